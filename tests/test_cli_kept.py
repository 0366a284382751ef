"""`--session` and `--cache` from the command line: what was computed is found again, and a session is not lost."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from kit.models import TOKENIZER_SIZE, random_model, save
from offload.engine.engine import Engine
from offload.engine.step import Step
from offload.interrupts import Terminated
from offload.session import catalogue
from offload.session.names import FOLDER_VARIABLE, session_folder
from triforce_cli.answering.answer import Answer, Part
from triforce_cli.app import main
from triforce_cli.ground.deadline import Deadline, TimedOut

PROMPT = "".join(f"Line {i} of a long and rather dull text.\n" for i in range(30))
SIZES = {"vocab_size": TOKENIZER_SIZE, "max_position_embeddings": 4096, "eos_token_id": None}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(**SIZES), tmp_path_factory.mktemp("model") / "target", tokenizer=True)


@pytest.fixture(autouse=True)
def sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "sessions"))
    return tmp_path / "sessions"


class Shell:
    """Runs `triforce` in this process and keeps what it wrote."""

    def __init__(self, model: Path, folder: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
        self._model, self._folder, self._capture = model, folder, capfdbinary
        self.errors = ""

    def generate(self, prompt: str, *args: str, code: int = 0) -> bytes:
        return self.run("generate", prompt, *args, code=code)

    def run(self, command: str, prompt: str, *args: str, code: int = 0) -> bytes:
        """`triforce generate` or `ask`."""
        (file := self._folder / "prompt.txt").write_text(prompt)
        fixed = ("--model", str(self._model), "--prompt-file", str(file), "--max-tokens", "30", "--dtype", "fp32")
        assert main([command, *fixed, "--temperature", "0", *args]) == code
        written = self._capture.readouterr()
        self.errors = written.err.decode()
        return written.out


@pytest.fixture
def shell(model: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> Shell:
    return Shell(model, tmp_path, capfdbinary)


def num_kept(name: str) -> int:
    return len(catalogue.inspect(session_folder(name)).tokens)


def test_a_session_gives_the_same_bytes_and_computes_its_prompt_once(shell: Shell) -> None:
    plain = shell.generate(PROMPT)
    first = shell.generate(PROMPT, "--session", "book")
    assert f"session: 0 of {len(PROMPT):,} prompt tokens were there" in shell.errors
    again = shell.generate(PROMPT, "--session", "book")
    assert plain == first == again
    assert f"{len(PROMPT):,} of {len(PROMPT):,} prompt tokens were there" in shell.errors
    assert num_kept("book") >= len(PROMPT)


def test_a_longer_prompt_goes_on_and_another_one_says_what_it_replaces(shell: Shell) -> None:
    shell.generate(PROMPT, "--session", "book")
    shell.generate(PROMPT + "And then?", "--session", "book")
    assert f"{len(PROMPT):,} of {len(PROMPT) + 9:,} prompt tokens were there" in shell.errors
    assert "replaced" not in shell.errors  # the few that were generated after it go without a word
    held = num_kept("book")
    shell.generate("Quite another text.", "--session", "book")
    assert f"{held:,} tokens of what was kept did not begin this prompt and are replaced" in shell.errors
    assert num_kept("book") < held


def test_a_run_that_breaks_off_before_its_first_token_leaves_the_session(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the prefill of another prompt left one token of a book."""
    shell.generate(PROMPT, "--session", "book")
    before = num_kept("book")

    def interrupted(*args: object, **settings: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "_prefill", interrupted)
    shell.generate("Quite another text, long enough for a prefill.", "--session", "book", code=130)
    assert num_kept("book") == before
    shell.generate(PROMPT + PROMPT, "--session", "book", code=130)
    assert num_kept("book") == before
    shell.generate(PROMPT, "--session", "new", code=130)
    assert not session_folder("new").exists() or not list(session_folder("new").glob("page-*"))


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("error", "code"), [(TimedOut("over"), 124), (KeyboardInterrupt(), 130), (Terminated(signal.SIGTERM), 143)]
)
@pytest.mark.parametrize("command", ["generate", "ask"])
def test_a_text_that_is_broken_off_is_kept_as_far_as_it_came(
    command: str, error: BaseException, code: int, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of the prompt alone were saved: the text was still being generated then."""
    add, check = Answer.add, Deadline.check
    came: list[Step] = []

    def added(answer: Answer, step: Step) -> Part:
        part = add(answer, step)
        came.append(step)
        if len(came) == 10 and not isinstance(error, TimedOut):
            raise error
        return part

    def checked(deadline: Deadline) -> None:
        check(deadline)
        if len(came) == 10 and isinstance(error, TimedOut):
            raise error

    with monkeypatch.context() as patch:
        patch.setattr(Answer, "add", added)
        patch.setattr(Deadline, "check", checked)
        shell.run(command, PROMPT, "--session", "book", "--no-speculation", "--logit-bias", "a=100", code=code)
    num_read = int(re.findall(r"of ([0-9,]+) prompt tokens", shell.errors)[0].replace(",", ""))
    assert num_kept("book") == num_read + 9
    if command == "generate":
        shell.generate(PROMPT + 10 * "a", "--session", "book")
        assert f"{len(PROMPT) + 9:,} of {len(PROMPT) + 10:,} prompt tokens were there" in shell.errors


def test_a_session_that_is_only_read_stays(shell: Shell, tmp_path: Path) -> None:
    kept = tmp_path / "kept here"
    shell.generate(PROMPT, "--cache", str(kept))
    files = {path.name: path.read_bytes() for path in kept.iterdir() if path.name.endswith((".json", ".safetensors"))}
    shell.generate(PROMPT + "More.", "--cache", str(kept), "--read-only")
    assert f"{len(PROMPT):,} of {len(PROMPT) + 5:,}" in shell.errors
    assert files == {name: (kept / name).read_bytes() for name in files}
    shell.generate(PROMPT, "--session", "nowhere", "--read-only", code=4)
    assert "nowhere" in shell.errors


def test_another_dtype_is_refused_with_what_differs(shell: Shell) -> None:
    shell.generate(PROMPT, "--session", "book")
    shell.generate(PROMPT, "--session", "book", "--dtype", "bf16", code=4)
    assert "dtype: saved fp32, now bf16" in shell.errors
    assert num_kept("book") >= len(PROMPT)


def test_a_chats_session_is_not_written_over(shell: Shell, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a text, nor by a chat that only reads it."""
    import io
    import sys

    def say(text: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))

    say(b"hello\n")
    chat = ["chat", "--model", str(model), "--session", "talk", "--dtype", "fp32", "--max-tokens", "8", "--quiet"]
    assert main(chat) == 0
    before = num_kept("talk")
    assert before
    shell.generate(PROMPT, "--session", "talk", code=2)
    assert "is kept by a chat" in shell.errors
    say(b"more\n")
    assert main([*chat, "--read-only"]) == 0
    assert num_kept("talk") == before
