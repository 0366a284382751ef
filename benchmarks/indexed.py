"""Passes of a model with an indexer over contexts of several lengths, whose time is to be flat in the length.

usage: python benchmarks/indexed.py [--lengths 2048,8192,65536,262144] [--rows 1,4] [--layers 4] [--experts 32]
                                    [--turns 5]

Layers of Qwen3.8-Flash-Next's sizes over made-up weights in bf16, three with a state before each that attends, with
fewer experts, of which a token uses as many as there. The cache is filled with made-up rows and keys, as after so many
tokens. "keys" is the time of reading the blocks' keys of that length at the rate of a plain sum, which is all that is
to grow. Each figure is the least of the turns, in ms.
"""

from __future__ import annotations

import offload  # noqa: F401  # isort: skip  # before torch, which reads its threads' wait policy once

import argparse
from functools import partial

import torch
from report import about, emit, say
from states import DTYPE, PASSES, in_turns, one_pass, seconds

from offload.config.config_json import config_of
from offload.config.model import ModelConfig
from offload.kernels.cpu import kernels, of_model
from offload.kernels.norms import NormWeights, dtype_of
from offload.kernels.rope import scorings
from offload.kv.block_index import BlockIndex
from offload.kv.checkpoints import Checkpoints
from offload.kv.indexed import IndexedCache
from offload.kv.layer_states import LayerStates
from offload.kv.mixed import MixedCache
from offload.kv.states import StateCache
from offload.model.decoder import Decoder
from offload.model.level import Level
from offload.pages.tiles import TileShape
from offload.plan.options import PAGE_TOKENS
from offload.transfer.memory import Memory
from offload.weights.embedding import Embedding
from offload.weights.expert_layout import bank_of, layout_of
from offload.weights.experts import ResidentExperts
from offload.weights.layers import ResidentLayers
from offload.weights.layout import LayerLayout
from offload.weights.linear import Linear
from offload.weights.loader import Weights
from offload.weights.streams import StreamWeights

SIZES: dict[str, object] = {
    "model_type": "qwen4_exp_text", "vocab_size": 4096, "hidden_size": 2560, "head_dim": 256, "num_attention_heads": 24,
    "num_key_value_heads": 2, "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "num_experts_per_tok": 10, "moe_intermediate_size": 640, "hc_count": 4,
    "shared_expert_intermediate_size": 640, "hc_lowrank": 320, "output_gate_type": "sigmoid", "indexer_n_heads": 4,
    "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_budget": 2048, "indexer_compress_ratio": 4,
    "max_position_embeddings": 1 << 18, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip
HELD = 72  # rows that may be replayed, one pass of them among these
TILE_PAGES = 16


def made(config: ModelConfig) -> Decoder:
    """A decoder over made-up weights."""
    buffers, experts = [], []
    for layer, layout in enumerate(LayerLayout.of_layers(config, DTYPE)):
        buffers.append(layout.bind(_filled(layout)))
        of_expert, own = layout_of(config.layer(layer), DTYPE), config.blocks[layer].experts
        assert own is not None
        content = torch.stack([_filled(of_expert) for _ in range(own.count)])
        experts.append(ResidentExperts(bank_of(of_expert, content)))
    table, streams = torch.randn(config.vocab_size, config.hidden_size, dtype=DTYPE), config.streams
    assert streams is not None
    norm = NormWeights(streams.norm, torch.ones(config.row_size, dtype=dtype_of(streams.norm, DTYPE)))
    matrices = (torch.randn(each.outputs, each.inputs, dtype=DTYPE) / 50 for each in config.of_last_mean.values())
    last = StreamWeights(streams, norm, *(Linear(matrix, None) for matrix in matrices))
    embedding, head = Embedding(table, torch.device("cpu"), DTYPE), Linear(table, None)
    weights = Weights(embedding, ResidentLayers(buffers, 0), last, head, experts=tuple(experts))
    return Decoder(config, weights, kernels=of_model(torch.device("cpu"), config))


def _filled(layout: LayerLayout) -> torch.Tensor:
    buffer = torch.empty(layout.num_bytes, dtype=torch.uint8)
    for view in layout.views.values():
        view.of(buffer).normal_(std=0.02)
    return buffer


def cache_of(decoder: Decoder, length: int) -> MixedCache:
    """A cache of so many made-up tokens."""
    config, memory, own = decoder.config, Memory(torch.device("cpu")), of_model(torch.device("cpu"), decoder.config)
    capacity, indexer = length + 4096, config.indexer
    assert indexer is not None
    assert config.recurrence is not None
    found = scorings(config, capacity, capacity, "cpu", DTYPE)
    of_layers = [found[config.attending.index(layer)] for layer in config.growing]
    index = BlockIndex(memory, indexer, scorings=of_layers, dtype=DTYPE, page_tokens=PAGE_TOKENS)
    shape = TileShape(config.num_kv_heads, config.head_dim, PAGE_TOKENS, TILE_PAGES, DTYPE)
    full = IndexedCache(memory, shape, index=index, num_layers=len(of_layers), scorings=of_layers, kernels=own)
    count = len(config.stateful)
    layers = LayerStates(memory, config.recurrence, num_layers=count, rows=HELD, dtype=DTYPE, kernels=own)
    kept = Checkpoints(memory, config.recurrence, num_layers=count, dtype=DTYPE, most=2)
    states = StateCache(layers, kept, weights=lambda: ())  # no session is saved
    full.reserve(capacity)
    for layer in range(len(of_layers)):
        for tile in range(full.shape.count(capacity)):
            full.pages.store.home(layer, tile).normal_()
    index.keys.normal_()
    full.length = states.length = length
    layers.known([length] * count)
    return MixedCache(config, full, None, states, drafts=False)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="2048,8192,65536,262144")
    parser.add_argument("--rows", default="1,4")
    parser.add_argument("--layers", type=int, default=4, help="a multiple of 4")
    parser.add_argument("--experts", type=int, default=32, help="of each layer")
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    if not kernels().usable:
        parser.error(kernels().reason)
    summed = torch.ones(2**26)
    rate = summed.nbytes / min(seconds(summed.sum) for _ in range(5))
    config = config_of(SIZES | {"num_hidden_layers": args.layers, "num_experts": args.experts})
    decoder, lengths = made(config), list(map(int, args.lengths.split(",")))
    caches = {length: cache_of(decoder, length) for length in lengths}
    measured = list[dict[str, float]]()
    for rows in map(int, args.rows.split(",")):
        levels = {str(at): Level("target", decoder, each, vocab_size=4096) for at, each in caches.items()}
        least = in_turns({at: partial(one_pass, level, rows) for at, level in levels.items()}, args.turns, PASSES)
        keys = [len(config.growing) * length // 4 * 128 * 2 / rate for length in lengths]
        measured += [
            {"rows": rows, "length": length, "pass": least[str(length)], "keys": of_keys}
            for length, of_keys in zip(lengths, keys, strict=True)
        ]
        say(f"passes of {rows} rows")
    lines = [
        [f"{each['rows']}", f"{each['length']}", f"{1e3 * each['pass']:.3g}", f"{1e3 * each['keys']:.2g}"]
        for each in measured
    ]
    emit(["rows", "tokens", "pass, ms", "keys, ms"], lines, about("indexed", 0, kernels=kernels().name), measured)


if __name__ == "__main__":
    main()
