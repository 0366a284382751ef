"""Cached numbers in 12 of their 16 bits: packing and unpacking, caches whose pages cross a link so, plans.

Twins of the kernels are torch's operators, in `offload.formats.packed`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kit.examples import at_most
from kit.models import CPU, LateLink
from kit.oracles import pack_with_torch
from kit.processor import best, built, on_this_machine
from offload.decode.sampling import SamplingParams
from offload.engine.engine import Engine, load_tokenizer, plan_request
from offload.engine.request import GenerationRequest
from offload.errors import UsageError
from offload.formats.layout import RESIDUAL, Packing
from offload.formats.packed import check, pack, unpack, unpack_tile, unpack_with_torch
from offload.kv.full import FullCache
from offload.native.interface import Library
from offload.pages.storage import Offload
from offload.pages.tiles import TileShape
from offload.plan.planner import Options, Plan
from offload.plan.request import Request
from offload.plan.what_if import LLAMA2_7B, LLAMA2_13B, LLAMA_68M
from offload.speed.hardware import Hardware
from offload.speed.rates import RTX_4090
from offload.transfer.link import Link, PacedLink
from offload.transfer.memory import Memory
from test_caches import (
    DIM,
    KV_HEADS,
    LAYERS,
    ROWS,
    Driver,
    Rounds,
    Tape,
    assert_same_bits_throughout,
    closing_link,
    shaky_link,
)
from test_caches import ROUNDS as SOME_ROUNDS
from test_placement import DRAFT, PROMPT, TARGET, request

PAGE, PAGES, CHUNK = 16, 3, 16
TILE = PAGE * PAGES
ALL = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16)  # every bf16 number there is
GREEDY = SamplingParams(temperature=0.0)


def bits(numbers: Tensor) -> Tensor:
    return numbers.view(torch.int16)


def normal(count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(1)).bfloat16()


def with_escapes(count: int, share: float, *, seed: int = 0) -> Tensor:
    """Numbers of which about so many have an exponent of any size up to 1's."""
    generator = torch.Generator().manual_seed(seed)
    small = ALL[(ALL.abs() < 2.0).nonzero().flatten()]
    escapes = small[torch.randint(len(small), (count,), generator=generator)]
    return torch.where(torch.rand(count, generator=generator) < share, escapes, 1 + torch.rand(count).bfloat16())


def at_the_least(count: int) -> Tensor:
    """Numbers whose largest exponent is 15, and some of exponent 0: those alone escape, and in some blocks too many."""
    generator = torch.Generator().manual_seed(3)
    exponents = torch.where(torch.rand(count, generator=generator) < 0.045, 0, 15)
    return ((exponents << 7) + torch.randint(128, (count,), generator=generator)).to(torch.int16).view(torch.bfloat16)


BLOCKS = {
    "normal": (normal(6 * 4096), Packing.of(4096, 1024, 1 / 64)),
    "every number": (ALL, Packing.of(4096, 1024, 1 / 64)),
    "every number, scattered": (ALL[torch.arange(1 << 16) * 40503 % (1 << 16)], Packing.of(4096, 256, 1 / 64)),
    "some escapes": (with_escapes(8 * 4096, 0.02), Packing.of(4096, 64, 0.05)),
    "many escapes": (with_escapes(8 * 4096, 0.3), Packing.of(4096, 128, 0.4)),
    "about as many as fit": (with_escapes(64 * 1024, 0.055), Packing.of(1024, 128, 0.05)),
    "zeros": (torch.zeros(2048).bfloat16(), Packing.of(1024, 64, 0.0)),
    "as small as escapes": (at_the_least(8 * 1024), Packing.of(1024, 64, 0.05)),
    "small ones": (ALL[(ALL.abs() < 1e-37).nonzero().flatten()[:1024]], Packing.of(512, 64, 0.0)),
}  # fmt: skip


