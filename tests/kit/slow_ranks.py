"""`triforce generate` with several ranks, in a fork of a process that has its libraries, which can be held in a
prefill, in a pass once it has said something, and in a save. No tests in here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from kit.hearing import hear_signals
from triforce_cli.__main__ import run

ROOT = Path(__file__).parents[2]
HOLD_PREFILL, HOLD_DECODE, HOLD_SAVE, PREFILLS = "hold-prefill", "hold-decode", "hold-save", "prefills"  # files
# Code of the program's own, as which it can be interrupted.
SLOWLY = f"""
import os, time
from offload import interrupts
from offload.kv.full import FullCache
from triforce_cli.screen import progress
progress.LINE_SECONDS = 0.0  # a stage is seen at once
sync, attend = os.fsync, FullCache.attend
def wait_while(name, is_so):
    while (folder / name).exists() and is_so():
        time.sleep(0.01)
def attend_slowly(cache, *rows):
    if cache._phase == "prefill":
        (folder / "{PREFILLS}").touch()
    if os.getpid() == rank_0:
        # A signal is heard after a block, which therefore has to end.
        held = lambda so: so and interrupts._requested is None
        wait_while("{HOLD_PREFILL}", lambda: held(cache._phase == "prefill"))
        wait_while("{HOLD_DECODE}", lambda: held((folder / "said").stat().st_size > 2))
    return attend(cache, *rows)
def sync_slowly(file):
    time.sleep(0.05)
    wait_while("{HOLD_SAVE}", lambda: len(list((folder / "session").glob("page-*"))) > num_pages)
    sync(file)
os.fsync, FullCache.attend = sync_slowly, attend_slowly
"""


def generate_slowly(
    folder: Path, variables: Mapping[str, str], args: Sequence[str], num_pages: int, silence_seconds: float, forks: bool
) -> None:
    """Rank 0 is held while there are files of these names; in a save once the session has more than `num_pages` files.
    forks: the other ranks, too, are forked, from this one; then a rank is hung after `silence_seconds`."""
    os.environ.update(variables)
    os.chdir(ROOT)
    os.setsid()
    hear_signals()
    for number, name in ((1, "said"), (2, "noted")):
        os.dup2(os.open(folder / name, os.O_CREAT | os.O_WRONLY), number)
    if forks:
        _fork_ranks(silence_seconds)
    exec(SLOWLY, {"__name__": "__main__", "folder": folder, "num_pages": num_pages, "rank_0": os.getpid()})
    sys.argv = ["triforce", "generate", *args]
    sys.exit(run())


def _fork_ranks(silence_seconds: float) -> None:
    from offload.ranks import rendezvous, watch

    watch.SILENCE_SECONDS = silence_seconds
    names = ("DEVNULL", "TimeoutExpired")
    rendezvous.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=_fork, **{name: getattr(subprocess, name) for name in names}
    )


def _fork(
    command: Sequence[str], *, stderr: IO[bytes], pass_fds: Sequence[int], **settings: Any
) -> subprocess.Popen[bytes]:
    """A rank of that command, which loads nothing anew."""
    from offload.ranks.follower import main

    def follow() -> None:
        for before, after in zip((2, *sorted(pass_fds)), (*sorted(pass_fds), os.sysconf("SC_OPEN_MAX")), strict=True):
            os.closerange(before + 1, after)  # who waits for an exec is told that there was one
        try:
            main(command[3:])
        finally:
            os._exit(1)

    return subprocess.Popen(["true"], preexec_fn=follow, stderr=stderr, pass_fds=pass_fds, **settings)
