"""Drafts of a mixture by the experts in slots alone: what is accepted of them, and what verifying them misses.

usage: python benchmarks/resident.py --model DIR --texts FILE,FILE [--stretches 15] [--length 256] [--step 8]

Slots of a layer hold the experts that the text's rows used last; the first quarter of the stretches fills them. At
every `--step`-th row the model drafts up to four tokens over its own cache and verifies them. "renormalised": a draft's
rows choose among the experts in slots; "dropped": among all, and those without a slot add nothing; "whole": all experts
draft, which bounds what any drafts save. Of a draft whose predecessors are accepted, "accepted" is the sum of min(p, q)
at temperature 1 and "agreed" the share of greedy ones. "misses" of 1 to 5 rows verified are in units of a row's
experts, "of plain" are those for each token written, of plain decoding's: 0 to 4 drafts at temperature 1.
"""

from __future__ import annotations

import offload  # noqa: F401  # isort: skip  # before torch, which reads its threads' wait policy once

import argparse
import math
from itertools import product
from pathlib import Path
from typing import Any

import torch
from report import about, emit, say
from routing import stretches
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from offload.engine.engine import load_tokenizer
from offload.errors import UsageError

SHARES, WAYS, DRAFTS, SEED = (0.2, 0.4, 0.6, 0.8), ("renormalised", "dropped", "whole"), 4, 0
Read = tuple[Tensor, DynamicCache, Tensor]  # a stretch that was read: its tokens, cache, and what its rows chose
Held = tuple[Tensor, str] | None  # the experts in slots, bool [rows, layers, experts], and the way; None: all


class Mixture:
    """A model whose routers may be held to the experts in slots."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
        self._held: Held = None
        self._chosen: list[Tensor] = []
        self.experts: int = self._model.config.num_experts
        if not self._model.config.norm_topk_prob:
            raise UsageError(f"{folder}: a row's weights do not sum to 1 there; only such mixtures are measured")
        for layer, block in enumerate(self._model.model.layers):
            block.mlp.gate.forward = self._router(layer, block.mlp.gate)

    def _router(self, layer: int, gate: Any) -> Any:
        def routed(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = torch.nn.functional.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight)
            probs = logits.softmax(-1)
            there, way = torch.ones_like(probs, dtype=torch.bool), ""
            if self._held is not None:
                there, way = self._held[0][:, layer], self._held[1]
            weights, chosen = (probs if way == "dropped" else probs.where(there, 0.0)).topk(gate.top_k)
            self._chosen.append(chosen)
            return logits, weights / weights.sum(-1, keepdim=True) * there.gather(1, chosen), chosen

        return routed

    def run(self, tokens: Tensor, held: Held, cache: DynamicCache, **others: Tensor) -> tuple[Tensor, Tensor]:
        """Of tokens [sequences, rows]: each sequence's last probabilities, and the experts that all rows choose, int64
        [rows of all, layers, used]."""
        self._held, self._chosen = held, []
        logits = self._model(tokens, past_key_values=cache, logits_to_keep=1, **others).logits
        return logits[:, 0].softmax(-1), torch.stack(self._chosen, 1)

    def read(self, stretch: list[int]) -> Read:
        tokens, cache = torch.tensor(stretch), DynamicCache()
        return tokens, cache, self.run(tokens[None], None, cache)[1]


def in_slots(chosen: Tensor, experts: int, slots: int) -> Tensor:
    """The experts in each layer's slots before each row, bool [rows, layers, experts]."""
    rows = torch.arange(1, len(chosen) + 1)[:, None, None].expand_as(chosen)
    last = torch.zeros(len(chosen) + 1, chosen.shape[1], experts, dtype=torch.int64)  # the row that used it last
    last[1:].scatter_(2, chosen, rows)
    recent = last.cummax(0).values[:-1].topk(slots).indices
    return torch.zeros(last[1:].shape, dtype=torch.bool).scatter_(2, recent, True)


