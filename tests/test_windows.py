"""Layers whose rows see a window: what is in the ring, and what a sequence can come back to."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kit import asked
from kit.families import save_tiny
from kit.models import (
    CPU,
    GREEDY,
    Sizes,
    changed,
    load,
    random_tokens,
    resident_rows,
    target_cache,
    tiny_engine,
    tiny_plan,
)
from kit.processor import OPERATORS, of, process_uses
from offload.config.config_json import config_of
from offload.config.model import llama_shaped
from offload.config.reading import read_config
from offload.decode.sampling import SamplingParams
from offload.engine.engine import Engine
from offload.engine.prefix import num_common
from offload.engine.request import GenerationRequest
from offload.errors import SessionError, UsageError
from offload.kernels.rope import Scoring, rope_table
from offload.kv.draft_rows import DraftRowsCache
from offload.kv.full import FullCache
from offload.kv.mixed import MixedCache
from offload.kv.window import WindowCache
from offload.model.decoder import Decoder
from offload.model.level import Level
from offload.model.passes import forward
from offload.pages.tiles import TileShape
from offload.plan.planner import Options, Plan
from offload.plan.request import Request
from offload.plan.sizing import MAX_ROWS, Sizing, ring_pages
from offload.session import manifest as manifests
from offload.session.fingerprints import identity_of
from offload.session.store import Store
from offload.transfer.memory import Memory
from test_parity import assert_same_logits, in_prefill

PAGE, WINDOW, HEADS, DIM = 8, 11, 2, 16
SIZES = Sizes(capacity=160, rows=4, prefill_block=7, page=PAGE, pages=2)
NAME = "gemma4"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers with a window of 9 tokens, and one that sees all."""
    options = {"vocab_size": 264, "max_position_embeddings": 1024}
    return save_tiny(NAME, tmp_path_factory.mktemp("windows"), tokenizer=True, **options)


@pytest.fixture(params=OPERATORS)
def decoder(folder: Path, request: pytest.FixtureRequest) -> Decoder:
    return load(folder, kernels=of(request.param))


# A cache of one layer, beside fp64.

ONE_LAYER = llama_shaped("llama", 32, 64, 32, 1, 2 * HEADS, HEADS, DIM, 400)


TABLE = rope_table(ONE_LAYER, 400, 400, "cpu", ONE_LAYER.rope)


def ring(operators: str, *, num_pages: int, windows: Sequence[int] = (WINDOW,)) -> WindowCache:
    return WindowCache(
        Memory(torch.device("cpu")),
        TileShape(HEADS, DIM, PAGE, 1, torch.float32),
        num_pages=num_pages,
        windows=windows,
        scorings=[Scoring(TABLE)] * len(windows),
        kernels=of(operators),
    )


@functools.cache
def rows(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(count, heads, DIM, generator=generator) for heads in (2 * HEADS, HEADS, HEADS))  # type: ignore[return-value]


