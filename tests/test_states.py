"""States of layers that have one: whatever passes, prefills, cuts and drafts came before, a row has the bits that it
has when each token runs by itself."""

from __future__ import annotations

import functools
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from kit import asked
from kit.families import save_tiny
from kit.models import (
    GREEDY,
    Sizes,
    changed,
    load,
    random_tokens,
    resident_rows,
    state_cache,
    target_cache,
    tiny_engine,
    tiny_plan,
)
from kit.processor import OPERATORS, best, of
from offload.config.mixers import DeltaRule, DilatedConvolution, Mamba2, Recurring, ShortConvolution
from offload.config.norm import Norm
from offload.config.reading import read_config
from offload.decode.sampling import SamplingParams
from offload.engine.engine import Engine
from offload.engine.request import GenerationRequest
from offload.kernels import convolution, delta, mamba
from offload.kernels.norms import NormWeights
from offload.kernels.recurrence import RecurrenceWeights
from offload.kv import checkpoints, layer_states, states
from offload.kv.checkpoints import Checkpoints, least_missed, places_of_prefill
from offload.kv.draft_rows import DraftRowsCache
from offload.kv.full import FullCache
from offload.kv.layer_states import LayerStates
from offload.kv.mixed import MixedCache
from offload.kv.states import DraftStates, StateCache
from offload.model.decoder import Decoder
from offload.model.level import Level
from offload.model.passes import forward
from offload.plan import states as plan_of_states
from offload.plan.sizing import PREFILL_BLOCK
from offload.transfer.memory import Memory
from test_parity import assert_same_logits, in_prefill

DELTA = DeltaRule(2, 4, 4, 6, 3, Norm(1e-5, fp32=True))
MAMBA = Mamba2(2, 4, 4, 6, 3, Norm(1e-5, fp32=True))
MIXERS: dict[str, Recurring] = {
    "delta": DELTA,
    "mamba": MAMBA,
    "convolution": ShortConvolution(6, 4),
    "dilated": DilatedConvolution(6, 3, 2),
}
LAYERS, ROWS, BLOCK, LONGEST = 2, 5, 3, 48
TOKENS = range(64)
SIZES = Sizes(capacity=45, rows=4, prefill_block=7, page=8, pages=2)
SIZES_LONG = Sizes(capacity=600, rows=4, prefill_block=512, page=64, pages=4)


@functools.cache
def weights(layer: int, mixer: Recurring) -> RecurrenceWeights:
    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    generator = torch.Generator().manual_seed(layer)
    if isinstance(mixer, ShortConvolution | DilatedConvolution):
        return RecurrenceWeights(some(*mixer.vectors["taps"]))
    assert mixer.norm is not None
    norm = NormWeights(mixer.norm, 1 + 0.2 * some(mixer.norm_size))
    vectors = some(mixer.width, mixer.channels), -some(mixer.num_heads).exp(), some(mixer.num_heads)
    of_mamba = (some(mixer.channels), some(mixer.num_heads)) if isinstance(mixer, Mamba2) else ()
    return RecurrenceWeights(*vectors, norm, *of_mamba)


@functools.cache
def rows(layer: int, seed: int, mixer: Recurring) -> Tensor:
    """The projected rows of the tokens, by place. seed: others than 0 are wrong ones."""
    generator = torch.Generator().manual_seed(100 + 10 * seed + layer)
    return torch.randn(len(TOKENS), sum(mixer.row_parts), generator=generator)


@dataclass
class Modules:
    """The modules under test, or edited ones."""

    states: Any = states
    layer_states: Any = layer_states
    checkpoints: Any = checkpoints
    mixer: Recurring = DELTA
    run: Callable[..., Tensor] | None = None  # in place of the kernels' function of this mixer

    def cache(self, operators: str, most: int = 3) -> StateCache:
        kept = self.checkpoints.Checkpoints(
            Memory(torch.device("cpu")), self.mixer, num_layers=LAYERS, dtype=torch.float32, most=most
        )
        made: StateCache = self.states.StateCache(self.layers(operators), kept, weights=lambda: ())
        return made

    def layers(self, operators: str) -> LayerStates:
        found: LayerStates = self.layer_states.LayerStates(
            Memory(torch.device("cpu")),
            self.mixer,
            num_layers=LAYERS,
            rows=ROWS,
            dtype=torch.float32,
            kernels=of(operators),
        )
        if self.run is not None:
            found._run = self.run
        return found


