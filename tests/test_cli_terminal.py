"""Output as a person at a terminal sees it."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

from test_cli_fake import fork
from triforce_cli.screen.output import Output

HELLO = {"pieces": ["Hello", " there"], "finish": "stop"}
SLOW = HELLO | {"ticks": 10, "tick_seconds": 0.05}  # bars are drawn ten times a second
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


class Screen:
    """The other side of the terminal that a process runs at."""

    def __init__(self, *args: str, script: dict[str, Any], env: dict[str, str] | None = None, **streams: Any) -> None:
        self.text = ""
        self._ours, terminal = pty.openpty()
        at_terminal = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
        size = {"COLUMNS": "80", "LINES": "24"}
        self.process = fork(*args, script=script, env=size | (env or {}), **(at_terminal | streams))
        os.close(terminal)

    def wait_for(self, condition: Callable[[str], object]) -> None:
        deadline = time.monotonic() + 300
        while not condition(self.text):
            assert time.monotonic() < deadline, f"the screen never got there: {self.text!r}"
            if not self._read():
                break
        assert condition(self.text), self.text

    def finish(self) -> int:
        while self._read():
            pass
        os.close(self._ours)
        return self.process.wait()

    def _read(self) -> bool:
        if not select.select([self._ours], [], [], 300)[0]:
            return False
        try:
            data = os.read(self._ours, 4096)
        except OSError:  # Linux: the process has closed its side
            return False
        self.text += data.decode()
        return bool(data)


def shown_at_the_end(text: str) -> str:
    """The text that remains after carriage returns and the control sequences that move up, to a column of the line's
    end, and erase lines or their rest."""
    lines = [""]
    row = column = 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
        if token == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif token == "\x1b[1A":
            row -= 1
        elif token == "\x1b[2K":
            lines[row] = ""
        elif token.startswith("\x1b[") and token.endswith("G"):
            column = int(token[2:-1]) - 1
        elif token == "\x1b[K":
            lines[row] = lines[row][:column]
        elif not token.startswith(("\x1b", "\r")):
            lines[row] += token
    return "\n".join(lines)


@pytest.fixture
def args(tmp_path: Path) -> tuple[str, ...]:
    return ("--model", str(tmp_path), "--prompt", "x" * 1000)


def test_bars_show_percent_rate_and_time_left_and_are_gone_before_the_text(args):
    screen = Screen(*args, script=SLOW)
    assert screen.finish() == 0
    assert re.search(r"load .*\d+% of 67\.1 MB, [\d.]+ MB/s, [\d.]+ s left", screen.text)
    assert re.search(r"prefill .*\d+% of 1,000 tokens, [\d,.]+ tokens/s, [\d.]+ s left", screen.text)
    assert shown_at_the_end(screen.text) == "Hello there\n"
    assert screen.text.rindex(SHOW_CURSOR) < screen.text.index("Hello")


def test_spinner_of_the_start_is_gone_before_the_text(args):
    screen = Screen(*args, script={"pieces": ["Hello"], "ticks": 0, "hang": True})
    screen.wait_for(lambda text: "Hello" in text)
    screen.process.send_signal(signal.SIGINT)
    assert screen.finish() == 130
    assert "starting" in screen.text
    assert shown_at_the_end(screen.text) == "Hello\n"
    assert screen.text.rindex(SHOW_CURSOR) < screen.text.index("Hello")


def test_lines_fit_80_columns(args):
    screen = Screen(*args, "--stats", script=SLOW)
    assert screen.finish() == 0
    assert max(map(len, shown_at_the_end(screen.text).splitlines())) <= 80
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.text)
    assert max(map(len, re.split(r"[\r\n]+", plain))) <= 80


def test_bar_is_gone_when_its_stage_is_done_also_before_there_is_text(args):
    screen = Screen(*args, script={"pieces": [], "hang": True})
    screen.wait_for(lambda text: text.rfind(SHOW_CURSOR) > text.rfind("prefill") > 0)
    screen.process.send_signal(signal.SIGINT)
    assert screen.finish() == 130


def test_text_ends_its_line_and_the_table_stands_apart(args):
    screen = Screen(*args, "--stats", script=HELLO)
    assert screen.finish() == 0
    assert shown_at_the_end(screen.text).startswith("Hello there\n\nload ")


def test_text_that_ends_its_line_gets_no_second_newline(args):
    screen = Screen(*args, script={"pieces": ["Hello\n"], "finish": "stop"})
    assert screen.finish() == 0
    assert shown_at_the_end(screen.text) == "Hello\n"


def test_progress_stays_at_the_terminal_when_the_text_goes_to_a_pipe(args):
    screen = Screen(*args, script=HELLO, stdout=subprocess.PIPE)
    assert screen.finish() == 0
    assert screen.process.stdout is not None
    assert screen.process.stdout.read() == b"Hello there"
    assert "prefill" in screen.text
    assert shown_at_the_end(screen.text).strip() == ""


def test_quiet_shows_the_text_alone(args):
    screen = Screen(*args, "--quiet", script=HELLO)
    assert screen.finish() == 0
    assert screen.text == "Hello there\r\n"


def test_dumb_terminal_gets_plain_lines(args):
    screen = Screen(*args, script=HELLO | {"line_seconds": 0}, env={"TERM": "dumb"})
    assert screen.finish() == 0
    assert "\x1b" not in screen.text
    assert "prefill: 1,000 tokens in" in screen.text


def test_no_color_is_respected(args):
    colour = re.compile(r"\x1b\[[0-9;]*3[0-9][0-9;]*m")
    coloured = Screen(*args, script=HELLO | {"fail": "ModelError"})
    assert coloured.finish() == 4
    assert colour.search(coloured.text)
    plain = Screen(*args, script=HELLO | {"fail": "ModelError"}, env={"NO_COLOR": "1"})
    assert plain.finish() == 4
    assert not colour.search(plain.text)
    assert "error: " in plain.text


def test_error_of_the_load_shows_the_cursor_again(args):
    screen = Screen(*args, script={"load_fail": "ModelError"})
    assert screen.finish() == 4
    assert screen.text.rindex(SHOW_CURSOR) > screen.text.rindex(HIDE_CURSOR)
    assert shown_at_the_end(screen.text) == "error: ModelError happened; do something else\n"


def test_error_amid_the_text_starts_its_own_line(args):
    screen = Screen(*args, "--quiet", script={"pieces": ["half"], "fail": "TriforceError"})
    assert screen.finish() == 1
    assert shown_at_the_end(screen.text).splitlines() == ["half", "error: TriforceError happened; do something else"]


def test_interrupt_amid_the_text_keeps_it_and_ends_the_line(args):
    screen = Screen(*args, script=HELLO | {"hang": True})
    screen.wait_for(lambda text: "there" in text)
    screen.process.send_signal(signal.SIGINT)
    assert screen.finish() == 130
    assert shown_at_the_end(screen.text) == "Hello there\n"


HOSTILE = "a\x1b]0;title\x07\x1b[2J\rb\x08\x9b31m\u202ec\x7f"
HARMLESS = r"a\u001b]0;title\u0007\u001b[2J\rb\b\u009b31m\u202ec\u007f"


def test_control_characters_of_a_text_are_visible_and_change_nothing(args):
    screen = Screen(*args, "--quiet", script={"pieces": [HOSTILE, "\ttab\r\n", "end"]})
    assert screen.finish() == 0
    assert screen.text == f"{HARMLESS}\ttab\r\r\nend\r\n"  # the terminal adds a carriage return to each line end


def test_control_characters_of_a_note_an_echo_and_an_error_are_visible(args, tmp_path):
    (tmp_path / "prompt").write_text(HOSTILE)
    with_file = ("--prompt-file", str(tmp_path / "prompt"), "--echo")
    screen = Screen(*args[:2], *with_file, script=HELLO | {"notes": [f"note {HOSTILE}"], "fail": "ModelError"})
    assert screen.finish() == 4
    assert f"note {HARMLESS}\r\n" in screen.text
    assert f"{HARMLESS}Hello" in screen.text
    screen = Screen("--model", str(tmp_path), "--prompt-file", f"/{HOSTILE}", script={})
    assert screen.finish() == 2
    assert HARMLESS in re.sub(r"\s", "", shown_at_the_end(screen.text))


def test_control_characters_of_a_table_are_visible_and_its_styles_stay(monkeypatch):
    class Terminal(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdout", Terminal(io.BytesIO(), encoding="utf-8"))
    monkeypatch.setenv("TERM", "xterm-256color")
    Output().show(Text("a\x1b[2Jb\u202ec", style="bold"))
    shown = sys.stdout.buffer.getvalue().decode()
    assert re.sub(r"\x1b\[[0-9;]*m", "", shown) == "a\\u001b[2Jb\\u202ec\n"
    assert "\x1b[1m" in shown


def test_json_at_a_terminal_means_what_it_meant(args):
    screen = Screen(*args, "--json", "--quiet", script={"pieces": [HOSTILE]})
    assert screen.finish() == 0
    assert screen.text.removesuffix("\r\n").isprintable()
    assert json.loads(screen.text)["text"] == HOSTILE


def test_a_pipe_gets_control_characters_as_they_are(args):
    screen = Screen(*args, "--quiet", script={"pieces": [HOSTILE]}, stdout=subprocess.PIPE)
    assert screen.finish() == 0
    assert screen.process.stdout is not None
    assert screen.process.stdout.read() == HOSTILE.encode()


PROSE = "It was a bright cold day in April, and the clocks were striking thirteen. "
CODE = "print('It was a bright cold day in April', 'and the clocks were striking thirteen')"


def test_a_text_breaks_between_words_and_code_where_the_terminal_breaks_it(args):
    pieces = [*re.findall(r"\s*\S{1,3}", PROSE * 2), f"\n```\n{CODE}\n```\n", PROSE * 2]
    screen = Screen(*args, "--quiet", script={"pieces": pieces}, env={"COLUMNS": "60"})
    assert screen.finish() == 0
    prose = textwrap.wrap(PROSE * 2, 60)
    assert [line.rstrip() for line in shown_at_the_end(screen.text).splitlines()] == [
        *prose,
        "```",
        CODE,
        "```",
        *prose,
    ]


def test_a_word_is_there_before_it_has_ended(args):
    screen = Screen(*args, "--quiet", script={"pieces": [PROSE, "Winston"], "hang": True})
    screen.wait_for(lambda text: "Winston" in text)
    screen.process.send_signal(signal.SIGINT)
    assert screen.finish() == 130
    assert shown_at_the_end(screen.text) == f"{PROSE}\nWinston\n"


def test_a_pipe_and_a_dumb_terminal_get_the_text_as_it_is(args):
    for streams, env in (({"stdout": subprocess.PIPE}, {}), ({}, {"TERM": "dumb"})):
        screen = Screen(*args, "--quiet", script={"pieces": [PROSE * 2]}, env=env, **streams)
        assert screen.finish() == 0
        written = screen.process.stdout.read().decode() if streams else screen.text.removesuffix("\r\n")
        assert written == PROSE * 2


def test_thoughts_break_between_words_and_a_dumb_terminals_where_it_breaks_them(at_terminal, monkeypatch):
    written = at_terminal("stderr")
    output = Output()
    for thought in (PROSE, PROSE.strip()):
        output.thought(thought)
    output.end_thought()
    thoughts = written()
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown_at_the_end(thoughts)).splitlines()
    assert [line.rstrip() for line in lines] == textwrap.wrap(PROSE * 2, 60)
    assert thoughts.startswith("\x1b[2mIt was")
    monkeypatch.setenv("TERM", "dumb")
    Output().thought(PROSE)
    assert written().removeprefix(thoughts) == PROSE


def test_a_block_that_one_answer_leaves_open_says_nothing_of_the_next(at_terminal):
    written = at_terminal("stdout")
    output = Output()
    for _ in range(2):
        with output:
            output.answer(PROSE + PROSE)
            output.answer("\n```\n")
    first, second, _ = written().split("```\n")
    assert first == second
    assert first.count("\n") == 3


@pytest.fixture
def at_terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Callable[[], str]]:
    """Has a stream be a terminal of 60 columns; returns what was written to it."""

    class Terminal(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    def opened(name: str) -> Callable[[], str]:
        stream = Terminal(io.BytesIO(), encoding="utf-8")
        monkeypatch.setattr(sys, name, stream)
        monkeypatch.setattr("triforce_cli.screen.output.columns", lambda stream: 60)
        monkeypatch.setenv("TERM", "xterm-256color")
        return lambda: stream.flush() or stream.buffer.getvalue().decode()

    return opened


def test_interrupt_of_a_bar_shows_the_cursor_again(args):
    screen = Screen(*args, script=SLOW | {"tick_seconds": 5})
    screen.wait_for(lambda text: "load" in text)
    screen.process.send_signal(signal.SIGINT)
    assert screen.finish() == 130
    assert screen.text.rindex(SHOW_CURSOR) > screen.text.rindex(HIDE_CURSOR)
    assert shown_at_the_end(screen.text).strip() == ""
    assert screen.text.endswith("\n")
