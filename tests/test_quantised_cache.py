"""The target proposes to itself over its whole cache in 4 bits, with exact weights or with weights in 4 bits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from kit.forked import Forked, forked_ranks
from kit.models import (
    GREEDY,
    LateLink,
    Sizes,
    full_cache,
    load,
    random_tokens,
)
from kit.processor import best, process_uses, swapped
from kit.quantised import engine_of, level_stats, saved
from offload.decode.sampling import SamplingParams
from offload.engine.engine import Engine
from offload.engine.request import GenerationRequest
from offload.formats.quantised_kv import GROUP, KVCodes, encode_with_torch
from offload.kernels.cpu import kernels
from offload.kv import quantised
from offload.kv.full import FullCache
from offload.kv.quantised import EXACT, QuantisedCache
from offload.model.decoder import Decoder
from offload.model.level import Level
from offload.model.passes import forward
from offload.plan.sizing import KV_TAIL
from offload.session.fingerprints import identity_of
from offload.session.store import Store
from offload.transfer.memory import Memory

SIZES = Sizes(gamma=7, draft_gamma=3, budget=0, window=32, kv_bits=4, any_rows=True, page=32, capacity=600)
PLAIN = replace(SIZES, gamma=0, kv_bits=16)
PROMPT = random_tokens(230, seed=7)  # some groups, and a tail
NUM_NEW = 24
make = partial(engine_of, prompt_tokens=400)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return saved(tmp_path_factory.mktemp("quantised-cache"))


@pytest.fixture(scope="module")
def decoder(folders: tuple[Path, Path]) -> Decoder:
    return load(folders[0], dtype=torch.bfloat16, kernels=best())


def say(engine: Engine, prompt: list[int] = PROMPT, *, seed: int | None = None, reuse: bool = False) -> list[int]:
    sampling = GREEDY if seed is None else SamplingParams(temperature=1.5, seed=seed)
    steps = engine.generate(GenerationRequest(prompt, sampling, max_tokens=NUM_NEW, reuse=reuse))
    return [token for step in steps for token in step.tokens]


# What the cache holds.


def quantised_cache(full: FullCache, *, drafted: int = 12, capacity: int = 600) -> QuantisedCache:
    return QuantisedCache(full, Memory(torch.device("cpu")), num_tokens=capacity, drafted=drafted, kernels=best())


def assert_follows(cache: QuantisedCache) -> None:
    """It holds the full cache's tokens: codes of whole groups, and the exact rows of all others."""
    full, length, coded = cache.full, cache.full.length, cache.coded
    assert cache.length == length
    assert coded == max(EXACT, (length - KV_TAIL) // GROUP * GROUP)
    rows = full.pages.reader.tokens(0, length)
    first = min(EXACT, length)
    assert torch.equal(cache._held[..., :first, :], rows[..., :first, :])
    assert torch.equal(cache._held[..., EXACT : EXACT + length - coded, :], rows[..., coded:, :])
    if coded > EXACT:
        ours = cache._codes.groups(0, coded // GROUP - 1)
        wanted = KVCodes(torch.empty_like(ours.blocks), ours.head_dim)
        encode_with_torch(rows[..., EXACT:coded, :], wanted)
        assert torch.equal(ours.blocks, wanted.blocks)


@pytest.mark.few(2)
@pytest.mark.parametrize("fetch_bytes", [1, 2**26], ids=["a group at a time", "all at once"])
@pytest.mark.parametrize("late", [False, True], ids=["resident", "late link"])
def test_it_holds_the_full_cache_after_every_refresh(
    decoder: Decoder, late: bool, fetch_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was drafted, verified, refused, cut off or written from outside in between."""
    monkeypatch.setattr(quantised, "FETCH_BYTES", fetch_bytes)
    draw = random.Random(5)
    full = full_cache(decoder, SIZES, link=LateLink(late_in=True, late_out=True) if late else None)
    cache = quantised_cache(full)
    target = Level("", decoder, full, vocab_size=264, block=SIZES.block)
    own, most = Level("", decoder, cache, vocab_size=264), 0
    for _ in range(200):
        step = draw.choice(["verify", "verify", "draft", "cut", "start over", "restore", "refresh"])
        if full.length > 500:
            target.truncate(40)
        if step == "verify":
            count = draw.choice([1, 3, 8, 70, 130])
            forward(target, random_tokens(count, seed=draw.randrange(99)), 1)
        elif step == "draft" and cache.length == full.length > 0:
            forward(own, random_tokens(draw.randrange(1, 13), seed=1), 1)
            own.truncate(full.length + draw.randrange(3))
        elif step == "cut":
            target.truncate(draw.randrange(full.length + 1))
            own.truncate(full.length)
        elif step == "start over":
            own.truncate(0)
        elif step == "restore" and full.length:
            full.wait_home()
            full.pages.page(0, 0).mul_(2)
            full.restored(full.length)
        if step in ("verify", "draft", "refresh") and draw.random() < 0.7:
            assert cache.prepare(3, wanted=True)
            assert_follows(cache)
            most = max(most, cache.coded)
    assert most > 300


@pytest.mark.parametrize("broken", ["encode", "fetch"])
def test_a_refresh_that_is_broken_off_is_made_up_for(
    decoder: Decoder, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = full_cache(decoder, SIZES)
    cache = quantised_cache(full)
    target = Level("", decoder, full, vocab_size=264, block=SIZES.block)
    forward(target, PROMPT, 1)
    cache.refresh()
    target.truncate(200)
    forward(target, random_tokens(90, seed=2), 1)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if broken == "encode":
            swapped(patch, cache._kernels, quantise_kv=interrupted)
        else:
            patch.setattr(cache._fetch, "fetch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache.refresh()
    cache.refresh()
    assert_follows(cache)


def test_codes_of_tokens_that_were_replaced_are_made_anew(decoder: Decoder) -> None:
    full = full_cache(decoder, SIZES)
    cache = quantised_cache(full)
    target = Level("", decoder, full, vocab_size=264, block=SIZES.block)
    forward(target, PROMPT, 1)
    cache.refresh()
    target.truncate(70)
    forward(target, random_tokens(200, seed=2), 1)
    cache.refresh()
    assert_follows(cache)


@pytest.mark.parametrize("length", [1, EXACT - 1, EXACT, EXACT + 1, 200])
def test_cut_to_the_length_that_it_has_it_holds_the_same(decoder: Decoder, length: int) -> None:
    """As each rank cuts it before a forward. Texts shorter than a group were forgotten, and several ranks ended."""
    full = full_cache(decoder, SIZES)
    cache = quantised_cache(full)
    forward(Level("", decoder, full, vocab_size=264, block=SIZES.block), PROMPT[:length], 1)
    cache.refresh()
    own = Level("", decoder, cache, vocab_size=264)
    wanted = forward(own, [5, 6, 7], 3)
    for _ in range(2):
        own.truncate(length)
        assert_follows(cache)
    assert torch.equal(forward(own, [5, 6, 7], 3), wanted)


def test_a_prefill_leaves_codes(folders: tuple[Path, Path]) -> None:
    """So the first draft need not wait for them."""
    with make(folders, replace(SIZES, draft_gamma=0)) as engine:
        engine.worker.prefill(PROMPT, lambda num_tokens: None)
        cache = engine.worker._copies
        assert isinstance(cache, QuantisedCache)
        assert cache.coded == 160
        assert_follows(cache)


def test_it_is_not_refreshed_where_nobody_wants_it(decoder: Decoder) -> None:
    full = full_cache(decoder, SIZES)
    cache = quantised_cache(full)
    forward(Level("", decoder, full, vocab_size=264, block=SIZES.block), PROMPT[:8], 1)
    assert not cache.prepare(8, wanted=False)
    assert cache.length == 0


def test_drafted_rows_are_seen_by_those_after_them_and_forgotten(decoder: Decoder) -> None:
    """Logits are those of a cache to which the same rows came in one pass, and near the target's own."""
    full = full_cache(decoder, SIZES)
    forward(Level("", decoder, full, vocab_size=264, block=SIZES.block), PROMPT, 1)
    cache, drafts = quantised_cache(full), random_tokens(6, seed=3)
    own = Level("", decoder, cache, vocab_size=264)
    cache.refresh()
    assert cache.coded == 160  # 230 tokens without the last 64, in groups
    together = forward(own, drafts, 6)
    own.truncate(len(PROMPT))
    forward(own, [9, 9, 9], 1)
    own.truncate(len(PROMPT))
    one_by_one = torch.cat([forward(own, [token], 1) for token in drafts])
    assert torch.equal(together, one_by_one)
    exact = forward(Level("", decoder, full, vocab_size=264, block=SIZES.block), drafts, 6)
    distance = (together.float() - exact.float()).norm() / exact.float().norm()
    assert 0 < float(distance) < 0.3


def test_a_prompt_after_what_was_precomputed_finds_room(decoder: Decoder) -> None:
    """More rows than are drafted at once go in before the next refresh."""
    full = full_cache(decoder, SIZES)
    forward(Level("", decoder, full, vocab_size=264, block=SIZES.block), PROMPT[:100], 1)
    small, large = quantised_cache(full, drafted=1), quantised_cache(full, drafted=200)
    for cache in (small, large):
        full.stable_length = 0  # the second asks, too
        cache.refresh()
    logits = [forward(Level("", decoder, cache, vocab_size=264), PROMPT[100:190], 3) for cache in (small, large)]
    assert torch.equal(*logits)


def test_tokens_that_stay_are_encoded_once(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """From one request to the next, too; and not again for rows that the tail has."""
    encoded, read, encode = list[int](), list[int](), kernels().quantise_kv

    def counted(rows: torch.Tensor, into: KVCodes) -> None:
        encoded.append(rows.shape[3])
        encode(rows, into)

    swapped(monkeypatch, kernels(), quantise_kv=counted)
    with make(folders, replace(SIZES, draft_gamma=0)) as engine:
        reader = engine.worker.full.pages.reader
        tokens = reader.tokens

        def counted_tokens(start: int, stop: int) -> torch.Tensor:
            read.append(stop - start)
            return tokens(start, stop)

        monkeypatch.setattr(reader, "tokens", counted_tokens)
        said = say(engine)
        total = (len(PROMPT) + len(said) - KV_TAIL) // GROUP * GROUP - EXACT
        assert total - GROUP <= sum(encoded) <= total
        say(engine, [*PROMPT, *said, 5, 6], reuse=True)
        more = (len(PROMPT) + 2 * len(said) + 2 - KV_TAIL) // GROUP * GROUP - EXACT
        assert more - GROUP <= sum(encoded) <= more
        assert sum(read) < len(PROMPT) + 3 * (NUM_NEW + NUM_NEW + KV_TAIL + GROUP)


# The text.


@pytest.fixture(scope="module")
def plainly(folders: tuple[Path, Path]) -> tuple[list[int], list[int], list[int]]:
    """What the target says alone, a prompt that goes on after that, and what it says then."""
    with make(folders, PLAIN) as engine:
        wanted = say(engine)
        longer = [*PROMPT, *wanted, 3]
        return wanted, longer, say(engine, longer)


@pytest.mark.few(2)
@pytest.mark.parametrize("draft_gamma", [3, 0])
@pytest.mark.parametrize("weight_bits", [4, 16])
@pytest.mark.parametrize("offload", [("kv", "weights"), ("kv",), ()], ids=["both", "kv", "resident"])
def test_the_text_is_the_targets(
    folders: tuple[Path, Path],
    plainly: tuple[list[int], list[int], list[int]],
    offload: tuple[str, ...],
    weight_bits: int,
    draft_gamma: int,
) -> None:
    """With its own proposals alone, and with a draft's below them; in the next request, too."""
    wanted, longer, wanted_then = plainly
    sizes = replace(SIZES, weight_bits=weight_bits, draft_gamma=draft_gamma)
    with make(folders, sizes, offload=frozenset(offload)) as engine:
        assert engine.plan.composition.levels == (*(["draft"] if draft_gamma else []), "self", "target")
        assert say(engine) == wanted
        target, own = level_stats(engine, "target"), level_stats(engine, "self")
        assert target.accepted_by["self"] > (0.6 if weight_bits == 16 else 0.1) * target.drafted_by["self"] > 0
        assert (own.drafted > 0) == (draft_gamma > 0)
        assert say(engine, longer) == wanted_then
        assert say(engine, PROMPT) == wanted
        assert len(say(engine, longer, reuse=True)) == NUM_NEW
        assert level_stats(engine, "target").accepted_by["self"] > 0


def test_a_seeded_text_repeats(folders: tuple[Path, Path]) -> None:
    with make(folders, SIZES) as engine:
        said = [say(engine, seed=seed) for seed in (1, 2, 1)]
    assert said[0] == said[2] != said[1]


def test_what_was_precomputed_is_gone_on_with(
    folders: tuple[Path, Path], plainly: tuple[list[int], list[int], list[int]]
) -> None:
    wanted, *_ = plainly
    with make(folders, replace(SIZES, draft_gamma=0)) as engine:
        engine.precompute(PROMPT[:120])
        assert say(engine, reuse=True) == wanted
        assert level_stats(engine, "target").accepted > 0


def test_a_restored_session_is_encoded_anew(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Codes of another text are not taken for those of the restored one."""
    other = random_tokens(len(PROMPT), seed=99)
    with make(folders, replace(SIZES, draft_gamma=0)) as engine:
        wanted = say(engine)
        with Store.open(tmp_path / "session", identity_of(folders[0], engine.plan)) as store:
            engine.save(store, {})
        say(engine, other)
        with Store.open(tmp_path / "session", identity_of(folders[0], engine.plan)) as store:
            assert engine.restore(store, PROMPT) > GROUP
        assert say(engine, reuse=True) == wanted
        cache = engine.worker._copies
        assert isinstance(cache, QuantisedCache)
        cache.refresh()
        assert_follows(cache)


@pytest.fixture
def forked() -> Iterator[list[Forked]]:
    with forked_ranks() as started:
        yield started


@pytest.mark.usefixtures("forked")
@pytest.mark.few(1)
@pytest.mark.parametrize("offload", [("kv",), ()], ids=["kv", "resident"])
def test_two_ranks_say_the_same(folders: tuple[Path, Path], offload: tuple[str, ...]) -> None:
    with make(folders, PLAIN, dtype="fp32") as engine:
        wanted = say(engine)
    sizes = replace(SIZES, draft_gamma=0)
    with make(folders, sizes, ranks=2, dtype="fp32", offload=frozenset(offload)) as engine:
        assert say(engine) == wanted
        target = level_stats(engine, "target")
        assert target.accepted > target.drafted / 2 > 0


# Memory, and what cannot be.


def test_it_takes_the_bytes_of_the_plan(folders: tuple[Path, Path]) -> None:
    with make(folders, SIZES) as engine:
        planned = engine.plan.placement.device_bytes["quantised cache"]
        assert engine.worker.memory.allocated()["device"]["quantised cache"] == planned
        cache = engine.worker._copies
        assert isinstance(cache, QuantisedCache)
        assert cache.nbytes() == planned
        engine.worker.release()
        assert "quantised cache" not in engine.worker.memory.allocated()["device"]


def test_without_kernels_torchs_operators_encode_and_attend(folders: tuple[Path, Path]) -> None:
    with process_uses("torch"):
        with make(folders, PLAIN) as engine:
            wanted = say(engine)
        with make(folders, SIZES) as engine:
            assert say(engine) == wanted
            target = level_stats(engine, "target")
            assert target.accepted > target.drafted / 4 > 0
