"""The options that commands share: name, environment variable, help, and the check of what was typed.

`--max-tokens` can be given as TRIFORCE_MAX_TOKENS, and so for every option. The command line wins.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from offload.errors import ModelError, UsageError
from triforce_cli.errors import DEBUG_VARIABLE
from triforce_cli.prompt import user_path

OFFLOADABLE = ("weights", "kv")
NONE = "none"
AUTO = "auto"


def option(name: str, help_text: str, panel: str, **settings: Any) -> Any:
    """A Typer option with its environment variable: `--draft-gamma` is also TRIFORCE_DRAFT_GAMMA."""
    variable = "TRIFORCE_" + name.removeprefix("--").replace("-", "_").upper()
    return typer.Option(name, envvar=variable, show_envvar=False, help=help_text, rich_help_panel=panel, **settings)


def switch(name: str, help_text: str, panel: str, **settings: Any) -> Any:
    """An option without a value: off unless given. Its variable takes 1 or 0."""
    return option(name, help_text, panel, metavar="", **settings)


def whole(text: str) -> int:
    """Parses a whole number. Typer's own message would not name what was typed."""
    try:
        return int(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a whole number") from error


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a number") from error


def switch_debugging_on(wanted: bool) -> None:
    if wanted:
        os.environ[DEBUG_VARIABLE] = "1"


MODELS = "Models"
PROMPT = "Prompt"
SAMPLING = "Sampling"
SPECULATION = "Cache and speculation (what is not given is chosen by the plan)"
PLACEMENT = "Placement"
OUTPUT = "Output"

Model = Annotated[
    Path | None,
    option(
        "--model",
        "Folder of the target model (config.json, safetensors, tokenizer). Without it, the embedded demo pair.",
        MODELS,
        metavar="DIR",
    ),
]
Draft = Annotated[
    str | None,
    option(
        "--draft",
        'Folder of the draft model, or "none": the target\'s retrieval cache proposes by itself. '
        "Without it, none for a model that you name.",
        MODELS,
        metavar="DIR|none",
    ),
]

PromptFile = Annotated[
    Path | None,
    option(
        "--prompt-file",
        'UTF-8 text to continue; "-" is standard input, which is also read when it is piped and no file is named.',
        PROMPT,
        metavar="PATH",
    ),
]
Prompt = Annotated[
    str | None,
    option("--prompt", "Text to continue; after a file or piped text it starts on a new line.", PROMPT, metavar="TEXT"),
]

MaxTokens = Annotated[
    int, option("--max-tokens", "Stop after this many new tokens.", SAMPLING, metavar="N", parser=whole)
]
Temperature = Annotated[
    float,
    option("--temperature", "0 always takes the most likely token.", SAMPLING, metavar="X", parser=number),
]
TopP = Annotated[
    float,
    option("--top-p", "Keep the most likely tokens up to this mass; 1 is off.", SAMPLING, metavar="X", parser=number),
]
TopK = Annotated[
    int, option("--top-k", "Keep this many most likely tokens; 0 is off.", SAMPLING, metavar="N", parser=whole)
]
MinP = Annotated[
    float,
    option(
        "--min-p",
        "Drop tokens less likely than this share of the likeliest; 0 is off.",
        SAMPLING,
        metavar="X",
        parser=number,
    ),
]
Seed = Annotated[
    int | None,
    option(
        "--seed",
        "The same seed gives the same text. Without it, every run differs.",
        SAMPLING,
        metavar="N",
        parser=whole,
    ),
]
Stop = Annotated[
    list[str] | None,
    option(
        "--stop",
        "Stop before this text; can be repeated. TRIFORCE_STOP holds several between white space.",
        SAMPLING,
        metavar="TEXT",
    ),
]

CHAT = "Conversation"
SESSION = "Session (what was computed, kept on the disk)"

System = Annotated[
    str,
    option("--system", "What the model is told before the first message.", CHAT, metavar="TEXT", show_default=False),
]
Files = Annotated[
    list[Path] | None,
    option("--file", "A UTF-8 text to put before the first message; can be repeated.", CHAT, metavar="PATH"),
]
Template = Annotated[
    str,
    option(
        "--template",
        "How messages are laid out for the model: auto (its own template; plain where it has none), llama2, chatml, "
        "vicuna or plain.",
        CHAT,
        metavar="NAME",
    ),
]
Session = Annotated[
    str | None,
    option(
        "--session",
        "Keep what was computed under this name, and go on from it where it was kept before (triforce sessions).",
        SESSION,
        metavar="NAME",
    ),
]
CacheFile = Annotated[
    Path | None, option("--cache", "The same in this folder, wherever you want it.", SESSION, metavar="PATH")
]
ReadOnly = Annotated[bool, switch("--read-only", "Go on from the session and leave it as it is.", SESSION)]
NoHistory = Annotated[bool, switch("--no-history", "Do not keep what is typed for the next time.", CHAT)]

Context = Annotated[
    int | None,
    option(
        "--context",
        "Tokens to make room for, prompt and output together.",
        SPECULATION,
        metavar="TOKENS",
        parser=whole,
    ),
]
Budget = Annotated[
    int | None,
    option(
        "--budget",
        "Tokens per layer that the retrieval cache holds, without the tail.",
        SPECULATION,
        metavar="TOKENS",
        parser=whole,
    ),
]
Chunk = Annotated[
    int | None, option("--chunk", "Tokens per retrieved chunk.", SPECULATION, metavar="TOKENS", parser=whole)
]
Gamma = Annotated[
    int | None,
    option(
        "--gamma",
        "Tokens drafted for each round of the target; without it as many as pay, anew in every round.",
        SPECULATION,
        metavar="TOKENS",
        parser=whole,
    ),
]
DraftGamma = Annotated[
    int | None,
    option(
        "--draft-gamma",
        "Tokens drafted for each round of the retrieval level; 0: no draft model; without it as many as pay.",
        SPECULATION,
        metavar="TOKENS",
        parser=whole,
    ),
]
NoLookup = Annotated[
    bool, switch("--no-lookup", "Do not draft what followed earlier occurrences of the last tokens.", SPECULATION)
]
Pace = Annotated[
    Literal["auto", "measured", "planned"],
    option(
        "--pace",
        "By which seconds drafts are lengthened: measured ones or the plan's; auto takes the plan's where a seed is to "
        "give the same text again.",
        SPECULATION,
    ),
]
Sinks = Annotated[
    int,
    option("--sinks", "First tokens that the draft's cache keeps.", SPECULATION, metavar="TOKENS", parser=whole),
]
Window = Annotated[
    int,
    option("--window", "Last tokens that the draft's cache keeps.", SPECULATION, metavar="TOKENS", parser=whole),
]
NoSpeculation = Annotated[
    bool, switch("--no-speculation", "Plain decoding: the same law and, at temperature 0, the same text.", SPECULATION)
]
Selection = Annotated[
    Literal["mass", "published"],
    option(
        "--selection",
        "How chunks are chosen: by attention mass after every verification, or once, by the published rule.",
        SPECULATION,
    ),
]

Device = Annotated[str, option("--device", "auto, cpu, cuda or cuda:N.", PLACEMENT, metavar="DEVICE")]
Dtype = Annotated[
    Literal["auto", "bf16", "fp16", "fp32"],
    option("--dtype", "Arithmetic of weights and caches; auto takes what suits the device and the model.", PLACEMENT),
]
Offload = Annotated[
    str,
    option(
        "--offload",
        "What may be kept on the host and streamed: weights, kv, weights,kv, none, or auto: what has no room.",
        PLACEMENT,
        metavar="WHAT",
    ),
]
DeviceMemory = Annotated[
    float | None,
    option(
        "--device-memory",
        "Use at most this much of the device's memory, in 10^9 bytes; on a CPU, of what stands for it.",
        PLACEMENT,
        metavar="GB",
        parser=number,
    ),
]
LinkGbps = Annotated[
    float | None,
    option(
        "--link-gbps",
        "Pace the link between host and device to this bandwidth, in 10^9 bytes per second (with --offload).",
        PLACEMENT,
        metavar="GB/S",
        parser=number,
    ),
]

MACHINE = "Machine (what is not given is taken from here, or assumed with --gpus)"

Gpus = Annotated[int | None, option("--gpus", "Plan for this many cards.", MACHINE, metavar="N", parser=whole)]
GpuMemory = Annotated[
    float | None,
    option("--gpu-memory", "Free memory of each card, in 10^9 bytes.", MACHINE, metavar="GB", parser=number),
]
HostMemory = Annotated[
    float | None,
    option("--host-memory", "Free memory of the host, in 10^9 bytes.", MACHINE, metavar="GB", parser=number),
]
PlannedLink = Annotated[
    float | None,
    option(
        "--link-gbps",
        "Bandwidth between host and each card, in 10^9 bytes per second.",
        MACHINE,
        metavar="GB/S",
        parser=number,
    ),
]

ShowStats = Annotated[bool, switch("--stats", "After the text, a table of what it cost (standard error).", OUTPUT)]
AsJson = Annotated[bool, switch("--json", "Write one JSON object at the end instead of text as it comes.", OUTPUT)]
Quiet = Annotated[bool, switch("--quiet", "No progress and no notes on standard error.", OUTPUT)]
Debug = Annotated[
    bool,
    switch("--debug", "Show the traceback of an error.", OUTPUT, callback=switch_debugging_on, is_eager=True),
]


@dataclass(frozen=True, kw_only=True)
class Models:
    """Which model folders a command uses."""

    target: Path
    draft: Path | None
    embedded: bool  # the target is the demo model that comes with triforce


def choose_models(model: Path | None, draft: str | None) -> Models:
    """The folders named, or the embedded pair. A model that is named has no draft unless that is named too."""
    chosen = None if draft in (None, NONE) else _folder("draft", Path(str(draft)))
    if model is not None:
        return Models(target=_folder("model", model), draft=chosen, embedded=False)
    if draft is None:
        chosen = embedded_model("demo-draft")
    return Models(target=embedded_model("demo-target"), draft=chosen, embedded=True)


def embedded_model(name: str) -> Path:
    """The folder of a model that comes as package data."""
    folder = Path(str(resources.files("triforce_cli"))) / "models" / name
    if not folder.is_dir():
        raise ModelError(f"the embedded demo model is not installed ({folder} is missing); name one with --model DIR")
    return folder


def offloaded(text: str) -> frozenset[str] | None:
    """From "weights,kv", either alone, "none", or "auto" (None: the plan chooses)."""
    if text.strip() == AUTO:
        return None
    if text.strip() == NONE:
        return frozenset()
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in OFFLOADABLE]
    if unknown:
        raise UsageError(f"offload names {unknown[0]!r}; it may be weights, kv, weights,kv, none or auto")
    return frozenset(names)


