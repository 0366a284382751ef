"""The time of a layer of each family, relative to a layer of Llama's form with the same sizes, over synthetic weights.

usage: python benchmarks/families.py [--turns 5]

Seconds per byte of a layer's weights without its attention, for 1, 8 and 16 rows, over a trial model as
`triforce` uses it to measure its kernels (offload/worker/trial.py): the minimum over the turns, as a multiple of
Llama's. The goal: at most 1.1.
"""

from __future__ import annotations

import argparse
from functools import partial
from math import inf

from report import say

from offload.config.config_json import config_of
from offload.config.families import FAMILIES
from offload.config.model import ModelConfig
from offload.errors import ModelError
from offload.kernels.cpu import of_model
from offload.worker.timed_runs import median_seconds
from offload.worker.trial import Trial

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
    import torch  # after offload, which tells its threads how to wait

    trial = Trial(config, torch.bfloat16, of_model(torch.device("cpu"), config))
    points = {("none", rows): partial(trial.run, rows, num_layers=0) for rows in SHOWN}
    points |= {("all", rows): partial(trial.run, rows) for rows in SHOWN}
    with torch.inference_mode():
        taken = median_seconds(points, inf)
    assert taken is not None
    num_bytes = config.num_layers * config.layer_weight_bytes(2)
    return [(taken["all", rows] - taken["none", rows]) / num_bytes for rows in SHOWN]


def dense() -> dict[str, ModelConfig]:
    """The families whose layers are of SIZES, without experts and states."""
    found = dict[str, ModelConfig]()
    for name in FAMILIES:
        try:
            config = config_of(SIZES | {"model_type": name} | OWN.get(name, {}))
        except ModelError as error:
            say(f"{name} is left out: {error}")
            continue
        if config.experts is None and not config.stateful:
            found[name] = config
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    turns = parser.parse_args().turns
    configs = dense()
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
