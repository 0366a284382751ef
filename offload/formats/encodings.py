"""The table of encodings in which checkpoints store matrices: blocks of numbers, GGUF's and this program's own.

A block has codes and a scale, and its numbers are in groups that share a step. A number is made of its code and its
step; `Encoding.code` and `Encoding.steps` say how. native/stored_forms.h has the same table. GGUF's layouts are ggml's,
ggml-common.h. Arithmetic without torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

GROUPS = (32, 64, 128)  # numbers per scale in this program's blocks, for safetensors checkpoints
GROUP_HEAD = 4  # bytes before a block's numbers: scale and zero, 2 each, or a scale of 4
BOOKS = {  # numbers by code
    "e2m1": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),  # doubled
    "iq4": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    "sign": (-1, 1),
}


@dataclass(frozen=True)
class Plane:
    """A plane of bits of a block's codes: `bits` of each number, from byte `at` on. A run of `run` bytes has the bits
    of its first `run` numbers in the lowest places, then of the next ones above them."""

    at: int
    bits: int
    run: int


NO_PLANE = Plane(0, 0, 0)


@dataclass(frozen=True)
class Field:
    """A field of bits for each of a block's items, least bits first: item n has `bits` bits, from bit
    at + n // many * outer + n % many * inner of the block on."""

    at: int
    bits: int
    inner: int
    many: int = 1 << 16
    outer: int = 0

    @property
    def is_across(self) -> bool:
        """Whether some items have bits in two 16-bit words."""
        return any((self.at + item * self.inner) % 16 + self.bits > 16 for item in range(min(self.many, 16)))


NO_FIELD = Field(0, 0, 0)


@dataclass(frozen=True)
class Small:
    """The small integers of a block's groups: `low`, and the bits above it in `high`. The block's scale is multiplied
    by integer * times + plus."""

    low: Field
    high: Field = NO_FIELD
    times: float = 1.0
    plus: float = 0.0


@dataclass(frozen=True)
class Grid:
    """The codes of a block by indices into a table of formats/grids.py, whose entries are `each` numbers.

    low, high: the lower and upper bits of an index. signs: a field for 8 numbers. Of 8 bits, number i is negative where
    bit i is set; of 7 bits, too, and the eighth makes the count of set bits even; of 1 bit, set, 1 is subtracted from
    all 8 codes, else 1 is added.
    """

    name: str
    each: int
    low: Field
    high: Field
    signs: Field

    @property
    def lows(self) -> Field:
        """The lower bits of the indices of 8 numbers each, which have no gap between them."""
        return self._of_eight(self.low)

    @property
    def highs(self) -> Field:
        """Likewise the upper bits."""
        return self._of_eight(self.high)

    def _of_eight(self, field: Field) -> Field:
        count = 8 // self.each
        return field if count == 1 else replace(field, bits=count * field.bits, inner=count * field.inner)


@dataclass(frozen=True)
class Tiling:
    """The tiling of a GPU's program, chosen so that no register spills. words: words of an output's codes at a time.
    stages: of the pipeline; all but one are being loaded."""

    outputs: int = 64
    words: int = 32
    warps: int = 4
    stages: int = 3

    def blocks(self, encoding: Encoding) -> int:
        """The number of blocks at a time."""
        return self.words // encoding.words


