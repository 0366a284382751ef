"""Blocks of rows: the numbers of rows that may run together so that a row's bits do not depend on its block.

A matrix product may round differently for different numbers of rows, and for different places in a block. The machine's
libraries decide which numbers round alike, and which are faster than several smaller blocks. Both are found by a trial
with the model's shapes, once, before the first pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from time import perf_counter

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from offload.kernels.attention import attend, fold, merge

MAX_ROWS = 64  # of a pass that may run as a graph
Product = tuple[int, int, bool]
_STARTS = (0, 3)  # first rows of the blocks that a trial compares

Run = Callable[[Tensor], list[Tensor]]  # rows in, outputs out, with rows as the first dimension


def power_of_two(num_rows: int, most: int = MAX_ROWS) -> int:
    """The next one, so that there are few numbers of rows; `num_rows` itself where that would be more than `most`."""
    padded = 1 << (num_rows - 1).bit_length() if num_rows else 0
    return padded if padded <= most else num_rows


@dataclass(frozen=True)
class Blocks:
    """sizes: numbers of rows, ascending, that give a row the same bits. Every pass is cut into blocks of such sizes."""

    sizes: tuple[int, ...]

    def cut(self, num_rows: int) -> list[int]:
        """Sizes of the blocks for `num_rows` rows: the largest as often as possible, then the smallest that is enough.

        They may hold more than `num_rows` rows; the rest is padding. A padded number of rows is cut the same way.
        """
        count, rest = divmod(num_rows, self.sizes[-1])
        last = [next(size for size in self.sizes if size >= rest)] if rest else []
        return [self.sizes[-1]] * count + last

    def padded(self, num_rows: int) -> int:
        return sum(self.cut(num_rows))


@dataclass(frozen=True)
class Shapes:
    """Shapes of a pass's operators. products: (outputs, inputs, has a bias) of each linear operator of a layer; head:
    of the logits. A tile of the cache is [2, num_pages, num_kv_heads, page_tokens, head_dim]; with windows, layers also
    attend page by page."""

    products: tuple[Product, ...]
    head: Product
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_pages: int
    page_tokens: int
    has_windows: bool = False


@cache
def equal_blocks(shapes: Shapes, candidates: tuple[int, ...], dtype: torch.dtype, threads: int) -> Blocks:
    """The largest set of `candidates`, ascending, that round alike on this CPU with `threads` threads, a row at any
    place of its block. Where none does, a row is a block by itself, which has one place.

    Of several sets of that size, the one with the largest number of rows. The trial's inputs make every exact sum zero,
    so outputs are rounding errors only, and another order of summation shows in nearly all of them. Temporary memory:
    the largest operator and one tile.
    """
    candidates, most = _alike_at_any_place(shapes, candidates, dtype), tuple[int, ...]()
    while len(candidates) > len(most):
        kept = _equal_to_last(shapes, candidates, dtype)
        most = max(most, kept, key=len)
        candidates = tuple(size for size in candidates if size not in kept)
    return Blocks(most or (1,))


@cache
def fast_blocks(shapes: Shapes, blocks: Blocks, dtype: torch.dtype, threads: int) -> Blocks:
    """The smallest of `blocks`, and those that take less time than smaller blocks with as many rows together.

    Timed on one layer over one tile with `threads` threads. Temporary memory: the layer's weights and the tile.
    """
    weights = [torch.ones(outputs, inputs, dtype=dtype) for outputs, inputs, _ in shapes.products]
    tile = torch.ones(2, shapes.num_pages, shapes.num_kv_heads, shapes.page_tokens, shapes.head_dim, dtype=dtype)

    def run(size: int) -> None:
        for weight in weights:
            linear(weight.new_ones(size, weight.shape[1]), weight)
        query = fold(tile.new_ones(size, shapes.num_heads, shapes.head_dim), shapes.num_kv_heads)
        attend(query, tile[0], tile[1], None)

    seconds, (smallest, *larger) = _seconds(run, blocks.sizes), blocks.sizes
    kept = [smallest]
    for size in larger:
        if seconds[size] < sum(seconds[part] for part in Blocks(tuple(kept)).cut(size)):
            kept.append(size)
    return Blocks(tuple(kept))


def _seconds(run: Callable[[int], None], sizes: tuple[int, ...], times: int = 5) -> dict[int, float]:
    """The least of `times` seconds of each size. Sizes take turns because a machine has pauses, the largest first
    because newly allocated memory is slow."""
    taken = dict.fromkeys(sizes, inf)
    for size in reversed(sizes * times):
        start = perf_counter()
        run(size)
        taken[size] = min(taken[size], perf_counter() - start)
    return taken


def same_at_every_place(run: Run, rows: Tensor) -> bool:
    """Whether rows have the same bits one place further on in their block and, since so do those of the next place, at
    all of its places."""
    moved = [out.roll(1, 0) for out in run(rows)]
    return all(map(torch.equal, run(rows.roll(1, 0)), moved))


def _alike_at_any_place(shapes: Shapes, sizes: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """Those of `sizes` in whose blocks a row's place changes none of its bits. The largest is tried first, so that one
    wrong result of the machine costs a size that others can stand for."""
    for run, x in _trials(shapes, max(sizes), dtype):
        sizes = tuple(size for size in reversed(sizes) if same_at_every_place(run, x[:size]))[::-1]
    return sizes


def _equal_to_last(shapes: Shapes, sizes: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """Those of `sizes`, ascending, that round like the largest in every product of a pass."""
    for run, x in _trials(shapes, max(sizes), dtype):
        if len(sizes) > 1:
            sizes = _sizes_with_equal_bits(run, x, sizes)
    return sizes


def _trials(shapes: Shapes, num_rows: int, dtype: torch.dtype) -> Iterator[tuple[Run, Tensor]]:
    """The products of a pass and attention, each with rows for blocks of `num_rows` from every start."""
    generator = torch.Generator().manual_seed(0)
    for num_pages in sorted({shapes.num_pages, 1}) if shapes.has_windows else (shapes.num_pages,):
        for scores in (True, False):
            yield _attention(replace(shapes, num_pages=num_pages), num_rows, dtype, generator, scores=scores)
    for product in dict.fromkeys((*shapes.products, shapes.head)):
        yield _product(product, num_rows, dtype, generator)


def _product(product: Product, num_rows: int, dtype: torch.dtype, generator: torch.Generator) -> tuple[Run, Tensor]:
    outputs, inputs, has_bias = product
    x, some = _cancelling(num_rows + max(_STARTS), 61, inputs, dtype, generator)
    weight = some.repeat(-(-outputs // len(some)), 1)[:outputs]
    bias = torch.zeros(outputs, dtype=dtype) if has_bias else None

    def run(part: Tensor) -> list[Tensor]:
        return [rms_norm(part, (inputs,)), linear(part, weight, bias)]

    return run, x


def _attention(
    shapes: Shapes, num_rows: int, dtype: torch.dtype, generator: torch.Generator, *, scores: bool
) -> tuple[Run, Tensor]:
    """scores: expose the rounding of the products of queries and keys; otherwise of those of weights and values."""
    count, dim = num_rows + max(_STARTS), shapes.head_dim
    tokens = shapes.num_pages * shapes.num_kv_heads * shapes.page_tokens
    queries, keys = _cancelling(count * shapes.num_heads, tokens, dim, dtype, generator)
    # Exact scores are zero. Terms this large leave rounding errors of about 1.
    largest = 2.0 ** (10 if dtype != torch.float16 else 4)
    queries, keys = queries * (largest if scores else 0.0), keys * largest
    page = (shapes.num_pages, shapes.num_kv_heads, shapes.page_tokens // 2, dim)
    half = _noise(page, dtype, generator)
    order = torch.randperm(page[2], generator=generator)
    values = torch.cat([half, -half[:, :, order]], 2)
    keys = keys.view(values.shape)

    def run(part: Tensor) -> list[Tensor]:
        folded = fold(part, shapes.num_kv_heads)
        done = merge(attend(folded, keys, values, None), attend(folded, keys.flip(0), values, None))
        by_row = [tensor.unflatten(1, (-1, len(part))).movedim(2, 0) for tensor in (done.out, done.lse)]
        return [tensor.contiguous() for tensor in by_row]

    return run, queries.view(count, shapes.num_heads, dim)


def _sizes_with_equal_bits(run: Run, x: Tensor, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes whose blocks give the rows of x the same bits as a block of the last size, from every start."""
    largest = sizes[-1]  # always kept, so that one wrong result of the machine does not leave no size at all
    for start in _STARTS:
        expected = run(x[start : start + largest])
        sizes = tuple(
            size
            for size in sizes
            if size == largest
            or all(map(torch.equal, run(x[start : start + size]), (rows[:size] for rows in expected)))
        )
    return sizes


def _cancelling(
    rows: int, columns: int, inner: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """x [rows, inner] and y [columns, inner] with exactly x · y = 0, whose terms have many magnitudes."""
    order = torch.randperm(inner // 2, generator=generator)
    x, y = _noise((rows, inner // 2), dtype, generator), _noise((columns, inner // 2), dtype, generator)
    odd = (0, inner % 2)
    return (
        torch.nn.functional.pad(torch.cat([x, x[:, order]], 1), odd),
        torch.nn.functional.pad(torch.cat([y, -y[:, order]], 1), odd),
    )


def _noise(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    powers = torch.randint(-3, 4, tuple(shape), generator=generator)
    return torch.randn(tuple(shape), generator=generator).ldexp(powers).to(dtype)