@functools.cache
def alone(operators: str, tokens: tuple[int, ...], mixer: Recurring) -> list[Tensor]:
    """Of each layer the output of each token, run by itself: [n, out_size]. tokens: the seed of each one's rows."""
    cache, out = Modules(mixer=mixer).cache(operators), [list[Tensor]() for _ in range(LAYERS)]
    for place, seed in enumerate(tokens):
        cache.begin("decode", 1)
        for layer, found in enumerate(out):
            found.append(cache.recur(layer, rows(layer, seed, mixer)[place : place + 1], weights(layer, mixer)))
        cache.advance(1)
    return [torch.cat([torch.empty(0, mixer.out_size), *found]) for found in out]


class Script:
    """A cache of states beside what each of its tokens gives by itself."""

    def __init__(self, operators: str, modules: Modules) -> None:
        self.operators, self.modules = operators, modules
        self.cache = modules.cache(operators)
        self.drafts: DraftStates = modules.states.DraftStates(modules.layers(operators), self.cache)
        self.is_right = True
        self.tokens: list[int] = []  # the seed of each token's rows: what is cut off is followed by others
        self.seed = 10

    @property
    def length(self) -> int:
        return self.cache.length

    def rows(self, layer: int, seed: int = 0) -> Tensor:
        return rows(layer, seed, self.modules.mixer)

    def weights(self, layer: int) -> RecurrenceWeights:
        return weights(layer, self.modules.mixer)

    def do(self, act: str) -> None:
        getattr(self, f"_{act.split()[0]}")(*map(int, act.split()[1:]))
        assert self.cache.layers.place <= self.length or not self.cache.layers.place

    def _pass(self, count: int, accepted: int) -> None:
        """A pass of `count` rows, of which the first `accepted` are right and stay."""
        start = self.length
        self.cache.begin("decode", count)
        for layer in range(LAYERS):
            some = torch.cat(
                [self.rows(layer, self.seed)[start : start + accepted], self.rows(layer, 1)[: count - accepted]]
            )
            self._compare(layer, start, self.cache.recur(layer, some, self.weights(layer))[:accepted])
        self.cache.advance(count)
        self.cache.truncate(start + accepted)
        self.tokens += [self.seed] * accepted
        assert self.length == start + accepted

    def _prefill(self, count: int) -> None:
        start = self.length
        self.cache.begin("prefill", count)
        for layer in range(LAYERS):
            for first in range(start, start + count, BLOCK):
                some = self.rows(layer, self.seed)[first : min(first + BLOCK, start + count)]
                self._compare(layer, first, self.cache.recur(layer, some, self.weights(layer)))
        self.cache.advance(count)
        self.tokens += [self.seed] * count

    def _broken(self, count: int) -> None:
        """A pass that is broken off after its first layer."""
        start = self.length
        self.cache.begin("decode", count)
        self.cache.recur(0, self.rows(0, 2)[:count], self.weights(0))
        self.cache.truncate(start)
        assert self.length == start

    def _room(self, most: int) -> None:
        """Begin anew with room for so many checkpoints."""
        self.cache, self.tokens = self.modules.cache(self.operators, most), []

    def _unfinished(self, count: int, back: int = 0) -> None:
        """A prefill that is broken off within its first layer, and so many tokens before it are cut off, too."""
        self.cache.begin("prefill", count)
        self.cache.recur(0, self.rows(0, 2)[:count], self.weights(0))
        before = self.length
        self._cut(before - back)
        assert back or not self.cache.most or self.length == before

    def _undo(self, count: int) -> None:
        self._cut(max(self.length - count, 0))

    def _cut(self, wanted: int) -> None:
        reachable = self.cache.reachable(wanted)
        self.cache.truncate(wanted)
        assert self.length == reachable <= wanted
        del self.tokens[reachable:]
        self.seed += 1

    def _draft(self, count: int, lag: int) -> None:
        """A level drafts so many rows, one after the other, from `lag` tokens before the exact ones' end on."""
        start = max(self.length - lag, 0)
        for place in range(start, start + count):
            self.drafts.begin("decode", 1, place)
            for layer in range(LAYERS):
                seed = self.seed if place == self.length else 4  # of the pending token, and of drafts that are wrong
                out = self.drafts.recur(layer, self.rows(layer, seed)[place : place + 1], self.weights(layer))
                if place == start and not lag:
                    self._compare(layer, place, out)
            self.drafts.advance(1)

    def _copy(self, back: int) -> None:
        """Go on with a copy of as much as is reachable, where the cache has gone on with other tokens."""
        other, count = self.modules.cache(self.operators), self.cache.reachable(max(self.length - back, 0))
        other.begin("decode", 2)  # it had a sequence of its own
        for layer in range(LAYERS):
            other.recur(layer, self.rows(layer, 3)[:2], self.weights(layer))
        other.advance(2)
        other.copy_from(self.cache, count)
        self.cache.begin("prefill", 4)
        for layer in range(LAYERS):
            self.cache.recur(layer, self.rows(layer, 2)[:4], self.weights(layer))
        self.cache.advance(4)
        self.cache = other
        del self.tokens[count:]
        self.seed += 1
        self.drafts = self.modules.states.DraftStates(self.modules.layers(self.operators), other)

    def _compare(self, layer: int, start: int, out: Tensor) -> None:
        known = self.tokens[:start]
        tokens = *known, *[self.seed] * (start + len(out) - len(known))
        expected = alone(self.operators, tokens, self.modules.mixer)[layer][start:]
        self.is_right = self.is_right and torch.equal(out, expected)


