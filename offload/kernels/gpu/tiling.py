"""How a GPU's attention is cut into programs and steps."""

from __future__ import annotations

from dataclasses import dataclass

from offload.formats.quantised_kv import GROUP

SPAN = 512  # tokens at most: one program's, and of one partial result (plan/sizing.py counts with it)
ROWS = 16  # of a block: the least that tensor cores take
STAGES = 2
_STAGE_BYTES = 32 * 2**10  # of keys and values at a time: two stages fit into every GPU's shared memory


@dataclass(frozen=True)
class Tiling:
    """How a kernel is cut for heads of `head_dim` in a dtype of `itemsize` bytes. step: keys at a time."""

    head_dim: int
    itemsize: int

    @property
    def padded(self) -> int:
        return 1 << (self.head_dim - 1).bit_length()

    @property
    def step(self) -> int:
        return min(64, _STAGE_BYTES // (2 * self.padded * self.itemsize))

    @property
    def blocks(self) -> int:
        """Of keys and values in 4 bits at a time: as many tokens, but at least one block."""
        return max(self.step // GROUP, 1)

    @property
    def warps(self) -> int:
        """fp32 products take no tensor cores, and more registers than four warps have."""
        return 4 if self.itemsize == 2 else 8

    @property
    def most_registers(self) -> int | None:
        """Of a thread. None: as many as the assembler thinks best, which for fp32 would spill."""
        return None if self.itemsize == 2 else 240

    @property
    def most_coded_registers(self) -> int:
        """The same where keys and values are in 4 bits: three programs on a multiprocessor, where they fit."""
        if self.itemsize == 4:
            return 240
        return 168 if self.padded == self.head_dim <= 128 else 255
