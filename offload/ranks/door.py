"""A listening socket that admits only connections that know a secret. Other connections are closed unread."""

from __future__ import annotations

import hmac
import selectors
import socket
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from offload.interrupts import waiting

SECRET_BYTES = 32
_MOST = 256  # connections that have not sent the secret yet; one more closes the oldest


@dataclass(eq=False)
class _Visitor:
    connection: socket.socket
    latest: float  # deadline for the secret and the rank, on the monotonic clock
    said: bytes = b""


class Door:
    """A server socket: each client sends the secret and its rank, one byte, within `patience` seconds. A slow client
    does not delay the others, and no byte is interpreted before the secret has been compared. A context manager; its
    end closes the socket and all pending connections.

    host: the address to listen at, "" for all addresses of this machine.
    """

    def __init__(self, host: str, secret: bytes, *, patience: float = 5.0) -> None:
        self._secret, self._patience = secret, patience
        self._server = socket.create_server((host, 0), backlog=socket.SOMAXCONN)
        self._server.setblocking(False)
        self._visitors: list[_Visitor] = []  # oldest first
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)

    @property
    def port(self) -> int:
        port: int = self._server.getsockname()[1]
        return port

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *_: object) -> None:
        while self._visitors:
            self._turn_away(self._visitors[0])
        self._selector.close()
        self._server.close()

    def admit(self, ranks: Collection[int], seconds: float) -> Iterator[tuple[int, socket.socket]]:
        """Each of `ranks` once, with its connection, in order of arrival. Raises TimeoutError if one is missing after
        `seconds`."""
        missing, latest = set(ranks), time.monotonic() + seconds
        while missing:
            now = time.monotonic()
            if now > latest:
                raise TimeoutError
            while self._visitors and self._visitors[0].latest < now:
                self._turn_away(self._visitors[0])
            next_look = min([latest, *(visitor.latest for visitor in self._visitors[:1])])
            with waiting():
                ready = self._selector.select(next_look - now)
            for key, _ in ready:
                if key.data is None:
                    self._accept()
                elif key.data in self._visitors and self._hear(key.data):
                    rank = key.data.said[SECRET_BYTES]
                    if rank in missing:
                        missing.remove(rank)
                        yield rank, self._release(key.data)
                    else:
                        self._turn_away(key.data)

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError:  # the client has disconnected
            return
        connection.setblocking(False)
        visitor = _Visitor(connection, time.monotonic() + self._patience)
        self._visitors.append(visitor)
        self._selector.register(connection, selectors.EVENT_READ, visitor)
        if len(self._visitors) > _MOST:
            self._turn_away(self._visitors[0])

    def _hear(self, visitor: _Visitor) -> bool:
        """Whether the client has sent the secret and its rank. A client that sent anything else is turned away."""
        try:
            piece = visitor.connection.recv(SECRET_BYTES + 1 - len(visitor.said))
        except BlockingIOError:
            return False
        except OSError:
            piece = b""
        visitor.said += piece
        if piece and len(visitor.said) <= SECRET_BYTES:
            return False
        knows = len(visitor.said) > SECRET_BYTES and hmac.compare_digest(visitor.said[:SECRET_BYTES], self._secret)
        if not knows:
            self._turn_away(visitor)
        return knows

    def _release(self, visitor: _Visitor) -> socket.socket:
        """Hand over the client's connection, in blocking mode."""
        self._selector.unregister(visitor.connection)
        self._visitors.remove(visitor)
        visitor.connection.setblocking(True)
        return visitor.connection

    def _turn_away(self, visitor: _Visitor) -> None:
        self._release(visitor).close()


def knock(host: str, port: int, secret: bytes, rank: int, *, seconds: float) -> socket.socket:
    """Connect to a door and send the secret and the rank. Raises OSError where it does not answer within `seconds`."""
    connection = socket.create_connection((host, port), seconds)
    connection.settimeout(None)
    connection.sendall(secret + bytes([rank]))
    return connection
