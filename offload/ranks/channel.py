"""Messages between rank 0 and another rank: JSON objects over a socket, each whole or not at all."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Mapping
from typing import Any

Message = Mapping[str, Any]
_LENGTH_BYTES = 4  # before each message; a length of zero is a heartbeat
_PIECE_BYTES = 1 << 16


class Channel:
    """One end of a connection. Any thread may send, one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._sending, self._received = connection, threading.Lock(), bytearray()

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: Message) -> None:
        """Send a message. Raises OSError where the other end is closed."""
        content = json.dumps(message).encode()
        with self._sending:
            self._connection.sendall(len(content).to_bytes(_LENGTH_BYTES, "big") + content)

    def beat(self) -> None:
        """Send a heartbeat, unless another thread is sending a message. Raises OSError."""
        if self._sending.acquire(blocking=False):
            try:
                self._connection.sendall(bytes(_LENGTH_BYTES))
            finally:
                self._sending.release()

    def receive(self) -> list[dict[str, Any]]:
        """The messages that the next bytes complete, without heartbeats; waits for at least a byte. Raises EOFError
        where the other end is closed, OSError where the connection fails."""
        piece = self._connection.recv(_PIECE_BYTES)
        if not piece:
            raise EOFError("the other end is gone")
        self._received += piece
        messages = []
        while len(self._received) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._received[:_LENGTH_BYTES], "big")
            if len(self._received) < end:
                break
            if end > _LENGTH_BYTES:
                messages.append(json.loads(self._received[_LENGTH_BYTES:end]))
            del self._received[:end]
        return messages

    def close(self) -> None:
        """Shut the connection down in both directions, even while other threads send or receive."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # already closed
            return
