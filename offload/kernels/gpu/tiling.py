"""The tiling of a GPU's attention: its programs and steps."""

from __future__ import annotations

from dataclasses import dataclass

from offload.formats.quantised_kv import GROUP

SPAN = 512  # most tokens of a program and of its partial result (plan/sizing.py uses it)
ROWS = 16  # of a block: the minimum of tensor cores
WIDEST_WHOLE = 256  # numbers of a head, or of half a joined row, that a program takes at once
MERGED = 64  # most numbers of a head that a program merges: few programs would wait for span after span
UNROLL = 8  # spans of which a program that merges them loads several at a time
STAGES = 2
_STAGE_BYTES = 32 * 2**10  # of keys and values at a time: two stages fit into every GPU's shared memory


@dataclass(frozen=True)
class Tiling:
    """The tiling of a kernel for heads of `head_dim` in a dtype of `itemsize` bytes. step: keys at a time. joined: keys
    and values are the halves of rows of `head_dim` numbers, see `Scoring`; held_padded: of each of them."""

    head_dim: int
    itemsize: int
    joined: bool = False

    @property
    def padded(self) -> int:
        return 1 << (self.head_dim - 1).bit_length()

    @property
    def held_padded(self) -> int:
        return 1 << (self.head_dim // (1 + self.joined) - 1).bit_length()

    @property
    def is_wide(self) -> bool:
        """Whether rows take more registers than four warps have."""
        return self.held_padded > WIDEST_WHOLE

    @property
    def step(self) -> int:
        return min(64, max(_STAGE_BYTES // (2 * self.held_padded * self.itemsize), 16))  # tensor cores' minimum

    @property
    def part(self) -> int:
        """Numbers of a head of 4-bit keys and values at a time: half of them where the head is wide."""
        return min(self.padded, WIDEST_WHOLE)

    @property
    def blocks(self) -> int:
        """Blocks of 4-bit keys and values at a time: as many tokens as `step`, but at least one block."""
        return max(self.step // GROUP, 1)

    @property
    def warps(self) -> int:
        """Warps of a program; more for wide rows and for fp32, whose products use no tensor cores and more registers
        than four warps have."""
        return 4 if self.itemsize == 2 and not (self.joined or self.is_wide) else 8

    @property
    def most_registers(self) -> int | None:
        """The limit of a thread's registers. None: the assembler's choice, which would spill for fp32, and for narrow
        halves of rows, where it is 128. That is enough for wide heads, and two programs fit on a multiprocessor."""
        if self.itemsize == 4 or (self.joined and not self.is_wide):
            return 240
        return None if self.joined or not self.is_wide else 128

    @property
    def merged(self) -> int:
        """Numbers of a head of a program that merges spans, a power of two."""
        return min(self.padded, MERGED)

    @property
    def most_coded_registers(self) -> int:
        """The limit of a thread's registers for 4-bit keys and values: three programs on a multiprocessor where they
        fit."""
        if self.itemsize == 4:
            return 240
        return 168 if self.padded == self.head_dim <= 128 else 255
