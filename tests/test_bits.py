"""The promise: greedy output with speculation has the bits of greedy output without it, whatever was drafted and kept.

The yardstick of each case is plain decoding (gamma 0, everything resident) with the same weights, rows and tiles.
Compared are the tokens and the target's logits that each token came from, both bit for bit, in fp32 and in bf16.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import PreTrainedModel

from kit.models import (
    GREEDY,
    VOCABULARY,
    Generated,
    LateLink,
    Sizes,
    Stack,
    changed,
    full_cache,
    kernels_of,
    load,
    perturbed,
    random_model,
    random_tokens,
    resident_rows,
    retrieval_cache,
    save,
    streaming_cache,
    tiny_engine,
    tiny_plan,
)
from kit.processor import OPERATORS, of, process_uses
from offload.decode.lengths import Adaptive
from offload.decode.random_source import SeededSource
from offload.decode.sampling import SamplingParams
from offload.engine.engine import Engine
from offload.engine.request import GenerationRequest
from offload.engine.step import Step
from offload.kv import Phase
from offload.kv.full import FullCache
from offload.kv.retrieval import RetrievalCache
from offload.model.decoder import Decoder
from offload.model.level import Level, StreamingLevel
from offload.model.native_layers import NativeLayers
from offload.model.passes import Pass, forward
from offload.model.torch_layers import TorchLayers
from offload.plan.composition import LevelName

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
KINDS = ("fp32 torch", "bf16 torch", "fp32 kernels", "bf16 kernels")  # of decoders: dtype, and what few rows run on
NUM_TOKENS = 16
CHUNK, TILE = 4, 16
PROMPT_LENGTHS = (1, CHUNK - 1, CHUNK, CHUNK + 1, TILE - 1, TILE, TILE + 1, 2 * TILE, 45, 67)
DRAFTS = ("right", "partly right", "wrong", "repeating")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    models = {
        "target": random_model(),
        "right": random_model(),
        "partly right": perturbed(random_model(), 0.15),
        "wrong": random_model(seed=7),
        # Its own embedding drowns what the layers add: the most likely next token is the last one.
        "repeating": repeating_model(),
        "qwen3": random_model("qwen3", seed=3),
        "biased": random_model("llama-biased", seed=4),
    }
    return {name: save(model, root / name.replace(" ", "-")) for name, model in models.items()}


def repeating_model() -> PreTrainedModel:
    model = random_model("llama-tied", seed=5, num_hidden_layers=1)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(20)
    return model


class Decoders:
    """The models of `folders` by their names, loaded as they are asked for."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self._folders, self._loaded = folders, dict[tuple[str, str], Decoder]()

    def __getitem__(self, name_and_kind: tuple[str, str]) -> Decoder:
        """kind: one of KINDS."""
        if name_and_kind not in self._loaded:
            name, kind = name_and_kind
            dtype, operators = kind.split()
            self._loaded[name, kind] = load(self._folders[name], dtype=DTYPES[dtype], kernels=of(operators))
        return self._loaded[name_and_kind]


@pytest.fixture(scope="module")
def decoders(folders: dict[str, Path]) -> Decoders:
    return Decoders(folders)


@dataclass(frozen=True)
class Case:
    """One combination. `resident`: tiles on the device, None: all of them, without a link."""

    target: str
    draft: str
    prompt_length: int
    sizes: Sizes
    resident: int | None

    def __str__(self) -> str:
        sizes = self.sizes
        numbers = f"g{sizes.gamma}.{sizes.draft_gamma} r{sizes.rows} b{sizes.budget} c{sizes.chunk}"
        tiles = f"p{sizes.page}x{sizes.pages} res{self.resident}"
        return f"{self.target} {self.draft} n{self.prompt_length} {numbers} {tiles}"


