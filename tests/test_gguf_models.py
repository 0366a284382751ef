"""A GGUF file means what the folder means that llama.cpp's converter made it of: config, tensors, logits, texts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from kit.families import GEMMA4_ROPES, SEEING, TEMPERED, TINY, save_tiny
from kit.gguf_models import ARCHITECTURES, architecture_of, write_gguf
from kit.models import (
    TOKENIZER_SIZE,
    Sizes,
    load,
    perturbed,
    random_model,
    random_tokens,
    save,
    target_cache,
    tiny_plan,
)
from offload.config.block import Block, Encodings
from offload.config.families.common import with_rope
from offload.config.gguf_architectures import ARCHITECTURES as KNOWN
from offload.config.gguf_header import read_header
from offload.config.mixers import Attention, DeltaRule, Mixer
from offload.config.model import ModelConfig
from offload.config.names import ExpertNames, IndexNames, NextTokenNames, RecurrenceNames, TensorNames
from offload.config.norm import Norm
from offload.config.reading import read_config
from offload.errors import ModelError
from offload.kernels.rope import inverse_frequencies
from offload.session.fingerprints import identity_of
from offload.session.identity import Identity
from offload.weights.checkpoint import Checkpoint, check_model
from test_parity import in_prefill

SIZES = Sizes(capacity=61, rows=4, prefill_block=7, page=8, pages=2)

# Not said in a file, and so not read of one: a window of Mistral's, Qwen's and SmolLM3's that llama.cpp has not, layers
# with a window in an order of their own, a scale that follows from no size, Solar Open's own name.
UNSAID = (
    "mistral, a window", "qwen2, windows", "qwen3, windows named", "smollm3, windows", "smollm3, listed",
    "cohere2, other windows", "gemma2, without caps", "starcoder2, a window", "ministral3, a window",
    "gemma, biased and untied", "hunyuan, stretched", "cohere, biased and untied", "qwen3_moe, some dense",
    "qwen3_next, not renormalised",
    "ernie4_5_moe, some dense", "hunyuan_v1_moe, stretched", "exaone_moe, groups", "olmoe, renormalised",
    "qwen2_moe, some dense", "solar_open", "solar_open, groups", "lfm2, biased", "lfm2_moe, without biases",
    "glm4_moe_lite, biased", "kimi_linear, groups",
    "afmoe, named", "cohere2_moe, of a softmax",
)  # fmt: skip
SCALED: dict[str, dict[str, object]] = {
    name: {"query_pre_attn_scalar": 8} for name in ("gemma2", "gemma3")
}  # as llama.cpp's, by the heads' size
SCALED["deepseek_v2, groups"] = {"attention_bias": False, "rope_parameters": TEMPERED}
SCALED["kimi_linear"] = {"linear_num_heads": 4}  # as many as an attention has, which a file says alone
SCALED["laguna"] = {"moe_router_logit_softcapping": 0.0}  # which a file does not say
SCALED["qwen2_5_vl"] = {"use_sliding_window": False}
SCALED["qwen3_omni_moe"] = {"mlp_only_layers": []}
SCALED["gpt_oss, top 1"] = {"sliding_window": 256}  # that no context exceeds: a file has windows in each other layer
SCALED |= {name: {"rope_parameters": GEMMA4_ROPES} for name, tiny in TINY.items() if "gemma4" in tiny.family}
GRANITE = "granitemoehybrid, attention alone"
NAMES = [
    name
    for name, tiny in TINY.items()
    if tiny.family in ARCHITECTURES and (not tiny.wrapped or tiny.wrapped in SEEING) and name not in UNSAID
]


def plain(config: ModelConfig) -> ModelConfig:
    """Without what a file has otherwise than a folder: neighbours, norms' 1, dtype, the order of value heads."""

    def plain_norm(found: Norm) -> Norm:
        return replace(found, plus_one=False, fp32=False)

    def norm(found: Norm | None) -> Norm | None:
        return found and plain_norm(found)

    def block(found: Block) -> Block:
        mixer: Mixer = found.mixer
        if isinstance(mixer, Attention):
            indexer = mixer.indexer and replace(mixer.indexer, norm=plain_norm(mixer.indexer.norm))
            mixer = replace(mixer, qk_norm=norm(mixer.qk_norm), indexer=indexer)
        elif isinstance(mixer, DeltaRule):
            mixer = replace(mixer, norm=replace(mixer.norm, fp32=False), tiled=None)
        names = ("before_attention", "after_attention", "before_feed_forward", "after_feed_forward")
        norms = {name: norm(getattr(found, name)) for name in names}
        streams = found.streams and replace(found.streams, norm=plain_norm(found.streams.norm))
        grams = found.ngrams and replace(found.ngrams, norm=plain_norm(found.ngrams.norm), parts=1)
        both = {"streams": streams, "ngrams": grams}
        return replace(found, mixer=mixer, encodings=Encodings(), factors=(), **both, **norms)

    config = with_rope(config, neighbours=False).mapped(block)
    if config.family == "falcon_h1":  # a file has its multipliers in the weights
        config = replace(config, embedding_scale=1.0, logits_scale=1.0)
    return replace(
        config,
        names=replace(
            config.names,
            body="",
            head="",
            **dict.fromkeys(("fused_gate_up", "up", "down"), "") if config.family.startswith("granite") else {},
            recurrence=RecurrenceNames(),
            experts=ExpertNames(),
            next_token=NextTokenNames(),
            index=IndexNames(),
            unused=(),
            k_b=TensorNames.k_b,
            v_b=TensorNames.v_b,
        ),
        wrapper="",
        norm=plain_norm(config.norm),
        dtype="",
        table_encoding="",
        head_encoding="",
        bos_token_id=None,
        eos_token_ids=(),
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root, made = tmp_path_factory.mktemp("gguf"), dict[str, Path]()

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = root / str(len(made))
            if name in TINY:
                save_tiny(name, made[name], **SCALED.get(name, {}))
            else:
                save(random_model(name), made[name])
            write_gguf(made[name], made[name].with_suffix(".gguf"))
        return made[name]

    return folder


def test_every_architecture_has_a_model_here() -> None:
    found = {architecture_of(TINY[name].config()) for name in NAMES}
    assert found | {"llama", "qwen2", "qwen3"} == set(KNOWN)


@pytest.mark.parametrize("name", [*NAMES, "llama-gqa", "llama-tied", "llama-biased", "mistral", "qwen2", "qwen3-tied"])
def test_config_and_logits_are_the_folders(folders: Callable[[str], Path], name: str) -> None:
    folder = folders(name)
    file, config = folder.with_suffix(".gguf"), read_config(folder)
    found = read_config(file)
    ours, theirs = plain(found), plain(config)
    if name in (
        "glm4_moe_lite",
        "mistral",
        "gemma4_unified",
        "qwen2_5_vl",
        "qwen3_omni_moe",
        "glm4v",
        "glm4v_moe",
        GRANITE,
    ):
        ours = replace(ours, family=theirs.family)
    assert ours == theirs
    with Checkpoint.open(file) as checkpoint:
        check_model(checkpoint, found)
    tokens = random_tokens(40)
    decoders = [load(path) for path in (folder, file)]
    logits = [in_prefill(each, target_cache(each, SIZES), tokens, SIZES.prefill_block) for each in decoders]
    torch.testing.assert_close(*logits, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.3},
        {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192, "low_freq_factor": 1.0,
         "high_freq_factor": 4.0},
        {"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0,
         "high_freq_factor": 2.0},
    ],
    ids=["linear", "yarn", "yarn with its own factor", "llama3", "llama3 of other numbers"],
)  # fmt: skip
def test_scaled_positions_are_the_folders(tmp_path: Path, rope: dict[str, object]) -> None:
    """Factors that are not those of llama3's own numbers are read one by one."""
    folder = save(random_model(head_dim=32, rope_parameters={**rope, "rope_theta": 10000.0}), tmp_path)
    write_gguf(folder, tmp_path / "model.gguf")
    ours, theirs = plain(read_config(tmp_path / "model.gguf")), plain(read_config(folder))
    for capacity in (200, 500):
        found, expected = (inverse_frequencies(config, capacity) for config in (ours, theirs))
        assert found[1] == expected[1]
        torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=0)
    if rope.get("high_freq_factor") != 2.0:
        assert ours == theirs


