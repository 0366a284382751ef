"""`triforce sessions`: what it lists, says, removes and leaves alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pexpect
import pytest
import typer

from kit.sessions import IDENTITY, PAGE, Rows, restore, save, saved
from offload.kv.kept import Kept
from offload.session import manifest as manifests
from offload.session.catalogue import Summary, inspect
from offload.session.manifest import MANIFEST_FILE
from offload.session.names import FOLDER_VARIABLE
from offload.session.store import Store
from test_cli_fake import environment, load, play
from triforce_cli import __version__
from triforce_cli.app import app
from triforce_cli.render import sessions as render_sessions

ROOT = Path(__file__).parents[1]
DAY = 86400
NOW = 1_800_000_000  # 2027-01-15 08:00:00 UTC
VARIABLES = ("OLDER_THAN", "KEEP", "MAX_SIZE", "DRY_RUN", "YES", "JSON", "QUIET", "DEBUG", "CONFIG", "LOG_FILE")


@pytest.fixture(autouse=True)
def _same_everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "sessions"))
    return tmp_path / "sessions"


def put(
    path: Path, *, tokens: int = 5, updated: float = NOW, model: str = "tiny", page: int = PAGE, **extra: object
) -> None:
    """A session as it would be had it been saved then."""
    identity = replace(IDENTITY, model_name=model, page_tokens=page)
    save(path, range(tokens), identity=identity, **extra)
    change(path, updated=updated)


def change(path: Path, **fields: Any) -> None:
    (path / MANIFEST_FILE).write_bytes(manifests.encode(replace(inspect(path), **fields)))


def damage(path: Path) -> None:
    """Its folder stays as old as its manifest was."""
    updated = inspect(path).updated
    (path / MANIFEST_FILE).write_bytes(b"{}")
    os.utime(path, (updated, updated))


def num_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


@pytest.fixture
def run(triforce: Callable[..., tuple[int, str, str]]) -> Callable[..., tuple[int, str, str]]:
    """(exit code, standard output, standard error) of `triforce sessions ARGS`."""
    return partial(triforce, "sessions")


# --- ls ---


def test_ls_shows_the_newest_first_and_what_is_damaged_with_the_reason(root, run):
    put(root / "old", updated=NOW - 3 * DAY)
    put(root / "a-longer-name", tokens=1234, updated=NOW + 60, model="SmolLM2-135M")
    put(root / "bad", updated=NOW)
    damage(root / "bad")
    code, out, err = run("ls")
    lines = out.splitlines()
    assert (code, lines[0].split()) == (0, ["name", "tokens", "size", "updated", "model"])
    assert lines[1].split() == ["a-longer-name", "1,234", "241", "kB", "2027-01-15", "08:01", "SmolLM2-135M"]
    assert lines[2].split() == ["bad", "-", *size_of(root / "bad"), "2027-01-15", "08:00", "-"]
    reason = " ".join(line.strip() for line in lines[3:-1])
    assert reason.startswith(f"cannot be used: {root / 'bad' / MANIFEST_FILE}: it is not a session's manifest")
    assert reason.endswith("remove it with 'triforce sessions rm bad', or start with another name")
    assert lines[-1].split() == ["old", "5", *size_of(root / "old"), "2027-01-12", "08:00", "tiny"]
    assert len({line.index("2027-01") for line in lines if "2027-01" in line}) == 1  # columns
    total = sum(num_bytes(path) for path in root.iterdir())
    assert err == f"3 sessions, {render_sessions.size(total)}, in {root}\n"


def size_of(path: Path) -> list[str]:
    return render_sessions.size(num_bytes(path)).split()


def test_ls_says_where_it_looked_and_makes_nothing(root, run):
    code, out, err = run("ls")
    assert (code, out) == (0, "")
    assert err == f"there are no sessions in {root}; --session NAME of chat or generate begins one\n"
    assert run("ls", "--quiet") == (0, "", "")
    assert json.loads(run("ls", "--json")[1]) == {"folder": str(root), "sessions": [], "version": __version__}
    assert not root.exists()


def test_ls_as_json_has_the_same_sessions(root, run):
    put(root / "chat", tokens=9, updated=NOW + 0.9)
    put(root / "bad", updated=NOW - DAY)
    damage(root / "bad")
    code, out, err = run("ls", "--json")
    chat, bad = json.loads(out)["sessions"]
    assert (code, err) == (0, "")
    assert chat == {
        "name": "chat",
        "num_tokens": 9,
        "bytes": num_bytes(root / "chat"),
        "model": "tiny",
        "updated": "2027-01-15T08:00:00Z",
        "problem": None,
    }
    assert "it is not a session's manifest" in bad.pop("problem")
    assert bad == {
        "name": "bad",
        "num_tokens": 0,
        "bytes": num_bytes(root / "bad"),
        "model": "",
        "updated": "2027-01-14T08:00:00Z",
    }


def test_ls_shows_a_session_that_is_open(root, run):
    with Store.open(root / "chat", IDENTITY) as store:
        assert "nothing was saved yet" in run("ls")[1]
        store.save(Kept(Rows(range(5))), range(5), capacity=7, extra={}, unchanged=0)
        assert "nothing was saved yet" not in run("ls")[1]


def test_any_time_that_a_manifest_may_claim_is_shown(root, run):
    put(root / "future", updated=2**40)
    put(root / "past", updated=0)
    code, out, _ = run("ls")
    assert (code, [line.split()[0] for line in out.splitlines()]) == (0, ["name", "future", "past"])
    assert run("info", "future", "--json")[0] == run("info", "future")[0] == 0


def test_ls_of_what_cannot_be_listed_ends_with_4(root, run):
    root.write_text("a file")
    code, out, err = run("ls")
    assert (code, out) == (4, "")
    assert f"{root} cannot be listed" in err


def test_a_folder_whose_name_is_not_utf8_is_written_with_a_question_mark(root, tmp_path, run, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, os.fsdecode(os.fsencode(tmp_path) + b"/\xe9"))
    assert json.loads(run("ls", "--json")[1])["folder"] == f"{tmp_path}/?"


# --- info ---


def test_info_says_what_a_session_holds(root, run):
    put(root / "book", tokens=9, updated=NOW, kind="chat", conversation={"turns": [{}, {}, {}]})
    change(root / "book", created=NOW - DAY, writer="0.1.0", capacity=32768)
    assert run("info", "book") == (
        0,
        "kind        chat, 3 turns\n"
        "model       tiny, fp32\n"
        "tokens      9, in a context of 32,768\n"
        f"size        {render_sessions.size(num_bytes(root / 'book'))}, 3 pages of 4 tokens\n"
        "created     2027-01-14 08:00\n"
        "updated     2027-01-15 08:00\n"
        "written by  triforce 0.1.0\n"
        f"folder      {root / 'book'}\n",
        "",
    )
    code, out, err = run("info", "book", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "name": "book",
        "folder": str(root / "book"),
        "kind": "chat",
        "num_turns": 3,
        "model": "tiny",
        "dtype": "fp32",
        "num_tokens": 9,
        "capacity": 32768,
        "num_pages": 3,
        "page_tokens": 4,
        "bytes": num_bytes(root / "book"),
        "created": "2027-01-14T08:00:00Z",
        "updated": "2027-01-15T08:00:00Z",
        "writer": "0.1.0",
        "digests": {"model": "model", "tokenizer": "tokenizer", "rope": "rope"},
        "version": __version__,
    }


@pytest.mark.parametrize(
    ("extra", "kind", "num_turns", "shown"),
    [
        ({"kind": "chat", "conversation": {"turns": [{}]}}, "chat", 1, "chat, 1 turn"),
        ({"kind": "chat", "conversation": {"turns": []}}, "chat", 0, "chat, 0 turns"),
        ({"kind": "text"}, "text", None, "text"),
        ({"kind": "text", "conversation": {"turns": [{}]}}, "text", None, "text"),
        ({}, None, None, "unknown"),
        ({"kind": "\x1b[2Jdance"}, None, None, "unknown"),
        ({"kind": ["chat"]}, None, None, "unknown"),
        ({"kind": "chat"}, "chat", None, "chat"),
        ({"kind": "chat", "conversation": [1]}, "chat", None, "chat"),
        ({"kind": "chat", "conversation": {"turns": "many"}}, "chat", None, "chat"),
    ],
)
def test_info_bears_with_any_extra(root, run, extra, kind, num_turns, shown):
    put(root / "it", **extra)
    document = json.loads(run("info", "it", "--json")[1])
    assert (document["kind"], document["num_turns"]) == (kind, num_turns)
    code, out, _ = run("info", "it")
    assert (code, out.splitlines()[0]) == (0, f"kind        {shown}")


def test_a_session_anywhere_is_named_by_its_path(root, run, tmp_path, monkeypatch):
    put(tmp_path / "kept", tokens=7)
    monkeypatch.chdir(tmp_path)
    for path in ("./kept", "kept/", str(tmp_path / "kept")):
        code, out, _ = run("info", path)
        assert (code, "tokens      7," in out) == (0, True)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run("info", "~/kept")[0] == 0
    assert run("info", "kept")[0] == 4  # a name, and none of those in `root`
    size = render_sessions.size(num_bytes(tmp_path / "kept"))
    assert run("rm", "--yes", "./kept") == (0, "", f"removed kept, {size}\n")


@pytest.mark.parametrize("command", ["info", "rm"])
def test_an_unknown_name_ends_with_4_and_with_what_there_is(root, run, command):
    code, out, err = run(command, "book")
    assert (code, out, err) == (4, "", f"error: there is no session 'book' in {root}; there are: none\n")
    for number in range(9):
        put(root / f"chat{number}", updated=NOW - number)
    code, out, err = run(command, "book")
    there = ", ".join(f"chat{number}" for number in range(8))
    assert (code, out) == (4, "")
    assert err == f"error: there is no session 'book' in {root}; there are: {there} and 1 more\n"


def test_info_of_a_damaged_session_ends_with_4_and_the_reason(root, run):
    put(root / "bad")
    damage(root / "bad")
    code, out, err = run("info", "bad")
    assert (code, out) == (4, "")
    assert "it is not a session's manifest" in err


@pytest.mark.parametrize("command", ["info", "rm"])
def test_what_cannot_be_a_name_ends_with_2(root, run, command):
    code, out, err = run(command, ".hidden")
    assert (code, out) == (2, "")
    assert "'.hidden' cannot be a session's name" in err


# --- rm ---


def test_rm_removes_what_is_named_and_says_what_is_free_again(root, run):
    for name in ("a", "b", "c"):
        put(root / name)
    put(root / "bad")
    damage(root / "bad")
    a, bad = (render_sessions.size(num_bytes(root / name)) for name in ("a", "bad"))
    expected = f"removed a, {a}\nremoved bad, {bad}\n"
    assert run("rm", "--yes", "a", "bad", "a", str(root / "a")) == (0, "", expected)  # twice the same is once
    assert run("rm", "--yes", "--quiet", "b") == (0, "", "")
    assert os.listdir(root) == ["c"]


def test_rm_removes_nothing_where_one_name_is_unknown(root, run):
    put(root / "chat")
    assert run("rm", "--yes", "chat", "chta")[0] == 4
    assert restore(root / "chat", replace(IDENTITY, model_name="tiny")) == saved(range(5))


def test_rm_needs_yes_where_nobody_can_be_asked(root, run):
    put(root / "chat")
    code, out, err = run("rm", "chat")
    assert (code, out) == (2, "")
    assert err == "error: removal cannot be undone and there is no terminal to ask at; give --yes\n"
    assert (root / "chat").is_dir()


def test_what_is_in_use_stays_and_the_rest_goes_with_exit_code_4(root, run):
    for name in ("a", "b", "c", "d", "e"):
        put(root / name)
    with Store.open(root / "b", IDENTITY), Store.open(root / "d", IDENTITY, read_only=True):
        code, out, err = run("rm", "--yes", "a", "b", "c")
        assert (code, out) == (4, "")
        assert [line.split(",")[0] for line in err.splitlines()[:2]] == ["removed a", "removed c"]
        assert err.splitlines()[2].startswith(f"error: {root / 'b'} is in use by process {os.getpid()}; wait")
        assert err.splitlines()[-1] == "error: 1 of 3 sessions stay"
        code, out, err = run("prune", "--keep", "0", "--yes")
        assert code == 4
        assert [f"error: {root / name} is in use" in err for name in "bde"] == [True, True, False]
        assert err.splitlines()[-1] == "error: 2 of 3 sessions stay"
    assert sorted(os.listdir(root)) == ["b", "d"]


def test_files_of_others_are_not_removed(root, run):
    (root / "photos").mkdir(parents=True)
    (root / "photos" / "cat.jpg").write_text("")
    code, _, err = run("rm", "--yes", "photos")
    assert (code, "holds other files than a session's" in err) == (4, True)
    assert (root / "photos" / "cat.jpg").exists()


# --- prune ---


@pytest.fixture(scope="module")
def aged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sessions of 1, 2 and 40 days, of about 70, 130 and 200 kB, and one of 3 days that is damaged."""
    root = tmp_path_factory.mktemp("aged")
    for name, tokens, days in (("one", 500, 1), ("two", 1000, 2), ("bad", 5, 3), ("old", 1500, 40)):
        put(root / name, tokens=tokens, updated=time.time() - days * DAY, page=64)
    damage(root / "bad")
    return root