def expected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention in fp64 of all rows, each to the last WINDOW up to itself."""
    rotated = Scoring(rope_table(ONE_LAYER, len(q), 400, "cpu", ONE_LAYER.rope)).rotated(q, k, 0)
    query, key = (each.double() for each in rotated)
    key, value = (each.repeat_interleave(2, 1) for each in (key, v.double()))
    scores = torch.einsum("thd,shd->hts", query, key) / DIM**0.5
    at = torch.arange(len(q))
    hidden = (at[None] > at[:, None]) | (at[None] <= at[:, None] - WINDOW)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, value).flatten(1)


@pytest.mark.parametrize("operators", OPERATORS)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_row_sees_its_window_and_nothing_else(operators: str, phase: str) -> None:
    cache, (q, k, v) = ring(operators, num_pages=5), rows(104, 1)
    out = []
    for start in range(0, 99, 3):
        some = slice(start, start + 4)  # of which three count
        cache.begin(phase, 4)  # type: ignore[arg-type]
        out.append(cache.attend(0, q[some], k[some], v[some])[:3])
        cache.advance(3)
    q, k, v = (each[:99] for each in (q, k, v))
    torch.testing.assert_close(torch.cat(out).double(), expected(q, k, v), atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("operators", OPERATORS)
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it_nor_on_what_is_still_there(operators: str) -> None:
    (q, k, v), found = rows(94, 2), []
    for step, num_pages in ((1, 5), (4, 6), (3, 30)):
        cache, out = ring(operators, num_pages=num_pages), []
        for start in range(0, 90, step):
            some = slice(start, start + 4)  # of which `step` count
            cache.begin("decode", 4)
            out.append(cache.attend(0, q[some], k[some], v[some])[:step])
            cache.advance(step)
        found.append(torch.cat(out)[:90])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("operators", OPERATORS)
def test_drafted_rows_change_none_of_those_that_are_known(operators: str) -> None:
    (q, k, v), drafts = rows(64, 3), rows(8, 4)
    plain, disturbed = ring(operators, num_pages=5), ring(operators, num_pages=5)
    for start in range(0, 60, 2):
        some, out = slice(start, start + 4), []
        for cache in (plain, disturbed):
            if cache is disturbed:  # some of them of tokens that are known, some after them
                cache.begin("decode", 8, max(start - 3, 0))
                cache.attend(0, *drafts)
                cache.advance(5)
                assert cache.length == start
            cache.begin("decode", 4)
            out.append(cache.attend(0, q[some], k[some], v[some])[:2])
            cache.advance(2)
        assert torch.equal(*out)


def filled(num_pages: int, count: int) -> WindowCache:
    """With the first `count` of the rows of seed 5."""
    cache, (q, k, v) = ring("torch", num_pages=num_pages), rows(200, 5)
    go_on(cache, (q, k, v), count)
    return cache


def go_on(cache: WindowCache, qkv: tuple[Tensor, Tensor, Tensor], stop: int) -> Tensor:
    """What comes out of the rows up to `stop`, one after the other."""
    out = []
    for at in range(cache.length, stop):
        cache.begin("prefill", 1)
        out.append(cache.attend(0, *(each[at : at + 1] for each in qkv)))
        cache.advance(1)
    return torch.cat(out)


@functools.cache
def written() -> Tensor:
    """What a cache has of the rows of seed 5: [2, H, n, D]."""
    k, v = rows(200, 5)[1:]
    return torch.stack([Scoring(TABLE).rotated(k, k, 0)[1], v]).transpose(1, 2)


def has_all_seen(cache: WindowCache, length: int) -> bool:
    """Whether the tokens before `length` that the next row sees are what was written there."""
    oldest = max(length + 1 - WINDOW, 0)
    for number in range(oldest // PAGE, -(-length // PAGE)):
        [page] = cache.page_of_all(number)
        first, last = max(oldest, number * PAGE), min(length, (number + 1) * PAGE)
        if not torch.equal(page[:, :, first - number * PAGE : last - number * PAGE], written()[:, :, first:last]):
            return False
    return True


@pytest.mark.parametrize("num_pages", [3, 4, 7])
@pytest.mark.parametrize("drafted", [0, 3, 13])
@pytest.mark.few(2)
def test_it_reaches_as_far_as_what_was_written_is_there(num_pages: int, drafted: int) -> None:
    """Rows that were drafted, or of a prefill that was broken off, take the place of others."""
    for count in range(60, 60 + PAGE):
        cache = filled(num_pages, count)
        if drafted:
            cache.begin("prefill", drafted, count)
            cache.attend(0, *(each[:drafted] for each in rows(200, 6)))
            cache.advance(drafted)
        oldest = max(-(-(count + drafted) // PAGE) - num_pages, 0) * PAGE
        for length in range(1, count + 1):
            assert cache.reaches(length) == (max(length + 1 - WINDOW, 0) >= oldest)
            assert has_all_seen(cache, length) or not cache.reaches(length)


def test_it_reaches_no_further_than_it_has_rows() -> None:
    cache = filled(9, 30)
    assert cache.reaches(30)
    assert not cache.reaches(31)


def test_layers_of_several_windows_reach_as_far_as_the_longest_one() -> None:
    cache = ring("torch", num_pages=3, windows=(3, WINDOW))
    cache.restored(0)
    cache.page_filled(7)
    cache.restored(72)
    assert cache.reaches(7 * PAGE + WINDOW - 1)  # whose longest window begins with page 7
    assert not cache.reaches(7 * PAGE + WINDOW - 2)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_rows_that_were_drafted_far_ahead_took_the_place_of_pages_whatever_is_drafted_after_them(phase: Any) -> None:
    """A planted fault lived: a second, shorter draft made the first one's pages forgotten."""
    cache, (q, k, v) = filled(4, 60), rows(200, 6)
    for count in (13, 1):
        cache.begin(phase, count, cache.length)
        cache.attend(0, q[:count], k[:count], v[:count])
        cache.advance(count)
    for length in range(1, 61):
        assert has_all_seen(cache, length) or not cache.reaches(length)


