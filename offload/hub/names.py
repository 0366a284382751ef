"""Names of models and their folders: OWNER/NAME for a pulled model, local/NAME for a converted one.

Models are stored in the user's data folder, or in the folder that TRIFORCE_MODELS_DIR names. The layout of a folder is
the hub's, so `--model` takes such a folder as well as a name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from offload.errors import UsageError, quoted_line
from offload.files import user_folder

FOLDER_VARIABLE = "TRIFORCE_MODELS_DIR"
MAIN = "main"  # the default revision
LOCAL = "local"  # the owner's part of a converted model's name
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]|\.(?!\.)){0,95}"
_ID = re.compile(rf"{_PART}/{_PART}", re.ASCII)
_TAGGED = re.compile(rf"(?P<id>{_PART}/{_PART}):(?P<label>[A-Za-z0-9][A-Za-z0-9_-]{{0,47}})", re.ASCII)


@dataclass(frozen=True)
class Alias:
    """A short name of a repository. draft: the alias of a suitable draft, "" if none is known. num_bytes: about, of its
    weights in 16 bits; None if that is not known without asking the hub."""

    name: str
    repository: str
    draft: str = ""
    num_bytes: int | None = None


ALIASES = (
    Alias("yarn-llama-2-13b-128k", "NousResearch/Yarn-Llama-2-13b-128k", "llama-68m", num_bytes=26_000_000_000),
    Alias("yarn-llama-2-7b-128k", "NousResearch/Yarn-Llama-2-7b-128k", "llama-68m", num_bytes=13_500_000_000),
    Alias("lwm-text-chat-128k", "LargeWorldModel/LWM-Text-Chat-128K", "llama-68m"),
    Alias("llama-68m", "JackFram/llama-68m"),
    Alias(
        "llama-3.1-8b-instruct", "meta-llama/Llama-3.1-8B-Instruct", "llama-3.2-1b-instruct", num_bytes=16_100_000_000
    ),
    Alias("llama-3.2-1b-instruct", "meta-llama/Llama-3.2-1B-Instruct", num_bytes=2_470_000_000),
    Alias(
        "qwen2.5-coder-1.5b-instruct",
        "Qwen/Qwen2.5-Coder-1.5B-Instruct",
        "qwen2.5-coder-0.5b-instruct",
        num_bytes=3_090_000_000,
    ),
    Alias("qwen2.5-coder-0.5b-instruct", "Qwen/Qwen2.5-Coder-0.5B-Instruct", num_bytes=988_000_000),
    Alias("qwen2.5-0.5b-instruct", "Qwen/Qwen2.5-0.5B-Instruct", num_bytes=988_000_000),
    Alias(
        "smollm2-1.7b-instruct", "HuggingFaceTB/SmolLM2-1.7B-Instruct", "smollm2-135m-instruct", num_bytes=3_420_000_000
    ),
    Alias("smollm2-135m-instruct", "HuggingFaceTB/SmolLM2-135M-Instruct", num_bytes=269_000_000),
)


def models_folder() -> Path:
    """The folder of all stored models. It may not exist yet."""
    return user_folder("data", "models", variable=FOLDER_VARIABLE).absolute()


def is_id(text: str) -> bool:
    """Tell whether `text` is OWNER/NAME. Such a name cannot point outside the folder of models."""
    return _ID.fullmatch(text) is not None


def tagged(name: str) -> tuple[str, str] | None:
    """(OWNER/NAME, label) of a name OWNER/NAME:LABEL, of a GGUF file by its quantisation; None for any other name."""
    found = _TAGGED.fullmatch(name)
    return (found["id"], found["label"]) if found and not name.startswith(f"{LOCAL}/") else None


def model_folder(model_id: str) -> Path:
    """The folder of OWNER/NAME, whether it exists or not. Raises UsageError for any other name."""
    if not is_id(model_id):
        raise UsageError(f"{model_id!r} is not OWNER/NAME: two names of letters, digits, '.', '_' and '-'")
    return models_folder() / model_id


def alias_of(name: str) -> Alias | None:
    """The alias called `name`, or the alias of the repository `name`. Upper and lower case are the same."""
    wanted = name.lower()
    return next((alias for alias in ALIASES if wanted in (alias.name, alias.repository.lower())), None)


def id_of(name: str) -> str | None:
    """OWNER/NAME for an alias or for OWNER/NAME itself; None for anything else."""
    if alias := alias_of(name):
        return alias.repository
    return name if is_id(name) else None


def repository_of(name: str) -> str:
    """The hub's OWNER/NAME for an alias or an id. Raises UsageError, which lists the aliases."""
    repository = id_of(name)
    if repository is None or repository.startswith(f"{LOCAL}/"):
        known = ", ".join(alias.name for alias in ALIASES)
        raise UsageError(f"{name!r} is not a model on the hub; give OWNER/NAME, or one of {known}")
    return repository


def pull_words(model_id: str, revision: str = MAIN, *, file: str = "", label: str = "") -> list[str]:
    """The arguments of the command that pulls the model, or a GGUF file of its repository by its path or its label."""
    further = {"--file": file, "--revision": "" if revision == MAIN else revision}
    options = [word for option, value in further.items() if value for word in (option, value)]
    return [short_name(model_id) + (f":{label}" if label else ""), *options]


def pull_command(model_id: str, revision: str = MAIN, *, file: str = "", label: str = "") -> str:
    """The command that pulls the model, see `pull_words`."""
    return quoted_line("triforce", "pull", *pull_words(model_id, revision, file=file, label=label))


def short_name(model_id: str) -> str:
    """The alias of OWNER/NAME, or OWNER/NAME itself if it has none."""
    alias = alias_of(model_id)
    return alias.name if alias else model_id