def session_path(session: str | None, cache: Path | None, *, read_only: bool) -> Path | None:
    """The folder of the session that was named, if one was."""
    if session is not None and cache is not None:
        raise UsageError("--session and --cache name two sessions; give one of them")
    if session is None and cache is None:
        if read_only:
            raise UsageError("--read-only is about a session and none is named; add --session NAME or --cache PATH")
        return None
    from offload.session.names import session_folder

    return session_folder(session) if session is not None else user_path(str(cache))


def check_max_tokens(max_tokens: int) -> None:
    if max_tokens < 1:
        raise UsageError(f"max-tokens is {max_tokens}, it must be 1 or more")


def check_machine(
    gpus: int | None, gpu_memory: float | None, host_memory: float | None, link_gbps: float | None
) -> None:
    if gpus is not None and gpus not in (1, 2, 4, 8):
        raise UsageError(f"gpus is {gpus}, it must be 1, 2, 4 or 8")
    for name, value in (("gpu-memory", gpu_memory), ("host-memory", host_memory), ("link-gbps", link_gbps)):
        if value is not None and not 0.001 <= value <= 1e6:
            raise UsageError(f"{name} is {value}, it must be from 0.001 to 1000000")


def check_stops(stops: list[str]) -> None:
    if "" in stops:
        raise UsageError("stop is empty, it must be at least one character")


def _folder(name: str, path: Path) -> Path:
    folder = path.expanduser()
    if not folder.is_dir():
        raise ModelError(
            f"{name} {path} is not a folder; models are read from local folders "
            "(hf download REPOSITORY --local-dir DIR fetches one)"
        )
    return folder
