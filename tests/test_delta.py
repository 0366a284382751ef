"""The gated delta rule, with decays by head or by channel, and Mamba-2 against their formulas in fp64, and the claim
that a row's bits depend on nothing beside it.

By torch's operators and by every instruction set of this machine, in every dtype.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad, silu, softplus
from torch.testing import assert_close
from transformers.models.glm5_next.modeling_glm5_next import recurrent_kimi_delta_attention

from kit.processor import before_a_guard, built, on_this_machine, threads
from offload.config.mixers import DeltaRule, Mamba2
from offload.config.norm import Norm
from offload.kernels import delta, mamba
from offload.kernels.norms import NormWeights
from offload.kernels.recurrence import Held, RecurrenceWeights, Replayed, RunRecurrence

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
EXECUTORS = ("torch", *on_this_machine())
NORM = Norm(1e-5, fp32=True)
RULES = {
    "three value heads a key head": DeltaRule(4, 12, 32, 64, norm=NORM),
    "two value heads a key head": DeltaRule(2, 4, 16, 128, norm=NORM),
    "odd sizes": DeltaRule(3, 3, 13, 21, width=3, norm=NORM, eps=1e-4),
    "tiny": DeltaRule(1, 3, 8, 12, width=2, norm=NORM),
    "steps to 2": DeltaRule(1, 2, 12, 100, norm=NORM, steps=2.0),
    "tiled heads": DeltaRule(3, 6, 16, 12, norm=NORM, tiled=0),
    "tiled heads of a later rank": DeltaRule(4, 6, 8, 16, norm=NORM, tiled=3),
    "bounded decays": DeltaRule(1, 3, 8, 12, width=2, norm=NORM, gate="sigmoid", least=-3.0),
}
BY_CHANNEL = DeltaRule(3, 3, 16, 28, norm=NORM, gate="sigmoid", by_channel=True, low_rank=8)  # low_rank: of no kernel
RULES |= {
    "decays by channel": BY_CHANNEL,
    "decays by channel, odd sizes": replace(BY_CHANNEL, key_dim=13, value_dim=21, width=3, eps=1e-4, gate="silu"),
    "decays by channel, wide heads": replace(BY_CHANNEL, key_dim=72, value_dim=100, width=2),
    "bounded decays by channel": replace(BY_CHANNEL, key_dim=20, value_dim=64, least=-5.0, steps=2.0),
}
STATES: dict[str, DeltaRule | Mamba2] = {
    **RULES,
    "mamba, four heads a group": Mamba2(2, 8, 16, 64, norm=NORM),
    "mamba, odd sizes": Mamba2(1, 3, 13, 21, width=3, norm=NORM),
    "mamba, several groups": Mamba2(3, 6, 8, 12, 2, norm=replace(NORM, eps=1e-2), taps_bias=False),
    "mamba, without a norm": Mamba2(2, 2, 24, 12, norm=None),
}
ROOM = 64  # new rows that can be held


Kind = type[DeltaRule | Mamba2]


def of(executor: str, kind: Kind = DeltaRule) -> RunRecurrence:
    if executor == "torch":
        return delta.delta_rule if kind is DeltaRule else mamba.mamba2
    return built(executor).recurrences[kind]


@pytest.fixture(params=EXECUTORS)
def executor(request: pytest.FixtureRequest) -> RunRecurrence:
    return of(request.param)


@pytest.fixture(params=EXECUTORS)
def executors(request: pytest.FixtureRequest) -> Callable[[DeltaRule | Mamba2], RunRecurrence]:
    return lambda rule: of(request.param, type(rule))


@dataclass(frozen=True)
class Scene:
    """A layer and what is held before some rows."""

    rule: Any  # of whichever kind
    weights: RecurrenceWeights
    held: Held
    rows: Tensor

    def copy(self) -> Held:
        return Held(self.held.state.clone(), self.held.inputs.clone())


def scene(rule: DeltaRule | Mamba2, dtype: torch.dtype, num_rows: int, *, seed: int = 0) -> Scene:
    """Rows are strided. Steps and times are of all sizes."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    is_mamba = isinstance(rule, Mamba2)
    normed = rule.out_size if is_mamba else rule.value_dim
    weights = RecurrenceWeights(
        normal(rule.width, rule.channels) / 2,
        -normal(rule.num_heads).exp(),
        normal(*rule.vectors["time_bias"]),
        None if rule.norm is None else NormWeights(rule.norm, 1 + normal(normed) / 4),
        normal(rule.channels) / 4 if isinstance(rule, Mamba2) and rule.taps_bias else None,
        normal(rule.num_heads) if is_mamba else None,
    )
    held = Held(normal(*rule.state_shape) / 4, normal(rule.width - 1 + ROOM, rule.kept).to(dtype))
    rows = normal(num_rows, sum(rule.row_parts) + 3).to(dtype)[:, : sum(rule.row_parts)]
    of_heads = sum(rule.rates)
    rows[:, -of_heads:] *= 3
    held.inputs[:, -of_heads:] *= 3
    return Scene(rule, weights, held, rows)


