"""Bytes of everything a request needs, as functions of its length."""

from __future__ import annotations

from dataclasses import dataclass

from offload.plan.config import ModelConfig
from offload.plan.hardware import Hardware
from offload.plan.options import DTYPE_BYTES, PAGE_TOKENS, Options

WALK = 512  # rows of one block of a prefill
MAX_GAMMA = 31
MAX_TILE_TOKENS = 8192
MAX_BUDGET = 4096  # where the user names none: a 13B model's retrieval cache is 3.1 GiB then


@dataclass(frozen=True)
class Sizing:
    """Bytes of everything, as functions of the capacity."""

    target: ModelConfig
    draft: ModelConfig | None
    options: Options
    hardware: Hardware
    dtype: str

    @property
    def chunk(self) -> int:
        return self.options.chunk or 16

    @property
    def itemsize(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def rows(self) -> int:
        """Rows of one block of a pass over the full cache. By device alone, since a token's bits depend on it.

        A CPU pays for each row (docs/log.md); a GPU's matrix units take 16 at the price of one.
        """
        return 8 if self.hardware.is_cpu else 16

    def budget(self, capacity: int) -> int:
        """Retrieved tokens per layer: a 16th of the context, 512 to MAX_BUDGET (docs/log.md), whole chunks."""
        wanted = self.options.budget or min(max(512, capacity // 16), MAX_BUDGET)
        return max(min(wanted, capacity) // self.chunk, 1) * self.chunk

    def tile_tokens(self, capacity: int) -> int:
        """As few tiles of at most MAX_TILE_TOKENS as hold a sequence, all of one size: few calls, few empty slots."""
        most = capacity + self.max_rows
        count = -(-most // MAX_TILE_TOKENS)
        return -(-most // (count * PAGE_TOKENS)) * PAGE_TOKENS

    def kv_bytes(self, capacity: int) -> int:
        """The full cache: whole tiles, with room for a block of padded rows."""
        tile = self.tile_tokens(capacity)
        tiles = -(-(capacity + self.max_rows) // tile)
        return tiles * tile * self.target.kv_bytes_per_token(self.itemsize)

    @property
    def max_rows(self) -> int:
        """Rows beyond the sequence that a pass may write: the longest verification, padded."""
        return -(-(max(MAX_GAMMA, self.options.gamma or 0) + 1) // self.rows) * self.rows

    def bytes(self, capacity: int, gamma: int, draft_gamma: int) -> tuple[dict[str, int], dict[str, int]]:
        """(device, host): bytes by purpose."""
        target, item, tile = self.target, self.itemsize, self.tile_tokens(capacity)
        device: dict[str, int] = {}
        host: dict[str, int] = {}
        layers = target.num_layers * target.layer_weight_bytes(item)
        (host if "weights" in self.options.offload else device)["target layers"] = layers
        device["embeddings"] = target.weight_bytes(item) - layers
        (host if "kv" in self.options.offload else device)["full cache"] = self.kv_bytes(capacity)
        per_layer = target.kv_bytes_per_token(item) // target.num_layers
        if "weights" in self.options.offload:
            device["weight staging"] = 2 * target.layer_weight_bytes(item)
        if "kv" in self.options.offload:
            device["kv staging"] = 2 * tile * per_layer
            device["prefill tiles"] = self.kv_bytes(capacity) // target.num_layers
        device["hidden rows"] = capacity * target.hidden_size * item
        device["block of rows"] = WALK * (3 * target.intermediate_size + 6 * target.hidden_size) * item
        if gamma:
            device["retrieval cache"] = (self.budget(capacity) + 2 * PAGE_TOKENS) * target.kv_bytes_per_token(item)
        if self.draft is not None and draft_gamma:
            device["draft"] = self.draft.weight_bytes(item) + (
                self.options.sinks + 2 * (self.options.window + 512)
            ) * self.draft.kv_bytes_per_token(item)
        return device, host
