"""Pages whose tokens all have codes in 4 bits on the device lie at home, and cross the link, as what they have beside
these: whatever is verified, refused, cut off or written from outside, every bit of every row is there."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kit.forked import forked_ranks
from kit.models import (
    LateLink,
    Sizes,
    changed,
    full_cache,
    load,
    random_model,
    random_tokens,
    save,
    tiny_engine,
    tiny_plan,
)
from kit.processor import best
from kit.quantised import SHAPES
from offload.decode.sampling import SamplingParams
from offload.engine.engine import Engine
from offload.engine.request import GenerationRequest
from offload.formats.layout import PACKED, RAW, RESIDUAL, Packing
from offload.kernels.device import Copies, DeviceKernels
from offload.kv.fetch import GpuFetch
from offload.kv.full import FullCache
from offload.kv.quantised import EXACT, QuantisedCache
from offload.model.decoder import Decoder
from offload.model.level import Level
from offload.model.passes import forward
from offload.pages import access
from offload.pages.packed import PackedPages
from offload.pages.reader import RowReader
from offload.pages.table import Page
from offload.session.fingerprints import identity_of
from offload.session.store import Store
from offload.transfer.memory import Memory
from test_quantised_cache import PLAIN, PROMPT, SIZES, assert_follows

PAGE, PLENTY = SIZES.page, 64


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All pages that have codes since are packed anew between two passes, however long that takes."""
    monkeypatch.setattr(access, "_AGAIN_SHARE", inf)
    monkeypatch.setattr(access, "_AGAIN_SECONDS", inf)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = random_model("qwen2", vocab_size=264, seed=11, max_position_embeddings=1024, **SHAPES)
    return save(model, tmp_path_factory.mktemp("residuals") / "target", tokenizer=True)


@pytest.fixture(scope="module")
def decoder(folder: Path) -> Decoder:
    return load(folder, dtype=torch.bfloat16, kernels=best())


