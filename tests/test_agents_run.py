"""Coding agents, as their packages bring them, with `triforce launch`: two turns with a tool call.

TRIFORCE_TEST_AGENTS names the folders of their programs, as PATH does. The model is a stand-in that reads a file by the
agent's own tool, and then says its word.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.served import Server
from test_cli_fake import ROOT, Step, environment
from triforce_cli.agents.table import AGENTS, agent_of

WORD, FILE = "zanzibar", "word.txt"
ASKED = f"Read the file {FILE} and tell me its word."
EDIT = f"{FILE}\n```\n{WORD} {{}}\n```\n"  # aider has no tools: it changes files, and tells what the user's test says
TEST = f"cat {FILE}; grep -q twice {FILE}"
CALLS: dict[str, dict[str, Any]] = {
    "claude": {"name": "Bash", "arguments": {"command": f"cat {FILE}", "description": "Read"}},
    "codex": {"name": "exec_command", "arguments": {"cmd": f"cat {FILE}"}},
    "opencode": {"name": "bash", "arguments": {"command": f"cat {FILE}", "description": "Read"}},
    "pi": {"name": "bash", "arguments": {"command": f"cat {FILE}"}},
    "qwen-code": {"name": "run_shell_command", "arguments": {"command": f"cat {FILE}", "is_background": False}},
}
ARGUMENTS = {
    "claude": ("-p", ASKED, "--allowedTools", "Bash(cat:*)"),
    "codex": ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", ASKED),
    "opencode": ("run", ASKED),
    "pi": ("-p", ASKED),
    "aider": ("--message", ASKED, "--yes-always", "--no-auto-commits", "--auto-test", "--test-cmd", TEST),
    "qwen-code": ("--yolo", "-p", ASKED),
}
FOLDERS = os.environ.get("TRIFORCE_TEST_AGENTS", "")


def steps(name: str, text: str) -> Iterator[Step]:
    if name == "aider":
        yield _said(EDIT.format("twice" if f"{WORD} once" in text else "once"))
    elif WORD in text:
        yield _said("The word is ", None)
        yield _said(f"{WORD}.")
    else:
        yield _said(f"<tool_call>\n{json.dumps(CALLS[name])}\n</tool_call>")


def _said(text: str, finish: str | None = "stop") -> Step:
    return Step(text, list(text.encode()), finish)


@pytest.mark.deep
@pytest.mark.parametrize("name", [agent.name for agent in AGENTS])
def test_an_agent_runs_two_turns_with_a_tool_call(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its second prompt begins as the first one, up to the new reply."""
    path = os.pathsep.join((FOLDERS, os.environ["PATH"]))
    if not FOLDERS or shutil.which(agent_of(name).command, path=path) is None:
        pytest.skip(f"{name} is not in a folder of TRIFORCE_TEST_AGENTS")
    (work := tmp_path / "work").mkdir()
    (home := tmp_path / "home").mkdir()
    (work / FILE).write_text(f"{WORD}\n")
    subprocess.run(["git", "init", "-q", str(work)], check=True)
    subprocess.run(["git", "-C", str(work), "add", FILE], check=True)
    with Server(context=1 << 20) as server:
        monkeypatch.setattr(server.model, "steps", lambda text: steps(name, text))
        done = subprocess.run(
            [sys.executable, "-m", "triforce_cli", "launch", name, "--port", str(server.client.port), "--",
             *ARGUMENTS[name]],
            cwd=work,
            env=environment(PATH=path, HOME=str(home), PWD=str(work), OPENAI_API_KEY="sk-cloud", PYTHONPATH=str(ROOT)),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )  # fmt: skip
    told = f"{done.stdout}\n{done.stderr}\n{server.notes}\n{server.refused}"
    assert done.returncode == 0, told
    assert not server.refused, told
    if name == "aider":
        assert (work / FILE).read_text() == f"{WORD} twice\n", told
    else:
        assert f"The word is {WORD}." in done.stdout, told
    first, second = server.model.said
    shared = 0.6 if name == "aider" else 0.95  # aider's files, which change, stand before the question
    assert second.startswith(first[: int(shared * len(first))]), told
