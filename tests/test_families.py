"""Families of models that are no Llamas: their logits and texts are transformers', and every part of a description
counts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from kit.contract import CONTEXT, DRAFTED, GROWN, MODES, NUM_NEW, PROMPT, Pair, alone, fields_of, say
from kit.families import LONGROPE, PARTIAL, SEEING, TINY, random_tiny, save_tiny
from kit.models import (
    CPU,
    EOS,
    GREEDY,
    TOKENIZER_SIZE,
    LateLink,
    Sizes,
    byte_tokenizer,
    load,
    random_tokens,
    resident_rows,
    target_cache,
)
from kit.processor import OPERATORS, of
from kit.quantised import engine_of
from kit.stored_models import store
from offload.config.block import BLOCK_NORMS, Block
from offload.config.config_json import config_of
from offload.config.encodings import matrices
from offload.config.families import FAMILIES, WRAPPERS
from offload.config.gguf_forms import FORMS, in_form
from offload.config.mixers import Attention, DeltaRule, Mamba2, Mixer, NoMixer, Recurrence, ShortConvolution
from offload.config.model import ModelConfig
from offload.config.networks import Experts, FeedForward
from offload.config.norm import Norm
from offload.config.reading import read_config
from offload.config.rope import Rope
from offload.engine.request import GenerationRequest
from offload.errors import ModelError, UsageError
from offload.kernels import choice, cpu
from offload.plan.composition import PLAIN
from offload.plan.fixed_bytes import fixed_bytes
from offload.plan.model_key import key_of
from offload.plan.planner import Options
from offload.plan.request import Request
from offload.plan.shards import check_divides
from offload.plan.sizing import Sizing
from offload.session.fingerprints import identity_of, model_digest
from offload.session.store import Store
from offload.weights.tensors import expected_tensors
from test_parity import assert_same_logits, in_decoding, in_prefill

LENGTH = 45
SIZES = Sizes(capacity=LENGTH, rows=4, prefill_block=7, page=8, pages=2)
IN_ONE_BLOCK = replace(SIZES, prefill_block=LENGTH)
TOLERANCE = 1e-4
FIRST = {tiny.family: name for name, tiny in reversed(TINY.items())}  # a model of each family
MIXTURES = (
    *("minimax_m2", "ernie4_5_moe", "hunyuan_v1_moe", "exaone_moe", "solar_open", "olmoe", "qwen2_moe", "afmoe"),
    *("laguna", "cohere2_moe"),
)
RECURRING = ("nemotron_h", "granitemoehybrid", "falcon_h1", "lfm2", "lfm2_moe", "lfm3")
LATENT = ("glm4_moe_lite", "deepseek_v2", "deepseek_v3", "mistral4", "kimi_linear", "bailing_hybrid")
NAMES = sorted(TINY, key=lambda name: FIRST[TINY[name].family] != name)  # they come first


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root, made = tmp_path_factory.mktemp("families"), dict[str, Path]()

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = save_tiny(name, root / name.replace(",", "").replace(" ", "-"))
        return made[name]

    return folder


@torch.inference_mode()
def reference(name: str, tokens: Sequence[int]) -> Tensor:
    """transformers' logits after each token: [n, V]."""
    return _reference(name, tuple(tokens))


@cache
def _reference(name: str, tokens: tuple[int, ...]) -> Tensor:
    model = random_tiny(name)
    shares = getattr(model.config, "num_kv_shared_layers", 0)  # then by default (5.24) it fails where there is no table
    some = {"logits_to_keep": torch.arange(len(tokens))} if shares else {}
    logits: Tensor = model(torch.tensor([tokens]), **some).logits[0]
    return logits


def test_every_family_has_models_here() -> None:
    elsewhere = {"llama", "qwen2", "qwen3", "gemma4_assistant", "gemma4_unified_assistant"}
    assert {tiny.family for tiny in TINY.values()} >= FAMILIES.keys() - elsewhere


@pytest.mark.parametrize("operators", OPERATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [name for name in NAMES if any("expert" in field for field in TINY[name].fields)])
@pytest.mark.few(len(FIRST))
def test_experts_run_over_the_rows_of_several_blocks_and_no_bit_changes(
    folders: Callable[[str], Path], name: str, dtype: torch.dtype, operators: str
) -> None:
    tokens, decoder = random_tokens(LENGTH), load(folders(name), dtype=dtype, kernels=of(operators))
    wanted = in_prefill(decoder, target_cache(decoder, SIZES), tokens, 8)
    for together in (16, 40, 48):
        assert torch.equal(in_prefill(decoder, target_cache(decoder, SIZES), tokens, 8, together), wanted)


@pytest.mark.parametrize("operators", OPERATORS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.few(len(FIRST))
def test_prefill_decoding_and_both_mixed_give_the_logits_of_transformers(
    folders: Callable[[str], Path], name: str, operators: str
) -> None:
    tokens = random_tokens(LENGTH)
    theirs, decoder = reference(name, tokens), load(folders(name), kernels=of(operators))
    assert_same_logits(in_prefill(decoder, target_cache(decoder, SIZES), tokens, SIZES.prefill_block), theirs)
    assert_same_logits(in_decoding(decoder, target_cache(decoder, SIZES), tokens, 5), theirs)
    late = LateLink(late_in=True, late_out=True)
    mixed = target_cache(decoder, SIZES, link=late if decoder.config.growing else None)
    decoder.prefill(mixed, tokens[:16], resident_rows(decoder, 7))
    parts = [in_decoding(decoder, mixed, tokens[16:22], 3), in_prefill(decoder, mixed, tokens[22:41], 9)]
    parts.append(in_decoding(decoder, mixed, tokens[41:], 1))
    assert_same_logits(torch.cat(parts), theirs[16:])


WRAPPER: dict[str, object] = {
    "model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"], "image_token_index": 10,
    "spatial_merge_size": 2, "multimodal_projector_bias": False, "vision_config": {"model_type": "pixtral"},
    "text_config": TINY["ministral3"].config(),
}  # fmt: skip


