"""@PATH in a chat's message, /copy and /log."""

from __future__ import annotations

import base64
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from kit.models import save_pair
from offload.errors import DoesNotFit
from test_cli_log import ENTRY
from triforce_cli.answering.thoughts import Marks, without_thoughts
from triforce_cli.chat.dialogue import Dialogue
from triforce_cli.chat.mentions import Mentions, mentions_in, typed
from triforce_cli.chat.reader import _completer
from triforce_cli.chat.slash import MOST_COPIED_BYTES
from triforce_cli.ground.answer_log import FOLDER_VARIABLE, AnswerLog
from triforce_cli.screen import output

Chat = Callable[..., tuple[int, str, str]]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder, with some files."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b c.txt", "sub/d.md", "e.txt."):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(f"This is {name}, a document.")


def found(text: str, *paths: str) -> Mentions:
    return Mentions(text, tuple(map(Path, paths)))


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("What is in @a.txt?", found("What is in a.txt?", "a.txt")),
        ("@a.txt (@sub/d.md), then?", found("a.txt (sub/d.md), then?", "a.txt", "sub/d.md")),
        ('Is @"b c.txt" new?\n@sub', found("Is b c.txt new?\nsub", "b c.txt", "sub")),
        ("Is @e.txt. there", found("Is e.txt. there", "e.txt.")),  # a file may be called so
        ("@a.txt  @sub/d.md.", found("", "a.txt", "sub/d.md")),  # nothing but mentions
        ("Who is @anna, me@a.txt or a@b.c? @. @.. @ @@ @/", found("Who is @anna, me@a.txt or a@b.c? @. @.. @ @@ @/")),
        ("as @@a.txt, and @@anna", found("as @a.txt, and @@anna")),
        ('as @@"b c.txt"', found('as @"b c.txt"')),
        ("@https://a.b/c @~nobody/a @\0 @" + "x" * 5000, found("@https://a.b/c @~nobody/a @\0 @" + "x" * 5000)),
    ],
)
def test_an_at_before_an_existing_file_is_a_mention(files: None, message: str, expected: Mentions) -> None:
    assert mentions_in(message) == expected


@pytest.mark.parametrize("message", ["as @a.txt.", '@"b c.txt"', "@anna", "a @sub @a.txt"])
def test_a_message_that_is_typed_again_mentions_nothing(files: None, message: str) -> None:
    assert mentions_in(typed(message)) == Mentions(message)


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("What of @a", ["What of @a.txt"]),
        ("@b", ['@"b c.txt"']),
        ('see @"b c', ['see @"b c.txt"']),
        ("x\n@sub/", ["x\n@sub/d.md"]),
        ("/edit of @a", ["/edit of @a.txt"]),
        ("a@a", []),
        ("@a.txt and", []),
        ("/file a", ["/file a.txt"]),
    ],
)
def test_paths_are_completed_behind_an_at(files: None, line: str, completed: list[str]) -> None:
    completer = _completer(lambda: [("/edit", "")], frozenset({"/file"}))
    made = completer.get_completions(Document(line), CompleteEvent())
    assert [line[: len(line) + each.start_position] + each.text for each in made] == completed


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save_pair(folder := tmp_path_factory.mktemp("pair"), context=2048)
    return folder / "target"


