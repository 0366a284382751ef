"""The only module that writes to the terminal: text to standard output, everything else to standard error."""

from __future__ import annotations

import base64
import io
import json
import os
import select
import shutil
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, NoReturn

from rich.console import Console, RenderableType
from rich.segment import Segment, Segments
from rich.text import Text

from offload.errors import TriforceError, UsageError
from offload.interrupts import poll, waiting
from triforce_cli.ground import log
from triforce_cli.ground.terminal import can_erase, columns, is_terminal
from triforce_cli.ground.text import line_text, visible
from triforce_cli.screen.progress import PlainDisplay, ProgressDisplay, SilentDisplay, TerminalDisplay
from triforce_cli.screen.word_wrap import WordWrap

if TYPE_CHECKING:
    from prompt_toolkit.output import Output as PromptOutput

    from offload.plan.planner import Plan
    from offload.progress import Progress
    from triforce_cli.ground.outfile import OutputFile

_MESSAGE_CHARACTERS = 4000


def forgive_locale() -> None:
    """Let characters that the locale lacks become "?" in help, which Typer writes. Our own output is bytes, always
    UTF-8."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


class Output:
    """The output of one command. Leaving it as a context leaves the screen clean, however the command ended.

    `quiet` silences notes and progress; errors and output requested by name (text, JSON, tables) always appear.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._file: OutputFile | None = None
        self._console = _StderrConsole()
        self._display = self._new_display()
        self._mid_thought = self._file_mid_line = False
        self._mid_line = False  # the last text does not end with a newline
        self._answer_wrap: WordWrap | None = None
        self._thought_wrap: WordWrap | None = None

    def __enter__(self) -> Output:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._display.stop()
        self._answer_wrap = self._thought_wrap = None
        if kind is not BrokenPipeError:
            self._end_line(interrupted=kind is KeyboardInterrupt)

    def write_to(self, file: OutputFile) -> None:
        """Send text to `file` instead of standard output from now on."""
        self._file = file

    @property
    def width(self) -> int:
        """Columns of the terminal, or COLUMNS if it is set; 80 without a terminal."""
        fallback = os.get_terminal_size(sys.stderr.fileno()).columns if is_terminal(sys.stderr) else 80
        return shutil.get_terminal_size((fallback, 24)).columns

    def text(self, piece: str) -> None:
        """Write to standard output, or to the file in its place, at once, as UTF-8 whatever the locale. At a terminal
        control characters are made visible; a file or a pipe gets them unchanged."""
        if self._file is not None:
            self._file.write(piece.encode("utf-8"))
            self._file_mid_line = not piece.endswith("\n") if piece else self._file_mid_line
        else:
            self._answer_wrap = None
            self._write(_shown_at(sys.stdout, piece))

    def answer(self, piece: str) -> None:
        """Write the next piece of an answer as `text` does; at a terminal prose is broken between words. Other text
        ends the answer, and so does leaving the output."""
        if self._file is not None or not can_erase(sys.stdout):
            self.text(piece)
        else:
            self._answer_wrap = self._answer_wrap or WordWrap(partial(columns, sys.stdout))
            self._write(self._answer_wrap.push(visible(piece)))

    @property
    def text_width(self) -> int:
        """Columns of standard output: those of its terminal, or COLUMNS if it is set; otherwise 80, so that a file
        looks the same wherever it is written."""
        return shutil.get_terminal_size((80, 24)).columns

    def show(self, shown: RenderableType) -> None:
        """Write tables to standard output, with colours if the terminal has them and NO_COLOR is not set."""
        console = Console(file=sys.stdout, width=self.text_width, highlight=False)
        with console.capture() as capture:
            console.print(_shown_segments(console.render(shown)), end="")
        self._write("".join(f"{line.rstrip()}\n" for line in capture.get().splitlines()))

    @property
    def has_person(self) -> bool:
        """True if a person types and sees standard error."""
        return is_terminal(sys.stdin) and is_terminal(sys.stderr)

    @property
    def is_dialogue(self) -> bool:
        """True if a person types and sees both streams."""
        return self.has_person and is_terminal(sys.stdout)

    def end_line(self) -> None:
        """End the current line of text, if it has not ended."""
        if self._mid_line or self._file_mid_line:
            self.text("\n")

    def end_shown_line(self) -> None:
        """End the current line of text at a terminal only: a file or a pipe gets the text and nothing else."""
        if is_terminal(sys.stdout):
            self.end_line()

    @property
    def can_draw(self) -> bool:
        """True if the terminal can move its cursor."""
        return not self._console.is_dumb_terminal

    def for_prompt(self) -> PromptOutput:
        """The output that a line editor draws on: standard error, since standard output is for text."""
        from prompt_toolkit.output import create_output

        return create_output(stdout=sys.stderr)

    def copy(self, text: str) -> None:
        """Send `text` to the clipboard of the terminal, by OSC 52, which is not shown. Raises UsageError for a terminal
        that has none."""
        if not is_terminal(sys.stderr) or not self.can_draw or os.environ.get("TERM") == "linux":
            raise UsageError("standard error is no terminal with a clipboard; triforce log show has the reply, too")
        self._display.stop()
        _write(sys.stderr, b"\x1b]52;c;" + base64.b64encode(text.encode("utf-8")) + b"\x07")

    def thought(self, piece: str) -> None:
        """Write text that is not part of the answer, such as thoughts, to standard error: at a terminal dimmed and
        broken between words, not if quiet."""
        if not self._quiet:
            self._display.stop()
            shown = _shown_at(sys.stderr, piece)
            if can_erase(sys.stderr):
                self._thought_wrap = self._thought_wrap or WordWrap(partial(columns, sys.stderr))
                shown = self._thought_wrap.push(shown)
            self._console.print(Text(shown, "dim"), soft_wrap=True, end="")
            self._mid_thought = not piece.endswith("\n")

    def end_thought(self) -> None:
        """End the line of thoughts, if it has not ended."""
        self._thought_wrap = None
        if self._mid_thought:
            self._mid_thought = False
            self._print("")

    def document(self, document: Mapping[str, Any]) -> None:
        """Write one JSON object on one line to standard output."""
        self.text(_one_line(document))

    def wait(self, label: str) -> None:
        """Show that work of unknown length is running, until the next output."""
        poll()
        self._display.wait(line_text(label))

    def progress(self, progress: Progress) -> None:
        """Show the progress of a stage. The engine calls this often."""
        poll()
        if progress.done >= progress.total:
            log.event(f"{progress.stage} done", {progress.unit: progress.total})
        self._display.update(progress.stage, progress.done, progress.total, progress.unit)

    def report(self, stage: str, done: int, total: int, unit: str = "bytes") -> None:
        """Show the progress of a stage that is given by numbers alone."""
        poll()
        self._display.update(stage, done, total, unit)

    def note(self, line: str, *, urgent: bool = False) -> None:
        """Write one line to standard error, unless quiet; "" writes nothing. urgent: even if quiet."""
        if not line:
            return
        log.event(line)
        if urgent or not self._quiet:
            self._print(line, wrap=True)

    def planned(self, *plans: Plan) -> None:
        """Print the plans' notes, each once, and write the whole plans to the log."""
        for plan in plans:
            log.event("plan", plan.as_dict())
        for line in dict.fromkeys(note for plan in plans for note in plan.notes):
            self.note(line)

    def table(self, table: str) -> None:
        """Write a table to standard error, at a terminal with a blank line above it."""
        self._print(f"\n{table}" if is_terminal(sys.stderr) else table)

    def question(self, text: str) -> None:
        """Write a question to standard error, always; the answer is typed on the same line."""
        self._display.stop()
        self._print(f"{text} ", end="")

    def error(self, message: str, *, hint: str = "", traceback: str = "") -> None:
        """Write an error message to standard error, always, below the traceback if there is one; "" writes nothing.
        hint: on a line of its own."""
        log.event(f"error: {message}")
        if traceback:
            self._print(traceback)
        if message:
            self._print(line_text(_shortened(message)), wrap=True, heading="error: ")
            if hint:
                self._print(hint, wrap=True)

    def error_document(self, document: Mapping[str, Any]) -> None:
        """Write an error to standard error as one JSON object on one line."""
        self._print(_one_line(document), end="")

    def _write(self, piece: str) -> None:
        self._display.stop()
        if piece:
            _write(sys.stdout, piece.encode("utf-8"))
            self._mid_line = not piece.endswith("\n")

    def _end_line(self, *, interrupted: bool) -> None:
        """At a terminal, leave the cursor at the start of a line. A file or a pipe gets the text and nothing else."""
        if is_terminal(sys.stdout) and (self._mid_line or interrupted):  # the terminal has echoed ^C
            self.text("\n")
        elif interrupted and is_terminal(sys.stderr):
            self._print("")

    def _print(self, text: str, end: str = "\n", *, wrap: bool = False, heading: str = "") -> None:
        """Print to standard error. wrap: at words, if a terminal sets a width."""
        line = Text.assemble((heading, "bold red"), visible(text))
        self._console.print(line, soft_wrap=not (wrap and is_terminal(sys.stderr)), end=end)

    def _new_display(self) -> ProgressDisplay:
        if self._quiet:
            return SilentDisplay()
        if is_terminal(sys.stderr) and not self._console.is_dumb_terminal:
            return TerminalDisplay(self._console)
        return PlainDisplay(self.note)