def sample_cases(num_cases: int) -> list[Case]:
    """A sample in which every value of every dimension comes up about equally often."""
    dice = random.Random(20)
    dimensions: dict[str, list[object]] = {
        "target": ["target", "target", "qwen3", "biased"],
        "draft": list(DRAFTS),
        "prompt_length": list(PROMPT_LENGTHS),
        "gamma": [1, 2, 3, 4, 7, 11],
        "draft_gamma": [0, 1, 2, 3],
        "rows": [1, 4, 8, 16],
        "budget": [4, 8, 16, 128],
        "chunk": [1, 2, 4],
        "tile": [(4, 1), (4, 4), (8, 2), (16, 1), (32, 2)],
        "resident": [None, 0, 1, 2, 50],
        "window": [1, 8, 200],
    }
    columns: dict[str, list[object]] = {}
    for name, values in dimensions.items():
        column = values * -(-num_cases // len(values))
        dice.shuffle(column)
        columns[name] = column[:num_cases]
    return [make_case(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]


def make_case(
    *, target: str, draft: str, prompt_length: int, resident: int | None, tile: tuple[int, int], **sizes: object
) -> Case:
    page, pages = tile
    fields = Sizes(page=page, pages=pages, num_resident=resident or 0, **sizes)  # type: ignore[arg-type]
    return Case(target, draft, prompt_length, fields, resident)


def assert_same_bits(spoken: Generated, plain: Generated) -> None:
    assert spoken.tokens == plain.tokens
    assert torch.equal(torch.cat(spoken.logits), torch.cat(plain.logits))


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", sample_cases(40), ids=str)
def test_speculation_changes_no_bit(decoders: Decoders, case: Case, kind: str) -> None:
    target, draft = decoders[case.target, kind], decoders[case.draft, kind]
    prompt = random_tokens(case.prompt_length, seed=case.prompt_length)
    plain = Stack(target, replace(case.sizes, gamma=0)).generate(prompt, NUM_TOKENS)
    link = None if case.resident is None else LateLink(late_in=False, late_out=True)
    assert_same_bits(Stack(target, case.sizes, draft=draft, link=link).generate(prompt, NUM_TOKENS), plain)


def test_the_sample_meets_every_sort_of_verdict(decoders: Decoders) -> None:
    """Nothing would be shown if all drafts were rejected, or none."""
    target, prompt = decoders["target", "fp32 torch"], random_tokens(45)
    shares = {}
    for budget in (4, 128):
        said = Stack(target, Sizes(gamma=4, budget=budget)).generate(prompt, 24)
        shares[budget] = said.num_accepted / said.num_drafted
    assert shares[128] > 0.9
    assert 0 < shares[4] < 0.9


@pytest.mark.few(2)
@pytest.mark.parametrize("draft", DRAFTS)
def test_drafts_differ_in_how_often_they_are_right(decoders: Decoders, draft: str) -> None:
    """The names of the drafts say what they are, at the level that verifies them."""
    target = decoders["target", "fp32 torch"]
    sizes = Sizes(gamma=6, draft_gamma=3, budget=256, window=200, sinks=0)
    stack = Stack(target, sizes, draft=decoders[draft, "fp32 torch"])
    stack.generate(random_tokens(30), 40)
    low, high = {"right": (0.99, 1.0), "partly right": (0.2, 0.95), "wrong": (0.0, 0.2), "repeating": (0.0, 0.2)}[draft]
    assert stack.retrieval_level is not None
    assert low <= (stack.retrieval_level.stats.acceptance or 0.0) <= high


@pytest.mark.parametrize("kind", KINDS)
def test_a_repetitive_text_keeps_its_bits(decoders: Decoders, kind: str) -> None:
    """The repeating model as target: every draft says what was just said, and is right."""
    target, prompt = decoders["repeating", kind], random_tokens(21)
    plain = Stack(target, Sizes()).generate(prompt, NUM_TOKENS)
    assert len(set(plain.tokens)) < 4
    spoken = Stack(target, Sizes(gamma=7, draft_gamma=3), draft=target).generate(prompt, NUM_TOKENS)
    assert spoken.num_accepted > 0.9 * spoken.num_drafted
    assert_same_bits(spoken, plain)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["fp32 kernels", "fp32 torch"])
def test_output_much_longer_than_budget_and_prompt_keeps_its_bits(decoders: Decoders, kind: str) -> None:
    target, draft, prompt = decoders["target", kind], decoders["partly right", kind], random_tokens(5)
    plain = Stack(target, Sizes()).generate(prompt, 50)
    sizes = Sizes(gamma=5, draft_gamma=2, budget=8)
    assert_same_bits(Stack(target, sizes, draft=draft).generate(prompt, 50), plain)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["fp32 kernels", "fp32 torch"])