@pytest.fixture
def chat(files: None, target: Path, triforce: Chat, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Chat:
    """chat(*lines): a chat without a terminal, each line typed; 8 tokens a reply."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "log"))

    def chat(*lines: str) -> tuple[int, str, str]:
        (tmp_path / "typed").write_text("".join(f"{line}\n" for line in lines))
        model = ("--model", str(target), "--draft", "none", "--dtype", "fp32", "--no-store", "--max-tokens", "8")
        with (tmp_path / "typed").open() as typed:
            monkeypatch.setattr(sys, "stdin", typed)
            return triforce("chat", *model, "--temperature", "0", "--context", "512")

    return chat


def test_a_mention_adds_the_document_before_its_message(chat: Chat) -> None:
    code, _, err = chat("@sub", "Hello", "And @a.txt?", "again @a.txt", "/save saved.json")
    assert code == 0
    turns = json.loads(Path("saved.json").read_text())["turns"]
    asked = [(turn["user"], [document["name"] for document in turn["documents"]]) for turn in turns]
    assert asked == [("Hello", ["d.md"]), ("And a.txt?", ["a.txt"]), ("again a.txt", [])]
    assert turns[1]["documents"][0]["text"] == "This is a.txt, a document."
    assert len(re.findall(r"a\.txt: \d+ tokens; \d+ of 512 tokens of context used", err)) == 1


def test_a_document_that_does_not_fit_is_not_added_and_the_message_is_not_sent(chat: Chat) -> None:
    Path("long.txt").write_text("x" * 2000)
    code, out, err = chat("What is @long.txt about?")
    assert (code, out) == (3, "")
    assert "the context ends at 512" in err


def test_a_draft_is_as_it_is_typed(files: None) -> None:
    """A message that is taken back mentions nothing when it is sent again; one whose document cannot be added does."""

    def refuse(named: object) -> None:
        raise DoesNotFit("no room")

    chat: Any = SimpleNamespace(draft="", add_documents=refuse)
    Dialogue.offer(chat, "/etc of @a.txt")
    assert Dialogue.taken_draft(chat) == "//etc of @@a.txt"
    with pytest.raises(DoesNotFit):
        Dialogue.with_mentions(chat, "/etc of @a.txt")
    assert Dialogue.taken_draft(chat) == "//etc of @a.txt"
    assert Dialogue.taken_draft(chat) == ""


def test_edit_takes_mentions_too(chat: Chat) -> None:
    assert chat("Hello", "/edit of @a.txt", "/save saved.json")[0] == 0
    [turn] = json.loads(Path("saved.json").read_text())["turns"]
    assert (turn["user"], [document["name"] for document in turn["documents"]]) == ("of a.txt", ["a.txt"])


def at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "is_terminal", lambda stream: stream is sys.stderr)
    monkeypatch.setattr(output.Output, "can_draw", property(lambda self: True))


def copied(err: str) -> list[str]:
    return [base64.b64decode(data).decode() for data in re.findall("\x1b]52;c;([A-Za-z0-9+/=]*)\x07", err)]


def test_copy_sends_the_last_reply_or_its_code_to_the_terminal(
    chat: Chat, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    at_a_terminal(monkeypatch)
    reply = "Sé:\n```py\nx = 1\n```\nDone.\n```\ny = 2\n```"
    turn = {"user": "?", "documents": [], "reply": reply, "reply_tokens": [], "complete": True}
    (tmp_path / "c.json").write_text(
        json.dumps({"version": 1, "system": "", "turns": [turn], "pending_documents": [], "question": None, "date": ""})
    )
    code, out, err = chat("/load c.json", "/copy", "/copy code")
    assert (code, out, copied(err)) == (0, "", [reply, "y = 2\n"])
    assert f"the last reply, {len(reply)} characters, is sent to the terminal's clipboard (OSC 52)" in err
    assert "the last code block, 6 characters, is sent" in err
    monkeypatch.setattr("triforce_cli.chat.slash.MOST_COPIED_BYTES", 5)
    assert "that is 6 bytes, terminals take 5; /save PATH" in chat("/load c.json", "/copy code")[2]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["/copy"], "there is no reply to copy yet"),
        (["Hello", "/copy all"], "/copy takes nothing or the word code, not 'all'"),
        (["Hello", "/copy code"], "the last reply has no code block; /copy copies all of it"),
        (["Hello", "/copy"], "standard error is no terminal with a clipboard"),
    ],
)
def test_copy_says_why_it_does_not(chat: Chat, lines: list[str], message: str) -> None:
    code, _, err = chat(*lines)
    assert (code, copied(err)) == (2, [])
    assert message in err


def test_a_console_has_no_clipboard(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    at_a_terminal(monkeypatch)
    monkeypatch.setenv("TERM", "linux")
    assert "no terminal with a clipboard" in chat("Hello", "/copy")[2]


def test_thoughts_are_no_part_of_a_reply_that_is_copied() -> None:
    marks = Marks("<think>", "</think>")
    assert without_thoughts("<think>Hm.</think>\n\nYes.", marks, begun=False) == "Yes."
    assert without_thoughts("Hm.</think>\n\nYes.", marks, begun=True) == "Yes."
    assert without_thoughts("Yes.", None, begun=False) == "Yes."


def test_what_is_copied_fits_what_terminals_take() -> None:
    assert len(base64.b64encode(bytes(MOST_COPIED_BYTES))) <= 100_000 - len("\x1b]52;c;\x07")


def test_log_shows_the_last_entries(chat: Chat) -> None:
    log = AnswerLog.of_user()
    for _ in range(12):
        log.add(ENTRY)
    _, out, err = chat("Hello", "/log", "/log tenant", "/log nowhere")
    assert out.count("\n") == 1  # of the reply
    assert re.search(r"\n *13 .* chat +Hello\n", err)
    assert err.count("Who is the tenant?") == 19
    assert "the newest 10 of 13; triforce log ls lists more" in err
    assert f"{log.file} has no such entry" in err
    assert os.environ[FOLDER_VARIABLE] in err
