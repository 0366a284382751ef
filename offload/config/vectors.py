"""The vectors of a layer: norms, and fp32 tensors of its mixer and of its router."""

from __future__ import annotations

from offload.config.block import BLOCK_NORMS, Block
from offload.config.mixers import Attention
from offload.config.norm import Norm

STREAM_NORMS = ("mixer_streams", "network_streams")
NGRAM_TAPS = "ngram_taps"
INDEX_NORMS = ("index_q_norm", "index_k_norm")


def layer_norms(block: Block, hidden_size: int) -> dict[str, tuple[int, Norm]]:
    """The norm vectors of a layer, by name: size, and the norm that each belongs to. A bias ends in ".bias"."""
    mixer = block.mixer
    sizes = {name: (hidden_size, getattr(block, name)) for name in BLOCK_NORMS}
    if isinstance(mixer, Attention):
        sizes |= _head_norms(mixer)
    if block.recurs:
        sizes["out_norm"] = block.recurrence.norm_size, block.recurrence.norm
    if (streams := block.streams) is not None:
        sizes |= dict.fromkeys(STREAM_NORMS, (streams.count * hidden_size, streams.norm))
    sizes |= block.ngrams.norms if block.ngrams is not None else {}
    vectors: dict[str, tuple[int, Norm]] = {}
    for name, (size, norm) in sizes.items():
        if norm is not None:
            vectors[name] = size, norm
            vectors |= {f"{name}.bias": (size, norm)} if norm.bias else {}
    return vectors


def _head_norms(attention: Attention) -> dict[str, tuple[int, Norm | None]]:
    """The norms of queries, keys and values, with their sizes; of queries alone where keys are another layer's. Of
    latent attention: of its low-rank rows."""
    if (latent := attention.latent) is not None:
        low_queries = attention.qk_norm if latent.query_rank else None
        return {"q_norm": (latent.query_rank, low_queries), "k_norm": (latent.rank, attention.qk_norm)}
    queries = {"q_norm": (attention.q_size if attention.has_long_weights else attention.head_dim, attention.qk_norm)}
    if attention.shares:
        return queries
    index: dict[str, tuple[int, Norm | None]] = {}
    if (indexer := attention.indexer) is not None:
        index = dict.fromkeys(INDEX_NORMS, (indexer.head_dim, indexer.norm))
    return {
        **queries,
        **index,
        "k_norm": (attention.kv_size if attention.has_long_weights else attention.head_dim, attention.qk_norm),
        "v_norm": (attention.head_dim, attention.v_norm),
    }


def layer_vectors(block: Block, hidden_size: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a layer's fp32 tensors besides norms, by name: of an attention the sink logits of its heads, if it
    has some; of a recurrence its vectors; of a mixture of experts its router's; of n-grams the
    taps of their convolution."""
    router = router_vectors(block, hidden_size)
    if block.ngrams is not None:
        router |= {NGRAM_TAPS: block.ngrams.convolution.vectors["taps"]}
    if block.recurs:
        return block.recurrence.vectors | router
    has_sinks = block.attends and block.attention.sink_logits
    return ({"sink_logits": (block.attention.num_heads,)} if has_sinks else {}) | router


def router_vectors(block: Block, hidden_size: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the router's fp32 tensors, by name: its matrix, a bias and a factor of each expert; empty without
    experts."""
    if (experts := block.experts) is None:
        return {}
    found: dict[str, tuple[int, ...]] = {"router": (experts.num_scores, hidden_size)}
    found |= {"router_bias": (experts.count,)} if experts.bias != "none" else {}
    return found | ({"router_scale": (experts.count,)} if experts.scaled else {})