@dataclass(frozen=True)
class Pair:
    """The same sequence in a cache whose pages stream, beside codes, and in one that is on the device."""

    away: FullCache
    codes: QuantisedCache
    here: FullCache
    levels: tuple[Level, Level]

    @classmethod
    def of(cls, decoder: Decoder, raw_pages: int = PLENTY, **fields: int) -> Pair:
        sizes, link = replace(SIZES, **fields), LateLink(late_in=True, late_out=True)
        away = full_cache(decoder, sizes, link=link, packs=True, raw_pages=raw_pages)
        away.reserve(0)
        memory = Memory(torch.device("cpu"))
        codes = QuantisedCache(away, memory, num_tokens=600, drafted=12, kernels=best(), beside=True)
        here = full_cache(decoder, sizes)
        levels = [Level("", decoder, each, vocab_size=264, block=SIZES.block) for each in (away, here)]
        return cls(away, codes, here, (levels[0], levels[1]))

    @property
    def pages(self) -> PackedPages:
        assert self.away.pages.packed is not None
        return self.away.pages.packed

    def forward(self, count: int, seed: int) -> None:
        tokens = random_tokens(count, seed=seed)
        assert torch.equal(*(forward(level, tokens, 1) for level in self.levels))

    def truncate(self, length: int) -> None:
        for level in self.levels:
            level.truncate(length)

    def refresh(self) -> None:
        assert self.codes.prepare(3, wanted=True)
        assert_follows(self.codes)

    def residuals(self) -> Tensor:
        """bool [pages]: of which all layers' are, of those in use."""
        used = -(-self.here.length // self.here.shape.page_tokens)
        return (self.pages.table.flags[:, :used] == RESIDUAL).all(0)

    def lie_apart(self) -> None:
        """No page lies over another's bytes."""
        table, shape = self.pages.table, self.away.shape
        for layer in range(self.away.num_layers):
            for index in range(self.away.pages.store.num_tiles):
                if self.away.pages.store.place(layer, index) != "stream":
                    continue
                home = self.away.pages.store.home(layer, index)
                at = home.data_ptr()
                for number in range(index * shape.num_pages, min((index + 1) * shape.num_pages, self.whole)):
                    flag, sizes = int(table.flags[layer, number]), table.sizes[layer, :, number].tolist()
                    keys, values = table.blocks[layer, :, number].tolist()
                    assert (flag == RAW) == ((layer, number) in table.slots)
                    if flag != RAW:
                        assert values == keys + sizes[0]
                        assert keys >= at
                        at = values + sizes[1]
                assert at <= home.data_ptr() + home.nbytes

    @property
    def whole(self) -> int:
        return self.here.length // self.here.shape.page_tokens

    def check(self) -> None:
        self.away.wait_home()
        self.lie_apart()
        length = self.here.length
        assert torch.equal(self.away.pages.reader.tokens(0, length), self.here.pages.reader.tokens(0, length))
        for number in range(self.whole):
            for theirs, ours in zip(self.away.page_of_all(number), self.here.page_of_all(number), strict=True):
                assert torch.equal(theirs, ours)


def test_whole_pages_with_codes_are_residuals_and_fewer_bytes_cross(decoder: Decoder) -> None:
    """The first page has tokens without codes, and so have the last ones: the former is packed as it would be."""
    pair = Pair.of(decoder)
    pair.forward(300, 1)
    pair.refresh()
    pair.forward(1, 2)
    covered = pair.codes.covered // PAGE
    assert pair.codes.covered == (300 - 64) // 32 * 32 == covered * PAGE
    assert pair.pages.table.flags[0, : covered + 1].tolist() == [PACKED, *[RESIDUAL] * (covered - 1), RAW]
    assert pair.residuals().sum() == covered - 1
    page = 2 * pair.pages.codec.packing.numbers
    sizes, blocks = (of_pages[..., 1:covered] for of_pages in (pair.pages.table.sizes, pair.pages.table.blocks))
    assert (sizes < 0.62 * page).all()
    in_a_tile = torch.arange(2, covered) % SIZES.pages > 0
    gaps = blocks[:, 0, 1:] - (blocks + sizes)[:, 1, :-1]
    assert not gaps[:, in_a_tile].any()
    assert len(list(pair.pages._contents(0, 1, SIZES.pages))) == 1  # they cross in one piece
    pair.check()


def test_pages_that_were_packed_before_they_had_codes_are_packed_anew_a_few_each_pass(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass takes 16 seconds of this clock, and packing some anew 1.5: so three times some, in a quarter of it."""
    now, pack_again = 0.0, PackedPages.pack_again

    def packed_again(pages: PackedPages, again: list[Page]) -> list[Page]:
        nonlocal now
        now += 1.5
        return pack_again(pages, again)

    monkeypatch.setattr(access, "_AGAIN_SHARE", 0.25)
    monkeypatch.setattr(access, "perf_counter", lambda: now)
    monkeypatch.setattr(PackedPages, "pack_again", packed_again)
    pair, counts, times = Pair.of(decoder, raw_pages=6), list[int](), list[float]()
    pair.forward(400, 1)
    pair.refresh()
    for seed in range(12):
        before = now
        pair.forward(1, seed)
        times.append((now - before) / 1.5)
        now += 16
        counts.append(int((pair.pages.table.flags == RESIDUAL).sum()))
    assert counts[-1] == pair.away.num_layers * (pair.codes.covered // PAGE - 1)
    assert max(times) == 3
    assert times[-1] == 0
    assert 0 < counts[1] < counts[-1] == counts[-2]
    assert pair.pages.table.raw.num_slots == 6
    pair.check()


@pytest.mark.few(2)
@pytest.mark.parametrize("raw_pages", [0, 7, PLENTY])
@pytest.mark.parametrize("fields", [{}, {"page": 96}, {"num_resident": 3}], ids=str)
def test_rows_are_the_same_whatever_happens(decoder: Decoder, raw_pages: int, fields: dict[str, int]) -> None:
    draw, pair, most = random.Random(9), Pair.of(decoder, raw_pages, **fields), 0
    for _ in range(160):
        step = draw.choice(["verify", "verify", "verify", "cut", "cut a little", "restore", "refresh", "ahead"])
        if pair.here.length > 480:
            pair.truncate(draw.choice([40, 256, 300]))
        if step == "verify":
            pair.forward(draw.choice([1, 3, 8, 70, 130]), draw.randrange(99))
        elif step == "cut":
            pair.truncate(draw.randrange(pair.here.length + 1))
        elif step == "cut a little":
            pair.truncate(max(pair.here.length - draw.randrange(120), 0))
        elif step == "restore" and pair.here.length:
            kept = pair.here.length
            for full in (pair.away, pair.here):
                other = full_cache(decoder, replace(SIZES, **fields))
                other.copy_from(full)
                for page in other.page_of_all(0):
                    page.mul_(2)
                full.copy_from(other)
            assert pair.away.length == kept
        elif step == "ahead" and pair.here.length:
            pair.away.fetch_ahead()
        if step in ("verify", "refresh") and draw.random() < 0.7:
            pair.refresh()
            pair.away.fetch_ahead()
        most = max(most, int((pair.pages.table.flags == RESIDUAL).sum()))
        if draw.random() < 0.2:
            pair.check()
    assert most > 1


def fetch_by_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose kernel reads homes itself and knows no residuals."""

    def copy(
        blocks: Tensor, flags: Tensor, wanted: Tensor, held: Tensor, packing: Packing, *,
        chunk: int, page: int, slot: int, tokens: range,
    ) -> None:  # fmt: skip
        assert not (flags[:, wanted * chunk // page] == RESIDUAL).any()
        at = slot * chunk + tokens.start - int(wanted[0]) * chunk
        held[:, :, :, at : at + len(tokens)] = reading[0].tokens(tokens.start, tokens.stop)

    def make(full: FullCache, chunk: int, kernels: DeviceKernels, num_bytes: int) -> GpuFetch:
        reading.append(full.pages.reader)
        copies = Copies(chunks=never, packed_chunks=copy, new_rows=never, rows=never, quantise_kv=never)
        return GpuFetch(full, chunk, copies, range(full.num_layers))

    def never(*_: object, **__: object) -> None:
        raise AssertionError

    reading: list[RowReader] = []
    monkeypatch.setattr("offload.kv.quantised.make_fetch", make)


@pytest.mark.few(6)
@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("cut", [300, 299, 256, 257, 200])
def test_pages_stay_residuals_where_the_cache_is_cut(
    decoder: Decoder, cut: int, by_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last tokens of the cache are attended to exactly, but their codes stay for the pages that lie beside them:
    until other rows are written there, or the same are encoded again."""
    if by_kernel:
        fetch_by_kernel(monkeypatch)
    pair = Pair.of(decoder)
    pair.forward(400, 1)
    pair.refresh()
    pair.forward(1, 2)
    assert pair.residuals().sum() == pair.codes.covered // PAGE - 1
    pair.truncate(cut)
    pair.refresh()
    assert pair.codes.coded == (cut - 64) // 32 * 32
    assert pair.residuals().sum() == -(-cut // PAGE) - 1
    pair.check()
    pair.forward(5, 3)
    assert pair.residuals().sum() == cut // PAGE - 1
    pair.refresh()
    pair.forward(60, 4)
    pair.check()


def test_stale_codes_are_no_codes(decoder: Decoder) -> None:
    """After rows came from outside, or were cut off and replaced, pages wait for codes of their own."""
    pair = Pair.of(decoder)
    pair.forward(300, 1)
    pair.refresh()
    other = full_cache(decoder, SIZES)
    forward(Level("", decoder, other, vocab_size=264, block=SIZES.block), random_tokens(300, seed=8), 1)
    for full in (pair.away, pair.here):
        full.copy_from(other)
    assert pair.codes.covered == 0
    pair.forward(1, 2)
    assert not pair.residuals().any()
    pair.refresh()
    pair.forward(1, 3)
    assert pair.residuals().any()
    pair.truncate(100)
    assert pair.codes.covered == 100
    pair.forward(120, 4)
    assert pair.residuals().sum() == 2
    pair.check()


def test_a_page_that_would_not_come_back_lies_as_it_is(decoder: Decoder) -> None:
    pair = Pair.of(decoder)
    pair.forward(300, 1)
    other = full_cache(decoder, SIZES)
    other.copy_from(pair.here)
    other.pages.page(0, 2)[1, 0, 3, 2] = torch.inf
    other.pages.page(1, 3)[0].view(torch.int16).copy_(torch.randint(0x7F00, other.pages.page(1, 3)[0].shape))
    for full in (pair.away, pair.here):
        full.copy_from(other)
    pair.refresh()
    flags = [forward(level, [1], 1) for level in pair.levels] and pair.pages.table.flags
    assert flags[:, 2:5].tolist() == [[RAW, RESIDUAL, RESIDUAL], [RESIDUAL, RAW, RESIDUAL]]
    pair.lie_apart()
    pair.away.wait_home()
    assert torch.equal(*(full.pages.reader.tokens(EXACT, 300).view(torch.int16) for full in (pair.away, pair.here)))


def test_a_page_lies_as_it_is_where_what_it_has_beside_codes_has_no_room(decoder: Decoder) -> None:
    """It would be smaller than its numbers, and larger than its place."""
    pair = Pair.of(decoder)
    pair.forward(300, 1)
    other = full_cache(decoder, SIZES)
    other.copy_from(pair.here)
    some = other.pages.page(1, 3)[0, ..., ::2]
    generator = torch.Generator().manual_seed(1)
    some.copy_(torch.randint(0x3F00, some.shape, generator=generator).to(torch.int16).view(torch.bfloat16))
    for full in (pair.away, pair.here):
        full.copy_from(other)
    pair.refresh()
    pair.forward(1, 2)
    assert pair.pages.table.flags[:, 2:5].tolist() == [[RESIDUAL] * 3, [RESIDUAL, RAW, RESIDUAL]]
    pair.check()


def fill_with_pages_that_do_not_pack(pair: Pair, decoder: Decoder) -> None:
    """300 tokens: a channel of their keys is large, but for the first."""
    pair.forward(300, 1)
    other = full_cache(decoder, SIZES)
    other.copy_from(pair.here)
    for number in range(2, 10):
        for page in other.page_of_all(number):
            page[0, ..., 0] *= 2.0**20
    for cache in (pair.away, pair.here):
        cache.copy_from(other)


def test_pages_that_lie_beside_codes_alone_need_no_more_slots_for_it(decoder: Decoder) -> None:
    """Until they have these, they are in slots, and in all that there are."""
    pair = Pair.of(decoder, raw_pages=0)
    fill_with_pages_that_do_not_pack(pair, decoder)
    table = pair.pages.table
    assert not table.flags[:, 2:9].any()
    assert table.raw.num_free == 0
    pair.refresh()
    pair.forward(1, 2)
    covered = pair.codes.covered // PAGE
    assert (table.flags[:, 1:covered] == RESIDUAL).all()
    pair.check()


def test_slots_of_rows_that_were_dropped_are_free(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.kv.full.MAX_ROWS", 0)
    pair = Pair.of(decoder)
    fill_with_pages_that_do_not_pack(pair, decoder)
    pair.refresh()
    pair.forward(1, 2)
    raw = pair.pages.table.raw
    raw.take(raw.num_free)
    pair.truncate(280)
    assert raw.num_free == pair.away.num_layers
    pair.refresh()
    pair.check()


# Engines.

ALONE = replace(SIZES, draft_gamma=0)


@contextmanager
def made(folder: Path, link_bits: int, *, ranks: int = 1, sizes: Sizes = ALONE) -> Iterator[Engine]:
    best()
    offload = frozenset({"kv"})
    plan = tiny_plan(folder, None, sizes, num_prompt_tokens=400, max_tokens=60, dtype="bf16", offload=offload)
    with tiny_engine(changed(plan, link_bits=link_bits, num_devices=ranks, raw_pages=PLENTY), folder) as engine:
        yield engine


def said(engine: Engine, prompt: list[int], *, temperature: float = 0.0, reuse: bool = False) -> list[int]:
    sampling = SamplingParams(temperature=temperature, seed=3)
    steps = engine.generate(GenerationRequest(prompt, sampling, max_tokens=24, reuse=reuse))
    return [token for step in steps for token in step.tokens]


def all_said(engine: Engine, temperature: float = 0.0) -> list[list[int]]:
    """Three requests that begin alike, one of which ends where a page does."""
    asked = [PROMPT, PROMPT[:160] + random_tokens(90, seed=5), [*PROMPT[:160], 3]]
    return [said(engine, prompt, temperature=temperature, reuse=number > 0) for number, prompt in enumerate(asked)]


@pytest.mark.few(1)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_engine_says_the_same_and_less_crosses(folder: Path, temperature: float) -> None:
    texts, crossed = [], []
    for link_bits in (16, 12, 9):
        with made(folder, link_bits) as engine:
            texts.append(all_said(engine, temperature))
            crossed.append(engine.worker.link_stats.bytes_to_device)
            packed = engine.worker.full.pages.packed
            assert link_bits != 9 or (packed is not None and (packed.table.flags == RESIDUAL).any())
    assert texts[0] == texts[1] == texts[2]
    assert crossed[0] > crossed[1] > crossed[2]
    if not temperature:
        with made(folder, 16, sizes=replace(PLAIN, draft_gamma=0)) as engine:
            assert all_said(engine) == texts[0]


def test_a_session_is_saved_from_residuals_and_opened(folder: Path, tmp_path: Path) -> None:
    with made(folder, 9) as engine:
        said(engine, PROMPT)
        full = engine.worker.full
        assert full.pages.packed is not None
        assert (full.pages.packed.table.flags == RESIDUAL).any()
        wanted = full.pages.reader.tokens(0, full.length).clone()
        with Store.open(tmp_path / "session", identity_of(folder, engine.plan)) as store:
            engine.save(store, {})
    with made(folder, 9) as engine:
        with Store.open(tmp_path / "session", identity_of(folder, engine.plan)) as store:
            store.load(engine.worker.kept, len(store.tokens))
        assert torch.equal(
            engine.worker.full.pages.reader.tokens(0, len(store.tokens)), wanted[..., : len(store.tokens), :]
        )


def test_two_ranks_say_the_same(folder: Path) -> None:
    texts = []
    with forked_ranks():
        for link_bits in (16, 9):
            with made(folder, link_bits, ranks=2) as engine:
                texts.append(all_said(engine))
    assert texts[0] == texts[1]
