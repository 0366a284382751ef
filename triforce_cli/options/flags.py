"""Groups of options that commands share. A command takes a group as one parameter; `spread` makes options of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from inspect import Parameter, Signature, cleandoc, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar, get_type_hints, runtime_checkable

from rich.markup import escape

from offload.errors import UsageError, shell_line
from triforce_cli.answering.recorder import Recorder
from triforce_cli.documents.selection import Named
from triforce_cli.ground.text import path_text
from triforce_cli.options import options
from triforce_cli.screen.utf8 import decode_argument, user_path
from triforce_cli.setup.choice import NONE, Models, choose_models
from triforce_cli.setup.engine import StoreSettings

if TYPE_CHECKING:
    from offload.plan.options import Options

OFFLOADABLE = ("weights", "kv")
AUTO = "auto"
HELP_ALL = Parameter("help_all", Parameter.KEYWORD_ONLY, default=False, annotation=options.HelpAll)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """The target and the draft."""

    model: options.Model = None
    draft: options.Draft = None

    def chosen(self, *, weights: bool = True) -> Models:
        """The chosen models. weights: False if config.json is enough. Raises ModelError."""
        return choose_models(self.model, self.draft, weights=weights)


@dataclass(frozen=True, kw_only=True)
class DocumentFlags:
    """The documents that the prompt begins with."""

    prompt_file: options.PromptFiles = None
    more_files: options.MoreFiles = None
    include: options.Include = None

    def named(self) -> Named:
        """The documents as named. Raises UsageError."""
        return named_documents("--prompt-file", self.prompt_file, self.more_files, self.include)


@dataclass(frozen=True, kw_only=True)
class LevelFlags:
    """The levels and their sizes; all of them may be left to the plan."""

    budget: options.Budget = None
    chunk: options.Chunk = None
    gamma: options.Gamma = None
    draft_gamma: options.DraftGamma = None
    weight_bits: options.WeightBits = AUTO
    kv_bits: options.KVBits = AUTO
    no_lookup: options.NoLookup = False
    sinks: options.Sinks = 16
    window: options.Window = 240


@dataclass(frozen=True, kw_only=True)
class CacheFlags(LevelFlags):
    """The options of one request: levels, context, plain decoding."""

    context: options.Context = None
    no_speculation: options.NoSpeculation = False


@dataclass(frozen=True, kw_only=True)
class PlacementFlags:
    """Device, dtype and memory."""

    device: options.Device = "auto"
    gpus: options.Gpus = "1"
    dtype: options.Dtype = "auto"
    offload: options.Offload = "auto"
    device_memory: options.DeviceMemory = None
    link_gbps: options.LinkGbps = None
    link_bits: options.LinkBits = AUTO
    cpu_experts: options.CpuExperts = None


@dataclass(frozen=True, kw_only=True)
class SessionFlags:
    """The session or cache file that keeps rows on the disk."""

    session: options.Session = None
    cache: options.CacheFile = None
    read_only: options.ReadOnly = False

    def path(self) -> Path | None:
        """The session's folder, or None. Raises UsageError."""
        if self.session is not None and self.cache is not None:
            raise UsageError("--session and --cache name two sessions; give one of them")
        if self.session is not None:
            from offload.session.names import session_folder

            return session_folder(self.session)
        if self.cache is not None:
            return user_path(str(self.cache))
        if self.read_only:
            raise UsageError("--read-only is about a session and none is named; add --session NAME or --cache PATH")
        return None


@dataclass(frozen=True, kw_only=True)
class StoreFlags:
    """The prefix store, which keeps rows of prompts on the disk."""

    store: options.Store = True
    store_size: options.StoreSize = None

    def settings(self) -> StoreSettings | None:
        """The settings of the store; None without one. Raises UsageError."""
        if self.store_size is not None and not 0 < self.store_size <= 1e6:
            raise UsageError(f"store-size is {self.store_size:g}, it must be above 0 and at most 1000000 (GB)")
        limit = None if self.store_size is None else int(self.store_size * 1e9)
        return StoreSettings(limit) if self.store else None


class Changed(dict[str, Any]):
    """The options of a command whose values differ from their defaults, by their names, in JSON values. A command has
    them as a parameter of its own, which `spread` fills."""


@dataclass(frozen=True, kw_only=True)
class LogFlags:
    """The answer log, which keeps questions and answers."""

    log: options.Log = True

    def recorder(self, command: str, models: Models, changed: Changed) -> Recorder | None:
        """The recorder of a command's answers; None if they are not kept."""
        return Recorder(command, models, changed) if self.log else None


@dataclass(frozen=True, kw_only=True)
class ProgramFlags:
    """Options of every command. They take effect when they are parsed."""

    config: options.Config = None
    log_file: options.LogFile = None
    debug: options.Debug = False


def question_of(text: str, more: Sequence[str], files: Sequence[Path] | None) -> str:
    """The question. more: words after it, from a question without quotes or a pattern after --file that the shell has
    expanded. Raises UsageError if there are any."""
    if more:
        remedy = f"put the question in quotes: {shell_line('triforce', 'ask', ' '.join([text, *more]))}"
        remedy = "quote the question, and give each document, or their folder, a --file of its own" if files else remedy
        raise UsageError(f"{more[0]!r} is unexpected here; {remedy}")
    return decode_argument("QUESTION", text)


