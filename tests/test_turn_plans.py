"""Whether sequences take turns, and how many tiles are staged for it, is planned by arithmetic."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest

from offload.config.model import ModelConfig
from offload.plan.batching import Turns, plan_together
from offload.plan.cost import Cost
from offload.plan.hardware import RTX_4090, Hardware
from offload.plan.planner import Options, Plan
from offload.plan.request import Request
from offload.plan.sizing import Sizing
from offload.plan.what_if import LLAMA2_7B
from test_planner import CPU, DEMO, DRAFT

GPU = Hardware("cuda:0", "a GPU", 23 * 10**9, 128 * 10**9, True, rates=RTX_4090)
KV, BOTH = frozenset({"kv"}), frozenset({"kv", "weights"})
SLOW = Options(offload=KV, link_gbps=1.0)
PROMPT, NEW = 8000, 128


def request(options: Options, hardware: Hardware = CPU) -> Request:
    pair: tuple[ModelConfig, ModelConfig | None] = (DEMO, DRAFT) if hardware.is_cpu else (LLAMA2_7B, None)
    return Request(*pair, options, hardware)


def planned(options: Options, number: int | None, hardware: Hardware = CPU) -> Plan:
    asked = request(options, hardware)
    return asked.together(asked.plan(num_prompt_tokens=PROMPT, max_tokens=NEW), number, most=8)


def price(options: Options, number: int, staged: int, hardware: Hardware = CPU) -> Turns:
    """Of `planned` with so many staged tiles, whatever is planned."""
    asked = request(options, hardware)
    plan = planned(options, number, hardware)
    sizing = Sizing(asked.target, asked.draft, options, hardware, plan.request.dtype, number, staged)
    placement = replace(plan.placement, staging_tiles=staged)
    return Turns(Cost(sizing, placement, plan.request.capacity, plan.composition))


@pytest.mark.parametrize(
    ("options", "hardware", "turns"),
    [
        (SLOW, CPU, True),
        (replace(SLOW, speculation=False), CPU, False),  # nothing drafts
        (replace(SLOW, offload=BOTH), CPU, False),  # the weights with which tokens are proposed stream
        (Options(), CPU, False),  # nothing streams
        (replace(SLOW, offload=frozenset({"weights"})), CPU, False),
        (SLOW, replace(CPU, num_devices=2), False),
        (replace(SLOW, link_gbps=1000.0), CPU, False),  # the link takes no time
        (Options(device_memory=12.0, weight_bits=4), GPU, True),
        (Options(device_memory=10.0, weight_bits=4), GPU, False),  # so many weights stream that twice is too often
    ],
)
def test_turns_are_planned_where_they_are_possible_and_pay(options: Options, hardware: Hardware, turns: bool) -> None:
    made = planned(options, 2, hardware)
    assert made.request.turns is turns
    assert any("draft while" in note for note in made.notes) is turns
    assert made == planned(options, 2, hardware)
    assert Plan.from_dict(made.as_dict()) == made


def test_turns_are_possible_where_what_drafts_uses_no_slots_of_the_pass_under_way() -> None:
    streamed = price(replace(SLOW, offload=BOTH), 2, 2)
    assert not streamed.possible
    assert Turns(replace(streamed.cost, composition=replace(streamed.cost.composition, budget=0))).possible
    assert price(Options(device_memory=10.0, weight_bits=4), 2, 2, GPU).possible
    lookups = replace(price(SLOW, 2, 2).cost.composition, budget=0, draft=False)
    assert price(SLOW, 2, 2).possible
    assert not Turns(replace(price(SLOW, 2, 2).cost, composition=lookups)).possible


def test_several_ranks_take_no_turns_whether_or_not_they_pay() -> None:
    """The others would be told of a pass in the middle of another, whose sums are due."""
    alone = price(SLOW, 2, 2)
    two = replace(alone.cost.sizing, hardware=replace(CPU, num_devices=2))
    assert alone.possible
    assert not Turns(replace(alone.cost, sizing=two)).possible


def test_one_sequence_takes_no_turns() -> None:
    assert not planned(SLOW, 1).request.turns


@pytest.mark.parametrize("gbps", [0.5, 20.0])
def test_a_full_pass_takes_the_longer_of_link_and_computing(gbps: float) -> None:
    """Four sequences, two of which draft while the full pass of two streams, over a slow link and a quick one."""
    options = replace(SLOW, gamma=5, link_gbps=gbps)
    turns = price(options, 4, staged=99)
    half = replace(turns.cost, sizing=replace(turns.cost.sizing, num_sequences=2))
    computed = replace(half, sizing=replace(half.sizing, options=replace(options, link_gbps=10_000.0))).full_pass(
        6, masses=True
    )
    drafted, link = 5 * half.retrieval_token, half.cache_bytes * half.link_share / (gbps * 1e9)
    assert (link > computed + drafted) == (gbps < 1)
    expected = (2 * max(link, computed + drafted) + 2 * half.refresh) / turns.cost.tokens_per_round
    assert turns.per_token == pytest.approx(expected)


def test_groups_of_an_odd_number_are_a_half_rounded_up_and_the_rest() -> None:
    turns = price(replace(SLOW, gamma=5), 3, staged=99)
    two, one = (replace(turns.cost, sizing=replace(turns.cost.sizing, num_sequences=number)) for number in (2, 1))
    link = two.full_link_seconds + one.full_link_seconds
    assert turns.per_token == pytest.approx((link + two.refresh + one.refresh) / turns.cost.tokens_per_round)


def test_with_few_staged_tiles_the_link_waits_for_passes_that_propose() -> None:
    options = Options(device_memory=12.0, weight_bits=4)
    wanted, *fewer = price(options, 2, 2, GPU).staging
    one = price(options, 1, 2, GPU).cost
    assert wanted == 1 + ceil(one.retrieval_pass(1) / one.tile_link_seconds)
    assert fewer[-1] == 2
    rates = [price(options, 2, staged, GPU).per_token for staged in (2, wanted, wanted + 1)]
    assert rates[0] > rates[1] == rates[2]


def test_staged_tiles_are_counted_where_there_is_room_for_them() -> None:
    made = planned(Options(device_memory=12.0, weight_bits=4), 2, GPU).placement
    tile = made.tile_tokens * LLAMA2_7B.kv_bytes_per_token(2) // LLAMA2_7B.num_layers
    assert made.staging_tiles > 2
    assert made.device_bytes["kv staging"] == 2 * (made.staging_tiles + (made.link_bits < 16)) * tile
    assert made.total_device_bytes <= 12e9


def test_turns_are_part_of_what_auto_weighs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prediction of the best number is the price of turns, and without them fewer sequences are worth it."""
    asked = request(SLOW)
    plan = asked.plan(num_prompt_tokens=PROMPT, max_tokens=NEW)
    sizing = Sizing(DEMO, DRAFT, SLOW, CPU, plan.request.dtype)
    made = plan_together(plan, sizing, asked.times, None, most=8)
    number = made.request.num_sequences
    assert made.request.turns
    one = Cost(sizing, plan.placement, plan.request.capacity, plan.composition).per_token
    rate = number * one / price(SLOW, number, made.placement.staging_tiles).per_token
    assert made.notes[-2] == f"{number} prompts at a time: predicted {rate:.1f} times the tokens a second"
    monkeypatch.setattr(Turns, "possible", False)
    without = plan_together(plan, sizing, asked.times, None, most=8)
    assert not without.request.turns
    assert without.request.num_sequences < number
