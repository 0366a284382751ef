"""Tiles that the CPU attends to where they live, while others stream: which ones, in what order, at what pace,
how many the plan chooses, and that no bit depends on it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import test_caches as caches
from models import LateLink, Sizes, changed, random_tokens, save_pair, tiny_engine, tiny_plan
from offload.config.reading import read_config
from offload.decode.sampling import SamplingParams
from offload.engine.engine import Engine, load_tokenizer, plan_request
from offload.engine.request import GenerationRequest
from offload.errors import UsageError
from offload.kernels import cpu
from offload.kernels.device import NONE
from offload.kernels.rope import Scoring
from offload.kernels.rows import Blocks
from offload.kernels.spans import Rows
from offload.kv.full import FullCache
from offload.kv.host_attention import HostAttention
from offload.kv.tile_attention import TileAttention
from offload.metrics import HostStats
from offload.native.interface import Library
from offload.pages.access import StreamedTiles
from offload.pages.storage import Offload
from offload.pages.tiles import TileShape, TileStore
from offload.plan.hardware import Hardware
from offload.plan.options import Options
from offload.plan.planner import Plan
from offload.plan.what_if import LLAMA2_7B as LLAMA_7B
from offload.transfer.link import Link, PacedLink
from offload.transfer.memory import Memory
from offload.transfer.pace import HostReads
from test_caches import CHUNK, DIM, KV_HEADS, LAYERS, PAGE, PAGES, ROUNDS, ROWS, TILE, Driver, Rounds, Tape
from test_planner import CPU, DEMO, GPU, plan
from test_planner import DRAFT as DRAFT_CONFIG

MODELS = Path(__file__).resolve().parents[1] / "triforce_cli" / "models"
TARGET, DRAFT = MODELS / "demo-target", MODELS / "demo-draft"
GREEDY = SamplingParams(temperature=0.0, seed=0)
PROMPT = [7 + i * i % 3900 for i in range(1100)]
KV = frozenset({"kv"})


def found_kernels(name: str) -> Library:
    """The CPU's own, or torch's operators in their place."""
    kernels = cpu.kernels() if name == "kernels" else NONE
    if name == "kernels" and kernels.library is None:
        pytest.skip(kernels.reason)
    return kernels


def make_cache(
    tape: Tape, kernels: Library, *, link: Link | None = None, num_resident: int = 0, num_host: int = 0, pace: float = 0
) -> FullCache:
    return FullCache(
        Memory(torch.device("cpu")),
        TileShape(KV_HEADS, DIM, PAGE, PAGES, tape.k.dtype),
        num_layers=LAYERS,
        scorings=tape.scorings,
        blocks=Blocks((ROWS,)),
        offload=link
        and Offload(link, num_resident=num_resident, num_host=num_host, host_reads=HostReads(pace or None)),
        mass_chunk=CHUNK,
        kernels=kernels,
    )


# Which tiles.


@given(
    num_layers=st.integers(1, 9), num_tiles=st.integers(1, 5), resident=st.floats(0, 1), host=st.floats(0, 1)
)  # fmt: skip
def test_as_many_tiles_are_the_hosts_as_planned_and_layers_stream_alike(
    num_layers: int, num_tiles: int, resident: float, host: float
) -> None:
    total = num_layers * num_tiles
    num_resident = round(resident * total)
    num_host = round(host * (total - num_resident))
    shape = TileShape(1, 2, 1, 1, torch.float32)
    store = TileStore(Memory(torch.device("cpu")), shape, num_layers, num_resident, num_host)
    places = [[store.place(layer, index) for index in range(num_tiles)] for layer in range(num_layers)]
    counts = {place: [row.count(place) for row in places] for place in ("device", "host", "stream")}
    assert sum(counts["device"]) == num_resident
    assert sum(counts["host"]) == num_host
    assert max(counts["stream"]) - min(counts["stream"]) <= 1
    rank = {"device": 0, "host": 1, "stream": 2}
    assert all(row == sorted(row, key=lambda place: rank[place]) for row in places)
    everywhere = [(layer, index) for layer in range(num_layers) for index in range(num_tiles)]
    assert store.streamed(num_tiles) == [
        (layer, index) for layer, index in everywhere if rank[places[layer][index]] > 1
    ]
    for layer, row in enumerate(places):
        order = store.order(layer, num_tiles)
        assert sorted(order) == list(range(num_tiles))
        assert {row[index] for index in order[: counts["host"][layer]]} <= {"host"}


def test_layers_that_stream_one_tile_less_are_far_apart() -> None:
    """The link has two slots to fill meanwhile, and no more. A pass begins with a layer that needs not wait for it."""
    shape = TileShape(1, 2, 1, 1, torch.float32)
    store = TileStore(Memory(torch.device("cpu")), shape, 8, 0, 4)
    assert [layer for layer, _ in store.streamed(1)] == [1, 3, 5, 7]
    store = TileStore(Memory(torch.device("cpu")), shape, 8, 2, 3)  # the first two layers have theirs on the device
    assert [layer for layer, _ in store.streamed(1)] == [3, 5, 7]


# What a cache does with them.


@pytest.mark.few(5)
@pytest.mark.parametrize("path", ["kernels", "torch"])
@pytest.mark.parametrize(("num_resident", "num_host"), [(0, 1), (0, 4), (1, 2), (3, 3), (0, 99)])
@settings(max_examples=8)
@given(prompt=st.integers(1, 40), blocks=st.integers(1, 40), rounds=ROUNDS, seed=st.integers(0, 99))
def test_attending_to_tiles_on_the_host_changes_no_bit(
    path: str, num_resident: int, num_host: int, prompt: int, blocks: int, rounds: Rounds, seed: int
) -> None:
    """Prefill, rounds with rejected rows, and rows taken back; what rows see, masses, and the homes at the end."""
    kernels, tape = found_kernels(path), Tape(seed=seed)
    with caches.closing_link(caches.shaky_link(seed)) as link:
        away = make_cache(tape, kernels, link=link, num_resident=num_resident, num_host=num_host)
        here = make_cache(tape, kernels)
        caches.assert_same_bits_throughout(away, here, tape, prompt, blocks, rounds)


@pytest.mark.parametrize("path", ["kernels", "torch"])
def test_a_forward_that_was_broken_off_leaves_no_trace_in_tiles_on_the_host(path: str) -> None:
    kernels, tape = found_kernels(path), Tape()
    link = LateLink(late_in=True, late_out=True)
    away, here = make_cache(tape, kernels, link=link, num_host=3), make_cache(tape, kernels)
    drivers = [Driver(cache, tape, padding=ROWS) for cache in (away, here)]
    for driver in drivers:
        driver.extend([0] * (2 * TILE + 3), phase="prefill", blocks=7)
        driver.extend([0])
    for phase, layers in (("decode", 1), ("prefill", 1), ("decode", 0)):
        drivers[0].break_off([2] * 5, phase=phase, num_layers=layers, num_blocks=1)  # type: ignore[arg-type]
        drivers[0].truncate(len(drivers[0].history))
        assert torch.equal(*(driver.extend([0] * 3) for driver in drivers))


def test_rows_of_another_cache_are_taken_into_tiles_on_the_host() -> None:
    kernels, tape = cpu.kernels(), Tape()
    with caches.closing_link(PacedLink(None)) as link:
        away, here = make_cache(tape, kernels, link=link, num_host=3), make_cache(tape, kernels)
        driver = Driver(here, tape, padding=ROWS)
        driver.extend([0] * (3 * TILE), phase="prefill", blocks=9)
        away.copy_from(here)
        other = Driver(away, tape, padding=ROWS, history=driver.history)
        assert torch.equal(other.extend([0] * 5), driver.extend([0] * 5))


def attended_beside(cache: FullCache, kernels: Library, link: Link) -> HostAttention:
    """Have a cache's tiles on the host attended to as beside a GPU, in memory that says that it is one's."""
    host = TileAttention(cache.shape, Blocks((ROWS,)), kernels, CHUNK)
    side = HostAttention(cache.pages._memory, cache.pages.store, link, gpu=cache._attention, host=host, chunk=CHUNK)
    cache._host_attention = side
    return side


@pytest.mark.parametrize("path", ["kernels", "torch"])
@pytest.mark.parametrize(("num_resident", "num_host"), [(0, 1), (0, 4), (3, 3), (5, 2), (0, 99)])
def test_beside_a_gpu_rows_and_masses_are_those_of_a_cache_of_its_own(
    path: str, num_resident: int, num_host: int
) -> None:
    """Wherever the tiles are that the host attends to, and whatever is added to them meanwhile. But for rounding: tiles
    are merged in another order. In the end all memory is given back.

    Without kernels the masses of rows before the only tile that the host attends to were not numbers.
    """
    kernels, tape, link = found_kernels(path), Tape(), LateLink(late_in=True, late_out=True)
    away = make_cache(tape, kernels, link=link, num_resident=num_resident, num_host=num_host)
    here, side = make_cache(tape, kernels), attended_beside(away, kernels, link)
    drivers = [Driver(cache, tape, padding=ROWS) for cache in (away, here)]
    for driver in drivers:
        driver.extend([0] * (3 * TILE - 2), phase="prefill", blocks=9)
    for count in (1, 5, ROWS, 2):
        assert_close(*(driver.extend([0] * count) for driver in drivers), atol=1e-5, rtol=1e-5)
        mass, beyond = away.mass(count).split([num := here.mass(count).shape[-1], away.mass(count).shape[-1] - num], -1)
        assert_close(mass, here.mass(count), atol=1e-5, rtol=1e-2)  # of bf16
        assert not beyond.any()  # of tiles that are not full
    away.release()
    assert away.pages._memory.allocated() == {"host": {}, "device": {}}
    assert side._sent is None


def test_rows_that_a_broken_forward_sent_to_the_host_are_waited_for_before_others_are() -> None:
    tape, link = Tape(), LateLink(late_in=True, late_out=True)
    cache = make_cache(tape, NONE, link=link, num_host=3)
    side = attended_beside(cache, NONE, link)
    rows = Rows(*tape.rows(0, 0, [0] * 3), tape.scorings[0], 0, 0)
    side._send(rows)
    assert side._sent is not None
    first = side._sent.arrived
    side._send(rows)
    assert first.happened()
    assert not side._sent.arrived.happened()
    assert torch.equal(side._received(rows).k, rows.k)


def test_layers_that_share_a_rotary_table_share_its_copy_on_the_host() -> None:
    """Bug: where each layer weighs rotated keys of its own, each had a copy of the table."""
    tape, link = Tape(), LateLink(late_in=True, late_out=True)
    side = attended_beside(make_cache(tape, NONE, link=link, num_host=3), NONE, link)
    ones = torch.ones(tape.rope.cos.shape[1])
    first, second = (side._on_host(Scoring(tape.rope, weights=(ones, scale * ones))) for scale in (1.0, 2.0))
    assert first.rope is second.rope
    assert first.weights is not None
    assert second.weights is not None
    assert torch.equal(2 * first.weights[1], second.weights[1])


def test_tiles_on_the_host_are_attended_to_first_and_not_waited_for_before_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a layer with a tile of each place, while the others are on their way."""
    kernels, tape, done = found_kernels("kernels"), Tape(), []
    link = LateLink(late_in=False, late_out=False)
    cache = make_cache(tape, kernels, link=link, num_resident=LAYERS, num_host=LAYERS)
    driver = Driver(cache, tape, padding=ROWS)
    driver.extend([0] * (3 * TILE - ROWS), phase="prefill", blocks=7)
    opened = StreamedTiles.open
    monkeypatch.setattr(StreamedTiles, "open", lambda self, *tile: done.append(tile) or opened(self, *tile))
    monkeypatch.setattr(cache.host_reads, "wait", lambda: done.append("waited"))
    driver.extend([0] * ROWS)
    assert done == [step for layer in range(LAYERS) for step in ((layer, 1), (layer, 0), (layer, 2), "waited")]


