"""The library of stored models: how complete each is, what it needs to run, and the folder of a name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from offload.config.gguf_header import SUFFIX, is_gguf, models_in, parts
from offload.config.model import ModelConfig
from offload.config.reading import read_config
from offload.errors import ModelError, unreadable
from offload.fields import TEXT, Fields, Kind, list_of
from offload.files import address_in, expanded, write_whole
from offload.hub.advice import advice
from offload.hub.labels import with_label
from offload.hub.names import (
    ALIASES,
    LOCAL,
    Alias,
    alias_of,
    id_of,
    is_id,
    model_folder,
    models_folder,
    pull_command,
    short_name,
    tagged,
)
from offload.plan.options import Options
from offload.plan.request import Request
from offload.speed.hardware import Hardware
from offload.strict_json import read_json

STAGING = ".pull"  # folder inside a model's folder: the files that a pull has fetched so far
LOCK = "lock"  # inside STAGING: held by a pull
MOVING = "moving"  # marker inside STAGING: files are being moved into place
ORIGIN_FILE = "triforce.json"
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

State = Literal["absent", "broken off", "config only", "whole"]


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The source of a model's files. files: the names of the files that `pull` or `convert` wrote."""

    source: str  # OWNER/NAME on the hub, or the folder that was converted
    commit: str = ""
    license: str = ""
    files: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> Origin | None:
        """Read the file that `write` wrote; None if there is no such file. ModelError."""
        path = folder / ORIGIN_FILE
        if not path.is_file():
            return None
        text = Kind("a text; remove the file", TEXT.fits)
        found = Fields(read_json(path), str(path))
        texts = {key: found.get(key, text) for key in ("source", "commit", "license")}
        return cls(**texts, files=tuple(found.get("files", list_of(text, "a list of names; remove the file"))))

    def write(self, folder: Path) -> None:
        """Write the origin into `folder`. Raises OSError."""
        write_whole(folder / ORIGIN_FILE, json.dumps(asdict(self), indent=1) + "\n")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A stored model. num_bytes: of all its files. problem: why it cannot be used; config may then be None."""

    name: str
    folder: Path
    num_bytes: int
    draft: str = ""
    state: State = "whole"
    origin: Origin | None = None
    config: ModelConfig | None = None
    problem: str = ""

    @property
    def kv_bytes_per_token(self) -> int | None:
        """Bytes of keys and values per token over all layers, in the dtype that config.json names."""
        if self.config is None:
            return None
        return self.config.kv_bytes_per_token(_DTYPE_BYTES[self.config.dtype])


def state_of(folder: Path) -> State:
    """The state of a model's folder. Files of an interrupted pull do not count. Raises ModelError."""
    try:
        return _state_of(folder)
    except OSError as error:
        raise unreadable(folder, error) from error


def _state_of(folder: Path) -> State:
    if (folder / STAGING / MOVING).exists():
        return "broken off"
    if any(folder.glob("*.safetensors")) or any(folder.glob(f"*{SUFFIX}")):
        return "whole"
    if (folder / "config.json").is_file():
        return "config only"
    return "broken off" if (folder / STAGING).exists() else "absent"


def locate(name: str, *, weights: bool = True) -> Path:
    """The folder that `name` stands for: a folder or a GGUF file, or else an alias, OWNER/NAME or OWNER/NAME:LABEL of a
    stored model.

    weights: config.json alone is not enough. Raises ModelError, which names the command to run.
    """
    if address := address_in(name):
        raise ModelError(
            f"{address} is an address and nothing is fetched from it; 'triforce pull OWNER/NAME' fetches a model from "
            "the hub"
        )
    folder = expanded(name)
    try:
        instead = advice(folder)
    except OSError as error:
        raise unreadable(folder, error) from error
    if instead:
        raise ModelError(instead)
    if folder.is_dir() or (folder.is_file() and is_gguf(folder)):
        return folder
    of, files = _files_named(name)
    if len(files) > 1:
        raise ModelError(f"{name} is {len(files)} GGUF files; name one: {', '.join(f'{of}/{f.name}' for f in files)}")
    if files:
        return files[0]
    model_id = id_of(name)
    if parted := tagged(name):
        raise ModelError(f"{name} is not here; {pull_command(parted[0], label=parted[1])} fetches it")
    if name.endswith(SUFFIX) and not (model_id and is_here(model_id)):
        raise ModelError(f"{name} does not exist; 'triforce models' lists the models that are here, GGUF files too")
    if model_id is None:
        raise ModelError(
            f"{name} is not a folder and not a model's name; 'triforce models' lists the names, "
            "and 'triforce pull OWNER/NAME' fetches any other from the hub"
        )
    if is_here(model_id, weights=weights):
        return _model_in(model_folder(model_id), name)
    raise ModelError(f"{name} is not a folder, and {_missing(model_id)}")


def _model_in(folder: Path, name: str) -> Path:
    """The folder of a stored model, or the GGUF file that is all it has. Raises ModelError where it has several."""
    files = _files(folder)
    if len(files) > 1:
        named = ", ".join(str(file) for file in files)
        raise ModelError(f"{name} has {len(files)} GGUF files; give the path of one: {named}")
    return files[0] if files else folder


def _files(folder: Path) -> list[Path]:
    """The GGUF files of a stored model; none where its folder is the model."""
    return [] if (folder / "config.json").is_file() else models_in(folder)


def _files_named(name: str) -> tuple[str, list[Path]]:
    """OWNER/NAME and the GGUF files of a stored model that `name` is: OWNER/NAME:LABEL, which may be several, or as
    `entries` lists one of several."""
    model, _, file = name.rpartition("/")
    model_id, label = tagged(name) or (id_of(model) if file.endswith(SUFFIX) else None, "")
    if model_id is None or not is_here(model_id):
        return "", []
    files = {path.name: path for path in models_in(model_folder(model_id))}
    named = with_label([*files], label) if label else [file] if file in files else []
    return model_id, [files[each] for each in named]


