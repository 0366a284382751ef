"""Routers of experts: the twin by torch's operators chooses and weighs as transformers does, and the CPU's kernels of
every instruction set as the twin."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import Cohere2MoeConfig, Ernie4_5_MoeConfig, Glm4MoeConfig, LagunaConfig, MiniMaxM2Config
from transformers.models.cohere2_moe.modeling_cohere2_moe import Cohere2MoeTopKRouter
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.laguna.modeling_laguna import LagunaTopKRouter
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTopKRouter

from kit.processor import built, on_this_machine, threads
from offload.config.networks import Experts, FeedForward, Scoring
from offload.config.norm import Norm
from offload.kernels import experts_cpu
from offload.kernels.experts import Bank, Batch, ExpertWeights, Mixture, Router, chosen, run_experts
from offload.kernels.norms import NormWeights

COUNT, USED, HIDDEN, SIZE, ROWS = 12, 4, 64, 32, 37
PLAIN = Experts(FeedForward(SIZE), COUNT, USED)
GLM = replace(PLAIN, scoring="sigmoid", bias="ranks")
KINDS: dict[str, Experts] = {
    "softmax": PLAIN,
    "softmax over all": replace(PLAIN, renormalised=False),
    "softmax with a bias": replace(PLAIN, bias="ranks", eps=0.2, floored=True),
    "softmax with a bias, not renormalised": replace(PLAIN, bias="ranks", renormalised=False),
    "softmax in groups": replace(PLAIN, renormalised=False, groups=4, groups_used=2, group_best=1, factor=2.0),
    "softmax in the dtype": replace(PLAIN, rounded="shares", groups=3, groups_used=2),
    "sigmoid": replace(PLAIN, scoring="sigmoid"),
    "sigmoid with a bias": replace(GLM, factor=2.5),
    "sigmoid, not renormalised": replace(GLM, renormalised=False),
    "sigmoid in groups": replace(GLM, groups=4, groups_used=2, eps=0.5),
    "sigmoid of rounded scores, a factor of the sum": replace(
        GLM, rounded="scores", eps=0.0, factor=2.5, scales_sum=True
    ),
    "sigmoid in the dtype after the top, averaged": replace(
        PLAIN, scoring="sigmoid", rounded="shares", ranks_scores=True, renormalised=False, averaged=True
    ),
    "sigmoid of capped scores": replace(GLM, score_cap=0.7),
    "softmax of capped scores": replace(PLAIN, score_cap=0.3, rounded="scores"),
    "scaled": replace(PLAIN, scaled=True, score_scale=0.3),
    "one of them": replace(GLM, used=1, factor=0.5),
    "all of them": replace(PLAIN, used=COUNT, scaled=True),
    "a gate beside": replace(PLAIN, gates_network=True),
}
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@dataclass
class Homes:
    """Experts that are all in their places. asked: what was chosen, call by call."""

    bank: Bank
    asked: list[Tensor] = field(default_factory=list)
    whole: Batch | None = None

    def batches(self, chosen: Tensor) -> Iterator[Batch]:
        self.asked.append(chosen.long().clone())
        yield Batch(self.bank, torch.arange(len(self.bank.places), dtype=torch.int32))


def random_of(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def in_eighths(numbers: Tensor) -> Tensor:
    return (8 * numbers).round() / 8


def homes_of(dtype: torch.dtype, *, alike: bool = False) -> Homes:
    """Random experts, or all the same."""
    parts = [(SIZE, HIDDEN), (SIZE, HIDDEN), (HIDDEN, SIZE)]
    numbers = [rows * columns for rows, columns in parts]
    content = random_of(COUNT, sum(numbers)).mul_(HIDDEN**-0.5).to(dtype)
    content = content[:1].repeat(COUNT, 1) if alike else content
    places = [
        ExpertWeights(*(part.view(shape) for part, shape in zip(each.split(numbers), parts, strict=True)))
        for each in content
    ]
    return Homes(Bank(places, content.view(torch.uint8)))


def router_of(experts: Experts, *, norm: NormWeights | None = None) -> Router:
    bias = random_of(COUNT, seed=1) if experts.bias == "ranks" else None
    scale = 1 + 0.3 * random_of(COUNT, seed=2) if experts.scaled else None
    return Router(random_of(experts.num_scores, HIDDEN, seed=3) * HIDDEN**-0.5, bias, scale, norm)


def twin(
    experts: Experts, router: Router, homes: Homes, norm: NormWeights, rows: Tensor, beside: Tensor | None = None
) -> Tensor:
    return run_experts(Mixture(experts, router, norm), homes, rows, beside, multiply=linear)  # type: ignore[arg-type]


def made_by(name: str, mixture: Mixture, homes: Homes, rows: Tensor, beside: Tensor | None = None) -> Tensor:
    """By the kernels of that name, or by the twin."""
    if name == "twin":
        return run_experts(mixture, homes, rows, beside, multiply=linear)  # type: ignore[arg-type]
    return experts_cpu.run_experts(mixture, homes, rows, beside, kernels=built(name))  # type: ignore[arg-type]


NORM = NormWeights(Norm(1e-5, fp32=True), 1 + 0.2 * random_of(HIDDEN, seed=4))
EXECUTORS = [*on_this_machine(), "twin"]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", on_this_machine())
def test_kernels_choose_weigh_and_add_as_the_twin(name: str, kind: str, dtype: torch.dtype) -> None:
    experts, kernels, homes = KINDS[kind], built(name), homes_of(dtype)
    own = None if experts.gates_network else NormWeights(Norm(1e-5, fp32=True), 1 + 0.3 * random_of(HIDDEN, seed=5))
    router, rows = router_of(experts, norm=own), random_of(ROWS, HIDDEN).to(dtype)
    for beside in (None, random_of(ROWS, HIDDEN, seed=6).to(dtype)):
        ours = experts_cpu.run_experts(Mixture(experts, router, NORM), homes, rows, beside, kernels=kernels)
        theirs = twin(experts, router, homes, NORM, rows, beside)
        assert torch.equal(*homes.asked[-2:])
        torch.testing.assert_close(ours, theirs, rtol=TOLERANCES[dtype], atol=4 * TOLERANCES[dtype])
    with threads(1):
        alone = [
            experts_cpu.run_experts(Mixture(experts, router, NORM), homes, row, other, kernels=kernels)
            for row, other in zip(rows.split(1), beside.split(1), strict=True)
        ]
    assert torch.equal(torch.cat(alone), ours)  # whatever is beside a row


ALIKE = [0, 1, 0, 2, 1, 0, 2, 2, 1, 0, 0, 1]  # which of three rows an expert's is


@pytest.mark.parametrize("kind", ["softmax", "softmax with a bias", "sigmoid with a bias", "all of them"])
@pytest.mark.parametrize("name", EXECUTORS)
def test_of_equal_ranks_the_first_expert_is_chosen(name: str, kind: str) -> None:
    """With numbers of few bits, whose sums are exact: torch's products with like rows may differ in their last bits."""
    experts, homes, rows = KINDS[kind], homes_of(torch.float32), in_eighths(random_of(ROWS, HIDDEN))
    few = in_eighths(random_of(3, HIDDEN))
    matrix = few[torch.tensor(ALIKE)]
    router = Router(matrix, torch.zeros(COUNT) if experts.bias == "ranks" else None, torch.ones(COUNT))
    made_by(name, Mixture(experts, router), homes, rows)
    of_kinds = rows @ few.T
    groups = [[expert for expert in range(COUNT) if ALIKE[expert] == kind] for kind in range(3)]
    for row, found in zip(of_kinds, homes.asked[0].tolist(), strict=True):
        ordered = [expert for group in row.argsort(descending=True) for expert in groups[group]]
        assert found == ordered[: experts.used]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", on_this_machine())
