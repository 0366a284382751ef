"""Users of a prefix store, in this process or in one of their own. No tests in here."""

from __future__ import annotations

import random
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from kit.sessions import IDENTITY, PAGE, Rows, bits
from offload.kv.kept import Kept
from offload.kv.parts import PagedPart
from offload.session.conditions import Conditions
from offload.session.prefix_store import PrefixStore
from offload.session.store_files import clear

ENOUGH = 1 << 30
PARTS = [Rows()]
CONDITIONS = Conditions(IDENTITY, ((7, 8),), (("torch", "1"),), 4 * PAGE)


def text(seed: int, num_tokens: int = 6 * PAGE) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(90) for _ in range(num_tokens)]


TOKENS = text(0, 6 * PAGE + 3)


def no_progress(progress: object) -> None: ...


def opened(root: Path, conditions: Conditions = CONDITIONS, limit: int = ENOUGH) -> tuple[PrefixStore, list[str]]:
    notes: list[str] = []
    return PrefixStore(root, conditions, limit=limit, on_note=notes.append), notes


def keep(root: Path, tokens: Sequence[int] = TOKENS, limit: int = ENOUGH) -> None:
    store, notes = opened(root, limit=limit)
    store.keep(Kept(Rows(tokens)), tokens, no_progress)
    assert not notes


def read(root: Path, tokens: Sequence[int], held: int = 0) -> tuple[int, PagedPart, list[str]]:
    store, notes = opened(root)
    rows = Rows(tokens[:held])
    return store.load(Kept(rows), tokens, held, no_progress), rows, notes


def keep_forever(root: Path, ready: Connection) -> None:
    ready.send(None)
    while True:
        for seed in range(20):
            keep(root, text(seed))


def use(root: Path, seed: int, told: Connection) -> None:
    """Keep, read and drop texts that others keep, read and drop too."""
    chance = random.Random(seed)
    for _ in range(25):
        tokens = text(chance.randrange(4))
        if chance.random() < 0.5:
            opened(root, limit=8 * 600)[0].keep(Kept(Rows(tokens)), tokens, no_progress)
        got, rows, _ = read(root, tokens)
        if bits(rows) != bits(Rows(tokens[:got])):
            told.send(f"{seed}: {got} tokens are not what they were")
            return
        if chance.random() < 0.1:
            clear(root)
    told.send("")
