"""`triforce serve`: answers over HTTP, for programs that speak OpenAI's or Anthropic's API."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

from offload.errors import UsageError
from offload.interrupts import ending_of, heard
from triforce_cli.answering.request import Wanted
from triforce_cli.options import options
from triforce_cli.options.answering import ChatFlags, EndFlags, Layout, setup, wanted
from triforce_cli.options.control import Sampling
from triforce_cli.options.flags import CacheFlags, ModelFlags, PlacementFlags, ProgramFlags, StoreFlags, spread
from triforce_cli.options.options import option, whole
from triforce_cli.screen.output import Output
from triforce_cli.setup.choice import Models
from triforce_cli.setup.engine import Prepared, Setup, open_engine

if TYPE_CHECKING:
    import socket

    from offload.plan.planner import Plan
    from triforce_cli.serve.access import Access
    from triforce_cli.serve.job import Ending
    from triforce_cli.serve.scheduler import Scheduler

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
AtATime = Annotated[int, option("--batch", "Requests that are answered at a time.", SERVER, metavar="N", parser=whole)]
Waiting = Annotated[
    int,
    option(
        "--max-waiting", "Requests that may wait; a further one is refused (429).", SERVER, metavar="N", parser=whole
    ),
]
MaxTokens = Annotated[
    int,
    option(
        "--max-tokens",
        "New tokens at most, where a request sets no limit.",
        options.SAMPLING,
        metavar="N",
        parser=whole,
    ),
]


@dataclass(frozen=True, kw_only=True)
class Serve:
    """One `triforce serve`, parsed. names: of the model in requests. num_sequences: requests at a time. shows_thoughts:
    to clients."""

    access: Access
    port: int
    names: tuple[str, ...]
    num_sequences: int
    most_waiting: int
    wanted: Wanted
    layout: Layout
    shows_thoughts: bool
    setup: Setup
    quiet: bool

    def run(self) -> None:
        """Bind the address, load the model, then answer until a signal comes. Answers under way may end; if some could
        not, the signal's exit code tells."""
        _check_installed()
        from triforce_cli.answering.several import Answers
        from triforce_cli.serve.http import HttpServer, listening_socket
        from triforce_cli.serve.job import Job
        from triforce_cli.serve.notes import serving

        with Output(quiet=self.quiet) as output:
            bound = listening_socket(self.access.host, self.port)
            prepared = self.setup.prepare(output, sampling=self.wanted.sampling)
            output.note(prepared.models.answers_note)
            plan = self._plan(prepared)
            output.planned(plan)
            with open_engine(prepared, plan, on_progress=output.progress) as engine:
                scheduler = self._scheduler(output)
                application = self._application(prepared, plan, scheduler, output)
                with (
                    Answers[Job](engine) as answers,
                    heard(scheduler.hear),
                    HttpServer(application, bound, on_end=scheduler.stop),
                ):
                    output.note(serving(_url(bound), self.names[0], plan.request.capacity))
                    scheduler.run(answers, prepared.tokenizer)
        if scheduler.num_dropped and scheduler.signal is not None:
            raise ending_of(scheduler.signal)

    def _plan(self, prepared: Prepared) -> Plan:
        """The plan for the context. Raises DoesNotFit."""
        request = prepared.request
        context = request.context
        if self.setup.options.context is None:
            context = min(CONTEXT, request.largest_context() or context)
        plan = request.plan(num_prompt_tokens=context - 1, max_tokens=1)
        return request.together(plan, self.num_sequences, most=self.num_sequences)

    def _scheduler(self, output: Output) -> Scheduler:
        from triforce_cli.serve.notes import answered
        from triforce_cli.serve.scheduler import Scheduler

        def on_end(ending: Ending) -> None:
            output.note(_timed(answered(ending)))

        return Scheduler(most_waiting=self.most_waiting, on_end=on_end)

    def _application(self, prepared: Prepared, plan: Plan, scheduler: Scheduler, output: Output) -> Any:
        from triforce_cli.batch.prompts import Prompts
        from triforce_cli.serve.app import Served, Service, web_application
        from triforce_cli.serve.notes import refused
        from triforce_cli.serve.reader import Reader

        def note(line: str) -> None:
            with suppress(OSError):  # standard error has gone, and with it the log
                output.note(_timed(line))

        context = plan.request.capacity
        prompts = Prompts(prepared.limited(context), self.layout)
        output.note(prompts.notice(self.wanted))
        reader = Reader(prompts, self.wanted, names=self.names, context=context)
        served = Served(self.names, int(time.time()), context, self.shows_thoughts)
        return web_application(
            Service(served, reader, scheduler, note), self.access, lambda refusal: note(refused(refusal))
        )


