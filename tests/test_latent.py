"""Latent attention (MLA): rows that are both key and value, cached as halves; products of single heads; and what
transformers' classes do that a config does not say."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, Mistral4Config
from transformers.models.mistral4.modeling_mistral4 import Mistral4TopkRouter

from kit.families import TINY, save_tiny
from kit.gguf_models import write_gguf
from kit.models import Sizes, load, random_tokens, target_cache
from kit.processor import best, built, on_this_machine, threads
from kit.stored import made_up
from offload.config.block import Block
from offload.config.config_json import config_of
from offload.config.model import ModelConfig
from offload.config.norm import Norm
from offload.config.reading import read_config
from offload.errors import ModelError
from offload.formats.quantised import Codes
from offload.formats.quantised_kv import GROUP, KVCodes, encode_with_torch
from offload.formats.stored import StoredMatrix
from offload.kernels.experts import chosen
from offload.kernels.operators import OperatorAttention
from offload.kernels.products import Step, Steps, divided, room_to_widen
from offload.kernels.rope import RopeTable, Scoring
from offload.kernels.runs import Rows, Run, RunAttention
from offload.plan.shards import Shard
from offload.weights.linear import by_heads
from test_parity import assert_same_logits, in_prefill

HEADS, PAGE, PAGES, POSITION = 5, 32, 2, 40


def kernels_of(name: str, **how: Any) -> RunAttention:
    """Attention by the CPU's kernels of an instruction set."""
    return built(name).attention(page=PAGE, **how)


TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 3e-5}
DTYPES = list(TOLERANCE)
OPERATORS = "operators"
EXECUTORS = {OPERATORS: OperatorAttention, **{each: partial(kernels_of, each) for each in on_this_machine()}}
SIZES = Sizes(capacity=230, rows=4, prefill_block=32, page=16, pages=4)
# Of GLM-4.7-Flash, without what transformers has by default.
FLASH: dict[str, object] = {
    "model_type": "glm4_moe_lite", "architectures": ["Glm4MoeLiteForCausalLM"], "attention_bias": False,
    "vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240, "moe_intermediate_size": 1536,
    "num_hidden_layers": 47, "num_attention_heads": 20, "num_key_value_heads": 20, "n_shared_experts": 1,
    "n_routed_experts": 64, "num_experts_per_tok": 4, "routed_scaling_factor": 1.8, "kv_lora_rank": 512,
    "q_lora_rank": 768, "qk_rope_head_dim": 64, "qk_nope_head_dim": 192, "v_head_dim": 256, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "topk_method": "noaux_tc", "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1, "partial_rotary_factor": 1.0, "rope_theta": 1000000, "rope_scaling": None,
    "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "dtype": "bfloat16",
}  # fmt: skip


