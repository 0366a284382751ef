"""The server that an agent talks to: one that runs, or a child process that ends with the agent."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

from offload.errors import TriforceError, UsageError
from offload.interrupts import waiting
from triforce_cli.agents.agent import Endpoint

_ANSWER_SECONDS, _LOOK_SECONDS, _END_SECONDS = 5.0, 0.2, 5.0
_MOST_BYTES = 1 << 20
_ERROR = "error: "  # the beginning of the server's last line
_OWNER = "triforce"
_NO_LIST = (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, AttributeError, StopIteration)


class ServerEnded(TriforceError):
    """The server ended before it served. It has its exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def url_of(host: str, port: int) -> str:
    """The URL of a server that listens on an address of this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def free_port(host: str) -> int:
    """A port of this machine on which nothing listens. Raises UsageError."""
    try:
        with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as bound:
            return int(bound.getsockname()[1])
    except OSError as error:
        raise UsageError(f"host {host!r} cannot be served ({error.strerror or error})") from error


def running(url: str, key: str, *, wanted: str = "", is_ours: bool = True) -> Endpoint | None:
    """The server at a URL with one of its models; None if nothing listens there. wanted: the model's name; "" for the
    first. is_ours: whether it has to be `triforce serve`. Raises UsageError where something else answers, or nothing
    does, or it has no such model."""
    remedy = "--port N names another port, --url URL another server" if is_ours else "--url URL names a server"
    try:
        found = {str(each["id"]): each for each in _get(f"{url}/v1/models", key)["data"]}
        name = wanted or next(iter(found))
        is_another = is_ours and any(each.get("owned_by") != _OWNER for each in found.values())
        context = found.get(name, {}).get("context_length")
    except HTTPError as error:
        if error.code in (401, 403):
            raise UsageError(f"the server at {url} asks for its key: --api-key KEY") from error
        raise UsageError(f"what answers at {url} is no server of models (status {error.code}); {remedy}") from error
    except URLError as error:
        if isinstance(error.reason, ConnectionRefusedError):
            return None
        raise UsageError(f"{url} cannot be reached ({error.reason}); {remedy}") from error
    except TimeoutError as error:
        raise UsageError(f"{url} gives no answer; if a server starts there, wait until it serves; {remedy}") from error
    except _NO_LIST as error:
        raise UsageError(f"what answers at {url} is no server of models; {remedy}") from error
    if is_another:
        raise UsageError(f"another program serves at {url}; {remedy}")
    if name not in found:
        raise UsageError(f"the server at {url} has {', '.join(found)}, not {name}; leave --model out, or {remedy}")
    if not isinstance(context, int):
        raise UsageError(f"the server at {url} does not say its context (context_length in /v1/models)")
    return Endpoint(url, name, context, key)


@contextmanager
def started(
    arguments: Sequence[str], url: str, key: str, *, log: Path, note: Callable[[str], None]
) -> Iterator[Endpoint]:
    """`triforce serve ARGUMENTS` as a child process, from the moment when it serves at the URL. log: takes its standard
    error; note: the lines of it until then. Raises ServerEnded, UsageError."""
    variables = {**os.environ, **({"TRIFORCE_API_KEY": key} if key else {})}
    with log.open("wb") as file:
        process = subprocess.Popen(
            serve_line(arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=file,
            env=variables,
            start_new_session=True,  # signals of the terminal are the agent's
        )
    try:
        _wait(process, url, log, note)
        found = running(url, key)
        if found is None:
            raise _ended(process, log)
        yield found
        if process.poll() is not None:
            note(f"the server had ended (exit code {process.returncode}): {_last_line(log)}")
    finally:
        _end(process)


def serve_line(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-P", "-m", "triforce_cli", "serve", *arguments]


def arguments_of(changed: Mapping[str, Any]) -> list[str]:
    """The command line of options that differ from their defaults, by their names."""
    words = []
    for name, value in changed.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}={each}" for each in (value if isinstance(value, list) else [value])]
    return words


def _wait(process: subprocess.Popen[bytes], url: str, log: Path, note: Callable[[str], None]) -> None:
    """Until the server says that it is well. Raises ServerEnded."""
    with log.open(errors="replace") as lines:
        is_well, begun = False, ""  # a line may come in parts
        while not is_well:
            has_ended = process.poll() is not None
            is_well = not has_ended and _is_well(url)
            for part in lines:
                line = begun + part
                begun = "" if line.endswith("\n") or has_ended else line
                if not begun and not line.startswith(_ERROR):  # the error is the server's last line
                    note(line.rstrip("\n"))
            if has_ended:
                raise _ended(process, log)
            with waiting():
                time.sleep(0 if is_well else _LOOK_SECONDS)


def _is_well(url: str) -> bool:
    with suppress(OSError, http.client.HTTPException, ValueError):
        _get(f"{url}/health", "")
        return True
    return False


def _ended(process: subprocess.Popen[bytes], log: Path) -> ServerEnded:
    code = process.wait()
    said = _last_line(log)
    reason = said.removeprefix(_ERROR) if said.startswith(_ERROR) else f"the server ended with exit code {code}"
    return ServerEnded(reason, code if 0 < code < 128 else TriforceError.exit_code)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the server; nobody waits for an answer any more."""
    for end in (process.terminate, process.terminate, process.kill):
        if process.poll() is None:
            end()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)


def _last_line(log: Path) -> str:
    return (log.read_text(errors="replace").splitlines() or [""])[-1]


def _get(url: str, key: str) -> Any:
    """The JSON at a URL, without a proxy."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with build_opener(ProxyHandler({})).open(Request(url, headers=headers), timeout=_ANSWER_SECONDS) as response:
        return json.loads(response.read(_MOST_BYTES))