def _check_installed() -> None:
    """Raises UsageError if a package of the server is missing."""
    for name in ("starlette", "uvicorn"):
        if find_spec(name) is None:
            raise UsageError(f"the server needs {name}, which is not installed: pip install 'triforce[serve]'")


def _timed(line: str) -> str:
    return f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}"


def _url(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _access(host: str, key: str | None, origins: Iterable[str]) -> Access:
    """Raises UsageError."""
    from triforce_cli.serve.access import Access, is_loopback

    if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key != ""):
        raise UsageError("api-key must be a text of printable ASCII characters, without spaces around it")
    if key is None and not is_loopback(host):
        raise UsageError(f"host is {host!r}, which other machines may reach; that needs a key (--api-key KEY)")
    for origin in origins:
        parts = urlsplit(origin)
        if not parts.scheme or not parts.netloc or parts.path or parts.query or parts.fragment:
            raise UsageError(f"allow-origin is {origin!r}, it must be an origin such as http://localhost:3000")
    return Access(host, key, frozenset(origins))


def _names(given: Sequence[str], models: Models, typed: Path | None) -> tuple[str, ...]:
    """The model's names: those given, the one by which it was named, and its folder's."""
    own = () if typed is None or os.path.exists(typed) else (str(typed),)
    return tuple(dict.fromkeys((*given, *own, models.target.name)))


@spread
def serve(
    *,
    models: ModelFlags,
    host: Host = "127.0.0.1",
    port: Port = 8080,
    api_key: Key = None,
    allow_origin: Origins = None,
    serve_as: Names = None,
    batch: AtATime = 1,
    max_waiting: Waiting = 64,
    chat: ChatFlags,
    max_tokens: MaxTokens = 4096,
    sampling: Sampling,
    ends: EndFlags,
    plan: options.GivenPlan = None,
    decoding: CacheFlags,
    placement: PlacementFlags,
    store: StoreFlags,
    quiet: options.Quiet = False,
    program: ProgramFlags,
) -> Serve:
    """Answer requests over HTTP: OpenAI's chat completions, completions and responses, and Anthropic's messages.

    Sampling options are defaults for requests that leave them out.

    Example: triforce serve --model path/to/model, then OPENAI_BASE_URL=http://127.0.0.1:8080/v1 for a client.
    """
    limits = (("port", port, 0, 65_535), ("batch", batch, 1, 64), ("max-waiting", max_waiting, 1, options.MOST))
    for name, value, least, most in limits:
        if not least <= value <= most:
            raise UsageError(f"{name} is {value}, it must be a whole number from {least} to {most}")
    started = setup(models, decoding, placement, store, cites=False, plan=plan)
    return Serve(
        access=_access(host, api_key, allow_origin or ()),
        port=port,
        names=_names(serve_as or (), started.models, models.model),
        num_sequences=batch,
        most_waiting=max_waiting,
        wanted=wanted(max_tokens, sampling, ends=ends, cites=False, logprobs=None, chat=chat),
        layout=chat.layout(),
        shows_thoughts=chat.how() == "show",
        setup=started,
        quiet=quiet,
    )