def test_among_equal_scores_kernels_choose_as_the_twin(name: str, kind: str, dtype: torch.dtype) -> None:
    experts, homes, rows = KINDS[kind], homes_of(dtype), in_eighths(random_of(ROWS, HIDDEN)).to(dtype)
    matrix = in_eighths(random_of(4, HIDDEN) / 4)[torch.tensor(ALIKE)]
    bias = torch.tensor([0.3, 0.0, 0.2])[ALIKE] if experts.bias == "ranks" else None
    router = Router(torch.cat([matrix, matrix[: experts.gates_network]]), bias, torch.ones(COUNT))
    for each in (name, "twin"):
        made_by(each, Mixture(experts, router), homes, rows)
    assert torch.equal(*homes.asked)


@pytest.mark.parametrize("name", EXECUTORS)
def test_what_is_rounded_to_the_dtype_is_equal_there(name: str) -> None:
    """Scores that differ by less than bf16 has, and ones of which sigmoids do; of equal ones the first are chosen."""
    last, first = [[11, 10, 9, 8]], [[0, 1, 2, 3]]
    near, far = (1 + torch.arange(COUNT) / 4096, 8 + torch.arange(COUNT) / 16)
    for rounded, scores, expected in (
        ("none", near, last), ("scores", near, first), ("scores", far, last), ("shares", far, first)
    ):  # fmt: skip
        experts, homes = replace(PLAIN, scoring="sigmoid", rounded=rounded), homes_of(torch.bfloat16)
        matrix = torch.zeros(COUNT, HIDDEN).index_copy(1, torch.tensor([0]), scores[:, None])
        made_by(name, Mixture(experts, Router(matrix)), homes, torch.eye(HIDDEN)[:1].bfloat16())
        assert homes.asked[0].tolist() == expected


