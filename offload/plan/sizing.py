"""Bytes of everything a request needs, as functions of its length (derived in docs/memory.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from offload.config.mixers import Attention, Indexer
from offload.config.model import ModelConfig
from offload.formats.encodings import ENCODINGS
from offload.formats.layout import CODE_BITS, KV_CODE_GROUP, Packing, code_bytes, home_bytes, kv_code_bytes
from offload.plan.composition import Composition
from offload.plan.options import DTYPE_BYTES, PAGE_TOKENS, Options
from offload.plan.shards import Shard
from offload.plan.states import checkpoint_bytes, num_checkpoints
from offload.speed.cpu_pass import CpuPass, shares_experts
from offload.speed.curves import Curves, typical
from offload.speed.hardware import TWO_CORES, Hardware

PREFILL_BLOCK = 512  # rows of one block of a prefill
MAX_TILE_TOKENS = 8192  # without the room for padded rows
BLOCK_ROWS = 16  # rows per block of torch's products: a GPU's matrix units take 16 at the price of one
CPU_ROWS = 32  # rows of a pass on a CPU that are priced as one block
RUN_BLOCKS = 8  # of a row's queries over one tile, 128 programs: enough for one tile at a time
MAX_ROWS = 256  # rows that a pass may write after the sequence: the longest verification, padded
NUM_ROW_SLOTS = 3  # groups of a prefill's rows on the device if hidden rows are on the host
STORED_TEMPORARY = 16  # bytes per number that torch's operators need to decode blocks (formats/stored.py)
NUM_STAGING = 2  # buffers through which layers, and tiles, cross the link
TAIL_TOKENS = 128  # granularity of the retrieval cache's tail, at least one chunk
KV_TAIL = 64  # last tokens of the quantised cache, and up to a group more, that stay exact
RAW_TILES = 3  # most tiles of a prefill whose pages are not packed yet
FETCH_BYTES = 64 * 2**20  # chunks that are fetched at a time
_EXPERTS_READ = 0.6  # of the host's read rate, over experts that the CPU runs for a GPU (docs/log.md)
BLOCK_SHARE = 14  # of a device's memory one part in so many for slots of blocks
CHOOSING_ROWS = 64  # rows that choose, and attend to what they chose, at a time
_SPAN = 128  # tokens that the CPU's kernels attend to at a time, of which slots have whole numbers
KEYS_GROWTH = 256  # keys of blocks of a layer, for which room is made at a time
_NGRAM_SHARE = 0.8  # of host memory, up to which a model with its tables of n-grams is read whole
NGRAM_ROWS = 1 << 20  # of a table of n-grams in its file, kept in host memory: those of code and talks repeat
WINDOW_UNDO = 1024  # tokens by which a sequence with windows can always be truncated
# Purposes that each sequence has of its own; models, staging of weights and workspaces are shared.
OF_EACH_SEQUENCE = frozenset(
    (
        *("rope tables", "quantised cache", "selection", "fetched chunks", "draft cache", "attention scratch"),
        *("kv staging", "arena", "kv cache", "window cache", "raw pages", "gathered chunks"),
        *("states", "state checkpoints", "hidden rows of drafts", "block index", "block cache"),
    )
)


def ring_pages(window: int, rows: int, *, page: int, undo: int) -> int:
    """The number of pages of a window's ring: pages of `page` tokens that `rows` rows of a pass see and write, at any
    offset within a page, and the pages that a sequence truncated by up to `undo` tokens sees."""
    return (window - 1 + rows + 2 * (page - 1)) // page + -(-undo // page)


def run_tiles(attention: Attention) -> int:
    """The number of tiles that a GPU attends to by one launch where they are all in its memory. A program has the
    queries of a KV head, BLOCK_ROWS at a time: where a row has few of them, only many tiles keep the GPU busy."""
    blocks = attention.num_kv_heads * -(-attention.num_heads // (attention.num_kv_heads * BLOCK_ROWS))
    return -(-RUN_BLOCKS // blocks)


def block_keys(indexer: Indexer, num_tokens: int) -> int:
    """The blocks' keys of a layer that there is room for with `num_tokens` tokens, incomplete blocks too."""
    return -(-num_tokens // (indexer.ratio * KEYS_GROWTH)) * KEYS_GROWTH


def slots_of(indexer: Indexer, num_rows: int) -> int:
    """Slots of a layer in which so many rows have all blocks that they choose, and those that they are part of."""
    return num_rows * (indexer.most_blocks + 1) + -(-num_rows // indexer.ratio) + 2


def rows_in(indexer: Indexer, slots: int) -> int:
    """The rows that have all of these in so many slots, see `slots_of`; at least one."""
    ratio = indexer.ratio
    return max((slots - 2) * ratio // ((indexer.most_blocks + 1) * ratio + 1), 1)


def raw_keys(indexer: Indexer) -> int:
    """Tokens whose raw index keys are kept: of a pass that may be rejected, of the one before, and of a block."""
    return 2 * MAX_ROWS + indexer.ratio


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
    """The byte sizes of a request, as functions of the capacity of one sequence. Device bytes are per device. measured:
    the curves of the host's CPU; None: not measured.

    Each of `num_devices` has a shard of every layer's weights and of the target's caches, embeddings and hidden rows.
    The head and the draft are on the first, so the others need less.
    """

    target: ModelConfig
    draft: ModelConfig | None
    options: Options
    hardware: Hardware
    dtype: str
    num_sequences: int = 1  # that run at a time
    measured: Curves | None = None

    @cached_property
    def curves(self) -> Curves:
        """The curves of the CPU by all its threads: measured, or typical of its rates."""
        if self.measured is not None:
            return self.measured
        rates, is_cpu = self.hardware.rates, self.hardware.is_cpu
        if not is_cpu:
            return typical(_EXPERTS_READ * rates.host_read, TWO_CORES.flops, decodes_as_read=True)
        ranks = self.hardware.ranks_per_host  # which share the rates
        return typical(ranks * rates.device_read, ranks * rates.flops)

    @cached_property
    def target_passes(self) -> Mapping[int, CpuPass]:
        """The target's passes on a CPU, by the bits of its weights."""
        return {bits: CpuPass(self.target, self.itemsize, self.curves, bits) for bits in (16, *CODE_BITS)}

    @cached_property
    def draft_pass(self) -> CpuPass:
        """The draft's passes on a CPU; only if there is one."""
        assert self.draft is not None
        return CpuPass(self.draft, self.itemsize, self.curves)

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

    @property
    def known_link_rate(self) -> float | None:
        """Bytes per second over the link, as set by the user or measured for a GPU; None: not known."""
        hardware = self.hardware
        if self.options.link_gbps is not None:
            return self.options.link_gbps * 1e9
        return hardware.link_rate if hardware.rates.measured and not hardware.is_cpu else None

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
        """The number of tiles of each layer: as few as possible, for few calls; one where a GPU attends to blocks that
        an index chooses, in one launch."""
        if self.target.indexer is not None and not self.hardware.is_cpu:
            return 1
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

    @cached_property
    def num_readers(self) -> int:
        """The number of layers that read these caches: each retrieves chunks of its own."""
        return len(self.target.readers(self.target.growing))

    @cached_property
    def read_kv_bytes(self) -> int:
        """Bytes that a row reads for each token that it attends to in the layers that read them, on each device."""
        return self.shard.read_kv_bytes(self.itemsize)

    def attended(self, capacity: int) -> int:
        """Tokens of `capacity` that a row of a growing layer attends to at most."""
        indexer = self.target.indexer
        return capacity if indexer is None else min(indexer.most_tokens, capacity)

    def index_keys_bytes(self, num_tokens: int) -> int:
        """Bytes of the keys by which a row chooses among `num_tokens` tokens, in all layers; 0 without an indexer."""
        if (indexer := self.target.indexer) is None:
            return 0
        return self.num_growing * (num_tokens // indexer.ratio) * indexer.head_dim * self.itemsize

    def block_index_bytes(self, capacity: int) -> int:
        """Bytes of a sequence's block index on each device."""
        indexer = self.target.indexer
        assert indexer is not None
        numbers = block_keys(indexer, capacity + MAX_ROWS) + raw_keys(indexer)
        return self.num_growing * numbers * indexer.head_dim * self.itemsize

    def block_slots(self, capacity: int, room: int) -> int:
        """Slots of each layer for blocks of keys and values that are on the host, with about `room` bytes: at least
        those of a row, at most those of a block of rows, which then run together, and in which 96 to 99 % of the chosen
        blocks are (docs/memory.md)."""
        indexer = self.target.indexer
        assert indexer is not None
        least, most = slots_of(indexer, 1), slots_of(indexer, self.most_rows)
        every = -(-(capacity + MAX_ROWS) // indexer.ratio)
        found = min(max(min(room // self.block_cache_bytes(1), most), least), every)
        step = max(_SPAN // indexer.ratio, 1)
        return -(-found // step) * step

    def block_cache_bytes(self, slots: int) -> int:
        """Bytes of so many slots of each layer, on each device."""
        indexer = self.target.indexer
        assert indexer is not None
        return self.num_growing * slots * indexer.ratio * self._layer_kv_bytes

    def beside_blocks_bytes(self, capacity: int, slots: int) -> int:
        """Bytes beside so many slots of each layer, on each device: the rows of a pass before they are in their slots,
        and the tables of slots and of all blocks, two numbers for each and a time."""
        indexer = self.target.indexer
        assert indexer is not None
        numbers = 2 * slots + 2 * -(-(capacity + MAX_ROWS) // indexer.ratio) + 1
        return CHOOSING_ROWS * self._layer_kv_bytes + 4 * self.num_growing * numbers

    def gathered_bytes(self, slots: int) -> int:
        """Bytes of blocks of a layer that are gathered on the host before they cross the link, for each device: a GPU
        reads them there."""
        return min(FETCH_BYTES, self.block_cache_bytes(slots) // self.num_growing) if self.hardware.is_cpu else 0

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
        return 2 * Packing.of_page(self.shard.num_kv_heads, PAGE_TOKENS, self.shard.kv_dim).nbytes

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

    def experts_bytes(self, most: int = 0) -> int:
        """Bytes of the experts of all layers, on each device or for it on the host: of all, or of at most so many of
        each layer."""
        if most not in self._experts_bytes:
            self._experts_bytes[most] = self.shard.all_layers(lambda layer: layer.experts_bytes(self.itemsize, most))
        return self._experts_bytes[most]

    @cached_property
    def _experts_bytes(self) -> dict[int, int]:
        return {}

    def first_experts(self, number: int) -> int:
        """Bytes of one expert of each of the first `number` layers that have some, on each device."""
        return self._first_experts[max(number, 0)]

    @cached_property
    def _first_experts(self) -> list[int]:
        sizes = {kind.block: kind.expert_bytes(self.itemsize) for kind, _ in self.shard.kinds}
        return [*accumulate(filter(None, (sizes[block] for block in self.shard.blocks)), initial=0)]

    @cached_property
    def shares_experts(self) -> bool:
        """Whether the CPU may run any of a layer's experts for the device, see `cpu_pass.shares_experts`."""
        return shares_experts(self.target, self.hardware, self.dtype)

    @cached_property
    def largest_expert_bytes(self) -> int:
        """Bytes of the largest expert, on each device."""
        return max(kind.expert_bytes(self.itemsize) for kind, _ in self.shard.kinds)

    def head_experts(self, composition: Composition, most: int = 0) -> int:
        """Bytes of the experts of the next-token head that drafts, of all or of at most so many; 0 without any. They
        are where the target's are, on the first device or for it on the host."""
        draft = self.draft
        drafts = draft is not None and draft.is_head and composition.draft
        return draft.experts_bytes(self.itemsize, most) if draft is not None and drafts else 0

    def assistant_reads(self, capacity: int) -> int:
        """Bytes of the target's keys and values that a row of an assistant reads."""
        assert self.draft is not None
        windows = [block.attention.window for block in self.draft.blocks]
        near = sum(min(window, capacity) for window in windows if window is not None)
        return near * self._window_kv_bytes + windows.count(None) * capacity * self._layer_kv_bytes

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
    def embedding_bytes(self) -> int:
        """Bytes outside the layers, on the first device: embeddings that are not mapped, head, last norm. The layer
        table is mapped."""
        mapped = self.target.layer_table_bytes(self.itemsize) + (self.table_bytes if self.maps_table else 0)
        return self.target.weight_bytes(self.itemsize) - self.target.layers_weight_bytes(self.itemsize) - mapped

    @cached_property
    def table_bytes(self) -> int:
        """Bytes of the embedding's table, on each device or for it on the host."""
        return self.target.table.nbytes(self.itemsize)

    @cached_property
    def ngram_tables_bytes(self) -> int:
        """Bytes of the tables of n-grams, for each device; 0 without any."""
        return sum(table.nbytes(self.itemsize) for table in self.target.ngram_tables())

    @cached_property
    def reads_ngrams(self) -> bool:
        """Whether rows of tables of n-grams are read from the file as they are chosen: where the model leaves no room
        for all of them."""
        whole = self.target.weight_bytes(self.itemsize) + self.ngram_tables_bytes
        return self.ngram_tables_bytes > 0 and whole > _NGRAM_SHARE * self.host_room

    @cached_property
    def host_room(self) -> int:
        """Bytes that may be used on all hosts; on a CPU those of the device among them."""
        cap, hardware = self.options.host_memory, self.hardware
        free = hardware.host_free_bytes
        return (free if cap is None else min(free, int(cap * 1e9))) * hardware.num_hosts

    @cached_property
    def ngram_rows(self) -> int:
        """Rows of each table of n-grams that are kept in host memory where the others are in its file."""
        return min((NGRAM_ROWS, *(table.outputs for table in self.target.ngram_tables())))

    @property
    def ngram_rows_bytes(self) -> int:
        """Bytes of these rows, for each device."""
        held = (replace(table, outputs=self.ngram_rows) for table in self.target.ngram_tables())
        return sum(table.nbytes(self.itemsize) for table in held)

    @cached_property
    def maps_table(self) -> bool:
        """Whether the embedding's rows are read from the mapped file, so that its table takes no memory: on a CPU, of
        a GGUF file's blocks, where the head is not the same table."""
        own = ENCODINGS.get(self.target.table_encoding)
        as_in_the_file = own is not None and not own.tail and self.target.quantisation is None
        return self.hardware.is_cpu and as_in_the_file and not self.target.tie_embeddings

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

    @cached_property
    def decoded_bytes(self) -> tuple[int, int]:
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
    def caps_scores(self) -> bool:
        """Whether some layer caps its scores, which no fused kernel of a CPU supports."""
        return any(block.attends and block.attention.cap for block in self.target.blocks)

    def low_bit_bytes(self, bits: int, *, first: bool = True) -> int:
        """Bytes of the layers and, on the first device, the head, with matrices in `bits` bits per element. A head in
        blocks stays as it is stored."""

        def coded(layer: ModelConfig) -> int:
            rest = layer.layer_weight_bytes(self.itemsize) - layer.layer_matrix_elements() * self.itemsize
            return rest + sum(code_bytes(outputs, inputs, bits) for outputs, inputs, _ in layer.products.values())

        has_codes = first and not self.target.head_encoding
        head = code_bytes(self.target.vocab_size, self.target.hidden_size, bits) if has_codes else 0
        return self.shard.all_layers(coded) + head

    def quantised_cache_bytes(self, capacity: int, composition: Composition) -> int:
        """Bytes of the quantised cache: whole groups of all tokens, or of the retrieved ones, with 4 bits a number, and
        the exact first and last tokens."""
        layers, exact = self.num_growing, self.kv_bytes_per_token
        if composition.budget:
            layers, exact = self.num_readers, self.read_kv_bytes
        heads = layers * self.shard.num_kv_heads
        coded = (composition.budget or capacity) // KV_CODE_GROUP * heads * kv_code_bytes(self.target.kv_dim)
        return coded + (KV_CODE_GROUP + low_bit_tail(composition.drafted)) * exact

    @property
    def kv_code_share(self) -> float:
        """Bytes of a token's codes in 4 bits, as a share of its exact keys and values."""
        dim = self.target.kv_dim
        return kv_code_bytes(dim) / (KV_CODE_GROUP * 2 * dim * self.itemsize)

    def hidden_bytes(self, num_rows: int) -> int:
        """Bytes of `num_rows` hidden rows, whole on each device, or on the host for each device."""
        return num_rows * self.target.row_size * self.itemsize

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
        if composition.budget:
            return min(FETCH_BYTES, (composition.budget + tail_tokens(composition)) * self.read_kv_bytes)
        return min(FETCH_BYTES, capacity * self.kv_bytes_per_token)

    def retrieval_bytes(self, capacity: int, composition: Composition) -> int:
        if composition.kv_bits < 16:
            return self.quantised_cache_bytes(capacity, composition)
        return (composition.budget + tail_tokens(composition)) * self.read_kv_bytes
