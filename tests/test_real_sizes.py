"""Models of 7B and 13B parameters at 120,000 tokens, as planned for GPUs of 24 GB, on paper and without their bytes:
every kind of pass keeps its budget of launches and waits, orders all that it does, and allocates what is planned.

Attention of few rows is launched as on a GPU, by the Triton programs, which are not run. Budgets may only go down.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from offload.config.model import ModelConfig
from offload.config.reading import read_config
from offload.formats.quantised_kv import GROUP
from offload.kv.quantised import QuantisedCache
from offload.model.passes import forward
from offload.plan.kernel_counts import block_kernels, layer_kernels
from offload.plan.options import Options
from offload.plan.passes import Passes, graph_levels
from offload.plan.request import Request
from offload.plan.sizing import KV_TAIL, run_tiles
from offload.plan.what_if import LLAMA2_7B, LLAMA2_13B, LLAMA_68M

pytest.importorskip("triton")

from offload.transfer.hidden_rows import ResidentRows
from offload.transfer.link import CudaEvent
from offload.worker.worker import Worker
from paper.real_sizes import GPU, NUM_PROMPT, planned, worker_without_bytes

NUM_PREFILLED = 512  # tokens, after all others of the prompt: a block


def _pass(level: str, num_rows: int) -> Callable[[Worker], object]:
    return lambda worker: forward(worker.levels[level], [1] * num_rows, num_rows)


def _prefill(worker: Worker, num_tokens: int = NUM_PREFILLED) -> None:
    worker.levels["target"].truncate(NUM_PROMPT - num_tokens)
    worker.prefill([1] * num_tokens, lambda num_tokens: None)


PASSES: dict[str, Callable[[Worker], object]] = {
    "target, 1 row": _pass("target", 1),
    "target, 16 rows": _pass("target", 16),
    "retrieval, 1 row": _pass("retrieval", 1),
    "draft, 1 row": _pass("draft", 1),
    "refresh": lambda worker: worker.refresh(1),
    "prefill, 512 rows": _prefill,
}


@dataclass(frozen=True)
class Case:
    """bits: see `planned`. budgets: (launches, waits of the host) of each pass, in the order of PASSES. A layer whose
    weights are made of their codes takes five launches. The prefill waits for copies of pages that it has no rows of
    any more: their slots are for others then."""

    target: ModelConfig
    num_gpus: int
    offload: tuple[str, ...]
    budgets: tuple[tuple[int, int], ...]
    bits: dict[str, int] = field(default_factory=dict)


EXACT_WEIGHTS, EXACT = {"weight_bits": 16}, {"weight_bits": 16, "kv_bits": 16}
CASES = {
    "7B": Case(LLAMA2_7B, 1, ("kv", "weights"), ((2201, 0), (2201, 0), (5, 0), (5, 0), (2058, 0), (3403, 6))),
    "7B, exact weights": Case(
        LLAMA2_7B, 1, ("kv",), ((2019, 0), (2019, 0), (5, 0), (5, 0), (1152, 0), (3219, 6)), EXACT_WEIGHTS
    ),
    "13B": Case(LLAMA2_13B, 1, ("kv", "weights"), ((2759, 0), (2759, 0), (5, 0), (5, 0), (1484, 0), (4259, 6))),
    "13B, two GPUs": Case(LLAMA2_13B, 2, ("kv",), ((2685, 0), (2685, 0), (645, 0), (5, 0), (77, 0), (4191, 6)), EXACT),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.deep
def test_every_kind_of_pass_keeps_its_budget_and_the_plan_its_bytes(case: Case) -> None:
    plan = planned(case.target, LLAMA_68M, case.num_gpus, **case.bits)
    assert plan.placement.offload == case.offload
    counted = {}
    with worker_without_bytes(plan, case.target, LLAMA_68M) as (worker, gpu):
        for level, num_rows in (("target", 16), ("retrieval", 16), ("draft", 300)):
            forward(worker.levels[level], [1] * num_rows, 1)  # the first pass makes and fetches more
        worker.refresh(1)  # likewise
        for level in ("retrieval", "draft"):
            for _ in range(2):  # the second one records a graph, where all weights are on the GPU
                forward(worker.levels[level], [1], 1)
        for name, run in PASSES.items():
            launches, waits = gpu.launches.total(), gpu.syncs.total()
            run(worker)
            counted[name] = (gpu.launches.total() - launches, gpu.syncs.total() - waits)
        ledger = worker.memory.allocated()["host"]
    assert gpu.problems == []
    assert bool(gpu.launches["multiply_codes"]) == (plan.composition.weight_bits < 16) == (not case.bits)
    assert gpu.bytes_peak <= plan.placement.total_device_bytes
    planned_there = {name: size // case.num_gpus for name, size in plan.placement.host_bytes.items()}
    assert all(size <= planned_there[name] for name, size in ledger.items())
    assert ledger["kv cache"] == planned_there["kv cache"]
    assert ledger["raw pages"] == planned_there["raw pages"]
    over = {
        name: got
        for (name, got), budget in zip(counted.items(), case.budgets, strict=True)
        if got[0] > budget[0] or got[1] > budget[1]
    }
    assert not over


LARGE = replace(GPU, device_free_bytes=139 * 10**9)
ON_CHIP = {
    "default": (Options(), {"target": 12 + 15, "retrieval": 14 + 2, "draft": 12}),
    "cache in 4 bits": (Options(kv_bits=4, weight_bits=16), {"target": 10 + 15, "self": 10 + 1, "draft": 12}),
}


@pytest.mark.parametrize(("options", "most"), ON_CHIP.values(), ids=ON_CHIP)
def test_where_all_is_on_the_gpu_a_pass_is_one_launch_of_few_kernels(options: Options, most: dict[str, int]) -> None:
    """Kernels of a layer: its products, norms and sums, rotation, gate, and a launch for 8192 tokens that it attends
    to; of codes, a second one for each product. As a graph a pass has its inputs, a launch, and its result."""
    target = LLAMA2_7B.changed(num_layers=4)
    plan = Request(LLAMA2_7B, LLAMA_68M, options, LARGE).plan(num_prompt_tokens=NUM_PROMPT, max_tokens=200)
    assert plan.placement.offload == ()
    counted = {}
    with worker_without_bytes(plan, target, LLAMA_68M) as (worker, gpu):
        for name, level in worker.levels.items():
            forward(level, [1] * (300 if name == "draft" else 16), 1)  # fills the draft's window
        for name, level in worker.levels.items():
            launches = []
            for _ in range(3):
                before = gpu.launches.total()
                forward(level, [1], 1)
                launches.append(gpu.launches.total() - before)
            num_layers = LLAMA_68M.num_layers if name == "draft" else target.num_layers
            counted[name] = (launches[0] - 8) // num_layers
            assert launches[2] <= 6
    assert gpu.problems == []
    assert counted.keys() == most.keys()
    assert all(counted[name] <= most[name] for name in most), counted


QWEN3_6_27B = {
    "model_type": "qwen3_5_text", "vocab_size": LLAMA_68M.vocab_size, "hidden_size": 5120, "intermediate_size": 17408,
    "num_hidden_layers": 8, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256,
    "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "max_position_embeddings": 2**18, "partial_rotary_factor": 0.25,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip


def test_a_state_takes_two_launches_and_in_a_prefill_two_for_128_rows(
    tmp_path: Path,
) -> None:
    """Of eight layers six have a state. A pass that is no graph, one that is, and a prefill."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_6_27B))
    target = read_config(tmp_path)
    plan = Request(target, None, Options(kv_bits=4, weight_bits=16), LARGE).plan(
        num_prompt_tokens=NUM_PROMPT, max_tokens=200
    )
    assert plan.placement.offload == ()
    with worker_without_bytes(plan, target, LLAMA_68M) as (worker, gpu):
        for name, level in worker.levels.items():
            counted = []
            for _ in range(3):
                gpu.launches.clear()
                forward(level, [1] * 5, 1)
                counted.append((gpu.launches["advance_states"], gpu.launches["finish_rows"], gpu.launches["graph"]))
            assert counted[::2] == [(6, 6, 0), (0, 0, 1)], name
        worker.levels["target"].truncate(0)
        for expected in (6 * 4, 6 * (4 + 1)):  # states come to a later prefill's first row by launches of their own
            gpu.launches.clear()
            worker.prefill([1] * 512, lambda num_tokens: None)
            assert gpu.launches["advance_states"] == gpu.launches["finish_rows"] == expected
    assert gpu.problems == []
    assert gpu.bytes_peak <= plan.placement.total_device_bytes