@pytest.fixture
def ages(aged: Path, root: Path) -> Path:
    """These sessions, to be removed."""
    return Path(shutil.copytree(aged, root))


@pytest.mark.parametrize(
    ("limits", "gone"),
    [
        (["--older-than", "50"], []),
        (["--older-than", "2.5"], ["old", "bad"]),
        (["--keep", "4"], []),
        (["--keep", "3"], ["old"]),
        (["--keep", "0"], ["old", "bad", "two", "one"]),
        (["--max-size", "1"], []),
        (["--max-size", "0.0003"], ["old"]),
        (["--max-size", "0.00015"], ["old", "bad", "two"]),
        (["--keep", "3", "--older-than", "1.5"], ["old", "bad", "two"]),
    ],
)
def test_prune_removes_the_oldest_beyond_any_limit(ages, run, limits, gone):
    code, out, err = run("prune", *limits, "--dry-run")
    listed = [line.split()[0] for line in out.splitlines()[1:] if not line.startswith(" ")]
    assert (code, listed) == (0, gone)
    assert err.endswith(" would be removed\n" if gone else f", in {ages}\n")
    assert len(os.listdir(ages)) == 4
    code, out, err = run("prune", *limits, "--yes")
    assert (code, out) == (0, "")
    assert [line.split(",")[0].removeprefix("removed ") for line in err.splitlines()] == (
        gone or [f"nothing to remove: {len(os.listdir(ages))} sessions"]
    )
    assert sorted({*os.listdir(ages), *gone}) == ["bad", "old", "one", "two"]
    assert not {*os.listdir(ages)} & {*gone}