# The formula.


def without_gates(rule: DeltaRule | Mamba2, rows: Tensor) -> Tensor:
    return torch.cat([rows[:, : rule.channels], rows[:, rule.channels + rule.out_size :]], 1)


def by_the_formula(
    rule: DeltaRule | Mamba2, weights: RecurrenceWeights, state: Tensor, inputs: Tensor
) -> Iterator[tuple[Tensor, ...]]:
    """For each token of inputs [width - 1 + n, kept]: (output [heads, value_dim], state), in fp64."""
    channels = inputs[:, : rule.channels].double()
    bias = None if weights.taps_bias is None else weights.taps_bias.double()
    mixed = conv1d(channels.T, weights.taps.double().T[:, None], bias, groups=rule.channels).T
    q, k, v = (mixed / (1 + (-mixed).exp())).split((rule.key_size, rule.key_size, rule.out_size), 1)
    others = inputs[rule.width - 1 :, rule.channels :].double().split(rule.rates, 1)
    if isinstance(rule, DeltaRule):
        yield from of_the_delta_rule(rule, weights, state, (q, k, v), others)
    else:
        yield from of_mamba(rule, weights, state, (q, k, v), others[0])


def of_mamba(
    rule: Mamba2, weights: RecurrenceWeights, state: Tensor, mixed: tuple[Tensor, ...], times: Tensor
) -> Iterator[tuple[Tensor, ...]]:
    """Of the sum over all earlier tokens (section 2.3 of the paper): y_t = sum_s C_t B_s exp(A (D_s+1 + ... + D_t)) D_s
    x_s + D x_t, each a term of its own."""
    count, heads = len(times), rule.num_heads
    steps = softplus(times + weights.time_bias.double())
    owner = torch.arange(heads) // (heads // rule.num_key_heads)
    c, b = (each.reshape(count, rule.num_key_heads, -1)[:, owner] for each in mixed[:2])
    x, totals = mixed[2].reshape(count, heads, -1), (weights.decay.double() * steps).cumsum(0)
    assert weights.skip is not None
    for t in range(count):
        after = totals[t].exp()[:, None, None] * state.double()
        for s in range(t + 1):
            share = (totals[t] - totals[s]).exp() * steps[s]
            after = after + share[:, None, None] * b[s, :, :, None] * x[s, :, None, :]
        yield torch.einsum("hk,hkv->hv", c[t], after) + weights.skip.double()[:, None] * x[t], after


