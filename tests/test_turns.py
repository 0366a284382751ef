"""Sequences take turns: while a full pass of some waits for a tile, the others draft in the middle of it."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import asked
from asked import NEVER, Asked, alone, check, together
from models import GREEDY, LateLink, Sizes, _Late, changed, random_model, random_tokens, save, tiny_engine, tiny_plan
from offload.engine import sequences
from offload.engine.engine import Engine
from offload.kv.full import FullCache
from offload.metrics import LinkStats
from offload.transfer.link import Link, PacedLink
from processor import OPERATORS, best, process_uses

ADAPTIVE = Sizes(gamma=7, draft_gamma=3, lookup=True, adaptive=True)  # drafts or not, by the machine's speed
FIXED = Sizes(gamma=5, draft_gamma=2)
IN_FEW_BITS = Sizes(gamma=5, draft_gamma=2, budget=0, weight_bits=4, kv_bits=4, page=32, capacity=600)
ROOM, OUTPUT = 100, 24


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("turns")
    whole_groups = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "head_dim": 16}
    return (
        save(random_model("qwen2", vocab_size=264, seed=11, **whole_groups), root / "target", tokenizer=True),
        save(random_model(vocab_size=264, seed=12, num_hidden_layers=1), root / "draft", tokenizer=True),
    )


@contextmanager
def made(
    folders: tuple[Path, Path],
    sizes: Sizes,
    num_sequences: int,
    *,
    dtype: str = "bf16",
    turns: bool = True,
    link: Link | None = None,
    offload: tuple[str, ...] = ("kv",),
    **fields: Any,
) -> Iterator[Engine]:
    """Over a streamed cache whose tiles come when they are waited for and no sooner, or over another link."""
    target, draft = folders
    plan = tiny_plan(
        target,
        draft,
        sizes,
        num_prompt_tokens=ROOM - OUTPUT,
        max_tokens=OUTPUT,
        dtype=dtype,
        offload=frozenset(offload),
        num_sequences=num_sequences,
    )
    plan = changed(plan, turns=turns, **fields)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offload.worker.models.make_link", lambda *_: link or LateLink(late_in=True, late_out=True))
        engine = tiny_engine(plan, target, draft)
    with engine:
        yield engine


def some(count: int, *, seed: int) -> list[Asked]:
    return asked.some(count, seed=seed, most=ROOM - OUTPUT, output=OUTPUT)


def alike(number: int) -> list[Asked]:
    """Of one length, greedy."""
    return [Asked(random_tokens(60, seed=seed), GREEDY, OUTPUT) for seed in range(number)]


@dataclass
class Passes:
    """That were run: of which level, by how many sequences, and how many were under way then."""

    found: list[tuple[str, int, int]] = field(default_factory=list)
    depth: int = 0

    @property
    def nested(self) -> list[tuple[str, int, int]]:
        return [each for each in self.found if each[2]]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Passes:
    seen, run = Passes(), sequences._run_as_one

    def watched(part: Any) -> None:
        seen.found.append((part[0].level.stats.name, len(part), seen.depth))
        seen.depth += 1
        try:
            run(part)
        finally:
            seen.depth -= 1

    monkeypatch.setattr(sequences, "_run_as_one", watched)
    return seen


@pytest.mark.few(3)
@pytest.mark.parametrize("number", [1, 2, 5, 3, 4, 6, 7, 8])
def test_each_of_one_to_eight_says_what_it_says_alone(folders, number, passes):
    with made(folders, FIXED, number) as engine:
        check(engine, some(number + 4, seed=number))
    assert bool(passes.nested) == (number > 1)
    assert {name for name, _, _ in passes.nested} <= {"draft", "retrieval"}
    assert max(depth for _, _, depth in passes.found) <= 1


@pytest.mark.few(3)
@pytest.mark.parametrize("operators", OPERATORS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("sizes", [FIXED, replace(FIXED, draft_gamma=0), ADAPTIVE])
def test_so_it_is_with_any_levels_and_any_operators(folders, sizes, dtype, operators, passes):
    with process_uses(operators), made(folders, sizes, 3, dtype=dtype) as engine:
        check(engine, some(6, seed=20))
    assert passes.nested or sizes.adaptive


@pytest.mark.few(1)
@pytest.mark.parametrize("offload", [("kv", "weights"), ("kv",)])
def test_so_it_is_with_weights_and_caches_quantised(folders, passes, offload):
    """Also while the exact weights stream, too."""
    best()  # skips where there are no kernels
    with made(folders, IN_FEW_BITS, 3, offload=offload) as engine:
        check(engine, some(6, seed=30))
    assert ("self", 1, 1) in passes.nested


def test_without_turns_or_with_tiles_that_have_come_nothing_is_nested(folders, passes):
    for turns, late in ((False, True), (True, False)):
        with made(folders, FIXED, 3, turns=turns, link=LateLink(late_in=late, late_out=late)) as engine:
            check(engine, some(4, seed=40))
    assert passes.found
    assert not passes.nested


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(3))
def test_so_it_is_whenever_tiles_come(folders, seed, passes, monkeypatch):
    dice = random.Random(seed)
    monkeypatch.setattr(_Late, "happened", lambda copy: copy._done or dice.random() < 0.5)
    with made(folders, FIXED, 4) as engine:
        check(engine, some(8, seed=100 + seed))
    assert passes.nested


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(2))
def test_so_it_is_beside_threads_that_copy(folders, seed):
    """At any speed: the link is paced and now and then late."""
    dice = random.Random(seed)
    link = PacedLink(2e8, delay=lambda: dice.choice((0.0, 0.0, 1e-3)))
    with made(folders, FIXED, 4, link=link) as engine:
        check(engine, some(6, seed=200 + seed))


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """Who was in each full pass of several."""
    found, run_together = list[set[int]](), sequences.run_together

    def watched(levels: Any, continuations: Any) -> Any:
        if levels[0].stats.name == "target":
            found.append({id(level) for level in levels})
        return run_together(levels, continuations)

    monkeypatch.setattr(sequences, "run_together", watched)
    return found


def test_two_groups_take_turns(folders, passes, groups):
    """Of four texts of one kind, until the first one ends: two in each full pass, not those of the last one; and the
    others draft in the middle of it, side by side, and at no other time."""
    with made(folders, FIXED, 4) as engine:
        together(engine, alike(4))
    until = passes.found[: len(passes.found) // 2]
    assert {each for each in until if not each[2]} == {("target", 2, 0)}
    assert {("draft", 2, 1), ("retrieval", 2, 1)} <= {each for each in until if each[2]}
    assert len(groups) > 4
    assert all(not one & other for one, other in pairwise(groups[:5]))


def test_where_all_wait_for_a_full_pass_those_are_first_who_have_waited_longest(folders, groups):
    """Nothing is drafted here."""
    with made(folders, Sizes(), 4) as engine:
        together(engine, alike(4))
    assert len(groups) > OUTPUT
    assert all(not one & other for one, other in pairwise(groups))


def test_who_drafts_in_the_middle_of_a_pass_goes_on_as_it_does_elsewhere(folders, passes, monkeypatch):
    """Passes run in torch's inference mode, and what decoding makes of them does not."""
    modes, go_on = list[tuple[bool, bool]](), sequences._Running.go_on

    def watched(running: Any) -> Any:
        modes.append((passes.depth > 0, torch.is_inference_mode_enabled()))
        return go_on(running)

    monkeypatch.setattr(sequences._Running, "go_on", watched)
    with made(folders, FIXED, 2) as engine:
        together(engine, alike(2))
    assert set(modes) == {(False, False), (True, False)}