def test_prune_says_what_it_would_remove_and_how_much(ages, run):
    size = render_sessions.size(num_bytes(ages / "old"))
    code, out, err = run("prune", "--keep", "3", "--dry-run")
    assert (code, err) == (0, f"1 session, {size} would be removed\n")
    assert f"old       1,500  {size:>7}" in out


def test_prune_needs_a_limit_and_somebody_to_ask(ages, run):
    for args, named in (
        ([], "no limit is given; add --older-than DAYS, --keep N or --max-size GB"),
        (["--yes"], "no limit is given"),
        (["--keep", "0"], "there is no terminal to ask at; give --yes"),
        (["--keep", "-1"], "keep is -1, it must be from 0 to 1000000"),
        (["--older-than", "nan"], "older-than is nan"),
        (["--max-size", "inf"], "max-size is inf"),
        (["--max-size", "big"], "'big' is not a number"),
        (["--keep", "1.5"], "'1.5' is not a whole number"),
    ):
        code, out, err = run("prune", *args)
        assert (code, out) == (2, "")
        assert named in err
    assert len(os.listdir(ages)) == 4


def test_prune_where_nothing_is_says_so(root, run):
    assert run("prune", "--keep", "0") == (0, "", f"nothing to remove: 0 sessions, 0 B, in {root}\n")
    assert not root.exists()


