"""The vectors of a layer: norms, and fp32 tensors of its mixer and of its router."""

from __future__ import annotations

from offload.config.block import BLOCK_NORMS, Attention, Block, DeltaRule, Norm


def layer_norms(block: Block, hidden_size: int) -> dict[str, tuple[int, Norm]]:
    """The norm vectors of a layer, by name: size, and the norm that each belongs to. A bias ends in ".bias"."""
    mixer = block.mixer
    sizes = {name: (hidden_size, getattr(block, name)) for name in BLOCK_NORMS}
    sizes |= {"out_norm": (mixer.value_dim, mixer.norm)} if isinstance(mixer, DeltaRule) else _head_norms(mixer)
    vectors: dict[str, tuple[int, Norm]] = {}
    for name, (size, norm) in sizes.items():
        if norm is not None:
            vectors[name] = size, norm
            vectors |= {f"{name}.bias": (size, norm)} if norm.bias else {}
    return vectors


def _head_norms(attention: Attention) -> dict[str, tuple[int, Norm | None]]:
    """The norms of queries, keys and values, with their sizes. Of latent attention: of its low-rank rows."""
    if (latent := attention.latent) is not None:
        queries = attention.qk_norm if latent.query_rank else None
        return {"q_norm": (latent.query_rank, queries), "k_norm": (latent.rank, attention.qk_norm)}
    return {
        "q_norm": (attention.q_size if attention.has_long_weights else attention.head_dim, attention.qk_norm),
        "k_norm": (attention.kv_size if attention.has_long_weights else attention.head_dim, attention.qk_norm),
        "v_norm": (attention.head_dim, attention.v_norm),
    }


def layer_vectors(block: Block, hidden_size: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a layer's fp32 tensors besides norms, by name: of an attention the sink logits of its heads, if it
    has some; of a delta rule the taps of its convolution, the decay of each head (-exp(A_log)) and the bias of its
    time; of a mixture of experts its router's."""
    router = router_vectors(block, hidden_size)
    if block.attends:
        attention = block.attention
        return ({"sink_logits": (attention.num_heads,)} if attention.sink_logits else {}) | router
    delta = block.delta
    return {
        "taps": (delta.width, delta.channels), "decay": (delta.num_heads,), "time_bias": (delta.num_heads,), **router,
    }  # fmt: skip


def router_vectors(block: Block, hidden_size: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the router's fp32 tensors, by name: its matrix, a bias and a factor of each expert; empty without
    experts."""
    if (experts := block.experts) is None:
        return {}
    found: dict[str, tuple[int, ...]] = {"router": (experts.num_scores, hidden_size)}
    found |= {"router_bias": (experts.count,)} if experts.bias != "none" else {}
    return found | ({"router_scale": (experts.count,)} if experts.scaled else {})