ACTS = (
    *("pass 1 1", "pass 5 2", "pass 4 0", "pass 7 7", "prefill 7", "broken 3"),
    *("unfinished 3", "undo 1", "undo 6", "draft 3 0", "draft 4 2", "copy 0", "copy 5"),
)


def every_script(length: int) -> Iterator[tuple[str, ...]]:
    """All scripts of so many acts, between a prefill and a pass."""
    for acts in itertools.product(ACTS, repeat=length):
        yield ("prefill 8", *acts, "pass 3 3")


LONGER = (  # scripts that some fault needs
    ("prefill 8", "pass 5 2", "prefill 7", "undo 6", "pass 3 3"),
    ("prefill 8", "undo 6", "pass 7 7", "pass 7 7", "pass 1 1", "undo 7", "pass 3 3"),
    ("prefill 8", "draft 3 0", "pass 5 2", "draft 3 0", "pass 3 3"),
    ("prefill 8", "unfinished 1", "pass 3 3"),
    ("room 0", "prefill 8", "unfinished 3", "pass 3 3"),
    ("prefill 7", "prefill 8", "unfinished 3 2", "pass 3 3"),
    ("prefill 7", "prefill 1", "undo 1", "pass 1 1", "unfinished 3", "pass 3 3"),
    ("prefill 7", "prefill 1", "copy 1", "pass 1 1", "unfinished 3", "pass 3 3"),
)


def follow(script: Script, acts: Sequence[str]) -> bool:
    for act in acts:
        script.do(act)
    return script.is_right


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("operators", OPERATORS)
def test_every_script_of_two_acts_gives_each_row_the_bits_of_its_token_alone(
    operators: str, mixer: str, pytestconfig: pytest.Config
) -> None:
    """By torch's operators, which take six times as long, and of Mamba-2 a fifth of them: each act first, and each
    second."""
    step = 5 if (operators == "torch" or mixer == "mamba") and not pytestconfig.getoption("deep") else 1
    scripts = itertools.chain(LONGER, itertools.islice(every_script(2), 0, None, step))
    assert all(follow(Script(operators, Modules(mixer=MIXERS[mixer])), acts) for acts in scripts)


