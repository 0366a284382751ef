"""The CPU's kernels beside torch's operators, a plain sum and matrix products, by rows: GB/s of cache and of weights.

usage: python benchmarks/kernels.py [--tokens 30000] [--rows 1,2,4,8,16,32] [--layers 8] [--megabytes 64]
                                    [--stored Q4_0,Q8_0,Q4_K,Q6_K,INT4_F16/128] [--latent-heads 20]

Attention of rows at the end of a full cache of the demo target's shape (or --heads, --kv-heads, --head-dim), bf16, and
products with bf16 weights of the demo target's and of a larger model's shape, and with the latter's in --stored
encodings, each over enough bytes to leave the CPU's caches. "of a sum" is the share of what `torch.sum` over fp32 reads
in the same time. Stored numbers are zeros; torch's products have to decode them first.

Latent attention is that of GLM-4.7-Flash: --latent-heads heads over --latent-tokens rows of 576 numbers, whose scores
take all of them and whose values 512, in bf16 and in fp32. "of products" is the share of the multiply-adds that torch's
product of large square matrices in the dtype does in the same time.
"""

from __future__ import annotations

import offload  # noqa: F401  # isort: skip  # before torch, which reads its threads' wait policy once

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from report import about, emit, say
from torch import Tensor

from offload.formats.encodings import ENCODINGS
from offload.formats.stored import StoredMatrix
from offload.kernels.attention import attend, attended_rows, fold
from offload.kernels.cpu import kernels
from offload.kernels.products import Step, Steps, room_to_widen
from offload.kernels.rope import RopeTable, Scoring
from offload.kernels.runs import Rows, Run
from offload.plan.options import PAGE_TOKENS
from offload.weights.linear import product

SHAPES = ((1280, 384), (8960, 1536))  # outputs, inputs
LATENT, VALUES = 576, 512  # numbers of a row of latent attention, and of those of its value
LATENT_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SQUARE = 2048  # of the matrices whose product shows the multiply-adds of a second


def least_seconds(run: Callable[[], object], times: int = 5) -> float:
    least = float("inf")
    for _ in range(times):
        start = perf_counter()
        run()
        least = min(least, perf_counter() - start)
    return least


