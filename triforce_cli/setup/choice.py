"""The choice of a command's models: the named ones, or the embedded pair."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from offload.errors import ModelError

NONE = "none"
FIRST, FIRST_ABOUT = "qwen2.5-0.5b-instruct", "988 MB, Apache 2.0"  # the smallest that answers well enough


@dataclass(frozen=True, kw_only=True)
class Models:
    """The model folders that a command uses."""

    target: Path
    draft: Path | None
    embedded: bool  # the target is the demo model that comes with triforce
    draft_note: str = ""  # the note on a draft that the user did not name

    @property
    def note(self) -> str:
        """A note on models that the user did not name; "" if all were named."""
        if self.embedded:
            return f"no --model given: using the embedded demo model ({self.target})"
        return self.draft_note

    @property
    def answers_note(self) -> str:
        """A note that the embedded model cannot answer questions. It names one that can, with its size and licence."""
        if not self.embedded:
            return ""
        from offload.hub.library import is_here
        from offload.hub.names import pull_command

        if is_here(FIRST, weights=True):
            return f"the demo model answers no questions; --model {FIRST} does"
        return f"the demo model answers no questions; {pull_command(FIRST)} gets one that does ({FIRST_ABOUT})"

    def as_dict(self) -> dict[str, str | None]:
        """The models as JSON."""
        return {"target": str(self.target), "draft": None if self.draft is None else str(self.draft)}


def choose_models(model: Path | None, draft: str | None, *, weights: bool = True) -> Models:
    """The named models, or the embedded pair. A target given by its name comes with a suitable draft if that was pulled
    and no draft is named. weights: config.json alone is not enough."""
    chosen = None if draft in (None, NONE) else _folder("draft", str(draft), weights=weights)
    if model is not None:
        target = _folder("model", str(model), weights=weights)
        if draft is None:
            return _with_suitable_draft(str(model), target, weights=weights)
        return Models(target=target, draft=chosen, embedded=False)
    if draft is None:
        chosen = embedded_model("demo-draft")
    return Models(target=embedded_model("demo-target"), draft=chosen, embedded=True)


def _with_suitable_draft(model: str, target: Path, *, weights: bool) -> Models:
    from offload.config.reading import has_next_token
    from offload.hub.library import is_here, recommended_draft
    from offload.hub.names import model_folder, pull_command, repository_of

    if has_next_token(target):
        note = "draft: the model's own next-token head (--draft none goes without)"
        return Models(target=target, draft=target, embedded=False, draft_note=note)
    name = recommended_draft(model, target)
    if not name:
        return Models(target=target, draft=None, embedded=False)
    if not is_here(name, weights=weights):
        note = f"no draft: {name} would suit {model}; {pull_command(name)} fetches it"
        return Models(target=target, draft=None, embedded=False, draft_note=note)
    note = f"draft: {name}, which suits {model} (--draft none goes without)"
    return Models(target=target, draft=model_folder(repository_of(name)), embedded=False, draft_note=note)


def embedded_model(name: str) -> Path:
    """The folder of a model that comes as package data."""
    folder = Path(str(resources.files("triforce_cli"))) / "models" / name
    if not folder.is_dir():
        raise ModelError(f"the embedded demo model is not installed ({folder} is missing); name one with --model DIR")
    return folder


def _folder(role: str, name: str, *, weights: bool) -> Path:
    from offload.hub.library import locate

    try:
        return locate(name, weights=weights)
    except ModelError as error:
        raise ModelError(f"{role} {error}") from error
