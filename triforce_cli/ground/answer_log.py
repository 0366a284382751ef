"""The answer log: a user's questions and answers in one SQLite file. The log of --log-file is another one, of events
without any prompt or reply (log.py)."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from offload import strict_json
from offload.errors import TriforceError
from offload.fields import OBJECT, record
from offload.files import user_folder

FOLDER_VARIABLE = "TRIFORCE_LOG_DIR"
NAME = "answers.db"
BUSY_SECONDS = 5.0  # to wait for another process that writes
_VERSION = 1
_JOURNAL = "-journal"  # of SQLite, behind the file's name
_TABLE = """CREATE TABLE IF NOT EXISTS answers (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    time REAL NOT NULL,
    command TEXT NOT NULL,
    model TEXT NOT NULL,
    seed INTEGER,
    options TEXT NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    question TEXT NOT NULL,
    documents TEXT NOT NULL,
    answer TEXT NOT NULL,
    finish TEXT NOT NULL,
    seconds REAL NOT NULL
)"""
_AS_JSON = ("options", "documents")  # columns


class LogError(TriforceError):
    """The answer log cannot be read or written: damaged, of another user, or a disk error."""

    kind = "log"


class DamagedLog(LogError):
    """The file is no SQLite file, or its pages are wrong."""


@dataclass(frozen=True)
class Entry:
    """An answer with its question. time: of its end, in seconds since the epoch. options: the values that differ from
    their defaults. documents: names. seconds: from the command's start, or from the message in a chat, to the end. id:
    0 before it is in the log."""

    time: float
    command: str
    model: str
    seed: int | None
    options: Annotated[Mapping[str, Any], OBJECT]
    prompt_tokens: int
    question: str
    documents: tuple[str, ...]
    answer: str
    finish: str
    seconds: float
    id: int = 0


_COLUMNS = tuple(field.name for field in fields(Entry))
_SELECT = f"SELECT {', '.join(_COLUMNS)} FROM answers"


def log_folder() -> Path:
    """The folder of the answer log: in the user's state folder, or the one that TRIFORCE_LOG_DIR names."""
    return user_folder("state", "log", variable=FOLDER_VARIABLE)