def text(**fields: object) -> dict[str, object]:
    return {**WRAPPER, "text_config": {**TINY["ministral3"].config(), **fields}}


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({**WRAPPER, "quantization_config": {"quant_method": "hqq"}}, 'quantization_config: quant_method is "hqq"'),
        ({**WRAPPER, "text_config": None}, "text_config is null"),
        ({**WRAPPER, "architectures": ["PixtralVisionModelWithHead"]}, "architectures is"),
        (text(model_type="gemma9_text"), 'text_config: model_type is "gemma9_text"'),
        (
            text(model_type="gemma9_text"),
            "lists; the nearest name is gemma4_text, but layers of another family",
        ),
        (
            {"model_type": "lagunas"},
            "lists; the nearest name is laguna, but layers of another family may compute",
        ),
        (
            {"model_type": "glm5_next"},
            'is "glm5_next"; it must be one that triforce models --families lists; the',
        ),
        (
            {"model_type": "glm5_next"},
            "but its layers keep four residual streams and attend to tokens that an index chooses",
        ),
        ({"model_type": "gemma3n"}, "but its layers mix four residual streams (AltUp)"),
        (
            text(rope_parameters={"rope_type": "default", "llama_4_scaling_beta": 0.1}),
            "original_max_position_embeddings",
        ),
        (text(sliding_window=0), "sliding_window is 0"),
        (TINY["gemma3"].config() | {"rope_parameters": {"rope_type": "default"}}, "rope_parameters is"),
        (TINY["gemma3"].config() | {"use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
        (TINY["gemma3"].config() | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        (TINY["gemma2"].config() | {"sliding_window": None}, "sliding_window is null"),
        (TINY["muse_glimmer"].config() | {"layer_rope_theta": [0]}, "layer_rope_theta is [0]"),
        (TINY["muse_glimmer"].config() | {"attention_bias": True}, "attention_bias is true"),
        (TINY["nemotron"].config() | {"hidden_act": "silu"}, 'hidden_act is "silu"'),
        (TINY["nemotron"].config() | {"rope_percent": 0.25}, "rope_percent is 0.25"),
        (TINY["hunyuan"].config() | {"use_qk_norm": False}, "use_qk_norm is false"),
        (TINY["granite"].config() | {"logit_scale": 0.5}, "logit_scale is 0.5"),
        (TINY["smollm3"].config() | {"no_rope_layers": [1]}, "no_rope_layers is [1]"),
        (
            TINY["phi3, long"].config() | {"rope_parameters": LONGROPE | {"short_factor": [1.0]}},
            "short_factor is [1.0]",
        ),
        (TINY["glm"].config() | {"head_dim": None}, "head_dim is null"),
        (TINY["glm4_moe"].config() | {"n_group": 3}, "n_group is 3; it must be a divisor of the number of experts, 8"),
        (TINY["glm4_moe"].config() | {"n_group": 8}, "n_group is 8; it must be a divisor of"),
        (
            TINY["glm4_moe"].config() | {"n_group": 4},
            "topk_group is missing; it must be groups that have the 3 experts",
        ),
        (TINY["glm4_moe"].config() | {"topk_group": 4}, "topk_group is 4; it must be"),
        (TINY["minimax_m2"].config() | {"qk_norm_type": "per_head"}, 'qk_norm_type is "per_head"'),
        (TINY["minimax_m2"].config() | {"use_qk_norm": False}, "use_qk_norm is false"),
        (TINY["ernie4_5_moe"].config() | {"use_bias": True}, "use_bias is true; it must be false in ernie4_5_moe"),
        (TINY["ernie4_5_moe"].config() | {"moe_num_experts": [8, 8]}, "moe_num_experts is [8, 8]"),
        (TINY["hunyuan_v1_moe"].config() | {"moe_topk": [3, 2]}, "moe_topk is [3, 2]; it must be a number, or a list"),
        (TINY["hunyuan_v1_moe"].config() | {"num_shared_expert": [2, 2]}, "num_shared_expert is [2, 2]; it must be 1"),
        (TINY["hunyuan_v1_moe"].config() | {"moe_intermediate_size": 24}, "moe_intermediate_size is 24; it must be 16"),
        (TINY["exaone_moe"].config() | {"is_moe_layer": [True] * 4}, "is_moe_layer is [true, true, true, true]"),
        (TINY["exaone_moe"].config() | {"mlp_layer_types": ["sparse"]}, 'mlp_layer_types is ["sparse"]'),
        (TINY["hunyuan_v1_moe"].config() | {"routed_scaling_factor": 2.0}, "routed_scaling_factor is 2.0"),
        (TINY["afmoe"].config() | {"num_expert_groups": 4}, "num_expert_groups is 4"),
        (TINY["afmoe"].config() | {"attention_bias": True}, "attention_bias is true; it must be absent or false"),
        (
            TINY["laguna"].config() | {"num_attention_heads_per_layer": [4, 6, 6]},
            "is [4, 6, 6]; it must be a list",
        ),
        (
            TINY["laguna"].config() | {"num_attention_heads_per_layer": [4, 5, 6, 6]},
            "multiple of the KV heads, 2",
        ),
        (TINY["laguna"].config() | {"gating": False}, 'gating is false; it must be true, "per-head" or "per-element"'),
        (TINY["laguna"].config() | {"gating_types": ["per-element"] * 4}, "absent, or as gating has it in all layers"),
        (
            TINY["laguna"].config() | {"moe_apply_router_weight_on_input": True},
            "_on_input is true",
        ),
        (TINY["laguna"].config() | {"attention_bias": True}, "attention_bias is true; it must be absent or false"),
        (TINY["laguna"].config() | {"mlp_layer_types": ["sparse"]}, 'mlp_layer_types is ["sparse"]'),
        (
            TINY["cohere2_moe"].config() | {"use_parallel_block": False},
            "use_parallel_block is false; it must be",
        ),
        (TINY["cohere2_moe"].config() | {"use_qk_norm": True}, "use_qk_norm is true; it must be absent or false"),
        (TINY["cohere2_moe"].config() | {"expert_selection_fn": "tanh"}, "softmax or sigmoid"),
        (TINY["cohere2_moe"].config() | {"shared_expert_combination_strategy": "max"}, "average or sum"),
        (TINY["olmoe"].config() | {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        (TINY["qwen2_moe"].config() | {"use_sliding_window": True}, "use_sliding_window is true"),
        (TINY["glm4_moe"].config() | {"n_shared_experts": 0}, "n_shared_experts is 0"),
        (TINY["glm4_moe"].config() | {"num_experts_per_tok": 9}, "num_experts_per_tok is 9"),
        (
            TINY["qwen3_5_moe"].config() | {"shared_expert_intermediate_size": None},
            "shared_expert_intermediate_size is",
        ),
        (TINY["qwen3_5_moe"].config() | {"mlp_only_layers": [1]}, "mlp_only_layers is [1]"),
        (TINY["qwen3_5_moe"].config() | {"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        *(
            (
                TINY["qwen3_5"].config() | {"linear_num_key_heads": 4, "linear_num_value_heads": heads},
                f"linear_num_value_heads is {heads}; it must be a multiple of linear_num_key_heads 4",
            )
            for heads in (2, 6)
        ),
        (TINY["nemotron_h"].config() | {"n_groups": 4}, "n_groups is 4; it must be a divisor of mamba_num_heads 6"),
        (TINY["nemotron_h"].config() | {"conv_kernel": 1}, "conv_kernel is 1; it must be 2 or more"),
        (TINY["nemotron_h"].config() | {"mlp_hidden_act": "silu"}, 'mlp_hidden_act is "silu"'),
        (TINY["nemotron_h, latents"].config() | {"mlp_bias": True}, "mlp_bias is true"),
        (TINY["granitemoehybrid"].config() | {"time_step_limit": [0.1, 2.0]}, "time_step_limit is [0.1, 2.0]"),
        (TINY["granitemoehybrid"].config() | {"layer_types": ["mamba"] * 4}, "layer_types is"),
        (TINY["qwen3_5"].config() | {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1; it must be 2 or more"),
        (TINY["lfm2"].config() | {"conv_L_cache": 1}, "conv_L_cache is 1; it must be 2 or more"),
        (TINY["lfm2"].config() | {"layer_types": ["conv"] * 4}, "it must be full_attention in one layer at least"),
        (TINY["lfm2, biased"].config() | {"full_attn_idxs": [3]}, "full_attn_idxs is [3]; it must be a list of layers"),
        (TINY["lfm2_moe"].config() | {"layer_types": None}, "it must be full_attention in one layer at least"),
        (TINY["lfm3"].config() | {"attention_bias": True}, "attention_bias is true; it must be absent or false"),
        (TINY["lfm3"].config() | {"sliding_window": 0}, "sliding_window is 0"),
        (TINY["gemma4_unified"].config() | {"enable_moe_block": True}, "enable_moe_block is true"),
        (TINY["gemma4_unified"].config() | {"num_kv_shared_layers": 1}, "num_kv_shared_layers is 1; it must be 0"),
        (
            TINY["gemma4_unified"].config() | {"hidden_size_per_layer_input": 8},
            "hidden_size_per_layer_input is 8; it must be 0",
        ),
        (
            TINY["gemma4, inputs of layers"].config() | {"vocab_size_per_layer_input": 9},
            "vocab_size_per_layer_input is 9; it must be vocab_size",
        ),
        (TINY["glm4"].config() | {"head_dim": 6}, "partial_rotary_factor"),
        (
            TINY["glm4"].config()
            | {"head_dim": 4, "rope_parameters": PARTIAL | {"rope_type": "dynamic", "factor": 2.0}},
            "dynamic with head_dim 2",
        ),
    ],
)
def test_what_a_family_does_not_have_is_refused_by_name(data: dict[str, object], named: str) -> None:
    with pytest.raises(ModelError) as caught:
        config_of(data, name="config.json")
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hunyuan", {"use_qk_norm": True, "use_rotary_pos_emb": True, "use_cla": False}),
        ("laguna", {"gating_types": ["per-head"] * 4, "mlp_only_layers": [0], "decoder_sparse_step": 1}),
        ("laguna", {"norm_topk_prob": True, "swa_attention_sink_enabled": False}),
        ("laguna, of full width", {"partial_rotary_factor": 0.75}),
        ("cohere2_moe", {"use_parallel_block": True, "use_gated_activation": True, "rope_theta": 7.0}),
    ],
)
def test_switches_that_say_what_is_so_anyway_are_read_past(name: str, said: dict[str, object]) -> None:
    plain = TINY[name].config()
    assert config_of(plain | said) == config_of(plain)


def test_what_a_wrapped_config_says_counts_more_than_what_stands_outside() -> None:
    inner = text(tie_word_embeddings=False)
    assert not config_of({**inner, "tie_word_embeddings": True}).tie_embeddings
    del inner["text_config"]["tie_word_embeddings"]  # type: ignore[attr-defined]
    assert config_of({**inner, "tie_word_embeddings": True}).tie_embeddings
    assert config_of({**inner, "dtype": "bfloat16"}).dtype == "bfloat16"


def test_the_plan_says_that_a_wrapped_model_sees_no_pictures() -> None:
    config = config_of({**WRAPPER, "text_config": TINY["granite"].config()})
    made = Request(config, None, Options(), CPU).plan(num_prompt_tokens=100, max_tokens=20)
    assert "the text of a mistral3 model: it sees no pictures here" in made.notes


@pytest.mark.parametrize("wrapper", ["mistral3", "llava"])
def test_a_null_inside_a_wrapper_keeps_its_meaning(wrapper: str) -> None:
    """Bug: without a window, Mistral Small 3.1 was refused as if it had Mistral's of 4,096."""
    inner = TINY["mistral, wrapped"].config() | {"max_position_embeddings": 131072, "num_key_value_heads": None}
    config = config_of({**WRAPPER, "model_type": wrapper, "text_config": inner})
    assert (config.context_limit, config.num_kv_heads) == (131072, config.num_heads)


OTHERWISE: dict[str, Callable[[str], str]] = {
    "as transformers has them": lambda name: (
        name if name == "lm_head.weight" else f"model.language_model.{name.removeprefix('model.')}"
    ),
    "without the wrapped model's own prefix": lambda name: (
        f"language_model.{name.removeprefix('model.')}" if name != "lm_head.weight" else name
    ),
}


@pytest.mark.parametrize("stored", OTHERWISE)
def test_a_wrapped_models_tensors_are_found_under_any_of_their_names(tmp_path: Path, stored: str) -> None:
    folder = save_tiny("ministral3, wrapped", tmp_path)
    path = folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if name.startswith("language_model.")}
    tensors = {OTHERWISE[stored](name.removeprefix("language_model.")): tensor for name, tensor in tensors.items()}
    save_file(tensors, path, metadata={"format": "pt"})
    tokens, decoder = random_tokens(LENGTH), load(folder)
    ours = in_prefill(decoder, target_cache(decoder, SIZES), tokens, SIZES.prefill_block)
    assert_same_logits(ours, reference("ministral3, wrapped", tokens))


def _with_tensors(folder: Path, **tensors: Tensor) -> Path:
    path = folder / "model.safetensors"
    save_file(load_file(path) | tensors, path, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("name", "field", "further"),
    [
        ("glm4_moe", "num_nextn_predict_layers", ("model.layers.3.eh_proj.weight", "model.layers.4.eh_proj.weight")),
        ("qwen3_5_moe", "mtp_num_hidden_layers", ("mtp.fc.weight", "mtp.layers.1.input_layernorm.weight")),
    ],
)
def test_a_next_token_head_of_several_layers_is_left_alone(
    tmp_path: Path, name: str, field: str, further: tuple[str, str]
) -> None:
    folder = _with_tensors(save_tiny(name, tmp_path / "with"), **{part: torch.ones(2, 2) for part in further})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {field: 2}))
    assert read_config(folder).next_token is None
    tokens, decoder = random_tokens(9), load(folder)
    ours = in_prefill(decoder, target_cache(decoder, SIZES), tokens, SIZES.prefill_block)
    assert_same_logits(ours, reference(name, tokens))
    other = _with_tensors(save_tiny(name, tmp_path / "other"), **{"model.layers.4.eh_proj.weight": torch.ones(2, 2)})
    with pytest.raises(ModelError, match=r"1 unexpected \(model.layers.4.eh_proj.weight\)"):
        load(other)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("ernie4_5_moe", "model.mtp_block.0.input_layernorm.weight"),
        ("exaone_moe", "mtp.layers.0.mlp.gate.weight"),
        ("cohere2_moe", "model.layers.6.eh_proj.weight"),
    ],
)
def test_a_next_token_head_that_is_not_supported_is_left_alone(tmp_path: Path, name: str, part: str) -> None:
    folder, tokens = _with_tensors(save_tiny(name, tmp_path), **{part: torch.ones(2, 2)}), random_tokens(9)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    decoder = load(folder)
    ours = in_prefill(decoder, target_cache(decoder, SIZES), tokens, SIZES.prefill_block)
    assert_same_logits(ours, reference(name, tokens))


