"""Environment variables: a misspelt one is an error, as a misspelt line of the configuration file is."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from triforce_cli.app import app
from triforce_cli.settings import variables

ROOT = Path(__file__).resolve().parent.parent
NAME = re.compile(r'"(TRIFORCE_[A-Z0-9_]+[A-Z0-9])\b')
Run = Callable[..., tuple[int, str, str]]


def read_by(*folders: str) -> set[str]:
    """The names that stand in the sources as the beginning of a text: those that are read, and named to people."""
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py") if file.name != "variables.py"]
    return {name for file in files for name in NAME.findall(file.read_text(encoding="utf-8"))}


def test_all_variables_that_the_sources_read_are_known() -> None:
    read, known = read_by("offload", "triforce_cli"), variables.known(typer.main.get_command(app))
    assert {"TRIFORCE_KERNELS", "TRIFORCE_CACHE_DIR", "TRIFORCE_CONFIG"} <= read
    assert read <= known
    assert read_by("offload", "triforce_cli", "tests") >= variables.OTHERS


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("TRIFORCE_MAXTOKENS", "did you mean TRIFORCE_MAX_TOKENS?"),
        ("TRIFORCE_KERNEL", "did you mean TRIFORCE_KERNELS?"),
        ("TRIFORCE_ZZZZZZ", "'triforce config show' lists all there are"),
    ],
)
def test_an_unknown_variable_is_named(name: str, remedy: str, triforce: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRIFORCE_MAXTOKENS was ignored."""
    monkeypatch.setenv(name, "3")
    code, out, err = triforce("version")
    assert (code, out) == (2, "")
    assert err == f"error: the environment variable {name} is none of this program; {remedy}\n"


@pytest.mark.parametrize(
    "name", ["TRIFORCE_MAX_TOKENS", "TRIFORCE_YES", "TRIFORCE_GRAPHS", "TRIFORCE_TEST_MODELS", "X"]
)
def test_a_variable_of_another_command_is_known(name: str, triforce: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    assert triforce("version")[0] == 0


def test_a_variable_without_a_value_is_none(triforce: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIFORCE_MAXTOKENS", "")
    assert triforce("version")[0] == 0
