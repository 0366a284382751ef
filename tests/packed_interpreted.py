"""A GPU's programs of packed pages in Triton's interpreter, and an engine on a GPU on paper whose pages cross its
link packed. test_gpu_kernels.py runs this in a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.interpreter import without_idle_work
from kit.models import GREEDY, Sizes, changed, random_model, random_tokens, save, tiny_engine, tiny_plan
from kit.oracles import pack_with_torch
from kit.processor import best
from offload.engine.engine import Engine
from offload.engine.request import GenerationRequest
from offload.formats.layout import PACKED, RESIDUAL, Packing
from offload.formats.packed import pack_numbers
from offload.formats.packed_gpu import packed_chunks, unpack_numbers, unpack_tile
from offload.kernels.gpu.copies import table_rows
from offload.model.graphs import VARIABLE
from offload.pages.traffic import Traffic
from offload.progress import Progress
from offload.transfer.background import BackgroundThread
from offload.transfer.link import CudaEvent
from offload.weights import embedding, homes
from offload.weights.layers import StreamedLayers
from paper import PaperGpu, on_paper
from paper.codes import codes_by_gpu
from paper.kernels import chunks_by_kernel
from paper.programs import programs_by_interpreter
from test_paper_bugs import Bug, plant

LAYERS, KV_HEADS, PAGE, PAGES = 2, 3, 64, 2
DIMS = [48, 16, 64, 128, 512]

without_idle_work()


def numbers(size: tuple[int, ...], *, seed: int) -> Tensor:
    """Of a normal distribution, and one in a hundred is any smaller number; with all sorts of numbers in the end."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(size, generator=generator).bfloat16()
    every = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16)
    small = every[(every.abs() < 1.0).nonzero().flatten()]
    some = small[torch.randint(len(small), size, generator=generator)]
    return torch.where(torch.rand(size, generator=generator) < 0.01, some, found)


def packed(pages: Tensor, packing: Packing, share: float, *, seed: int) -> tuple[list[Tensor], Tensor]:
    """Pages [P, 2, H_kv, S, D] as they may lie, each as bytes, its keys and then its values; and which are packed,
    uint8 [P], about that share of them."""
    wanted = torch.rand(len(pages), generator=torch.Generator().manual_seed(seed)) < share
    found, flags = [], torch.zeros(len(pages), dtype=torch.uint8)
    for number, page in enumerate(pages):
        blocks = [pack_with_torch(block.flatten(), packing) for block in page]
        kept = [block for block in blocks if block is not None]
        flags[number] = int(bool(wanted[number]) and len(kept) == 2)
        found.append(torch.cat(kept) if flags[number] else page.flatten().view(torch.uint8))
    return found, flags


def starts_of(pages: list[Tensor]) -> Tensor:
    """Where keys and values begin, one page after the other: int64 [2, P], of which a row is a part of a longer one."""
    ends = torch.tensor([len(page) for page in pages]).cumsum(0)
    sizes = torch.tensor([len(page) // 2 for page in pages])
    starts = torch.stack([ends - 2 * sizes, ends - sizes])
    return torch.nn.functional.pad(starts, (1, 2), value=7)[:, 1:-2]


def bits(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.int16)


@pytest.mark.few(1)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("share", [0.5, 1.0, 0.0])
def test_pages_are_unpacked_bit_for_bit(dim: int, share: float) -> None:
    packing = Packing.of(KV_HEADS * PAGE * dim, 16 * dim, 0.05)
    exact = numbers((2, 4, KV_HEADS, PAGE, dim), seed=dim)
    exact[0, 1, 0, 3, :8] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 0.0, 1e-40, -1e-40, 3e38])
    pages, flags = packed(exact.transpose(0, 1), packing, share, seed=dim)
    slot, tile = torch.zeros_like(exact), torch.full_like(exact, 7.0)
    content = torch.cat(pages[:3])
    slot.view(-1).view(torch.uint8)[: len(content)] = content
    unpack_tile(tile, slot, flags[:3], starts_of(pages[:3]), packing)
    assert torch.equal(bits(tile[:, :3]), bits(exact[:, :3]))
    assert (tile[:, 3] == 7.0).all()
    assert flags.sum() == 0 if share == 0.0 else flags[:3].any()


def test_residuals_are_left_alone() -> None:
    packing = Packing.of(KV_HEADS * PAGE * 16, 16 * 16, 0.05)
    exact = numbers((2, 3, KV_HEADS, PAGE, 16), seed=1)
    pages, flags = packed(exact.transpose(0, 1), packing, 1.0, seed=1)
    slot, tile = torch.zeros_like(exact), torch.full_like(exact, 7.0)
    slot.view(-1).view(torch.uint8)[: sum(map(len, pages))] = torch.cat(pages)
    flags[1] = RESIDUAL
    unpack_tile(tile, slot, flags, starts_of(pages), packing)
    assert (tile[:, 1] == 7.0).all()
    assert torch.equal(bits(tile[:, [0, 2]]), bits(exact[:, [0, 2]]))


