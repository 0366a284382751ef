"""Mapped tensors of a GGUF file, by this program's names."""

from __future__ import annotations

import importlib.util
import math
import mmap
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from offload.config.gguf import PLAIN, gguf_config, names_of, nvfp4_scales
from offload.config.gguf_header import TensorInfo, read_header
from offload.errors import ModelError, unreadable
from offload.formats.encodings import ENCODINGS
from offload.transfer.direct_file import FileState
from offload.weights.entry import Entry

_NVFP4 = ENCODINGS["NVFP4"]
_NO_NUMBER = 127  # NaN in e4m3
PLAIN_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class MappedFile:
    """A memory-mapped file, a `TensorFile`. It is unmapped with its last tensor."""

    def __init__(self, path: Path, tensors: dict[str, TensorInfo]) -> None:
        """tensors: all tensors of the file. Raises ModelError."""
        self._tensors = tensors
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                self.state = FileState.of(file.fileno())
        except (OSError, ValueError) as error:
            raise unreadable(path, error if isinstance(error, OSError) else OSError(str(error))) from error
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about read-only memory
            self._bytes: Tensor | None = torch.frombuffer(self._map, dtype=torch.uint8)

    def extent(self, name: str) -> tuple[int, int]:
        """The first byte of a tensor in the file, and the number of its bytes."""
        info = self._tensors[name]
        return info.start, info.nbytes

    def forget(self, name: str) -> None:
        """Release the memory pages of a tensor that was copied, so that they no longer count as this process's memory.
        They are read again on the next access."""
        info, page = self._tensors[name], mmap.PAGESIZE
        first, stop = -(-info.start // page) * page, (info.start + info.nbytes) // page * page
        if stop > first and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, stop - first)

    def get_tensor(self, name: str) -> Tensor:
        """The tensor, if it has plain numbers; otherwise its rows, uint8 [outputs, bytes]."""
        assert self._bytes is not None, "closed"
        info = self._tensors[name]
        data = self._bytes[info.start : info.start + info.nbytes]
        if info.kind not in PLAIN:
            return data.view(*info.shape[:-1], -1)
        dtype = PLAIN_DTYPES[info.kind]
        if info.start % dtype.itemsize:
            data = data.clone()
        return data.view(dtype).view(info.shape)

    def close(self) -> None:
        self._bytes = None


@dataclass(frozen=True)
class Nvfp4File:
    """A `TensorFile` of a matrix in NVFP4, whose rows get their scale as they are read. ggml reads no sign of a group's
    scale, and 127 as 0. scales: of the matrix, fp32 [1], or of each of its experts, [experts]."""

    file: MappedFile
    info: TensorInfo
    scales: Tensor

    def get_tensor(self, name: str) -> Tensor:
        """All rows, uint8 [rows, bytes]. Memory: the result and a few MiB."""
        return self.rows(range(math.prod(self.info.shape[:-1])))

    def rows(self, rows: range) -> Tensor:
        """Some rows, uint8 [n, bytes]; only their part of the file is read. ModelError for a scale that no e4m3 is."""
        stored = self.file.get_tensor(self.info.name).flatten(0, -2)
        chosen = stored[rows.start : rows.stop : rows.step].unflatten(1, (-1, _NVFP4.nbytes))
        out = torch.empty(len(rows), _NVFP4.row_bytes(self.info.shape[-1]), dtype=torch.uint8)
        blocks = out[:, : -_NVFP4.tail].unflatten(1, (-1, _NVFP4.nbytes)).copy_(chosen)
        groups = blocks[..., : _NVFP4.codes.at]
        if (groups == _NO_NUMBER + 128).any():
            raise ModelError(f"{self.info.path}: {self.info.name} has a scale of 255; download it again")
        groups &= _NO_NUMBER
        groups.masked_fill_(groups == _NO_NUMBER, 0)
        self.file.forget(self.info.name)
        experts = torch.arange(rows.start, rows.stop, rows.step) * len(self.scales) // len(stored)
        out[:, -_NVFP4.tail :] = self.scales[experts, None].view(torch.uint8)
        return out


