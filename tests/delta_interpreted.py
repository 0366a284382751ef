"""The GPU's delta rule and Mamba-2 in Triton's interpreter: against their formulas in fp64, and bit for bit against
themselves however tokens are divided into launches. test_gpu_kernels.py runs this as it does gpu_interpreted.py."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from gpu_interpreted import normal
from kit.interpreter import rounds_to_bf16, without_idle_work
from offload.config.mixers import DeltaRule, Mamba2, Recurrence
from offload.config.norm import Norm
from offload.kernels.device import DeviceKernels
from offload.kernels.gpu import delta as by_triton
from offload.kernels.gpu import delta_programs
from offload.kernels.gpu.delta import States, is_aligned, run_states
from offload.kernels.gpu.kernels import GPU_KERNELS
from offload.kernels.norms import NormWeights
from offload.kernels.recurrence import Held, RecurrenceWeights, Replayed
from offload.native.launch import counting

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES: dict[str, States] = {
    "grouped": DeltaRule(2, 6, 8, 12, 4),
    "tiled": DeltaRule(3, 6, 5, 3, 3, tiled=1),
    "alone": DeltaRule(2, 2, 12, 20, 2, Norm(1e-4, fp32=True), steps=2.0, eps=1e-3),
    "aligned": DeltaRule(1, 8, 16, 2, 4, tiled=0),
    "bounded": DeltaRule(2, 2, 8, 5, 2, gate="sigmoid", least=-3.0),
    "by channel": DeltaRule(3, 3, 13, 12, 4, gate="sigmoid", by_channel=True, low_rank=8),
    "by channel, aligned": DeltaRule(16, 16, 16, 2, 3, by_channel=True),
    "by channel, bounded": DeltaRule(2, 2, 16, 20, 2, gate="sigmoid", by_channel=True, least=-5.0, steps=2.0),
    "mamba": Mamba2(2, 6, 8, 12, 4),
    "mamba, odd sizes": Mamba2(3, 3, 5, 3, 3, Norm(1e-3, fp32=True), taps_bias=False),
    "mamba, aligned": Mamba2(1, 8, 16, 6, 2, norm=None),
}
ROOM = 72  # M
BY_TORCH = DeviceKernels().recurrences
COUNTS = ((0, 1), (1, 1), (5, 3), (1, 16), (0, 64), (5, 64))  # replayed, new

without_idle_work()


@pytest.fixture(autouse=True)
def _rounds_as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds_to_bf16(monkeypatch)


@cache
def weights_of(delta: States) -> RecurrenceWeights:
    """Decays of a token from nearly none to nearly all."""
    decay, is_mamba = -(2 * normal(delta.num_heads, seed=1)).exp(), isinstance(delta, Mamba2)
    factors = 1 + normal(delta.out_size if is_mamba else delta.value_dim, seed=3) / 4
    norm = None if delta.norm is None else NormWeights(delta.norm, factors)
    bias = 3 * normal(*delta.vectors["time_bias"], seed=4)
    found = RecurrenceWeights(normal(delta.width, delta.channels, seed=2), decay, bias, norm)
    if not isinstance(delta, Mamba2):
        return found
    taps_bias = normal(delta.channels, seed=8) if delta.taps_bias else None
    return replace(found, taps_bias=taps_bias, skip=normal(delta.num_heads, seed=9))


def some(delta: Recurrence, count: int, dtype: torch.dtype, *, replayed: int = 0) -> tuple[Held, Tensor]:
    """What is held, NaN beyond the replayed tokens, and new rows, which are a part of longer ones."""
    inputs = normal(delta.width - 1 + ROOM, delta.kept, seed=5, dtype=dtype)
    inputs[delta.width - 1 + replayed :] = torch.nan
    rows = normal(count, 16 + sum(delta.row_parts), seed=6, dtype=dtype)[:, 3 : 3 + sum(delta.row_parts)]
    return Held(normal(*delta.state_shape, seed=7), inputs), rows


def copied(held: Held) -> Held:
    return Held(held.state.clone(), held.inputs.clone())


@dataclass
class Formula:
    """One head's recurrence in fp64, as Yang et al. 2024 (arXiv 2412.06464, equation 10) have it for its transpose, or
    Kimi Delta Attention (arXiv 2510.26692) with a decay for each row, or as Dao and Gu 2024 (arXiv 2405.21060, section
    6) have it."""

    delta: States
    weights: RecurrenceWeights
    head: int
    state: Tensor  # [key_dim, value_dim]

    def token(self, window: Tensor, *others: Tensor) -> Tensor:
        """window: [width, channels] up to this token. others: its parts with a number for each head, or with a head's
        numbers of each channel of its key."""
        delta, head, bias = self.delta, self.head, self.weights.taps_bias
        mixed = torch.zeros(delta.channels, dtype=torch.float64)
        mixed = mixed if bias is None else bias.double()
        for tap in range(delta.width):
            mixed = mixed + window[tap] * self.weights.taps[tap].double()
        mixed = mixed / (1 + (-mixed).exp())
        group, tiled = delta.num_heads // delta.num_key_heads, getattr(delta, "tiled", None)
        first = delta.key_dim * (head // group if tiled is None else (head + tiled) % delta.num_key_heads)
        query, key = mixed[first:][: delta.key_dim], mixed[delta.key_size + first :][: delta.key_dim]
        value = mixed[2 * delta.key_size + head * delta.value_dim :][: delta.value_dim]
        time = (
            others[-1].view(delta.num_heads, -1)[head] + self.weights.time_bias.view(delta.num_heads, -1)[head].double()
        )
        waited, rate = torch.log1p(time.exp()), self.weights.decay[head].double()
        least = getattr(delta, "least", None)
        logs = rate * waited if least is None else least / (1 + (rate * time).exp())
        decayed = logs.exp()[:, None] * self.state
        if isinstance(delta, Mamba2):
            assert self.weights.skip is not None
            self.state = decayed + waited * torch.outer(key, value)
            return query @ self.state + self.weights.skip[head].double() * value
        query, key = (each / (each.square().sum() + delta.eps).sqrt() for each in (query, key))
        steps = others[0]
        step = delta.steps / (1 + (-steps[head]).exp())
        self.state = decayed - step * torch.outer(key, key @ decayed) + step * torch.outer(key, value)
        return query @ self.state / delta.key_dim**0.5


def normed(delta: States, norm: NormWeights | None, out: Tensor, gates: Tensor) -> Tensor:
    """The output [T, out_size] of outputs of heads and their activated gates, [T, heads, value_dim]."""
    if norm is None:
        return (out * gates).flatten(1)
    if isinstance(delta, Mamba2):
        parts, gates = (out * gates).flatten(1).unflatten(1, (delta.num_key_heads, -1)), torch.tensor(1.0)
    else:
        parts = out
    found = parts / (parts.square().mean(2, keepdim=True) + norm.norm.eps).sqrt() * gates
    return (found * norm.weight.double().view(-1 if parts is out else delta.num_key_heads, parts.shape[2])).flatten(1)


def in_fp64(delta: States, held: Held, rows: Tensor, replayed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(The output [T, out_size], the state after the replayed tokens, the state after the rows)."""
    weights, before, heads = weights_of(delta), delta.width - 1, delta.num_heads
    old, new = held.inputs[: before + replayed].double(), rows.double()
    mixed = torch.cat([old[:, : delta.channels], new[:, : delta.channels]])
    others = torch.cat([old[:, delta.channels :], new[:, delta.channels + delta.out_size :]])
    gates = new[:, delta.channels :][:, : delta.out_size].unflatten(1, (heads, -1))
    out, states = torch.zeros_like(gates), []
    for head in range(heads):
        formula = Formula(delta, weights, head, held.state[head].double())
        states.append([formula.state])
        for token in range(replayed + len(rows)):
            found = formula.token(mixed[token : token + delta.width], *others[token + before].split(delta.rates))
            states[-1].append(formula.state)
            if token >= replayed:
                out[token - replayed, head] = found
    numerators = 1 if getattr(delta, "gate", None) == "sigmoid" else gates
    found = normed(delta, weights.norm, out, numerators / (1 + (-gates).exp()))
    return found, *(torch.stack([each[at] for each in states]) for at in (replayed, -1))


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("delta", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("replayed", "count"), COUNTS)
@pytest.mark.parametrize("settles", [False, True])
def test_outputs_and_states_are_those_of_the_formula_in_fp64(
    dtype: torch.dtype, delta: States, replayed: int, count: int, settles: bool
) -> None:
    """And what is held is, bit for bit, what torch's operators hold."""
    held, rows = some(delta, count, dtype, replayed=replayed)
    wanted, before, after = in_fp64(delta, held, rows, replayed)
    theirs = copied(held)
    BY_TORCH[type(delta)](delta, weights_of(delta), theirs, rows, Replayed(replayed), settles=settles)
    out = run_states(delta, weights_of(delta), held, rows, Replayed(replayed), settles=settles)
    assert out.dtype == dtype
    assert_close(out.double(), wanted, rtol=2 * torch.finfo(dtype).eps, atol=3e-5)
    assert_close(held.state.double(), after if settles else before, rtol=1e-5, atol=1e-5)
    assert held.inputs.view(torch.uint8).equal(theirs.inputs.view(torch.uint8))


