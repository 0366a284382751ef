"""The link: order, events, errors, pace; and that what crosses it is what is needed, whenever it crosses."""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kit.models import (
    GREEDY,
    LateLink,
    Sizes,
    full_cache,
    load,
    random_model,
    random_tokens,
    resident_rows,
    save,
    tiny_engine,
    tiny_plan,
)
from offload.config.model import llama_shaped
from offload.decode.sampling import SamplingParams
from offload.engine.request import GenerationRequest
from offload.errors import ModelError
from offload.metrics import LinkStats
from offload.model.decoder import Decoder
from offload.model.level import Level
from offload.model.passes import forward
from offload.transfer.link import Link, PacedLink
from offload.weights.homes import AsTheyAre
from offload.weights.layers import StreamedLayers
from offload.weights.layout import LayerLayout, LayerWeights

WAIT_SECONDS = 10.0  # for what must happen; a failure, not a measurement


@contextmanager
def paced(
    bytes_per_second: float | None = None, *, overlap: bool = True, delay: Callable[[], float] = lambda: 0.0
) -> Iterator[PacedLink]:
    link = PacedLink(bytes_per_second, overlap=overlap, delay=delay)
    try:
        yield link
    finally:
        link.close()


def jitter(seed: int, most: float = 1e-3) -> Callable[[], float]:
    dice = random.Random(seed)
    return lambda: dice.choice((0.0, 0.0, dice.random() * most))


class Gate:
    """An event that a test fires."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def fire(self) -> None:
        self._open.set()

    def wait(self) -> None:
        assert self._open.wait(WAIT_SECONDS)

    def synchronize(self) -> None:
        self.wait()

    def happened(self) -> bool:
        return self._open.is_set()


def link_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("link-")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("overlap", [True, False])
def test_a_copy_arrives_bit_for_bit(overlap: bool, dtype: torch.dtype) -> None:
    src = torch.randn(3, 4, 5).to(dtype)
    src[0, 0, :3] = torch.tensor([torch.nan, torch.inf, -0.0])
    with paced(overlap=overlap) as link:
        for copy in (link.to_device, link.to_host):
            dst, part = torch.zeros_like(src), torch.zeros(5, 4, 5, dtype=dtype)
            copy(dst, src).wait()
            copy(part[1:4], src).wait()
            for arrived in (dst, part[1:4]):
                assert torch.equal(arrived.view(torch.uint8), src.view(torch.uint8))
            assert not part[0].any()
            assert not part[4].any()


@pytest.mark.parametrize("seed", range(3))
def test_copies_of_one_direction_keep_their_order(seed: int) -> None:
    """Each hands on what the one before it brought; only the last one is waited for."""
    blocks = [torch.zeros(4) for _ in range(40)]
    blocks[0].fill_(7.0)
    with paced(delay=jitter(seed)) as link:
        for first, second in pairwise(blocks):
            event = link.to_device(second, first)
        event.wait()
    assert all(torch.equal(block, blocks[0]) for block in blocks)


def test_a_copy_waits_for_the_events_before_it_and_the_other_direction_does_not() -> None:
    src, dst, other = torch.ones(4), torch.zeros(4), torch.zeros(4)
    first, second = Gate(), Gate()
    with paced() as link:
        held = link.to_device(dst, src, (first, second))
        link.to_host(other, src).wait()
        first.fire()
        time.sleep(0.02)
        assert not dst.any()
        src.fill_(2.0)  # what counts is what the source holds when the events have happened
        second.fire()
        held.wait()
    assert dst.eq(2).all()


@pytest.mark.parametrize("seed", range(3))
def test_directions_wait_for_each_others_events_under_random_delays(seed: int) -> None:
    """A block goes out and comes back fifty times, through one staging slot."""
    home, slot = torch.zeros(8), torch.zeros(8)
    with paced(delay=jitter(seed)) as link:
        back = link.record()
        for turn in range(50):
            back.wait()
            slot.add_(1.0)
            out = link.to_host(home, slot, (link.record(),))
            back = link.to_device(slot, home, (out,))
            if turn % 7 == 0:
                out.wait()
                assert home.eq(turn + 1).all()
        back.wait()
    assert slot.eq(50).all()


@pytest.mark.parametrize("overlap", [True, False])
def test_what_went_wrong_in_the_worker_surfaces_in_whoever_waits(overlap: bool) -> None:
    with paced(overlap=overlap) as link:
        event = link.to_device(torch.zeros(3), torch.zeros(4))
        for _ in range(2):
            with pytest.raises(RuntimeError, match="copy over the link failed") as caught:
                event.wait()
            assert isinstance(caught.value.__cause__, ValueError)
        dependent = link.to_host(torch.zeros(4), torch.zeros(4), (event,))
        with pytest.raises(RuntimeError, match="copy over the link failed"):
            dependent.wait()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_failed_copy_fails_the_ones_after_it(overlap: bool) -> None:
    """Keys and values of a tile are two copies, and only the second was waited for: a failed first half was lost."""
    with paced(overlap=overlap) as link:
        link.to_device(torch.zeros(3), torch.zeros(4))
        second = link.to_device(torch.zeros(4), torch.ones(4))
        with pytest.raises(RuntimeError, match="copy over the link failed"):
            second.wait()
        fine = torch.zeros(4)
        link.to_host(fine, torch.ones(4)).wait()
        assert fine.all()


def test_close_finishes_what_is_under_way_and_ends_the_threads() -> None:
    before = len(link_threads())
    link = PacedLink(None, delay=lambda: 0.005)
    assert len(link_threads()) == before + 2
    blocks = [torch.zeros(4) for _ in range(5)]
    for block in blocks:
        link.to_device(block, torch.ones(4))
    link.close()
    assert all(block.all() for block in blocks)
    assert len(link_threads()) == before
    link.close()  # again: nothing happens


def test_a_closed_link_refuses_copies() -> None:
    """Nobody was left to carry the copy out, and the waiter waited for ever."""
    link = PacedLink(None)
    link.close()
    with pytest.raises(RuntimeError, match="closed"):
        link.to_device(torch.zeros(4), torch.ones(4))


def test_without_overlap_there_is_no_thread_and_a_copy_is_done_when_the_call_returns() -> None:
    before = len(link_threads())
    with paced(overlap=False) as link:
        dst = torch.zeros(4)
        link.to_device(dst, torch.ones(4))
        assert dst.all()
        assert len(link_threads()) == before


@pytest.mark.parametrize("overlap", [True, False])
def test_the_set_bandwidth_is_kept(overlap: bool) -> None:
    """40 copies of 10 kB at 2 MB/s take 0.2 s at least."""
    src, dst = torch.zeros(2500), torch.zeros(2500)
    with paced(2e6, overlap=overlap) as link:
        start = time.perf_counter()
        for _ in range(40):
            event = link.to_device(dst, src)
        event.wait()
        seconds = time.perf_counter() - start
        stats = link.stats
    assert stats.bytes_to_device == 40 * src.nbytes
    assert stats.bytes_to_host == 0
    assert stats.bytes_per_second == 2e6
    assert 0.2 - 1e-6 <= stats.busy_seconds <= seconds + 1e-6  # a sum of 40 differences of a clock


class Oversleeper:
    """A clock on which every sleep takes 5 ms too long."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + 0.005