@dataclass(frozen=True)
class Encoding:
    """The encoding of a matrix' rows in a quantised checkpoint: blocks of `numbers` numbers, of `nbytes` bytes each.

    codes: all bits of the codes, or the lowest ones. high: the bits above them, if there are some. code: what a code
    is: "integer", from which `centre` is subtracted; "signed", an int8; "e4m3"; the table of BOOKS; or that of `grid`.
    scale: the dtype of a block's scale, at byte `scale_at`; "F16/4": F16 of four bits each, the highest of four 16-bit
    words from there on. steps: how a group of `group` numbers has its step: "one", the scale; "least", too, and a least
    value behind it is added; "k", as in Q4_K; "bytes", the scale times an int8 for each group, in front of it; "small",
    the scale times an integer of `small`; "zero", the scale, and a zero behind it is subtracted from codes; "times" and
    "over", an e4m3 number for each group, times the row's own scale, or divided by it. least: the integers whose
    products with the scale behind the block's are subtracted. tail: bytes behind a row's blocks, of the row's own
    scale, F32. tiling: of products on a GPU. expert_tiling: of products with experts, in tiles of 16 rows.
    """

    name: str
    numbers: int
    nbytes: int
    codes: Plane = NO_PLANE
    high: Plane = NO_PLANE
    code: str = "integer"
    grid: Grid | None = None
    centre: int = 0
    scale: str = "F16"
    scale_at: int = 0
    steps: str = "one"
    small: Small | None = None
    least: Small | None = None
    group: int = 32
    tail: int = 0
    tiling: Tiling = Tiling()
    expert_tiling: Tiling = Tiling(outputs=32)
    fixed_tiling: Tiling = Tiling(outputs=32, warps=8)

    def __hash__(self) -> int:
        return hash(self.name)  # quick, since a launch finds its compiled program by it

    @property
    def kind(self) -> str:
        """The name without the numbers of a group of this program's blocks."""
        return self.name.partition("/")[0]

    @property
    def is_rounded(self) -> bool:
        """Whether numbers are rounded to the scale's dtype: those of this program's blocks."""
        return self.name != self.kind

    @property
    def has_integers(self) -> bool:
        """Whether numbers are integers times steps, so that there are products in fixed point: those of GGUF's kinds,
        NVFP4 among them."""
        return not self.is_rounded

    @property
    def number(self) -> int:
        """The number of the kind in native/stored_forms.h."""
        return KINDS.index(self.kind) + 1

    @property
    def bits(self) -> float:
        """Bits per number, without the scale of a row."""
        return 8 * self.nbytes / self.numbers

    def row_bytes(self, inputs: int) -> int:
        """Bytes of a row of `inputs` numbers, a multiple of `numbers`."""
        return inputs // self.numbers * self.nbytes + self.tail

    def inputs(self, row_bytes: int) -> int:
        """The numbers of a row of so many bytes."""
        return (row_bytes - self.tail) // self.nbytes * self.numbers

    # A GPU reads codes in words of 4 bytes, and of each byte one part after the other: the lower half, then the upper.

    @property
    def looked_up(self) -> bool:
        """Whether a GPU looks codes up in a table: a word has 8 codes of a byte each, in two parts."""
        return self.code == "iq4" or self.grid is not None

    @property
    def width(self) -> int:
        """The bits of a code, without those in a grid."""
        return self.codes.bits + self.high.bits

    @property
    def centre_taken(self) -> int:
        """The number that is subtracted from codes before they are multiplied, as `centre` in
        native/stored_forms.h."""
        if self.codes.bits < 4:
            return self.centre
        return 1 << (self.width - 1) if self.code == "integer" else 0

    @property
    def fours(self) -> Field:
        """The codes of 4 numbers each that lie in their order in a byte. A GPU makes words of them, a byte a code."""
        return Field(8 * self.codes.at, 4 * self.codes.bits, 4 * self.codes.bits) if self.codes.run == 1 else NO_FIELD

    @property
    def _read(self) -> Plane:
        """The plane that has all parts of a byte: of codes in two planes of which one has half the bits, that one."""
        if self.grid:
            return Plane(0, 4, 4)
        if self.fours.bits:
            return Plane(0, 8, self.numbers)
        return self.high if self.in_halves else self.codes

    @property
    def in_halves(self) -> bool:
        """Whether a word of a block's upper bits belongs to two words of its lower ones, 32 bytes apart."""
        return self.high.bits * 2 == self.codes.bits > 0

    @property
    def parts(self) -> int:
        """Numbers of a byte."""
        return 8 // self._read.bits

    @property
    def words(self) -> int:
        """Words of a block."""
        return self.numbers // (4 * self.parts)

    @property
    def run(self) -> int:
        """Words of a run: the numbers of the first parts of all its bytes come first, then of the second parts."""
        return self._read.run // 4

    @property
    def units(self) -> int:
        """The parts of a block whose words have steps of their own."""
        return self.words // min(max(self.run, self.group // (4 * self.parts)), self.group // 4)


