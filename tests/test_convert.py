"""`triforce convert`: the same bits in another file, and no output folder after an error."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import shutil
import stat
import struct
from collections import namedtuple
from pathlib import Path

import gguf
import pytest
import torch
from safetensors import safe_open
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM

from kit.models import Sizes, Stack, load, random_model, random_tokens, save
from kit.programs import run
from offload.errors import ModelError
from offload.hub import pickles
from offload.hub.library import Origin, locate
from offload.hub.names import FOLDER_VARIABLE
from offload.hub.pickles import convert_shard, source_of
from offload.text.tokenizer import Tokenizer
from offload.units import size

Usage = namedtuple("Usage", "total used free")
HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "models"))
    return tmp_path / "models"


def old_folder(
    folder: Path, family: str = "llama-gqa", *, num_shards: int = 1, dtype: torch.dtype = torch.float32
) -> Path:
    """A model with its weights pickled, in `dtype`, and its config and tokenizer."""
    model = random_model(family).to(dtype)
    save(model, folder, tokenizer=True)
    (folder / "model.safetensors").unlink()
    state = model.state_dict()
    if num_shards == 1:
        torch.save(state, folder / "pytorch_model.bin")
        return folder
    weight_map = {}
    for number in range(num_shards):
        part = dict(list(state.items())[number::num_shards])
        name = f"pytorch_model-{number + 1:05d}-of-{num_shards:05d}.bin"
        torch.save(part, folder / name)
        weight_map.update(dict.fromkeys(part, name))
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def read(path: Path) -> dict[str, Tensor]:
    with safe_open(str(path), framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def bits(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


# --- folders ---


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_converted_model_has_the_same_bits(triforce, root, tmp_path, num_shards, dtype):
    source = old_folder(tmp_path / "old-model", num_shards=num_shards, dtype=dtype)
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    code, out, err = triforce("convert", str(source))
    folder = root / "local/old-model"
    assert (code, out) == (0, f"{folder}\n")
    assert err.endswith("next: triforce generate --model local/old-model --prompt-file FILE\n")
    found = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in read(path).items()}
    state = random_model().to(dtype).state_dict()
    assert {name: bits(tensor) for name, tensor in found.items()} == {name: bits(t) for name, t in state.items()}
    assert len(list(folder.glob("*.safetensors"))) == num_shards
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == ["old-model"]
    assert locate("local/old-model") == folder
    assert Origin.read(folder).source == str(source)


def test_who_may_read_the_old_files_may_read_the_new_ones(triforce, root, tmp_path):
    """Bug: only their owner could read weights and triforce.json, so a model in a shared folder was of no use."""
    source = old_folder(tmp_path / "old", num_shards=2)
    for path in source.iterdir():
        path.chmod(0o644)
    before = os.umask(0o022)
    try:
        assert triforce("convert", str(source))[0] == 0
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (root / "local/old").iterdir()}
    assert modes == dict.fromkeys(modes, 0o644)
    assert {"model.safetensors.index.json", "triforce.json"} < set(modes)


@pytest.mark.parametrize("family", ["llama-tied", "qwen2-tied", "llama-biased"])
def test_a_converted_model_computes_the_same(triforce, root, tmp_path, family):
    source = old_folder(tmp_path / "old", family, num_shards=2)
    assert triforce("convert", str(source), "--output", str(tmp_path / "new"))[0] == 0
    save(random_model(family), tmp_path / "same")
    tokens = random_tokens(20)
    ours, same = (Stack(load(tmp_path / name), Sizes()).generate(tokens, 5) for name in ("new", "same"))
    assert (ours.tokens, torch.equal(torch.cat(ours.logits), torch.cat(same.logits))) == (same.tokens, True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    with torch.no_grad():
        logits = [model(torch.tensor([tokens])).logits for model in (theirs, random_model(family))]
    assert torch.equal(*logits)


def test_a_generation_from_a_converted_model_runs(triforce, tmp_path):
    source = old_folder(tmp_path / "old")
    triforce("convert", str(source))
    config = json.loads((source / "config.json").read_text())
    assert config["vocab_size"] < 258  # the byte tokenizer's ids would be too large
    code, _, err = triforce("plan", "--model", "local/old", "--max-tokens", "10")
    assert (code, err) == (0, "")


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "pytorch_model-00002-of-00002.bin").unlink(), "-00002-of-00002.bin is missing"),
        (
            lambda folder: (folder / "pytorch_model-00002-of-00002.bin").write_bytes(b"x" * 99),
            "more than tensors, or is damaged",
        ),
        (lambda folder: (folder / "pytorch_model.bin.index.json").unlink(), "holds no weights"),
        (
            lambda folder: (folder / "pytorch_model.bin.index.json").write_text("{}"),
            "weight_map is missing; it must be an object of file names",
        ),
        (lambda folder: save(random_model(), folder), "holds safetensors and needs no conversion"),
        (
            lambda folder: torch.save({EMBEDDINGS: torch.ones(3, 5)}, folder / "pytorch_model-00001-of-00002.bin"),
            "the tensors do not fit config.json",
        ),
    ],
)
def test_what_cannot_be_converted_leaves_nothing(triforce, root, tmp_path, break_it, said):
    source = old_folder(tmp_path / "old", num_shards=2)
    break_it(source)
    code, _, err = triforce("convert", str(source))
    assert (code, said in err) == (4, True)
    assert not list(root.rglob("old*"))


@pytest.mark.parametrize("shard", ["../outside.bin", "/tmp/outside.bin", "a/b.bin", "x.safetensors"])
def test_an_index_leads_nowhere_else(triforce, tmp_path, shard):
    source = old_folder(tmp_path / "old", num_shards=2)
    torch.save({}, tmp_path / "outside.bin")
    (source / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    code, _, err = triforce("convert", str(source))
    assert (code, f"shard {shard!r} must be a plain name" in err) == (4, True)


def test_nothing_is_overwritten(triforce, tmp_path):
    source = old_folder(tmp_path / "old")
    (tmp_path / "new").mkdir()
    code, _, err = triforce("convert", str(source), "--output", str(tmp_path / "new"))
    assert (code, f"{tmp_path / 'new'} exists" in err) == (2, True)
    assert not list((tmp_path / "new").iterdir())


def test_what_an_earlier_try_left_is_replaced(triforce, root, tmp_path):
    source = old_folder(tmp_path / "old")
    (root / "local/.old.part").mkdir(parents=True)
    (root / "local/.old.part/model-00001-of-00009.safetensors").write_bytes(b"x")
    assert triforce("convert", str(source))[0] == 0
    assert not list(root.rglob("*00009*"))


def test_too_small_a_disk_is_refused_beforehand(triforce, root, tmp_path, monkeypatch):
    source = old_folder(tmp_path / "old")
    needed = (source / "pytorch_model.bin").stat().st_size
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1, 1, needed - 1))
    code, _, err = triforce("convert", str(source))
    assert (code, f"{size(needed)} are needed" in err) == (3, True)
    assert not list(root.rglob("old*"))


def test_a_disk_that_fills_up_leaves_nothing(triforce, root, tmp_path, monkeypatch):
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("offload.hub.convert.shutil.copyfile", full)
    code, _, err = triforce("convert", str(old_folder(tmp_path / "old")))
    assert (code, "is full; make room, then run 'triforce convert" in err) == (3, True)
    assert not list(root.rglob("*old*"))


# --- shards ---


def converted(state: object, tmp_path: Path, *, tied: bool = False, **save_settings: bool) -> dict[str, Tensor]:
    torch.save(state, tmp_path / "shard.bin", **save_settings)
    convert_shard(tmp_path / "shard.bin", tmp_path / "shard.safetensors", source="abc", tied=tied)
    return read(tmp_path / "shard.safetensors")


@pytest.mark.parametrize("new_format", [True, False])
def test_views_and_shared_memory_become_tensors_of_their_own(tmp_path, new_format):
    whole = torch.arange(24.0).reshape(4, 6)
    state = {"whole": whole, "again": whole, "turned": whole.T, "part": whole[1:3, 2:], "none": torch.empty(0, 3)}
    found = converted(state, tmp_path, _use_new_zipfile_serialization=new_format)
    assert {name: bits(tensor) for name, tensor in found.items()} == {name: bits(t) for name, t in state.items()}
    assert source_of(tmp_path / "shard.safetensors") == "abc"


def test_a_tied_head_is_left_out_where_config_says_tied_and_only_there(tmp_path):
    weight = torch.randn(4, 3)
    state = {EMBEDDINGS: weight, HEAD: weight}
    assert set(converted(state, tmp_path, tied=True)) == {EMBEDDINGS}
    assert set(converted(state, tmp_path, tied=False)) == {EMBEDDINGS, HEAD}
    assert set(converted({EMBEDDINGS: weight, HEAD: weight.clone()}, tmp_path, tied=True)) == {EMBEDDINGS, HEAD}


def test_what_computes_nothing_is_left_out(tmp_path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    assert set(converted({"a": torch.ones(2), name: torch.ones(2)}, tmp_path)) == {"a"}


@pytest.mark.parametrize("state", [[torch.ones(2)], {"model": {"a": torch.ones(2)}}, {"a": 1}, torch.ones(2)])
def test_only_tensors_by_name_are_converted(state, tmp_path):
    with pytest.raises(ModelError, match="does not hold tensors by name"):
        converted(state, tmp_path)


def test_a_file_that_was_written_wrong_is_found_out_and_not_kept(tmp_path, monkeypatch):
    real = pickles.save_file

    def wrong(tensors, path, metadata):
        real({name: tensor + 1 for name, tensor in tensors.items()}, path, metadata)

    monkeypatch.setattr(pickles, "save_file", wrong)
    with pytest.raises(ModelError, match="a was not written correctly"):
        converted({"a": torch.ones(2)}, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["shard.bin"]


def test_a_negative_zero_is_not_a_zero(tmp_path):
    assert (
        bits(converted({"a": torch.tensor([-0.0, float("nan")])}, tmp_path)["a"])[2]
        == bits(torch.tensor([-0.0, float("nan")]))[2]
    )


# --- GGUF ---


def write_gguf(path: Path, *, without: str = "nothing", pre: str = "", spaced: bool = True) -> dict[str, Tensor]:
    """A tiny Llama with byte tokens in fp16. Returns its weights under transformers' names. pre: byte-level tokens that
    are cut so, else SentencePiece's, with a space before a text or without."""
    state = {name: tensor.half().float() for name, tensor in random_model(vocab_size=258).state_dict().items()}
    writer = gguf.GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_context_length, 256), (writer.add_embedding_length, 32), (writer.add_block_count, 2),
        (writer.add_feed_forward_length, 48), (writer.add_head_count, 4), (writer.add_head_count_kv, 2),
        (writer.add_layer_norm_rms_eps, 1e-5), (writer.add_rope_dimension_count, 8), (writer.add_vocab_size, 258),
        (writer.add_rope_freq_base, 10000.0),
    ):  # fmt: skip
        add(value)
    if pre:
        tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges([])
    else:
        tokens = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([0.0] * len(tokens))
        writer.add_add_space_prefix(spaced)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, *[1 if pre else 6] * 256])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, tensor in state.items():
        if without in name:
            continue
        stored = interleaved(tensor, 4 if "q_proj" in name else 2) if "q_proj" in name or "k_proj" in name else tensor
        dtype = stored.half() if stored.dim() == 2 else stored
        writer.add_tensor(names.get_name(name, (".weight",)), dtype.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return state


def interleaved(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of a query or key matrix in GGUF's order for Llama."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, 2, rows // num_heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def test_a_gguf_file_becomes_a_folder_with_the_same_weights(triforce, root, tmp_path):
    state = write_gguf(tmp_path / "tiny.gguf")
    done = run(["convert", str(tmp_path / "tiny.gguf")], env=os.environ)
    assert (done.returncode, done.stdout) == (0, f"{root / 'local/tiny'}\n")
    assert done.stderr == "next: triforce generate --model local/tiny --prompt-file FILE\n"  # and no bars
    found = read(root / "local/tiny/model.safetensors")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name].float(), tensor) for name, tensor in state.items())
    assert triforce("convert", str(tmp_path), "--output", str(tmp_path / "out"))[0] == 0


