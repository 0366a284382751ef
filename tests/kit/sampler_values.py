"""Values of the settings of samplers, for tests that try every row of the table."""

from __future__ import annotations

from typing import Any

from offload.decode.sampling import Row


def others(row: Row) -> list[Any]:
    """Some values that the row allows, its default not among them."""
    if row.kind is bool:
        return [not row.default]
    kind = float if row.kind is float else int
    tried = [kind(row.low + step) for step in (0.125, 0.25, 0.5, 1, 2, 3)]
    return [value for value in dict.fromkeys(tried) if row.allows(value) and value != row.default]