@pytest.mark.parametrize("name", EXECUTORS)
def test_sigmoids_of_any_score_are_numbers(name: str) -> None:
    """Of scores of -60 the sum is below 1e-20, which keeps weights small; of 100 it is 1, and e^100 is no number."""
    experts, homes = replace(GLM, bias="none"), homes_of(torch.float32, alike=True)
    rows = random_of(4, HIDDEN)
    rows[:, 0] = torch.tensor([-60.0, -100.0, 100.0, 0.0])
    router = Router(torch.eye(HIDDEN)[:1].repeat(COUNT, 1))
    plain = NormWeights(Norm(fp32=True), torch.ones(HIDDEN))
    scale = 1 / plain(rows)[:, :1] * rows[:, :1]  # of scores, so that they are what rows begin with
    found = []
    for row, factor in zip(rows.split(1), scale[:, 0].nan_to_num(1.0).tolist(), strict=True):
        made = made_by(name, Mixture(replace(experts, score_scale=factor), router, plain), homes, row)
        whole = twin(replace(PLAIN, used=1), router, homes, plain, row)
        found.append(float((made / whole).mean()))
    sigmoid = torch.tensor([-60.0], dtype=torch.float64).sigmoid().item()
    small = USED * sigmoid / (USED * sigmoid + 1e-20)
    assert found == pytest.approx([small, 0.0, 1.0, 1.0], rel=1e-4)


@pytest.mark.parametrize("kind", ["softmax", "softmax over all"])
@pytest.mark.parametrize("name", EXECUTORS)
def test_softmaxes_of_any_score_are_numbers(name: str, kind: str) -> None:
    """Of scores of 100 and more, of which e^x is no number, and of rows whose scores are all far below -100."""
    experts, homes, rows = (
        replace(KINDS[kind], score_scale=100.0),
        homes_of(torch.float32, alike=True),
        random_of(8, 64),
    )
    router, rows[:, 0] = router_of(experts), torch.tensor([0.0, 3.0]).repeat(4)
    router.matrix[:, 0] = -2
    scores = 100 * rows.double() @ router.matrix.double().T
    assert scores.amax(1)[::2].min() > 100
    assert scores.amax(1)[1::2].max() < -200
    made, whole = (made_by(name, Mixture(each, router), homes, rows) for each in (experts, replace(PLAIN, used=1)))
    shares = scores.softmax(1).topk(USED)[0].sum(1) if kind == "softmax over all" else torch.ones(8).double()
    torch.testing.assert_close((made / whole).double().mean(1), shares, rtol=1e-2, atol=0)