def test_a_gguf_file_with_byte_level_tokens_keeps_their_ids_and_its_cuts(triforce, root, tmp_path):
    write_gguf(tmp_path / "tiny.gguf", pre="smollm")
    assert triforce("convert", str(tmp_path / "tiny.gguf"))[0] == 0
    tokenizer = Tokenizer.from_folder(root / "local/tiny")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    assert tokenizer.encode("a 1</s>") == [*(2 + letters.index(letter) for letter in ("a", "Ġ", "1")), 1]
    assert (tokenizer.eos_token_id, tokenizer.start_tokens()) == (1, [])


def test_a_gguf_file_with_unknown_cuts_is_refused_by_their_name(triforce, root, tmp_path):
    write_gguf(tmp_path / "tiny.gguf", pre="falcon")
    code, _, err = triforce("convert", str(tmp_path / "tiny.gguf"))
    assert (code, f"{tmp_path / 'tiny.gguf'}: its tokenizer cuts text as 'falcon'" in err) == (4, True)
    assert not list(root.rglob("*tiny*"))


@pytest.mark.parametrize("spaced", [True, False])
def test_a_text_of_a_gguf_file_has_a_space_before_it_where_the_file_says_so(triforce, root, tmp_path, spaced):
    write_gguf(tmp_path / "tiny.gguf", spaced=spaced)
    assert triforce("convert", str(tmp_path / "tiny.gguf"))[0] == 0
    tokenizer = Tokenizer.from_folder(root / "local/tiny")
    space = [2 + byte for byte in "\u2581".encode()] if spaced else []
    assert tokenizer.encode("a") == [0, *space, 2 + ord("a")]


