"""Several sequences share passes, and each says what it says alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kit import asked
from kit.asked import NEVER, Asked, alone, check, together
from kit.models import GREEDY, Sizes, random_model, random_tokens, save, tiny_engine, tiny_plan
from kit.processor import OPERATORS, best, process_uses
from offload.decode.sampling import SamplingParams
from offload.engine.engine import Engine
from offload.engine.request import GenerationRequest
from offload.engine.sequences import Sequences
from offload.engine.step import Step
from offload.errors import DoesNotFit, UsageError
from offload.metrics import Stats
from offload.model import torch_layers
from offload.model.level import Level
from offload.model.passes import Pass, Work
from offload.weights.embedding import Embedding
from offload.worker.worker import Worker

TWO = Sizes(gamma=7, draft_gamma=3, lookup=True, adaptive=True)
FIXED = Sizes(gamma=5, draft_gamma=2)
PLAIN = Sizes()
IN_FEW_BITS = Sizes(gamma=5, draft_gamma=2, budget=0, weight_bits=4, kv_bits=4, page=32, capacity=600)
IN_WHOLE_GROUPS = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "head_dim": 16}
ROOM, OUTPUT = 92, 16
SAMPLED = SamplingParams(temperature=1.2, seed=6)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("sequences")
    return (
        save(random_model("qwen2", vocab_size=264, seed=11, **IN_WHOLE_GROUPS), root / "target", tokenizer=True),
        save(random_model(vocab_size=264, seed=12, num_hidden_layers=1), root / "draft", tokenizer=True),
    )


@contextmanager
def made(
    folders: tuple[Path, Path], sizes: Sizes, num_sequences: int, *offload: str, dtype: str = "fp32"
) -> Iterator[Engine]:
    target, draft = folders
    wanted = draft if sizes.draft_gamma else None
    plan = tiny_plan(
        target,
        wanted,
        sizes,
        num_prompt_tokens=ROOM - OUTPUT,
        max_tokens=OUTPUT,
        dtype=dtype,
        offload=frozenset(offload),
        num_sequences=num_sequences,
    )
    with tiny_engine(plan, target, wanted) as engine:
        yield engine


def some(count: int, *, seed: int, most: int = ROOM - OUTPUT) -> list[Asked]:
    return asked.some(count, seed=seed, most=most, output=OUTPUT)


@pytest.mark.few(2)
@pytest.mark.parametrize("number", [1, 8, 2, 3, 4, 5, 6, 7])
def test_each_of_one_to_eight_says_what_it_says_alone(folders, number):
    with made(folders, TWO, number) as engine:
        check(engine, some(number + 2, seed=number))


@pytest.mark.few(4)
@pytest.mark.parametrize("operators", OPERATORS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("sizes", [PLAIN, FIXED, replace(FIXED, draft_gamma=0), TWO])
def test_so_it_is_with_any_levels_and_any_operators(folders, sizes, dtype, operators):
    with process_uses(operators), made(folders, sizes, 3, dtype=dtype) as engine:
        check(engine, some(5, seed=20))


def test_so_it_is_with_weights_and_caches_quantised(folders):
    best()  # skips where there are no kernels
    with made(folders, IN_FEW_BITS, 3, dtype="bf16") as engine:
        check(engine, some(5, seed=30))


@pytest.mark.few(1)
@pytest.mark.parametrize("offload", [("kv", "weights"), ("weights",), ("kv",)])
def test_so_it_is_wherever_bytes_are(folders, offload):
    with made(folders, TWO, 3, *offload, dtype="bf16") as engine:
        check(engine, some(5, seed=40))


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(6))
def test_so_it_is_whoever_comes_and_goes(folders, seed):
    chance = random.Random(seed)
    with made(folders, chance.choice((FIXED, TWO)), chance.randint(2, 5)) as engine:
        check(engine, some(8, seed=100 * seed, most=60))


@pytest.mark.parametrize(("offload", "may"), [((), True), (("kv",), True), (("weights",), False)])
def test_they_go_on_within_prefills_where_no_weights_cross_a_link(folders, offload, may):
    """A pass would take the buffers of the layer that the prefill is at."""
    with made(folders, PLAIN, 2, *offload) as engine, Sequences[int](engine) as sequences:
        assert sequences.may_go_on_in_prefills is may


def test_passes_are_shared_and_counted_for_each(folders, monkeypatch):
    """Four greedy texts of one length take as many passes as one."""
    shared = []
    run = Level.run
    monkeypatch.setattr(Level, "run", lambda level, passes: shared.append(len(passes)) or run(level, passes))
    requests = [Asked(random_tokens(50, seed=number), GREEDY, 20) for number in range(4)]
    with made(folders, PLAIN, 4) as engine:
        _, stats = together(engine, requests)
        monkeypatch.undo()
        alone(engine, requests[0])
        [target] = engine.stats.levels
    assert shared == [4] * target.passes
    assert {each.levels[0].passes for each in stats} == {target.passes}
    assert {each.levels[0].rows for each in stats} == {target.rows}
    assert {each.output_tokens for each in stats} == {20}


def test_of_those_who_draft_the_cheapest_level_comes_first():
    """Then whoever drafts is there when the target's turn comes."""
    sequences = Sequences.__new__(Sequences)
    sequences._levels = ["draft", "retrieval", "target"]
    waiting = [SimpleNamespace(level_name=name) for name in ("retrieval", "draft", "target", "draft")]
    assert sequences._cheapest(waiting) == waiting[1::2]


