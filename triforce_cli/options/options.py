"""The options that commands share: name, environment variable, help, and the check of what was typed.

`--max-tokens` can be given as TRIFORCE_MAX_TOKENS, and so for every option. The command line wins.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from offload.errors import UsageError
from triforce_cli.options import callbacks, completion

if TYPE_CHECKING:
    pass


def option(name: str, help_text: str, panel: str, *, short: str | None = None, **settings: Any) -> Any:
    """A Typer option with its environment variable: `--draft-gamma` is also TRIFORCE_DRAFT_GAMMA."""
    variable = "TRIFORCE_" + name.removeprefix("--").partition("/")[0].replace("-", "_").upper()
    names = (name,) if short is None else (name, short)
    settings = {"show_envvar": False, "show_default": False, **settings}
    return typer.Option(*names, envvar=variable, help=help_text, rich_help_panel=panel, **settings)


MOST = 2**24  # the largest count on the command line


def switch(name: str, help_text: str, panel: str, **settings: Any) -> Any:
    """An option without a value: off unless given. Its variable takes 1 or 0."""
    return option(name, help_text, panel, metavar="", **settings)


def whole(text: str) -> int:
    """Parses a whole number. Typer's own message would not name what was typed."""
    try:
        return int(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a whole number") from error


def count(text: str) -> int | None:
    """The whole number from 1 to MOST in `text`; None if it is not one."""
    found = int(text) if text.isdecimal() and len(text) <= len(str(MOST)) else 0
    return found if 1 <= found <= MOST else None


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a number") from error


MODELS = "Models"
PROMPT = "Prompt"
SAMPLING = "Sampling"
SPECULATION = "Cache and speculation (the plan chooses what is not given)"
EXPERT = "For experts"
PLACEMENT = "Placement"
OUTPUT = "Output"
PROGRAM = "Program"

Model = Annotated[
    Path | None,
    option(
        "--model",
        "The target: folder, GGUF file, name, alias or OWNER/NAME:Q4_K_M. Without it, the demo pair.",
        MODELS,
        short="-m",
        metavar="MODEL",
        callback=callbacks.without_alias,
        autocompletion=completion.models,
        readable=False,  # the error of the model has the remedy
    ),
]
Draft = Annotated[
    str | None,
    option(
        "--draft",
        'The draft model, or "none". Without it, the target\'s own head, or a recommended one.',
        MODELS,
        metavar="MODEL|none",
        callback=callbacks.draft_without_alias,
        autocompletion=completion.drafts,
    ),
]

FetchYes = Annotated[
    bool,
    switch("--yes", "Fetch OWNER/NAME:LABEL without asking.", MODELS, short="-y"),
]

PromptFiles = Annotated[
    list[Path] | None,
    option(
        "--prompt-file",
        'Document, folder or pattern; repeatable. "-" is standard input, the default where piped.',
        PROMPT,
        short="-f",
        metavar="PATH",
    ),
]
MoreFiles = Annotated[
    list[Path] | None,
    typer.Argument(metavar="PATH", help="More of --prompt-file, as a shell writes them for *.pdf.", hidden=True),
]
DocumentFiles = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="FILE",
        help='Documents, patterns or folders, as --prompt-file of triforce generate takes them; "-" is standard input, '
        "the default.",
    ),
]
Include = Annotated[
    list[str] | None,
    option(
        "--include",
        "Files to read in folders; !X: not X.",
        PROMPT,
        metavar="PATTERN",
    ),
]
Prompt = Annotated[
    str | None,
    option("--prompt", "Text to continue, below documents.", PROMPT, metavar="TEXT"),
]

MaxTokens = Annotated[int, option("--max-tokens", "New tokens at most.", SAMPLING, metavar="N", parser=whole)]

SESSION = "Session (what was computed, kept on disk)"

