"""Seeds of random numbers, and the sequence of seeds for several texts."""

from __future__ import annotations

NUM_SEEDS = 2**63


def seed_after(seed: int | None, count: int) -> int | None:
    """The seed of the text that comes `count` texts after the one with `seed`: the highest seed is followed by 0."""
    if seed is None:
        return None
    return seed + count - (NUM_SEEDS if seed < NUM_SEEDS <= seed + count else 0)
