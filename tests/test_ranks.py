"""Several ranks give what one gives: tokens, bits where they are promised, sessions; and they stay in step.

Ranks 1 and on are processes, and talk by sockets and gloo; rank 0 is this one. In fp32 the tiny models' best tokens are
far enough apart for another order of sums to choose no other.
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from kit.asked import Asked, alone, check, some, together
from kit.faults import fails_later, has_less_memory, in_pieces, stops_itself, sum_in_pieces
from kit.forked import Forked, forked_ranks
from kit.models import GREEDY, Sizes, changed, perturbed, random_model, random_tokens, save, tiny_engine, tiny_plan
from kit.processor import process_uses
from offload.decode.sampling import SamplingParams
from offload.engine.engine import Engine
from offload.engine.request import GenerationRequest
from offload.errors import DoesNotFit, RankFailed, SessionError, UsageError
from offload.kernels.cpu import VARIABLE, kernels
from offload.kv.full import FullCache
from offload.kv.retrieval import RetrievalCache
from offload.model.passes import Pass, forward
from offload.ranks import rendezvous, watch
from offload.ranks.leader import COMPARED_FORWARDS, LeadingWorker
from offload.ranks.sums import Sums
from offload.session.catalogue import inspect
from offload.session.fingerprints import identity_of
from offload.session.store import Store

SIZES = Sizes(gamma=7, draft_gamma=3, budget=48, window=32, lookup=True, adaptive=True)
FIXED = replace(SIZES, adaptive=False)  # lengths that follow no clock
PLAIN = Sizes()
FAMILIES = ("mistral", "llama-biased", "llama-mha", "llama-gqa", "llama-tied", "qwen3")  # KV heads: 1, 2, 4, 2, 2, 2
OFFLOADS = [("kv",), ("weights",), ("kv", "weights")]
TOLERANCE = 2e-5  # of rows in fp32, see test_prefix
PROMPT = random_tokens(60, seed=7)
NUM_NEW = 12  # tokens that are said, unless told otherwise
ALL = len(PROMPT) + NUM_NEW - PLAIN.rows  # tokens whose rows are cached then, at least


class Folders(dict[str, tuple[Path, Path]]):
    """Target and draft by family, written when they are asked for."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root

    def __missing__(self, family: str) -> tuple[Path, Path]:
        model, folder = random_model(family, vocab_size=264, seed=11), self.root / family
        target = save(model, folder / "target", tokenizer=True)
        self[family] = target, save(perturbed(model, 0.03), folder / "draft", tokenizer=True)
        return self[family]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("ranks"))


@pytest.fixture
def forked() -> Iterator[list[Forked]]:
    with forked_ranks() as started:
        yield started


def make(
    folders: Folders,
    num_ranks: int,
    sizes: Sizes = SIZES,
    *,
    family: str = "llama-gqa",
    dtype: str = "fp32",
    offload: tuple[str, ...] = (),
    room: int = 200,
    num_sequences: int = 1,
) -> Engine:
    target, draft = folders[family]
    wanted = draft if sizes.draft_gamma else None
    plan = tiny_plan(
        target,
        wanted,
        sizes,
        num_prompt_tokens=room - 60,
        max_tokens=60,
        dtype=dtype,
        offload=frozenset(offload),
        num_sequences=num_sequences,
    )
    return tiny_engine(changed(plan, num_devices=num_ranks), target, wanted)


def say(
    engine: Engine,
    prompt: list[int] = PROMPT,
    num_tokens: int = NUM_NEW,
    *,
    seed: int | None = None,
    reuse: bool = False,
) -> list[int]:
    sampling = GREEDY if seed is None else SamplingParams(temperature=1.5, seed=seed)
    steps = engine.generate(GenerationRequest(prompt, sampling, max_tokens=num_tokens, reuse=reuse))
    return [token for step in steps for token in step.tokens]


def rows_of(engine: Engine, length: int) -> Tensor:
    """Rows of all heads, [L, 2, H_kv, length, D]."""
    kept = engine.worker.kept
    kept.each("wait_home")
    pages = [torch.stack(kept.tensors(kept["rows"], unit)).clone() for unit in kept["rows"].units(length)]
    return torch.cat(pages, 3)[:, :, :, :length]


# The same tokens


