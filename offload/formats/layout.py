"""The memory layout of blocks of numbers in each encoding: sizes and offsets in bytes. Arithmetic without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALL_TOKENS = range(2**31 - 1)  # the range of a copy without limits
RAW, PACKED, RESIDUAL = range(3)  # encodings of a page; RESIDUAL goes with codes in 4 bits

CODE_GROUP = 64  # inputs of quantised weights that share a step and a least value, 2 bytes each
CODE_TILE = 16  # outputs of quantised weights that are stored together
CODE_BITS = (4, 6)  # of a quantised weight
BESIDE_CODES = {4: 9, 6: 8}  # bits of a weight's residual, by the bits of its code

KV_CODE_GROUP = 32  # tokens whose quantised keys share a step and a least value by channel
KV_VALUE_GROUP = 64  # channels of a token's quantised values that share them
KV_CODE_LANES = 16  # channels of values are padded to a multiple of it
EXPERT_ALIGNMENT = 16  # a row has whole multiples of so many numbers where the CPU's kernels run experts
WIDEST_GPU_HEAD = 512  # largest head_dim of the GPU kernels
WIDEST_GPU_HALF = 512  # and numbers of half a row that is key and value (`Attention.latent`)

PACKED_TOKENS = 16  # tokens of a head that are packed as one group
PACKED_ESCAPES = 1 / 64  # room for escapes in a packed page, as a share of its numbers
PACKED_SHARE = 0.75 + PACKED_ESCAPES / 2 + 0.001  # packed bytes of a page, as a share of its bytes

RESIDUAL_HEAD_BYTES = 8  # per group: the offsets of its 4-bit parts and of its escapes

CACHED_SHARE = {16: 1.0, 12: PACKED_SHARE, 9: 0.5 + 1 / 1024 + 0.2 / 4}  # share of a page's bytes
WEIGHT_BYTES = {  # per number of a layer's matrices, at home and over the link, by bits; see weights/homes.py
    16: 2.0,
    12: 1.5 + 4 / 1024 + 1 / 64,  # with group heads (groups of 1024) and escapes
    9: 1.0 + 8 / 1024 + 0.24 / 2 + 1 / 256,  # with 4 more bits for the quarter of numbers near zero
    8: 1.0 + 8 / 1024 + 0.08 / 2 + 1 / 256,  # fewer are near zero, as intervals are shorter
}

_HEAD_BYTES = 4  # per packed group: its largest exponent (8 bits) and the number of escapes before its own


def home_bytes(layer_bytes: int, numbers: int, bits: int) -> int:
    """Bytes of a layer at home, with `numbers` numbers in its matrices, padded to a multiple of 64."""
    saved = int(numbers * (WEIGHT_BYTES[16] - WEIGHT_BYTES[bits]))
    return layer_bytes - saved // 64 * 64


def takes_codes(products: Sequence[tuple[int, int, bool]]) -> bool:
    """Whether matrices of these (outputs, inputs, has a bias) can be quantised (formats/quantised.py)."""
    return all(outputs % CODE_TILE == inputs % CODE_GROUP == 0 for outputs, inputs, _ in products)


def takes_kv_codes(head_dim: int, on_cpu: bool = True) -> bool:
    """Whether keys and values of heads of `head_dim` can be quantised to 4 bits (formats/quantised_kv.py)."""
    return head_dim % 8 == 0 if on_cpu else head_dim % 16 == 0 and head_dim <= WIDEST_GPU_HEAD


def code_bytes(outputs: int, inputs: int, bits: int) -> int:
    """Bytes of a matrix in 4 or 6 bits, with the steps and least values of its groups."""
    return -(-outputs // CODE_TILE) * (inputs // CODE_GROUP) * CODE_TILE * (CODE_GROUP * bits // 8 + 4)


def kv_code_bytes(head_dim: int) -> int:
    """Bytes of a head's keys and values of a group of tokens in 4 bits, with their steps and least values."""
    lanes = -(-head_dim // KV_CODE_LANES) * KV_CODE_LANES
    scales = 4 * head_dim + 4 * KV_CODE_GROUP * -(-head_dim // KV_VALUE_GROUP)
    return scales + KV_CODE_GROUP // 2 * (head_dim + lanes)


@dataclass(frozen=True)
class Packing:
    """The layout of packed blocks of `numbers` numbers, in groups of `group`, a multiple of 64, with room for `room`
    escapes.

    A packed block is stored in place of its numbers. Its parts, in bytes: signs and mantissas [numbers]; distances
    [numbers / 2], [group / 2] for each group, with the first half of a group in the low halves; heads, int32 [groups];
    escapes [room]; see native/packed.h.
    """

    numbers: int
    group: int
    room: int

    @property
    def num_groups(self) -> int:
        return self.numbers // self.group

    @property
    def heads(self) -> int:
        """The offset of the group heads, in bytes."""
        return self.numbers + self.numbers // 2

    @property
    def escapes(self) -> int:
        """The offset of the escapes, in bytes."""
        return self.heads + _HEAD_BYTES * self.num_groups

    @property
    def nbytes(self) -> int:
        """Bytes of a packed block, a multiple of 16."""
        return self.escapes + self.room

    @classmethod
    def of_page(cls, num_kv_heads: int, page_tokens: int, head_dim: int) -> Packing:
        """The packing of a page's keys or values: [num_kv_heads, page_tokens, head_dim]."""
        return cls.of(num_kv_heads * page_tokens * head_dim, PACKED_TOKENS * head_dim, PACKED_ESCAPES)

    @classmethod
    def of(cls, numbers: int, group: int, escapes: float) -> Packing:
        """The packing with room for that share of escapes, rounded up so that the size is a multiple of 16 bytes."""
        found = cls(numbers, group, 0)
        found = cls(numbers, group, int(numbers * escapes) // 16 * 16 + -found.escapes % 16)
        if numbers % group or group % 64 or found.nbytes > 2 * numbers:
            raise ValueError(f"{numbers} numbers in groups of {group} cannot be packed with {found.room} escapes")
        return found

    @classmethod
    def roomiest(cls, numbers: int, group: int) -> Packing:
        """The packing with the most room for escapes for which a packed block is still smaller than its numbers."""
        found = cls(numbers, group, 0)
        return cls(numbers, group, 2 * numbers - 16 - found.escapes)


@dataclass(frozen=True)
class PageShape:
    """The shape of a block, the keys or the values of a page, [num_kv_heads, page_tokens, head_dim], and the layout of
    its residual.

    Groups are `KV_CODE_GROUP` tokens of a head, as for the codes; they are numbered through a head's tokens, then
    through the heads. A residual has the numbers' low bytes [numbers], heads [num_groups + 1, 2] int32, of which the
    last gives the ends, 4 bits for each number near zero, and escapes.
    """

    num_kv_heads: int
    page_tokens: int
    head_dim: int

    @property
    def num_groups(self) -> int:
        return self.num_kv_heads * self.page_tokens // KV_CODE_GROUP

    @property
    def numbers(self) -> int:
        """The number of numbers in a block, which is also the offset of the heads in bytes."""
        return self.num_kv_heads * self.page_tokens * self.head_dim

    @property
    def fours(self) -> int:
        """The offset of the 4-bit parts, in bytes."""
        return self.numbers + RESIDUAL_HEAD_BYTES * (self.num_groups + 1)
