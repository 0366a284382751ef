"""Hidden rows of a prefill: wherever they are and whenever their blocks cross the link, no bit of a cache differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count, product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kit.asked import Asked, together
from kit.models import LateLink, Sizes, random_tokens, save_pair, tiny_engine, tiny_plan
from offload.decode.sampling import SamplingParams
from offload.engine.engine import Engine
from offload.engine.request import GenerationRequest
from offload.plan.planner import Plan
from offload.transfer.arena import Arena
from offload.transfer.hidden_rows import HiddenRows, ResidentRows, StreamedRows
from offload.transfer.link import Link, PacedLink
from offload.transfer.memory import Memory
from test_link import jitter

BLOCK, SLOTS = 8, 3
LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 3, 3 * BLOCK, 3 * BLOCK + 1, 4 * BLOCK, 9 * BLOCK - 1]
LINKS: dict[str, Callable[[], Link]] = {
    "one after the other": lambda: PacedLink(None, overlap=False),
    "late": lambda: LateLink(late_in=True, late_out=True),
    "in threads with delays": lambda: PacedLink(None, delay=jitter(1)),
    "with other delays": lambda: PacedLink(None, delay=jitter(2)),
    "in threads": lambda: PacedLink(None),
    "late in": lambda: LateLink(late_in=True, late_out=False),
    "late out": lambda: LateLink(late_in=False, late_out=True),
}
EVERY_LINK = pytest.mark.parametrize("make", LINKS.values(), ids=LINKS)
SIZES = Sizes(prefill_block=BLOCK, capacity=192)
SAMPLED, NUM_NEW = SamplingParams(temperature=1.0, seed=7), 5


class BrokenOff(Exception):
    """What the tests break a prefill off with."""


def streamed(link: Link, *, num_layers: int, num_slots: int = SLOTS, num_rows: int = 100) -> StreamedRows:
    return StreamedRows(
        Memory(torch.device("cpu")), link, num_rows=num_rows, hidden_size=4, dtype=torch.float32, block=BLOCK,
        num_layers=num_layers, num_slots=num_slots,
    )  # fmt: skip


def worked_on(rows: HiddenRows, num_rows: int, num_layers: int, *, seed: int = 0, after: int | None = None) -> Tensor:
    """What the last layer leaves of made-up rows, in each of which layers do what depends on what others did. after: it
    is broken off after so many blocks."""
    first = torch.arange(num_rows * 4.0).view(num_rows, 4) + 1000 * seed
    last, done = torch.empty(num_rows, 4), count()
    rows.begin(num_rows)
    for layer in range(num_layers):
        for start, block in rows.groups(layer):
            if layer == 0:
                block.copy_(first[start : start + len(block)])
            if next(done) == after:
                raise BrokenOff
            block.mul_(layer + 2).add_(start + layer)
            last[start : start + len(block)] = block
    return last


def expected(num_rows: int, num_layers: int, *, seed: int = 0) -> Tensor:
    memory = Memory(torch.device("cpu"))
    return worked_on(ResidentRows(Arena(memory), 4, torch.float32, block=BLOCK), num_rows, num_layers, seed=seed)


@pytest.mark.few(4)
@EVERY_LINK
def test_every_layer_has_the_rows_that_the_one_before_left(make: Callable[[], Link]) -> None:
    for num_layers, num_slots, num_rows in product((1, 2, 3), (1, 2, 3), LENGTHS):
        rows = streamed(link := make(), num_layers=num_layers, num_slots=num_slots)
        assert torch.equal(worked_on(rows, num_rows, num_layers), expected(num_rows, num_layers))
        link.close()


@EVERY_LINK
def test_a_prefill_that_was_broken_off_leaves_nothing_to_the_next(make: Callable[[], Link]) -> None:
    """After each of its blocks; what follows is longer, or as short as to stay in the slots."""
    rows, num_layers = streamed(link := make(), num_layers=2), 2
    for after, num_rows in product(range(2 * 5), (3 * BLOCK, 5 * BLOCK - 1, 7 * BLOCK)):
        with pytest.raises(BrokenOff):
            worked_on(rows, 5 * BLOCK, num_layers, seed=1, after=after)
        assert torch.equal(worked_on(rows, num_rows, num_layers), expected(num_rows, num_layers))
    link.close()


@pytest.mark.parametrize("num_layers", [1, 2, 4])
@pytest.mark.parametrize("num_rows", LENGTHS)
def test_each_row_crosses_the_link_once_each_way_between_two_layers(num_rows: int, num_layers: int) -> None:
    """Not before the first, and not after the last. As few as the slots hold do not cross it at all."""
    rows = streamed(link := PacedLink(None), num_layers=num_layers)
    worked_on(rows, num_rows, num_layers)
    link.close()
    crossed = (num_layers - 1) * num_rows * 4 * 4 if num_rows > SLOTS * BLOCK else 0
    assert (link.stats.bytes_to_device, link.stats.bytes_to_host) == (crossed, crossed)


def test_the_next_blocks_are_on_their_way_while_one_is_worked_on() -> None:
    link = LateLink(late_in=True, late_out=False)
    rows = streamed(link, num_layers=2)
    rows.begin(5 * BLOCK)
    coming = [link.num_coming for layer in range(2) for _ in rows.groups(layer)]
    assert coming == [0, 0, 0, 1, 2, *[2] * 3, 1, 0]


def test_rows_are_allocated_once_unless_a_prefill_is_longer_than_planned() -> None:
    memory = Memory(torch.device("cpu"))
    rows = StreamedRows(
        memory, PacedLink(None, overlap=False), num_rows=40, hidden_size=4, dtype=torch.float32, block=BLOCK,
        num_layers=2,
    )  # fmt: skip
    planned = {"device": {"hidden rows": SLOTS * BLOCK * 16}, "host": {"hidden rows": 40 * 16}}
    assert memory.allocated() == planned
    for num_rows in (40, 3, 39):
        worked_on(rows, num_rows, 2)
        assert memory.allocated() == planned
    assert torch.equal(worked_on(rows, 50, 2), expected(50, 2))
    assert memory.allocated() == planned | {"host": {"hidden rows": 50 * 16}}


# Whole engines.


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_pair(tmp_path_factory.mktemp("models"), context=256)


def planned(pair: tuple[Path, Path], *offload: str, num_sequences: int = 1) -> Plan:
    return tiny_plan(
        pair[0], None, SIZES, num_prompt_tokens=160, max_tokens=NUM_NEW, offload=frozenset(offload),
        num_sequences=num_sequences,
    )  # fmt: skip


@pytest.fixture
def engines(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """Makes engines over a link of a test's, which end with it."""
    made: list[Engine] = []

    def engine(make: Callable[[], Link], *offload: str, **more: int) -> Engine:
        with monkeypatch.context() as patch:
            patch.setattr("offload.worker.models.make_link", lambda *_: make())
            made.append(tiny_engine(planned(pair, *offload, **more), pair[0]))
        return made[-1]

    yield engine
    for each in made:
        each.close()


