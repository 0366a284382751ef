"""What a shell completes, by the variables with which Typer's scripts for shells ask the program."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from offload.hub.names import ALIASES
from offload.hub.names import FOLDER_VARIABLE as MODELS_VARIABLE
from offload.session.names import FOLDER_VARIABLE as SESSIONS_VARIABLE
from test_architecture import ROOT
from test_cli_models import LARGE, put
from triforce_cli.app import app
from triforce_cli.settings import configuration

FILE = """
temperature = 0.5
[chat]
top-k = 3
[aliases]
small = "llama-68m"
[templates.sum]
prompt = "Sum it up."
"""


@pytest.fixture
def completed(tmp_path, monkeypatch, capfd) -> Callable[[str], list[str]]:
    """The completions of a line, in a home with two sessions, a model and a configuration."""
    for name in ("book", "letters", "not a name"):
        (tmp_path / "sessions" / name).mkdir(parents=True)
    put(tmp_path / "models" / LARGE)
    put(tmp_path / "models/local/mine")
    (tmp_path / "config.toml").write_text(FILE)
    monkeypatch.setenv(SESSIONS_VARIABLE, str(tmp_path / "sessions"))
    monkeypatch.setenv(MODELS_VARIABLE, str(tmp_path / "models"))
    monkeypatch.setenv(configuration.VARIABLE, str(tmp_path / "config.toml"))
    monkeypatch.setenv("_TRIFORCE_COMPLETE", "complete_bash")

    def completed(line: str) -> list[str]:
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
        capfd.readouterr()
        with pytest.raises(SystemExit):
            app([], prog_name="triforce", standalone_mode=False)
        out, err = capfd.readouterr()
        assert err == ""
        return out.split()

    return completed


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("chat --session ", ["book", "letters"]),
        ("generate --session b", ["book"]),
        ("sessions info ", ["book", "letters"]),
        ("sessions rm book l", ["letters"]),
        ("ask --model ", ["small", "yarn-llama-2-13b-128k", "local/mine"]),
        ("ask -m s", ["small"]),
        ("score -m ya", ["yarn-llama-2-13b-128k"]),
        ("score --against l", ["local/mine"]),
        ("plan --draft ", ["none", "small", "yarn-llama-2-13b-128k", "local/mine"]),
        ("models rm ", ["yarn-llama-2-13b-128k", "local/mine"]),
        ("models r", ["rm"]),
        ("pull ", [alias.name for alias in ALIASES]),
        ("pull smollm2-1.", ["smollm2-1.7b-instruct"]),
        ("ask -t ", ["sum"]),
        ("launch ", ["claude", "codex", "opencode", "pi", "aider", "qwen-code"]),
        ("launch o", ["opencode"]),
        ("ask --model ./", []),  # the shell's own files
    ],
)
def test_names_are_completed(line: str, names: list[str], completed) -> None:
    assert completed(f"triforce {line}") == names


def test_a_file_that_is_named_is_asked(completed, tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text('[aliases]\nanother = "x"\n')
    assert completed(f"triforce ask --config {tmp_path}/other.toml -m a") == ["another"]


@pytest.mark.parametrize("text", ["a = = 1", "temprature = 1", '[aliases]\na = "a"'])
def test_a_faulty_file_hides_no_models_and_says_nothing(text: str, completed, tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "home/triforce/config.toml"
    file.parent.mkdir(parents=True)
    for path in (tmp_path / "config.toml", file):
        path.write_text(text)
    assert completed("triforce ask -m ") == ["yarn-llama-2-13b-128k", "local/mine"]
    monkeypatch.delenv(configuration.VARIABLE)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))  # the user's own file
    assert completed("triforce ask -m ") == ["yarn-llama-2-13b-128k", "local/mine"]
    assert completed("triforce ask -t ") == []


def test_without_folders_nothing_is_completed(completed, tmp_path: Path, monkeypatch) -> None:
    for variable in (SESSIONS_VARIABLE, MODELS_VARIABLE, configuration.VARIABLE):
        monkeypatch.setenv(variable, str(tmp_path / "nowhere"))
    for line in ("chat --session ", "ask -m ", "ask -t "):
        assert completed(f"triforce {line}") == []


def test_nothing_heavy_is_loaded(tmp_path: Path) -> None:
    """A person waits for each completion."""
    put(tmp_path / LARGE)
    code = (
        "import os, sys, atexit\n"
        f"os.environ.update(_TRIFORCE_COMPLETE='complete_bash', COMP_WORDS='triforce ask -m ', COMP_CWORD='3',\n"
        f"    {MODELS_VARIABLE}={str(tmp_path)!r})\n"
        "heavy = {'torch', 'transformers', 'huggingface_hub', 'numpy', 'prompt_toolkit'}\n"
        "atexit.register(lambda: sys.stderr.write(','.join(heavy & set(sys.modules))))\n"
        "from triforce_cli.__main__ import run\nrun()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == (["yarn-llama-2-13b-128k"], "")
