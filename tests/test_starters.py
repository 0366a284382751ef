"""The table of starters, and the order in which a machine is offered them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from offload.config.encodings import matrices
from offload.config.families import FAMILIES
from offload.formats.encodings import ENCODINGS
from offload.hub.names import is_id
from offload.hub.offers import CONTEXT, READING, offer_of, offers
from offload.hub.starters import STARTERS, Starter
from offload.speed.hardware import RTX_4090, Hardware

GB = 10**9
LARGE = Hardware("cuda:0", "RTX 4090", 23 * GB, 118 * GB, True, rates=RTX_4090)  # 24 GB and 128 GB, some of it in use
DESK = replace(LARGE, host_free_bytes=56 * GB)
SMALL = replace(LARGE, device_free_bytes=11 * GB, host_free_bytes=26 * GB)
LAPTOP = Hardware("cpu", "CPU", 12 * GB, 12 * GB, True)
NAMES = [starter.name for starter in STARTERS]


def named(hardware: Hardware) -> list[str]:
    return [offer.candidate.name for offer in offers(STARTERS, hardware)]


@pytest.mark.parametrize("starter", STARTERS, ids=NAMES)
def test_a_starters_shapes_and_encodings_make_its_bytes(starter: Starter) -> None:
    """All but vocabularies, norms and the like. A wrong size or layer is more than that."""
    config = starter.config
    assert 0.98 < sum(matrix.nbytes(2) for matrix in matrices(config).values()) / starter.num_bytes <= 1
    assert set(config.stored_in) <= ENCODINGS.keys()
    assert (config.family in FAMILIES, config.context_limit >= 2 * CONTEXT, config.next_token) == (True, True, None)
    assert is_id(starter.repository)
    assert starter.file.endswith(f"-{starter.form}.gguf")


@pytest.mark.few(3)
@pytest.mark.parametrize("starter", STARTERS, ids=NAMES)
def test_every_starter_can_be_planned_on_the_large_machine(starter: Starter) -> None:
    offer = offer_of(starter, LARGE)
    assert offer is not None
    assert offer.plan.placement.total_device_bytes <= LARGE.device_free_bytes
    assert offer.plan.placement.total_host_bytes + offer.plan.placement.total_device_bytes > 0.8 * starter.num_bytes


def test_the_table_has_most_parameters_first_and_each_model_once() -> None:
    sizes = [starter.config.num_parameters() for starter in STARTERS]
    assert sizes == sorted(sizes, reverse=True)
    assert len({*NAMES}) == len({starter.model for starter in STARTERS}) == len(STARTERS)


def test_three_machines_are_offered_the_largest_that_they_write_as_fast_as_one_reads() -> None:
    assert named(LARGE) == ["gpt-oss 120B", "Qwen3.6 35B-A3B", "Qwen3.6 27B"]
    assert named(DESK) == ["Qwen3.6 35B-A3B", "Qwen3.6 27B", "Gemma 4 26B-A4B"]
    assert named(SMALL) == ["Qwen3.6 35B-A3B", "Gemma 4 26B-A4B", "gpt-oss 20B"]
    assert named(LAPTOP) == ["Qwen3.5 4B", "Qwen3 1.7B", "Qwen3 0.6B"]
    assert named(replace(LAPTOP, device_free_bytes=GB // 2, host_free_bytes=GB // 2)) == []


def test_slow_ones_come_last_the_fastest_first_and_what_is_not_needed_is_not_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = offers(STARTERS, LAPTOP, number=5)
    rates = [offer.tokens_per_second for offer in found]
    quick = [rate for rate in rates if rate >= READING]
    slow = rates[len(quick) :]
    assert (len(slow) > 1, slow) == (True, sorted(slow, reverse=True))
    planned = []
    offers(STARTERS, DESK, request_of=lambda request: planned.append(request.target) or request)
    assert STARTERS[-1].config not in planned


def test_the_parts_on_the_host_are_said() -> None:
    by_name = {starter.name: starter for starter in STARTERS}

    def on_host(name: str, hardware: Hardware) -> tuple[str, ...]:
        offer = offer_of(by_name[name], hardware)
        assert offer is not None
        return offer.on_host

    assert on_host("Qwen3.6 35B-A3B", SMALL) == ("experts",)
    assert on_host("Mistral Small 3.2 24B", DESK) == ()
    assert on_host("Llama 3.3 70B", LARGE) == ("weights", "cache")
    assert on_host("Qwen3 14B", SMALL) == ("cache",)