# Pace.


class Clock:
    """Time passes while someone sleeps, and in `work`."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    found = Clock()
    monkeypatch.setattr("offload.transfer.pace.time", found)
    return found


def read(reads: HostReads, clock: Clock, num_bytes: int, seconds: float, *, rows: int = 1) -> None:
    """Attend to `num_bytes`, which takes this CPU `seconds`."""
    reads.begin()
    clock.now += seconds
    reads.end(num_bytes, rows=rows)


def test_reads_take_their_bytes_at_the_pace_beside_what_else_is_done(clock: Clock) -> None:
    reads = HostReads(1000.0)
    read(reads, clock, 300, 0.01)
    read(reads, clock, 200, 0.01)
    clock.now = 0.35  # the link's tiles came meanwhile
    reads.wait()
    assert clock.now == pytest.approx(0.5)
    assert reads.stats == HostStats(500, pytest.approx(0.5))
    clock.now = 1.0
    reads.wait()  # nothing more is due
    assert clock.now == 1.0
    read(reads, clock, 100, 0.4)  # slower than the pace
    reads.wait()
    assert clock.now == pytest.approx(1.4)
    assert reads.stats.bytes_per_second == pytest.approx(600 / 0.9)


@pytest.mark.parametrize(("rows", "group", "times"), [(1, 1, 1), (16, 1, 1), (4, 4, 1), (32, 1, 2), (8, 6, 3)])
def test_many_rows_take_the_time_that_a_desktop_needs_to_compute(
    rows: int, group: int, times: int, clock: Clock
) -> None:
    reads = HostReads(1000.0, group=group)
    read(reads, clock, 100, 0.0, rows=rows)
    reads.wait()
    assert clock.now == pytest.approx(0.1 * times)
    assert reads.stats == HostStats(100, pytest.approx(0.1 * times))


def test_without_a_pace_reads_take_the_time_that_they_take(clock: Clock) -> None:
    reads = HostReads()
    read(reads, clock, 10**9, 0.25)
    reads.wait()
    assert (clock.now, reads.stats) == (0.25, HostStats(10**9, 0.25))


@pytest.mark.parametrize("path", ["kernels", "torch"])
def test_a_pass_reads_the_pages_in_use_of_its_tiles_on_the_host(path: str, clock: Clock) -> None:
    kernels, tape = found_kernels(path), Tape()
    cache = make_cache(tape, kernels, link=LateLink(late_in=False, late_out=False), num_host=3, pace=1e4)
    driver = Driver(cache, tape, padding=ROWS)
    driver.extend([0] * (TILE + PAGE), phase="prefill", blocks=7)
    assert cache.host_reads.stats == HostStats()
    driver.extend([0] * ROWS)
    page = 2 * PAGE * KV_HEADS * DIM * 4
    # Of two tiles, two layers have the first, one of them the second too: its rows reach to its end.
    assert cache.host_reads.stats.bytes_read == 3 * PAGES * page
    assert clock.now == pytest.approx(3 * PAGES * page / 1e4)


# The engine.


def request(**options: object) -> Plan:
    return plan_request(
        TARGET,
        DRAFT,
        Options(device="cpu", weight_bits=16, kv_bits=16, **options),
        num_prompt_tokens=len(PROMPT),
        max_tokens=16,
    )  # type: ignore[arg-type]


def tokens_of(engine: Engine, prompt: list[int], *, speculation: bool = True) -> list[int]:
    steps = engine.generate(GenerationRequest(prompt, GREEDY, max_tokens=16, speculation=speculation))
    return [token for step in steps for token in step.tokens]


@contextmanager
def running_on(path: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    kernels = found_kernels(path)
    with monkeypatch.context() as patch:
        patch.setattr(cpu, "kernels", lambda: kernels)
        yield


@pytest.mark.few(1)
@pytest.mark.parametrize("path", ["kernels", "torch"])
def test_greedy_tokens_are_the_same_wherever_tiles_are_attended_to(
    path: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target, draft = save_pair(tmp_path, context=512)
    prompt, sizes = random_tokens(90), Sizes(gamma=7, draft_gamma=3, budget=48)
    resident, streamed = (
        tiny_plan(target, draft, sizes, num_prompt_tokens=90, max_tokens=16, offload=offload)
        for offload in (frozenset[str](), KV)
    )
    num_tiles = -(-(90 + 16) // (sizes.page * sizes.pages)) * read_config(target).num_layers
    with running_on(path, monkeypatch):
        with tiny_engine(resident, target, draft) as engine:
            expected = tokens_of(engine, prompt)
        for share in (0.0, 0.4, 1.0):
            with tiny_engine(changed(streamed, host_tiles=round(share * num_tiles)), target, draft) as engine:
                for speculation in (True, False):
                    assert tokens_of(engine, prompt, speculation=speculation) == expected
                    assert (engine.stats.host_attention.bytes_read > 0) == (share > 0)
                    if not speculation:
                        assert (engine.stats.decode_link.bytes_to_device > 0) == (share < 1)


def test_a_pass_reads_on_the_host_what_was_planned() -> None:
    made = request(gamma=0, offload=KV, link_gbps=0.2, host_attention=0.5)
    with Engine.load(made, TARGET, DRAFT, load_tokenizer(TARGET, DRAFT)) as engine:
        tokens_of(engine, PROMPT)
    host, passes = engine.stats.host_attention, engine.stats.levels[0].passes
    assert host.bytes_read == pytest.approx(passes * made.predicted.full_host_bytes, rel=0.4)  # whole pages are read
    assert host.bytes_per_second == pytest.approx(0.2e9 * 60 / 25, rel=0.3)
    assert engine.stats.as_dict()["host_attention"]["bytes_per_second"] == host.bytes_per_second


# The plan.


def paced(link: float, **options: object) -> Plan:
    return plan(Options(**{"offload": KV, "link_gbps": link, "link_bits": 16} | options))  # type: ignore[arg-type]


def test_link_and_host_end_a_pass_together() -> None:
    for offload in (KV, frozenset({"weights", "kv"})):
        alone, both = (paced(0.1, offload=offload, host_gbps=rate, speculation=False) for rate in (None, 0.2))
        found, placement = both.predicted, both.placement
        tile = found.full_host_bytes / placement.host_tiles
        link, host = found.full_link_bytes / 0.1e9, found.full_host_bytes / 0.2e9
        assert abs(link - host) <= tile * (1 / 0.1e9 + 1 / 0.2e9)
        assert found.full_pass_seconds == pytest.approx(max(link, host), rel=0.02)
        assert found.full_link_bytes + found.full_host_bytes == pytest.approx(alone.predicted.full_link_bytes)
        assert found.seconds_per_token == pytest.approx(found.full_pass_seconds)
        assert placement.attended_bytes == placement.host_tiles * placement.tile_tokens * 12288 // DEMO.num_layers
        assert placement.host_bytes_per_second == 0.2e9
        assert placement.host_bytes == alone.placement.host_bytes


def test_what_many_rows_and_query_heads_take_is_left_to_the_link() -> None:
    """A pass of 48 rows, or one of 8 rows of 6 query heads each, costs the CPU three times its bytes."""
    grouped = DEMO.changed(num_heads=6, num_kv_heads=1)
    options = {"offload": KV, "link_gbps": 0.1, "host_gbps": 0.2, "lookup": False, "link_bits": 16}
    few, many = (plan(Options(**options, gamma=gamma), draft=DRAFT_CONFIG).placement for gamma in (15, 47))  # type: ignore[arg-type]
    assert (few.host_tiles, many.host_tiles) == (21, 13)  # of 32: two thirds, two fifths
    assert plan(Options(**options, gamma=7), target=grouped, draft=DRAFT_CONFIG).placement.host_tiles == 13  # type: ignore[arg-type]
    given = plan(Options(**options, gamma=31, host_attention=1.0), draft=DRAFT_CONFIG).predicted  # type: ignore[arg-type]
    assert given.full_pass_seconds == pytest.approx(32200 * 12288 / 0.2e9, rel=0.02)  # of one row


def test_a_pass_waits_for_the_host_where_the_user_gives_it_too_much() -> None:
    found = paced(0.1, host_gbps=0.2, host_attention=1.0).predicted
    assert (found.full_link_bytes, found.full_host_bytes) == (0, 32200 * 12288)
    assert found.full_pass_seconds == pytest.approx(32200 * 12288 / 0.2e9, rel=0.02)
    options = Options(offload=KV, link_gbps=9.0, host_gbps=20.0, host_attention=1.0, speculation=False)
    fast = plan(options, hardware=replace(CPU, rates=replace(CPU.rates, device_read=40e9))).predicted
    assert fast.full_pass_seconds > 1.01 * 32200 * 12288 / 20e9  # the host waits for each layer's query


def test_the_host_attends_to_nothing_where_that_gains_less_than_a_twentieth() -> None:
    plain = {"speculation": False}
    assert paced(0.1, host_gbps=0.007, **plain).placement.host_tiles == 2  # of 32: a sixteenth less to stream
    assert paced(0.1, host_gbps=0.004, **plain).placement.host_tiles == 0
    assert paced(100.0, host_gbps=240.0, **plain).placement.host_tiles == 0  # computing takes longer than the link
    assert paced(0.1, host_gbps=0.004, host_attention=1 / 32).placement.host_tiles == 1  # as the user says


def test_a_share_that_does_not_fit_is_not_taken() -> None:
    """Tiles that the CPU attends to are as they are, those that stream are packed and smaller."""
    options = Options(offload=KV, link_gbps=0.1, host_gbps=0.2, speculation=False)
    alone, both = (found.placement for found in (plan(replace(options, host_attention=0.0)), plan(options)))
    needed, more = (each.total_device_bytes + each.total_host_bytes for each in (alone, both))
    assert both.host_tiles
    assert needed < more
    tight = plan(options, hardware=replace(CPU, host_free_bytes=(needed + more) // 2)).placement
    assert tight.host_tiles == 0
    assert plan(options, hardware=replace(CPU, host_free_bytes=more)).placement == both


def test_auto_needs_both_rates_and_off_is_off() -> None:
    off = paced(0.1)
    assert off.placement.host_tiles == 0
    assert paced(0.1, host_gbps=0.2, host_attention=0.0).predicted == off.predicted
    assert plan(Options(offload=KV)).placement.host_tiles == 0
    given = plan(Options(offload=KV, host_attention=0.5)).placement
    assert (given.host_tiles, given.host_bytes_per_second) == (16, None)
    assert paced(0.1, host_attention=0.5).placement.host_bytes_per_second == pytest.approx(0.24e9)


def test_ranks_of_one_host_share_its_memory() -> None:
    options = Options(offload=KV, link_gbps=0.1, host_gbps=0.2, speculation=False, link_bits=16)
    one, two, apart = (
        plan(options, hardware=replace(CPU, num_devices=number, num_hosts=hosts)).placement
        for number, hosts in ((1, 1), (2, 1), (2, 2))
    )
    assert [found.host_bytes_per_second for found in (one, two, apart)] == [0.2e9, 0.1e9, 0.2e9]
    assert (one.host_tiles, two.host_tiles, apart.host_tiles) == (21, 16, 21)
    assert two.attended_bytes == 16 * two.tile_tokens * 12288 // DEMO.num_layers  # of both ranks


# Beside a GPU: a link of 24 GB/s and 60 GB/s of memory, of which the link leaves 36.
MEASURED = replace(
    GPU, rates=replace(GPU.rates, to_device=24e9, to_host=24e9, device_read=900e9, host_read=60e9, measured=True)
)
BESIDE: dict[str, object] = {"offload": KV, "device_memory": 8.0, "speculation": False}


def beside(hardware: Hardware = MEASURED, **options: object) -> Plan:
    """Eight layers of Llama-7B, with most of their cache of 6.6 GB on the host."""
    asked = Options(**BESIDE | options)  # type: ignore[arg-type]
    llama = LLAMA_7B.changed(max_positions=65536, num_layers=8)
    return plan(asked, target=llama, draft=None, hardware=hardware, prompt=50000)


def test_beside_a_gpu_the_share_is_the_users_and_the_best_one_is_advised() -> None:
    alone = beside()
    assert alone.placement.host_tiles == 0
    (advice,) = [note for note in alone.notes if "host-attention" in note]
    found = re.match(r"--host-attention (0\.\d\d) would make a full pass (\d\.\d) times as fast", advice)
    assert found is not None
    taken = beside(host_attention=float(found[1]))
    assert not [note for note in taken.notes if "host-attention" in note]
    faster = alone.predicted.full_pass_seconds / taken.predicted.full_pass_seconds
    assert faster == pytest.approx(float(found[2]), abs=0.06)
    assert faster > 1.5
    for share in (0.15, -0.15):
        other = beside(host_attention=float(found[1]) + share)
        assert other.predicted.full_pass_seconds > 1.05 * taken.predicted.full_pass_seconds


def test_nothing_is_advised_where_rates_are_not_measured_or_there_is_nothing_to_gain() -> None:
    for hardware in (
        replace(MEASURED, rates=replace(MEASURED.rates, measured=False)),
        replace(MEASURED, rates=replace(MEASURED.rates, host_read=24e9)),  # the link takes all
        replace(MEASURED, num_devices=2),
    ):
        found = beside(hardware)
        assert found.placement.host_tiles == 0
        assert not [note for note in found.notes if "host-attention" in note]
    assert not [note for note in beside(host_attention=0.0).notes if "host-attention" in note]


def test_a_full_pass_beside_a_gpu_takes_as_long_as_link_and_memory_do() -> None:
    """The CPU has what the link leaves of the memory's rate, and waits for queries and for tiles on the link."""
    found = beside(host_attention=1.0)
    placement, predicted = found.placement, found.predicted
    assert placement.host_bytes_per_second == pytest.approx(36e9)
    assert predicted.full_link_bytes == 0
    read = predicted.full_host_bytes / 36e9
    tile = predicted.full_host_bytes / placement.host_tiles
    assert predicted.full_pass_seconds - read == pytest.approx(8 * tile / 24e9, rel=0.3)
    slow = beside(replace(MEASURED, rates=replace(MEASURED.rates, host_read=24e9)), host_attention=1.0)
    assert slow.placement.host_bytes_per_second == pytest.approx(2.4e9)
    given = beside(replace(MEASURED, rates=replace(MEASURED.rates, links=50e9)), host_attention=1.0)
    assert given.placement.host_bytes_per_second == pytest.approx(26e9)


