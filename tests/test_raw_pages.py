"""Where pages lie while their homes have room for packed ones only: slots for a few of them, as few as planned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kit.asked import Asked, alone, together
from kit.examples import at_most
from kit.models import CPU, LateLink
from kit.processor import best
from offload.config.model import ModelConfig
from offload.config.reading import read_config
from offload.decode.sampling import SamplingParams
from offload.engine.engine import Engine, Request, load_tokenizer
from offload.engine.request import GenerationRequest
from offload.errors import DoesNotFit
from offload.kv import Phase, full
from offload.kv.full import FullCache
from offload.pages.access import StreamedTiles
from offload.pages.mover import Mover
from offload.pages.packed import PackedPages
from offload.pages.raw import PURPOSE
from offload.pages.tiles import TileShape
from offload.pages.traffic import Traffic
from offload.plan.options import PAGE_TOKENS
from offload.plan.planner import Options
from offload.plan.shards import Shard
from offload.plan.sizing import Sizing
from offload.plan.what_if import LLAMA2_7B, LLAMA2_13B, LLAMA_68M
from offload.transfer.memory import Memory
from offload.worker.models import _host_blocks
from test_caches import LAYERS, ROWS, Driver, Rounds, Tape, assert_same_bits_throughout
from test_caches import ROUNDS as SOME_ROUNDS
from test_packed import GPU, PAGE, PAGES, TILE, flags_of, make
from test_placement import DRAFT, PROMPT, TARGET, request

FEWEST = 2 * LAYERS + PAGES  # slots: the last pages of each layer, and what a prefill writes at a time


@pytest.fixture
def late() -> LateLink:
    return LateLink(late_in=True, late_out=True)


@pytest.fixture(autouse=True, scope="module")
def few_rows() -> Iterator[None]:
    """A pass writes no more than a page after the sequence."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(full, "MAX_ROWS", PAGE)
        yield


