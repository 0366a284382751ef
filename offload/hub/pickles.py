"""One pickled shard (pytorch_model*.bin) to one safetensors file with the same bits, read again and compared.

Only tensors are unpickled (weights_only): nothing that a file brings along is run. Files are memory-mapped, so only the
page cache grows; a shard in torch's format of before 2020 is read into memory.
"""

from __future__ import annotations

import os
import pickle
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
from offload.transfer.checkpoint import COMPUTES_NOTHING

SOURCE_KEY = "triforce_source"  # in a file's metadata: what it was made of
_HEAD, _EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"


def convert_shard(shard: Path, target: Path, *, source: str, tied: bool) -> None:
    """Make `target`, whole or not at all, of the tensors in `shard`; ModelError, OSError.

    source: kept in the file, for `source_of`. tied: a head that is the embeddings, as the same memory, is left out.
    What computes nothing is left out too. Tensors that share memory become tensors of their own.
    """
    tensors = _separate(_wanted(_unpickled(shard), tied=tied))
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        save_file(tensors, temporary, metadata={"format": "pt", SOURCE_KEY: source})
        shutil.copymode(shard, temporary)  # safetensors writes for its owner alone
        _verify(temporary, tensors)
        os.replace(temporary, target)
    except SafetensorError as error:  # a full disk, too
        raise TriforceError(f"{target} cannot be written ({error}); look at the disk and try again") from error
    finally:
        temporary.unlink(missing_ok=True)


def source_of(path: Path) -> str:
    """What the safetensors file was made of, as `convert_shard` was told; "" for any other file, or none."""
    if not path.is_file():
        return ""
    try:
        with safe_open(str(path), framework="pt") as file:
            return str((file.metadata() or {}).get(SOURCE_KEY, ""))
    except (OSError, SafetensorError):
        return ""


def weight_map(paths: Iterable[Path]) -> dict[str, str]:
    """Tensor name -> file name over several files. ModelError where two have the same tensor."""
    found: dict[str, str] = {}
    for path in paths:
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                if name in found:
                    raise ModelError(f"{name} is in {found[name]} and in {path.name}; which one counts is not said")
                found[name] = path.name
    return found


def _unpickled(shard: Path) -> dict[str, Tensor]:
    try:
        state = torch.load(shard, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(shard))
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"{shard.name} holds more than tensors, or is damaged; nothing of it was run. Fetch it again, or use a "
            "repository with safetensors"
        ) from error
    except (RuntimeError, ValueError, EOFError, KeyError) as error:
        reason = (str(error).splitlines() or ["nothing"])[0]
        raise ModelError(f"{shard.name} is no checkpoint that torch reads ({reason}); fetch it again") from error
    if not isinstance(state, Mapping) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise ModelError(f"{shard.name} does not hold tensors by name; only a model's state_dict is converted")
    return {str(name): tensor for name, tensor in state.items()}


def _wanted(tensors: Mapping[str, Tensor], *, tied: bool) -> dict[str, Tensor]:
    kept = {
        name: tensor.detach()
        for name, tensor in tensors.items()
        if not any(fnmatchcase(name, pattern) for pattern in COMPUTES_NOTHING)
    }
    if tied and _HEAD in kept and _EMBEDDINGS in kept and _memory(kept[_HEAD]) == _memory(kept[_EMBEDDINGS]):
        del kept[_HEAD]
    return kept


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous, and no two in the same memory: safetensors stores each by itself."""
    seen: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        address = _memory(tensor)
        separate[name] = tensor.clone().contiguous() if address in seen else tensor.contiguous()
        seen.add(address)
    return separate


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _verify(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """ModelError unless the file holds these names, shapes, dtypes and bytes. One tensor at a time is looked at."""
    with safe_open(str(path), framework="pt") as file:
        if set(file.keys()) != tensors.keys():
            raise ModelError(f"{path.name} was not written as it should be; is the disk sound?")
        for name, tensor in tensors.items():
            written: Tensor = file.get_tensor(name)
            same = (written.dtype, written.shape) == (tensor.dtype, tensor.shape)
            if not same or not torch.equal(_bits(written), _bits(tensor)):
                raise ModelError(f"{path.name}: {name} was not written as it should be; is the disk sound?")


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
