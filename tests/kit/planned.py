"""Plans that are made once: a plan follows from its arguments alone, and takes up to seconds. No tests in here."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from offload.errors import DoesNotFit
from offload.plan import request


class Plans:
    """The plans so far. folder: where forks of this process leave theirs to each other."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._kept: dict[str, object] = {}

    def keep(self, patch: pytest.MonkeyPatch) -> None:
        """Have every command plan by these."""
        for module, name in (
            (request, "make_plan"),
            (request, "largest_context"),
            (request, "has_room"),
        ):
            patch.setattr(module, name, partial(self._once, getattr(module, name)))

    def _once(self, function: Callable[..., object], *args: object, **sizes: object) -> object:
        asked = f"{function.__name__} {args} {sizes}"
        if asked not in self._kept:
            self._kept[asked] = self._found(function, asked, *args, **sizes)
        if isinstance(found := self._kept[asked], DoesNotFit):
            raise found
        return found

    def _found(self, function: Callable[..., object], asked: str, *args: object, **sizes: object) -> object:
        file = self._folder and self._folder / hashlib.sha256(asked.encode()).hexdigest()
        if file and file.exists():
            return pickle.loads(file.read_bytes())
        try:
            found = function(*args, **sizes)
        except DoesNotFit as error:
            found = error
        if file:
            file.write_bytes(pickle.dumps(found))
        return found