@pytest.mark.deep
@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("operators", OPERATORS)
def test_every_script_of_three_acts_does(operators: str, mixer: str) -> None:
    assert all(follow(Script(operators, Modules(mixer=MIXERS[mixer])), acts) for acts in every_script(3))


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("operators", OPERATORS)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.few(4)
def test_so_does_any_longer_script(operators: str, mixer: str, seed: int) -> None:
    draw, script = random.Random(seed), Script(operators, Modules(mixer=MIXERS[mixer]))
    for _ in range(40):
        script.do(draw.choice(ACTS) if script.length < LONGEST else "undo 20")
    assert script.is_right


@dataclass(frozen=True)
class Mutant:
    """A fault: a replacement in the text of one of the modules."""

    description: str
    module: str
    old: str
    new: str


MUTANTS = [
    Mutant(
        "one token too few is replayed",
        "layer_states",
        "Replayed(start - self.bases[layer]",
        "Replayed(max(start - self.bases[layer] - 1, 0)",
    ),
    Mutant("no token is replayed", "layer_states", "Replayed(start - self.bases[layer]", "Replayed(0"),
    Mutant(
        "all tokens of the last pass are replayed",
        "states",
        "        kept = self.reachable(length)\n",
        "        kept = self.length\n",
    ),
    Mutant(
        "a state that a broken prefill has passed is gone on with",
        "states",
        "            self._take_back()\n",
        "            pass\n",
    ),
    Mutant(
        "a state that a broken prefill of one token has passed is gone on with",
        "states",
        "            if base > self._start:\n",
        "            if base > self._start + 1:\n",
    ),
    Mutant(
        "a prefill is taken back to where nothing is noted",
        "checkpoints",
        "return place in self._held or place in self._new",
        "return True",
    ),
    Mutant(
        "a broken prefill is taken back to its start where more is cut off",
        "states",
        'if self._phase == "prefill" and kept == self._start:',
        'if self._phase == "prefill":',
    ),
    Mutant(
        "a broken prefill can be cut anywhere below its start",
        "states",
        "wanted if wanted == self.length and self._begins_at_known else",
        "wanted if self._begins_at_known else",
    ),
    Mutant(
        "the base of layers that ran before an interrupt is forgotten",
        "layer_states",
        "        self.bases[layer] = start + len(rows) * settles\n",
        "        self.bases = [start + len(rows) * settles] * len(self.bases)\n",
    ),
    Mutant(
        "a checkpoint lacks the convolution's tail",
        "checkpoints",
        "            self._tails[slot, layer].copy_(tail)\n",
        "",
    ),
    Mutant(
        "a checkpoint comes back without the convolution's tail",
        "layer_states",
        "        self.tails().copy_(tails)\n",
        "",
    ),
    Mutant(
        "a checkpoint of tokens that were cut off stays", "states", "        self.checkpoints.forget_after(kept)\n", ""
    ),
    Mutant(
        "a checkpoint one token after a cut stays",
        "checkpoints",
        "in self._held.items() if place <= length}",
        "in self._held.items() if place <= length + 1}",
    ),
    Mutant(
        "a copy has checkpoints of tokens that it lacks",
        "checkpoints",
        "[place for place in other.places if place <= length]",
        "[*other.places]",
    ),
    Mutant(
        "a copy has the state without the inputs after it",
        "layer_states",
        "        self.inputs[:, :used] = other.inputs[:, :used]\n",
        "",
    ),
    Mutant(
        "a prefill does not note where it begins",
        "states",
        "            self._settle(layer, rows, weights)\n",
        "            self._note(layer)\n",
    ),
    Mutant("drafts go on from their own states", "states", "if start == exact.length or not", "if not"),
    Mutant("a cache without checkpoints keeps its states", "states", "            self.layers.states.zero_()\n", ""),
    Mutant(
        "the tail is off by one",
        "delta",
        "held.inputs[count : before + count]",
        "held.inputs[max(count - 1, 0) : before + max(count - 1, 0)]",
    ),
    Mutant(
        "gates are those of the row before",
        "delta",
        "return out, gates.float()",
        "return out, gates.float().roll(1, 0)",
    ),
    Mutant(
        "steps are those of the row before",
        "delta",
        "each[states.width - 1 :]",
        "each[states.width - 2 : -1]",
    ),
    Mutant(
        "the state passes rows that may be rejected",
        "delta",
        "held.state if settles else held.state.clone()",
        "held.state",
    ),
    Mutant(
        "a convolution's inputs are off by one",
        "convolution",
        "held.inputs[count : before + count], b",
        "held.inputs[max(count - 1, 0) : before + max(count - 1, 0)], b",
    ),
    Mutant(
        "a convolution begins where the last pass did", "convolution", "[count : before + count], b", "[:before], b"
    ),
    Mutant(
        "a dilated convolution begins where the last pass did",
        "convolution",
        "[count : before + count], rows",
        "[:before], rows",
    ),
    Mutant("a dilated convolution's taps are neighbours", "convolution", "len(rows), own.dilation)", "len(rows))"),
    Mutant(
        "a convolution holds the last rows alone",
        "convolution",
        "inputs[-before:] if settles else inputs",
        "inputs[-before:]",
    ),
    Mutant("a convolution holds no new rows", "convolution", "held.inputs[: len(kept)] = kept", "pass"),
    Mutant(
        "a convolution's last tap is of the row before",
        "convolution",
        "inputs[tap * dilation :]",
        "inputs[min(tap * dilation, len(inputs) - num_rows - 1) :]",
    ),
]


