"""Bytes of a request on a device that do not depend on where layers and tiles are, temporaries among them (derived in
docs/memory.md)."""

from __future__ import annotations

from offload.config.mixers import DeltaRule
from offload.config.model import ModelConfig
from offload.config.networks import Experts
from offload.config.next_token import rest_bytes
from offload.formats.layout import EXPERT_ALIGNMENT
from offload.plan.composition import Composition
from offload.plan.expert_placement import expert_rows, made_bytes
from offload.plan.options import PAGE_TOKENS
from offload.plan.sizing import CHOOSING_ROWS, MAX_ROWS, PREFILL_BLOCK, Sizing, low_bit_tail, run_tiles, tail_tokens
from offload.plan.states import held_rows, level_bytes

PREFILL_PAGES = 2  # pages whose scores are in memory at a time without a fused kernel
FEW_ROWS = 64  # rows that attend at a time at the lower levels
MASS_TOKENS = 32  # tokens over which a GPU sums masses before they are joined by chunks
KV_ROWS = 16  # rows that attend to the quantised cache at a time
_GPU_RESERVE = 512 * 2**20  # the libraries' own workspaces, and the allocator's fragmentation


def fixed_bytes(
    sizing: Sizing, capacity: int, composition: Composition, *, first: bool = True, streamed: bool = False
) -> dict[str, int]:
    """Bytes that do not depend on the placement of layers and tiles, by purpose, on the first device or on each
    other one, which has neither head nor draft. streamed: weights may be on the host."""
    sizes = {
        "target embeddings": sizing.embedding_bytes - (0 if first else sizing.head_bytes),
        "rope tables": _rope_bytes(sizing, sizing.target, capacity),
        "workspace": _workspace(sizing, capacity, composition.gamma if first else None, streamed=streamed),
    }
    if sizing.target.indexer is not None:
        sizes["block index"] = sizing.block_index_bytes(capacity)
    if sizing.target.windowed:
        sizes["window cache"] = sizing.window_bytes(sizing.window_pages(capacity) * PAGE_TOKENS)
    if sizing.target.stateful:  # of the target, and of the level where it drafts for itself
        of_level = level_bytes(sizing.shard, held_rows(composition, sizing.rows), sizing.itemsize)
        sizes["states"] = of_level * (2 if composition.inner else 1)
    if composition.weight_bits < 16:
        sizes["quantised weights"] = sizing.low_bit_bytes(composition.weight_bits, first=first)
    if composition.keeps_all_codes:
        sizes["quantised cache"] = sizing.quantised_cache_bytes(capacity, composition)
    if composition.mass_chunk:
        sizes["selection"] = _selection_bytes(sizing, capacity, composition)
    if composition.keeps_copies:
        sizes["fetched chunks"] = 2 * sizing.fetched_bytes(capacity, composition)  # in arrival order, and sorted
    if first and composition.draft and sizing.draft is not None:
        sizes |= _draft_bytes(sizing, sizing.draft, composition)
        per_token = sizing.draft.all_layers(lambda layer: layer.layer_kv_bytes(sizing.itemsize))
        sizes["draft cache"] = _draft_tokens(sizing, composition) * per_token
        sizes["rope tables"] += _rope_bytes(sizing, sizing.draft, capacity)
    if not sizing.hardware.is_cpu:
        sizes["attention scratch"] = _attention_bytes(sizing, capacity, composition, first=first)
        sizes["reserve"] = _GPU_RESERVE
    return sizes


def _draft_bytes(sizing: Sizing, draft: ModelConfig, composition: Composition) -> dict[str, int]:
    """Bytes of a draft's weights. A next-token head has the model's embeddings, and hidden rows of it; for its
    experts see `head_experts`."""
    layers = draft.all_layers(lambda layer: layer.layer_weight_bytes(sizing.itemsize))
    rest = rest_bytes(draft, sizing.itemsize)
    if draft.assistant:
        rows = 2 * (1 + _draft_slack(sizing, composition) + composition.gamma)
        hidden = rows * draft.assistant.target_size * sizing.itemsize
        return {"draft layers": layers, "draft embeddings": rest, "hidden rows of drafts": hidden}
    if draft.is_head:
        rows = _draft_tokens(sizing, composition) + 2 * composition.gamma
        hidden = rows * draft.row_size * sizing.itemsize
        return {"draft layers": layers + rest, "hidden rows of drafts": hidden}
    experts = draft.all_layers(lambda layer: layer.experts_bytes(sizing.itemsize))
    return {"draft layers": layers, "draft experts": experts, "draft embeddings": rest}


def _rope_bytes(sizing: Sizing, model: ModelConfig, capacity: int) -> int:
    return sum(dim for _, dim in model.tables) * 2 * (capacity + MAX_ROWS) * sizing.itemsize