def by_expert(found: Tensor, weights: Tensor) -> Tensor:
    """The weights of all experts, [T, experts]."""
    return torch.zeros(len(found), COUNT).scatter(1, found, weights)


@torch.inference_mode()
@pytest.mark.parametrize("renormalised", [True, False])
def test_sigmoids_are_those_of_glm(renormalised: bool) -> None:
    config = Glm4MoeConfig(
        hidden_size=HIDDEN, n_routed_experts=COUNT, num_experts_per_tok=USED, norm_topk_prob=renormalised,
        routed_scaling_factor=1.7,
    )  # fmt: skip
    theirs, rows = Glm4MoeTopkRouter(config), random_of(ROWS, HIDDEN)
    router = router_of(GLM)
    assert router.bias is not None
    theirs.weight.copy_(router.matrix)
    theirs.e_score_correction_bias.copy_(router.bias)
    _, weights, indices = theirs(rows)
    experts = replace(GLM, renormalised=renormalised, factor=1.7)
    ours = chosen(experts, rows @ router.matrix.T, router.bias)
    torch.testing.assert_close(by_expert(*ours), by_expert(indices, weights))


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_are_those_of_glm(dtype: torch.dtype) -> None:
    config = Glm4MoeConfig(
        hidden_size=HIDDEN, n_routed_experts=COUNT, num_experts_per_tok=USED, n_group=4, topk_group=2
    )
    theirs, rows = Glm4MoeTopkRouter(config).to(dtype), random_of(ROWS, HIDDEN).to(dtype)
    experts = replace(GLM, groups=4, groups_used=2)
    router = router_of(experts)
    matrix, bias = router.matrix.to(dtype), random_of(COUNT, seed=1)
    theirs.weight.copy_(matrix)
    theirs.e_score_correction_bias = bias
    _, weights, indices = theirs(rows)
    ours = chosen(experts, rows.float() @ matrix.float().T, bias, dtype=dtype)
    torch.testing.assert_close(by_expert(*ours), by_expert(indices, weights.float()))
    assert not torch.equal(ours[0], chosen(GLM, rows.float() @ matrix.float().T, bias)[0])


@torch.inference_mode()
@pytest.mark.parametrize("least", [1e-12, 0.3])
def test_softmaxes_with_a_bias_are_those_of_ernie(least: float) -> None:
    config = Ernie4_5_MoeConfig(hidden_size=HIDDEN, moe_num_experts=COUNT, moe_k=USED, moe_norm_min=least)
    experts = replace(PLAIN, bias="ranks", eps=least, floored=True)
    theirs, rows, router = Ernie4_5_MoeTopKRouter(config), random_of(ROWS, HIDDEN), router_of(experts)
    assert router.bias is not None
    theirs.weight.copy_(router.matrix)
    theirs.moe_statics.e_score_correction_bias.copy_(router.bias)
    _, weights, indices = theirs(rows)
    ours = chosen(experts, rows @ router.matrix.T, router.bias)
    torch.testing.assert_close(by_expert(*ours), by_expert(indices, weights))


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sigmoids_of_rounded_scores_are_those_of_minimax(dtype: torch.dtype) -> None:
    """Scores of -60, whose sigmoids any number added to the sum would outweigh, among others. Exact ones."""
    config = MiniMaxM2Config(hidden_size=HIDDEN, num_local_experts=COUNT, num_experts_per_tok=USED)
    theirs, rows = MiniMaxM2TopKRouter(config).to(dtype), in_eighths(random_of(ROWS, HIDDEN)).to(dtype)
    rows[:, 0] = torch.eye(ROWS)[0]
    rows[0, 1:] = 0
    experts, matrix = replace(GLM, rounded="scores", eps=0.0), in_eighths(random_of(COUNT, HIDDEN, seed=3)).to(dtype)
    matrix[:, 0] = -60 + torch.arange(COUNT) / 4
    theirs.weight.copy_(matrix)
    bias = torch.arange(COUNT) / 8 + 0.3
    _, weights, indices = theirs(rows, bias)
    scores = rows.float() @ matrix.float().T
    ours = chosen(experts, scores, bias, dtype=dtype)
    torch.testing.assert_close(by_expert(*ours), by_expert(indices, weights))
    if dtype != torch.float32:
        assert not torch.equal(ours[1], chosen(replace(experts, rounded="none"), scores, bias, dtype=dtype)[1])


