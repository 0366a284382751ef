"""A part that is planted in what a sequence keeps, by a class and the line that lists it, comes through reuse, copies,
sessions, the prefix store and ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kit.families import save_tiny
from kit.forked import Forked, forked_ranks
from kit.heads import SHAPES, with_head
from kit.models import changed
from offload.config.model import ModelConfig
from offload.config.reading import read_config
from offload.engine.engine import Engine
from offload.errors import SessionError
from offload.kv.full import FullCache
from offload.kv.parts import Part, Shapes, Split, Unit
from offload.plan.shards import Shard
from offload.session import manifest as manifests
from offload.session.folder import Folder
from offload.session.needs import needs_of
from offload.session.prefix_store import PrefixStore
from offload.worker.worker import Worker
from test_next_token_reuse import engine as drafting_engine
from test_state_sessions import BLOCK, DOCUMENT, QUESTIONS, flip, manifest_of, opened, plan_of, say, sealed, with_store

pytestmark = pytest.mark.usefixtures("unsynced")
PROMPT, PAGES = [*DOCUMENT, *QUESTIONS[0]], len(DOCUMENT) // BLOCK


class Index(Part):
    """The planted part: of each whole page of rows its first token's keys in all layers, [L, H_kv, D]."""

    name, what = "index", "file of an index"

    def __init__(self, rows: FullCache) -> None:
        self._rows, self.filled_units = rows, dict[Unit, Tensor]()

    def shapes(self, unit: Unit) -> Shapes:
        shape = self._rows.shape
        return {"keys": ((self._rows.num_layers, shape.num_kv_heads, shape.head_dim), shape.dtype)}

    def units(self, length: int) -> list[Unit]:
        return [(stop,) for stop in range(BLOCK, length + 1, BLOCK)]

    needed = units

    def wanted(self, saved: Sequence[Unit], length: int) -> list[Unit]:
        return [unit for unit in saved if unit[0] <= length]

    def reach(self, units: Sequence[Unit], length: int) -> int:
        return length if {*self.units(length)} <= {*units} else 0

    def tensors(self, unit: Unit) -> list[Tensor]:
        return [self.filled_units[unit] if unit in self.filled_units else keys_of(self._rows.tensors(unit))]

    def filled(self, unit: Unit, tensors: Sequence[Tensor]) -> None:
        self.filled_units[unit] = tensors[0].clone()

    def restored(self, length: int) -> None:
        self.filled_units = {unit: keys for unit, keys in self.filled_units.items() if unit[0] <= length}

    truncate = restored

    def splits(self, whole: ModelConfig, shards: Sequence[Shard]) -> Sequence[Split]:
        return self._rows.splits(whole, shards)[:1]


def keys_of(page: Sequence[Tensor]) -> Tensor:
    return torch.stack([layer[0, :, 0] for layer in page])


LISTED = Worker._parts


def plant(rank: int = 0) -> None:
    """In a rank's process."""
    Worker._parts = lambda self: [*LISTED(self), Index(self.full)]  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def forked_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Forked]]:
    monkeypatch.setattr("offload.engine.prefix.LEAST_TOKENS", 1)
    monkeypatch.setattr(PrefixStore, "read_seconds", lambda self, stored: 0.0)
    monkeypatch.setattr(Worker, "_parts", LISTED)
    plant()
    with forked_ranks(plant) as started:
        yield started


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = {"vocab_size": 264, "max_position_embeddings": 4096, "num_key_value_heads": 4}
    return save_tiny("qwen3_5", tmp_path_factory.mktemp("kept"), tokenizer=True, **options)


def engine(folder: Path, root: Path, ranks: int = 1) -> Engine:
    return with_store(folder, root / "store", plan=changed(plan_of(folder), num_devices=ranks))


def assert_filled(made: Engine, num_pages: int) -> None:
    """The part of each rank has so many units from elsewhere: those of its rows."""
    kept = made.worker.kept
    assert len(kept["index"].filled_units) == num_pages  # type: ignore[attr-defined]
    for number in range(num_pages):
        unit = ((number + 1) * BLOCK,)
        [keys] = kept.tensors(kept["index"], unit)
        assert torch.equal(keys, keys_of(kept.tensors(kept["rows"], unit)))