Session = Annotated[
    str | None,
    option(
        "--session",
        "Keep what was computed; resume from it.",
        SESSION,
        metavar="NAME",
        autocompletion=completion.sessions,
    ),
]
CacheFile = Annotated[
    Path | None,
    option("--cache", "Keep what was computed in this folder.", SESSION, metavar="PATH"),
]
ReadOnly = Annotated[bool, switch("--read-only", "Resume without changing it.", SESSION)]
Store = Annotated[
    bool,
    option(
        "--store/--no-store",
        "Keep rows of long prompts.",
        SESSION,
        metavar="",
    ),
]
StoreSize = Annotated[
    float | None,
    option(
        "--store-size",
        "Most bytes that --store keeps, in 10^9; by default 20, or a tenth of the free disk if less.",
        SESSION,
        metavar="GB",
        parser=number,
        hidden=True,
    ),
]

Log = Annotated[
    bool,
    option(
        "--log/--no-log",
        "Keep answers with options in clear.",
        SESSION,
        metavar="",
    ),
]

GivenPlan = Annotated[
    Path | None,
    option(
        "--plan",
        "Use the plan that --json printed.",
        SPECULATION,
        metavar="FILE",
    ),
]
Context = Annotated[
    int | None,
    option(
        "--context",
        "Tokens to reserve memory for, prompt and output together.",
        SPECULATION,
        metavar="TOKENS",
        parser=whole,
    ),
]
Budget = Annotated[
    int | None,
    option(
        "--budget",
        "Tokens per layer in the retrieval cache, without the tail.",
        SPECULATION,
        metavar="TOKENS",
        parser=whole,
    ),
]
Chunk = Annotated[
    int | None, option("--chunk", "Tokens per retrieved chunk.", EXPERT, metavar="TOKENS", parser=whole, hidden=True)
]
Gamma = Annotated[
    int | None,
    option(
        "--gamma",
        "Tokens drafted for each target pass; without it, chosen anew in every round.",
        SPECULATION,
        hidden=True,
        metavar="TOKENS",
        parser=whole,
    ),
]
DraftGamma = Annotated[
    int | None,
    option(
        "--draft-gamma",
        "Tokens drafted for each retrieval pass, 0 for no draft model; without it, chosen anew in every round.",
        EXPERT,
        metavar="TOKENS",
        parser=whole,
        hidden=True,
    ),
]
WeightBits = Annotated[
    str,
    option(
        "--weight-bits",
        "Bits of the weights with which the target drafts for itself: 16, 6, 4 or auto.",
        SPECULATION,
        metavar="BITS",
        hidden=True,
    ),
]
KVBits = Annotated[
    str,
    option(
        "--kv-bits",
        "Bits of the cache, or with --budget of a part of it, over which the target drafts for itself: 16, 4 or auto.",
        SPECULATION,
        metavar="BITS",
        hidden=True,
    ),
]
NoLookup = Annotated[
    bool,
    switch(
        "--no-lookup",
        "Do not draft by lookup: what followed earlier occurrences of the last tokens.",
        SPECULATION,
        hidden=True,
    ),
]
Sinks = Annotated[
    int,
    option(
        "--sinks", "First tokens that the draft's cache keeps.", EXPERT, metavar="TOKENS", parser=whole, hidden=True
    ),
]
Window = Annotated[
    int,
    option(
        "--window", "Last tokens that the draft's cache keeps.", EXPERT, metavar="TOKENS", parser=whole, hidden=True
    ),
]
NoSpeculation = Annotated[
    bool,
    switch(
        "--no-speculation",
        "Plain decoding: the same distribution and, at temperature 0, the same text.",
        SPECULATION,
    ),
]