def test_time_lost_by_one_copy_is_not_lost_by_those_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copy began when the thread woke from the one before: 60 ms of copies took 360 ms."""
    clock, gate = Oversleeper(), Gate()
    for module in ("link", "pace"):
        monkeypatch.setattr(f"offload.transfer.{module}.time", clock)
    src, dst = torch.zeros(250), torch.zeros(250)
    with paced(1e6) as link:
        event = link.to_device(dst, src, (gate,))
        for _ in range(59):
            event = link.to_device(dst, src, (event,))
        gate.fire()
        event.wait()
        assert 0.060 <= clock.now <= 0.066
        assert link.stats.busy_seconds == pytest.approx(0.060)
        clock.now = 1.0  # idle since: what comes now takes its own time again
        link.to_device(dst, src).wait()
        assert 1.001 <= clock.now <= 1.007


# Weights that stream.

CONFIG = llama_shaped("llama", 8, 8, 8, 1, 2, 1, 4, 64, 1e-5)
LAYOUT = LayerLayout.of(CONFIG, torch.float32)


def filled(number: float) -> Tensor:
    """A layer's buffer, all of it this number."""
    return torch.full((LAYOUT.num_bytes // 4,), number).view(torch.uint8)


def streamed(num_layers: int, num_staging: int, link: Link, *, num_resident: int = 0) -> StreamedLayers:
    """Layer i is full of the number i."""
    homes = [filled(float(layer)) for layer in range(num_layers)]
    staging = [filled(torch.nan) for _ in range(num_staging)]
    resident = [LAYOUT.bind(home) for home in homes[:num_resident]]
    layouts, others = [LAYOUT] * num_layers, [AsTheyAre(home) for home in homes[num_resident:]]
    return StreamedLayers(resident, others, layouts, staging, link)


def holds(weights: LayerWeights, layer: int) -> bool:
    tensors = (
        weights.qkv.weight,
        weights.o.weight,
        weights.gate_up.weight,
        weights.down.weight,
        weights.before_feed_forward.weight,
    )
    return all(bool(tensor.eq(layer).all()) for tensor in tensors)


def test_views_of_several_dtypes_share_a_buffer_and_keep_apart() -> None:
    """Odd sizes in an order in which no view would be aligned by itself; each survives the others being written."""
    shapes = {"a": (3, 5), "b": (7,), "c": (5, 7), "d": (1,)}
    dtypes = (torch.uint8, torch.bfloat16, torch.float32, torch.float16)
    layout = LayerLayout.pack(
        {name: (shape, dtype) for (name, shape), dtype in zip(shapes.items(), dtypes, strict=True)}
    )
    buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    assert [view.offset for view in layout.views.values()] == [0, 64, 128, 320]
    assert layout.num_bytes == 384
    for number, view in enumerate(layout.views.values(), start=1):
        view.of(buffer).fill_(number)
    for number, (name, view) in enumerate(layout.views.items(), start=1):
        tensor = view.of(buffer)
        assert (tensor.shape, tensor.dtype) == (shapes[name], dtypes[number - 1])
        assert tensor.eq(number).all()
        assert tensor.data_ptr() == buffer.data_ptr() + view.offset


def test_a_layer_of_several_dtypes_is_bound_to_its_operators() -> None:
    views = LayerLayout.of(CONFIG, torch.bfloat16).views
    norms = LayerLayout.of(CONFIG, torch.bfloat16).norms
    mixed = {name: (view.shape, torch.float32 if name in norms else view.dtype) for name, view in views.items()}
    layout = replace(LayerLayout.pack(mixed), norms=norms)
    buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for number, view in enumerate(layout.views.values()):
        view.of(buffer).fill_(number)
    weights, names = layout.bind(buffer), list(views)
    for name, tensor in (
        ("qkv.weight", weights.qkv.weight), ("down.weight", weights.down.weight),
        ("before_feed_forward", weights.before_feed_forward.weight),
    ):  # fmt: skip
        assert tensor.dtype == mixed[name][1]
        assert tensor.eq(names.index(name)).all()


@contextmanager
def some_link(kind: str) -> Iterator[Link]:
    if kind == "at once":
        yield LateLink(late_in=False, late_out=False)
    elif kind == "late":
        yield LateLink(late_in=True, late_out=True)
    else:
        with paced(delay=jitter(1)) as link:
            yield link


@pytest.mark.parametrize("kind", ["at once", "late", "threads"])
@pytest.mark.parametrize("num_staging", [2, 3])
@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("num_resident", [0, 1, 3])
def test_each_layer_is_there_while_it_is_used_also_after_a_pass_was_broken_off(
    num_resident: int, num_layers: int, num_staging: int, kind: str
) -> None:
    with some_link(kind) as link:
        layers = streamed(num_layers, num_staging, link, num_resident=num_resident)
        for broken_at in [None, *range(num_layers), None, None, 0, 0, num_layers - 1, None]:
            for layer, weights in enumerate(layers):
                assert holds(weights, layer)
                if layer == broken_at:
                    break
                if kind == "threads":
                    time.sleep(5e-4)
                assert holds(weights, layer)
            else:
                assert layer == num_layers - 1


def test_while_a_layer_computes_the_next_is_on_its_way() -> None:
    link = LateLink(late_in=True, late_out=True)
    layers = streamed(4, 2, link)
    for _ in range(3):
        for _ in layers:
            assert link.num_coming > 0


def test_resident_layers_do_not_cross_the_link() -> None:
    with paced() as link:
        layers = streamed(4, 2, link, num_resident=3)
        for _ in range(5):
            assert all(holds(weights, layer) for layer, weights in enumerate(layers))
    assert link.stats.bytes_to_device <= (5 + 2) * LAYOUT.num_bytes


def test_nothing_is_fetched_twice_while_passes_follow_each_other() -> None:
    with paced() as link:
        layers, passes = streamed(3, 2, link), 4
        for _ in range(passes):
            for _ in layers:
                pass
        link.close()
        assert link.stats.bytes_to_device == (3 * passes + 2) * LAYOUT.num_bytes


# What crosses the link.


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    target = save(random_model(vocab_size=258, num_hidden_layers=3), root / "target", tokenizer=True)
    draft = save(random_model(vocab_size=258, num_hidden_layers=1, seed=1), root / "draft", tokenizer=True)
    return target, draft


SPECULATIVE = Sizes(gamma=4, draft_gamma=2)
PROMPT = random_tokens(50, vocabulary=256)


def generation(
    folders: tuple[Path, Path], sizes: Sizes, sampling: SamplingParams, *, offload: tuple[str, ...]
) -> tuple[list[int], LinkStats]:
    """(tokens, everything that crossed the link)."""
    target, draft = folders
    wanted = draft if sizes.draft_gamma else None
    plan = tiny_plan(target, wanted, sizes, num_prompt_tokens=len(PROMPT), max_tokens=16, offload=frozenset(offload))
    with tiny_engine(plan, target, wanted) as engine:
        tokens = [
            token
            for step in engine.generate(GenerationRequest(PROMPT, sampling, max_tokens=16))
            for token in step.tokens
        ]
        stats = engine.worker.link.stats if engine.worker.link is not None else LinkStats()
        assert (engine.worker.link is None) == (not offload)
        assert engine.stats.prefill_link.bytes_to_device <= stats.bytes_to_device
    return tokens, stats


@pytest.mark.few(1)
@pytest.mark.parametrize("sizes", [SPECULATIVE, Sizes()], ids=["speculative", "plain"])
@pytest.mark.parametrize("sampling", [SamplingParams(temperature=1.0, seed=5), GREEDY], ids=["sampled", "greedy"])
def test_no_schedule_changes_what_is_said(
    folders: tuple[Path, Path], sizes: Sizes, sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing offloaded; copies at once, in threads, in threads with random delays, and as late as events allow."""
    wanted, stats = generation(folders, sizes, sampling, offload=())
    assert stats == LinkStats()
    makes: list[Callable[[], Link]] = [
        lambda: PacedLink(None, overlap=False),
        lambda: PacedLink(None),
        lambda: PacedLink(None, delay=jitter(1)),
        lambda: PacedLink(None, delay=jitter(2)),
        lambda: LateLink(late_in=False, late_out=True),
        lambda: LateLink(late_in=True, late_out=True),
    ]
    for make in makes:
        with monkeypatch.context() as patch:
            patch.setattr("offload.worker.models.make_link", lambda *_, make=make: make())
            tokens, _ = generation(folders, sizes, sampling, offload=("weights", "kv"))
        assert tokens == wanted


def test_an_engine_ends_its_threads(folders: tuple[Path, Path]) -> None:
    before = len(link_threads())
    generation(folders, SPECULATIVE, GREEDY, offload=("kv",))
    assert len(link_threads()) == before


def test_a_model_that_cannot_be_loaded_leaves_no_threads(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """`Engine.load` made the link before it read the weights, and an error there left its two threads running."""
    broken = tmp_path / "broken"
    shutil.copytree(folders[0], broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    offload = frozenset({"kv"})
    plan = tiny_plan(folders[0], None, Sizes(gamma=0), num_prompt_tokens=4, max_tokens=2, offload=offload)
    before = len(link_threads())
    with pytest.raises(ModelError):
        tiny_engine(plan, broken)
    assert len(link_threads()) == before


def test_a_failing_copy_fails_the_generation(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(dst: Tensor, src: Tensor) -> None:
        raise OSError("the bus is gone")

    monkeypatch.setattr("offload.transfer.link._move", failing)
    with pytest.raises(RuntimeError, match="copy over the link failed"):
        generation(folders, Sizes(), GREEDY, offload=("kv",))


@pytest.fixture(scope="module")
def decoder(folders: tuple[Path, Path]) -> Decoder:
    return load(folders[0])


@pytest.mark.parametrize("num_resident", [0, 1, 2])
@pytest.mark.parametrize("length", [1, 8, 15, 16, 17, 40, 47, 64])
def test_a_decode_forward_moves_the_used_pages_and_no_more(decoder: Decoder, length: int, num_resident: int) -> None:
    """In: pages that hold tokens, and, ahead of the next forward, those of the first two tiles. Out: pages that new
    rows, padding included, were written into. Keys and values. `num_resident` tiles of each layer."""
    config = decoder.config
    sizes = Sizes(num_resident=num_resident * config.num_layers, page=8, pages=2, rows=4)
    page_bytes = 2 * config.num_kv_heads * config.head_dim * sizes.page * 4
    with paced() as link:
        cache = full_cache(decoder, sizes, link=link)
        level = Level("target", decoder, cache, vocab_size=config.vocab_size, block=sizes.block, link=link)
        decoder.prefill(cache, random_tokens(length), resident_rows(decoder, 7))
        pages = -(-length // sizes.page)
        resident = num_resident * sizes.pages
        streamed = max(pages - resident, 0) * config.num_layers
        assert link.stats.bytes_to_device == 0
        assert link.stats.bytes_to_host == streamed * page_bytes
        before = link.stats
        forward(level, [5, 6], 1)
        cache.fetch_ahead()
        cache.wait_home()
    moved = link.stats - before  # the link is closed: what was fetched ahead has come
    shape = cache.shape
    tiles = range(num_resident, shape.count(length + sizes.rows))
    ahead = [shape.used_pages(index, length + 2) for _ in range(config.num_layers) for index in tiles]
    assert moved.bytes_to_device == (streamed + sum(ahead[: sizes.kv_staging])) * page_bytes
    assert streamed * page_bytes <= level.stats.link_bytes <= moved.bytes_to_device
    first, last = length // sizes.page, (length + sizes.rows - 1) // sizes.page
    written = [page for page in range(first, last + 1) if page >= resident]
    assert moved.bytes_to_host == len(written) * config.num_layers * page_bytes


def test_what_was_fetched_ahead_is_not_fetched_again(decoder: Decoder) -> None:
    """Ten forwards move ten times the tiles in use, and once more the first two."""
    config = decoder.config
    sizes = Sizes(page=8, pages=2, rows=4)
    page_bytes = 2 * config.num_kv_heads * config.head_dim * sizes.page * 4
    with paced() as link:
        cache = full_cache(decoder, sizes, link=link)
        level = Level("target", decoder, cache, vocab_size=config.vocab_size, block=sizes.block, link=link)
        decoder.prefill(cache, random_tokens(33), resident_rows(decoder, 7))
        for _ in range(10):
            forward(level, [5, 6], 1)
            level.truncate(33)
            cache.fetch_ahead()
            cache.fetch_ahead()
    tiles = 3 * config.num_layers
    pages = 5 * config.num_layers  # of 33 tokens, and of 37
    assert tiles > sizes.kv_staging
    assert link.stats.bytes_to_device == (10 * pages + 2 + 2) * page_bytes


def test_a_prefill_makes_what_was_fetched_ahead_stale(decoder: Decoder) -> None:
    """The same tokens, said twice with a prefill of others between, give the same bits as on a fresh cache."""
    sizes = Sizes(page=8, pages=2, rows=4)
    with paced() as link:
        cache = full_cache(decoder, sizes, link=link)
        level = Level("target", decoder, cache, vocab_size=decoder.config.vocab_size, block=sizes.block, link=link)
        logits = []
        for seed in (1, 2, 1):
            level.truncate(0)
            decoder.prefill(cache, random_tokens(30, seed=seed), resident_rows(decoder, 7))
            logits.append(forward(level, [5, 6], 2))
            cache.fetch_ahead()
    assert torch.equal(logits[0], logits[2])
    assert not torch.equal(logits[0], logits[1])


def test_prefill_after_prefill_fetches_what_is_there_once_and_sends_what_is_new(decoder: Decoder) -> None:
    sizes = Sizes(page=8, pages=2, rows=4)
    config = decoder.config
    page_bytes = 2 * config.num_kv_heads * config.head_dim * sizes.page * 4 * config.num_layers
    with paced() as link:
        cache = full_cache(decoder, sizes, link=link)
        for start, stop in ((0, 21), (21, 60)):
            before = link.stats
            tokens = random_tokens(stop - start)
            decoder.prefill(cache, tokens, resident_rows(decoder, 5))
            moved = link.stats - before
            assert moved.bytes_to_device == -(-start // sizes.page) * page_bytes
            assert moved.bytes_to_host == (-(-stop // sizes.page) - start // sizes.page) * page_bytes


def test_rows_of_streamed_tiles_cross_the_link_once_and_rows_of_resident_ones_do_not(decoder: Decoder) -> None:
    """One tile of 16 tokens of each layer is on the device; tokens 10 to 30, then chunks 1 and 6 of 4 tokens."""
    config = decoder.config
    row_bytes = 2 * config.head_dim * 4
    with paced() as link:
        cache = full_cache(decoder, Sizes(page=8, pages=2, num_resident=config.num_layers), link=link)
        decoder.prefill(cache, random_tokens(33), resident_rows(decoder, 7))
        assert [cache.pages.store.place(0, index) for index in range(3)] == ["device", "stream", "stream"]
        cache.pages.reader.tokens(10, 30)
        moved = 14 * config.num_layers * config.num_kv_heads * row_bytes
        assert link.stats.bytes_to_device == moved
        cache.pages.reader.chunks(torch.tensor([2, 2]), torch.tensor([0, 1]), torch.tensor([1, 6]), 4)
        assert link.stats.bytes_to_device == moved + 4 * row_bytes
