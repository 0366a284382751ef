"""Names that a screen cannot show: on one line in tables, notes and errors, also in pipes; exact in JSON."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from offload.errors import ModelError, UsageError, quoted_line
from offload.hub.names import pull_command
from offload.weights.checkpoint import Checkpoint
from triforce_cli.answering.citations import Citation
from triforce_cli.chat import notes
from triforce_cli.documents.selection import Named, select, without
from triforce_cli.documents.texts import read_texts
from triforce_cli.ground.text import line_text, visible

NAME, SHOWN = "a\nb\t\x1b[31mc\u202e.txt", r"a\nb\t\u001b[31mc\u202e.txt"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / NAME).write_text("once upon a time")
    (tmp_path / "d.txt").write_text("there was")
    return tmp_path


def test_a_name_is_one_line_and_a_text_keeps_its_lines() -> None:
    assert line_text(NAME) == SHOWN
    assert visible("a\n\tb\x1b") == "a\n\tb\\u001b"
    assert line_text("héllo wörld 日本.txt") == "héllo wörld 日本.txt"


def test_a_table_of_tokens_has_a_line_for_each_document(folder: Path, triforce: Run) -> None:
    """A line break in a name split the table, and ESC went into the pipe."""
    code, out, err = triforce("tokens", str(folder))
    assert code == 0
    assert [line.split("  ")[0] for line in out.splitlines()[1:3]] == [SHOWN, "d.txt"]
    assert "\x1b" not in out + err


def test_json_has_names_as_they_are(folder: Path, triforce: Run) -> None:
    code, out, _ = triforce("tokens", str(folder), "--json")
    assert code == 0
    assert [each["name"] for each in json.loads(out)["documents"]] == [NAME, "d.txt"]


def test_scores_have_a_line_for_each_text(folder: Path, triforce: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    code, out, err = triforce("score", NAME, "-q")
    assert (code, err) == (0, "")
    assert f"\n{SHOWN} " in out
    assert f"\n{SHOWN}:1:" in out
    assert "\x1b" not in out


def test_an_error_is_one_line(folder: Path, triforce: Run) -> None:
    code, _, err = triforce("tokens", str(folder / f"no {NAME}"))
    assert code == 2
    assert err.splitlines()[-1].startswith(rf"error: {folder}/no {SHOWN} has no document")


def test_an_error_in_json_has_the_name_as_it_is(folder: Path, triforce: Run) -> None:
    code, _, err = triforce("tokens", str(folder / f"no {NAME}"), "--json")
    assert code == 2
    assert f"no {NAME}" in json.loads(err.splitlines()[-1])["error"]["message"]


def test_a_note_of_a_folder_is_one_line(folder: Path, triforce: Run) -> None:
    parent = folder / NAME.replace(".txt", "")
    parent.mkdir()
    (parent / "e.txt").write_text("x")
    _, _, err = triforce("tokens", str(parent))
    assert rf"/{SHOWN.replace('.txt', '')}: 1 file, 1 B" in err.splitlines()[-1]


def test_citations_and_a_chats_lines_have_names_on_one_line() -> None:
    assert str(Citation(NAME, "lines 1 to 2", (), 1, 2, 0.5, "text")).startswith(f"{SHOWN}, lines 1 to 2")
    assert notes.kept(Path(NAME), 3, 4).startswith(f"kept in {SHOWN}: ")


# Addresses


@pytest.mark.parametrize(
    "args",
    [
        ("generate", "--prompt-file"),
        ("ask", "hi", "--file"),
        ("ask", "--prompt-file"),
        ("ask", "hi", "--system-file"),
        ("ask", "hi", "--tools"),
        ("tokens",),
        ("score",),
        ("bench", "--prompt-file"),
        ("generate", "--input-jsonl"),
        ("generate", "--prompt", "x", "--plan"),
        ("generate", "--prompt", "x", "--grammar"),
        ("generate", "--prompt", "x", "--config"),
        ("generate", "--prompt", "x", "--model"),
        ("generate", "--prompt", "x", "--draft"),
        ("convert",),
    ],
)
def test_an_address_is_refused_since_nothing_is_fetched(args: tuple[str, ...], triforce: Run) -> None:
    """It was said that there is no file https:/x/y.pdf."""
    code, _, err = triforce(*args, "https://x/y.pdf")
    assert code in (2, 4)
    remedy = (
        "'triforce pull OWNER/NAME'" if args[-1] in ("--model", "--draft") else "download it first (curl -LO https:"
    )
    assert f"https://x/y.pdf is an address and nothing is fetched from it; {remedy}" in err


@pytest.mark.parametrize("name", ["https:/x", "ftp://x/y", "s3://b/k.txt", "file:///etc/passwd"])
def test_addresses_of_any_kind_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="is an address"):
        select(Named((Path(name),)), note=lambda line, **_: None)


def test_a_file_in_a_folder_of_such_a_name_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes:").mkdir()
    (tmp_path / "notes:" / "y.txt").write_text("text")
    found = read_texts([Path("notes:/y.txt")], note=lambda line, **_: None, on_read=lambda *_: None)
    assert list(found.values()) == ["text"]


def test_sentences_below_the_table_of_tokens_fit_the_window(
    folder: Path, triforce: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal of 80 columns cut one of 86 in a word."""
    for columns in (40, 80):
        monkeypatch.setenv("COLUMNS", str(columns))
        _, out, _ = triforce("tokens", str(folder / "d.txt"))
        assert max(map(len, out.splitlines())) <= columns
        assert "context of demo-target: 32,768 tokens, these are" in " ".join(out.split())


HOSTILE = "a;touch pwned 'b"


@pytest.mark.parametrize(
    "args",
    [
        ("tokens", f"https://x.y/{HOSTILE}"),
        ("generate", "--prompt", "x", "--prompt-file", f"https://x.y/{HOSTILE}"),
        ("convert", f"https://x.y/{HOSTILE}"),
        ("ask", "What", HOSTILE),
    ],
)
def test_a_command_to_paste_is_quoted_for_the_shell(args: tuple[str, ...], triforce: Run) -> None:
    """The remedy was curl -LO https://x.y/a;touch pwned, which runs two commands."""
    _, _, err = triforce(*args)
    assert shlex.quote(args[-1] if "://" in args[-1] else " ".join(args[1:])) in err


def test_every_remedy_with_a_name_is_quoted_for_the_shell(tmp_path: Path) -> None:
    model, quoted = tmp_path / HOSTILE, shlex.quote(str(tmp_path / HOSTILE))
    model.mkdir()
    (model / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError) as error:
        Checkpoint.open(model)
    assert str(error.value).endswith(f"triforce convert {quoted}")
    assert f"--revision {shlex.quote(HOSTILE)}" in pull_command("a/b", HOSTILE)
    assert f"--file {shlex.quote(HOSTILE)}" in pull_command("a/b", file=HOSTILE)
    assert shlex.quote(f"!{HOSTILE}") in without(HOSTILE)


def test_a_command_in_a_sentence_is_in_quotes_unless_it_has_some() -> None:
    assert quoted_line("triforce", "pull", "a/b") == "'triforce pull a/b'"
    assert quoted_line("triforce", "convert", "a b") == "triforce convert 'a b'"
