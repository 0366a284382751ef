"""Passes and prefills of a model whose layers have states, beside their bytes and beside a model of attention alone.

usage: python benchmarks/states.py [--turns 5] [--sizes 4B,27B] [--rows 1,8,64] [--prompt 1024]
                                   [--layers N] [--megabytes 256]

Layers of Qwen3.5's sizes, three with a state before each with attention, and as many layers of Llama's form whose
matrices have as many numbers, all over made-up weights in bf16. "rule" is the gated delta rule of one layer
alone, where one row is replayed; "by channel" the same with a key head for each value head and a decay for each
channel of it, as of Kimi Linear; "of bytes" is a pass's time over that of its bytes (weights, and states read and
written) at the rate of a plain sum. Each figure is the least of the turns. Goals: a pass at most 1.3 of its bytes for 1
row and for 64, a prefill at most 1.3 of the dense one.
"""

from __future__ import annotations

import offload  # noqa: F401  # isort: skip  # before torch, which reads its threads' wait policy once

import argparse
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import count as counted
from math import inf
from time import perf_counter
from typing import Any

import torch
from report import about, emit, say

from offload.config.config_json import config_of
from offload.config.mixers import DeltaRule
from offload.config.model import ModelConfig
from offload.kernels.cpu import kernels, of_model
from offload.kernels.device import DeviceKernels
from offload.kernels.norms import NormWeights, dtype_of
from offload.kernels.recurrence import Held, RecurrenceWeights, Replayed
from offload.kernels.rope import scorings
from offload.kv.checkpoints import Checkpoints
from offload.kv.full import FullCache
from offload.kv.layer_states import LayerStates
from offload.kv.mixed import MixedCache
from offload.kv.states import StateCache
from offload.model.decoder import Decoder
from offload.model.level import Level
from offload.model.passes import forward
from offload.pages.tiles import TileShape
from offload.plan.options import PAGE_TOKENS
from offload.transfer.hidden_rows import ResidentRows
from offload.transfer.memory import Memory
from offload.weights.embedding import Embedding
from offload.weights.layers import ResidentLayers
from offload.weights.layout import LayerLayout
from offload.weights.linear import Linear
from offload.weights.loader import Weights

