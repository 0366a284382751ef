"""`triforce config edit` and `path`: the configuration file in the user's editor, and its check afterwards."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from triforce_cli.settings import configuration

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configuration file that commands read, which is not there."""
    file = tmp_path / "config.toml"
    monkeypatch.setenv(configuration.VARIABLE, str(file))
    for name in ("VISUAL", "EDITOR"):
        monkeypatch.delenv(name, raising=False)
    return file


def editor(tmp_path: Path, script: str) -> str:
    """The command line of an editor that runs a script, with the file as its second argument."""
    (made := tmp_path / "an editor.sh").write_text(f"#!/bin/sh\n{script}\n")
    made.chmod(0o755)
    return f"'{made}' --wait"


def test_the_path_is_printed_alone(triforce: Run, file: Path) -> None:
    assert triforce("config", "path", "--config", str(file)) == (0, f"{file}\n", "")
    assert not file.exists()


def test_the_editor_gets_the_file_which_is_made_for_its_owner(
    triforce: Run, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDITOR", "false")  # VISUAL wins
    monkeypatch.setenv("VISUAL", editor(tmp_path, 'test "$1" = --wait && echo "max-tokens = 7" >> "$2"'))
    code, said, notes = triforce("config", "edit", "--config", str(file))
    assert (code, said) == (0, "")
    assert notes == f"{file} has no fault\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_text().startswith("# Options that hold without the command line")
    assert configuration.parsed(file, file.read_text()) == {"max-tokens": 7}


def test_a_file_that_is_there_keeps_its_bytes(
    triforce: Run, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("# mine\r\ntemperature = 1\r\n", newline="")
    file.chmod(0o640)
    monkeypatch.setenv("EDITOR", editor(tmp_path, "true"))
    assert triforce("config", "edit", "--config", str(file))[0] == 0
    assert file.read_bytes() == b"# mine\r\ntemperature = 1\r\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o640


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("max-tokens = = 3", "is not TOML"),
        ("max-tokns = 3", "max-tokns is no option of any command; did you mean max-tokens?"),
        ("[chat]\ntemperature = true", "chat.temperature"),
        ('[aliases]\na = "b"\nb = "a"', "leads to no model: a -> b -> a"),
        ("[templates.x]\nsystem = 'y'", "templates.x"),
    ],
)
def test_a_fault_is_named_and_the_file_kept(
    triforce: Run, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, fault: str
) -> None:
    (tmp_path / "text").write_text(text)
    monkeypatch.setenv("EDITOR", editor(tmp_path, f"cat '{tmp_path / 'text'}' > \"$2\""))
    code, said, notes = triforce("config", "edit", "--config", str(file))
    assert (code, said) == (2, "")
    assert fault in notes
    assert f"triforce config edit --config {file}" in notes
    assert file.read_text() == text
    monkeypatch.setenv("EDITOR", editor(tmp_path, 'echo > "$2"'))  # a faulty file is edited again
    assert triforce("config", "edit", "--config", str(file))[0] == 0


def test_an_alias_of_a_model_that_is_not_there_is_noted(
    triforce: Run, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDITOR", editor(tmp_path, 'echo \'[aliases]\nlost = "no/where"\' > "$2"'))
    code, _, notes = triforce("config", "edit", "--config", str(file))
    assert code == 0
    assert "alias lost: " in notes


@pytest.mark.parametrize(
    ("variable", "code", "fault"),
    [
        ("", 2, "no editor is set: set VISUAL or EDITOR, or change "),
        ("no-such-editor -w", 2, "the editor no-such-editor cannot be run: No such file or directory"),
        ("vi 'x", 2, "which is no command line"),
        ("sh -c 'exit 3'", 1, "the editor sh ended with exit code 3"),
    ],
)
def test_an_editor_that_fails_is_said(
    triforce: Run, file: Path, monkeypatch: pytest.MonkeyPatch, variable: str, code: int, fault: str
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    monkeypatch.setenv("EDITOR", variable)
    assert triforce("config", "edit", "--config", str(file))[0] == code
    assert fault in triforce("config", "edit", "--config", str(file))[2]


def test_no_folder_is_edited(triforce: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDITOR", "true")
    code, _, notes = triforce("config", "edit", "--config", str(tmp_path))
    assert code == 2
    assert f"{tmp_path} is no regular file" in notes