@dataclass(frozen=True)
class Attended:
    """A cache [2, P, H_kv, S, D / halves] for each layer, which `heads` query heads attend to."""

    layers: list[Tensor]
    heads: int
    joined: bool = False

    @classmethod
    def filled(cls, layers: int, tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> Attended:
        """One of random numbers: keys and values of heads of `dim`, or of LATENT halves of rows that are both."""
        joined = dim == LATENT
        size = 2, -(-tokens // PAGE_TOKENS), kv_heads, PAGE_TOKENS, dim // (1 + joined)
        return cls([torch.randn(size).to(dtype) for _ in range(layers)], heads, joined)

    @property
    def multiply_adds(self) -> int:
        """Of one row in all layers."""
        of_token = LATENT + VALUES if self.joined else 2 * self.layers[0].shape[-1]
        return len(self.layers) * self.layers[0].shape[1] * PAGE_TOKENS * self.heads * of_token


def attention_ways(cache: Attended, num_rows: int) -> dict[str, Callable[[], None]]:
    """The ways to compute attention of `num_rows` rows, the last of the cache, in every layer."""
    _, pages, kv_heads, _, held = cache.layers[0].shape
    num_tokens, dim, dtype = pages * PAGE_TOKENS, held * (1 + cache.joined), cache.layers[0].dtype
    q, k = (torch.randn(num_rows, heads, dim).to(dtype) for heads in (cache.heads, kv_heads))
    table = torch.ones(num_tokens, dim).to(dtype)
    spans = kernels().attention(dtype=dtype, page=PAGE_TOKENS)
    scoring = Scoring(RopeTable(table, table), joined=cache.joined)
    rows = Rows(q, k, k, scoring, position=num_tokens - num_rows, index=num_tokens - num_rows)

    def ours() -> None:
        for tile in cache.layers:
            spans.begin(rows, [num_tokens])
            spans.attend(Run(tile, num_tokens))
            spans.merge()

    def with_torch() -> None:
        for tile in cache.layers:
            attend(fold(q, kv_heads), *attended_rows(tile, joined=cache.joined), None)

    return {"kernels": ours, "torch": with_torch}


def multiply_adds(dtype: torch.dtype) -> float:
    """Of a second, in torch's product of large square matrices."""
    one, other = (torch.randn(SQUARE, SQUARE).to(dtype) for _ in range(2))
    return SQUARE**3 / least_seconds(lambda: one @ other)


def product_ways(weights: Sequence[Tensor | StoredMatrix], num_rows: int) -> dict[str, Callable[[], None]]:
    outputs, inputs = weights[0].shape
    x, out = torch.randn(num_rows, inputs).bfloat16(), torch.empty(num_rows, outputs, dtype=torch.bfloat16)
    room = room_to_widen(num_rows, inputs)
    steps = [Steps(kernels(), [Step(x, weight, None, out)], room) for weight in weights]

    def ours() -> None:
        for step in steps:
            step.run(num_rows)

    def with_torch() -> None:
        for weight in weights:
            product(x, weight, None)

    return {"kernels": ours, "torch": with_torch}


def stored_matrices(name: str, num_bytes: int) -> list[Tensor | StoredMatrix]:
    """Matrices of the larger shape in the encoding `name`, of so many bytes or a few more. No scale in them is
    subnormal, as MXFP4's would be in zeros: products with it take longer."""
    outputs, inputs = SHAPES[-1]
    own = ENCODINGS[name]
    number = -(-num_bytes // (outputs * own.row_bytes(inputs)))
    shape = outputs, own.row_bytes(inputs)
    return [StoredMatrix(torch.full(shape, 0x38, dtype=torch.uint8), own) for _ in range(number)]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=30000)
    parser.add_argument("--rows", default="1,2,4,8,16,32")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--kv-heads", type=int, default=6)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--latent-heads", type=int, default=20, help="0: no latent attention")
    parser.add_argument("--latent-tokens", type=int, default=8192)
    parser.add_argument("--stored", default="Q4_0,Q8_0,Q4_K,Q6_K,INT4_F16/128", help="encodings, or an empty text")
    parser.add_argument("--megabytes", type=int, default=512, help="of weights of each shape, and of the sum")
    args = parser.parse_args()
    if not kernels().usable:
        parser.error(kernels().reason)
    num_bytes = args.megabytes * 2**20
    summed = torch.ones(num_bytes // 4)
    sum_rate = num_bytes / least_seconds(summed.sum)
    shape = args.heads, args.kv_heads, args.head_dim
    cases: list[tuple[str, Any]] = [("attention", Attended.filled(args.layers, args.tokens, *shape, torch.bfloat16))]
    for name, dtype in LATENT_DTYPES.items() if args.latent_heads else ():
        shape = args.latent_heads, 1, LATENT
        cases.append((f"latents in {name}", Attended.filled(args.layers, args.latent_tokens, *shape, dtype)))
    for outputs, inputs in SHAPES:
        number = -(-num_bytes // (2 * outputs * inputs))
        weights = [torch.randn(outputs, inputs).bfloat16() for _ in range(number)]
        cases.append((f"product {outputs} x {inputs}", weights))
    cases += [(f"product in {name}", stored_matrices(name, num_bytes)) for name in filter(None, args.stored.split(","))]
    runs, table = [], []
    most = {dtype: multiply_adds(dtype) for dtype in LATENT_DTYPES.values()}
    for name, read in cases:
        attends = isinstance(read, Attended)
        held = read.layers if attends else [each.rows if isinstance(each, StoredMatrix) else each for each in read]
        total = sum(each.nbytes for each in held)
        for num_rows in map(int, args.rows.split(",")):
            ways = attention_ways(read, num_rows) if attends else product_ways(read, num_rows)
            rates = {way: total / least_seconds(run) for way, run in ways.items()}
            runs += [{"kernel": name, "rows": num_rows, "way": way, "bytes_per_second": rates[way]} for way in rates]
            ours, theirs = rates["kernels"], rates["torch"]
            cells = [f"{ours / 1e9:.1f}", f"{theirs / 1e9:.1f}", f"{ours / theirs:.2f}", f"{ours / sum_rate:.2f}", ""]
            if attends:
                done = num_rows * read.multiply_adds * ours / total
                cells[-1] = f"{done / most[held[0].dtype]:.2f}"
            table.append([name, str(num_rows), *cells])
            say(" ".join(table[-1]))
    shared = about("kernels", 0, instruction_set=kernels().instruction_set, sum_bytes_per_second=sum_rate)
    shared |= {"multiply_adds_per_second": {str(dtype): rate for dtype, rate in most.items()}}
    heads = ["", "rows", "kernels GB/s", "torch GB/s", "ratio", "of a sum", "of products"]
    emit(heads, table, shared, runs)


if __name__ == "__main__":
    main()