def test_an_architecture_that_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(save(random_model(), tmp_path), path)
    path.write_bytes(path.read_bytes().replace(b"llama", b"lamma"))
    with pytest.raises(ModelError, match=r"its architecture is 'lamma', known are afmoe, .*starcoder2"):
        read_config(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda writer: writer.add_expert_count(8), "llama.expert_count is 8; it must be absent or 0"),
        (lambda writer: writer.add_sliding_window(8), "llama.attention.sliding_window is 8"),
        (lambda writer: writer.add_value_length(16), "llama.attention.value_length is 16; .* attention.key_length, 8"),
        (lambda writer: writer.add_head_count([4, 2]), "llama.attention.head_count is .*the same in all layers"),
        (lambda writer: writer.add_tensor("rope_freqs.weight", np.array([1, 2], np.float32)), "has 2 numbers beside"),
        (lambda writer: writer.add_rope_scaling_factor(-1.0), "llama.rope.scaling.factor is -1.0"),
    ],
)
def test_what_changes_the_arithmetic_and_is_not_known_is_refused(tmp_path: Path, change, said: str) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(save(random_model(), tmp_path), path, tokenizer="", change=change)
    with pytest.raises(ModelError, match=said):
        read_config(path)


def test_a_tensor_that_the_model_has_not_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"

    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.1.attn_sinks.weight", np.ones(4, np.float32))

    write_gguf(save(random_model(), tmp_path), path, change=change)
    with (
        Checkpoint.open(path) as checkpoint,
        pytest.raises(ModelError, match=r"1 unexpected \(model.layers.1.self_attn.sinks\)"),
    ):
        check_model(checkpoint, read_config(path))
    write_gguf(save(random_model(), tmp_path), path, without="1.mlp.up_proj")
    with (
        Checkpoint.open(path) as checkpoint,
        pytest.raises(ModelError, match=r"1 missing \(model.layers.1.mlp.up_proj"),
    ):
        check_model(checkpoint, read_config(path))