# Of faults of a convolution's kernel, and of all others: a delta rule's lie in what it shares with Mamba-2.
# A fault in the text of one sort of convolution has a name that says which.
def seen_by(mutant: Mutant) -> tuple[str, ...]:
    if mutant.module != "convolution":
        return "delta", "mamba"
    if mutant.description.startswith("a dilated"):
        return ("dilated",)
    return ("convolution",) if "], b" in mutant.old else ("convolution", "dilated")


FAULTS = [(mutant, mixer) for mutant in MUTANTS for mixer in seen_by(mutant)]


@pytest.mark.few(8)
@pytest.mark.parametrize(("mutant", "mixer"), FAULTS, ids=[f"{mutant.description}-{mixer}" for mutant, mixer in FAULTS])
def test_each_fault_makes_a_script_wrong(mutant: Mutant, mixer: str) -> None:
    """By another bit, or by a cache that has another length than it should."""
    modules = edited(mutant, mixer)

    def fails(acts: Sequence[str]) -> bool:
        try:
            return not follow(Script("torch", modules), acts)
        except (AssertionError, RuntimeError, ValueError):
            return True

    assert any(fails(acts) for acts in itertools.chain(LONGER, every_script(2)))


def edited(mutant: Mutant, mixer: str = "delta") -> Modules:
    """The modules with the fault. The source has its text once."""
    kernels = {"delta": delta, "mamba": mamba, "convolution": convolution}  # the second imports the first
    found = {"checkpoints": checkpoints, "layer_states": layer_states, "states": states, **kernels}
    made: dict[str, ModuleType] = {}
    with patch.dict(sys.modules):
        for name, module in found.items():
            source = Path(str(module.__file__)).read_text()
            if name == mutant.module:
                assert source.count(mutant.old) == 1, f"{name} has {source.count(mutant.old)} times {mutant.old!r}"
                source = source.replace(mutant.old, mutant.new)
            sys.modules[module.__name__] = made[name] = ModuleType(module.__name__)
            exec(compile(source, f"<edited {name}>", "exec"), made[name].__dict__)
    functions = {
        "delta": made["delta"].delta_rule, "mamba": made["mamba"].mamba2,
        "convolution": made["convolution"].short_convolution, "dilated": made["convolution"].dilated_convolution,
    }  # fmt: skip
    run = functions[mixer] if mutant.module in kernels else None
    return Modules(made["states"], made["layer_states"], made["checkpoints"], MIXERS[mixer], run)


# Which places are kept.


def test_a_prefill_notes_its_ends_and_places_whose_distance_from_the_end_doubles() -> None:
    assert places_of_prefill(0, 5000, 512) == [512, 2560, 3584, 4096, 4608, 5000]
    assert places_of_prefill(100, 300, 512) == [100, 400]
    assert places_of_prefill(1000, 1500, 512) == [1000, 1512, 2024, 2500]


