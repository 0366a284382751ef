"""Checkpoints: tensors are read unchanged, and any fault in a folder is a ModelError that names it."""

from __future__ import annotations

import json
import os
import struct
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from kit.examples import at_most
from offload.config.config_json import config_of
from offload.config.model import ModelConfig
from offload.config.reading import read_config
from offload.errors import ModelError
from offload.weights import safetensors_folder
from offload.weights.checkpoint import EMBEDDINGS, HEAD, Checkpoint, check_model
from offload.weights.fp16 import all_finite
from offload.weights.gguf_file import MappedFile
from offload.weights.safetensors_folder import _DTYPES, shards_by_tensor
from offload.weights.tensors import expected_tensors

TINY = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
INDEX = "model.safetensors.index.json"


def some_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(3, 4, generator=generator),
        "b": torch.randn(5, generator=generator).bfloat16(),
        "c": torch.randn(2, 2, generator=generator).half(),
    }


def write_single(folder: Path, tensors: dict[str, Tensor] | None = None) -> Path:
    save_file(some_tensors() if tensors is None else tensors, folder / "model.safetensors")
    return folder


def write_sharded(folder: Path, weight_map: dict[str, str] | None = None) -> Path:
    tensors = some_tensors()
    save_file({"a": tensors["a"]}, folder / "one.safetensors")
    save_file({"b": tensors["b"], "c": tensors["c"]}, folder / "two.safetensors")
    default = {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map or default}))
    return folder


def write_raw(folder: Path, header: bytes, data: bytes = b"", length: int | None = None) -> Path:
    prefix = struct.pack("<Q", len(header) if length is None else length)
    (folder / "model.safetensors").write_bytes(prefix + header + data)
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        Checkpoint.open(folder)
    return str(caught.value)


@pytest.mark.parametrize("write", [write_single, write_sharded])
@pytest.mark.parametrize("piece_bytes", [1, 33, 1 << 20])
def test_every_tensor_arrives_as_it_was_saved(tmp_path: Path, write, piece_bytes: int, monkeypatch) -> None:
    monkeypatch.setattr("offload.weights.checkpoint._PIECE_BYTES", piece_bytes)
    tensors = some_tensors()
    with Checkpoint.open(write(tmp_path)) as checkpoint:
        assert checkpoint.names() == ("a", "b", "c")
        for name, tensor in tensors.items():
            assert checkpoint.shape(name) == tuple(tensor.shape)
            assert checkpoint.dtype(name) == tensor.dtype
            dst = torch.full_like(tensor, float("nan"))
            checkpoint.read_into(name, dst)
            assert torch.equal(dst, tensor)


def test_a_read_rounds_into_a_strided_view_and_touches_nothing_else(tmp_path: Path) -> None:
    tensor = some_tensors()["a"]
    with Checkpoint.open(write_single(tmp_path)) as checkpoint:
        flat = torch.full((8, 6), 7.0, dtype=torch.bfloat16)
        checkpoint.read_into("a", flat[1:7:2, 1:5])
    assert torch.equal(flat[1:7:2, 1:5], tensor.bfloat16())
    flat[1:7:2, 1:5] = 7.0
    assert (flat == 7.0).all()


def test_a_destination_of_another_shape_is_refused_even_if_it_would_broadcast(tmp_path: Path) -> None:
    with Checkpoint.open(write_single(tmp_path)) as checkpoint:
        with pytest.raises(ModelError, match=r"b has shape \[5\], \[2, 5\] is needed"):
            checkpoint.read_into("b", torch.zeros(2, 5))
        with pytest.raises(ModelError, match="no tensor z"):
            checkpoint.read_into("z", torch.zeros(1))


def test_a_closed_checkpoint_reads_nothing_and_closes_again(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_single(tmp_path))
    checkpoint.close()
    checkpoint.close()
    with pytest.raises(ModelError, match="cannot be read"):
        checkpoint.read_into("a", torch.zeros(3, 4))


def test_check_names_missing_unexpected_and_misshapen_tensors_with_counts(tmp_path: Path) -> None:
    with Checkpoint.open(write_single(tmp_path)) as checkpoint:
        checkpoint.check({"a": (3, 4), "b": (5,), "c": (2, 2)})
        expected = {"a": (4, 3), **{f"m{index}": (1,) for index in range(5)}}
        with pytest.raises(ModelError) as caught:
            checkpoint.check(expected, ignore=["c*"])
    message = str(caught.value)
    assert "5 missing (m0, m1, m2, ...)" in message
    assert "1 unexpected (b)" in message
    assert "1 of the wrong shape (a [3, 4], not [4, 3])" in message


