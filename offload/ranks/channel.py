"""Messages between rank 0 and another rank: JSON objects over a socket, each whole or not at all."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Mapping
from typing import Any

Message = Mapping[str, Any]
_LENGTH_BYTES = 4  # before each message; a length of zero is a beat: whoever sends it is alive
_PIECE_BYTES = 1 << 16


class Channel:
    """One end of a connection. Any thread may send, one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._sending, self._received = connection, threading.Lock(), bytearray()

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: Message) -> None:
        """Raises OSError where the other end is gone."""
        content = json.dumps(message).encode()
        with self._sending:
            self._connection.sendall(len(content).to_bytes(_LENGTH_BYTES, "big") + content)

    def beat(self) -> None:
        """Say that this end is alive, unless it is saying something anyway. Raises OSError."""
        if self._sending.acquire(blocking=False):
            try:
                self._connection.sendall(bytes(_LENGTH_BYTES))
            finally:
                self._sending.release()

    def receive(self) -> list[dict[str, Any]]:
        """The messages that are complete with what has come, without beats; waits for at least a byte. Raises EOFError
        where the other end is gone, OSError where the connection is."""
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
        """End the connection at both ends, whoever sends or receives."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # it had ended
            return
