"""What every encoding of a block of numbers keeps, whatever it is: the CPU's kernels write what torch's operators find,
bit for bit, on any number of threads; what is lossless comes back bit for bit, or is not encoded; and nothing is read
behind the numbers, or behind what they were encoded to.

A new encoding is one more entry of ENCODINGS. The GPU's programs are tried on the same content in the files
*_interpreted.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol, runtime_checkable

import pytest
import torch
from torch import Tensor

from kit.oracles import (
    pack_with_torch,
    restore_kv_with_torch,
    restore_with_torch,
    split_off_kv_with_torch,
    split_off_with_torch,
)
from kit.processor import before_a_guard, built, on_this_machine, threads
from offload.formats import quantised, quantised_kv, residuals
from offload.formats.layout import PageShape
from offload.formats.packed import pack, unpack, unpack_with_torch
from offload.formats.quantised import Codes
from offload.formats.quantised_kv import KVCodes, Order
from offload.formats.residuals import KEYS, VALUES, Residual
from offload.native.interface import Library
from test_codes import awkward
from test_kv_codes import held
from test_kv_residuals import DIMS, Page, sorts
from test_packed import BLOCKS
from test_residuals import MATRICES

Encoded = Tensor | None  # uint8 [bytes]; None: the numbers stay as they are


class Encoding(Protocol):
    def blocks(self) -> Iterator[tuple[str, Tensor]]:
        """Numbers of all sorts, a block each, with their names."""
        ...

    def encode(self, numbers: Tensor, kernels: Library) -> Encoded: ...

    def encode_with_torch(self, numbers: Tensor) -> Encoded: ...


@runtime_checkable
class Lossless(Encoding, Protocol):
    """The same numbers come back."""

    def decode(self, content: Tensor, numbers: Tensor, kernels: Library) -> Tensor:
        """In the form of `numbers`, which are what was encoded."""
        ...

    def decode_with_torch(self, content: Tensor, numbers: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class PackedBlocks:
    """12 bits without loss."""

    name: str

    def blocks(self) -> Iterator[tuple[str, Tensor]]:
        numbers, packing = BLOCKS[self.name]
        for number, block in enumerate(numbers.view(-1, packing.numbers)):
            yield f"{self.name} {number}", block

    def encode(self, numbers: Tensor, kernels: Library) -> Encoded:
        packing, content = BLOCKS[self.name][1], torch.zeros_like(numbers).view(torch.uint8)
        at, to = torch.tensor([numbers.data_ptr()]), torch.tensor([content.data_ptr()])
        return content[: packing.nbytes] if pack(at, packing, kernels, to=to) > 0 else None

    def encode_with_torch(self, numbers: Tensor) -> Encoded:
        return pack_with_torch(numbers, BLOCKS[self.name][1])

    def decode(self, content: Tensor, numbers: Tensor, kernels: Library) -> Tensor:
        out, packing = torch.full_like(numbers, torch.nan), BLOCKS[self.name][1]
        part = content.data_ptr(), out.data_ptr(), 0, packing.num_groups, 1
        unpack(torch.tensor([part]), packing, kernels)
        return out

    def decode_with_torch(self, content: Tensor, numbers: Tensor) -> Tensor:
        return unpack_with_torch(content, BLOCKS[self.name][1])


@dataclass(frozen=True)
class QuantisedWeights:
    """The kernels multiply with them: test_codes.py."""

    bits: int
    dtype: torch.dtype

    def blocks(self) -> Iterator[tuple[str, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        yield "awkward", awkward(self.dtype)
        yield "no whole tile", torch.randn(37, 5 * quantised.GROUP, generator=generator).to(self.dtype)
        yield "large", (torch.randn(1100, quantised.GROUP, generator=generator) / 30).to(self.dtype)

    def encode(self, numbers: Tensor, kernels: Library) -> Encoded:
        return self._filled(numbers, partial(quantised.encode, kernels=kernels))

    def encode_with_torch(self, numbers: Tensor) -> Encoded:
        return self._filled(numbers, quantised.encode_with_torch)

    def _filled(self, numbers: Tensor, encode: Callable[[Tensor, Codes], None]) -> Tensor:
        codes = Codes(torch.full(Codes.shape_of_blocks(numbers.shape, self.bits), 0xA5, dtype=torch.uint8))
        encode(numbers, codes)
        return codes.blocks.flatten()


@dataclass(frozen=True)
class QuantisedRows:
    """Keys and values, [L, 2, H_kv, tokens, D]. The kernels attend to them: test_kv_codes.py."""

    dim: int
    dtype: torch.dtype

    def blocks(self) -> Iterator[tuple[str, Tensor]]:
        rows = held(2, 3, 3 * quantised_kv.GROUP, self.dim, self.dtype)
        rows[0, :, 1, :, 3] = 0.25
        rows[1, 1, 0, 5] = -2.0
        rows[1, 0, 2, 7, 4] = torch.finfo(self.dtype).max
        yield "as cached, some equal and one large", rows

    def encode(self, numbers: Tensor, kernels: Library) -> Encoded:
        return self._filled(numbers, partial(quantised_kv.encode, kernels=kernels))

    def encode_with_torch(self, numbers: Tensor) -> Encoded:
        return self._filled(numbers, quantised_kv.encode_with_torch)

    def _filled(self, numbers: Tensor, encode: Callable[[Tensor, KVCodes], None]) -> Tensor:
        num_layers, _, num_kv_heads, num_tokens, dim = numbers.shape
        shape = KVCodes.shape_of_blocks(num_layers, num_kv_heads, num_tokens, dim)
        codes = KVCodes(torch.full(shape, 0xA5, dtype=torch.uint8), dim)
        encode(numbers, codes)
        return codes.blocks.flatten()


@dataclass(frozen=True)
class WeightResiduals:
    """9 bits beside codes in 4, 8 beside 6."""

    bits: int

    def blocks(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, weight.contiguous()) for name, weight in MATRICES.items())
        for value in (torch.nan, torch.inf, -torch.inf, 3.3e38):
            weight = torch.randn(32, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
            weight[17, 70], weight[17, 90] = value, -3.3e38
            yield f"with {value}", weight

    def encode(self, numbers: Tensor, kernels: Library) -> Encoded:
        return _with_place(residuals.split_off(numbers, self._codes(numbers), kernels))

    def encode_with_torch(self, numbers: Tensor) -> Encoded:
        return _with_place(split_off_with_torch(numbers, self._codes(numbers)))

    def decode(self, content: Tensor, numbers: Tensor, kernels: Library) -> Tensor:
        out, (place, rest) = torch.full_like(numbers, torch.nan), _place_of(content)
        residuals.restore(rest, place, self._codes(numbers), out, kernels)
        return out

    def decode_with_torch(self, content: Tensor, numbers: Tensor) -> Tensor:
        place, rest = _place_of(content)
        return restore_with_torch(rest, place, self._codes(numbers))

    def _codes(self, numbers: Tensor) -> Codes:
        codes = Codes(torch.zeros(Codes.shape_of_blocks(numbers.shape, self.bits), dtype=torch.uint8))
        quantised.encode_with_torch(numbers, codes)
        return codes


def _with_place(residual: Residual | None) -> Encoded:
    """Where the escapes begin is kept apart from the content: here before it."""
    if residual is None:
        return None
    return torch.cat([torch.tensor([residual.escapes]).view(torch.uint8), residual.content])


def _place_of(content: Tensor) -> tuple[int, Tensor]:
    return int(content[:8].clone().view(torch.long)), content[8:]


@dataclass(frozen=True)
class PageResiduals:
    """Keys, or values, [H_kv, S, D], 9 bits beside codes in 4."""

    dim: int
    order: Order
    kind: int

    def blocks(self) -> Iterator[tuple[str, Tensor]]:
        for name, kv in sorts(self.dim):
            yield name, kv[self.kind]
        for value in (torch.nan, torch.inf, -torch.inf, 3.38e38):
            kv = dict(sorts(self.dim))["normal"][self.kind].clone()
            kv[1, 40, 3], kv[1, 37, 3], kv[1, 40, 5] = value, -3.38e38, -3.38e38
            yield f"with {value}", kv

    def encode(self, numbers: Tensor, kernels: Library) -> Encoded:
        split, sizes = self._page(numbers).split(kernels)
        if not sizes[self.kind]:
            assert split[self.kind].isnan().all()
            return None
        return split[self.kind].flatten().view(torch.uint8)[: sizes[self.kind]]

    def encode_with_torch(self, numbers: Tensor) -> Encoded:
        return split_off_kv_with_torch(numbers, self._page(numbers).codes, self.kind)

    def decode(self, content: Tensor, numbers: Tensor, kernels: Library) -> Tensor:
        return self._page(numbers).restored(content, self.kind, kernels).view(numbers.shape)

    def decode_with_torch(self, content: Tensor, numbers: Tensor) -> Tensor:
        return restore_kv_with_torch(content, self._page(numbers).codes, self.kind)

    def _page(self, numbers: Tensor) -> Page:
        assert PageShape(*numbers.shape).numbers == numbers.numel()
        return Page.of(torch.stack([numbers, numbers]), self.order)


ENCODINGS: Mapping[str, Encoding] = {
    **{f"packed, {name}": PackedBlocks(name) for name in BLOCKS},
    **{
        f"weights in {bits} bits, {str(dtype)[6:]}": QuantisedWeights(bits, dtype)
        for bits in (4, 6)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    },
    **{
        f"cached rows in 4 bits, heads of {dim}, {str(dtype)[6:]}": QuantisedRows(dim, dtype)
        for dim in (8, 16, 40, 64, 80, 128, 256)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    },
    **{f"weights beside {bits} bits": WeightResiduals(bits) for bits in (4, 6)},
    **{
        f"{('keys', 'values')[kind]} beside 4 bits, heads of {dim}, {order}": PageResiduals(dim, order, kind)
        for dim, order in DIMS
        for kind in (KEYS, VALUES)
    },
}


# Of cached rows all sizes of heads in one dtype, and two of them in the others.
DEEP = {
    name for name in ENCODINGS if name.startswith("cached") and not ("bf" in name or " 40," in name or " 128," in name)
}
EVERY = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.deep] if name in DEEP else []) for name in ENCODINGS]
)


@pytest.fixture(params=on_this_machine() or ["none"])
def kernels(request: pytest.FixtureRequest) -> Library:
    if request.param == "none":
        pytest.skip("there are no kernels for this machine")
    return built(request.param)


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Bit for bit."""
    return torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))