def test_the_seconds_of_a_pass_are_shared_by_rows_and_what_is_fixed_equally():
    sequences = Sequences.__new__(Sequences)
    predicted = SimpleNamespace(full_pass_seconds=5.0, full_row_seconds=1.0)  # 4 of them fixed
    sequences._engines = [SimpleNamespace(plan=SimpleNamespace(predicted=predicted))]
    part = [SimpleNamespace(level_name="target", waits_for=SimpleNamespace(tokens=[7] * count)) for count in (1, 3)]
    assert sequences._shares(part) == [3 / 8, 5 / 8]


def test_streamed_weights_cross_the_link_once_for_all(folders, monkeypatch):
    """Ten more tokens of four texts take as many bytes as of one."""
    prompts = [random_tokens(50, seed=number) for number in range(4)]
    with made(folders, PLAIN, 4, "weights") as engine:
        link = engine.worker.link
        to_device, sent = link.to_device, []
        monkeypatch.setattr(link, "to_device", lambda dst, *args: sent.append(dst.nbytes) or to_device(dst, *args))

        def of_four(max_tokens: int) -> int:
            engine.prefix.truncate(0)  # every run computes all rows
            sent.clear()
            together(engine, [Asked(prompt, GREEDY, max_tokens) for prompt in prompts])
            return sum(sent)

        def of_one(max_tokens: int) -> int:
            engine.prefix.truncate(0)
            sent.clear()
            alone(engine, Asked(prompts[0], GREEDY, max_tokens))
            return sum(sent)

        of_four(1)  # every later run begins with the first layers in flight
        assert of_four(20) - of_four(10) == of_one(20) - of_one(10) > 0