def test_a_gguf_file_without_some_weights_is_refused_and_none_are_made_up(triforce, root, tmp_path):
    write_gguf(tmp_path / "tiny.gguf", without="1.mlp.up_proj")
    code, _, err = triforce("convert", str(tmp_path / "tiny.gguf"))
    assert (code, "lacks 1 weights of its model (model.layers.1.mlp.up_proj.weight" in err) == (4, True)
    assert not list(root.rglob("*tiny*"))


def test_gguf_without_its_packages_says_what_to_install(triforce, root, tmp_path, monkeypatch):
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else find(name))
    code, _, err = triforce("convert", str(tmp_path / "tiny.gguf"))
    assert (code, "needs gguf: pip install gguf" in err) == (4, True)
    assert not list(root.rglob("tiny*"))


def test_a_damaged_gguf_file_is_refused(triforce, tmp_path):
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF" + bytes(20))
    code, _, err = triforce("convert", str(tmp_path / "tiny.gguf"))
    assert (code, "is not a whole GGUF file" in err) == (4, True)


@pytest.mark.parametrize("count", [1 << 63, (1 << 64) - 1, 1 << 61])
def test_a_gguf_file_with_an_endless_list_is_refused_at_once(triforce, tmp_path, count):
    """In 43 bytes: gguf's own reader makes a list of 2**63 values of it, and never ends (llama.cpp issue 27188)."""
    data = b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 0, count)
    (tmp_path / "tiny.gguf").write_bytes(data)
    code, _, err = triforce("convert", str(tmp_path / "tiny.gguf"))
    assert (code, f"a, a list of {count} values, would end at byte" in err) == (4, True)


def test_a_gguf_file_that_needs_more_memory_than_there_is_is_refused(triforce, tmp_path, monkeypatch):
    write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr("offload.hub.gguf.free_host_bytes", lambda: 1000)
    code, _, err = triforce("convert", str(tmp_path / "tiny.gguf"))
    assert (code, "unpacking tiny.gguf takes" in err) == (3, True)


def test_several_gguf_files_are_not_chosen_from(triforce, tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    code, _, err = triforce("convert", str(tmp_path), "--output", str(tmp_path / "out"))
    assert (code, "holds 2 GGUF files; give one of them" in err) == (4, True)


@pytest.mark.parametrize("args", [("~nobody-at-all/x",), ("x", "--output", "~nobody-at-all/x")])
def test_the_home_of_nobody_is_no_folder(triforce, args):
    code, out, err = triforce("convert", *args)
    assert (code, out) == (2, "")
    assert "~nobody-at-all/x: there is no such home folder" in err
