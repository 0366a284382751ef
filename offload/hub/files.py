"""The files that make up a model: weights, config and tokenizer, chosen by known plain names. Code is never chosen."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from offload.config import modelopt
from offload.config.gguf_header import SUFFIX, part_names
from offload.errors import ModelError
from offload.hub.remote import Listing, RemoteFile
from offload.strict_json import MAX_JSON_BYTES
from offload.weights.safetensors_folder import INDEX_FILE, SINGLE_FILE, shards_by_tensor

CONFIG_FILE = "config.json"
BIN_FILE = "pytorch_model.bin"
BIN_INDEX_FILE = "pytorch_model.bin.index.json"
TEXT_FILES = (
    *(CONFIG_FILE, modelopt.FILE, "generation_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"),
)
_SHARD_SUFFIX = {INDEX_FILE: ".safetensors", BIN_INDEX_FILE: ".bin"}
_NUM_NAMED = 8  # files that a message names
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*", re.ASCII)


def gguf_parts(listing: Listing, name: str) -> list[RemoteFile]:
    """The GGUF file `name` and, of a model in several, the others. Raises ModelError if it is not in the repository's
    top folder."""
    found = [file for file in listing.files if file.name in part_names(name)]
    if len(found) == len(part_names(name)) and name.endswith(SUFFIX) and _PLAIN_NAME.fullmatch(name):
        return found
    raise ModelError(f"{listing.repository} has no {name}, or not all of its parts; {_gguf_there(listing)}")


def _gguf_there(listing: Listing) -> str:
    names = [file.name for file in listing.files if file.name.endswith(SUFFIX) and _PLAIN_NAME.fullmatch(file.name)]
    if not names:
        return "it has no GGUF files outside of folders"
    more = ", ..." if len(names) > _NUM_NAMED else ""
    return f"name one of its GGUF files with --file: {', '.join(sorted(names)[:_NUM_NAMED])}{more}"


def needed_first(listing: Listing, *, config_only: bool) -> list[RemoteFile]:
    """The files that a check of the model and `needed` read: config.json, a description of the quantisation beside it,
    and the index of the weights, if there are some.

    Raises ModelError where the repository holds no model of a known format.
    """
    config = listing.file(CONFIG_FILE)
    if config is None:
        if any(file.name.endswith(SUFFIX) for file in listing.files):
            raise ModelError(f"{listing.repository} has no config.json; {_gguf_there(listing)}")
        raise ModelError(f"{listing.repository} has no config.json; it is not a model that triforce can run")
    if config.num_bytes > MAX_JSON_BYTES:
        raise ModelError(f"{listing.repository}: config.json has {config.num_bytes} bytes, over {MAX_JSON_BYTES}")
    described = [config, *filter(None, [listing.file(modelopt.FILE)])]
    if config_only:
        return described
    weights = weights_file(file.name for file in listing.files)
    if weights is None:
        raise ModelError(f"{listing.repository} has neither safetensors nor pytorch_model.bin; {_gguf_there(listing)}")
    index = listing.file(weights) if weights in _SHARD_SUFFIX else None
    return [*described, *([index] if index else [])]


def needed(listing: Listing, folder: Path, *, config_only: bool) -> list[RemoteFile]:
    """All files to pull, weights last. `folder` holds the files of `needed_first`. Raises ModelError."""
    texts = [file for file in listing.files if file.name in TEXT_FILES]
    weights = weights_file(file.name for file in listing.files)
    if config_only or weights is None:
        return texts
    indexed = weights in _SHARD_SUFFIX
    names = [*([weights] if indexed else []), *shards(folder / weights)]
    found = {name: listing.file(name) for name in names}
    missing = [name for name, file in found.items() if file is None]
    if missing:
        raise ModelError(f"{listing.repository}: {weights} names {missing[0]}, which is not in the repository")
    return texts + [file for file in found.values() if file is not None]


def weights_file(names: Iterable[str]) -> str | None:
    """The file of the weights, or the index of their shards, among `names`. Safetensors come before pickles."""
    present = set(names)
    return next((name for name in (SINGLE_FILE, INDEX_FILE, BIN_FILE, BIN_INDEX_FILE) if name in present), None)


def shards(weights: Path) -> list[str]:
    """Names of the files that hold the weights, sorted: the shards in an index, or the single file. ModelError."""
    suffix = _SHARD_SUFFIX.get(weights.name)
    if suffix is None:
        return [weights.name]
    found = sorted(set(shards_by_tensor(weights).values()))
    for shard in found:
        if not _PLAIN_NAME.fullmatch(shard) or not shard.endswith(suffix):
            raise ModelError(f"{weights}: shard {shard!r} must be a plain name that ends in {suffix}")
    return found


def is_pickled(name: str) -> bool:
    return name.endswith(".bin")


def converted_name(shard: str, names: list[str]) -> str:
    """Name of the safetensors file that is made from the pickled `shard`, one of `names`."""
    if len(names) == 1:
        return SINGLE_FILE
    return f"model-{names.index(shard) + 1:05d}-of-{len(names):05d}.safetensors"
