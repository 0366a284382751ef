"""`--continue`: what two runs write is what one run with a larger --max-tokens writes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kit.models import TOKENIZER_SIZE, random_model, save
from offload.decode.sampling import SamplingParams
from offload.engine.step import Step
from offload.interrupts import Terminated
from offload.seeds import seed_within
from offload.session import catalogue
from offload.session.names import FOLDER_VARIABLE, session_folder
from triforce_cli.answering.answer import Answer
from triforce_cli.answering.request import Earlier, Prompt, Wanted
from triforce_cli.answering.resumable import Resumable
from triforce_cli.answering.thoughts import Marks
from triforce_cli.app import main

SIZES = {"vocab_size": TOKENIZER_SIZE, "max_position_embeddings": 4096, "eos_token_id": None}
PROMPT = "A line of a rather dull text.\n" * 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(**SIZES), tmp_path_factory.mktemp("model") / "target", tokenizer=True)


@pytest.fixture(autouse=True)
def sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "sessions"))


class Shell:
    """Runs `triforce` in this process and keeps what it wrote."""

    def __init__(self, model: Path, folder: Path, capture: pytest.CaptureFixture[bytes]) -> None:
        self._fixed = ("--model", str(model), "--dtype", "fp32", "--temperature", "0", "--no-speculation")
        (folder / "prompt.txt").write_text(PROMPT)
        self._prompt, self._capture = ("--prompt-file", str(folder / "prompt.txt")), capture
        self.errors = ""

    def begin(self, command: str, max_tokens: int, *args: str, code: int = 0) -> str:
        return self.run(command, "--max-tokens", str(max_tokens), *self._prompt, *args, code=code)

    def go_on(self, command: str, max_tokens: int, *args: str, code: int = 0) -> str:
        return self.run(command, "--max-tokens", str(max_tokens), "--session", "s", "--continue", *args, code=code)

    def run(self, *args: str, code: int) -> str:
        found = main([args[0], *self._fixed, *args[1:]])
        written = self._capture.readouterr()
        self.errors = written.err.decode()
        assert found == code, self.errors
        return written.out.decode()


@pytest.fixture
def shell(model: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> Shell:
    return Shell(model, tmp_path, capfdbinary)


@pytest.mark.parametrize("command", ["generate", "ask"])
def test_two_runs_write_what_one_does(command: str, shell: Shell) -> None:
    penalties = ("--repetition-penalty", "1.3", "--no-repeat-ngram", "3")  # they depend on where the prompt ends
    whole = shell.begin(command, 24, *penalties)
    first = shell.begin(command, 9, *penalties, "--session", "s")
    assert "--continue goes on" in shell.errors
    second = shell.go_on(command, 1, *penalties)
    third = json.loads(shell.go_on(command, 14, *penalties, "--json"))
    if command == "ask":  # which ends with a line break
        whole, first, second = (
            text[: -(text != "\n")] if text.endswith("\n") else text for text in (whole, first, second)
        )
    assert first + second + third["text"] == whole
    assert len(third["tokens"]) == 14
    assert shell.go_on(command, 3, *penalties, "--compare")


def test_a_constraint_and_a_stop_string_reach_across_the_cut(shell: Shell) -> None:
    pattern = ("--regex", "abcdefgh[0-9]{9}")
    assert shell.begin("generate", 3, *pattern, "--session", "s", code=6) == "abc"
    assert shell.go_on("generate", 5, *pattern, code=6) == "defgh"
    assert re.fullmatch("[0-9]{9}", shell.go_on("generate", 20, *pattern))
    shell.go_on("generate", 5, *pattern, code=2)
    assert "has ended, so there is nothing to go on with" in shell.errors
    stop = (*pattern, "--stop", "cde")
    assert shell.begin("generate", 3, *stop, "--session", "s", code=6) == "abc"  # that it begins is not sure yet
    assert shell.go_on("generate", 9, *stop) == ""
    shell.go_on("generate", 9, *stop, code=2)
    assert "has ended" in shell.errors


def test_an_answer_that_was_interrupted_goes_on(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, add = shell.begin("generate", 20), Answer.add

    def added(answer: Answer, step: Step) -> Any:
        part = add(answer, step)
        if answer.num_tokens == 7:
            raise Terminated(15)
        return part

    with monkeypatch.context() as patch:
        patch.setattr(Answer, "add", added)
        first = shell.begin("generate", 20, "--session", "s", code=143)
    assert first + shell.go_on("generate", 13) == whole


def test_an_answer_with_no_new_row_is_still_the_last_one(shell: Shell) -> None:
    """Rows are saved where there are more than before; where the answer stopped has to be saved all the same."""
    whole = shell.begin("generate", 20, "--session", "s")
    first = shell.begin("generate", 1, "--session", "s")
    assert first + shell.go_on("generate", 19) == whole
    files = {path: path.read_bytes() for path in session_folder("s").iterdir() if path.suffix == ".json"}
    shell.go_on("generate", 4, "--read-only")
    assert "--continue goes on" not in shell.errors
    assert files == {path: path.read_bytes() for path in files}


def test_what_cannot_go_on_is_said(shell: Shell, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shell.run("generate", "--continue", code=2)
    assert "add --session NAME" in shell.errors
    shell.go_on("generate", 4, code=4)
    assert "there is no session" in shell.errors
    shell.begin("generate", 4, "--session", "s")
    shell.go_on("ask", 4, code=2)
    assert "triforce generate --continue goes on with it" in shell.errors
    for args, named in (
        (("generate", "--prompt", "More"), "--prompt"), (("ask", "Why?"), "QUESTION"), (("ask", "--cite"), "--cite"),
        (("ask", "--system", "Be brief"), "--system"), (("ask", "--thinking", "off"), "--thinking off"),
        (("generate", "--echo"), "--echo"), (("generate", "--input-jsonl", "x"), "--input-jsonl"),
    ):  # fmt: skip
        shell.go_on(args[0], 4, *args[1:], code=2)
        assert f"leave out {named}" in shell.errors
    manifest = catalogue.inspect(session_folder("s"))
    with monkeypatch.context() as patch:
        patch.setattr("triforce_cli.answering.session._extra", lambda *of: {"kind": "text"})  # as 0.1.0 wrote it
        shell.begin("generate", 5, "--session", "s")
    shell.go_on("generate", 4, code=2)
    assert "an earlier version wrote it" in shell.errors
    for change in ({"num_rows": 10**6}, {"num_prompt": 0}, {"rest": ["a"]}, {"version": 2}):
        answer = {**manifest.extra["answer"], **change}  # type: ignore[dict-item]
        with monkeypatch.context() as patch:
            patch.setattr(
                "triforce_cli.answering.session._extra", lambda *of, answer=answer: {"kind": "text", "answer": answer}
            )
            shell.begin("generate", 5, "--session", "s")
        shell.go_on("generate", 4, code=2)
        assert "an answer that cannot be read" in shell.errors


class Numbers:
    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))


@pytest.mark.parametrize("cut", range(1, 30))
def test_thoughts_are_told_apart_across_the_cut(cut: int) -> None:
    """Also where the first run broke off within a mark, and wrote it as text: nothing is written twice."""
    reply, marks = "<think>\nLong thoughts</think>\n\nYes.", Marks("<think>", "</think>")
    prompt = Prompt([1, 2, 3], is_chat=True, marks=marks)
    wanted, tokenizer = Wanted(max_tokens=99, sampling=SamplingParams()), Numbers()

    def read(prompt: Prompt, *texts: str, finish: str | None) -> Answer:
        answer = Answer(prompt, wanted, tokenizer)  # type: ignore[arg-type]
        for i, text in enumerate(texts):
            answer.add(Step(text, list(map(ord, text)), finish if i == len(texts) - 1 else None))  # type: ignore[arg-type]
        return answer

    first = read(prompt, *reply[:cut], finish=None)
    begun = Resumable.of(first, [1, 2])  # before what is held back is written, as by `kept`
    first.end("interrupted")
    again = begun.prompt([1, 2, 9])
    assert again.earlier == Earlier(cut, len(first.text), sum(len(part.thoughts) for part in first.parts))
    assert list(again.tokens) == [1, 2, 3, *map(ord, reply[:cut])]
    second = read(again, reply[: cut + 1], *reply[cut + 1 :], finish="stop")
    thoughts = "".join(part.thoughts for part in (*first.parts, *second.parts))
    written_marks = [reply[:cut][-n:] for n in range(1, 8) if marks.close.startswith(reply[:cut][-n:])]
    if not written_marks and cut >= len("<think>"):
        assert (first.text + second.text, thoughts) == ("Yes.", "Long thoughts")
    assert second.text.endswith("Yes."[len(first.text) :] if "think" in reply[cut:] else "")
    assert Resumable.of(second, [1]).ended


def test_the_seed_of_what_follows_is_another_one() -> None:
    assert seed_within(None, 5) is None
    assert seed_within(7, 0) == 7
    wanted = Wanted(max_tokens=9, sampling=SamplingParams(seed=7))
    request = Prompt([1, 2, 3], earlier=Earlier(2)).request(wanted, max_tokens=9)
    assert (request.begun, request.sampling.seed) == (2, seed_within(7, 2))
    assert len({seed_within(7, 5), seed_within(7, 6), seed_within(8, 5), 7, 8}) == 5
