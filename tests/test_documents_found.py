"""Which files a folder, a pattern and a name stand for: links, loops, devices, pipes, and limits of all of them."""

from __future__ import annotations

import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from test_documents_in import Heard
from triforce_cli.documents import selection, walk
from triforce_cli.documents.walk import Pattern, Walk
from triforce_cli.ground import inputs
from triforce_cli.ground.errors import describe

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def heard() -> Heard:
    return Heard()


def tree(root: Path, *names: str) -> Path:
    """A folder of files, each of which has its name as text."""
    for name in names or ("a.txt", "sub/b.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"text of {name}\n")
    return root


def names(heard: Heard, *paths: Path | str, include: tuple[str, ...] = ()) -> list[str]:
    return [reading.name for reading in heard.read(*paths, include=include)]


# --- links ---


@pytest.mark.parametrize("named", ["{}", "{}/**/*.txt", "{}/**", "{}/../d", "{}/loop0", "{}/loop0/**/*.txt"])
def test_links_to_the_folder_itself_are_walked_once(named: str, heard: Heard, tmp_path: Path) -> None:
    """Bug: with two links to itself, a pattern with ** had 2^40 paths to go."""
    folder = tree(tmp_path / "d")
    for number in range(2):
        (folder / f"loop{number}").symlink_to(".")
        (folder / f"sub/up{number}").symlink_to("..")
    assert names(heard, named.format(folder)) == ["a.txt", "sub/b.txt"]
    assert "4 links that repeat what is read" in heard.notes[0]


def outside(tmp_path: Path) -> Path:
    folder = tree(tmp_path / "d")
    tree(tmp_path / "secrets", "key.txt")
    (folder / "notes.txt").symlink_to(tmp_path / "secrets/key.txt")
    (folder / "chain.txt").symlink_to("notes.txt")
    (folder / "more").symlink_to("../secrets")
    (folder / "up").symlink_to("..")
    return folder


@pytest.mark.parametrize("named", ["{}", "{}/**/*", "{}/**/*.txt", "{}/**"])
def test_what_leads_outside_of_the_folder_is_left_out_and_said(named: str, heard: Heard, tmp_path: Path) -> None:
    """Bug: a link in a folder, as one of a repository that was cloned, had any file read without a word."""
    folder = outside(tmp_path)
    assert names(heard, named.format(folder)) == ["a.txt", "sub/b.txt"]
    assert "(left out: 4 links that lead outside; name a link to read what it leads to)" in heard.notes[0]


def test_what_a_person_names_is_followed(heard: Heard, tmp_path: Path) -> None:
    folder = outside(tmp_path)
    assert heard.text(folder / "notes.txt") == "text of key.txt\n"
    assert names(heard, folder / "more") == ["key.txt"]
    assert names(heard, f"{folder}/more/*.txt") == ["key.txt"]
    (folder / "here").symlink_to("sub")
    assert names(heard, folder / "here") == ["b.txt"]


def test_links_that_stay_inside_are_followed(heard: Heard, tmp_path: Path) -> None:
    folder = tree(tmp_path / "d", "v1/a.txt", "v2/a.txt", "z.txt")
    (folder / "current").symlink_to("v2")
    (folder / "first.txt").symlink_to("z.txt")
    assert names(heard, folder) == ["v1/a.txt", "v2/a.txt", "z.txt"]
    assert "2 links that repeat what is read" in heard.notes[-1]
    assert names(heard, folder, include=("first*",)) == ["first.txt"]
    assert heard.text(f"{folder}/cur*/a.txt") == "text of v2/a.txt\n"
    assert names(heard, f"{folder}/cur*/a.txt") == ["current/a.txt"]
    assert names(heard, f"{folder}/*/a.txt") == ["v1/a.txt", "v2/a.txt"]
    assert names(heard, f"{folder}/**/current/*") == ["current/a.txt"]


def test_link_is_read_by_the_path_that_was_checked(heard: Heard, tmp_path: Path) -> None:
    """Were it opened by its name, it could lead elsewhere by then."""
    folder = tree(tmp_path / "d", "z.txt")
    (folder / "a.txt").symlink_to("z.txt")
    (found,) = selection.select(selection.Named((folder,), ("a*",)), note=heard.note)
    assert (found.name, found.path) == ("a.txt", folder.resolve() / "z.txt")


def test_link_to_a_hidden_file_is_left_out(heard: Heard, tmp_path: Path) -> None:
    """A repository has no .env; whoever cloned it has."""
    folder = tree(tmp_path / "d", "a.txt", ".env", ".git/config", "node_modules/b.txt")
    for name, target in (("x.txt", ".env"), ("y.txt", ".git/config"), ("z", "node_modules")):
        (folder / name).symlink_to(target)
    assert names(heard, folder) == ["a.txt"]
    assert "3 links that lead to what is left out" in heard.notes[0]


def test_broken_links_and_rings_are_left_out(heard: Heard, tmp_path: Path) -> None:
    folder = tree(tmp_path / "d")
    (folder / "nowhere").symlink_to("nothing")
    (folder / "ring").symlink_to("gnir")
    (folder / "gnir").symlink_to("ring")
    assert names(heard, folder) == ["a.txt", "sub/b.txt"]
    assert "3 links that cannot be followed" in heard.notes[0]
    assert "No such file" in heard.refused(folder / "nowhere")
    assert "Too many levels of symbolic links" in heard.refused(folder / "ring")


def test_names_with_line_ends_and_bytes_that_are_no_text(heard: Heard, tmp_path: Path) -> None:
    folder = tree(tmp_path / "d", "a\nb.txt")
    (folder / os.fsdecode(b"\xff.txt")).write_text("bytes\n")
    assert names(heard, f"{folder}/*.txt") == names(heard, folder) == ["a\nb.txt", "?.txt"]


# --- patterns ---


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*", ["a.txt"]),
        ("**", ["a.txt", "sub/b.txt", "sub/deep/c.md"]),
        ("**/*.md", ["sub/deep/c.md"]),
        ("**/deep/**/*", ["sub/deep/c.md"]),
        ("s*/?.txt", ["sub/b.txt"]),
        ("s*/**", ["sub/b.txt", "sub/deep/c.md"]),
        ("[!s]*", ["a.txt"]),
        ("*/*/*", ["sub/deep/c.md"]),
        ("**/**/b.txt", ["sub/b.txt"]),
        (".h*/*", [".hid/d.txt"]),
        ("*/.e*", ["sub/.e.txt"]),
    ],
)
def test_pattern_matches_name_by_name(pattern: str, found: list[str], heard: Heard, tmp_path: Path) -> None:
    tree(tmp_path, "a.txt", "sub/b.txt", "sub/deep/c.md", ".hid/d.txt", "sub/.e.txt")
    entries = Walk(tmp_path, Pattern(Path(pattern).parts), asked=tmp_path).entries()
    assert sorted(str(entry.path.relative_to(tmp_path)) for entry in entries if not entry.why) == found