def cached(engine: Engine, tokens: list[int], *, at: int = 0) -> Tensor:
    """The keys and values of all tokens after a prefill of those from `at` on."""
    engine.levels["target"].truncate(at)
    engine.worker.prefill(tokens[at:], lambda num_tokens: None)
    engine.worker.full.wait_home()
    return engine.worker.full.pages.reader.tokens(0, len(tokens))


def said(engine: Engine, prompt: list[int]) -> list[int]:
    return [
        token
        for step in engine.generate(GenerationRequest(prompt, SAMPLED, max_tokens=NUM_NEW))
        for token in step.tokens
    ]


@pytest.mark.few(2)
@EVERY_LINK
@pytest.mark.parametrize("offload", [("kv",), ("kv", "weights")], ids=" and ".join)
def test_a_prompts_cache_and_text_have_the_bits_that_they_have_with_rows_on_the_device(
    offload: tuple[str, ...], make: Callable[[], Link], engines: Callable[..., Engine]
) -> None:
    on_device, on_host = engines(make), engines(make, *offload)
    assert (on_device.worker.models.rows, type(on_host.worker.models.rows)) == (None, StreamedRows)
    for length in (*LENGTHS, 150):
        tokens = random_tokens(length, seed=length)
        assert torch.equal(cached(on_host, tokens), cached(on_device, tokens)), length
        assert said(on_host, tokens) == said(on_device, tokens), length


@pytest.mark.few(3)
@EVERY_LINK
def test_a_prefill_after_others_adds_the_bits_that_it_adds_with_rows_on_the_device(
    make: Callable[[], Link], engines: Callable[..., Engine]
) -> None:
    """A growing text."""
    on_device, on_host = engines(make), engines(make, "kv")
    tokens = random_tokens(150)
    for engine in (on_device, on_host):
        cached(engine, tokens[:5])
    for start, stop in ((5, 29), (29, 31), (31, 100), (100, 150)):
        added = [cached(engine, tokens[:stop], at=start) for engine in (on_host, on_device)]
        assert torch.equal(*added), (start, stop)


@pytest.mark.few(2)
@EVERY_LINK
def test_an_interrupted_prefill_changes_nothing_in_the_next(
    make: Callable[[], Link], engines: Callable[..., Engine]
) -> None:
    """Ctrl-C comes between two blocks, in either layer."""
    on_device, on_host = engines(make), engines(make, "kv", "weights")
    tokens = random_tokens(60)
    wanted = cached(on_device, tokens), said(on_device, tokens)
    for after in range(0, 2 * 13, 3):
        left = count()

        def interrupted(num_tokens: int, left: Iterator[int] = left, after: int = after) -> None:
            if next(left) == after:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            on_host.worker.prefill(random_tokens(100, seed=after), interrupted)
        got = cached(on_host, tokens), said(on_host, tokens)
        assert torch.equal(got[0], wanted[0])
        assert got[1] == wanted[1]


def test_sequences_have_one_set_of_rows_and_say_what_each_says_alone(engines: Callable[..., Engine]) -> None:
    def make() -> Link:
        return PacedLink(None, delay=jitter(3))

    prompts = [random_tokens(length, seed=length) for length in (60, 9, 41, 100)]
    alone = engines(make)
    wanted = [said(alone, prompt) for prompt in prompts]
    engine = engines(make, "kv", num_sequences=3)
    found, _ = together(engine, [Asked(prompt, SAMPLED, NUM_NEW) for prompt in prompts])
    assert found == wanted
    placement, allocated = engine.plan.placement, engine.worker.memory.allocated()
    assert allocated["host"]["hidden rows"] == placement.host_bytes["hidden rows"]