def test_quantised_weights_are_refused_by_name_and_dtype_but_may_be_ignored(tmp_path: Path) -> None:
    write_single(tmp_path, {"w": torch.ones(2), "q": torch.ones(2, dtype=torch.int8)})
    with Checkpoint.open(tmp_path) as checkpoint:
        checkpoint.check({"w": (2,)}, ignore=["q"])
        with pytest.raises(ModelError, match="q is stored as I8"):
            checkpoint.check({"w": (2,), "q": (2,)})
        with pytest.raises(ModelError, match="q is stored as I8"):
            checkpoint.read_into("q", torch.zeros(2))


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = write_single(tmp_path) / "model.safetensors"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert "download it again" in refusal(tmp_path)


@pytest.mark.parametrize("length", [1 << 20, (1 << 24) + 1, 1 << 40, (1 << 64) - 1])
def test_a_huge_header_length_is_refused_with_value_and_limit(tmp_path: Path, length: int) -> None:
    message = refusal(write_raw(tmp_path, b"{}", length=length))
    assert f"claims {length} bytes, at most 2 are possible" in message


def test_a_header_over_the_limit_is_refused_even_if_the_file_is_that_long(tmp_path: Path) -> None:
    path = write_raw(tmp_path, b"", length=(1 << 24) + 1) / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate((1 << 24) + 100)  # sparse
    assert f"at most {1 << 24} are possible" in refusal(tmp_path)


@pytest.mark.parametrize("dtype", _DTYPES.values(), ids=_DTYPES)
def test_a_file_that_is_larger_than_memory_is_mapped_for_reading_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """As NVIDIA's of 53 GB, which the library maps for writing, too: it could not be opened with less memory."""
    bits = torch.randint(256, (3, 5, 8), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    tensors = {"odd": bits[0, 0, :3].clone(), "some": (bits & 1 if dtype == torch.bool else bits).view(dtype).clone()}
    save_file({**tensors, "one": tensors["some"][0, 0, 0].clone()}, tmp_path / "model.safetensors")

    def refusing(path: str, framework: str, **others: Any) -> Any:
        if framework == "pt":
            raise RuntimeError("unable to mmap 53366126354 bytes: Cannot allocate memory (12)")
        return safe_open(path, framework, **others)

    monkeypatch.setattr(safetensors_folder, "safe_open", refusing)
    with Checkpoint.open(tmp_path) as checkpoint:
        for name, wanted in {**tensors, "one": tensors["some"][0, 0, 0]}.items():
            entry = checkpoint._entry(name)
            assert isinstance(entry.file, MappedFile)
            found = entry.file.get_tensor(entry.stored_name)
            assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
            assert torch.equal(found.reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8))


def test_an_index_has_room_for_the_parts_of_25_000_experts(tmp_path: Path) -> None:
    """In NVFP4: 300,000 tensors in 33 MB. 16 MiB were too few."""
    experts = [
        f"model.language_model.layers.{layer}.mlp.experts.{number}" for layer in range(49) for number in range(512)
    ]
    kinds = ("weight", "weight_scale", "weight_scale_2", "input_scale")
    parts = [f"{name}_proj.{kind}" for name in ("gate", "up", "down") for kind in kinds]
    index = dict.fromkeys((f"{each}.{part}" for each in experts for part in parts), "model-00001-of-00131.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": index}))
    assert (tmp_path / INDEX).stat().st_size > 1 << 24
    assert shards_by_tensor(tmp_path / INDEX) == index
    os.truncate(tmp_path / INDEX, (1 << 26) + 1)
    with pytest.raises(ModelError, match=f"is over the limit of {1 << 26} bytes"):
        shards_by_tensor(tmp_path / INDEX)


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[]",
        b"\xff\xfe\xfd",
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,80]}}',
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}',
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}',
        b'{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,12]}}',
        b'{"a":{"dtype":"F99","shape":[3],"data_offsets":[0,12]}}',
        b'{"a":{"dtype":"F32","shape":[-3],"data_offsets":[0,12]}}',
    ],
    ids=["text", "list", "bytes", "past-end", "backwards", "overlap", "overflow", "dtype", "negative"],
)
def test_a_malformed_header_is_refused(tmp_path: Path, header: bytes) -> None:
    assert "not a whole safetensors file" in refusal(write_raw(tmp_path, header, b"0" * 12))


@pytest.mark.parametrize(
    "shard",
    ["../two.safetensors", "/etc/two.safetensors", "..", "", "sub/two.safetensors", "..\\two.safetensors",
     "C:two.safetensors", "two.safetensors\x00", "two.bin", "two.safetensors\n"],
)  # fmt: skip
def test_an_index_cannot_name_anything_but_a_plain_safetensors_name(tmp_path: Path, shard: str) -> None:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    for place in (tmp_path, folder / "sub"):  # so that only the name can be the reason
        save_file({"a": torch.ones(1)}, place / "two.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": shard}}))
    assert "must be a plain name" in refusal(folder)