@pytest.mark.parametrize("name", ["qwen3_5_moe", "glm4_moe"])
def test_experts_may_be_in_one_tensor_of_a_layer_in_one_file_or_several(tmp_path: Path, name: str) -> None:
    folder = save_tiny(name, tmp_path)
    alone = {part for part in load_file(folder / "model.safetensors") if ".experts." in part}
    stacked = {part: each.clone() for part, each in random_tiny(name).state_dict().items() if ".experts." in part}
    rest = {part: each for part, each in load_file(folder / "model.safetensors").items() if part not in alone}
    assert alone
    assert len(stacked) == 2 * len([part for part in stacked if part.endswith("down_proj")])
    tokens = random_tokens(9)
    for files in ({"model.safetensors": rest | stacked}, {"a.safetensors": rest, "b.safetensors": stacked}):
        (folder / "model.safetensors").unlink()
        for file, tensors in files.items():
            save_file(tensors, folder / file, metadata={"format": "pt"})
        if len(files) > 1:
            index = {part: file for file, tensors in files.items() for part in tensors}
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
        decoder = load(folder)
        assert_same_logits(in_decoding(decoder, target_cache(decoder, SIZES), tokens, 3), reference(name, tokens))


@pytest.mark.parametrize("stored", ["by outputs", "of each expert"])
def test_experts_of_qwen3_vl_are_found_as_other_programs_write_them(tmp_path: Path, stored: str) -> None:
    """By inputs they are in the authors' folders; transformers 5 writes them by outputs, quantisers each by itself. No
    matrix is square."""
    folder = save_tiny("qwen3_vl_moe", tmp_path, moe_intermediate_size=24)
    tensors = load_file(path := folder / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        rows, (layer, part) = tensors.pop(name).transpose(1, 2), name.split("experts.")
        if stored == "by outputs":
            tensors[name] = rows.contiguous()
            continue
        parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
        for number, expert in enumerate(rows):
            for own, matrix in zip(parts, expert.chunk(len(parts)), strict=True):
                tensors[f"{layer}experts.{number}.{own}.weight"] = matrix.contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    tokens, decoder = random_tokens(9), load(folder)
    ours = in_prefill(decoder, target_cache(decoder, SIZES), tokens, SIZES.prefill_block)
    with torch.inference_mode():
        theirs = random_tiny("qwen3_vl_moe", moe_intermediate_size=24)(torch.tensor([tokens])).logits[0]
    assert_same_logits(ours, theirs)


@pytest.mark.parametrize("wrapped", SEEING)
def test_what_the_text_of_a_model_that_sees_pictures_leaves_out_is_as_transformers_has_it(wrapped: str) -> None:
    """Epsilon, base, sizes and windows are not those of the family that it has the form of."""
    text = AutoConfig.for_model(WRAPPERS[wrapped].default_family).to_dict()
    left = {key: value for key, value in text.items() if not key.endswith("token_id") and key != "tie_word_embeddings"}

    def described(text_config: dict[str, object]) -> ModelConfig:
        holder = {"text_config": {**text_config, "head_dim": 128}}  # heads do not divide rows in each
        return config_of({"model_type": wrapped, **({"thinker_config": holder} if "omni" in wrapped else holder)})

    assert described({}) == described(left)
    assert described({}).wrapper == wrapped


def test_a_text_whose_fields_are_among_the_wrappers_is_the_one_of_its_own() -> None:
    """As the authors' configs of Qwen2-VL and Qwen2.5-VL have them, where a text_config may be null."""
    inner = {key: value for key, value in TINY["qwen2_vl"].config().items() if key != "model_type"}
    wrapper = {"model_type": "qwen2_vl", "architectures": ["Qwen2VLForConditionalGeneration"], "vision_config": {}}
    expected = config_of({**wrapper, "text_config": inner})
    assert config_of({**wrapper, **inner}) == config_of({**wrapper, **inner, "text_config": None}) == expected
    with pytest.raises(ModelError, match="config: clip_qkv is 3"):
        config_of({**wrapper, **inner, "clip_qkv": 3})


def test_real_configs_have_the_parameters_that_their_names_say() -> None:
    """As the authors publish them, without what transformers has by default."""
    rope = {"rope_theta": 10000000, "partial_rotary_factor": 0.25, "rope_scaling": None}
    states = {f"linear_num_{kind}_heads": count for kind, count in (("key", 16), ("value", 32))}
    states |= {f"linear_{part}": size for part, size in (("key_head_dim", 128), ("value_head_dim", 128))}
    coder = {
        "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "vocab_size": 151936,
        "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4, "num_experts": 512,
        "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "max_position_embeddings": 262144, "mlp_only_layers": [], "decoder_sparse_step": 1, "norm_topk_prob": True,
        "attention_bias": False, "tie_word_embeddings": False, "router_aux_loss_coef": 0.001, "dtype": "bfloat16",
        "output_router_logits": False, "use_sliding_window": False, **states, **rope,
    }  # fmt: skip
    config = config_of(coder)
    assert round(config.num_parameters() / 1e9, 1) == 79.7
    assert (config.kv_bytes_per_token(2), config.state_bytes()) == (24576, 75497472)
    assert config.next_token == config.blocks[3]
    lfm = {"vocab_size": 65536, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 2048}
    older = {
        "model_type": "lfm2", **lfm, "num_hidden_layers": 16, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "block_ff_dim": 12288, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0, "tie_embedding": True,
        "block_auto_adjust_ff_dim": True, "conv_L_cache": 3, "conv_bias": False, "norm_eps": 1e-05, "use_pos_enc": True,
    }  # fmt: skip
    attending = (2, 6, 10, 14, 18, 21)
    kinds = ["full_attention" if layer in attending else "conv" for layer in range(24)]
    sparse = {
        "model_type": "lfm2_moe", **lfm, "num_hidden_layers": 24, "layer_types": kinds, "intermediate_size": 7168,
        "moe_intermediate_size": 1792, "num_experts": 32, "num_experts_per_tok": 4, "num_dense_layers": 2,
        "norm_topk_prob": True, "use_expert_bias": True, "routed_scaling_factor": 1.0, "tie_embedding": True,
    }  # fmt: skip
    third = {
        **lfm, "model_type": "lfm3", "vocab_size": 128000, "num_hidden_layers": 24, "intermediate_size": 7680,
        "num_attention_heads": 16, "num_key_value_heads": 4,
    }  # fmt: skip
    for data, billions, kv_bytes in ((older, 1.17, 12288), (sparse, 8.34, 12288), (third, 1.73, 12288)):
        config = config_of(data)
        assert round(config.num_parameters() / 1e9, 2) == billions
        assert (config.kv_bytes_per_token(2), config.state_bytes(), config.tie_embeddings) == (kv_bytes, 0, True)


def test_nemotrons_own_config_has_the_parameters_that_its_name_says(tmp_path: Path) -> None:
    """Nemotron 3 Nano 30B-A3B's, with a letter for each layer and a limit of time steps that Python writes so."""
    pattern = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    fields = {
        "model_type": "nemotron_h", "vocab_size": 131072, "hidden_size": 2688, "hybrid_override_pattern": pattern,
        "num_hidden_layers": 52, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
        "intermediate_size": 1856, "mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128,
        "conv_kernel": 4, "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712, "routed_scaling_factor": 2.5, "time_step_limit": [0.0, math.inf],
        "rope_theta": 10000, "partial_rotary_factor": 1.0, "rescale_prenorm_residual": True, "n_shared_experts": 1,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert "Infinity" in (tmp_path / "config.json").read_text()
    config = read_config(tmp_path)
    assert round(config.num_parameters() / 1e9, 1) == 31.6
    assert (config.num_layers, len(config.growing), len(config.stateful), config.num_parts) == (52, 6, 23, 52)
    assert (config.kv_bytes_per_token(2), config.state_bytes()) == (6144, 48234496)
    for words in ("MEM", ["mamba", "moe"], [], "M?*"):
        key = "hybrid_override_pattern" if isinstance(words, str) else "layers_block_type"
        with pytest.raises(ModelError, match=f"{key} is"):
            config_of({**fields, key: words})


@pytest.mark.parametrize("name", [name for name in TINY if not TINY[name].wrapped])
def test_a_file_that_is_not_fetched_can_be_planned_in_any_form(name: str) -> None:
    """Each matrix by its name, with its shape in the checkpoint."""
    config = config_of(TINY[name].config())
    every, tensors = matrices(config), expected_tensors(config)
    assert {name: (each.outputs, each.inputs) for name, each in every.items()} == {
        name: tensors[name] for name in every
    }
    for form in FORMS:
        assert in_form(config, form).block.encodings.every


LAGUNA_XS: dict[str, object] = {
    "model_type": "laguna", "architectures": ["LagunaForCausalLM"], "vocab_size": 100352, "hidden_size": 2048,
    "intermediate_size": 8192, "num_hidden_layers": 40, "num_attention_heads": 48, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 131072, "attention_bias": False, "rms_norm_eps": 1e-6,
    "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [0], "router_aux_loss_coef": 0.0,
    "mlp_layer_types": ["dense"] + ["sparse"] * 39, "moe_routed_scaling_factor": 2.5, "gating": "per-head",
    "gating_types": ["per-head"] * 40, "moe_router_logit_softcapping": 0.0, "moe_apply_router_weight_on_input": False,
    "sliding_window": 512, "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 10,
    "num_attention_heads_per_layer": [48, 64, 64, 64] * 10, "partial_rotary_factor": 0.5, "eos_token_id": [2, 24],
    "tie_word_embeddings": False, "dtype": "bfloat16",
    "rope_parameters": {
        "full_attention": {
            "rope_type": "yarn", "rope_theta": 500000.0, "factor": 64.0, "original_max_position_embeddings": 4096,
            "beta_fast": 64.0, "beta_slow": 1.0, "partial_rotary_factor": 0.5,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    },
}  # fmt: skip
NORTH_MINI: dict[str, object] = {
    "model_type": "cohere2_moe", "architectures": ["Cohere2MoeForCausalLM"], "vocab_size": 262144, "hidden_size": 2048,
    "intermediate_size": 768, "prefix_dense_intermediate_size": 3072, "first_k_dense_replace": 1,
    "prefix_dense_sliding_window_pattern": 1, "num_hidden_layers": 49, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 500000, "attention_bias": False,
    "rms_norm_eps": 1e-5, "layer_norm_eps": 1e-5, "num_experts": 128, "num_experts_per_tok": 8,
    "expert_selection_fn": "sigmoid", "norm_topk_prob": False, "num_shared_experts": 0, "sliding_window": 4096,
    "sliding_window_pattern": 4, "rope_theta": 50000.0, "logit_scale": 1.0, "use_parallel_block": True,
    "use_qk_norm": False, "use_gated_activation": True, "tie_word_embeddings": True, "dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "billions", "kv_bytes", "windows"),
    [(LAGUNA_XS, 33.4, 40960, 30), (NORTH_MINI, 30.5, 26624, 36)],
    ids=["laguna", "cohere2_moe"],
)
def test_real_mixtures_have_the_sizes_that_their_names_say(
    config: dict[str, object], billions: float, kv_bytes: int, windows: int
) -> None:
    found = config_of(config)
    assert round(found.num_parameters() / 1e9, 1) == billions
    assert (found.kv_bytes_per_token(2), len(found.windowed)) == (kv_bytes, windows)


def test_multipliers_of_matrices_in_blocks_are_refused(tmp_path: Path) -> None:
    """Falcon-H1's are multiplied into plain numbers as they are read; codes and their scales would not be the same."""
    folder = store(save_tiny("falcon_h1", tmp_path / "model", tokenizer=True, **fields_of("falcon_h1")), "int4")
    with pytest.raises(ModelError, match=r"multiplies its matrices by factors .* GGUF file"):
        load(folder)


def test_a_field_that_a_description_gets_later_changes_no_sessions_digest(tmp_path: Path) -> None:
    """Only what is not at its default is digested; and each model has a digest of its own."""
    digests = {name: model_digest(config_of(tiny.config()), []) for name, tiny in TINY.items() if not tiny.wrapped}
    assert len(set(digests.values())) == len(digests) - 1  # Phi's factors are the positions'
    plain = config_of(TINY["olmo2"].config())
    assert model_digest(plain.mapped(lambda block: replace(block, scale=1.0)), []) == digests["olmo2"]
    assert model_digest(plain.mapped(lambda block: replace(block, scale=2.0)), []) != digests["olmo2"]


def test_in_16_bits_gemmas_norms_lose_nothing_and_embeddings_are_scaled_as_by_transformers(tmp_path: Path) -> None:
    """1 + weight in fp32; the root of the hidden size rounded to bf16 before it multiplies."""
    model = random_tiny("gemma").bfloat16()
    model.save_pretrained(tmp_path)
    decoder = load(tmp_path, dtype=torch.bfloat16)
    [first, *_] = decoder.weights.layers
    assert first.before_attention is not None
    own = model.model.layers[0].input_layernorm.weight.detach()
    assert torch.equal(first.before_attention.weight, 1 + own.float())
    assert torch.equal(decoder.weights.final_norm.weight, 1 + model.model.norm.weight.detach().float())
    tokens = torch.tensor(random_tokens(9))
    assert torch.equal(decoder._embedded(tokens), model.model.embed_tokens(tokens).detach())
    rows = decoder._embedded(tokens)
    assert torch.equal(first.before_attention(rows), model.model.layers[0].input_layernorm(rows).detach())


Change = Callable[[ModelConfig], ModelConfig]


def _block(**changes: Callable[[Block], object]) -> Change:
    return lambda config: config.mapped(
        lambda block: replace(block, **{name: change(block) for name, change in changes.items()})  # type: ignore[arg-type]
    )


def _attention(**changes: Callable[[Attention], object]) -> Change:
    def changed(block: Block) -> Mixer:
        own = block.mixer
        if not isinstance(own, Attention):
            return own
        return replace(own, **{name: change(own) for name, change in changes.items()})  # type: ignore[arg-type]

    return _block(mixer=changed)


def _recurrence(kind: type[Recurrence], **changes: Callable[[Any], object]) -> Change:
    def changed(block: Block) -> Mixer:
        own = block.mixer
        return replace(own, **{name: change(own) for name, change in changes.items()}) if isinstance(own, kind) else own

    return _block(mixer=changed)


def _recurrence_names(key: str) -> Change:
    """A tensor's name told otherwise: of gates as of times, of decays another form."""

    def changed(config: ModelConfig) -> ModelConfig:
        own = config.names.recurrence
        states = config.recurrence
        if not isinstance(states, DeltaRule | Mamba2) or (key != "decays" and not getattr(states, "low_rank", 0)):
            return config
        parts = (*own.parts[:3], *own.parts[:2:-1])
        told: dict[str, Any] = {
            "parts": {"parts": parts}, "gates_b": {"gates_b": own.times_b, "times_b": own.gates_b},
            "decays": {"decays": "negated"},
        }[key]  # fmt: skip
        return replace(config, names=replace(config.names, recurrence=replace(own, **told)))

    return changed


def _has_weights(attention: Attention) -> bool:
    """Of its norm of queries and keys: ones weigh nothing, however they are laid out."""
    return attention.qk_norm is not None and not attention.qk_norm.weightless


def _rope(**changes: Callable[[Rope], object]) -> Change:
    def changed(attention: Attention) -> Rope | None:
        rope = attention.rope
        return rope and replace(rope, **{name: change(rope) for name, change in changes.items()})  # type: ignore[arg-type]

    return _attention(rope=changed)


def _inner(**changes: Callable[[FeedForward], object]) -> Change:
    def changed(block: Block) -> FeedForward:
        own = block.feed_forward
        return own if not own.size else replace(own, **{name: change(own) for name, change in changes.items()})  # type: ignore[arg-type]

    return _block(feed_forward=changed)


def _experts(**changes: Callable[[Experts], object]) -> Change:
    def changed(block: Block) -> Experts | None:
        own = block.experts
        return own and replace(own, **{name: change(own) for name, change in changes.items()})  # type: ignore[arg-type]

    return _block(experts=changed)


def _norms(change: Callable[[Norm], Norm]) -> dict[str, Change]:
    """Of each norm by itself."""
    found: dict[str, Change] = {
        name: _block(**{name: lambda block, name=name: (own := getattr(block, name)) and change(own)})
        for name in BLOCK_NORMS
    }
    found["qk_norm"] = _attention(qk_norm=lambda own: own.qk_norm and change(own.qk_norm))
    found["norm"] = lambda config: replace(config, norm=change(config.norm))
    return found


def _first_without_positions(config: ModelConfig) -> ModelConfig:
    first = replace(config.block, mixer=replace(config.block.attention, rope=None))
    return replace(config, blocks=(first, *config.blocks[1:]))


FLAGS: dict[str, Change] = {
    "embedding_scale": lambda config: replace(config, embedding_scale=2 * config.embedding_scale),
    "logits_scale": lambda config: replace(config, logits_scale=2 * config.logits_scale),
    "tie_embeddings": lambda config: replace(config, tie_embeddings=not config.tie_embeddings),
    "block.scale": _block(scale=lambda block: 2 * block.scale),
    "side_by_side": _block(
        side_by_side=lambda block: not block.side_by_side,
        before_feed_forward=lambda block: block.before_feed_forward or block.before_attention,
    ),
    "attention.scale": _attention(scale=lambda own: 2 * own.score_scale),
    "attention.cap": _attention(cap=lambda own: None if own.cap else 0.5),
    "logits_cap": lambda config: replace(config, logits_cap=None if config.logits_cap else 0.5),
    "shares": _attention(shares=lambda own: False),
    "input_size": _block(input_size=lambda block: 0),
    "eps of the table": lambda config: replace(
        config, layer_table=config.layer_table and replace(config.layer_table, norm=Norm(30.0))
    ),
    "window": _attention(window=lambda own: None if own.window else 5),
    "gate": _attention(gate=lambda own: not own.gate),
    "gate_function": _attention(
        gate_function=lambda own: "softplus" if own.gate and own.gate_function == "sigmoid" else "sigmoid"
    ),
    "gates_heads": _attention(gates_heads=lambda own: own.gate and not own.gates_heads),
    "sink_logits": _attention(sink_logits=lambda own: not own.sink_logits),
    "multiplied": _block(multiplied=lambda block: not block.multiplied),
    "with v_norm": _attention(v_norm=lambda own: None if own.v_norm else Norm(weightless=True)),
    "values_are_keys": _attention(values_are_keys=lambda own: not own.values_are_keys),
    "delta.steps": _recurrence(DeltaRule, steps=lambda own: 2 * own.steps),
    "delta.tiled": _recurrence(DeltaRule, tiled=lambda own: 1 if own.tiled is None else None),
    "delta.eps": _recurrence(DeltaRule, eps=lambda own: 0.5),
    "delta.gate": _recurrence(DeltaRule, gate=lambda own: "silu" if own.gate == "sigmoid" else "sigmoid"),
    "delta.least": _recurrence(DeltaRule, least=lambda own: None if own.least else -3.0 if own.by_channel else None),
    "delta.by_channel": _recurrence(DeltaRule, by_channel=lambda own: False),
    "delta.low_rank": _recurrence(DeltaRule, low_rank=lambda own: 0),
    **{f"{key} of low rank in the other order": _recurrence_names(key) for key in ("parts", "gates_b")},
    "decays as they are stored": _recurrence_names("decays"),
    "convolution.width": _recurrence(ShortConvolution, width=lambda own: own.width + 1),
    "convolution.taps_bias": _recurrence(ShortConvolution, taps_bias=lambda own: not own.taps_bias),
    "convolution.bias": _recurrence(ShortConvolution, bias=lambda own: not own.bias),
    "convolution.out_bias": _recurrence(ShortConvolution, out_bias=lambda own: not own.out_bias),
    "mamba.taps_bias": _recurrence(Mamba2, taps_bias=lambda own: not own.taps_bias),
    "mamba.bias": _recurrence(Mamba2, bias=lambda own: not own.bias),
    "mamba.norm": _recurrence(Mamba2, norm=lambda own: None),
    "mamba.eps": _recurrence(Mamba2, norm=lambda own: own.norm and replace(own.norm, eps=30.0)),
    "mamba.groups": _recurrence(Mamba2, num_key_heads=lambda own: 1 if own.num_key_heads > 1 else 2),
    "beside.taps_bias": _block(beside=lambda block: block.beside and replace(block.beside, taps_bias=False)),
    "beside.norm": _block(beside=lambda block: block.beside and replace(block.beside, norm=None)),
    "nothing beside attention": _block(beside=lambda block: None),
    **{
        f"factors of {name}": _block(
            factors=lambda block, name=name: tuple(each for each in block.factors if each[0] != name)
        )
        for name in ("qkv", "o", "states_in", "states_out", "gate_up", "down")
    },
    "a network in each layer": _block(
        feed_forward=lambda block: block.feed_forward if block.has_network else replace(block.feed_forward, size=48)
    ),
    "embedding_norm": lambda config: replace(config, embedding_norm=None if config.embedding_norm else Norm()),
    "a window that is longer by one": _attention(window=lambda own: own.window and own.window + 1),
    "attention.bias": _attention(bias=lambda own: not own.bias),
    "attention.out_bias": _attention(out_bias=lambda own: not own.out_bias),
    "norms_whole": _attention(norms_whole=lambda own: own.qk_norm is not None and not own.norms_whole),
    "weighs_heads": _attention(
        weighs_heads=lambda own: _has_weights(own) and not (own.weighs_heads or own.norms_whole)
    ),
    "weighs_rotated": _attention(weighs_rotated=lambda own: _has_weights(own) and not own.weighs_rotated),
    "with qk_norm": _attention(qk_norm=lambda own: None if own.qk_norm else Norm()),
    **{
        f"with {name}": _block(**{name: lambda block, name=name: None if getattr(block, name) else Norm()})
        for name in BLOCK_NORMS
    },
    **{
        f"centred {name}": change
        for name, change in _norms(lambda norm: replace(norm, centred=not norm.centred)).items()
    },
    **{
        f"plus_one {name}": change
        for name, change in _norms(lambda norm: replace(norm, plus_one=not (norm.plus_one or norm.weightless))).items()
    },
    **{
        f"bias {name}": change
        for name, change in _norms(lambda norm: replace(norm, bias=not (norm.bias or norm.weightless))).items()
    },
    **{
        f"weightless {name}": change
        for name, change in _norms(lambda norm: replace(norm, weightless=not norm.weightless)).items()
        if name != "norm"
    },
    **{f"eps {name}": change for name, change in _norms(lambda norm: replace(norm, eps=30.0)).items()},
    "experts.used": _experts(used=lambda own: own.used + 1),
    "renormalised": _experts(renormalised=lambda own: not own.renormalised),
    "scoring": _experts(scoring=lambda own: "softmax" if own.scoring == "sigmoid" else "sigmoid"),
    "score_scale": _experts(score_scale=lambda own: 3 * own.score_scale),
    "score_cap": _experts(score_cap=lambda own: None if own.score_cap else 0.5),
    "experts.factor": _experts(factor=lambda own: 2 * own.factor),
    "scaled": _experts(scaled=lambda own: not own.scaled),
    "bias of scores": _experts(bias=lambda own: "none" if own.bias == "scores" else "scores"),
    "bias of ranks": _experts(bias=lambda own: "none" if own.bias == "ranks" else "ranks"),
    "gates_network": _experts(gates_network=lambda own: not own.gates_network),
    "groups": _experts(groups=lambda own: 1),
    "groups_used": _experts(groups_used=lambda own: own.groups if own.groups > 1 else 1),
    "group_best": _experts(group_best=lambda own: 1 if own.groups > 1 else own.group_best),
    "experts.eps": _experts(eps=lambda own: 0.5),
    "floored": _experts(floored=lambda own: not own.floored, eps=lambda own: 5.0),
    "scales_sum": _experts(factor=lambda own: 2 * own.factor, scales_sum=lambda own: not own.scales_sum),
    "averaged": _experts(averaged=lambda own: not own.averaged),
    "latents": _experts(latent=lambda own: 0 if own.latent else 16),
    "without the network beside experts": _block(
        feed_forward=lambda block: replace(block.feed_forward, size=0) if block.experts else block.feed_forward
    ),
    "activation of experts": _experts(network=lambda own: replace(own.network, activation="relu_squared")),
    "activation": _inner(activation=lambda own: "gelu_tanh" if own.activation == "relu_squared" else "relu_squared"),
    "gated": _inner(gated=lambda own: not own.gated),
    "inner bias": _inner(bias=lambda own: not own.bias),
    "theta": _rope(theta=lambda rope: 3 * rope.theta),
    "kind": _rope(kind=lambda rope: "default" if rope.kind != "default" else "linear", factor=lambda rope: 3.0),
    "growth": _rope(growth=lambda rope: 0.0 if rope.growth else 0.5, original_max_positions=lambda rope: 16),
    "rotated": _rope(rotated=lambda rope: None if rope.rotated else 4),
    "neighbours": _rope(neighbours=lambda rope: not rope.neighbours),
    "factors": _rope(short_factors=lambda rope: rope.long_factors, long_factors=lambda rope: rope.short_factors),
    "attention_factor": _rope(attention_factor=lambda rope: 2.0 if rope.kind in ("yarn", "longrope") else None),
    "no positions": _attention(rope=lambda own: None),
    "positions of all layers": lambda config: config.changed(rope=config.rope),
    "positions of the first": _first_without_positions,
}


NOT_LATENT = (  # what latent attention does not have
    *("sink_logits", "values_are_keys", "norms_whole", "weighs_heads", "weighs_rotated"),
    *("with v_norm", "with qk_norm"),
)


@pytest.mark.parametrize("flag", FLAGS)
def test_every_flag_of_a_description_counts(
    folders: Callable[[str], Path], flag: str, pytestconfig: pytest.Config
) -> None:
    """In every model that has it, or one of them: told otherwise, the checkpoint does not fit, or logits are others."""
    at = [*FLAGS].index(flag)
    names = (*[*TINY][at:], *[*TINY][:at])
    having = (name for name in names if _would_count(flag, read_config(folders(name))))
    counted = list(having if pytestconfig.getoption("deep") else islice(having, 1))
    assert counted
    for name in counted:
        assert_counts(folders, name, flag)


def _would_count(flag: str, config: ModelConfig) -> bool:
    if flag == "eps before_attention" and config.block.attention.v_norm:
        return False  # it only scales what is normed again
    if config.block.attention.latent is not None and flag in NOT_LATENT:
        return False
    if flag == "sink_logits" and any(each.beside for each in config.blocks):
        return False  # attention beside a recurrence has none
    if flag == "weighs_rotated" and any(each.attends and each.attention.shares for each in config.blocks):
        return False  # a layer that shares keys has no weights of them
    if flag in ("experts.factor", "renormalised", "scales_sum") and config.block.after_experts:
        return False  # as this does
    if flag in ("experts.eps", "floored") and not (
        config.experts and config.experts.renormalised and config.experts.scoring == "sigmoid"
    ):
        return config.experts is not None and config.experts.needs_softmax and config.experts.renormalised
    if flag == "block.scale" and config.streams is not None:
        return False  # each stream has factors of its own
    if flag == "window" and config.indexer is not None:
        return False  # the index chooses what a row attends to
    if flag == "side_by_side" and any(isinstance(each.mixer, NoMixer) for each in config.blocks):
        return False
    if flag == "averaged":
        sums = [each for each in config.blocks if each.experts and each.feed_forward.size and not each.has_latents]
        return any(not (each.joins_normed or each.after_feed_forward) for each in sums)
    one_of_all = config.experts is not None and config.experts.used == 1 and config.experts.renormalised
    if flag in ("scoring", "score_scale", "score_cap", "bias of ranks", "eps before_router") and one_of_all:
        return False  # its weight is 1, and the order of scores is the same
    return FLAGS[flag](config) != config


def assert_counts(folders: Callable[[str], Path], name: str, flag: str) -> None:
    tokens, changed = random_tokens(LENGTH), FLAGS[flag](read_config(folders(name)))
    try:
        decoder = load(folders(name), config=changed)
        ours = in_prefill(decoder, target_cache(decoder, IN_ONE_BLOCK), tokens, LENGTH)
    except (ModelError, RuntimeError):  # a checkpoint or factors of other shapes
        return
    theirs = reference(name, tokens)
    alike = (ours - theirs).abs() <= 20 * TOLERANCE * theirs.abs().max()
    assert not bool(alike.all())  # a state may have grown until it is no number


# Whole engines (test_contract.py has what they have in common).


def test_layers_of_one_layout_whose_heads_differ_share_no_rows(pairs: Callable[[str], Pair]) -> None:
    """Streamed, they have the same buffers."""
    pair, (sizes, offload) = pairs("gemma4, one layout"), MODES["draft and retrieval, all streamed"]
    with engine_of(pair, sizes, prompt_tokens=CONTEXT, offload=offload) as engine:
        assert say(engine) == alone(pair)


def test_the_query_heads_of_each_layer_count_for_ranks_sizes_and_keys_of_plans() -> None:
    config = config_of(TINY["laguna"].config())
    assert config.head_counts == (4, 6)
    check_divides(config, 2)
    with pytest.raises(UsageError, match=r"and 4 and 6 heads, 2 KV heads .* --gpus may be 1, 2$"):
        check_divides(config, 4)
    alike = config_of(TINY["laguna"].config() | {"num_attention_heads_per_layer": [4] * 4})
    sizes = (
        fixed_bytes(Sizing(each, None, Options(), CPU, "bf16"), 4000, PLAIN)["workspace"] for each in (config, alike)
    )
    assert next(sizes) > next(sizes)
    assert key_of(config, "bf16") != key_of(alike, "bf16")


def test_kernels_have_to_know_the_heads_of_all_layers() -> None:
    """Those of a window were written past the end of a buffer."""
    fields = TINY["gemma4"].config() | {"hidden_activation": "gelu_pytorch_tanh"}
    for head_dim, usable in ((8, cpu.kernels().usable), (2048, False)):
        config = config_of({**fields, "head_dim": head_dim})
        assert cpu.of_model(torch.device("cpu"), config).usable == usable
        assert choice.of_model(torch.device("cpu"), config).usable == usable


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"per_layer_config": {"5": {"head_dim": 12}, "05": {"head_dim": 12}}}, "each once"),
        ({"per_layer_config": {"0": {"head_dim": 12}}}, "of layers without a window, 5, 6, each once"),
        ({"per_layer_config": {"5": {"head_dim": 12}}}, "the same of layers 5, 6"),
        ({"per_layer_config": {"x": {}}}, "by the numbers of layers"),
        ({"global_head_dim": 7}, "global_head_dim is 7; it must be even"),
        ({"num_global_key_value_heads": 3}, "num_global_key_value_heads is 3; it must be KV heads that divide"),
        ({"hidden_size_per_layer_input": ...}, "vocab_size_per_layer_input is missing; it must be vocab_size,"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers is 2"),
        ({"enable_moe_block": True}, "num_experts is missing"),
        ({"enable_moe_block": True, "num_experts": 4}, "moe_intermediate_size is missing"),
        ({"use_bidirectional_attention": "all"}, 'use_bidirectional_attention is "all"'),
        ({"rope_parameters": {"full_attention": {}}}, "full_attention and sliding_attention"),
    ],
)
def test_what_gemma_4_has_and_this_program_does_not_is_refused_by_name(fields: dict[str, object], words: str) -> None:
    data = {**TINY["gemma4"].config(), "attention_k_eq_v": True, **fields}
    with pytest.raises(ModelError) as caught:
        config_of({key: value for key, value in data.items() if value is not ...})
    assert words in str(caught.value)


