"""Recurrent states on the disk: sessions and the prefix store give back what lets a text go on, bit for bit."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import test_next_token
from kit.families import TINY, save_tiny
from kit.forked import Forked, forked_ranks
from kit.heads import with_head
from kit.models import GREEDY, Sizes, changed, load, random_tokens, state_cache, tiny_engine, tiny_plan
from kit.sessions import IDENTITY, PAGE, Rows, bits
from kit.store_users import CONDITIONS, ENOUGH, no_progress
from offload.config.config_json import config_of
from offload.decode.sampling import SamplingParams
from offload.engine.engine import Engine, load_tokenizer
from offload.engine.request import GenerationRequest
from offload.errors import SessionError
from offload.kernels.recurrence import RecurrenceWeights
from offload.kv import states as kv_states
from offload.kv.checkpoints import thinned
from offload.kv.kept import Kept
from offload.kv.parts import PlacedPart, Shapes, Unit
from offload.kv.states import StateCache, kept_numbers
from offload.plan.planner import Plan
from offload.plan.shards import Shard
from offload.progress import Progress
from offload.session import manifest as manifests
from offload.session.conditions import Conditions
from offload.session.fingerprints import identity_of, model_digest
from offload.session.folder import Folder
from offload.session.identity import Identity
from offload.session.layout import TensorsFormat
from offload.session.manifest import MANIFEST_FILE, Manifest, Saved
from offload.session.prefix_store import PrefixStore
from offload.session.store import Store
from offload.session.store_files import nbytes, shrink
from offload.session.units import read_unit, write_unit
from test_session_crash import STEPS, at_step

pytestmark = pytest.mark.usefixtures("unsynced")
NAME, BLOCK = "qwen3_5", 32
SIZES = Sizes(rows=4, page=BLOCK, prefill_block=BLOCK, any_rows=True, capacity=600)
DRAFTED = replace(SIZES, gamma=6, budget=32, chunk=8, lookup=True)
DOCUMENT = random_tokens(200, seed=21)
QUESTIONS = [random_tokens(9, seed=100 + number) for number in range(3)]
SAMPLINGS = {"greedy": GREEDY, "seeded": SamplingParams(temperature=1.5, seed=3)}


@pytest.fixture(autouse=True)
def _short_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.kv.states.PREFILL_BLOCK", BLOCK)
    monkeypatch.setattr("offload.engine.prefix.LEAST_TOKENS", 1)
    monkeypatch.setattr(PrefixStore, "read_seconds", lambda self, stored: 0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers with a state, and one that attends."""
    options = {"vocab_size": 264, "max_position_embeddings": 4096, "num_key_value_heads": 4}
    return save_tiny(NAME, tmp_path_factory.mktemp("states"), tokenizer=True, **options)


def plan_of(folder: Path, sizes: Sizes = SIZES, *, prompt: int = 400, offload: frozenset[str] = frozenset()) -> Plan:
    return tiny_plan(folder, None, sizes, num_prompt_tokens=prompt, max_tokens=60, offload=offload)


def engine(folder: Path, **options: Any) -> Engine:
    return tiny_engine(plan_of(folder, **options), folder)


def say(made: Engine, prompt: Sequence[int], sampling: SamplingParams = GREEDY, *, reuse: bool = True) -> list[int]:
    request = GenerationRequest(list(prompt), sampling, max_tokens=12, reuse=reuse)
    return [token for step in made.generate(request) for token in step.tokens]


@cache
def _said(folder: Path, prompt: tuple[int, ...], sampling: SamplingParams) -> list[int]:
    with engine(folder) as made:
        return say(made, prompt, sampling)


def fresh(folder: Path, prompt: Sequence[int], sampling: SamplingParams = GREEDY) -> list[int]:
    """What an engine says that has nothing cached."""
    return _said(folder, tuple(prompt), sampling)


@contextmanager
def rows_counted(made: Engine) -> Iterator[list[int]]:
    """The numbers of tokens of each prefill and each pass of the target that begin within."""
    counted, prefill, target = list[int](), made.worker.target.prefill, made.levels["target"]
    run = target.run

    def counted_prefill(cache: Any, tokens: Sequence[int], *args: Any, **more: Any) -> None:
        counted.append(len(tokens))
        prefill(cache, tokens, *args, **more)

    def counted_run(passes: Any) -> None:
        counted.extend(len(each.tokens) for each in passes)
        run(passes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made.worker.target, "prefill", counted_prefill)
        patch.setattr(target, "run", counted_run)
        yield counted


def opened(path: Path, folder: Path, made: Engine) -> Store:
    return Store.open(path, identity_of(folder, made.plan))


def saved(path: Path, folder: Path, prompt: Sequence[int], **options: Any) -> list[int]:
    """Save a session of a prompt and what came after it -> its tokens."""
    with engine(folder, **options) as made, opened(path, folder, made) as store:
        say(made, prompt)
        made.save(store, {})
        return list(store.tokens)


def manifest_of(path: Path) -> Manifest:
    found = manifests.read(Folder(path))
    assert found is not None
    return found


def places_of(path: Path) -> list[int]:
    return [saved.unit[0] for saved in manifest_of(path).parts["states"]]


def files(path: Path) -> dict[str, int]:
    return {each.name: each.stat().st_mtime_ns for each in path.glob("state-*")}


# The cache: a checkpoint of its length.


Given = tuple[list[Tensor], list[RecurrenceWeights]]


@pytest.fixture(scope="module")
def given(folder: Path) -> Given:
    """For each layer with a state the projected rows of 60 tokens, and weights."""
    generator, decoder = torch.Generator().manual_seed(4), load(folder)
    assert decoder.config.recurrence is not None
    size = sum(decoder.config.recurrence.parts)
    rows = [torch.randn(60, size, generator=generator) for _ in decoder.config.stateful]
    return rows, [layer.recurrence for layer in decoder.weights.layers if layer.recurrence is not None]


def no_weights() -> Iterator[RecurrenceWeights]:
    yield pytest.fail("weights are read")


