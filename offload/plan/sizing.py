"""Bytes of everything a request needs, as functions of its length (derived in docs/memory.md)."""

from __future__ import annotations

from dataclasses import dataclass

from offload.plan.config import ModelConfig
from offload.plan.hardware import Hardware
from offload.plan.options import DTYPE_BYTES, PAGE_TOKENS, Options

WALK = 512  # rows of one block of a prefill
MAX_GAMMA = 31
MAX_TILE_TOKENS = 8192
MAX_BUDGET = 4096  # where the user names none: a 13B model's retrieval cache is 3.1 GiB then
NUM_STAGING = 2  # buffers through which layers, and tiles, cross the link
TAIL_TOKENS = 128  # room after the chosen chunks of the retrieval cache
_GPU_RESERVE = 512 * 2**20  # the libraries' own workspaces, and what an allocator cannot use


@dataclass(frozen=True)
class PrefillShape:
    """What prefill attends at a time: rows, and pages where some row sees only a part of them.

    fused: pages that all rows see whole go through torch's fused kernel, a tile at once.
    """

    rows: int
    pages: int
    fused: bool


def prefill_shape(device_type: str, itemsize: int) -> PrefillShape:
    """On a CPU scores must stay in the processor's cache (docs/log.md); a GPU wants large products, and has a fused
    kernel for 16 bits."""
    return PrefillShape(64, 4, False) if device_type == "cpu" else PrefillShape(WALK, 2, itemsize == 2)


@dataclass(frozen=True)
class Sizing:
    """Bytes of everything, as functions of the capacity. Device bytes are those of each device.

    `num_devices` share the heads and the feed-forward rows evenly: each holds that share of every layer's weights and
    of every cache. Embeddings, hidden rows and the draft are on each.
    """

    target: ModelConfig
    draft: ModelConfig | None
    options: Options
    hardware: Hardware
    dtype: str

    @property
    def num_devices(self) -> int:
        return self.hardware.num_devices

    @property
    def itemsize(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def chunk(self) -> int:
        return self.options.chunk or 16

    @property
    def rows(self) -> int:
        """Rows of one block of a pass over the full cache. By device alone, since a token's bits depend on it.

        A CPU pays for each row (docs/log.md); a GPU's matrix units take 16 at the price of one.
        """
        return 8 if self.hardware.is_cpu else 16

    @property
    def max_rows(self) -> int:
        """Rows beyond the sequence that a pass may write: the longest verification, padded."""
        return self._padded(max(MAX_GAMMA, self.options.gamma or 0) + 1)

    def budget(self, capacity: int) -> int:
        """Retrieved tokens per layer: a 16th of the context, 512 to MAX_BUDGET (docs/log.md), whole chunks."""
        wanted = self.options.budget or min(max(512, capacity // 16), MAX_BUDGET)
        return max(min(wanted, capacity) // self.chunk, 1) * self.chunk

    def tile_tokens(self, capacity: int) -> int:
        """As few tiles of at most MAX_TILE_TOKENS as hold a sequence, all of one size: few calls, few empty slots."""
        most = capacity + self.max_rows
        count = -(-most // MAX_TILE_TOKENS)
        return -(-most // (count * PAGE_TOKENS)) * PAGE_TOKENS

    def num_tiles(self, capacity: int) -> int:
        """Of each layer: whole tiles, with room for a block of padded rows."""
        return -(-(capacity + self.max_rows) // self.tile_tokens(capacity))

    def tile_bytes(self, capacity: int) -> int:
        """Of one layer, on each device."""
        return self.tile_tokens(capacity) * self.kv_bytes_per_token // self.target.num_layers

    @property
    def kv_bytes_per_token(self) -> int:
        """Of all layers, on each device."""
        return self.target.kv_bytes_per_token(self.itemsize) // self.num_devices

    @property
    def layer_bytes(self) -> int:
        """Weights of one layer, on each device."""
        return -(-self.target.layer_weight_bytes(self.itemsize) // self.num_devices)

    @property
    def embedding_bytes(self) -> int:
        """What is not in a layer: embeddings, head, last norm."""
        layers = self.target.num_layers * self.target.layer_weight_bytes(self.itemsize)
        return self.target.weight_bytes(self.itemsize) - layers

    def fixed_bytes(self, capacity: int, gamma: int, draft_gamma: int) -> dict[str, int]:
        """What is on each device wherever layers and tiles are, by purpose."""
        sizes = {
            "target embeddings": self.embedding_bytes,
            "hidden rows": capacity * self.target.hidden_size * self.itemsize,
            "workspace": self._workspace(capacity, gamma),
        }
        if gamma:
            sizes["retrieval cache"] = (self.budget(capacity) + TAIL_TOKENS) * self.kv_bytes_per_token
            sizes["chunk masses"] = self._mass_bytes(capacity, gamma)
        if draft_gamma and self.draft is not None:
            sizes["draft layers"] = self.draft.num_layers * self.draft.layer_weight_bytes(self.itemsize)
            sizes["draft embeddings"] = self.draft.weight_bytes(self.itemsize) - sizes["draft layers"]
            sizes["draft cache"] = self._draft_tokens(gamma, draft_gamma) * self.draft.kv_bytes_per_token(self.itemsize)
        if not self.hardware.is_cpu:
            sizes["reserve"] = _GPU_RESERVE
        return sizes

    def _workspace(self, capacity: int, gamma: int) -> int:
        """The largest temporaries: a block of a prefill, or a block of rows over a tile, or the logits."""
        target, item, heads = self.target, self.itemsize, self.target.num_heads // self.num_devices
        walk = WALK * (3 * target.intermediate_size + 6 * target.hidden_size) * item
        prefill = prefill_shape("cpu" if self.hardware.is_cpu else "cuda", item)
        scores = prefill.rows * prefill.pages * PAGE_TOKENS * heads * (item + 4)
        if prefill.fused:  # a tile's pages, attended apart before they are merged
            pages = self.tile_tokens(capacity) // PAGE_TOKENS
            scores = max(scores, pages * prefill.rows * heads * target.head_dim * (item + 4))
        tile = self.rows * self.tile_tokens(capacity) * heads * (item + 4)
        logits = self._padded(gamma + 1) * target.vocab_size * (item + 8)
        return max(walk + scores, tile, logits)

    def _mass_bytes(self, capacity: int, gamma: int) -> int:
        """fp32, per row, KV head and chunk of each layer's last verification."""
        chunks = self.num_tiles(capacity) * self.tile_tokens(capacity) // self.chunk
        heads = self.target.num_kv_heads // self.num_devices
        return 4 * self._padded(gamma + 1) * heads * chunks * self.target.num_layers

    def _draft_tokens(self, gamma: int, draft_gamma: int) -> int:
        slack = gamma + draft_gamma + 2 * self.rows
        return max(self.options.sinks, 1) + 2 * (self.options.window + slack)

    def _padded(self, num_rows: int) -> int:
        return -(-num_rows // self.rows) * self.rows
