"""On a CUDA device: pinned blocks, the link's order, and the same tokens wherever layers and tiles are.

Runs under pytest, and, where there is none, as a script: python tests/test_cuda.py
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from kit.asked import Asked, alone, together  # noqa: E402
from offload.config.mixers import DeltaRule, DilatedConvolution, Mamba2, Recurring, ShortConvolution  # noqa: E402
from offload.config.norm import Norm  # noqa: E402
from offload.decode.sampling import SamplingParams  # noqa: E402
from offload.engine.engine import Engine, load_tokenizer, plan_request, timed  # noqa: E402
from offload.engine.request import GenerationRequest  # noqa: E402
from offload.formats.layout import CODE_BITS  # noqa: E402
from offload.formats.quantised import Codes, encode_in_parts  # noqa: E402
from offload.kernels.block_slots import SlotTable, take_slots  # noqa: E402
from offload.kernels.choice import gpu_kernels  # noqa: E402
from offload.kernels.choosing import choose  # noqa: E402
from offload.kernels.device import NONE  # noqa: E402
from offload.kernels.norms import NormWeights  # noqa: E402
from offload.kernels.recurrence import Held, RecurrenceWeights, Replayed, RunRecurrence  # noqa: E402
from offload.kernels.rope import RopeTable, Scoring  # noqa: E402
from offload.kernels.runs import Chosen, Rows, Run  # noqa: E402
from offload.model.passes import forward  # noqa: E402
from offload.plan.options import Options  # noqa: E402
from offload.plan.planner import Plan  # noqa: E402
from offload.plan.request import Request  # noqa: E402
from offload.transfer.link import CudaLink  # noqa: E402
from offload.transfer.memory import Memory  # noqa: E402
from offload.weights.linear import Linear  # noqa: E402

try:
    import pytest

    pytestmark = pytest.mark.cuda
except ImportError:  # a bare GPU machine: `main` below runs the tests
    pass

MODELS = ROOT / "triforce_cli" / "models"
TARGET, DRAFT = MODELS / "demo-target", MODELS / "demo-draft"
GREEDY = SamplingParams(temperature=0.0, seed=0)
DEVICE = "cuda:0"
SIDE = 4096  # of a square matrix whose product takes a GPU a while
LONG = 5000  # tokens of a prompt of several tiles
LONGER = 16_000  # of one whose caches are large
MAX_TOKENS = 48
DTYPES = ("bf16", "fp16")
WIDTHS = ((4096, 11008), (5120, 13824), (4096, 14336))  # hidden and inner ones of a 7B, a 13B and an 8B


def prompt(num_tokens: int) -> list[int]:
    text = (ROOT / "examples" / "persuasion.txt").read_text(encoding="utf-8")
    return load_tokenizer(TARGET, None).encode(text)[:num_tokens]


def planned(tokens: list[int], **options: object) -> Plan:
    asked = Options(**({"device": DEVICE} | options))  # type: ignore[arg-type]
    return plan_request(TARGET, DRAFT, asked, num_prompt_tokens=len(tokens), max_tokens=MAX_TOKENS)


def placed(plan: Plan, offload: str = "", *, layers: int = 8, tiles: int = 0) -> Plan:
    """The plan with tiles of 1024 tokens, and that many layers and tiles on the device where `offload` lets others go:
    small models fit any GPU by themselves."""
    moved = tuple(sorted(filter(None, offload.split(","))))
    return replace(
        plan,
        placement=replace(
            plan.placement,
            tile_tokens=1024,
            offload=moved,
            resident_layers=layers,
            resident_tiles=tiles,
        ),
    )


def said(tokens: list[int], plan: Plan, *, speculation: bool = True) -> list[int]:
    with Engine.load(plan, TARGET, DRAFT, load_tokenizer(TARGET, DRAFT)) as engine:
        steps = engine.generate(GenerationRequest(tokens, GREEDY, max_tokens=MAX_TOKENS, speculation=speculation))
        text = [token for step in steps for token in step.tokens]
        moved = engine.stats.decode_link.bytes_to_device
    assert bool(moved) == bool(plan.placement.offload), (moved, plan.placement.offload)
    return text


def test_a_host_block_is_exact_and_pinned() -> None:
    block = Memory(torch.device(DEVICE)).allocate((5_000_001,), torch.uint8, tier="host", purpose="test")
    assert block.is_pinned()
    assert block.untyped_storage().nbytes() == 5_000_001
    assert not block.any()


def test_a_block_can_be_pinned_again_after_it_was_dropped() -> None:
    memory = Memory(torch.device(DEVICE))
    for _ in range(3):
        block = memory.allocate((2**26,), torch.uint8, tier="host", purpose="test")
        assert block.is_pinned()
        memory.released(block, tier="host", purpose="test")
        del block


def test_copies_arrive_bit_for_bit_and_are_counted() -> None:
    memory, link = Memory(torch.device(DEVICE)), CudaLink(torch.device(DEVICE))
    home = memory.allocate((2**24,), torch.bfloat16, tier="host", purpose="test")
    home.copy_(torch.randn(2**24))
    there = torch.empty_like(home, device=DEVICE)
    back = memory.allocate((2**24,), torch.bfloat16, tier="host", purpose="test")
    arrived = link.to_device(there, home, (link.record(),))
    link.to_host(back, there, (arrived,)).synchronize()
    assert torch.equal(home, back)
    stats = link.stats
    assert (stats.bytes_to_device, stats.bytes_to_host) == (home.nbytes, home.nbytes)
    assert stats.busy_seconds > 0


def test_a_copy_home_waits_for_the_computation_before_it_and_computation_for_the_copy_in() -> None:
    memory, link = Memory(torch.device(DEVICE)), CudaLink(torch.device(DEVICE))
    home = memory.allocate((SIDE**2,), torch.float32, tier="host", purpose="test")
    matrix = torch.ones(SIDE, SIDE, device=DEVICE)
    for value in range(1, 6):
        for _ in range(8):
            matrix = (matrix @ matrix).clamp_(max=1.0)  # takes a while
        result = matrix.view(-1) * value
        link.to_host(home, result, (link.record(),)).synchronize()
        assert home.eq(value).all()
        there = torch.empty_like(result)
        link.to_device(there, home, (link.record(),)).wait()
        assert there.eq(value).all()


def test_logits_are_those_of_the_cpu() -> None:
    """Logits of one pass on both, in fp32."""
    tokens = prompt(700)
    logits = []
    for device in ("cpu", DEVICE):
        plan = planned(tokens, device=device, dtype="fp32", speculation=False)
        with Engine.load(plan, TARGET, None, load_tokenizer(TARGET, None)) as engine:
            list(engine.generate(GenerationRequest(tokens, GREEDY, max_tokens=1)))
            engine.worker.full.truncate(len(tokens) - 1)
            logits.append(forward(engine.levels["target"], tokens[-1:], 1).float().cpu())
    assert (logits[0] - logits[1]).abs().max() < 2e-3


def test_tokens_are_the_same_with_and_without_speculation_wherever_bytes_are() -> None:
    """Five tiles a layer; one block and several; layers and tiles of one layer on both sides of the link."""
    tokens = prompt(LONG)
    for dtype in DTYPES:

        def made(dtype: str = dtype, **options: object) -> Plan:
            return planned(tokens, dtype=dtype, **options)

        expected = said(tokens, placed(made(speculation=False)))
        for plan in (
            placed(made(gamma=7, draft_gamma=2)),
            placed(made(gamma=31, draft_gamma=1)),
            placed(made(gamma=15, draft_gamma=0, budget=256), "kv", tiles=13),
            placed(made(gamma=31, draft_gamma=2), "kv"),
            placed(made(gamma=15, draft_gamma=1), "weights,kv", layers=3, tiles=21),
            placed(made(gamma=15, draft_gamma=0, weight_bits=4)),
            placed(made(gamma=15, draft_gamma=0, weight_bits=6)),
            placed(made(gamma=15, draft_gamma=1, weight_bits=16, kv_bits=4)),
            placed(made(gamma=15, draft_gamma=1, weight_bits=4, budget=256), "weights,kv", layers=0, tiles=21),
            placed(made(speculation=False), "weights,kv", layers=0),
        ):
            assert said(tokens, plan) == expected, (dtype, plan)


def test_tokens_are_the_same_in_whatever_bits_weights_and_pages_cross_the_link() -> None:
    """Packed, and beside codes quantised."""
    tokens = prompt(LONG)
    expected = said(tokens, placed(planned(tokens, dtype="bf16", speculation=False)))
    for few, bits in (
        ({"speculation": False}, (12, 12)),
        ({"gamma": 15, "budget": 256, "weight_bits": 16, "kv_bits": 16}, (12, 12)),
        ({"gamma": 15, "weight_bits": 4, "kv_bits": 4}, (9, 9)),
        ({"gamma": 15, "weight_bits": 6, "kv_bits": 4}, (9, 8)),
        ({"gamma": 15, "weight_bits": 6, "budget": 256}, (12, 8)),
    ):
        plan = planned(tokens, dtype="bf16", offload=frozenset({"weights", "kv"}), link_bits=12, **few)
        assert (plan.placement.link_bits, plan.placement.weight_link_bits) == bits
        assert said(tokens, placed(plan, "weights,kv", layers=2, tiles=5)) == expected, plan


def test_texts_of_passes_as_graphs_are_those_of_passes_launched_one_by_one() -> None:
    """Drafted, drawn and judged as parts of them; the second request replays those of the first."""
    tokens = prompt(LONG)
    for few in ({"speculation": False}, {"gamma": 15, "weight_bits": 16, "kv_bits": 4}, {"gamma": 15, "budget": 256}):
        plan, found = placed(planned(tokens, dtype="bf16", **few)), []
        for value in ("on", "off"):
            os.environ["TRIFORCE_GRAPHS"] = value
            try:
                with Engine.load(plan, TARGET, DRAFT, load_tokenizer(TARGET, DRAFT)) as engine:
                    for seed in (3, 4):
                        asked = GenerationRequest(tokens, SamplingParams(seed=seed), max_tokens=MAX_TOKENS)
                        found.append([token for step in engine.generate(asked) for token in step.tokens])
            finally:
                del os.environ["TRIFORCE_GRAPHS"]
        assert found[:2] == found[2:], few


def test_several_prompts_at_a_time_say_what_each_says_alone() -> None:
    """Three at a time of four, each of another length, drafted for, wherever bytes are."""
    tokens = prompt(LONG)
    prompts = [tokens, tokens[: LONG // 2], tokens[LONG // 3 :], tokens[: LONG // 2]]
    requests = [Asked(prompt, GREEDY, MAX_TOKENS) for prompt in prompts]
    options = Options(device=DEVICE, dtype="bf16", gamma=15, draft_gamma=1, budget=256)
    request = timed(Request.on_this_machine(TARGET, DRAFT, options))
    plan = request.together(request.plan(num_prompt_tokens=LONG, max_tokens=MAX_TOKENS), 3, most=4)
    for offload in ("", "kv", "weights,kv"):
        with Engine.load(placed(plan, offload), TARGET, DRAFT, load_tokenizer(TARGET, DRAFT)) as engine:
            found, _ = together(engine, requests)
            expected = [alone(engine, each) for each in requests]
        assert found == expected, offload


def test_a_row_of_a_product_does_not_depend_on_its_place_among_the_rows() -> None:
    """The condition for equal bits with blocks of 16 rows: a layer's products at several widths, and attention's."""
    order = torch.randperm(16, device=DEVICE)
    for dtype in (torch.bfloat16, torch.float16):
        for hidden, inner in WIDTHS:
            for num_in, num_out in ((hidden, 3 * hidden), (hidden, hidden), (hidden, 2 * inner), (inner, hidden)):
                rows = torch.randn(16, num_in, device=DEVICE).to(dtype)
                weight = (torch.randn(num_out, num_in, device=DEVICE) / num_in**0.5).to(dtype)
                whole = torch.nn.functional.linear(rows, weight)
                assert torch.equal(whole[order], torch.nn.functional.linear(rows[order], weight)), (num_in, num_out)
        query, keys = (torch.randn(32, size, 128, device=DEVICE).to(dtype) for size in (16, 512))
        scores = torch.bmm(query, keys.transpose(1, 2))
        assert torch.equal(scores[:, order], torch.bmm(query[:, order], keys.transpose(1, 2)))
        weights = scores.softmax(-1)
        assert torch.equal(torch.bmm(weights, keys)[:, order], torch.bmm(weights[:, order], keys))


def test_a_sum_of_masses_does_not_depend_on_the_chunks_after_those_that_count() -> None:
    """`FullCache.mass` sums slices on a GPU without copying them, of rows whose padding differs."""
    for num_rows, heads, seen in product((1, 3, 4, 5, 16, 64), (1, 4), (16, 100, 1000, 15_000)):
        wide = torch.rand(num_rows, heads, seen + 17, device=DEVICE).to(torch.bfloat16)
        exact = wide[..., :seen].contiguous().sum(0, dtype=torch.float32)
        for padding in (1, 2, 16, 17):
            held = wide[..., : seen + padding].contiguous()
            assert torch.equal(held[..., :seen].sum(0, dtype=torch.float32), exact), (num_rows, heads, seen, padding)


def coded(outputs: int, inputs: int, dtype: torch.dtype, bits: int) -> tuple[Codes, Codes]:
    """The same quantised weights, made by the CPU and by the GPU."""
    weight = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
    made = []
    for device in ("cpu", DEVICE):
        made.append(Codes(torch.zeros(Codes.shape_of_blocks(weight.shape, bits), dtype=torch.uint8, device=device)))
        encode_in_parts(weight.to(device), made[-1])
    return made[0], made[1]


def test_weights_in_few_bits_are_those_of_the_processor_and_products_with_them_of_fp64() -> None:
    for dtype, bits in product((torch.bfloat16, torch.float16), CODE_BITS):
        for outputs, inputs in ((272, 1216), (SIDE, SIDE), (64, 2 * SIDE)):
            wanted, made = coded(outputs, inputs, dtype, bits)
            assert torch.equal(made.blocks.cpu(), wanted.blocks)
            rows, bias = torch.randn(33, inputs).to(dtype), torch.randn(outputs).to(dtype)
            exact = rows.double() @ wanted.matrix(dtype).double().T + bias
            for count in (1, 3, 16, 33):
                out = Linear(made, bias.to(DEVICE))(rows[:count].to(DEVICE)).cpu().double()
                assert (out - exact[:count]).abs().max() <= torch.finfo(dtype).eps * exact.abs().max()


def test_a_row_of_a_product_with_weights_in_few_bits_does_not_depend_on_the_rows_beside_it() -> None:
    for dtype, bits in product((torch.bfloat16, torch.float16), CODE_BITS):
        for inputs, outputs in ((5120, 15360), (5120, 5120), (13824, 5120), (1216, 272)):
            _, made = coded(outputs, inputs, dtype, bits)
            rows = torch.randn(40, inputs, device=DEVICE).to(dtype)
            whole = Linear(made, None)(rows)
            for first, count in ((0, 1), (5, 1), (15, 2), (3, 16), (20, 20)):
                assert torch.equal(whole[first : first + count], Linear(made, None)(rows[first : first + count]))


def delta_weights(delta: DeltaRule | Mamba2) -> RecurrenceWeights:
    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE)

    norm = None if delta.norm is None else NormWeights(delta.norm, 1 + some(delta.norm_size) / 4)
    taps = some(delta.width, delta.channels)
    of_mamba = (some(delta.channels), some(delta.num_heads)) if isinstance(delta, Mamba2) else ()
    return RecurrenceWeights(taps, -some(delta.num_heads).exp(), 2 * some(delta.rates[-1]), norm, *of_mamba)


def in_passes(
    delta: Recurring,
    weights: RecurrenceWeights,
    rows: torch.Tensor,
    counts: list[int],
    run: RunRecurrence,
    kind: str = "",
) -> list[torch.Tensor]:
    """The outputs of all rows in passes of so many, each with a row more that is rejected, and the last state. kind:
    "graph": the number of replayed tokens is read on the GPU; "prefill": states pass the rows."""
    room = delta.width - 1 + 80
    inputs = torch.zeros(room, delta.kept, dtype=rows.dtype, device=DEVICE)
    held, out, waiting = Held(torch.zeros(delta.state_shape, device=DEVICE), inputs), [], 0
    for part in rows.split(counts):
        there = torch.tensor([waiting], device=DEVICE) if kind == "graph" else None
        some, settles = part if kind == "prefill" else torch.cat([part, -part[:1]]), kind == "prefill"
        replayed = Replayed(waiting, there)
        out.append(run(delta, weights, held, some, replayed, settles=settles)[: len(part)])
        waiting = 0 if settles else len(part)
    run(delta, weights, held, rows[:0], Replayed(waiting), settles=True)
    return [torch.cat(out), held.state, held.inputs[: delta.width - 1]]


DIVIDED = (
    ([1] * 150, ""),
    ([1, 16, 7, 63, 63], "graph"),
    ([2, 64, 64, 20], ""),
    ([150], "prefill"),
    ([31, 19, 100], "prefill"),
)


def test_short_convolutions_have_the_bits_of_torchs_operators_however_tokens_are_divided() -> None:
    """With sizes of LFM2 and LFM3, and with odd ones. Dilated ones, with sizes of Qwen3.8-Flash-Next, have a GPU's own
    bits, whose e^x is another."""
    dilated = DilatedConvolution(10240, 4, 3), DilatedConvolution(33, 3, 2)
    for own in (*dilated, ShortConvolution(2048), ShortConvolution(2048, 7), ShortConvolution(33, 4, taps_bias=True)):
        run, by_torch = (each.recurrences[type(own)] for each in (gpu_kernels(torch.device(DEVICE)), NONE))
        vectors = {name: torch.randn(*shape, device=DEVICE) for name, shape in own.vectors.items()}
        weights = RecurrenceWeights(**vectors)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            rows = torch.randn(150, sum(own.row_parts), device=DEVICE).to(dtype)
            wanted = in_passes(own, weights, rows, [75, 75], by_torch)
            if isinstance(own, DilatedConvolution):
                near, wanted = wanted, in_passes(own, weights, rows, [75, 75], run)
                torch.testing.assert_close(wanted[0], near[0], rtol=2 * max(torch.finfo(dtype).eps, 1e-6), atol=0)
            for counts, kind in DIVIDED:
                found = in_passes(own, weights, rows, counts, run, kind)
                assert all(map(torch.equal, found, wanted)), (own, dtype, counts, kind)


def test_streams_are_mixed_as_by_torchs_operators_whatever_rows_are_beside_a_row() -> None:
    """With the sizes of Qwen3.8-Flash-Next, and odd ones."""
    own = gpu_kernels(torch.device(DEVICE)).streams
    for count, size, rank in ((4, 2560, 320), (3, 1030, 7)):
        norm = NormWeights(Norm(plus_one=True, fp32=True), 1 + torch.randn(count * size, device=DEVICE))
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            x, mixes = torch.randn(2, 9, count * size, device=DEVICE).to(dtype)
            low, part = (torch.randn(9, width, device=DEVICE).to(dtype) for width in (rank + count, size))
            found = []
            for kernels, rows in ((own, 9), (own, 2), (NONE.streams, 9)):
                added, (inner, factors) = x[:rows].clone(), kernels.gates(low[:rows], rank, count)
                kernels.inject(added, part[:rows], factors)
                mean = kernels.mean(mixes[:rows], x[:rows], count)
                found.append([kernels.normed(x[:rows], norm, count), inner, factors, mean, added])
            every, some, theirs = found
            assert all(torch.equal(out, of_all[:2]) for out, of_all in zip(some, every, strict=True)), (size, dtype)
            eps = max(torch.finfo(dtype).eps, 1e-6)
            for out, wanted in zip(every, theirs, strict=True):
                torch.testing.assert_close(out, wanted, rtol=2 * eps, atol=2 * eps)


def test_chosen_blocks_are_those_of_exact_scores_whatever_rows_are_beside_a_row() -> None:
    """Of small whole numbers, whose sums are exact and often equal; then of any numbers."""
    own, generator = gpu_kernels(torch.device(DEVICE)), torch.Generator().manual_seed(0)
    q = torch.randint(-1, 2, (70, 4, 128), generator=generator).bfloat16().to(DEVICE)
    pooled = torch.randint(-1, 2, (20_000, 128), generator=generator).bfloat16().to(DEVICE)
    visible = torch.randint(0, 20_001, (70,), generator=generator).to(DEVICE)
    assert torch.equal(own.choose(q, pooled, visible, 512), choose(q, pooled, visible, 512))
    q, pooled = (torch.randn(each.shape, generator=generator).bfloat16().to(DEVICE) for each in (q, pooled))
    together = own.choose(q, pooled, visible, 512)
    for first, count in ((0, 1), (15, 2), (63, 7)):
        rows = slice(first, first + count)
        assert torch.equal(own.choose(q[rows], pooled, visible[rows], 512), together[rows])


def test_chosen_blocks_come_from_pinned_memory_to_the_slots_that_torch_gives_them() -> None:
    """And rows go there, in passes over a text that grows, with slots for two rows' choice."""
    own, generator = gpu_kernels(torch.device(DEVICE)), torch.Generator().manual_seed(0)
    num_blocks, num_slots, most, size, page = 9000, 1100, 512, 4, 512
    home = torch.randn(2, 72, 2, page, 256, generator=generator).bfloat16().pin_memory()
    address = torch.tensor([[home.data_ptr()]], device=DEVICE)
    held = torch.zeros(1, 2, 2, num_slots * size, 256, dtype=torch.bfloat16, device=DEVICE)
    tables = [_slot_table(num_blocks, num_slots) for _ in range(2)]
    for turn in range(40):
        start = 30_000 + 3 * turn
        positions = torch.arange(start, start + 2, device=DEVICE)
        blocks = torch.rand(2, start // size, generator=generator).topk(most).indices.sort().values.int().to(DEVICE)
        found, theirs = (
            take(table, blocks, positions, size)
            for take, table in zip((own.take_slots, take_slots), tables, strict=True)
        )
        assert all(map(torch.equal, found, theirs))
        assert all(torch.equal(*each) for each in zip(*(vars(table).values() for table in tables), strict=True))
        assert own.copies is not None
        own.copies.chunks(address, found[1], held, chunk=size, page=page, tile=72 * page)
        new = torch.randn(2, 2, 2, 256, generator=generator).bfloat16().to(DEVICE)
        slot_of = tables[0].slot_of
        own.copies.new_rows(new, positions, slot_of, held[0], address[0], size=size, page=page, tile=72 * page)
        torch.cuda.synchronize()
        text = home.transpose(1, 2).flatten(2, 3).to(DEVICE)  # [2, H_kv, tokens, D]
        assert torch.equal(text[:, :, start : start + 2], new)
        chosen, slots = blocks.flatten().long(), found[0].flatten().long()
        there, wanted = held[0].unflatten(2, (-1, size))[:, :, slots], text.unflatten(2, (-1, size))[:, :, chosen]
        counts = (chosen[:, None] * size + torch.arange(size, device=DEVICE) < start)[:, :, None]
        assert torch.equal(there * counts, wanted * counts)


def _slot_table(num_blocks: int, num_slots: int) -> SlotTable:
    of_blocks, of_slots = (torch.zeros(2, each, dtype=torch.int32, device=DEVICE) for each in (num_blocks, num_slots))
    of_blocks[0] = of_slots[0] = -1
    return SlotTable(*of_blocks, *of_slots, torch.zeros(1, dtype=torch.int32, device=DEVICE))


def test_attention_over_all_blocks_has_the_bits_of_attention() -> None:
    """Of rows whose last block is incomplete, and of one whose is whole."""
    own, generator, tokens = gpu_kernels(torch.device(DEVICE)), torch.Generator().manual_seed(0), 2051
    table = torch.ones(tokens, 256), torch.zeros(tokens, 256)
    scoring = Scoring(RopeTable(*(each.bfloat16().to(DEVICE) for each in table)))
    pages = torch.randn(2, 5, 2, 512, 256, generator=generator).bfloat16().to(DEVICE)
    q = torch.randn(4, 24, 256, generator=generator).bfloat16().to(DEVICE)
    rows, run = Rows(q, q[:, :2], q[:, :2], scoring, tokens - 4, tokens - 4), Run(pages, tokens)
    seen = torch.arange(tokens - 3, tokens + 1, dtype=torch.int32, device=DEVICE)
    blocks = torch.arange(513, dtype=torch.int32, device=DEVICE).repeat(4, 1)
    chosen = Chosen(blocks.where(4 * blocks < seen[:, None], -1), seen, 4)
    attention = own.attention(dtype=torch.bfloat16, page=512)
    attention.begin(rows, [tokens])
    attention.attend(run)
    wanted = attention.merge()[0]
    attention.begin(rows, [tokens])
    attention.attend_chosen([run], chosen)
    assert torch.equal(attention.merge()[0], wanted)


def test_states_are_those_of_torchs_operators_and_have_the_same_bits_however_tokens_are_divided() -> None:
    """With sizes of a 9B, a 27B, Kimi Linear, Nemotron 3 Nano and Granite 4 H-Tiny, and with odd ones."""
    kimi = DeltaRule(32, 32, 128, 128, gate="sigmoid", by_channel=True)
    kimis = kimi, replace(kimi, least=-5.0), DeltaRule(3, 3, 20, 12, 3, by_channel=True)
    rules = DeltaRule(16, 32, 128, 128), DeltaRule(16, 48, 128, 128), DeltaRule(3, 6, 20, 12, 3, tiled=1)
    mambas = Mamba2(8, 64, 128, 64), Mamba2(1, 48, 128, 64), Mamba2(3, 6, 20, 12, 3, norm=None)
    for delta in (*rules, *kimis, *mambas):
        kernels = gpu_kernels(torch.device(DEVICE)).recurrences[type(delta)]
        by_torch = NONE.recurrences[type(delta)]
        weights = delta_weights(delta)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            rows = torch.randn(150, sum(delta.parts), device=DEVICE).to(dtype)
            wanted = in_passes(delta, weights, rows, [75, 75], by_torch)
            found = in_passes(delta, weights, rows, [75, 75], kernels)
            near = 4 * torch.finfo(dtype).eps
            assert (found[0].float() - wanted[0].float()).abs().max() <= (near + 1e-4) * wanted[0].float().abs().max()
            assert (found[1] - wanted[1]).abs().max() < 1e-4
            for counts, kind in DIVIDED:
                again = in_passes(delta, weights, rows, counts, kernels, kind)
                assert all(map(torch.equal, again, found)), (delta, dtype, counts, kind)


def test_texts_of_states_and_of_wide_heads_are_the_same_drafted_for_and_as_graphs() -> None:
    """The model proposes to itself; the second request begins like the first."""
    from kit.families import save_tiny

    common = {
        "vocab_size": 264, "max_position_embeddings": 2048, "hidden_size": 128, "intermediate_size": 128,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    }  # fmt: skip
    models: dict[str, dict[str, object]] = {
        "qwen3_5": {
            "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
        },
        "gemma4": {"global_head_dim": 512},
    }  # fmt: skip
    tokens = torch.randint(250, (900,), generator=torch.Generator().manual_seed(5)).tolist()
    for name, own in models.items():
        with tempfile.TemporaryDirectory() as root:
            folder, texts = save_tiny(name, Path(root, "model"), tokenizer=True, **common, **own), []
            for graphs, few in product(("on", "off"), ({"speculation": False}, {"gamma": 7, "kv_bits": 4})):
                options = Options(device=DEVICE, dtype="bf16", **few)  # type: ignore[arg-type]
                plan = plan_request(folder, None, options, num_prompt_tokens=len(tokens), max_tokens=MAX_TOKENS)
                os.environ["TRIFORCE_GRAPHS"] = graphs
                try:
                    with Engine.load(plan, folder, None, load_tokenizer(folder, None)) as engine:
                        asked = (
                            GenerationRequest(some, GREEDY, max_tokens=MAX_TOKENS) for some in (tokens, tokens[:700])
                        )
                        texts.append(
                            [[token for step in engine.generate(each) for token in step.tokens] for each in asked]
                        )
                finally:
                    del os.environ["TRIFORCE_GRAPHS"]
        assert all(each == texts[0] for each in texts), (name, texts)


def test_products_in_fixed_point_have_the_bits_of_their_definition() -> None:
    """Of every kind that has them."""
    from kit.fixed_products import FIXED, has_the_defined_bits

    for dtype in (torch.bfloat16, torch.float16):
        assert [name for name in FIXED if not has_the_defined_bits(name, dtype, DEVICE)] == []


def test_texts_of_mixtures_are_the_same_wherever_experts_are_and_as_graphs() -> None:
    """With experts on the GPU and in slots, drafted for or not; where the CPU runs some, as graphs or not."""
    from kit.families import save_tiny

    fields = {
        "vocab_size": 264, "max_position_embeddings": 2048, "hidden_size": 128, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 64,
    }  # fmt: skip
    tokens = torch.randint(250, (900,), generator=torch.Generator().manual_seed(5)).tolist()
    for name, root in ((name, tempfile.TemporaryDirectory()) for name in ("qwen3_moe", "glm4_moe")):
        with root:
            folder, texts = save_tiny(name, Path(root.name, "model"), tokenizer=True, **fields), {}
            for graphs, (slots, by_cpu), few in product(
                ("on", "off"), ((0, 0), (3, 0), (3, 1)), ({"speculation": False}, {"gamma": 7, "kv_bits": 4})
            ):
                options = Options(device=DEVICE, dtype="bf16", **few)  # type: ignore[arg-type]
                plan = plan_request(folder, None, options, num_prompt_tokens=len(tokens), max_tokens=MAX_TOKENS)
                if slots:
                    moved = {"offload": ("weights",), "expert_slots": slots, "cpu_experts": by_cpu}
                    plan = replace(plan, placement=replace(plan.placement, **moved))  # type: ignore[arg-type]
                os.environ["TRIFORCE_GRAPHS"] = graphs
                try:
                    with Engine.load(plan, folder, None, load_tokenizer(folder, None)) as engine:
                        steps = engine.generate(GenerationRequest(tokens, GREEDY, max_tokens=MAX_TOKENS))
                        text = [token for step in steps for token in step.tokens]
                finally:
                    del os.environ["TRIFORCE_GRAPHS"]
                texts.setdefault(by_cpu, []).append(text)
            assert all(each == own[0] for own in texts.values() for each in own), (name, texts)


def test_planned_device_bytes_hold() -> None:
    """Without the reserve, which is for what an allocator cannot use; 96 MB for workspaces of the libraries."""
    tokens = prompt(LONGER)
    for plan in (planned(tokens, gamma=15, draft_gamma=1), planned(tokens, gamma=15, device_memory=0.9)):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with Engine.load(plan, TARGET, DRAFT, load_tokenizer(TARGET, DRAFT)) as engine:
            list(engine.generate(GenerationRequest(tokens, GREEDY, max_tokens=MAX_TOKENS)))
        planned_bytes = plan.placement.total_device_bytes - plan.placement.device_bytes["reserve"]
        assert torch.cuda.max_memory_allocated() - before <= planned_bytes + 96e6


def main() -> int:
    """Every test once; the number that failed."""
    if not torch.cuda.is_available():
        print("skipped: torch sees no CUDA device")
        return 0
    failed = 0
    for name, test in [(name, test) for name, test in globals().items() if name.startswith("test_")]:
        began = time.perf_counter()
        try:
            test()
            print(f"passed  {name}  {time.perf_counter() - began:.1f} s", flush=True)
        except Exception:
            failed += 1
            print(f"FAILED  {name}\n{traceback.format_exc()}", flush=True)
    print(f"{failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(main())
