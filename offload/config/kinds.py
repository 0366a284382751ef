"""The kinds of encoding that a model's matrices have, by bytes: a file's name tells one of them at most."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from offload.config.encodings import matrices
from offload.config.gguf import is_unpacked
from offload.config.gguf_header import Header
from offload.config.model import ModelConfig
from offload.config.next_token import head_of
from offload.config.quantisation import scheme_of
from offload.formats.encodings import ENCODINGS

_PLAIN = {"float32": ("F32", 32), "bfloat16": ("BF16", 16), "float16": ("F16", 16)}
_UNPACKED_BYTES = 2  # of a number


@dataclass(frozen=True)
class Kind:
    """The matrices of a model that are in one encoding. nbytes: as the checkpoint has them. unpacked: they are plain
    numbers once they are read, since this program has no such encoding."""

    name: str
    num_tensors: int
    num_numbers: int
    nbytes: int
    unpacked: bool = False

    @property
    def bits(self) -> float:
        """Bits a number."""
        return 8 * self.nbytes / self.num_numbers

    @property
    def held_bytes(self) -> int:
        """Bytes in memory; of plain numbers in 16 bits, if they are unpacked."""
        return _UNPACKED_BYTES * self.num_numbers if self.unpacked else self.nbytes


def kinds_of_header(header: Header) -> list[Kind]:
    """The kinds in a GGUF file, most bytes first."""
    return _grouped(
        Kind(each.kind, 1, math.prod(each.shape), each.nbytes, is_unpacked(each.kind))
        for each in header.tensors.values()
        if len(each.shape) > 1
    )


def kinds_of_config(config: ModelConfig) -> list[Kind]:
    """The kinds of a folder's matrices by its config, most bytes first. Blocks count as this program has them; of
    matrices that fit none only the codes count."""
    head = head_of(config)
    every = matrices(config) | (matrices(head) if head is not None else {})
    found = []
    for name, matrix in every.items():
        count = matrix.outputs * matrix.inputs
        scheme = None if config.quantisation is None else scheme_of(name, config.quantisation, config)
        if matrix.encoding:
            nbytes = matrix.outputs * ENCODINGS[matrix.encoding].row_bytes(matrix.inputs)
            found.append(Kind(matrix.encoding, 1, count, nbytes))
        elif scheme is not None:
            found.append(Kind(f"{scheme.packing}, {scheme.bits} bits", 1, count, count * scheme.bits // 8, True))
        else:
            plain, bits = _PLAIN[config.dtype]
            found.append(Kind(plain, 1, count, count * bits // 8))
    return _grouped(found)


def _grouped(found: Iterable[Kind]) -> list[Kind]:
    """The sums of those that have the same name."""
    sums: dict[str, Kind] = {}
    for each in found:
        so_far = sums.get(each.name, Kind(each.name, 0, 0, 0))
        sums[each.name] = Kind(
            each.name,
            so_far.num_tensors + each.num_tensors,
            so_far.num_numbers + each.num_numbers,
            so_far.nbytes + each.nbytes,
            each.unpacked,
        )
    return sorted(sums.values(), key=lambda kind: -kind.nbytes)
