"""Blocks of keys and values that rows of a text choose, and those of them that slots have.

usage: python benchmarks/blocks.py [--model DIR] [--texts FILE,FILE] [--length 4096] [--tokens 256] [--budget 512]
                                   [--rows 1,4,8] [--times 1,2] [--layers 12]

A model of Qwen3.8-Flash-Next's form reads the beginning of each text (a novel, unless told otherwise), and then goes on
with the text's own tokens in passes of some rows, keys and values on the host. Without --model it is a small one over
**random weights**, of whose layers a quarter grow, with the demo model's tokenizer; its rows choose blocks of 4 tokens.
Slots: the fewest that a plan gives, times each of --times, and as many as there are blocks. hits: the share of blocks,
of those that the rows of a pass chose together, that crossed no link. bytes: that crossed for a token, and over those
of the blocks that were missing, both counted. --budget: tokens of the blocks that a row chooses, of any model.
scripts/train_demo.py trains a small model with an index.
"""

from __future__ import annotations

import offload  # noqa: F401  # isort: skip  # before torch, which reads its threads' wait policy once

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import texts
import torch
from indexed import SIZES, made
from report import about, emit, say
from torch import Tensor

from offload.config.config_json import config_of
from offload.config.mixers import Indexer
from offload.config.reading import read_config
from offload.engine.engine import load_tokenizer
from offload.kernels.cpu import kernels, of_model
from offload.kernels.rope import scorings
from offload.kv.block_cache import BlockCache
from offload.kv.block_index import BlockIndex
from offload.kv.checkpoints import Checkpoints
from offload.kv.indexed import IndexedCache
from offload.kv.layer_states import LayerStates
from offload.kv.mixed import MixedCache
from offload.kv.states import StateCache
from offload.model.decoder import Decoder
from offload.model.level import Level
from offload.model.passes import forward
from offload.pages.storage import Offload
from offload.pages.tiles import TileShape
from offload.plan.options import PAGE_TOKENS
from offload.transfer.arena import Arena
from offload.transfer.hidden_rows import ResidentRows
from offload.transfer.link import PacedLink
from offload.transfer.memory import Memory
from offload.weights.checkpoint import Checkpoint, check_model
from offload.weights.loader import load_weights

DTYPE, HELD, BLOCK, SPAN = torch.bfloat16, 72, 256, 32
TOKENIZER = Path(__file__).parents[1] / "triforce_cli" / "models" / "demo-target"
SMALL: dict[str, object] = {
    "hidden_size": 256, "head_dim": 64, "num_attention_heads": 8, "linear_num_key_heads": 4,
    "linear_num_value_heads": 12, "linear_key_head_dim": 64, "linear_value_head_dim": 64, "num_experts": 16,
    "num_experts_per_tok": 4, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "hc_lowrank": 64,
    "indexer_head_dim": 64,
}  # fmt: skip


