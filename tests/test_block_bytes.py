"""Bytes of keys and values that cross the link where rows attend to chosen blocks: those of blocks that are in no slot,
each once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.families import save_tiny
from kit.models import Sizes, load, random_tokens, target_cache
from kit.processor import OPERATORS, of
from offload.kernels.block_slots import SlotTable
from offload.kernels.cpu import CpuKernels
from offload.kernels.pooled import IndexRows
from offload.kernels.runs import Chosen, Rows
from offload.kv.block_cache import BlockCache
from offload.kv.fetch import HostFetch, Tail
from offload.kv.indexed import IndexedCache
from offload.kv.mixed import MixedCache
from offload.model.decoder import Decoder
from offload.model.level import Level
from offload.model.passes import forward
from offload.transfer.link import PacedLink
from test_parity import in_prefill

LENGTH, DECODED = 120, 32  # tokens of a prefill, and after it; a row attends to at most 16 tokens and 3
SIZES = Sizes(capacity=200, rows=8, prefill_block=7, page=8, pages=2)
LEAST, ALL = 8, 52  # slots: four blocks that a row chooses and those of new rows, in whole spans; and of all tokens
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module", params=OPERATORS)
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """Three of its twelve layers grow."""
    folder = tmp_path_factory.mktemp("bytes") / "model"
    return load(save_tiny("qwen4_exp, n-grams", folder, num_hidden_layers=12), kernels=of(request.param))


@dataclass
class Counted:
    """What crossed in each pass, and what had to. needed: blocks that rows chose, or that new rows go on in, and whose
    rows were in no slot when these rows ran, whatever the cache's own tables said. chosen: by the same rows together.
    """

    block_bytes: int
    row_bytes: int
    to_device: list[int] = field(default_factory=list)
    to_host: list[int] = field(default_factory=list)
    needed: list[int] = field(default_factory=list)
    chosen: list[int] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Bytes that crossed over those that had to."""
        return sum(self.to_device) / (sum(self.needed) * self.block_bytes)


def in_slots(cache: IndexedCache, blocks: BlockCache, layer: int, block: int, before: int) -> bool:
    """Whether any slot has the rows of a block that are at home, of tokens before `before`."""
    start, shape = block * blocks.size, cache.shape
    tile, within = divmod(start, shape.tokens)
    page, offset = divmod(within, shape.page_tokens)
    count = min(blocks.size, before - start)
    home = cache.pages.store.home(layer, tile)[:, page, :, offset : offset + count]
    slots = blocks.held[layer].unflatten(2, (-1, blocks.size))[:, :, :, :count]
    return bool((slots == home[:, :, None]).flatten(3).all(3).all(1).all(0).any())


def counted(decoder: Decoder, slots: int, rows: int, patch: Patch, block: int | None = None) -> Counted:
    """Passes of `rows` rows over DECODED tokens after a prefill of LENGTH, padded to blocks of `block` rows."""
    link = PacedLink(None, overlap=False)
    whole = target_cache(decoder, replace(SIZES, block_slots=slots), link=link)
    assert isinstance(whole, MixedCache)
    cache, real = whole.growing, IndexedCache._over_blocks
    assert isinstance(cache, IndexedCache)
    shape = cache.shape
    of_row = 2 * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize
    found = Counted(of_row * cache.index.indexer.ratio, of_row)
    parts = list[tuple[int, int]]()  # blocks (chosen, needed) by rows that ran together

    def watched(self: IndexedCache, blocks: BlockCache, layer: int, some: Rows, chosen: Chosen) -> None:
        size, own = blocks.size, some.index // blocks.size
        seen = {each for each in [*chosen.blocks.flatten().tolist(), own] if 0 <= each * size < some.index}
        parts.append((len(seen), sum(not in_slots(self, blocks, layer, each, some.index) for each in seen)))
        real(self, blocks, layer, some, chosen)

    tokens = random_tokens(LENGTH + DECODED, seed=3)
    in_prefill(decoder, whole, tokens[:LENGTH], SIZES.prefill_block)
    level = Level("target", decoder, whole, vocab_size=decoder.config.vocab_size, block=block)
    patch.setattr(IndexedCache, "_over_blocks", watched)
    for start in range(LENGTH, LENGTH + DECODED, rows):
        before = link.stats
        forward(level, tokens[start : start + rows], rows)
        crossed = link.stats - before
        found.to_device.append(crossed.bytes_to_device)
        found.to_host.append(crossed.bytes_to_host)
        found.chosen.append(sum(chosen for chosen, _ in parts))
        found.needed.append(sum(needed for _, needed in parts))
        parts.clear()
    patch.setattr(IndexedCache, "_over_blocks", real)
    return found