def _own(kind: str, group: int) -> Encoding:
    """This program's blocks: the numbers of the first half of a block of 4 bits are in lower halves."""
    code, _, scale = kind.partition("_")
    bits, is_float = 4 if code == "INT4" else 8, code == "FP8"
    return Encoding(
        f"{kind}/{group}", group, GROUP_HEAD + group * bits // 8, Plane(GROUP_HEAD, bits, group * bits // 8),
        code="e4m3" if is_float else "integer", scale=scale, steps="one" if is_float else "zero", group=group,
        tiling=Tiling(outputs=128, warps=8) if bits == 8 else Tiling(),
        expert_tiling=_FEW_STAGES,
    )  # fmt: skip


def _k(name: str, nbytes: int, codes: Plane, high: Plane = NO_PLANE, tiling: Tiling = Tiling()) -> Encoding:
    """A block of 256 with six bits each for the steps and the least values of its groups."""
    steps = Small(Field(32, 4, 8, 4, 64), Field(36, 2, 8, 4, 2))
    least = Small(Field(64, 4, 8, 4, 36), Field(68, 2, 8, 4, 2))
    return Encoding(
        name, 256, nbytes, codes, high, steps="k", small=steps, least=least, tiling=tiling,
        fixed_tiling=_FIXED,
    )  # fmt: skip


def _of_grid(
    name: str, nbytes: int, each: int, low: Field, high: Field, signs: Field, small: Small, group: int, **scale: Any
) -> Encoding:
    """A block of 256 whose codes are in a grid."""
    code = name.lower() if name.startswith(("IQ2", "IQ3")) else "iq1"
    return Encoding(
        name, 256, nbytes, code=code, grid=Grid(code, each, low, high, signs), steps="small", small=small, group=group,
        tiling=_GRID, expert_tiling=_FEW_STAGES, fixed_tiling=_FEW_STAGES, **scale,
    )  # fmt: skip


