"""Experts of which only some are in memory, and the others in the model's file: text is the resident model's."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kit.contract import CONTEXT, PLAIN, Pair, alone, say
from kit.models import Sizes, changed, tiny_engine, tiny_plan
from kit.processor import best
from offload.engine.engine import Engine

WEIGHTS = frozenset({"weights"})
DIRECT = ["qwen3_moe", "gemma4, sparse", "nemotron_h", "qwen3_5_moe in a file, Q4_K experts"]
CONVERTED = ["gpt_oss", "qwen3_moe in int4", "qwen3_moe in mxfp4"]
SLOTTED = frozenset({"weights"})


def engine(
    pair: Pair, sizes: Sizes, places: int, *, offload: frozenset[str] = frozenset(), **changes: object
) -> Engine:
    best()
    draft = pair[1] if sizes.draft_gamma else None
    plan = tiny_plan(pair[0], draft, sizes, num_prompt_tokens=CONTEXT, max_tokens=60, dtype="bf16", offload=offload)
    return tiny_engine(changed(plan, expert_places=places, **changes), pair[0], draft)


@pytest.mark.parametrize("offload", [frozenset[str](), SLOTTED], ids=["CPU", "slots"])
@pytest.mark.parametrize("places", [2, 3, 7])
@pytest.mark.parametrize("name", [*DIRECT, *CONVERTED])
def test_text_is_the_resident_models(
    pairs: Callable[[str], Pair], name: str, places: int, offload: frozenset[str]
) -> None:
    pair = pairs(name)
    with engine(pair, PLAIN, places, offload=offload) as made:
        assert say(made) == alone(pair)
        print(made.stats.decode_link)
