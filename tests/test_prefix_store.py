"""The prefix store: rows that it gives back are those of a prefill, bit for bit, or they are computed again."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from kit.asked import Asked, together
from kit.families import save_tiny
from kit.forked import PROCESSES, forked
from kit.models import Sizes, changed, random_tokens, save_pair, tiny_plan
from kit.sessions import IDENTITY, PAGE, Rows, bits
from kit.store_users import CONDITIONS, ENOUGH, PARTS, TOKENS, keep, keep_forever, no_progress, opened, read, text, use
from offload.decode.sampling import SamplingParams
from offload.engine.engine import Engine, load_tokenizer
from offload.engine.request import GenerationRequest
from offload.kv.kept import Kept
from offload.plan.planner import Plan
from offload.progress import Progress
from offload.session.conditions import Conditions
from offload.session.fingerprints import identity_of
from offload.session.prefix_store import PrefixStore
from offload.session.store import Store
from offload.session.store_files import clear, nbytes, pages_of, remove, shrink, summaries
from offload.units import size

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.0, seed=3)


@pytest.fixture(autouse=True)
def _short_prompts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.engine.prefix.LEAST_TOKENS", 1)
    monkeypatch.setattr(PrefixStore, "read_seconds", lambda self, stored: 0.0)


def files(root: Path) -> list[Path]:
    return sorted(root.glob("*/*.safetensors"))


@pytest.mark.parametrize("held", [0, PAGE, 3 * PAGE, 6 * PAGE])
@pytest.mark.parametrize("count", [0, 1, PAGE, 3 * PAGE + 1, len(TOKENS)])
def test_whole_pages_that_a_text_begins_with_come_back(tmp_path: Path, count: int, held: int) -> None:
    """count: of the first tokens that are those that were kept."""
    keep(tmp_path)
    text = [*TOKENS[:count], *(token + 1 for token in TOKENS[count:]), 5]
    got, rows, notes = read(tmp_path, text, held)
    assert got == max(min(count, 6 * PAGE) // PAGE * PAGE, held)
    assert (rows.length, notes) == (got, [])
    assert bits(rows) == bits(Rows(text[:got]))


def test_the_folder_is_the_owners_alone(tmp_path: Path) -> None:
    keep(root := tmp_path / "store")
    modes = {path.stat().st_mode & 0o777 for path in (root, *root.iterdir())}
    assert modes == {0o700}
    assert {path.stat().st_mode & 0o777 for path in files(root)} == {0o600}


@pytest.mark.parametrize(
    "other",
    [
        replace(CONDITIONS, identity=replace(IDENTITY, rope="other")),
        replace(CONDITIONS, identity=replace(IDENTITY, model="other")),
        replace(CONDITIONS, files=((7, 9),)),
        replace(CONDITIONS, rounding=(("torch", "2"),)),
    ],
)
def test_other_conditions_have_other_rows(tmp_path: Path, other: Conditions) -> None:
    keep(tmp_path)
    assert opened(tmp_path, other)[0].stored(PARTS, TOKENS).num_tokens == 0
    renamed = replace(CONDITIONS, identity=replace(IDENTITY, model_name="renamed"))
    assert opened(tmp_path, renamed)[0].stored(PARTS, TOKENS).num_tokens


def test_a_page_counts_after_its_own_text_only(tmp_path: Path) -> None:
    one, other = text(1, 2 * PAGE), text(2, 2 * PAGE)
    keep(tmp_path, one)
    keep(tmp_path, other)
    assert opened(tmp_path)[0].stored(PARTS, [*one[:PAGE], *other[PAGE:]]).num_tokens == PAGE
    assert opened(tmp_path)[0].stored(PARTS, [*one[PAGE:], *one[PAGE:]]).num_tokens == 0


@pytest.mark.parametrize(("tile", "alike"), [(4, 6), (3, 3), (5, 4), (6, 4), (9, 4), (2, 2)])
def test_rows_up_to_the_first_tile_that_begins_elsewhere_are_the_same(tmp_path: Path, tile: int, alike: int) -> None:
    """tile: in pages; of those that were kept it is 4."""
    keep(tmp_path)
    store, _ = opened(tmp_path, replace(CONDITIONS, tile_tokens=tile * PAGE))
    assert store.stored(PARTS, TOKENS).num_tokens == alike * PAGE


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a bit": flip,
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"1"),
    "empty": lambda file: file.write_bytes(b""),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "a link": lambda file: (file.rename(other := file.parent / "other"), file.symlink_to(other)),
    "unreadable": lambda file: file.chmod(0),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_page_and_those_after_it_do_not_count(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    keep(tmp_path)
    store, notes = opened(tmp_path)
    victim = store.path / store.stored(PARTS, TOKENS).pages["rows", 3].file
    damage(victim)
    if damage is DAMAGES["unreadable"] and os.access(victim, os.R_OK):
        pytest.skip("this user may read everything")
    rows = Rows()
    assert store.load(Kept(rows), TOKENS, 0, no_progress) == rows.length == 3 * PAGE
    assert bits(rows) == bits(Rows(TOKENS[: 3 * PAGE]))
    assert len(notes) == 1
    assert "computed again" in notes[0]
    if not victim.is_dir():
        assert not os.path.lexists(victim)
        store.keep(Kept(Rows(TOKENS)), TOKENS, no_progress)
        assert store.stored(PARTS, TOKENS).num_tokens == 6 * PAGE
        assert store.load(Kept(rows), TOKENS, 0, no_progress) == 6 * PAGE


def test_the_least_used_pages_go_first_and_of_a_text_the_last_ones(tmp_path: Path) -> None:
    first, second = text(1, 4 * PAGE), text(2, 4 * PAGE)
    for tokens in (first, second):
        keep(tmp_path, tokens)
    for file in files(tmp_path):
        os.utime(file, (1.0, file.stat().st_mtime - 1000))
    assert read(tmp_path, first)[0] == 4 * PAGE  # used
    page = files(tmp_path)[0].stat().st_size
    shrink(tmp_path, 6 * page)
    store, _ = opened(tmp_path)
    assert [store.stored(PARTS, tokens).num_tokens for tokens in (first, second)] == [4 * PAGE, 2 * PAGE]
    shrink(tmp_path, 3 * page)
    assert [store.stored(PARTS, tokens).num_tokens for tokens in (first, second)] == [3 * PAGE, 0]


def test_a_text_that_has_no_room_is_kept_as_far_as_it_has(tmp_path: Path) -> None:
    keep(tmp_path / "all")
    page = files(tmp_path / "all")[0].stat().st_size
    store, notes = opened(tmp_path / "some", limit=3 * page + 1)
    for _ in range(2):
        assert store.keep(Kept(Rows(TOKENS)), TOKENS, no_progress) == 3 * PAGE
    assert store.stored(PARTS, TOKENS).num_tokens == 3 * PAGE
    assert len(files(tmp_path / "some")) == 3
    [note] = notes  # once
    assert f"only the first {3 * PAGE} tokens of what the model has read are kept: {size(6 * page)} are needed" in note
    assert f"the store may take {size(3 * page + 1)}; --store-size GB" in note


def test_a_text_that_has_no_room_at_all_is_said(tmp_path: Path) -> None:
    """It was said that what the model has read is kept, and nothing was."""
    store, notes = opened(tmp_path, limit=10)
    assert store.keep(Kept(Rows(TOKENS)), TOKENS, no_progress) == 0
    assert notes[0].startswith("what the model has read is not kept: ")
    assert "are needed, and the store may take 10 B" in notes[0]
    assert opened(tmp_path)[0].keep(Kept(Rows(TOKENS)), TOKENS, no_progress) == 6 * PAGE


def test_a_full_disk_is_said_and_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("offload.session.units.write_all", full)
    store, notes = opened(tmp_path)
    assert store.keep(Kept(Rows(TOKENS)), TOKENS, no_progress) == 0
    assert notes[0].startswith("what the model has read is not kept: ")
    assert notes[0].endswith("No space left on device")
    assert not files(tmp_path)
    assert not list(tmp_path.glob("*/*.tmp"))


def kept_of(root: Path, seed: int, *documents: str) -> list[int]:
    """The tokens of a prompt with documents that is kept at `root`."""
    tokens = text(seed)
    assert opened(root)[0].keep(Kept(Rows(tokens)), tokens, no_progress, documents=documents) == len(tokens)
    return tokens


def test_pages_are_removed_by_a_documents_name_and_by_the_models(tmp_path: Path) -> None:
    lease, book, other = kept_of(tmp_path, 1, "lease.pdf"), kept_of(tmp_path, 2, "lease.pdf", "b"), kept_of(tmp_path, 3)
    kept_of(tmp_path, 1, "copy.pdf")  # the same text by another name
    assert summaries(tmp_path)[0].documents == ("b", "copy.pdf", "lease.pdf")
    assert pages_of(tmp_path, "a") == {}
    assert sum(pages_of(tmp_path, IDENTITY.model_name).values()) == nbytes(tmp_path)
    assert pages_of(tmp_path, "copy.pdf").keys() < pages_of(tmp_path, "lease.pdf").keys()
    remove(tmp_path, pages_of(tmp_path, "lease.pdf"))
    store, _ = opened(tmp_path)
    assert [store.stored(PARTS, tokens).num_tokens for tokens in (lease, book, other)] == [0, 0, len(other)]
    assert summaries(tmp_path)[0].documents == ()
    assert [file.name for file in tmp_path.glob("*/*.json")] == ["about.json"]
    remove(tmp_path, pages_of(tmp_path, IDENTITY.model_name))
    assert not tmp_path.exists()


def test_a_name_goes_with_the_last_page_that_had_to_make_room(tmp_path: Path) -> None:
    kept_of(tmp_path, 1, "old")
    for file in files(tmp_path):
        os.utime(file, (1.0, 1.0))  # the last page of a prompt is as old as the first one of a prompt 5 ms before
    kept_of(tmp_path, 2, "new")
    shrink(tmp_path, nbytes(tmp_path) // 2)
    assert summaries(tmp_path)[0].documents == ("new",)
    for file in tmp_path.glob("*/*.json"):
        file.write_text("{")
    assert summaries(tmp_path)[0].documents == ()


def test_clear_removes_all_that_is_the_stores_own(tmp_path: Path) -> None:
    keep(tmp_path / "store")
    [summary] = summaries(tmp_path / "store")
    assert (summary.model_name, summary.dtype, summary.num_pages) == ("tiny", "fp32", 6)
    (own := files(tmp_path / "store")[0].parent / "own.txt").write_text("mine")
    assert clear(tmp_path / "store") == summary.nbytes
    assert summaries(tmp_path / "store") == []
    assert own.read_text() == "mine"
    own.unlink()
    clear(tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_a_writer_that_is_killed_leaves_whole_pages_and_files_that_go_later(tmp_path: Path) -> None:
    for _ in range(2):
        here, there = PROCESSES.Pipe()
        writer = forked(keep_forever, tmp_path, there)
        there.close()
        here.recv()
        time.sleep(random.uniform(0.0, 0.05))
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        for seed in range(20):
            tokens = text(seed)
            got, rows, notes = read(tmp_path, tokens)
            assert (bits(rows), notes) == (bits(Rows(tokens[:got])), [])
    for file in tmp_path.glob("*/*.tmp"):
        os.utime(file, (1.0, 1.0))
    shrink(tmp_path, ENOUGH)
    assert not list(tmp_path.glob("*/*.tmp"))


@pytest.mark.parametrize("whole", ["", "about.json", f"{7:032x}.json"])
def test_a_file_that_its_writer_did_not_finish_goes_once_it_is_old(tmp_path: Path, whole: str) -> None:
    keep(tmp_path)
    left = files(tmp_path)[0].parent / f"{whole}{5:016x}.tmp"
    left.write_text("half")
    shrink(tmp_path, ENOUGH)
    assert left.exists()
    os.utime(left, (1.0, 1.0))
    shrink(tmp_path, ENOUGH)
    assert not left.exists()


def test_several_processes_share_a_store(tmp_path: Path) -> None:
    pipes = [PROCESSES.Pipe() for _ in range(3)]
    users = [forked(use, tmp_path, seed, there) for seed, (_, there) in enumerate(pipes)]
    for _, there in pipes:
        there.close()
    assert [here.recv() for here, _ in pipes] == ["", "", ""]
    for user in users:
        user.join()


@dataclass(frozen=True)
class Case:
    """A model, and what of its plan matters to rows."""

    folder: Path
    draft: Path | None
    sizes: Sizes
    dtype: str = "fp32"
    offload: frozenset[str] = frozenset()

    def plan(self, num_prompt: int = 150, *, num_sequences: int = 1) -> Plan:
        return tiny_plan(
            self.folder,
            self.draft,
            self.sizes,
            num_prompt_tokens=num_prompt,
            max_tokens=40,
            dtype=self.dtype,
            offload=self.offload,
            num_sequences=num_sequences,
        )

    def engine(self, plan: Plan, root: Path | None, notes: list[str] | None = None) -> Engine:
        told = [] if notes is None else notes

        def open_store(plan: Plan) -> PrefixStore:
            assert root is not None
            return PrefixStore(root, Conditions.of(self.folder, plan), limit=ENOUGH, on_note=told.append)

        tokenizer = load_tokenizer(self.folder, self.draft)
        return Engine.load(plan, self.folder, self.draft, tokenizer, open_store=root and open_store)


# Tried by default from the first on.
CASES = ["windows", "offloaded", "4-bit cache", "bf16, packed", "all windows", "retrieval", "plain"]
SIZES = Sizes(capacity=190, page=16, pages=4, rows=8, prefill_block=16, gamma=4, budget=0)


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp("models")
    name = request.param
    if name in ("windows", "all windows"):
        family = "gemma4" if name == "windows" else "mistral, a window"
        yield Case(save_tiny(family, folder, tokenizer=True, sliding_window=25), None, SIZES)
        return
    target, draft = save_pair(folder, context=512)
    sizes = {"retrieval": {"budget": 32, "chunk": 8}, "4-bit cache": {"kv_bits": 4, "page": 64, "pages": 1}}
    yield Case(
        target,
        draft,
        replace(SIZES, **sizes.get(name, {})),
        "bf16" if "bf16" in name else "fp32",
        frozenset({"kv", "weights"}) if name in ("offloaded", "bf16, packed") else frozenset(),
    )


def asked(num_tokens: int, *, seed: int = 0, question: int = 1, sampling: SamplingParams = GREEDY) -> GenerationRequest:
    """A question of a few tokens after a text of so many."""
    text = random_tokens(num_tokens, seed=seed)
    return GenerationRequest([*text, *random_tokens(9, seed=100 + question)], max_tokens=12, sampling=sampling)


def said(engine: Engine, request: GenerationRequest) -> list[int]:
    tokens = [token for step in engine.generate(request) for token in step.tokens]
    engine.keep()
    return tokens


@pytest.mark.few(5)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_warm_store_gives_the_text_of_a_cold_one(case: Case, sampling: SamplingParams, tmp_path: Path) -> None:
    requests = [asked(130, question=number, sampling=sampling) for number in range(3)]
    with case.engine(case.plan(), None) as engine:
        cold = []
        for request in requests:
            engine.prefix.truncate(0)
            cold.append(said(engine, request))
    warm, read = [], []
    for request in requests:
        with case.engine(case.plan(), tmp_path) as engine:
            warm.append(said(engine, request))
            read.append(engine.stats.stored_tokens)
            assert engine.stats.reused_tokens == engine.stats.stored_tokens
    assert warm == cold
    page = case.sizes.page
    assert read[0] == 0
    assert read[1:] == [130 // page * page] * 2


@pytest.mark.few(4)
def test_a_prompt_that_is_read_in_spans_is_the_same_and_where_it_is_left_its_spans_stay(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows were lost. Within a span windows lose more."""
    request = asked(130, sampling=SAMPLED)
    with case.engine(case.plan(), None) as engine:
        whole, rows = said(engine, request), rows_of(engine, 130)
    monkeypatch.setattr("offload.engine.prefix.span_tokens", lambda plan: 48)
    for place, stays in ((0, False), (48, True), (96, True), (97, False), (len(request.prompt), True)):

        def leave(progress: Progress, place: int = place, stays: bool = stays) -> None:
            if progress.stage == "prefill" and progress.done >= place and progress.stays is stays:
                raise TimeoutError

        with case.engine(case.plan(), None) as engine:
            if place < len(request.prompt):
                with pytest.raises(TimeoutError):
                    next(engine.generate(request, on_progress=leave))
                kept = engine.worker.reachable(place // 48 * 48)
                assert stays is False or kept == place
                assert len(engine.prefix.tokens) == engine.levels["target"].length == kept
            assert said(engine, request) == whole
            assert engine.stats.reused_tokens == (0 if place == len(request.prompt) else kept)
            assert torch.equal(rows_of(engine, 130), rows)


def rows_of(engine: Engine, length: int) -> torch.Tensor:
    engine.worker.full.wait_home()
    return engine.worker.full.pages.reader.tokens(0, length).clone()


def test_windows_are_kept_as_far_as_the_ring_has_them(tmp_path: Path) -> None:
    """The ring has five pages of 16 tokens, windows of 25: a text can begin from its end, not from its middle."""
    case = Case(save_tiny("gemma4", tmp_path / "model", tokenizer=True, sliding_window=25), None, SIZES)
    plan = changed(case.plan(), window_pages=5)
    alike = asked(130, question=2)
    halfway = replace(alike, prompt=[*random_tokens(60), *random_tokens(75, seed=9)])
    with case.engine(plan, None) as engine:
        cold = []
        for request in (asked(130), alike, halfway):
            engine.prefix.truncate(0)
            cold.append(said(engine, request))
    warm, read = [], []
    for request in (asked(130), alike, halfway, alike):
        with case.engine(plan, tmp_path / "store") as engine:
            warm.append(said(engine, request))
            read.append(engine.stats.stored_tokens)
    assert warm == [*cold, cold[1]]
    assert read == [0, 128, 0, 128]


@pytest.mark.parametrize(("max_tokens", "is_kept"), [(5, True), (40, False)])
def test_nothing_is_kept_that_no_text_can_begin_with(tmp_path: Path, max_tokens: int, is_kept: bool) -> None:
    """After a long answer the ring has lost what a text needs to go on from its prompt's end."""
    case = Case(save_tiny("gemma4", tmp_path / "model", tokenizer=True, sliding_window=25), None, SIZES)
    with case.engine(changed(case.plan(50), window_pages=4), tmp_path / "store") as engine:
        said(engine, replace(asked(30), max_tokens=max_tokens))
    assert bool(files(tmp_path / "store")) is is_kept


def test_after_any_requests_texts_are_those_without_a_store(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Requests that share more or less, of several sequences, on engines with other rooms, with damage in between."""
    target, draft = save_pair(tmp_path, context=512)
    case, chance, told = Case(target, draft, replace(SIZES, budget=32, chunk=8)), random.Random(5), list[str]()
    root, num_read = tmp_path / "store", 0
    rounds = 40 if pytestconfig.getoption("deep") else 6
    for _ in range(rounds):
        plan = changed(case.plan(150 + 40 * chance.randrange(2)), tile_tokens=64 * chance.randint(1, 3))
        with case.engine(plan, root, told) as engine, case.engine(plan, None) as without:
            for _ in range(3):
                request = asked(chance.randrange(60, 130), seed=chance.randrange(2), question=chance.randrange(3))
                without.prefix.truncate(0)
                assert said(engine, request) == said(without, request)
                num_read += engine.stats.stored_tokens
        if chance.random() < 0.4 and (some := files(root)):
            flip(chance.choice(some))
        shrink(root, chance.choice([ENOUGH, 100_000]))
    assert num_read > 60 * rounds  # how many depends on which pages the file system calls the oldest


def test_a_batch_reads_what_another_has_kept(tmp_path: Path) -> None:
    target, draft = save_pair(tmp_path, context=512)
    case = Case(target, draft, SIZES)
    requests = [asked(130, question=number) for number in range(3)]
    with case.engine(case.plan(), None) as engine:
        cold = [said(engine, request) for request in requests]
    with case.engine(case.plan(), tmp_path / "store") as engine:
        said(engine, requests[0])
    with case.engine(case.plan(num_sequences=3), tmp_path / "store") as engine:
        found, stats = together(engine, [Asked(request.prompt, GREEDY, 12) for request in requests])
    assert found == cold
    assert [each.stored_tokens for each in stats] == [128, 0, 0]  # the others take the rows of the first


def test_an_interrupted_reading_changes_nothing_in_the_next(case: Case, tmp_path: Path) -> None:
    class Stopped(Exception):
        pass

    with case.engine(case.plan(), tmp_path / "store") as engine:
        expected = said(engine, asked(130))

    def stop(progress: Progress) -> None:
        if progress.stage == "restore" and progress.done:
            raise Stopped

    with case.engine(case.plan(), tmp_path / "store") as engine:
        with pytest.raises(Stopped):
            list(engine.generate(asked(130), on_progress=stop))
        assert said(engine, asked(130)) == expected


def test_reading_that_takes_longer_than_computing_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = save_pair(tmp_path, context=512)
    case = Case(target, draft, SIZES)
    plan = case.plan()
    for seconds, count in ((plan.predicted.first_token_seconds, 0), (1e-9, 128)):
        monkeypatch.setattr(PrefixStore, "read_seconds", lambda self, stored, seconds=seconds: seconds)
        for expected in (0, count):
            with case.engine(plan, tmp_path / f"{count}") as engine:
                said(engine, asked(130))
                assert engine.stats.stored_tokens == expected


def test_rows_after_decoded_ones_are_computed(tmp_path: Path) -> None:
    """A conversation goes on after rows that passes gave, which one prefill would give otherwise. With a seed nothing
    is read after them; without one they give way to the many more rows that are stored."""
    target, draft = save_pair(tmp_path, context=512)
    case = Case(target, draft, SIZES)
    with case.engine(case.plan(), None) as engine:
        told = [*(first := asked(130)).prompt, *said(engine, first)]
    longer = replace(first, prompt=[*told[:144], *random_tokens(30, seed=8)], reuse=True)
    with case.engine(case.plan(), tmp_path / "store") as engine:
        said(engine, longer)  # all of it by one prefill
    with case.engine(case.plan(), tmp_path / "store") as engine:
        said(engine, first)
        said(engine, replace(longer, sampling=SamplingParams(temperature=1.0, seed=5)))
        assert (engine.stats.reused_tokens, engine.stats.stored_tokens) == (144, 0)
        assert engine.prefix.num_alike(longer.prompt) <= 139
    with case.engine(case.plan(), tmp_path / "store") as engine:
        said(engine, first)
        said(engine, longer)
        assert (engine.stats.reused_tokens, engine.stats.stored_tokens) == (160, 32)
        assert engine.prefix.num_alike(longer.prompt) > 160  # all of it


def test_after_a_damaged_page_no_row_of_a_ring_counts(tmp_path: Path) -> None:
    """A planted fault lived: rows in memory counted whose places in the ring pages of the longer text had taken."""
    case = Case(save_tiny("gemma4", tmp_path / "model", tokenizer=True, sliding_window=25), None, SIZES)
    plan, root, whole = changed(case.plan(), window_pages=5), tmp_path / "store", asked(130)
    with case.engine(plan, root) as engine:
        said(engine, whole)
    with case.engine(plan, root) as engine:
        list(engine.generate(replace(whole, prompt=whole.prompt[:80], max_tokens=1)))
        held = engine.prefix.num_alike(whole.prompt)
        assert held > 2 * SIZES.page
        engine.prefix.truncate(held)
        notes, worker = list[str](), engine.worker
        store = PrefixStore(root, Conditions.of(case.folder, plan), on_note=notes.append)
        flip(store.path / store.stored(worker.kept.parts, whole.prompt).pages["rows", held // SIZES.page].file)
        count = store.load(worker.kept, whole.prompt[:130], held, no_progress)
        assert worker.windows is not None
        assert (count, worker.full.length, worker.windows.length) == (0, 0, 0)
        assert len(notes) == 1


def test_rows_of_a_session_are_no_prefills(tmp_path: Path) -> None:
    """A planted fault lived: decoded rows of a session counted as a prefill's and were kept in the store."""
    target, draft = save_pair(tmp_path, context=512)
    case, root = Case(target, draft, SIZES), tmp_path / "store"
    with case.engine(case.plan(), None) as engine, opened_session(tmp_path / "session", case, engine) as session:
        text = [*asked(120).prompt, *said(engine, asked(120))]
        engine.save(session, {})
    with case.engine(case.plan(), root) as engine, opened_session(tmp_path / "session", case, engine) as session:
        assert engine.restore(session, text) > len(asked(120).prompt)
        engine.keep()
        assert not files(root)
        assert engine.prefix.num_alike([*text, *random_tokens(40, seed=5)]) == 0


def opened_session(path: Path, case: Case, engine: Engine) -> Store:
    return Store.open(path, identity_of(case.folder, engine.plan))


def test_scores_are_computed_of_every_row(tmp_path: Path) -> None:
    target, draft = save_pair(tmp_path, context=512)
    case, tokens = Case(target, draft, SIZES), asked(130).prompt
    with case.engine(case.plan(), tmp_path / "store") as engine:
        said(engine, asked(130))
    with case.engine(case.plan(), tmp_path / "store") as engine, case.engine(case.plan(), None) as without:
        assert torch.equal(engine.score(tokens).log_probabilities, without.score(tokens).log_probabilities)


def test_rows_that_another_plan_computed_are_none_of_a_prefill(tmp_path: Path) -> None:
    """Attention is summed tile by tile. Rows of the plan before went into the store under the key of the new one."""
    target, _ = save_pair(tmp_path / "models", context=512)
    case = Case(target, None, SIZES)
    small, large = changed(case.plan(), tile_tokens=64 * 3), changed(case.plan(190), tile_tokens=64)
    request = asked(130)
    with case.engine(large, None) as cold:
        whole, rows = said(cold, request), rows_of(cold, 128)
    with case.engine(small, tmp_path / "store") as engine:
        said(engine, request)
        engine.replan(large)
        assert engine.prefix._num_own == 64  # the first tile of both
        assert (engine.keep(), said(engine, request)) == (64, whole)
        assert engine.stats.reused_tokens == 64
        assert torch.equal(rows_of(engine, 128), rows)
    with case.engine(large, tmp_path / "store") as warm:
        assert said(warm, request) == whole
        assert torch.equal(rows_of(warm, 128), rows)


def test_of_rows_that_were_cut_whole_blocks_are_those_of_a_prefill(tmp_path: Path) -> None:
    """A prefill of just as many tokens has its last rows in a block of their own."""
    target, _ = save_pair(tmp_path / "models", context=512)
    case, text = Case(target, None, SIZES), random_tokens(130)
    plan = case.plan()
    count = plan.placement.prefill_block * 3 + 5
    with case.engine(plan, None) as engine:
        for prompt in (text, [*text[:count], *random_tokens(40, seed=6)]):
            [*_] = engine.generate(GenerationRequest(prompt, GREEDY, max_tokens=2, reuse=True))
        again = [*text[:count], *random_tokens(plan.placement.rows, seed=7)]
        [*_] = engine.generate(GenerationRequest(again, GREEDY, max_tokens=2))
        assert engine.stats.reused_tokens == plan.placement.prefill_block * 3