def normal(*size: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


# Rows that are both key and value.


def scoring(dim: int, dtype: torch.dtype) -> Scoring:
    rope = RopeTable(*(normal(80, 16, seed=seed, dtype=dtype) for seed in (7, 8)))  # the first 8 of each half turn
    return Scoring(rope, 0.5 * dim**-0.5, joined=True)


def runs_of(dim: int, dtype: torch.dtype) -> list[Run]:
    """Pages that the new rows are written to, and codes."""
    rows = normal(1, 2, 1, 2 * GROUP, dim, seed=3, dtype=dtype)
    codes = KVCodes(torch.zeros(KVCodes.shape_of_blocks(1, 1, 2 * GROUP, dim), dtype=torch.uint8), dim)
    encode_with_torch(rows, codes)
    pages = normal(2, PAGES, 1, PAGE, dim, seed=1, dtype=dtype)
    return [Run(pages, PAGES * PAGE), Run(codes.blocks[0], 2 * GROUP)]


def attended(attention: RunAttention, runs: list[Run], q: Tensor, row: Tensor, how: Scoring, first: int = 0) -> Tensor:
    """Attention of rows, the first of which is at POSITION + `first`."""
    at = POSITION + first
    attention.begin(Rows(q, row, row, how, at, at), [run.tokens for run in runs])
    for number, run in enumerate(runs):
        if not number:
            attention.append_rows(run)
        attention.attend(run)
    return attention.merge()[0]


@pytest.mark.parametrize("dim", [24, 288])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_halves_of_a_row_are_its_key_and_its_value(executor: str, dtype: torch.dtype, dim: int) -> None:
    q, row = normal(7, HEADS, 2 * dim, seed=5, dtype=dtype), normal(7, 1, 2 * dim, seed=6, dtype=dtype)
    how, runs = scoring(dim, dtype), runs_of(dim, dtype)
    out = attended(EXECUTORS[executor](dtype=dtype), runs, q, row, how)
    queries, written = how.rotated(q, row, POSITION)
    held = runs[0].pages.transpose(1, 2).flatten(2, 3)[:, 0]  # [2, tokens, D]
    assert torch.equal(held[:, POSITION : POSITION + 7], torch.stack(written[:, 0].chunk(2, -1)))
    codes = KVCodes(runs[1].held[None], dim).rows(dtype)[0, :, 0]
    rows = torch.cat([torch.cat([held, codes], 1)[0], torch.cat([held, codes], 1)[1]], -1).double()
    scores = 0.5 * dim**-0.5 * torch.einsum("thd,nd->thn", queries.double(), rows)
    hidden = torch.arange(PAGES * PAGE) > POSITION + torch.arange(7)[:, None]
    scores[..., : PAGES * PAGE].masked_fill_(hidden[:, None], -torch.inf)
    wanted = (scores.softmax(-1) @ rows).flatten(1)
    assert_close(out.double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dim", [24, 288])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_rows_attention_to_halves_has_the_same_bits_beside_any_rows(
    executor: str, dtype: torch.dtype, dim: int
) -> None:
    """At even and odd places, on any number of threads. Behind a row that is alone there are no numbers."""
    make, how = EXECUTORS[executor], scoring(dim, dtype)
    q, row = normal(8, HEADS, 2 * dim, seed=5, dtype=dtype), normal(8, 1, 2 * dim, seed=6, dtype=dtype)
    wanted = attended(make(dtype=dtype), runs := runs_of(dim, dtype), q, row, how)
    for first, count in ((0, 1), (7, 1), (2, 3), (1, 2)):
        some = slice(first, first + count)
        if executor != OPERATORS:
            runs[0].pages.transpose(1, 2).flatten(2, 3)[:, :, POSITION + first + count :].fill_(torch.nan)
        with threads(count):
            assert torch.equal(attended(make(dtype=dtype), runs, q[some], row[some], how, first), wanted[some])
        runs = runs_of(dim, dtype)
        attended(make(dtype=dtype), runs, q, row, how)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("executor", list(EXECUTORS)[1:])
def test_tiles_of_halves_of_any_size_give_the_same_bits(executor: str, dtype: torch.dtype) -> None:
    dim, make = 40, EXECUTORS[executor]
    q, row = normal(3, HEADS, 2 * dim, seed=5, dtype=dtype), normal(3, 1, 2 * dim, seed=6, dtype=dtype)
    [whole, _], how, found = runs_of(dim, dtype), scoring(dim, dtype), list[Tensor]()
    parts = [Run(whole.pages[:, at : at + 1].clone(), PAGE, at * PAGE) for at in range(PAGES)]
    for runs in ([whole], parts):
        attention = make(dtype=dtype)
        attention.begin(Rows(q, row, row, how, POSITION, POSITION), [run.tokens for run in runs])
        for run in runs:
            attention.append_rows(run)
            attention.attend(run)
        found.append(attention.merge()[0])
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("executor", list(EXECUTORS)[1:])
def test_attention_to_halves_is_nearer_to_fp64_than_torchs(executor: str, dtype: torch.dtype) -> None:
    """With weights of all sizes, of many tokens and of few."""
    dim, errors = 288, dict[str, float]()
    pages, how = normal(2, 16, 1, PAGE, dim, seed=1, dtype=dtype), replace(scoring(dim, dtype), scale=0.05)
    sizes = torch.linspace(0.02, 1.5, 20)[None, :, None]
    q, row = (sizes * normal(4, 20, 2 * dim, seed=5)).to(dtype), normal(4, 1, 2 * dim, seed=6, dtype=dtype)
    at, tokens = 16 * PAGE - 4, 16 * PAGE
    for name in (OPERATORS, executor):
        attention, run = EXECUTORS[name](dtype=dtype), Run(pages, tokens)
        attention.begin(Rows(q, row, row, how, POSITION, at), [tokens])
        attention.append_rows(run)
        attention.attend(run)
        held = torch.cat([*pages.transpose(1, 2).flatten(2, 3)[:, 0]], -1).double()
        scores = 0.05 * torch.einsum("thd,nd->thn", how.rotated(q, row, POSITION)[0].double(), held)
        hidden = torch.arange(tokens) > at + torch.arange(4)[:, None]
        wanted = scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1) @ held
        errors[name] = float((attention.part().out.double() - wanted).square().mean().sqrt())
    assert errors[executor] <= (1 if dtype == torch.float32 else 0.2) * errors[OPERATORS]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("executor", list(EXECUTORS)[1:])