def of_the_delta_rule(
    rule: DeltaRule, weights: RecurrenceWeights, state: Tensor, mixed: tuple[Tensor, ...], others: tuple[Tensor, ...]
) -> Iterator[tuple[Tensor, ...]]:
    """S_t = S_{t-1} diag(alpha_t) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T and S_t q_t, S being a state's transpose
    (section 3.1 of the paper; with an alpha for each channel, section 3 of Kimi Delta Attention's)."""
    (q, k, v), (b, a), heads = mixed, others, rule.num_heads
    count = len(v)
    owner = torch.arange(heads) // max(heads // rule.num_key_heads, 1)
    if rule.tiled is not None:
        owner = (torch.arange(heads) + rule.tiled) % rule.num_key_heads
    q, k = (x.reshape(count, rule.num_key_heads, rule.key_dim)[:, owner] for x in (q, k))
    q, k = (x / (x.square().sum(-1, keepdim=True) + rule.eps).sqrt() for x in (q, k))
    q, v = q / rule.key_dim**0.5, v.reshape(count, heads, rule.value_dim)
    beta = rule.steps / (1 + (-b).exp())
    times, rates = (a + weights.time_bias.double()).view(count, heads, -1), weights.decay.double()[:, None]
    alpha = (rates * softplus(times)).exp()
    if rule.least is not None:
        alpha = (rule.least / (1 + (rates * times).exp())).exp()
    transposed, one = state.double().transpose(1, 2), torch.eye(rule.key_dim, dtype=torch.float64)
    for t in range(count):
        removed = one - beta[t, :, None, None] * k[t, :, :, None] * k[t, :, None, :]
        added = beta[t, :, None, None] * v[t, :, :, None] * k[t, :, None, :]
        transposed = (transposed * alpha[t, :, None]) @ removed + added
        yield (transposed @ q[t, :, :, None])[..., 0], transposed.transpose(1, 2)


