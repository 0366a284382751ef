"""A GPU's mixtures of experts without a GPU: compiled for the GPUs that they are for, and in plans."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="triton is not installed: nothing of the GPU's kernels is tested")

import triton
import triton.language as tl

from offload.config.block import Encodings
from offload.config.model import ModelConfig, llama_shaped
from offload.config.networks import Experts, FeedForward
from offload.errors import TriforceError
from offload.formats.encodings import ENCODINGS
from offload.formats.fixed_gpu import as_bytes, check_bytes, joins_bytes, sums_of
from offload.kernels.gpu import expert_programs as programs
from offload.kernels.gpu.experts import (
    COLUMNS,
    FIXED_ROWS,
    PAIRS,
    PLAIN,
    PLAIN_STAGES,
    PLAIN_WARPS,
    ROWS,
    SCORED,
    arranging_warps,
    scratch_bytes,
)
from offload.kernels.gpu.fixed_programs import fix_rows, multiply_fixed
from offload.kernels.gpu.fixed_rows import GROUPS
from offload.plan.composition import PLAIN as PLAIN_LEVELS
from offload.plan.cost import Cost
from offload.plan.cost_gpu import GPU as COSTS
from offload.plan.fixed_bytes import fixed_bytes
from offload.plan.options import Options
from offload.plan.passes import graph_levels
from offload.plan.sizing import PREFILL_BLOCK, Sizing
from test_gpu_kernels import CAPABILITIES, SHARED_BYTES, STORED, Compiled, book_kind, compiled
from test_planner import GPU, plan

NUMBERS = ("rows", "out")
PRODUCT = {"pair_of": "*i32", "expert_of": "*i32", "places": "*i32", "content": "*u8", "book": "*i16"}
FIXED = [name for name, own in ENCODINGS.items() if own.has_integers]
FIXED_PRODUCT = PRODUCT | {"planes": "*i8", "units": "*fp32", "sums": "*fp32", "counts": "*i32"}
SIZES = ("num_inputs", "num_outputs", "step", "gate_at", "weight_at", "bias_at", "out_stride")
ENDINGS = {
    "gate": {"GATED": True, "ADDED": True, "ACTIVATION": 0},
    "no gate": {"GATED": False, "ADDED": True, "ACTIVATION": 2},
    "down": {"GATED": False, "ADDED": False, "ACTIVATION": -1},
}


def copied(found: Compiled) -> list[int]:
    """Bytes of each copy past the registers."""
    copies = re.findall(r"cp\.async\.\w+\.shared\.global \[[^\]]*\], \[[^\]]*\], (\w+)", found.ptx)
    return [int(num_bytes, 0) for num_bytes in copies]


def has_a_rows_bits_beside_any(found: Compiled) -> bool:
    """By the one instruction of a matrix unit that multiplies 16 rows."""
    return "mma.sync" in found.ptx and "wgmma" not in found.ptx and "tf32" not in found.ptx


@pytest.mark.few(2)
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_plain_experts_come_in_copies_of_16_bytes_without_a_spill(
    capability: int, rows: int, dtype: str, ending: str
) -> None:
    found = compiled(
        programs.multiply_plain, capability, PRODUCT | dict.fromkeys(NUMBERS, f"*{dtype}"),
        ENDINGS[ending] | {"ROWS": rows, "WIDEN": False} | PLAIN,
        warps=PLAIN_WARPS, stages=PLAIN_STAGES, divisible=SIZES,
    )  # fmt: skip
    assert found.spilled_bytes == 0
    assert found.registers <= 96
    assert found.shared_bytes <= 33 * 2**10  # so three programs have room
    assert set(copied(found)) == {16}
    assert has_a_rows_bits_beside_any(found)


@pytest.mark.few(1)
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("name", STORED)
def test_stored_experts_are_multiplied_without_a_spill(capability: int, dtype: str, ending: str, name: str) -> None:
    own, tiling = ENCODINGS[name], ENCODINGS[name].expert_tiling
    found = compiled(
        programs.multiply_blocks, capability,
        PRODUCT | {"book": book_kind(name)} | dict.fromkeys(NUMBERS, f"*{dtype}"),
        ENDINGS[ending] | {"ROWS": ROWS[0], "OUTPUTS": tiling.outputs, "BLOCKS": tiling.blocks(own), "WIDEN": False}
        | {"FORM": own},
        warps=tiling.warps, stages=tiling.stages, divisible=SIZES[1:],
    )  # fmt: skip
    assert found.spilled_bytes == 0
    assert found.registers <= 255
    assert found.shared_bytes <= SHARED_BYTES
    assert copied(found)
    assert has_a_rows_bits_beside_any(found)
    assert ".ftz" not in found.ptx
    assert not re.search(r"ld\.global[.\w]*\.b?8\b", found.ptx)


@pytest.mark.few(1)
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("rows", FIXED_ROWS)
@pytest.mark.parametrize(("ending", "dtype"), [("gate", "bf16"), ("no gate", "bf16"), ("down", "fp16")])
@pytest.mark.parametrize("name", FIXED)
def test_stored_experts_in_fixed_point_are_multiplied_with_next_to_no_spill(
    capability: int, rows: int, ending: str, dtype: str, name: str
) -> None:
    """What spills is computed once for each matrix. Only what the definition fuses is fused."""
    own, tiling = ENCODINGS[name], ENCODINGS[name].fixed_tiling
    found = compiled(
        multiply_fixed, capability, FIXED_PRODUCT | {"book": book_kind(name), "out": f"*{dtype}"},
        ENDINGS[ending] | {"ROWS": rows, "OUTPUTS": tiling.outputs, "FORM": own},
        warps=tiling.warps, stages=tiling.stages, divisible=SIZES[1:], fuses=False,
    )  # fmt: skip
    assert found.spilled_bytes <= 64
    assert found.registers <= 255
    assert found.shared_bytes <= SHARED_BYTES
    assert copied(found)
    assert joins_bytes(found.ttgir)
    assert "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32" in found.ptx
    assert "wgmma" not in found.ptx
    assert ".ftz" not in found.ptx
    each = 8 * tiling.outputs * rows // (32 * tiling.warps) * (2 if own.group == 16 else 1)
    fused = each * (2 if sums_of(own) else 1)
    activated = 7 * -(-tiling.outputs * rows // (32 * tiling.warps)) if ending == "gate" else 0
    assert found.ptx.count("fma.rn.f32") == fused + activated


@triton.jit
def store_bytes(words, out, STEP: tl.constexpr):
    """Bytes in the layout of a store, which has one of them in each thread."""
    at = tl.arange(0, 2)[:, None, None] * 256 + tl.arange(0, 32)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    own = as_bytes(tl.load(words + at))
    byte = (
        tl.arange(0, 2)[:, None, None] * 1024 + tl.arange(0, 32)[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    )
    tl.store(out + byte * STEP, own)


def test_a_program_whose_bytes_are_not_neighbours_in_a_register_is_refused() -> None:
    """As another version of Triton might make one."""
    wrong = compiled(store_bytes, 90, {"words": "*i32", "out": "*i8"}, {"STEP": 1000})
    with pytest.raises(TriforceError, match="puts the bytes of codes into registers in an order"):
        check_bytes(SimpleNamespace(hash="wrong", asm={"ttgir": wrong.ttgir}))
    with pytest.raises(TriforceError):
        check_bytes(SimpleNamespace(hash="none", asm={"ttgir": ""}))
    check_bytes(None)


@pytest.mark.few(2)
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["Q2_K", "Q4_K", "MXFP4", "Q8_0"])
def test_rows_come_into_fixed_point_without_a_spill(capability: int, dtype: str, name: str) -> None:
    pointers = {"rows": f"*{dtype}", "chosen": "*i32", "places": "*i32", "planes": "*i8"}
    found = compiled(
        fix_rows, capability, pointers | dict.fromkeys(("units", "sums"), "*fp32"),
        {"EXPERTS": 128, "CHOSEN": True, "FORM": ENCODINGS[name], "GROUPS": GROUPS},
    )  # fmt: skip
    assert found.spilled_bytes == 0
    assert found.registers <= 64
    assert ".ftz" not in found.ptx


@pytest.mark.few(2)
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("count", "used"), [(128, 8), (32, 4), (256, 8), (512, 10), (8, 2)])
def test_routers_compile_without_a_spill(capability: int, count: int, used: int) -> None:
    padded, padded_more, padded_used = (1 << (each - 1).bit_length() for each in (count, count + 1, used))
    groups = {128: 4, 256: 8}.get(count, 1)  # no model has groups of 512
    shape = {
        "EXPERTS": count, "SCORES": count + 1, "USED": used, "SIGMOID": count > 100, "RENORMALISED": True,
        "BIASED": count == 32, "CORRECTED": count > 100, "SCALED": count == 8, "PADS": count > 8, "EPS": 1e-20,
        "SOFTMAX": count == 8, "RANKS_SCORES": count == 32, "GROUPS": groups, "GROUPS_USED": 2,
        "GROUP_BEST": 2, "FLOORED": count == 8, "ROUNDS_SCORES": True, "ROUNDS_SHARES": count != 512,
        "PADDED": padded, "GROUPS_PADDED": groups, "USED_PADDED": padded_used,
    }  # fmt: skip
    vectors = dict.fromkeys(("scores", "bias", "scale", "weights"), "*fp32")
    scored = compiled(
        programs.score_rows, capability,
        {"rows": "*bf16", "router": "*fp32", "scores": "*fp32", "factor": "fp32"}, SCORED,
        divisible=("num_inputs", "num_experts"),
    )  # fmt: skip
    chosen = compiled(
        programs.choose_experts,
        capability,
        {**vectors, "real": "*i1", "like": "*bf16", "chosen": "*i32", "factor": "fp32"},
        shape,
        warps=1,
    )
    arranged = compiled(
        programs.arrange_pairs, capability, dict.fromkeys(("chosen", "pair_of", "expert_of"), "*i32"),
        {"EXPERTS": count, "PADDED": padded_more, "ROWS": ROWS[0], "BLOCK": PAIRS[1]}, warps=arranging_warps(count),
    )  # fmt: skip
    summed = compiled(
        programs.sum_pairs, capability,
        {"made": "*bf16", "chosen": "*i32", "weights": "*fp32", "beside": "*bf16", "scores": "*fp32", "out": "*bf16"},
        {"EXPERTS": count, "SCORES": count + 1, "USED": used, "ADDS": True, "COLUMNS": COLUMNS,
         "SUM_FACTOR": 2.5, "BOTH_FACTOR": 0.5},
        divisible=("num_outputs", "stride"),
    )  # fmt: skip
    assert [each.spilled_bytes for each in (scored, chosen, arranged, summed)] == [0] * 4
    assert scored.registers <= 128
    assert max(chosen.registers, arranged.registers, summed.registers) <= 96
    assert "ld.global.v4" in scored.ptx
    assert "fma.rn.f32" in scored.ptx


def config_of(*encodings: str, experts: Experts | None = None) -> ModelConfig:
    own = experts or Experts(FeedForward(768), 128, 8)
    config = llama_shaped("llama", 32000, 2048, 0, 24, 16, 4, 128, 40960)
    return config.mapped(lambda block: replace(block, experts=own, encodings=Encodings(experts=encodings)))


@pytest.mark.parametrize("encodings", [(), ("Q4_0",) * 3, ("Q4_0", "Q8_0", "Q4_0")], ids=str)
def test_plans_count_the_scratch_of_a_block(encodings: Sequence[str]) -> None:
    """As much as is allocated at a time."""
    config = config_of(*encodings)
    assert config.experts is not None
    used = scratch_bytes(config.experts, PREFILL_BLOCK, config.hidden_size, alike=len(set(encodings[:2])) < 2)
    sizing = Sizing(config, None, Options(), replace(GPU, has_kernels=True), "bf16")
    with_experts, without = (
        fixed_bytes(each, 200, PLAIN_LEVELS)["workspace"]
        for each in (sizing, replace(sizing, target=config.mapped(lambda block: replace(block, experts=None))))
    )
    assert 0.97 * used <= with_experts - without <= 1.03 * used


def test_a_pass_is_graphs_where_kernels_run_experts() -> None:
    hardware = replace(GPU, has_kernels=True, device_free_bytes=80 * 2**30)
    config = config_of()
    made = plan(Options(speculation=False, dtype="bf16"), target=config, draft=None, hardware=hardware, prompt=1000)
    assert made.placement.expert_slots == 0

    def levels(**changes: object) -> Sequence[str]:
        given = {"placement": made.placement, "hardware": hardware, "dtype": "bf16"} | changes
        return graph_levels(made.composition, target=config, **given)  # type: ignore[arg-type]

    assert levels() == levels(dtype="fp16") == ("target",)
    assert levels(dtype="fp32") == ()
    assert levels(hardware=replace(hardware, has_kernels=False)) == ()
    assert levels(placement=replace(made.placement, expert_slots=40)) == ("target",)


def test_a_pass_of_several_graphs_counts_the_hosts_work_in_every_layer() -> None:
    """Of experts on the host."""
    hardware = replace(GPU, has_kernels=True, device_free_bytes=80 * 2**30)
    hardware = replace(hardware, rates=replace(hardware.rates, device_read=1e18))
    config, options = config_of(), Options(speculation=False, dtype="bf16")
    made = plan(options, target=config, draft=None, hardware=hardware, prompt=1000)

    def calls(slots: int) -> float:
        placement = replace(made.placement, expert_slots=slots)
        sizing = Sizing(config, None, options, hardware, "bf16")
        return Cost(sizing, placement, made.request.capacity, made.composition).device.full(1, masses=False)

    assert calls(40) - calls(0) == pytest.approx(config.num_layers * COSTS.piece_seconds, rel=1e-3)
