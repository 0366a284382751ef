"""The output of a batch: standard output, or a file that grows line by line and survives an interrupt at any point."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from offload.errors import TriforceError, UsageError
from triforce_cli.batch.records import Id
from triforce_cli.ground.outfile import open_alone, write_all

_BEGINNING = b'{"id": '


class Results(Protocol):
    """The results of a batch, as a context manager. done: ids of the results in the file, in order. finish_reasons: of
    all results, by id."""

    done: list[Id]
    finish_reasons: dict[Id, str]

    def __enter__(self) -> Results: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None: ...

    def add(self, result: Mapping[str, Any]) -> None: ...


class ResultStream:
    """Results on standard output; there are none from an earlier run."""

    def __init__(self, write: Callable[[Mapping[str, Any]], None]) -> None:
        self.done: list[Id] = []
        self.finish_reasons: dict[Id, str] = {}
        self._write = write

    def __enter__(self) -> ResultStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        return None

    def add(self, result: Mapping[str, Any]) -> None:
        self._write(result)
        self.finish_reasons[result["id"]] = result["finish_reason"]


class ResultFile:
    """A file of JSON lines, locked while it is open. An incomplete last line is removed and computed again."""

    def __init__(self, path: Path) -> None:
        self.done: list[Id] = []
        self.finish_reasons: dict[Id, str] = {}
        self._path = path
        self._file: FileIO | None = None

    def __enter__(self) -> ResultFile:
        """Open and lock the file. Raises UsageError, with the file unchanged, if it holds anything but results."""
        if os.path.exists(self._path) and not self._path.is_file():  # Path.exists raises if the name is too long
            raise UsageError(f"{self._path} is no file; without --output-jsonl the results go to standard output")
        self._file = open_alone(self._path, self._path)
        try:
            end = self._find_end()
            self._file.truncate(end)
            self._file.seek(end)
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, result: Mapping[str, Any]) -> None:
        """Append one result and wait until it is on disk. Raises TriforceError."""
        if self._file is None:
            raise ValueError("the file is not open")
        try:
            write_all(self._file, json.dumps(result, ensure_ascii=False, allow_nan=False).encode("utf-8") + b"\n")
            os.fsync(self._file.fileno())
        except OSError as error:
            raise TriforceError(f"{self._path} cannot be written: {error.strerror}") from error
        self._hold(result)

    def _hold(self, result: Mapping[str, Any]) -> None:
        self.done.append(result["id"])
        self.finish_reasons[result["id"]] = result.get("finish_reason", "stop")

    def _find_end(self) -> int:
        """The end of the last complete line, in bytes. Raises UsageError if a line is not a batch's result."""
        end = 0
        with self._path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    self._check_cut(line, number)
                    break
                self._hold(self._result(line, number))
                end += len(line)
        return end

    def _check_cut(self, line: bytes, number: int) -> None:
        """Accept an incomplete last line if it begins like a result. Raises UsageError otherwise."""
        if not line.startswith(_BEGINNING[: len(line)]):
            raise self._foreign(number)
        with contextlib.suppress(ValueError, RecursionError):
            json.loads(line)
            self._result(line, number)

    def _result(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            result: dict[str, Any] = json.loads(line)
            id_, _ = result["id"], result["text"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise self._foreign(number) from error
        if not isinstance(id_, str | int):
            raise UsageError(f"{self._path}, line {number}: its id is no text and no number; name another file")
        return result

    def _foreign(self, number: int) -> UsageError:
        return UsageError(
            f"{self._path}, line {number} is no result of triforce; name another file, or remove that one"
        )