@pytest.mark.few(1)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("chunk", [32, 16, 64])
def test_chunks_and_ranges_come_from_packed_homes(dim: int, chunk: int) -> None:
    packing = Packing.of(KV_HEADS * PAGE * dim, 16 * dim, 0.05)
    exact = numbers((LAYERS, 2 * PAGES, 2, KV_HEADS, PAGE, dim), seed=dim + chunk)
    homes = [packed(pages, packing, 0.7, seed=i) for i, pages in enumerate(exact)]
    flags = torch.stack([flags for _, flags in homes])
    assert 0 < flags.sum() < flags.numel()
    rows = exact.permute(0, 2, 3, 1, 4, 5).flatten(3, 4)  # [L, 2, H, tokens, D]
    aligned = [[torch.cat([page, page.new_zeros(-len(page) % 16)]) for page in pages] for pages, _ in homes]
    blocks = torch.tensor(
        [[[page.data_ptr() + kind * (len(page) // 2) for page in pages] for kind in range(2)] for pages in aligned]
    )
    sizes = {"chunk": chunk, "page": PAGE}
    slots = 3
    held = torch.full((LAYERS, 2, KV_HEADS, (slots + 2) * chunk, dim), 7.0).bfloat16()
    generator = torch.Generator().manual_seed(chunk)
    per_layer = 2 * PAGE * PAGES // chunk
    wanted = torch.stack([torch.randperm(per_layer, generator=generator)[:slots] for _ in range(LAYERS * KV_HEADS)])
    wanted = wanted.view(LAYERS, KV_HEADS, slots)
    wanted[0, 1, 2] = -1
    expected = held.clone()
    for layer in range(LAYERS):
        for head in range(KV_HEADS):
            for slot, number in enumerate(wanted[layer, head].tolist()):
                if number >= 0:
                    own = rows[layer, :, head, number * chunk : (number + 1) * chunk]
                    expected[layer, :, head, slot * chunk : (slot + 1) * chunk] = own
    packed_chunks(blocks, flags, wanted, held, packing, **sizes)
    assert torch.equal(bits(held), bits(expected))
    start, stop = chunk + 3, 3 * chunk - 5
    packed_chunks(blocks, flags, torch.arange(1, 3), held, packing, slot=slots, tokens=range(start, stop), **sizes)
    expected[:, :, :, slots * chunk + 3 : (slots + 2) * chunk - 5] = rows[:, :, :, start:stop]
    assert torch.equal(bits(held), bits(expected))


# An engine.

PROMPT = random_tokens(100, seed=7)
OTHER = PROMPT[:80] + random_tokens(20, seed=8)
SIZES = Sizes(
    gamma=4, budget=32, chunk=16, page=32, pages=1, capacity=128, rows=8, prefill_block=64, adaptive=True, lookup=True
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = random_model("qwen2", vocab_size=264, max_position_embeddings=512, hidden_size=64, head_dim=16, seed=11)
    return save(model, tmp_path_factory.mktemp("packed") / "target", tokenizer=True)


@contextmanager
def on_gpu(
    folder: Path,
    link_bits: int = 16,
    *,
    sizes: Sizes = SIZES,
    weight_link_bits: int | None = None,
    resident_layers: int = 1,
    embeds_on_host: bool = False,
    reads_host: bool = True,
    raw_pages: int = 0,
) -> Iterator[tuple[Engine, PaperGpu]]:
    """weight_link_bits: None where no weights stream; else all but `resident_layers` do. reads_host: the GPU's kernels
    read memory of the host."""
    offload = frozenset({"kv"} if weight_link_bits is None else {"kv", "weights"})
    plan = tiny_plan(folder, None, sizes, num_prompt_tokens=110, max_tokens=10, offload=offload, dtype="bf16")
    plan = changed(plan, device="cuda:0", resident_tiles=1, fused_prefill=False, link_bits=link_bits)
    if weight_link_bits is not None:
        plan = changed(plan, weight_link_bits=weight_link_bits, resident_layers=resident_layers)
    plan = changed(plan, table="host" if embeds_on_host else "device", raw_pages=raw_pages)
    with on_paper() as gpu, pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "off")
        patch.setattr(embedding, "kernels_read_host", lambda device: reads_host)
        programs_by_interpreter(gpu, patch)
        chunks_by_kernel(gpu, patch)
        codes_by_gpu(patch, without_values=False)
        patch.setattr(homes, "PACKING", Packing.roomiest(1 << 11, 1 << 10))
        with tiny_engine(plan, folder) as engine:
            yield engine, gpu


def said(engine: Engine, prompt: list[int], *, reuse: bool = False) -> list[int]:
    steps = engine.generate(GenerationRequest(prompt, GREEDY, max_tokens=6, reuse=reuse))
    return [token for step in steps for token in step.tokens]


def all_said(engine: Engine) -> list[list[int]]:
    """The last prompt is prefilled over packed pages."""
    return [said(engine, PROMPT), said(engine, OTHER), said(engine, OTHER[:90], reuse=True)]


@pytest.mark.deep
def test_the_text_is_the_same_and_all_is_ordered(folder: Path) -> None:
    with on_gpu(folder, 16) as (engine, gpu):
        wanted = all_said(engine)
        assert gpu.problems == []
    with on_gpu(folder, 12) as (engine, gpu):
        assert all_said(engine) == wanted
        packed = engine.worker.full.pages.packed
        assert packed is not None
        assert packed.table.flags.any()
        assert gpu.launches["unpack_pages"] > 10
        assert gpu.launches["copy_packed_chunks"] > 3
    assert gpu.problems == []


def behind(patch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Pages that the thread packs, from now on."""
    begun, begin = list[tuple[int, ...]](), BackgroundThread.begin

    def counted(thread: BackgroundThread, pages: Sequence[tuple[int, int]], *more: Any) -> None:
        begun.extend(pages)
        begin(thread, pages, *more)

    patch.setattr(BackgroundThread, "begin", counted)
    return begun


@pytest.mark.deep
def test_pages_of_a_prefill_are_packed_behind_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it goes on, and again after it was broken off."""
    with on_gpu(folder, 16) as (engine, gpu):
        wanted = all_said(engine)
    begun = behind(monkeypatch)
    with on_gpu(folder, 12, raw_pages=4) as (engine, gpu):
        assert all_said(engine) == wanted
        assert len(begun) > 1
        packed = engine.worker.full.pages.packed
        assert packed is not None
        assert all(packed.table.flags[page] == PACKED or page in packed.table.slots for page in begun)

        def stops(progress: Progress) -> None:
            if progress.done > 60:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            for _ in engine.generate(GenerationRequest(OTHER[::-1], GREEDY, max_tokens=2), on_progress=stops):
                pass
        assert all_said(engine) == wanted
    assert gpu.problems == []


@pytest.mark.deep
@pytest.mark.parametrize(
    "bug",
    [
        Bug("the thread packs pages before they are home", "offload.transfer.background", "    for event in after:",
            "    for event in ():", reported="race: read by host (pack)"),
        Bug("what the thread packs is entered when it has begun", "offload.pages.packed",
            "        pages, sizes, happened = self._thread.take()",
            "        pages, sizes, happened = self._thread._items, torch.ones(len(self._thread._items), 2), ()",
            reported=""),
    ],
    ids=lambda bug: bug.description,
)  # fmt: skip
def test_a_bug_of_the_packing_thread_is_seen(bug: Bug, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with on_gpu(folder, 16) as (engine, gpu):
        wanted = all_said(engine)
    behind(monkeypatch)
    plant(bug, monkeypatch)
    try:
        with on_gpu(folder, 12, raw_pages=4) as (engine, gpu):
            found, problems = all_said(engine), gpu.problems
    except (AssertionError, KeyError):
        return
    assert any(bug.reported in problem for problem in problems) or found != wanted


@pytest.mark.deep
def test_pages_that_are_packed_before_they_are_home_are_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Traffic, "settle", lambda traffic, tiles: None)
    with on_gpu(folder, 12) as (engine, gpu), torch.inference_mode():
        said(engine, PROMPT)
        problems = list(gpu.problems)
        monkeypatch.undo()
    assert any("race: read by host (pack)" in problem for problem in problems)


@pytest.mark.deep
@pytest.mark.parametrize("planted", [False, True])
def test_pages_that_are_packed_over_what_a_copy_reads_are_reported(
    planted: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session is read after tiles were fetched ahead."""
    if planted:
        monkeypatch.setattr(Traffic, "reads", lambda traffic, tile, event: None)
    with on_gpu(folder, 12) as (engine, gpu), torch.inference_mode():
        said(engine, PROMPT)
        full = engine.worker.full
        full.fetch_ahead()
        full.restored(0)
        full.wait_home()
        for number in range(3):
            layers = full.page_to_fill(number)
            for layer in layers:
                layer.zero_()
            full.page_filled(number)
        problems = list(gpu.problems)
        monkeypatch.undo()
    assert any("race: write by host" in problem for problem in problems) == planted


# Weights.


@pytest.mark.few(1)
@pytest.mark.parametrize("share", [0.4, 0.0, 1.0])
def test_numbers_are_unpacked_bit_for_bit(share: float) -> None:
    """Blocks that do not pack are among them."""
    packing, exact = Packing.roomiest(1 << 11, 1 << 10), numbers((5 << 11,), seed=3)
    every = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16)
    some = every[torch.randint(len(every), exact.shape, generator=torch.Generator().manual_seed(4))]
    where = (torch.arange(len(exact)) >> 11) < int(5 * share)
    exact = torch.where(where, some, exact)
    content, starts = pack_numbers(exact.clone(), packing, best())
    assert int((starts.diff() == 2 * packing.numbers).sum()) == int(5 * share)
    out = torch.full_like(exact, 7.0)
    unpack_numbers(content, starts, out, packing)
    assert torch.equal(bits(out), bits(exact))


@pytest.fixture(scope="module")
def square(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights can be had quantised."""
    sizes = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "intermediate_size": 128}
    model = random_model("qwen2", vocab_size=264, max_position_embeddings=512, seed=11, **sizes)
    return save(model, tmp_path_factory.mktemp("square") / "target", tokenizer=True)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("weight_bits", "link_bits", "launched"),
    [(4, 9, "restore_weights"), (6, 8, "restore_weights"), (16, 12, "unpack_blocks")],
)
def test_the_text_is_the_same_however_weights_cross(
    square: Path, weight_bits: int, link_bits: int, launched: str
) -> None:
    sizes = replace(SIZES, weight_bits=weight_bits)
    with on_gpu(square, sizes=sizes, weight_link_bits=16) as (engine, gpu):
        wanted, crossed = all_said(engine), engine.worker.link_stats.bytes_to_device
        assert gpu.problems == []
        assert gpu.launches[launched] == 0
    with on_gpu(square, sizes=sizes, weight_link_bits=link_bits) as (engine, gpu):
        assert all_said(engine) == wanted
        assert engine.worker.link_stats.bytes_to_device < crossed
        assert gpu.launches[launched] > 10
    assert gpu.problems == []


@pytest.mark.deep
def test_a_layer_that_is_opened_before_it_has_come_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaEvent, "wait", lambda event: None)
    with on_gpu(folder, weight_link_bits=12, resident_layers=0) as (engine, gpu), torch.inference_mode():
        said(engine, PROMPT)
        problems = list(gpu.problems)
        monkeypatch.undo()
    assert any("not ordered after read by compute" in problem for problem in problems)


@pytest.mark.deep
def test_a_layer_that_comes_where_another_is_opened_from_is_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy has to wait until what was in its slot was opened."""

    def fetch(layers: StreamedLayers, position: int) -> None:
        slot, number = position % len(layers._staging), position % len(layers._homes)
        content = layers._homes[number].content
        layers._full[slot] = layers._link.to_device(layers._staging[slot][: len(content)], content, ())
        layers._held[slot] = number

    monkeypatch.setattr(StreamedLayers, "_fetch", fetch)
    with on_gpu(folder, weight_link_bits=12, resident_layers=0) as (engine, gpu), torch.inference_mode():
        said(engine, PROMPT)
        problems = list(gpu.problems)
        monkeypatch.undo()
    assert any("not ordered after read by compute" in problem for problem in problems)


# The embedding.


@pytest.mark.few(2)
@pytest.mark.parametrize("width", [62, 5120, 2, 2048])
def test_rows_of_a_table_are_copied(width: int) -> None:
    table, tokens = numbers((50, width), seed=width), torch.tensor([49, 0, 7, 7, 31])
    out = torch.full((5, width), 7.0).bfloat16()
    table_rows(torch.tensor([table.data_ptr()]), tokens, out)
    assert torch.equal(bits(out), bits(table[tokens]))


@pytest.mark.deep
@pytest.mark.parametrize("reads_host", [True, False])
def test_the_text_is_the_same_wherever_the_embedding_is(folder: Path, reads_host: bool) -> None:
    with on_gpu(folder, sizes=SIZES) as (engine, gpu):
        wanted, waits = all_said(engine), gpu.syncs.total()
        assert not engine.worker.target.weights.embedding.waits
    with on_gpu(folder, embeds_on_host=True, reads_host=reads_host) as (engine, gpu):
        table = engine.worker.target.weights.embedding
        assert table.table.device.type == "cpu"
        assert gpu.is_pinned(table.table)
        assert table.waits != reads_host
        assert all_said(engine) == wanted
        assert (gpu.launches["copy_rows"] > 10) == reads_host
        assert (gpu.syncs.total() > waits) != reads_host
    assert gpu.problems == []