def go_on(cache: StateCache, phase: Any, count: int, taken: int, given: Given) -> None:
    """A forward of `count` rows of which `taken` count."""
    start = cache.length
    cache.begin(phase, count)
    for layer, (rows, weights) in enumerate(zip(*given, strict=True)):
        cache.recur(layer, rows[start : start + count], weights)
    cache.advance(taken)


@pytest.fixture
def caches(folder: Path) -> Callable[[], StateCache]:
    return lambda: state_cache(load(folder))


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_checkpoint_of_the_length_is_the_one_that_a_prefill_to_there_or_from_there_notes(
    caches: Callable[[], StateCache], given: Given, drafts: int
) -> None:
    """Whichever rows a pass has drafted; and it changes nothing in what is held."""
    plain, noted, undisturbed, whole = (caches() for _ in range(4))
    go_on(whole, "prefill", 27, 27, given)
    for own in (plain, noted, undisturbed):
        go_on(own, "prefill", 20, 20, given)
        go_on(own, "decode", 4 + drafts, 4, given)
        go_on(own, "decode", 3 + drafts, 3, given)
    go_on(plain, "prefill", 9, 9, given)
    noted.note_length()
    assert noted.places == [20, 27]
    for one, other in (
        (noted.checkpoint(27).states, plain.checkpoint(27).states),
        (noted.checkpoint(27).tails, plain.checkpoint(27).tails),
        (noted.checkpoint(27).states, whole.checkpoint(27).states),
        (noted.checkpoint(27).tails, whole.checkpoint(27).tails),
        (noted.layers.states, undisturbed.layers.states),
        (noted.layers.inputs, undisturbed.layers.inputs),
    ):
        assert torch.equal(one, other)
    assert noted.reachable(25) == undisturbed.reachable(25) == 25


def test_a_length_that_has_a_checkpoint_needs_no_weights(caches: Callable[[], StateCache], given: Given) -> None:
    kept = caches()
    kept.weights = no_weights
    kept.note_length()  # nothing is cached
    assert kept.places == []
    go_on(kept, "prefill", 20, 20, given)
    before = kept.checkpoint(20).states.clone()
    kept.note_length()
    assert kept.places == [20]
    assert torch.equal(kept.checkpoint(20).states, before)


def test_what_comes_from_elsewhere_counts_up_to_the_length_and_no_further(
    caches: Callable[[], StateCache], given: Given
) -> None:
    kept, other = caches(), caches()
    go_on(kept, "prefill", 20, 20, given)
    go_on(kept, "prefill", 20, 20, given)
    go_on(other, "prefill", 33, 33, given)
    other.restored(0)
    assert (other.length, other.places, other.layers.place) == (0, [], 0)
    assert not other.layers.states.any()
    for place in kept.places:
        other.filled((place,), kept.tensors((place,)))
    other.restored(20)
    assert (other.length, other.places) == (20, [20])
    for own in (kept, other):
        own.truncate(20)
        go_on(own, "prefill", 15, 15, given)
    assert torch.equal(kept.layers.states, other.layers.states)


@pytest.mark.parametrize("most", [1, 2, 5])
def test_of_too_many_places_those_stay_that_are_missed_most(most: int) -> None:
    places = [10, 20, 500, 900, 1000]
    kept = thinned(places, most)
    assert kept == sorted(kept)
    assert len(kept) == most
    assert kept[-1] == 1000
    assert most < 2 or kept[0] == {2: 900, 5: 10}[most]


# A second question about a document.


def assert_few(rows: Sequence[int], question: Sequence[int]) -> None:
    """Rows of a second question: what comes after the document, twice the first one's rest, to ends of blocks; and
    those of 12 tokens."""
    prompt = sum(rows[:2])  # the prefill, and the first pass, which has one row more than are left to it
    assert prompt <= len(question) + 2 * BLOCK + 1
    assert sum(rows) <= prompt + 12


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("reuse", [False, True])
def test_a_second_question_does_not_read_the_document_again(
    folder: Path, reuse: bool, sampling: SamplingParams
) -> None:
    prompts = [[*DOCUMENT, *question] for question in QUESTIONS]
    with engine(folder) as made:
        for prompt in prompts:
            with rows_counted(made) as rows:
                found = say(made, prompt, sampling, reuse=reuse)
            assert found == fresh(folder, prompt, sampling)
            if prompt is not prompts[0]:
                assert_few(rows, QUESTIONS[0])
                assert made.stats.reused_tokens >= len(DOCUMENT) - 2 * BLOCK


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_nor_with_a_session_in_another_engine(folder: Path, tmp_path: Path, sampling: SamplingParams) -> None:
    saved(tmp_path / "session", folder, [*DOCUMENT, *QUESTIONS[0]])
    prompt = [*DOCUMENT, *QUESTIONS[1]]
    with engine(folder) as made, opened(tmp_path / "session", folder, made) as store:
        restored = made.restore(store, prompt)
        assert restored == max(place for place in places_of(tmp_path / "session") if place <= 200)
        with rows_counted(made) as rows:
            assert say(made, prompt, sampling) == fresh(folder, prompt, sampling)
        assert_few(rows, QUESTIONS[1])


def with_store(folder: Path, root: Path, notes: list[str] | None = None, **options: Any) -> Engine:
    plan, told = options.pop("plan", None) or plan_of(folder, **options), [] if notes is None else notes

    def open_store(plan: Plan) -> PrefixStore:
        return PrefixStore(root, Conditions.of(folder, plan), limit=ENOUGH, on_note=told.append)

    return Engine.load(plan, folder, None, load_tokenizer(folder, None), open_store=open_store)


def store_of(made: Engine) -> PrefixStore:
    store = made.prefix._store
    assert store is not None
    return store


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_nor_with_the_prefix_store_in_another_engine(folder: Path, tmp_path: Path, sampling: SamplingParams) -> None:
    for question in QUESTIONS[:2]:
        prompt = [*DOCUMENT, *question]
        with with_store(folder, tmp_path) as made, rows_counted(made) as rows:
            assert say(made, prompt, sampling, reuse=False) == fresh(folder, prompt, sampling)
            made.keep()
    assert_few(rows, QUESTIONS[1])
    assert made.stats.stored_tokens == made.stats.reused_tokens >= len(DOCUMENT) - 2 * BLOCK