@pytest.mark.few(2)
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_say_what_one_says(folders: Folders, family: str, num_ranks: int) -> None:
    """Rows of all heads are those of one rank, too, but for rounding."""
    with make(folders, 1, PLAIN, family=family) as alone:
        wanted, rows = say(alone), rows_of(alone, ALL)
    with make(folders, num_ranks, FIXED, family=family) as engine:
        assert say(engine) == wanted
        assert engine.stats.levels[0].accepted > 0
        assert rows_of(engine, ALL).shape == rows.shape
        assert (rows_of(engine, ALL) - rows).abs().max() < TOLERANCE
        plainly = engine.generate(GenerationRequest(PROMPT, GREEDY, max_tokens=NUM_NEW, speculation=False))
        assert [token for step in plainly for token in step.tokens] == wanted


@pytest.mark.few(1)
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("offload", OFFLOADS, ids=",".join)
def test_ranks_that_offload_say_the_same(folders: Folders, offload: tuple[str, ...]) -> None:
    with make(folders, 1, PLAIN) as alone:
        wanted = [say(alone), say(alone, PROMPT[:20])]
    with make(folders, 2, offload=offload) as engine:
        assert [say(engine), say(engine, PROMPT[:20])] == wanted
        assert all(rank.bytes_to_device > 0 for rank in engine.worker.rank_stats())


@pytest.mark.usefixtures("forked")
def test_a_seeded_run_repeats_and_is_that_of_one_rank(folders: Folders) -> None:
    with make(folders, 1) as alone:
        wanted = [say(alone, seed=seed) for seed in (1, 2)]
    for num_ranks in (2, 4):
        with make(folders, num_ranks) as engine:
            assert [say(engine, seed=seed) for seed in (1, 2, 1)] == [*wanted, wanted[0]]


# The same bits


@dataclass
class Heard:
    """The target's logits by position; of a token that was rejected, those that came in its place."""

    logits: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, before: int, after: int, logits: Tensor) -> None:
        self.logits |= dict(zip(range(after - len(logits), after), logits.clone(), strict=True))


def spoken(engine: Engine) -> tuple[list[int], Tensor]:
    """Tokens, and the bits of the logits of each."""
    heard, target = Heard(), engine.levels["target"]
    run = target.run

    def heard_run(passes: Sequence[Pass]) -> None:
        before = target.length
        run(passes)
        heard(before, target.length, passes[0].made[0])

    target.run = heard_run  # type: ignore[method-assign]
    tokens = say(engine)
    del target.run
    first = len(PROMPT) - 1
    return tokens, torch.stack([heard.logits[first + i] for i in range(len(tokens))])


@pytest.mark.few(1)
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_speculation_changes_no_bit(folders: Folders, num_ranks: int, pytestconfig: pytest.Config) -> None:
    with make(folders, num_ranks, PLAIN, dtype="bf16") as engine:
        tokens, logits = spoken(engine)
    for gamma, draft_gamma in ((4, 0), (11, 3)) if pytestconfig.getoption("deep") else ((11, 3),):
        with make(folders, num_ranks, Sizes(gamma=gamma, draft_gamma=draft_gamma), dtype="bf16") as engine:
            drafted = spoken(engine)
            assert engine.stats.levels[0].drafted > 0
        assert drafted[0] == tokens
        assert torch.equal(drafted[1], logits)


def rows_by_block(engine: Engine) -> dict[int, Tensor]:
    """The logits after the same 12 tokens, so many of them in a pass."""
    target, found = engine.levels["target"], {}
    engine.worker.prefill(PROMPT, lambda num_tokens: None)
    more = random_tokens(12, seed=8)
    for count in (1, 2, 3, 12):
        runs = [forward(target, more[start : start + count], count) for start in range(0, 12, count)]
        found[count] = torch.cat(runs)
        target.truncate(len(PROMPT))
    return found


def differing(found: dict[int, Tensor]) -> list[int]:
    return [count for count, logits in found.items() if not torch.equal(logits, found[1])]


@pytest.mark.few(2)
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(folders: Folders, dtype: str, num_ranks: int) -> None:
    with make(folders, num_ranks, PLAIN, dtype=dtype) as engine:
        assert differing(rows_by_block(engine)) == []