class CountedBlocks(BlockCache):
    """Slots that count. chosen: blocks that a pass's rows chose together, of all passes. missing: those of them that
    were in no slot."""

    chosen = missing = 0

    def bring(self, layer: int, blocks: Tensor, positions: Tensor) -> Tensor:
        asked = torch.cat([blocks.flatten().long(), positions // self.size]).unique()
        old = asked[(asked >= 0) & (asked * self.size < positions[0])]
        self.chosen += len(old)
        self.missing += int((self.table(layer).slot_of[old] < 0).sum())
        return super().bring(layer, blocks, positions)


def loaded(folder: Path) -> Decoder:
    """A decoder over a folder's weights."""
    config, device = read_config(folder), torch.device("cpu")
    with Checkpoint.open(folder) as checkpoint:
        check_model(checkpoint, config)
        weights = load_weights(checkpoint, config, Memory(device), dtype=DTYPE)
    return Decoder(config, weights, kernels=of_model(device, config))


def cache_of(
    decoder: Decoder, indexer: Indexer, capacity: int, slots: int, link: PacedLink
) -> tuple[MixedCache, CountedBlocks]:
    """An empty cache with its keys and values on the host, and its slots."""
    config, device = decoder.config, torch.device("cpu")
    memory, own, states = Memory(device), of_model(device, config), config.recurrence
    assert states is not None
    found = scorings(config, capacity, capacity, "cpu", DTYPE)
    of_layers = [found[config.attending.index(layer)] for layer in config.growing]
    index = BlockIndex(memory, indexer, scorings=of_layers, dtype=DTYPE, page_tokens=PAGE_TOKENS)
    shape = TileShape(config.num_kv_heads, config.head_dim, PAGE_TOKENS, 1, DTYPE)
    away = Offload(link, num_resident=0, num_staging=2, by_blocks=True)
    num_layers = len(of_layers)
    full = IndexedCache(
        memory,
        shape,
        index=index,
        block_slots=slots,
        num_layers=num_layers,
        scorings=of_layers,
        kernels=own,
        offload=away,
    )
    assert full.blocks is not None
    full.blocks.release()
    full.blocks = counted = CountedBlocks(memory, full, indexer.ratio, slots, -(-capacity // indexer.ratio), own)
    count = len(config.stateful)
    layers = LayerStates(memory, states, num_layers=count, rows=HELD, dtype=DTYPE, kernels=own)
    kept = Checkpoints(memory, states, num_layers=count, dtype=DTYPE, most=2)
    kept_states = StateCache(layers, kept, weights=lambda: ())  # no session is saved
    return MixedCache(config, full, None, kept_states, drafts=False), counted


@dataclass(frozen=True)
class Text:
    """A text's tokens, of which a model reads `length` and goes on with the others."""

    name: str
    tokens: list[int]
    length: int

    def measured(self, decoder: Decoder, indexer: Indexer, slots: int, rows: int) -> dict[str, float | str]:
        """Hits and bytes of passes of `rows` rows."""
        config, link, total = decoder.config, PacedLink(None, overlap=False), len(self.tokens)
        cache, blocks = cache_of(decoder, indexer, total + 2 * PAGE_TOKENS, slots, link)
        room = ResidentRows(Arena(Memory(torch.device("cpu"))), config.row_size, DTYPE, block=BLOCK)
        decoder.prefill(cache, self.tokens[: self.length], room)
        level, before = Level("target", decoder, cache, vocab_size=config.vocab_size), link.stats
        for start in range(self.length, total, rows):
            forward(level, self.tokens[start : start + rows], min(rows, total - start))
        crossed = (link.stats - before).bytes_to_device
        of_block = 2 * config.num_kv_heads * indexer.ratio * config.head_dim * DTYPE.itemsize
        return {
            "text": self.name, "slots": slots, "rows": rows, "hits": 1 - blocks.missing / blocks.chosen,
            "bytes_of_token": crossed / (total - self.length), "of_needed": crossed / max(blocks.missing * of_block, 1),
        }  # fmt: skip


def beginnings(files: list[Path], folder: Path, length: int, more: int) -> Iterator[Text]:
    """The beginning of each text in a folder's tokens."""
    tokenizer = load_tokenizer(folder, None)
    for file in files:
        tokens = tokenizer.encode(file.read_text(encoding="utf-8"))[: length + more]
        if len(tokens) < length + more:
            raise SystemExit(f"{file} has {len(tokens)} tokens, {length + more} are asked for")
        yield Text(file.stem, tokens, length)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--texts", default=str(texts.NOVEL))
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--rows", default="1,4,8")
    parser.add_argument("--times", default="1,2", help="the fewest slots")
    parser.add_argument("--layers", type=int, default=12, help="of random weights, a multiple of 4")
    args = parser.parse_args()
    if not kernels().usable:
        parser.error(kernels().reason)
    files = [Path(file) for file in args.texts.split(",")]
    found = list(beginnings(files, args.model or TOKENIZER, args.length, args.tokens))
    if args.model is None:
        torch.manual_seed(0)
        highest = max(max(text.tokens) for text in found)
        decoder = made(config_of(SIZES | SMALL | {"num_hidden_layers": args.layers, "vocab_size": highest + 1}))
    else:
        decoder = loaded(args.model)
    if decoder.config.indexer is None:
        parser.error(f"{args.model} has no index")
    indexer = replace(decoder.config.indexer, budget=args.budget)
    least = -(-(indexer.most_blocks + 3) // SPAN) * SPAN
    every = -(-(args.length + args.tokens + 2 * PAGE_TOKENS) // indexer.ratio // SPAN) * SPAN
    sizes = [least * int(each) for each in args.times.split(",")]
    measured = list[dict[str, float | str]]()
    for text in found:
        for slots in (*(each for each in sizes if each < every), every):
            for rows in map(int, args.rows.split(",")):
                measured.append(text.measured(decoder, indexer, slots, rows))
                say(str(measured[-1]))
    lines = [
        [f"{each['text']}", f"{each['slots']}", f"{each['rows']}", f"{each['hits']:.3f}",
         f"{each['bytes_of_token'] / 1e3:.0f}", f"{each['of_needed']:.3f}"] for each in measured
    ]  # fmt: skip
    weights = "random weights" if args.model is None else args.model.name
    title = f"blocks chosen over {args.length + args.tokens} tokens of texts, {weights}"
    columns = ["text", "slots", "rows", "hits", "kB/token", "of needed"]
    emit(columns, lines, about(title, 0, kernels=kernels().name), measured)


if __name__ == "__main__":
    main()