def has_label(model_id: str, label: str) -> bool:
    """Whether GGUF files of a stored model have this label."""
    return bool(_files_named(f"{model_id}:{label}")[1])


def stored_name(name: str) -> str | None:
    """The name by which `entries` lists a stored model that can be loaded; None where `name` is that of none, or of
    several. Never a path."""
    of, files = _files_named(name)
    if len(files) == 1:
        return f"{short_name(of)}/{files[0].name}"
    model_id = id_of(name)
    if model_id is None or not is_here(name):
        return None
    return None if len(_files(model_folder(model_id))) > 1 else short_name(model_id)


def name_of(model_id: str, file: str = "") -> str:
    """The name of a stored model for --model. file: the GGUF file that is meant, which is named where there is more."""
    folder, name = model_folder(model_id), short_name(model_id)
    return f"{name}/{file}" if file and _files(folder) != [folder / file] else name


def is_here(name: str, *, weights: bool = True) -> bool:
    """Tell whether the model `name`, an alias or OWNER/NAME, is stored. weights: config.json alone is not enough."""
    model_id = id_of(name)
    if model_id is None:
        return False
    state = state_of(model_folder(model_id))
    return state == "whole" or (state == "config only" and not weights)


def recommended_draft(model: str, folder: Path) -> str:
    """The alias of a suitable draft for the model named `model` and found in `folder`, "" if none is known.

    A model that was given as a folder has none, whatever its name.
    """
    alias = alias_of(model)
    return alias.draft if alias is not None and folder == model_folder(alias.repository) else ""


def entries() -> list[Entry]:
    """All models in the folder of models, sorted; a damaged one has its `problem` set. Other folders are skipped."""
    found = (entry for model_id in stored_ids() for entry in _entries_of(model_id))
    return [entry for entry in found if entry.state != "absent" or entry.problem]


def _entries_of(model_id: str) -> list[Entry]:
    """The entry of a stored model, or one entry per GGUF file if it has several."""
    folder, name = model_folder(model_id), short_name(model_id)
    files = _files(folder)
    if len(files) < 2:
        return [entry_of(folder, name)]
    return [entry_of(folder, f"{name}/{file.name}", file=file) for file in files]


def entry_of(folder: Path, name: str, draft: str = "", *, file: Path | None = None) -> Entry:
    """The model called `name` in `folder`. Reads config.json and the headers of its weights. file: the GGUF file, if
    there are several."""
    from offload.weights.checkpoint import Checkpoint  # imports torch, which `locate` does not need

    alias = alias_of(name)
    entry = Entry(name=name, folder=folder, num_bytes=0, draft=draft or (alias.draft if alias else ""), state="absent")
    try:
        files = folder.rglob("*") if file is None else parts(file)
        num_bytes = sum(path.stat().st_size for path in files if path.is_file())
        entry = replace(entry, state=state_of(folder), num_bytes=num_bytes, origin=Origin.read(folder))
        if entry.state == "broken off":
            raise ModelError(_resume(name))
        if entry.state == "absent":
            return entry
        model = file or _model_in(folder, name)
        entry = replace(entry, config=read_config(model))
        if entry.state == "whole":
            Checkpoint.open(model).close()
    except (ModelError, OSError) as error:
        return replace(entry, problem=str(error))
    return entry


def absent_aliases() -> Iterator[Alias]:
    """The aliases whose models are not stored."""
    return (alias for alias in ALIASES if state_of(model_folder(alias.repository)) != "whole")


def has_room(alias: Alias, hardware: Hardware) -> bool | None:
    """Whether the free memory, with a GPU the host's too, has room for the weights of a model that is not here; None if
    their size is not known. A CPU that does not compute in 16 bits takes twice as much."""
    if alias.num_bytes is None:
        return None
    if hardware.is_cpu:
        return alias.num_bytes * (1 if hardware.fast_bf16 else 2) <= hardware.device_free_bytes
    return alias.num_bytes <= hardware.device_free_bytes * hardware.num_devices + hardware.host_free_bytes


def longest_context(entry: Entry, hardware: Hardware) -> int:
    """The longest context in tokens that fits `hardware`; 0 if none does or the model's config is unknown."""
    if entry.config is None:
        return 0
    return Request(entry.config, None, Options(), hardware).largest_context()


def stored_ids() -> list[str]:
    """OWNER/NAME of every folder in the folder of models, sorted; folders with other names are skipped. Raises
    ModelError."""
    kept = models_folder()
    try:
        found = [f"{folder.parent.name}/{folder.name}" for folder in kept.glob("*/*") if folder.is_dir()]
    except OSError as error:
        raise unreadable(kept, error) from error
    return sorted(filter(is_id, found))


def _missing(model_id: str) -> str:
    """The reason why the model cannot be used, and the command to run."""
    owner, _, name = model_id.partition("/")
    if owner == LOCAL:
        converted = ", ".join(found for found in stored_ids() if found.startswith(f"{LOCAL}/")) or "none"
        return f"no model {name} was converted into {models_folder() / LOCAL}; there are: {converted}"
    state, command = state_of(model_folder(model_id)), pull_command(model_id)
    if state == "broken off":
        return _resume(model_id)
    if state == "config only":
        return f"only its config.json was pulled; {command} fetches its weights"
    return f"no such model was pulled; run {command}"


def _resume(name: str) -> str:
    return f"its pull was interrupted; {pull_command(name)} resumes it"
