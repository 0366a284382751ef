"""Engines of quantised checkpoints: whatever proposes, wherever weights and cache are, on any number of ranks and after
a session, they say what the same numbers say as a plain checkpoint, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forked import Forked, forked_ranks
from gguf_models import write_gguf
from models import GREEDY, Sizes, random_tokens
from offload.config.encodings import encoded
from offload.config.matrices import Matrix
from offload.config.model import llama_shaped
from offload.config.reading import read_config
from offload.engine.engine import Engine
from offload.engine.request import GenerationRequest
from offload.errors import ModelError, UsageError
from offload.formats.stored import StoredMatrix
from offload.plan.shards import check_divides
from offload.session.fingerprints import identity_of
from offload.session.store import Store
from offload.text import gguf_tokenizer
from offload.weights.checkpoint import Checkpoint, check_model
from offload.weights.tensors import expected_tensors
from quantised import DRAFTED, PLAIN, engine_of, level_stats, saved

GROUP = 32
MODES: dict[str, tuple[Sizes, frozenset[str]]] = {
    "draft and retrieval": (DRAFTED, frozenset()),
    "draft and retrieval, all streamed": (DRAFTED, frozenset(("kv", "weights"))),
    "cache in 4 bits": (replace(DRAFTED, budget=0, kv_bits=4, draft_gamma=0), frozenset(("kv",))),
    "lookups": (replace(DRAFTED, budget=0, draft_gamma=0, lookup=True), frozenset(("weights",))),
}
PROMPT = random_tokens(150, seed=7)
Pair = tuple[Path, Path]


def in_fp8(weight: Tensor) -> dict[str, Tensor]:
    """By blocks of GROUP x GROUP."""
    outputs, inputs = weight.shape
    blocks = weight.float().view(outputs // GROUP, GROUP, inputs // GROUP, GROUP)
    scale = blocks.abs().amax((1, 3)) / 448
    numbers = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn).view(outputs, inputs)
    return {"weight": numbers, "weight_scale_inv": scale}


def in_int4(weight: Tensor) -> dict[str, Tensor]:
    """compressed-tensors' packed integers, symmetric, in groups of GROUP inputs."""
    outputs, inputs = weight.shape
    groups = weight.float().view(outputs, inputs // GROUP, GROUP)
    scale = (groups.abs().amax(2) / 7).bfloat16()
    codes = (groups / scale.float()[..., None]).round().clamp(-8, 7).to(torch.int32).view(outputs, -1, 8) + 8
    words = (codes.long() << 4 * torch.arange(8)).sum(2)
    packed = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    return {"weight_packed": packed, "weight_scale": scale, "weight_shape": torch.tensor([outputs, inputs])}


Form = tuple[Callable[[Tensor], dict[str, Tensor]], dict[str, Any]]
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
FORMS: dict[str, Form] = {
    "fp8": (
        in_fp8,
        {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP], "modules_to_not_convert": ["lm_head", "v_proj"]},
    ),
    "int4": (
        in_int4,
        {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
        },
    ),
}  # fmt: skip


MIXED = {"v_proj": "Q6_K", "down_proj": "Q6_K", "gate_proj": "Q5_K", "embed_tokens": "Q8_0", "lm_head": "Q6_K"}
GGUF: dict[str, Callable[[str], str]] = {  # the type of a matrix
    "Q8_0": lambda name: "Q8_0",
    "Q4_K and others": lambda name: next((kind for part, kind in MIXED.items() if part in name), "Q4_K"),
    "MXFP4 and others": lambda name: "IQ4_NL" if "down_proj" in name else "MXFP4" if "layers" in name else "Q8_0",
}
ALL = (*FORMS, *GGUF)


