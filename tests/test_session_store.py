"""Sessions on the disk: a load restores what was saved bit for bit, and a save writes only what changed."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from kit import models
from kit.examples import at_most
from kit.models import LateLink, Sizes
from kit.sessions import (
    DIM,
    DTYPES,
    HEADS,
    IDENTITY,
    LAYERS,
    PAGE,
    Rows,
    bits,
    identity_of,
    page_files,
    restore,
    save,
    saved,
)
from offload.errors import DoesNotFit, SessionError
from offload.kv.full import FullCache
from offload.kv.kept import Kept
from offload.model.decoder import Decoder
from offload.model.level import Level
from offload.model.passes import forward
from offload.session import manifest as manifests
from offload.session import units
from offload.session.catalogue import inspect
from offload.session.folder import Folder
from offload.session.layout import PageFile, PageFormat
from offload.session.store import Store
from offload.transfer.link import Link, PacedLink

pytestmark = pytest.mark.usefixtures("unsynced")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chat"


class Noted(Rows):
    """Rows that note what is asked of them."""

    asked: tuple[str, ...] = ()

    def wait_home(self) -> None:
        self.asked += ("wait",)

    def page_of_all(self, number: int) -> list[torch.Tensor]:
        self.asked += ("page",)
        return super().page_of_all(number)

    page_to_fill = page_of_all

    def page_filled(self, number: int) -> None:
        self.asked += (f"filled {number}",)

    def restored(self, length: int) -> None:
        self.asked += (f"hold {length}",)
        super().restored(length)


def test_pages_are_read_and_filled_once_all_rows_are_home(path: Path) -> None:
    """A forward that was broken off may still be copying rows to the pages."""
    tokens = list(range(6))
    rows = Noted(tokens)
    with Store.open(path, IDENTITY) as store:
        store.save(Kept(rows), tokens, capacity=77, extra={}, unchanged=0)
        assert rows.asked == ("wait", "page", "page")
        rows.asked = ()
        store.load(Kept(rows), 6)
        assert rows.asked == ("hold 0", "wait", "page", "filled 0", "page", "filled 1", "hold 6")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 5, 8, 11])
def test_what_is_loaded_is_what_was_saved(path: Path, dtype: str, num_tokens: int) -> None:
    identity, tokens = replace(IDENTITY, dtype=dtype), list(range(7, 7 + num_tokens))
    with Store.open(path, identity, writer="1.2.3") as store:
        store.save(Kept(Rows(tokens, dtype)), tokens, capacity=77, extra={"turns": ["a", {"b": None}]}, unchanged=0)
    assert restore(path, identity) == saved(tokens, identity)
    with Store.open(path, identity) as store:
        assert (store.capacity, store.extra) == (77, {"turns": ["a", {"b": None}]})
        assert store.nbytes == sum(file.stat().st_size for file in page_files(path))


def test_bits_that_are_no_number_come_back_too(path: Path) -> None:
    rows = Rows(range(PAGE), "bf16")
    rows.page(1, 0)[0].view(torch.int16).copy_(torch.arange(32704, 32704 + HEADS * PAGE * DIM).view(HEADS, PAGE, DIM))
    identity, back = replace(IDENTITY, dtype="bf16"), Rows((), "bf16")
    with Store.open(path, identity) as store:
        store.save(Kept(rows), range(PAGE), capacity=0, extra={}, unchanged=0)
        store.load(Kept(back), PAGE)
    assert not back.page(1, 0).isfinite().all()
    assert bits(back) == bits(rows)


@pytest.mark.parametrize("num_tokens", [0, 1, 4, 6, 8, 10])
def test_a_part_is_loaded_without_reading_the_rest(path: Path, num_tokens: int) -> None:
    tokens, rows = range(10), Rows(range(50, 59))
    save(path, tokens)
    for file in page_files(path)[-(-num_tokens // PAGE) :]:
        file.unlink()
    counted: list[int] = []
    with Store.open(path, IDENTITY, read_only=True) as store:
        store.load(Kept(rows), num_tokens, on_bytes=counted.append)
    assert rows.length == num_tokens
    assert bits(rows) == bits(Rows(tokens[:num_tokens]))
    assert sum(counted) == -(-num_tokens // PAGE) * LAYERS * 2 * HEADS * PAGE * DIM * 4


def fingerprint(file: Path) -> tuple[str, int, int, int]:
    status = file.stat()
    return file.name, status.st_ino, status.st_mtime_ns, status.st_size


def test_an_appending_save_writes_only_what_changed(path: Path) -> None:
    with Store.open(path, IDENTITY) as store:
        store.save(Kept(Rows(range(10))), range(10), capacity=0, extra={}, unchanged=0)
        before = [fingerprint(file) for file in page_files(path)]
        written: list[int] = []
        assert store.bytes_to_write(13, 10, Kept(Rows(()))) == 2 * store.nbytes // 3
        store.save(Kept(Rows(range(13))), range(13), capacity=0, extra={}, unchanged=10, on_bytes=written.append)
        assert sum(written) == 2 * IDENTITY.page_format.nbytes
    after = [fingerprint(file) for file in page_files(path)]
    assert len(after) == 4
    assert after[:2] == before[:2]
    assert not set(after[2:]) & set(before)
    assert restore(path) == saved(range(13))


def test_a_save_without_a_change_writes_no_page(path: Path) -> None:
    save(path, range(10), turn=1)
    before = [fingerprint(file) for file in page_files(path)]
    save(path, range(10), unchanged=10, turn=2)
    assert [fingerprint(file) for file in page_files(path)] == before
    with Store.open(path, IDENTITY) as store:
        assert store.extra == {"turn": 2}


def test_a_session_remembers_when_it_was_made_and_who_wrote_it_last(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seconds, writer in ((1000.0, "1.0"), (2000.5, "1.1")):
        monkeypatch.setattr(time, "time", lambda: seconds)  # noqa: B023
        with Store.open(path, IDENTITY, writer=writer) as store:
            store.save(Kept(Rows(range(5))), range(5), capacity=0, extra={}, unchanged=0)
    manifest = inspect(path)
    assert (manifest.created, manifest.updated, manifest.writer) == (1000.0, 2000.5, "1.1")


def test_a_page_cut_short_is_written_again_without_what_was_dropped(path: Path) -> None:
    save(path, range(10))
    save(path, range(6), unchanged=6)
    assert restore(path) == saved(range(6))
    with safe_open(page_files(path)[1], "pt") as file:
        assert file.get_tensor("layers.1")[:, :, 2:].count_nonzero() == 0


@at_most(60)
@given(st.lists(st.tuples(st.integers(0, 12), st.lists(st.integers(0, 3), max_size=9)), min_size=1, max_size=6))
def test_any_cutting_and_growing_restores_the_last_save(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, list[int]]]
) -> None:
    path, tokens = tmp_path_factory.mktemp("edits") / "chat", list[int]()
    for keep, more in edits:
        unchanged = min(keep, len(tokens))
        tokens = tokens[:unchanged] + more
        save(path, tokens, unchanged)
        assert restore(path) == saved(tokens)
        assert len(page_files(path)) == -(-len(tokens) // PAGE)


def test_equal_sequences_are_equal_files_and_the_live_rows_stay(path: Path) -> None:
    """Rejected rows behind the last token are not written to the file and not cleared in the cache."""
    clean, dirty = Rows(range(6)), Rows(range(6))
    for layer in range(LAYERS):
        clean.page(layer, 1)[:, :, 2:] = 0
    garbage = dirty.page(1, 1).clone()
    for name, rows in (("a", clean), ("b", dirty)):
        with Store.open(path / name, IDENTITY) as store:
            store.save(Kept(rows), range(6), capacity=0, extra={}, unchanged=0)
    contents = [[file.read_bytes() for file in page_files(path / name)] for name in "ab"]
    assert contents[0] == contents[1]
    assert torch.equal(dirty.page(1, 1), garbage)
    assert garbage[:, :, 2:].count_nonzero()


@pytest.mark.parametrize("dtype", DTYPES)
def test_page_files_are_safetensors(path: Path, dtype: str) -> None:
    identity, rows = replace(IDENTITY, dtype=dtype), Rows(range(8), dtype)
    with Store.open(path, identity) as store:
        store.save(Kept(rows), range(8), capacity=0, extra={}, unchanged=0)
    for number, file in enumerate(page_files(path)):
        with safe_open(file, "pt") as tensors:
            assert sorted(tensors.keys()) == ["layers.0", "layers.1"]
            for layer, home in enumerate(rows.page_of_all(number)):
                assert tensors.get_tensor(f"layers.{layer}").dtype == DTYPES[dtype]
                assert torch.equal(tensors.get_tensor(f"layers.{layer}"), home)


@pytest.mark.parametrize("num_layers", [1, 11, 101])
def test_data_begins_at_a_multiple_of_eight(num_layers: int) -> None:
    form = PageFormat(num_layers, 3, 2, 5, "fp16")
    header = PageFile(form).header
    assert len(header) % 8 == 0
    assert form.nbytes == len(header) + num_layers * 2 * 3 * 5 * 2 * 2


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return models.load(models.save(models.random_model(), tmp_path_factory.mktemp("model")))


def level_over(decoder: Decoder, link: Link | None) -> tuple[Level, FullCache]:
    """A model with a full cache: resident, or with a link three tiles of all layers."""
    sizes = Sizes(num_resident=3)
    cache = models.full_cache(decoder, sizes, link=link)
    return Level("target", decoder, cache, vocab_size=models.VOCABULARY, block=sizes.block), cache


LINKS = {
    "resident": lambda: None,
    "paced": lambda: PacedLink(None),
    "late": lambda: LateLink(late_in=True, late_out=True),
}


@pytest.mark.parametrize("before", LINKS)
@pytest.mark.parametrize("after", LINKS)
@pytest.mark.parametrize("num_tokens", [60, 37])
def test_a_restored_cache_goes_on_with_the_same_bits(
    path: Path, decoder: Decoder, before: str, after: str, num_tokens: int
) -> None:
    """Saved from one residence and loaded into another that held a different sequence before."""
    tokens, more = models.random_tokens(60), models.random_tokens(7, seed=2)
    links = [LINKS[before](), LINKS[after]()]
    level, cache = level_over(decoder, links[0])
    forward(level, tokens[:41], 1)
    forward(level, tokens[41:], 1)
    identity = identity_of(cache, "fp32")
    with Store.open(path, identity) as store:
        store.save(Kept(cache), tokens, capacity=0, extra={}, unchanged=0)
    level.truncate(num_tokens)
    expected = forward(level, more, 7)
    other, restored = level_over(decoder, links[1])
    forward(other, models.random_tokens(50, seed=3), 1)
    restored.fetch_ahead()
    with Store.open(path, identity, read_only=True) as store:
        store.load(Kept(restored), num_tokens)
    assert restored.length == num_tokens
    assert torch.equal(forward(other, more, 7), expected)
    for link in links:
        if link is not None:
            link.close()


def test_what_a_refused_load_leaves_behind_changes_nothing(path: Path, decoder: Decoder) -> None:
    """Hidden rows are multiplied by zero, so none may be infinite."""
    tokens = models.random_tokens(40)
    expected = forward(level_over(decoder, None)[0], tokens[:20], 20)
    level, cache = level_over(decoder, None)
    forward(level, tokens, 1)
    identity = identity_of(cache, "fp32")
    with Store.open(path, identity) as store:
        store.save(Kept(cache), tokens, capacity=0, extra={}, unchanged=0)
    third = page_files(path)[2]  # tokens 16 to 24
    third.write_bytes(
        third.read_bytes()[: len(PageFile(identity.page_format).header)].ljust(third.stat().st_size, b"\xff")
    )
    other, damaged = level_over(decoder, None)
    with Store.open(path, identity) as store, pytest.raises(SessionError, match=third.name):
        store.load(Kept(damaged), 40)
    assert damaged.length == 0
    assert torch.equal(forward(other, tokens[:20], 20), expected)


def test_rows_that_the_host_cannot_reach_go_through_a_buffer(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "_on_host", lambda layer: False)
    save(path, range(10))
    assert restore(path) == saved(range(10))


@pytest.mark.cuda
@pytest.mark.parametrize("num_tokens", [8, 10])
def test_rows_on_a_gpu_come_back(path: Path, num_tokens: int) -> None:
    rows, back = Rows(range(num_tokens), device="cuda"), Rows(range(9), device="cuda")
    with Store.open(path, IDENTITY) as store:
        store.save(Kept(rows), range(num_tokens), capacity=0, extra={}, unchanged=0)
        store.load(Kept(back), num_tokens)
    assert bits(back) == saved(range(num_tokens))[1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "bf16"}, ["dtype: saved fp32, now bf16"]),
        ({"model": "m2", "model_name": "big"}, ["model: saved tiny (model), now big (m2)"]),
        ({"rope": "r2", "page_tokens": 8}, ["rope: saved rope, now r2", "page_tokens: saved 4, now 8"]),
        ({"tokenizer": "t2"}, ["tokenizer: saved tokenizer, now t2"]),
        ({"num_layers": 3}, ["num_layers: saved 2, now 3"]),
        ({"num_kv_heads": 1}, ["num_kv_heads: saved 2, now 1"]),
        ({"head_dim": 8}, ["head_dim: saved 4, now 8"]),
    ],
)
@pytest.mark.parametrize("read_only", [False, True])
def test_another_model_is_refused_with_what_differs(
    path: Path, change: dict[str, object], words: list[str], read_only: bool
) -> None:
    save(path, range(5))
    with pytest.raises(SessionError) as caught:
        Store.open(path, replace(IDENTITY, **change), read_only=read_only)  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words)
    assert str(caught.value).count(": saved ") == len(words)
    assert f"remove the folder {path}" in str(caught.value)
    assert restore(path) == saved(range(5))


def test_a_renamed_model_folder_holds_the_same_model(path: Path) -> None:
    save(path, range(5))
    assert restore(path, replace(IDENTITY, model_name="renamed")) == saved(range(5))


def test_reading_changes_nothing_and_makes_nothing(path: Path) -> None:
    with pytest.raises(SessionError, match=r"there is no session in .*--read-only"):
        Store.open(path, IDENTITY, read_only=True)
    assert not path.exists()
    path.mkdir()
    with pytest.raises(SessionError, match="there is no session"):
        Store.open(path, IDENTITY, read_only=True)
    assert list(path.iterdir()) == []
    save(path, range(5))
    before = sorted(fingerprint(file) for file in path.iterdir())
    restore(path)
    assert sorted(fingerprint(file) for file in path.iterdir()) == before
    with Store.open(path, IDENTITY, read_only=True) as store, pytest.raises(RuntimeError, match="opened read-only"):
        store.save(Kept(Rows(range(5))), range(5), capacity=0, extra={}, unchanged=5)


def test_a_session_that_was_never_saved_leaves_nothing(path: Path) -> None:
    with Store.open(path, IDENTITY) as store:
        assert (store.tokens, store.capacity, store.extra, store.nbytes) == ((), 0, {}, 0)
        assert path.is_dir()
    assert not path.exists()
    store.close()


def test_only_the_user_can_read_it(path: Path) -> None:
    save(path, range(5))
    assert [oct(file.stat().st_mode & 0o077) for file in (path, *path.iterdir())] == ["0o0"] * 6


def test_a_folder_of_other_things_is_left_alone(path: Path) -> None:
    path.mkdir()
    (path / "thesis.txt").write_text("mine")
    with pytest.raises(SessionError, match=r"holds thesis\.txt"):
        Store.open(path, IDENTITY)
    assert os.listdir(path) == ["thesis.txt"]
    with pytest.raises(SessionError, match="is a file"):
        Store.open(path / "thesis.txt", IDENTITY)
    with pytest.raises(SessionError, match="cannot be opened as a session"):
        Store.open(path / "thesis.txt" / "chat", IDENTITY)


def test_what_a_caller_must_not_do(path: Path) -> None:
    with Store.open(path, IDENTITY) as store:
        store.save(Kept(Rows(range(5))), range(5), capacity=0, extra={}, unchanged=0)
        for tokens, unchanged in (((0, 1, 9), 3), (range(5), 6), (range(5), -1), (range(6), 6)):
            with pytest.raises(ValueError, match="are not those that were saved"):
                store.save(Kept(Rows(tokens)), tokens, capacity=0, extra={}, unchanged=unchanged)
        with pytest.raises(ValueError, match="6 tokens, and rows of 5"):
            store.save(Kept(Rows(range(5))), range(6), capacity=0, extra={}, unchanged=0)
        with pytest.raises(ValueError, match="rows are"):
            store.load(Kept(Rows((), "bf16")), 1)
        with pytest.raises(ValueError, match="6 tokens of 5"):
            store.load(Kept(Rows()), 6)
        for extra in ({"a": (1, 2)}, {"a": float("nan")}, {1: 2}, nested(17)):
            with pytest.raises(ValueError, match=r"extra|JSON"):
                store.save(Kept(Rows(range(5))), range(5), capacity=0, extra=extra, unchanged=0)  # type: ignore[arg-type]
    assert restore(path) == saved(range(5))
    assert len(os.listdir(path)) == 5


def nested(depth: int) -> dict[str, object]:
    inner: object = 1
    for _ in range(depth):
        inner = {"a": inner}
    return {"a": inner}


def test_any_text_comes_back(path: Path) -> None:
    texts = ["", "é\u4e2d\U0001f600", "\ud800 alone", '"\\\n\x00', "a" * 100_000]
    save(path, range(5), texts=texts)
    with Store.open(path, IDENTITY) as store:
        assert store.extra == {"texts": texts}


def test_too_much_text_is_refused_before_anything_is_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(path, range(5))
    monkeypatch.setattr(manifests, "MAX_BYTES", 2000)
    with pytest.raises(SessionError, match="limit"):
        save(path, range(9), text="a" * 2000)
    assert restore(path) == saved(range(5))


def test_a_full_disk_is_seen_before_anything_is_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(path, range(5))
    before = [fingerprint(file) for file in (*page_files(path), path / "manifest.json")]
    monkeypatch.setattr(Folder, "free_bytes", lambda folder: 3 * IDENTITY.page_format.nbytes)
    with pytest.raises(DoesNotFit, match=r"takes up to [0-9.]+ kB more in .*, [0-9.]+ kB are free.*sessions prune"):
        save(path, range(12))
    assert [fingerprint(file) for file in (*page_files(path), path / "manifest.json")] == before
    save(path, range(8), unchanged=5)
    assert restore(path) == saved(range(8))
