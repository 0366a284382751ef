"""Mixtures of experts against their formula in fp64, and the claim that a row's bits depend on nothing beside it.

By torch's operators and by every instruction set of this machine, in every dtype and with stored matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from kit.models import CPU
from kit.processor import built, on_this_machine, threads
from kit.stored import made_up
from offload.config.block import Encodings
from offload.config.model import ModelConfig, llama_shaped
from offload.config.networks import Experts, FeedForward
from offload.config.norm import Norm
from offload.formats.stored import StoredMatrix
from offload.kernels import experts as twin
from offload.kernels import experts_scratch
from offload.kernels.experts import Bank, Batch, Mixture, Router, chosen
from offload.kernels.experts_cpu import MOST_ROWS, MixtureCalls
from offload.kernels.experts_scratch import scratch_bytes
from offload.kernels.norms import NormWeights
from offload.kernels.products import Step, Steps, room_to_widen
from offload.plan.composition import PLAIN
from offload.plan.fixed_bytes import fixed_bytes
from offload.plan.options import Options
from offload.plan.sizing import PREFILL_BLOCK, Sizing
from offload.weights.expert_layout import bank_of, layout_of
from offload.weights.experts import ResidentExperts
from offload.weights.linear import product

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
HIDDEN = 64
MIXTURES = {
    "softmax over those in use": Experts(FeedForward(48), 8, 3),
    "softmax over all": Experts(FeedForward(32), 6, 2, renormalised=False),
    "one of many": Experts(FeedForward(16, "gelu_tanh"), 37, 1),
    "all in use": Experts(FeedForward(80, "relu_squared", gated=False), 4, 4),
    "biases": Experts(FeedForward(24, bias=True), 5, 2),
    "latents": Experts(FeedForward(80, "relu_squared", gated=False), 7, 3, latent=32),
}
STORED = ("Q4_0", "Q8_0", "INT4_F16/32", "FP8_F32/32")
Run = Callable[..., Tensor]


def of(executor: str) -> Run:
    if executor == "torch":
        return partial(twin.run_experts, multiply=product, blocks=None)
    name, _, phase = executor.partition(", ")
    found = built(name).prefill_experts if phase else built(name).experts
    assert found is not None
    return found


IN_PREFILL = [f"{name}, prefill" for name in on_this_machine()]


@pytest.fixture(params=("torch", *on_this_machine(), *IN_PREFILL))
def run(request: pytest.FixtureRequest) -> Run:
    return of(request.param)


def config_of(experts: Experts, *encodings: str) -> ModelConfig:
    config = llama_shaped("llama", 64, HIDDEN, 0, 1, 2, 1, 32, 128)
    return config.mapped(lambda block: replace(block, experts=experts, encodings=Encodings(experts=encodings)))


@dataclass(frozen=True)
class Scene:
    """A layer's experts, and rows before them. Latents are the first numbers of rows."""

    experts: Experts
    router: Router
    homes: ResidentExperts
    norm: NormWeights
    rows: Tensor

    @property
    def mixture(self) -> Mixture:
        return Mixture(self.experts, self.router, self.norm)

    def by(self, run: Run, rows: Tensor | None = None, **others: object) -> Tensor:
        rows = (self.rows if rows is None else rows).contiguous()
        latents = {"latents": rows[:, : self.experts.latent].contiguous()} if self.experts.latent else {}
        return run(self.mixture, self.homes, rows, **latents, **others)


def scene(experts: Experts, dtype: torch.dtype, num_rows: int, *encodings: str, seed: int = 0) -> Scene:
    generator = torch.Generator().manual_seed(seed)
    config = config_of(experts, *encodings)
    layout = layout_of(config, dtype)
    content = torch.zeros(experts.count, layout.num_bytes, dtype=torch.uint8)
    for number, buffer in enumerate(content):
        for place, (name, view) in enumerate(layout.views.items()):
            if name in layout.stored:
                outputs = view.shape[0]
                inputs = experts.network.size if name.startswith("down") else HIDDEN
                own = seed + number + 100 * place
                view.of(buffer).copy_(made_up(layout.stored[name], outputs, inputs, own).rows)
            else:
                view.of(buffer).copy_(torch.randn(view.shape, generator=generator) / view.shape[-1] ** 0.5)
    norm = NormWeights(Norm(1e-5), (1 + torch.randn(HIDDEN, generator=generator) / 4).to(dtype))
    router = Router(torch.randn(experts.count, HIDDEN, generator=generator))
    rows = torch.randn(num_rows, HIDDEN, generator=generator).to(dtype)
    return Scene(experts, router, ResidentExperts(bank_of(layout, content)), norm, rows)


