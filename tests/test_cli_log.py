"""The answer log: what is kept of questions and answers, by whom it is read, and what it costs when it breaks."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from kit.models import save_pair
from triforce_cli.answering.recorder import MOST_OF_TEXT, MOST_QUESTION, ending
from triforce_cli.ground import answer_log
from triforce_cli.ground.answer_log import FOLDER_VARIABLE, AnswerLog, DamagedLog, Entry, LogError
from triforce_cli.render.answer_log import table
from triforce_cli.settings import configuration

ROOT = Path(__file__).resolve().parent.parent
Triforce = Callable[..., tuple[int, str, str]]
ENTRY = Entry(
    time=1_800_000_000.0,
    command="ask",
    model="llama",
    seed=None,
    options={"temperature": 0.0, "stop": ["a b"]},
    prompt_tokens=90,
    question="Who is the tenant?",
    documents=("lease.pdf",),
    answer="Miller.",
    finish="stop",
    seconds=1.5,
)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AnswerLog:
    """The log of commands, where there is none yet."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "state" / "log"))
    return AnswerLog.of_user()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    save_pair(folder, context=2048)
    (folder / "text.txt").write_text("A long and rather dull text.\n" * 20)
    return folder


@pytest.fixture
def run(pair: Path, triforce: Triforce, log: AnswerLog, monkeypatch: pytest.MonkeyPatch) -> Iterator[Triforce]:
    """`triforce COMMAND ARGS` with the tiny model, nothing on standard input."""
    model = ("--model", str(pair / "target"), "--draft", "none", "--dtype", "fp32", "--no-store")

    with Path(os.devnull).open() as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        yield lambda *args: triforce(args[0], *model, "--max-tokens", "8", "--temperature", "0", *args[1:])


def entries(log: AnswerLog) -> list[Entry]:
    return log.newest(100)[0]


def test_an_answer_is_kept_with_its_question_and_the_names_of_documents(
    run: Triforce, log: AnswerLog, pair: Path
) -> None:
    code, out, err = run("ask", "Who is it?", "--file", str(pair / "text.txt"), "--seed", "7", "--top-k", "5")
    assert code == 0
    [entry] = entries(log)
    assert (entry.command, entry.model, entry.seed, entry.question) == ("ask", "target", 7, "Who is it?")
    assert entry.documents == ("text.txt",)
    assert out == f"{entry.answer}\n"
    assert (entry.finish, entry.id) == ("length", 1)
    assert entry.prompt_tokens > 500  # of the document
    assert "dull" not in log.file.read_bytes().decode("latin-1")
    expected = {"draft": "none", "dtype": "fp32", "store": False, "max-tokens": 8, "temperature": 0.0, "top-k": 5}
    assert entry.options == expected | {"file": [str(pair / "text.txt")]}
    first_use = f"questions and answers are kept in {log.file}, for you alone (triforce log); --no-log leaves them out"
    assert err.count(first_use) == 1
    assert first_use not in run("ask", "Who is it?")[2]


def test_of_a_prompt_the_text_or_its_end_is_kept(run: Triforce, log: AnswerLog, pair: Path) -> None:
    file = str(pair / "text.txt")
    run("generate", "--prompt-file", file, "--prompt", "And then")
    run("generate", "--prompt-file", file, "--json")
    last, first = entries(log)
    assert (first.question, first.documents) == ("And then", ("text.txt",))
    assert last.question == "... " + (pair / "text.txt").read_text()[-MOST_OF_TEXT:]
    assert last.options["json"] is True


def test_of_a_long_question_the_end_is_kept() -> None:
    assert ending("x" + "y" * MOST_QUESTION, MOST_QUESTION) == "... " + "y" * MOST_QUESTION
    assert ending("y" * MOST_QUESTION, MOST_QUESTION) == "y" * MOST_QUESTION