@pytest.mark.parametrize("slots", [LEAST, 2 * LEAST, ALL])
@pytest.mark.parametrize("rows", [1, 4, 8])
def test_blocks_that_are_in_no_slot_cross_once_and_no_others(
    decoder: Decoder, rows: int, slots: int, monkeypatch: Patch
) -> None:
    """In each pass, and new rows cross to the host once."""
    found = counted(decoder, slots, rows, monkeypatch)
    assert found.to_device == [needed * found.block_bytes for needed in found.needed]
    assert found.to_host == [3 * rows * found.row_bytes] * len(found.to_host)
    assert sum(found.needed) > 9


@pytest.mark.parametrize("rows", [1, 4, 8])
def test_with_slots_for_all_blocks_each_crosses_once_in_all_passes(
    decoder: Decoder, rows: int, monkeypatch: Patch
) -> None:
    found, of_prefill = counted(decoder, ALL, rows, monkeypatch), LENGTH // 4
    assert sum(found.needed) <= 3 * of_prefill
    assert sum(found.chosen) > sum(found.needed)
    assert found.to_device[-1] < found.to_device[0]


@pytest.mark.parametrize("slots", [LEAST, ALL])
def test_nothing_crosses_for_padding(slots: int, decoder: Decoder, monkeypatch: Patch) -> None:
    """Passes by the CPU's own kernels have none."""
    if isinstance(decoder._kernels, CpuKernels):
        return
    alone = counted(decoder, slots, 3, monkeypatch)
    padded = counted(decoder, slots, 3, monkeypatch, block=8)
    assert (padded.to_device, padded.to_host) == (alone.to_device, alone.to_host)
    _padding_chooses(monkeypatch)
    assert sum(counted(decoder, slots, 3, monkeypatch, block=8).to_device) > sum(alone.to_device)


def _padding_chooses(patch: Patch) -> None:
    real = IndexedCache.attend_chosen

    def mutant(self: IndexedCache, layer: int, q: Tensor, k: Tensor, v: Tensor, index: IndexRows) -> Tensor:
        return real(self, layer, q, k, v, replace(index, real=None))

    patch.setattr(IndexedCache, "attend_chosen", mutant)


# Mutants: each has to bring more than was needed.


def _each_block_twice(patch: Patch) -> None:
    real = HostFetch.fetch

    def mutant(self: HostFetch, held: Tensor, tail: Tail, wanted: Tensor | None = None) -> None:
        real(self, held, tail, wanted)
        real(self, held, tail, wanted)

    patch.setattr(HostFetch, "fetch", mutant)


def _one_block_twice(patch: Patch) -> None:
    """The first that is missing, in any pass."""
    real = HostFetch.fetch

    def mutant(self: HostFetch, held: Tensor, tail: Tail, wanted: Tensor | None = None) -> None:
        real(self, held, tail, wanted)
        assert wanted is not None
        first = wanted.clone()
        first[..., int((wanted[0, 0] >= 0).int().argmax()) + 1 :] = -1
        real(self, held, tail, first)

    patch.setattr(HostFetch, "fetch", mutant)


def _blocks_that_are_in_slots(patch: Patch) -> None:
    real = BlockCache.bring

    def mutant(self: BlockCache, layer: int, blocks: Tensor, positions: Tensor) -> Tensor:
        table, first = self.table(layer), blocks[0, 0]
        if first >= 0 and (gone := table.slot_of[first]) >= 0:
            table.block_in[gone], table.slot_of[first] = -1, -1
        return real(self, layer, blocks, positions)

    patch.setattr(BlockCache, "bring", mutant)


def _slots_are_forgotten_between_passes(patch: Patch) -> None:
    real = IndexedCache.begin

    def mutant(self: IndexedCache, phase: object, num_rows: int, *, ahead: bool = False) -> None:
        real(self, phase, num_rows, ahead=ahead)  # type: ignore[arg-type]
        if self.blocks is not None:
            self.blocks.forget(0)

    patch.setattr(IndexedCache, "begin", mutant)


def _blocks_of_new_rows_alone(patch: Patch) -> None:
    """Blocks that new rows begin are read from the host, which has nothing of them."""
    real = BlockCache.__init__

    def made(self: BlockCache, *given: Any) -> None:
        def mutant(table: SlotTable, blocks: Tensor, positions: Tensor, size: int) -> tuple[Tensor, Tensor]:
            before = table.block_in.clone()
            return take(table, blocks, positions, size)[0], torch.where(table.block_in != before, table.block_in, -1)

        real(self, *given)
        take, self._take = self._take, mutant

    patch.setattr(BlockCache, "__init__", made)


MUTANTS: list[Callable[[Patch], None]] = [
    _each_block_twice, _one_block_twice, _blocks_that_are_in_slots, _slots_are_forgotten_between_passes,
    _blocks_of_new_rows_alone,
]  # fmt: skip


@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda mutate: mutate.__name__)
def test_mutants_bring_more_than_is_needed(
    decoder: Decoder, mutate: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    mutate(monkeypatch)
    found = counted(decoder, 2 * LEAST, 4, monkeypatch)
    assert found.to_device != [needed * found.block_bytes for needed in found.needed]
    assert found.ratio > 1