def by_the_formula(scene: Scene) -> Tensor:
    """sum_i weight_i * down_i(act(gate_i(x)) * up_i(x)) over a row's experts, in fp64."""
    experts, rows = scene.experts, scene.norm(scene.rows).double()
    activation = {
        "silu": silu,
        "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
        "relu_squared": lambda x: x.relu().square(),
    }[experts.network.activation]
    powers = (rows @ scene.router.matrix.double().T).softmax(1)
    weights, found = powers.topk(experts.used)
    if experts.renormalised:
        weights = weights / weights.sum(1, keepdim=True)
    rows = scene.rows[:, : experts.latent].double() if experts.latent else rows
    out = torch.zeros_like(rows)
    for row, (own, shares) in enumerate(zip(found.tolist(), weights.tolist(), strict=True)):
        for expert, share in zip(own, shares, strict=True):
            weights_of = scene.homes.bank.places[expert]
            up, down = (numbers(each) for each in (weights_of.up, weights_of.down))
            bias = weights_of.gate_up_bias
            before, after = (0.0, 0.0) if bias is None else bias.double().chunk(2)
            inner = up @ rows[row] + after
            if weights_of.gate is not None:
                inner = activation(numbers(weights_of.gate) @ rows[row] + before) * inner
            else:
                inner = activation(inner)
            out[row] += share * (down @ inner + (0.0 if weights_of.down_bias is None else weights_of.down_bias))
    return out


def numbers(matrix: Tensor | StoredMatrix) -> Tensor:
    return (matrix.matrix(torch.float32) if isinstance(matrix, StoredMatrix) else matrix).double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MIXTURES)
def test_the_output_is_that_of_the_formula(run: Run, name: str, dtype: torch.dtype) -> None:
    given = scene(MIXTURES[name], dtype, 19)
    error = (given.by(run).double() - by_the_formula(given)).abs().max()
    assert error <= {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]


@pytest.mark.parametrize("encoding", STORED)
def test_stored_experts_are_decoded(run: Run, encoding: str) -> None:
    """The CPU's kernels round rows to 8 bits for them, as for other matrices."""
    given = scene(Experts(FeedForward(96), 6, 2), torch.float32, 9, *[encoding] * 3)
    expected = by_the_formula(given)
    assert (given.by(run).double() - expected).abs().max() <= 0.03 * expected.abs().max()


