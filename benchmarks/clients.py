"""Clients of a server, as others publish them, in talks of several turns: Python packages, coding agents.

A turn asks about a file, which the model reads by a tool.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import texts
from report import say

from triforce_cli.agents.installed import installed, path_of
from triforce_cli.agents.table import agent_of

Document = dict[str, Any]
TURNS = 5
MOST_CALLS = 3  # in a turn
FILE_CHARACTERS, SYSTEM_CHARACTERS = 1200, 6000
TURN_SECONDS = 1800  # after which a program is ended, with all that it has started
_MOST_OF_WORDS = 500  # characters
READ = "read_file"  # the tool of the Python packages
ABOUT = "Read a file of the folder."
PARAMETERS = {
    "type": "object",
    "properties": {"path": {"type": "string", "description": "its name"}},
    "required": ["path"],
    "additionalProperties": False,
}
FUNCTION = f'''def {READ}(path: str) -> str:
    "{ABOUT}"
    try:
        return open(path.split("/")[-1], encoding="utf-8").read()
    except OSError as error:
        return str(error)
'''


@dataclass(frozen=True)
class Place:
    """The place of a talk. url: up to the paths of the APIs. work: the folder of the files. home: of its user."""

    url: str
    model: str
    work: Path
    home: Path


@dataclass(frozen=True)
class Client:
    """A client. tool: that a relay is to demand; "" where the client does, or has none. talk: yields after each turn.
    package: of Python; "" for an agent of `triforce launch`."""

    name: str
    tool: str
    talk: Callable[[Place], Iterator[None]]
    package: str = ""


def write_files(work: Path) -> None:
    """The files that are asked about."""
    novel = texts.NOVEL.read_text(encoding="utf-8")
    for turn in range(1, TURNS + 1):
        start = novel.index("\n\n", turn * len(novel) // (TURNS + 1)) + 2
        _file(work, turn).write_text(novel[start : start + FILE_CHARACTERS] + "\n", encoding="utf-8")


def _file(work: Path, turn: int) -> Path:
    return work / f"part-{turn}.txt"


def _question(turn: int) -> str:
    return f"Read the file part-{turn}.txt and say in one sentence who is in it."


def _system() -> str:
    """A system prompt of a usual length."""
    novel = texts.NOVEL.read_text(encoding="utf-8")
    return f"You answer questions about a novel. It begins as follows.\n\n{novel[:SYSTEM_CHARACTERS]}"


def _result(work: Path, arguments: Mapping[str, Any]) -> str:
    try:
        return (work / Path(str(arguments.get("path"))).name).read_text(encoding="utf-8")
    except OSError as error:
        return str(error)


def _chat(place: Place) -> Iterator[None]:
    """`openai`, chat completions."""
    import openai

    client = openai.OpenAI(base_url=f"{place.url}/v1", api_key="none", max_retries=0)
    function = {"name": READ, "description": ABOUT, "parameters": PARAMETERS}
    demand = {"tool_choice": {"type": "function", "function": {"name": READ}}}
    messages: list[Any] = [{"role": "system", "content": _system()}]
    for turn in range(1, TURNS + 1):
        messages.append({"role": "user", "content": _question(turn)})
        for number in range(MOST_CALLS):
            message = (
                client.chat.completions.create(
                    model=place.model,
                    messages=messages,
                    tools=[{"type": "function", "function": function}],
                    **({} if number else demand),
                )
                .choices[0]
                .message
            )
            messages.append(message.to_dict())
            calls = message.tool_calls or []
            messages += [
                {
                    "role": "tool",
                    "tool_call_id": call.id,
                    "content": _result(place.work, _object(call.function.arguments)),
                }
                for call in calls
            ]
            if not calls:
                break
        yield


def _responses(place: Place) -> Iterator[None]:
    """`openai`, responses."""
    import openai

    client = openai.OpenAI(base_url=f"{place.url}/v1", api_key="none", max_retries=0)
    tool: Any = {"type": "function", "name": READ, "description": ABOUT, "parameters": PARAMETERS, "strict": True}
    demand = {"tool_choice": {"type": "function", "name": READ}}
    items: list[Any] = []
    for turn in range(1, TURNS + 1):
        items.append({"role": "user", "content": _question(turn)})
        for number in range(MOST_CALLS):
            *_, last = client.responses.create(
                model=place.model,
                instructions=_system(),
                input=items,
                tools=[tool],
                store=False,
                stream=True,
                **({} if number else demand),
            )
            response = last.response
            items += [item.to_dict() for item in response.output]
            calls = [item for item in response.output if item.type == "function_call"]
            items += [
                {
                    "type": "function_call_output",
                    "call_id": call.call_id,
                    "output": _result(place.work, _object(call.arguments)),
                }
                for call in calls
            ]
            if not calls:
                break
        yield


def _messages(place: Place) -> Iterator[None]:
    """`anthropic`, messages, with marks of caching where Claude Code has them."""
    import anthropic

    client = anthropic.Anthropic(base_url=place.url, api_key="none", max_retries=0)
    mark = {"cache_control": {"type": "ephemeral"}}
    tool: Any = {"name": READ, "description": ABOUT, "input_schema": PARAMETERS}
    messages: list[Any] = []
    for turn in range(1, TURNS + 1):
        messages.append({"role": "user", "content": [{"type": "text", "text": _question(turn)}]})
        for number in range(MOST_CALLS):
            *others, last = messages[-1]["content"]
            with client.messages.stream(
                model=place.model,
                max_tokens=1024,
                system=[{"type": "text", "text": _system(), **mark}],
                messages=[*messages[:-1], {"role": "user", "content": [*others, {**last, **mark}]}],
                tools=[tool],
                **({} if number else {"tool_choice": {"type": "tool", "name": READ}}),
            ) as stream:
                content = stream.get_final_message().content
            messages.append({"role": "assistant", "content": [block.to_dict() for block in content]})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": _result(place.work, block.input)}
                for block in content
                if block.type == "tool_use"
            ]
            if not results:
                break
            messages.append({"role": "user", "content": results})
        yield


def _object(arguments: str) -> Document:
    """A call's arguments; of a call that was cut, none."""
    try:
        found = json.loads(arguments)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _llm(place: Place) -> Iterator[None]:
    """`llm`, by its command line."""
    model = {"model_id": "local", "model_name": place.model, "api_base": f"{place.url}/v1", "supports_tools": True}
    (place.home / "extra-openai-models.yaml").write_text(json.dumps([model]), encoding="utf-8")  # JSON is YAML, too
    command = [sys.executable, "-m", "llm", "-m", "local", "--key", "none", "--functions", FUNCTION]
    for turn in range(1, TURNS + 1):
        more = ["--continue"] if turn > 1 else ["--system", _system()]
        _run([*command, *more, _question(turn)], place, LLM_USER_PATH=str(place.home))
        yield


