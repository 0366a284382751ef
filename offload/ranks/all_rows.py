"""The KV rows of all ranks joined into one sequence with all heads, as sessions save and restore them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from offload.pages.tiles import TileShape
from offload.ranks.record import TokenRecord
from offload.ranks.sums import Sums
from offload.session.page import PagedRows, WindowRows


class AllRows:
    """`PagedRows` on rank 0 over the same cache of every rank. A page is gathered when it is read, and scattered once
    it is filled. Peak host memory: two pages.

    heads: the KV heads of each rank; several ranks may have the same heads. tell: sends a command to the other ranks.
    record: rank 0's token record, of the layers that keep every token.
    """

    def __init__(
        self,
        own: PagedRows,
        heads: Sequence[range],
        sums: Sums,
        tell: Callable[..., int],
        record: TokenRecord | None = None,
    ) -> None:
        self._own, self._heads, self._sums, self._tell, self._record = own, heads, sums, tell, record

    @property
    def num_layers(self) -> int:
        return self._own.num_layers

    @property
    def shape(self) -> TileShape:
        return replace(self._own.shape, num_kv_heads=max(heads.stop for heads in self._heads))

    @property
    def length(self) -> int:
        return self._own.length

    def reserve(self, num_tokens: int) -> None:
        self._tell("reserve", num_tokens=num_tokens)
        self._own.reserve(num_tokens)

    def wait_home(self) -> None:
        self._tell("wait_home")
        self._own.wait_home()

    def page_of_all(self, number: int) -> list[Tensor]:
        self._tell("gather_page", page=number)
        parts = self._sums.gather(packed_page(self._own, number))
        page = empty_page(self.num_layers, self.shape)
        for heads, part in zip(self._heads, parts, strict=True):
            page[:, :, heads.start : heads.stop] = part
        return list(page)

    def page_to_fill(self, number: int) -> list[Tensor]:
        return list(empty_page(self.num_layers, self.shape))

    def filled(self, number: int, layers: Sequence[Tensor]) -> None:
        self._tell("fill_page", page=number)
        parts = [torch.stack([layer[:, heads.start : heads.stop] for layer in layers]) for heads in self._heads]
        own = empty_page(self.num_layers, self._own.shape)
        self._sums.scatter(parts, own)
        unpack_page(self._own, number, own)

    def restored(self, length: int) -> None:
        self._tell("restored", length=length)
        self._own.restored(length)
        if self._record is not None:
            self._record.forget(length)


class AllWindows(AllRows):
    """`WindowRows` on rank 0 over the windows of every rank."""

    def __init__(self, own: WindowRows, *others: Any) -> None:
        super().__init__(own, *others)
        self._windows = own

    @property
    def first_page(self) -> int:
        return self._windows.first_page

    def first_kept(self, length: int) -> int:
        return self._windows.first_kept(length)

    def first_seen(self, length: int) -> int:
        return self._windows.first_seen(length)


def empty_page(num_layers: int, shape: TileShape) -> Tensor:
    """An uninitialised page of all layers, [L, 2, H_kv, S, D] on the host."""
    return torch.empty((num_layers, 2, shape.num_kv_heads, shape.page_tokens, shape.head_dim), dtype=shape.dtype)


def packed_page(full: PagedRows, number: int) -> Tensor:
    """Page `number` of one rank's cache: [L, 2, h, S, D] on the host."""
    return torch.stack([layer.cpu() for layer in full.page_of_all(number)])


def unpack_page(full: PagedRows, number: int, page: Tensor) -> None:
    """Copy `page`, as `packed_page` returns it, into page `number` of one rank's cache."""
    layers = full.page_to_fill(number)
    for home, layer in zip(layers, page, strict=True):
        home.copy_(layer)
    full.filled(number, layers)