# --- at a terminal ---


@contextmanager
def terminal(root: Path, *args: str) -> Iterator[pexpect.spawn]:
    """`triforce sessions ARGS` with somebody at the keyboard, in a fork of this process."""
    variables = environment(None, **{FOLDER_VARIABLE: str(root), "TZ": "UTC"})
    load()
    child = pexpect.spawn(
        "true",
        encoding="utf-8",
        dimensions=(24, 80),
        preexec_fn=lambda: play(["sessions", *args], variables, stand_in=False),
    )
    child.delaybeforesend, child.ptyproc.delayafterclose = None, 0
    try:
        yield child
    finally:
        child.close(force=True)


def ended(child: pexpect.spawn) -> tuple[str, int]:
    """The output since the last call, and the exit code."""
    child.expect(pexpect.EOF)
    child.wait()
    child.close()
    return child.before, child.exitstatus


@pytest.mark.parametrize(
    ("typed", "code", "is_gone"),
    [
        ("y\r", 0, True),
        (" YES \r", 0, True),
        ("n\r", 0, False),
        ("\r", 0, False),
        ("\x04", 0, False),
        ("\x03", 130, False),
    ],
)
def test_a_person_is_asked_before_sessions_are_removed(root, typed, code, is_gone):
    for name in ("a", "b", "c"):
        put(root / name)
    with terminal(root, "rm", "a", "b", "--quiet") as child:
        child.expect_exact("remove a, b for good? [y/N] ")
        assert len(os.listdir(root)) == 3
        child.send(typed)
        assert ended(child)[1] == code
    assert sorted(os.listdir(root)) == (["c"] if is_gone else ["a", "b", "c"])


