"""docs/cli.md says what the program says."""

from __future__ import annotations

import sys

import typer

from test_cli_fake import ROOT
from triforce_cli.app import app
from triforce_cli.settings import tree

sys.path.insert(0, str(ROOT / "scripts"))

import cli_docs
import model_docs

COMMANDS = tree.commands(typer.main.get_command(app))


def test_the_file_is_the_programs_own():
    assert cli_docs.FILE.read_text(encoding="utf-8") == cli_docs.document(), "run python scripts/cli_docs.py"


def test_the_table_of_families_is_the_programs_own():
    text = model_docs.FILE.read_text(encoding="utf-8")
    assert text == model_docs.document(text), "run python scripts/model_docs.py"
    assert model_docs.document(text.replace("Command R", "Command X")) == text


def test_every_command_and_option_is_in_it():
    text = cli_docs.document()
    sections = dict(zip(COMMANDS, text.split("\n## triforce ")[1:], strict=True))
    for words, command in COMMANDS.items():
        assert sections[words].startswith(" ".join(words) + "\n")
        for name in tree.options(command):
            assert f"--{name}" in sections[words]


def test_a_change_of_a_help_text_is_noticed(monkeypatch):
    option = tree.options(COMMANDS["generate",])["seed"]
    before = cli_docs.document()
    assert "| `--seed N` | Number that gives the same text again. |" in before
    monkeypatch.setattr(cli_docs, "_about", lambda option: f"changed {option.name}")
    assert cli_docs.document() != before
    assert option.help in before


def test_every_command_has_an_example():
    without = [words for words, command in COMMANDS.items() if "Example: triforce" not in (command.help or "")]
    assert without == [("sessions", "ls")]  # nothing to choose there
