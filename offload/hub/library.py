"""The models that are here: how whole each is, and the folder that a name stands for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from offload.errors import ModelError
from offload.hub.names import LOCAL, alias_of, id_of, is_id, model_folder, models_folder, pull_command
from offload.plan.fields import Fields, read_json
from offload.plan.files import write_whole

STAGING = ".pull"  # in a model's folder: what a pull has fetched so far
MOVING = "moving"  # in there, while files change places
ORIGIN_FILE = "triforce.json"

State = Literal["absent", "broken off", "config only", "whole"]


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a model's files come from. files: the names of those that we put there."""

    source: str  # OWNER/NAME on the hub, or the folder that was converted
    commit: str = ""
    license: str = ""
    files: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> Origin | None:
        """What `write` wrote; None where nobody did. ModelError."""
        path = folder / ORIGIN_FILE
        if not path.is_file():
            return None
        data = read_json(path)
        files = data.get("files")
        texts = {key: data.get(key) for key in ("source", "commit", "license")}
        if not isinstance(files, list) or not all(isinstance(text, str) for text in [*files, *texts.values()]):
            Fields(data, str(path)).refuse("files", "a list of names, beside source, commit and license; remove it")
        return cls(**{key: str(text) for key, text in texts.items()}, files=tuple(files))

    def write(self, folder: Path) -> None:
        """Raises OSError."""
        write_whole(folder / ORIGIN_FILE, json.dumps(asdict(self), indent=1) + "\n")


def state_of(folder: Path) -> State:
    """Of a model's folder. Nothing of what a pull that was broken off has fetched is used."""
    if (folder / STAGING / MOVING).exists():
        return "broken off"
    if any(folder.glob("*.safetensors")):
        return "whole"
    if (folder / "config.json").is_file():
        return "config only"
    return "broken off" if (folder / STAGING).exists() else "absent"


def locate(name: str, *, weights: bool = True) -> Path:
    """The folder that `name` stands for: a folder, an alias or OWNER/NAME of a model that is here, in this order.

    weights: config.json alone is not enough. Raises ModelError, which says what to run.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    model_id = id_of(name)
    if model_id is None:
        raise ModelError(
            f"{name} is not a folder and not a model's name; 'triforce models' lists the names, "
            "and 'triforce pull OWNER/NAME' fetches any other from the hub"
        )
    if is_here(model_id, weights=weights):
        return model_folder(model_id)
    raise ModelError(f"{name} is not a folder, and {_why(model_id, state_of(model_folder(model_id)))}")


def is_here(name: str, *, weights: bool = True) -> bool:
    """Can the model called `name`, an alias or OWNER/NAME, be used? weights: config.json alone is not enough."""
    model_id = id_of(name)
    if model_id is None:
        return False
    state = state_of(model_folder(model_id))
    return state == "whole" or (state == "config only" and not weights)


def recommended_draft(model: str, folder: Path) -> str:
    """The alias of the draft that suits what was named as `model` and found in `folder`; "": none is known.

    A folder that was given as such has none, whatever it is called.
    """
    alias = alias_of(model)
    return alias.draft if alias is not None and folder == model_folder(alias.repository) else ""


def stored_ids() -> Sequence[str]:
    """OWNER/NAME of all that lies in the folder of models, sorted; other folders do not count."""
    found = (f"{folder.parent.name}/{folder.name}" for folder in models_folder().glob("*/*") if folder.is_dir())
    return sorted(filter(is_id, found))


def _why(model_id: str, state: State) -> str:
    """What is missing of it, and what to run."""
    owner, _, name = model_id.partition("/")
    if owner == LOCAL:
        there = ", ".join(found for found in stored_ids() if found.startswith(f"{LOCAL}/")) or "none"
        return f"no model {name} was converted into {models_folder() / LOCAL}; there are: {there}"
    command = pull_command(model_id)
    if state == "broken off":
        return f"its pull was broken off; {command} goes on with it"
    if state == "config only":
        return f"only its config.json was pulled; {command} fetches its weights"
    return f"no such model was pulled; run {command}"
