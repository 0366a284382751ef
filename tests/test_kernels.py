"""The CPU's kernels against fp64, and the claim that a row's bits depend on nothing beside it.

Every instruction set of this machine, every dtype. Where a rounding to 16 bits is part of the result, the kernels may
not be further from fp64 than torch's operators are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, rms_norm, silu
from torch.testing import assert_close

from kit.oracles import step_with_torch
from kit.processor import built, on_this_machine, threads
from offload.config.norm import Norm
from offload.kernels import cpu
from offload.kernels.attention import attend, fold, unfold
from offload.kernels.norms import NormWeights, add_normed
from offload.kernels.products import HeadNorms, Step, Steps, room_to_widen
from offload.kernels.rope import RopeTable, Scoring, rotate
from offload.kernels.runs import Rows, Run
from offload.kernels.spans import SpanAttention
from offload.native.interface import Library

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
EXACT_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
GARBAGE = 3e4
SENTINEL = 77.0


@pytest.fixture(params=on_this_machine() or ["none"])
def found(request: pytest.FixtureRequest) -> Library:
    if request.param == "none":
        pytest.skip("there are no kernels for this machine")
    return built(request.param)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=generator(seed)).to(dtype)


def assert_same_bits(actual: Tensor, wanted: Tensor) -> None:
    kind = EXACT_BITS[wanted.dtype]
    assert torch.equal(actual.contiguous().view(kind), wanted.contiguous().view(kind))


def root_mean_square(errors: Sequence[Tensor]) -> float:
    return float(torch.cat([error.flatten() for error in errors]).square().mean().sqrt())


# Products.


def followed_by_nan(tensor: Tensor) -> Tensor:
    """The same, in memory after which there is nothing to be read."""
    memory = torch.full((tensor.numel() + 64,), torch.nan, dtype=tensor.dtype)
    memory[: tensor.numel()] = tensor.flatten()
    return memory[: tensor.numel()].view(tensor.shape)


def make_step(
    dtype: torch.dtype,
    num_rows: int,
    inputs: int,
    outputs: int,
    *,
    ending: str,
    norm: str,
    bias: bool,
    seed: int = 0,
) -> Step:
    """ending: one of ENDINGS, norm: one of NORMS."""
    ending, _, activation = ending.partition(", ")
    width = 2 * outputs if ending == "gate" else outputs
    scale = (6 if activation == "clamped_silu" else 1) / inputs**0.5  # some are clamped
    return Step(
        x=followed_by_nan(normal(num_rows, inputs, dtype=dtype, seed=seed)),
        weight=followed_by_nan((normal(width, inputs, dtype=torch.float32, seed=seed + 1) * scale).to(dtype)),
        bias=followed_by_nan(normal(width, dtype=dtype, seed=seed + 2)) if bias else None,
        out=normal(num_rows, outputs, dtype=dtype, seed=seed + 3),
        norm=make_norm(dtype, inputs, norm, seed=seed) if norm else None,
        ending=ending,  # type: ignore[arg-type]
        factor=0.4 if ending == "add" else 1.0,
        activation=activation or "silu",  # type: ignore[arg-type]
    )


ENDINGS = (
    *("write", "add", "gate, silu", "gate, gelu_tanh", "gate, clamped_silu", "activate, gelu_tanh"),
    "activate, relu_squared",
)
NORMS = ("", "rms", "rms, fp32", "layer", "layer, biased", "layer, fp32, biased")
ACTIVATIONS = {
    "silu": silu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "relu_squared": lambda x: x.relu().square(),
    "clamped_silu": lambda x: x.clamp(max=7) / (1 + (-1.702 * x.clamp(max=7)).exp()),
}


def make_norm(dtype: torch.dtype, size: int, kind: str, *, seed: int) -> NormWeights:
    biased, fp32 = kind.endswith("biased"), "fp32" in kind
    kept = torch.float32 if fp32 else dtype
    weight, bias = (followed_by_nan(normal(size, dtype=kept, seed=seed + at)) for at in (4, 5))
    norm = Norm(1e-5, centred=not kind.startswith("rms"), bias=biased, fp32=fp32)
    return NormWeights(norm, weight, bias if biased else None)


def normed_in_fp64(x: Tensor, norm: NormWeights) -> Tensor:
    bias = None if norm.bias is None else norm.bias.double()
    return replace(norm, weight=norm.weight.double(), bias=bias)(x.double())


def in_fp64(step: Step) -> Tensor:
    """What the step leaves in `out`, without any rounding."""
    x = step.x.double() if step.norm is None else normed_in_fp64(step.x, step.norm)
    if step.weight is None:
        return step.out.double() + step.factor * x
    y = x @ step.weight.double().T
    if step.bias is not None:
        y += step.bias.double()
    if step.ending == "gate":
        gate, up = y.chunk(2, -1)
        return ACTIVATIONS[step.activation](gate) * (up.clamp(-7, 7) + 1 if step.activation == "clamped_silu" else up)
    if step.ending == "activate":
        return ACTIVATIONS[step.activation](y)
    return step.factor * y + step.out.double() if step.ending == "add" else y


def run(found: Library, step: Step, num_rows: int | None = None) -> Tensor:
    """The step's `out` afterwards; the step keeps its own. All memory to widen is NaN before."""
    own = replace(step, out=step.out.clone())
    widened = room_to_widen(*own.x.shape).fill_(torch.nan)
    Steps(found, [own], widened).run(len(own.x) if num_rows is None else num_rows)
    return own.out


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.few(9)
def test_products_are_as_near_to_fp64_as_torchs(
    found: Library, dtype: torch.dtype, ending: str, norm: str, bias: bool
) -> None:
    """Sizes on either side of a vector, a tile and a thread's outputs."""
    ours, theirs = [], []
    sizes = [(2, 1), (30, 5), (32, 16), (34, 17), (34, 32), (62, 40), (130, 33), (512, 48)]
    for seed, (inputs, outputs) in enumerate(sizes):
        if inputs == 2 and norm.startswith("layer"):  # two numbers that are nearly equal lose most of theirs
            continue
        for num_rows in (1, 2, 3, 7, 8, 15, 16, 17, 33, 48, 64, 65, 70):
            step = make_step(dtype, num_rows, inputs, outputs, ending=ending, norm=norm, bias=bias, seed=7 * seed)
            wanted = in_fp64(step)
            out = run(found, step)
            by_torch = replace(step, out=step.out.clone())
            step_with_torch(by_torch, num_rows)
            ours.append(out.double() - wanted)
            theirs.append(by_torch.out.double() - wanted)
            # Of each rounding on the way, at most a few; sums of bf16 products lose nothing else.
            few = 8 * torch.finfo(dtype).eps
            assert_close(out.double(), wanted, atol=few * max(1.0, float(wanted.abs().max())), rtol=few)
    if dtype != torch.float32:  # there the bound above is what is promised: other sums are as good
        assert root_mean_square(ours) <= 1.02 * root_mean_square(theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ending", [*ENDINGS, "no product"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.few(12)
def test_a_rows_product_has_the_same_bits_beside_any_rows(
    found: Library, dtype: torch.dtype, ending: str, norm: str
) -> None:
    """With 1 to 70 rows, at every place among them, on 1, 2 and 4 threads; one of the rows beside it is NaN."""
    most = 70
    step = (
        make_addition(dtype, most, 130, norm or "rms")
        if ending == "no product"
        else make_step(dtype, most, 130, 37, ending=ending, norm=norm, bias=True)
    )
    step.x[5] = torch.nan
    alone = torch.cat([run(found, replace(step, x=step.x[i : i + 1], out=step.out[i : i + 1])) for i in range(most)])
    sound = torch.arange(most) != 5
    for number, count in enumerate([*range(1, 65), 66, most]):
        places = (torch.arange(count) + 29 * number) % most
        with threads((1, 2, 4)[number % 3]):
            out = run(found, replace(step, x=step.x[places], out=step.out[places]))
        assert_same_bits(out[sound[places]], alone[places][sound[places]])


def make_addition(dtype: torch.dtype, num_rows: int, size: int, norm: str, *, seed: int = 0) -> Step:
    """Of normed rows, without a product."""
    x, out = (normal(num_rows, size, dtype=dtype, seed=seed + at) for at in (0, 3))
    own = make_norm(dtype, size, norm, seed=seed)
    return Step(followed_by_nan(x), None, None, out, own, "add", 0.4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", NORMS[1:])
def test_normed_rows_are_added_as_near_to_fp64_as_by_torch(found: Library, dtype: torch.dtype, norm: str) -> None:
    ours, theirs = [], []
    for seed, size in enumerate((30, 32, 34, 62, 130, 512)):
        for num_rows in (1, 3, 16, 70):
            step = make_addition(dtype, num_rows, size, norm, seed=9 * seed)
            wanted, out, by_torch = in_fp64(step), run(found, step), step.out.clone()
            assert step.norm is not None
            add_normed(by_torch, step.x, step.norm, step.factor)
            ours.append(out.double() - wanted)
            theirs.append(by_torch.double() - wanted)
            few = 8 * torch.finfo(dtype).eps
            assert_close(out.double(), wanted, atol=few * max(1.0, float(wanted.abs().max())), rtol=few)
    if dtype != torch.float32:
        assert root_mean_square(ours) <= 1.02 * root_mean_square(theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_first_rows_are_those_of_all_and_the_rest_stays(found: Library, dtype: torch.dtype) -> None:
    step = make_step(dtype, 80, 66, 21, ending="add", norm="rms", bias=True)
    whole = run(found, step)
    for count in (1, 9, 70, 79):
        out = run(found, step, count)
        assert_same_bits(out[:count], whole[:count])
        assert torch.equal(out[count:], step.out[count:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_steps_follow_one_another_and_leave_the_rows_after_theirs(found: Library, dtype: torch.dtype) -> None:
    """What the second step reads is what the first one wrote, by whichever thread; rows that do not count stay."""
    first = make_step(dtype, 9, 66, 2050, ending="write", norm="rms", bias=False)
    second = make_step(dtype, 9, 2050, 66, ending="add", norm="", bias=True, seed=9)
    wanted_first = run(found, first, 6)
    wanted = run(found, replace(second, x=wanted_first), 6)
    assert torch.equal(wanted[6:], second.out[6:])
    for number in (1, 2, 4, *[2] * 30):  # threads have to meet between the steps, every time
        joined = replace(second, x=first.out.clone(), out=second.out.clone())
        steps = Steps(found, [replace(first, out=joined.x), joined], room_to_widen(9, 2050))
        with threads(number):
            steps.run(6)
        assert_same_bits(joined.out, wanted)
        assert_same_bits(joined.x, wanted_first)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_the_smallest_and_largest_numbers(found: Library, dtype: torch.dtype) -> None:
    """Each output is one input times a power of two: exact, or where it is past the dtype's largest, infinite."""
    info = torch.finfo(dtype)
    numbers = [info.max, -info.max, info.max / 4, -0.0, 0.0, info.tiny, -info.tiny, info.tiny / 4, 1.0, -3.5]
    x = torch.zeros(len(numbers), 34).to(dtype)
    x[:, 33] = torch.tensor(numbers, dtype=torch.float64).to(dtype)
    weight = torch.zeros(19, 34).to(dtype)
    weight[:, 33] = torch.tensor([2.0 ** (i - 9) for i in range(19)]).to(dtype)
    out = run(found, Step(x, weight, None, torch.empty(len(numbers), 19).to(dtype)))
    wanted = (x.double() @ weight.double().T).to(dtype)
    # AMX and AVX512_BF16 take subnormal numbers for zeros; the largest power of two here is 2^9.
    flushed = found.instruction_set in ("amx", "avx512_bf16") and dtype == torch.bfloat16
    assert_close(out.double(), wanted.double(), rtol=0, atol=2**9 * info.tiny if flushed else 0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates_of_the_smallest_and_largest_numbers(found: Library, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    numbers = torch.tensor([largest, -largest, 1e4, -1e4, 100.0, -100.0, 30.0, -30.0, 1e-4, 0.0, -0.0]).to(dtype)
    one_and_zero = torch.tensor([[1.0, 0.0]]).to(dtype)  # a gate of each number, and 1 in it
    out = torch.empty(len(numbers), 1).to(dtype)
    step = Step(numbers[:, None] * one_and_zero, torch.eye(2).to(dtype), one_and_zero[0].flip(0), out, ending="gate")
    wanted = silu(numbers.double())
    near = max(2 * torch.finfo(dtype).eps, 3e-6)  # e^30 in fp32 is less exact than a sum
    assert_close(run(found, step)[:, 0].double(), wanted, rtol=near, atol=200 * torch.finfo(dtype).tiny)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ending", ENDINGS)
def test_what_is_not_a_number_stays_so(found: Library, dtype: torch.dtype, ending: str) -> None:
    step = make_step(dtype, 3, 34, 17, ending=ending, norm="", bias=False)
    step.x[1] = torch.nan
    assert run(found, step).isnan().all(1).tolist() == [False, True, False]


# Rotation, norms of heads, writes.


@dataclass(frozen=True)
class Heads:
    """Sizes of an attention: query heads for each of `kv` heads of `dim`."""

    dim: int
    group: int
    kv: int = 2


def random_rope(dim: int, dtype: torch.dtype, num_positions: int = 400) -> RopeTable:
    """Any numbers do: the columns of `sin` need not be those of angles."""
    return RopeTable(normal(num_positions, dim, dtype=dtype, seed=8), normal(num_positions, dim, dtype=dtype, seed=9))


def unmoving(dim: int, dtype: torch.dtype) -> RopeTable:
    return RopeTable(torch.ones(1024, dim, dtype=dtype), torch.zeros(1024, dim, dtype=dtype))


def fused(heads: Heads, num_rows: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as parts of one tensor's rows, as the decoder has them."""
    sizes = (heads.group * heads.kv, heads.kv, heads.kv)
    return normal(num_rows, sum(sizes), heads.dim, dtype=dtype, seed=seed).split(sizes, 1)  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [2, 10, 64, 80])
@pytest.mark.parametrize(("position", "index", "num_rows"), [(0, 0, 1), (37, 37, 9), (13, 5, 27), (50, 20, 4)])
def test_rows_are_rotated_and_written_as_torch_does_to_the_bit(
    found: Library, dtype: torch.dtype, dim: int, position: int, index: int, num_rows: int
) -> None:
    """Into pages of 8 tokens of a tile of 3 that begins at token 16, and nowhere else. Tokens outside are left out."""
    heads, page, first = Heads(dim, 3), 8, 16
    rope = random_rope(dim, dtype)
    q, k, v = fused(heads, num_rows, dtype)
    table = rope.rows(position, position + num_rows)
    tile = torch.full((2, 3, heads.kv, page, dim), SENTINEL, dtype=dtype)
    wanted = tile.clone()
    for t, (key, value) in enumerate(zip(rotate(k, *table), v, strict=True)):
        number, offset = divmod(index + t - first, page)
        if 0 <= number < 3:
            wanted[0, number, :, offset], wanted[1, number, :, offset] = key, value
    spans = SpanAttention(found, dtype=dtype, span=page)
    spans.begin(Rows(q, k, v, Scoring(rope), position, index), [3 * page])
    spans.append_rows(Run(tile, 0, first))
    assert_same_bits(tile, wanted)
    assert_same_bits(queries_of(spans, q, heads.kv), rotate(q, *table).float())
    grown = replace(rope, growth=normal(len(rope.cos), dtype=dtype, seed=10))
    spans.begin(Rows(q, k, v, Scoring(grown), position, index), [3 * page])
    spans.append_rows(Run(tile, 0, first))
    assert_same_bits(queries_of(spans, q, heads.kv), grown.rotated(q, k, position)[0].float())
    weighed = Scoring(rope, weights=(normal(dim, dtype=dtype, seed=11), normal(dim, dtype=dtype, seed=12)))
    wanted_q, wanted_k = weighed.rotated(q, k, position)
    spans.begin(Rows(q, k, v, weighed, position, index), [3 * page])
    spans.append_rows(Run(tile, 0, first))
    assert_same_bits(queries_of(spans, q, heads.kv), wanted_q.float())
    for t, key in enumerate(wanted_k):
        number, offset = divmod(index + t - first, page)
        if 0 <= number < 3:
            assert_same_bits(tile[0, number, :, offset], key)


def queries_of(spans: SpanAttention, q: Tensor, kv_heads: int) -> Tensor:
    """Those that attend, fp32 [T, H, D]."""
    num_rows, _, dim = q.shape
    return spans._queries[: q.numel()].view(kv_heads, num_rows, -1, dim).transpose(0, 1).reshape(q.shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [2, 10, 64, 80, 128])
@pytest.mark.parametrize("fp32", [False, True], ids=["", "weight in fp32"])
def test_heads_are_normed_as_near_to_fp64_as_by_torch(found: Library, dtype: torch.dtype, dim: int, fp32: bool) -> None:
    """In place among other heads, which stay as they are; with the bits that a row has alone."""
    rows = normal(13, 7, dim, dtype=dtype)
    norm = normal(dim, dtype=torch.float32 if fp32 else dtype, seed=1)
    weights = NormWeights(Norm(1e-6, fp32=fp32), norm)
    before, own = rows.clone(), rows[:, 2:5]
    wanted = rms_norm(own.double(), norm.shape, norm.double(), 1e-6)
    by_torch = weights(own)
    HeadNorms(found, [(rows.flatten(1)[:, 2 * dim : 5 * dim], weights)]).run(len(rows))
    assert torch.equal(rows[:, :2], before[:, :2])
    assert torch.equal(rows[:, 5:], before[:, 5:])
    assert_close(own.double(), wanted, rtol=4 * torch.finfo(dtype).eps, atol=1e-6)
    ours, theirs = ([out.double() - wanted] for out in (own, by_torch))
    if dtype != torch.float32:
        assert root_mean_square(ours) <= 1.02 * root_mean_square(theirs)
    alone = before[4:5].clone()
    HeadNorms(found, [(alone.flatten(1)[:, 2 * dim : 5 * dim], weights)]).run(1)
    assert_same_bits(alone[0], rows[4])


# Attention.


@dataclass(frozen=True)
class Held:
    """Tokens `first` to `first` + `tokens` in tile [2, P, H_kv, S, D], which are attended to in spans of `span`."""

    tile: Tensor
    first: int
    tokens: int
    span: int
    windowed: bool = False

    @property
    def num_spans(self) -> int:
        return -(-self.tokens // self.span)

    def flat(self) -> Tensor:
        """[2, H_kv, tokens, D]"""
        return self.tile.transpose(1, 2).flatten(2, 3)[:, :, : self.tokens]


def hold(
    heads: Heads, dtype: torch.dtype, *, page: int, pages: int, tokens: int, span: int, first: int = 0,
    windowed: bool = False, scale: float = 1.0, seed: int = 5,
) -> Held:  # fmt: skip
    """Random keys and values; NaN past `tokens`."""
    tile = (scale * torch.randn(2, pages, heads.kv, page, heads.dim, generator=generator(seed))).to(dtype)
    tile.transpose(1, 2)[:, :, torch.arange(pages * page).view(pages, page) >= tokens] = torch.nan
    return Held(tile, first, tokens, span, windowed)


def attended(
    found: Library, held: Sequence[Held], q: Tensor, index: int, *, window: int = 0, chunk: int | None = None,
    cap: float | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Rows q [T, H, D] at `index` and on over `held`."""
    return attending(found, held, q, index, window=window, chunk=chunk, cap=cap).merge()


def attending(
    found: Library, held: Sequence[Held], q: Tensor, index: int, *, window: int = 0, chunk: int | None = None,
    cap: float | None = None,
) -> SpanAttention:  # fmt: skip
    """As `attended`, before the spans are merged."""
    kv_heads = held[0].tile.shape[2]
    spans = SpanAttention(found, dtype=q.dtype, span=held[0].span, chunk=chunk)
    k = torch.zeros(len(q), kv_heads, q.shape[-1], dtype=q.dtype)
    scoring = Scoring(unmoving(q.shape[-1], q.dtype), cap=cap)
    rows = Rows(q, k, k, scoring, position=0, index=index, window=window)
    spans.begin(rows, [each.tokens for each in held], masses=chunk is not None)
    for each in held:
        spans.attend(Run(each.tile, each.tokens, each.first, windowed=each.windowed))
    return spans


def plain_weights(
    held: Sequence[Held], q: Tensor, index: int, window: int, cap: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(weights [T, H_kv, G, tokens], values [H_kv, tokens, D], positions [tokens]) in fp64."""
    keys, values = torch.cat([each.flat() for each in held], 2).double()
    positions = torch.cat([each.first + torch.arange(each.tokens) for each in held])
    windowed = torch.cat([torch.full((each.tokens,), each.windowed) for each in held])
    own = torch.arange(index, index + len(q))[:, None]
    seen = (positions <= own) & (~windowed | (positions > own - window))
    grouped = q.double().view(len(q), keys.shape[0], -1, q.shape[-1])
    scores = torch.einsum("thgd,hnd->thgn", grouped, keys) * q.shape[-1] ** -0.5
    scores = scores if cap is None else cap * (scores / cap).tanh()
    return scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1), values, positions


def plain_attention(held: Sequence[Held], q: Tensor, index: int, window: int = 0, cap: float | None = None) -> Tensor:
    weights, values, _ = plain_weights(held, q, index, window, cap)
    return torch.einsum("thgn,hnd->thgd", weights, values).reshape(len(q), -1)


def assert_rounded(out: Tensor, wanted: Tensor, fp32: float = 2e-6) -> None:
    """`wanted` with one rounding to the dtype, and fp32's few on the way."""
    assert_close(out.double(), wanted, rtol=0.51 * torch.finfo(out.dtype).eps + fp32, atol=fp32)


ALL_HEADS = [Heads(dim, group) for dim in (2, 32, 64, 80, 96, 128, 256) for group in (1, 2, 6)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", ALL_HEADS, ids=str)
def test_attention_over_spans_equals_fp64(found: Library, heads: Heads, dtype: torch.dtype) -> None:
    """Rows in the middle and at the end of spans, whole and partial ones, of one page and of several."""
    for page, pages, span, index, num_rows in [
        (8, 1, 8, 0, 1),
        (8, 3, 4, 5, 9),
        (64, 2, 64, 90, 17),
        (128, 2, 128, 130, 3),
    ]:
        held = [hold(heads, dtype, page=page, pages=pages, tokens=index + num_rows, span=span)]
        q = fused(heads, num_rows, dtype, seed=index)[0]
        out, mass = attended(found, held, q, index)
        assert mass is None
        assert_rounded(out, plain_attention(held, q, index))


@pytest.mark.parametrize("cap", [0.5, 3.0, 50.0, 1e9])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_are_capped(found: Library, dtype: torch.dtype, cap: float) -> None:
    """Small ones and those far beyond the cap; a cap that nothing reaches changes nothing that shows."""
    heads = Heads(64, 2)
    for size in (0.1, 1.0, 40.0):
        held = [hold(heads, dtype, page=64, pages=2, tokens=100, span=64, scale=size)]
        q = fused(heads, 9, dtype, seed=3)[0]
        out = attended(found, held, q, 91, cap=cap)[0]
        values = 1 + float(held[0].flat()[1].double().abs().max())
        most = values * (0.51 * torch.finfo(dtype).eps + 2e-6 + 1e-6 * size)
        assert float((out.double() - plain_attention(held, q, 91, cap=cap)).abs().max()) <= most


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [Heads(64, 2), Heads(80, 6)], ids=str)
def test_attention_is_nearer_to_fp64_than_torchs(found: Library, heads: Heads, dtype: torch.dtype) -> None:
    held = hold(heads, dtype, page=128, pages=3, tokens=384, span=128)
    q = fused(heads, 20, dtype)[0]
    wanted = plain_attention([held], q, 364)
    keys, values = held.tile
    visible = torch.arange(365, 385).repeat(heads.group)
    theirs = unfold(attend(fold(q, heads.kv), keys, values, visible).out, 20).to(dtype).double() - wanted
    ours = attended(found, [held], q, 364)[0].double() - wanted
    assert root_mean_square([ours]) <= (1.1 if dtype == torch.float32 else 0.8) * root_mean_square([theirs])


@pytest.mark.parametrize("window", [1, 5, 30, 200])
@pytest.mark.parametrize("span", [4, 16, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_see_what_is_in_their_window(found: Library, dtype: torch.dtype, span: int, window: int) -> None:
    """Also where the first rows see what the last ones do not, and spans that a row, or none, sees nothing of."""
    heads = Heads(32, 2)
    for first, index, num_rows in [(0, 0, 1), (3, 110, 40), (0, 120, 64), (7, 7, 64), (0, 190, 2), (3, 20, 128)]:
        held = [
            hold(
                heads, dtype, page=256, pages=1, tokens=index + num_rows - first, first=first, span=span, windowed=True
            )
        ]
        q = fused(heads, num_rows, dtype, seed=index)[0]
        assert_rounded(attended(found, held, q, index, window=window)[0], plain_attention(held, q, index, window))


def some_runs(heads: Heads, dtype: torch.dtype, scale: float = 1.0) -> list[Held]:
    """Three runs of other pages: positions 0 to 28, some of 100 to 140 in a window, and 28 to 100."""
    return [
        hold(heads, dtype, page=16, pages=2, tokens=28, span=16, scale=scale, seed=1),
        hold(heads, dtype, page=64, pages=1, tokens=40, span=16, first=100, windowed=True, scale=scale, seed=2),
        hold(heads, dtype, page=16, pages=5, tokens=72, span=16, first=28, scale=scale, seed=3),
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_number_of_threads_gives_the_same_bits(found: Library, dtype: torch.dtype) -> None:
    heads = Heads(80, 2)
    held, q = some_runs(heads, dtype), fused(heads, 11, dtype)[0]
    wanted, masses = attended(found, held, q, 129, window=9, chunk=4)
    assert_rounded(wanted, plain_attention(held, q, 129, 9))
    assert masses is not None
    for number in (1, 2, 4):
        with threads(number):
            out, mass = attended(found, held, q, 129, window=9, chunk=4)
        assert mass is not None
        assert_same_bits(out, wanted)
        assert_same_bits(mass, masses)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiles_of_any_size_give_the_same_bits(found: Library, dtype: torch.dtype) -> None:
    """Pages of one run, or each page a run of its own somewhere else."""
    heads = Heads(64, 2)
    whole, q = hold(heads, dtype, page=16, pages=6, tokens=91, span=16), fused(heads, 7, dtype)[0]
    wanted, masses = attended(found, [whole], q, 84, chunk=8)
    parts = [
        Held(whole.tile[:, i : i + size].clone(), 16 * i, min(91 - 16 * i, 16 * size), 16)
        for i, size in ((0, 1), (1, 3), (4, 2))
    ]
    out, mass = attended(found, parts, q, 84, chunk=8)
    assert masses is not None
    assert mass is not None
    assert_same_bits(out, wanted)
    assert_same_bits(mass, masses)


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [Heads(64, 2), Heads(10, 3)], ids=str)
@pytest.mark.parametrize("windowed", [False, True], ids=["", "windowed"])
def test_a_rows_attention_has_the_same_bits_beside_any_rows(
    found: Library, heads: Heads, dtype: torch.dtype, windowed: bool
) -> None:
    """With 1 to 64 rows, at every place among them, on 1, 2 and 4 threads, out and masses. What is after a row is NaN
    when it is alone, random with rows after it."""
    span, chunk, window, most = 64, 8, 21, 64
    q = fused(heads, 150, dtype)[0]

    def run_rows(start: int, count: int) -> tuple[Tensor, Tensor]:
        stop = start + count
        held = hold(heads, dtype, page=64, pages=3, tokens=150, span=span)
        held.tile.transpose(1, 2)[:, :, torch.arange(192).view(3, 64) >= stop] = torch.nan
        out, mass = attended(
            found, [Held(held.tile, 0, stop, span, windowed)], q[start:stop], start, window=window, chunk=chunk
        )
        assert mass is not None
        return out, mass

    alone = [run_rows(start, 1) for start in range(150)]
    for count in range(1, most + 1):
        start = 37 * count % (151 - count)
        with threads((1, 2, 4)[count % 3]):
            out, mass = run_rows(start, count)
        for t in range(count):
            own, own_mass = alone[start + t]
            assert_same_bits(out[t], own[0])
            assert_same_bits(mass[t, :, : own_mass.shape[-1]], own_mass[0])
            assert not mass[t, :, own_mass.shape[-1] :].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hidden_rows_change_no_bit_whatever_they_hold(found: Library, dtype: torch.dtype) -> None:
    heads = Heads(64, 2)
    held, q = hold(heads, dtype, page=64, pages=2, tokens=101, span=64), fused(heads, 9, dtype)[0]
    wanted = attended(found, [held], q, 92)[0]
    for garbage in (GARBAGE, -GARBAGE, 0.0, -0.0):
        other = held.tile.clone()
        other.transpose(1, 2)[:, :, torch.arange(128).view(2, 64) >= 97] = garbage
        out = attended(found, [replace(held, tile=other)], q, 92)[0]
        assert_same_bits(out[:5], wanted[:5])
        assert not torch.equal(out[5:], wanted[5:])


@pytest.mark.parametrize("half", [0, 1], ids=["keys", "values"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_a_number_is_seen_and_not_passed_over(found: Library, dtype: torch.dtype, half: int) -> None:
    heads = Heads(64, 2)
    held, q = hold(heads, dtype, page=64, pages=2, tokens=101, span=64), fused(heads, 9, dtype)[0]
    held.tile[half, 1, :, 97 - 64, 3] = torch.nan
    out = attended(found, [held], q, 92)[0]
    assert out[5:].isnan().any(-1).all()
    if half == 0:  # hidden values must be finite: zero times what is not a number is none
        assert not out[:5].isnan().any()


def test_a_windows_hidden_rows_change_no_bit_either(found: Library) -> None:
    heads = Heads(32, 1)
    held = hold(heads, torch.float32, page=64, pages=1, tokens=60, span=64, windowed=True)
    q = fused(heads, 6, torch.float32)[0]
    wanted = attended(found, [held], q, 54, window=8)[0]
    other = held.tile.clone()
    other[:, :, :, :47] = GARBAGE
    assert_same_bits(attended(found, [replace(held, tile=other)], q, 54, window=8)[0], wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk", [1, 4, 16])
def test_masses_are_the_softmax_mass_of_each_chunk(found: Library, dtype: torch.dtype, chunk: int) -> None:
    heads = Heads(64, 3)
    held, q = some_runs(heads, dtype), fused(heads, 12, dtype)[0]
    weights, *_ = plain_weights(held, q, 128, 9)
    mass = attended(found, held, q, 128, window=9, chunk=chunk)[1]
    assert mass is not None
    starts, at = [], 0
    for each in held:
        starts.append(at + torch.arange(each.tokens) // chunk)
        at += each.num_spans * each.span // chunk
    wanted = torch.zeros(mass.shape, dtype=torch.float64).index_add_(2, torch.cat(starts), weights.sum(2))
    assert_close(mass.double(), wanted, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("span", "chunk"), [(16, 16), (16, 32), (8, 64)])
def test_chunks_may_be_longer_than_spans(found: Library, dtype: torch.dtype, span: int, chunk: int) -> None:
    """The masses' sum over a chunk's spans; `out` has the same bits as without them."""
    heads = Heads(32, 2)
    held, q = hold(heads, dtype, page=64, pages=3, tokens=139, span=span), fused(heads, 5, dtype)[0]
    out, mass = attended(found, [held], q, 134, chunk=chunk)
    weights, _, positions = plain_weights([held], q, 134, 0)
    wanted = torch.zeros(5, 2, -(-139 // chunk), dtype=torch.float64).index_add_(2, positions // chunk, weights.sum(2))
    assert mass is not None
    assert_close(mass.double(), wanted, atol=2e-6, rtol=2e-6)
    assert_same_bits(out, attended(found, [held], q, 134)[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [Heads(64, 3), Heads(10, 1), Heads(128, 2)], ids=str)
def test_a_part_is_what_is_merged_before_it_is_rounded(found: Library, heads: Heads, dtype: torch.dtype) -> None:
    """out to the bit, lse and each query head's masses against fp64; the next merge is an ordinary one again."""
    held, q = some_runs(heads, dtype), fused(heads, 12, dtype)[0]
    spans = attending(found, held, q, 128, window=9, chunk=4)
    part = spans.part()
    out, mass = attended(found, held, q, 128, window=9, chunk=4)
    assert_same_bits(part.out.to(dtype).flatten(1), out)
    assert mass is not None
    assert part.mass is not None
    assert_close(part.mass.unflatten(1, (heads.kv, -1)).sum(2), mass, atol=1e-6, rtol=1e-5)
    assert_close(part.mass.sum(-1), torch.ones_like(part.lse), atol=1e-5, rtol=0)
    weights, *_ = plain_weights(held, q, 128, 9)
    keys = torch.cat([each.flat() for each in held], 2)[0].double()
    scores = torch.einsum("thgd,hnd->thgn", q.double().view(12, heads.kv, -1, heads.dim), keys) * heads.dim**-0.5
    lse = scores.masked_fill(weights == 0, -torch.inf).logsumexp(-1).flatten(1)
    assert_close(part.lse.double(), lse, atol=1e-5, rtol=1e-5)
    k = torch.zeros(12, heads.kv, heads.dim, dtype=dtype)
    spans.begin(Rows(q, k, k, Scoring(unmoving(q.shape[-1], q.dtype)), position=0, index=128), [28])
    spans.attend(Run(held[0].tile, 28, held[0].first))
    again = spans.merge()[0]
    assert again.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_that_sees_nothing_of_a_part_has_lse_minus_infinity(found: Library, dtype: torch.dtype) -> None:
    heads = Heads(32, 2)
    held, q = hold(heads, dtype, page=16, pages=2, tokens=32, span=16, first=100), fused(heads, 4, dtype)[0]
    part = attending(found, [held], q, 98, chunk=8).part()
    assert part.mass is not None
    for tensor, blind in ((part.out, 0.0), (part.mass, 0.0), (part.lse, -torch.inf)):
        assert (tensor[:2] == blind).all()
        assert tensor[2:].isfinite().all()
        assert (tensor[2:] != blind).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_large_scores_stay_finite_and_right(found: Library, dtype: torch.dtype, sign: int) -> None:
    """Scores of 1e4, all of the same sign or of both: one key has nearly all the weight."""
    heads = Heads(64, 2)
    held = some_runs(heads, dtype, scale=100.0)
    q = (sign * 100 * fused(heads, 11, torch.float32)[0]).to(dtype)
    weights, values, _ = plain_weights(held, q, 129, 40)
    wanted = torch.einsum("thgn,hnd->thgd", weights, values).reshape(len(q), -1)
    # An fp32 score of 1e4 is wrong by up to 1e-3.
    assert_rounded(attended(found, held, q, 129, window=40)[0] / 100, wanted / 100, 5e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_up_to_the_dtypes_largest_are_mixed_without_overflow(found: Library, dtype: torch.dtype) -> None:
    """A mean of numbers is no larger than they are; queries and keys may be subnormal or -0."""
    heads, info = Heads(64, 1), torch.finfo(dtype)
    held = hold(heads, dtype, page=16, pages=3, tokens=40, span=16)
    keys, values = held.tile
    keys[:] = torch.where(torch.rand(keys.shape, generator=generator(1)) < 0.5, info.tiny / 2, -0.0).to(dtype)
    values[:] = info.max if dtype == torch.float16 else 1e30  # fp32 sums 40 of them before it divides
    values[..., 1::2] = info.tiny
    q = fused(heads, 2, dtype)[0]
    out = attended(found, [held], q, 38)[0].double()
    assert_close(out[:, 0::2], torch.full_like(out[:, 0::2], float(values[0, 0, 0, 0])), rtol=1e-6, atol=0)
    assert_close(out[:, 1::2], torch.full_like(out[:, 1::2], info.tiny), rtol=1e-6, atol=0)


@pytest.mark.few(3)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("outputs", "inputs", "rows"), [(48, 64, 1), (96, 130, 65), (17, 34, 200), (64, 6, 3)])
def test_without_torchs_products_of_16_bits_the_kernels_multiply_any_number_of_rows(
    outputs: int, inputs: int, rows: int, dtype: torch.dtype, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On AVX2 torch took seven times as long. A row's bits do not depend on the rows beside it."""
    if "avx2" not in on_this_machine():
        pytest.skip("this machine has no AVX2")
    monkeypatch.setattr(cpu, "kernels", lambda: built("avx2"))
    random = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(n, inputs, generator=random).to(dtype) for n in (rows, outputs))
    added = torch.randn(outputs, generator=random).to(dtype) if bias else None
    found = cpu.product(x, weight, added)
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if added is None else added.double())
    error = (found.double() - expected).abs() / (expected.abs() + inputs**0.5)
    assert error.max() < {torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
    assert torch.equal(found[-1:], cpu.product(x[-1:], weight, added))
    assert torch.equal(found, cpu.product(x.T.contiguous().T, weight, added))


@pytest.mark.parametrize(("dtype", "inputs"), [(torch.float32, 64), (torch.bfloat16, 63)])
def test_what_the_kernels_do_not_multiply_torch_does(dtype: torch.dtype, inputs: int) -> None:
    x, weight = torch.randn(70, inputs).to(dtype), torch.randn(8, inputs).to(dtype)
    assert torch.equal(cpu.product(x, weight, None), torch.nn.functional.linear(x, weight))
