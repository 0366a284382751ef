"""Groups of options that commands share. A command takes a group as one parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.errors import UsageError, shell_line
from triforce_cli.answering.recorder import Recorder
from triforce_cli.documents.selection import Named
from triforce_cli.options import options
from triforce_cli.options.call import Changed
from triforce_cli.options.fetching import make_present
from triforce_cli.screen.utf8 import decode_argument, user_path
from triforce_cli.setup.choice import NONE, Models, choose_models
from triforce_cli.setup.engine import Setup, StoreSettings
from triforce_cli.setup.plan_file import beside_given

if TYPE_CHECKING:
    from offload.plan.options import Options

OFFLOADABLE = ("weights", "kv")
AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """The target and the draft."""

    model: options.Model = None
    draft: options.Draft = None
    yes: options.FetchYes = False

    def chosen(self, *, weights: bool = True, quiet: bool = False) -> Models:
        """The chosen models; GGUF files that are named by their labels are fetched if need be. weights: False if
        config.json is enough. Raises TriforceError."""
        self.make_present(quiet=quiet)
        return choose_models(self.model, self.draft, weights=weights)

    def make_present(self, *, quiet: bool = False) -> None:
        """Fetch the named GGUF files that are not here, see `fetching.make_present`."""
        make_present(self.model, self.draft, yes=self.yes, quiet=quiet)


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
    host_memory: options.HostMemory = None
    link_gbps: options.LinkGbps = None
    link_bits: options.LinkBits = AUTO
    cpu_experts: options.CpuExperts = None


@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """An engine: a plan from a file, or what is wanted of one."""

    plan: options.GivenPlan = None
    decoding: CacheFlags
    placement: PlacementFlags

    def setup(
        self, models: ModelFlags, store: StoreFlags | None = None, *, cites: bool = False, quiet: bool = False
    ) -> Setup:
        """The models, the options of their plan, and the prefix store. quiet: a fetch shows nothing. Raises
        TriforceError."""
        wanted = plan_options(self.decoding, **vars(self.placement), masses=cites)
        chosen, given = beside_given(self.plan, wanted)
        return Setup(models.chosen(quiet=quiet), chosen, given, None if store is None else store.settings())


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


@dataclass(frozen=True, kw_only=True)
class LogFlags:
    """The answer log, which keeps questions and answers."""

    log: options.Log = True

    def recorder(self, command: str, models: Models, changed: Changed) -> Recorder | None:
        """The recorder of a command's answers; None if they are not kept."""
        return Recorder(command, models, changed) if self.log else None


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
        given["gpus"] = number_of_gpus(given["gpus"])
    return Options(**given)


def number_of_gpus(text: str) -> int | None:
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