def _one_line(document: Mapping[str, Any]) -> str:
    return json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n"


class _StderrConsole(Console):
    """Rich's console on standard error. If its reader has gone, the caller handles it; Rich would end the process."""

    def __init__(self) -> None:
        super().__init__(stderr=True, highlight=False)

    def on_broken_pipe(self) -> NoReturn:
        _discard(sys.stderr)
        raise BrokenPipeError


def _shown_at(stream: IO[str] | None, text: str) -> str:
    return visible(text) if is_terminal(stream) else text


def _shown_segments(segments: Iterable[Segment]) -> Segments:
    """The segments with control characters made visible; styles are unchanged."""
    return Segments([Segment(_shown_at(sys.stdout, text), style) for text, style, _ in segments])


def _shortened(message: str) -> str:
    """The message, cut if it is long: one that quotes a file must not fill the screen."""
    return message if len(message) <= _MESSAGE_CHARACTERS else f"{message[:_MESSAGE_CHARACTERS]} ..."


def _write(stream: IO[str] | None, data: bytes) -> None:
    if stream is None:  # closed by the caller; handled like a broken pipe
        raise BrokenPipeError
    try:
        with waiting():
            stream.buffer.write(data)  # type: ignore[attr-defined]
            stream.flush()
    except OSError as error:
        _discard(stream)
        if isinstance(error, BrokenPipeError):
            raise
        raise TriforceError(f"the text cannot be written to standard output: {error.strerror}") from error
    except BaseException:
        if not _is_taking(stream):  # interrupted because the reader is stuck: flushing at exit would block, too
            _discard(stream)
        raise


def _is_taking(stream: IO[str]) -> bool:
    """True if the stream accepts more data without blocking."""
    return bool(select.select([], [stream], [], 0)[1])


def _discard(stream: IO[str]) -> None:
    """Discard the data still in the buffer of `stream`: Python flushes it at exit, and would report the error again."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
