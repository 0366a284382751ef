"""The description of a model from its files: a folder with config.json, or a GGUF file."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from offload.config import modelopt
from offload.config.config_json import config_of
from offload.config.families.common import token_ids
from offload.config.gguf import gguf_config
from offload.config.gguf_header import is_gguf, read_header
from offload.config.model import ModelConfig
from offload.config.next_token import head_of
from offload.config.quantisation import KEYS, parted
from offload.errors import ModelError
from offload.fields import Fields
from offload.strict_json import read_json

ADAPTER_FILE = "adapter_config.json"


def read_config(path: str | Path) -> ModelConfig:
    """The config of the model in `path`: from `config.json` and the further eos ids and suppressed tokens of
    `generation_config.json`, or from a GGUF file's metadata. ModelError, also if the folder is or holds an adapter:
    its weights would change every token."""
    folder = Path(path)
    if is_gguf(folder):
        return gguf_config(read_header(folder))
    if (folder / ADAPTER_FILE).is_file():
        raise ModelError(
            f"{folder} holds {ADAPTER_FILE}, and adapters are not applied; merge it into its model (peft: "
            "merge_and_unload, then save_pretrained) and give the new folder, or remove it"
        )
    scales, names = stored_scales(folder), _tensor_names(folder)
    stacked = [name.decode() for name in _STACKED.findall(names)]
    scaled = {name.decode() for name in _SCALE.findall(names)} if names else None
    name = str(folder / "config.json")
    config = config_of(_described(folder), name=name, scales=scales, stacked=stacked, scaled=scaled)
    if config.next_token is not None and names and f'"{config.names.next_token.join}.weight"'.encode() not in names:
        config = replace(config, next_token=None)
    generation = folder / "generation_config.json"
    if not generation.is_file():
        return config
    fields = Fields(read_json(generation), str(generation))
    ends, suppressed = (token_ids(fields, name, config.vocab_size) for name in ("eos_token_id", "suppress_tokens"))
    return replace(config, eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + ends)), suppressed=suppressed)


def _described(folder: Path) -> dict[str, object]:
    """config.json's fields, with ModelOpt's description where that is in a file of its own alone."""
    path, own = folder / "config.json", folder / modelopt.FILE
    data = read_json(path)
    if not own.is_file() or parted(data, str(path))[1] is not None:
        return data
    stored = modelopt.from_file(read_json(own))
    return data if stored is None else data | {KEYS[0]: stored}


def has_next_token(model: Path) -> bool:
    """Whether a model has a next-token head. False where it cannot be read, which its reader reports."""
    try:
        return read_config(model).next_token is not None
    except ModelError:
        return False


def draft_config(draft: Path, target: Path) -> ModelConfig:
    """The config of the draft in `draft`: of the target's next-token head, if that is the target itself and has one.
    ModelError."""
    config = read_config(draft)
    alone = head_of(config) if draft.samefile(target) else None
    return alone or config


_SINGLE_FILE = "model.safetensors"
MAX_HEADER_BYTES = 1 << 24  # of one file of safetensors; all tensors of a 405B model take a hundredth of it
MAX_INDEX_BYTES = 1 << 26  # of 300,000 tensors, as 25,000 experts in NVFP4 have, it has half of that
_NAME = re.compile(r"\.(scales|weight_scale)$")
_SCALE = re.compile(rb'"([^"]*\.weight_scale(?:_2|_inv)?)"')
_STACKED = re.compile(rb'"([^"]*experts\.gate_up_proj)"')
_ENTRY = re.compile(rb'\.(?:scales|weight_scale)"\s*:\s*\{\s*"dtype"\s*:\s*"(F16|BF16|F32)"')


def stored_scales(folder: Path) -> str:
    """The dtype of the scales: F16, BF16 or F32; "" if the folder has no weights yet, or none with scales. Reading the
    weights checks all scales and reports faults of the files."""
    path = folder / _SINGLE_FILE
    try:
        named = {} if path.is_file() else _shards(folder)
        shards = dict.fromkeys(Path(named[name]).name for name in named if _NAME.search(name))
        for each in [folder / shard for shard in shards] or [path]:
            if each.is_file() and (found := _ENTRY.search(_header(each))):
                return found[1].decode()
    except (OSError, ModelError, ValueError):
        return ""
    return ""


def _tensor_names(folder: Path) -> bytes:
    """The names of the folder's tensors in quotes, among other text; empty if it has no weights yet. Many programs that
    convert or quantise a model leave out its next-token head, which config.json still names."""
    path = folder / _SINGLE_FILE
    try:
        return _header(path) if path.is_file() else b"".join(f'"{name}"'.encode() for name in _shards(folder))
    except (OSError, ModelError, ValueError):
        return b""


def _shards(folder: Path) -> dict[str, str]:
    """The file of each tensor of a checkpoint in several files; empty without an index."""
    index = folder / f"{_SINGLE_FILE}.index.json"
    if not index.is_file():
        return {}
    weight_map = read_json(index, max_bytes=MAX_INDEX_BYTES).get("weight_map")
    return {name: str(file) for name, file in weight_map.items()} if isinstance(weight_map, dict) else {}


def _header(path: Path) -> bytes:
    """The header of a safetensors file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return file.read(min(length, MAX_HEADER_BYTES))
