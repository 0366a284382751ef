"""Settings that may be changed between two replies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from offload.errors import UsageError
from offload.seeds import seed_after

if TYPE_CHECKING:
    from offload.decode.sampling import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Sampling parameters and the maximal length of replies. Names as in options: `top-p`."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    max_tokens: int

    def changed(self, name: str, text: str) -> Settings:
        """The settings with one changed. Raises UsageError for an unknown name or a value out of range."""
        if name not in names():
            raise UsageError(f"there is no setting {name!r}; there are {', '.join(names())}")
        field = name.replace("-", "_")
        value: Any = _parse(name, text)
        changed = replace(self, **{field: value})
        changed.params()
        if changed.max_tokens < 1:
            raise UsageError(f"max-tokens is {changed.max_tokens}, it must be 1 or more")
        return changed

    def params(self, num_replies: int = 0) -> SamplingParams:
        """Sampling parameters of the reply after `num_replies` others. With a seed each reply has its own, so that a
        second try differs."""
        from offload.decode.sampling import SamplingParams

        chosen: dict[str, Any] = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        return SamplingParams(**chosen, seed=seed_after(self.seed, num_replies))

    def __str__(self) -> str:
        values = ((name, getattr(self, name.replace("-", "_"))) for name in names())
        return ", ".join(f"{name} {'none' if value is None else value}" for name, value in values)


def names() -> tuple[str, ...]:
    return tuple(field.name.replace("_", "-") for field in fields(Settings))


def _parse(name: str, text: str) -> object:
    if name == "seed" and text == "none":
        return None
    kind: Callable[[str], object] = float if name in ("temperature", "top-p", "min-p") else int
    try:
        return kind(text)
    except ValueError as error:
        wanted = "a number" if kind is float else "a whole number"
        raise UsageError(f"{name} is {text!r}, it must be {wanted}{' or none' if name == 'seed' else ''}") from error
