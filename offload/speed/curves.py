"""Curves of a CPU's kernels: the seconds of the parts of a pass by rows, measured once on a machine, or typical.

They are of one dtype and one set of kernels, and of no model: a pass takes the bytes that it reads times the curves
(speed/cpu_pass.py).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, fields
from typing import Annotated

from offload.fields import number
from offload.formats.encodings import ENCODINGS

ROWS = (1, 2, 4, 8, 16, 32, 64)
NEAR_BYTES = 32 * 2**20  # of keys and values that a CPU's caches keep from one pass to the next
FAR_BYTES = 128 * 2**20  # of keys and values: more than a CPU's caches hold

_PASS_SECONDS = 3e-4  # Python of a pass outside its layers, the draw and the check of drafted tokens
_LAYER_SECONDS = 6e-5  # calls of one layer
_CALLS_ROW = 0.05  # of the seconds of calls, for each further row
_VOCABULARY = 1e-9  # seconds of a draw, for each token of the vocabulary
_WEIGHT_ROW = 0.05  # of the seconds of reading the weights, for each further row
_QUERY_ROW = 0.06  # of the seconds of reading the cache, for each further query row
_MASS_SHARE = 0.12
_STORED_BYTES = 1  # a number of a stored matrix takes at least as long to multiply as so many bytes to read
_STORED_ROW = 0.3  # of the seconds of a row with stored matrices, for each further row
_PREFILL_SHARE = 0.2  # of the rate of large products

Seconds = Annotated[float, number(1e-18, 1e6)]  # plausible ones, so that a quotient is finite
Curve = tuple[Seconds, ...]


def at(curve: Curve, rows: float) -> float:
    """The value of a curve, which has one for every row count in ROWS, at `rows`, at least 1: linear between its
    points, proportional beyond the last one."""
    if rows >= ROWS[-1]:
        return curve[-1] * rows / ROWS[-1]
    after = max(bisect_left(ROWS, rows), 1)
    below, above = ROWS[after - 1 : after + 1]
    low, high = curve[after - 1 : after + 1]
    return low + (high - low) * (rows - below) / (above - below)


def in_bits(bits: int) -> str:
    """The name of quantised weights among the forms of `Curves.weights`."""
    return f"{bits} bits"


@dataclass(frozen=True)
class Curves:
    """Seconds of the parts of passes by one set of a CPU's kernels, for every row count in ROWS.

    calls: of a pass of no layers, over little more than its Python. layer: of the calls of one layer. vocabulary: of a
    draw, per token of the vocabulary. weights: per byte of the matrices that rows are multiplied with, by form: "" for
    plain numbers, the name of an encoding, or `in_bits`. cache: per byte of keys and values, by the query rows for each
    KV head, over FAR_BYTES and more of them; near_cache: over NEAR_BYTES and fewer. coded_cache: the same per byte of
    plain numbers where there are 4 bits in place of each; None if there is no kernel. mass_share: the share of
    attention that recording masses adds. product: of a prefill, per number of a matrix and row. pair: per number of a
    query row and token that it attends to. kernels: those that ran; "" for typical curves.
    """

    calls: Curve
    layer: Curve
    vocabulary: Curve
    weights: dict[str, Curve]
    cache: Curve
    near_cache: Curve
    coded_cache: Curve | None
    mass_share: Annotated[float, number(0, 10)]
    product: Seconds
    pair: Seconds
    kernels: str = ""

    def __post_init__(self) -> None:
        own = (value for field in fields(self) if isinstance(value := getattr(self, field.name), tuple))
        if "" not in self.weights or any(len(each) != len(ROWS) for each in (*own, *self.weights.values())):
            raise ValueError(f"a curve has {len(ROWS)} values, and plain weights have one")

    def weights_of(self, form: str) -> Curve:
        """The curve of matrices in `form`. One that was not measured follows from plain numbers: quantised weights take
        their bytes' share, an encoding at least _STORED_BYTES for each number, and more for further rows."""
        if (measured := self.weights.get(form)) is not None:
            return measured
        plain = self.weights[""]
        if form not in ENCODINGS:
            return plain
        share = max(1.0, 8 * _STORED_BYTES / ENCODINGS[form].bits)
        return _growing(share * plain[0], _STORED_ROW)


def typical(read: float, flops: float, *, decodes_as_read: bool = False) -> Curves:
    """Curves of a CPU of which two rates are known: bytes per second that are read through products, and operations per
    second of large products. decodes_as_read: it has threads enough to decode encodings as fast as it reads them."""
    cache, stored = _growing(1 / read, _QUERY_ROW), _growing(1 / read, _STORED_ROW)
    return Curves(
        calls=_growing(_PASS_SECONDS, _CALLS_ROW),
        layer=_growing(_LAYER_SECONDS, _CALLS_ROW),
        vocabulary=_growing(_VOCABULARY, 1.0),
        weights={"": _growing(1 / read, _WEIGHT_ROW)} | (dict.fromkeys(ENCODINGS, stored) if decodes_as_read else {}),
        cache=cache,
        near_cache=cache,
        coded_cache=None,
        mass_share=_MASS_SHARE,
        product=2 / (_PREFILL_SHARE * flops),
        pair=4 / (_PREFILL_SHARE * flops),
    )


def _growing(seconds: float, share: float) -> Curve:
    """A curve that starts at `seconds` and grows by `share` of them for each further row."""
    return tuple(seconds * (1.0 + share * (rows - 1)) for rows in ROWS)