def test_the_layers_of_gemma_4_may_be_numbered_with_zeros() -> None:
    """As transformers writes them where there are more than ten."""
    fields = {**TINY["gemma4, of many layers"].config(), "global_head_dim": None}
    own = {"head_dim": 12, "num_key_value_heads": 1}
    config = config_of({**fields, "per_layer_config": {"05": own, "11": own}})
    assert config.kv_shapes == ((2, 8),) * 5 + ((1, 12),) + ((2, 8),) * 5 + ((1, 12),)
    assert config_of({**fields, "per_layer_config": None}).has_one_shape


@pytest.mark.few(3)
@pytest.mark.parametrize("name", GROWN)
def test_greedy_tokens_are_those_of_transformers(pairs: Callable[[str], Pair], name: str) -> None:
    pair = pairs(name)
    model, text = random_tiny(name, **fields_of(name)), list(PROMPT)
    ends = {*read_config(pair[0]).eos_token_ids, byte_tokenizer().eos_token_id}
    with torch.inference_mode():
        while len(text) < len(PROMPT) + NUM_NEW and text[-1] not in ends:
            # All hidden states: else transformers cuts Gemma 4's inputs of layers, also where there are none.
            logits = model(torch.tensor([text]), output_hidden_states=True).logits
            text.append(int(logits[0, -1, :TOKENIZER_SIZE].argmax()))
    assert alone(pair, "fp32") == text[len(PROMPT) :]