@pytest.mark.few(2)
@pytest.mark.parametrize("where", ["pass", "after"])
@pytest.mark.parametrize("after", [0, 3, 10])
def test_an_error_in_the_middle_breaks_off_both_and_all_can_be_asked_again(folders, monkeypatch, passes, where, after):
    """In a nested pass, or in what its sequence makes of it."""
    requests = [replace(each, leaves=NEVER, max_tokens=OUTPUT) for each in some(4, seed=50)]
    with made(folders, FIXED, 4) as engine:
        expected = [alone(engine, each) for each in requests]
        left, watched, go_on = iter(range(after)), sequences._run_as_one, sequences._Running.go_on

        def fails(*args: Any) -> Any:
            if passes.depth and next(left, None) is None:
                raise KeyboardInterrupt
            return (watched if where == "pass" else go_on)(*args)

        with monkeypatch.context() as patch:
            if where == "pass":
                patch.setattr(sequences, "_run_as_one", fails)
            else:
                patch.setattr(sequences._Running, "go_on", fails)
            with pytest.raises(KeyboardInterrupt):
                together(engine, requests)
        assert engine.worker.full.pages.access["decode"]._meanwhile is None
        assert [alone(engine, each) for each in requests] == expected
        found, _ = together(engine, requests)
        assert found == expected


