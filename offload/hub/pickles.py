"""Convert a pickled shard (pytorch_model*.bin) to a safetensors file with the same bits, then read it back and compare.

Only tensors are unpickled (weights_only); code in the file is never run, which takes a torch without known holes. Files
are memory-mapped, so only the page cache grows; a shard in torch's format of before 2020 is read into memory.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from offload.errors import ModelError, TriforceError
from offload.interrupts import poll
from offload.weights.checkpoint import COMPUTES_NOTHING, EMBEDDINGS, HEAD

_SAFE_TORCH = (2, 10)  # the first whose weights_only no file can break (CVE-2026-24747)
SOURCE_KEY = "triforce_source"  # metadata key: digest or name of the converted file


def check_torch(name: str) -> None:
    """Raises ModelError where this torch is too old to read the pickled file `name` safely."""
    version = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
    if version < _SAFE_TORCH:
        safe = ".".join(map(str, _SAFE_TORCH))
        raise ModelError(
            f"{name} is pickled, and a crafted one can take over a program with torch {torch.__version__} "
            f"(CVE-2026-24747); install torch {safe} or later, or take a repository with safetensors"
        )


def convert_shard(shard: Path, target: Path, *, source: str, tied: bool) -> None:
    """Write the tensors in `shard` to `target`, which appears only when it is complete. ModelError, OSError.

    source: stored in the file, for `source_of`. tied: leave out an output head that shares memory with the embeddings.
    Tensors that no computation uses are left out too. Tensors that share memory are written separately.
    """
    tensors = _separate(_wanted(_unpickled(shard), tied=tied))
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        save_file(tensors, temporary, metadata={"format": "pt", SOURCE_KEY: source})
        shutil.copymode(shard, temporary)  # safetensors creates files that only their owner can read
        _verify(temporary, tensors)
        os.replace(temporary, target)
    except SafetensorError as error:  # also raised when the disk is full
        raise TriforceError(f"{target} cannot be written ({error}); check the disk and try again") from error
    finally:
        temporary.unlink(missing_ok=True)


def source_of(path: Path) -> str:
    """The `source` that `convert_shard` stored in the safetensors file `path`; "" if there is none."""
    if not path.is_file():
        return ""
    try:
        with safe_open(str(path), framework="pt") as file:
            return str((file.metadata() or {}).get(SOURCE_KEY, ""))
    except (OSError, SafetensorError):
        return ""


def weight_map(paths: Iterable[Path]) -> dict[str, str]:
    """Tensor name -> file name over several safetensors files. ModelError if a tensor is in two of them."""
    found: dict[str, str] = {}
    for path in paths:
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                if name in found:
                    raise ModelError(f"{name} is in {found[name]} and in {path.name}; it must be in one file only")
                found[name] = path.name
    return found


def _unpickled(shard: Path) -> dict[str, Tensor]:
    check_torch(shard.name)
    try:
        state = torch.load(shard, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(shard))
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"{shard.name} holds more than tensors, or is damaged; no code in it was run. Fetch it again, or use a "
            "repository with safetensors"
        ) from error
    except (RuntimeError, ValueError, EOFError, KeyError) as error:
        reason = (str(error).splitlines() or ["nothing"])[0]
        raise ModelError(f"{shard.name} is not a checkpoint that torch reads ({reason}); fetch it again") from error
    if not isinstance(state, Mapping) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise ModelError(f"{shard.name} does not hold tensors by name; only a model's state_dict is converted")
    return {str(name): tensor for name, tensor in state.items()}


def _wanted(tensors: Mapping[str, Tensor], *, tied: bool) -> dict[str, Tensor]:
    kept = {
        name: tensor.detach()
        for name, tensor in tensors.items()
        if not any(fnmatchcase(name, pattern) for pattern in COMPUTES_NOTHING)
    }
    if tied and HEAD in kept and EMBEDDINGS in kept and _address(kept[HEAD]) == _address(kept[EMBEDDINGS]):
        del kept[HEAD]
    return kept


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors made contiguous, no two of them in the same memory, as safetensors requires."""
    seen: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        address = _address(tensor)
        separate[name] = tensor.clone().contiguous() if address in seen else tensor.contiguous()
        seen.add(address)
    return separate


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _verify(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raises ModelError unless the file holds these names, shapes, dtypes and bytes. Reads one tensor at a time."""
    with safe_open(str(path), framework="pt") as file:
        if set(file.keys()) != tensors.keys():
            raise ModelError(f"{path.name} was not written correctly; check the disk")
        for name, tensor in tensors.items():
            poll()
            written: Tensor = file.get_tensor(name)
            same = (written.dtype, written.shape) == (tensor.dtype, tensor.shape)
            if not same or not torch.equal(_bits(written), _bits(tensor)):
                raise ModelError(f"{path.name}: {name} was not written correctly; check the disk")


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