def _scales(info: TensorInfo, scale: TensorInfo, file: MappedFile) -> Tensor:
    """The scales of a matrix in NVFP4, fp32 [1], or [experts] of a stack."""
    experts = info.shape[0] if len(info.shape) == 3 else 1
    if scale.kind != "F32" or scale.shape not in ((1,), (experts,)):
        raise ModelError(
            f"{scale.path}: {scale.name} is {list(scale.shape)} in {scale.kind}; it must be [1] in F32"
            + (f", or [{experts}] for the experts" if experts > 1 else "")
        )
    return file.get_tensor(scale.name).clone()


def open_model(path: Path, opened: ExitStack) -> Iterator[tuple[str, Entry]]:
    """Every tensor of the model by its name, except tensors that belong to the config or to another one. opened: gets
    the files. Raises ModelError."""
    header = read_header(path)
    config = gguf_config(header)
    names = names_of(header, config)
    gate, states = f".{config.names.experts.network_gate}.weight", config.names.recurrence
    vectors = tuple(f".{name}" for name in (states.decay, states.skip, f"{states.norm}.weight") if name)

    def shaped(info: TensorInfo, name: str) -> TensorInfo:
        if name.endswith(gate):
            return as_row(info)
        return as_vector(info) if name.endswith(vectors) else info

    tensors = {stored: shaped(info, names.get(stored, "")) for stored, info in header.tensors.items()}
    files = {
        part: MappedFile(part, {stored: info for stored, info in tensors.items() if info.path == part})
        for part in header.files
    }
    for file in files.values():
        opened.callback(file.close)
    scales = {matrix: name for name, matrix in nvfp4_scales(header, config).items() if not name.endswith("input_scale")}
    for stored, name in names.items():
        info, file = tensors[stored], files[tensors[stored].path]
        if len(info.shape) == 1 and info.kind not in PLAIN:
            raise ModelError(f"{info.path}: {stored} is a vector in {info.kind}; only matrices can be in blocks")
        if info.kind == _NVFP4.name:
            scale = tensors.get(scales.get(stored, ""))
            own = Nvfp4File(file, info, torch.ones(1) if scale is None else _scales(info, scale, files[scale.path]))
            yield name, Entry(own, info.path, file.state, stored, info.shape, info.kind, rows=own.rows)
        else:
            yield name, Entry(file, info.path, file.state, stored, info.shape, info.kind, unpacker(info))


def as_row(info: TensorInfo) -> TensorInfo:
    """A matrix of one row where llama.cpp has a vector."""
    return replace(info, shape=(1, *info.shape)) if len(info.shape) == 1 else info


def as_vector(info: TensorInfo) -> TensorInfo:
    """A vector where llama.cpp has a matrix of its heads or groups."""
    return replace(info, shape=(math.prod(info.shape),))


def unpacker(info: TensorInfo) -> Callable[[Tensor], Tensor] | None:
    """The function that unpacks rows, uint8 [n, bytes] -> fp32 [n, inputs], by the package gguf; None for plain numbers
    and for blocks that this program decodes itself. The function raises ModelError if the package is not installed or
    does not support the type. Temporary memory: about 30 bytes a number."""
    if info.kind in ENCODINGS or info.kind in PLAIN or info.kind in ("I8", "I16", "I32", "I64"):
        return None

    def unpack(rows: Tensor) -> Tensor:
        if importlib.util.find_spec("gguf") is None:
            raise ModelError(f"{info.path}: {info.name} is in {info.kind}, which needs: pip install 'triforce[gguf]'")
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        try:
            numbers = dequantize(rows.numpy(), GGMLQuantizationType[info.kind])
        except (KeyError, NotImplementedError) as error:
            raise ModelError(
                f"{info.path}: {info.name} is in {info.kind}, which the package gguf does not unpack; install a newer "
                "one, or fetch the model in another quantisation"
            ) from error
        return torch.from_numpy(numbers)

    return unpack