def test_a_person_is_told_that_nothing_was_removed(root):
    put(root / "a")
    with terminal(root, "rm", "a") as child:
        child.expect_exact("[y/N] ")
        child.send("n\r")
        text, _ = ended(child)
    assert text.split("\r\n")[1:] == ["nothing was removed", ""]


def test_a_person_sees_what_prune_would_remove_before_the_question(ages):
    size = render_sessions.size(sum(num_bytes(ages / name) for name in ("two", "bad", "old")))
    with terminal(ages, "prune", "--keep", "1", "--quiet") as child:
        child.expect_exact(f"remove 3 sessions, {size}, for good? [y/N] ")
        shown = child.before
        child.send("y\r")
        assert ended(child)[1] == 0
    assert [name for name in ("one", "two", "bad", "old") if f"\n{name} " in shown] == ["two", "bad", "old"]
    assert os.listdir(ages) == ["one"]


def test_yes_asks_nobody(root):
    put(root / "a")
    with terminal(root, "rm", "a", "--yes") as child:
        text, code = ended(child)
    assert (code, "[y/N]" in text) == (0, False)
    assert os.listdir(root) == []


# --- the command line ---


def parse(*args: str) -> Mapping[str, Any]:
    return app(["sessions", *args], standalone_mode=False).arguments


