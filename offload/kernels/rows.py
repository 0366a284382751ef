"""Blocks of rows: how many rows may run together so that each gets the bits it would get in any other block.

A matrix product may round differently for different numbers of rows. Which numbers agree, and which are faster than
smaller ones in their place, are properties of the machine's libraries: both are tried once, with the shapes at hand,
before the first pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from time import perf_counter

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from offload.kernels.attention import attend, fold, merge

Product = tuple[int, int, bool]
_STARTS = (0, 3)  # rows of a trial from which blocks are compared

Run = Callable[[Tensor], list[Tensor]]  # rows in, what they give out, row by row


@dataclass(frozen=True)
class Blocks:
    """sizes: numbers of rows, ascending, whose blocks give a row the same bits; a pass is cut into such blocks only."""

    sizes: tuple[int, ...]

    def cut(self, num_rows: int) -> list[int]:
        """Sizes of the blocks that hold `num_rows` rows: whole ones, then the smallest that takes what is left.

        They hold as many rows as asked for, or a few more, which are padding; a padded number is cut the same way.
        """
        count, rest = divmod(num_rows, self.sizes[-1])
        last = [next(size for size in self.sizes if size >= rest)] if rest else []
        return [self.sizes[-1]] * count + last

    def padded(self, num_rows: int) -> int:
        return sum(self.cut(num_rows))


@dataclass(frozen=True)
class Shapes:
    """What a pass multiplies. products: (outputs, inputs, has a bias) of each linear operator of a layer, head: of the
    logits; a tile of the cache is [2, num_pages, num_kv_heads, page_tokens, head_dim]."""

    products: tuple[Product, ...]
    head: Product
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_pages: int
    page_tokens: int


@cache
def equal_blocks(shapes: Shapes, candidates: tuple[int, ...], dtype: torch.dtype, threads: int) -> Blocks:
    """The most of `candidates`, ascending, that round alike on this machine's processor with `threads` threads; where
    several are as many, those with the largest.

    The numbers are made so that exact sums are zero and what is left is rounding alone: another order of summation
    shows in nearly every output. Temporary memory: the largest operator and one tile.
    """
    most: tuple[int, ...] = ()
    while len(candidates) > len(most):
        kept = _equal_to_last(shapes, candidates, dtype)
        most = max(most, kept, key=len)
        candidates = tuple(size for size in candidates if size not in kept)
    return Blocks(most)


@cache
def fast_blocks(shapes: Shapes, blocks: Blocks, dtype: torch.dtype, threads: int) -> Blocks:
    """Those of `blocks` that take less time than the smaller ones which would hold as many rows, and the smallest.

    Tried on one layer over one tile with `threads` threads. Temporary memory: the layer's weights and the tile.
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
    """Of each size the least that it takes. In turns, the largest first: a machine has pauses, and memory that is new
    to the process is slow."""
    taken = dict.fromkeys(sizes, inf)
    for size in reversed(sizes * times):
        start = perf_counter()
        run(size)
        taken[size] = min(taken[size], perf_counter() - start)
    return taken


def _equal_to_last(shapes: Shapes, sizes: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """Those of `sizes`, ascending, that round like the largest in all that a pass multiplies."""
    generator = torch.Generator().manual_seed(0)
    for scores in (True, False):
        sizes = _equal_in_attention(shapes, sizes, dtype, generator, scores=scores)
    for product in dict.fromkeys((*shapes.products, shapes.head)):
        if len(sizes) > 1:
            sizes = _equal_in_product(product, sizes, dtype, generator)
    return sizes


def _equal_in_product(
    product: Product, sizes: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> tuple[int, ...]:
    outputs, inputs, has_bias = product
    x, some = _cancelling(sizes[-1] + max(_STARTS), 61, inputs, dtype, generator)
    weight = some.repeat(-(-outputs // len(some)), 1)[:outputs]
    bias = torch.zeros(outputs, dtype=dtype) if has_bias else None

    def run(part: Tensor) -> list[Tensor]:
        return [rms_norm(part, (inputs,)), linear(part, weight, bias)]

    return _alike(run, x, sizes)


def _equal_in_attention(
    shapes: Shapes, sizes: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, *, scores: bool
) -> tuple[int, ...]:
    """scores: rounding shows in the products of queries and keys; otherwise in those of weights and values."""
    count, dim = sizes[-1] + max(_STARTS), shapes.head_dim
    tokens = shapes.num_pages * shapes.num_kv_heads * shapes.page_tokens
    queries, keys = _cancelling(count * shapes.num_heads, tokens, dim, dtype, generator)
    # Scores of about 1: rounding noise of sums whose terms are this large.
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

    return _alike(run, queries.view(count, shapes.num_heads, dim), sizes)


def _alike(run: Run, x: Tensor, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes whose blocks give the rows of x the bits that a block of the last size gives, wherever it starts."""
    largest = sizes[-1]  # kept in any case: a machine that errs once must not end here
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
    """x [rows, inner] and y [columns, inner] with x · y = 0 exactly, from terms of many magnitudes."""
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