def named_documents(
    option: str, files: Sequence[Path] | None, more: Sequence[Path] | None, include: Sequence[str] | None
) -> Named:
    """The documents as named. more: files after the option's own, from a pattern that the shell has expanded. Raises
    UsageError."""
    if more and not files:
        raise UsageError(f"{more[0]} is unexpected here; name documents with {option} FILE, text with --prompt TEXT")
    if include and not files:
        raise UsageError(f"--include chooses among documents and none are named; name a folder with {option} FOLDER")
    return Named((*(files or ()), *(more or ())), tuple(include or ()))


def plan_options(levels: LevelFlags, **placement: Any) -> Options:
    """The options of the plan. placement: fields of PlacementFlags. Raises UsageError."""
    from offload.plan.options import Options

    given = vars(levels) | placement
    given["lookup"], given["speculation"] = not given.pop("no_lookup"), not given.pop("no_speculation", False)
    given["offload"] = _offloaded(given["offload"])
    for name in ("weight_bits", "kv_bits", "link_bits"):
        if name in given:
            given[name] = _bits(name.replace("_", "-"), given[name])
    if "gpus" in given:
        given["gpus"] = _num_gpus(given["gpus"])
    return Options(**given)


def _num_gpus(text: str) -> int | None:
    """The number of GPUs, from a number or "auto" (None: all of this machine)."""
    if text.strip() == AUTO:
        return None
    try:
        return int(text)
    except ValueError as error:
        raise UsageError(f"gpus is {text!r}; it may be a number or auto") from error


def _bits(name: str, text: str) -> int | None:
    """The number of bits, from a number or "auto" (None: the plan chooses)."""
    try:
        return None if text.strip() == AUTO else int(text)
    except ValueError as error:
        from offload.plan.options import bits_of

        raise UsageError(f"{name} is {text!r}, it must be {bits_of(name)}") from error


def _offloaded(text: str) -> frozenset[str] | None:
    """The offloaded parts, from "weights,kv", one of the two, "none", or "auto" (None: the plan chooses)."""
    if text.strip() == AUTO:
        return None
    if text.strip() == NONE:
        return frozenset()
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in OFFLOADABLE]
    if unknown:
        raise UsageError(f"offload names {unknown[0]!r}; it may be weights, kv, weights,kv, none or auto")
    return frozenset(names)


def flowing(text: str | None) -> str:
    """A docstring as text for --help, which keeps lines and takes brackets for markup: one line per paragraph, brackets
    escaped."""
    return escape("\n\n".join(" ".join(paragraph.split()) for paragraph in cleandoc(text or "").split("\n\n")))


@runtime_checkable
class Group(Protocol):
    """Options that a command takes as one parameter, whose annotation has the group as metadata."""

    def parameters(self) -> Iterable[Parameter]: ...

    def made(self, given: Mapping[str, Any]) -> Any:
        """The command's argument. given: values by parameter. Raises UsageError."""
        ...


@dataclass(frozen=True)
class _Fields:
    """The group of a dataclass's fields, each an option. kind: the dataclass."""

    kind: Any

    def parameters(self) -> Iterator[Parameter]:
        hints = get_type_hints(self.kind, include_extras=True)
        for field in fields(self.kind):
            yield Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name])

    def made(self, given: Mapping[str, Any]) -> Any:
        return self.kind(**given)


def _group(hint: Any) -> Group | None:
    if is_dataclass(hint):
        return _Fields(hint)
    return next((found for found in getattr(hint, "__metadata__", ()) if isinstance(found, Group)), None)


def spread(command: Callable[..., T]) -> Callable[..., T]:
    """`command` with its group parameters replaced by their options. A group is a dataclass, whose fields are options,
    or an annotation with a `Group`. Help texts name defaults. Hidden options come last; `--help-all` shows them. A
    parameter of type `Changed` is no option, and is filled."""
    hints = get_type_hints(command, include_extras=True)
    own_names = [name for name in signature(command).parameters if hints[name] is not Changed]
    filled = [name for name, hint in hints.items() if hint is Changed]
    groups = {name: group for name, hint in hints.items() if name != "return" and (group := _group(hint))}
    spread_out = {name: list(group.parameters()) for name, group in groups.items()}

    def spread_command(**flags: Any) -> T:
        flags.pop(HELP_ALL.name, None)
        changed = Changed(_changed(parameters, flags)) if filled else None
        for name, group in groups.items():
            flags[name] = group.made({option.name: flags.pop(option.name) for option in spread_out[name]})
        return command(**flags, **dict.fromkeys(filled, changed))

    parameters: list[Parameter] = []
    for parameter in map(signature(command).parameters.__getitem__, own_names):
        own = [parameter.replace(annotation=hints[parameter.name])]
        parameters += spread_out.get(parameter.name, own)
    parameters = sorted(map(_with_default, parameters), key=_is_hidden)
    if any(map(_is_hidden, parameters)):
        parameters.append(HELP_ALL)
    spread_command.__name__, spread_command.__doc__ = command.__name__, flowing(command.__doc__)
    spread_command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    spread_command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return spread_command


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
