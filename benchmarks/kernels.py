"""The CPU's kernels beside torch's operators and a plain sum, by rows: GB/s of cache and of weights, in one run.

usage: python benchmarks/kernels.py [--tokens 30000] [--rows 1,2,4,8,16,32] [--layers 8] [--megabytes 64]
                                    [--stored Q4_0,Q8_0,Q4_K,Q6_K,INT4_F16/128]

Attention of rows at the end of a full cache of the demo target's shape (or --heads, --kv-heads, --head-dim), bf16, and
products with bf16 weights of the demo target's and of a larger model's shape, and with the latter's in --stored
encodings, each over enough bytes to leave the CPU's caches. "of a sum" is the share of what `torch.sum` over fp32 reads
in the same time. Stored numbers are zeros; torch's products have to decode them first.
"""

from __future__ import annotations

import offload  # noqa: F401  # isort: skip  # before torch, which reads its threads' wait policy once

import argparse
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from report import about, emit, say
from torch import Tensor

from offload.formats.encodings import ENCODINGS
from offload.formats.stored import StoredMatrix
from offload.kernels.attention import attend, fold
from offload.kernels.cpu import kernels
from offload.kernels.products import Step, Steps, room_to_widen
from offload.kernels.rope import RopeTable, Scoring
from offload.kernels.runs import Rows, Run
from offload.kernels.spans import SPAN, SpanAttention
from offload.plan.options import PAGE_TOKENS
from offload.weights.linear import product

SHAPES = ((1280, 384), (8960, 1536))  # outputs, inputs


def least_seconds(run: Callable[[], object], times: int = 5) -> float:
    least = float("inf")
    for _ in range(times):
        start = perf_counter()
        run()
        least = min(least, perf_counter() - start)
    return least


def attention_ways(args: argparse.Namespace, layers: list[Tensor], num_rows: int) -> dict[str, Callable[[], None]]:
    """The ways to compute attention of `num_rows` rows, the last of the cache, in every layer."""
    num_tokens = layers[0].shape[1] * PAGE_TOKENS
    q = torch.randn(num_rows, args.heads, args.head_dim).bfloat16()
    k = torch.randn(num_rows, args.kv_heads, args.head_dim).bfloat16()
    table = torch.ones(num_tokens, args.head_dim).bfloat16()
    spans = SpanAttention(kernels(), dtype=q.dtype, span=SPAN)
    scoring = Scoring(RopeTable(table, table))
    rows = Rows(q, k, k, scoring, position=num_tokens - num_rows, index=num_tokens - num_rows)

    def ours() -> None:
        for tile in layers:
            spans.begin(rows, [num_tokens])
            spans.attend(Run(tile, num_tokens))
            spans.merge()

    def with_torch() -> None:
        for tile in layers:
            attend(fold(q, args.kv_heads), tile[0], tile[1], None)

    return {"kernels": ours, "torch": with_torch}


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
    parser.add_argument("--stored", default="Q4_0,Q8_0,Q4_K,Q6_K,INT4_F16/128", help="encodings, or an empty text")
    parser.add_argument("--megabytes", type=int, default=512, help="of weights of each shape, and of the sum")
    args = parser.parse_args()
    if not kernels().usable:
        parser.error(kernels().reason)
    num_bytes = args.megabytes * 2**20
    summed = torch.ones(num_bytes // 4)
    sum_rate = num_bytes / least_seconds(summed.sum)
    pages = -(-args.tokens // PAGE_TOKENS)
    size = (2, pages, args.kv_heads, PAGE_TOKENS, args.head_dim)
    layers = [torch.randn(size).bfloat16() for _ in range(args.layers)]
    cases: list[tuple[str, Sequence[Any]]] = [("attention", layers)]
    for outputs, inputs in SHAPES:
        number = -(-num_bytes // (2 * outputs * inputs))
        weights = [torch.randn(outputs, inputs).bfloat16() for _ in range(number)]
        cases.append((f"product {outputs} x {inputs}", weights))
    cases += [(f"product in {name}", stored_matrices(name, num_bytes)) for name in filter(None, args.stored.split(","))]
    runs, table = [], []
    for name, read in cases:
        total = sum(each.rows.nbytes if isinstance(each, StoredMatrix) else each.nbytes for each in read)
        for num_rows in map(int, args.rows.split(",")):
            ways = attention_ways(args, read, num_rows) if read is layers else product_ways(read, num_rows)
            rates = {way: total / least_seconds(run) for way, run in ways.items()}
            runs += [{"kernel": name, "rows": num_rows, "way": way, "bytes_per_second": rates[way]} for way in rates]
            ours, theirs = rates["kernels"], rates["torch"]
            cells = (f"{ours / 1e9:.1f}", f"{theirs / 1e9:.1f}", f"{ours / theirs:.2f}", f"{ours / sum_rate:.2f}")
            table.append([name, str(num_rows), *cells])
            say(" ".join(table[-1]))
    shared = about("kernels", 0, instruction_set=kernels().instruction_set, sum_bytes_per_second=sum_rate)
    emit(["", "rows", "kernels GB/s", "torch GB/s", "ratio", "of a sum"], table, shared, runs)


if __name__ == "__main__":
    main()