_WIDE, _WIDE_EXPERT = Tiling(warps=8), Tiling(outputs=32, warps=8)
_GRID, _FEW_STAGES = Tiling(warps=8, stages=2), Tiling(outputs=32, warps=8, stages=2)
_FIXED = Tiling(outputs=32)
_SHORT, _SHORT_EXPERT = Tiling(words=16, stages=2), Tiling(words=16, warps=8, stages=2)
_GGUF = (  # by llama.cpp's names
    Encoding("Q4_0", 32, 18, Plane(2, 4, 16), centre=8),
    Encoding("Q4_1", 32, 20, Plane(4, 4, 16), steps="least", fixed_tiling=_FIXED),
    Encoding("Q5_0", 32, 22, Plane(6, 4, 16), Plane(2, 1, 1), centre=16, tiling=_WIDE),
    Encoding("Q5_1", 32, 24, Plane(8, 4, 16), Plane(4, 1, 1), steps="least", tiling=_WIDE, fixed_tiling=_FIXED),
    Encoding("Q8_0", 32, 34, Plane(2, 8, 32), code="signed", fixed_tiling=_FEW_STAGES),
    Encoding("MXFP4", 32, 17, Plane(1, 4, 16), code="e2m1", scale="E8M0", tiling=_WIDE),
    Encoding("IQ4_NL", 32, 18, Plane(2, 4, 16), code="iq4", tiling=_WIDE, expert_tiling=_WIDE_EXPERT),
    _k("Q4_K", 144, Plane(16, 4, 32)),
    _k("Q5_K", 176, Plane(48, 4, 32), Plane(16, 1, 32), tiling=_WIDE),
    Encoding(
        "Q6_K", 256, 210, Plane(0, 4, 64), Plane(128, 2, 32), centre=32, scale_at=208, steps="bytes", group=16,
        tiling=_SHORT, expert_tiling=_SHORT_EXPERT,  # three stages were slower
        fixed_tiling=_FEW_STAGES,
    ),
    Encoding(
        "IQ4_XS", 256, 136, Plane(8, 4, 16), code="iq4", steps="small",
        small=Small(Field(32, 4, 4), Field(16, 2, 2), plus=-32), tiling=_WIDE, fixed_tiling=_FIXED,
    ),
    Encoding(
        "Q3_K", 256, 110, Plane(32, 2, 32), Plane(0, 1, 32), centre=4, scale_at=108, steps="small", group=16,
        small=Small(Field(8 * 96, 4, 8, 8, 4), Field(8 * 104, 2, 8, 4, 2), plus=-32),
        tiling=_SHORT, expert_tiling=Tiling(outputs=32, words=16, warps=8),
    ),
    Encoding(
        "Q2_K", 256, 84, Plane(16, 2, 32), scale_at=80, steps="small", group=16, small=Small(Field(0, 4, 8)),
        least=Small(Field(4, 4, 8)), tiling=_SHORT, expert_tiling=_SHORT_EXPERT,
    ),
    _of_grid(
        "IQ3_S", 110, 4, Field(16, 8, 8), Field(8 * 66, 1, 1), Field(8 * 74, 8, 8),
        Small(Field(8 * 106, 4, 4), times=2, plus=1), 32,
    ),
    _of_grid(
        "IQ3_XXS", 98, 4, Field(16, 8, 8), NO_FIELD, Field(8 * 66, 7, 7, 4, 32),
        Small(Field(8 * 66 + 28, 4, 32), times=0.5, plus=0.25), 32,
    ),
    _of_grid(
        "IQ2_S", 82, 8, Field(16, 8, 8), Field(8 * 66, 2, 2), Field(8 * 34, 8, 8),
        Small(Field(8 * 74, 4, 4), times=0.25, plus=0.125), 16,
    ),
    _of_grid(
        "IQ2_XS", 74, 8, Field(16, 8, 16), Field(24, 1, 16), Field(25, 7, 16),
        Small(Field(8 * 66, 4, 4), times=0.25, plus=0.125), 16,
    ),
    _of_grid(
        "IQ2_XXS", 66, 8, Field(16, 8, 8, 4, 64), NO_FIELD, Field(48, 7, 7, 4, 64),
        Small(Field(76, 4, 64), times=0.25, plus=0.125), 32,
    ),
    _of_grid(
        "IQ1_S", 50, 8, Field(16, 8, 8), Field(8 * 34, 3, 3, 4, 16), Field(8 * 34 + 15, 1, 0, 4, 16),
        Small(Field(8 * 34 + 12, 3, 16), times=0.25, plus=0.125), 32,
    ),
    _of_grid(
        "IQ1_M", 56, 8, Field(0, 8, 8), Field(8 * 32, 3, 4), Field(8 * 32 + 3, 1, 4),
        Small(Field(8 * 48, 3, 3, 4, 16), times=0.25, plus=0.125), 16, scale="F16/4", scale_at=48,
    ),
    Encoding("Q2_0", 64, 18, Plane(2, 2, 1), centre=1, group=64),
    Encoding("Q1_0", 128, 18, Plane(2, 1, 1), code="sign", group=128),
    Encoding(
        "TQ2_0", 256, 66, Plane(0, 2, 32), centre=1, scale_at=64, group=256,
        tiling=_SHORT, expert_tiling=_SHORT_EXPERT,
    ),
    Encoding(
        "NVFP4", 64, 36, Plane(4, 4, 8), code="e2m1", scale="E4M3", steps="times", group=16, tail=4,
        tiling=_WIDE, expert_tiling=_WIDE_EXPERT, fixed_tiling=_FIXED,
    ),
)  # fmt: skip
# compressed-tensors' NVFP4, whose scale of a row divides; in the same bytes.
_FOLDERS = (replace(_GGUF[-1], name="NVFP4_INV", steps="over"),)
_OWN_KINDS = ("INT4_F16", "INT4_BF16", "INT8_F16", "INT8_BF16", "FP8_F32", "FP8_F16", "FP8_BF16")

ENCODINGS = {
    each.name: each for each in (*_GGUF, *_FOLDERS, *(_own(kind, group) for kind in _OWN_KINDS for group in GROUPS))
}
KINDS = tuple(dict.fromkeys(each.kind for each in ENCODINGS.values()))  # numbered from 1