def test_with_a_librarys_sums_they_would(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sums, "total", in_pieces)
    with forked_ranks(sum_in_pieces), make(folders, 4, PLAIN) as engine:
        assert differing(rows_by_block(engine)) != []


# Sessions


def keep(engine: Engine, folders: Folders, path: Path, *, read_only: bool = False) -> Store:
    return Store.open(path, identity_of(folders["llama-gqa"][0], engine.plan), read_only=read_only)


@pytest.mark.few(2)
@pytest.mark.usefixtures("forked", "unsynced")
@pytest.mark.parametrize("offload", [(), ("kv", "weights")], ids=["resident", "offloaded"])
@pytest.mark.parametrize(("saving", "opening"), [(1, 2), (2, 1), (4, 2), (2, 4)])
def test_a_session_of_one_layout_opens_in_another(
    folders: Folders, tmp_path: Path, saving: int, opening: int, offload: tuple[str, ...]
) -> None:
    """With four ranks two have the same KV head. Rows are read back bit for bit and go on as they did; a save writes
    what came since."""
    with make(folders, saving, offload=offload) as engine, keep(engine, folders, tmp_path) as store:
        text = PROMPT + say(engine, reuse=True)
        engine.save(store, {})
        rows = rows_of(engine, len(store.tokens))
        wanted = say(engine, [*text, 5], reuse=True)
    before = set(tmp_path.glob("page-*"))
    with make(folders, opening) as engine, keep(engine, folders, tmp_path) as store:
        assert engine.restore(store, [*text, 5]) == len(text) - 1
        assert torch.equal(rows_of(engine, len(store.tokens)), rows)
        assert say(engine, [*text, 5], reuse=True) == wanted
        assert engine.stats.reused_tokens == len(text) - SIZES.rows + 1
        engine.save(store, {})
        tokens, rows = engine.prefix.tokens, rows_of(engine, len(engine.prefix.tokens))
    assert len(before & set(tmp_path.glob("page-*"))) == (len(text) - SIZES.rows) // SIZES.page
    with make(folders, 1) as alone, keep(alone, folders, tmp_path, read_only=True) as store:
        alone.restore(store, tokens)
        assert torch.equal(rows_of(alone, len(tokens)), rows)


@pytest.mark.few(1)
@pytest.mark.usefixtures("forked", "unsynced")
@pytest.mark.parametrize(("saving", "opening"), [(1, 2), (2, 1)])
def test_packed_pages_are_of_all_heads(folders: Folders, tmp_path: Path, saving: int, opening: int) -> None:
    with process_uses("kernels"):
        with make(folders, saving, dtype="bf16") as engine, keep(engine, folders, tmp_path) as store:
            say(engine)
            engine.save(store, {})
            tokens, rows = engine.prefix.tokens, rows_of(engine, len(store.tokens))
        assert sum(page.packed != "" for page in inspect(tmp_path).parts["rows"]) >= len(tokens) // SIZES.page // 2
        with make(folders, opening, dtype="bf16") as engine, keep(engine, folders, tmp_path) as store:
            assert engine.restore(store, tokens) == len(tokens)
            assert torch.equal(rows_of(engine, len(tokens)), rows)


@pytest.mark.usefixtures("forked", "unsynced")
def test_a_damaged_page_is_refused_and_the_ranks_go_on(folders: Folders, tmp_path: Path) -> None:
    with make(folders, 2) as engine:
        wanted = say(engine)
        with keep(engine, folders, tmp_path) as store:
            engine.save(store, {})
        page = sorted(tmp_path.glob("page-*"))[3]
        page.write_bytes(page.read_bytes()[:-1] + b"\x01")
        with keep(engine, folders, tmp_path) as store:
            engine.prefix.truncate(0)
            with pytest.raises(SessionError, match=page.name):
                engine.restore(store, PROMPT)
            assert engine.num_cached == 0
            assert say(engine) == wanted


# Other plans, and memory


@pytest.mark.usefixtures("forked")
def test_ranks_go_on_under_another_plan(folders: Folders) -> None:
    with make(folders, 1, room=250) as alone:
        text = PROMPT + say(alone)
        wanted, plan = say(alone, text), changed(alone.plan, num_devices=2)
    with make(folders, 2) as engine:
        say(engine)
        engine.replan(plan)
        assert say(engine, text, reuse=True) == wanted
        assert engine.stats.reused_tokens >= len(text) - SIZES.rows