@pytest.mark.parametrize(
    ("command", "flag", "typed", "field", "expected"),
    [
        (["ls"], "--json", "1", "json", True),
        (["ls"], "--quiet", "1", "quiet", True),
        (["info", "x"], "--json", "1", "json", True),
        (["rm", "x"], "--yes", "1", "yes", True),
        (["rm", "x"], "--quiet", "1", "quiet", True),
        (["prune", "--keep", "1"], "--older-than", "0.5", "older_than", 0.5),
        (["prune", "--older-than", "1"], "--keep", "3", "keep", 3),
        (["prune", "--keep", "1"], "--max-size", "2.5", "max_size", 2.5),
        (["prune", "--keep", "1"], "--dry-run", "1", "dry_run", True),
        (["prune", "--keep", "1"], "--yes", "1", "yes", True),
        (["prune", "--keep", "1"], "--quiet", "1", "quiet", True),
    ],
)
def test_option_and_its_variable_say_the_same(command, flag, typed, field, expected, monkeypatch):
    assert parse(*command)[field] != expected
    given = [flag] if expected is True else [flag, typed]
    assert parse(*command, *given)[field] == expected
    monkeypatch.setenv("TRIFORCE_" + flag[2:].replace("-", "_").upper(), typed)
    assert parse(*command)[field] == expected


def test_every_option_has_its_variable():
    group = typer.main.get_command(app).commands["sessions"]
    options = {(name, each.opts[0]): each.envvar for name, command in group.commands.items() for each in command.params}
    arguments = {("info", "name"), ("rm", "names")}
    assert {key for key, variable in options.items() if variable is None} == arguments
    assert {variable for key, variable in options.items() if key not in arguments} == {
        f"TRIFORCE_{name}" for name in VARIABLES
    }


@pytest.mark.parametrize("args", [[], ["ls"], ["info"], ["rm"], ["prune"]])
def test_every_command_has_help(run, args):
    code, out, err = run(*args, "--help")
    assert (code, err) == (0, "")
    assert f"Usage: triforce sessions {args[0] if args else '[OPTIONS] COMMAND'}" in out


def test_without_a_command_there_is_help_and_exit_code_2(run):
    code, out, err = run()
    assert (code, err) == (2, "")
    assert "prune" in out


def test_an_error_shows_its_traceback_where_it_is_asked_for(root, run, monkeypatch):
    monkeypatch.setenv("TRIFORCE_DEBUG", "0")
    assert "Traceback" not in run("info", "x")[2]
    assert "Traceback" in run("info", "x", "--debug")[2]


def test_listing_loads_no_torch(root):
    put(root / "chat")
    code = (
        "import sys; from triforce_cli.app import main\n"
        "assert main(['sessions', 'ls']) == main(['sessions', 'info', 'chat']) == 0\n"
        "sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


# --- text ---


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (350e6, "350 MB"), (1.236e9, "1.24 GB"), (1234e9, "1.23 TB")],
)
def test_sizes_are_decimal(count, text):
    assert render_sessions.size(count) == text


def test_a_table_fits_the_window_and_cuts_models_only():
    summary = Summary(Path("a" * 20), 5 * 10**9, 123456, "m" * 50, NOW, "")
    for width, model in ((120, "m" * 50), (80, "m" * 17 + "..."), (20, "m" * 9 + "...")):
        head, row = render_sessions.table([summary], width=width).splitlines()
        assert row == f"{'a' * 20}    123,456  5.00 GB  2027-01-15 08:00  {model}"
        assert len(head) <= 80
    broken = replace(summary, problem="/a/rather-long/path: " + "words " * 40)
    assert max(map(len, render_sessions.table([broken], width=64).splitlines()[2:])) <= 64