def store(folder: Path, form: str) -> Path:
    """Quantise the matrices of its layers, fp8: but for the values', or write all as a GGUF file. -> The model."""
    if form in GGUF:
        write_gguf(folder, file := folder.with_suffix(".gguf"), kind=GGUF[form])
        return file
    encode, stored = FORMS[form]
    tensors = dict[str, Tensor]()
    for name, tensor in load_file(folder / "model.safetensors").items():
        left = any(part in name for part in ("norm", "mlp.gate.", *(["v_proj"] if form == "fp8" else [])))
        left = left or "layers" not in name or tensor.dim() < 2
        module = name.removesuffix("weight")
        tensors |= {name: tensor} if left else {module + part: each for part, each in encode(tensor).items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": stored, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def twin(folder: Path, root: Path, dtype: torch.dtype) -> Path:
    """A plain checkpoint of the numbers that `folder` means, rounded to `dtype`."""
    root.mkdir(parents=True)
    config, tensors = read_config(folder), dict[str, Tensor]()
    with Checkpoint.open(folder) as checkpoint:
        check_model(checkpoint, config)
        for name, shape in expected_tensors(config).items():
            tensors[name] = torch.empty(shape, dtype=dtype)
            checkpoint.read_into(name, tensors[name])
    save_file(tensors, root / "model.safetensors", metadata={"format": "pt"})
    source = folder.with_suffix("") if folder.is_file() else folder
    for file in source.iterdir():
        if file.name not in ("model.safetensors", "config.json"):
            (root / file.name).write_bytes(file.read_bytes())
    if folder.is_file():
        gguf_tokenizer.write(folder, root)
    config_json = json.loads((source / "config.json").read_text())
    config_json.pop("quantization_config", None)
    (root / "config.json").write_text(json.dumps(config_json))
    return root


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    @cache
    def pair(form: str) -> Pair:
        sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64} if form in GGUF else {}
        target, draft = (store(folder, form) for folder in saved(tmp_path_factory.mktemp("models"), **sizes))
        return target, draft

    return pair


