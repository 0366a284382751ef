"""Short convolutions, gated and dilated, against their formulas in fp64, and the claim that a row's bits depend on
nothing beside it.

By torch's operators and by every instruction set of this machine, in every dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from kit.processor import before_a_guard, built, on_this_machine
from offload.config.mixers import DilatedConvolution, ShortConvolution
from offload.kernels import convolution as twin
from offload.kernels.recurrence import Held, RecurrenceWeights, Replayed, RunRecurrence
from test_delta import DTYPES, EXECUTORS, NUM_TOKENS, PASSES, ROOM, Scene, check_divided, with_a_bug

Convolution = ShortConvolution | DilatedConvolution
CONVOLUTIONS: dict[str, Convolution] = {
    "lfm2": ShortConvolution(64),
    "lfm3": ShortConvolution(300, 7),
    "odd sizes": ShortConvolution(13, 4, taps_bias=True),
    "the longest": ShortConvolution(17, 8),
    "the shortest": ShortConvolution(5, 2, taps_bias=True),
    "qwen4": DilatedConvolution(64, 4, 3),
    "dilated, odd sizes": DilatedConvolution(13, 3, 2),
    "dilated, the longest": DilatedConvolution(300, 8, 5),
    "dilated by one": DilatedConvolution(5, 2, 1),
}


def of(executor: str, own: Convolution) -> RunRecurrence:
    if executor == "torch":
        return twin.short_convolution if isinstance(own, ShortConvolution) else twin.dilated_convolution
    return built(executor).recurrences[type(own)]


@pytest.fixture(params=EXECUTORS)
def executor(request: pytest.FixtureRequest) -> Callable[[Convolution], RunRecurrence]:
    return lambda own: of(request.param, own)


def scene(own: Convolution, dtype: torch.dtype, num_rows: int, *, seed: int = 0) -> Scene:
    """Rows are strided."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    bias = normal(own.channels) if "taps_bias" in own.vectors else None
    weights = RecurrenceWeights(normal(*own.vectors["taps"]), taps_bias=bias)
    held = Held(torch.empty(own.state_shape), normal(own.width - 1 + ROOM, own.kept).to(dtype))
    rows = normal(num_rows, sum(own.row_parts) + 3).to(dtype)[:, : sum(own.row_parts)]
    return Scene(own, weights, held, rows)