def test_nor_on_the_grid_that_engines_have(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A document of some more blocks."""
    monkeypatch.undo()
    monkeypatch.setattr("offload.engine.prefix.LEAST_TOKENS", 1)
    monkeypatch.setattr(PrefixStore, "read_seconds", lambda self, stored: 0.0)
    document, sizes = random_tokens(1300, seed=5), replace(SIZES, page=512, prefill_block=512)
    prompts, path = [[*document, *question] for question in QUESTIONS[:2]], tmp_path / "session"
    with with_store(folder, tmp_path / "store", sizes=sizes, prompt=1400) as made:
        say(made, prompts[0])
        made.keep()
        with opened(path, folder, made) as store:
            made.save(store, {})
        expected = say(made, prompts[1])
        assert made.stats.reused_tokens == 1024  # the last whole block before the question
    with engine(folder, sizes=sizes, prompt=1400) as made, opened(path, folder, made) as store:
        assert made.restore(store, prompts[1]) == 1024
        assert say(made, prompts[1]) == expected
    with with_store(folder, tmp_path / "store", sizes=sizes, prompt=1400) as made:
        assert say(made, prompts[1], reuse=False) == expected
        assert made.stats.stored_tokens == 1024


# Sessions.


@pytest.mark.few(4)
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("cut", [0, 20, 120])
def test_a_session_is_loaded_and_gone_on_with(folder: Path, tmp_path: Path, cut: int, sampling: SamplingParams) -> None:
    tokens = saved(tmp_path / "session", folder, DOCUMENT)
    going_on = [*tokens[: len(tokens) - cut], *random_tokens(25, seed=8)]
    places = places_of(tmp_path / "session")
    assert places[-1] == len(tokens)
    with engine(folder) as made, opened(tmp_path / "session", folder, made) as store:
        expected = max(place for place in places if place <= len(tokens) - cut)
        assert made.restore(store, going_on) == expected
        with rows_counted(made) as rows:
            assert say(made, going_on, sampling) == fresh(folder, going_on, sampling)
        assert sum(rows[:2]) == len(going_on) - expected
        assert made.stats.reused_tokens == expected


def test_a_turn_of_few_tokens_reads_no_reply_again(folder: Path, tmp_path: Path) -> None:
    """Fewer than are left to the first pass otherwise: which would have begun before the last state."""
    with engine(folder) as made, opened(tmp_path / "session", folder, made) as store:
        told = [*DOCUMENT, *say(made, DOCUMENT)]
        made.save(store, {})
        cached, prompt = len(made.prefix.tokens), [*told, 5]
        assert len(prompt) - cached < SIZES.rows
        expected = fresh(folder, prompt)
        for restores in (False, True):
            if restores:
                made.prefix.truncate(len(DOCUMENT) - 1)  # the cache goes on from the prompt's end
                assert made.restore(store, prompt) == cached
            with rows_counted(made) as rows:
                assert say(made, prompt) == expected
            assert rows[0] == len(prompt) - cached
            made.prefix.truncate(cached)


def test_what_is_asked_again_begins_at_the_prompts_end(folder: Path, tmp_path: Path) -> None:
    """Where the saved tokens are as many as the prompt has, the place of the last one is of no use."""
    path = tmp_path / "session"
    tokens = saved(path, folder, DOCUMENT)
    with engine(folder) as made, opened(path, folder, made) as store:
        for prompt in (DOCUMENT, tokens):
            made.prefix.truncate(0)
            assert made.restore(store, prompt) >= len(DOCUMENT) - SIZES.rows
            with rows_counted(made) as rows:
                assert say(made, prompt) == fresh(folder, prompt)
            missing = len(prompt) - (len(DOCUMENT) - SIZES.rows)
            assert rows[0] + (rows[1] if missing > SIZES.rows else 0) == missing


def test_rows_that_the_cache_has_are_not_loaded(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "session"
    with engine(folder) as made, opened(path, folder, made) as store:
        told = [*DOCUMENT, *say(made, DOCUMENT)]
        made.save(store, {})
        with monkeypatch.context() as patch:
            patch.setattr(Store, "load", lambda *args, **more: pytest.fail("it loads"))
            assert made.restore(store, [*told, 1, 2, 3]) == len(store.tokens)
        assert made.worker.states is not None
        made.worker.states.checkpoints._held.clear()  # as if others had taken their places
        prompt = [*DOCUMENT[:150], 1, 2, 3]
        restored = made.restore(store, prompt)
        say(made, prompt)
        assert made.stats.reused_tokens == restored == 128


def test_what_can_be_loaded_ends_at_a_place_with_states(folder: Path, tmp_path: Path) -> None:
    tokens = saved(tmp_path / "session", folder, DOCUMENT)
    places = [0, *places_of(tmp_path / "session")]
    assert len(places) > 4
    with engine(folder) as made, opened(tmp_path / "session", folder, made) as store:
        for count in range(len(tokens) + 1):
            assert store.num_loadable(made.worker.kept, count) == max(place for place in places if place <= count)
        with pytest.raises(ValueError, match="tokens of"):
            store.load(made.worker.kept, places[2] + 1)
        assert made.restore(store, DOCUMENT[: places[1] - 1]) == 0
        assert made.restore(store, [*DOCUMENT[: places[2]], 1, 2]) == places[2]
        states = made.worker.states
        assert states is not None
        assert list(states.places) == places[1:3]  # an earlier text can be gone back to


def test_a_save_writes_the_states_that_are_new_and_says_how_many_bytes(folder: Path, tmp_path: Path) -> None:
    path, told = tmp_path / "session", list[int]()
    with engine(folder) as made, opened(path, folder, made) as store:
        states, form = made.worker.states, store.identity.formats["states"]
        assert states is not None
        assert form is not None
        for turn in range(4):
            told += [*(DOCUMENT[:150] if not turn else QUESTIONS[0])]
            told += say(made, told)
            before, num_saved = files(path), made.prefix._num_saved
            made.worker.kept.each("note_length")
            tokens, new = len(made.prefix.tokens), [place for place in states.places if place > num_saved]
            pages = store.bytes_to_write(tokens, num_saved, Kept(made.worker.full))
            assert store.bytes_to_write(tokens, num_saved, made.worker.kept) - pages == len(new) * form.nbytes
            made.save(store, {"turn": turn})
            after = files(path)
            assert len(after.keys() - before.keys()) == len(new)
            assert all(after[name] == before[name] for name in before.keys() & after.keys())
            assert {int(name.split("-")[1]) for name in after} == {*states.places}
            assert len(after) <= states.most
            assert {(path / name).stat().st_size for name in after} == {form.nbytes}
            made.save(store, {"turn": turn})
            assert files(path) == after
            assert store.bytes_to_read(made.worker.kept, tokens) == store.nbytes
            assert store.nbytes == sum(each.stat().st_size for each in path.glob("*-*"))
    assert states.places[-1] == tokens


@pytest.mark.parametrize("most", [2, 3])
def test_an_engine_with_room_for_fewer_loads_as_many_and_the_last_one(folder: Path, tmp_path: Path, most: int) -> None:
    path = tmp_path / "session"
    tokens = saved(path, folder, DOCUMENT)
    plan, going_on = changed(plan_of(folder), checkpoints=most), [*tokens, *QUESTIONS[1]]
    assert len(files(path)) > most
    with tiny_engine(plan, folder) as made, opened(path, folder, made) as store:
        left = (len(files(path)) - most) * store.identity.formats["states"].nbytes
        assert store.bytes_to_read(made.worker.kept, len(tokens)) == store.nbytes - left
        assert made.restore(store, going_on) == len(tokens)
        assert made.worker.states is not None
        assert len(made.worker.states.places) == most
        assert say(made, going_on) == fresh(folder, going_on)
        made.save(store, {})
        assert len(files(path)) == most


@pytest.mark.parametrize("case", ["drafted", "streamed", "in bf16", "a next-token head"])
def test_sessions_are_gone_on_with_wherever_weights_and_drafts_are(folder: Path, tmp_path: Path, case: str) -> None:
    """Streamed weights share buffers: what is noted of a layer is by its own ones, as when a prefill notes it."""
    sizes, draft = DRAFTED if case == "drafted" else SIZES, None
    if case == "a next-token head":
        folder = draft = with_head(save_tiny(NAME, tmp_path / "model", tokenizer=True, **test_next_token.SHAPES))
        sizes = replace(SIZES, gamma=6, draft_gamma=3, budget=64, chunk=16, window=32)
    offload = frozenset({"kv", "weights"} if case == "streamed" else ())
    dtype = "bf16" if case == "in bf16" else "fp32"
    plan = tiny_plan(folder, draft, sizes, num_prompt_tokens=400, max_tokens=60, offload=offload, dtype=dtype)
    with tiny_engine(plan, folder, draft) as made, opened(tmp_path / "session", folder, made) as store:
        told = [*DOCUMENT, *say(made, DOCUMENT)]
        made.save(store, {})
        states = made.worker.states
        assert states is not None
        noted = states.checkpoint(len(told) - 1).states.clone()
        states.checkpoints._held.pop(len(told) - 1)
        going_on = [*told, *QUESTIONS[0]]
        expected = say(made, going_on)
        assert torch.equal(states.checkpoint(len(told) - 1).states, noted)
    with tiny_engine(plan, folder, draft) as made, opened(tmp_path / "session", folder, made) as store:
        assert made.restore(store, going_on) == len(told) - 1
        assert say(made, going_on) == expected
        assert made.stats.reused_tokens == len(told) - 1


class Broken(Exception):
    pass


def test_a_prefill_that_is_broken_off_spoils_no_session(folder: Path, tmp_path: Path) -> None:
    path, longer = tmp_path / "session", [*DOCUMENT, *random_tokens(150, seed=4)]

    def stop(progress: object) -> None:
        if getattr(progress, "stage", "") == "prefill" and getattr(progress, "done", 0) > 50:
            raise Broken

    with engine(folder) as made, opened(path, folder, made) as store:
        say(made, DOCUMENT)
        made.save(store, {"said": 1})
        with pytest.raises(Broken):
            list(made.generate(GenerationRequest(longer, GREEDY, max_tokens=2, reuse=True), on_progress=stop))
        made.save(store, {"said": 2})
        tokens = list(store.tokens)
        assert tokens == DOCUMENT[: len(tokens)]
    with engine(folder) as made, opened(path, folder, made) as store:
        assert made.restore(store, longer) == len(tokens) > 100
        assert say(made, longer) == fresh(folder, longer)


def test_a_session_without_tokens_keeps_what_was_saved(folder: Path, tmp_path: Path) -> None:
    tokens = saved(tmp_path / "session", folder, DOCUMENT)
    with engine(folder) as made, opened(tmp_path / "session", folder, made) as store:
        made.save(store, {"said": 2})
        assert list(store.tokens) == tokens
        assert files(tmp_path / "session")
        assert made.restore(store, [*tokens, 1]) == len(tokens)


# Damage.


def flip(content: bytes) -> bytes:
    return content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]


DAMAGES: dict[str, tuple[Callable[[bytes], bytes | None], str]] = {
    "a bit": (flip, "its checksum differs"),
    "cut": (lambda content: content[:-1], "was cut off or changed"),
    "longer": (lambda content: content + b"1", "was cut off or changed"),
    "a header": (lambda content: content.replace(b"tails", b"heads"), "its header is not that of a file of states"),
    "gone": (lambda content: None, "cannot be read"),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("index", [0, -1])
@pytest.mark.parametrize(("damage", "why"), DAMAGES.values(), ids=DAMAGES)
def test_damaged_states_are_refused_and_nothing_is_half_loaded(
    folder: Path, tmp_path: Path, damage: Callable[[bytes], bytes | None], why: str, index: int
) -> None:
    path = tmp_path / "session"
    tokens = saved(path, folder, DOCUMENT)
    victim = path / manifest_of(path).parts["states"][index].file
    content = damage(victim.read_bytes())
    victim.unlink() if content is None else victim.write_bytes(content)
    assert_refused(path, folder, [*tokens, 1, 2, 3], why)


def assert_refused(path: Path, folder: Path, prompt: Sequence[int], why: str) -> None:
    with engine(folder) as made, opened(path, folder, made) as store:
        say(made, random_tokens(100, seed=1))
        with pytest.raises(SessionError, match=why):
            made.restore(store, prompt)
        states = made.worker.states
        assert states is not None
        assert (made.num_cached, made.worker.full.length, states.length, list(states.places)) == (0, 0, 0, [])
        assert say(made, prompt) == fresh(folder, prompt)


@pytest.mark.few(2)
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["states", "tails"])
def test_forged_states_that_are_not_finite_are_refused(folder: Path, tmp_path: Path, part: str, number: float) -> None:
    path = tmp_path / "session"
    tokens = saved(path, folder, DOCUMENT)
    saved_last, ignored = manifest_of(path).parts["states"][-1], lambda num_bytes, fewer=0: None
    with engine(folder) as made, Folder(path) as files:
        kept, states = made.worker.kept, made.worker.kept["states"]
        tensors = read_unit(files, saved_last, kept, states, ignored)
        tensors[part == "tails"].view(-1)[-1] = number
        states.filled(saved_last.unit, tensors)
        files.remove(saved_last.file)
        forged, _ = write_unit(files, saved_last.file, kept, states, saved_last.unit, ignored)
    edit(path, lambda record: record["states"][-1].update(checksum=forged))
    assert_refused(path, folder, [*tokens, 1], "not finite")


def record_of(path: Path) -> dict[str, Any]:
    content = (path / MANIFEST_FILE).read_bytes().partition(b"\n")[2]
    found: dict[str, Any] = json.loads(b"{" + content)
    return found


def sealed(record: dict[str, Any]) -> bytes:
    body = json.dumps(record, separators=(",", ":")).encode()[1:]
    return b'{"checksum":"%s",\n%s' % (manifests.checksum(body).encode(), body)


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    record = record_of(path)
    change(record)
    (path / MANIFEST_FILE).write_bytes(sealed(record))


@pytest.fixture(scope="module")
def record(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("manifest") / "session"
    saved(path, folder, DOCUMENT)
    return record_of(path)


def _state(**fields: object) -> Callable[[dict[str, Any]], object]:
    return lambda record: record["states"][1].update(fields)


FORGED: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (_state(place=0), "place is 0"),
    (_state(place=10_000), "place is 10000"),
    (_state(place="3"), "place is"),
    (_state(checksum="0"), "checksum is"),
    (_state(file="page-00001-0123456789abcdef.safetensors"), "it must be the file of the states at"),
    (_state(file="../state-1-0123456789abcdef.safetensors"), "it must be the file of the states at"),
    (_state(more=1), "more is not known"),
    (lambda record: record["states"][1].update(file=record["states"][0]["file"]), "it must be the file of the states"),
    (lambda record: record["states"].reverse(), "place is"),
    (lambda record: record["states"].append(record["states"][-1]), "place is"),
    (lambda record: record.pop("states"), "states is missing"),
    (lambda record: record.update(states=3), "states is 3"),
    (lambda record: record.update(format=4), "is not known"),
    (lambda record: record.update(window_pages=[{}]), "its tokens need 0"),
    (lambda record: record.update(first_window_page=1), "first_window_page is 1"),
    (lambda record: record["identity"].update(num_state_layers=0), "num_state_layers is 0"),
    (lambda record: record["identity"].update(tail_size=-1), "tail_size is -1"),
    (lambda record: record["identity"].pop("state_heads"), "state_heads is missing"),
]


@pytest.mark.parametrize(("change", "why"), FORGED)
def test_a_forged_manifest_of_states_is_refused(
    record: dict[str, Any], change: Callable[[dict[str, Any]], object], why: str
) -> None:
    forged = json.loads(json.dumps(record))
    assert manifests.decode(sealed(forged)).parts["states"]
    change(forged)
    with pytest.raises(ValueError, match=why):
        manifests.decode(sealed(forged))


def test_states_of_another_shape_are_of_another_session(folder: Path, tmp_path: Path) -> None:
    saved(tmp_path / "session", folder, DOCUMENT)
    with engine(folder) as made:
        identity = identity_of(folder, made.plan)
    with pytest.raises(SessionError, match="state_key_dim: saved 8, now 9"):
        Store.open(tmp_path / "session", replace(identity, state_key_dim=9))


# Models without states: their sessions and stores are what they were.


def test_manifests_and_conditions_are_byte_for_byte_what_they_were() -> None:
    windows = replace(IDENTITY, num_window_layers=2)
    heads = replace(windows, window_kv_heads=1, window_head_dim=8)
    numbers = {"rows": (2,), "windows": (2,), "states": (1,), "hidden": (2, 1, 0, 8)}
    parts = {
        name: (Saved(unit, manifests.file_name(name, unit, PAGE, "0" * 16), "0" * 32),)
        for name, unit in numbers.items()
    }
    found = []
    for own, names in (
        (IDENTITY, ("rows",)),
        (windows, ("rows", "windows")),
        (heads, ("rows", "windows")),
        (STATEFUL, ("rows", "states")),
        (STATEFUL, ("rows", "states", "hidden")),
    ):
        kept = {name: parts[name] for name in names}
        found.append(manifests.checksum(manifests.encode(Manifest(own, (1, 2), kept, 5, {"a": 1}, 1.0, 2.0, "v"))))
    assert [*found, CONDITIONS.digest] == [
        "edd41d56d1eeb2e96bc6ff2d418af95f",
        "b47b30039acaf636c0e3033dbcf666f8",
        "c066c6a0cad613f325a7d51eab22303c",
        "8703cbb8d2841f7d7ed26572aaebcee4",
        "fe39d78c0afaa7b72c5a8173765ed456",
        "f972309fb992f5f4ec36e65f248dc9fa",
    ]


@pytest.mark.parametrize(
    "name", ["num_key_heads", "num_heads", "key_dim", "value_dim", "width", "steps", "eps", "tiled"]
)
def test_a_models_digest_covers_each_field_of_its_delta_rule(name: str) -> None:
    config = config_of(TINY[NAME].config())
    assert config.recurrence is not None
    value = (getattr(config.recurrence, name) or 0) * 2 + 1
    other = replace(config.recurrence, **{name: value})  # type: ignore[arg-type]
    told = config.mapped(lambda block: block if block.attends else replace(block, mixer=other))
    assert model_digest(told, []) != model_digest(config, [])


# Saves that are broken off: the fake caches of test_session_crash, and states.

SHAPES = {"states": ((2, 3, 2, 4), torch.float32), "tails": ((2, 3, 5), torch.float32)}
FORM = TensorsFormat(tuple((name, "fp32", shape) for name, (shape, _) in SHAPES.items()))
STATEFUL = replace(
    IDENTITY, num_state_layers=2, state_heads=3, state_key_dim=2, state_value_dim=4, tail_tokens=3, tail_size=5
)
OLD, NEW = tuple(range(6)), (*range(4), *range(40, 45))
UNCHANGED = 4


class States(PlacedPart):
    """States computed from the tokens before a place alone."""

    name, most, places = "states", 4, ()

    def __init__(self, tokens: Sequence[int] = (), places: Sequence[int] = ()) -> None:
        self.length, self.places = len(tokens), list(places)
        self._held = {place: self._of(tokens[:place]) for place in places}

    @staticmethod
    def _of(tokens: Sequence[int]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(sum(token * 7**at for at, token in enumerate(tokens)) % 2**40)
        return [torch.randn(shape, generator=generator) for shape, _ in SHAPES.values()]

    def shapes(self, unit: Unit) -> Shapes:
        return SHAPES

    def tensors(self, unit: Unit) -> list[Tensor]:
        return self._held[unit[0]]

    def filled(self, unit: Unit, tensors: Sequence[Tensor]) -> None:
        self._held[unit[0]] = list(tensors)
        self.places = sorted(self._held)

    def restored(self, length: int) -> None:
        self._held = {place: held for place, held in self._held.items() if place <= length}
        self.length, self.places = length, sorted(self._held)
        assert not length or length in self._held

    truncate = restored

    def bits(self) -> dict[int, bytes]:
        return {place: b"".join(part.numpy().tobytes() for part in held) for place, held in self._held.items()}


PARTS = [Rows(), States()]


def states_of(tokens: Sequence[int]) -> States:
    return States(tokens, sorted({4, 6, len(tokens)}))


def write(store: Store, tokens: Sequence[int]) -> None:
    unchanged = min(UNCHANGED, len(store.tokens))
    store.save(Kept(Rows(tokens), states_of(tokens)), tokens, capacity=0, extra={}, unchanged=unchanged)


def assert_whole(path: Path, tokens: Sequence[int]) -> None:
    """Both as they were saved, and no file besides."""
    rows, states = Rows(range(9)), States(range(9), [1, 9])
    with Store.open(path, STATEFUL, read_only=True) as store:
        assert store.tokens == tokens
        store.load(Kept(rows, states), len(tokens))
    assert bits(rows) == bits(Rows(tokens))
    assert states.bits() == states_of(tokens).bits()
    assert {each.name for each in path.glob("*.safetensors")} == manifest_of(path).files


class Killed(BaseException):
    """Stands for a killed process: no later call reaches the disk."""


@pytest.mark.parametrize("half", [False, True], ids=["before the step", "in the middle of a write"])
def test_a_writer_of_states_killed_at_any_step_leaves_the_old_or_the_new_session(tmp_path: Path, half: bool) -> None:
    def die(name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if half and name == "pwrite":
            real(args[0], args[1][: len(args[1]) // 2], *args[2:])
        for step in STEPS:
            patch.setattr(os, step, beyond)
        raise Killed

    def beyond(*args: Any, **kwargs: Any) -> Any:
        raise Killed

    def begun(path: Path) -> Store:
        with Store.open(path, STATEFUL) as store:
            write(store, OLD)
        return Store.open(path, STATEFUL)

    with begun(tmp_path / "counted") as store, at_step(-1, lambda *call: None) as calls:
        write(store, NEW)
    kept = [place for place in places_of(tmp_path / "counted") if place == UNCHANGED]
    assert calls.count("fsync") == 7  # two pages, states at 6 and 9, the manifest, twice the folder: those at 4 stay
    assert len(kept) == 1
    outcomes = set()
    for number in range(len(calls)):
        path = tmp_path / f"killed at {number}"
        store = begun(path)
        with pytest.MonkeyPatch.context() as patch, at_step(number, die), pytest.raises(Killed):
            write(store, NEW)
        store._held.close()  # the system gives locks back
        with Store.open(path, STATEFUL) as next_one:
            outcomes.add(next_one.tokens)
            assert_whole(path, next_one.tokens)
            write(next_one, NEW)
        assert_whole(path, NEW)
    assert outcomes == {OLD, NEW}


def test_the_disks_room_for_states_is_looked_at_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.open(tmp_path, STATEFUL) as store:
        pages = store.bytes_to_write(len(OLD), 0, Kept(Rows(OLD)))
        assert store.bytes_to_write(len(OLD), 0, Kept(Rows(OLD), states_of(OLD))) == pages + 2 * FORM.nbytes


def test_rows_of_a_model_with_states_come_with_them(tmp_path: Path) -> None:
    for identity, states in ((STATEFUL, []), (IDENTITY, [states_of(OLD)])):
        with (
            Store.open(tmp_path / str(len(states)), identity) as store,
            pytest.raises(ValueError, match="states are"),
        ):
            store.save(Kept(Rows(OLD), *states), OLD, capacity=0, extra={}, unchanged=0)


# The prefix store.


def stored_files(root: Path, kind: str) -> list[Path]:
    return sorted(root.glob(f"*/*-{kind}-*"))


def conditions_with(identity: Identity) -> Conditions:
    return replace(CONDITIONS, identity=identity)


def test_the_store_goes_on_from_the_last_page_that_has_states(folder: Path, tmp_path: Path) -> None:
    """One by one the last files are lost or damaged: what is left is what is read, and the text is the same."""
    prompt, notes = [*DOCUMENT, *QUESTIONS[0]], list[str]()
    expected = fresh(folder, prompt)
    with with_store(folder, tmp_path) as made:
        assert say(made, prompt, reuse=False) == expected
        made.keep()
        places = [place for place in made.worker.states.places if place % BLOCK == 0]  # type: ignore[union-attr]
    assert len(places) >= 3
    assert len(stored_files(tmp_path, "states")) == len(places)
    assert len(stored_files(tmp_path, "rows")) == places[-1] // BLOCK
    for place in reversed(places):
        with with_store(folder, tmp_path, notes) as made:
            assert say(made, prompt, reuse=False) == expected
            assert made.stats.stored_tokens == place
            stored = store_of(made).stored(made.worker.kept.parts, prompt)
            victim = store_of(made).path / stored.pages["states", place // BLOCK - 1].file
        if place == places[-1]:
            victim.unlink()
        else:
            victim.write_bytes(flip(victim.read_bytes()))
            with with_store(folder, tmp_path, notes) as made:
                assert say(made, prompt, reuse=False) == expected
                assert made.stats.stored_tokens == max((each for each in places if each < place), default=0)
            assert not victim.exists()
    assert len(notes) == len(places) - 1
    assert all("computed again" in note for note in notes)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_of_a_prompt_that_is_left_whole_spans_stay(
    folder: Path, sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, expected = [*DOCUMENT, *QUESTIONS[0]], fresh(folder, [*DOCUMENT, *QUESTIONS[0]], sampling)
    monkeypatch.setattr("offload.engine.prefix.span_tokens", lambda plan: 2 * BLOCK)
    with engine(folder) as made:
        assert say(made, prompt, sampling, reuse=False) == expected
    for stays in (True, False):

        def leave(progress: Progress, stays: bool = stays) -> None:
            if progress.done > 2 * BLOCK and progress.stays is stays:
                raise TimeoutError

        with engine(folder) as made:
            with pytest.raises(TimeoutError):
                next(made.generate(GenerationRequest(prompt, sampling, max_tokens=12), on_progress=leave))
            assert len(made.prefix.tokens) == (4 * BLOCK if stays else 2 * BLOCK)
            assert say(made, prompt, sampling, reuse=False) == expected
            assert made.stats.reused_tokens == (4 * BLOCK if stays else 2 * BLOCK)


def test_states_that_could_not_be_read_leave_the_ones_that_are_held(folder: Path, tmp_path: Path) -> None:
    prompt = [*DOCUMENT, *QUESTIONS[0]]
    with with_store(folder, tmp_path) as made:
        say(made, prompt, reuse=False)
        made.keep()
    for victim in stored_files(tmp_path, "states"):
        victim.write_bytes(flip(victim.read_bytes()))
    with with_store(folder, tmp_path) as made:
        short = DOCUMENT[: 2 * BLOCK + SIZES.rows]
        say(made, short, reuse=False)
        held = made.prefix.num_alike(prompt)
        assert held == 2 * BLOCK
        assert say(made, prompt, reuse=False) == fresh(folder, prompt)
        assert (made.stats.stored_tokens, made.stats.reused_tokens) == (0, held)


def test_pages_without_states_are_not_kept_and_count_for_nothing(tmp_path: Path) -> None:
    page, tokens, told = STATEFUL.page_tokens, list(range(20)), list[str]()
    store = PrefixStore(tmp_path, conditions_with(STATEFUL), limit=ENOUGH, on_note=told.append)
    store.keep(Kept(Rows(tokens), States(tokens, [3, 18])), tokens, no_progress)
    assert not list(tmp_path.iterdir())
    store.keep(Kept(Rows(tokens), States(tokens, [page, 3 * page, 18])), tokens, no_progress)
    assert len(stored_files(tmp_path, "rows")) == 3
    assert [store.stored(PARTS, tokens[:count]).num_tokens for count in (3, 4, 8, 11, 12, 20)] == [0, 4, 4, 4, 12, 12]
    found = store.stored(PARTS, tokens)
    assert found.nbytes == sum((store.path / file.file).stat().st_size for file in found.pages.values())
    assert nbytes(tmp_path) == sum(file.stat().st_size for file in tmp_path.glob("*/*.safetensors"))
    rows, states = Rows(), States()
    assert store.load(Kept(rows, states), tokens, 0, no_progress) == 12
    assert bits(rows) == bits(Rows(tokens[:12]))
    assert states.bits() == {12: States(tokens, [12]).bits()[12]}
    assert not told


def test_a_store_with_little_room_keeps_a_beginning_that_can_be_gone_on_with(tmp_path: Path) -> None:
    tokens, page = list(range(20)), STATEFUL.page_tokens
    states, per_page, per_state = States(tokens, [4, 8, 16, 20]), STATEFUL.page_format.nbytes, FORM.nbytes
    for pages, count, expected in ((5, 4, 20), (5, 1, 20), (4, 1, 16), (2, 1, 8), (1, 1, 4), (1, 0, 0), (0, 1, 0)):
        root, limit = tmp_path / f"{pages} {count}", pages * per_page + count * per_state
        told = list[str]()
        store = PrefixStore(root, conditions_with(STATEFUL), limit=limit, on_note=told.append)
        kept = store.keep(Kept(Rows(tokens), states), tokens, no_progress)
        assert kept == store.stored(PARTS, tokens).num_tokens == expected, (pages, count)
        assert ["the store may take" in line for line in told] == [True] * (expected < len(tokens))
        assert nbytes(root) <= limit
        assert len(stored_files(root, "states")) == (min(count, 4) if expected else 0)
        assert len(stored_files(root, "rows")) == expected // page


def test_of_a_text_that_is_used_the_last_states_go_first(tmp_path: Path) -> None:
    tokens = list(range(20))
    store = PrefixStore(tmp_path, conditions_with(STATEFUL), limit=ENOUGH, on_note=pytest.fail)
    store.keep(Kept(Rows(tokens), States(tokens, [4, 12, 20])), tokens, no_progress)
    for file in tmp_path.glob("*/*.safetensors"):
        os.utime(file, (1.0, 1.0))
    used = [*tokens[:12], *range(50, 58)]  # which has another end
    assert store.load(Kept(Rows(), States()), used, 0, no_progress) == 12
    shrink(tmp_path, 3 * STATEFUL.page_format.nbytes + 2 * FORM.nbytes)
    assert store.stored(PARTS, tokens).num_tokens == 12
    assert [store.stored(PARTS, tokens[:count]).num_tokens for count in (4, 12)] == [4, 12]
    shrink(tmp_path, STATEFUL.page_format.nbytes + FORM.nbytes)
    assert store.stored(PARTS, tokens).num_tokens == 4


# Ranks.


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("tiled", [None, 0])
def test_the_kept_numbers_of_all_shards_are_those_of_the_whole(size: int, tiled: int | None) -> None:
    """Which numbers a rank keeps, from the rows of its projection in the whole one's."""
    config = config_of(TINY[NAME].config() | {"linear_num_key_heads": 4, "linear_num_value_heads": 8})
    assert config.recurrence is not None
    delta = replace(config.recurrence, tiled=tiled)
    whole = replace(config.mapped(lambda block: block if block.attends else replace(block, mixer=delta)))
    one = whole.layer(whole.stateful[0])
    row = torch.arange(delta.kept)
    q, k, v, steps, times = row.split(
        (delta.key_size, delta.key_size, delta.out_size, delta.num_heads, delta.num_heads)
    )
    seen = torch.zeros(delta.kept, dtype=torch.long)
    for rank in range(size):
        shard = Shard(rank, size)
        own, heads, keys = shard.config(whole).recurrence, shard.value_heads(one), shard.key_heads(one)
        assert own is not None
        found = kept_numbers(one, shard)
        assert len(found) == own.kept
        expected = [part.unflatten(0, (-1, delta.key_dim))[keys.start : keys.stop].flatten() for part in (q, k)]
        expected.append(v.unflatten(0, (-1, delta.value_dim))[heads.start : heads.stop].flatten())
        expected += [part[heads.start : heads.stop] for part in (steps, times)]
        assert torch.equal(found, torch.cat(expected))
        seen[found] += 1
    assert seen.min() == 1
    assert (seen.max() == 1) == (tiled is None)


def on_a_short_grid(rank: int) -> None:
    kv_states.PREFILL_BLOCK = BLOCK  # type: ignore[attr-defined]


@pytest.fixture
def forked_here() -> Iterator[list[Forked]]:
    with forked_ranks(on_a_short_grid) as started:
        yield started


@pytest.mark.usefixtures("forked_here")
@pytest.mark.parametrize("order", [(1, 2), pytest.param((2, 1, 2), marks=pytest.mark.deep)])
def test_a_session_of_states_is_of_any_number_of_ranks(folder: Path, tmp_path: Path, order: tuple[int, ...]) -> None:
    path, text, bytes_of = tmp_path / "session", list(DOCUMENT), dict[str, bytes]()
    plain = list(DOCUMENT)
    with engine(folder) as alone:
        for question in QUESTIONS:
            plain += [*say(alone, plain), *question]
    for ranks, question in zip(order, QUESTIONS, strict=False):
        plan = changed(plan_of(folder), num_devices=ranks)
        with tiny_engine(plan, folder) as made, opened(path, folder, made) as store:
            known, kept = len(store.tokens), made.worker.kept
            places = places_of(path) if known else []
            assert made.restore(store, text) == known
            for place in places:  # each rank has its part
                again = tmp_path / f"{ranks}-{place}-{known}"
                with Folder(tmp_path) as where:
                    write_unit(where, again.name, kept, kept["states"], (place,), lambda num_bytes, fewer=0: None)
                assert again.read_bytes() == bytes_of[f"{place}"]
            text += say(made, text)
            assert text == plain[: len(text)]
            assert made.stats.reused_tokens == known
            made.save(store, {})
            text += question
        for saved_one in manifest_of(path).parts["states"]:
            bytes_of[f"{saved_one.unit[0]}"] = (path / saved_one.file).read_bytes()
    assert bytes_of


@pytest.mark.usefixtures("forked_here")
def test_ranks_read_the_store_and_refuse_damage_together(folder: Path, tmp_path: Path) -> None:
    prompt = [*DOCUMENT, *QUESTIONS[0]]
    expected = fresh(folder, prompt)
    path = tmp_path / "session"
    plan = changed(plan_of(folder), num_devices=2)
    with with_store(folder, tmp_path / "store", plan=plan) as made, opened(path, folder, made) as store:
        assert say(made, prompt) == expected
        made.keep()
        made.prefix.truncate(0)
        assert say(made, prompt, reuse=False) == expected
        assert made.stats.stored_tokens > len(prompt) - 3 * BLOCK
        made.save(store, {})
        victim = path / manifest_of(path).parts["states"][-1].file
        victim.write_bytes(flip(victim.read_bytes()))
        made.prefix.truncate(0)
        with pytest.raises(SessionError, match=victim.name):
            made.restore(store, [*store.tokens, 1])
        assert made.num_cached == 0
        assert say(made, prompt) == expected
