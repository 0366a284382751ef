"""Settings that may be changed between two replies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from offload.decode.sampling import SETTINGS, SamplingParams
from offload.errors import UsageError
from offload.seeds import seed_after
from triforce_cli.options.control import BASIC

MAX_TOKENS = "max-tokens"
SHOWN = tuple(SETTINGS[name].label for name in BASIC)  # always shown; others only if they are on
_ROWS = {row.label: row for row in SETTINGS.values()}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of replies: sampling parameters and the maximal length. Names as in options: `top-p`."""

    sampling: SamplingParams
    max_tokens: int

    def changed(self, name: str, text: str) -> Settings:
        """The settings with one changed. Raises UsageError for an unknown name or a value out of range."""
        if name not in names():
            raise UsageError(f"there is no setting {name!r}; there are {', '.join(names())}")
        value: Any = _parse(name, text)
        if name != MAX_TOKENS:
            return replace(self, sampling=replace(self.sampling, **{_ROWS[name].name: value}))
        if not isinstance(value, int) or value < 1:
            raise UsageError(f"max-tokens is {value}, it must be 1 or more")
        return replace(self, max_tokens=value)

    def since(self, before: Settings) -> dict[str, Any]:
        """The settings that differ from those before, by their names."""
        found = {name: getattr(self.sampling, row.name) for name, row in _ROWS.items()} | {MAX_TOKENS: self.max_tokens}
        there = {name: getattr(before.sampling, row.name) for name, row in _ROWS.items()}
        return {name: value for name, value in found.items() if value != there.get(name, before.max_tokens)}

    def params(self, num_replies: int = 0) -> SamplingParams:
        """The sampling parameters of the reply after `num_replies` others. With a seed each reply has its own seed, so
        that a second try differs."""
        return replace(self.sampling, seed=seed_after(self.sampling.seed, num_replies))

    def __str__(self) -> str:
        values = {name: getattr(self.sampling, row.name) for name, row in _ROWS.items()}
        changed = [name for name, row in _ROWS.items() if name not in SHOWN and values[name] != row.default]
        shown = {name: values[name] for name in (*SHOWN, *changed)} | {MAX_TOKENS: self.max_tokens}
        return ", ".join(f"{name} {_written(value)}" for name, value in shown.items())


def names() -> tuple[str, ...]:
    return (*SHOWN, MAX_TOKENS, *(name for name in _ROWS if name not in SHOWN))


def _parse(name: str, text: str) -> object:
    kind, optional = (int, False) if name == MAX_TOKENS else (_ROWS[name].kind, _ROWS[name].optional)
    if kind is bool:
        if text not in ("on", "off"):
            raise UsageError(f"{name} is {text!r}, it must be on or off")
        return text == "on"
    if optional and text == "none":
        return None
    try:
        return float(text) if kind is float else int(text)
    except ValueError as error:
        wanted = "a number" if kind is float else "a whole number"
        raise UsageError(f"{name} is {text!r}, it must be {wanted}{' or none' if optional else ''}") from error


def _written(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)