def expected(scene: Scene, count: int, *, settles: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """In fp64 the outputs [T, out_size], the sizes of what is added up for them, and by how much they change for a last
    digit of the sums; the inputs to hold, in their dtype."""
    own, before, weights = scene.rule, scene.rule.width - 1, scene.weights
    gated = isinstance(own, ShortConvolution)
    b, c, x = scene.rows.split(own.parts, 1) if gated else (scene.rows, None, 1)
    inputs = torch.cat([scene.held.inputs[count : before + count], b * x])
    windows = inputs.double().unfold(0, own.width, 1)[:, :, :: 1 if gated else own.dilation]
    windows = windows * weights.taps.double().T
    bias = torch.zeros(own.channels) if weights.taps_bias is None else weights.taps_bias
    sums, sizes = windows.sum(2) + bias.double(), windows.abs().sum(2) + bias.double().abs()
    rounded, eps = sums.to(scene.rows.dtype).double(), torch.finfo(scene.rows.dtype).eps
    kept = inputs[len(inputs) - before :] if settles else inputs
    held = torch.cat([kept, scene.held.inputs[len(kept) :]])
    if c is not None:
        out = c.double() * rounded
        return out, c.double().abs() * sizes, eps * out.abs(), held
    opened = 1 / (1 + (-rounded).exp())
    slope = (opened * (1 + rounded * (1 - opened))).abs()
    return rounded * opened, 2 * sizes, eps * (slope + 0.1 * eps) * rounded.abs(), held


def check_formula(
    run: RunRecurrence, own: Convolution, dtype: torch.dtype, passes: Sequence[tuple[int, int, bool]]
) -> None:
    """Outputs and held inputs. Of 16 bits most outputs have the very bits of sums that are rounded, then multiplied or
    activated."""
    near, eps = 0, torch.finfo(dtype).eps
    for number, (num_rows, count, settles) in enumerate(passes):
        made = scene(own, dtype, num_rows, seed=number)
        out, sizes, digit, inputs = expected(made, count, settles=settles)
        held = made.copy()
        found = run(own, made.weights, held, made.rows, Replayed(count), settles=settles)
        assert found.is_contiguous()
        assert found.dtype == dtype
        rounding = 0.51 * eps * out.abs() + digit if dtype != torch.float32 else 0.0
        assert ((found.double() - out).abs() <= rounding + 1e-6 * sizes + torch.finfo(dtype).smallest_normal).all()
        assert torch.equal(held.inputs, inputs)
        near += int((found == out.to(dtype)).sum())
    assert dtype == torch.float32 or near > 0.97 * own.channels * sum(num_rows for num_rows, *_ in passes)


@pytest.mark.few(7)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("own", CONVOLUTIONS)
def test_outputs_and_what_is_held_are_those_of_the_formula(
    executor: Callable[[Convolution], RunRecurrence], own: str, dtype: torch.dtype
) -> None:
    check_formula(executor(CONVOLUTIONS[own]), CONVOLUTIONS[own], dtype, PASSES)


@pytest.mark.few(7)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("own", CONVOLUTIONS)
def test_bits_are_the_same_in_any_passes_with_any_replays(
    executor: Callable[[Convolution], RunRecurrence], own: str, dtype: torch.dtype
) -> None:
    check_divided(executor(CONVOLUTIONS[own]), scene(CONVOLUTIONS[own], dtype, NUM_TOKENS), range(3))


def test_it_rounds_where_transformers_does(executor: Callable[[Convolution], RunRecurrence]) -> None:
    """In bf16, with its own projections made ones: nearly all bits are the same."""
    config = Lfm2Config(hidden_size=32, num_hidden_layers=1, layer_types=["conv"], num_attention_heads=1)
    theirs = Lfm2ShortConv(config, 0).bfloat16().eval()
    made = scene(ShortConvolution(32), torch.bfloat16, 40)
    theirs.in_proj = theirs.out_proj = torch.nn.Identity()  # type: ignore[assignment]
    theirs.conv.weight.data = made.weights.taps.T[:, None].bfloat16()
    taps = theirs.conv.weight.detach()[:, 0].T.float().contiguous()
    held = Held(made.held.state, torch.zeros_like(made.held.inputs))
    found = executor(made.rule)(made.rule, RecurrenceWeights(taps), held, made.rows, Replayed(0), settles=False)
    with torch.inference_mode():
        wanted = theirs(made.rows[None])[0]
    assert (found == wanted).float().mean() > 0.97


@pytest.mark.parametrize("name", on_this_machine())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("own", CONVOLUTIONS)
def test_nothing_is_read_or_written_past_the_end_of_memory(name: str, own: str, dtype: torch.dtype) -> None:
    made = scene(CONVOLUTIONS[own], dtype, 5)
    kept, weights = made.rule.width - 1 + 5, made.weights
    bias = weights.taps if weights.taps_bias is None else weights.taps_bias
    tensors = made.held.inputs[:kept], made.rows, weights.taps, bias
    with ExitStack() as stack:
        inputs, rows, taps, bias = (stack.enter_context(before_a_guard(each.contiguous())) for each in tensors)
        guarded = RecurrenceWeights(taps, taps_bias=None if weights.taps_bias is None else bias)
        found = of(name, made.rule)(made.rule, guarded, Held(made.held.state, inputs), rows, Replayed(2), settles=False)
    held = made.copy()
    assert torch.equal(found, of(name, made.rule)(made.rule, weights, held, made.rows, Replayed(2), settles=False))


@pytest.mark.parametrize("own", ["odd sizes", "qwen4"])
def test_what_is_around_the_held_rows_stays(executor: Callable[[Convolution], RunRecurrence], own: str) -> None:
    """Inputs may be a part of wider rows."""
    made = scene(CONVOLUTIONS[own], torch.bfloat16, 4)
    wide = pad(made.held.inputs, (5, 6), value=7.0)
    held = Held(made.held.state, wide[:, 5:-6])
    executor(made.rule)(made.rule, made.weights, held, made.rows, Replayed(3), settles=False)
    assert (wide[:, :5] == 7).all()
    assert (wide[:, -6:] == 7).all()
    written = made.rule.width - 1 + 4
    assert torch.equal(held.inputs[written:], made.held.inputs[written:])


# The tests have teeth: each of these mistakes, planted in the source of the operators' function, is found.

BUGS = {
    "one token too few is replayed": (
        "held.inputs[count : before + count], b", "held.inputs[max(count - 1, 0) : before + max(count - 1, 0)], b"
    ),
    "no token is replayed": ("held.inputs[count : before + count], b", "held.inputs[:before], b"),
    "products are not rounded": (
        "= _summed(inputs, weights.taps, len(rows))",
        "= _summed(torch.cat([inputs[:before], b.double() * x]), weights.taps, len(rows))",
    ),
    "sums are not rounded": ("c * sums.to(rows.dtype)", "(c * sums).to(rows.dtype)"),
    "x comes before C": ("b, c, x =", "b, x, c ="),
    "B multiplies the output": ("b, c, x =", "c, b, x ="),
    "taps are the other way around": ("enumerate(taps)", "enumerate(taps.flip(0))"),
    "a convolution of the next token": ("inputs[tap * dilation :]", "inputs.roll(-1, 0)[tap * dilation :]"),
    "no bias": ("sums += weights.taps_bias", "pass"),
    "only the last rows are held": ("inputs[-before:] if settles else inputs", "inputs[-before:]"),
    "all rows are held after the last": ("inputs[-before:] if settles else inputs", "inputs"),
    "what is held is x alone": ("    kept = inputs[", "    inputs[before:] += 1\n    kept = inputs["),
}  # fmt: skip
DILATED_BUGS = {
    "one token too few is replayed": (
        "held.inputs[count : before + count], rows", "held.inputs[max(count - 1, 0) :][:before], rows"
    ),
    "no token is replayed": ("held.inputs[count : before + count], rows", "held.inputs[:before], rows"),
    "neighbouring tokens": ("len(rows), own.dilation)", "len(rows))"),
    "taps are the other way around": ("enumerate(taps)", "enumerate(taps.flip(0))"),
    "a convolution of the next token": ("inputs[tap * dilation :]", "inputs.roll(-1, 0)[tap * dilation :]"),
    "sums are not rounded": ("silu(sums.to(rows.dtype).float())", "silu(sums)"),
    "no activation": ("silu(sums.to(rows.dtype).float())", "sums"),
    "only the last rows are held": ("inputs[-before:] if settles else inputs", "inputs[-before:]"),
    "all rows are held after the last": ("inputs[-before:] if settles else inputs", "inputs"),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_mistakes_are_found(bug: str) -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        check_small(with_a_bug(twin, *BUGS[bug]).short_convolution, "odd sizes")


@pytest.mark.parametrize("bug", DILATED_BUGS)
def test_mistakes_of_a_dilated_convolution_are_found(bug: str) -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        check_small(with_a_bug(twin, *DILATED_BUGS[bug]).dilated_convolution, "dilated, odd sizes")


def test_without_a_mistake_none_is_found() -> None:
    check_small(twin.short_convolution, "odd sizes")
    check_small(twin.dilated_convolution, "dilated, odd sizes")


def check_small(run: RunRecurrence, name: str) -> None:
    own = CONVOLUTIONS[name]
    for dtype in (torch.float32, torch.bfloat16):
        check_formula(run, own, dtype, PASSES)
        check_divided(run, scene(own, dtype, NUM_TOKENS), [1, 2])
