"""The output of every command, character by character: at a terminal, into pipes, as JSON.

tests/golden has a file for each scene of scenes.py. When output changes on purpose:

    python tests/test_golden.py --write [SCENE ...]

and look at the difference. Not kept as they are: the program's version, which is <version>; the folder of a scene,
which is somewhere; JSON, which is laid out and shortened, with six digits of numbers that are not whole. A terminal is
kept as its screen at the end, without colours.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import typer

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a script
    sys.path.insert(0, str(ROOT))

from kit import scenes, stage  # noqa: E402
from kit.forked import forked  # noqa: E402
from kit.stage import Scene  # noqa: E402
from triforce_cli import __version__  # noqa: E402
from triforce_cli.app import app  # noqa: E402
from triforce_cli.settings import tree  # noqa: E402

GOLDEN = Path(__file__).with_name("golden")
COMMANDS = tree.commands(typer.main.get_command(app))
HELPED = [(), ("sessions",), ("config",), *COMMANDS]
SCENES = scenes.SCENES | scenes.help_scenes(HELPED)
FOLDER = re.compile(r"/tmp/tmp\w{8}")
NO_NEWLINE = "(no newline at the end)"
LARGE = 8  # members of an object


def record(scene: Scene) -> str:
    """All that it writes in each of its modes, under headings; the same lines as before are not written again."""
    sections = {heading: _as_kept(text) for heading, text in _sections(scene)}
    seen: list[list[str]] = []
    for heading, text in sections.items():
        lines = [line.rstrip() for line in text.strip("\n ").splitlines()]
        if text and lines in seen:
            sections[heading] = "(as above)\n"
        seen.append(lines)
    return "".join(f"=== {heading} ===\n{text}" for heading, text in sections.items())


def _sections(scene: Scene) -> Iterator[tuple[str, str]]:
    modes = scene.modes.split()
    if "terminal" in modes:
        screen, code = stage.at_terminal(scene)
        yield f"triforce {scene.args}: at a terminal of {scene.columns} columns, exit code {code}", screen
    for mode, more in (("piped", ()), ("json", ("--json",))):
        if mode in modes:
            out, err, code = stage.piped(scene, *more)
            line = f"triforce {' '.join([scene.args, *more])}"
            yield f"{line}: standard output, exit code {code}", out
            yield f"{line}: standard error", err


def _as_kept(text: str) -> str:
    """Without what differs between machines, JSON laid out, ending in a newline, whether it has one or not."""
    text = FOLDER.sub("/somewhere/there", text.replace(__version__, "<version>"))
    lines = [_laid_out(line) if line[0] == "{" else line for line in text.splitlines(keepends=True)]
    return "".join(lines) + f"\n{NO_NEWLINE}\n" * (text[-1:] not in ("", "\n"))


def _laid_out(line: str) -> str:
    try:
        return Json().laid_out(json.loads(line)) + line[len(line.rstrip()) :]
    except json.JSONDecodeError:  # cut by the edge of a screen
        return line


class Json:
    """Lays out a document, as many members on a line as fit. Of large objects, and of the objects of a list, those with
    the same names are written once: their values are in the text of the other modes."""

    def __init__(self) -> None:
        self.seen: set[frozenset[str]] = set()

    def laid_out(self, value: Any, margin: str = "") -> str:
        inner = f"{margin}  "
        match value:
            case float():
                return f"{value:.6g}"
            case dict() if len(value) >= LARGE and frozenset(value) in self.seen:
                return "{the same members as above}"
            case dict():
                self.seen.add(frozenset(value))
                return _filled(
                    "{}", [f"{json.dumps(key)}: {self.laid_out(value[key], inner)}" for key in value], margin
                )
            case [{}, *_]:
                kinds = {frozenset(member): member for member in reversed(value)}
                more = [f"and {len(value) - len(kinds)} more such members"] * (len(value) > len(kinds))
                return _filled("[]", [self.laid_out(kind, inner) for kind in reversed(kinds.values())] + more, margin)
            case list():
                return _filled("[]", [self.laid_out(member, inner) for member in value], margin)
        return json.dumps(value, ensure_ascii=False)


def _filled(brackets: str, members: Sequence[str], margin: str) -> str:
    whole = ", ".join(members)
    if len(whole) < 80 and "\n" not in whole:
        return brackets[0] + whole + brackets[1]
    lines = [""]
    for member in members:
        if "\n" in member + lines[-1] or len(lines[-1] + member) > 110:
            lines.append("")
        lines[-1] += f"{member}, "
    filled = "\n".join(f"{margin}  {line.rstrip()}" for line in lines if line)
    return f"{brackets[0]}\n{filled.rstrip(',')}\n{margin}{brackets[1]}"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """What a scene writes today. By a process of its own, since torch's threads do not survive the forks."""
    here, there = Pipe()
    process = forked(_record, there)
    there.close()

    def recorded(name: str) -> str:
        here.send(name)
        return str(here.recv())

    with here:
        yield recorded
    process.join()


