"""Texts to score: their sources, their tokens, and each token's place in its text."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from offload.errors import UsageError
from triforce_cli.documents.reading import OnRead, read_documents
from triforce_cli.documents.selection import Named
from triforce_cli.ground.inputs import Note
from triforce_cli.ground.text import counted, path_text
from triforce_cli.screen.utf8 import PIPED, STDIN, stdin_is_terminal, user_path

if TYPE_CHECKING:
    from offload.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Text:
    """A text and its tokens. places: where each token begins, in characters."""

    name: str
    content: str
    tokens: tuple[int, ...]
    places: tuple[int, ...]

    @classmethod
    def of(cls, name: str, content: str, tokenizer: Tokenizer) -> Text:
        """The text with its tokens. Raises UsageError for fewer than two tokens: the first has no context and is not
        scored."""
        tokens = tokenizer.encode(content)
        if len(tokens) < 2:
            raise UsageError(
                f"{name} has {counted(len(tokens), 'token')}; it needs at least 2, since a token is scored by those "
                "before it"
            )
        return cls(name, content, tuple(tokens), tuple(tokenizer.places(content)))

    def position(self, index: int) -> tuple[int, int]:
        """Line and column, from 1, of the start of token `index`; columns are characters."""
        line = bisect_right(self._line_starts, self.places[index])
        return line, self.places[index] - self._line_starts[line - 1] + 1

    @cached_property
    def _line_starts(self) -> list[int]:
        return [0, *(place + 1 for place, character in enumerate(self.content) if character == "\n")]


def read_texts(files: Sequence[Path], *, note: Note, on_read: OnRead) -> dict[str, str]:
    """The content of each file by its name, in order. "-", or an empty list, is standard input. Raises UsageError."""
    if not files and stdin_is_terminal():
        raise UsageError("there is no text; name a file (triforce score book.txt) or pipe one in")
    found: dict[str, str] = {}
    for file in files or [STDIN]:
        path = file if file == STDIN else user_path(str(file))
        readings = read_documents(Named((path,)), "the text", note=note, on_read=on_read)
        for reading in readings:
            shown = path_text(reading.source.path if reading.source.is_found else file)
            name = PIPED if file == STDIN else shown
            if name in found:
                raise UsageError(f"{name} is named twice; name each text once")
            found[name] = reading.text
    return found