def test_a_stack_that_has_generated_before_generates_the_same_again(decoders: Decoders, kind: str) -> None:
    target, draft = decoders["target", kind], decoders["partly right", kind]
    sizes, long, short = Sizes(gamma=5, draft_gamma=2), random_tokens(60, seed=1), random_tokens(9, seed=2)
    stack = Stack(target, sizes, draft=draft, link=LateLink(late_in=True, late_out=True))
    for prompt in (long, short, long):
        assert_same_bits(stack.generate(prompt, NUM_TOKENS), Stack(target, Sizes()).generate(prompt, NUM_TOKENS))


# Several sequences in one forward.


RAGGED = ((23, 5), (50, 9), (9, 1))  # tokens of each sequence, and how many of them run in the common pass


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("count", [2, 3])
def test_sequences_that_share_a_pass_have_the_bits_that_each_has_alone(
    decoders: Decoders, count: int, rows: int, kind: str
) -> None:
    """Logits and masses, in every order, every other cache on the host."""
    target, sizes = decoders["target", kind], Sizes(rows=rows)
    alone = [verified_together(target, sizes, [ragged])[0] for ragged in RAGGED[:count]]
    for order in permutations(range(count)):
        together = verified_together(target, sizes, [RAGGED[i] for i in order])
        for i, (logits, mass) in zip(order, together, strict=True):
            assert torch.equal(logits, alone[i][0])
            assert torch.equal(mass, alone[i][1])


def verified_together(target: Decoder, sizes: Sizes, ragged: Sequence[tuple[int, int]]) -> list[tuple[Tensor, Tensor]]:
    """(logits, masses) of the last tokens of each sequence, run in one pass after a prefill of the others."""
    caches, asked = list[FullCache](), list[Pass]()
    for place, (length, count) in enumerate(ragged):
        tokens = random_tokens(length, seed=length)
        link = LateLink(late_in=True, late_out=True) if place % 2 else None
        cache = full_cache(target, sizes, mass=True, link=link)
        target.prefill(cache, tokens[:-count], resident_rows(target, 7))
        level = Level("target", target, cache, vocab_size=VOCABULARY, block=sizes.block)
        caches.append(cache)
        asked.append(Pass(level, tokens[-count:], count))
    asked[0].level.run(asked)
    assert [(each.level.stats.passes, each.level.stats.rows) for each in asked] == [(1, count) for _, count in ragged]
    assert [cache.length for cache in caches] == [length for length, _ in ragged]
    return [(own, cache.mass(len(own))) for [own], cache in zip([each.made for each in asked], caches, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["retrieval", "draft"])
def test_drafts_that_share_a_pass_have_the_bits_that_each_has_alone(decoders: Decoders, name: str, kind: str) -> None:
    """Also where one of them has more tokens to catch up with than its window. More than 64 rows would run on torch,
    whose products of all rows together round as they do on this machine: then the bits are nearly those."""
    decoder, sizes, lengths = decoders["target", kind], Sizes(), (3, 40, 12)

    def asked(length: int) -> Pass:
        cache = (
            streaming_cache(decoder, sizes)
            if name == "draft"
            else retrieval_cache(full_cache(decoder, sizes), sizes, kernels_of(decoder))
        )
        level = (StreamingLevel if name == "draft" else Level)(name, decoder, cache, vocab_size=VOCABULARY)
        return Pass(level, random_tokens(length, seed=length), min(length, 2))

    def run(passes: list[Pass]) -> list[Tensor]:
        passes[0].level.run(passes)
        return [logits for each in passes for logits in each.made]

    alone = [run([asked(length)])[0] for length in lengths]
    for first, second in zip(alone, run([asked(length) for length in lengths]), strict=True):
        if decoder.takes_any_rows:
            assert torch.equal(first, second)
        else:
            assert_close(first, second, rtol=0.02, atol=0.05)


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [4, 16])
def test_a_row_has_the_same_bits_wherever_it_stands_in_its_forward(decoders: Decoders, rows: int, kind: str) -> None:
    """21 tokens in one forward, one by one, and in threes."""
    target, tokens = decoders["target", kind], random_tokens(40)
    runs = []
    for step in (21, 1, 3):
        own = full_cache(target, Sizes(rows=rows))
        level = Level("target", target, own, vocab_size=VOCABULARY, block=rows)
        forward(level, tokens[:19], 1)
        runs.append(torch.cat([forward(level, tokens[at : at + step], step) for at in range(19, 40, step)]))
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])


