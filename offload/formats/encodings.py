"""The table of encodings in which checkpoints store matrices: blocks of numbers, GGUF's and this program's own.

A block has planes of codes and a scale, and its numbers are in groups that share a step. A number is made of its code
and its step; `Encoding.code` and `Encoding.steps` say how. native/stored_forms.h has the same table. Arithmetic without
torch.
"""

from __future__ import annotations

from dataclasses import dataclass

GROUPS = (32, 64, 128)  # numbers per scale in this program's blocks, for safetensors checkpoints
GROUP_HEAD = 4  # bytes before a block's numbers: scale and zero, 2 each, or a scale of 4
BOOKS = {  # numbers by code
    "e2m1": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),  # doubled
    "iq4": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
}


@dataclass(frozen=True)
class Plane:
    """A plane of bits of a block's codes: `bits` of each number, from byte `at` on. A run of `run` bytes has the bits
    of its first `run` numbers in the lowest places, then of the next ones above them."""

    at: int
    bits: int
    run: int


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

    codes: all bits of the codes, or the lowest 4. high: the bits above them, if there are some. code: what a code is:
    "integer", from which `centre` is subtracted; "signed", an int8; "e4m3"; or the table of BOOKS. scale: the dtype of
    a block's scale, at byte `scale_at`. steps: how a group of `group` numbers has its step: "one", the scale; "least",
    too, and a least value behind it is added; "k", as in Q4_K; "bytes", the scale times an int8 for each group, in
    front of it; "zero", the scale, and a zero behind it is subtracted from codes. tiling: of products on a GPU.
    expert_tiling: of products with experts, in tiles of 16 rows.
    """

    name: str
    numbers: int
    nbytes: int
    codes: Plane
    high: Plane = Plane(0, 0, 0)
    code: str = "integer"
    centre: int = 0
    scale: str = "F16"
    scale_at: int = 0
    steps: str = "one"
    group: int = 32
    tiling: Tiling = Tiling()
    expert_tiling: Tiling = Tiling(outputs=32)

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
    def number(self) -> int:
        """The number of the kind in native/stored_forms.h."""
        return KINDS.index(self.kind) + 1

    @property
    def bits(self) -> float:
        """Bits per number."""
        return 8 * self.nbytes / self.numbers

    def row_bytes(self, inputs: int) -> int:
        """Bytes of a row of `inputs` numbers, a multiple of `numbers`."""
        return inputs // self.numbers * self.nbytes

    # A GPU reads codes in words of 4 bytes, and of each byte one part after the other: the lower half, then the upper.

    @property
    def _read(self) -> Plane:
        """The plane that has all parts of a byte: of codes of 6 bits the upper one, of 2 bits."""
        return self.high if self.high.bits == 2 else self.codes

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
        return self.words // min(self.run, self.group // 4)


def _own(kind: str, group: int) -> Encoding:
    """This program's blocks: the numbers of the first half of a block of 4 bits are in lower halves."""
    code, _, scale = kind.partition("_")
    bits, is_float = 4 if code == "INT4" else 8, code == "FP8"
    return Encoding(
        f"{kind}/{group}", group, GROUP_HEAD + group * bits // 8, Plane(GROUP_HEAD, bits, group * bits // 8),
        code="e4m3" if is_float else "integer", scale=scale, steps="one" if is_float else "zero", group=group,
        tiling=Tiling(outputs=128, warps=8) if bits == 8 else Tiling(),
        expert_tiling=Tiling() if bits == 8 else Tiling(outputs=32),
    )  # fmt: skip


_WIDE = Tiling(warps=8)
_GGUF = (  # by llama.cpp's names
    Encoding("Q4_0", 32, 18, Plane(2, 4, 16), centre=8),
    Encoding("Q4_1", 32, 20, Plane(4, 4, 16), steps="least"),
    Encoding("Q5_0", 32, 22, Plane(6, 4, 16), Plane(2, 1, 1), centre=16, tiling=_WIDE),
    Encoding("Q5_1", 32, 24, Plane(8, 4, 16), Plane(4, 1, 1), steps="least", tiling=_WIDE),
    Encoding("Q8_0", 32, 34, Plane(2, 8, 32), code="signed"),
    Encoding("MXFP4", 32, 17, Plane(1, 4, 16), code="e2m1", scale="E8M0", tiling=_WIDE),
    Encoding("IQ4_NL", 32, 18, Plane(2, 4, 16), code="iq4", tiling=_WIDE),
    Encoding("Q4_K", 256, 144, Plane(16, 4, 32), steps="k"),
    Encoding("Q5_K", 256, 176, Plane(48, 4, 32), Plane(16, 1, 32), steps="k", tiling=_WIDE),
    Encoding(
        "Q6_K", 256, 210, Plane(0, 4, 64), Plane(128, 2, 32), centre=32, scale_at=208, steps="bytes", group=16,
        tiling=Tiling(words=16, stages=2), expert_tiling=Tiling(words=16, warps=8, stages=2),  # three were slower
    ),
)  # fmt: skip
_OWN_KINDS = ("INT4_F16", "INT4_BF16", "INT8_F16", "INT8_BF16", "FP8_F32", "FP8_F16", "FP8_BF16")

ENCODINGS = {each.name: each for each in (*_GGUF, *(_own(kind, group) for kind in _OWN_KINDS for group in GROUPS))}
KINDS = tuple(dict.fromkeys(each.kind for each in ENCODINGS.values()))  # numbered from 1
