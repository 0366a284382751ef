"""A limit on the time of a chat template, which comes with a model and may loop forever."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from offload.errors import ModelError
from offload.interrupts import poll

MAX_STEPS = 10_000_000  # a template for one turn takes some 20
MAX_SECONDS = 60.0  # of CPU time: a filter may loop without steps
_TEMPLATE = "<template>"  # the file name of code that Jinja generates
_STEPS_PER_LOOK = 256  # between two checks of the time


class TooManySteps(Exception):
    """A template took too many steps or too long. The message says which."""


class TooMuchWork(ModelError):
    """A template that exceeded a limit of its steps, time or text, with the messages that it was given."""


@contextmanager
def limited_steps() -> Iterator[None]:
    """Within this context each line of a template and each function call counts as a step, and steps poll. Raises
    TooManySteps."""
    num_steps, end = 0, time.thread_time() + MAX_SECONDS

    def step(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps > MAX_STEPS:
            raise TooManySteps(f"takes more than {MAX_STEPS:,} steps")
        if num_steps % _STEPS_PER_LOOK == 0:
            poll()
            if time.thread_time() > end:
                raise TooManySteps(f"takes more than {MAX_SECONDS:g} s")
        return step if frame.f_code.co_filename == _TEMPLATE else None

    before = sys.gettrace()
    sys.settrace(step)
    try:
        yield
    finally:
        sys.settrace(before)