@pytest.mark.parametrize("rows", [4, 16])
@pytest.mark.parametrize("kind", ["fp32 torch", "fp32 kernels"])
def test_a_tokens_logits_have_the_same_bits_however_many_logits_are_asked_for(
    decoders: Decoders, kind: str, rows: int
) -> None:
    target, tokens = decoders["target", kind], random_tokens(23)
    own = full_cache(target, Sizes(rows=rows))
    level = Level("target", target, own, vocab_size=VOCABULARY, block=rows)
    logits = forward(level, tokens, 23)
    for count in (1, 2, 3, 7, 16, 22):
        level.truncate(0)
        assert torch.equal(forward(level, tokens, count), logits[-count:])


# The engine as a whole.


@pytest.fixture(scope="module")
def engine_folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Padded vocabularies of different widths: 264 and 260, the tokenizer has 258 tokens."""
    root = tmp_path_factory.mktemp("engine")
    target = save(random_model(vocab_size=264, seed=11), root / "target", tokenizer=True)
    draft = save(random_model(vocab_size=260, seed=12, num_hidden_layers=1), root / "draft", tokenizer=True)
    return target, draft


@pytest.fixture
def in_this_process(operators: str) -> Iterator[None]:
    """The engines run few rows on `operators`."""
    with process_uses(operators):
        yield


PLAIN = Sizes()
SPECULATIVE = Sizes(gamma=5, draft_gamma=2)
ADAPTIVE = Sizes(gamma=9, draft_gamma=4, lookup=True, adaptive=True)


def engine(folders: tuple[Path, Path], sizes: Sizes, *, dtype: str = "fp32", offload: tuple[str, ...] = ()) -> Engine:
    target, draft = folders
    wanted = draft if sizes.draft_gamma else None
    plan = tiny_plan(
        target, wanted, sizes, num_prompt_tokens=120, max_tokens=72, dtype=dtype, offload=frozenset(offload)
    )
    return tiny_engine(plan, target, wanted)


Said = tuple[list[int], str, str | None]  # tokens, text, why it ended


def said(steps: Iterator[Step]) -> Said:
    all_steps = list(steps)
    tokens = [token for step in all_steps for token in step.tokens]
    return tokens, "".join(step.text for step in all_steps), all_steps[-1].finish


def text_prompt(num_tokens: int) -> list[int]:
    return random_tokens(num_tokens, seed=num_tokens, vocabulary=256)


def all_said(subject: Engine, num_tokens: int) -> list[Said]:
    """With prompts shorter and longer than the budget."""
    requests = [GenerationRequest(text_prompt(n), GREEDY, max_tokens=num_tokens) for n in (1, 33, 100)]
    return [said(subject.generate(each)) for each in requests]


@pytest.fixture(scope="module")
def plainly() -> dict[tuple[str, str], list[Said]]:
    """What engines without speculation have said, by operators and dtype."""
    return {}


@pytest.mark.few(2)
@pytest.mark.parametrize("operators", OPERATORS[::-1])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("offload", [("kv", "weights"), (), ("kv",), ("weights",)], ids=str)
@pytest.mark.usefixtures("in_this_process")
def test_the_engine_says_the_same_with_and_without_speculation(
    engine_folders: tuple[Path, Path],
    plainly: dict[tuple[str, str], list[Said]],
    offload: tuple[str, ...],
    dtype: str,
    operators: str,
) -> None:
    if (operators, dtype) not in plainly:
        with engine(engine_folders, PLAIN, dtype=dtype) as plain:
            plainly[operators, dtype] = all_said(plain, 14)
    for sizes in (SPECULATIVE, replace(SPECULATIVE, draft_gamma=0), ADAPTIVE):
        with engine(engine_folders, sizes, dtype=dtype, offload=offload) as fast:
            assert all_said(fast, 14) == plainly[operators, dtype]


@pytest.fixture(scope="module")
def reference(engine_folders: tuple[Path, Path]) -> list[Said]:
    with engine(engine_folders, PLAIN) as plain:
        return all_said(plain, 32)


@pytest.mark.parametrize("levels", [("draft", "target"), ("target",)], ids=str)
@pytest.mark.parametrize("adaptive", [True, False])
def test_a_draft_or_lookups_alone_leave_the_text_as_it_is(
    engine_folders: tuple[Path, Path], reference: list[Said], levels: tuple[LevelName, ...], adaptive: bool
) -> None:
    """The compositions planned for short contexts and for models whose weights outweigh their cache."""
    target, draft = engine_folders
    sizes = replace(ADAPTIVE, adaptive=adaptive)
    plan = tiny_plan(target, draft, sizes, num_prompt_tokens=120, max_tokens=72)
    with tiny_engine(changed(plan, draft="draft" in levels, budget=0), target, draft) as subject:
        assert all_said(subject, 32) == reference
        assert [level.name for level in subject.stats.levels] == list(reversed(levels))
        assert adaptive or subject.stats.levels[0].drafted > 0  # by measured seconds it may be that nothing pays


@pytest.mark.parametrize("gamma", [0, 5])
def test_stopping_inside_an_accepted_run_leaves_an_engine_that_says_the_same_again(
    engine_folders: tuple[Path, Path], gamma: int
) -> None:
    prompt = text_prompt(50)
    with engine(engine_folders, Sizes(gamma=gamma, budget=256)) as subject:
        tokens, text, _ = said(subject.generate(GenerationRequest(prompt, GREEDY, max_tokens=28)))
        kept = [i for i, character in enumerate(text) if character.isprintable() and text.index(character) == i]
        stop = text[kept[len(kept) // 2]]
        for _ in range(2):
            stopped, shown, finish = said(
                subject.generate(GenerationRequest(prompt, GREEDY, max_tokens=28, stop=[stop]))
            )
            assert finish == "stop"
            assert shown == text[: text.index(stop)]
            assert stopped == tokens[: len(stopped)]
            assert len(stopped) < len(tokens)
            assert subject.worker.full.length <= len(prompt) + len(stopped)
            assert said(subject.generate(GenerationRequest(prompt, GREEDY, max_tokens=28))) == (tokens, text, "length")


@pytest.mark.few(1)
@pytest.mark.parametrize("sizes", [SPECULATIVE, PLAIN], ids=["speculative", "plain"])
def test_an_engine_says_the_same_whatever_it_was_asked_before(engine_folders: tuple[Path, Path], sizes: Sizes) -> None:
    """A prompt too short for a prefill left the earlier one marked as held, so it was not run when it came again."""
    lengths, wanted = (20, 3, 20, 20, 1, 50, 20), {}
    for length in {*lengths}:
        with engine(engine_folders, PLAIN) as fresh:
            wanted[length] = said(fresh.generate(GenerationRequest(text_prompt(length), GREEDY, max_tokens=14)))
    with engine(engine_folders, sizes, offload=("kv",)) as subject:
        for length in lengths:
            request = GenerationRequest(text_prompt(length), GREEDY, max_tokens=14)
            assert said(subject.generate(request)) == wanted[length]


@pytest.mark.parametrize("offload", [(), ("kv",)], ids=str)
def test_a_prompt_taken_over_from_another_engine_is_as_good_as_prefilled(
    engine_folders: tuple[Path, Path], offload: tuple[str, ...]
) -> None:
    first, second = text_prompt(90), text_prompt(50)
    with engine(engine_folders, PLAIN) as one, engine(engine_folders, SPECULATIVE, offload=offload) as other:
        said(other.generate(GenerationRequest(second, GREEDY, max_tokens=8)))  # leaves tiles in its staging slots
        wanted = said(one.generate(GenerationRequest(first, GREEDY, max_tokens=16)))
        other.take_prompt(one)
        assert said(other.generate(GenerationRequest(first, GREEDY, max_tokens=16))) == wanted
        assert other.stats.prefill_seconds < one.stats.prefill_seconds


def test_an_abandoned_generation_leaves_an_engine_that_says_the_same_again(engine_folders: tuple[Path, Path]) -> None:
    prompt = text_prompt(50)
    with engine(engine_folders, SPECULATIVE, offload=("kv", "weights")) as subject:
        whole = said(subject.generate(GenerationRequest(prompt, GREEDY, max_tokens=12)))
        for num_steps in (0, 1, 3):
            steps = subject.generate(GenerationRequest(prompt, GREEDY, max_tokens=12))
            for _ in range(num_steps):
                next(steps)
            assert isinstance(steps, Generator)
            steps.close()
            assert said(subject.generate(GenerationRequest(prompt, GREEDY, max_tokens=12))) == whole


@pytest.mark.few(1)
@pytest.mark.parametrize("operators", OPERATORS[::-1])
@pytest.mark.usefixtures("in_this_process")
def test_a_generation_that_fails_in_a_layer_leaves_an_engine_that_says_the_same_again(
    engine_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever forward of whichever level it is, in prefill and in decoding."""
    prompt = text_prompt(50)
    with engine(engine_folders, SPECULATIVE, offload=("kv", "weights")) as subject:
        whole = said(subject.generate(GenerationRequest(prompt, GREEDY, max_tokens=12)))
        layers = {kind: kind.run for kind in (TorchLayers, NativeLayers)}
        for fatal in (0, 5, 13, 14, 15, 16, 17, 20, 33):
            calls = 0

            def failing(layer: Callable[..., None], *args: object, **more: object) -> None:
                nonlocal calls
                calls += 1
                if calls > fatal:  # noqa: B023
                    raise KeyboardInterrupt
                layer(*args, **more)

            with monkeypatch.context() as patch:
                for kind, run in layers.items():
                    patch.setattr(kind, "run", lambda *args, run=run, **more: failing(run, *args, **more))
                with pytest.raises(KeyboardInterrupt):
                    list(subject.generate(GenerationRequest(prompt, GREEDY, max_tokens=12)))
            assert said(subject.generate(GenerationRequest(prompt, GREEDY, max_tokens=12))) == whole


