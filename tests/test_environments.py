"""Whatever surroundings the program is started in: it does its work, or says in a line what is missing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kit import programs
from kit.models import TOKENIZER_SIZE, random_model, save
from offload.hub.names import FOLDER_VARIABLE as MODELS_VARIABLE
from offload.speed.rates import FOLDER_VARIABLE as CACHE_VARIABLE
from test_cli_fake import ROOT, command, environment, load, play
from test_cli_terminal import Screen, shown_at_the_end
from triforce_cli.setup.choice import choose_models

# "": without the variable
NO_FOLDERS = dict.fromkeys(("XDG_DATA_HOME", "XDG_CACHE_HOME", CACHE_VARIABLE, MODELS_VARIABLE), "")
SURROUNDINGS = {
    "dumb": {"TERM": "dumb"},
    "no-term": {"TERM": ""},
    "no-color": {"NO_COLOR": "1"},
    "force-color": {"FORCE_COLOR": "1"},
    "narrow": {"COLUMNS": "20"},
    "one-column": {"COLUMNS": "1"},
    "no-number": {"COLUMNS": "wide"},
    "c-locale": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "c-locale-narrow": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "COLUMNS": "40"},
    "no-home": {"HOME": "", **NO_FOLDERS},
    "home-is-a-file": {"HOME": "/dev/null", **NO_FOLDERS},
}
COMMANDS = {
    "help": ["generate", "--help"],
    "plan": ["plan", "--model", str(choose_models(None, None).target), "--gpus", "1"],
    "sessions": ["sessions", "ls"],
}
DEEP = ("no-term", "no-color", "narrow", "c-locale", "no-home")  # each has one that is like it, or more so
WITH_COMMANDS = ("dumb", "force-color", "one-column")  # tried by default with the first of the two tests


def apart_from(*deep: str) -> pytest.MarkDecorator:
    """Each of SURROUNDINGS, those that are named with --deep alone."""
    return pytest.mark.parametrize(
        "variables",
        [
            pytest.param(variables, marks=[pytest.mark.deep] * (name in deep), id=name)
            for name, variables in SURROUNDINGS.items()
        ],
    )


def surroundings(variables: dict[str, str], script: dict[str, Any] | None = None) -> dict[str, str]:
    return {name: value for name, value in environment(script, **variables).items() if value or name not in variables}


@pytest.mark.few(2)
@apart_from(*DEEP)
@pytest.mark.parametrize("args", COMMANDS.values(), ids=COMMANDS)
def test_commands_answer(args: list[str], variables: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "triforce_cli", *args],
        cwd=ROOT,
        env=surroundings(variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
    )
    homeless = variables.get("HOME") == "/dev/null" and args[0] == "sessions"
    assert (done.returncode, done.stderr.count(b"Traceback")) == (4 if homeless else 0, 0), done.stderr
    assert done.stdout + done.stderr != b""
    if "FORCE_COLOR" not in variables:
        assert b"\x1b" not in done.stdout + done.stderr


@apart_from(*DEEP, *WITH_COMMANDS)
def test_text_and_errors_come_as_they_are(tmp_path: Path, variables: dict[str, str]) -> None:
    args, streams = ("--model", str(tmp_path), "--prompt", "x"), {"stdin": subprocess.DEVNULL, "capture_output": True}
    env = surroundings(variables, {"pieces": ["naïve ", "€"], "notes": ["a note: é"]})
    done = subprocess.run(command(*args), env=env, **streams)
    assert (done.returncode, done.stdout) == (0, "naïve €".encode())
    env = surroundings(variables, {"load_fail": "ModelError"})
    if "LC_ALL" in variables:
        done = subprocess.run(command(*args), env=env, **streams)
    else:  # a fork, since the interpreter takes nothing else from them
        load()
        done = subprocess.run(["true"], preexec_fn=lambda: play(["generate", *args], env), **streams)
    code, out, err = done.returncode, done.stdout, done.stderr
    assert (code, out) == (4, b"")
    assert err.startswith(b"error: ModelError happened; do something else") or "FORCE_COLOR" in variables


@pytest.mark.few(1)
@pytest.mark.parametrize("columns", [20, 40])
def test_a_narrow_terminal_is_kept_to(tmp_path: Path, columns: int) -> None:
    """Bars, notes and errors; the text is the terminal's to wrap."""
    script = {"ticks": 5, "tick_seconds": 0.05, "pieces": [], "notes": ["a note that is longer than the line"]}
    screen = Screen(
        *("--model", str(tmp_path), "--prompt", "x" * 1000),
        script=script | {"fail": "TriforceError"},
        env={"COLUMNS": str(columns)},
    )
    assert screen.finish() == 1
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.text)
    assert max(map(len, re.split(r"[\r\n]+", plain))) <= columns
    assert "error: " in shown_at_the_end(screen.text)


def test_a_session_without_a_home_says_where_it_cannot_be(tmp_path: Path) -> None:
    model = save(random_model(vocab_size=TOKENIZER_SIZE), tmp_path, tokenizer=True)  # whose passes are timed at once
    args = ("--model", str(model), "--prompt", "x", "--session", "kept", "--quiet")
    done = programs.run(["generate", *args], env=surroundings(SURROUNDINGS["home-is-a-file"]))
    assert done.returncode == 4
    assert done.stderr.startswith("error: /dev/null/")
    assert "Traceback" not in done.stderr
