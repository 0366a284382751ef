"""What there is to run: models that are here, with what they need, and how much of their context fits a machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from offload.errors import ModelError
from offload.hub.library import Origin, State, state_of, stored_ids
from offload.hub.names import ALIASES, Alias, alias_of, model_folder, pull_command, short_name
from offload.plan.config import ModelConfig
from offload.plan.hardware import Hardware
from offload.plan.options import Options
from offload.plan.request import Request
from offload.transfer.checkpoint import Checkpoint

_STORED_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One model. num_bytes: of all its files. problem: why it cannot be used; then there may be no config."""

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
        """Over all layers, in the dtype that the model is meant for."""
        if self.config is None:
            return None
        return self.config.kv_bytes_per_token(_STORED_BYTES[self.config.dtype])


def entries() -> list[Entry]:
    """All in the folder of models, sorted; what is broken says why. Other folders that lie about are none of ours."""
    found = (entry_of(model_folder(model_id), short_name(model_id)) for model_id in stored_ids())
    return [entry for entry in found if entry.state != "absent" or entry.problem]


def entry_of(folder: Path, name: str, draft: str = "") -> Entry:
    """The model in `folder`, called `name`. Reads config.json and the headers of its weights."""
    alias = alias_of(name)
    entry = Entry(name=name, folder=folder, num_bytes=0, draft=draft or (alias.draft if alias else ""), state="absent")
    try:
        entry = replace(entry, state=state_of(folder), num_bytes=_num_bytes(folder), origin=Origin.read(folder))
        if entry.state == "broken off":
            raise ModelError(f"its pull was broken off; {pull_command(name)} goes on with it")
        if entry.state == "absent":
            return entry
        entry = replace(entry, config=ModelConfig.from_folder(folder))
        if entry.state == "whole":
            Checkpoint.open(folder).close()
    except (ModelError, OSError) as error:
        return replace(entry, problem=str(error))
    return entry


def absent_aliases() -> Iterator[Alias]:
    """Those that `pull` would fetch."""
    return (alias for alias in ALIASES if state_of(model_folder(alias.repository)) != "whole")


def longest_context(entry: Entry, hardware: Hardware) -> int:
    """Tokens of the model's context that fit `hardware`, beside a draft or without; 0: none, or nothing is known."""
    if entry.config is None:
        return 0
    return Request(entry.config, None, Options(), hardware).largest_context()


def _num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