def test_the_limit_of_entries_ends_the_walk(heard: Heard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a pattern was expanded and sorted whole before its entries were counted."""
    tree(tmp_path, *(f"{folder}/{number}.txt" for folder in range(20) for number in range(20)))
    listed: list[str] = []
    scan = os.scandir

    def counted(path: Path) -> Iterator[os.DirEntry[str]]:
        listed.append(str(path))
        return scan(path)

    monkeypatch.setattr(walk, "MOST_ENTRIES", 50)
    monkeypatch.setattr(walk.os, "scandir", counted)
    for named in (str(tmp_path), f"{tmp_path}/**/*.txt", f"{tmp_path}/*/*.no"):
        listed.clear()
        said = heard.refused(named)
        assert f"{named} has over 50 entries to look at, the most that are (3 folders so far)" in said
        assert said.endswith("; name a folder further down")
        assert len(listed) == 3


def test_folder_that_cannot_be_read_is_left_out_and_always_said(
    heard: Heard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a folder that was named was refused, with --include as the remedy, which did not help; a pattern passed over
    it without a word."""
    folder, scan = tree(tmp_path / "d"), os.scandir

    def closed(path: Path) -> Iterator[os.DirEntry[str]]:
        if path.name == "sub":
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    def note(line: str, *, urgent: bool = False) -> None:
        assert "(left out: 1 folder that cannot be read)" in line
        assert urgent

    monkeypatch.setattr(walk.os, "scandir", closed)  # root could read any folder
    monkeypatch.setattr(heard, "note", note)
    for named in (str(folder), f"{folder}/**/*.txt"):
        assert names(heard, named) == ["a.txt"]


# --- sizes ---


def test_one_file_has_a_limit(heard: Heard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: only folders had one."""
    (tmp_path / "long.txt").touch()
    os.truncate(tmp_path / "long.txt", 10 << 30)
    assert heard.refused(tmp_path / "long.txt") == (
        f"{tmp_path}/long.txt has 10.7 GB, read are at most 1.07 GB; split it"
    )
    os.truncate(tmp_path / "long.txt", 300 << 20)
    assert heard.refused(tmp_path / "long.txt") == f"{tmp_path}/long.txt has 315 MB, a text may have 268 MB; split it"
    for number in range(3):
        (tmp_path / f"{number}.txt").write_bytes(b"x" * 40)
    monkeypatch.setattr(selection, "MOST_BYTES", 100)
    said = heard.refused(*(tmp_path / f"{number}.txt" for number in range(3)))
    assert said.endswith("2.txt has 120 B, read are at most 100 B; split it")


@pytest.mark.parametrize("says", [0, 10])
def test_no_more_than_the_limit_is_read_whatever_the_system_says(
    says: int, heard: Heard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of /proc have no size, and others grow."""
    file, look = tmp_path / "a.txt", os.fstat
    file.write_bytes(b"x" * 5000)

    def lies(descriptor: int) -> os.stat_result:
        found = list(look(descriptor))
        found[6] = says
        return os.stat_result(found)

    monkeypatch.setattr(inputs, "MOST_TEXT_BYTES", 1000)
    monkeypatch.setattr(inputs.os, "fstat", lies)
    read: list[int] = []
    opened = os.fdopen

    class Counted:
        def __init__(self, stream: object) -> None:
            self._stream = stream

        def __getattr__(self, name: str) -> object:
            return getattr(self._stream, name)

        def __enter__(self) -> Counted:
            return self

        def __exit__(self, *_: object) -> None:
            self._stream.close()  # type: ignore[attr-defined]

        def read(self, size: int) -> bytes:
            data = self._stream.read(size)  # type: ignore[attr-defined]
            read.append(len(data))
            return bytes(data)

    monkeypatch.setattr(inputs.os, "fdopen", lambda *args: Counted(opened(*args)))
    assert heard.refused(file) == f"{file} has over 1.00 kB, a text may have 1.00 kB; split it"
    assert sum(read) == 1001


def test_files_of_proc_are_read(heard: Heard) -> None:
    assert heard.text("/proc/self/status").startswith("Name:")


def test_devices_and_sockets_are_refused(heard: Heard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: /dev/zero, and a link to it, were read until the kernel ended the program."""
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    for path in ("/dev/zero", tmp_path / "zero.txt"):
        said = heard.refused(path)
        assert said == (
            f"the prompt cannot be read from {path}: it is a device, which need not end; name a file or a pipe "
            '("-" is standard input)'
        )
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("socket")
        assert "it is a socket, which need not end" in heard.refused(tmp_path / "socket")


def test_pipe_has_the_limit_too(heard: Heard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "MOST_TEXT_BYTES", 1000)
    reader, writer = os.pipe()
    os.write(writer, b"x" * 5000)
    assert heard.refused(f"/dev/fd/{reader}") == f"/dev/fd/{reader} has over 1.00 kB, a text may have 1.00 kB; split it"
    os.close(writer)
    os.close(reader)


def test_fifo_is_waited_for_and_that_is_said(heard: Heard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a FIFO that nobody writes to was opened, and nothing more was heard."""
    monkeypatch.setattr(inputs, "PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(inputs, "LONG_SECONDS", 0.01)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    said: list[tuple[str, bool]] = []

    def note(line: str, *, urgent: bool = False) -> None:
        said.append((line, urgent))
        if urgent:  # now somebody writes, in two pieces
            threading.Thread(target=written).start()

    def written() -> None:
        with fifo.open("w") as stream:
            for piece in ("at ", "last"):
                stream.write(piece)
                stream.flush()

    monkeypatch.setattr(heard, "note", note)
    assert heard.text(fifo) == "at last"
    assert said == [
        (f"waiting for the prompt on {fifo} (Ctrl-C gives up)", False),
        (f"still waiting for the prompt: nothing writes to {fifo}", True),
    ]


def test_no_memory_is_said_with_a_remedy() -> None:
    """Bug: "unexpected MemoryError: no message"."""
    failure = describe(MemoryError(), debug=False)
    assert (failure.exit_code, failure.kind) == (3, "does-not-fit")
    assert failure.message.startswith("there is no more memory")
    assert "give less text" in failure.message


def test_commands_say_what_a_folder_leaves_out(triforce: Run, tmp_path: Path) -> None:
    folder = outside(tmp_path)
    code, out, err = triforce("tokens", str(folder))
    assert code == 0
    assert "key" not in out
    assert "4 links that lead outside" in err
    shutil.rmtree(tmp_path / "secrets")
    assert triforce("tokens", str(folder), "--quiet")[0] == 0