@pytest.mark.parametrize(("num_pages", "counts"), [(9, (50, 61, 64)), (4, (66, 77))])
def test_what_was_copied_goes_on_with_the_same_bits(num_pages: int, counts: Sequence[int]) -> None:
    """From a ring that has more pages, or that has lost some for which the copy has room."""
    qkv = rows(200, 5)
    for count in counts:
        source = filled(num_pages, 80)
        other = ring("torch", num_pages=5)
        go_on(other, qkv, 90)
        other.copy_from(source, count)
        assert other.length == count
        oldest = max(-(-count // PAGE) - 5, 10 - num_pages) * PAGE
        for length in range(1, count + 1):
            assert other.reaches(length) == (max(length + 1 - WINDOW, 0) >= oldest)
            assert has_all_seen(other, length) or not other.reaches(length)
        assert torch.equal(go_on(other, qkv, 100), go_on(filled(5, count), qkv, 100))


def test_of_pages_from_elsewhere_those_that_were_filled_are_there() -> None:
    source, cache = filled(9, 80), ring("torch", num_pages=9)
    for first in (9, 8, 7):
        cache.restored(0)
        for number in range(first, 10):
            pages = cache.page_to_fill(number)
            pages[0].copy_(source.page_of_all(number)[0])
            cache.page_filled(number)
        cache.restored(80)
        assert cache.first_page == first
        for length in range(50, 81):
            assert cache.reaches(length) == (length + 1 - WINDOW >= first * PAGE)
            assert has_all_seen(cache, length) or not cache.reaches(length)


def test_after_a_truncate_beyond_what_is_there_nothing_is() -> None:
    cache = filled(ring_pages(WINDOW, 1, page=PAGE, undo=10), 100)
    assert cache.reaches(90)
    assert not cache.reaches(100 - PAGE * 5)
    cache.truncate(90)
    assert cache.length == 90
    cache.truncate(100 - PAGE * 5)
    assert cache.length == 0
    assert cache.first_page == 0


@pytest.mark.parametrize(
    ("window", "rows_", "page", "undo"), [(1, 1, 8, 0), (9, 7, 8, 3), (8, 8, 8, 8), (100, 5, 16, 64)]
)
def test_a_ring_holds_what_rows_see_and_what_a_shorter_sequence_would(
    window: int, rows_: int, page: int, undo: int
) -> None:
    """Wherever these rows begin: all pages from the oldest that a sequence shorter by `undo` sees are in the ring."""
    num_pages = ring_pages(window, rows_, page=page, undo=undo)
    for start in range(3 * page + window + undo, 3 * page + window + undo + page):
        oldest, last = (start - undo + 1 - window) // page, (start + rows_ - 1) // page
        assert last - oldest + 1 <= num_pages


# A model's logits.


def scripted(decoder: Decoder, seed: int, *, undo: int, acts: Sequence[str]) -> bool:
    """Forwards, prefills and truncates at random over a ring and over one that forgets nothing: where a window would
    miss something, an empty cache, else the same logits. Whether they were so bit for bit."""
    equal = True
    draw = random.Random(seed)
    tokens = random_tokens(150, seed=seed)
    small, large = (target_cache(decoder, SIZES, undo=size) for size in (undo, 400))
    levels = [Level("target", decoder, cache, vocab_size=264, block=SIZES.block) for cache in (small, large)]
    for _ in range(25):
        room = 150 - large.length
        count = min(draw.randrange(1, 30), room)
        act = draw.choice(acts) if room else "truncate"
        if act == "truncate":
            length = max(large.length - draw.randrange(0, 60), 0)
            for level in levels:
                level.truncate(length)
            if small.length != large.length:
                assert small.length == 0
                levels[1].truncate(0)
        elif act == "prefill":
            for cache in (small, large):
                some = tokens[cache.length : cache.length + count]
                decoder.prefill(cache, some, resident_rows(decoder, 7))
        else:
            count = min(count, 9)
            some = tokens[large.length : large.length + count]
            first, second = (forward(level, some, len(some)) for level in levels)
            assert_same_logits(first, second)
            equal = equal and torch.equal(first, second)
        assert small.length == large.length
    return equal


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.few(2)
def test_any_script_gives_the_bits_of_a_cache_that_forgets_nothing(decoder: Decoder, seed: int) -> None:
    """In a prefill the ring's end rounds otherwise, as a tile's does."""
    assert scripted(decoder, seed, undo=8 * seed, acts=("forward", "forward", "truncate"))
    scripted(decoder, seed, undo=8 * seed, acts=("forward", "forward", "prefill", "truncate"))


def test_a_level_that_drafts_in_the_ring_leaves_the_targets_logits_alone(decoder: Decoder) -> None:
    tokens = random_tokens(60, seed=9)  # more than the ring's
    whole = target_cache(decoder, SIZES, undo=8)
    theirs = in_prefill(decoder, whole, tokens, 7)
    cache = target_cache(decoder, SIZES, undo=8)
    assert isinstance(cache, MixedCache)
    assert isinstance(cache.growing, FullCache)
    ahead = MixedCache(decoder.config, DraftRowsCache(cache.growing), cache.windows, drafts=True)
    own = Level("self", decoder, ahead, vocab_size=264, block=SIZES.block)
    target = Level("target", decoder, cache, vocab_size=264, block=SIZES.block)
    plain = Level("target", decoder, target_cache(decoder, SIZES, undo=8), vocab_size=264, block=SIZES.block)
    for start in range(0, 60, 3):
        some = tokens[start : start + 3]
        forward(own, [*some[:1], 0], 1)
        forward(own, [1, 2, 3], 1)
        own.truncate(cache.length + 3)
        forward(own, [7], 1)
        logits = forward(target, some, 3)
        assert torch.equal(logits, forward(plain, some, 3))
        own.truncate(cache.length)
        assert_same_logits(logits, theirs[start : start + 3])


# Engines: what comes back is what a fresh start says.

PLAIN = Sizes(rows=4, page=32, prefill_block=32, any_rows=True, capacity=600)


def engine_plan(folder: Path) -> Plan:
    return tiny_plan(folder, None, PLAIN, num_prompt_tokens=440, max_tokens=60, dtype="fp32")


def engine(folder: Path) -> Engine:
    return tiny_engine(engine_plan(folder), folder)


def say(
    made: Engine, prompt: Sequence[int], num_tokens: int = 12, *, reuse: bool = True, seed: int | None = None
) -> list[int]:
    sampling = GREEDY if seed is None else SamplingParams(temperature=1.5, seed=seed)
    steps = made.generate(GenerationRequest(list(prompt), sampling, max_tokens=num_tokens, reuse=reuse))
    return [token for step in steps for token in step.tokens]


PROMPT = random_tokens(300, seed=21)


@pytest.mark.few(2)
@pytest.mark.parametrize(("cut", "is_reused"), [(10, True), (200, False), (40, True)])
def test_a_shorter_prompt_reuses_rows_where_windows_reach_and_says_the_same(
    folder: Path, cut: int, is_reused: bool
) -> None:
    edited = [*PROMPT[:-cut], *random_tokens(30, seed=5)]
    with engine(folder) as fresh:
        expected_text = say(fresh, edited, reuse=False)
    with engine(folder) as made:
        say(made, PROMPT)
        assert say(made, edited) == expected_text
        assert (made.stats.reused_tokens > 0) == is_reused


def test_a_seeds_text_is_that_of_a_fresh_start_whatever_was_cached_before(folder: Path) -> None:
    other = [*PROMPT[:150], *random_tokens(100, seed=6)]
    with engine(folder) as fresh:
        expected_text = say(fresh, other, reuse=False, seed=3)
    with engine(folder) as made:
        for prompt in (PROMPT, other[:-20], other):
            text = say(made, prompt, reuse=False, seed=3)
        assert text == expected_text


class Broken(Exception):
    pass


def test_a_prefill_that_is_broken_off_costs_what_it_has_overwritten_and_no_more(folder: Path, tmp_path: Path) -> None:
    """Bug: windows held rows of the new prompt, and the session was saved as if they were the old one's."""
    short = PROMPT[:60]
    longer = [*short, *PROMPT[60:300]]

    def stop(progress: object) -> None:
        if getattr(progress, "stage", "") == "prefill" and getattr(progress, "done", 0) > 100:
            raise Broken

    with engine(folder) as fresh:
        expected_text = say(fresh, short)
    for saves_before in (False, True):
        path = tmp_path / str(saves_before)
        with engine(folder) as made, Store.open(path, identity_of(folder, made.plan)) as store:
            say(made, short, 2)
            if saves_before:
                made.save(store, {"said": 1})
            known = store.tokens
            with pytest.raises(Broken):
                list(made.generate(GenerationRequest(longer, GREEDY, max_tokens=2, reuse=True), on_progress=stop))
            made.save(store, {"said": 2})
            assert store.tokens == known  # what is on the disk is still good
            assert store.extra == {"said": 2}
            assert made.restore(store, short) == min(len(known), len(short))
            assert say(made, short) == expected_text
            assert (made.stats.reused_tokens > 0) == saves_before


def test_rows_after_a_load_that_failed_are_those_of_a_fresh_start(folder: Path, tmp_path: Path) -> None:
    """Bug: pages that it had filled were taken for the first ones of the next prompt."""
    path, other = tmp_path / "session", random_tokens(150, seed=17)
    with engine(folder) as made, Store.open(path, identity_of(folder, made.plan)) as store:
        say(made, PROMPT)
        made.save(store, {})
        windows = made.worker.windows
        assert windows is not None
        damage(sorted(path.glob("window-*"))[-1])
        made.prefix.truncate(0)
        with pytest.raises(SessionError):
            made.restore(store, PROMPT)
        say(made, other, 3, reuse=False)
        assert windows.first_page == 0
        assert windows.reaches(100)


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)


def test_rows_are_copied_from_who_still_has_them(folder: Path) -> None:
    """Of two that hold a prompt's beginning the one that ran further has lost it."""
    with engine(folder) as far, engine(folder) as near, engine(folder) as new:
        say(far, PROMPT, reuse=False)
        say(near, PROMPT[:110], reuse=False)
        wanted = [*PROMPT[:96], *random_tokens(60, seed=3)]
        assert far.prefix.num_alike(wanted) == 0
        assert near.prefix.num_alike(wanted) == 96
        assert not new.worker.copy_rows(far.worker, 96)
        new.prefix.borrow([far.prefix, near.prefix], wanted)
        assert len(new.prefix.tokens) == 96


@pytest.mark.parametrize("cut", [0, 20])
def test_a_session_of_windows_is_loaded_and_gone_on_with(folder: Path, tmp_path: Path, cut: int) -> None:
    going_on = [*PROMPT[: len(PROMPT) - cut], *random_tokens(25, seed=8)]
    with engine(folder) as fresh:
        expected_text = say(fresh, going_on)
    with engine(folder) as made:
        say(made, PROMPT)
        with Store.open(tmp_path / "session", identity_of(folder, made.plan)) as store:
            made.save(store, {})
            num_saved = len(store.tokens)
        with Store.open(tmp_path / "session", identity_of(folder, made.plan)) as store:
            made.save(store, {})
            assert len(store.tokens) == num_saved
    with engine(folder) as later, Store.open(tmp_path / "session", identity_of(folder, later.plan)) as store:
        assert later.restore(store, going_on) == len(PROMPT) - cut
        assert say(later, going_on) == expected_text
        assert later.stats.reused_tokens > 200


def test_what_windows_have_lost_is_not_restored(folder: Path, tmp_path: Path) -> None:
    with engine(folder) as made:
        say(made, PROMPT)
        with Store.open(tmp_path / "session", identity_of(folder, made.plan)) as store:
            made.save(store, {})
    with engine(folder) as fresh:
        expected_text = say(fresh, PROMPT[:80])
    with engine(folder) as later, Store.open(tmp_path / "session", identity_of(folder, later.plan)) as store:
        assert later.restore(store, PROMPT[:80]) == 0
        assert say(later, PROMPT[:80]) == expected_text


def first_window_of(path: Path) -> int:
    """The first page of windows in a session."""
    record = json.loads(b"{" + (path / manifests.MANIFEST_FILE).read_bytes().partition(b"\n")[2])
    found: int = record["first_window_page"]
    return found


def test_a_session_keeps_the_files_of_pages_that_windows_still_have(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "session"

    def files() -> dict[str, int]:
        return {each.name[:12]: each.stat().st_mtime_ns for each in path.glob("window-*")}

    with engine(folder) as made, Store.open(path, identity_of(folder, made.plan)) as store:
        say(made, PROMPT[:200])
        made.save(store, {})
        before = files()
        say(made, PROMPT[:300])
        made.save(store, {})
        after = files()
        assert not before.keys() <= after.keys()  # those that windows have no longer are gone
        kept = [name for name in before.keys() & after.keys() if before[name] == after[name]]
        assert kept
        assert first_window_of(path) == made.worker.windows.first_page  # type: ignore[union-attr]
        assert store.bytes_to_read(made.worker.kept, len(store.tokens)) <= store.nbytes
        assert store.nbytes == sum(each.stat().st_size for each in path.glob("*-*"))


def test_sessions_are_gone_on_with_by_engines_of_another_size(folder: Path, tmp_path: Path) -> None:
    """Fewer pages than were saved, or more, of which some were not."""
    path, prompt = tmp_path / "session", PROMPT[:200]
    with engine(folder) as fresh:
        expected_text = say(fresh, PROMPT)
    with engine(folder) as made, Store.open(path, identity_of(folder, made.plan)) as store:
        say(made, prompt)
        made.save(store, {})
    for pages in (3, 12, 5):
        plan = changed(engine_plan(folder), window_pages=pages)
        with tiny_engine(plan, folder) as later, Store.open(path, identity_of(folder, later.plan)) as store:
            known = num_common(store.tokens, PROMPT)
            assert later.restore(store, PROMPT) == known >= len(prompt)
            windows = later.worker.windows
            assert windows is not None
            assert windows.first_page >= windows.first_kept(known)
            assert say(later, PROMPT) == expected_text
            later.save(store, {})
            assert store.tokens[:300] == tuple(PROMPT)


def test_what_can_be_loaded_is_what_windows_of_it_were_saved(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "session"
    with engine(folder) as made, Store.open(path, identity_of(folder, made.plan)) as store:
        say(made, PROMPT)
        made.save(store, {})
        windows, first = made.worker.windows, first_window_of(path)
        assert windows is not None
        for count in range(1, len(store.tokens)):
            seen = max(count + 1 - 9, 0) // 32
            assert store.num_loadable(made.worker.kept, count) == (count if seen >= first else 0)


def test_a_save_writes_the_page_that_has_grown_and_says_how_many_bytes(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "session"
    with engine(folder) as made, Store.open(path, identity_of(folder, made.plan)) as store:
        say(made, PROMPT[:200], 4)
        made.save(store, {})
        say(made, PROMPT[:210], 4)
        before, windows = made.prefix._num_saved, made.worker.windows
        assert windows is not None
        rows, form = store.identity.page_format, store.identity.window_format
        pages = form.count(len(made.prefix.tokens)) - before // 32
        new = store.bytes_to_write(len(made.prefix.tokens), before, made.worker.kept)
        assert new == pages * (form.nbytes + rows.nbytes)
        made.save(store, {})
        tokens = list(store.tokens)
    with engine(folder) as later, Store.open(path, identity_of(folder, later.plan)) as store:
        assert later.restore(store, tokens) == len(tokens)
        own = later.worker.windows
        assert own is not None
        for number in range(own.first_page, form.count(len(tokens))):
            used = min(len(tokens) - number * 32, 32)
            for ours, theirs in zip(own.page_of_all(number), windows.page_of_all(number), strict=True):
                assert torch.equal(ours[:, :, :used], theirs[:, :, :used])


def test_a_save_without_a_change_writes_no_page(folder: Path, tmp_path: Path) -> None:
    """Also where every layer has a window."""
    larger = {"vocab_size": 264, "max_position_embeddings": 1024}
    everywhere = save_tiny("mistral, a window", tmp_path / "model", tokenizer=True, **larger)
    for number, model in enumerate((folder, everywhere)):
        path = tmp_path / f"session{number}"
        with engine(model) as made, Store.open(path, identity_of(model, made.plan)) as store:
            say(made, PROMPT)
            made.save(store, {"said": 1})
            before = {each.name: each.stat().st_mtime_ns for each in path.glob("*-*")}
            num_tokens = len(made.prefix.tokens)
            assert store.bytes_to_write(num_tokens, num_tokens, made.worker.kept) == 0
            made.save(store, {"said": 2})
            assert {each.name: each.stat().st_mtime_ns for each in path.glob("*-*")} == before
            assert store.extra == {"said": 2}


def test_what_would_be_cut_off_again_is_not_loaded(folder: Path, tmp_path: Path) -> None:
    """A prompt within what is kept, whose last rows are left to the first pass, may see a page more."""
    with engine(folder) as made, Store.open(tmp_path / "session", identity_of(folder, made.plan)) as store:
        say(made, PROMPT)
        made.save(store, {})
        first = first_window_of(tmp_path / "session") * 32
        prompts = [PROMPT[:count] for count in range(first, first + 40, 3)]
    found = []
    with engine(folder) as later, Store.open(tmp_path / "session", identity_of(folder, later.plan)) as store:
        for prompt in prompts:
            later.prefix.truncate(0)
            restored = later.restore(store, prompt)
            later.prefix.begin(prompt, reuse=True)
            assert (len(later.prefix.tokens) > 0) == (restored > 0)
            found.append(restored > 0)
    assert found == sorted(found)
    assert set(found) == {False, True}


def test_a_damaged_page_of_windows_is_refused(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "session"
    with engine(folder) as made, Store.open(path, identity_of(folder, made.plan)) as store:
        say(made, PROMPT)
        made.save(store, {})
        damage(sorted(path.glob("window-*"))[-1])
        made.prefix.truncate(0)
        with pytest.raises(SessionError, match="window-"):
            made.restore(store, PROMPT)
        assert made.worker.full.length == 0
        assert made.worker.windows is not None
        assert made.worker.windows.length == 0


@pytest.fixture(scope="module")
def record(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The manifest of a session of windows."""
    path = tmp_path_factory.mktemp("manifest") / "session"
    with engine(folder) as made, Store.open(path, identity_of(folder, made.plan)) as store:
        say(made, PROMPT)
        made.save(store, {})
    content = (path / manifests.MANIFEST_FILE).read_bytes().partition(b"\n")[2]
    found: dict[str, Any] = json.loads(b"{" + content)
    return found


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"first_window_page": 99}, "first_window_page is 99"),
        ({"first_window_page": 0}, "its tokens need"),
        ({"window_pages": []}, "its tokens need"),
        ({"format": 2}, "window_page is not known"),
        ({"identity": {"num_kv_heads": 0}}, "num_kv_heads is 0"),
        ({"identity": {"num_window_layers": -1}}, "num_window_layers is -1"),
        ({"identity": {"window_head_dim": 0}}, "window_head_dim is 0"),
        ({"pages": "windows"}, "it must be the file of page"),
    ],
)
def test_a_forged_manifest_of_windows_is_refused(record: dict[str, Any], change: dict[str, Any], why: str) -> None:
    if change == {"pages": "windows"}:
        change = {"pages": [{**page, "file": page["file"].replace("page-", "window-")} for page in record["pages"]]}
    if "identity" in change:
        change = {"identity": record["identity"] | change["identity"]}
    body = json.dumps(record | change, separators=(",", ":")).encode()[1:]
    sealed = b'{"checksum":"%s",\n%s' % (manifests.checksum(body).encode(), body)
    with pytest.raises(ValueError, match=why):
        manifests.decode(sealed)


DRAFTED = Sizes(
    gamma=6, draft_gamma=3, budget=32, chunk=8, window=16, lookup=True, rows=4, page=32, prefill_block=48, capacity=600
)


@pytest.mark.few(1)
@pytest.mark.parametrize("operators", OPERATORS)
def test_speculation_says_what_plain_decoding_says(folder: Path, tmp_path: Path, operators: str) -> None:
    draft = save_tiny(NAME, tmp_path / "draft", tokenizer=True, noise=0.03, vocab_size=264)
    said = []
    with process_uses(operators):
        for sizes in (DRAFTED, replace(DRAFTED, gamma=0, draft_gamma=0, lookup=False)):
            wanted = draft if sizes.draft_gamma else None
            plan = tiny_plan(folder, wanted, sizes, num_prompt_tokens=200, max_tokens=50, dtype="fp32")
            with tiny_engine(plan, folder, wanted) as made:
                said.append(say(made, PROMPT[:200], 30))
                assert not wanted or sum(level.accepted for level in made.stats.levels) > 0
    assert said[0] == said[1]


@pytest.mark.few(1)
@pytest.mark.parametrize("offload", [("kv", "weights"), ()])
def test_sequences_share_passes_and_say_what_each_says_alone(
    folder: Path, tmp_path: Path, offload: tuple[str, ...]
) -> None:
    draft = save_tiny(NAME, tmp_path / "draft", tokenizer=True, noise=0.03, vocab_size=264)
    plan = tiny_plan(
        folder, draft, DRAFTED, num_prompt_tokens=90, max_tokens=24, dtype="fp32", offload=frozenset(offload),
        num_sequences=3,
    )  # fmt: skip
    with tiny_engine(plan, folder, draft) as made:
        asked.check(made, asked.some(5, seed=3, most=90, output=16))


# Plans.

LARGE: dict[str, object] = {
    "model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 5376, "intermediate_size": 21504,
    "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128,
    "max_position_embeddings": 131072, "sliding_window": 1024, "query_pre_attn_scalar": 168,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "torch_dtype": "bfloat16",
}  # fmt: skip


def test_seconds_and_bytes_that_a_row_sees_are_of_no_more_than_there_is() -> None:
    config = config_of(LARGE)
    sizing = Sizing(config, None, Options(), GPU, "bf16")
    per_token = config.layer_kv_bytes(2)
    assert sizing.seen_window_bytes(100) == 52 * 100 * per_token
    assert sizing.seen_window_bytes(50_000) == 52 * 1024 * per_token


def test_bytes_of_windows_do_not_grow_with_the_context() -> None:
    config = config_of(LARGE)
    assert (len(config.growing), len(config.windowed)) == (10, 52)
    assert config.kv_bytes_per_token(2) == 10 * 2 * 16 * 128 * 2
    found = {}
    for tokens in (20_000, 120_000):
        plan = Request(config, None, Options(), GPU).plan(num_prompt_tokens=tokens, max_tokens=256)
        found[tokens] = plan.placement
        away = plan.placement.host_bytes["kv cache"] + plan.placement.device_bytes.get("kv cache", 0)
        assert away == pytest.approx(tokens * config.kv_bytes_per_token(2), rel=0.1)
    sizes = {placement.device_bytes["window cache"] for placement in found.values()}
    [size] = sizes
    assert size == 52 * 2 * 16 * 128 * 2 * 512 * found[20_000].window_pages
    assert found[20_000].window_pages * 512 >= 1023 + 512 + 1024


def test_a_ring_of_a_short_context_has_room_for_all_of_it_and_padding() -> None:
    config = config_of(LARGE)
    for tokens in (100, 500, 513, 1500):
        plan = Request(config, None, Options(), GPU).plan(num_prompt_tokens=tokens - 50, max_tokens=50)
        assert plan.placement.window_pages == -(-(tokens + MAX_ROWS) // 512)


GPU = replace(CPU, device="cuda:0", device_free_bytes=24 * 10**9, host_free_bytes=200 * 10**9)


def test_an_engine_allocates_the_windows_that_its_plan_says(folder: Path) -> None:
    plan = Request(read_config(folder), None, Options(device="cpu", dtype="fp32"), CPU).plan(
        num_prompt_tokens=700, max_tokens=60
    )
    with tiny_engine(plan, folder) as made:
        assert made.worker.memory.allocated()["device"]["window cache"] == plan.placement.device_bytes["window cache"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (Options(budget=512), "budget is 512: every layer"),
        (Options(kv_bits=4), "kv-bits is 4: every layer"),
        (Options(offload=frozenset({"kv"})), "offload names kv: every layer"),
    ],
)
def test_where_every_layer_has_a_window_there_is_nothing_to_retrieve_or_to_stream(options: Options, why: str) -> None:
    config = config_of({**SMALL_MISTRAL})
    with pytest.raises(UsageError, match=why):
        Request(config, None, options, CPU).plan(num_prompt_tokens=100, max_tokens=20)


SMALL_MISTRAL: dict[str, object] = {
    "model_type": "mistral", "vocab_size": 264, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 1024, "sliding_window": 64,
}  # fmt: skip