def lie_where_the_table_says(cache: FullCache) -> None:
    """No two pages have one slot, nobody has a slot that is free, and addresses are those of homes or slots."""
    assert cache.pages.packed is not None
    table = cache.pages.packed.table
    taken = sorted(table.slots.values())
    assert sorted([*taken, *table.raw._free]) == list(range(table.raw.num_slots))
    for layer in range(LAYERS):
        for number in range(table.flags.shape[1]):
            if cache.pages.store.place(layer, number // PAGES) != "stream":
                continue
            if (slot := table.slots.get((layer, number))) is None:
                index, within = divmod(number, PAGES)
                if within < len(home := cache.pages.store.home(layer, index)):
                    assert table.blocks[layer, :, number].tolist() == [block.data_ptr() for block in home[within]]
            else:
                assert table.blocks[layer, :, number].tolist() == [half.data_ptr() for half in table.raw.page(slot)]
            assert table.flags[layer, number] == (slot is None)


def slots_of(cache: FullCache) -> int:
    assert cache.pages.packed is not None
    return cache.pages.packed.table.raw.num_slots


@pytest.mark.few(1)
@pytest.mark.parametrize("fields", [{"num_resident": 3}, {"num_resident": 1}, {}], ids=str)
@at_most(20)
@given(prompt=st.integers(1, 130), blocks=st.integers(1, 40), rounds=SOME_ROUNDS, seed=st.integers(0, 99))
def test_as_few_slots_as_may_be_are_enough_whatever_is_taken_back(
    fields: dict[str, int], prompt: int, blocks: int, rounds: Rounds, seed: int
) -> None:
    """A prefill packs what came first while it goes on."""
    tape, link = Tape(torch.bfloat16, seed=seed), LateLink(late_in=True, late_out=True)
    away, here = make(tape, link=link, packs=True, raw_pages=FEWEST, **fields), make(tape)
    away.reserve(0)
    assert_same_bits_throughout(away, here, tape, prompt, blocks, rounds)
    assert slots_of(away) == FEWEST
    lie_where_the_table_says(away)
    for number in range(away.length // PAGE):
        for theirs, ours in zip(away.page_of_all(number), here.page_of_all(number), strict=True):
            assert torch.equal(theirs, ours)


def test_a_prefill_takes_no_more_memory_than_homes_of_packed_pages_and_slots(late: LateLink) -> None:
    tape, memory = Tape(torch.bfloat16), Memory(torch.device("cpu"))
    cache = make(tape, link=late, packs=True, memory=memory, raw_pages=FEWEST)
    cache.reserve(len(tape.rope.cos))
    before, num_pages = memory.allocated()["host"], len(tape.rope.cos) // PAGE
    packing = cache.shape.packing
    assert before == {
        "kv cache": 2 * LAYERS * num_pages * packing.nbytes,
        PURPOSE: FEWEST * 4 * packing.numbers,
    }
    Driver(cache, tape, padding=ROWS).extend([0] * (3 * TILE + 5), phase="prefill", blocks=9)
    assert memory.allocated()["host"] == before
    cache.release()
    assert memory.allocated()["host"] == {}


def test_the_last_home_has_no_more_pages_than_positions(late: LateLink) -> None:
    tape = Tape(torch.bfloat16)
    cache = make(tape, link=late, packs=True, num_resident=1)
    cache.pages.store._most_tokens = 2 * TILE + PAGE + 1
    cache.reserve(2 * TILE + PAGE + 1)
    assert [len(cache.pages.store.home(1, index)) for index in range(3)] == [PAGES, PAGES, 2]
    assert cache.pages.store.home(0, 0).shape == cache.shape.shape
    with_room = [cache.pages.store.home_bytes(1, index) for index in range(3)]
    assert with_room == [cache.pages.store.home(1, index).nbytes for index in range(3)]


def test_pages_of_a_tile_that_is_new_are_known() -> None:
    """Also where nobody wrote to them since: those that are on the device, of which a kernel asks."""
    cache = make(Tape(torch.bfloat16), link=LateLink(late_in=True, late_out=True), packs=True, num_resident=2 * LAYERS)
    assert cache.pages.packed is not None
    for num_tiles in (1, 2, 3):
        cache.pages.store.grow(num_tiles * TILE)
        assert cache.pages.packed.table.on_device().blocks.shape == (LAYERS, 2, num_tiles * PAGES)


def spread(tape: Tape, positions: slice, layer: int | slice = slice(None)) -> None:
    """Values there have exponents of all sizes."""
    part = tape.v[:, layer, positions]
    part *= 2.0 ** torch.randint(-60, 60, part.shape, generator=torch.Generator().manual_seed(3))


def test_pages_that_do_not_pack_keep_their_slots_and_others_get_more(late: LateLink) -> None:
    """The planned ones come back once the text is dropped."""
    tape, memory = Tape(torch.bfloat16), Memory(torch.device("cpu"))
    spread(tape, slice(0, 2 * TILE))
    away, here = make(tape, link=late, packs=True, memory=memory, raw_pages=FEWEST), make(tape)
    away.reserve(0)
    drivers = Driver(away, tape, padding=ROWS), Driver(here, tape, padding=ROWS)
    prompt = [0] * (3 * TILE)
    assert torch.equal(*(driver.extend(prompt, phase="prefill", blocks=9) for driver in drivers))
    for _ in range(3):
        assert torch.equal(*(driver.extend([0]) for driver in drivers))
    assert flags_of(away) == flags_of(away, 1) == [0] * 6 + [1] * 3 + [0]
    most = slots_of(away)
    assert FEWEST < most <= LAYERS * 7 + FEWEST
    assert memory.allocated()["host"][PURPOSE] == most * 4 * away.shape.packing.numbers
    lie_where_the_table_says(away)
    for driver in drivers:
        driver.truncate(0)
    lie_where_the_table_says(away)
    assert torch.equal(*(driver.extend(prompt, phase="prefill", blocks=9) for driver in drivers))
    assert torch.equal(*(driver.extend([0]) for driver in drivers))
    assert slots_of(away) == most


def test_where_there_is_no_memory_for_more_slots_a_pass_is_refused_and_the_rest_stays(
    late: LateLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    tape = Tape(torch.bfloat16)
    spread(tape, slice(0, 2 * TILE))
    away, here = make(tape, link=late, packs=True, raw_pages=FEWEST), make(tape)
    away.reserve(0)
    drivers = Driver(away, tape, padding=ROWS), Driver(here, tape, padding=ROWS)
    for driver in drivers:
        driver.extend([0] * PAGE, phase="prefill", blocks=9)
    allocate = Memory.allocate

    def refuse(memory: Memory, *args: Any, purpose: str, **kwargs: Any) -> Tensor:
        if purpose == PURPOSE:
            raise DoesNotFit("no memory")
        return allocate(memory, *args, purpose=purpose, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Memory, "allocate", refuse)
        with pytest.raises(DoesNotFit, match="no memory"):
            drivers[0].extend([0] * (2 * TILE), phase="prefill", blocks=9)
    drivers[0].truncate(PAGE)
    lie_where_the_table_says(away)
    assert torch.equal(*(driver.extend([0] * (2 * TILE), phase="prefill", blocks=9) for driver in drivers))
    assert torch.equal(*(driver.extend([0]) for driver in drivers))


STEPS: tuple[tuple[type, str], ...] = (
    (Mover, "write"),
    *((PackedPages, name) for name in ("fetch", "pack_some", "keep", "to_fill", "filled")),
)


@contextmanager
def interrupted_at(number: int) -> Iterator[list[str]]:
    """Ctrl-C before or after a step: none is left half done. The list collects the names of all steps, twice."""
    calls, within = list[str](), list[str]()

    def count(name: str) -> None:
        if not within:
            calls.append(name)
            if len(calls) == number:
                raise KeyboardInterrupt

    def watch(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any) -> Any:
            count(name)
            within.append(name)
            try:
                done = real(*args)
            finally:
                within.pop()
            count(name)
            return done

        return watched

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in STEPS:
            patch.setattr(owner, name, watch(name, getattr(owner, name)))
        yield calls


# Of a text: tokens that come, in which phase, and how many are taken back before.
GROWTH: list[tuple[int, Phase, int]] = [
    (2 * TILE, "prefill", 0), (3, "decode", 0), (PAGE, "decode", 2 * PAGE + 3), (TILE + 1, "prefill", 1),
    (2, "decode", TILE), (PAGE + 2, "decode", 0),
]  # fmt: skip


def grown(driver: Driver, count: int, phase: Phase, kept: int) -> Tensor:
    """Tokens after the first `kept`."""
    driver.truncate(kept)
    return driver.extend([0] * count, phase=phase, blocks=9 if phase == "prefill" else None)


def grow(driver: Driver, expected: Sequence[Tensor], source: FullCache, number: int) -> list[str]:
    """A text of which a part is taken back, broken off at a step and gone on with; the steps."""
    cache = driver.cache
    assert isinstance(cache, FullCache)
    with interrupted_at(number) as calls:
        for (count, phase, back), wanted in zip(GROWTH, expected, strict=True):
            kept = len(driver.history) - back
            for _ in range(2):
                with suppress(KeyboardInterrupt):
                    assert torch.equal(grown(driver, count, phase, kept), wanted)
                    break
                del driver.history[kept:]
            lie_where_the_table_says(cache)
        for _ in range(2):
            with suppress(KeyboardInterrupt):
                cache.copy_from(source)
                break
        assert torch.equal(cache.pages.reader.tokens(0, source.length), source.pages.reader.tokens(0, source.length))
    return calls


@pytest.mark.few(1)
@pytest.mark.parametrize("lateness", [(True, True), (True, False), (False, True)], ids=str)
def test_interrupts_at_every_step_leave_pages_where_the_table_says(
    lateness: tuple[bool, bool], pytestconfig: pytest.Config
) -> None:
    tape, other = Tape(torch.bfloat16), Tape(torch.bfloat16, seed=5)
    spread(tape, slice(PAGE, 2 * PAGE), layer=1)
    source = make(other)
    Driver(source, other, padding=ROWS).extend([0] * (TILE + PAGE + 5), phase="prefill", blocks=9)
    here = Driver(make(tape), tape, padding=ROWS)
    expected = [grown(here, count, phase, len(here.history) - back) for count, phase, back in GROWTH]

    def away() -> Driver:
        link = LateLink(late_in=lateness[0], late_out=lateness[1])
        cache = make(tape, link=link, packs=True, raw_pages=FEWEST)
        cache.reserve(0)
        return Driver(cache, tape, padding=ROWS)

    calls = grow(away(), expected, source, 0)
    assert set(calls) == {name for _, name in STEPS}
    for number in range(1, len(calls) + 1, 1 if pytestconfig.getoption("deep") else 7):
        grow(away(), expected, source, number)


def test_tiles_that_were_fetched_ahead_are_forgotten_where_others_come_in_their_place(
    late: LateLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass that reaches into one more tile is broken off as its first tiles come, and the next one does not."""
    tape = Tape(torch.bfloat16)
    away, here = make(tape, link=late, packs=True), make(tape)
    drivers = Driver(away, tape, padding=ROWS), Driver(here, tape, padding=ROWS)
    for driver in drivers:
        driver.extend([0] * (TILE - ROWS), phase="prefill", blocks=9)
        driver.extend([0] * ROWS)
    fetch, fetched = StreamedTiles._fetch, list[int]()

    def interrupted(tiles: StreamedTiles, position: int, length: int) -> None:
        fetch(tiles, position, length)
        fetched.append(position)
        if len(fetched) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StreamedTiles, "_fetch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            drivers[0].extend([0])
    for driver in drivers:
        driver.truncate(TILE - 2 * ROWS)
    assert torch.equal(*(driver.extend([0] * ROWS) for driver in drivers))


def test_what_comes_from_outside_is_packed_page_by_page(late: LateLink) -> None:
    """And so takes no more slots than layers, but for pages that do not pack."""
    tape, other = Tape(torch.bfloat16), Tape(torch.bfloat16, seed=5)
    spread(other, slice(PAGE, 2 * PAGE))
    away, source = make(tape, link=late, packs=True, raw_pages=2 * LAYERS), make(other)
    away.reserve(0)
    Driver(away, tape, padding=ROWS).extend([0] * (PAGE + 1), phase="prefill")
    driver = Driver(source, other, padding=ROWS)
    driver.extend([0] * (2 * TILE + 5), phase="prefill", blocks=9)
    away.copy_from(source)
    assert flags_of(away)[:6] == flags_of(away, 1)[:6] == [1, 0, 1, 1, 1, 1]
    assert slots_of(away) <= 3 * LAYERS  # its last page may have as many escapes
    assert torch.equal(away.pages.reader.tokens(0, away.length), source.pages.reader.tokens(0, source.length))
    lie_where_the_table_says(away)
    here = Driver(away, other, padding=ROWS, history=driver.history)
    for _ in range(3):
        assert torch.equal(here.extend([0] * PAGE), driver.extend([0] * PAGE))


def test_a_page_that_is_packed_after_it_came_is_read_as_it_came(late: LateLink) -> None:
    """Rows of padding have filled it, and it came for the next pass; then that wants slots, and there are none."""
    tape = Tape(torch.bfloat16)
    away, here = make(tape, link=late, packs=True), make(tape)
    drivers = Driver(away, tape, padding=ROWS), Driver(here, tape, padding=ROWS)
    for driver in drivers:
        driver.extend([0] * (2 * PAGE - 2 * ROWS), phase="prefill", blocks=9)
        driver.extend([0] * (ROWS + 1))
    assert flags_of(away, 1) == [1, 0]
    assert away.pages.packed is not None
    raw = away.pages.packed.table.raw
    raw.take(raw.num_free)
    assert torch.equal(*(driver.extend([0] * (PAGE - ROWS)) for driver in drivers))
    assert away.pages.packed.table.raw.num_slots <= 4
    assert torch.equal(*(driver.extend([0]) for driver in drivers))


def test_packed_bytes_are_never_left_as_numbers() -> None:
    """A prefill over packed pages left some where no row was, in its tiles and in the one that they are unpacked by:
    hidden rows are multiplied by zero, and so have to be finite."""
    tape = Tape(torch.bfloat16)
    cache = make(tape, link=LateLink(late_in=False, late_out=False), packs=True)
    Driver(cache, tape, padding=ROWS).extend([0] * (2 * PAGE), phase="prefill")
    cache.fetch_ahead()
    Driver(cache, tape, padding=ROWS).cache.begin("decode", ROWS)
    assert flags_of(cache) == [1, 1]
    assert cache.pages.packed is not None
    apart = torch.zeros(cache.shape.shape, dtype=torch.bfloat16)
    link = LateLink(late_in=False, late_out=False)
    mover = Mover(cache.pages.store, link, Traffic(link), cache.pages.packed, apart, best())
    tile = torch.zeros_like(apart)
    _, staged = cache.pages.packed.fetch(tile, 0, 0, 2, ())
    mover.open_in_place(tile, staged)
    pages = torch.stack([cache.pages.packed.codec.tokens(0, number) for number in (0, 1)])
    assert torch.equal(tile[:, :2].transpose(0, 1), pages)
    assert not tile[:, 2:].any()
    assert torch.equal(apart, tile)


# Engines and plans.


@contextmanager
def most_of_host() -> Iterator[dict[str, int]]:
    """The most bytes of the host that were ever allocated, by purpose."""
    most, allocate = dict[str, int](), Memory.allocate

    def allocated(memory: Memory, *args: Any, **kwargs: Any) -> Tensor:
        block = allocate(memory, *args, **kwargs)
        for name, size in memory.allocated()["host"].items():
            most[name] = max(size, most.get(name, 0))
        return block

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Memory, "allocate", allocated)
        yield most


@pytest.mark.few(1)
@pytest.mark.parametrize("options", [{"gamma": 7, "budget": 256}, {"gamma": 0}], ids=str)
def test_a_request_takes_what_was_planned_of_the_host_from_its_beginning_to_its_end(options: dict[str, object]) -> None:
    best()
    plan = request(offload=frozenset({"kv"}), link_bits=12, dtype="bf16", **options)
    as_they_are = request(offload=frozenset({"kv"}), link_bits=16, dtype="bf16", **options)
    cache = "kv cache"
    assert plan.placement.host_bytes[cache] < 0.77 * as_they_are.placement.host_bytes[cache]
    with most_of_host() as most, Engine.load(plan, TARGET, DRAFT, load_tokenizer(TARGET, DRAFT)) as engine:
        list(engine.generate(GenerationRequest(PROMPT[:400], SamplingParams(temperature=0.0), max_tokens=12)))
        list(engine.generate(GenerationRequest(PROMPT[900:], SamplingParams(temperature=0.0), max_tokens=12)))
    for name in (cache, PURPOSE):
        assert most[name] == plan.placement.host_bytes[name]


def test_several_sequences_say_what_each_says_alone() -> None:
    best()
    options = Options(
        offload=frozenset({"kv"}), link_bits=12, dtype="bf16", gamma=3, budget=256, weight_bits=16, kv_bits=16,
        device="cpu",
    )  # fmt: skip
    models = read_config(TARGET), read_config(DRAFT)
    asked = Request(*models, options, CPU)
    prompts = [PROMPT[start:] for start in (len(PROMPT) - 330, len(PROMPT) - 180, len(PROMPT) - 60)]
    plan = asked.together(asked.plan(num_prompt_tokens=330, max_tokens=12), 2, most=2)
    requests = [Asked(prompt, SamplingParams(temperature=0.0), 6) for prompt in prompts]
    with most_of_host() as most, Engine.load(plan, TARGET, DRAFT, load_tokenizer(TARGET, DRAFT)) as engine:
        said = [alone(engine, each) for each in requests]
        assert together(engine, requests)[0] == said
    for name in ("kv cache", PURPOSE):
        assert most[name] == plan.placement.host_bytes[name]


@pytest.mark.few(6)
@pytest.mark.parametrize("model", [LLAMA2_7B, LLAMA2_13B], ids=["7B", "13B"])
@pytest.mark.parametrize("tokens", [5000, 8192, 119_744, 130_816])
@pytest.mark.parametrize("num_devices", [1, 2])
def test_the_plan_counts_the_blocks_that_are_pinned(model: ModelConfig, tokens: int, num_devices: int) -> None:
    options = Options(offload=frozenset({"kv", "weights"}), weight_bits=16, kv_bits=16)
    hardware = replace(GPU, num_devices=num_devices)
    plan = Request(model, LLAMA_68M, options, hardware).plan(num_prompt_tokens=tokens, max_tokens=256)
    assert plan.placement.link_bits == 12
    shard = Shard(0, num_devices).config(model)
    blocks = num_devices * sum(_host_blocks(plan, shard, None, Memory(torch.device("cpu"))))
    names = ("target layers", "target embeddings", "hidden rows", "kv cache", PURPOSE)
    planned = sum(plan.placement.host_bytes.get(name, 0) for name in names)
    assert blocks == pytest.approx(planned, rel=1e-9)
    if tokens > 100_000:
        assert plan.placement.raw_pages == 2 * model.num_layers + 3 * plan.placement.tile_tokens // PAGE_TOKENS


@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(8, 128), (40, 128), (2, 48), (1, 64), (3, 16)])
def test_a_packed_page_has_the_bytes_that_are_planned(num_kv_heads: int, head_dim: int) -> None:
    model = LLAMA2_7B.changed(num_heads=num_kv_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    sizing = Sizing(model, None, Options(), GPU, "bf16")
    packing = TileShape(num_kv_heads, head_dim, PAGE_TOKENS, 16, torch.bfloat16).packing
    assert sizing._packed_page_bytes == 2 * packing.nbytes