class Unsteady:
    """A clock on which everything takes another time, and a pass may seem to take a second."""

    def __init__(self, seed: int) -> None:
        self._random, self._now = random.Random(seed), 0.0

    def __call__(self) -> float:
        self._now += self._random.choice([1e-5, 1e-3, 1.0])
        return self._now


@pytest.mark.parametrize("operators", OPERATORS)
@pytest.mark.usefixtures("in_this_process")
def test_a_seed_fixes_what_is_sampled_on_a_machine_of_any_mood(
    engine_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths adapt to seconds, and how many tokens are drafted decides which random numbers are drawn for what."""
    prompt, sampling = text_prompt(60), SamplingParams(temperature=1.2, top_p=0.95, seed=3)
    runs = []
    for mood in range(3):
        monkeypatch.setattr(time, "perf_counter", Unsteady(mood))
        with engine(engine_folders, ADAPTIVE) as subject:
            runs.append(said(subject.generate(GenerationRequest(prompt, sampling, max_tokens=20))))
    assert runs[0] == runs[1] == runs[2]


def test_greedy_text_is_the_same_on_a_machine_of_any_mood(
    engine_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured lengths follow the clock, the text does not."""
    with engine(engine_folders, PLAIN) as plain:
        wanted = said(plain.generate(GenerationRequest(text_prompt(60), GREEDY, max_tokens=24)))
    drafted = set()
    for mood in range(3):
        monkeypatch.setattr(time, "perf_counter", Unsteady(mood))
        with engine(engine_folders, ADAPTIVE) as subject:
            assert said(subject.generate(GenerationRequest(text_prompt(60), GREEDY, max_tokens=24))) == wanted
            drafted.add(subject.stats.levels[0].drafted)
    assert len(drafted) > 1


def test_a_retrieval_level_may_rest_and_be_got_ready_again(
    engine_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it rests no masses are kept and no chunk moves; the pass before it is ready again keeps them."""
    with engine(engine_folders, PLAIN) as plain:
        wanted = said(plain.generate(GenerationRequest(text_prompt(60), GREEDY, max_tokens=24)))
    rng = random.Random(0)
    wished: list[bool] = []
    kept: list[bool] = []
    ready: list[bool] = []

    def is_retrieval(self: Adaptive, index: int) -> bool:
        return self.estimates[index].prepare_seconds.value > 0.0

    def wants(self: Adaptive, index: int) -> bool:
        if is_retrieval(self, index):
            wished.append(rng.random() < 0.6)
            return wished[-1]
        return True

    def prepared(self: Adaptive, index: int, seconds: float | None) -> None:
        self.estimates[index].ready = seconds is not None
        if is_retrieval(self, index):
            ready.append(seconds is not None)
            kept.append(subject.worker.full.record_mass)

    begin = FullCache.begin

    def slowly(self: FullCache, phase: Phase, num_rows: int) -> None:
        time.sleep(0.003)  # lengths follow measured seconds: drafts must be worth their while
        begin(self, phase, num_rows)

    monkeypatch.setattr(FullCache, "begin", slowly)
    monkeypatch.setattr(Adaptive, "wants", wants)
    monkeypatch.setattr(Adaptive, "prepared", prepared)
    with engine(engine_folders, ADAPTIVE, offload=("kv",)) as subject:
        for _ in range(2):
            wished.clear(), kept.clear(), ready.clear()
            assert said(subject.generate(GenerationRequest(text_prompt(60), GREEDY, max_tokens=24))) == wanted
            assert kept == wished
            before = [True, *kept[:-1]]  # a prompt's first pass keeps them
            assert ready == [wish and had for wish, had in zip(wished, before, strict=True)]
            assert {True, False} == set(ready)
            subject.worker.full.record_mass = (
                False  # as after a text that ended at rest: a prompt's first pass keeps them
            )
        passes = subject.stats.levels[1].passes
    assert passes > 0


def test_an_end_token_that_is_text_is_not_part_of_the_text(engine_folders: tuple[Path, Path]) -> None:
    with engine(engine_folders, PLAIN) as subject:
        tokens, *_ = said(subject.generate(GenerationRequest(text_prompt(60), GREEDY, max_tokens=20)))
        end = next(i for i, token in enumerate(tokens) if i and token not in tokens[:i])
        before, text, _ = said(subject.generate(GenerationRequest(text_prompt(60), GREEDY, max_tokens=end)))
        stopped = said(
            subject.generate(GenerationRequest(text_prompt(60), GREEDY, max_tokens=20, end_tokens=[tokens[end]]))
        )
    assert stopped == ([*before, tokens[end]], text, "stop")


def test_a_refresh_is_told_how_many_of_the_passes_rows_stayed(
    engine_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, refresh = FullCache.begin, RetrievalCache.refresh
    before, told, stayed = 0, [], []

    def watched_begin(self: FullCache, phase: Phase, num_rows: int) -> None:
        nonlocal before
        before = self.length
        begin(self, phase, num_rows)

    def watched_refresh(self: RetrievalCache, num_rows: int) -> None:
        told.append(num_rows)
        stayed.append(self.full.length - before)
        refresh(self, num_rows)

    monkeypatch.setattr(FullCache, "begin", watched_begin)
    monkeypatch.setattr(RetrievalCache, "refresh", watched_refresh)
    with engine(engine_folders, SPECULATIVE) as subject:
        said(subject.generate(GenerationRequest(text_prompt(60), GREEDY, max_tokens=28)))
    assert told == stayed
    assert len(set(told)) > 2


def test_no_random_number_of_a_request_is_used_twice(
    engine_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft with a generator of its own and the same seed would draw what the target decides by."""
    uniform, uniforms = SeededSource._uniform, list[float]()

    def watched(self: SeededSource) -> float:
        uniforms.append(uniform(self))
        return uniforms[-1]

    monkeypatch.setattr(SeededSource, "_uniform", watched)
    with engine(engine_folders, SPECULATIVE) as subject:
        said(
            subject.generate(GenerationRequest(text_prompt(40), SamplingParams(temperature=1.5, seed=0), max_tokens=20))
        )
    assert len(set(uniforms)) == len(uniforms) > 40


@pytest.mark.parametrize("sizes", [PLAIN, SPECULATIVE], ids=["plain", "speculative"])
def test_a_seed_fixes_what_is_sampled(engine_folders: tuple[Path, Path], sizes: Sizes) -> None:
    prompt = text_prompt(40)
    with engine(engine_folders, sizes) as first, engine(engine_folders, sizes, offload=("kv",)) as second:
        for seed in (0, 1):
            sampling = SamplingParams(temperature=1.5, top_p=0.95, seed=seed)
            runs = [
                said(subject.generate(GenerationRequest(prompt, sampling, max_tokens=20)))
                for subject in (first, second, first)
            ]
            assert runs[0] == runs[1] == runs[2]
        other = said(first.generate(GenerationRequest(prompt, SamplingParams(temperature=1.5, seed=2), max_tokens=20)))
        assert other != runs[0]