def expected(
    scene: Scene, held: Held, rows: Tensor, count: int, *, settles: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """In fp64 the outputs [T, out_size] and the factors that multiply what the norm leaves of them, the state to hold;
    and the inputs to hold, in their dtype."""
    rule, before = scene.rule, scene.rule.width - 1
    inputs = torch.cat([held.inputs[: before + count], without_gates(rule, rows)])
    outputs, states = zip(*by_the_formula(rule, scene.weights, held.state, inputs), strict=True)
    out = torch.stack(outputs[count:])
    gates = rows[:, rule.channels : rule.channels + rule.out_size].double().view(out.shape)
    by_sigmoid, norm = getattr(rule, "gate", None) == "sigmoid", scene.weights.norm
    gates = (1 if by_sigmoid else gates) / (1 + (-gates).exp())
    if isinstance(rule, DeltaRule):
        assert norm is not None
        factors = gates * norm.weight.double()
        normed = out / (out.square().mean(-1, keepdim=True) + rule.norm.eps).sqrt()
    elif norm is None:
        factors, normed = gates, out
    else:
        parts = (out * gates).flatten(1).unflatten(1, (rule.num_key_heads, -1))
        normed = parts / (parts.square().mean(-1, keepdim=True) + norm.norm.eps).sqrt()
        factors = norm.weight.double().view(rule.num_key_heads, -1).expand(normed.shape)
    at = count + len(rows) if settles else count
    state = states[at - 1] if at else held.state.double()
    kept = inputs[len(inputs) - before :] if settles else inputs[count:]
    return (normed * factors).flatten(1), factors.flatten(1), state, torch.cat([kept, held.inputs[len(kept) :]])


PASSES = [(1, 0, False), (1, 1, False), (2, 3, False), (17, 5, False), (64, 64, False), (1, 0, True), (2, 1, True),
          (100, 7, True)]  # fmt: skip


def check_formula(
    run: RunRecurrence, rule: DeltaRule | Mamba2, dtype: torch.dtype, passes: Sequence[tuple[int, int, bool]]
) -> None:
    """Outputs, states and held inputs."""
    for number, (num_rows, count, settles) in enumerate(passes):
        made = scene(rule, dtype, num_rows, seed=number)
        out, factors, state, inputs = expected(made, made.held, made.rows, count, settles=settles)
        held = made.copy()
        found = run(rule, made.weights, held, made.rows, Replayed(count), settles=settles)
        assert found.is_contiguous()
        assert found.dtype == dtype
        rounding = 0.501 * torch.finfo(dtype).eps * out.abs() if dtype != torch.float32 else 0.0
        least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        # The terms of some outputs cancel before the norm: torch's operators are off by up to 1.6e-5 there.
        assert ((found.double() - out).abs() <= rounding + 3e-5 * (factors.abs() + 0.1) + least).all()
        assert ((held.state.double() - state).abs() <= 2e-6 * (1 + state.abs())).all()
        assert torch.equal(held.inputs, inputs)


@pytest.mark.few(11)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", STATES)
def test_outputs_states_and_what_is_held_are_those_of_the_formula(
    executors: Callable[[DeltaRule | Mamba2], RunRecurrence], rule: str, dtype: torch.dtype
) -> None:
    check_formula(executors(STATES[rule]), STATES[rule], dtype, PASSES)


REAL = {
    "delta rule": DeltaRule(1, 3, 128, 128, norm=NORM),
    "decays by channel": replace(BY_CHANNEL, num_key_heads=2, num_heads=2, key_dim=128, value_dim=128),
    "mamba": Mamba2(1, 3, 128, 64, norm=NORM),
}


@pytest.mark.parametrize("name", on_this_machine())
@pytest.mark.parametrize("rule", REAL.values(), ids=REAL)
def test_real_sizes(name: str, rule: DeltaRule | Mamba2) -> None:
    """Heads of 128 x 128 and 128 x 64, of which every kernel has its own blocks of columns."""
    check_formula(of(name, type(rule)), rule, torch.bfloat16, [(1, 1, False), (20, 3, False)])


@pytest.mark.parametrize("least", [None, -5.0])
def test_decays_by_channel_are_transformers_own(executor: RunRecurrence, least: float | None) -> None:
    """In fp32, of layers with which Kimi Linear's and Ling's agree: outputs and the state."""
    rule = replace(BY_CHANNEL, key_dim=32, value_dim=32, least=least)
    made, count = scene(rule, torch.float32, 40), 5
    held, before, rates, norm = made.copy(), rule.width - 1, made.weights.decay, made.weights.norm
    inputs = torch.cat([held.inputs[: before + count], without_gates(rule, made.rows)])
    mixed = silu(conv1d(inputs[:, : rule.channels].T, made.weights.taps.T[:, None], groups=rule.channels)).T
    q, k, v = (each.view(1, -1, 3, 32) for each in mixed.split(rule.key_size, 1))
    steps, times = inputs[before:, rule.channels :].split(rule.rates, 1)
    times = (times + made.weights.time_bias).view(1, -1, 3, 32)
    logs = rates[:, None] * softplus(times) if least is None else least * (times * -rates[:, None]).sigmoid()
    given = q, k, v, logs, steps.sigmoid()[None], held.state[None], True
    wanted, state = recurrent_kimi_delta_attention(*given, use_qk_l2norm_in_kernel=True)
    normed = wanted[0, count:] * (wanted[0, count:].square().mean(-1, keepdim=True) + rule.norm.eps).rsqrt()
    gates = made.rows[:, rule.channels :][:, : rule.out_size].sigmoid()
    found = executor(rule, made.weights, held, made.rows, Replayed(count), settles=True)
    assert_close(found, (normed * norm.weight).flatten(1) * gates, rtol=1e-5, atol=3e-5)
    assert_close(held.state, state[0], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_of_the_rows_dtype(dtype: torch.dtype) -> None:
    """The kernels round once, whichever it is."""
    for name in on_this_machine():
        made = scene(RULES["odd sizes"], dtype, 3)
        assert made.weights.norm is not None
        weight = made.weights.norm.weight.to(dtype)
        outputs = []
        for norm in (NormWeights(replace(NORM, fp32=False), weight), NormWeights(NORM, weight.float())):
            weights = replace(made.weights, norm=norm)
            outputs.append(of(name)(made.rule, weights, made.copy(), made.rows, Replayed(2), settles=False))
        assert torch.equal(*outputs)


# Bits.

NUM_TOKENS = 90


def settled(run: RunRecurrence, made: Scene, counts: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    """All outputs, and the states after each pass, of passes of so many rows that are all kept."""
    held, outputs, states, at = made.copy(), list[Tensor](), list[Tensor](), 0
    for count in counts:
        rows = made.rows[at : at + count]
        outputs.append(run(made.rule, made.weights, held, rows, Replayed(0), settles=True))
        states.append(held.state.clone())
        at += count
    return torch.cat(outputs), states


def check_bits(run: RunRecurrence, rule: DeltaRule | Mamba2, dtype: torch.dtype, seeds: Sequence[int]) -> None:
    check_divided(run, scene(rule, dtype, NUM_TOKENS), seeds)


def check_divided(run: RunRecurrence, made: Scene, seeds: Sequence[int]) -> None:
    """Passes of 1 to 64 rows of which some are accepted, as in speculation; the others are not numbers. Now and then
    all are accepted at once. One to three threads."""
    rule, dtype = made.rule, made.rows.dtype
    wanted, states = settled(run, made, [1] * NUM_TOKENS)
    states.insert(0, made.held.state)
    whole, last = settled(run, made, [NUM_TOKENS])
    assert torch.equal(whole, wanted)
    assert torch.equal(last[0], states[-1])
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)

        def draw(most: int, generator: torch.Generator = generator) -> int:
            return 1 + int(torch.randint(most, (), generator=generator))

        held, done, count = made.copy(), 0, 0
        while done < NUM_TOKENS:
            num_rows = draw((2, 8, ROOM)[seed % 3])
            accepted = min(draw(num_rows), NUM_TOKENS - done)
            settles = draw(4) == 1
            rows = torch.full((num_rows, sum(rule.row_parts)), torch.nan, dtype=dtype)
            rows[:accepted] = made.rows[done : done + accepted]
            with threads(draw(3)):
                rows = rows[:accepted] if settles else rows
                found = run(rule, made.weights, held, rows, Replayed(count), settles=settles)
            assert torch.equal(found[:accepted], wanted[done : done + accepted])
            assert torch.equal(held.state, states[done + accepted if settles else done])
            done, count = done + accepted, 0 if settles else accepted


@pytest.mark.few(11)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", STATES)
def test_bits_are_the_same_in_any_passes_with_any_replays(
    executors: Callable[[DeltaRule | Mamba2], RunRecurrence], rule: str, dtype: torch.dtype
) -> None:
    check_bits(executors(STATES[rule]), STATES[rule], dtype, range(3))


@pytest.mark.parametrize("name", on_this_machine())
@pytest.mark.parametrize("rule", REAL.values(), ids=REAL)
def test_bits_of_real_sizes(name: str, rule: DeltaRule | Mamba2) -> None:
    check_bits(of(name, type(rule)), rule, torch.bfloat16, range(2))


# Functions of single numbers, which a state of one number shows.

ONE = DeltaRule(1, 1, 1, 1, width=2, norm=NORM, eps=1e-30)
ONES = {"by head": ONE, "by channel": replace(ONE, by_channel=True)}
NUMBERS = torch.cat([torch.linspace(-120, 100, 1001), torch.logspace(-6, 2, 200), -torch.logspace(-6, 2, 200)])
NUMBERS = torch.cat([NUMBERS, torch.tensor([0.0, 1e3, -1e3, 1e38, -1e38])])
ULP = torch.finfo(torch.float32).eps


def state_after(
    run: RunRecurrence, one: DeltaRule, state: float, v: Tensor, b: Tensor, a: Tensor, decay: Tensor
) -> Tensor:
    """Of heads with one token each, whose key is 1: fp64 [n]. one: the rule of a head."""
    heads = len(v)
    rule = replace(one, num_key_heads=heads, num_heads=heads)
    last = torch.cat([torch.full((2 * heads,), 4096.0), v, torch.zeros(heads), b, a])
    taps = torch.stack([torch.zeros(rule.channels), torch.ones(rule.channels)])
    weights = RecurrenceWeights(taps, decay, torch.zeros(heads), NormWeights(NORM, torch.ones(1)))
    held = Held(torch.full(rule.state_shape, state), torch.zeros(1, rule.kept))
    run(rule, weights, held, last[None], Replayed(0), settles=True)
    return held.state.flatten().double()


@pytest.mark.parametrize("one", ONES.values(), ids=ONES)
def test_functions_are_within_a_few_units_of_the_last_place(executor: RunRecurrence, one: DeltaRule) -> None:
    """silu of the convolution, sigmoid of the steps; exp, softplus and sigmoid of the decays."""
    x, zero, after = NUMBERS, torch.zeros_like(NUMBERS), partial(state_after, executor, one)
    sure, never = zero + 200, zero - 200
    gated = after(0.0, x, sure, zero, zero - 1)
    exact = x.double() / (1 + (-x.double()).exp())
    assert ((gated - exact).abs() <= 4 * ULP * exact.abs() + 1e-35).all()
    steps = after(0.0, zero + 4096, x, zero, zero - 1) / 4096
    exact = 1 / (1 + (-x.double()).exp())
    assert ((steps - exact).abs() <= 4 * ULP * exact + 1e-35).all()
    times = x.clamp(min=-80)
    grown = softplus(times.double())
    decay = (-2 / grown).float()  # so that e^-2 has softplus's own errors twice
    exact = (decay.double() * grown).exp()
    assert ((after(1.0, zero, never, times, decay) - exact).abs() <= 10 * ULP * exact).all()
    exact = (-NUMBERS.abs().double()).exp()
    found = after(1.0, zero, never, zero + 60, -NUMBERS.abs() / 60)
    assert ((found - exact).abs() <= (4 + 2 * NUMBERS.abs()) * ULP * exact + 1e-35).all()
    exact = (-5 / (1 + (-x.double()).exp())).exp()
    bounded = state_after(executor, replace(one, least=-5.0), 1.0, zero, never, x, zero - 1)
    assert ((bounded - exact).abs() <= 20 * ULP * exact).all()


# What is no number, and the ends of memory.


@pytest.mark.parametrize("name", on_this_machine())
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("own", ["odd sizes", "decays by channel, odd sizes"])
def test_what_is_no_number_is_passed_on_to_later_rows_alone(name: str, value: float, own: str) -> None:
    rule = RULES[own]
    made = scene(rule, torch.float32, 8)
    wanted = of(name)(rule, made.weights, made.copy(), made.rows, Replayed(0), settles=False)
    end = sum(rule.row_parts)
    for column in (*range(0, end, 7), *range(end - sum(rule.rates), end)):
        rows = made.rows.clone()
        rows[4, column] = value
        found = of(name)(rule, made.weights, made.copy(), rows, Replayed(0), settles=False)
        assert torch.equal(found[:4], wanted[:4])
        assert found[4].isnan().any() or value == value


@pytest.mark.parametrize("name", on_this_machine())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", STATES)
def test_nothing_is_read_or_written_past_the_end_of_memory(name: str, rule: str, dtype: torch.dtype) -> None:
    made = scene(STATES[rule], dtype, 5)
    kept, weights, run = made.rule.width - 1 + 5, made.weights, of(name, type(made.rule))
    with ExitStack() as stack:

        def guarded(each: Tensor) -> Tensor:
            return stack.enter_context(before_a_guard(each.contiguous()))

        own = {key: guarded(each) for key, each in vars(weights).items() if isinstance(each, Tensor)}
        norm = weights.norm and replace(weights.norm, weight=guarded(weights.norm.weight))
        held = Held(guarded(made.held.state), guarded(made.held.inputs[:kept]))
        found = run(made.rule, replace(weights, norm=norm, **own), held, guarded(made.rows), Replayed(2), settles=False)
    assert torch.equal(found, run(made.rule, weights, made.copy(), made.rows, Replayed(2), settles=False))


MISFITS: dict[str, Callable[[Scene], Scene]] = {
    "a bias by head alone": lambda made: replace(
        made, weights=replace(made.weights, time_bias=torch.zeros(made.rule.num_heads))
    ),
    "no decay": lambda made: replace(made, weights=replace(made.weights, decay=None)),
    "a skip": lambda made: replace(made, weights=replace(made.weights, skip=torch.zeros(made.rule.num_heads))),
    "taps of 16 bits": lambda made: replace(made, weights=replace(made.weights, taps=made.weights.taps.half())),
    "taps in columns": lambda made: replace(
        made, weights=replace(made.weights, taps=made.weights.taps.T.contiguous().T)
    ),
    "a state of 16 bits": lambda made: replace(made, held=replace(made.held, state=made.held.state.half())),
    "a state of one head": lambda made: replace(made, held=replace(made.held, state=made.held.state[:1])),
    "no room for new rows": lambda made: replace(made, held=replace(made.held, inputs=made.held.inputs[:7])),
    "short inputs": lambda made: replace(made, held=replace(made.held, inputs=made.held.inputs[:, 1:])),
    "inputs of 16 bits": lambda made: replace(made, held=replace(made.held, inputs=made.held.inputs.half())),
    "rows without times": lambda made: replace(made, rows=made.rows[:, : -made.rule.num_times]),
    "rows in columns": lambda made: replace(made, rows=made.rows.T.contiguous().T),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_what_the_kernels_would_read_wrongly_they_refuse(misfit: str) -> None:
    name, fits = on_this_machine()[0], scene(BY_CHANNEL, torch.float32, 5)
    of(name)(fits.rule, fits.weights, fits.copy(), fits.rows, Replayed(5), settles=False)
    made = MISFITS[misfit](fits)
    with pytest.raises(AssertionError):
        of(name)(made.rule, made.weights, made.held, made.rows, Replayed(5), settles=False)


def test_what_is_around_the_held_rows_stays(executor: RunRecurrence) -> None:
    """Inputs may be a part of wider rows."""
    made = scene(RULES["tiny"], torch.bfloat16, 4)
    wide = pad(made.held.inputs, (5, 6), value=7.0)
    held = Held(made.held.state.clone(), wide[:, 5:-6])
    executor(made.rule, made.weights, held, made.rows, Replayed(3), settles=False)
    assert (wide[:, :5] == 7).all()
    assert (wide[:, -6:] == 7).all()
    assert torch.equal(held.inputs[5:], made.held.inputs[5:])


# The tests have teeth: each of these mistakes, planted in the source of the operators' rule, is found.

BUGS = {
    "one token too few is replayed": ("[: before + count]):", "[: before + max(count - 1, 0)]):"),
    "the state is stored after the new rows": ("held.state if settles else held.state.clone()", "held.state"),
    "a settled state is not kept": ("held.state if settles else held.state.clone()", "held.state.clone()"),
    "the rows before the first new one are too early": ("held.inputs[count : before + count]", "held.inputs[:before]"),
    "only the last rows are held": ("inputs[-before:] if settles else inputs", "inputs[-before:]"),
    "the gate of another head": ("silu(gates)", "silu(gates).roll(1, 1)"),
    "a gate is held": ("torch.cat([mixed, others], 1)", "torch.cat([mixed[:, 1:], gates[:, :1], others], 1)"),
    "the decay comes after the update": ("state *= decays[token]", "state *= decays[token - 1] if token else 1"),
    "an update of the state before its decay": ("key @ state", "key @ (state / decays[token])"),
    "an output of the state before the update": (
        "query @ state", "query @ (state - key.transpose(1, 2) * update.unsqueeze(1))"
    ),
    "steps end at 1": ("delta.steps / grown", "1 / grown"),
    "the decays of other heads": ("rates[:, None]", "rates.flip(0)[:, None]"),
    "value heads take turns": (
        "(states.key_heads,", "([head % states.num_key_heads for head in range(states.num_heads)],",
    ),
    "queries are not scaled": (".mul_(delta.key_dim**-0.5)", ""),
    "no epsilon below the norm of keys": ("keepdim=True) + delta.eps)", "keepdim=True))"),
    "taps are the other way around": ("enumerate(weights.taps)", "enumerate(weights.taps.flip(0))"),
    "a sum over all rows": ("square().sum(2, keepdim=True)", "square().sum((0, 2), keepdim=True)"),
}  # fmt: skip


BUGS_BY_CHANNEL = {
    "the decays of other channels": ("logs.exp_()", "logs.roll(1, 2).exp_()"),
    "the decays of other heads": ("logs.exp_()", "logs.roll(1, 1).exp_()"),
    "a decay of the whole head": ("logs.exp_()", "logs.mean(2, keepdim=True).exp_()"),
    "the biases of another head": ("times + weights.time_bias", "times + weights.time_bias.roll(delta.key_dim)"),
    "the biases of other channels": ("times + weights.time_bias", "times + weights.time_bias.flip(0)"),
    "the steps of another head": ("delta.steps / grown(steps)", "delta.steps / grown(steps.roll(1, 1))"),
    "decays are never bounded": ("if delta.least is None else", "if True else"),
    "decays are always bounded": (
        "if delta.least is None else delta.least *", "if delta.least == 0 else (delta.least or -5) *"
    ),
    "bounded decays have no rate": ("by_head * -rates", "by_head"),
    "bounded decays grow with time": ("by_head * -rates", "by_head * rates"),
    "gates are silu": ("else sigmoid(gates)", "else silu(gates)"),
    "times are held of so many channels as there are heads": (
        "held.inputs[: len(kept)] = kept",
        "held.inputs[: len(kept), :end] = kept[:, : (end := states.channels + 2 * states.num_heads)]",
    ),
}  # fmt: skip


BUGS_OF_MAMBA = {
    "a state decays after its update": ("state *= decays[token]", "state *= decays[token - 1] if token else 1"),
    "keys are not timed": ("(steps[token].unsqueeze(1) * value)", "value"),
    "groups take turns": ("for_heads(mamba, k)", "for_heads(mamba, k).roll(2, 1)"),
    "a time step is cut below": (
        "softplus(times + weights.time_bias)", "softplus(times + weights.time_bias).clamp(min=0.001)"
    ),
    "nothing passes the state": (" + skip * value", ""),
    "a value passes it untimed by its head": ("weights.skip.unsqueeze(1)", "weights.skip.flip(0).unsqueeze(1)"),
    "the norm comes before the gate": ("out.mul_(silu(gates)).flatten(1)", "out.flatten(1)"),
    "a norm of the whole row": ("(mamba.num_key_heads, -1)", "(1, -1)"),
    "a norm without its epsilon": (" + weights.norm.norm.eps", ""),
}  # fmt: skip


def with_a_bug(twin: ModuleType, old: str, new: str) -> ModuleType:
    """The module with `old`, which its source has once, replaced. Errors: ValueError where it has not, which no test
    takes for a mistake that was found."""
    source = Path(str(twin.__file__)).read_text(encoding="utf-8")
    if (times := source.count(old)) != 1:
        raise ValueError(f"{twin.__name__} has {old!r} {times} times, not once")
    module = ModuleType(twin.__name__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)  # where dataclasses look for their annotations
        exec(compile(source.replace(old, new), "<with a bug>", "exec"), module.__dict__)
    return module


@pytest.mark.few(9)
@pytest.mark.parametrize("bug", BUGS)
def test_mistakes_are_found(bug: str) -> None:
    with pytest.raises(AssertionError):
        check_small(with_a_bug(delta, *BUGS[bug]).delta_rule)


@pytest.mark.few(9)
@pytest.mark.parametrize("bug", BUGS_BY_CHANNEL)
def test_mistakes_by_channel_are_found(bug: str) -> None:
    with pytest.raises(AssertionError):
        check_small_by_channel(with_a_bug(delta, *BUGS_BY_CHANNEL[bug]).delta_rule)


@pytest.mark.few(5)
@pytest.mark.parametrize("bug", BUGS_OF_MAMBA)
def test_mistakes_of_mamba_are_found(bug: str) -> None:
    with pytest.raises(AssertionError):
        check_small_mamba(with_a_bug(mamba, *BUGS_OF_MAMBA[bug]).mamba2)


def test_without_a_mistake_none_is_found() -> None:
    check_small(delta.delta_rule)
    check_small_by_channel(delta.delta_rule)
    check_small_mamba(mamba.mamba2)


def check_small(run: RunRecurrence) -> None:
    rule = replace(RULES["three value heads a key head"], key_dim=8, value_dim=9, steps=2.0, eps=1e-2)
    check_formula(run, rule, torch.float32, PASSES[:5] + PASSES[6:7])
    check_bits(run, rule, torch.float32, [1, 2])


def check_small_by_channel(run: RunRecurrence) -> None:
    rule = replace(BY_CHANNEL, key_dim=8, value_dim=9)
    for each in (rule, replace(rule, least=-5.0)):
        check_formula(run, each, torch.float32, PASSES[1:4])
        check_bits(run, each, torch.float32, [1])


def check_small_mamba(run: RunRecurrence) -> None:
    rule = Mamba2(2, 4, 8, 9, norm=replace(NORM, eps=1e-2))
    check_formula(run, rule, torch.float32, PASSES[:5] + PASSES[6:7])
    check_bits(run, rule, torch.float32, [1, 2])