def test_the_blocks_are_of_all_sorts() -> None:
    shares = {
        name: sum(pack_with_torch(block, packing) is not None for block in numbers.view(-1, packing.numbers))
        / (numbers.numel() // packing.numbers)
        for name, (numbers, packing) in BLOCKS.items()
    }
    assert all(shares[name] == 1 for name in ("normal", "some escapes", "many escapes", "zeros", "small ones"))
    assert shares["every number, scattered"] == 0
    assert 0 < shares["about as many as fit"] < 1
    assert 0 < shares["as small as escapes"] < 1


@pytest.mark.parametrize("instructions", on_this_machine())
def test_groups_of_a_block_are_read_by_themselves(instructions: str) -> None:
    numbers, packing = BLOCKS["some escapes"]
    kernels, home = built(instructions), numbers.clone()
    addresses = torch.tensor([block.data_ptr() for block in home.view(-1, packing.numbers)])
    assert pack(addresses, packing, kernels).all()
    out = torch.full((5, packing.group), torch.nan).bfloat16()
    parts = [(addresses[3], out[0].data_ptr(), 7, 3, 1), (addresses[5], out[3].data_ptr(), 62, 2, 1)]
    unpack(torch.tensor(parts), packing, kernels)
    groups = numbers.view(8, -1, packing.group)
    assert torch.equal(bits(out), bits(torch.cat([groups[3, 7:10], groups[5, 62:]])))


@pytest.mark.few(1)
@pytest.mark.parametrize("instructions", on_this_machine())
@at_most(200)
@given(data=st.data())
def test_of_a_block_that_anybody_may_have_written_no_byte_is_read_that_is_not_there(
    instructions: str, data: st.DataObject
) -> None:
    """A forged block is refused, or the kernel stays within a group of bytes behind it, and its twin reads the same."""
    kernels, packing = built(instructions), Packing.of(512, 128, 1 / 16)
    whole = pack_with_torch(with_escapes(512, 0.02), packing)
    assert whole is not None
    block = whole.clone()
    for _ in range(data.draw(st.integers(0, 6))):
        first = data.draw(st.sampled_from((0, packing.numbers, packing.heads, packing.escapes)))
        place, count = data.draw(st.integers(first, packing.nbytes - 1)), data.draw(st.sampled_from((1, 1, 64)))
        block[place : place + count] = data.draw(st.integers(0, 255))
    starts = block[packing.heads : packing.escapes].view(torch.int32) >> 8
    if starts.min() < 0 or starts.max() > packing.room:
        with pytest.raises(ValueError, match=f"escapes beyond the {packing.room} that there is room for"):
            check(block, packing)
        return
    check(block, packing)
    coded = block[packing.numbers : packing.heads].view(packing.num_groups, -1)
    ends = starts + (torch.cat([coded & 15, coded >> 4], 1) == 15).sum(1)
    assert packing.escapes + ends.max() <= packing.nbytes + packing.group
    held, out = torch.cat([block, torch.zeros(packing.group, dtype=torch.uint8)]), torch.empty(512).bfloat16()
    unpack(torch.tensor([[held.data_ptr(), out.data_ptr(), 0, packing.num_groups, 1]]), packing, kernels)
    assert torch.equal(bits(out), bits(unpack_with_torch(block, packing)))


def test_what_cannot_be_packed_is_refused() -> None:
    for numbers, group, escapes in ((1000, 64, 0.1), (1024, 96, 0.1), (1024, 64, 0.5)):
        with pytest.raises(ValueError, match=f"{numbers} numbers in groups of {group}"):
            Packing.of(numbers, group, escapes)
    assert Packing.of(2**20, 2048, 1 / 64).nbytes / 2**21 == pytest.approx(0.75 + 1 / 128 + 4 / 4096, abs=1e-4)


def test_a_tile_is_unpacked_page_by_page() -> None:
    packing, kernels = Packing.of(2 * 16 * 8, 128, 1 / 64), best()
    exact = torch.randn(2, 4, 2, 16, 8, generator=torch.Generator().manual_seed(2)).bfloat16()
    slot, tile = torch.zeros_like(exact), torch.zeros_like(exact)
    there, at = slot.view(-1).view(torch.uint8), 32
    flags, starts = torch.tensor([1, 0, RESIDUAL, 1], dtype=torch.uint8), torch.zeros(2, 4, dtype=torch.long)
    for number, flag in enumerate(flags.tolist()[:3]):
        for kind in range(2):
            content = pack_with_torch(exact[kind, number].flatten(), packing) if flag else exact[kind, number]
            assert content is not None
            starts[kind, number] = at
            size = content.nbytes
            there[at : at + size] = content.flatten().view(torch.uint8)
            at += size + 16
    unpack_tile(tile, slot, flags[:3], starts[:, :3], packing, kernels)
    assert torch.equal(tile[:, :2], exact[:, :2])
    assert not tile[:, 2:].any()


# Caches.


def make(
    tape: Tape, *, link: Link | None = None, packs: bool = False, memory: Memory | None = None, **fields: int
) -> FullCache:
    kernels: Library = best()
    return FullCache(
        memory or Memory(torch.device("cpu")), TileShape(KV_HEADS, DIM, PAGE, PAGES, torch.bfloat16), num_layers=LAYERS,
        scorings=tape.scorings, mass_chunk=CHUNK, kernels=kernels,
        offload=link and Offload(link, packs=kernels if packs else None, **fields),
    )  # fmt: skip


@pytest.fixture
def late() -> LateLink:
    return LateLink(late_in=True, late_out=True)


@pytest.mark.few(2)
@pytest.mark.parametrize("fields", [{"num_resident": 3}, {"num_staging": 3}, {}, {"num_resident": 1}], ids=str)
@at_most(12)
@given(prompt=st.integers(1, 130), blocks=st.integers(1, 40), rounds=SOME_ROUNDS, seed=st.integers(0, 99))
def test_packing_pages_changes_no_bit(
    fields: dict[str, int], prompt: int, blocks: int, rounds: Rounds, seed: int
) -> None:
    tape = Tape(torch.bfloat16, seed=seed)
    with closing_link(shaky_link(seed)) as link:
        away, here = make(tape, link=link, packs=True, **fields), make(tape)
        assert_same_bits_throughout(away, here, tape, prompt, blocks, rounds)
        for number in range(away.length // PAGE):
            for theirs, ours in zip(away.page_of_all(number), here.page_of_all(number), strict=True):
                assert torch.equal(theirs, ours)


def flags_of(cache: FullCache, layer: int = 0) -> list[int]:
    """Which of its pages are packed, of those that are in use."""
    assert cache.pages.packed is not None
    return cache.pages.packed.table.flags[layer, : -(-cache.length // PAGE)].tolist()


def test_whole_pages_are_packed_once_and_cross_in_fewer_bytes() -> None:
    tape = Tape(torch.bfloat16)
    link = PacedLink(None, overlap=False)
    away = make(tape, link=link, packs=True, raw_pages=LAYERS * 7)
    away.reserve(2 * TILE + 5)
    driver = Driver(away, tape, padding=ROWS)
    driver.extend([0] * (2 * TILE + 5), phase="prefill", blocks=9)
    assert flags_of(away) == [0] * 7
    driver.extend([0])
    assert flags_of(away) == flags_of(away, 1) == [1] * 6 + [0]
    before = link.stats.bytes_to_device
    driver.extend([0])
    assert away.pages.packed is not None
    packing = away.pages.packed.codec.packing
    crossed = link.stats.bytes_to_device - before
    assert crossed == LAYERS * 2 * (2 * PAGES * packing.nbytes + 2 * packing.numbers)


def test_rows_written_over_packed_ones_lie_as_they_are_until_their_page_is_whole(late: LateLink) -> None:
    tape = Tape(torch.bfloat16)
    away, here = make(tape, link=late, packs=True), make(tape)
    drivers = Driver(away, tape, padding=ROWS), Driver(here, tape, padding=ROWS)
    for driver in drivers:
        driver.extend([0] * (2 * TILE), phase="prefill", blocks=9)
        driver.extend([0] * 3)
        driver.truncate(TILE + PAGE + 3)
    assert torch.equal(*(driver.extend([1] * 5) for driver in drivers))
    assert flags_of(away) == [1, 1, 1, 1, 0]
    assert torch.equal(*(driver.extend([0] * (2 * PAGE), phase="prefill", blocks=7) for driver in drivers))
    assert torch.equal(*(driver.extend([0] * (2 * PAGE)) for driver in drivers))
    assert torch.equal(*(driver.extend([0]) for driver in drivers))
    assert flags_of(away) == [1, 1, 1, 1, 1, 1, 1, 1, 0]


def test_a_page_with_too_many_escapes_crosses_as_it_is(late: LateLink) -> None:
    """Its keys would pack."""
    tape = Tape(torch.bfloat16)
    tape.v[:, 1, :PAGE] *= 2.0 ** torch.randint(-60, 60, tape.v[:, 1, :PAGE].shape)
    away, here = make(tape, link=late, packs=True), make(tape)
    drivers = Driver(away, tape, padding=ROWS), Driver(here, tape, padding=ROWS)
    for driver in drivers:
        driver.extend([0] * TILE, phase="prefill", blocks=9)
    for _ in range(3):
        assert torch.equal(*(driver.extend([0]) for driver in drivers))
    assert flags_of(away, 0) == [1, 1, 1, 0]
    assert flags_of(away, 1) == [0, 1, 1, 0]


def test_a_prefill_over_packed_pages_leaves_no_packed_bytes_to_be_taken_for_numbers(late: LateLink) -> None:
    """Hidden rows of the tile in which pages are unpacked have to be finite."""
    tape = Tape(torch.bfloat16)
    away = make(tape, link=late, packs=True)
    driver = Driver(away, tape, padding=ROWS)
    driver.extend([0] * (2 * TILE), phase="prefill", blocks=9)
    driver.extend([0])
    assert away.pages.packed is not None
    assert away.pages.packed.table.flags.any()
    driver.extend([0] * 5, phase="prefill", blocks=9)
    ours = away.pages._staging[-1]
    assert ours.isfinite().all()
    assert ours.abs().max() < 100


def test_chunks_and_ranges_are_read_from_packed_pages(late: LateLink) -> None:
    tape = Tape(torch.bfloat16)
    away, here = make(tape, link=late, packs=True, num_resident=2), make(tape)
    for cache in (away, here):
        driver = Driver(cache, tape, padding=ROWS)
        driver.extend([0] * (3 * TILE), phase="prefill", blocks=9)
        driver.extend([0] * 7)
    away.wait_home()
    for start, stop in ((0, 151), (TILE + 1, TILE + 2), (TILE + PAGE - 3, 3 * TILE + 5)):
        assert torch.equal(away.pages.reader.tokens(start, stop), here.pages.reader.tokens(start, stop))
    where = torch.tensor([(1, 0, 8), (0, 1, 3), (1, 1, 0), (1, 0, 4), (0, 0, 3)]).unbind(1)
    (order, rows), (other_order, other_rows) = (cache.pages.reader.chunks(*where, CHUNK) for cache in (away, here))
    assert torch.equal(order, other_order)
    assert torch.equal(rows, other_rows)


def test_rows_that_come_from_outside_take_the_place_of_packed_ones(late: LateLink) -> None:
    tape, other = Tape(torch.bfloat16), Tape(torch.bfloat16, seed=5)
    away, here, source = make(tape, link=late, packs=True), make(other), make(other)
    for cache, own in ((away, tape), (here, other), (source, other)):
        driver = Driver(cache, own, padding=ROWS)
        driver.extend([0] * (2 * TILE), phase="prefill", blocks=9)
        driver.extend([0])
    away.copy_from(source)
    drivers = [Driver(cache, other, padding=ROWS, history=[0] * (2 * TILE + 1)) for cache in (away, here)]
    assert torch.equal(*(driver.extend([0] * 2) for driver in drivers))
    source.copy_from(away)
    assert torch.equal(source.pages.reader.tokens(0, source.length), here.pages.reader.tokens(0, here.length))


# Engines.


def said(engine: Engine, prompt: list[int], **options: object) -> list[int]:
    steps = engine.generate(GenerationRequest(prompt, GREEDY, max_tokens=12, **options))  # type: ignore[arg-type]
    return [token for step in steps for token in step.tokens]


@pytest.mark.few(2)
@pytest.mark.parametrize("options", [{"gamma": 7, "budget": 128}, {"gamma": 7, "kv_bits": 4}, {"gamma": 0}], ids=str)
def test_the_engine_says_the_same_however_pages_cross(options: dict[str, object]) -> None:
    """A second request reuses rows, and so prefills over packed pages."""
    best()
    texts = []
    for bits_of_pages in (16, 12):
        plan = request(offload=frozenset({"kv"}), link_bits=bits_of_pages, dtype="bf16", **options)
        assert plan.placement.link_bits == (9 if "kv_bits" in options and bits_of_pages == 12 else bits_of_pages)
        with Engine.load(plan, TARGET, DRAFT, load_tokenizer(TARGET, DRAFT)) as engine:
            first = said(engine, PROMPT[:170])
            texts.append((first, said(engine, PROMPT[:160] + PROMPT[:40], reuse=True)))
            packed = engine.worker.full.pages.packed
            assert (packed is not None) == (bits_of_pages == 12)
            assert packed is None or packed.table.flags.any()
    assert texts[0] == texts[1]


# Plans.


GPU = Hardware("cuda:0", "gpu", 24 * 10**9, 200 * 10**9, True, RTX_4090)


def planned(hardware: Hardware = GPU, **options: object) -> Plan:
    wanted = Options(**{"kv_bits": 16, **options})  # type: ignore[arg-type]
    return Request(LLAMA2_13B, LLAMA_68M, wanted, hardware).plan(num_prompt_tokens=119_744, max_tokens=256)


def test_a_gpu_has_pages_cross_packed_and_the_plan_counts_the_bytes() -> None:
    packed, plain = planned(budget=8192, weight_bits=16), planned(budget=8192, weight_bits=16, link_bits=16)
    assert (packed.placement.link_bits, packed.placement.weight_link_bits) == (12, 12)
    assert (plain.placement.link_bits, plain.placement.weight_link_bits) == (16, 16)
    tile = plain.placement.tile_tokens * LLAMA2_13B.kv_bytes_per_token(2) // LLAMA2_13B.num_layers
    assert plain.placement.device_bytes["kv staging"] == 2 * tile
    assert packed.placement.device_bytes["kv staging"] == 3 * tile
    assert packed.predicted.full_link_bytes == pytest.approx(0.76 * plain.predicted.full_link_bytes, rel=0.02)
    assert packed.predicted.seconds_per_token < 0.88 * plain.predicted.seconds_per_token
    assert planned(device_memory=20.0, dtype="fp16").placement.link_bits == 16


@pytest.mark.parametrize(
    ("hardware", "options", "reason"),
    [
        (GPU, {"dtype": "fp16"}, "fp16 is not packed"),
        (GPU, {"budget": 4096, "chunk": 8}, "chunk is 8, and 16 tokens are packed together; try --chunk 16"),
        (replace(GPU, packs=False), {}, "the CPU's kernels pack, and are not there"),
        (replace(GPU, has_kernels=False), {"weight_bits": 16}, "pip install triton"),
        (replace(GPU, fast_bf16=False), {"dtype": "bf16", "weight_bits": 16}, "compute capability 8.0"),
    ],
)
def test_what_cannot_cross_packed_is_said_and_otherwise_crosses_as_it_is(
    hardware: Hardware, options: dict[str, object], reason: str
) -> None:
    with pytest.raises(UsageError, match=f"link-bits is 12: .*{reason}"):
        planned(hardware, link_bits=12, **options)
    assert planned(hardware, **options).placement.link_bits == 16


def test_a_link_as_fast_as_memory_gets_numbers_as_they_are() -> None:
    def bits_at(link_gbps: float | None) -> int:
        wanted = Options(offload=frozenset({"kv"}), link_gbps=link_gbps, dtype="bf16", kv_bits=16)
        made = Request(LLAMA2_7B, None, wanted, CPU).plan(num_prompt_tokens=4000, max_tokens=96)
        return made.placement.link_bits

    assert [bits_at(gbps) for gbps in (0.5, 1.0, 100.0, None)] == [12, 12, 16, 16]
    assert (
        plan_request(TARGET, None, Options(device="cpu"), num_prompt_tokens=100, max_tokens=8).placement.link_bits == 16
    )


@pytest.mark.parametrize(("link_gbps", "bits"), [(0.5, 9), (1.3, 9), (1.4, 12), (2.0, 12)])
def test_on_a_cpu_only_a_slow_link_gets_what_is_beside_codes(link_gbps: float, bits: int) -> None:
    """Two cores make numbers of their codes and the rest more slowly than a quicker link brings packed ones."""
    few = {"kv_bits": 4, "weight_bits": 4, "offload": frozenset({"kv", "weights"}), "link_gbps": link_gbps}
    sizes = {"num_prompt_tokens": 4000, "max_tokens": 96}
    found = Request(LLAMA2_7B, None, Options(dtype="bf16", **few), CPU).plan(**sizes).placement  # type: ignore[arg-type]
    assert (found.link_bits, found.weight_link_bits) == (bits, bits)
    asked = Options(dtype="bf16", link_bits=12, **few)  # type: ignore[arg-type]
    assert Request(LLAMA2_7B, None, asked, CPU).plan(**sizes).placement.link_bits == 9