@pytest.mark.parametrize("rests", [False, True])
def test_what_is_drafted_in_the_middle_of_a_pass_costs_nothing_while_tiles_are_on_their_way(
    folders, monkeypatch, rests
):
    """By a clock that runs in nested passes alone. So far does it pay to draft: a link that rests gives no time away.
    Statistics have all seconds where they were spent."""
    now, depth, run = [0.0], [0], sequences._run_as_one

    def watched(part: Any) -> None:
        depth[0] += 1
        try:
            run(part)
            now[0] += 1.0 * (depth[0] > 1)
        finally:
            depth[0] -= 1

    charged = defaultdict[str, float](float)
    go_on = sequences._Running.go_on

    def noted(running: Any) -> Any:
        asked, since = running._answered, running.since
        step = go_on(running)
        if asked is not None:
            charged[asked.level.stats.name] += now[0] - since - asked.waited
        return step

    clock = SimpleNamespace(perf_counter=lambda: now[0])
    requests = alike(4)
    with made(folders, FIXED, 4) as engine:
        monkeypatch.setattr(sequences, "_run_as_one", watched)
        monkeypatch.setattr(sequences._Running, "go_on", noted)
        monkeypatch.setattr(sequences, "time", clock)
        monkeypatch.setattr("offload.transfer.timing.time", clock)
        monkeypatch.setattr(FullCache, "link_idle", property(lambda _: rests))
        _, stats = together(engine, requests)
    drafted = sum(seconds for name, seconds in charged.items() if name != "target")
    assert now[0] > 0
    assert (charged["target"], drafted) == pytest.approx((0.0, now[0]) if rests else (now[0], 0.0))
    assert {level.seconds for each in stats for level in each.levels if level.name == "target"} == {0.0}
    meanwhile = sum(level.meanwhile_seconds for each in stats for level in each.levels)
    assert meanwhile == pytest.approx(now[0])


def test_a_link_does_not_rest_while_tiles_of_one_of_two_are_on_their_way(folders, monkeypatch):
    """By a clock that every pass moves on."""
    now, found = [0.0], set[tuple[tuple[bool, ...], bool]]()
    run, draft = sequences._run_as_one, sequences.Sequences._draft

    def watched(part: Any) -> None:
        run(part)
        now[0] += 1.0

    def noted(running: Any, under_way: Any, caches: Any) -> bool:
        before = running._exposed_seconds
        drafted = draft(running, under_way, caches)
        if drafted:
            found.add((tuple(cache in resting for cache in caches), running._exposed_seconds > before))
        return drafted

    with made(folders, FIXED, 4) as engine:
        resting = [engine.worker.full]
        monkeypatch.setattr(sequences, "_run_as_one", watched)
        monkeypatch.setattr(sequences.Sequences, "_draft", noted)
        monkeypatch.setattr(sequences, "time", SimpleNamespace(perf_counter=lambda: now[0]))
        monkeypatch.setattr(FullCache, "link_idle", property(lambda cache: cache in resting))
        together(engine, alike(4))
    assert found & {((True, False), False), ((False, True), False)}
    assert all(exposed == all(rests) for rests, exposed in found)


def test_a_link_rests_once_all_tiles_have_come(folders):
    with made(folders, FIXED, 2) as engine:
        alone(engine, *alike(1))
        full = engine.worker.full
        full.fetch_ahead()
        under_way = [slot.full for slot in full.pages.access["decode"]._slots]
        assert len(under_way) > 1
        for each in under_way:
            assert not full.link_idle
            each.wait()
        assert full.link_idle


def test_only_what_streams_has_bytes_that_cross_the_link(folders, monkeypatch):
    """Over a link that brings something whenever one looks: what comes while others draft is the target's."""
    come = count(1)
    monkeypatch.setattr(
        LateLink, "stats", property(lambda link: LinkStats(next(come)), lambda link, stats: None), raising=False
    )
    with made(folders, FIXED, 2) as engine:
        _, stats = together(engine, alike(2))
    assert all(bool(level.link_bytes) == (level.name == "target") for each in stats for level in each.levels)


def test_as_many_tiles_are_staged_as_planned(folders):
    with made(folders, FIXED, 2, staging_tiles=5) as engine:
        tile = engine.worker.full.shape.nbytes
        assert engine.worker.memory.allocated()["device"]["kv staging"] == 5 * tile