@pytest.mark.few(6)
@pytest.mark.parametrize("length", [1, 63, 64, 65])
@pytest.mark.parametrize(
    "name", ["qwen3_next", *(name for name in GROWN if TINY[name].wrapped in SEEING), *MIXTURES, *RECURRING, *LATENT]
)
def test_forty_tokens_after_prompts_about_a_block_are_those_of_transformers(
    pairs: Callable[[str], Pair], name: str, length: int
) -> None:
    """With a cache there, and of a model that sees pictures the whole of it, with its own positions in sections. The
    prompt is the first whose text does not go round in a few tokens."""
    pair, model = pairs(name), random_tiny(name, **fields_of(name))
    prompts = (random_tokens(length, seed=seed) for seed in range(11, 31))
    texts = ((prompt, forty_after(prompt, model)) for prompt in prompts)
    prompt, theirs = next((prompt, text) for prompt, text in texts if len({*text}) > 12)
    greedy = replace(GREEDY, logit_bias=((EOS, -math.inf),))
    with engine_of(pair, DRAFTED, prompt_tokens=CONTEXT, dtype="fp32") as engine:
        steps = engine.generate(GenerationRequest(prompt, greedy, max_tokens=40))
        assert [token for step in steps for token in step.tokens] == theirs


def forty_after(prompt: list[int], model: PreTrainedModel) -> list[int]:
    """The model's greedy tokens. No token of the prompt is padding."""
    tokens, banned = torch.tensor([prompt]), torch.arange(EOS, model.config.get_text_config().vocab_size)
    rows = model.generate(  # type: ignore[operator]
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=40, do_sample=False, pad_token_id=0,
        suppress_tokens=banned.tolist(), eos_token_id=None,
    )  # fmt: skip
    text: list[int] = rows[0, len(prompt) :].tolist()
    assert len(text) == 40
    return text


@pytest.mark.usefixtures("forked_here")
@pytest.mark.parametrize("name", [pytest.param("gemma3", marks=pytest.mark.deep), "gemma4", "lfm3"])
def test_a_session_of_windows_is_of_any_number_of_ranks(
    pairs: Callable[[str], Pair], name: str, tmp_path: Path
) -> None:
    pair, sizes = pairs(name), replace(DRAFTED, draft_gamma=0)
    for ranks in (2, 1, 2):
        with (
            engine_of(pair, sizes, prompt_tokens=CONTEXT, ranks=ranks, dtype="fp32") as engine,
            Store.open(tmp_path / "session", identity_of(pair[0], engine.plan)) as store,
        ):
            known = engine.restore(store, PROMPT)
            assert known >= min(len(store.tokens), len(PROMPT)) - 16 * bool(engine.plan.placement.checkpoints)
            assert say(engine, reuse=True) == alone(pair, "fp32")
            assert engine.stats.reused_tokens > 100 or not known
            engine.save(store, {})
