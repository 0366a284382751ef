"""The target proposes to itself over retrieved chunks in 4 bits, with exact weights or with quantised weights."""

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
    count_fetched,
    full_cache,
    load,
    random_tokens,
)
from kit.processor import best, process_uses
from kit.quantised import engine_of, level_stats, saved
from offload.decode.sampling import SamplingParams
from offload.engine.engine import Engine
from offload.engine.request import GenerationRequest
from offload.formats.quantised_kv import GROUP, KVCodes, encode_with_torch
from offload.kv import fetch
from offload.kv.chunk_store import QuantisedChunks
from offload.kv.fetch import HostFetch
from offload.kv.full import FullCache
from offload.kv.quantised_attention import EXACT
from offload.kv.retrieval import RetrievalCache
from offload.kv.selection import ByMass
from offload.model.decoder import Decoder
from offload.model.level import Level
from offload.model.passes import forward
from offload.plan.sizing import KV_TAIL
from offload.session.fingerprints import identity_of
from offload.session.store import Store

BUDGET = 3 * GROUP
SIZES = Sizes(
    gamma=7, draft_gamma=3, budget=BUDGET, chunk=GROUP, window=32, kv_bits=4, any_rows=True, page=64,
    pages=2, capacity=600,
)  # fmt: skip
PLAIN = replace(SIZES, gamma=0, kv_bits=16, budget=0)
PROMPT = random_tokens(330, seed=7)  # more groups than are chosen, and a tail
NUM_NEW = 12
make = partial(engine_of, prompt_tokens=500)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return saved(tmp_path_factory.mktemp("coded-chunks"))


@pytest.fixture(scope="module")
def decoder(folders: tuple[Path, Path]) -> Decoder:
    return load(folders[0], dtype=torch.bfloat16, kernels=best())


def say(engine: Engine, prompt: list[int] = PROMPT, *, seed: int | None = None, reuse: bool = False) -> list[int]:
    sampling = GREEDY if seed is None else SamplingParams(temperature=0.8, seed=seed)
    steps = engine.generate(GenerationRequest(prompt, sampling, max_tokens=NUM_NEW, end_tokens=(), reuse=reuse))
    return [token for step in steps for token in step.tokens]


def coded(full: FullCache, *, budget: int = BUDGET, tail: int = 160) -> RetrievalCache:
    rule = ByMass(reach=7)
    return RetrievalCache(full, budget=budget, chunk=GROUP, selector=rule, kernels=best(), tail=tail, bits=4)


# What the cache holds.