@cache
def by_torch(name: str) -> list[tuple[str, Tensor, Encoded]]:
    """Each block of an encoding: its name, its numbers, and its content as torch's operators write it."""
    return [(sort, numbers, ENCODINGS[name].encode_with_torch(numbers)) for sort, numbers in ENCODINGS[name].blocks()]


@pytest.mark.few(len(ENCODINGS) - len(DEEP))  # each on one of the instruction sets
@EVERY
def test_content_is_the_twins_and_what_is_lossless_comes_back(name: str, kernels: Library) -> None:
    encoding = ENCODINGS[name]
    for sort, numbers, twin in by_torch(name):
        content = encoding.encode(numbers, kernels)
        assert (content is None) == (twin is None), sort
        if content is None or twin is None:
            assert isinstance(encoding, Lossless), sort
            continue
        assert same(content, twin), sort
        if isinstance(encoding, Lossless):
            assert same(encoding.decode(content, numbers, kernels), numbers), sort
            assert same(encoding.decode_with_torch(twin, numbers), numbers), sort


@pytest.mark.few(6)
@EVERY
@pytest.mark.parametrize("number", [1, 3, 5])
def test_threads_change_no_byte(name: str, number: int, kernels: Library) -> None:
    encoding = ENCODINGS[name]
    for sort, numbers, expected in by_torch(name):
        with threads(number):
            content = encoding.encode(numbers, kernels)
            assert (content is None) == (expected is None), sort
            if content is None or expected is None:
                continue
            assert same(content, expected), sort
            if isinstance(encoding, Lossless):
                assert same(encoding.decode(content, numbers, kernels), numbers), sort


@pytest.mark.few(12)
@EVERY
def test_nothing_is_read_behind_what_there_is(name: str, kernels: Library) -> None:
    encoding = ENCODINGS[name]
    for sort, numbers in encoding.blocks():
        with before_a_guard(numbers.contiguous()) as there:
            content = encoding.encode(there, kernels)
            if content is None or not isinstance(encoding, Lossless):
                continue
            with before_a_guard(content) as whole:
                decoded = encoding.decode(whole, there, kernels)
        assert same(decoded, numbers), sort


def test_each_sort_is_there(pytestconfig: pytest.Config) -> None:
    """Of each encoding most blocks are encoded, and of the lossless ones some would not come back and stay."""
    tried = ENCODINGS if pytestconfig.getoption("deep") else ENCODINGS.keys() - DEEP
    stays = {name: [content is None for _, _, content in by_torch(name)] for name in tried}
    for name, found in stays.items():
        assert not all(found) or "scattered" in name, name
    for name in ("packed, about as many as fit", "weights beside 4 bits", "keys beside 4 bits, heads of 40, lanes"):
        assert any(stays[name]), name