def test_where_there_is_no_room_the_place_goes_that_is_missed_the_least() -> None:
    assert least_missed([512, 2560, 3584, 4096, 5000]) == 512
    assert least_missed([1000, 1010, 9000]) == 1000
    assert least_missed([1000, 1010, 9000], stays=1000) == 1010
    assert least_missed([1000, 8990, 9000]) == 1000
    assert least_missed([7]) == 7


def noting(kept: Checkpoints, place: int, layer: int) -> None:
    kept.note(place, layer, torch.zeros(DELTA.state_shape), torch.zeros(DELTA.width - 1, DELTA.kept))


def test_a_place_that_some_layers_alone_have_noted_is_no_checkpoint() -> None:
    """A prefill that was broken off between two layers; each layer that noted it can go back there meanwhile."""
    kept = Checkpoints(Memory(torch.device("cpu")), DELTA, num_layers=LAYERS, dtype=torch.float32, most=3)
    kept.begin([4, 9])
    for layer in range(LAYERS):
        noting(kept, 4, layer)
    noting(kept, 9, 0)
    assert [kept.of_layer(9, layer) is not None for layer in range(LAYERS)] == [True, False]
    kept.commit()
    assert kept.places == [4]
    kept.begin([5])
    noting(kept, 5, LAYERS - 1)
    kept.commit()
    assert kept.places == [4]


@pytest.mark.parametrize("most", [2, 3, 8, 12])
def test_what_is_run_again_is_at_most_about_twice_what_follows(most: int) -> None:
    """With room for enough places; never is there more than room for, and with less what is missed is far away."""
    kept = Checkpoints(Memory(torch.device("cpu")), DELTA, num_layers=1, dtype=torch.float32, most=most)
    places = places_of_prefill(0, 40_000, 512)
    kept.begin(places)
    for place in places:
        noting(kept, place, 0)
    kept.commit()
    assert len(kept.places) <= most
    assert kept.places[-1] == 40_000
    for length in range(600, 40_000, 7) if most >= 8 else ():
        times = 2 if most == 12 else 4  # a place is missing between two
        assert 40_000 - kept.last(length) <= times * (40_000 - length) + 512


