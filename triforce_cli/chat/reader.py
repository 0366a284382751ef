"""The source of messages: a person's line editor, or lines of standard input."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from prompt_toolkit.completion import Completer
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.output import Output

    from triforce_cli.chat.keys import Keys

from offload.errors import UsageError
from offload.interrupts import waiting
from triforce_cli.chat.mentions import OPEN_MENTION

FENCE = '"""'  # before and after a message of several lines
_REFRESH_SECONDS = 0.25


class Reader(Protocol):
    def read(self, default: str = "") -> str | None:
        """The next message or command; None at the end of input. default: text to begin with, if the reader has an
        editor. Raises KeyboardInterrupt if the person discards the typed text."""
        ...


class LineReader:
    """A reader of messages, one per line. A message between fences may have several lines. on_ask: called before each
    message. keys: of the person who types."""

    def __init__(self, on_ask: Callable[[], None] = lambda: None, *, keys: Keys | None = None) -> None:
        self._on_ask, self._keys = on_ask, keys

    def read(self, default: str = "") -> str | None:
        self._on_ask()
        with nullcontext() if self._keys is None else self._keys.shown():
            return self._message()

    def _message(self) -> str | None:
        line = _next_line()
        if line is None or not line.lstrip().startswith(FENCE):
            return line
        lines = [line]
        while not is_closed("".join(lines)):
            following = _next_line()
            if following is None:
                raise UsageError(f"standard input ends inside a message that began with {FENCE}")
            lines.append("\n" + following)
        return without_fences("".join(lines))


class PromptReader:
    """A reader with prompt_toolkit's editor. Enter sends; Alt-Enter, or Enter between fences, begins a new line.

    toolbar: the text below the prompt, called at intervals. history: a file, or None.
    """

    def __init__(
        self,
        *,
        history: Path | None,
        commands: Callable[[], Iterable[tuple[str, str]]],
        with_path: Iterable[str],
        toolbar: Callable[[], str],
        output: Output,
    ) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.history import FileHistory, InMemoryHistory

        self._session: PromptSession[str] = PromptSession(
            message=[("bold", "> ")],
            multiline=True,
            prompt_continuation="  ",
            history=InMemoryHistory() if history is None else FileHistory(str(_private(history))),
            completer=_completer(commands, frozenset(with_path)),
            complete_while_typing=False,
            key_bindings=_bindings(),
            bottom_toolbar=toolbar,
            refresh_interval=_REFRESH_SECONDS,
            output=output,
        )

    def read(self, default: str = "") -> str | None:
        try:
            with waiting():
                return without_fences(self._session.prompt(default=default))
        except EOFError:
            return None


def is_closed(text: str) -> bool:
    """True for a complete message, in which every fence is closed."""
    text = text.strip()
    return not text.startswith(FENCE) or (len(text) >= 2 * len(FENCE) and text.endswith(FENCE))


def without_fences(text: str) -> str:
    stripped = text.strip()
    fenced = stripped.startswith(FENCE) and is_closed(stripped)
    return stripped[len(FENCE) : -len(FENCE)].strip("\n") if fenced else text


def _next_line() -> str | None:
    if sys.stdin is None:
        return None
    with waiting():
        data = sys.stdin.buffer.readline()
    if not data:
        return None
    try:
        return data.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"standard input is not valid UTF-8: byte 0x{data[error.start]:02x} in {data[:40]!r}; convert it first"
        ) from error


def _private(path: Path) -> Path:
    """The file, created if needed, readable for its owner only: it holds the typed messages."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
    except OSError as error:
        raise UsageError(
            f"what is typed cannot be kept in {path} ({error.strerror}); --no-history does without"
        ) from error
    return path


def _bindings() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings

    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_closed(buffer.text):
            buffer.validate_and_handle()
        else:
            buffer.newline(copy_margin=False)

    @bindings.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return bindings


def _completer(commands: Callable[[], Iterable[tuple[str, str]]], with_path: frozenset[str]) -> Completer:
    """The completer of command names after a slash, and of paths after commands that take one, and after an @."""
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document

    paths = PathCompleter(expanduser=True)

    class Commands(Completer):
        def get_completions(self, document: Document, event: CompleteEvent) -> Iterator[Completion]:
            text = document.text_before_cursor
            name, space, argument = text.partition(" ")
            if text.startswith("/") and not space and "\n" not in text:
                for known, about in commands():
                    if known.startswith(name):
                        yield Completion(known, -len(name), display_meta=about)
            elif name in with_path and "\n" not in text:
                yield from paths.get_completions(Document(argument), event)
            elif (mention := OPEN_MENTION.search(text)) is not None:
                yield from _mentioned(mention["quoted"], mention["plain"] or "", event)

    def _mentioned(quoted: str | None, plain: str, event: CompleteEvent) -> Iterator[Completion]:
        """A path with white space is put between quotes."""
        begun = plain if quoted is None else quoted
        for found in paths.get_completions(Document(begun), event):
            path = begun + found.text
            if quoted is None and not any(map(str.isspace, path)):
                yield found
                continue
            is_folder = found.display_text.endswith("/")
            start = len(begun) + (quoted is not None)
            yield Completion(f'"{path}' + '"' * (not is_folder), -start, display=found.display)

    return Commands()
