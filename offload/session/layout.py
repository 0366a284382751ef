"""The layout of a file of a page or of whole tensors, which follows only from shapes, dtypes and the set of packed
blocks.

A page's blocks are a layer's keys and its values, [H_kv, S, D] each, keys before values, first layer first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from offload.formats.layout import Packing

ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "int64": 8}
_SAFETENSORS_DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32", "int64": "I64"}
_ALIGNMENT = 8  # bytes; of the data in a safetensors file
_HALVES = ("keys", "values")
# The packing of files, independent of the cache's: other numbers need another format of the manifest.
_GROUP_TOKENS, _ESCAPES = 16, 1 / 64


@dataclass(frozen=True)
class PageFormat:
    """The format of a page: keys and values of `page_tokens` tokens in all layers."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_tokens: int
    dtype: str  # a key of ELEMENT_BYTES

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of one layer's keys and values, [2, H_kv, S, D]."""
        return (2, *self.block_shape)

    @property
    def block_shape(self) -> tuple[int, int, int]:
        """The shape of a block, [H_kv, S, D]."""
        return (self.num_kv_heads, self.page_tokens, self.head_dim)

    @property
    def block_bytes(self) -> int:
        return math.prod(self.block_shape) * ELEMENT_BYTES[self.dtype]

    @property
    def num_blocks(self) -> int:
        return 2 * self.num_layers

    @cached_property
    def packing(self) -> Packing | None:
        """The packing of a block. None: blocks of this format are never packed."""
        if self.dtype != "bf16":
            return None
        try:
            return Packing.of(math.prod(self.block_shape), _GROUP_TOKENS * self.head_dim, _ESCAPES)
        except ValueError:  # no packing with such groups
            return None

    @property
    def most_packed(self) -> str:
        """The value of `PageFile.packed` with every block packed, if blocks can be packed."""
        return "1" * self.num_blocks if self.packing else ""

    def allows(self, packed: str) -> bool:
        """Whether `packed` is a valid value of `PageFile.packed`."""
        return not packed or (len(packed) == len(self.most_packed) and set(packed) <= set("01") and "1" in packed)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the file of an unpacked page."""
        return self.file().nbytes

    def file(self, packed: str = "") -> PageFile:
        """The format of a page's file with these packed blocks."""
        return PageFile(self, packed)

    def count(self, num_tokens: int) -> int:
        """The number of pages that hold `num_tokens` tokens; 0 without layers of this kind."""
        return -(-num_tokens // self.page_tokens) if self.num_layers else 0


@dataclass(frozen=True)
class PageFile:
    """One page's file, as safetensors.

    packed: "1" for each packed block and "0" for each unpacked one; "" if no block is packed. In that case there is one
    tensor per layer, `layers.3` [2, H_kv, S, D]. Otherwise there is one per block, `layers.3.keys` and
    `layers.3.values`, [H_kv, S, D] or, packed, bytes. A reader compares the file's header with this one and parses
    nothing.
    """

    form: PageFormat
    packed: str = ""

    @property
    def are_packed(self) -> list[bool]:
        """Whether each block is packed."""
        return [flag == "1" for flag in self.packed or "0" * self.form.num_blocks]

    @property
    def block_bytes(self) -> list[int]:
        """The bytes of each block."""
        form = self.form
        packed = form.packing.nbytes if form.packing else 0
        return [packed if is_packed else form.block_bytes for is_packed in self.are_packed]

    @cached_property
    def header(self) -> bytes:
        return _header(self._tensors())

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + sum(self.block_bytes)

    def _tensors(self) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
        """The (name, dtype, shape, bytes) of each tensor."""
        form = self.form
        dtype = _SAFETENSORS_DTYPES[form.dtype]
        if not self.packed:
            yield from (
                (f"layers.{layer}", dtype, form.shape, 2 * form.block_bytes) for layer in range(form.num_layers)
            )
            return
        for block, (is_packed, nbytes) in enumerate(zip(self.are_packed, self.block_bytes, strict=True)):
            name = f"layers.{block // 2}.{_HALVES[block % 2]}"
            yield (name, "U8", (nbytes,), nbytes) if is_packed else (name, dtype, form.block_shape, nbytes)


@dataclass(frozen=True)
class TensorsFormat:
    """The format of a file of whole tensors, as safetensors. tensors: the name, the dtype, a key of ELEMENT_BYTES, and
    the shape of each."""

    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    packed: ClassVar[str] = ""
    most_packed: ClassVar[str] = ""

    @property
    def block_bytes(self) -> list[int]:
        """The bytes of each tensor."""
        return [math.prod(shape) * ELEMENT_BYTES[dtype] for _, dtype, shape in self.tensors]

    @cached_property
    def header(self) -> bytes:
        sizes = zip(self.tensors, self.block_bytes, strict=True)
        return _header([(name, _SAFETENSORS_DTYPES[dtype], shape, size) for (name, dtype, shape), size in sizes])

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + sum(self.block_bytes)

    def allows(self, packed: str) -> bool:
        return not packed

    def file(self, packed: str = "") -> TensorsFormat:
        """The format of the file, whose tensors are never packed."""
        return self


Format = PageFormat | TensorsFormat
NO_TENSORS = TensorsFormat(())  # the format of a part that a model does not have


def _header(tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> bytes:
    """The header of a safetensors file with the (name, dtype, shape, bytes) of each tensor."""
    entries, start = {}, 0
    for name, dtype, shape, nbytes in tensors:
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, start + nbytes)}
        start += nbytes
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
