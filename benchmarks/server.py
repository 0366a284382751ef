"""A server that is measured: `triforce serve` as a process of its own, and its counts.

PYTHONPATH says whose server it is.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATIENCE_SECONDS = 3600.0  # for an answer
_STOP_SECONDS = 60.0
_SERVES = re.compile(r"^serving .* at (http://\S+)/v1, ", re.M)
_COUNT = re.compile(r"^triforce_(?!\w+_(?:created|bucket))(\w+)(?:\{.*\})? (\S+)$", re.M)


@dataclass(frozen=True)
class Server:
    """A server that runs. url: up to the paths of its APIs. log: the file that has its standard error."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The response, whose body is read by the caller."""
        headers = {"content-type": "application/json"}
        sent = urllib.request.Request(f"{self.url}{path}", json.dumps(body).encode(), headers)
        return urllib.request.urlopen(sent, timeout=PATIENCE_SECONDS)

    def status(self) -> Any:
        with urllib.request.urlopen(f"{self.url}/status", timeout=PATIENCE_SECONDS) as response:
            return json.load(response)

    def counts(self) -> dict[str, float]:
        """The sums of its metrics over their labels, by their names without "triforce_"."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=PATIENCE_SECONDS) as response:
            text = response.read().decode()
        found: dict[str, float] = {}
        for name, value in _COUNT.findall(text):
            found[name] = found.get(name, 0.0) + float(value)
        return found


@contextmanager
def serving(*arguments: str, **variables: str) -> Iterator[Server]:
    """`triforce serve ARGUMENTS` at a free port, until the context ends. variables: of its environment. Raises
    SystemExit if it does not start, or ends with another exit code than 0."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        command = [sys.executable, "-m", "triforce_cli", "serve", "--port", "0", *arguments]
        with log.open("wb") as file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=file,
                env={**os.environ, **variables},
            )
        try:
            yield Server(_url(process, log), process, log)
            process.terminate()
            if code := process.wait(_STOP_SECONDS):
                raise SystemExit(f"the server ended with exit code {code}: {_last_line(log)}")
        finally:
            process.kill()
            process.wait()


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    while (found := _SERVES.search(log.read_text(errors="replace"))) is None:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with exit code {process.returncode}: {_last_line(log)}")
        time.sleep(0.2)
    return found[1]


def _last_line(log: Path) -> str:
    return (log.read_text(errors="replace").splitlines() or [""])[-1]