SIZES: dict[str, dict[str, int]] = {
    "0.8B": {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "linear_num_value_heads": 16},
    "4B": {"hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 8, "linear_num_value_heads": 32},
    "27B": {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 4, "linear_num_value_heads": 48},
}
ATTENTION = {
    "0.8B": {"num_attention_heads": 8, "num_key_value_heads": 2},
    "4B": {"num_attention_heads": 16, "num_key_value_heads": 4},
    "27B": {"num_attention_heads": 24, "num_key_value_heads": 4},
}
SHARED: dict[str, object] = {
    "vocab_size": 4096, "head_dim": 256, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "max_position_embeddings": 65536, "tie_word_embeddings": True, "eos_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip
DTYPE = torch.bfloat16
HELD = 72  # rows that may be replayed, one pass of them among these
BLOCK = 512  # rows of a prefill's block
CACHED = 64  # tokens before the measured passes
PASSES = 4  # in a row, in each turn


@dataclass(frozen=True)
class Model:
    """A model over made-up weights, with an empty cache of its own."""

    config: ModelConfig
    decoder: Decoder
    full: FullCache
    states: StateCache | None

    @property
    def cache(self) -> FullCache | MixedCache:
        states = self.states
        return MixedCache(self.config, self.full, None, states, drafts=False) if states else self.full

    def pass_bytes(self) -> int:
        """The bytes that a pass reads and writes, without keys and values."""
        delta, count = self.config.recurrence, len(self.config.stateful)
        states = 2 * 4 * count * math.prod(delta.state_shape) if delta else 0
        return self.config.weight_bytes(DTYPE.itemsize) + states

    def level(self) -> Level:
        """The level of its passes, over a cache of CACHED tokens."""
        self.prefill(CACHED)
        return Level("target", self.decoder, self.cache, vocab_size=self.config.vocab_size)

    def prefill(self, num_tokens: int) -> None:
        self.cache.truncate(0)
        rows = ResidentRows(self.full.arena, self.config.hidden_size, DTYPE, block=BLOCK)
        self.decoder.prefill(self.cache, [0] * num_tokens, rows)


def hybrid(size: str, num_layers: int | None) -> ModelConfig:
    return config_of(_sizes(size, num_layers) | {"model_type": "qwen3_5_text"})


def dense(size: str, num_layers: int | None) -> ModelConfig:
    """A model of Qwen3's form whose matrices have as many numbers as those of the hybrid, by a wider feed-forward
    network."""
    given = _sizes(size, num_layers) | {"model_type": "qwen3", "rope_parameters": None}
    config = config_of(given)
    more = _matrices(hybrid(size, num_layers)) - _matrices(config)
    width = more // (3 * config.num_layers * config.hidden_size)
    return config_of(given | {"intermediate_size": SIZES[size]["intermediate_size"] + width // 64 * 64})


def _sizes(size: str, num_layers: int | None) -> dict[str, object]:
    return SHARED | SIZES[size] | ATTENTION[size] | ({"num_hidden_layers": num_layers} if num_layers else {})


def _matrices(config: ModelConfig) -> int:
    return sum(number * kind.layer_matrix_elements() for kind, number in config.kinds)


def made(config: ModelConfig, capacity: int) -> Model:
    """capacity: of its cache, in tokens."""
    memory, own = Memory(torch.device("cpu")), of_model(torch.device("cpu"), config)
    buffers = []
    for layout in LayerLayout.of_layers(config, DTYPE):
        buffer = torch.empty(layout.num_bytes, dtype=torch.uint8)
        for view in layout.views.values():
            view.of(buffer).normal_(std=0.02)
        buffers.append(layout.bind(buffer))
    table = torch.randn(config.vocab_size, config.hidden_size, dtype=DTYPE)
    norm = NormWeights(config.norm, torch.ones(config.hidden_size, dtype=dtype_of(config.norm, DTYPE)))
    embedding = Embedding(table, torch.device("cpu"), DTYPE)
    weights = Weights(embedding, ResidentLayers(buffers, 0), norm, Linear(table, None))
    shape = TileShape(config.num_kv_heads, config.head_dim, PAGE_TOKENS, -(-capacity // PAGE_TOKENS), DTYPE)
    found = scorings(config, capacity, capacity, "cpu", DTYPE)
    at = [config.attending.index(layer) for layer in config.growing]
    full = FullCache(memory, shape, num_layers=len(at), scorings=[found[each] for each in at], kernels=own)
    states = None
    if config.recurrence is not None:
        count = len(config.stateful)
        layers = LayerStates(memory, config.recurrence, num_layers=count, rows=HELD, dtype=DTYPE, kernels=own)
        kept = Checkpoints(memory, config.recurrence, num_layers=count, dtype=DTYPE, most=2)
        states = StateCache(layers, kept, weights=lambda: ())  # no session is saved
    return Model(config, Decoder(config, weights, kernels=own), full, states)


def seconds(run: Callable[[], object]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start


def rules_alone(config: ModelConfig, rows: int, replayed: int, num_bytes: int) -> dict[str, Callable[[], object]]:
    """A model's delta rule by itself, and with decays by channel."""
    delta, own = config.recurrence, of_model(torch.device("cpu"), config)
    assert isinstance(delta, DeltaRule)
    by_channel = replace(delta, num_key_heads=delta.num_heads, gate="sigmoid", by_channel=True)
    rules = {"rule": delta, "by channel": by_channel}
    return {name: rule_alone(own, rule, rows, replayed, num_bytes) for name, rule in rules.items()}


def rule_alone(own: DeviceKernels, delta: DeltaRule, rows: int, replayed: int, num_bytes: int) -> Callable[[], object]:
    """The delta rule of layer after layer, over states of so many bytes or a few more: each run is of another one."""
    count = -(-num_bytes // (4 * math.prod(delta.state_shape)))
    inputs = torch.randn(delta.width - 1 + HELD, delta.kept).to(DTYPE)
    held = [Held(torch.randn(delta.state_shape), inputs) for _ in range(count)]
    weights = RecurrenceWeights(
        torch.randn(delta.width, delta.channels),
        -torch.rand(delta.num_heads),
        torch.randn(delta.num_times),
        NormWeights(delta.norm, torch.ones(delta.value_dim)),
    )
    new, turn = torch.randn(rows, sum(delta.parts)).to(DTYPE), counted()

    def run() -> None:
        own.recurrences[DeltaRule](delta, weights, held[next(turn) % len(held)], new, Replayed(replayed), settles=False)

    return run


def one_pass(level: Level, rows: int) -> None:
    """A pass after which its first token stays, as where all drafts are rejected."""
    length = level.length
    forward(level, [0] * rows, rows)
    level.truncate(length + 1)


@torch.inference_mode()
def of_size(size: str, sum_rate: float, args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """A line for each number of rows, and one for the prefill."""
    all_rows = list(map(int, args.rows.split(",")))
    capacity = max(args.prompt, CACHED + args.turns * PASSES * len(all_rows)) + BLOCK
    config = hybrid(size, args.layers)
    models = {"hybrid": made(config, capacity), "dense": made(dense(size, args.layers), capacity)}
    for rows in all_rows:
        ways = {name: partial(one_pass, model.level(), rows) for name, model in models.items()}
        alone = rules_alone(config, rows, replayed=1, num_bytes=args.megabytes * 2**20)
        least = in_turns(ways | alone, args.turns, PASSES)
        of_bytes = least["hybrid"] * sum_rate / models["hybrid"].pass_bytes()
        yield {"size": size, "rows": rows, "of_bytes": of_bytes, **least}
        say(f"{size}: passes of {rows} rows")
    ways = {name: partial(model.prefill, args.prompt) for name, model in models.items()}
    yield {"size": size, "prompt": args.prompt, **in_turns(ways, args.turns, 1)}


def in_turns(ways: Mapping[str, Callable[[], object]], turns: int, times: int) -> dict[str, float]:
    """The least seconds of each way. times: in a row, in each turn."""
    taken = dict.fromkeys(ways, inf)
    for _ in range(turns):
        for name, run in ways.items():
            taken[name] = min(taken[name], *(seconds(run) for _ in range(times)))
    return taken


def row(measured: dict[str, Any]) -> list[str]:
    ratio = f"{measured['hybrid'] / measured['dense']:.2f}"
    names = "rule", "by channel", "hybrid", "dense"
    times = [f"{1000 * measured[name]:.3g}" if name in measured else "" for name in names]
    of_bytes = f"{measured['of_bytes']:.2f}" if "of_bytes" in measured else ""
    rows = str(measured["rows"]) if "rows" in measured else f"prefill of {measured['prompt']}"
    return [measured["size"], rows, *times[:3], of_bytes, times[3], ratio]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--sizes", default="4B,27B", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--rows", default="1,8,64")
    parser.add_argument("--layers", type=int, help="instead of as many as fill some gigabytes; a multiple of 4")
    parser.add_argument("--megabytes", type=int, default=256, help="of the sum, and of the states of the rule alone")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the prefill")
    args = parser.parse_args()
    if not kernels().usable:
        parser.error(kernels().reason)
    summed = torch.ones(args.megabytes * 2**18)
    sum_rate = summed.nbytes / min(seconds(summed.sum) for _ in range(5))
    runs = [measured for size in args.sizes.split(",") for measured in of_size(size, sum_rate, args)]
    columns = ["", "rows", "rule, ms a layer", "by channel", "pass, ms", "of bytes", "dense pass, ms", "ratio"]
    shared = about("states", 0, kernels=kernels().name, sum_bytes_per_second=sum_rate)
    emit(columns, [row(measured) for measured in runs], shared, runs)


if __name__ == "__main__":
    main()