class Rounds:
    """Rounds that begin at rows `starts` of a stretch, a token at a time over the stretch's cache before them."""

    def __init__(self, model: Mixture, before: DynamicCache, starts: Tensor) -> None:
        self._model, self._starts, self._cache = model, starts, DynamicCache()
        self._before = torch.arange(before.get_seq_length()) < starts[:, None]
        for layer, own in enumerate(before.layers):
            self._cache.update(*(each.repeat(len(starts), 1, 1, 1) for each in (own.keys, own.values)), layer)

    def run(self, tokens: Tensor, number: int, held: Held) -> tuple[Tensor, Tensor]:
        """Probabilities after row `number` of each round, [rounds, vocabulary], and its experts."""
        seen = torch.cat([self._before, self._before.new_ones(len(tokens), number + 1)], 1)
        mask = torch.zeros(seen.shape).masked_fill(~seen, -math.inf)[:, None, None]
        places = self._starts[:, None] + number
        return self._model.run(tokens[:, None], held, self._cache, attention_mask=mask, position_ids=places)


def of_rounds(drafts: Rounds, target: Rounds, tokens: Tensor, held: Tensor, way: str, greedy: bool) -> Tensor:
    """By depth, [depths, 3, rounds]: the chance that all drafts before are accepted, that the next one is, and the
    experts without a slot that all rows up to here want. tokens: the first of each round."""
    slots = torch.ones_like(held) if way == "whole" else held
    reach, wanted, found = torch.ones(len(tokens)), torch.zeros_like(held), []
    for depth in range(DRAFTS + 1):
        q, _ = drafts.run(tokens, depth, (slots, way))
        p, chosen = target.run(tokens, depth, None)
        wanted = wanted.scatter(2, chosen, True)
        tokens = q.argmax(-1) if greedy else torch.multinomial(q, 1)[:, 0]
        agreed = (p.argmax(-1) == tokens).float()
        chance = agreed if greedy else 1 - (p - q).abs().sum(-1) / 2
        found.append(torch.stack([reach, chance, (wanted & ~held).sum((1, 2))]))
        reach = reach * (agreed if greedy else (p / q).gather(1, tokens[:, None])[:, 0].clamp(max=1.0))
    return torch.stack(found)


def measured(model: Mixture, texts: list[Read], share: float, way: str, step: int) -> dict[str, Any]:
    """Means over the rounds of a text, by depth."""
    slots = in_slots(torch.cat([chosen for *_, chosen in texts]), model.experts, round(share * model.experts))
    sampled, greedy = list[Tensor](), list[Tensor]()
    for number, (tokens, cache, _) in list(enumerate(texts))[len(texts) // 4 :]:
        starts = torch.arange(len(tokens) // 8, len(tokens), step)
        own = tokens[starts], slots[number * len(tokens) + starts], way
        for found in (sampled, greedy):
            drafts, target = (Rounds(model, cache, starts) for _ in range(2))
            found.append(of_rounds(drafts, target, *own, found is greedy))
    of_all = [torch.cat(found, 2) for found in (sampled, greedy)]
    accepted, agreed = ((each[:, 0] * each[:, 1]).sum(1) / each[:, 0].sum(1) for each in of_all)
    assert way != "whole" or bool((accepted == 1).all() and (agreed == 1).all())
    misses = of_all[0][:, 2].mean(1) / texts[0][2][0].numel()
    written = 1 + torch.cat([torch.zeros(1), accepted[:-1].cumprod(0).cumsum(0)])
    means = {"accepted": accepted[:-1], "agreed": agreed[:-1], "misses": misses}
    means["of plain"] = misses / misses[0] / written
    return {"rounds": of_all[0].shape[2]} | {name: each.tolist() for name, each in means.items()}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--texts", required=True)
    parser.add_argument("--stretches", type=int, default=15)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--step", type=int, default=8)
    args = parser.parse_args()
    torch.manual_seed(SEED)
    model, tokenizer, runs, rows = Mixture(args.model), load_tokenizer(args.model, None), [], []
    for file in map(Path, args.texts.split(",")):
        tokens = tokenizer.encode(file.read_text(encoding="utf-8"))
        texts = [model.read(each) for each in stretches(tokens, args.length, args.stretches)]
        for share, way in product(SHARES, WAYS):
            case, found = {"text": file.stem, "share": share, "way": way}, measured(model, texts, share, way, args.step)
            runs.append(case | found)
            cells = [" ".join(f"{x:.2f}" for x in each) for each in list(found.values())[1:]]
            rows.append([*map(str, case.values()), *cells])
            say(", ".join(rows[-1]))
    columns = ["text", "in slots", "draft", "accepted", "agreed", "misses", "of plain"]
    emit(columns, rows, about("Drafts by the experts in slots, by depth", SEED), runs)


if __name__ == "__main__":
    main()