@torch.inference_mode()
@pytest.mark.parametrize("cap", [0.0, 1.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sigmoids_of_capped_scores_are_those_of_laguna(dtype: torch.dtype, cap: float) -> None:
    config = LagunaConfig(
        hidden_size=HIDDEN, num_experts=COUNT, num_experts_per_tok=USED, moe_router_logit_softcapping=cap
    )
    theirs, rows = LagunaTopKRouter(config).to(dtype), in_eighths(random_of(ROWS, HIDDEN)).to(dtype)
    matrix, bias = in_eighths(random_of(COUNT, HIDDEN, seed=3)).to(dtype), 0.3 + torch.arange(COUNT) / 64
    theirs.weight.copy_(matrix)
    theirs.e_score_correction_bias.data = bias
    _, weights, indices = theirs(rows)
    experts = replace(GLM, rounded="scores", eps=0.0, score_cap=cap or None)
    found, shares = chosen(experts, rows.float() @ matrix.float().T, bias, dtype=dtype)
    torch.testing.assert_close(by_expert(found, shares.to(dtype).float()), by_expert(indices, weights.float()))


@torch.inference_mode()
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_that_are_ranked_themselves_are_those_of_cohere(dtype: torch.dtype, scoring: Scoring) -> None:
    """In bf16 sigmoids of different scores are equal."""
    config = Cohere2MoeConfig(
        hidden_size=HIDDEN, num_experts=COUNT, num_experts_per_tok=USED, expert_selection_fn=scoring,
        norm_topk_prob=False,
    )  # fmt: skip
    theirs, rows = Cohere2MoeTopKRouter(config).to(dtype), in_eighths(random_of(ROWS, HIDDEN)).to(dtype)
    experts = replace(
        PLAIN, scoring=scoring, ranks_scores=True, rounded="shares" if scoring == "sigmoid" else "scores",
        renormalised=scoring == "softmax",
    )  # fmt: skip
    matrix = in_eighths(random_of(COUNT, HIDDEN, seed=3)).to(dtype)
    theirs.weight.copy_(matrix)
    _, weights, indices = theirs(rows)
    scores = rows.float() @ matrix.float().T
    found, shares = chosen(experts, scores, dtype=dtype)
    tied = scores.to(dtype).sort(1)[0].diff() == 0  # whose order topk leaves open
    clear = ~tied.any(1)
    assert clear.sum() > ROWS // 4
    torch.testing.assert_close(
        by_expert(found, shares.to(dtype).float())[clear], by_expert(indices, weights.float())[clear]
    )
    if dtype != torch.float32 and scoring == "sigmoid":
        assert not torch.equal(found, chosen(replace(experts, ranks_scores=False), scores, dtype=dtype)[0])


@torch.inference_mode()
def test_softmaxes_are_those_of_qwen_and_gemma() -> None:
    rows, router = random_of(ROWS, HIDDEN), router_of(replace(PLAIN, scaled=True))
    qwen = Qwen3_5MoeTopKRouter(Qwen3_5MoeTextConfig(hidden_size=HIDDEN, num_experts=COUNT, num_experts_per_tok=USED))
    qwen.weight.copy_(router.matrix)
    _, weights, indices = qwen(rows)
    torch.testing.assert_close(by_expert(*chosen(PLAIN, rows @ router.matrix.T)), by_expert(indices, weights))
    gemma = Gemma4TextRouter(Gemma4TextConfig(hidden_size=HIDDEN, num_experts=COUNT, top_k_experts=USED))
    gemma.proj.weight.copy_(router.matrix)
    gemma.per_expert_scale.copy_(router.scale)
    gemma.scale.copy_(NORM.weight)
    _, weights, indices = gemma(rows)
    normed = replace(NORM, norm=Norm(gemma.eps, fp32=True))(rows)
    ours = chosen(PLAIN, normed @ router.matrix.T * HIDDEN**-0.5, None, router.scale)
    torch.testing.assert_close(by_expert(*ours), by_expert(indices, weights))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", ["softmax", "a gate beside", "sigmoid in the dtype after the top, averaged"])
@pytest.mark.parametrize("name", EXECUTORS)
def test_what_is_beside_is_gated_and_added_with_a_rounding_each(name: str, kind: str, dtype: torch.dtype) -> None:
    """The gate's score, of two numbers, is the same in any order of the sum."""
    experts, homes, rows = KINDS[kind], homes_of(dtype), random_of(ROWS, HIDDEN).to(dtype)
    router, beside = router_of(experts), random_of(ROWS, HIDDEN, seed=6).to(dtype)
    router.matrix[COUNT:] = torch.zeros(HIDDEN).index_fill(0, torch.tensor([5, 7]), 0.75)
    made, joined = (made_by(name, Mixture(experts, router), homes, rows, each) for each in (None, beside))
    if experts.gates_network:
        beside = beside * (rows.float() @ router.matrix[COUNT:].T).to(dtype).sigmoid()
    expected = (made + beside) / 2 if experts.averaged else made + beside
    torch.testing.assert_close(joined, expected, rtol=0, atol=1e-6 if dtype == torch.float32 else 0)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", EXECUTORS)
def test_a_factor_of_the_sum_multiplies_what_is_rounded(name: str, dtype: torch.dtype) -> None:
    experts, homes, rows = replace(GLM, factor=2.3, scales_sum=True), homes_of(dtype), random_of(ROWS, HIDDEN).to(dtype)
    router = router_of(experts)
    made, plain = (
        made_by(name, Mixture(each, router), homes, rows) for each in (experts, replace(experts, factor=1.0))
    )
    assert torch.equal(made, plain * 2.3)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", ["softmax", "scaled", "all of them"])
@pytest.mark.parametrize("name", EXECUTORS)
def test_the_sum_over_experts_is_rounded_once(name: str, kind: str, dtype: torch.dtype) -> None:
    """It is as near to the exact one as a number of the dtype can be, but for fp32's rounding. Each expert by itself
    has a weight of 1."""
    experts, homes, rows = KINDS[kind], homes_of(dtype), random_of(ROWS, HIDDEN).to(dtype)
    router, only = router_of(experts), replace(PLAIN, used=1, bias="ranks")
    alone = [Router(router.matrix, torch.zeros(COUNT).index_fill(0, torch.tensor(e), 1e6)) for e in range(COUNT)]
    of_each = torch.stack([made_by(name, Mixture(only, each), homes, rows) for each in alone], 1).double()
    weights = by_expert(*chosen(experts, rows.float() @ router.matrix.T * experts.score_scale, None, router.scale))
    terms = weights.double()[:, :, None] * of_each
    exact, least = terms.sum(1), torch.finfo(dtype).eps
    half_a_unit = torch.exp2(torch.frexp(exact)[1] - 1.0) * least / 2
    error = (made_by(name, Mixture(experts, router), homes, rows).double() - exact).abs()
    assert (error <= half_a_unit + 3e-6 * terms.abs().sum(1)).all()
