"""The configuration file in the user's editor. It is made if there is none, its owner's alone."""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

from offload.errors import TriforceError, UsageError
from offload.interrupts import ctrl_c_ignored
from triforce_cli.settings.configuration import default_file

_PRIVATE = 0o600
_EDITORS = ("sensible-editor", "nano", "vi")  # without VISUAL and EDITOR, where somebody is at a terminal
_BEGINNING = """\
# Options that hold without the command line; `triforce config show` lists all of them.
# max-tokens = 500       # of every command that has the option
# [chat]
# temperature = 0.8      # of this command
# [aliases]
# small = "qwen2.5-0.5b-instruct"
"""


def edit(file: Path) -> None:
    """Run the user's editor on `file` until it ends. Raises UsageError where there is no editor, or no file can be
    there, and TriforceError where the editor fails."""
    command = [*_editor(file), str(file)]
    _make(file)
    try:
        process = subprocess.Popen(command)
    except OSError as error:
        raise UsageError(f"the editor {command[0]} cannot be run: {error.strerror}; set VISUAL or EDITOR") from error
    with ctrl_c_ignored():  # it is the editor's
        code = process.wait()
    if code:
        raise TriforceError(f"the editor {command[0]} ended with exit code {code}; {file} is as it left it")


def _editor(file: Path) -> list[str]:
    """The words of the editor's command line."""
    chosen = os.environ.get("VISUAL") or os.environ.get("EDITOR")
    if chosen:
        try:
            words = shlex.split(chosen)
        except ValueError as error:
            raise UsageError(f"VISUAL or EDITOR is {chosen!r}, which is no command line: {error}") from error
        if words:
            return words
    found = next(filter(None, map(shutil.which, _EDITORS)), None) if sys.stdin.isatty() else None
    if found is None:
        raise UsageError(f"no editor is set: set VISUAL or EDITOR, or change {file} yourself")
    return [found]


def _make(file: Path) -> None:
    """Write the beginning of a file that is not there. Raises UsageError."""
    try:
        if file == default_file():
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not file.exists():
            with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE), "w") as made:
                made.write(_BEGINNING)
        elif not stat.S_ISREG(file.stat().st_mode):
            raise UsageError(f"{file} is no regular file; --config FILE names another")
    except OSError as error:
        raise UsageError(f"the configuration file {file} cannot be written: {error.strerror}") from error
