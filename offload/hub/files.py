"""The files that make up a model: weights, config and tokenizer, chosen by known plain names. Code is never chosen.

GGUF files may be in folders of a repository, and are stored side by side.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from offload.config import modelopt
from offload.config.gguf_header import SUFFIX, part_names
from offload.errors import ModelError
from offload.hub.labels import is_model, label_of, stored_as, with_label
from offload.hub.names import pull_words
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


@dataclass(frozen=True)
class GgufModel:
    """A model of a repository in a GGUF file, or in the parts of one. label: of its quantisation, "" if its name tells
    none. is_alone: no other model of the repository has this label."""

    repository: str
    revision: str
    path: str
    label: str
    is_alone: bool
    parts: tuple[RemoteFile, ...]

    @property
    def named(self) -> dict[str, str]:
        """The label if that is enough to name it, or else the path, as `pull_words` takes them."""
        return {"label": self.label} if self.label and self.is_alone else {"file": self.path}

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def pull(self) -> tuple[str, ...]:
        """The arguments of the command that fetches it."""
        return tuple(pull_words(self.repository, self.revision, **self.named))

    @property
    def model(self) -> str:
        """The name for --model, once it is here."""
        label = self.named.get("label")
        return f"{self.repository}:{label}" if label else f"{self.repository}/{self.parts[0].name}"


def gguf_models(listing: Listing) -> list[GgufModel]:
    """The models of a repository in GGUF files that are whole, by their paths."""
    by_path = {file.name: file for file in listing.files if _is_plain(file.name)}
    whole = [path for path in sorted(by_path) if is_model(path) and by_path.keys() >= set(part_names(path))]
    labels = [label_of(path) for path in whole]
    return [
        GgufModel(
            listing.repository,
            listing.revision,
            path,
            label,
            labels.count(label) == 1,
            tuple(replace(by_path[part], name=stored_as(part), path=part) for part in part_names(path)),
        )
        for path, label in zip(whole, labels, strict=True)
    ]


def has_gguf_alone(listing: Listing) -> bool:
    """Whether the repository's weights are in GGUF files and in no others."""
    return weights_file(file.name for file in listing.files) is None and bool(gguf_models(listing))


def gguf_model(listing: Listing, path: str) -> GgufModel:
    """The model that the file `path` is, or is a part of. Raises ModelError if there is none, or not all of its
    parts."""
    for model in gguf_models(listing):
        if path in part_names(model.path):
            return model
    raise ModelError(f"{listing.repository} has no {path}, or not all of its parts; {_gguf_there(listing)}")


def labelled(listing: Listing, label: str) -> GgufModel:
    """The model whose quantisation has this label. Raises ModelError if there is none, or more than one."""
    every = {model.path: model for model in gguf_models(listing)}
    found = with_label([*every], label)
    if len(found) == 1:
        return every[found[0]]
    if found:
        raise ModelError(
            f"{listing.repository} has {len(found)} GGUF files in {label}; name one with --file: {', '.join(found)}"
        )
    labels = list(dict.fromkeys(model.label for model in every.values() if model.label))
    there = f"it has {', '.join(labels)}" if labels else _gguf_there(listing)
    raise ModelError(f"{listing.repository} has no GGUF file in {label}; {there}")


def _is_plain(path: str) -> bool:
    return all(map(_PLAIN_NAME.fullmatch, path.split("/")))


def _gguf_there(listing: Listing) -> str:
    names = [model.path for model in gguf_models(listing)]
    if not names:
        return "it has no GGUF files"
    more = ", ..." if len(names) > _NUM_NAMED else ""
    return f"name one of its GGUF files with --file: {', '.join(names[:_NUM_NAMED])}{more}"


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