def _agent(name: str, first: Sequence[str], later: Sequence[str]) -> Callable[[Place], Iterator[None]]:
    """The talk of an agent of `triforce launch`. first, later: its arguments before the question."""

    def talk(place: Place) -> Iterator[None]:
        for turn in range(1, TURNS + 1):
            command = [sys.executable, "-m", "triforce_cli", "launch", name, "--url", place.url, "--model", place.model]
            _run([*command, "--", *(later if turn > 1 else first), _question(turn)], place)
            yield

    return talk


def _run(command: Sequence[str], place: Place, **variables: str) -> None:
    """Run a program to its end, and say its last words if it fails: an agent does where its answer was cut."""
    environment = {**os.environ, "HOME": str(place.home), "PWD": str(place.work), **variables}
    done = subprocess.run(
        ["timeout", str(TURN_SECONDS), *command],
        cwd=place.work,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        say(f"  exit code {done.returncode}: {(done.stdout + done.stderr)[-_MOST_OF_WORDS:]}")


def client_of(name: str) -> Client:
    """Raises SystemExit where there is no such client, or its package or program is not installed."""
    found = next((client for client in CLIENTS if client.name == name), None)
    if found is None:
        raise SystemExit(f"there is no client {name!r}; there are {', '.join(client.name for client in CLIENTS)}")
    if found.package and find_spec(found.package) is None:
        raise SystemExit(
            f"{name} needs the package {found.package}: pip install --target FOLDER {found.package}, and FOLDER on "
            "PYTHONPATH"
        )
    if not found.package and path_of(agent_of(name)) is None:
        raise SystemExit(f"{name} needs its program on PATH: {agent_of(name).install}")
    return found


def version_of(client: Client) -> str:
    """ "" where no package says it."""
    if client.package:
        return version(client.package)
    return next(found.version for found in installed() if found.agent.name == client.name)


CLAUDE = ("--allowedTools", "Read", "-p")
CODEX = ("--skip-git-repo-check",)
AIDER = ("--yes-always", "--no-auto-commits", "--no-suggest-shell-commands", "--no-check-update")
CLIENTS = (
    Client("openai-chat", "", _chat, "openai"),
    Client("openai-responses", "", _responses, "openai"),
    Client("anthropic", "", _messages, "anthropic"),
    Client("llm", READ, _llm, "llm"),
    Client("claude", "Read", _agent("claude", CLAUDE, ("--continue", *CLAUDE))),
    Client("codex", "exec_command", _agent("codex", ("exec", *CODEX), ("exec", "resume", "--last", *CODEX))),
    Client("opencode", "read", _agent("opencode", ("run",), ("run", "--continue"))),
    Client("pi", "read", _agent("pi", ("-p",), ("--continue", "-p"))),
    Client("aider", "", _agent("aider", (*AIDER, "--message"), (*AIDER, "--restore-chat-history", "--message"))),
    Client("qwen-code", READ, _agent("qwen-code", ("-p",), ("--continue", "-p"))),
)
