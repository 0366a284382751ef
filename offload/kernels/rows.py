"""Blocks of rows: how many rows may run together so that each gets the bits it would get in any other block.

A matrix product may round differently for different numbers of rows. Which numbers agree is a property of the machine's
libraries: it is tried once, with the shapes at hand, before the first pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from offload.kernels.attention import attend, fold, merge

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
    """What a pass multiplies. products: (outputs, inputs, has a bias) of each linear operator; a tile of the cache is
    [2, num_pages, num_kv_heads, page_tokens, head_dim]."""

    products: tuple[tuple[int, int, bool], ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_pages: int
    page_tokens: int


@cache
def equal_blocks(shapes: Shapes, rows: int, candidates: tuple[int, ...], dtype: torch.dtype, threads: int) -> Blocks:
    """`rows` and those of `candidates` that round like it on this machine's processor with `threads` threads.

    The numbers are made so that exact sums are zero and what is left is rounding alone: another order of summation
    shows in nearly every output. Temporary memory: the largest operator and one tile.
    """
    generator = torch.Generator().manual_seed(0)
    kept = {size for size in candidates if size != rows}
    for product in dict.fromkeys(shapes.products):
        kept &= _equal_in_product(product, rows, kept, dtype, generator)
    for scores in (True, False):
        kept &= _equal_in_attention(shapes, rows, kept, dtype, generator, scores=scores)
    return Blocks(tuple(sorted({rows, *kept})))


def _equal_in_product(
    product: tuple[int, int, bool], rows: int, candidates: set[int], dtype: torch.dtype, generator: torch.Generator
) -> set[int]:
    outputs, inputs, has_bias = product
    x, some = _cancelling(max([*candidates, rows]) + rows, 61, inputs, dtype, generator)
    weight = some.repeat(-(-outputs // len(some)), 1)[:outputs]
    bias = torch.zeros(outputs, dtype=dtype) if has_bias else None

    def run(part: Tensor) -> list[Tensor]:
        return [rms_norm(part, (inputs,)), linear(part, weight, bias)]

    return {size for size in candidates if _alike(run, x, rows, size)}


def _equal_in_attention(
    shapes: Shapes, rows: int, candidates: set[int], dtype: torch.dtype, generator: torch.Generator, *, scores: bool
) -> set[int]:
    """scores: rounding shows in the products of queries and keys; otherwise in those of weights and values."""
    count, dim = max([*candidates, rows]) + rows, shapes.head_dim
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

    x = queries.view(count, shapes.num_heads, dim)
    return {size for size in candidates if _alike(run, x, rows, size)}


def _alike(run: Run, x: Tensor, rows: int, size: int) -> bool:
    """Blocks of `size` rows, first and a little further on, against blocks of `rows`."""
    return all(
        torch.equal(one, other)
        for start in (0, min(3, rows - 1))
        for one, other in zip(run(x[start : start + size]), _by_block(run, x[start:], rows, size), strict=True)
    )


def _by_block(run: Run, x: Tensor, rows: int, size: int) -> list[Tensor]:
    blocks = [run(x[at : at + rows]) for at in range(0, size, rows)]
    return [torch.cat(parts)[:size] for parts in zip(*blocks, strict=True)]


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