def test_a_number_that_all_tokens_have_comes_out_as_it_is(executor: str, dtype: torch.dtype) -> None:
    """Weights sum to 1 as they are multiplied, rounded or not: no part of a row's output is lost."""
    dim, run = 24, runs_of(24, dtype)[0]
    run.pages[1, ..., 20] = 1
    q, row = normal(5, HEADS, 2 * dim, seed=5, dtype=dtype), normal(5, 1, 2 * dim, seed=6, dtype=dtype)
    attention = EXECUTORS[executor](dtype=dtype)
    attention.begin(Rows(q, row, row, scoring(dim, dtype), POSITION, POSITION), [run.tokens])
    attention.attend(run)
    assert_close(attention.part().out[..., dim + 20], torch.ones(5, HEADS), atol=5e-7, rtol=0)


def test_masses_of_all_heads_are_of_one_row() -> None:
    dim, dtype = 24, torch.float32
    q, row = normal(3, HEADS, 2 * dim, seed=5), normal(3, 1, 2 * dim, seed=6)
    found = list[Tensor]()
    for make in (EXECUTORS[OPERATORS], lambda **how: best().attention(page=PAGE, **how)):
        attention, runs = make(dtype=dtype, chunk=8), runs_of(dim, dtype)[:1]
        attention.begin(Rows(q, row, row, scoring(dim, dtype), POSITION, POSITION), [PAGES * PAGE], masses=True)
        attention.append_rows(runs[0])
        attention.attend(runs[0])
        mass = attention.merge()[1]
        assert mass is not None
        found.append(mass)
    assert found[0].shape == (3, 1, PAGES * PAGE // 8)
    assert_close(found[0].sum(2), torch.full((3, 1), float(HEADS)))
    assert_close(*found, atol=1e-5, rtol=1e-5)


def test_a_narrow_table_is_a_wide_one_whose_other_pairs_stay() -> None:
    rope, x, wide = scoring(24, torch.float32).rope, normal(5, 3, 48, seed=9), torch.ones(80, 2, 24)
    cos, sin = wide.clone(), wide * 0
    cos[..., :8], sin[..., :8] = (part.unflatten(1, (2, -1)) for part in (rope.cos, rope.sin))
    own, other = (table.rotated(x, x, 7)[1] for table in (rope, RopeTable(cos.flatten(1), sin.flatten(1))))
    assert torch.equal(own, other)
    assert not torch.equal(own, x)


# Products of single heads.


@pytest.mark.parametrize("kind", ["plain", "codes", "Q8_0"])
def test_products_beside_each_other_have_the_bits_that_each_has_alone(kind: str) -> None:
    """More steps than one after the other there may be, before one that reads what they write."""
    heads, outputs, inputs, rows, dtype = 40, 16, 64, 3, torch.bfloat16
    plain = normal(heads * outputs, inputs, seed=1, dtype=dtype)
    weight: Tensor | Codes | StoredMatrix = plain
    if kind == "codes":
        weight = Codes(torch.zeros(Codes.shape_of_blocks((heads * outputs, inputs), 4), dtype=torch.uint8))
        best().quantise(plain, weight)
    elif kind == "Q8_0":
        weight = made_up("Q8_0", heads * outputs, inputs, seed=3)
    x, last = normal(rows, heads * inputs, seed=2, dtype=dtype), normal(8, heads * outputs, seed=4, dtype=dtype)
    room = room_to_widen(rows, heads * outputs)
    parts = zip(x.chunk(heads, 1), divided(weight, heads), strict=True)
    alone, beside, sums = x.new_empty(rows, heads * outputs), x.new_empty(rows, heads * outputs), x.new_empty(rows, 8)
    steps = list[Step]()
    for number, (own, part) in enumerate(parts):
        at = slice(number * outputs, (number + 1) * outputs)
        Steps(best(), [Step(own, part, None, alone[:, at])], room).run(rows)
        others = room_to_widen(rows, inputs)
        steps.append(Step(own, part, None, beside[:, at], room=others, beside=number > 0))
    steps.append(Step(beside, last, None, sums))
    Steps(best(), steps, room).run(rows)
    assert torch.equal(alone, beside)
    assert_close(sums.float(), alone.float() @ last.float().T, atol=0.5, rtol=2e-2)
    if kind == "plain":
        made = by_heads(x.unflatten(1, (heads, -1)), weight).flatten(1)
        assert_close(made, alone, atol=2e-2, rtol=2e-2)


# Models.


@pytest.mark.parametrize("name", ["glm4_moe_lite", "deepseek_v2"])
def test_a_file_with_keys_and_values_in_one_tensor_is_one_with_two(tmp_path: Path, name: str) -> None:
    """Old files, and those of today, whose keys are transposed."""
    folder, found = save_tiny(name, tmp_path / "folder"), list[Tensor]()
    for joins in (False, True):
        write_gguf(folder, path := tmp_path / f"{joins}.gguf", joins_latent=joins)
        decoder = load(path)
        assert decoder.config.names.splits_latent != joins
        found.append(in_prefill(decoder, target_cache(decoder, SIZES), random_tokens(40), 32))
    assert torch.equal(*found)


def test_scores_with_a_bias_are_sigmoids_whatever_an_old_file_says(tmp_path: Path) -> None:
    """As files of GLM-4.7-Flash from before llama.cpp 18980 do."""

    def change(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(f"{writer.arch}.expert_gating_func")
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)

    write_gguf(save_tiny("glm4_moe_lite", tmp_path), path := tmp_path / "model.gguf", change=change)
    experts = read_config(path).experts
    assert experts is not None
    assert (experts.scoring, experts.bias) == ("sigmoid", "ranks")


def _small(folder: Path) -> None:
    """Low-rank rows so small that the epsilon of their norms is seen."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    small = {name: part * 3e-3 for name, part in tensors.items() if "kv_a_proj" in name or "q_a_proj" in name}
    assert small
    save_file(tensors | small, path, metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["glm4_moe_lite", "deepseek_v2, groups", "kimi_linear, groups"])
def test_norms_of_low_rank_rows_have_an_epsilon_of_their_own(tmp_path: Path, name: str) -> None:
    """1e-6, whatever the config has: transformers makes them so. llama.cpp, vLLM and SGLang take the config's."""
    _small(save_tiny(name, tmp_path))
    tokens, config = random_tokens(40), read_config(tmp_path)
    assert config.norm.eps == 1e-5
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
        theirs = model(torch.tensor([tokens])).logits[0]
    changed = config.mapped(lambda block: _with_norm(block, Norm(1e-5)))
    ours, other = (
        in_prefill(decoder, target_cache(decoder, SIZES), tokens, 32)
        for decoder in (load(tmp_path), load(tmp_path, config=changed))
    )
    assert_same_logits(ours, theirs)
    assert float((other - theirs).abs().max()) > 1e-3 * float(theirs.abs().max())


def _with_norm(block: Block, norm: Norm) -> Block:
    return replace(block, mixer=replace(block.attention, qk_norm=norm)) if block.attends else block


@torch.inference_mode()
def test_shares_of_mistral_4_are_rounded_to_the_dtype() -> None:
    """As by transformers' router, whose softmax is in it."""
    fields = {**TINY["mistral4"].config(), "n_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0}
    fields = {key: value for key, value in fields.items() if key != "model_type"}
    theirs = Mistral4TopkRouter(Mistral4Config(**fields)).bfloat16()  # type: ignore[arg-type]
    experts = config_of({**fields, "model_type": "mistral4"}).experts
    assert experts is not None
    rows, matrix = ((4 * normal(*size, seed=size[0])).round().bfloat16() / 8 for size in ((40, 32), (12, 32)))
    theirs.weight.copy_(matrix)
    weights, scores = theirs(rows)[1].float().sort(1)[0], rows.float() @ matrix.float().T
    for own, is_same in ((experts, True), (replace(experts, rounded="none"), False)):
        shares = chosen(own, scores, dtype=torch.bfloat16)[1].sort(1)[0]  # of equal ones topk may take another
        assert torch.equal(shares, weights) is is_same


def test_a_token_of_glm_flash_takes_54_kb_of_cache() -> None:
    config = config_of(FLASH)
    assert config.kv_bytes_per_token(2) == 54144
    assert round(config.num_parameters() / 1e9, 1) == 29.9
    assert config.kv_shapes[0] == (1, 288)
    assert config.next_token == config.blocks[-1]
    own = Shard(1, 4).config(config)
    assert (own.num_heads, own.num_kv_heads, own.kv_bytes_per_token(2)) == (5, 1, 54144)


def scale(**fields: object) -> float:
    found: ModelConfig = config_of({**FLASH, **fields})
    return found.block.attention.score_scale


def test_the_scale_of_scores_has_the_square_of_mscale() -> None:
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
    assert math.isclose(scale(), 256**-0.5)
    tempered = yarn | {"mscale": 0.707, "mscale_all_dim": 0.707}
    assert math.isclose(scale(rope_scaling=tempered), 256**-0.5 * (0.0707 * math.log(40) + 1) ** 2)
    assert math.isclose(scale(rope_scaling=yarn), 256**-0.5)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"kv_lora_rank": 511}, "kv_lora_rank is 511; it must be even"),
        ({"attention_bias": True, "q_lora_rank": None}, "attention_bias is true; it must be false without q_lora_rank"),
        ({"qk_head_dim": 128}, "qk_head_dim is 128; it must be 256"),
        ({"topk_method": "greedy"}, 'topk_method is "greedy"; it must be absent or noaux_tc'),
        ({"scoring_func": "softmax"}, 'scoring_func is "softmax"'),
        ({"model_type": "deepseek_v2", "topk_method": "greedy"}, "norm_topk_prob is true; it must be absent or False"),
        ({"model_type": "deepseek_v3", "moe_layer_freq": 2}, "moe_layer_freq is 2; it must be 1"),
        (
            {"model_type": "mistral4", "rope_scaling": {"type": "yarn", "factor": 8, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor is 0.5; it must be 0.25",
        ),
    ],
)
def test_what_latent_attention_is_not_here_is_refused_by_name(fields: dict[str, object], named: str) -> None:
    with pytest.raises(ModelError) as caught:
        config_of({**FLASH, **fields})
    assert named in str(caught.value)
