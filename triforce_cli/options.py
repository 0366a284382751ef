"""The options that commands share: name, environment variable, help, and the check of what was typed.

`--max-tokens` can be given as TRIFORCE_MAX_TOKENS, and so for every option. The command line wins.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from offload.errors import UsageError
from triforce_cli import log
from triforce_cli.errors import DEBUG_VARIABLE, FILE_OF_DEFAULTS
from triforce_cli.prompt import user_path


def option(name: str, help_text: str, panel: str, *, short: str | None = None, **settings: Any) -> Any:
    """A Typer option with its environment variable: `--draft-gamma` is also TRIFORCE_DRAFT_GAMMA."""
    variable = "TRIFORCE_" + name.removeprefix("--").replace("-", "_").upper()
    names = (name,) if short is None else (name, short)
    return typer.Option(*names, envvar=variable, show_envvar=False, help=help_text, rich_help_panel=panel, **settings)


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


def switch_debugging_on(wanted: bool) -> bool:
    if wanted:
        os.environ[DEBUG_VARIABLE] = "1"
    return wanted


def use_configuration(context: typer.Context, named: Path | None) -> Path | None:
    """Let options that nobody gives be what the configuration file says."""
    from triforce_cli.configuration import Configuration

    configuration = Configuration.read(named, context.find_root().command)
    context.default_map = configuration.of(_words(context), context.command)
    context.meta[FILE_OF_DEFAULTS] = configuration.file
    return named


def _words(context: Any) -> tuple[str, ...]:
    """Of the command line up to here, without the program's name: ("sessions", "ls")."""
    return () if context.parent is None else (*_words(context.parent), str(context.info_name))


def begin_log(file: Path | None) -> Path | None:
    if file is not None:
        log.begin(user_path(str(file)))
    return file


MODELS = "Models"
PROMPT = "Prompt"
SAMPLING = "Sampling"
SPECULATION = "Cache and speculation (what is not given is chosen by the plan)"
PLACEMENT = "Placement"
OUTPUT = "Output"
PROGRAM = "Program"

Model = Annotated[
    Path | None,
    option(
        "--model",
        "The target model: a folder (config.json, safetensors, tokenizer), or the name of one that was pulled "
        "(triforce models). Without it, the embedded demo pair.",
        MODELS,
        metavar="MODEL",
    ),
]
Draft = Annotated[
    str | None,
    option(
        "--draft",
        'The draft model, or "none": the target\'s retrieval cache proposes by itself. Without it, the one that suits '
        "a model that you name, if it was pulled; none for a folder.",
        MODELS,
        metavar="MODEL|none",
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


SESSION = "Session (what was computed, kept on the disk)"

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


AsJson = Annotated[bool, switch("--json", "Write one JSON object at the end instead of text as it comes.", OUTPUT)]
Quiet = Annotated[bool, switch("--quiet", "No progress and no notes on standard error.", OUTPUT, short="-q")]
Config = Annotated[
    Path | None,
    option(
        "--config",
        "Read what is not given here from this file instead of your own (triforce config show).",
        PROGRAM,
        metavar="FILE",
        callback=use_configuration,
        is_eager=True,
    ),
]
LogFile = Annotated[
    Path | None,
    option(
        "--log-file",
        "Append what happens to this file, errors with their tracebacks; never prompts or replies.",
        PROGRAM,
        metavar="FILE",
        callback=begin_log,
    ),
]
Debug = Annotated[
    bool,
    switch("--debug", "Show the traceback of an error.", PROGRAM, callback=switch_debugging_on, is_eager=True),
]


def check_max_tokens(max_tokens: int) -> None:
    if max_tokens < 1:
        raise UsageError(f"max-tokens is {max_tokens}, it must be 1 or more")
