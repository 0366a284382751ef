"""A sequence with two state caches, of a layer's mixer and of a dilated convolution beside it, and with its ids: each
goes where the others go, in rollbacks, copies and sessions."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kit.processor import OPERATORS, of
from offload.config.mixers import DeltaRule, DilatedConvolution, Recurring
from offload.config.norm import Norm
from offload.kernels.recurrence import RecurrenceWeights
from offload.kv.checkpoints import Checkpoints
from offload.kv.kept import Kept
from offload.kv.layer_states import LayerStates
from offload.kv.recent_ids import RecentIds
from offload.kv.states import StateCache
from offload.plan.shards import Shard
from offload.transfer.memory import Memory
from test_states import weights

MIXER, BESIDE = DeltaRule(2, 4, 4, 6, 3, Norm(1e-5, fp32=True)), DilatedConvolution(10, 4, 3)
CONTEXT, EOS, VOCAB, MOST = 2, 1, 7, 3


def cache(recurrence: Recurring, name: str, operators: str) -> StateCache:
    memory = Memory(torch.device("cpu"))
    layers = LayerStates(memory, recurrence, num_layers=1, rows=5, dtype=torch.float32, kernels=of(operators))
    kept = Checkpoints(memory, recurrence, num_layers=1, dtype=torch.float32, most=MOST)
    return StateCache(layers, kept, weights=lambda: [weights_of(recurrence)], name=name)


def weights_of(recurrence: Recurring) -> RecurrenceWeights:
    return weights(0, recurrence)


def rows_of(recurrence: Recurring, ids: Tensor) -> Tensor:
    """The rows of tokens follow from their ids and those before them: [context + T] -> [T, numbers]."""
    size, keys = sum(recurrence.row_parts), ids.unfold(0, CONTEXT + 1, 1) @ torch.tensor([49, 7, 1])
    table = torch.randn(VOCAB**3, size, generator=torch.Generator().manual_seed(1))
    return table[keys]


class Sequence:
    """What a sequence keeps, and the outputs of its tokens."""

    def __init__(self, operators: str, ids: type[RecentIds] = RecentIds) -> None:
        self.states, self.beside = (
            cache(each, name, operators) for each, name in ((MIXER, "states"), (BESIDE, "lexical"))
        )
        self.ids = ids(CONTEXT, EOS, self.states)
        self.kept = Kept(self.states, self.beside, self.ids)
        self.text, self.out = list[int](), torch.empty(0, MIXER.out_size + BESIDE.out_size)

    def run(self, ids: list[int], kept: int, *, prefill: bool = False) -> None:
        noted = self.ids.note(ids)
        found = []
        for each, own in ((self.states, MIXER), (self.beside, BESIDE)):
            each.begin("prefill" if prefill else "decode", len(ids))
            found.append(each.recur(0, rows_of(own, noted), weights_of(own)))
        start = len(self.text)
        for part in (self.states, self.beside, self.ids):
            part.advance(len(ids))
            part.truncate(start + kept)
        self.text += ids[:kept]
        self.out = torch.cat([self.out, torch.cat(found, 1)[:kept]])

    def cut(self, length: int) -> None:
        reached = self.kept.reachable(length)
        self.kept.each("truncate", reached)
        assert [part.length for part in self.kept.parts] == [reached] * 3
        self.text, self.out = self.text[:reached], self.out[:reached]


def saved(one: Sequence, other: Sequence) -> None:
    """Go on in `other` with a session of `one`."""
    one.kept.each("note_length")
    length = len(one.text)
    units = {part.name: part.units(length) for part in one.kept.parts}
    assert [*units] == ["states", "lexical", "ids"]
    reached = other.kept.reach(units, length)
    assert reached == length
    other.kept.clear()
    for part in other.kept.parts:
        theirs = one.kept[part.name]
        for unit in part.wanted(units[part.name], reached):
            tensors = [each.clone() for each in one.kept.tensors(theirs, unit)]
            assert [tuple(each.shape) for each in tensors] == [shape for shape, _ in part.shapes(unit).values()]
            held = other.kept.to_fill(part, unit)
            for own, tensor in zip(held, tensors, strict=True):
                own.copy_(tensor)
            other.kept.filled(part, unit, held)
    other.kept.each("restored", reached)
    other.text, other.out = one.text[:reached], one.out[:reached]


def follow(operators: str, seed: int, ids: type[RecentIds] = RecentIds) -> bool:
    """Whether each token of a random script has the bits that it has in its text alone."""
    draw, made = random.Random(seed), Sequence(operators, ids)

    def some(most: int) -> list[int]:
        return [draw.randrange(VOCAB) for _ in range(draw.randint(1, most))]

    made.run(some(8), 0)
    for _ in range(14):
        act = draw.choice(("pass", "pass", "prefill", "cut", "copy", "session"))
        if act == "pass":
            made.run(own := some(6), draw.randint(0, len(own)))
        elif act == "prefill":
            made.run(own := some(12), len(own), prefill=True)
        elif act == "cut":
            made.cut(draw.randint(0, len(made.text)))
        else:
            other = Sequence(operators, ids)
            other.run(own := some(9), len(own))
            if act == "session" and made.text:
                saved(made, other)
            else:
                other.kept.copy_from(made.kept, len(made.text))
                other.text, other.out = [*made.text], made.out
            made.run(own := some(4), len(own))  # of another sequence by now
            made = other
    alone = Sequence(operators)
    for token in made.text:
        alone.run([token], 1)
    return torch.equal(made.out, alone.out)


@pytest.mark.parametrize("operators", OPERATORS)
def test_tokens_have_the_bits_of_their_text_alone(operators: str) -> None:
    assert all(follow(operators, seed) for seed in range(12))


def forgets(change: Callable[[RecentIds], None]) -> type[RecentIds]:
    class Forgetful(RecentIds):
        def note(self, ids: object) -> Tensor:
            change(self)
            return super().note(ids)  # type: ignore[arg-type]

    return Forgetful


def test_ids_of_another_sequence_are_seen() -> None:
    def other(ids: RecentIds) -> None:
        if ids.length > CONTEXT:
            ids._ids[-1] = (ids._ids[-1] + 1) % VOCAB

    assert not all(follow("torch", seed, forgets(other)) for seed in range(5))


def test_every_rank_has_all_of_the_second_cache() -> None:
    made = Sequence("torch")
    shards = [Shard(0, 2), Shard(1, 2)]
    for part in (made.beside, made.ids):
        shapes = [shape for shape, _ in part.shapes((0,)).values()]
        for split, shape in zip(part.splits(None, shards), shapes, strict=True):  # type: ignore[arg-type]
            assert split.whole(shape) == shape
            assert all(torch.empty(shape)[split.of_rank(rank)].shape == shape for rank in (0, 1))
