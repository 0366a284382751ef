"""The tensors of a folder of safetensors: one file, or the shards that an index names. Sizes of headers and index are
limited."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from offload.config.gguf_header import TensorInfo
from offload.config.reading import MAX_HEADER_BYTES, MAX_INDEX_BYTES
from offload.errors import ModelError, shell_line
from offload.fields import TEXT, Fields, Kind, list_of
from offload.strict_json import read_json
from offload.transfer.direct_file import FileState
from offload.weights.entry import STORED_DTYPES, Entry, TensorFile
from offload.weights.file_rows import extents
from offload.weights.gguf_file import MappedFile

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_DTYPES = {
    **STORED_DTYPES, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
# Shard names have no separator, so they cannot point outside the folder. A file may be a symbolic link to the outside
# (every file of a Hugging Face cache is one): the author of that link could have put the bytes there as well.
_SHARD_NAME = re.compile(r"[^/\\:\x00]+\.safetensors")


def read_entries(folder: Path, files: ExitStack) -> dict[str, Entry]:
    """Open every file of the checkpoint into `files` and list its tensors. The index names the shards, and the shards'
    headers list their tensors."""
    index = _read_index(folder)
    entries: dict[str, Entry] = {}
    for path in [folder / SINGLE_FILE] if index is None else _shard_paths(folder, set(index.values())):
        for name, entry in _open_file(path, files).items():
            if name in entries and not _same(entries[name], entry):
                raise ModelError(
                    f"{path}: {name} is in {entries[name].path.name} as well, with other values; remove the older one"
                )
            entries[name] = entry
    return entries


def _same(one: Entry, other: Entry) -> bool:
    """Whether two entries hold the same tensor, as when tied weights were saved in two shards."""
    if one.dtype != other.dtype or one.dtype not in STORED_DTYPES:
        return False
    return torch.equal(*(entry.file.get_tensor(entry.stored_name) for entry in (one, other)))


def _read_index(folder: Path) -> dict[str, str] | None:
    """The map from tensor to shard names; None if the folder holds a single file."""
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise ModelError(f"{folder} {what}; give the path of a downloaded model folder (nothing is downloaded)")
    single, sharded = (folder / SINGLE_FILE).is_file(), (folder / INDEX_FILE).is_file()
    if single and sharded:
        raise ModelError(f"{folder} holds both {SINGLE_FILE} and {INDEX_FILE}; remove the one that is out of date")
    if not single and not sharded:
        if any(folder.glob("pytorch_model*.bin")):
            raise ModelError(
                f"{folder} holds only pytorch_model*.bin; safetensors is required, so convert it once: "
                f"{shell_line('triforce', 'convert', str(folder))}"
            )
        raise ModelError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; is the download complete?")
    if single:
        return None
    return shards_by_tensor(folder / INDEX_FILE)


def shards_by_tensor(index: Path) -> dict[str, str]:
    """The map from tensor to file names in an index. ModelError."""
    files = Kind(
        "an object of file names by names of tensors; download it again",
        lambda value: isinstance(value, dict) and value != {} and list_of(TEXT).fits([*value.values()]),
    )
    found: dict[str, str] = Fields(read_json(index, max_bytes=MAX_INDEX_BYTES), str(index)).get("weight_map", files)
    return found


def _shard_paths(folder: Path, shards: Iterable[str]) -> list[Path]:
    for shard in sorted(shards):
        if not _SHARD_NAME.fullmatch(shard):
            raise ModelError(f"{folder / INDEX_FILE}: shard {shard!r} must be a plain name that ends in .safetensors")
        if not (folder / shard).is_file():
            raise ModelError(f"{folder}: shard {shard} is missing; the download is not complete")
    return [folder / shard for shard in sorted(shards)]


def _open_file(path: Path, files: ExitStack) -> dict[str, Entry]:
    _check_header_length(path)
    state = FileState.of(path)  # before it is mapped: one that is replaced in between is told from it
    try:
        with safe_open(str(path), framework="numpy") as checked:
            slices = {name: checked.get_slice(name) for name in checked.keys()}  # noqa: SIM118 (not a mapping)
            kinds = {name: (tuple(part.get_shape()), str(part.get_dtype())) for name, part in slices.items()}
        file = _mapped(path, state, kinds, files)
        return {name: Entry(file, path, state, name, *kind) for name, kind in kinds.items()}
    except SafetensorError as error:
        raise ModelError(f"{path} is not a whole safetensors file ({error}); download it again") from error


def _mapped(
    path: Path, state: FileState, kinds: Mapping[str, tuple[tuple[int, ...], str]], files: ExitStack
) -> TensorFile:
    """The file, whose header is checked. kinds: shapes and dtype codes of its tensors."""
    try:
        return files.enter_context(safe_open(str(path), framework="pt", device="cpu"))  # type: ignore[no-any-return]
    except RuntimeError:  # it maps a file for writing, too, for which Linux gives no more than there is of memory
        places = extents(path, state)
        file = _ReadOnly(path, {name: TensorInfo(name, path, *kind, *places[name]) for name, kind in kinds.items()})
        files.callback(file.close)
        return file


class _ReadOnly(MappedFile):
    """A file of safetensors that is mapped for reading alone. A `TensorFile`."""

    def get_tensor(self, name: str) -> Tensor:
        assert self._bytes is not None, "closed"
        info = self._tensors[name]
        data, dtype = self._bytes[info.start : info.start + info.nbytes], _DTYPES[info.kind]
        aligned = data.clone() if info.start % dtype.itemsize else data
        return aligned.view(dtype).view(info.shape)


def _check_header_length(path: Path) -> None:
    """Check the header's length, which the first 8 bytes give, so that a huge number costs no memory."""
    with path.open("rb") as file:
        prefix, file_bytes = file.read(8), path.stat().st_size
    header_bytes = int.from_bytes(prefix, "little")
    limit = min(MAX_HEADER_BYTES, file_bytes - 8)
    if len(prefix) < 8 or header_bytes > limit:
        raise ModelError(
            f"{path}: its header claims {header_bytes} bytes, at most {max(limit, 0)} are possible in a file of "
            f"{file_bytes} bytes; it is truncated or no safetensors file, download it again"
        )