@pytest.mark.parametrize("name", MIXTURES)
def test_torchs_operators_and_the_kernels_agree(name: str) -> None:
    given = scene(MIXTURES[name], torch.float32, 33)
    expected = given.by(of("torch"))
    for executor in (*on_this_machine(), *IN_PREFILL):
        torch.testing.assert_close(given.by(of(executor)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("encodings", [(), ("Q4_0", "Q8_0", "INT4_F16/32"), ("Q4_0",) * 3], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_experts_output_has_the_bits_of_a_dense_networks(dtype: torch.dtype, encodings: tuple[str, ...]) -> None:
    """By the same products. With one expert in use its weight is 1."""
    for executor in on_this_machine():
        given, kernels = scene(Experts(FeedForward(64), 5, 1), dtype, 21, *encodings), built(executor)
        found, _ = chosen(given.experts, given.norm(given.rows).float() @ given.router.matrix.T)
        out, inner = torch.empty_like(given.rows), torch.empty(21, 64, dtype=dtype)
        for row, (expert,) in enumerate(found.tolist()):
            own = given.homes.bank.places[expert]
            steps = [
                Step(given.rows[row : row + 1], own.gate, None, inner[:1], given.norm, "gate", up=own.up),
                Step(inner[:1], own.down, None, out[row : row + 1]),
            ]
            Steps(kernels, steps, room_to_widen(16, 64)).run(1)
        assert torch.equal(given.by(of(executor)), out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("encodings", [(), ("Q4_0", "Q8_0", "Q4_0")], ids=str)
def test_a_rows_bits_depend_on_nothing_beside_it(run: Run, dtype: torch.dtype, encodings: tuple[str, ...]) -> None:
    given = scene(Experts(FeedForward(64), 7, 3), dtype, MOST_ROWS + 45, *encodings)
    blocks = run.keywords.get("blocks", ...) if isinstance(run, partial) else ...
    if blocks is None:  # torch's operators: in blocks

        def made(rows: Tensor) -> Tensor:
            filled = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % 16))
            return given.by(run, filled, blocks=[16] * (len(filled) // 16))[: len(rows)]
    else:

        def made(rows: Tensor) -> Tensor:
            return given.by(run, rows)

    whole = made(given.rows)
    for first, count in ((0, 1), (5, 2), (17, 33), (300, 64), (MOST_ROWS - 3, 20)):
        assert torch.equal(made(given.rows[first : first + count]), whole[first : first + count])
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(3))
    assert torch.equal(made(given.rows[order]), whole[order])
    with threads(1):
        assert torch.equal(made(given.rows), whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("encodings", [(), ("Q4_0", "Q8_0", "Q4_0")], ids=str)
@pytest.mark.parametrize("executor", IN_PREFILL)
def test_many_rows_of_an_expert_with_many_inputs(executor: str, dtype: torch.dtype, encodings: tuple[str, ...]) -> None:
    """More rows, inputs and outputs than run together, and none of them a multiple of those."""
    size = 1056 if encodings else 1072
    given = scene(Experts(FeedForward(size), 3, 2), dtype, 431, *encodings)
    error = (given.by(of(executor)).double() - by_the_formula(given)).abs().max()
    assert error <= {torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 0.13}[dtype]
    with threads(1):
        whole = given.by(of(executor))
    assert torch.equal(given.by(of(executor), given.rows[200:203]), whole[200:203])


def test_a_prefill_rounds_stored_numbers_and_a_pass_does_not() -> None:
    given = scene(Experts(FeedForward(96), 6, 2), torch.bfloat16, 40, *["Q4_0"] * 3)
    bank = given.homes.bank
    plain = layout_of(config_of(given.experts), torch.bfloat16)
    content = torch.zeros(len(bank.places), plain.num_bytes, dtype=torch.uint8)
    rounded = bank_of(plain, content)
    for own, to in zip(bank.places, rounded.places, strict=True):
        for name in ("gate", "up", "down"):
            getattr(to, name).copy_(getattr(own, name).matrix(torch.bfloat16))
    for executor in on_this_machine():
        in_prefill = of(f"{executor}, prefill")
        made = replace(given, homes=ResidentExperts(rounded)).by(in_prefill)
        assert torch.equal(given.by(in_prefill), made)
        assert not torch.equal(given.by(of(executor)), made)


def test_of_equal_scores_the_first_experts_are_chosen() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0], [-1.0, -2.0, -1.0, 5.0, 5.0]])
    found, weights = chosen(Experts(FeedForward(16), 5, 3), scores)
    assert found.tolist() == [[1, 2, 4], [0, 1, 2], [3, 4, 0]]
    assert weights.sum(1).allclose(torch.ones(3))


@pytest.mark.parametrize("used", [1, 2, 5, 9])
def test_kernels_choose_as_torchs_operators_do_with_equal_scores(run: Run, used: int) -> None:
    """Pairs of experts have one router row and different matrices."""
    given = scene(Experts(FeedForward(32), 9, used), torch.float32, 40)
    router = Router(given.router.matrix[torch.arange(9) // 2])
    given = replace(given, router=router)
    torch.testing.assert_close(given.by(run), given.by(of("torch")), rtol=1e-5, atol=1e-5)


def test_an_expert_that_is_in_no_batch_of_a_row_is_not_asked_for() -> None:
    """Batches of a few experts each give the bits of all at once."""

    @dataclass(frozen=True)
    class InBatches:
        homes: ResidentExperts
        size: int
        room: None = None
        whole: None = None

        @property
        def bank(self) -> Bank:
            return self.homes.bank

        def batches(self, chosen: Tensor) -> Iterator[Batch]:
            wanted = chosen.unique()
            assert len(wanted) < 12
            for part in wanted.flip(0).split(self.size):
                places = torch.full((12,), -1, dtype=torch.int32)
                places[part] = part.int()
                yield Batch(self.bank, places)

    for executor in ("torch", *on_this_machine(), *IN_PREFILL):
        given = scene(Experts(FeedForward(48), 12, 2), torch.bfloat16, 4)
        expected = given.by(of(executor))
        for size in (1, 2, 5):
            assert torch.equal(replace(given, homes=InBatches(given.homes, size)).by(of(executor)), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("executor", ["torch", *on_this_machine()])
def test_padding_runs_through_no_expert(executor: str) -> None:
    """Its output is a number that means nothing; other rows keep their bits. A prefill has none."""
    run = of(executor)
    given, chosen_ones = scene(Experts(FeedForward(48), 12, 2), torch.bfloat16, 6), list[int]()
    real = torch.tensor([True, True, False, True, False, False])

    @dataclass(frozen=True)
    class Watched:
        homes: ResidentExperts
        whole: None = None

        @property
        def bank(self) -> Bank:
            return self.homes.bank

        def batches(self, chosen: Tensor) -> Iterator[Batch]:
            chosen_ones.extend(chosen.unique().tolist())
            return self.homes.batches(chosen)

    whole = given.by(run)
    watched = replace(given, homes=Watched(given.homes))  # type: ignore[arg-type]
    some = watched.by(run, real=real)
    assert torch.equal(some[real], whole[real])
    assert some.isfinite().all()
    found, _ = chosen(given.experts, given.norm(given.rows).float() @ given.router.matrix.T)
    assert {*chosen_ones} - {12} == {*found[real].flatten().tolist()}
    beside = torch.randn(6, HIDDEN).bfloat16()
    padded = watched.by(run, beside=beside, real=real)
    assert torch.equal(padded[real], given.by(run, beside=beside)[real])
    assert padded.isfinite().all()


@pytest.mark.parametrize("name", MIXTURES)
def test_plans_count_the_scratch_of_a_block(name: str) -> None:
    experts = MIXTURES[name]
    hardware, config = replace(CPU, packs=True), config_of(experts)
    with_experts, without = (
        fixed_bytes(Sizing(each, None, Options(), hardware, "bf16"), 200, PLAIN)["workspace"]
        for each in (config, config.mapped(lambda block: replace(block, experts=None)))
    )
    used = scratch_bytes(experts, PREFILL_BLOCK, HIDDEN, torch.bfloat16, threads=64)
    assert 0.97 * used <= with_experts <= without + 1.1 * used


def test_layers_with_experts_have_what_their_bytes_say() -> None:
    for experts in MIXTURES.values():
        for encodings in ((), ("Q4_0",) * (3 if experts.network.gated else 2)):
            if encodings and experts.network.size % 32:
                continue
            config = config_of(experts, *encodings)
            for dtype in DTYPES:
                assert layout_of(config, dtype).num_bytes == config.expert_bytes(dtype.itemsize)


class _Alternating:
    """Experts that are in another bank each time they are wanted."""

    whole = None

    def __init__(self, *homes: ResidentExperts) -> None:
        self.homes, self.bank = list(homes), homes[0].bank

    def batches(self, chosen: Tensor) -> Iterator[Batch]:
        self.homes.append(self.homes.pop(0))
        yield from self.homes[-1].batches(chosen)


@pytest.mark.parametrize("name", on_this_machine())
def test_prepared_calls_give_the_bits_of_fresh_ones_for_any_rows_and_bank_in_turn(name: str) -> None:
    own, experts = built(name), MIXTURES["softmax over all"]
    given, other = (scene(experts, torch.bfloat16, 9, *["Q4_0"] * 3, seed=seed) for seed in (1, 2))
    rows, out = given.rows, torch.empty_like(given.rows)
    homes = _Alternating(given.homes, other.homes)
    calls = MixtureCalls(own, given.mixture, homes, rows, out)  # type: ignore[arg-type]
    for count in (2, 9, 2, 5, 9, 9):
        bank = homes.homes[0]
        calls.run(count)
        assert own.experts is not None
        assert torch.equal(out[:count], own.experts(given.mixture, bank, rows[:count]))


def test_prepared_calls_use_the_scratch_that_they_borrow_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they were prepared for, another thread may have borrowed."""
    given, spare = scene(MIXTURES["biases"], torch.float32, 4), list[Tensor]()
    monkeypatch.setattr(experts_scratch, "_spare", spare)
    own, out = built(on_this_machine()[0]), torch.empty_like(given.rows)
    calls = MixtureCalls(own, given.mixture, given.homes, given.rows, out)
    calls.run(4)
    (first,) = spare
    assert not first.eq(255).all()
    first.fill_(255)
    spare.clear()
    calls.run(4)
    assert first.eq(255).all()
