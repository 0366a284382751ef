"""Bytes of everything a request needs, as functions of its length (derived in docs/memory.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from offload.config.model import ModelConfig
from offload.config.next_token import rest_bytes
from offload.formats.layout import KV_CODE_GROUP, Packing, code_bytes, home_bytes, kv_code_bytes
from offload.plan.composition import Composition
from offload.plan.hardware import Hardware
from offload.plan.options import DTYPE_BYTES, PAGE_TOKENS, Options
from offload.plan.routing import SHARED_SLOTS, layers_read_bytes, read_bytes
from offload.plan.shards import Shard
from offload.plan.states import checkpoint_bytes, held_rows, level_bytes, num_checkpoints

PREFILL_BLOCK = 512  # rows of one block of a prefill
PREFILL_PAGES = 2  # pages whose scores are in memory at a time without a fused kernel
MAX_TILE_TOKENS = 8192  # without the room for padded rows
BLOCK_ROWS = 16  # rows per block of torch's products: a GPU's matrix units take 16 at the price of one
CPU_ROWS = 32  # rows of a pass on a CPU that are priced as one block
MAX_ROWS = 256  # rows that a pass may write after the sequence: the longest verification, padded
NUM_ROW_SLOTS = 3  # prefill blocks on the device if hidden rows are on the host
STORED_TEMPORARY = 16  # bytes per number that torch's operators need to decode blocks (formats/stored.py)
NUM_STAGING = 2  # buffers through which layers, and tiles, cross the link
TAIL_TOKENS = 128  # granularity of the retrieval cache's tail, at least one chunk
FEW_ROWS = 64  # rows that attend at a time at the lower levels
MASS_TOKENS = 32  # tokens over which a GPU sums masses before they are joined by chunks
KV_TAIL = 64  # last tokens of the quantised cache, and up to a group more, that stay exact
KV_ROWS = 16  # rows that attend to the quantised cache at a time
RAW_TILES = 3  # most tiles of a prefill whose pages are not packed yet
FETCH_BYTES = 64 * 2**20  # chunks that are fetched at a time
WINDOW_UNDO = 1024  # tokens by which a sequence with windows can always be truncated
# Purposes that each sequence has of its own; models, staging of weights and workspaces are shared.
OF_EACH_SEQUENCE = frozenset(
    (
        *("rope tables", "quantised cache", "selection", "fetched chunks", "draft cache", "attention scratch"),
        *("kv staging", "arena", "kv cache", "window cache", "raw pages", "gathered chunks"),
        *("states", "state checkpoints", "hidden rows of drafts"),
    )
)
_GPU_RESERVE = 512 * 2**20  # the libraries' own workspaces, and the allocator's fragmentation


def ring_pages(window: int, rows: int, *, page: int, undo: int) -> int:
    """The number of pages of a window's ring: pages of `page` tokens that `rows` rows of a pass see and write, at any
    offset within a page, and the pages that a sequence truncated by up to `undo` tokens sees."""
    return (window - 1 + rows + 2 * (page - 1)) // page + -(-undo // page)


def low_bit_tail(drafted: int) -> int:
    """The number of exact rows after the quantised tokens: the last ones of the sequence and `drafted` more."""
    return -(-(KV_TAIL + KV_CODE_GROUP + drafted) // KV_CODE_GROUP) * KV_CODE_GROUP


def tail_tokens(composition: Composition) -> int:
    """The retrieval cache's tail, in tokens since its chunks were chosen: less than a chunk, the drafted tokens, and
    the last exact tokens beside chunks in 4 bits."""
    if composition.kv_bits < 16:
        return low_bit_tail(composition.drafted)
    step = max(TAIL_TOKENS, composition.chunk)
    return -(-(composition.chunk + composition.drafted) // step) * step


@dataclass(frozen=True)
class Sizing:
    """The byte sizes of a request, as functions of the capacity of one sequence. Device bytes are per device.

    Each of `num_devices` has a shard of every layer's weights and of the target's caches, embeddings and hidden rows.
    The head and the draft are on the first, so the others need less.
    """

    target: ModelConfig
    draft: ModelConfig | None
    options: Options
    hardware: Hardware
    dtype: str
    num_sequences: int = 1  # that run at a time

    def of_all(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Bytes by purpose for all sequences. sizes: for one."""
        return {name: size * self.num_sequences if name in OF_EACH_SEQUENCE else size for name, size in sizes.items()}

    @cached_property
    def num_devices(self) -> int:
        return self.hardware.num_devices

    @property
    def link_rate(self) -> float:
        """Bytes per second over each device's link: the user's, or the hardware's."""
        paced = self.options.link_gbps
        return self.hardware.link_rate if paced is None else paced * 1e9

    @cached_property
    def shard(self) -> ModelConfig:
        """The config of the target's shard on each device."""
        return Shard(0, self.num_devices).config(self.target)

    @cached_property
    def itemsize(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @cached_property
    def rows(self) -> int:
        """The number of last prompt rows that are left to the first pass over the full cache: a block on a GPU. It
        depends only on the device, since a token's bits depend on it."""
        return 8 if self.hardware.is_cpu else BLOCK_ROWS

    @cached_property
    def most_rows(self) -> int:
        """The most rows of a pass that are computed together."""
        return CPU_ROWS if self.hardware.is_cpu else BLOCK_ROWS

    @property
    def fused_prefill(self) -> bool:
        """Whether prefill uses torch's fused kernel: on a GPU only in 16 bits, and only on GPUs with fast bf16."""
        serves = all(head_dim % 8 == 0 and head_dim <= 256 for head_dim in self.target.head_dims)
        return self.hardware.is_cpu or (self.itemsize == 2 and self.hardware.fast_bf16 and serves)

    def num_tiles(self, capacity: int) -> int:
        """The number of tiles of each layer: as few as possible, for few calls."""
        return -(-capacity // MAX_TILE_TOKENS)

    def tile_tokens(self, capacity: int) -> int:
        """The tokens of a tile. All tiles have the same size, with room for the padded rows of any verification, since
        bits must not depend on gamma."""
        return -(-(capacity + MAX_ROWS) // (self.num_tiles(capacity) * PAGE_TOKENS)) * PAGE_TOKENS

    def tile_bytes(self, capacity: int) -> int:
        """Bytes of a tile of one layer, on each device."""
        return self.tile_tokens(capacity) * self._layer_kv_bytes

    def window_pages(self, capacity: int) -> int:
        """The number of pages in the ring of a layer with a window."""
        if not self.target.windowed:
            return 0
        pages = ring_pages(self.target.window, PREFILL_BLOCK, page=PAGE_TOKENS, undo=WINDOW_UNDO)
        return min(pages, -(-(capacity + MAX_ROWS) // PAGE_TOKENS))

    def window_bytes(self, num_tokens: int) -> int:
        """Bytes of `num_tokens` tokens in all layers with a window, on each device."""
        return len(self.target.windowed) * num_tokens * self._window_kv_bytes

    @property
    def num_checkpoints(self) -> int:
        """The number of checkpoints of each sequence's states."""
        return num_checkpoints(self.shard, self.itemsize, self.num_sequences)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of the checkpoints of a sequence's states on the host, for each device."""
        return self.num_checkpoints * checkpoint_bytes(self.shard, self.itemsize)

    def seen_tokens(self, growing: int, capacity: int) -> tuple[float, float]:
        """The mean tokens per layer that a row of a full sequence sees: those of growing layers, with `growing` tokens
        each, and those of windows, converted to growing layers' tokens of the same bytes."""
        layers, seen = self.timed_layers, self.seen_window_bytes(capacity) / self._layer_kv_bytes
        return growing * self.num_growing / layers, seen / layers

    def seen_window_bytes(self, capacity: int) -> int:
        """Bytes that a row of a full sequence sees in layers with a window."""
        return sum(min(window, capacity) for window in self.target.windows) * self._window_kv_bytes

    @cached_property
    def _layer_kv_bytes(self) -> int:
        """Bytes of a token in one growing layer, on each device; in a layer with a window if there are no growing
        ones."""
        return self.shard.layer_kv_bytes(self.itemsize)

    @cached_property
    def _window_kv_bytes(self) -> int:
        """Bytes of a token in one layer with a window, on each device."""
        return self.shard.window_kv_bytes(self.itemsize)

    @cached_property
    def num_growing(self) -> int:
        """The number of layers whose cache is in tiles."""
        return len(self.target.growing)

    def host_cache_bytes(self, capacity: int, resident: int, bits: int) -> dict[str, int]:
        """Bytes of the cache on the host, for each device, by purpose. resident: tiles of all layers on the device.
        bits: per number of the other tiles."""
        tile, away = self.tile_bytes(capacity), self.num_growing * self.num_tiles(capacity) - resident
        if bits == 16:
            return {"kv cache": away * tile}
        packed = self._streamed_pages(capacity, resident) * self._packed_page_bytes
        raw = self.raw_pages(capacity, resident) * (PAGE_TOKENS * tile // self.tile_tokens(capacity))
        return {"kv cache": packed, "raw pages": raw}

    def raw_pages(self, capacity: int, resident: int) -> int:
        """The number of raw (not packed) pages on the host: the last of each layer, with room for the rows of a pass,
        and the pages that a prefill writes. resident: tiles of all layers on the device."""
        last = (1 + -(-MAX_ROWS // PAGE_TOKENS)) * self.num_growing
        return min(last + RAW_TILES * self._tile_pages(capacity), self._streamed_pages(capacity, resident))

    def _streamed_pages(self, capacity: int, resident: int) -> int:
        """The number of streamed pages of all layers that `capacity` tokens reach."""
        share, extra = divmod(resident, self.num_growing)
        pages = -(-(capacity + MAX_ROWS) // PAGE_TOKENS)
        few, more = (max(pages - tiles * self._tile_pages(capacity), 0) for tiles in (share + 1, share))
        return extra * few + (self.num_growing - extra) * more

    def _tile_pages(self, capacity: int) -> int:
        return self.tile_tokens(capacity) // PAGE_TOKENS

    @property
    def _packed_page_bytes(self) -> int:
        """Bytes of a packed page of one layer, on each device."""
        return 2 * Packing.of_page(self.shard.num_kv_heads, PAGE_TOKENS, self.shard.head_dim).nbytes

    @cached_property
    def kv_bytes_per_token(self) -> int:
        """Bytes that a token adds to all layers, on each device."""
        return self.shard.kv_bytes_per_token(self.itemsize)

    @cached_property
    def layer_bytes(self) -> int:
        """Bytes of the weights of the largest layer, on each device."""
        return max(kind.layer_weight_bytes(self.itemsize) for kind, _ in self.shard.kinds)

    def home_bytes(self, bits: int) -> int:
        """Bytes of the largest layer's weights on the host and over the link, with `bits` bits per weight."""
        return max(self._home(kind, bits) for kind, _ in self.shard.kinds)

    def layers_bytes(self, count: int) -> int:
        """Bytes of the weights of the first `count` layers, on each device."""
        return self._first_layers[count]

    @property
    def all_layers_bytes(self) -> int:
        return self._first_layers[-1]

    @cached_property
    def _first_layers(self) -> list[int]:
        sizes = {kind.block: kind.layer_weight_bytes(self.itemsize) for kind, _ in self.shard.kinds}
        return [*accumulate((sizes[block] for block in self.shard.blocks), initial=0)]

    @cached_property
    def experts_bytes(self) -> int:
        """Bytes of the experts of all layers, on each device or for it on the host."""
        return self.shard.all_layers(lambda layer: layer.experts_bytes(self.itemsize))

    def slots_bytes(self, slots: int, cpu_experts: int) -> int:
        """Bytes of slots for experts on each device: so many of each layer, but for the layers whose experts the CPU
        runs, which share a few."""
        apart = self._first_experts[max(self.num_expert_layers - cpu_experts, 0)]
        shared = min(SHARED_SLOTS, self.num_experts) if slots and cpu_experts else 0
        return slots * apart + shared * self.largest_expert_bytes

    @cached_property
    def _first_experts(self) -> list[int]:
        """Bytes of one expert of each of the first layers that have some, by their number."""
        sizes = {kind.block: kind.expert_bytes(self.itemsize) for kind, _ in self.shard.kinds}
        return [*accumulate(filter(None, (sizes[block] for block in self.shard.blocks)), initial=0)]

    @cached_property
    def largest_expert_bytes(self) -> int:
        """Bytes of the largest expert, on each device."""
        return max(kind.expert_bytes(self.itemsize) for kind, _ in self.shard.kinds)

    @property
    def num_expert_layers(self) -> int:
        """The number of layers that have experts."""
        return len(self._first_experts) - 1

    def head_experts(self, composition: Composition) -> tuple[int, int]:
        """Bytes of all experts of the next-token head that drafts, and of one of them; 0 without any. They are where
        the target's are, on the first device or for it on the host."""
        draft = self.draft
        if draft is None or not (draft.is_head and composition.draft):
            return 0, 0
        return draft.experts_bytes(self.itemsize), draft.expert_bytes(self.itemsize)

    @property
    def num_experts(self) -> int:
        """Experts of a layer that has some; 0 if none has."""
        return self.target.experts.count if self.target.experts else 0

    def homes_bytes(self, first: int, bits: int) -> int:
        """Bytes of the weights of all layers from the `first` on, on the host with `bits` bits per weight."""
        if bits not in self._homes_after:
            sizes = {kind.block: self._home(kind, bits) for kind, _ in self.shard.kinds}
            after = accumulate((sizes[block] for block in reversed(self.shard.blocks)), initial=0)
            self._homes_after[bits] = [*after][::-1]
        return self._homes_after[bits][first]

    @cached_property
    def _homes_after(self) -> dict[int, list[int]]:
        return {}

    def _home(self, layer: ModelConfig, bits: int) -> int:
        return home_bytes(layer.layer_weight_bytes(self.itemsize), layer.layer_matrix_elements(), bits)

    @cached_property
    def timed_layers(self) -> float:
        """The target's `timed_layers`."""
        return timed_layers(self.target, self.itemsize)

    @cached_property
    def embedding_bytes(self) -> int:
        """Bytes outside the layers, on the first device: embeddings, head, last norm."""
        return self.target.weight_bytes(self.itemsize) - self.target.layers_weight_bytes(self.itemsize)

    @cached_property
    def table_bytes(self) -> int:
        """Bytes of the embedding's table, on each device or for it on the host."""
        return self.target.table.nbytes(self.itemsize)

    @cached_property
    def may_embed_on_host(self) -> bool:
        """Whether the embedding's table may be on the host: a GPU's kernel reads its rows there, and the head is not
        the same table."""
        hardware = self.hardware
        apart = not (hardware.is_cpu or self.target.tie_embeddings or self.target.table_encoding)
        return apart and hardware.has_kernels and hardware.fast_bf16

    @cached_property
    def head_bytes(self) -> int:
        """Bytes of a head that is a tensor of its own, on the first device."""
        target = self.target
        return 0 if target.tie_embeddings else target.head.nbytes(self.itemsize)

    def fixed_bytes(self, capacity: int, composition: Composition, *, first: bool = True) -> dict[str, int]:
        """Bytes that do not depend on the placement of layers and tiles, by purpose, on the first device or on each
        other one, which has neither head nor draft."""
        sizes = {
            "target embeddings": self.embedding_bytes - (0 if first else self.head_bytes),
            "rope tables": self._rope_bytes(self.target, capacity),
            "workspace": self._workspace(capacity, composition.gamma if first else None),
        }
        if self.target.windowed:
            sizes["window cache"] = self.window_bytes(self.window_pages(capacity) * PAGE_TOKENS)
        if self.target.stateful:  # of the target, and of the level where it drafts for itself
            of_level = level_bytes(self.shard, held_rows(composition, self.rows), self.itemsize)
            sizes["states"] = of_level * (2 if composition.inner else 1)
        if composition.weight_bits < 16:
            sizes["quantised weights"] = self.low_bit_bytes(composition.weight_bits, first=first)
        if composition.keeps_all_codes:
            sizes["quantised cache"] = self.quantised_cache_bytes(capacity, composition)
        if composition.mass_chunk:
            sizes["selection"] = self._selection_bytes(capacity, composition)
        if composition.keeps_copies:
            sizes["fetched chunks"] = 2 * self.fetched_bytes(capacity, composition)  # in arrival order, and sorted
        if first and composition.draft and self.draft is not None:
            sizes |= self._draft_bytes(self.draft, composition)
            per_token = self.draft.all_layers(lambda layer: layer.layer_kv_bytes(self.itemsize))
            sizes["draft cache"] = self._draft_tokens(composition) * per_token
            sizes["rope tables"] += self._rope_bytes(self.draft, capacity)
        if not self.hardware.is_cpu:
            sizes["attention scratch"] = self._attention_bytes(capacity, composition, first=first)
            sizes["reserve"] = _GPU_RESERVE
        return sizes

    def _draft_bytes(self, draft: ModelConfig, composition: Composition) -> dict[str, int]:
        """Bytes of a draft's weights. A next-token head has the model's embeddings, and hidden rows of it; for its
        experts see `head_experts`."""
        layers = draft.all_layers(lambda layer: layer.layer_weight_bytes(self.itemsize))
        rest = rest_bytes(draft, self.itemsize)
        if draft.is_head:
            rows = self._draft_tokens(composition) * draft.hidden_size * self.itemsize
            return {"draft layers": layers + rest, "hidden rows of drafts": rows}
        experts = draft.all_layers(lambda layer: layer.experts_bytes(self.itemsize))
        return {"draft layers": layers, "draft experts": experts, "draft embeddings": rest}

    def low_bit_bytes(self, bits: int, *, first: bool = True) -> int:
        """Bytes of the layers and, on the first device, the head, with matrices in `bits` bits per element. A head in
        blocks stays as it is stored."""

        def coded(layer: ModelConfig) -> int:
            rest = layer.layer_weight_bytes(self.itemsize) - layer.layer_matrix_elements() * self.itemsize
            return rest + sum(code_bytes(outputs, inputs, bits) for outputs, inputs, _ in layer.layer_products())

        has_codes = first and not self.target.head_encoding
        head = code_bytes(self.target.vocab_size, self.target.hidden_size, bits) if has_codes else 0
        return self.shard.all_layers(coded) + head

    def quantised_cache_bytes(self, capacity: int, composition: Composition) -> int:
        """Bytes of the quantised cache: whole groups of all tokens, or of the retrieved ones, with 4 bits a number, and
        the exact first and last tokens."""
        heads = self.num_growing * self.shard.num_kv_heads
        coded = (composition.budget or capacity) // KV_CODE_GROUP * heads * kv_code_bytes(self.target.head_dim)
        return coded + (KV_CODE_GROUP + low_bit_tail(composition.drafted)) * self.kv_bytes_per_token

    @property
    def kv_code_share(self) -> float:
        """Bytes of a token's codes in 4 bits, as a share of its exact keys and values."""
        head_dim = self.target.head_dim
        return kv_code_bytes(head_dim) / (KV_CODE_GROUP * 2 * head_dim * self.itemsize)

    def hidden_bytes(self, num_rows: int) -> int:
        """Bytes of `num_rows` hidden rows, whole on each device, or on the host for each device."""
        return num_rows * self.target.hidden_size * self.itemsize

    def arena_bytes(self, capacity: int, composition: Composition, *, rows: int, prefill_tiles: int) -> int:
        """Bytes of the arena, which holds `rows` hidden rows and `prefill_tiles` tiles of a layer in a prefill, and
        then the retrieval cache."""
        retrieved = self.retrieval_bytes(capacity, composition) if composition.budget else 0
        return max(self.hidden_bytes(rows) + prefill_tiles * self.tile_bytes(capacity), retrieved)

    def fetched_bytes(self, capacity: int, composition: Composition) -> int:
        """The most bytes that one fetch of chunks, or of tokens to encode, moves, on each device, and on the host for
        each device."""
        if not composition.keeps_copies:
            return 0
        tokens = composition.budget + tail_tokens(composition) if composition.budget else capacity
        return min(FETCH_BYTES, tokens * self.kv_bytes_per_token)

    def retrieval_bytes(self, capacity: int, composition: Composition) -> int:
        if composition.kv_bits < 16:
            return self.quantised_cache_bytes(capacity, composition)
        return (composition.budget + tail_tokens(composition)) * self.kv_bytes_per_token

    def _rope_bytes(self, model: ModelConfig, capacity: int) -> int:
        return sum(dim for _, dim in model.tables) * 2 * (capacity + MAX_ROWS) * self.itemsize

    def _workspace(self, capacity: int, gamma: int | None) -> int:
        """Bytes of the largest temporaries: a block of a prefill, or of rows over a tile, or logits and probabilities.
        gamma: None without logits."""
        target, item, heads = self.shard, self.itemsize, self.shard.num_heads
        tile_tokens = self.tile_tokens(capacity)
        block = PREFILL_BLOCK * 6 * target.hidden_size * item + max(
            self._network_bytes(kind) for kind, _ in target.kinds
        )
        score = 2 * item + 4  # raw, in fp32 and as weights
        width = max(kind.block.mixer.out_size for kind, _ in target.kinds)
        attended = PREFILL_BLOCK * width * (item + 4)  # raw and in fp32
        if self.hardware.is_cpu and not self._capped:  # a tile's pages, joined and then ordered for matrix units
            scores = 2 * self.tile_bytes(capacity) + attended
        else:
            scores = PREFILL_BLOCK * PREFILL_PAGES * PAGE_TOKENS * heads * score
            if self.fused_prefill and not self.hardware.is_cpu:
                # A tile's pages or, by flash-attn, all tiles, attended apart before they are merged, with their sums.
                # Triton's kernel has less: its fp32 accumulator with its sums, and the result.
                tiles = self.num_tiles(capacity) * PREFILL_BLOCK * (width * item + 2 * heads * 4)
                scores = max(scores, tile_tokens // PAGE_TOKENS * attended, tiles + attended)
        if self.num_devices > 1:  # a block's parts from all ranks, and from three on their sum in fp32
            parts = self.num_devices * item + (4 if self.num_devices > 2 else 0)
            width = target.hidden_size * (1 + any(kind.block.joins_normed for kind, _ in target.kinds))
            scores = max(scores, PREFILL_BLOCK * width * parts)
        tile = self.most_rows * tile_tokens * heads * score
        logits = 0 if gamma is None else self._padded(gamma + 1) * target.vocab_size * (item * self.num_sequences + 36)
        whole, of_head = self._decoded_bytes
        return max(block + max(scores, whole), tile, logits + (0 if gamma is None else of_head))

    @cached_property
    def _decoded_bytes(self) -> tuple[int, int]:
        """Bytes of temporaries of products with matrices in blocks: the largest matrix of a layer decoded, as a prefill
        uses it, and the decoded head if there is no kernel that multiplies a few rows by its blocks."""
        parts = (part for kind, _ in self.shard.kinds for each in kind.layer_matrices().values() for part in each)
        largest = max((part.outputs * part.inputs for part in parts if part.encoding), default=0)
        hardware, head = self.hardware, self.target.head
        has_kernels = hardware.packs if hardware.is_cpu else hardware.has_kernels
        each = self.itemsize if has_kernels else STORED_TEMPORARY
        takes_rows = has_kernels and (hardware.is_cpu or self.itemsize == 2)
        return largest * each, 0 if takes_rows or not head.encoding else head.outputs * head.inputs * each

    @cached_property
    def _capped(self) -> bool:
        """Whether some layer caps its scores, which no fused kernel of a CPU supports."""
        return any(block.attends and block.attention.cap for block in self.target.blocks)

    def _network_bytes(self, layer: ModelConfig) -> int:
        """Bytes of a prefill block's rows in the feed-forward network of `layer.block`."""
        experts, hidden, item = layer.block.experts, layer.hidden_size, self.itemsize
        dense = PREFILL_BLOCK * 3 * layer.block.feed_forward.size * item
        if experts is None:
            return dense
        beside = layer.block.feed_forward.size
        held = PREFILL_BLOCK * (beside + hidden) * item if beside else 0  # while experts run
        size, pairs = experts.network.size, PREFILL_BLOCK * experts.used
        if self.hardware.packs and self.hardware.is_cpu:
            lines = pairs + min(pairs, experts.count) * 15
            return max(dense, held + lines * ((size + hidden) * item + 5 * (size + 2 * hidden)))  # rows, and widened
        if self.hardware.has_kernels and not self.hardware.is_cpu and item == 2:  # scores, and pairs of row and expert
            first = set(layer.block.encodings.experts[:-1])
            inner = size * (3 if len(first) > 1 else 1)  # gate and up in two encodings are multiplied apart
            return max(dense, held + PREFILL_BLOCK * experts.count * 4 + pairs * (inner + hidden) * item)
        inner = PREFILL_BLOCK * 3 * size * item
        return max(dense, held + inner + pairs * hidden * (item + 8))  # of each expert, and in fp32 times its weight

    def _selection_bytes(self, capacity: int, composition: Composition) -> int:
        """Bytes of the masses of the last verification, for each row, KV head and chunk of each layer, in fp32 or, on a
        GPU, in bf16, and of the temporaries of choosing chunks."""
        chunks = self._all_tokens(capacity) // composition.chunk
        heads, item = self.shard.num_kv_heads, 4 if self.hardware.is_cpu else 2
        return (item * self._padded(composition.gamma + 1) + 24) * heads * chunks * self.num_growing

    def _attention_bytes(self, capacity: int, composition: Composition, *, first: bool) -> int:
        """Bytes of scratch for a GPU kernel's attention at each level: fp32 results per span of two runs (or of the
        only run) and merged, and the masses of one layer, with room to grow by a half."""
        rows, target = self._padded(composition.gamma + 1), self.shard
        spans = 2 * max(self.tile_tokens(capacity) // PAGE_TOKENS, self.window_pages(capacity))
        size = _partial_bytes(target, rows, spans)
        if composition.mass_chunk:
            parts = self._all_tokens(capacity) // min(composition.chunk, MASS_TOKENS)
            size += rows * target.num_heads * parts * 4 * 3 // 2
        if composition.budget and composition.kv_bits == 16:
            held = composition.budget + tail_tokens(composition)
            size += _partial_bytes(target, min(composition.drafted, FEW_ROWS), -(-held // PAGE_TOKENS))
        if composition.kv_bits < 16:
            coded = composition.budget or capacity
            spans = 1 + -(-low_bit_tail(composition.drafted) // PAGE_TOKENS) + -(-coded // PAGE_TOKENS)
            size += _partial_bytes(target, KV_ROWS, spans)
        if first and composition.draft and self.draft is not None:
            held = self._draft_tokens(composition)
            size += _partial_bytes(self.draft, FEW_ROWS, 1 + -(-held // PAGE_TOKENS))
        return size

    def _all_tokens(self, capacity: int) -> int:
        """The number of tokens that the tiles of a layer hold."""
        return self.num_tiles(capacity) * self.tile_tokens(capacity)

    def _draft_tokens(self, composition: Composition) -> int:
        slack = composition.gamma + composition.draft_gamma + 2 * self.rows
        return max(composition.sinks, 1) + 2 * (composition.window + slack)

    def _padded(self, num_rows: int) -> int:
        return -(-num_rows // self.most_rows) * self.most_rows


def timed_layers(config: ModelConfig, itemsize: int) -> float:
    """The number of layers like `config.block` of whose weights a row reads as many bytes as of all layers."""
    return layers_read_bytes(config, itemsize, 1) / read_bytes(config, itemsize, 1)


def _partial_bytes(model: ModelConfig, rows: int, num_spans: int) -> int:
    """Bytes of the fp32 attention results of `rows` rows: of `num_spans` spans, and merged."""
    return rows * model.num_heads * (num_spans + 1) * (model.head_dim + 2) * 4