@pytest.mark.few(1)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_plan_that_one_rank_has_no_memory_for_changes_nothing(folders: Folders, num_ranks: int) -> None:
    with forked_ranks(has_less_memory), make(folders, num_ranks) as engine:
        wanted, plan, memory = say(engine), engine.plan, engine.worker.rank_stats()
        with pytest.raises(DoesNotFit, match="rank 1: this rank has no memory"):
            engine.replan(changed(plan, max_tokens=110))
        assert engine.plan is plan
        assert [rank.device_bytes for rank in engine.worker.rank_stats()] == [rank.device_bytes for rank in memory]
        assert say(engine) == wanted


def test_a_model_that_one_rank_has_no_memory_for_leaves_nothing(folders: Folders) -> None:
    """All ranks have ended, and the next engine can have its own."""
    with forked_ranks(has_less_memory), pytest.raises(DoesNotFit, match="rank 1: this rank has no memory"):
        make(folders, 2, room=250)
    assert not dist.is_initialized()
    with forked_ranks(has_less_memory), make(folders, 2) as engine:
        assert len(say(engine)) == NUM_NEW


@pytest.mark.usefixtures("forked")
def test_a_process_may_have_two_engines_of_several_ranks(folders: Folders) -> None:
    """Each has a memory of its own for its sums."""
    with make(folders, 2) as engine, make(folders, 4) as other:
        assert say(engine) == say(other) == say(engine)


