"""Helpers for session tests: rows to save, an identity, and the files on the disk. No tests in here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from offload.config.model import ModelConfig
from offload.errors import SessionError
from offload.kv.kept import Kept
from offload.kv.parts import PagedPart
from offload.pages.tiles import TileShape, TileStore
from offload.session.identity import Identity
from offload.session.store import Store
from offload.transfer.memory import Memory

PAGE, LAYERS, HEADS, DIM = 4, 2, 2, 4
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
IDENTITY = Identity("model", "tokenizer", "rope", "fp32", LAYERS, HEADS, DIM, PAGE, model_name="tiny")
# Pages are packed from shapes like these on; those of IDENTITY are too small for it in any dtype.
PACKED = replace(IDENTITY, dtype="bf16", head_dim=16, page_tokens=32)


class Rows(PagedPart):
    """Rows computed from position and token alone, in tiles of two pages as in the full cache."""

    name = "rows"

    def __init__(
        self, tokens: Sequence[int] = (), dtype: str = "fp32", device: str = "cpu", *, dim: int = DIM, page: int = PAGE
    ) -> None:
        self.shape, self.num_layers, self.length = TileShape(HEADS, dim, page, 2, DTYPES[dtype]), LAYERS, 0
        self.store = TileStore(Memory(torch.device(device)), self.shape, LAYERS, None)
        self.put(tokens)

    @classmethod
    def of(cls, identity: Identity, tokens: Sequence[int] = (), device: str = "cpu") -> Rows:
        """Of that dtype and shape."""
        return cls(tokens, identity.dtype, device, dim=identity.head_dim, page=identity.page_tokens)

    def put(self, tokens: Sequence[int]) -> None:
        """Cache `tokens`, with garbage behind them as after a rejection."""
        self.reserve(len(tokens) + 3)
        for position, token in enumerate([*tokens, 9991, 9992, 9993]):
            rows = _computed(position, token, self.shape.head_dim)
            number, within = divmod(position, self.shape.page_tokens)
            for layer in range(LAYERS):
                self.page(layer, number)[:, :, within] = rows[layer]
        self.length = len(tokens)

    def reserve(self, num_tokens: int) -> None:
        self.store.grow(num_tokens)

    def page(self, layer: int, number: int) -> Tensor:
        index, within = divmod(number, self.shape.num_pages)
        return self.store.home(layer, index)[:, within]

    def page_of_all(self, number: int) -> list[Tensor]:
        return [self.page(layer, number) for layer in range(self.num_layers)]

    page_to_fill = page_of_all

    def page_filled(self, number: int) -> None: ...

    def layers_of(self, whole: ModelConfig) -> Sequence[int]:
        return range(LAYERS)

    def restored(self, length: int) -> None:
        self.length = length

    truncate = restored


@cache
def _computed(position: int, token: int, dim: int) -> Tensor:
    """A row of every layer, [LAYERS, 2, HEADS, dim]."""
    generator = torch.Generator().manual_seed(10_000 * position + token)
    return torch.randn(LAYERS, 2, HEADS, dim, generator=generator)


def bits(rows: PagedPart) -> bytes:
    """The bits of all cached rows, in the order of page, layer, keys or values, head."""
    size = rows.shape.page_tokens
    pages = [rows.page_of_all(number) for number in range(-(-rows.length // size))]
    cut = [[layer[:, :, : rows.length - number * size] for layer in layers] for number, layers in enumerate(pages)]
    return b"".join(part.cpu().contiguous().view(torch.uint8).numpy().tobytes() for layers in cut for part in layers)


def save(
    path: Path, tokens: Sequence[int], unchanged: int = 0, *, identity: Identity = IDENTITY, **extra: object
) -> None:
    """Open, save rows of `tokens`, close."""
    with Store.open(path, identity) as store:
        store.save(Kept(Rows.of(identity, tokens)), tokens, capacity=100, extra=extra, unchanged=unchanged)


def restore(path: Path, identity: Identity = IDENTITY) -> tuple[tuple[int, ...], bytes]:
    """(tokens, bits) as a reader loads them. On a SessionError, checks that the rows are empty and finite."""
    rows = Rows.of(identity, range(2 * identity.page_tokens + 1))
    with Store.open(path, identity, read_only=True) as store:
        try:
            store.load(Kept(rows), len(store.tokens))
        except SessionError:
            assert rows.length == 0
            assert all(rows.page(layer, page).isfinite().all() for layer in range(LAYERS) for page in range(2))
            raise
        return store.tokens, bits(rows)


def saved(tokens: Sequence[int], identity: Identity = IDENTITY) -> tuple[tuple[int, ...], bytes]:
    """The expected result of `restore`."""
    return tuple(tokens), bits(Rows.of(identity, tokens))


def identity_of(rows: PagedPart, dtype: str) -> Identity:
    shape = {name: getattr(rows.shape, name) for name in ("num_kv_heads", "head_dim", "page_tokens")}
    return replace(IDENTITY, dtype=dtype, num_layers=rows.num_layers, **shape)


def page_files(path: Path) -> list[Path]:
    return sorted(path.glob("page-*"))
