"""`--extract`: what a pipeline gets of an answer with code, and what it gets where there is none."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kit.models import save_pair
from offload.engine.engine import Engine
from offload.engine.step import Step
from offload.errors import DoesNotFit
from triforce_cli.answering.code import last_block

Run = Callable[..., tuple[int, str, str]]
CODE = "```python\nprint('\x1b[1m')\n```\n"
NOT_THERE = "error: the answer has no whole code block, so nothing is written; all of it stands above\n"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    save_pair(folder, context=1024)
    return folder / "target"


@pytest.fixture
def run(target: Path, triforce: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """run(answer, *args, finish=, fails=): `triforce ask -x ARGS` of a model that answers in pieces of three
    characters."""

    def run(
        answer: str, *args: str, finish: str = "stop", fails: bool = False, command: Sequence[str] = ("ask", "?")
    ) -> tuple[int, str, str]:
        def generate(self: Engine, request: Any, **settings: Any) -> Iterator[Step]:
            for start in range(0, len(answer), 3):
                yield Step(answer[start : start + 3], [65], None)
            if fails:
                raise DoesNotFit("no more room")
            yield Step("", [], finish)  # type: ignore[arg-type]

        monkeypatch.setattr(Engine, "generate", generate)
        model = ("--model", str(target), "--draft", "none", "--no-store", "--quiet", "--extract")
        return triforce(*command, *model, *args)

    with Path(os.devnull).open() as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        yield run


@pytest.mark.parametrize(
    ("text", "finish", "code"),
    [
        ("Here:\n```py\na\n\n  b\n```\nThere.", "length", "a\n\n  b\n"),
        ("```\na\n```\nthen\n~~~sh\nb\n~~~\n", "stop", "b\n"),
        ("````md\n```\na\n```\n````", "stop", "```\na\n```\n"),
        ("1. Run\n\n   ```\n   a\n     b\n   ```\n", "stop", "a\n  b\n"),
        ("```\n```", "length", ""),
        ("a `b` c\n\n    indented\n", "stop", None),
        ("", "stop", None),
        ("```\na", "stop", "a\n"),  # as with --begin-reply '```' and --stop '```'
        ("```\na", "length", None),
        ("```\na\n", None, None),
        ("```\na\n```\n```\nb", "timeout", None),  # the last one was cut
    ],
)
def test_the_last_block_is_found_as_markdown_has_it(text: str, finish: str | None, code: str | None) -> None:
    assert last_block(text, finish) == code


def test_standard_output_gets_the_code_alone(run: Run) -> None:
    assert run(f"Sure:\n{CODE}Have fun!") == (0, "print('\x1b[1m')\n", "")
    assert run(f"Sure:\n{CODE}", command=("generate", "--prompt", "?")) == (0, "print('\x1b[1m')\n", "")


def test_without_a_block_nothing_is_written_and_the_answer_is_not_lost(run: Run) -> None:
    assert run("I cannot.\nSorry.\n") == (6, "", f"I cannot.\nSorry.\n{NOT_THERE}")


def test_a_block_that_was_cut_is_none(run: Run) -> None:
    code, out, err = run("```\nrm -r /tmp/", finish="length")
    assert (code, out) == (6, "")
    assert err.startswith("```\nrm -r /tmp/\n")
    assert err.endswith(NOT_THERE)
    assert run(f"{CODE}And", finish="length")[:2] == (0, "print('\x1b[1m')\n")


def test_an_answer_that_fails_is_not_lost_either(run: Run) -> None:
    assert run("Half an", fails=True) == (3, "", "Half an\nerror: no more room\n")


def test_a_file_is_left_alone_where_there_is_no_code(run: Run, tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text("old")
    assert run("No code.", "-o", str(tmp_path / "run.py"))[0] == 6
    assert [path.name for path in tmp_path.iterdir()] == ["run.py"]
    assert (tmp_path / "run.py").read_text() == "old"
    assert run(CODE, "-o", str(tmp_path / "run.py"))[:2] == (0, "")
    assert (tmp_path / "run.py").read_text() == "print('\x1b[1m')\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("ask", "?", "--json"), "--extract writes a code block and --json all of the answer; give one of them"),
        (("ask", "?", "--jsonl"), "--extract writes a code block and --json all of the answer; give one of them"),
        (("generate", "--prompt", "?", "--echo"), "--echo begins with the prompt"),
        (("generate", "--input-jsonl", "-"), "--input-jsonl answers in JSON lines of its own; leave out"),
    ],
)
def test_other_forms_are_refused(triforce: Run, args: tuple[str, ...], message: str) -> None:
    code, out, err = triforce(*args, "-x")
    assert (code, out) == (2, "")
    assert message in err