def _record(asked: Connection) -> None:
    stage.rehearse()
    stage.keep_plans()
    with suppress(EOFError):
        while True:
            asked.send(record(SCENES[asked.recv()]))


DEEP = set(SCENES) - set(scenes.SCENES) - {"help", "help-generate"}  # below in this process


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.deep] * (name in DEEP)) for name in SCENES])
def test_output_is_as_it_was(name: str, recorded: Callable[[str], str]) -> None:
    file = GOLDEN / f"{name}.txt"
    wanted, found = (text.splitlines() for text in (file.read_text(encoding="utf-8"), recorded(name)))
    difference = "\n".join(difflib.unified_diff(wanted, found, str(file.relative_to(ROOT)), "now", lineterm=""))
    if difference:
        pytest.fail(f"if this is meant, run: python tests/test_golden.py --write {name}\n{difference}", pytrace=False)


def test_every_command_and_nothing_else_is_kept() -> None:
    assert sorted(path.stem for path in GOLDEN.iterdir()) == sorted(SCENES)
    begun = [scene.args for scene in scenes.SCENES.values()]
    assert not [words for words in COMMANDS if not any(args.startswith(" ".join(words)) for args in begun)]


@pytest.mark.parametrize("words", HELPED, ids=" ".join)
def test_help_fits_a_narrow_terminal_and_loses_no_option(
    words: tuple[str, ...], triforce: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A usual one has all that is kept."""
    wide = (GOLDEN / f"{'-'.join(('help', *words))}.txt").read_text(encoding="utf-8")
    monkeypatch.setenv("COLUMNS", "80")
    shown = [line.rstrip() for line in triforce(*words, "--help")[1].strip("\n ").splitlines()]
    assert shown == [
        line.rstrip() for line in wide.partition("===\n")[2].partition("\n===")[0].strip("\n ").splitlines()
    ]
    monkeypatch.setenv("COLUMNS", "50")
    code, out, err = triforce(*words, "--help")
    assert (code, err, max(map(len, out.splitlines()))) == (0, "", 50)
    assert not [option for option in re.findall(r"│ (--[a-z-]+)", wide) if f"│ {option[:10]}" not in out]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write down what every command says.")
    parser.add_argument("names", nargs="*", metavar="SCENE", help="these alone (default: all)")
    parser.add_argument("--write", action="store_true", help="to tests/golden")
    given = parser.parse_args()
    if not given.write or not set(given.names) <= {*SCENES}:
        parser.error(f"give --write, and names of {', '.join(SCENES)}")
    stage.rehearse()
    stage.keep_plans()
    for name in given.names or SCENES:
        (GOLDEN / f"{name}.txt").write_text(record(SCENES[name]), encoding="utf-8")
        print(name, flush=True)


if __name__ == "__main__":
    main()
