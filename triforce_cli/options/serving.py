"""The options of a server, of `serve` and of commands that start one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from triforce_cli.options.answering import WantedFlags
from triforce_cli.options.flags import EngineFlags, ModelFlags, StoreFlags
from triforce_cli.options.options import SAMPLING, number, option, switch, whole

SERVER = "Server"
CONTEXT = 32_768  # tokens of a prompt and its answer, unless the model's or the memory's limit is below

Host = Annotated[str, option("--host", "The address to listen on; others need --api-key.", SERVER, metavar="HOST")]
Port = Annotated[int, option("--port", "The port; 0 takes a free one.", SERVER, metavar="N", parser=whole)]
Key = Annotated[
    str | None,
    option(
        "--api-key",
        "The key that every request has to carry; TRIFORCE_API_KEY keeps it off the list of processes.",
        SERVER,
        metavar="KEY",
        show_default=False,
    ),
]
Origins = Annotated[
    list[str] | None,
    option(
        "--allow-origin",
        "An origin of web pages that may use the server, such as http://localhost:3000. Can be repeated.",
        SERVER,
        metavar="URL",
    ),
]
Names = Annotated[
    list[str] | None,
    option(
        "--serve-as",
        "A name of the model in requests, besides its own. Can be repeated.",
        SERVER,
        metavar="NAME",
    ),
]
Cites = Annotated[
    bool, switch("--cite", 'Find the places that answers come from, where requests have "cite": true.', SERVER)
]
AtATime = Annotated[int, option("--batch", "Requests that are answered at a time.", SERVER, metavar="N", parser=whole)]
Waiting = Annotated[
    int,
    option(
        "--max-waiting", "Requests that may wait; a further one is refused (429).", SERVER, metavar="N", parser=whole
    ),
]
OtherModels = Annotated[
    bool,
    switch("--models", "Load any installed model that a request names, in place of the one before.", SERVER),
]
IdleUnload = Annotated[
    float | None,
    option(
        "--idle-unload",
        "Give the model's memory back after so many seconds without a request; the next one loads it again.",
        SERVER,
        metavar="SECONDS",
        parser=number,
        show_default=False,
    ),
]
KeepBilling = Annotated[
    bool,
    switch(
        "--keep-billing",
        "Leave Claude Code's billing block, which changes with each request, in prompts.",
        SERVER,
    ),
]
MaxTokens = Annotated[
    int,
    option(
        "--max-tokens",
        "New tokens at most, where a request sets no limit.",
        SAMPLING,
        metavar="N",
        parser=whole,
    ),
]


@dataclass(frozen=True, kw_only=True)
class ServedFlags(WantedFlags):
    """Wishes for answers, where requests have none."""

    max_tokens: MaxTokens = 4096


@dataclass(frozen=True, kw_only=True)
class ServerFlags:
    """A server: its model, its address, who may use it, and what it answers with."""

    pair: ModelFlags
    host: Host = "127.0.0.1"
    port: Port = 8080
    api_key: Key = None
    allow_origin: Origins = None
    serve_as: Names = None
    batch: AtATime = 1
    max_waiting: Waiting = 64
    models: OtherModels = False
    idle_unload: IdleUnload = None
    keep_billing: KeepBilling = False
    cite: Cites = False
    wanted: ServedFlags
    engine: EngineFlags
    store: StoreFlags
