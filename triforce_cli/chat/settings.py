"""Settings that may be changed between two replies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from offload.decode.sampling import SamplingParams
from offload.errors import UsageError
from offload.seeds import seed_after

MAX_TOKENS = "max-tokens"
SHOWN = ("temperature", "top-p", "top-k", "min-p", "seed")  # whatever they are; others where they are on
_KINDS: dict[str, Callable[[str], object]] = {"float": float, "int": int, "int | None": int}
_FIELDS = {field.name.replace("_", "-"): field for field in fields(SamplingParams) if field.type in (*_KINDS, "bool")}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Sampling parameters and the maximal length of replies. Names as in options: `top-p`."""

    sampling: SamplingParams
    max_tokens: int

    def changed(self, name: str, text: str) -> Settings:
        """The settings with one changed. Raises UsageError for an unknown name or a value out of range."""
        if name not in names():
            raise UsageError(f"there is no setting {name!r}; there are {', '.join(names())}")
        value: Any = _parse(name, text)
        if name != MAX_TOKENS:
            return replace(self, sampling=replace(self.sampling, **{_FIELDS[name].name: value}))
        if not isinstance(value, int) or value < 1:
            raise UsageError(f"max-tokens is {value}, it must be 1 or more")
        return replace(self, max_tokens=value)

    def params(self, num_replies: int = 0) -> SamplingParams:
        """Sampling parameters of the reply after `num_replies` others. With a seed each reply has its own, so that a
        second try differs."""
        return replace(self.sampling, seed=seed_after(self.sampling.seed, num_replies))

    def __str__(self) -> str:
        values = {name: getattr(self.sampling, field.name) for name, field in _FIELDS.items()}
        changed = [name for name, field in _FIELDS.items() if name not in SHOWN and values[name] != field.default]
        shown = {name: values[name] for name in (*SHOWN, *changed)} | {MAX_TOKENS: self.max_tokens}
        return ", ".join(f"{name} {_written(value)}" for name, value in shown.items())


def names() -> tuple[str, ...]:
    return (*SHOWN, MAX_TOKENS, *(name for name in _FIELDS if name not in SHOWN))


def _parse(name: str, text: str) -> object:
    if name == "seed" and text == "none":
        return None
    kind = "int" if name == MAX_TOKENS else str(_FIELDS[name].type)
    if kind == "bool":
        if text not in ("on", "off"):
            raise UsageError(f"{name} is {text!r}, it must be on or off")
        return text == "on"
    try:
        return _KINDS[kind](text)
    except ValueError as error:
        wanted = "a number" if kind == "float" else "a whole number"
        raise UsageError(f"{name} is {text!r}, it must be {wanted}{' or none' if name == 'seed' else ''}") from error


def _written(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)
