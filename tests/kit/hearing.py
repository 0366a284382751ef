"""Signals reach what the tests start, whoever started the tests."""

from __future__ import annotations

import signal


def hear_signals() -> None:
    """In a child, before its program starts: tests may run in the background, where SIGINT and SIGQUIT are ignored, or
    under nohup, where SIGHUP is."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