def test_links_into_a_hub_cache_are_followed(tmp_path: Path) -> None:
    """Every file of a Hugging Face cache is a link to ../../blobs. It must load although it leads out of the folder."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    write_sharded(blobs)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    with Checkpoint.open(snapshot) as checkpoint:
        assert checkpoint.names() == ("a", "b", "c")


def test_shards_say_what_is_in_them_whatever_the_index_says(tmp_path: Path) -> None:
    """As in transformers. A tensor that the model needs and no shard has is missing when the model is checked."""
    write_sharded(tmp_path, {"a": "one.safetensors", "b": "one.safetensors", "ghost": "two.safetensors"})
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.names() == ("a", "b", "c")
        with pytest.raises(ModelError, match=r"1 missing \(ghost\)"):
            checkpoint.check({"a": (3, 4), "b": (5,), "c": (2, 2), "ghost": (1,)})
    write_sharded(tmp_path, {"a": "one.safetensors", "b": "three.safetensors"})
    assert "three.safetensors is missing" in refusal(tmp_path)
    write_sharded(tmp_path)
    save_file({"a": torch.ones(1), "b": torch.ones(1), "c": torch.ones(1)}, tmp_path / "two.safetensors")
    assert "is in one.safetensors as well, with other values" in refusal(tmp_path)
    save_file(some_tensors(), tmp_path / "two.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.names() == ("a", "b", "c")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}', "\x00", "[" * 10**5]
)
def test_a_malformed_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    assert INDEX in refusal(tmp_path)


def test_each_wrong_folder_gets_its_own_remedy(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "nowhere")
    assert "neither" in refusal(tmp_path)
    (tmp_path / "pytorch_model-00001-of-00002.bin").write_bytes(b"x")
    assert "convert it once" in refusal(tmp_path)
    (tmp_path / "model.safetensors").mkdir()
    assert "convert it once" in refusal(tmp_path)
    (tmp_path / "model.safetensors").rmdir()
    write_single(tmp_path)
    assert "is a file, not a folder" in refusal(tmp_path / "model.safetensors")
    write_sharded(tmp_path)
    assert "holds both" in refusal(tmp_path)


HEADER = (
    b'{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},'
    b'"b":{"dtype":"BF16","shape":[2],"data_offsets":[8,12]}}'
)


@at_most(300)
@example(flips=[(0, 0xFF)])
@example(flips=[(7, 0x80)])
@given(flips=st.lists(st.tuples(st.integers(0, len(HEADER) + 7), st.integers(1, 255)), min_size=1, max_size=4))
def test_flipped_header_bytes_give_a_model_error_or_a_readable_checkpoint(tmp_path: Path, flips) -> None:
    content = bytearray(struct.pack("<Q", len(HEADER)) + HEADER + b"0" * 12)
    for position, mask in flips:
        content[position] ^= mask
    (tmp_path / "model.safetensors").write_bytes(content)
    with suppress(ModelError), Checkpoint.open(tmp_path) as checkpoint:
        for name in checkpoint.names():
            checkpoint.read_into(name, torch.zeros(checkpoint.shape(name)))


FAMILIES = {
    "llama": LlamaConfig(**TINY),
    "llama-biases-tied": LlamaConfig(**TINY, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "mistral": MistralConfig(**TINY, sliding_window=None),
    "qwen2": Qwen2Config(**TINY),
    "qwen2-tied": Qwen2Config(**TINY, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**TINY),
    "qwen3-biases": Qwen3Config(**TINY, attention_bias=True),
}


@pytest.mark.parametrize("reference", FAMILIES.values(), ids=FAMILIES)
def test_expected_tensors_are_those_that_transformers_saves(tmp_path: Path, reference) -> None:
    AutoModelForCausalLM.from_config(reference).save_pretrained(tmp_path, max_shard_size="8KB")
    config = read_config(tmp_path)
    with Checkpoint.open(tmp_path) as checkpoint:
        check_model(checkpoint, config)
        num_elements = sum(torch.Size(checkpoint.shape(name)).numel() for name in checkpoint.names())
        assert num_elements == config.num_parameters()
        layer = [name for name in checkpoint.names() if name.startswith("model.layers.1.")]
        assert sum(torch.Size(checkpoint.shape(name)).numel() for name in layer) == config.layer_parameters()


def model_folder(folder: Path, *, tied: bool, **more: Tensor) -> tuple[Path, ModelConfig]:
    """A folder of constant weights with further tensors, by name."""
    config = config_of(LlamaConfig(**TINY, tie_word_embeddings=tied).to_dict())
    tensors = {name: torch.ones(shape) for name, shape in expected_tensors(config).items()}
    return write_single(folder, tensors | more), config


def test_an_equal_head_beside_tied_embeddings_is_ignored_and_another_refused(tmp_path: Path) -> None:
    """transformers 5 unties the two if they differ, 4 does not, so such a folder is ambiguous."""
    for head, refused in ((torch.ones(32, 16), False), (torch.zeros(32, 16), True), (torch.ones(2, 16), True)):
        folder, config = model_folder(tmp_path, tied=True, **{"lm_head.weight": head})
        with Checkpoint.open(folder) as checkpoint:
            if refused:
                with pytest.raises(ModelError, match=r"lm_head\.weight differs"):
                    check_model(checkpoint, config)
            else:
                check_model(checkpoint, config)


@pytest.mark.parametrize("tied", [True, False])
def test_what_stands_beside_body_and_head_is_no_part_of_the_model(tmp_path: Path, tied: bool) -> None:
    """Bug: a value head that a trainer had left was to be mended by another download."""
    heads = {
        "v_head.summary.weight": torch.ones(1, 16),
        "v_head.summary.bias": torch.ones(1),
        "score.weight": torch.ones(2, 16),
    }
    folder, config = model_folder(tmp_path, tied=tied, **heads)
    with Checkpoint.open(folder) as checkpoint:
        check_model(checkpoint, config)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("body", ["model.", ""])
def test_names_that_mean_the_same_are_read_under_one(tmp_path: Path, body: str, tied: bool) -> None:
    """Bug: tied embeddings that were stored as the head alone, or without "model.", were "missing"."""
    _, config = model_folder(tmp_path, tied=tied)
    tensors = {name: torch.full(shape, float(i)) for i, (name, shape) in enumerate(expected_tensors(config).items())}
    stored = {name if name == HEAD else body + name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    if tied:
        stored[HEAD] = stored.pop(EMBEDDINGS.removeprefix("model.") if not body else EMBEDDINGS)
        stored |= {"embed_tokens.weight": stored[HEAD].clone()} if not body else {}
    with Checkpoint.open(write_single(tmp_path, stored)) as checkpoint:
        check_model(checkpoint, config)
        for name, tensor in tensors.items():
            read = torch.empty(tensor.shape)
            checkpoint.read_into(name, read)
            assert torch.equal(read, tensor), name


def test_each_misfit_has_its_own_remedy(tmp_path: Path) -> None:
    folder, config = model_folder(tmp_path, tied=True)
    untied = replace(config, tie_embeddings=False)
    for wrong, said in (
        (untied, "set tie_word_embeddings to true"),
        (config.changed(num_layers=3), "another model's"),
        (config.changed(num_layers=1), "parts that this program does not know"),
    ):
        with Checkpoint.open(folder) as checkpoint, pytest.raises(ModelError, match=said):
            check_model(checkpoint, wrong)


def test_tensors_of_64_bits_are_rounded_to_what_is_wanted(tmp_path: Path) -> None:
    tensor = torch.tensor([1 / 3, 1e-3], dtype=torch.float64)
    with Checkpoint.open(write_single(tmp_path, {"a": tensor})) as checkpoint:
        checkpoint.check({"a": (2,)})
        read = torch.empty(2, dtype=torch.bfloat16)
        checkpoint.read_into("a", read)
    assert torch.equal(read, tensor.bfloat16())


def test_stored_rotary_frequencies_are_ignored_and_a_foreign_tensor_is_not(tmp_path: Path) -> None:
    rotary = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    folder, config = model_folder(tmp_path, tied=False, **rotary)
    with Checkpoint.open(folder) as checkpoint:
        check_model(checkpoint, config)
    folder, config = model_folder(tmp_path, tied=False, **{"model.layers.0.self_attn.q_norm.weight": torch.ones(8)})
    with Checkpoint.open(folder) as checkpoint, pytest.raises(ModelError, match="1 unexpected"):
        check_model(checkpoint, config)


class MostBytes(TorchDispatchMode):
    """The bytes of the largest result of any operator."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        results = function(*args, **(kwargs or {}))
        sizes = [found.nbytes for found in tree_leaves(results) if isinstance(found, Tensor)]
        self.num_bytes = max([self.num_bytes, *sizes])
        return results


@pytest.mark.parametrize("value", [1.0, 65504.0, float("inf"), -float("inf"), float("nan")])
def test_weights_are_checked_to_be_finite_without_temporaries(value: float) -> None:
    """Those of a layer of 13B took 2 GB, and were not in the plan."""
    weight = torch.full((300, 200), -0.5, dtype=torch.float16)
    weight[299, 7] = value
    with MostBytes() as most:
        assert all_finite(weight) == (abs(value) <= 65504.0)
    assert most.num_bytes <= 2
