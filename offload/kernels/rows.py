"""Blocks of rows: torch's operators run in blocks of a fixed number of rows, so that a row's bits do not depend on the
number of other rows.

A matrix product may round differently for different numbers of rows, and for different places in a block. A trial with
the model's shapes, once before the first pass, finds out whether all places round alike on this machine. Its inputs
make every exact sum zero, so outputs are rounding errors, and another order of summation changes nearly all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from offload.kernels.attention import attend, fold, merge

MAX_ROWS = 64  # most rows of a pass that runs as a graph
Product = tuple[int, int, bool]

Run = Callable[[Tensor], list[Tensor]]  # rows in, outputs out, with rows as the first dimension


def power_of_two(num_rows: int, most: int = MAX_ROWS) -> int:
    """The next power of two, so that there are few numbers of rows; `num_rows` itself if that is more than `most`."""
    padded = 1 << (num_rows - 1).bit_length() if num_rows else 0
    return padded if padded <= most else num_rows


def rounded_up(number: int, most: int) -> int:
    """`number` rounded up to a sixteenth of the next power of two, so that lengths that grow have few values; `most` if
    that is less."""
    step = max((1 << (number - 1).bit_length()) // 16, 1) if number else 1
    return min(-(-number // step) * step, most)


@dataclass(frozen=True)
class AttentionShape:
    """The shape of an attention: heads, and pages [num_pages, num_kv_heads, page_tokens, head_dim] of keys and of
    values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_pages: int
    page_tokens: int


@cache
def products_alike(products: tuple[Product, ...], rows: int, dtype: torch.dtype, threads: int) -> bool:
    """Whether a row's bits do not depend on its place in a block of `rows` rows, in torch's products of these shapes on
    this CPU with `threads` threads. Temporary memory: the largest product's matrix."""
    generator = torch.Generator().manual_seed(0)
    return all(same_at_every_place(*_product(each, rows, dtype, generator)) for each in dict.fromkeys(products))


@cache
def attention_alike(shape: AttentionShape, rows: int, dtype: torch.dtype, threads: int) -> bool:
    """Whether a row's bits do not depend on its place in a block, in attention by torch's operators to pages of this
    shape."""
    generator = torch.Generator().manual_seed(0)
    trials = (_attention(shape, rows, dtype, generator, scores=scores) for scores in (True, False))
    return all(same_at_every_place(*each) for each in trials)


def same_at_every_place(run: Run, rows: Tensor) -> bool:
    """Whether rows have the same bits one place further on in their block. By induction they then have the same bits at
    all places."""
    moved = [out.roll(1, 0) for out in run(rows)]
    return all(map(torch.equal, run(rows.roll(1, 0)), moved))


def _product(product: Product, num_rows: int, dtype: torch.dtype, generator: torch.Generator) -> tuple[Run, Tensor]:
    outputs, inputs, has_bias = product
    x, some = _cancelling(num_rows, 61, inputs, dtype, generator)
    weight = some.repeat(-(-outputs // len(some)), 1)[:outputs]
    bias = torch.zeros(outputs, dtype=dtype) if has_bias else None

    def run(part: Tensor) -> list[Tensor]:
        return [rms_norm(part, (inputs,)), linear(part, weight, bias)]

    return run, x


def _attention(
    shapes: AttentionShape, num_rows: int, dtype: torch.dtype, generator: torch.Generator, *, scores: bool
) -> tuple[Run, Tensor]:
    """A trial of attention -> (run, rows). scores: expose the rounding of the products of queries and keys; otherwise
    of the products of weights and values."""
    count, dim = num_rows, shapes.head_dim
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


def _cancelling(
    rows: int, columns: int, inner: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Matrices x [rows, inner] and y [columns, inner] with exactly x · y = 0, whose terms have many magnitudes."""
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