def test_memory_for_rows_and_results_is_planned_beside_a_gpu() -> None:
    assert "host attention" not in beside().placement.host_bytes
    assert beside(host_attention=0.5).placement.host_bytes["host attention"] < 20e6


def test_several_gpus_refuse_a_share() -> None:
    two = replace(GPU, num_devices=2)
    assert plan(Options(offload=KV), hardware=two).placement.host_tiles == 0
    assert plan(Options(offload=KV, host_attention=0.0), hardware=two).placement.host_tiles == 0
    with pytest.raises(UsageError, match=r"host-attention is 0\.5 and there are 2 GPUs: the CPU attends for one"):
        plan(Options(offload=KV, host_attention=0.5), hardware=two)


@pytest.mark.parametrize(
    ("options", "unused"),
    [
        (Options(host_attention=0.5), ["host-attention"]),
        (Options(offload=KV, host_attention=0.01), ["host-attention"]),
        (Options(offload=KV, link_gbps=1.0, host_gbps=1.0, host_attention=0.0), ["host-gbps"]),
        (Options(offload=frozenset({"weights"}), link_gbps=0.1, host_gbps=1.0), ["host-gbps"]),
        (Options(offload=KV, link_gbps=0.1, host_gbps=0.2, host_attention=0.5), []),
    ],
)
def test_a_share_and_a_pace_that_are_not_used_are_named(options: Options, unused: list[str]) -> None:
    notes = plan(options).notes
    assert [note.split()[0].removeprefix("--") for note in notes if "is not used" in note] == unused