def test_nobody_else_can_read_it(run: Triforce, log: AnswerLog) -> None:
    run("ask", "Who?")
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (log.file, log.file.parent)]
    assert modes == [0o600, 0o700]


def test_it_is_left_out_by_an_option_a_line_of_the_configuration_and_in_batches(
    run: Triforce, log: AnswerLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, triforce: Triforce
) -> None:
    assert run("ask", "Who?", "--no-log")[0] == 0
    (tmp_path / "lines.jsonl").write_text('{"prompt": "Once"}\n')
    assert run("generate", "--input-jsonl", str(tmp_path / "lines.jsonl"))[0] == 0
    (tmp_path / "config.toml").write_text("log = false\n")
    monkeypatch.setenv(configuration.VARIABLE, str(tmp_path / "config.toml"))
    assert run("ask", "Who?")[0] == 0
    assert not log.file.exists()
    assert triforce("log", "ls")[:2] == (0, "")  # `log` is an option and a command
    assert run("ask", "Who?", "--log")[0] == 0
    assert len(entries(log)) == 1


def test_replies_of_a_chat_are_kept_with_what_was_set(
    run: Triforce, log: AnswerLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in.txt").write_text("Who?\n/set max-tokens 4\n/set seed 5\nWhy?\n/clear\n")
    with (tmp_path / "in.txt").open() as messages:
        monkeypatch.setattr(sys, "stdin", messages)
        code, out, err = run("chat")
    assert code == 0
    last, first = entries(log)
    assert [first.question, last.question] == ["Who?", "Why?"]
    assert out == f"{first.answer}\n{last.answer}\n"
    assert (first.options["max-tokens"], last.options["max-tokens"]) == (8, 4)
    assert (first.seed, last.seed, first.command) == (None, 6, "chat")  # the second reply's own seed
    assert err.count("questions and answers are kept") == 1


def test_an_answer_that_is_out_of_time_is_kept_as_far_as_it_came(
    run: Triforce, log: AnswerLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triforce_cli.ground.deadline import Deadline, TimedOut

    def within(self: Deadline, steps: Iterator[Any], *, is_end: object) -> Iterator[Any]:
        yield next(steps)
        raise TimedOut("over")

    monkeypatch.setattr(Deadline, "within", within)
    code, out, _ = run("ask", "Who?", "--timeout", "60")
    assert code == 124
    assert [(entry.finish, entry.answer) for entry in entries(log)] == [("timeout", out.rstrip("\n"))]


@pytest.mark.parametrize("fault", ["damaged", "unwritable", "newer"])
def test_a_log_that_cannot_be_written_costs_a_note_and_no_answer(
    run: Triforce, log: AnswerLog, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "unwritable":
        (tmp_path / "state").write_text("no folder")
    else:
        log.add(ENTRY)
        if fault == "damaged":
            log.file.write_bytes(b"no database at all" * 1000)
        else:
            sqlite3.connect(log.file).execute("PRAGMA user_version = 2").connection.close()
    (tmp_path / "in.txt").write_text("Who?\nWhy?\n")
    with (tmp_path / "in.txt").open() as messages:
        monkeypatch.setattr(sys, "stdin", messages)
        code, out, err = run("chat", "--json")
    assert (code, len(out.splitlines())) == (0, 2)
    assert err.count(f"not in the log of answers: {log.file}") == 1
    expected = {"damaged": "is damaged", "unwritable": "Not a directory", "newer": "update triforce"}
    assert expected[fault] in err


def test_several_processes_lose_no_answer(log: AnswerLog) -> None:
    code = (
        "import sys; from triforce_cli.ground.answer_log import AnswerLog, Entry\n"
        "for number in range(10):\n"
        "    entry = Entry(0.0, 'ask', 'm', None, {}, 1, '?', (), f'{sys.argv[1]}.{number}', 'stop', 1.0)\n"
        "    AnswerLog.of_user().add(entry)"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    processes = [subprocess.Popen([sys.executable, "-c", code, str(number)], env=env) for number in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert sorted(entry.answer for entry in entries(log)) == [f"{i}.{j}" for i in range(3) for j in range(10)]


def test_a_process_that_is_killed_while_it_writes_leaves_the_entries_before(log: AnswerLog) -> None:
    for _ in range(12):
        log.add(ENTRY)
    code = (
        "import os, signal; from triforce_cli.ground.answer_log import AnswerLog\n"
        "with AnswerLog.of_user()._changing() as connection:\n"
        "    connection.execute('PRAGMA cache_size = 1')\n"
        '    connection.execute("UPDATE answers SET answer = hex(zeroblob(5000))")\n'
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert log.file.with_name("answers.db-journal").stat().st_size > 0  # the change was under way in the file
    log.add(ENTRY)
    assert [entry.answer for entry in entries(log)] == ["Miller."] * 13


def test_another_process_that_holds_the_file_for_long_is_an_error(
    log: AnswerLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_log, "BUSY_SECONDS", 0.05)
    log.add(ENTRY)
    with log._changing(), pytest.raises(LogError, match="is being written by another process"):
        log.add(ENTRY)
    assert len(entries(log)) == 1


def test_entries_come_back_as_they_were(log: AnswerLog) -> None:
    odd = replace(ENTRY, question="a\0b \ud800\n\x1b[2J", answer="", seed=2**63 - 1, documents=("ä, b", "\n"))
    log.add(odd)
    [found] = entries(log)
    assert found == replace(odd, question="a\0b ?\n\x1b[2J", id=1)


def test_words_are_searched_in_any_case_in_questions_answers_and_names(log: AnswerLog, triforce: Triforce) -> None:
    log.add(ENTRY)
    log.add(replace(ENTRY, question="Wer ist der Mieter?", answer="Herr MÜLLER", documents=()))
    assert [entry.id for entry in log.newest(5, ["müller"])[0]] == [2]
    assert [entry.id for entry in log.newest(5, ["LEASE", "tenant", "miller"])[0]] == [1]
    assert log.newest(5, ["tenant", "mieter"]) == ([], 0)
    assert "'nobody' and 'else'" in triforce("log", "ls", "--search", "nobody else")[2]
    assert triforce("log", "ls", "--search", "mieter")[1].splitlines()[1].startswith(" 2  ")


def test_texts_are_searched_and_not_their_json(log: AnswerLog) -> None:
    """--search '"' found every entry with a document, and a name with a backslash was not found."""
    log.add(replace(ENTRY, documents=("a.txt", r"C:\lease.pdf")))
    log.add(replace(ENTRY, question='Who said "hello"?', documents=()))
    for word, found in (('"', [2]), ("[", []), (",", []), (r"C:\lease", [1]), ("\\\\", [])):
        assert [entry.id for entry in log.newest(5, [word])[0]] == found, word


def test_the_list_fits_the_terminal_newest_first(
    log: AnswerLog, triforce: Triforce, monkeypatch: pytest.MonkeyPatch
) -> None:
    for question in ("first\nof two lines", "漢字" * 12, "\x1b]0;title\x07" + "x" * 200):
        log.add(replace(ENTRY, question=question))
    monkeypatch.setenv("COLUMNS", "60")
    code, out, err = triforce("log", "ls", "-n", "2")
    assert (code, [line[:2] for line in out.splitlines()]) == (0, ["id", " 3", " 2"])
    assert max(map(len, out.splitlines())) == 60
    assert "\x1b" not in out
    assert cell_len(out.splitlines()[2]) in (59, 60)  # of two columns each
    assert err == "the newest 2 of 3; -n 3 shows all\n"
    assert "first of two lines" in table(entries(log), width=60)
    assert [each["id"] for each in json.loads(triforce("log", "ls", "--json")[1])["entries"]] == [3, 2, 1]


def test_show_has_all_of_an_entry_by_default_the_last(log: AnswerLog, triforce: Triforce) -> None:
    log.add(replace(ENTRY, question="Line\n" * 40, answer="```\ncode\n```\n"))
    log.add(ENTRY)
    assert triforce("log", "show")[1].endswith("\n\nWho is the tenant?\n\nMiller.\n")
    assert triforce("log", "show", "1")[1].endswith("\n" + "Line\n" * 40 + "\n```\ncode\n```\n")
    found = json.loads(triforce("log", "show", "2", "--json")[1])
    assert (found["id"], found["answer"], found["options"]) == (2, "Miller.", ENTRY.options)
    code, out, err = triforce("log", "show", "3")
    assert (code, out) == (2, "")
    assert f"there is no entry 3 in {log.file}" in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("show", "x"), "'x' is no entry's id"),
        (("rm",), "name the entries to remove"),
        (("rm", "1", "--all"), "give --all alone"),
        (("rm", "1"), "give --yes"),
        (("rm", "1", "9", "--yes"), "there is no entry 9"),
        (("ls", "-n", "0"), "number is 0"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_removed(
    log: AnswerLog, triforce: Triforce, args: tuple[str, ...], message: str
) -> None:
    log.add(ENTRY)
    code, out, err = triforce("log", *args)
    assert (code, out) == (2, "")
    assert message in err
    assert len(entries(log)) == 1


def test_what_is_removed_is_no_longer_in_the_file(log: AnswerLog, triforce: Triforce) -> None:
    for word in ("apple", "banana", "cherry"):
        log.add(replace(ENTRY, answer=word))
    assert triforce("log", "rm", "1", "3", "1", "--yes") == (0, "", "removed 2 questions with the answers\n")
    assert [entry.answer for entry in entries(log)] == ["banana"]
    data = log.file.read_bytes()
    assert (b"apple" in data, b"banana" in data, b"cherry" in data) == (False, True, False)
    assert triforce("log", "rm", "--all", "--yes")[0] == 0
    assert entries(log) == []
    assert b"banana" not in log.file.read_bytes()
    log.add(ENTRY)
    assert [entry.id for entry in entries(log)] == [4]  # an id is not used again


def test_a_damaged_file_is_named_and_can_be_removed(log: AnswerLog, triforce: Triforce) -> None:
    log.add(ENTRY)
    log.file.write_bytes(b"no database" * 1000)
    code, out, err = triforce("log", "ls")
    assert (code, out) == (1, "")
    assert f"{log.file} is damaged (file is not a database); 'triforce log rm --all' removes it" in err
    with pytest.raises(DamagedLog):
        log.add(ENTRY)
    assert triforce("log", "rm", "--all", "--yes")[0] == 0
    log.add(ENTRY)
    assert len(entries(log)) == 1


def test_an_entry_with_other_values_names_the_field_and_can_be_removed(log: AnswerLog, triforce: Triforce) -> None:
    log.add(ENTRY)
    with sqlite3.connect(log.file) as connection:
        connection.execute("UPDATE answers SET documents = '[1]'")
    connection.close()
    code, _, err = triforce("log", "show")
    assert (code, "entry 1.documents[0] is 1" in err, "triforce log rm 1 removes it" in err) == (1, True, True)
    assert triforce("log", "rm", "1", "--yes")[0] == 0


def test_without_a_log_nothing_is_made(log: AnswerLog, triforce: Triforce) -> None:
    assert "nothing is kept in" in triforce("log", "ls")[2]
    assert json.loads(triforce("log", "ls", "--json")[1])["entries"] == []
    assert triforce("log", "show")[0] == triforce("log", "rm", "--all", "--yes")[0] == 2
    assert not log.file.parent.exists()


def test_the_log_loads_no_torch() -> None:
    code = "import sys; from triforce_cli.app import main; main(['log', 'ls']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True).returncode == 0
