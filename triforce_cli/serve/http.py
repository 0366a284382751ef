"""The HTTP server, in a thread of its own."""

from __future__ import annotations

import asyncio
import socket
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from offload.errors import TriforceError, UsageError
from triforce_cli.ground import log
from triforce_cli.serve import load
from triforce_cli.serve.guard import Guard, Refusal

HEADER_SECONDS = 20.0  # for a client to send the headers of its first request
IDLE_SECONDS = 75.0  # up to the headers of each further one
SEND_SECONDS = 60.0  # for a client to take what was sent
MOST_CONNECTIONS, MOST_OF_ADDRESS = load.MOST_REQUESTS + load.SPARE, load.MOST_OF_ADDRESS + load.SPARE
_CLOSE_SECONDS = 5  # for clients to take the last bytes, when the server stops


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that listens on an address; clients that connect wait until they are served. port: 0 takes a free one.
    Raises UsageError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise UsageError(f"host {host!r} has no address ({error})") from error
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(MOST_CONNECTIONS)
    except OSError as error:
        bound.close()
        raise UsageError(f"{host} port {port} cannot be served ({error.strerror}); --port names another") from error
    return bound


class HttpServer:
    """A web application served on a socket, as a context manager. At its end clients have a few seconds to take what
    was sent. Raises TriforceError if the server had ended by itself."""

    def __init__(self, application: Guard, bound: socket.socket, *, on_end: Callable[[], None]) -> None:
        """on_end: called in the server's thread when it ends, for whatever reason."""
        config = uvicorn.Config(
            application,
            http=Patient,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # the guard logs
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=int(IDLE_SECONDS),
            timeout_graceful_shutdown=_CLOSE_SECONDS,
        )
        self._server, self._bound, self._on_end = uvicorn.Server(config), bound, on_end
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def __enter__(self) -> HttpServer:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        has_failed = not self._thread.is_alive()
        self._server.should_exit = True
        self._thread.join(2 * _CLOSE_SECONDS)
        self._bound.close()
        if has_failed and error is None:
            raise TriforceError("the HTTP server has ended by itself; --log-file FILE has the reason")

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._bound])
        except BaseException:
            log.failure(traceback.format_exc())
            raise
        finally:
            self._on_end()


class Patient(H11Protocol):
    """HTTP/1.1 with limits on the time that a client takes to send the headers of a request, and to take what was sent;
    and on connections: where they are too many, the one that has been idle longest is closed. idle_since: when its last
    answer was sent, or it began."""

    _patience: asyncio.TimerHandle | None = None  # with a client that takes nothing

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.idle_since = self.loop.time()
        self._make_room()
        self._expect_request(None, HEADER_SECONDS)

    @property
    def address(self) -> str:
        return self.client[0] if self.client else ""

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way."""
        return self.cycle is None or self.cycle.response_complete

    def _make_room(self) -> None:
        """Close an idle connection, at worst this one, if there are too many of this address, or in all."""
        found = [each for each in self.connections if isinstance(each, Patient) and not each.transport.is_closing()]
        of_address = [each for each in found if each.address == self.address]
        if len(of_address) > MOST_OF_ADDRESS or len(found) > MOST_CONNECTIONS:
            some = of_address if len(of_address) > MOST_OF_ADDRESS else found
            min((each for each in some if each.is_idle), key=lambda each: each.idle_since).transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_patience()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._end_patience()
        self._patience = self.loop.call_later(SEND_SECONDS, self.transport.abort)  # to close waits for the client

    def resume_writing(self) -> None:
        self._end_patience()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        cast(Guard, self.app).refusals.on_refusal(Refusal(self.address, "-", "-", 400, msg))
        super().send_400_response(msg)

    def _end_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def on_response_complete(self) -> None:
        answered, self.idle_since = self.cycle, self.loop.time()
        super().on_response_complete()  # the next one may begin in here
        self._expect_request(answered, IDLE_SECONDS)

    def _expect_request(self, answered: RequestResponseCycle | None, seconds: float) -> None:
        """Close the connection unless a request follows that was answered."""

        def close() -> None:
            if self.cycle is answered and not self.transport.is_closing():
                self.transport.close()

        self.loop.call_later(seconds, close)
