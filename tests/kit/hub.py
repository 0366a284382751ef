"""A local server with the hub's API and files, and faults that a test asks for. No tests in here."""

from __future__ import annotations

import hashlib
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlparse

COMMIT = "c" * 40


@dataclass
class Repository:
    """large: names of the files whose hash is sha256; the others have git's. listed: false listing entries by file."""

    files: dict[str, bytes]
    commit: str = COMMIT
    license: str = "apache-2.0"
    revisions: tuple[str, ...] = ("main",)
    renamed: str = ""  # what the hub calls it now
    answer: bytes = b""  # instead of the listing
    listed: dict[str, dict[str, object]] = field(default_factory=dict)

    def siblings(self) -> list[dict[str, object]]:
        return [{**_sibling(name, data), **self.listed.get(name, {})} for name, data in self.files.items()]


@dataclass
class Hub:
    """cuts: numbers of bytes of a file after which its connection closes, one per request. refusals: (status,
    X-Error-Code) that requests for a repository or a file are answered with. requests: (file, first byte) asked for."""

    repositories: dict[str, list[Repository]] = field(default_factory=dict)
    cuts: dict[str, list[int]] = field(default_factory=dict)
    refusals: dict[str, tuple[int, str]] = field(default_factory=dict)
    requests: list[tuple[str, int]] = field(default_factory=list)
    ranges: bool = True  # False: a file always comes from its beginning
    sent: int = 0  # bytes of files that were asked for
    abrupt: bool = False  # cuts are resets
    stalls: dict[str, int] = field(default_factory=dict)  # after how many bytes of a file nothing more comes
    stalled: threading.Event = field(default_factory=threading.Event)  # nothing more comes
    url: str = ""

    def put(self, name: str, files: dict[str, bytes], **fields: Any) -> Repository:
        """Add a repository, or another commit of it."""
        repository = Repository(files, **fields)
        self.repositories.setdefault(name, []).append(repository)
        return repository

    def asked(self) -> list[str]:
        """Names of the files requested since the last call."""
        names = [name for name, _ in self.requests]
        self.requests.clear()
        return names


@contextmanager
def running() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def _sibling(name: str, data: bytes) -> dict[str, object]:
    said: dict[str, object] = {"rfilename": name, "size": len(data)}
    if name.endswith((".bin", ".safetensors")):
        sha256 = hashlib.sha256(data).hexdigest()
        return {**said, "blobId": "0" * 40, "lfs": {"size": len(data), "sha256": sha256, "pointerSize": 130}}
    return {**said, "blobId": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()}


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_GET(self) -> None:
        path = unquote(urlparse(self.path).path).strip("/")
        if path.startswith("api/models/"):
            name, _, revision = path.removeprefix("api/models/").partition("/revision/")
            self._listing(name, revision)
        elif "/resolve/" in path:
            name, _, rest = path.partition("/resolve/")
            commit, _, file = rest.partition("/")
            self._file(name, commit, file)
        else:  # whatever else the library asks a hub for
            self._refuse(404, "")

    def _listing(self, name: str, revision: str) -> None:
        if name in self.hub.refusals:
            return self._refuse(*self.hub.refusals[name])
        if name not in self.hub.repositories:
            return self._refuse(401, "RepoNotFound")
        found = [r for r in self.hub.repositories[name] if revision in (*r.revisions, r.commit)]
        if not found:
            return self._refuse(404, "RevisionNotFound")
        if found[-1].answer:
            return self._answer(200, found[-1].answer, {"Content-Type": "application/json"})
        said = {
            "id": found[-1].renamed or name,
            "sha": found[-1].commit,
            "siblings": found[-1].siblings(),
            "tags": [f"license:{found[-1].license}"] if found[-1].license else [],
        }
        return self._answer(200, json.dumps(said).encode(), {"Content-Type": "application/json"})

    def _file(self, name: str, commit: str, file: str) -> None:
        data = next(r.files[file] for r in self.hub.repositories[name] if r.commit == commit)
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        start, stop = (int(first), int(last or len(data)) + 1) if self.hub.ranges else (0, len(data))
        self.hub.requests.append((file, start))
        if file in self.hub.refusals:
            return self._refuse(*self.hub.refusals[file])
        is_part, size = start > 0 or stop < len(data), len(data)
        data = data[:stop]
        self.hub.sent += len(data) - start
        headers = {"Content-Range": f"bytes {start}-{len(data) - 1}/{size}"} if is_part else {}
        if file in self.hub.stalls:
            self.hub.cuts[file] = [self.hub.stalls[file]]
        self._answer(206 if is_part else 200, data[start:], headers, self.hub.cuts.get(file))
        while file in self.hub.stalls:
            self.hub.stalled.set()
            time.sleep(0.01)
        return None

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, b"", {"X-Error-Code": code} if code else {})

    def _answer(self, status: int, body: bytes, headers: dict[str, str], cuts: list[int] | None = None) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if cuts:
            body = body[: cuts.pop(0)]
            self.close_connection = True
        self.wfile.write(body)
        if self.close_connection and cuts is not None and self.hub.abrupt:
            time.sleep(0.1)  # what is on the way would be lost
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()

    def log_message(self, format: str, *args: object) -> None: ...