def _workspace(sizing: Sizing, capacity: int, gamma: int | None, *, streamed: bool) -> int:
    """Bytes of the largest temporaries: a block of a prefill, or of rows over a tile, or logits and probabilities.
    gamma: None without logits."""
    target, item, heads = sizing.shard, sizing.itemsize, max(sizing.shard.head_counts)
    tile_tokens = sizing.tile_tokens(capacity)
    rows = expert_rows(sizing, capacity, streamed=streamed)
    streams = 8 * (target.row_size - target.hidden_size)  # normed, their mixes in fp32, and what makes them
    block = PREFILL_BLOCK * (6 * target.hidden_size + streams) * item
    block += max(_network_bytes(sizing, kind, rows, lent=streamed) for kind, _ in target.kinds)
    beside = [kind.block.beside for kind, _ in target.kinds if kind.block.beside is not None]
    block += PREFILL_BLOCK * max((sum(own.parts) + own.out_size for own in beside), default=0) * item
    block += PREFILL_BLOCK * max(_widened_size(kind) for kind, _ in target.kinds) * item
    score = 2 * item + 4  # raw, in fp32 and as weights
    width = max(_attended_size(kind) for kind, _ in target.kinds)
    attended = PREFILL_BLOCK * width * (item + 4)  # raw and in fp32
    if sizing.target.indexer is not None:
        tile_tokens = sizing.attended(capacity)
        scores = attended + _choice_bytes(sizing, capacity)
    elif sizing.hardware.is_cpu and not sizing.caps_scores:  # a tile's pages, joined and then ordered for matrix units
        copies = 4 if target.block.attends and target.block.attention.latent else 2  # of halves of rows, both whole
        scores = copies * sizing.tile_bytes(capacity) + attended
    else:
        scores = PREFILL_BLOCK * PREFILL_PAGES * PAGE_TOKENS * heads * score
        if sizing.fused_prefill and not sizing.hardware.is_cpu:
            # A tile's pages or, by flash-attn, all tiles, attended apart before they are merged, with their sums.
            # Triton's kernel has less: its fp32 accumulator with its sums, and the result.
            tiles = sizing.num_tiles(capacity) * PREFILL_BLOCK * (width * item + 2 * heads * 4)
            scores = max(scores, tile_tokens // PAGE_TOKENS * attended, tiles + attended)
    if sizing.num_devices > 1:  # a block's parts from all ranks, and from three on their sum in fp32
        parts = sizing.num_devices * item + (4 if sizing.num_devices > 2 else 0)
        width = target.hidden_size * (1 + any(kind.block.joins for kind, _ in target.kinds))
        scores = max(scores, PREFILL_BLOCK * width * parts)
    tile = sizing.most_rows * tile_tokens * heads * score
    logits = 0 if gamma is None else _padded(sizing, gamma + 1) * target.vocab_size * (item * sizing.num_sequences + 36)
    whole, of_head = sizing.decoded_bytes
    return max(block + max(scores, whole), tile, logits + (0 if gamma is None else of_head))


def _choice_bytes(sizing: Sizing, capacity: int) -> int:
    """Bytes of the scores by which rows choose blocks, thrice with those that are sorted, as numbers and places."""
    assert sizing.target.indexer is not None
    return 3 * CHOOSING_ROWS * (capacity // sizing.target.indexer.ratio) * 8


def _attended_size(layer: ModelConfig) -> int:
    """Numbers of a row of the attention's output in `layer.block`, or of its mixer's."""
    return layer.block.attention.q_size if layer.block.attends else layer.block.mixer.out_size


def _widened_size(layer: ModelConfig) -> int:
    """Numbers of a row of a delta rule of low rank in `layer.block`, beside those of its projection."""
    mixer = layer.block.mixer
    return sum(mixer.row_parts) if isinstance(mixer, DeltaRule) and mixer.low_rank else 0


def _network_bytes(sizing: Sizing, layer: ModelConfig, rows: int, *, lent: bool) -> int:
    """Bytes of a prefill block's rows in the feed-forward network of `layer.block`, and of `rows` rows in its
    experts. lent: what these make is in the memory of slots (`expert_placement.prefill_bytes`)."""
    experts, hidden, item = layer.block.experts, layer.hidden_size, sizing.itemsize
    dense = PREFILL_BLOCK * 3 * layer.block.feed_forward.size * item
    if experts is None:
        return dense
    held = _held_numbers(layer, rows) * item
    size, row, pairs = experts.network.size, experts.row_size(hidden), rows * experts.used
    if sizing.hardware.packs and sizing.hardware.is_cpu:
        few = _few_lines(experts) * ((size + row) * item + 5 * (size + 2 * row))  # of a pass, rows widened to fp32
        made = 0 if lent else made_bytes(sizing, layer, rows)
        return max(dense, held + made + rows * row * item, few)
    if sizing.hardware.has_kernels and not sizing.hardware.is_cpu and item == 2:  # scores, and pairs of row and expert
        more = (rows - PREFILL_BLOCK) * 3 * hidden * item  # normed and summed rows; a block's are counted
        made = 0 if lent else made_bytes(sizing, layer, rows)
        return max(dense, held + more + rows * experts.count * 4 + made)
    inner = PREFILL_BLOCK * 3 * size * item
    return max(dense, held + inner + pairs * hidden * (item + 8))  # of each expert, and in fp32 times its weight


def _held_numbers(layer: ModelConfig, rows: int) -> int:
    """Numbers of a prefill's rows that stay while their experts run: of the network beside these, of latents, and of a
    mixer side by side with them. Those of several blocks are joined."""
    block, experts, copies = layer.block, layer.block.experts, 1 + (rows > PREFILL_BLOCK)
    assert experts is not None
    beside = block.feed_forward.size
    held = PREFILL_BLOCK * beside + rows * copies * layer.hidden_size if beside else 0
    if block.side_by_side:
        held += rows * sum(block.mixer.parts)
    return held + (rows * copies * experts.latent if copies > 1 else 0)


def _few_lines(experts: Experts) -> int:
    """Lines of pairs of a pass's rows and their experts on a CPU."""
    pairs = FEW_ROWS * experts.used
    return pairs + min(pairs, experts.count) * (EXPERT_ALIGNMENT - 1)


def _selection_bytes(sizing: Sizing, capacity: int, composition: Composition) -> int:
    """Bytes of the masses of the last verification, for each row, KV head and chunk of each layer, in fp32 or, on a
    GPU, in bf16, and of the temporaries of choosing chunks."""
    chunks = _all_tokens(sizing, capacity) // composition.chunk
    heads, item = sizing.shard.num_kv_heads, 4 if sizing.hardware.is_cpu else 2
    return (item * _padded(sizing, composition.gamma + 1) + 24) * heads * chunks * sizing.num_readers


def _attention_bytes(sizing: Sizing, capacity: int, composition: Composition, *, first: bool) -> int:
    """Bytes of scratch for a GPU kernel's attention at each level: fp32 results per span of two runs (or of the
    only run) and merged, and the masses of one layer, with room to grow by a half."""
    rows, target = _padded(sizing, composition.gamma + 1), sizing.shard
    tiles = min(run_tiles(target.block.attention), sizing.num_tiles(capacity)) if target.block.attends else 1
    spans = 2 * max(tiles * sizing.tile_tokens(capacity) // PAGE_TOKENS, sizing.window_pages(capacity))
    size = _partial_bytes(target, rows, spans)
    if sizing.target.indexer is not None:
        size = _partial_bytes(target, CHOOSING_ROWS, 1 + -(-sizing.attended(capacity) // PAGE_TOKENS))
    if composition.mass_chunk:
        parts = _all_tokens(sizing, capacity) // min(composition.chunk, MASS_TOKENS)
        size += rows * max(target.head_counts) * parts * 4 * 3 // 2
    if composition.budget and composition.kv_bits == 16:
        held = composition.budget + tail_tokens(composition)
        size += _partial_bytes(target, min(composition.drafted, FEW_ROWS), -(-held // PAGE_TOKENS))
    if composition.kv_bits < 16:
        coded = composition.budget or capacity
        spans = 1 + -(-low_bit_tail(composition.drafted) // PAGE_TOKENS) + -(-coded // PAGE_TOKENS)
        size += _partial_bytes(target, KV_ROWS, spans)
    if first and composition.draft and sizing.draft is not None:
        held = _draft_tokens(sizing, composition)
        size += _partial_bytes(sizing.draft, FEW_ROWS, 1 + -(-held // PAGE_TOKENS))
    return size


def _all_tokens(sizing: Sizing, capacity: int) -> int:
    """The number of tokens that the tiles of a layer hold."""
    return sizing.num_tiles(capacity) * sizing.tile_tokens(capacity)


def _draft_tokens(sizing: Sizing, composition: Composition) -> int:
    return max(composition.sinks, 1) + 2 * (composition.window + _draft_slack(sizing, composition))


def _draft_slack(sizing: Sizing, composition: Composition) -> int:
    """Rows of a draft that may be rejected."""
    return composition.gamma + composition.draft_gamma + 2 * sizing.rows


def _padded(sizing: Sizing, num_rows: int) -> int:
    return -(-num_rows // sizing.most_rows) * sizing.most_rows


def _partial_bytes(model: ModelConfig, rows: int, num_spans: int) -> int:
    """Bytes of the fp32 attention results of `rows` rows: of `num_spans` spans, and merged."""
    return rows * max(model.head_counts) * (num_spans + 1) * (model.head_dim + 2) * 4
