"""The kernel that copies chunks, on paper: by torch's operators on the tensors' values. No tests in here."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from offload.formats.layout import ALL_TOKENS, Packing, PageShape
from offload.formats.packed import pack, unpack, unpack_with_torch
from offload.formats.quantised_kv import Order
from offload.formats.residuals import restore_pages, split_off_pages
from offload.kernels.gpu.kernels import COPIES
from offload.kv import block_cache, chunk_store, quantised
from offload.kv.fetch import GpuFetch
from offload.native.interface import Library
from offload.pages import codec
from offload.pages.codec import move
from offload.pages.tiles import TileStore
from paper.clocks import Actor
from paper.gpu import ADDRESS, PaperGpu
from paper.tensors import PaperTensor, launch

Homes = list[list[Tensor]]


def chunks_by_kernel(gpu: PaperGpu, patch: pytest.MonkeyPatch) -> None:
    """Copies of the full cache that are made from now on are filled by the GPU itself. Homes stand for addresses,
    where nothing is packed."""
    there = pages_by_host(gpu, patch)

    def run(
        homes: Homes, wanted: Tensor, held: Tensor, *, chunk: int, page: int, tile: int,
        slot: int = 0, tokens: range = ALL_TOKENS,
    ) -> None:  # fmt: skip
        def rows(layer: int, head: int, token: int) -> Tensor:
            index, within = divmod(token, tile)
            number, offset = divmod(within, page)
            return _raw(homes[layer][index])[:, number, head, offset]

        _launch(gpu, "copy_chunks", homes, [wanted], held)
        _run(gpu, lambda: _copy_chunks(chunk, rows, _raw(wanted), _raw(held), slot, tokens), [held])

    def run_new(
        rows: Tensor, positions: Tensor, slot_of: Tensor, held: Tensor, homes: list[Tensor], *, size: int, page: int,
        tile: int,
    ) -> None:  # fmt: skip
        def compute() -> None:
            for row, token in enumerate(each for each in _raw(positions).tolist() if each >= 0):
                index, within = divmod(token, tile)
                number, offset = divmod(within, page)
                new = _raw(rows)[:, :, row]
                _raw(homes[index])[:, number, :, offset] = new
                _raw(held)[:, :, int(_raw(slot_of)[token // size]) * size + token % size] = new

        _launch(gpu, "copy_new_rows", [homes], [rows, positions, slot_of], held, writes_homes=True)
        _run(gpu, compute, [held, *homes])

    def run_packed(
        blocks: Tensor, flags: Tensor, wanted: Tensor, held: Tensor, packing: Packing, *, chunk: int,
        page: int, slot: int = 0, tokens: range = ALL_TOKENS,
    ) -> None:  # fmt: skip
        tensors = [cast(PaperTensor, each) for each in (blocks, flags, wanted, held)]
        found = _raw(blocks).unique().tolist()
        homes = [home for first, home in there.items() if any(first <= at < first + home.raw.nbytes for at in found)]
        actor = launch(gpu, "copy_packed_chunks", [*tensors, *homes], {id(held)})
        with _disable_current_modes():
            pages = _Pages(gpu, actor, packing, page, _raw(blocks), _raw(flags), held.shape[2])
            _copy_chunks(chunk, pages.row, _raw(wanted), _raw(held), slot, tokens)

    patch.setattr(TileStore, "addresses", lambda store: _Homes(store._homes))
    copies = replace(COPIES, chunks=run, packed_chunks=run_packed, new_rows=run_new)
    patch.setattr(block_cache, "copies_of", lambda full, kernels: copies)
    for module in (chunk_store, quantised):
        patch.setattr(
            module,
            "make_fetch",
            lambda full, chunk, kernels, num_bytes, reads=(): GpuFetch(
                full, chunk, copies, reads or range(full.num_layers)
            ),
        )


def pages_by_host(gpu: PaperGpu, patch: pytest.MonkeyPatch) -> dict[int, PaperTensor]:
    """What the CPU packs and unpacks it reads and writes by addresses. -> Homes on the GPU, by theirs, as far as
    somebody asked for them."""
    there: dict[int, PaperTensor] = {}

    def address(store: TileStore, layer: int, index: int) -> int:
        home = store.home(layer, index)
        found = ADDRESS(_raw(home))
        if isinstance(home, PaperTensor):
            there[found] = home
        return found

    def pack_on_paper(addresses: Tensor, packing: Packing, kernels: Library, *, to: Tensor) -> Tensor:
        gpu.host.step()
        for each in addresses.tolist():
            gpu.access_address(each, 2 * packing.numbers, gpu.host, write=False, what="pack")
        for each in to.tolist():
            gpu.access_address(each, packing.nbytes, gpu.host, write=True, what="pack")
        return pack(addresses, packing, kernels, to=to)

    def unpack_on_paper(parts: Tensor, packing: Packing, kernels: Library) -> None:
        gpu.host.step()
        for start, _, _, _, is_packed in parts.tolist():
            size = packing.nbytes if is_packed else 2 * packing.numbers
            gpu.access_address(start, size, gpu.host, write=False, what="unpack")
        unpack(parts, packing, kernels)

    def split_off_on_paper(parts: Tensor, shape: PageShape, order: Order, kernels: Library, *, most: int) -> Tensor:
        gpu.host.step()
        for start, to, _, _, _ in parts.tolist():
            gpu.access_address(start, 2 * shape.numbers, gpu.host, write=False, what="split_off")
            gpu.access_address(to, most, gpu.host, write=True, what="split_off")
        return split_off_pages(parts, shape, order, kernels, most=most)

    def restore_on_paper(parts: Tensor, shape: PageShape, order: Order, kernels: Library) -> None:
        gpu.host.step()
        for start in parts[:, 0].tolist():
            gpu.access_address(start, shape.numbers, gpu.host, write=False, what="restore")
        restore_pages(parts, shape, order, kernels)

    def move_on_paper(to: int, at: int, size: int) -> None:
        if to != at:
            gpu.host.step()
            gpu.access_address(at, size, gpu.host, write=False, what="move")
            gpu.access_address(to, size, gpu.host, write=True, what="move")
        move(to, at, size)

    patch.setattr(codec, "split_off_pages", split_off_on_paper)
    patch.setattr(codec, "restore_pages", restore_on_paper)
    patch.setattr(codec, "move", move_on_paper)
    patch.setattr(codec, "pack", pack_on_paper)
    patch.setattr(codec, "unpack", unpack_on_paper)
    patch.setattr(TileStore, "address", address)
    return there


class _Homes(list[list[Tensor]]):
    """Homes in place of their addresses."""

    def data_ptr(self) -> int:
        """They stay where they are."""
        return 0


@dataclass(frozen=True)
class _Pages:
    """Pages as the GPU's kernel finds them by the table that it is given."""

    gpu: PaperGpu
    actor: Actor
    packing: Packing
    page: int
    blocks: Tensor
    flags: Tensor
    num_heads: int

    def row(self, layer: int, head: int, token: int) -> Tensor:
        """Keys and values of a token, [2, D]."""
        number, offset = divmod(token, self.page)
        return torch.stack([self._block(layer, half, number)[head, offset] for half in range(2)])

    def _block(self, layer: int, half: int, number: int) -> Tensor:
        """[H_kv, S, D]"""
        packing, address = self.packing, int(self.blocks[layer, half, number])
        is_packed = bool(self.flags[layer, number])
        size = packing.nbytes if is_packed else 2 * packing.numbers
        self.gpu.access_address(address, size, self.actor, write=False, what="copy_packed_chunks")
        content = torch.frombuffer(bytearray(ctypes.string_at(address, size)), dtype=torch.uint8)
        found = unpack_with_torch(content, packing) if is_packed else content.view(torch.bfloat16)
        return found.view(self.num_heads, self.page, -1)