Device = Annotated[str, option("--device", "auto, cpu, cuda or cuda:N.", PLACEMENT, metavar="DEVICE")]
Dtype = Annotated[
    Literal["auto", "bf16", "fp16", "fp32"],
    option(
        "--dtype",
        "auto, bf16, fp16 or fp32.",
        PLACEMENT,
        metavar="DTYPE",
    ),
]
Offload = Annotated[
    str,
    option(
        "--offload",
        "What may be streamed from the host: weights, kv, weights,kv, none, or auto: what does not fit.",
        PLACEMENT,
        metavar="WHAT",
    ),
]
Gpus = Annotated[
    str,
    option(
        "--gpus",
        'GPUs that share the model, or processes on a CPU; "auto": all GPUs.',
        PLACEMENT,
        metavar="N",
    ),
]
DeviceMemory = Annotated[
    float | None,
    option(
        "--device-memory",
        "Device memory at most, simulated on a CPU.",
        PLACEMENT,
        metavar="GB",
        parser=number,
    ),
]
HostMemory = Annotated[
    float | None,
    option(
        "--host-memory",
        "Host memory at most; experts of a mixture that have no room there are read from the model's file.",
        PLACEMENT,
        metavar="GB",
        parser=number,
        hidden=True,
    ),
]
LinkGbps = Annotated[
    float | None,
    option(
        "--link-gbps",
        "Bandwidth of the link to the host at most, in 10^9 bytes per second (with --offload).",
        PLACEMENT,
        metavar="GB/S",
        parser=number,
    ),
]

CpuExperts = Annotated[
    int | None,
    option(
        "--cpu-experts",
        "Layers at most in which the CPU may run experts that are on the host; by default as the plan says.",
        PLACEMENT,
        metavar="LAYERS",
        parser=whole,
        hidden=True,
    ),
]
LinkBits = Annotated[
    str,
    option(
        "--link-bits",
        "Bits of a bf16 number that cross the link: 16, 12 (9 or 8 where codes are there; none is lost) or auto.",
        PLACEMENT,
        metavar="BITS",
        hidden=True,
    ),
]


Logprobs = Annotated[
    int | None,
    option(
        "--logprobs",
        "JSON has each token's log-probability, and those of the N likeliest tokens in its place.",
        OUTPUT,
        metavar="N",
        parser=whole,
        hidden=True,
    ),
]
Cite = Annotated[
    bool,
    switch("--cite", "Below the answer, the places it came from.", OUTPUT),
]
AsJson = Annotated[bool, switch("--json", "Write one JSON object at the end instead of text.", OUTPUT)]
Quiet = Annotated[bool, switch("--quiet", "No progress and no notes on standard error.", OUTPUT, short="-q")]
Config = Annotated[
    Path | None,
    option(
        "--config",
        "Configuration file for options not given here, instead of your own (triforce config show).",
        PROGRAM,
        metavar="FILE",
        callback=callbacks.use_configuration,
        is_eager=True,
    ),
]
EditedConfig = Annotated[
    Path | None,
    option(
        "--config",
        "This file, instead of your own configuration file.",
        PROGRAM,
        metavar="FILE",
        callback=callbacks.use_configuration_as_far_as_it_is_one,
        is_eager=True,
    ),
]
LogFile = Annotated[
    Path | None,
    option(
        "--log-file",
        "Append events, and errors with tracebacks, to this file; never prompts or replies.",
        PROGRAM,
        metavar="FILE",
        callback=callbacks.begin_log,
    ),
]
HelpAll = Annotated[
    bool,
    typer.Option(
        "--help-all",
        metavar="",
        callback=callbacks.show_all_help,
        is_eager=True,
        help="Show the options for experts too, and exit.",
    ),
]
Debug = Annotated[
    bool,
    switch("--debug", "Show the traceback of an error.", PROGRAM, callback=callbacks.switch_debugging, is_eager=True),
]


def checked_seconds(name: str, seconds: float | None) -> float | None:
    """The seconds of an option, or None. Raises UsageError."""
    if seconds is not None and not 0 < seconds < 1e9:
        raise UsageError(f"{name} is {seconds:g}, it must be above 0 and below 1000000000 seconds")
    return seconds


def check_max_tokens(max_tokens: int) -> None:
    if max_tokens < 1:
        raise UsageError(f"max-tokens is {max_tokens}, it must be 1 or more")


def check_min_tokens(min_tokens: int, max_tokens: int) -> None:
    if min_tokens > max_tokens:
        raise UsageError(f"min-tokens is {min_tokens}, it must be at most max-tokens, {max_tokens}")