@pytest.mark.usefixtures("forked")
def test_without_kernels_ranks_say_the_same_over_torch_distributed(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with torchrun: there a process has one such engine."""
    monkeypatch.setenv(VARIABLE, "off")
    kernels.cache_clear()
    try:
        with make(folders, 1, PLAIN) as alone:
            wanted = say(alone)
        with make(folders, 2, PLAIN) as engine:
            assert dist.is_initialized()
            assert say(engine) == wanted
            with pytest.raises(UsageError, match="close that engine"):
                make(folders, 2)
            assert say(engine) == wanted
    finally:
        kernels.cache_clear()


# Broken off


class Once:
    """Raises KeyboardInterrupt at its call number `at`, in place of `work`, and never again."""

    def __init__(self, work: Callable[..., Tensor], at: int) -> None:
        self.work, self.left = work, at

    def __call__(self, *args: object) -> Tensor:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return self.work(*args)


@pytest.fixture(scope="module")
def texts(folders: Folders) -> list[list[int]]:
    """Of a rank alone: first the answer to a part of the prompt, then to all of it."""
    with make(folders, 1) as alone:
        return [say(alone, PROMPT[:30]), say(alone)]


@pytest.mark.few(1)
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_forward_that_rank_0_breaks_off_leaves_all_ranks_in_step(
    folders: Folders, texts: list[list[int]], num_ranks: int, num_cases: Callable[[int], int]
) -> None:
    """Wherever that is: in a prefill, a verification or a draft, between any two sums. With rows that are kept."""
    chance = random.Random(num_ranks)
    layers, num_broken, num_trials = {FullCache: 60, RetrievalCache: 30}, 0, num_cases(80 // num_ranks)
    with make(folders, num_ranks, FIXED) as engine:
        for _ in range(num_trials):
            cache = chance.choice(list(layers))
            broken = Once(cache.attend, chance.randrange(1, layers[cache]))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(cache, "attend", lambda *args, broken=broken: broken(*args))
                with suppress(KeyboardInterrupt):
                    say(engine, num_tokens=60)
            num_broken += broken.left <= 0
            if chance.random() < 0.5:
                assert say(engine, PROMPT[:30]) == texts[0]
            assert say(engine, reuse=chance.random() < 0.5) == texts[1]
    assert num_broken > num_trials / 2


@pytest.mark.few(1)
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("offload", [(), ("kv", "weights")], ids=["resident", "offloaded"])
def test_a_request_that_is_given_up_leaves_all_ranks_in_step(
    folders: Folders, texts: list[list[int]], offload: tuple[str, ...]
) -> None:
    def stop(progress: object) -> None:
        raise KeyboardInterrupt

    with make(folders, 2, offload=offload) as engine:
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                next(engine.generate(GenerationRequest(PROMPT, GREEDY, max_tokens=NUM_NEW), on_progress=stop))
            assert say(engine) == texts[1]
            steps = engine.generate(GenerationRequest(PROMPT[:30], GREEDY, max_tokens=NUM_NEW))
            next(steps)
            steps.close()
            assert say(engine, reuse=True) == texts[1]
            with pytest.raises(KeyboardInterrupt):
                engine.precompute([*PROMPT, *PROMPT[:20]], on_progress=stop)
            assert say(engine, PROMPT[:30]) == texts[0]


@pytest.mark.usefixtures("forked")
def test_a_text_may_be_given_up_after_its_engine_was_closed(folders: Folders) -> None:
    """As where a signal comes between two steps: five seconds later a BrokenPipeError was written."""
    with make(folders, 2) as engine:
        steps = engine.generate(GenerationRequest(PROMPT, GREEDY, max_tokens=NUM_NEW))
        next(steps)
    steps.close()
    with pytest.raises(RankFailed, match="the ranks were ended"):
        say(engine)


# Several sequences


def ragged(seed: int) -> list[Asked]:
    return some(5, seed=seed, most=60, output=12)


@pytest.mark.few(1)
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("num_ranks", "offload", "operators"),
    [
        *[(2, ("kv",), "kernels"), (2, ("kv", "weights"), "kernels"), (2, (), "kernels")],
        *[(2, (), "torch"), (4, (), "kernels")],
    ],
)
def test_sequences_of_ranks_say_what_each_says_alone(
    folders: Folders, num_ranks: int, offload: tuple[str, ...], operators: str
) -> None:
    """Ragged ones that come, go and begin alike, in bf16, where other bits would soon be other tokens."""
    with (
        process_uses(operators),
        make(folders, num_ranks, FIXED, dtype="bf16", offload=offload, num_sequences=3) as engine,
    ):
        check(engine, ragged(num_ranks))


@pytest.mark.usefixtures("forked")
def test_sequences_of_ranks_share_passes_and_what_they_begin_with(folders: Folders) -> None:
    """Three texts of one length are as many messages and sums as one, once their prompts are read."""
    book = random_tokens(100, seed=1)
    requests = [Asked(book + random_tokens(8, seed=number), GREEDY, 20) for number in range(3)]
    with make(folders, 2, PLAIN, num_sequences=3) as engine:
        worker = engine.worker
        assert isinstance(worker, LeadingWorker)
        team, told = worker._lead.team, list[dict[str, Any]]()
        tell = team.tell
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(team, "tell", lambda verb, **said: told.append({"verb": verb} | said) or tell(verb, **said))
            found, stats = together(engine, requests)
        forwards = [len(each["parts"]) for each in told if each["verb"] == "forward"]
        assert found == [alone(engine, each) for each in requests]
        block = engine.plan.placement.prefill_block
    assert forwards == [3] * stats[0].levels[0].passes
    assert [each.reused_tokens for each in stats] == [0, *[100 // block * block] * 2]


@pytest.mark.few(1)
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("offload", [(), ("kv", "weights")], ids=["resident", "offloaded"])
def test_a_shared_pass_that_rank_0_breaks_off_leaves_all_ranks_in_step(
    folders: Folders, num_cases: Callable[[int], int], offload: tuple[str, ...]
) -> None:
    """Wherever that is; afterwards all memory is given back and every sequence can be asked again."""
    chance, requests, num_broken = random.Random(5), ragged(5), 0
    with make(folders, 2, FIXED, offload=offload, num_sequences=3) as engine:
        expected = [alone(engine, each) for each in requests]
        before = [rank.device_bytes for rank in engine.worker.rank_stats()]
        for _ in range(num_cases(12)):
            broken = Once(FullCache.attend, chance.randrange(1, 80))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(FullCache, "attend", lambda *args, broken=broken: broken(*args))
                with suppress(KeyboardInterrupt):
                    together(engine, requests)
            num_broken += broken.left <= 0
            assert [rank.device_bytes for rank in engine.worker.rank_stats()] == before
            number = chance.randrange(len(requests))
            assert alone(engine, requests[number]) == expected[number]
    assert num_broken > 0


# Faults


@pytest.mark.usefixtures("forked")
def test_tokens_that_differ_between_ranks_are_found(folders: Folders) -> None:
    with make(folders, 2, PLAIN) as engine:
        worker = engine.worker
        assert isinstance(worker, LeadingWorker)
        steps = engine.generate(GenerationRequest(PROMPT, GREEDY, max_tokens=2 * COMPARED_FORWARDS))
        for _ in range(3):
            next(steps)
        worker._record._tokens[5] += 1
        with pytest.raises(RankFailed, match=r"rank 1 failed: its first \d+ tokens are not those of rank 0"):
            list(steps)


def say_for_ever(engine: Engine) -> None:
    while True:
        say(engine)


def test_an_error_of_a_rank_ends_all_and_is_shown(folders: Folders) -> None:
    message = r"rank 2 failed: AssertionError.*; the other ranks are ended"
    with forked_ranks(fails_later), make(folders, 4) as engine, pytest.raises(RankFailed, match=message):
        say_for_ever(engine)


@pytest.mark.few(1)
@pytest.mark.parametrize("killed", [1, 2, 3])
def test_of_four_ranks_the_one_that_died_is_named(folders: Folders, killed: int) -> None:
    """Its neighbours lose their connections to it at the same moment, and rank 0 does."""
    for num_steps in range(2):
        with forked_ranks() as started, make(folders, 4) as engine:
            steps = engine.generate(GenerationRequest(PROMPT, GREEDY, max_tokens=60))
            for _ in range(num_steps):
                next(steps)
            started[killed - 1].kill()
            with pytest.raises(RankFailed, match=rf"rank {killed} ended \(killed by signal 9\); the other ranks are"):
                list(steps)


def test_a_rank_that_is_stopped_before_it_was_heard_is_named(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended the run after 121 seconds with the words "for 7 seconds"."""
    monkeypatch.setattr(watch, "START_SECONDS", 1.0)
    message = "rank 1 has not been heard of since its start, for 1 seconds; the other ranks are ended"
    with forked_ranks(stops_itself), pytest.raises(RankFailed, match=message):
        make(folders, 2)


# Strangers


def test_nobody_elses_connections_reach_the_ranks(folders: Folders, forked: list[Forked]) -> None:
    """Their store listened on every interface. What listens now does to this machine alone, and goes on whoever
    connects."""
    with make(folders, 2) as engine, ExitStack() as held:
        wanted = say(engine)
        processes = [psutil.Process(), *(psutil.Process(rank.pid) for rank in forked)]
        sockets = [each for process in processes for each in process.net_connections("tcp")]
        doors = {each.laddr for each in sockets if each.status == psutil.CONN_LISTEN}
        assert {door.ip for door in doors} <= {"127.0.0.1"}
        for door in doors:
            for said in [b""] * 50 + [b"\0" * 8, b"\1" + b"\0" * 7, random.Random(1).randbytes(99)]:
                held.enter_context(socket.create_connection(door)).sendall(said)
        assert say(engine) == wanted


def test_a_system_without_files_to_meet_by_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(UsageError, match="2 ranks on one machine need Linux"):
        rendezvous.start(2)


# Numbers


@pytest.mark.usefixtures("forked")
def test_each_rank_moves_its_share_over_its_own_link(folders: Folders) -> None:
    """The tiles that are fetched ahead may still be on their way when bytes are counted. Hidden rows of a prefill are
    whole on each rank, and cross its link between two layers."""
    with make(folders, 1, PLAIN, offload=("kv",)) as alone:
        say(alone)
        alone.worker.kept.each("wait_home")
        whole, config = alone.worker.link_stats, alone.worker.target.config
    hidden = (config.num_layers - 1) * (len(PROMPT) - PLAIN.rows) * config.hidden_size * 4
    with make(folders, 2, PLAIN, offload=("kv",)) as engine:
        say(engine)
        engine.worker.kept.each("wait_home")
        ranks = engine.worker.rank_stats()
    assert [rank.rank for rank in ranks] == [0, 1]
    for rank in ranks:
        assert 2 * (rank.bytes_to_device - hidden) == pytest.approx(whole.bytes_to_device - hidden, rel=0.02)
        assert 2 * (rank.bytes_to_host - hidden) == whole.bytes_to_host - hidden
        assert rank.link_seconds > 0
        assert rank.sum_seconds > 0