@pytest.mark.parametrize(
    ("saving", "opening"),
    [(1, 1), (2, 1), *(pytest.param(*ranks, marks=pytest.mark.deep) for ranks in ((1, 2), (2, 2)))],
)
def test_a_session_and_the_store_keep_it_on_any_number_of_ranks(
    folder: Path, tmp_path: Path, saving: int, opening: int
) -> None:
    path = tmp_path / "session"
    with engine(folder, tmp_path, saving) as made, opened(path, folder, made) as store:
        text = [*PROMPT, *say(made, PROMPT)]
        assert made.keep() == PAGES * BLOCK
        made.save(store, {})
        wanted = say(made, [*text, 5])
        tokens = list(store.tokens)
    assert len(list(path.glob("part-index-*"))) == len(tokens) // BLOCK
    assert len(list(tmp_path.glob("store/*/*-index-*"))) == PAGES
    with engine(folder, tmp_path, opening) as made, opened(path, folder, made) as store:
        assert made.restore(store, [*text, 5]) == len(tokens)
        assert_filled(made, len(tokens) // BLOCK)
        assert store.bytes_to_write(len(tokens), len(tokens), made.worker.kept) == 0
        assert say(made, [*text, 5]) == wanted
        made.prefix.truncate(0)
        made.worker.kept.each("restored", 0)
        assert say(made, PROMPT, reuse=False) == text[len(PROMPT) :]
        is_same = saving == opening  # rows of so many ranks
        assert made.stats.stored_tokens == PAGES * BLOCK * is_same
        assert_filled(made, PAGES * is_same)


def test_a_neighbour_that_borrows_rows_has_it(folder: Path, tmp_path: Path) -> None:
    with engine(folder, tmp_path) as made:
        say(made, PROMPT)
        beside = made.worker.beside()
        assert beside.copy_rows(made.worker, 2 * BLOCK)
        index = beside.kept["index"]
        assert isinstance(index, Index)
        assert [*index.filled_units] == [(BLOCK,), (2 * BLOCK,)]


def test_without_it_nothing_is_gone_on_with(folder: Path, tmp_path: Path) -> None:
    """A damaged file ends a session; in the store pages without it count for nothing."""
    path = tmp_path / "session"
    with engine(folder, tmp_path) as made, opened(path, folder, made) as store:
        expected = say(made, PROMPT)
        made.keep()
        made.save(store, {})
        victim = path / manifest_of(path).parts["index"][1].file
        victim.write_bytes(flip(victim.read_bytes()))
        made.prefix.truncate(0)
        with pytest.raises(SessionError, match=victim.name):
            made.restore(store, [*store.tokens, 1])
        assert made.num_cached == made.worker.full.length == len(made.worker.kept["index"].filled_units) == 0  # type: ignore[attr-defined]
    for file in tmp_path.glob("store/*/*-index-*"):
        file.unlink()
    with engine(folder, tmp_path) as made:
        assert say(made, PROMPT, reuse=False) == expected
        assert made.stats.stored_tokens == 0
    assert {*manifest_of(path).parts} == {"rows", "states", "index"}


FORGED = [
    ({"unit": [10_000]}, "no further one of its tokens'"),
    ({"unit": []}, "no further one of its tokens'"),
    ({"unit": [BLOCK]}, "no further one of its tokens'"),
    ({"unit": [-1]}, r"unit\[0\] is -1"),
    ({"file": "part-other-64-0123456789abcdef.safetensors"}, "it must be the file of index at 64"),
    ({"packed": "2"}, "packed is"),
    ({"more": 1}, "more is not known"),
]


def test_a_forged_manifest_of_it_is_refused(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "session"
    with engine(folder, tmp_path) as made, opened(path, folder, made) as store:
        say(made, PROMPT)
        made.save(store, {})
    content = (path / manifests.MANIFEST_FILE).read_bytes()
    for change, why in FORGED:
        record = json.loads(b"{" + content.partition(b"\n")[2])
        assert record["format"] == 7
        record["parts"]["index"][1] |= change
        with pytest.raises(ValueError, match=why):
            manifests.decode(sealed(record))
    for names in ("rows", "In"):
        record = json.loads(b"{" + content.partition(b"\n")[2])
        record["parts"][names] = record["parts"].pop("index")
        with pytest.raises(ValueError, match="no part's name"):
            manifests.decode(sealed(record))
    assert manifests.read(Folder(path)) is not None


@pytest.mark.parametrize("name", ["glm4_moe", "gemma4", "qwen3_5", "a head"])
def test_a_plan_tells_what_texts_need_of_parts(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`triforce plan` asks the store before there are caches."""
    monkeypatch.setattr(Worker, "_parts", LISTED)
    if name == "a head":
        model = with_head(save_tiny("qwen3_5", tmp_path / "m", tokenizer=True, **SHAPES))
        made = drafting_engine(model)
    else:
        model = save_tiny(name, tmp_path / "m", tokenizer=True, vocab_size=264, max_position_embeddings=1024)
        made = with_store(model, tmp_path)
    with made:
        parts, needs = made.worker.kept.parts, needs_of(made.plan, read_config(model))
        for length in range(BLOCK, 10 * BLOCK, BLOCK):
            told = {part.name: (part.in_place, part.num_computed, part.needed(length)) for part in parts}
            assert {each.name: (each.in_place, each.num_computed, each.needed(length)) for each in needs} == told
