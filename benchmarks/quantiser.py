"""ggml's own quantiser, in the shared library of the wheel xllamacpp, and the importance matrix it takes."""

from __future__ import annotations

import offload  # noqa: F401  # isort: skip  # before torch, which reads its threads' wait policy once

import ctypes
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import quantize
from torch import Tensor, nn
from transformers import AutoModel

from offload.errors import TriforceError

Numbers = np.ndarray[Any, np.dtype[np.float32]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

PIECE = 1 << 20  # numbers of a matrix that a thread takes at a time
_LIBRARY = (
    "import importlib.util, pathlib; found = importlib.util.find_spec('xllamacpp');"
    "print(next(pathlib.Path(found.origin).parent.glob('*.so')))"
)


class Quantiser:
    """The quantiser in the wheel of the Python `python`, which has to be of this Python's version."""

    def __init__(self, python: str) -> None:
        """Raises TriforceError where the library cannot be loaded."""
        try:
            path = subprocess.run([python, "-c", _LIBRARY], check=True, capture_output=True, text=True).stdout.strip()
            self._ggml = ctypes.CDLL(path)
        except (OSError, subprocess.CalledProcessError) as error:
            raise TriforceError(f"the wheel's library does not load in this Python: {error}") from error
        self._ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
        self._ggml.ggml_quantize_requires_imatrix.restype = ctypes.c_bool

    def quantise(self, matrix: Numbers, kind: Kind, importance: Numbers | None) -> Bytes:
        """matrix [O, I], importance [I] -> its blocks [O, bytes of a row]. Raises TriforceError where the kind needs an
        importance and there is none."""
        if kind in (Kind.F32, Kind.F16):
            return quantize(matrix, kind)
        if importance is None and self._ggml.ggml_quantize_requires_imatrix(int(kind)):
            raise TriforceError(f"{kind.name} needs an importance matrix, and a matrix has none")
        numbers, size = gguf.GGML_QUANT_SIZES[kind]
        matrix = np.ascontiguousarray(matrix)
        blocks = np.empty((len(matrix), matrix.shape[1] // numbers * size), np.uint8)
        step = max(PIECE // matrix.shape[1], 1)
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            piece = partial(self._piece, matrix, kind, importance, blocks, step)
            list(threads.map(piece, range(0, len(matrix), step)))
        return blocks

    def _piece(
        self, matrix: Numbers, kind: Kind, importance: Numbers | None, blocks: Bytes, step: int, start: int
    ) -> None:
        """Quantise `step` rows from `start` on. ctypes lets other threads run meanwhile."""
        rows = min(step, len(matrix) - start)
        written = self._ggml.ggml_quantize_chunk(
            ctypes.c_int(int(kind)),
            ctypes.c_void_p(matrix[start:].ctypes.data),
            ctypes.c_void_p(blocks[start:].ctypes.data),
            ctypes.c_int64(0),
            ctypes.c_int64(rows),
            ctypes.c_int64(matrix.shape[1]),
            ctypes.c_void_p(None if importance is None else importance.ctypes.data),
        )
        assert written == rows * blocks.shape[1], (kind, written)


def importance_matrix(folder: Path, chunks: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """The means of the squared inputs of each matrix in the layers, by the matrix' name, over texts of tokens: what
    llama.cpp's imatrix finds. transformers runs the model in fp32, and needs its memory."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    sums: dict[str, Tensor] = {}

    def add(name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        rows = inputs[0].flatten(0, -2)
        sums[name] = sums.get(name, torch.zeros(rows.shape[-1])) + rows.square().sum(0)

    for name, module in model.layers.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(partial(add, f"model.layers.{name}.weight"))
    with torch.inference_mode():
        for chunk in chunks:
            model(torch.tensor([list(chunk)]), use_cache=False)
    return {name: total / sum(map(len, chunks)) for name, total in sums.items()}