@pytest.mark.parametrize(
    ("extra", "without", "said"),
    [
        ("blk.1.attn_other.weight", "nothing", "attn_other.weight); the model has parts that this program does not"),
        ("", "1.self_attn.o_proj", "1 missing (model.layers.1.self_attn.o_proj.weight); download it again"),
    ],
)
def test_tensors_that_do_not_fit_are_told_without_a_config_json(
    tmp_path: Path, extra: str, without: str, said: str
) -> None:
    """It was to be fetched together with the weights."""

    def change(writer: gguf.GGUFWriter) -> None:
        if extra:
            writer.add_tensor(extra, np.ones(4, np.float32))

    write_gguf(save(random_model(), tmp_path), path := tmp_path / "model.gguf", change=change, without=without)
    with Checkpoint.open(path) as checkpoint, pytest.raises(ModelError, match="the file's metadata: 1 ") as error:
        check_model(checkpoint, read_config(path))
    assert said in str(error.value)
    assert "config.json" not in str(error.value)


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """Folders and files of a target and a draft in fp16, a token for each byte."""
    for name, noise in (("target", 0.0), ("draft", 0.1)):
        model = random_model(vocab_size=TOKENIZER_SIZE, max_position_embeddings=256)
        model = (perturbed(model, noise) if noise else model).half().float()
        write_gguf(save(model, tmp_path / name, tokenizer=True), tmp_path / f"{name}.gguf", kind="F16")
    return tmp_path


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_a_file_says_what_its_folder_says(triforce, pair: Path, temperature: str) -> None:
    (pair / "prompt.txt").write_text("zig zag zig")
    texts = []
    for suffix in ("", ".gguf"):
        models = ("--model", str(pair / f"target{suffix}"), "--draft", str(pair / f"draft{suffix}"))
        fixed = ("--prompt-file", str(pair / "prompt.txt"), "--max-tokens", "30", "--dtype", "fp32", "--seed", "1")
        code, out, err = triforce("generate", *models, *fixed, "--temperature", temperature, "--json")
        assert code == 0, err
        texts.append(json.loads(out)["tokens"])
    assert texts[0] == texts[1]
    assert len(texts[0]) > 2


def test_a_session_is_of_its_model_and_tokenizer_and_not_of_the_files_name(pair: Path) -> None:
    target, draft = pair / "target.gguf", pair / "draft.gguf"

    def identity(path: Path) -> Identity:
        return identity_of(path, tiny_plan(path, None, Sizes(), num_prompt_tokens=20, max_tokens=10))

    same, other = pair / "same.gguf", identity(draft)
    same.symlink_to(target)
    assert replace(identity(same), model_name="") == replace(identity(target), model_name="")
    assert (identity(same).model_name, identity(target).model_name) == ("same.gguf", "target.gguf")
    assert (identity(target).tokenizer, identity(target).rope) == (other.tokenizer, other.rope)
    assert identity(target).model != other.model
    target.write_bytes(target.read_bytes().replace(b"</s>", b"</t>"))
    assert identity(target).model == identity(same).model
    assert identity(target).tokenizer != other.tokenizer


def test_a_plan_reads_the_header_alone(triforce, pair: Path) -> None:
    path = pair / "target.gguf"
    end = max(each.start + each.nbytes for each in read_header(path).tensors.values())
    first = min(each.start for each in read_header(path).tensors.values())
    data = path.read_bytes()
    path.write_bytes(data[:first])
    with path.open("r+b") as file:
        file.truncate(end)
    code, out, err = triforce("plan", "--model", str(path), "--max-tokens", "10", "--json")
    assert (code, err, json.loads(out)["model"]) == (0, "", str(path))
