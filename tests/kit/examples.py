"""How many examples Hypothesis tries where each takes long. No tests in here."""

from __future__ import annotations

from hypothesis import settings

USUAL = 12  # of conftest.py, without --deep


def at_most(number: int) -> settings:
    """So many with --deep, and a third of them by default, 3 at least."""
    return settings(max_examples=min(number, max(number * settings.default.max_examples // (3 * USUAL), 3)))