def test_sequences_share_the_bytes_of_checkpoints(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has as many as fit its part: 12 at most, and 2 whatever they take."""
    config = read_config(folder)
    monkeypatch.setattr(plan_of_states, "CHECKPOINT_BYTES", 40 * plan_of_states.checkpoint_bytes(config, 4))
    found = {number: plan_of_states.num_checkpoints(config, 4, number) for number in (1, 3, 4, 8, 30)}
    assert found == {1: 12, 3: 12, 4: 10, 8: 5, 30: 2}


# Whole models.


@pytest.fixture(scope="module", params=["qwen3_5", "lfm2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = {"vocab_size": 264, "max_position_embeddings": 1024}
    return save_tiny(request.param, tmp_path_factory.mktemp("states"), tokenizer=True, **options)


@pytest.fixture(params=OPERATORS)
def decoder(folder: Path, request: pytest.FixtureRequest) -> Decoder:
    return load(folder, kernels=of(request.param))


def test_a_level_that_drafts_from_the_states_leaves_the_targets_logits_alone(decoder: Decoder) -> None:
    tokens = random_tokens(45, seed=9)
    theirs = in_prefill(decoder, target_cache(decoder, SIZES), tokens, 7)
    cache, plain_cache = target_cache(decoder, SIZES), target_cache(decoder, SIZES)
    assert isinstance(cache, MixedCache)
    assert isinstance(cache.growing, FullCache)
    assert isinstance(cache.states, StateCache)
    drafts = DraftStates(state_cache(decoder).layers, cache.states)
    ahead = MixedCache(decoder.config, DraftRowsCache(cache.growing), None, drafts, drafts=True)
    own = Level("self", decoder, ahead, vocab_size=264, block=SIZES.block)
    target = Level("target", decoder, cache, vocab_size=264, block=SIZES.block)
    plain = Level("target", decoder, plain_cache, vocab_size=264, block=SIZES.block)
    for start in range(0, 45, 3):
        some = tokens[start : start + 3]
        forward(own, [*some[:1], 0], 1)
        forward(own, [1, 2, 3], 1)
        own.truncate(cache.length + 3)
        forward(own, [7], 1)
        logits = forward(target, some, 3)
        assert torch.equal(logits, forward(plain, some, 3))
        own.truncate(cache.length)
        assert_same_logits(logits, theirs[start : start + 3])


def test_what_drafts_see_are_the_exact_states(decoder: Decoder) -> None:
    """With the same cache and weights, each draft has the logits of the target."""
    tokens = random_tokens(30, seed=3)
    cache = target_cache(decoder, SIZES)
    assert isinstance(cache, MixedCache)
    assert isinstance(cache.growing, FullCache)
    assert isinstance(cache.states, StateCache)
    drafts = DraftStates(state_cache(decoder).layers, cache.states)
    ahead = MixedCache(decoder.config, DraftRowsCache(cache.growing), None, drafts, drafts=True)
    own = Level("self", decoder, ahead, vocab_size=264, block=SIZES.block)
    target = Level("target", decoder, cache, vocab_size=264, block=SIZES.block)
    decoder.prefill(cache, tokens[:11], resident_rows(decoder, 7))
    for start in range(11, 29, 3):
        drafted = torch.cat([forward(own, [token], 1) for token in tokens[start : start + 3]])
        own.truncate(cache.length)
        assert torch.equal(forward(target, tokens[start : start + 3], 3), drafted)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 63, 64, 65, 511, 512, 513])
def test_prompts_of_all_lengths_around_blocks_give_the_logits_of_transformers(folder: Path, count: int) -> None:
    from transformers import AutoModelForCausalLM

    tokens, sizes = random_tokens(count + 3, seed=count), SIZES_LONG
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        theirs = model(torch.tensor([tokens])).logits[0]
    decoder = load(folder, kernels=of(OPERATORS[-1]))
    cache = target_cache(decoder, sizes)
    level = Level("target", decoder, cache, vocab_size=264, block=sizes.block)
    decoder.prefill(cache, tokens[:count], resident_rows(decoder, 512))
    assert_same_logits(forward(level, tokens[count:], 3), theirs[count:])


# Engines: what comes back is what a fresh start says, and little runs again.

PLAIN = Sizes(rows=4, page=32, prefill_block=32, any_rows=True, capacity=3000)
PROMPT = random_tokens(2200, seed=21)


def engine(folder: Path, sizes: Sizes = PLAIN, **options: Any) -> Engine:
    plan = tiny_plan(folder, None, sizes, num_prompt_tokens=2800, max_tokens=60, dtype="fp32", **options)
    return tiny_engine(plan, folder)


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = {"vocab_size": 264, "max_position_embeddings": 4096}
    return save_tiny("qwen3_5", tmp_path_factory.mktemp("long"), tokenizer=True, **options)


def say(
    made: Engine, prompt: Sequence[int], num_tokens: int = 12, *, reuse: bool = True, seed: int | None = None
) -> list[int]:
    sampling = GREEDY if seed is None else SamplingParams(temperature=1.5, seed=seed)
    steps = made.generate(GenerationRequest(list(prompt), sampling, max_tokens=num_tokens, reuse=reuse))
    return [token for step in steps for token in step.tokens]


def test_a_second_question_about_a_document_reads_little_of_it_again(long_folder: Path) -> None:
    """At most about as many tokens as the first question had, and a block."""
    questions = [random_tokens(count, seed=count) for count in (40, 60, 25)]
    with engine(long_folder) as fresh:
        expected = [say(fresh, [*PROMPT, *question], reuse=False) for question in questions]
    with engine(long_folder) as made:
        for number, question in enumerate(questions):
            assert say(made, [*PROMPT, *question]) == expected[number]
            ran = len(PROMPT) + len(question) - made.stats.reused_tokens
            assert ran <= (len(PROMPT) + len(question) if not number else PREFILL_BLOCK * 2)


def test_a_turn_that_is_taken_back_comes_back_to_the_one_before(long_folder: Path) -> None:
    """Its reply's end is a checkpoint: not a token of what stays runs again."""
    with engine(long_folder) as made:
        text = [*PROMPT[:900], *say(made, PROMPT[:900])]
        first = [*text, *random_tokens(30, seed=1)]
        text_after = [*first, *say(made, first)]
        second = [*text, *random_tokens(35, seed=2)]
        said = say(made, second)
        assert made.stats.reused_tokens >= len(text) - 1
        again = [*text_after, 7, 8, 9]
        say(made, again)
    with engine(long_folder) as fresh:
        assert said == say(fresh, second)


def test_a_reply_that_is_made_again_runs_only_the_prompts_last_rows(long_folder: Path) -> None:
    with engine(long_folder) as made:
        first = say(made, PROMPT[:900], seed=1)
        assert say(made, PROMPT[:900], seed=1) == first
        assert made.stats.reused_tokens == 900 - PLAIN.rows


def test_a_seeds_text_is_that_of_a_fresh_start_whatever_was_cached_before(long_folder: Path) -> None:
    other = [*PROMPT[:1150], *random_tokens(100, seed=6)]
    with engine(long_folder) as fresh:
        expected_text = say(fresh, other, reuse=False, seed=3)
    with engine(long_folder) as made:
        for prompt in (PROMPT, other[:-20], other):
            text = say(made, prompt, reuse=False, seed=3)
        assert text == expected_text


class Broken(Exception):
    pass


@pytest.mark.parametrize("after", [100, 5000])
def test_a_prefill_that_is_broken_off_costs_no_more_than_it_has_passed(long_folder: Path, after: int) -> None:
    """Within a layer or between two: the text after it is that of a fresh start."""

    def stop(progress: Any) -> None:
        if progress.stage == "prefill" and progress.done > after // 4:
            raise Broken

    with engine(long_folder) as fresh:
        expected_text = say(fresh, [*PROMPT[:700], 5, 6, 7])
    with engine(long_folder) as made:
        say(made, PROMPT[:700])
        longer = GenerationRequest([*PROMPT[:700], *PROMPT[:1400]], GREEDY, max_tokens=5, reuse=True)
        with pytest.raises(Broken):
            list(made.generate(longer, on_progress=stop))
        assert say(made, [*PROMPT[:700], 5, 6, 7]) == expected_text
        assert made.stats.reused_tokens >= 690


def test_sequences_of_a_batch_say_what_each_says_alone(long_folder: Path) -> None:
    best()
    sizes = replace(PLAIN, gamma=5, budget=0, kv_bits=4, lookup=True)
    requests = asked.some(6, seed=4, most=700, output=16)
    with engine(long_folder, sizes, num_sequences=3) as made:
        asked.check(made, requests)


def test_citations_are_of_the_layers_that_attend(long_folder: Path) -> None:
    """Their masses are as many as those layers, and are there in a model with states."""
    plan = tiny_plan(long_folder, None, PLAIN, num_prompt_tokens=2800, max_tokens=60)
    with tiny_engine(changed(plan, masses=True), long_folder) as made:
        *_, last = made.generate(GenerationRequest(PROMPT[:900], GREEDY, max_tokens=8, passages=3))
        assert last.passages


@pytest.mark.few(1)
@pytest.mark.usefixtures("forked_here")
@pytest.mark.parametrize("count", [1, 3])
def test_where_rank_0_breaks_a_prefill_off_all_stay_in_step(
    long_folder: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank has gone on: its states have passed the place that both go back to. In the first layer, or in a
    later one."""
    text, more = PROMPT[:300], PROMPT[300:600]
    with engine(long_folder) as fresh:
        text = [*text, *say(fresh, text)]
        expected = say(fresh, [*text, *more], reuse=False)
    plan = tiny_plan(long_folder, None, PLAIN, num_prompt_tokens=2800, max_tokens=60, dtype="fp32")
    with tiny_engine(changed(plan, num_devices=2), long_folder) as made:
        say(made, PROMPT[:300])
        calls, real = itertools.count(1), StateCache.recur

        def recur(self: StateCache, *given: Any) -> Tensor:
            if next(calls) == count:
                raise Broken
            return real(self, *given)

        monkeypatch.setattr(StateCache, "recur", recur)
        with pytest.raises(Broken):
            say(made, [*text, *more])
        monkeypatch.setattr(StateCache, "recur", real)
        assert say(made, [*text, *more]) == expected
        assert made.stats.reused_tokens == len(text) - 1