def _launch(
    gpu: PaperGpu, name: str, homes: Homes, read: Sequence[Tensor], held: Tensor, *, writes_homes: bool = False
) -> None:
    """It may read any home, of the GPU or of the host, or write to it. It writes to `held`."""
    tiles = [home for layer in homes for home in layer]
    there = [home for home in tiles if isinstance(home, PaperTensor)]
    tensors = [cast(PaperTensor, each) for each in (*read, held, *there)]
    actor = launch(gpu, name, tensors, {id(held), *(map(id, there) if writes_homes else ())})
    for home in tiles:
        if not isinstance(home, PaperTensor):
            assert gpu.is_pinned(home)
            if gpu.recording is not None:
                gpu.recording.reaches(home, write=writes_homes, name=name)
            else:
                gpu.access_host(home, actor, write=writes_homes, what=name)


def _run(gpu: PaperGpu, compute: Callable[[], None], written: Sequence[Tensor]) -> None:
    """Compute on the tensors' values, now and in each replay: it is not the host that reads."""

    def compute_alone() -> None:
        with _disable_current_modes():
            compute()

    if (graph := gpu.recording) is not None:
        for each in written:
            graph.writes(_raw(each))
        graph.computed(compute_alone, ())
    compute_alone()


def _copy_chunks(
    chunk: int, rows: Callable[[int, int, int], Tensor], wanted: Tensor, held: Tensor, slot: int, tokens: range
) -> None:
    """rows: of a layer, a head and a token, [2, D]."""
    num_layers, _, num_heads, _, _ = held.shape
    wanted = wanted.expand(num_layers, num_heads, -1)
    for layer, head, place in torch.cartesian_prod(*map(torch.arange, wanted.shape)).tolist():
        number = int(wanted[layer, head, place])
        for row in range(chunk):
            token = number * chunk + row
            if number >= 0 and token in tokens:
                held[layer, :, head, (slot + place) * chunk + row] = rows(layer, head, token)


def _raw(tensor: Tensor) -> Tensor:
    return tensor.raw if isinstance(tensor, PaperTensor) else tensor
