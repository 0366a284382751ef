"""`triforce serve`: answers over HTTP, for programs that speak OpenAI's or Anthropic's API."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from offload.errors import UsageError
from offload.interrupts import ending_of, heard
from triforce_cli.options import options
from triforce_cli.options.call import spread
from triforce_cli.options.serving import CONTEXT, ServerFlags
from triforce_cli.screen.output import Output
from triforce_cli.setup.choice import Models

if TYPE_CHECKING:
    import socket

    from triforce_cli.serve.access import Access


@spread
def serve(*, server: ServerFlags, quiet: options.Quiet = False) -> None:
    """Answer requests over HTTP: OpenAI's chat completions, completions and responses, and Anthropic's messages.

    Sampling options are defaults for requests that leave them out.

    Example: triforce serve --model path/to/model, then OPENAI_BASE_URL=http://127.0.0.1:8080/v1 for a client.
    """
    limits = (
        *(("port", server.port, 0, 65_535), ("batch", server.batch, 1, 64)),
        ("max-waiting", server.max_waiting, 1, options.MOST),
    )
    for name, value, least, most in limits:
        if not least <= value <= most:
            raise UsageError(f"{name} is {value}, it must be a whole number from {least} to {most}")
    idle_seconds = options.checked_seconds("idle-unload", server.idle_unload)
    if server.models and server.engine.plan is not None:
        raise UsageError("--plan is for one model; leave --models or --plan out")
    setup = server.engine.setup(server.pair, server.store, cites=server.cite, quiet=quiet)
    access = _access(server.host, server.api_key, server.allow_origin or ())
    names = _names(server.serve_as or (), setup.models, server.pair.model)
    wishes = server.wanted.checked()
    server.wanted.chat.layout()  # is checked before anything is loaded
    _check_installed()
    from triforce_cli.serve.app import Service, web_application
    from triforce_cli.serve.catalogue import Catalogue
    from triforce_cli.serve.http import HttpServer, listening_socket
    from triforce_cli.serve.loop import Loop
    from triforce_cli.serve.notes import answered, refused, serving
    from triforce_cli.serve.scheduler import Scheduler
    from triforce_cli.serve.served import Loader, Served
    from triforce_cli.serve.store_use import StoreWatch
    from triforce_cli.serve.turns import Turns

    with Output(quiet=quiet) as output, ExitStack() as stack:

        def note(line: str) -> None:
            with suppress(OSError):  # standard error has gone, and with it the log
                output.note(_timed(line))

        bound = listening_socket(access.host, server.port)
        scheduler = Scheduler(
            most_waiting=server.max_waiting, on_end=lambda ending: output.note(_timed(answered(ending)))
        )
        catalogue = Catalogue(setup, names, has_others=server.models, limit=server.engine.decoding.context or CONTEXT)
        turns = Turns[Served](idle_seconds=idle_seconds)
        service = Service(
            catalogue,
            turns,
            scheduler,
            note,
            shows_thoughts=server.wanted.chat.how() == "show",
            store=None if setup.store is None else StoreWatch(setup.store.limit),
        )
        application = web_application(service, access, lambda refusal: note(refused(refusal)))

        def begin(served: Served) -> None:
            stack.enter_context(heard(scheduler.hear))
            stack.enter_context(HttpServer(application, bound, on_end=scheduler.stop))
            output.note(serving(_url(bound), names[0], served.context))

        Loop(catalogue, Loader(server, wishes, output), turns, scheduler, note, begin).run()
    if scheduler.num_dropped and scheduler.signal is not None:
        raise ending_of(scheduler.signal)


def _check_installed() -> None:
    """Raises UsageError if a package of the server is missing."""
    for name in ("starlette", "uvicorn", "prometheus_client"):
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
