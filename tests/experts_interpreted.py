"""A GPU's mixtures of experts in Triton's interpreter, on a CPU: run as gpu_interpreted.py is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from itertools import pairwise
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import test_experts
from kit.interpreter import products_by_row, rounds_products_once, rounds_to_bf16, runs_assembly, without_idle_work
from kit.processor import before_a_guard
from kit.stored import NAMES
from offload.config.networks import Experts, FeedForward
from offload.config.norm import Norm
from offload.formats.encodings import ENCODINGS
from offload.kernels import experts as twin
from offload.kernels.experts import Bank, Batch, ExpertHomes, Mixture, Room, Router
from offload.kernels.gpu import expert_programs
from offload.kernels.gpu import experts as by_triton
from offload.kernels.gpu.experts import ROWS, arranged, choose, most_tiles, rows_of_tile, run_experts, score
from offload.kernels.norms import NormWeights
from offload.kernels.rows import MAX_ROWS
from offload.native.launch import counting, launch
from offload.weights.expert_layout import bank_of, layout_of
from offload.weights.experts import ResidentExperts
from offload.weights.linear import product
from test_expert_slots import Homes, streamed
from test_experts import MIXTURES, Scene, by_the_formula, config_of, scene

DTYPES = [torch.bfloat16, torch.float16]
ERROR = {torch.bfloat16: 2**-6, torch.float16: 2**-9}  # of the largest number: inner rows and outputs are rounded
SMALL = Experts(FeedForward(24), 5, 2)
FEW = ["MXFP4", "INT4_BF16/32", "NVFP4_INV"]  # of which there is a small case by default
WAYS = [("Q4_0", "Q8_0", "INT4_F16/32"), ("", "MXFP4", ""), ("Q8_0", "Q8_0", "")]
ROUTERS = {
    "softmax": SMALL,
    "sigmoids with a correction": Experts(FeedForward(24), 6, 2, scoring="sigmoid", bias="ranks", factor=2.5),
    "sigmoids in groups": Experts(
        FeedForward(24), 12, 3, scoring="sigmoid", bias="ranks", groups=3, groups_used=2, eps=0.5
    ),
    "a softmax in groups": Experts(FeedForward(24), 12, 3, renormalised=False, groups=4, groups_used=2, group_best=1),
    "a softmax with a correction": Experts(FeedForward(24), 5, 2, bias="ranks", eps=0.3, floored=True),
    "a softmax with a correction as it is": Experts(FeedForward(24), 5, 2, bias="ranks", renormalised=False),
    "a softmax in the dtype": Experts(FeedForward(24), 6, 2, rounded="shares", groups=2),
    "sigmoids of rounded scores, a factor of the sum": Experts(
        FeedForward(24), 5, 2, scoring="sigmoid", rounded="scores", eps=0.0, factor=2.3, scales_sum=True
    ),
    "sigmoids in the dtype after the top, averaged": Experts(
        FeedForward(24), 5, 2, scoring="sigmoid", rounded="shares", ranks_scores=True, renormalised=False, averaged=True
    ),
    "sigmoids of capped scores": Experts(FeedForward(24), 5, 2, scoring="sigmoid", bias="ranks", score_cap=0.7),
    "a softmax of capped scores": Experts(FeedForward(24), 5, 2, renormalised=False, score_cap=0.3),
    "sigmoids as they are": Experts(FeedForward(24), 6, 3, renormalised=False, scoring="sigmoid"),
    "biases, clamped gates": Experts(FeedForward(24, "clamped_silu", bias=True), 5, 2, bias="scores"),
    "factors, scaled scores, a norm of its own": Experts(FeedForward(24), 5, 2, score_scale=0.3, scaled=True),
    "latents": Experts(FeedForward(24, "relu_squared", gated=False), 5, 2, latent=32),
    "a gate beside": Experts(FeedForward(24), 5, 2, gates_network=True),
}
by_torch = partial(twin.run_experts, multiply=product, blocks=None)

without_idle_work()


@pytest.fixture(autouse=True)
def _as_a_gpu_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    products_by_row(monkeypatch)
    rounds_to_bf16(monkeypatch)
    rounds_products_once(monkeypatch)
    runs_assembly(monkeypatch)


@pytest.fixture(autouse=True)
def _memory_is_written_before_it_is_read_and_no_further(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Old numbers are NaN, or those of an expert or a pair that may well exist."""
    empty, behind = torch.empty, list[Tensor]()

    def watched(*size: Any, **more: Any) -> Tensor:
        size = size[0] if isinstance(size[0], tuple) else size
        number = prod(size)
        room = empty(number + 64, **more)
        room.fill_(torch.nan if room.is_floating_point() else 2)
        behind.append(room[number:].fill_(7))
        return room[:number].view(size)

    monkeypatch.setattr(by_triton.torch, "empty", watched)
    yield
    assert all(bool((rest == 7).all()) for rest in behind)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16)


