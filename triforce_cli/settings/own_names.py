"""Names that a person gives in the configuration file: of aliases and of prompt templates."""

from __future__ import annotations

import re

from offload.errors import UsageError

_NAME = re.compile(r"\w[\w.-]{0,63}")


def check_name(name: str, place: str, *, reserved: str = "") -> None:
    """Raises UsageError for a name that is not one word without slashes. place: of the table. reserved: no name."""
    if _NAME.fullmatch(name) is None or name == reserved:
        but = f', and not be "{reserved}"' if reserved else ""
        raise UsageError(
            f"{place} has the name {name!r}; it must be 1 to 64 letters, digits, '_', '.' and '-', and begin with a "
            f"letter or digit{but}"
        )