class AnswerLog:
    """The answer log in `file`. Every method opens it anew, so several processes can share it. Raises LogError."""

    def __init__(self, file: Path) -> None:
        self.file = file

    @classmethod
    def of_user(cls) -> AnswerLog:
        return cls(log_folder() / NAME)

    def exists(self) -> bool:
        try:
            return self.file.exists()
        except OSError as error:
            raise LogError(f"{self.file} cannot be read ({error.strerror}); check its permissions") from error

    def add(self, entry: Entry) -> None:
        """Add an entry, all of it or nothing, whatever ends the process. The file and its folder are made if they are
        missing, for the user alone."""
        self._make()
        names = _COLUMNS[:-1]  # without the id
        values = [_stored(name, getattr(entry, name)) for name in names]
        with self._changing() as connection:
            connection.execute(_TABLE)
            connection.execute(f"PRAGMA user_version = {_VERSION}")
            places = ", ".join("?" for _ in names)
            connection.execute(f"INSERT INTO answers ({', '.join(names)}) VALUES ({places})", values)

    def newest(self, most: int, words: Sequence[str] = ()) -> tuple[list[Entry], int]:
        """(the newest entries, at most so many; the number of all). words: of entries that have all of these, in any
        case, in the question, the answer or a document's name."""
        with self._reading() as connection:
            if connection is None:
                return [], 0
            wanted = [word.casefold() for word in words]
            connection.create_function("has_words", 3, lambda *texts: _has(wanted, *texts), deterministic=True)
            where = "WHERE has_words(question, answer, documents)" if words else ""
            (count,) = connection.execute(f"SELECT count(*) FROM answers {where}").fetchone()
            rows = connection.execute(f"{_SELECT} {where} ORDER BY id DESC LIMIT ?", [most]).fetchall()
        return [self._entry(row) for row in rows], count

    def entry(self, number: int | None) -> Entry | None:
        """The entry of this id, or the last one for None; None if there is none."""
        with self._reading() as connection:
            if connection is None:
                return None
            which, values = ("ORDER BY id DESC LIMIT 1", []) if number is None else ("WHERE id = ?", [number])
            row = connection.execute(f"{_SELECT} {which}", values).fetchone()
        return None if row is None else self._entry(row)

    def missing(self, numbers: Sequence[int]) -> list[int]:
        """The ids in `numbers` that no entry has."""
        with self._reading() as connection:
            there = set[int]()
            if connection is not None:
                there = {number for (number,) in connection.execute("SELECT id FROM answers")}
        return [number for number in numbers if number not in there]

    def remove(self, numbers: Sequence[int]) -> None:
        """Remove entries; their texts are overwritten in the file. Ids are not used again."""
        with self._changing() as connection:
            connection.executemany("DELETE FROM answers WHERE id = ?", [(number,) for number in numbers])

    def clear(self) -> None:
        """Remove all entries, or the file itself if it is damaged: while it is in use, that could damage another."""
        try:
            with self._changing() as connection:
                connection.execute(_TABLE)
                connection.execute("DELETE FROM answers")
            with self._opened() as connection:
                connection.execute("VACUUM")
        except DamagedLog:
            self._unlink()

    def _make(self) -> None:
        try:
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise LogError(f"{self.file} cannot be written: {error.strerror}") from error

    def _unlink(self) -> None:
        try:
            for path in (self.file, self.file.with_name(NAME + _JOURNAL)):
                path.unlink(missing_ok=True)
        except OSError as error:
            raise LogError(f"{self.file} cannot be removed: {error.strerror}") from error

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self.file, timeout=BUSY_SECONDS, isolation_level=None)) as connection:
                connection.execute("PRAGMA secure_delete = ON")
                yield connection
        except sqlite3.Error as error:
            raise _failure(self.file, error) from error

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection | None]:
        """A connection; None for a log without any entry yet."""
        if not self.exists():
            yield None
            return
        with self._opened() as connection:
            yield connection if self._version(connection) else None

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """A transaction, which is undone by an error."""
        with self._opened() as connection:
            connection.execute("BEGIN IMMEDIATE")
            with connection:
                self._version(connection)
                yield connection

    def _version(self, connection: sqlite3.Connection) -> int:
        """The version of the file's form; 0 for an empty file."""
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version not in (0, _VERSION):
            raise LogError(f"{self.file} is of version {version}, and this program reads {_VERSION}; update triforce")
        return int(version)

    def _entry(self, row: Sequence[Any]) -> Entry:
        data = dict(zip(_COLUMNS, row, strict=True))
        place = f"entry {data['id']}"
        try:
            data |= {name: strict_json.parse(data[name]) for name in _AS_JSON}
            return record(Entry, data, place)
        except (TypeError, ValueError, RecursionError) as error:
            remedy = f"triforce log rm {data['id']} removes it"
            raise LogError(f"{self.file}: {place} cannot be read ({error}); {remedy}") from error


def _stored(name: str, value: Any) -> Any:
    """A field as SQLite keeps it; texts as UTF-8, whatever they hold."""
    text = json.dumps(value, ensure_ascii=False) if name in _AS_JSON else value
    return text.encode("utf-8", "replace").decode("utf-8") if isinstance(text, str) else text


def _has(words: Sequence[str], question: str, answer: str, documents: str) -> bool:
    """Whether each word is in one of the texts. documents: their names, in JSON."""
    texts = [text.casefold() for text in (question, answer, *_listed(documents))]
    return all(any(word in text for text in texts) for word in words)


def _listed(names: str) -> list[str]:
    """The texts of a list in JSON; the text itself where it is none, for an entry that `show` reports."""
    with suppress(ValueError, RecursionError):
        if isinstance(found := strict_json.parse(names), list):
            return [name for name in found if isinstance(name, str)]
    return [names]


def _failure(file: Path, error: sqlite3.Error) -> LogError:
    """The error to report for one of SQLite's."""
    if "locked" in str(error):
        return LogError(f"{file} is being written by another process; try again")
    if type(error) is sqlite3.DatabaseError:  # its subclasses are other faults
        return DamagedLog(f"{file} is damaged ({error}); 'triforce log rm --all' removes it")
    return LogError(f"{file} cannot be used: {error}")
