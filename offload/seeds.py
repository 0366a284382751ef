"""Seeds of random numbers, and the sequence of seeds for several texts."""

from __future__ import annotations

import hashlib

NUM_SEEDS = 2**63


def seed_of(number: int) -> int | None:
    """The seed of a whole number with a sign, as other programs take them: -1 draws one, None."""
    return None if number == -1 else number + NUM_SEEDS if -NUM_SEEDS <= number < 0 else number


def seed_after(seed: int | None, count: int) -> int | None:
    """The seed of the text that comes `count` texts after the one with `seed`: the highest seed is followed by 0."""
    if seed is None:
        return None
    return seed + count - (NUM_SEEDS if seed < NUM_SEEDS <= seed + count else 0)


def seed_within(seed: int | None, num_tokens: int) -> int | None:
    """The seed for going on with a text after `num_tokens` of its tokens. Another one than the text's own: random
    numbers that decided its beginning must not decide what follows."""
    if seed is None or not num_tokens:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed} {num_tokens}".encode(), digest_size=8).digest(), "big") % NUM_SEEDS