def is_near(found: Tensor, wanted: Tensor) -> bool:
    most = ERROR[found.dtype] * wanted.abs().max()
    return bool(found.isfinite().all() and (found.double() - wanted).abs().max() <= most)


@dataclass(frozen=True)
class InBatches:
    """Experts in batches of a few, the last one first."""

    homes: ResidentExperts
    size: int
    room: Room | None = None
    on_host: bool = False
    whole: None = None

    @property
    def bank(self) -> Bank:
        return self.homes.bank

    def batches(self, chosen: Tensor) -> Iterator[Batch]:
        for part in chosen.unique().long().flip(0).split(self.size):
            places = torch.full((len(self.bank.places),), -1, dtype=torch.int32)
            places[part] = part.int()
            yield Batch(self.bank, places)


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [64, 150, 37])
@pytest.mark.parametrize("name", MIXTURES)
def test_the_output_is_that_of_the_formula(
    name: str, hidden: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of sizes that are no multiples of a program's."""
    monkeypatch.setattr(test_experts, "HIDDEN", hidden)
    given = scene(MIXTURES[name], dtype, 19)
    assert is_near(given.by(run_experts), by_the_formula(given))


@pytest.mark.few(len(FEW))
@pytest.mark.parametrize("name", [*FEW, *(name for name in NAMES if name not in FEW)])
def test_stored_experts_are_multiplied_as_they_are_stored(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in prefills. Over several blocks, the last of which are less than a program takes at a time."""
    monkeypatch.setattr(by_triton, "MAX_ROWS", 0)
    numbers = ENCODINGS[name].numbers
    size = -(-96 // numbers) * numbers
    monkeypatch.setattr(test_experts, "HIDDEN", hidden := 3 * numbers)
    monkeypatch.setattr(test_experts, "numbers", lambda matrix: matrix.matrix(torch.bfloat16).double())  # rounded
    for network in (FeedForward(size, bias=True), FeedForward(size, "gelu_tanh", gated=False)):
        given = scene(Experts(network, 3, 2), torch.bfloat16, 3, *[name] * (3 if network.gated else 2))
        assert given.rows.shape[1] == hidden
        assert is_near(given.by(run_experts), by_the_formula(given))


@pytest.mark.few(2)
@pytest.mark.parametrize("encodings", [*WAYS, ("IQ2_XXS", "Q3_K", "NVFP4")], ids=str)
def test_an_experts_matrices_may_be_stored_in_different_ways(
    encodings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    size, hidden = (64, 256) if "Q3_K" in encodings else (96, 64)
    monkeypatch.setattr(test_experts, "HIDDEN", hidden)
    given = scene(Experts(FeedForward(size, bias=True), 4, 2), torch.float16, 5, *encodings)
    with counting() as launches:
        out = given.by(run_experts)
    assert is_near(out, by_the_formula(given))
    assert launches["activate_gate"] == (encodings[0] != encodings[1])
    assert replace(given, homes=InBatches(given.homes, 1)).by(run_experts).equal(out)  # type: ignore[arg-type]


def test_a_layer_is_a_few_launches_and_the_host_learns_of_no_choice() -> None:
    wanted = dict.fromkeys(("score_rows", "choose_experts", "arrange_pairs", "sum_pairs"), 1)
    fixed = {"fix_rows": 2, "multiply_fixed": 2}
    for encodings, rows, others in (
        ((), 2, {"multiply_plain": 2}),
        (["INT4_F16/32"] * 3, 2, {"multiply_blocks": 2}),
        (["Q8_0", "Q8_0", "INT4_F16/32"], 2, {"multiply_blocks": 2}),
        (["Q8_0"] * 3, 2, fixed),
        (["Q8_0"] * 3, MAX_ROWS, fixed),
        (["Q8_0"] * 3, MAX_ROWS + 1, {"multiply_blocks": 2}),  # a prefill
        (["Q8_0", "Q8_0", "MXFP4"], 2, fixed),
    ):
        given = scene(Experts(FeedForward(32), 4, 2), torch.bfloat16, rows, *encodings)
        with counting() as launches:
            given.by(run_experts)
        assert launches == wanted | others


def test_of_equal_scores_the_first_experts_are_chosen() -> None:
    """As by torch's operators; scores are exact. What is NaN is chosen, and makes all weights NaN."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(-2, 3, (9, 40), generator=generator).bfloat16()
    rows[0] = 0
    for count, used in ((7, 3), (16, 16), (33, 1)):
        router = torch.randint(-2, 3, (count // 2 + 1, 40), generator=generator).float()[torch.arange(count) // 2]
        for renormalised in (True, False):
            own = Experts(FeedForward(16), count, used, renormalised=renormalised)
            found, weights = chosen_by(own, router, rows)
            wanted, shares = twin.chosen(own, rows.float() @ router.T)
            assert found.tolist() == wanted.tolist()
            assert found[0].tolist() == [*range(used)]
            torch.testing.assert_close(weights, shares)
    rows[3, 5] = torch.nan
    found, weights = chosen_by(own, router, rows)
    assert weights[3].isnan().all()
    assert not weights[[0, 1, 2, 4]].isnan().any()
    assert ((found >= 0) & (found < 33)).all()


def test_an_infinite_score_leaves_every_choice_within_the_experts() -> None:
    router = torch.full((5, 16), -torch.inf)
    router[3] = 1.0
    found, _ = chosen_by(Experts(FeedForward(16), 5, 4), router, torch.ones(1, 16).half())
    assert found.tolist() == [[3, 0, 1, 2]]


@pytest.mark.few(2)
@pytest.mark.parametrize(("count", "used", "num_rows"), [(8, 3, 1), (5, 5, 40), (130, 8, 40), (3, 1, 300), (64, 2, 9)])
def test_each_pair_has_a_line_of_a_tile_of_its_expert(count: int, used: int, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(count)
    skewed = torch.rand(num_rows, count, generator=generator) + 3 * (torch.arange(count) % 3 == 0)
    chosen = skewed.topk(used).indices.int()
    for rows in ROWS:
        lines = arranged(chosen, count, rows)
        experts, pairs = lines.expert_of.tolist(), lines.pair_of.view(-1, rows)
        busy = [tile for tile, expert in enumerate(experts) if expert >= 0]
        assert busy == [*range(len(busy))]  # the others follow
        assert [experts[tile] for tile in busy] == sorted(experts[tile] for tile in busy)
        found = pairs[: len(busy)]
        assert all((own >= 0).sum() > 0 for own in found)
        flat = chosen.flatten()
        assert sorted(found[found >= 0].tolist()) == [*range(chosen.numel())]
        for tile in busy:
            own = found[tile][found[tile] >= 0].long()
            assert set(flat[own].tolist()) == {experts[tile]}
        in_order = found[found >= 0].tolist()
        assert all(first < then for first, then in pairwise(in_order) if flat[first] == flat[then])


def test_there_are_tiles_enough_and_none_for_nobody() -> None:
    def need(counts: list[int], rows: int) -> int:
        return sum(-(-each // rows) for each in counts)

    for rows in ROWS:
        assert most_tiles(8, 128, rows) == 8  # a row by itself
        for busy, pairs in ((1, 40), (4, 40), (7, 1000), (128, 4096)):
            worst = [1 + rows * ((pairs - busy) // rows // busy)] * (busy - 1)
            worst.append(pairs - sum(worst))
            assert need(worst, rows) <= most_tiles(pairs, busy, rows)
        assert need([1] * 127 + [pairs - 127], rows) == most_tiles(pairs, 128, rows)


@pytest.mark.few(2)
@pytest.mark.parametrize("encodings", [(), ("Q4_0", "Q4_0", "Q8_0"), ("Q4_0", "Q8_0", "MXFP4")], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_rows_bits_are_those_of_the_row_alone(dtype: torch.dtype, encodings: tuple[str, ...]) -> None:
    """Among 1 to 37 rows, wherever it is among them; one of these is NaN. In tiles of either number of lines."""
    given = scene(Experts(FeedForward(32), 2, 1), dtype, 37, *encodings)
    given.rows[7] = torch.nan
    whole = given.by(run_experts)
    assert rows_of_tile(37, 2, given.homes.bank.places[0]) == ROWS[not encodings]
    assert rows_of_tile(20, 2, given.homes.bank.places[0]) == ROWS[0]
    assert {row for row in range(37) if whole[row].isnan().any()} == {7}
    for first, count in ((0, 1), (7, 1), (36, 1), (5, 4), (3, 20)):
        assert torch.equal(
            bits(given.by(run_experts, given.rows[first : first + count])), bits(whole[first : first + count])
        )
    order = torch.arange(37).flip(0)
    assert torch.equal(bits(given.by(run_experts, given.rows[order])), bits(whole[order]))


def test_batches_of_any_size_give_the_bits_of_all_at_once() -> None:
    for experts, num_rows in ((MIXTURES["biases"], 7), (SMALL, 2), (MIXTURES["all in use"], 3)):
        given = scene(experts, torch.bfloat16, num_rows)
        expected = given.by(run_experts)
        for size in (1, 3):
            assert torch.equal(replace(given, homes=InBatches(given.homes, size)).by(run_experts), expected)  # type: ignore[arg-type]


def test_slots_give_the_bits_of_resident_experts() -> None:
    """Fewer than a pass wants, over a link that is late."""
    homes = Homes.made()
    with streamed(homes, 3) as given:
        for layer in (0, 2, 0):
            own: Scene = homes.scenes[layer]
            slots: ExpertHomes = given[layer]
            out = run_experts(own.mixture, slots, own.rows[:4])
            assert torch.equal(out, own.by(run_experts, own.rows[:4]))


@pytest.mark.parametrize("encodings", [(), ("MXFP4",) * 3], ids=str)
def test_nothing_behind_the_bank_is_read(encodings: tuple[str, ...]) -> None:
    """Whose last matrix ends with it."""
    experts = Experts(FeedForward(96), 3, 2)
    given = scene(experts, torch.bfloat16, 4, *encodings)
    with before_a_guard(given.homes.bank.content) as content:
        bank = bank_of(layout_of(config_of(experts, *encodings), torch.bfloat16), content)
        assert torch.equal(replace(given, homes=ResidentExperts(bank)).by(run_experts), given.by(run_experts))


def test_a_long_prefill_runs_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    given = scene(SMALL, torch.float16, 7)
    whole = given.by(run_experts)
    monkeypatch.setattr(by_triton, "MOST_ROWS", 3)
    with counting() as launches:
        assert torch.equal(given.by(run_experts), whole)
    assert launches["sum_pairs"] == 3


def test_rows_may_lie_apart_and_have_no_norm() -> None:
    given = scene(SMALL, torch.float16, 6)
    wide = torch.cat([given.rows, given.rows], 1)[:, : given.rows.shape[1]]
    for norm in (None, given.norm):
        apart = run_experts(Mixture(given.experts, given.router, norm), given.homes, wide)
        assert torch.equal(apart, run_experts(Mixture(given.experts, given.router, norm), given.homes, given.rows))


def test_rows_of_fp32_are_refused() -> None:
    """A decoder has torch's operators run them."""
    with pytest.raises(ValueError, match="float32; a GPU's own experts take bf16 and fp16"):
        scene(SMALL, torch.float32, 21).by(run_experts)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ROUTERS)
def test_every_router_chooses_and_weighs_as_torchs_operators_do(name: str) -> None:
    """And a network beside the experts is added, times its gate."""
    assert is_as_by_torch(ROUTERS[name])


def is_as_by_torch(experts: Experts) -> bool:
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    given = scene(experts, torch.float16, 9)
    router = Router(
        normal(experts.num_scores, given.rows.shape[1]),
        normal(experts.count) if experts.bias != "none" else None,
        1 + normal(experts.count) / 4 if experts.scaled else None,
        NormWeights(Norm(1e-5), (1 + normal(given.rows.shape[1]) / 4).half()) if experts.scaled else None,
    )
    adds = experts.gates_network or experts.averaged
    beside = normal(9, 2 * given.rows.shape[1]).half()[:, : given.rows.shape[1]] if adds else None
    own, real = replace(given, router=router), torch.arange(9) % 3 != 1
    padded = own.by(run_experts, beside=beside, real=real)
    found, _ = choose(experts, router, score(experts, router, given.rows), real)
    if not padded.isfinite().all() or set(found[~real].flatten().tolist()) != {experts.count}:
        return False
    if not padded[real].equal(own.by(run_experts, beside=beside)[real]):
        return False
    return is_near(own.by(run_experts, beside=beside), own.by(by_torch, beside=beside).double())


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROUTERS)
def test_among_equal_scores_every_router_chooses_as_torchs_operators_do(name: str, dtype: torch.dtype) -> None:
    assert breaks_ties_as_torch(ROUTERS[name], dtype)


def breaks_ties_as_torch(experts: Experts, dtype: torch.dtype) -> bool:
    """Also those of groups, and of scores or shares that are equal in the dtype alone. Biases are equal where scores
    are, so sums of a group's best are equal, too, or clearly not."""
    generator = torch.Generator().manual_seed(3)
    kinds = torch.randint(0, 3, (experts.num_scores,), generator=generator)
    scores = torch.tensor([[a, b, c] for a in (0.0, 1.0, 40.0) for b in (0.0, -2.0, 1.0005) for c in (41.0, 1.0)])
    scores, bias = scores[:, kinds], torch.tensor([0.3, 0.0, 0.2])[kinds[: experts.count]]
    given = None if experts.bias == "none" else bias
    router = Router(torch.empty(0), given, torch.ones(experts.count))
    found, weights = choose(experts, router, scores, like=torch.empty(0, dtype=dtype))
    wanted, shares = twin.chosen(experts, scores[:, : experts.count], given, dtype=dtype)
    return found.tolist() == wanted.tolist() and torch.allclose(weights, shares, rtol=1e-5)


def chosen_by(experts: Experts, matrix: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    router = Router(matrix)
    return choose(experts, router, score(experts, router, rows))


ONES = {"SUM_FACTOR": 1.0, "BOTH_FACTOR": 1.0}


def in_order(numbers: list[float]) -> float:
    """What becomes of the outputs of a row's experts with weights of 1, bf16 numbers."""
    made, out = torch.tensor(numbers).bfloat16()[:, None], torch.zeros(1, 1, dtype=torch.bfloat16)
    ones, used = torch.ones(1, len(numbers)), len(numbers)
    sizes, chosen = {"EXPERTS": 1, "SCORES": 1, "USED": used, "COLUMNS": 16}, torch.zeros(1, used, dtype=torch.int32)
    launch(
        by_triton.sum_pairs,
        (1, 1),
        (made, chosen, ones, out, ones, out, 1, 0),
        ADDS=False,
        **sizes,
        **ONES,
        num_warps=1,
    )
    return float(out)


def test_outputs_are_added_up_in_the_order_of_choice() -> None:
    assert in_order([2.0**24, 1.0, -(2.0**24)]) == 0.0
    assert in_order([2.0**24, -(2.0**24), 1.0]) == 1.0


MUTANTS = {
    "another expert's matrix": ("place_of", "places + expert,", "places + (expert + 1) % 2,"),
    "the first place's matrices": ("multiply_plain", "content + place.to(tl.int64) * step", "content"),
    "the first place's blocks": ("multiply_blocks", "content + place.to(tl.int64) * step", "content"),
    "the gate is up": ("multiply_plain", "home + gate_at", "home + weight_at"),
    "the gate's blocks are up's": ("multiply_blocks", "weight_at, gate_at)", "weight_at, weight_at)"),
    "the gate has up's bias": ("multiply_plain", "bias - num_outputs", "bias"),
    "the gate of blocks has up's bias": ("multiply_blocks", "bias - part * num_outputs", "bias"),
    "experts that are not there run": ("multiply_plain", "    if place < 0:\n        return\n",
                                       "    place = tl.maximum(place, 0)\n"),
    "a line without a pair is the first one's": ("lines_of", "return pair, ",
                                                 "pair = tl.maximum(pair, 0)\n    return pair, "),
    "a pair's row is its neighbour's": ("lines_of", "// per_row", "// per_row ^ 1"),
    "a pair is a row": ("lines_of", "// per_row", ""),
    "the last inputs are left out": ("_sum_inputs", "inside = (at < num_inputs)", "inside = (at < num_inputs - 1)"),
    "later inputs alone": ("_sum_inputs", "trans(numbers), total,", "trans(numbers), total * 0,"),
    "scores of the last inputs alone": ("score_rows", "total.shape), total)", "total.shape), total * 0)"),
    "an expert has its neighbour's score": ("score_rows", "+ expert[None, :]", "+ (expert ^ 1)[None, :]"),
    "of equal scores the last expert": ("choose_experts", "tl.min(tl.where(left & (rank == most), expert, PADDED), 0)",
                                        "tl.max(tl.where(left & (rank == most), expert, -1), 0)"),
    "an expert is chosen twice": ("choose_experts", "left & (expert != first)", "left & (expert != first - 1)"),
    "a softmax over all": ("choose_experts", "elif not RENORMALISED", "elif True"),
    "a softmax over those in use": ("choose_experts", "elif not RENORMALISED", "elif False"),
    "later blocks of pairs take the first one's lines": ("arrange_pairs", "line += tl.sum", "line += 0 * tl.sum"),
    "experts share a tile": ("arrange_pairs", "(count + ROWS - 1) // ROWS", "(count + ROWS - 2) // ROWS"),
    "a line without a pair has an old one": ("arrange_pairs", "rest = line + ", "rest = line + 1 + "),
    "a tile of no expert has an old one": ("arrange_pairs", "tl.where(own == EXPERTS - 1, num_tiles, last)", "last"),
    "the last expert's output is left out": ("sum_pairs", "tl.range(0, USED,", "tl.range(0, USED - 1,"),
    "outputs are added up from the last one": ("sum_pairs", "USED + place", "USED + USED - 1 - place"),
    "the correction counts for no rank": ("choose_experts", "    if CORRECTED:\n", "    if False:\n"),
    "a bias counts for the weights alone": ("choose_experts", "    if BIASED:\n", "    if False:\n"),
    "sigmoids are not renormalised": ("choose_experts", "        if not RENORMALISED:\n", "        if True:\n"),
    "nothing is added to a sum": ("choose_experts", "total += EPS", "total += 0.0"),
    "a sum is as small as it is": ("choose_experts", "tl.maximum(total, EPS)", "total"),
    "a softmax is not divided before it ranks": ("choose_experts", "power / tl.sum(power, 0)", "power"),
    "scores are not rounded": ("choose_experts", "    if ROUNDS_SCORES:\n", "    if False:\n"),
    "shares are not rounded": ("choose_experts", "    if ROUNDS_SHARES:\n", "    if False:\n"),
    "shares are ranked": ("choose_experts", " and not RANKS_SCORES", ""),
    "scores are ranked": ("choose_experts", "(SIGMOID or SOFTMAX) and", "SIGMOID and"),
    "all groups are open": ("choose_experts", "    if GROUPS > 1:\n", "    if False:\n"),
    "of equal groups the last": ("_opened", "tl.min(tl.where(left & (sums == most), group, PADDED), 0)",
                                 "tl.max(tl.where(left & (sums == most), group, -1), 0)"),
    "one group is open": ("_opened", "opened | (expert", "(expert"),
    "a group's best alone": ("_opened", "    if BEST == 2:\n", "    if False:\n" ),
    "a group's best two": ("_opened", "if BEST == 2:", "if True:" ),
    "no factor of the sum": ("sum_pairs", " * SUM_FACTOR", ""),
    "no mean": ("sum_pairs", " * BOTH_FACTOR", ""),
    "no factor of an expert": ("choose_experts", "    if SCALED:\n", "    if False:\n"),
    "no factor of all": ("choose_experts", "share / total * factor", "share / total"),
    "scores are not scaled": ("score_rows", "tl.sum(total, 2) * factor", "tl.sum(total, 2)"),
    "padding runs through experts": ("choose_experts", "    if PADS:\n", "    if False:\n"),
    "padding has what was there before": ("sum_pairs", "mask_if(tl.load(chosen + pair) < EXPERTS, inside)",
                                          "inside"),
    "the network beside is left out": ("sum_pairs", "    if ADDS:\n", "    if False:\n"),
    "its gate is left out": ("sum_pairs", "        if SCORES > EXPERTS:\n", "        if False:\n"),
    "weights of the first row": ("sum_pairs", "weights + pair", "weights + place"),
}  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize(("program", "old", "new"), MUTANTS.values(), ids=MUTANTS)
def test_each_fault_is_seen(program: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    edited = edited_programs(program, old, new, tmp_path / "edited.py", monkeypatch)
    for name in ("score_rows", "choose_experts", "arrange_pairs", "multiply_plain", "multiply_blocks", "sum_pairs"):
        monkeypatch.setattr(by_triton, name, getattr(edited, name))
    monkeypatch.setattr(test_experts, "HIDDEN", 160)
    assert not sees_no_fault()


@pytest.mark.deep
def test_without_a_fault_none_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_experts, "HIDDEN", 160)
    assert sees_no_fault()


def test_each_program_has_the_text_of_its_faults() -> None:
    for program, old, new in MUTANTS.values():
        assert edited_source(program, old, new)


def edited_source(program: str, old: str, new: str) -> str:
    """The source of the programs with `old`, which `program` has once, replaced in it."""
    before, name, rest = Path(str(expert_programs.__file__)).read_text().partition(f"\ndef {program}(")
    own, following, after = rest.partition("\n@triton.jit")
    assert own.count(old) == 1, f"{own.count(old)} times {old!r}"
    return before + name + own.replace(old, new) + following + after


def edited_programs(program: str, old: str, new: str, path: Path, patch: pytest.MonkeyPatch) -> ModuleType:
    path.write_text(edited_source(program, old, new))
    spec = spec_from_file_location("edited", path)
    assert spec is not None
    assert spec.loader is not None
    patch.setitem(sys.modules, "edited", edited := module_from_spec(spec))
    spec.loader.exec_module(edited)
    return edited


def sees_no_fault() -> bool:
    """Whether outputs are near those of the formula, with plain and stored experts, all there or in batches, among
    equal scores; and are added up in their order."""
    if in_order([2.0**24, 1.0, -(2.0**24)]) != 0.0:
        return False
    several = Experts(FeedForward(152, bias=True), 4, 2)
    in_blocks = replace(several, renormalised=False, network=FeedForward(96, bias=True))
    others = (several, ()), (in_blocks, ["INT4_F16/32"] * 3)  # not in fixed point, as GGUF's kinds are
    for experts, encodings in others:
        given = scene(experts, torch.float16, 5, *encodings)
        same = Router(given.router.matrix[:1].expand(4, -1).contiguous())
        alike = replace(given, router=same)  # the first two experts alone
        if not is_near(alike.by(run_experts), alike.by(by_torch).double()):
            return False
        for own in (replace(given, rows=given.rows[:1]), replace(given, homes=InBatches(given.homes, 1))):  # type: ignore[arg-type]
            if not is_near(own.by(run_experts), by_the_formula(replace(own, homes=given.homes))):
                return False
    many = scene(Experts(FeedForward(16), 2, 1), torch.float16, 300)  # pairs of several blocks
    if not is_near(many.by(run_experts, many.rows[:17]), by_the_formula(replace(many, rows=many.rows[:17]))):
        return False
    chosen = (torch.arange(300) % 2).int()[:, None]
    if sorted(arranged(chosen, 2, 16).pair_of[: 2 * 160].tolist()) != [-1] * 20 + [*range(300)]:
        return False
    router = torch.zeros(5, 1100)
    router[2, 0] = 1.0
    if chosen_by(SMALL, router, torch.ones(1, 1100).half())[0].tolist() != [[2, 0]]:
        return False
    return all(map(is_as_by_torch, ROUTERS.values())) and all(
        breaks_ties_as_torch(each, torch.float16) for each in ROUTERS.values()
    )