@pytest.fixture(scope="module")
def twins(pairs: Callable[[str], Pair], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Pair]:
    @cache
    def pair(form: str, dtype: str) -> Pair:
        root, kind = tmp_path_factory.mktemp("twins"), {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
        target, draft = (twin(folder, root / folder.name, kind) for folder in pairs(form))
        return target, draft

    return pair


def say(engine: Engine, *, reuse: bool = False) -> list[int]:
    steps = engine.generate(GenerationRequest(PROMPT, GREEDY, max_tokens=12, reuse=reuse))
    return [token for step in steps for token in step.tokens]


@cache
def alone(pair: Pair, dtype: str = "bf16") -> list[int]:
    with engine_of(pair, PLAIN, prompt_tokens=400, dtype=dtype) as engine:
        return say(engine)


@pytest.mark.few(4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", ALL)
def test_every_mode_says_what_plain_decoding_says(pairs: Callable[[str], Pair], form: str, mode: str) -> None:
    pair, (sizes, offload) = pairs(form), MODES[mode]
    assert read_config(pair[0]).stored_in
    with engine_of(pair, sizes, prompt_tokens=400, offload=offload) as engine:
        assert any(isinstance(layer.o.weight, StoredMatrix) for layer in engine.worker.models.target.weights.layers)
        assert say(engine) == alone(pair)
        assert level_stats(engine, "target").accepted > 0 or mode == "lookups"


@pytest.mark.parametrize("form", ALL)
def test_in_fp32_plain_decoding_says_what_the_plain_numbers_say(
    pairs: Callable[[str], Pair], twins: Callable[[str, str], Pair], form: str
) -> None:
    assert alone(pairs(form), "fp32") == alone(twins(form, "fp32"), "fp32")


@pytest.mark.parametrize("form", ALL)
def test_rows_of_a_prefill_have_the_bits_of_the_plain_numbers(
    pairs: Callable[[str], Pair], twins: Callable[[str, str], Pair], form: str
) -> None:
    """Both are rounded to the dtype."""
    found = []
    for pair in (pairs(form), twins(form, "bf16")):
        with engine_of(pair, PLAIN, prompt_tokens=400) as engine:
            say(engine)
            found.append([page.clone() for page in engine.worker.full.page_of_all(0)])
    assert all(map(torch.equal, *found))


@pytest.mark.few(2)
@pytest.mark.usefixtures("forked_here")
@pytest.mark.parametrize("form", ALL)
def test_two_ranks_say_the_same(pairs: Callable[[str], Pair], twins: Callable[[str, str], Pair], form: str) -> None:
    with engine_of(pairs(form), replace(DRAFTED, draft_gamma=0), prompt_tokens=400, ranks=2, dtype="fp32") as engine:
        assert say(engine) == alone(twins(form, "fp32"), "fp32")


@pytest.fixture
def forked_here() -> Iterator[list[Forked]]:
    with forked_ranks() as started:
        yield started


def test_a_session_is_gone_on_with(
    pairs: Callable[[str], Pair], twins: Callable[[str, str], Pair], tmp_path: Path
) -> None:
    """By the same checkpoint, and by no other one."""
    pair = pairs("int4")
    with (
        engine_of(pair, DRAFTED, prompt_tokens=400) as engine,
        Store.open(tmp_path / "session", identity_of(pair[0], engine.plan)) as session,
    ):
        assert say(engine) == alone(pair)
        engine.save(session, {})
        assert identity_of(pair[0], engine.plan) != identity_of(twins("int4", "bf16")[0], engine.plan)
    with engine_of(pair, DRAFTED, prompt_tokens=400) as engine:
        with Store.open(tmp_path / "session", identity_of(pair[0], engine.plan)) as session:
            assert engine.restore(session, PROMPT) >= len(PROMPT) - 16
        assert say(engine, reuse=True) == alone(pair)


def test_ranks_cut_no_block(pairs: Callable[[str], Pair]) -> None:
    """Of 256 inputs; 512 are two of them."""
    config = read_config(pairs("Q4_K and others")[0])
    check_divides(config, 2)
    with pytest.raises(UsageError, match=r"gpus is 4, .* in blocks of 256 do not divide so; --gpus may be 1, 2$"):
        check_divides(config, 4)


@pytest.mark.parametrize("operator", ["self_attn.o_proj", "mlp.down_proj"])
def test_ranks_cut_no_block_of_either_matrix_that_they_share_by_inputs(operator: str) -> None:
    """A planted fault lived: blocks of the feed-forward network alone could be cut."""
    plain = llama_shaped("llama", 264, 256, 256, 1, num_heads=4, num_kv_heads=4, head_dim=64, max_positions=400)
    check_divides(plain, 2)
    stored = encoded(plain, lambda name: "Q4_K" if operator in name else "")
    with pytest.raises(UsageError, match=r"in blocks of 256 do not divide so; --gpus may be 1$"):
        check_divides(stored, 2)


def test_a_tied_head_is_stored_as_its_table_is() -> None:
    plain = llama_shaped("llama", 264, 256, 256, 1, num_heads=4, num_kv_heads=4, head_dim=64, max_positions=400)
    tied = encoded(replace(plain, tie_embeddings=True), lambda name: "Q4_K" if name == plain.names.embeddings else "")
    assert tied.head == tied.table == Matrix(264, 256, "Q4_K")


def test_no_second_copy_of_quantised_weights_is_made(pairs: Callable[[str], Pair]) -> None:
    sizes = replace(DRAFTED, budget=0, draft_gamma=0, weight_bits=4)
    with pytest.raises(
        UsageError, match="the model's own weights are quantised \\(INT4_BF16/32\\), and no second copy"
    ):
        engine_of(pairs("int4"), sizes, prompt_tokens=400)


@pytest.mark.parametrize("bits", [4, 6])
def test_a_head_that_is_stored_in_blocks_stays_so_beside_quantised_layers(tmp_path: Path, bits: int) -> None:
    """Such a file, with layers as plain numbers, could not be run by the CPU's kernels at all."""
    target, draft = saved(tmp_path, hidden_size=256, intermediate_size=512, head_dim=64)
    write_gguf(target, file := tmp_path / "target.gguf", kind=lambda name: "BF16" if "layers" in name else "Q8_0")
    assert (config := read_config(file)).head_encoding
    assert not config.stored_in
    sizes = replace(DRAFTED, budget=0, draft_gamma=0, weight_bits=bits)
    with engine_of((file, draft), PLAIN, prompt_tokens=400) as engine:
        expected = say(engine)
    with engine_of((file, draft), sizes, prompt_tokens=400) as engine:
        assert say(engine) == expected
        assert level_stats(engine, "target").accepted > 0
        planned, device = engine.plan.placement.device_bytes, engine.worker.memory.allocated()["device"]
        assert device["quantised weights"] == planned["quantised weights"]


@pytest.mark.parametrize(
    ("weight", "owner"),
    [("model.layers.1.mlp.down_proj.weight", "layer 1"), ("model.embed_tokens.weight", "model.embed_tokens.weight")],
)
def test_stored_weights_beyond_fp16_are_refused_in_fp16(tmp_path: Path, weight: str, owner: str) -> None:
    """As plain ones are; they were infinite."""
    target, draft = saved(tmp_path, hidden_size=256, intermediate_size=512, head_dim=64)
    tensors = load_file(target / "model.safetensors")
    tensors[weight] = tensors[weight].float() * 1e5 / tensors[weight].abs().max()
    save_file(tensors, target / "model.safetensors")
    write_gguf(target, file := tmp_path / "target.gguf", kind="Q8_0")
    engine_of((file, draft), PLAIN, prompt_tokens=400).close()
    with pytest.raises(ModelError, match=f"^{owner} has weights beyond fp16's range of 65504; try --dtype bf16"):
        engine_of((file, draft), PLAIN, prompt_tokens=400, dtype="fp16")