def test_what_prompts_begin_with_alike_is_read_once(folders):
    """Also while the one that has it is in the middle of its text."""
    book = random_tokens(60, seed=1)
    requests = [Asked(book + random_tokens(8, seed=number), GREEDY, 24) for number in range(2, 6)]
    with made(folders, TWO, 4) as engine:
        found, stats = together(engine, requests)
        block = engine.plan.placement.prefill_block
    assert [each.reused_tokens for each in stats] == [0, *[60 // block * block] * 3]
    with made(folders, TWO, 1) as engine:
        assert found == [alone(engine, each) for each in requests]


def test_a_request_goes_to_the_sequence_that_has_most_of_its_prompt(folders, monkeypatch):
    """Then nothing has to be copied."""
    prompts, copied, copy_rows = [random_tokens(40, seed=seed) for seed in (1, 2)], [], Worker.copy_rows
    with made(folders, PLAIN, 3) as engine, Sequences[int](engine) as sequences:
        for key, prompt in enumerate(prompts):
            sequences.join(key, GenerationRequest(prompt, GREEDY, max_tokens=2))
        for key in range(2):
            sequences.leave(key)
        monkeypatch.setattr(Worker, "copy_rows", lambda *args: copied.append(args) or copy_rows(*args))
        for key in (1, 0):
            sequences.join(key, GenerationRequest(prompts[key], GREEDY, max_tokens=2))
            assert sequences.leave(key).reused_tokens > 30
    assert copied == []


def turn(sequences: Sequences[int], prompt: list[int], num_tokens: int = 6, **fields: Any) -> tuple[list[int], Stats]:
    """What a request that goes on from any rows says, alone among the others; and its statistics."""
    sequences.join(NEVER, GenerationRequest(prompt, GREEDY, max_tokens=num_tokens, **{"reuse": True} | fields))
    said: list[int] = []
    while len(said) < num_tokens:
        said += [token for key, step in sequences.steps() if key == NEVER for token in step.tokens]
    return said, sequences.leave(NEVER)


def test_conversations_go_on_where_their_rows_are_and_overwrite_no_others(folders, monkeypatch):
    """They begin alike, with fewer tokens than a block, and nothing was reused. Each of their turns reads what is new
    alone, and copies nothing."""
    book, copied, copy_rows = random_tokens(20, seed=9), [], Worker.copy_rows
    monkeypatch.setattr(Worker, "copy_rows", lambda *args: copied.append(args[2]) or copy_rows(*args))
    talks = [[*book, *random_tokens(6, seed=seed)] for seed in range(3)]
    with made(folders, PLAIN, 3) as engine, Sequences[int](engine) as sequences:
        for number in range(3):
            for which, talk in enumerate(talks):
                said, stats = turn(sequences, talk)
                if number:
                    assert stats.reused_tokens == len(talk) - 6  # but for the answer's last token, and what is new
                elif which:
                    assert stats.reused_tokens == len(book)
                talks[which] = [*talk, *said, *random_tokens(5, seed=50 + which)]
        assert copied == [20, 20]
        _, stats = turn(sequences, random_tokens(30, seed=77))  # no sequence is empty: the one used longest ago
        assert stats.reused_tokens == 0
        assert all(turn(sequences, talk)[1].reused_tokens > 40 for talk in talks[1:])


def test_rows_of_a_running_sequence_are_copied_as_far_as_its_prompt(folders):
    prompt = random_tokens(40, seed=3)
    with made(folders, TWO, 2) as engine:
        expected = alone(engine, Asked([*prompt[:27], 5, 6, 7, 8, 9], GREEDY, 6))
        engine.prefix.truncate(0)
        with Sequences[int](engine) as sequences:
            sequences.join(0, GenerationRequest(prompt, GREEDY, max_tokens=20))
            sequences.steps()
            said, stats = turn(sequences, [*prompt[:27], 5, 6, 7, 8, 9])
            assert (said, stats.reused_tokens) == (expected, min(27, 32 - engine.plan.placement.rows))


def test_a_request_that_goes_on_from_no_rows_but_a_prefills_says_what_it_says_alone(folders):
    """After requests that went on from any: as those with a seed in a server."""
    prompt = random_tokens(50, seed=4)
    with made(folders, TWO, 2) as engine:
        sampling = SamplingParams(temperature=1.2, seed=4)
        expected = alone(engine, Asked([*prompt, 1, 2, 3], sampling, 6))
        with Sequences[int](engine) as sequences:
            said, _ = turn(sequences, prompt[:30])
            turn(sequences, [*prompt[:30], *said])
            turn(sequences, prompt)
            sequences.join(1, GenerationRequest([*prompt, 1, 2, 3], sampling, max_tokens=6))
            again: list[int] = []
            while len(again) < 6:
                again += [token for _, step in sequences.steps() for token in step.tokens]
            sequences.leave(1)
    assert again == expected


POINTS = {"draft, retrieval": (TWO, ()), "offloaded": (TWO, ("kv", "weights")), "plain": (PLAIN, ())}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", POINTS)
def test_a_request_may_be_left_at_every_point_of_its_rounds(folders, name, monkeypatch, pytestconfig):
    """Before and after each pass of each level, and between two rounds: the next request says what it says alone, no
    token id from outside the vocabulary is embedded, and nothing stays allocated."""
    sizes, offload = POINTS[name]
    rows, seen = Embedding.rows, set[int]()
    monkeypatch.setattr(
        Embedding, "rows", lambda self, tokens, **more: seen.update(tokens.tolist()) or rows(self, tokens, **more)
    )
    first, second = Asked(random_tokens(60, seed=1), SAMPLED, 8), Asked(random_tokens(40, seed=2), SAMPLED, 5)
    with made(folders, sizes, 1, *offload) as engine:
        expected = alone(engine, first), alone(engine, second)
        engine.prefix.truncate(0)
        before = engine.worker.memory.allocated()
        for point in range(200):
            work = engine.in_passes(GenerationRequest(first.prompt, first.sampling, max_tokens=8))
            came = list(islice(_run(work), point))
            work.close()
            assert engine.levels["target"].length == len(engine.prefix.tokens)
            for which in (1, 0) if point % 2 else (0, 1):
                assert alone(engine, (first, second)[which]) == expected[which]
            engine.prefix.truncate(0)
            assert engine.worker.memory.allocated() == before
            if len(came) < point:
                break
    assert point > 10
    assert min(seen) >= 0
    assert max(seen) < engine.worker.vocab_size


def _run(work: Work[Step]) -> Iterator[Pass | Step]:
    """The items of `work`, each pass before and after it is run."""
    for item in work:
        yield item
        if isinstance(item, Pass):
            item.level.run([item])
            yield item


@pytest.mark.few(1)
@pytest.mark.parametrize("name", POINTS)
def test_a_request_may_fail_in_every_block_and_pass(folders, name, monkeypatch):
    """A block of a prefill, a draft, a verification: what comes next says what it says alone."""
    sizes, offload = POINTS[name]
    asked = Asked(random_tokens(60, seed=1), SAMPLED, 12)
    with made(folders, sizes, 2, *offload) as engine:
        expected, before = alone(engine, asked), engine.worker.memory.allocated()
        for point in range(200):
            turns = iter(range(10_000))

            def poll(turns: Iterator[int] = turns, point: int = point) -> None:
                if next(turns) == point:
                    raise TimeoutError

            engine.prefix.truncate(0)
            with monkeypatch.context() as patch:
                for module in ("decoder", "level"):
                    patch.setattr(f"offload.model.{module}.poll", poll)
                try:
                    together(engine, [asked, replace(asked, prompt=asked.prompt[:50])])
                except TimeoutError:
                    has_failed = True
                else:
                    has_failed = False
            assert alone(engine, asked) == expected
            assert engine.worker.memory.allocated() == before
            if not has_failed:
                break
    assert point > 20


@pytest.mark.parametrize("offload", [(), ("kv",)])
def test_all_memory_is_given_back_and_the_engine_goes_on(folders, offload):
    request = Asked(random_tokens(50), GREEDY, 20)
    with made(folders, TWO, 3, *offload) as engine:
        expected, before = alone(engine, request), engine.worker.memory.allocated()
        with Sequences[str](engine) as sequences:
            sequences.join("a", GenerationRequest(request.prompt, GREEDY, max_tokens=20))
            sequences.join("b", GenerationRequest(request.prompt, GREEDY, max_tokens=20))
            assert sequences.steps()
            assert engine.worker.memory.allocated() != before
        assert engine.worker.memory.allocated() == before
        assert alone(engine, request) == expected


def test_without_memory_for_all_of_them_nothing_stays_allocated(folders, monkeypatch):
    with made(folders, PLAIN, 4) as engine:
        before, beside, numbers = engine.worker.memory.allocated(), Engine.beside, iter(range(9))

        def fails(self: Engine) -> Engine:
            if next(numbers) == 2:
                raise DoesNotFit("no memory")
            return beside(self)

        monkeypatch.setattr(Engine, "beside", fails)
        with pytest.raises(DoesNotFit):
            Sequences(engine)
        assert engine.worker.memory.allocated() == before


@pytest.mark.parametrize("offload", [(), ("weights", "kv")])
def test_an_error_of_a_shared_pass_reaches_who_runs_it_and_all_can_be_asked_again(folders, monkeypatch, offload):
    requests = some(3, seed=50)
    with made(folders, TWO, 3, *offload) as engine:
        expected = [alone(engine, each) for each in requests]
        target = engine.worker.target
        forward, count = target.forward, iter(range(1000))

        def fails(*args: Any, **settings: Any) -> Any:
            if next(count) == 14:
                raise KeyboardInterrupt
            return forward(*args, **settings)

        monkeypatch.setattr(target, "forward", fails)
        with pytest.raises(KeyboardInterrupt):
            together(engine, [replace(each, leaves=NEVER, max_tokens=OUTPUT) for each in requests])
        assert [alone(engine, each) for each in requests] == expected


def test_a_request_for_no_tokens_ends_like_any_other(folders):
    """It ended in StopIteration."""
    nothing, other = Asked(random_tokens(50), GREEDY, 0), Asked(random_tokens(60, seed=1), GREEDY, 20)
    with made(folders, TWO, 2) as engine:
        assert list(engine.generate(GenerationRequest(nothing.prompt, GREEDY, max_tokens=0))) == [
            Step("", [], "length")
        ]
        expected = alone(engine, other)
        for requests in ([nothing], [nothing, other], [other, nothing, other, nothing, nothing]):
            found, stats = together(engine, requests)
            assert found == [expected if each is other else [] for each in requests]
            assert [each.output_tokens for each in stats] == [len(tokens) for tokens in found]


def test_no_requests_have_no_steps(folders):
    with made(folders, PLAIN, 2) as engine:
        with Sequences[int](engine) as sequences:
            assert sequences.steps() == []
        assert together(engine, []) == ([], [])


def test_a_request_may_take_all_the_room_that_is_planned(folders):
    """One more token does not fit."""
    with made(folders, TWO, 1) as engine:
        capacity = engine.plan.request.capacity
        for length in (1, capacity - 1, capacity):
            prompt = random_tokens(length)
            assert len(alone(engine, Asked(prompt, GREEDY, capacity - length))) == capacity - length
            with pytest.raises(DoesNotFit, match=f"are more than the planned {capacity}"):
                alone(engine, Asked(prompt, GREEDY, capacity - length + 1))


def test_a_request_that_cannot_be_is_refused_and_the_others_go_on(folders):
    """Lookups failed by ids that no token has, and a negative one was another token; with fewer than no tokens there
    was no answer."""
    good = Asked(random_tokens(50), GREEDY, 20)
    wrong = [
        ([], 5, "the prompt is empty"),
        ([3, 4], -1, "max_tokens is -1, it must be 0 or more"),
        ([3, -1, 4], 5, "the prompt has token -1, it must be from 0 to 257"),
        ([3, 258, 4, 258], 5, "the prompt has token 258, it must be from 0 to 257"),
        ([3, 2**40], 5, f"the prompt has token {2**40}"),
    ]
    with made(folders, TWO, 2) as engine, Sequences[int](engine) as sequences:
        expected = alone(engine, good)
        sequences.join(0, GenerationRequest(good.prompt, GREEDY, max_tokens=20))
        for prompt, max_tokens, message in wrong:
            with pytest.raises(UsageError, match=message):
                sequences.join(1, GenerationRequest(prompt, GREEDY, max_tokens=max_tokens))
            assert sequences.leave(1).output_tokens == 0
        said: list[int] = []
        while len(said) < 20:
            said += [token for _, step in sequences.steps() for token in step.tokens]
        assert said == expected


def test_an_error_of_one_prefill_leaves_the_others_as_they_are(folders):
    first, second = (Asked(random_tokens(60, seed=number), GREEDY, 20) for number in range(2))

    def fails(progress: object) -> None:
        raise TimeoutError

    with made(folders, TWO, 2) as engine:
        with Sequences[int](engine) as sequences:
            sequences.join(0, GenerationRequest(first.prompt, GREEDY, max_tokens=20))
            with pytest.raises(TimeoutError):
                sequences.join(1, GenerationRequest(second.prompt, GREEDY, max_tokens=20), on_progress=fails)
            assert sequences.leave(1).output_tokens == 0
            sequences.join(2, GenerationRequest(second.prompt, GREEDY, max_tokens=20))
            said: dict[int, list[int]] = {0: [], 2: []}
            while len(sequences):
                for key, step in sequences.steps():
                    said[key] += step.tokens
                    if step.finish is not None:
                        sequences.leave(key)
        assert [said[0], said[2]] == [alone(engine, first), alone(engine, second)]


def test_without_kernels_sequences_share_blocks(folders, monkeypatch):
    """Passes of a row each of four texts run in one block, not in four; their logits, too."""
    requests = [Asked(random_tokens(20, seed=number), GREEDY, 10) for number in range(4)]
    with process_uses("torch"), made(folders, PLAIN, 4) as engine:
        found, by_block = list[list[int]](), torch_layers._by_block
        with monkeypatch.context() as patch:
            patch.setattr(
                torch_layers, "_by_block", lambda blocks, *rest: found.append(blocks) or by_block(blocks, *rest)
            )
            together(engine, requests)
        block = engine.levels["target"].block
        _, stats = together(engine, requests)
        products = 1 + 4 * engine.worker.target.config.num_layers  # of a pass: the head, and of each layer four
    passes = [each for each in found if each is not None]  # a prefill has none
    assert passes.count([block]) >= products * (stats[0].levels[0].passes - 1)
    assert [block] * 4 not in passes
