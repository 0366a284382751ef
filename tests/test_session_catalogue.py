"""Sessions in a folder: names, listing, removal, and the digests that bind one to its model."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kit import models
from kit.sessions import IDENTITY, Rows, page_files, restore, save, saved
from offload.config.model import llama_shaped
from offload.config.reading import read_config
from offload.config.rope import Rope
from offload.errors import ModelError, SessionError, UsageError
from offload.kv.kept import Kept
from offload.session.catalogue import Summary, inspect, outdated, remove, summaries
from offload.session.fingerprints import (
    SAMPLE_BYTES,
    identify,
    identity_of,
    model_digest,
    rope_digest,
    tokenizer_digest,
)
from offload.session.folder import WRITER
from offload.session.identity import Identity, differences
from offload.session.manifest import checksum
from offload.session.names import FOLDER_VARIABLE, session_folder, sessions_folder
from offload.session.store import Store

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.usefixtures("unsynced")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "sessions"))
    return tmp_path / "sessions"


# --- names ---


@pytest.mark.parametrize("name", ["a", "chat", "My_notes-2.1", "0", "_", "a" * 64, "a..b"])
def test_a_name_leads_to_a_folder_below_the_sessions(root: Path, name: str) -> None:
    assert session_folder(name) == root / name


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".a", "-a", "a/b", "../a", "/a", "a" * 65, "a b", "\u00e9", "a\n", "a\0"]
)
def test_what_leads_elsewhere_is_no_name(root: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot be a session's name: 1 to 64 letters"):
        session_folder(name)


def test_sessions_lie_in_the_users_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, "~/elsewhere")
    assert sessions_folder() == Path.home() / "elsewhere"
    monkeypatch.delenv(FOLDER_VARIABLE)
    assert sessions_folder().parts[-2:] == ("triforce", "sessions")


def test_a_refusal_names_the_command_that_removes_a_session_with_a_name(root: Path) -> None:
    save(session_folder("notes"), range(5))
    page_files(root / "notes")[1].unlink()
    with pytest.raises(
        SessionError, match=r"cannot be read \(No such file.*'triforce sessions rm notes', or start with"
    ):
        restore(root / "notes")


# --- lists ---


def at(path: Path, seconds: float) -> None:
    """Set the time at which a session was last updated."""
    content = (path / "manifest.json").read_bytes().split(b"\n", 1)[1]
    record = json.loads(b"{" + content) | {"updated": seconds}
    body = json.dumps(record).encode()[1:]
    (path / "manifest.json").write_bytes(b'{"checksum":"%s",\n%s' % (checksum(body).encode(), body))


def test_a_list_says_what_each_session_is_and_the_newest_is_first(root: Path) -> None:
    assert summaries(root) == []
    for name, num_tokens, seconds in (("old", 5, 1000), ("new", 9, 3000), ("middle", 0, 2000)):
        save(root / name, range(num_tokens))
        at(root / name, seconds)
    found = summaries(root)
    assert [(each.name, each.num_tokens, each.updated) for each in found] == [
        ("new", 9, 3000.0),
        ("middle", 0, 2000.0),
        ("old", 5, 1000.0),
    ]
    for each in found:
        assert (each.path, each.model_name, each.problem) == (root / each.name, "tiny", "")
        assert each.nbytes == sum(file.stat().st_size for file in each.path.iterdir())


def test_a_damaged_session_is_listed_with_what_is_wrong(root: Path) -> None:
    save(root / "whole", range(5))
    save(root / "bad", range(5))
    (root / "bad" / "manifest.json").write_bytes(b"{}")
    bad = {each.name: each for each in summaries(root)}["bad"]
    assert "it is not a session's manifest" in bad.problem
    assert bad.nbytes > 2 * IDENTITY.page_format.nbytes
    with pytest.raises(SessionError, match="it is not a session's manifest"):
        inspect(root / "bad")
    assert remove(root / "bad") == bad.nbytes
    assert [each.name for each in summaries(root)] == ["whole"]


def test_what_is_no_session_is_not_listed(root: Path) -> None:
    save(root / "chat", range(5))
    (root / "file").write_text("")
    (root / "photos").mkdir()
    (root / "photos" / "cat.jpg").write_text("")
    (root / ".hidden").mkdir()
    (root / "loop").symlink_to("loop")
    assert [each.name for each in summaries(root)] == ["chat"]
    with pytest.raises(SessionError, match="cannot be listed"):
        summaries(root / "file")


def test_listing_and_looking_lock_nobody_out_and_are_not_locked_out(root: Path) -> None:
    with Store.open(root / "chat", IDENTITY) as store:
        assert summaries(root)[0].problem == "nothing was saved yet"
        store.save(Kept(Rows(range(5))), range(5), capacity=7, extra={"a": 1}, unchanged=0)
        assert summaries(root)[0].num_tokens == 5
        manifest = inspect(root / "chat")
    assert (manifest.tokens, manifest.capacity, manifest.extra) == (tuple(range(5)), 7, {"a": 1})
    assert manifest.created == manifest.updated > 1.7e9
    for path in (root / "none", root, root / "chat" / "manifest.json"):
        with pytest.raises(SessionError, match=r"there is no session in .*'triforce sessions ls' lists"):
            inspect(path)


def test_the_catalogue_needs_no_torch() -> None:
    code = "import sys, offload.session.catalogue; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


# --- removal ---


def test_a_session_is_removed_whole(root: Path) -> None:
    save(root / "chat", range(5))
    save(root / "other", range(5))
    assert remove(root / "chat") > 2 * IDENTITY.page_format.nbytes
    assert os.listdir(root) == ["other"]
    with pytest.raises(SessionError, match="there is no session"):
        remove(root / "chat")


def test_nothing_of_others_is_removed(root: Path, tmp_path: Path) -> None:
    save(root / "chat", range(5))
    (root / "chat" / "notes.txt").write_text("mine")
    with pytest.raises(SessionError, match="holds other files than a session's"):
        remove(root / "chat")
    (root / "chat" / "notes.txt").unlink()
    (root / "chat").rename(tmp_path / "moved")
    (root / "chat").symlink_to(tmp_path / "moved")
    with pytest.raises(SessionError, match="is a link"):
        remove(root / "chat")
    assert restore(root / "chat") == saved(range(5))


def test_a_removal_that_is_broken_off_leaves_no_half_session(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(root / "chat", range(9))
    unlink, removed = os.unlink, list[str]()

    def once(name: str, **kwargs: int) -> None:
        if removed:
            raise OSError(5, "Input/output error")
        removed.append(name)
        unlink(name, **kwargs)

    monkeypatch.setattr(os, "unlink", once)
    with pytest.raises(SessionError, match=r"cannot be removed \(Input/output error\)"):
        remove(root / "chat")
    monkeypatch.setattr(os, "unlink", unlink)
    assert summaries(root)[0].problem == "nothing was saved yet"
    save(root / "chat", range(3))
    assert len(page_files(root / "chat")) == 1
    assert restore(root / "chat") == saved(range(3))


def test_who_begins_anew_while_a_session_is_removed_is_left_alone(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(root / "chat", range(5))
    rmdir = os.rmdir

    def too_late(path: Path) -> None:
        (root / "chat" / WRITER).touch()
        rmdir(path)

    monkeypatch.setattr(os, "rmdir", too_late)
    remove(root / "chat")
    assert os.listdir(root / "chat") == [WRITER]


DAY = 86400.0
FOUR = [
    Summary(Path(f"{age}"), nbytes, 1, "", 100 * DAY - age * DAY) for age, nbytes in ((1, 10), (2, 20), (3, 5), (9, 1))
]


@pytest.mark.parametrize(
    ("limits", "removed"),
    [
        ({}, []),
        ({"older_than_seconds": 9 * DAY}, []),
        ({"older_than_seconds": 9 * DAY - 1}, ["9"]),
        ({"older_than_seconds": 1.5 * DAY}, ["9", "3", "2"]),
        ({"older_than_seconds": 0.0}, ["9", "3", "2", "1"]),
        ({"keep": 4}, []),
        ({"keep": 3}, ["9"]),
        ({"keep": 0}, ["9", "3", "2", "1"]),
        ({"max_bytes": 36}, []),
        ({"max_bytes": 35}, ["9"]),
        ({"max_bytes": 29}, ["9", "3", "2"]),
        ({"max_bytes": 9}, ["9", "3", "2", "1"]),
        ({"keep": 3, "max_bytes": 34}, ["9", "3"]),
        ({"keep": 1, "older_than_seconds": 5 * DAY}, ["9", "3", "2"]),
    ],
)
def test_pruning_removes_the_oldest_until_all_limits_hold(limits: dict[str, float], removed: list[str]) -> None:
    for order in (FOUR, FOUR[::-1]):
        chosen = outdated(order, now=100 * DAY, **limits)  # type: ignore[arg-type]
        assert [session.name for session in chosen] == removed


# --- whose session ---


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return models.save(models.random_model(), tmp_path / "model", tokenizer=True)


def identity_at(folder: Path) -> Identity:
    return identify(folder, read_config(folder), dtype="bf16", capacity=100, page_tokens=512)


def test_an_identity_describes_the_model_and_is_the_same_each_time(model: Path) -> None:
    identity = identity_at(model)
    assert identity == identity_at(model)
    form = identity.page_format
    assert (form.num_layers, form.shape, form.dtype) == (2, (2, 2, 512, 8), "bf16")
    assert identity.model_name == "model"
    assert len({identity.model, identity.tokenizer, identity.rope}) == 3
    copied = shutil.copytree(model, model.parent / "copied\n")
    assert identity_at(copied) == identity
    assert identity_at(copied).model_name == "copied"


def edit_json(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def nudge(folder: Path, name: str, index: int) -> None:
    """Change one number of one tensor, at `index` from either end, or in the middle with 0.5."""
    file = folder / "model.safetensors"
    tensors = {key: value.clone() for key, value in load_file(file).items()}
    tensors[name].view(-1)[index] += 1
    save_file(tensors, file, metadata={"format": "pt"})


def swap_names(folder: Path) -> None:
    """A layer's keys and values have each other's names: the numbers of the file stay where they are."""
    file = folder / "model.safetensors"
    content, keys, values = file.read_bytes(), b"layers.1.self_attn.k_proj", b"layers.1.self_attn.v_proj"
    file.write_bytes(content.replace(keys, bytes(len(keys))).replace(values, keys).replace(bytes(len(keys)), values, 1))


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        (swap_names, ["model"]),
        (lambda folder: nudge(folder, "lm_head.weight", 0), ["model"]),
        (lambda folder: nudge(folder, "lm_head.weight", -1), ["model"]),
        (lambda folder: nudge(folder, "model.layers.1.mlp.down_proj.weight", 7), ["model"]),
        (lambda folder: nudge(folder, "model.norm.weight", 3), ["model"]),
        (lambda folder: edit_json(folder / "config.json", rms_norm_eps=1e-6), ["model"]),
        (lambda folder: edit_json(folder / "config.json", rope_theta=20000.0, rope_parameters=None), ["rope"]),
        (lambda folder: edit_json(folder / "config.json", max_position_embeddings=512, eos_token_id=3), []),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), ["tokenizer"]),
        (lambda folder: (folder / "tokenizer_config.json").write_text("{}"), []),
    ],
)
def test_what_changes_keys_and_values_changes_the_identity(
    model: Path, change: Callable[[Path], object], fields: list[str]
) -> None:
    before = identity_at(model)
    change(model)
    assert [text.split(":")[0] for text in differences(before, identity_at(model))] == fields


def test_a_digest_of_a_large_file_reads_little_of_it(tmp_path: Path) -> None:
    """Only the ends and the middle of each tensor are read; a change elsewhere may go unnoticed, as documented."""
    path, tensor = tmp_path / "model.safetensors", torch.zeros(16 * SAMPLE_BYTES)
    config = llama_shaped("llama", 8, 32, 8, 1, 4, 2, 8, 64, 1e-5)
    digests = {}
    for index in (None, 0, 8 * SAMPLE_BYTES, -1, 4 * SAMPLE_BYTES):
        changed = tensor.clone()
        if index is not None:
            changed[index] = 1.0
        save_file({"w": changed}, path)
        digests[index] = model_digest(config, [path])
    assert digests.pop(4 * SAMPLE_BYTES) == digests[None]
    assert len(set(digests.values())) == 4


def test_positions_that_depend_on_the_capacity_are_told_apart() -> None:
    plain = llama_shaped("llama", 8, 32, 8, 1, 4, 2, 8, 64, 1e-5)
    assert rope_digest(plain, 64) == rope_digest(plain, 4096)
    dynamic = plain.changed(rope=Rope(kind="dynamic", factor=2.0))
    assert rope_digest(dynamic, 64) == rope_digest(dynamic, 32) == rope_digest(plain, 64)
    assert rope_digest(dynamic, 128) != rope_digest(dynamic, 129)
    yarn = Rope(kind="yarn", factor=4.0, original_max_positions=64)
    assert rope_digest(plain.changed(rope=yarn), 64) != rope_digest(
        plain.changed(rope=replace(yarn, attention_factor=1.0)), 64
    )


@pytest.mark.parametrize(("rope", "fields"), [(models.DYNAMIC_ROPE, ["rope"]), (None, [])], ids=["dynamic", "default"])
def test_a_session_with_dynamic_rope_belongs_to_a_plans_capacity(
    tmp_path: Path, rope: dict[str, object] | None, fields: list[str]
) -> None:
    model = models.random_model(rope_parameters=rope, max_position_embeddings=256 if rope else 512)
    folder = models.save(model, tmp_path, tokenizer=True)
    plans = [models.tiny_plan(folder, None, models.Sizes(), num_prompt_tokens=n, max_tokens=10) for n in (300, 400)]
    first, second = (identity_of(folder, plan) for plan in plans)
    assert [text.split(":")[0] for text in differences(first, second)] == fields


def test_a_tokenizer_is_told_by_its_file_or_by_the_parts_of_older_ones(model: Path) -> None:
    whole = tokenizer_digest(model)
    (model / "vocab.json").write_text("{}")
    assert tokenizer_digest(model) == whole
    (model / "tokenizer.json").unlink()
    parts = tokenizer_digest(model)
    (model / "merges.txt").write_text("a b")
    both = tokenizer_digest(model)
    (model / "merges.txt").rename(model / "vocab.txt")
    assert len({whole, parts, both, tokenizer_digest(model)}) == 4
    for name in ("vocab.json", "vocab.txt"):
        (model / name).unlink()
    with pytest.raises(ModelError, match=r"holds no tokenizer, .*; tokenizer\.json is needed"):
        tokenizer_digest(model)