SIZES = {"vocab_size": LLAMA_68M.vocab_size, "hidden_size": 2816, "intermediate_size": 2112, "rms_norm_eps": 1e-6}
MIXTURE = {"num_experts": 128, "moe_intermediate_size": 704}
GEMMA_4 = SIZES | MIXTURE | {
    "model_type": "gemma4_text", "num_hidden_layers": 6, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": 2, "attention_k_eq_v": True,
    "sliding_window": 1024, "hidden_size_per_layer_input": 0, "enable_moe_block": True, "top_k_experts": 8,
    "tie_word_embeddings": True,
}  # fmt: skip
FLASH: dict[str, object] = {
    "model_type": "qwen4_exp_text", "vocab_size": LLAMA_68M.vocab_size, "hidden_size": 2560, "head_dim": 256,
    "num_attention_heads": 24, "num_key_value_heads": 2, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_experts": 128, "num_experts_per_tok": 10,
    "moe_intermediate_size": 640, "shared_expert_intermediate_size": 640, "hc_count": 4, "hc_lowrank": 320,
    "output_gate_type": "sigmoid", "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 128,
    "indexer_budget": 2048, "indexer_compress_ratio": 4, "tie_word_embeddings": True, "num_hidden_layers": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip
COUNTED: dict[str, tuple[dict[str, object], int]] = {  # with kernels of the embedding, of padding and of the head
    "gemma4_text": (GEMMA_4, 9),
    "qwen3_5_text": (QWEN3_6_27B | {"num_hidden_layers": 4}, 8),
    "qwen3_moe": (SIZES | MIXTURE | {
        "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts_per_tok": 8,
    }, 7),
    "glm4_moe_lite": (SIZES | {
        "num_hidden_layers": 2, "num_attention_heads": 20, "num_key_value_heads": 20, "q_lora_rank": 768,
        "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "n_group": 1,
        "n_routed_experts": 64, "num_experts_per_tok": 4, "n_shared_experts": 1, "moe_intermediate_size": 1536,
        "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.8, "topk_group": 1,
    }, 7),
    "lfm2_moe": (SIZES | {
        "hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "num_dense_layers": 2,
        "norm_topk_prob": True, "use_expert_bias": True, "conv_L_cache": 3, "tie_word_embeddings": True,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
    }, 8),
    "glm4": (SIZES | {
        "num_hidden_layers": 2, "num_attention_heads": 48, "num_key_value_heads": 2, "head_dim": 128,
        "attention_bias": False,
    }, 5),
}  # fmt: skip


def test_fewer_slots_have_fewer_of_the_chosen_blocks(tmp_path: Path) -> None:
    """Missed bytes follow from slots over a row's choice; where every block has one, each crosses once."""
    (tmp_path / "config.json").write_text(json.dumps(FLASH | {"max_position_embeddings": 2**18}))
    target, options = read_config(tmp_path), Options(speculation=False, offload=frozenset({"kv"}))
    plan = Request(target, None, options, LARGE).plan(num_prompt_tokens=NUM_PROMPT, max_tokens=200)
    sizing = Request(target, None, options, LARGE)._sizing
    passes = [
        Passes(sizing, replace(plan.placement, block_slots=slots), plan.request.capacity, plan.composition)
        for slots in (640, 1280, 2560, 8192, 2**18)
    ]
    assert [round(each.block_misses, 2) for each in passes] == [0.6, 0.28, 0.13, 0.04, 0.01]
    whole = passes[0].sizing.attended(plan.request.capacity) * sizing.read_kv_bytes
    assert [each.streamed_cache_bytes / whole for each in passes] == [each.block_misses for each in passes]
    kernels = [block_kernels(target, 16, slots) for slots in (0, 640, 8224)]
    assert kernels[0] == 0 < kernels[2] < kernels[1]


def launches_of(fields: dict[str, object], folder: Path, *offload: str) -> tuple[ModelConfig, list[Counter[str]]]:
    """The launches of three passes of a row, of which the last is a graph that was recorded before."""
    given = {"max_position_embeddings": 2**18, "dtype": "bfloat16"} | fields
    (folder / "config.json").write_text(json.dumps(given))
    target, options = read_config(folder), Options(speculation=False, offload=frozenset(offload))
    plan = Request(target, None, options, LARGE).plan(num_prompt_tokens=NUM_PROMPT, max_tokens=200)
    assert plan.placement.offload == offload
    assert graph_levels(plan.composition, plan.placement, LARGE, target, "bf16") == ("target",)
    with worker_without_bytes(plan, target, LLAMA_68M) as (worker, gpu):
        launches = []
        for _ in range(3):
            gpu.launches.clear()
            forward(worker.levels["target"], [1], 1)
            launches.append(gpu.launches.copy())
    assert launches[2]["graph"] == 1
    assert launches[2].total() <= 6 + len(offload)  # the clock of slots
    assert gpu.problems == []
    assert gpu.bytes_peak <= plan.placement.total_device_bytes
    return target, launches


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", COUNTED)
def test_a_pass_has_the_kernels_that_the_plan_prices_and_runs_as_a_graph(kind: str, tmp_path: Path) -> None:
    """Beside those outside layers, and a launch for each further run of a long cache."""
    fields, outside = COUNTED[kind]
    target, launches = launches_of(fields | {"model_type": kind}, tmp_path)
    attentions = [block.attention for block in target.blocks if block.attends]
    runs = sum(-(-15 // run_tiles(each)) if each.window is None else 1 for each in attentions)
    assert launches[0]["attend_spans"] == runs
    assert launches[0].total() - (runs - len(attentions)) - outside == sum(map(layer_kernels, target.blocks))


@pytest.mark.few(1)
@pytest.mark.parametrize("offload", [(), ("kv",)])
def test_a_pass_over_chosen_blocks_is_a_graph_wherever_they_are(offload: tuple[str, ...], tmp_path: Path) -> None:
    """With the kernels that the plan prices, and 41 outside layers, 43 where blocks are on the host: most of these
    compute the rows' places."""
    target, launches = launches_of(FLASH, tmp_path, *offload)
    more = block_kernels(target, 16, 8224 if offload else 0)
    assert launches[0].total() == sum(map(layer_kernels, target.blocks)) + more + 41 + 2 * bool(offload)


@pytest.mark.deep
def test_hidden_rows_cross_the_link_without_a_wait_of_the_host() -> None:
    """In four blocks as often as where they are on the device: it waits for other things."""
    case, num_tokens = CASES["13B"], 4 * NUM_PREFILLED
    plan = planned(case.target, LLAMA_68M, case.num_gpus)
    with worker_without_bytes(plan, case.target, LLAMA_68M, with_flash=True) as (worker, gpu):
        streamed, dtype = worker._hidden_rows, worker.full.shape.dtype
        resident = ResidentRows(worker.full.arena, case.target.row_size, dtype, block=NUM_PREFILLED)
        moved, waits = [], []
        for rows in (resident, resident, streamed):  # the first one sends other pages home, too
            before, waited = worker.link_stats, gpu.syncs.total()
            worker._hidden_rows = rows
            _prefill(worker, num_tokens)
            moved.append(worker.link_stats - before)
            waits.append(gpu.syncs.total() - waited)
    assert gpu.problems == []
    assert gpu.bytes_peak <= plan.placement.total_device_bytes
    crossed = (case.target.num_layers - 1) * num_tokens * case.target.hidden_size * 2
    assert moved[2].bytes_to_device - moved[1].bytes_to_device == crossed
    assert moved[2].bytes_to_host - moved[1].bytes_to_host == crossed
    assert waits[2] == waits[1]


@pytest.mark.deep
def test_a_cache_in_4_bits_keeps_the_plans_bytes() -> None:
    """On a GPU of 48 GB: what its passes and the encoding of new tokens take, and that nothing waits in a pass."""
    hardware = replace(GPU, device_free_bytes=46 * 10**9)
    options = Options(kv_bits=4, gamma=7)
    plan = Request(LLAMA2_7B, LLAMA_68M, options, hardware).plan(num_prompt_tokens=NUM_PROMPT, max_tokens=200)
    assert plan.placement.offload == ("kv",)
    with worker_without_bytes(plan, LLAMA2_7B, LLAMA_68M) as (worker, gpu):
        cache = worker._copies
        assert isinstance(cache, QuantisedCache)
        cache.coded = cache._exact = NUM_PROMPT - 1024  # tokens that were encoded before
        worker.full.stable_length = NUM_PROMPT
        gpu.reset_peak()
        before = gpu.bytes_now
        worker.refresh(1)
        assert 60e6 < gpu.bytes_peak - before <= plan.placement.device_bytes["fetched chunks"]
        assert cache.coded == (NUM_PROMPT - KV_TAIL) // GROUP * GROUP
        counted = []
        for num_rows in (1, 16, 40):
            launches, waits = gpu.launches.total(), gpu.syncs.total()
            gpu.reset_peak()
            before = gpu.bytes_now
            forward(worker.levels["self"], [1] * num_rows, num_rows)
            assert gpu.bytes_peak - before <= plan.placement.device_bytes["attention scratch"]
            worker.levels["self"].truncate(NUM_PROMPT)
            counted.append((gpu.launches.total() - launches, gpu.syncs.total() - waits))
        forward(worker.levels["target"], [1] * 16, 1)
        launches, waits = gpu.launches.total(), gpu.syncs.total()
        worker.refresh(1)
        counted.append((gpu.launches.total() - launches, gpu.syncs.total() - waits))
    assert gpu.problems == []
    assert gpu.bytes_peak <= plan.placement.total_device_bytes
    for (launches, waits), most in zip(counted, (647, 647, 1893, 4), strict=True):
        assert launches <= most
        assert waits == 0


@pytest.mark.deep
def test_a_triton_program_that_does_not_wait_for_its_keys_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["7B"]
    plan = planned(case.target, LLAMA_68M, case.num_gpus)
    with worker_without_bytes(plan, case.target, LLAMA_68M) as (worker, gpu):
        monkeypatch.setattr(CudaEvent, "wait", lambda event: None)
        forward(worker.levels["target"], [1], 1)
        problems = gpu.problems
        monkeypatch.undo()
    assert any("race: read" in problem and "unpack_pages" in problem for problem in problems)


@pytest.mark.deep
@pytest.mark.parametrize(("name", "launches"), [("7B", 4044), ("7B, exact weights", 3860), ("13B", 5062)])
def test_a_prefill_by_flash_attn_keeps_its_budget(name: str, launches: int) -> None:
    case = CASES[name]
    plan = planned(case.target, LLAMA_68M, case.num_gpus, **case.bits)
    with worker_without_bytes(plan, case.target, LLAMA_68M, with_flash=True) as (worker, gpu):
        before, waits = gpu.launches.total(), gpu.syncs.total()
        _prefill(worker)
        taken, waited = gpu.launches.total() - before, gpu.syncs.total() - waits
    assert gpu.problems == []
    assert gpu.launches["flash_attn_with_kvcache"] == case.target.num_layers * 15  # tiles
    assert gpu.bytes_peak <= plan.placement.total_device_bytes
    assert taken <= launches
    assert waited <= case.budgets[-1][1]