@pytest.mark.parametrize("delta", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("replayed", [0, 1, 5])
def test_a_state_is_settled_without_new_rows(delta: States, replayed: int) -> None:
    held, rows = some(delta, 0, torch.float32, replayed=replayed)
    theirs, (_, _, after) = copied(held), in_fp64(delta, held, rows, replayed)
    for run, each in ((BY_TORCH[type(delta)], theirs), (run_states, held)):
        assert run(delta, weights_of(delta), each, rows, Replayed(replayed), settles=True).shape == (0, delta.out_size)
    assert_close(held.state.double(), after, rtol=1e-5, atol=1e-5)
    assert held.inputs.view(torch.uint8).equal(theirs.inputs.view(torch.uint8))


@pytest.mark.parametrize("by_channel", [False, True])
def test_small_times_keep_their_digits(by_channel: bool) -> None:
    """Of softplus: log(1 + exp(-18)) is 1.5e-8, which fp32 does not add to 1. Decays are those of the formula."""
    delta = DeltaRule(1, 1, 2, 2, 2, by_channel=by_channel)
    norm = NormWeights(delta.norm, torch.ones(2))
    for time, rate in ((-18.0, -3e6), (-5.0, -20.0), (0.0, -1.0), (4.0, -0.1), (40.0, -0.01)):
        weights = RecurrenceWeights(torch.zeros(2, 6), torch.tensor([rate]), torch.full((delta.num_times,), time), norm)
        held = Held(torch.ones(1, 2, 2), torch.zeros(3, delta.kept))
        run_states(delta, weights, held, torch.zeros(1, sum(delta.row_parts)), Replayed(0), settles=True)
        wanted = (rate * torch.tensor(time).double().exp().log1p()).exp().expand(1, 2, 2)
        assert_close(held.state.double(), wanted, rtol=2e-6, atol=0)


@dataclass
class Tokens:
    """A layer's tokens, whose rows are `rows`, as passes and prefills divide them. delta: or another recurrence. rule:
    the function of its kind."""

    delta: Any
    rows: Tensor
    held: Held
    weights: RecurrenceWeights
    rule: Callable[..., Tensor] = run_states
    place: int = 0  # of the state
    length: int = 0

    def run(self, count: int, *, settles: bool = False, rejected: int = 0, graph: bool = False) -> Tensor:
        """The next `count` rows, which stay, and others after them that do not. graph: the number of replayed tokens is
        read on the GPU, and what the host gave is that of another pass."""
        rows = self.rows[self.length : self.length + count]
        rows = torch.cat([rows, 1 - self.rows[:rejected]])
        waiting = self.length - self.place
        replayed = Replayed(9, torch.tensor([waiting])) if graph else Replayed(waiting)
        out = self.rule(self.delta, self.weights, self.held, rows, replayed, settles=settles)
        self.place = self.length + (count if settles else 0)
        self.length += count
        return out[:count]


def tokens_of(delta: States, dtype: torch.dtype) -> Tokens:
    held, rows = some(delta, 9, dtype)
    return Tokens(delta, rows, held, weights_of(delta))


def outputs(found: Tokens, acts: Sequence[tuple[str, int]]) -> tuple[Tensor, Held]:
    """The outputs of all rows, and what is held in the end, after a settled state."""
    out = []
    for act, count in acts:
        if act == "prefill":
            found.run(0, settles=True)
            out.append(found.run(count, settles=True))
        else:
            out.append(found.run(count, rejected=3 * (act == "rejected"), graph=act == "graph"))
    found.run(0, settles=True)
    found.held.inputs[found.delta.width - 1 :] = 0
    return torch.cat(out), found.held


@cache
def alone(tokens_of: Callable[..., Tokens], own: Recurrence, dtype: torch.dtype) -> tuple[Tensor, Held]:
    """Of each token by itself."""
    return outputs(tokens_of(own, dtype), [("pass", 1)] * 9)


def check_divided(
    tokens_of: Callable[..., Tokens], own: Recurrence, dtype: torch.dtype, acts: Sequence[tuple[str, int]]
) -> None:
    """What comes out and what is held are, bit for bit, those of each token by itself."""
    out, held = outputs(tokens_of(own, dtype), acts)
    wanted, wanted_held = alone(tokens_of, own, dtype)
    assert out.equal(wanted)
    assert held.state.equal(wanted_held.state)
    assert held.inputs.equal(wanted_held.inputs)


DIVIDED = {
    "one prefill": [("prefill", 9)],
    "prefills": [("prefill", 4), ("prefill", 1), ("prefill", 4)],
    "one pass": [("pass", 9)],
    "passes": [("pass", 2), ("pass", 3), ("pass", 1), ("pass", 3)],
    "graphs": [("graph", 1), ("graph", 2), ("graph", 3), ("graph", 1), ("graph", 2)],
    "rejected rows": [("rejected", 2), ("rejected", 0), ("rejected", 3), ("rejected", 4)],
    "all kinds": [("prefill", 3), ("graph", 2), ("rejected", 1), ("prefill", 2), ("pass", 1)],
}


@pytest.mark.few(1)
@pytest.mark.parametrize("acts", [*DIVIDED.values()][::-1], ids=[*DIVIDED][::-1])  # all kinds first
@pytest.mark.parametrize("delta", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_has_its_bits_however_tokens_are_divided(
    acts: list[tuple[str, int]], delta: States, dtype: torch.dtype
) -> None:
    check_divided(tokens_of, delta, dtype, acts)


def test_a_long_prefill_runs_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    delta, found = SHAPES["tiled"], {}
    for most in (3, 100):
        monkeypatch.setattr(by_triton, "MOST_ROWS", most)
        held, rows = some(delta, 7, torch.float16, replayed=2)
        with counting() as launches:
            out = run_states(delta, weights_of(delta), held, rows, Replayed(2), settles=True)
        parts = -(-7 // most)
        assert launches == {"advance_states": parts, "finish_rows": parts}
        found[most] = [out, held.state, held.inputs[: delta.width - 1]]
    assert all(map(torch.equal, *found.values()))


def test_a_pass_is_two_launches_of_a_layer() -> None:
    delta = SHAPES["aligned"]
    held, rows = some(delta, 4, torch.bfloat16, replayed=3)
    with counting() as launches:
        run_states(delta, weights_of(delta), held, rows, Replayed(3), settles=False)
    assert launches == {"advance_states": 1, "finish_rows": 1}
    assert all(GPU_KERNELS.recurrences[kind] is run_states for kind in (DeltaRule, Mamba2))


def test_rows_whose_places_a_program_would_take_for_aligned_ones_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which bits a program computes does not depend on where rows happen to lie."""
    given = []
    monkeypatch.setattr(by_triton, "launch", lambda program, grid, arguments, **_: given.append((program, arguments)))
    for delta in SHAPES.values():
        for first, stride in ((0, 0), (3, 16), (16, 16)):
            rows = torch.zeros(3, stride + sum(delta.row_parts))[:, first : first + sum(delta.row_parts)]
            held = some(delta, 0, torch.float32)[0]
            run_states(delta, weights_of(delta), held, rows, Replayed(0), settles=False)
            (advance, (*_, there, _, step, _, _, _)), (_, (_, passed, *_)) = given
            assert advance is delta_programs.ADVANCE[is_aligned(delta)]
            assert there.dtype == torch.int64
            if is_aligned(delta):
                assert passed.data_ptr() % 16 == step % 16 == 0
                assert (passed.data_ptr() == rows.data_ptr()) == (first != 3)
            else:
                assert passed.data_ptr() == rows.data_ptr()
            given.clear()
    assert {is_aligned(each) for each in SHAPES.values()} == {False, True}


STORED, GATE, TAIL = "stored = replayed + num_rows * settles", "row * row_stride + CHANNELS", "num_rows * settles + tap"
FOUND, HELD = (
    "replayed = tl.load(there, mask=count < 0, other=count).to(tl.int32)\n    first_new, ",
    "num_rows, 0), ROWS",
)
NEW, NEXT = "first_new, stop = replayed + WIDTH - 1, replayed + num_rows", "tl.minimum(number + 1, stop - 1)"
MUTANTS = {
    "one row too few": (NEW, f"{NEW} - 1"),
    "one token too few is replayed": (STORED, f"{STORED} - 1 + settles"),
    "new rows begin a place early": (NEW, NEW.replace("WIDTH - 1", "WIDTH - 2")),
    "a state has passed rows that may be rejected": (STORED, "stored = stop"),
    "a settled state lacks the last row": (STORED, f"{STORED} - settles"),
    "no state is stored after replayed tokens": ("(part == 0) & (stored > 0)", "(part == 0) & (stored > replayed)"),
    "a graph replays the host's count": (f"{FOUND}stop", "replayed = tl.maximum(count, 0)\n    first_new, stop"),
    "a graph holds the tail of another pass": (f"{FOUND}tap", "replayed = tl.maximum(count, 0)\n    first_new, tap"),
    "keys are the neighbour's": ("head * KEY_HEADS // HEADS", "(head + 1) % HEADS * KEY_HEADS // HEADS"),
    "tiles begin at the first key head": ("(head + TILED) % KEY_HEADS", "head % KEY_HEADS"),
    "steps of a new row are its gates": ("place >= first_new, OUT, 0", "place > first_new, OUT, 0"),
    "times are steps": ("tl.load(own + at_time, mask=in_time, other=0.0)\n", "tl.load(own + head)\n"),
    "decays of another channel": ("head * KEY_DIM + dim, dim < KEY_DIM", "head * KEY_DIM + (dim ^ 1), dim < KEY_DIM"),
    "biases of another head": ("time_bias + at_time", "time_bias + (at_time + TIMES // HEADS) % TIMES"),
    "steps of another head": ("tl.load(own + head)", "tl.load(own + tl.maximum(head - 1, 0))"),
    "times of another head": (
        "at_time, in_key, in_value, in_time,\n        KEY",
        "at_time * 0, in_key, in_value, in_time,\n        KEY",
    ),
    "decays are never bounded": ("if LEAST is None else", "if LEAST != 0 else"),
    "bounded decays have no rate": ("LEAST / (1 + tl.exp(rate * time))", "LEAST / (1 + tl.exp(-time))"),
    "gates are silu": ("(1.0 if SIGMOID else x)", "x"),
    "as many times are held as there are heads": ("(1 - MAMBA) * HEADS + TIMES", "(2 - MAMBA) * HEADS"),
    "a token is read twice": (NEXT, NEXT.replace("stop - 1", "stop - 2")),
    "an output is of the state before": ("seen + tl.sum(query * key, 0) * update", "seen"),
    "values have no taps": ("_convolved(value, value_taps, value_bias)", "_silu(tl.sum(value.to(tl.float32), 0))"),
    "a convolution without its bias": ("taps, 0) + bias)", "taps, 0))"),
    "an update of Mamba-2 is not timed": ("update = _softplus(time) * value", "update = value"),
    "values of Mamba-2 do not pass the state": ("result += passed * value", "result += 0.0"),
    "keys of Mamba-2 are normed": ("if MAMBA:\n                update", "if False:\n                update"),
    "its norm comes before the gate": ("numbers *= _silu(gate)\n", "numbers *= 1.0\n"),
    "its norm is of a whole row": ("0) / SIZE + EPS", "0) / (HEADS * VALUE_DIM) + EPS"),
    "its factors are the first part's": ("(at if MAMBA else column)", "column"),
    "a gate of another head": (f"{GATE} + at", f"{GATE} + (at + VALUE_DIM) % (HEADS * VALUE_DIM)"),
    "gates of the first row": (GATE, "CHANNELS"),
    "the tail is shifted": (f"replayed + {TAIL}", f"replayed + {TAIL} + 1"),
    "the tail stays where it was": (f"replayed + {TAIL}", TAIL),
    "new rows are held with their gates": ("channel < CHANNELS, 0, HEADS", "channel < CHANNELS, 0, 0 * HEADS"),
    "the first rows alone are held": (f"settles == 0, {HELD}", f"settles == 0, {HELD}".replace("num_rows", "1")),
    "settled rows are held": (f"tl.where(settles == 0, {HELD}", "num_rows, ROWS"),
}


@pytest.mark.few(2)
@pytest.mark.parametrize(("old", "new"), MUTANTS.values(), ids=MUTANTS)
def test_each_fault_is_seen(old: str, new: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (path := tmp_path / "edited.py").write_text(edited_source(old, new))
    spec = spec_from_file_location("edited", path)
    assert spec is not None
    assert spec.loader is not None
    monkeypatch.setitem(sys.modules, "edited", edited := module_from_spec(spec))
    spec.loader.exec_module(edited)
    monkeypatch.setattr(by_triton, "ADVANCE", edited.ADVANCE)
    monkeypatch.setattr(by_triton, "FINISH", edited.FINISH)
    names = "tiled", "grouped", "mamba", "by channel", "by channel, bounded"
    assert not all(sees_no_fault(SHAPES[name]) for name in names)


def test_the_programs_have_the_text_of_each_fault() -> None:
    for old, new in MUTANTS.values():
        assert edited_source(old, new)


def edited_source(old: str, new: str) -> str:
    """The source of the programs with `old`, which they have once, replaced."""
    source = Path(str(delta_programs.__file__)).read_text()
    assert source.count(old) == 1, f"{source.count(old)} times {old!r}"
    return source.replace(old, new)


def sees_no_fault(delta: States) -> bool:
    """Whether outputs, states and what is held are near those of torch's operators, in passes and a prefill."""
    for replayed, count, settles, graph in ((2, 10, False, False), (1, 2, False, True), (0, 3, True, False)):
        held, rows = some(delta, count, torch.float32, replayed=replayed)
        theirs, there = copied(held), torch.tensor([replayed]) if graph else None
        wanted = BY_TORCH[type(delta)](delta, weights_of(delta), theirs, rows, Replayed(replayed), settles=settles)
        given = Replayed(9 if graph else replayed, there)
        out = run_states(delta, weights_of(delta), held, rows, given, settles=settles)
        if not (out - wanted).abs().max() < 1e-4 or not (held.state - theirs.state).abs().max() < 1e-4:
            return False
        if not held.inputs.view(torch.uint8).equal(theirs.inputs.view(torch.uint8)):
            return False
    return True
