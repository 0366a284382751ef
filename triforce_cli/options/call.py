"""The call of a command: a function whose parameters are the options of a command line, and its arguments as typed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, is_dataclass
from inspect import Parameter, Signature, cleandoc, signature
from pathlib import Path
from typing import Annotated, Any, Protocol, get_type_hints, runtime_checkable

from rich.markup import escape

from triforce_cli.ground.text import path_text
from triforce_cli.options import options

HELP_ALL = Parameter("help_all", Parameter.KEYWORD_ONLY, default=False, annotation=options.HelpAll)
JSON_OPTIONS = ("json", "jsonl", "input_jsonl")


class Changed(dict[str, Any]):
    """The options of a command whose values differ from their defaults, by their names, in JSON values. A command has
    them as a parameter of its own, which `spread` fills."""


@dataclass(frozen=True, kw_only=True)
class ProgramFlags:
    """Options of every command that has no `config` of its own. They take effect when they are parsed."""

    config: options.Config = None
    log_file: options.LogFile = None
    debug: options.Debug = False


def flowing(text: str | None) -> str:
    """A docstring as text for --help, which keeps lines and takes brackets for markup: one line per paragraph, brackets
    escaped."""
    return escape("\n\n".join(" ".join(paragraph.split()) for paragraph in cleandoc(text or "").split("\n\n")))


@runtime_checkable
class Group(Protocol):
    """Options that a command takes as one parameter, whose annotation has the group as metadata."""

    def parameters(self) -> Iterable[Parameter]: ...

    def made(self, given: Mapping[str, Any]) -> Any:
        """The command's argument. given: values by parameter, those of other groups too. Raises UsageError."""
        ...


@dataclass(frozen=True)
class Arguments:
    """The arguments of a function or a dataclass. Each is an option, or a group of options: another dataclass, or an
    annotation with a `Group`."""

    function: Callable[..., Any]

    def parameters(self) -> Iterator[Parameter]:
        for parameter, group in self._parts():
            if group is not None:
                yield from group.parameters()
            elif parameter.annotation is not Changed:
                yield parameter

    def of(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by name. given: values by parameter. Raises UsageError."""
        return {part.name: given[part.name] if group is None else group.made(given) for part, group in self._parts()}

    def made(self, given: Mapping[str, Any]) -> Any:
        return self.function(**self.of(given))

    def _parts(self) -> Iterator[tuple[Parameter, Group | None]]:
        hints = get_type_hints(self.function, include_extras=True)
        for name, parameter in signature(self.function).parameters.items():
            hint = hints[name]
            marks = getattr(hint, "__metadata__", ())
            own = Arguments(hint) if isinstance(hint, type) and is_dataclass(hint) else None
            group = own or next((mark for mark in marks if isinstance(mark, Group)), None)
            yield parameter.replace(annotation=hint), group


@dataclass(frozen=True)
class Call:
    """A command line, parsed: the function of the command, with its arguments. as_json: its results, and so its errors,
    are JSON."""

    command: Callable[..., None]
    arguments: Mapping[str, Any]
    as_json: bool

    def __call__(self) -> None:
        self.command(**self.arguments)


def spread(command: Callable[..., None]) -> Callable[..., Call]:
    """The function that Typer calls with the options of `command`, and that returns the call of it. The options of
    groups are the command's, see `Arguments`; so are those of `ProgramFlags`. Help texts name defaults. Hidden options
    come last; `--help-all` shows them. A parameter of type `Changed` is no option, and is filled."""
    arguments = Arguments(command)

    def parsed(**flags: Any) -> Call:
        changed = Changed(_changed(parameters, flags))
        as_json = any(map(flags.get, JSON_OPTIONS))
        return Call(command, arguments.of({**flags, "changed": changed}), as_json)

    parameters = list(arguments.parameters())
    if all(parameter.name != "config" for parameter in parameters):
        parameters += Arguments(ProgramFlags).parameters()
    parameters = sorted(map(_with_default, parameters), key=_is_hidden)
    if any(map(_is_hidden, parameters)):
        parameters.append(HELP_ALL)
    parsed.__name__, parsed.__doc__ = command.__name__, flowing(command.__doc__)
    parsed.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    parsed.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return parsed


def _changed(parameters: Iterable[Parameter], flags: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of each option that is not as by default, without those of the program itself."""
    for parameter in parameters:
        declared = next(iter(getattr(parameter.annotation, "__metadata__", ())), None)  # none of Typer's context
        panel = getattr(declared, "rich_help_panel", None)
        is_option = getattr(declared, "envvar", None) and panel != options.PROGRAM
        value = flags.get(parameter.name)
        if is_option and value != parameter.default and value not in (None, [], ()):
            yield parameter.name.replace("_", "-"), _as_json(value)


def _as_json(value: Any) -> Any:
    """An option's value as JSON has it."""
    if isinstance(value, list | tuple):
        return [_as_json(each) for each in value]
    return path_text(value) if isinstance(value, Path) else value


def _with_default(parameter: Parameter) -> Parameter:
    """The parameter with its default named in the help text: Typer would print it on a line of its own."""
    default, annotation = parameter.default, parameter.annotation
    if default is Parameter.empty or default is None or default is False or default == "":
        return parameter
    (option,) = annotation.__metadata__
    option = copy(option)
    option.help += f" \\[default: {'on' if default is True else default}]"
    return parameter.replace(annotation=Annotated[annotation.__origin__, option])


def _is_hidden(parameter: Parameter) -> bool:
    return any(option.hidden for option in getattr(parameter.annotation, "__metadata__", ()))
