"""The time of a layer of each family, relative to a layer of Llama's form with the same sizes, over synthetic weights.

usage: python benchmarks/families.py [--turns 5]

Seconds per byte of a layer's weights without its attention, for 1, 8 and 16 rows, as `triforce` measures them before a
model's first plan (offload/worker/pass_timer.py): the minimum over the turns, as a multiple of Llama's. The goal: at
most 1.1.
"""

from __future__ import annotations

import argparse

from report import say

from offload.config.config_json import config_of
from offload.config.families import FAMILIES
from offload.config.model import ModelConfig
from offload.speed.pass_times import ROWS
from offload.worker.pass_timer import time_passes

SIZES: dict[str, object] = {
    "vocab_size": 4096, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8, "head_dim": 128,
    "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 8192, "eos_token_id": 2,
    "sliding_window": None, "layer_types": ["full_attention"] * 8, "tie_word_embeddings": False,
}  # fmt: skip
OWN: dict[str, dict[str, object]] = {
    "granite": {"residual_multiplier": 0.22, "attention_multiplier": 0.01, "embedding_multiplier": 12.0},
    "phi3": {"head_dim": None},
    "gemma2": {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": None},
    "gemma4_text": {
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": None,
        "hidden_size_per_layer_input": 0,
        "global_head_dim": 128,
    },
    "gemma4_unified_text": {
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": None,
        "global_head_dim": 128,
    },
    "gemma3_text": {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": None},
}
SHOWN = (1, 8, 16)


def layer(config: ModelConfig) -> list[float]:
    """Seconds per byte of weights, for each number of rows in SHOWN."""
    times = time_passes(config, "bf16")
    assert times is not None, "the machine is too busy"
    return [times.layer[ROWS.index(rows)] / config.layer_weight_bytes(2) for rows in SHOWN]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    turns = parser.parse_args().turns
    configs = {name: config_of(SIZES | {"model_type": name} | OWN.get(name, {})) for name in FAMILIES}
    taken: dict[str, list[list[float]]] = {name: [] for name in configs}
    for turn in range(turns):
        for name, config in configs.items():
            taken[name].append(layer(config))
        say(f"turn {turn + 1} of {turns}")
    least = {name: [min(column) for column in zip(*found, strict=True)] for name, found in taken.items()}
    print(f"| family | {' | '.join(f'{rows} rows' for rows in SHOWN)} |\n|---{'|---' * len(SHOWN)}|")
    for name, found in least.items():
        ratios = (f"{own / llama:.2f}" for own, llama in zip(found, least["llama"], strict=True))
        print(f"| {name} | {' | '.join(ratios)} |")


if __name__ == "__main__":
    main()