def assert_holds(cache: RetrievalCache, *, budget: int = BUDGET) -> None:
    """Codes of the chosen chunks, and the exact rows of the first and the last tokens."""
    full, length, chosen = cache.full, cache.full.length, cache._chosen
    assert isinstance(chosen, QuantisedChunks)
    full.wait_home()
    rows = full.pages.reader.tokens(0, length)
    start = max(EXACT, (length - KV_TAIL) // GROUP * GROUP)
    assert cache.length == length
    first = min(EXACT, length)
    assert torch.equal(chosen._held[..., :first, :], rows[..., :first, :])
    assert torch.equal(chosen._held[..., EXACT : EXACT + max(length - start, 0), :], rows[..., start:, :])
    if start == EXACT:
        assert cache.chunks is None
        return
    assert cache.chunks is not None
    assert chosen._codes is not None
    num_chosen = min(budget // GROUP, start // GROUP - 1)
    assert cache.chunks.shape[2] == num_chosen
    blocks = KVCodes.shape_of_blocks(len(rows), rows.shape[2], start - EXACT, 16)
    wanted = KVCodes(torch.empty(blocks, dtype=torch.uint8), 16)
    encode_with_torch(rows[..., EXACT:start, :], wanted)
    for layer, heads in enumerate(cache.chunks.tolist()):
        for head, chunks in enumerate(heads):
            assert len(set(chunks)) == num_chosen
            assert min(chunks) >= 1
            assert max(chunks) < start // GROUP
            for slot, chunk in enumerate(chunks):
                assert torch.equal(chosen._codes.blocks[layer, head, slot], wanted.blocks[layer, head, chunk - 1])


@pytest.mark.few(2)
@pytest.mark.parametrize("fetch_bytes", [1, 2**26], ids=["a chunk at a time", "all at once"])
@pytest.mark.parametrize("late", [False, True], ids=["resident", "late link"])
def test_it_holds_the_chosen_chunks_after_every_refresh(
    decoder: Decoder, late: bool, fetch_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was drafted, verified, refused, cut off or written from outside in between, and wherever a prefill took
    its memory."""
    monkeypatch.setattr(fetch, "FETCH_BYTES", fetch_bytes)
    draw = random.Random(5)
    full = full_cache(decoder, SIZES, link=LateLink(late_in=True, late_out=True) if late else None, mass=True)
    cache = coded(full)
    target = Level("", decoder, full, vocab_size=264, block=SIZES.block)
    own, most = Level("", decoder, cache, vocab_size=264), 0
    for _ in range(160):
        step = draw.choice(["verify", "verify", "draft", "cut", "start over", "restore"])
        if full.length > 500:
            target.truncate(40)
            own.truncate(40)
        if step == "verify":
            count = draw.choice([1, 3, 8, 70, 130])
            forward(target, random_tokens(count, seed=draw.randrange(99)), 1)
            assert cache.prepare(min(count, 3), wanted=True)
            assert_holds(cache)
            most = max(most, cache.num_chunks)
            if draw.random() < 0.3:
                full.arena.begin(lambda: None)
                assert not cache._chosen.is_open
                cache.begin("decode", 1)
                assert_holds(cache)
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
            own.truncate(0)
    assert most > 10


def test_the_first_tokens_are_held_whole_although_they_came_one_by_one(decoder: Decoder) -> None:
    full = full_cache(decoder, SIZES, mass=True)
    cache = coded(full)
    target = Level("", decoder, full, vocab_size=264, block=SIZES.block)
    forward(target, random_tokens(EXACT - 2, seed=1), 1)
    for _ in range(4):
        forward(target, [9], 1)
        cache.refresh(1)
        assert_holds(cache)


def test_the_chunks_with_the_most_mass_are_held(decoder: Decoder) -> None:
    full = full_cache(decoder, SIZES, mass=True)
    cache = coded(full)
    forward(Level("", decoder, full, vocab_size=264, block=SIZES.block), PROMPT, 1)
    scores = cache.selector.scores(full, 5, GROUP, (len(PROMPT) - KV_TAIL) // GROUP)
    cache.selector.forget()
    cache.refresh(5)
    assert cache.chunks is not None
    for own, chunks in zip(scores.flatten(0, 1), cache.chunks.flatten(0, 1), strict=True):
        least = own[chunks].min()
        others = [chunk for chunk in range(1, len(own)) if chunk not in chunks.tolist()]
        assert bool((own[others] <= least).all())


def test_a_chunk_that_stays_is_not_fetched_again(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = count_fetched(monkeypatch)
    full = full_cache(decoder, SIZES, mass=True)
    cache = coded(full, budget=64 * GROUP)
    target = Level("", decoder, full, vocab_size=264, block=SIZES.block)
    fetched = []
    for count in (300, 40, 40):
        forward(target, random_tokens(count, seed=count), 1)
        before = counts[cache._chosen]
        cache.refresh(3)
        fetched.append(counts[cache._chosen] - before)
    layers, heads, _ = cache.chunks.shape if cache.chunks is not None else (0, 0, 0)
    chunks = [(length - KV_TAIL) // GROUP - 1 for length in (300, 340, 380)]
    assert [each // (layers * heads) for each in fetched] == [chunks[0], chunks[1] - chunks[0], chunks[2] - chunks[1]]


@pytest.mark.parametrize("broken", ["encode", "fetch"])
def test_a_refresh_that_is_broken_off_is_made_up_for(
    decoder: Decoder, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = full_cache(decoder, SIZES, mass=True)
    cache = coded(full)
    target = Level("", decoder, full, vocab_size=264, block=SIZES.block)
    forward(target, PROMPT, 1)
    cache.refresh(3)
    target.truncate(200)
    cache.truncate(200)
    forward(target, random_tokens(90, seed=2), 1)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(HostFetch, broken, interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache.refresh(3)
    cache.truncate(full.length)
    cache.refresh(3)
    assert_holds(cache)


def test_with_room_for_all_chunks_logits_are_those_of_the_whole_cache_in_4_bits(decoder: Decoder) -> None:
    """Drafted rows are seen by those after them and forgotten; more than a block at a time."""
    from offload.kv.quantised import QuantisedCache
    from offload.transfer.memory import Memory

    full, drafts = full_cache(decoder, SIZES, mass=True), random_tokens(20, seed=3)
    forward(Level("", decoder, full, vocab_size=264, block=SIZES.block), PROMPT, 1)
    memory = Memory(torch.device("cpu"))
    whole = QuantisedCache(full, memory, num_tokens=600, drafted=40, kernels=best())
    some, part = coded(full, budget=600), coded(full)
    for cache in (whole, some, part):
        cache.refresh(3)
    logits = []
    for cache in (whole, some, part):
        own = Level("", decoder, cache, vocab_size=264)
        together = forward(own, drafts, 20)
        own.truncate(len(PROMPT))
        forward(own, [9, 9, 9], 1)
        own.truncate(len(PROMPT))
        assert torch.equal(together, torch.cat([forward(own, [token], 1) for token in drafts]))
        logits.append(together)
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])


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
@pytest.mark.parametrize("weight_bits", [6, 16])
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
        assert engine.plan.composition.levels == (*(["draft"] if draft_gamma else []), "retrieval", "target")
        assert say(engine) == wanted
        assert isinstance(engine.retrieval._chosen if engine.retrieval else None, QuantisedChunks)
        target, own = level_stats(engine, "target"), level_stats(engine, "retrieval")
        assert 0 < target.accepted_by["retrieval"] <= target.drafted_by["retrieval"]
        assert (own.drafted > 0) == (draft_gamma > 0)
        assert say(engine, longer) == wanted_then
        assert say(engine, PROMPT) == wanted
        assert len(say(engine, longer, reuse=True)) == NUM_NEW


def test_a_seeded_text_repeats(folders: tuple[Path, Path]) -> None:
    with make(folders, SIZES, offload=frozenset({"kv"})) as engine:
        said = [say(engine, seed=seed) for seed in (1, 2, 1)]
    assert said[0] == said[2] != said[1]


def test_what_was_precomputed_is_gone_on_with(
    folders: tuple[Path, Path], plainly: tuple[list[int], list[int], list[int]]
) -> None:
    wanted, *_ = plainly
    with make(folders, replace(SIZES, draft_gamma=0)) as engine:
        engine.precompute(PROMPT[:220])
        assert say(engine, reuse=True) == wanted
        assert level_stats(engine, "target").accepted > 0


@pytest.mark.few(1)
@pytest.mark.parametrize("offload", [("kv",), ()], ids=["kv", "resident"])
def test_chunks_of_a_restored_session_are_encoded_anew(
    folders: tuple[Path, Path], tmp_path: Path, offload: tuple[str, ...]
) -> None:
    """Codes of another text are not taken for those of the restored one."""
    with make(folders, replace(SIZES, draft_gamma=0), offload=frozenset(offload)) as engine:
        wanted = say(engine)
        with Store.open(tmp_path / "session", identity_of(folders[0], engine.plan)) as store:
            engine.save(store, {})
        say(engine, random_tokens(len(PROMPT), seed=99))
        with Store.open(tmp_path / "session", identity_of(folders[0], engine.plan)) as store:
            assert engine.restore(store, PROMPT) > BUDGET
        assert say(engine, reuse=True) == wanted
        assert level_stats(engine, "target").accepted > 0
        assert engine.retrieval is not None
        assert_holds(engine.retrieval)


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
    with make(folders, replace(SIZES, draft_gamma=0), ranks=2, dtype="fp32", offload=frozenset(offload)) as engine:
        assert say(engine) == wanted
        assert level_stats(engine, "target").accepted > 0


# Memory, and what cannot be.


def test_its_codes_and_its_rows_are_its_bytes(decoder: Decoder) -> None:
    full = full_cache(decoder, SIZES, mass=True)  # with an arena of no bytes: all are taken beside it
    cache = coded(full)
    forward(Level("", decoder, full, vocab_size=264, block=SIZES.block), PROMPT, 1)
    cache.refresh(1)
    assert full.pages._memory.allocated()["device"]["arena"] == cache.nbytes()


def test_it_takes_the_bytes_of_the_plan(folders: tuple[Path, Path]) -> None:
    with make(folders, SIZES, offload=frozenset({"kv"})) as engine:
        planned = engine.plan.placement.device_bytes
        assert engine.retrieval is not None
        say(engine)
        assert "quantised cache" not in planned
        assert engine.retrieval.nbytes() <= planned["arena"]
        assert engine.worker.memory.allocated()["device"]["arena"] == planned["arena"]
        gathered = engine.worker.memory.allocated()["host"]["gathered chunks"]
        assert gathered == engine.plan.placement.host_bytes["gathered chunks"]


def test_without_kernels_torchs_operators_encode_and_attend(folders: tuple[Path, Path]) -> None:
    with process_uses("torch"):
        with make(folders, PLAIN) as engine:
            wanted = say(engine)
        with make(folders, SIZES) as engine:
            assert say(engine) == wanted
            assert level_stats(engine, "target").accepted > 0
