"""Kimi Linear and Ling 3, whose states decay by channel: their configs as authors and transformers write them, what is
refused of them, and how ranks share matrices of low rank."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kit.families import TINY, save_tiny
from kit.gguf_models import write_gguf
from offload.config.config_json import config_of
from offload.config.mixers import DeltaRule
from offload.config.reading import read_config
from offload.errors import ModelError, UsageError
from offload.plan.shards import Shard, check_divides
from offload.weights.checkpoint import Checkpoint, check_model
from offload.weights.layout import LayerLayout
from offload.weights.loader import load_layer

# As the authors publish them, without what transformers has by default.
ATTENDING = [4, 8, 12, 16, 20, 24, 27]
KIMI: dict[str, object] = {
    "model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"], "bos_token_id": 163584,
    "eos_token_id": 163586, "first_k_dense_replace": 1, "head_dim": 72, "hidden_act": "silu", "hidden_size": 2304,
    "intermediate_size": 9216, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True, "model_max_length": 1048576,
    "moe_intermediate_size": 1024, "moe_layer_freq": 1, "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid", "num_attention_heads": 32, "num_expert_group": 1, "num_experts": 256,
    "num_experts_per_token": 8, "num_hidden_layers": 27, "num_key_value_heads": 32, "num_nextn_predict_layers": 0,
    "num_shared_experts": 1, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446, "tie_word_embeddings": False, "topk_group": 1, "use_grouped_topk": True,
    "vocab_size": 163840, "dtype": "bfloat16",
    "linear_attn_config": {
        "full_attn_layers": ATTENDING, "kda_layers": [each for each in range(1, 28) if each not in ATTENDING],
        "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
    },
}  # fmt: skip
LING: dict[str, object] = {
    "model_type": "bailing_hybrid", "architectures": ["BailingMoeV3ForCausalLM"], "eos_token_id": 156895,
    "expert_swiglu_limit_list": None, "share_expert_swiglu_limit_list": None, "first_k_dense_replace": 1,
    "gated_attention_proj_granularity_type": "head_wise", "group_norm_size": 1, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 1536, "intermediate_size": 4608, "kda_lower_bound": -5, "kda_safe_gate": True, "kv_lora_rank": 512,
    "layer_group_size": 4, "linear_silu": True, "max_position_embeddings": 131072, "moe_intermediate_size": 512,
    "moe_router_enable_expert_bias": True, "moe_shared_expert_intermediate_size": 512, "mtp_loss_scaling_factor": 0,
    "mtp_use_kda": False, "n_group": 8, "no_kda_lora": True, "norm_topk_prob": True, "num_attention_heads": 16,
    "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 24, "num_key_value_heads": 16,
    "num_kv_heads_for_linear_attn": 0, "num_nextn_predict_layers": 1, "num_shared_experts": 1,
    "partial_rotary_factor": 0.5, "q_lora_rank": 256, "qk_head_dim": 192, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6, "rope_interleave": True, "rope_theta": 6000000, "rotary_dim": 64,
    "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 6000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5, "router_dtype": "fp32", "scale_router_input": False, "score_function": "sigmoid",
    "scoring_func": "sigmoid", "short_conv_kernel_size": 4, "tie_word_embeddings": False, "topk_group": 4,
    "topk_method": "noaux_tc", "up_proj_norm": False, "use_bias": False, "use_kda_lora": False, "use_mla_nope": False,
    "use_nGPT": False, "use_qk_norm": True, "use_qkv_bias": False, "v_head_dim": 128, "value_norm": False,
    "vocab_size": 157184, "dtype": "bfloat16",
}  # fmt: skip


def test_authors_configs_have_the_sizes_that_their_names_say() -> None:
    kimi, ling = config_of(KIMI), config_of(LING)
    assert [round(each.num_parameters() / 1e9, 1) for each in (kimi, ling)] == [49.1, 7.9]
    assert [each.kv_bytes_per_token(2) for each in (kimi, ling)] == [8064, 6912]
    assert [each.state_bytes() for each in (kimi, ling)] == [41943040, 18874368]
    assert kimi.growing == tuple(each - 1 for each in ATTENDING)
    assert ling.growing == (3, 7, 11, 15, 19, 23)
    assert (kimi.context_limit, ling.context_limit) == (1048576, 131072)
    assert kimi.block.attention.rope is None
    assert ling.rope.rotated == 64
    assert ling.next_token == ling.blocks[-1]
    assert [len([block for block in each.blocks if block.experts]) for each in (kimi, ling)] == [26, 23]
    assert ling.experts is not None
    assert (ling.experts.groups, ling.experts.groups_used) == (8, 4)


def test_what_transformers_writes_of_a_config_is_what_it_was_made_of() -> None:
    """Sizes of states and kinds of layers under names of its own, fields under both names, defaults."""
    inner = KIMI["linear_attn_config"]
    assert isinstance(inner, dict)
    types = ["full_attention" if layer in ATTENDING else "linear_attention" for layer in range(1, 28)]
    left = ("linear_attn_config", "num_experts", "num_experts_per_token", "model_max_length", "first_k_dense_replace")
    written = {key: value for key, value in KIMI.items() if key not in left} | {
        "layer_types": types, "mlp_layer_types": ["dense"] + ["sparse"] * 26, "linear_head_dim": 128,
        "linear_num_heads": 32, "linear_conv_kernel_dim": 4, "num_local_experts": 256, "num_experts_per_tok": 8,
        "max_position_embeddings": 1048576,
    }  # fmt: skip
    assert config_of(written) == config_of(KIMI)
    assert config_of({**KIMI, "layer_types": types, "num_local_experts": 256}) == config_of(KIMI)
    types = (["linear_attention"] * 3 + ["full_attention"]) * 6
    sizes = {"head_dim": 64, "linear_head_dim": 128, "linear_num_heads": 16, "linear_conv_kernel_dim": 4}
    assert config_of({**LING, **sizes, "layer_types": types, "rope_theta": 1.0}) == config_of(LING)


@pytest.mark.parametrize(("given", "factor", "dense"), [(KIMI, 2.446, 1), (LING, 2.5, 2)], ids=["kimi", "ling"])
def test_what_a_config_leaves_out_is_as_transformers_has_it(
    given: dict[str, object], factor: float, dense: int
) -> None:
    left = ("routed_scaling_factor", "first_k_dense_replace")
    config = config_of({key: value for key, value in given.items() if key not in left})
    assert config.experts is not None
    assert config.experts.factor == factor
    assert [block.experts is None for block in config.blocks].index(False) == dense
    more = config_of({**given, "first_k_dense_replace": 3})
    assert [block.experts is None for block in more.blocks].index(False) == 3


def of_states(**fields: object) -> dict[str, object]:
    inner = KIMI["linear_attn_config"]
    assert isinstance(inner, dict)
    return {"linear_attn_config": {**inner, **fields}}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (of_states(kda_layers=[1, 2]), "linear_attn_config: kda_layers is"),
        (of_states(full_attn_layers=[4, 8, 12, 16, 20, 24, 28]), "full_attn_layers"),
        (of_states(gate_lower_bound=-5.0), "gate_lower_bound is -5.0; it must be absent"),
        ({"layer_types": ["full_attention"] * 27}, "it must be absent, or as linear_attn_config has it"),
        ({"num_local_experts": 128}, "num_experts is 256; it must be absent, or 128 as num_local_experts is"),
        ({"mla_use_nope": False}, "mla_use_nope is false; it must be absent or true in kimi_linear"),
        ({"moe_router_activation_func": "softmax"}, 'moe_router_activation_func is "softmax"'),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers is 1; it must be absent or 0"),
        ({"hidden_act": "situ"}, 'hidden_act is "situ"'),
    ],
)
def test_what_kimi_linear_does_not_have_is_refused_by_name(fields: dict[str, object], named: str) -> None:
    with pytest.raises(ModelError) as caught:
        config_of({**KIMI, **fields})
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"no_kda_lora": False}, "no_kda_lora is false; it must be absent or true in bailing_hybrid"),
        ({"gated_attention_proj_granularity_type": "element_wise"}, 'it must be absent or "head_wise"'),
        ({"use_mla_nope": True}, "use_mla_nope is true; it must be absent or false"),
        ({"expert_swiglu_limit_list": [0] * 23 + [7]}, "it must be absent or 0 in all layers: gates and ups"),
        ({"share_expert_swiglu_limit_list": [4] * 24}, "share_expert_swiglu_limit_list is"),
        ({"expert_swiglu_limit_list": 7.0}, "expert_swiglu_limit_list is 7.0; it must be absent or 0"),
        ({"attention_bias": True}, "attention_bias is true; it must be absent or false"),
        ({"linear_num_key_heads": 4}, "linear_num_key_heads is 4; it must be absent, or"),
        ({"moe_shared_expert_intermediate_size": 1024}, "is 1024; it must be absent, or 512 as moe_intermediate_size"),
        ({"rotary_dim": 32}, "rotary_dim is 32; it must be absent, or 64 as qk_rope_head_dim is"),
        ({"layer_group_size": 5}, "layer_group_size is 5; it must be a divisor of num_hidden_layers 24"),
        ({"kda_lower_bound": 1.0}, "kda_lower_bound is 1.0"),
        ({"scoring_func": "softmax"}, 'scoring_func is "softmax"; it must be absent or "sigmoid"'),
    ],
)
def test_what_ling_3_does_not_have_is_refused_by_name(fields: dict[str, object], named: str) -> None:
    with pytest.raises(ModelError) as caught:
        config_of({**LING, **fields})
    assert named in str(caught.value)


def test_products_of_activations_that_a_file_cuts_off_are_refused(tmp_path: Path) -> None:
    folder = save_tiny("bailing_hybrid", tmp_path / "folder")
    write_gguf(folder, tmp_path / "none.gguf", change=lambda writer: writer.add_swiglu_clamp_exp([0.0] * 4))
    assert read_config(tmp_path / "none.gguf").experts is not None
    write_gguf(folder, tmp_path / "some.gguf", change=lambda writer: writer.add_swiglu_clamp_exp([0.0] * 3 + [4.0]))
    with pytest.raises(ModelError, match=r"bailingmoe3\.swiglu_clamp_exp is .*it must be absent or 0"):
        read_config(tmp_path / "some.gguf")


def test_ranks_share_the_second_matrices_of_low_rank_and_have_the_first_ones_whole(tmp_path: Path) -> None:
    folder = save_tiny("kimi_linear", tmp_path, linear_num_heads=4)
    whole, size = read_config(folder), 2
    delta = whole.blocks[0].recurrence
    assert isinstance(delta, DeltaRule)
    assert (delta.low_rank, delta.by_channel) == (8, True)
    with Checkpoint.open(folder) as checkpoint:
        check_model(checkpoint, whole)
        layers = []
        for shard in (Shard(0, size), Shard(1, size), Shard()):
            own = shard.config(whole)
            layout = LayerLayout.of(own.layer(0), torch.float32)
            buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8)
            load_layer(checkpoint, whole, layout, 0, buffer, shard)
            layers.append((own.blocks[0].recurrence, layout.tensors(buffer)))
    (first, one), (second, two), (every, both) = layers
    assert first == second == replace(delta, num_heads=2, num_key_heads=2)
    for name in ("gates_b.weight", "times_b.weight", "time_bias", "decay"):
        assert torch.equal(torch.cat([one[name], two[name]]), both[name])
    own, parts = (each["qkv.weight"].split(rule.parts) for rule, each in ((first, one), (every, both)))
    for part in (3, 5):
        assert torch.equal(own[part], parts[part])
    for part in (0, 1, 2, 4):
        assert torch.equal(own[part], parts[part].chunk(size)[0])


def test_numbers_of_ranks_that_do_not_divide_heads_with_a_state_are_named() -> None:
    config = config_of({**TINY["kimi_linear"].config(), "linear_num_heads": 6})
    with pytest.raises(UsageError, match=r"6 heads with a state .*--gpus may be 1, 2"):
        check_divides(config, 4)


def test_decays_may_have_dimensions_of_one(tmp_path: Path) -> None:
    """As Kimi's checkpoints have them; some programs that convert one drop them."""
    folder = save_tiny("kimi_linear", tmp_path)
    path, config = folder / "model.safetensors", read_config(folder)
    tensors, found = load_file(path), []
    assert tensors["model.layers.0.self_attn.A_log"].shape == (1, 1, 6, 1)
    for flat in (False, True):
        if flat:
            tensors = {name: each.flatten() if name.endswith("A_log") else each for name, each in tensors.items()}
            save_file(tensors, path, metadata={"format": "pt"})
        with Checkpoint.open(folder) as checkpoint:
            check_model(checkpoint, config)
            checkpoint.read_into("model.layers.0.self_attn.A_log", decays := torch.empty(6))
            found.append(decays)
    assert torch.equal(*found)
    assert json.loads((folder / "config.json").read_text())["linear_num_heads"] == 6
