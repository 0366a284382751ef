"""What every command writes, character by character: at a terminal, into pipes, as JSON.

tests/golden has a file for each scene of scenes.py. When output changes on purpose:

    python tests/test_golden.py --write [SCENE ...]

and look at the difference. Not kept as they are: the program's version, which is <version>; the folder of a scene,
which is somewhere; JSON, which is laid out on many lines, with six digits of numbers that are not whole. A terminal is
kept as its screen at the end, without colours.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a script
    sys.path.insert(0, str(ROOT))

import scenes  # noqa: E402
import stage  # noqa: E402
from stage import Scene  # noqa: E402
from triforce_cli import __version__, tree  # noqa: E402
from triforce_cli.app import app  # noqa: E402

GOLDEN = Path(__file__).with_name("golden")
COMMANDS = tree.commands(typer.main.get_command(app))
SCENES = scenes.SCENES | scenes.help_scenes([(), ("sessions",), ("config",), *COMMANDS])
FOLDER = re.compile(r"/tmp/tmp\w{8}")
NO_NEWLINE = "(no newline at the end)"


def record(scene: Scene) -> str:
    """All that it writes in each of its modes, under headings."""
    return "".join(f"=== {heading} ===\n{_whole(text)}" for heading, text in _sections(scene))


def _sections(scene: Scene) -> Iterator[tuple[str, str]]:
    modes = scene.modes.split()
    if "terminal" in modes:
        screen, code = stage.at_terminal(scene)
        yield f"triforce {scene.args}: at a terminal of {scene.columns} columns, exit code {code}", screen
    for mode, more in (("piped", ()), ("json", ("--json",))):
        if mode in modes:
            out, err, code = stage.piped(scene, *more)
            yield f"triforce {' '.join([scene.args, *more])}: standard output, exit code {code}", _laid_out(out)
            yield "standard error", _laid_out(err)


def _whole(text: str) -> str:
    """Ending in a newline, whether it has one or not."""
    text = FOLDER.sub("/somewhere/there", text.replace(__version__, "<version>"))
    return text if text.endswith("\n") or not text else f"{text}\n{NO_NEWLINE}\n"


def _laid_out(text: str) -> str:
    """Each line of JSON on many."""
    lines = text.splitlines(keepends=True)
    return "".join(_json(json.loads(line)) + line[len(line.rstrip()) :] if line[0] == "{" else line for line in lines)


def _json(value: Any, margin: str = "") -> str:
    """A line for each member of an object; lists of numbers and strings on one."""
    if isinstance(value, float):
        return f"{value:.6g}"
    inner = f"{margin}  "
    if isinstance(value, dict) and value:
        members = [f"{inner}{json.dumps(key)}: {_json(member, inner)}" for key, member in value.items()]
        return "{\n" + ",\n".join(members) + f"\n{margin}}}"
    if isinstance(value, list) and any(isinstance(member, dict | list) for member in value):
        return "[\n" + ",\n".join(f"{inner}{_json(member, inner)}" for member in value) + f"\n{margin}]"
    return json.dumps(value, ensure_ascii=False)


def write(folder: Path, names: Sequence[str]) -> None:
    stage.rehearse()
    for name in names:
        (folder / f"{name}.txt").write_text(record(SCENES[name]), encoding="utf-8")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is written today. By a process of its own, since torch's threads do not survive the forks."""
    folder = tmp_path_factory.mktemp("recorded")
    command = [sys.executable, __file__, "--into", str(folder)]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SCENES)
def test_output_is_as_it_was(name: str, recorded: Path) -> None:
    file = GOLDEN / f"{name}.txt"
    wanted, found = (path.read_text(encoding="utf-8").splitlines() for path in (file, recorded / file.name))
    difference = "\n".join(difflib.unified_diff(wanted, found, str(file.relative_to(ROOT)), "now", lineterm=""))
    if difference:
        pytest.fail(f"if this is meant, run: python tests/test_golden.py --write {name}\n{difference}", pytrace=False)


def test_every_command_and_nothing_else_is_kept() -> None:
    assert sorted(path.stem for path in GOLDEN.iterdir()) == sorted(SCENES)
    begun = [scene.args for scene in scenes.SCENES.values()]
    assert not [words for words in COMMANDS if not any(args.startswith(" ".join(words)) for args in begun)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write down what every command says.")
    parser.add_argument("names", nargs="*", metavar="SCENE", help="these alone (default: all)")
    parser.add_argument("--write", dest="into", action="store_const", const=GOLDEN, help="to tests/golden")
    parser.add_argument("--into", type=Path, metavar="DIR", help="to another folder")
    given = parser.parse_args()
    if given.into is None or not set(given.names) <= SCENES.keys():
        parser.error(f"give --write or --into DIR, and names of {', '.join(SCENES)}")
    write(given.into, given.names or list(SCENES))


if __name__ == "__main__":
    main()
