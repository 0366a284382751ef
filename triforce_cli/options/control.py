"""Options that control the generated text: sampling settings, token biases and constraints."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any

from offload.decode.sampling import BREAKERS, SETTINGS, Row, SamplingParams
from offload.errors import UsageError
from offload.grammar.constraint import Constraint
from triforce_cli.options import options
from triforce_cli.options.options import number, option, switch, whole
from triforce_cli.screen.utf8 import decode_argument, read_text, user_path

CONTROL = "What is written (docs/sampling.md)"
NEVER = ("-inf", "false")  # biases that exclude a token
BASIC = ("temperature", "top_p", "top_k", "min_p", "seed")  # settings that other programs have, too

JsonSchema = Annotated[
    str | None,
    option("--json-schema", "JSON of this schema; {} is any JSON.", options.SAMPLING, metavar="FILE|JSON"),
]
Regex = Annotated[str | None, option("--regex", "The whole text matches this.", CONTROL, metavar="REGEX", hidden=True)]
Choice = Annotated[
    list[str] | None,
    option(
        "--choice", "The text is one of these; repeat it for texts with commas.", CONTROL, metavar="A,B,C", hidden=True
    ),
]
GrammarFile = Annotated[
    Path | None,
    option("--grammar", "The text follows a grammar in llguidance's Lark.", CONTROL, metavar="FILE", hidden=True),
]
DryBreakers = Annotated[
    list[str] | None,
    option(
        "--dry-breaker",
        "DRY: a text that ends a repetition; can be repeated. Without it: new line, colon, quote, asterisk.",
        CONTROL,
        metavar="TEXT",
        hidden=True,
    ),
]
LogitBias = Annotated[
    list[str] | None,
    option(
        "--logit-bias",
        "Add X to the logit of a token, by its id or its text; -inf: never. Can be repeated.",
        CONTROL,
        metavar="TOKEN=X",
        hidden=True,
    ),
]


@dataclass(frozen=True)
class Control:
    """Options that together give one field of `SamplingParams`. options: annotations by parameter; value: a function of
    the options' values that returns the field's value."""

    options: Mapping[str, Any]
    value: Callable[..., Any]


@dataclass(frozen=True)
class SamplingOptions:
    """The options of `SamplingParams`, a group of `flags.spread`, in the order of its fields.

    names: the fields that have options; empty: all. temperature: the default, if it differs from the table's.
    """

    names: Sequence[str] = ()
    temperature: float | None = None

    def parameters(self) -> Iterator[Parameter]:
        """The parameters of the command. Settings have their defaults; other options are None unless given."""
        defaults = {name: row.default for name, row in SETTINGS.items()}
        if self.temperature is not None:
            defaults["temperature"] = self.temperature
        for name, control in self._controls():
            for option_name, annotation in control.options.items():
                yield Parameter(option_name, Parameter.KEYWORD_ONLY, default=defaults.get(name), annotation=annotation)

    def made(self, given: Mapping[str, Any]) -> SamplingParams:
        """The sampling parameters. given: values by parameter. Reads the files that are named. Raises UsageError."""
        values = {name: control.value(*map(given.get, control.options)) for name, control in self._controls()}
        return SamplingParams(**values)

    def _controls(self) -> Iterator[tuple[str, Control]]:
        return ((name, control) for name, control in CONTROLS.items() if name in (self.names or CONTROLS))


Sampling = Annotated[SamplingParams, SamplingOptions()]
GreedySampling = Annotated[SamplingParams, SamplingOptions(temperature=0.0)]  # for commands that are greedy by default
BasicGreedySampling = Annotated[SamplingParams, SamplingOptions(BASIC, temperature=0.0)]


def _option(row: Row) -> Control:
    """The option of a setting."""
    words = f"--{row.label}", row.help, options.SAMPLING if row.common else CONTROL
    if row.kind is bool:
        declared = switch(*words, hidden=not row.common)
    else:
        metavar, parser = ("X", number) if row.kind is float else ("N", whole)
        declared = option(*words, metavar=metavar, parser=parser, hidden=not row.common)
    return Control({row.name: Annotated[row.kind, declared]}, lambda value: value)


def _constraint(
    schema: str | None, regex: str | None, choice: list[str] | None, grammar: Path | None
) -> Constraint | None:
    found: list[Constraint] = []
    if schema is not None:
        found.append(Constraint("json-schema", _schema(schema)))
    if regex is not None:
        found.append(Constraint("regex", decode_argument("--regex", regex)))
    if choice:
        found.append(Constraint("choice", json.dumps(_choices(choice))))
    if grammar is not None:
        found.append(Constraint("grammar", read_text(user_path(str(grammar)), "the grammar")))
    if len(found) > 1:
        raise UsageError(f"{' and '.join(each.kind for each in found)} both say what the text is; give one of them")
    return found[0] if found else None


def _breakers(texts: list[str] | None) -> tuple[str, ...]:
    return tuple(decode_argument("--dry-breaker", text) for text in texts or BREAKERS)


def _biases(texts: list[str] | None) -> tuple[tuple[int | str, float], ...]:
    return tuple(map(_bias, texts or ()))


def _schema(text: str) -> str:
    """The schema's text: the argument itself, or the content of the file that it names."""
    if text.lstrip().startswith("{") or text.strip() in ("true", "false"):
        return decode_argument("--json-schema", text)
    return read_text(user_path(text), "the JSON schema")


def _choices(texts: list[str]) -> list[str]:
    """The alternatives of a choice; a single text is split at its commas."""
    found = [decode_argument("--choice", text) for text in texts]
    return found[0].split(",") if len(found) == 1 else found


def _bias(text: str) -> tuple[int | str, float]:
    """A token bias from TOKEN=X. A TOKEN of digits is an id."""
    name, equals, value = decode_argument("--logit-bias", text).rpartition("=")
    if not equals or not name:
        raise UsageError(f"logit-bias is {text!r}, it must be TOKEN=X, such as 42=-5 or ' the'=-inf")
    try:
        bias = -math.inf if value.strip() in NEVER else float(value)
    except ValueError as error:
        raise UsageError(f"logit-bias of {name!r} is {value!r}, it must be a number or -inf") from error
    return int(name) if name.isdecimal() else name, bias


_OTHERS = {
    "constraint": Control(
        {"json_schema": JsonSchema, "regex": Regex, "choice": Choice, "grammar": GrammarFile}, _constraint
    ),
    "dry_breakers": Control({"dry_breaker": DryBreakers}, _breakers),
    "logit_bias": Control({"logit_bias": LogitBias}, _biases),
}
CONTROLS: Mapping[str, Control] = {
    field.name: _option(SETTINGS[field.name]) if field.name in SETTINGS else _OTHERS[field.name]
    for field in fields(SamplingParams)
    if field.name in SETTINGS or field.name in _OTHERS
}
