"""Plans of mixtures whose next-token head has experts: they are where the target's are, and a draft's pass reads, or
fetches, those in use."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from offload.config.config_json import config_of
from offload.config.model import ModelConfig
from offload.config.next_token import head_of
from offload.plan.cost import Cost
from offload.plan.cost_gpu import GPU as COSTS
from offload.plan.kernel_counts import layer_kernels
from offload.plan.options import Options
from offload.plan.placement import Placement, place
from offload.plan.planner import Plan
from offload.plan.request import Request
from offload.plan.shards import Shard
from offload.plan.sizing import Sizing
from offload.speed.hardware import RTX_4090, Hardware
from offload.transfer.memory import Memory
from offload.worker.models import _host_blocks

GPU = Hardware("cuda:0", "RTX 4090", 24 * 10**9, 256 * 10**9, True, has_kernels=True, rates=RTX_4090)
MODELS = {
    "Qwen3.6 35B-A3B": config_of({
        "model_type": "qwen3_5_moe_text", "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 262144,
        "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "rms_norm_eps": 1e-6,
        "shared_expert_intermediate_size": 512, "mtp_num_hidden_layers": 1, "dtype": "bfloat16",
    }),
    "GLM-4.5-Air": config_of({
        "model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944,
        "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
        "partial_rotary_factor": 0.5, "n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1,
        "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "attention_bias": True, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072, "dtype": "bfloat16",
    }),
}  # fmt: skip


def head(model: ModelConfig) -> ModelConfig:
    found = head_of(model)
    assert found is not None
    return found


def planned(model: ModelConfig, *, num_devices: int = 1, memory: int = 24, tokens: int = 8192) -> Plan:
    """A plan with the head as its draft. memory: GB of each device."""
    hardware = replace(GPU, num_devices=num_devices, device_free_bytes=memory * 10**9)
    options = Options(gamma=3, kv_bits=16, cpu_experts=0)
    return Request(model, head(model), options, hardware).plan(num_prompt_tokens=tokens, max_tokens=256)


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_a_heads_experts_are_counted_once_where_the_targets_are(name: str, num_devices: int) -> None:
    """On the first device or for it on the host, in the order in which blocks are pinned."""
    model = MODELS[name]
    made, all_there = planned(model, num_devices=num_devices).placement, planned(model, memory=400).placement
    experts, expert = head(model).experts_bytes(2), head(model).expert_bytes(2)
    assert made.expert_slots > 0
    assert made.host_bytes["draft experts"] == experts
    assert "draft experts" not in made.device_bytes
    own = Shard(0, num_devices).config(model).all_layers(lambda layer: layer.expert_bytes(2))
    assert made.device_bytes["expert slots"] == made.expert_slots * (own + expert)
    if num_devices > 1:
        assert made.other_device_bytes["expert slots"] == made.expert_slots * own
    assert all_there.expert_slots == 0
    assert all_there.device_bytes["draft experts"] == experts
    assert "draft experts" not in all_there.host_bytes
    assert made.device_bytes["draft layers"] == all_there.device_bytes["draft layers"] < experts


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_the_plan_counts_the_blocks_that_are_pinned(name: str, num_devices: int) -> None:
    model, memory = MODELS[name], Memory(torch.device("cpu"))
    plan = planned(model, num_devices=num_devices)
    shard = Shard(0, num_devices).config(model)
    whole, alone = (_host_blocks(plan, shard, draft, memory) for draft in (head(model), None))
    names = ("target layers", "target experts", "target embeddings", "hidden rows", "kv cache", "raw pages")
    of_target = sum(plan.placement.host_bytes.get(name, 0) for name in names)
    assert num_devices * sum(alone) == pytest.approx(of_target, rel=1e-9)
    assert sum(whole) - sum(alone) == plan.placement.host_bytes["draft experts"]


def draft_seconds(model: ModelConfig, placement: Placement, plan: Plan, hardware: Hardware = GPU) -> float:
    sizing = Sizing(model, head(model), Options(gamma=3), hardware, "bf16")
    return Cost(sizing, placement, plan.request.capacity, plan.composition).draft_pass


@pytest.mark.parametrize("name", MODELS)
def test_a_drafts_pass_reads_the_experts_in_use_and_waits_for_those_that_are_not_there(name: str) -> None:
    model = MODELS[name]
    there, slots = planned(model, memory=400), planned(model)
    own = head(model)
    read = own.layers_weight_bytes(2) - own.experts_bytes(2) + 8 * own.expert_bytes(2)
    rest = 2 * own.hidden_size**2 * 2 + own.head.nbytes(2)
    calls = COSTS.graph_seconds + layer_kernels(own.block) * COSTS.graph_kernel_seconds
    seconds = draft_seconds(model, there.placement, there)
    assert seconds - calls == pytest.approx((read + rest) / (COSTS.read_share * RTX_4090.device_read), rel=1e-3)
    fewer, more = (draft_seconds(model, replace(slots.placement, expert_slots=count), slots) for count in (2, 100))
    assert fewer > more > seconds
    assert fewer - more < 8 * own.expert_bytes(2) / GPU.link_rate


def test_a_drafts_experts_that_stay_are_counted_apart() -> None:
    """Those of a model that drafts for another one stay on the device."""
    model = MODELS["Qwen3.6 35B-A3B"]
    draft = MODELS["GLM-4.5-Air"]
    plan = planned(model)
    sizing = Sizing(model, draft, Options(offload=frozenset(("weights",)), gamma=3), GPU, "bf16")
    found = place(sizing, plan.request.capacity, plan.composition)
    assert found.device_bytes["draft experts"] == draft.all_layers(lambda layer: layer.experts_bytes(2))
    assert "draft experts" not in found.host_bytes
