"""The contract of decoding, for every tiny model: whatever proposes, wherever weights and cache are, on any number of
ranks, in a batch, after a session and from the prefix store an engine says what plain decoding says, token by token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kit import asked
from kit.contract import CONTEXT, DRAFTED, MODELS, MODES, PROMPT, Pair, alone, possible, refusal, say
from kit.quantised import engine_of, level_stats
from offload.config.reading import read_config
from offload.engine import prefix
from offload.engine.engine import Engine
from offload.errors import UsageError
from offload.formats.stored import StoredMatrix
from offload.plan.planner import Plan
from offload.session.conditions import Conditions
from offload.session.fingerprints import identity_of
from offload.session.prefix_store import PrefixStore
from offload.session.store import Store

ROOM = 10**8  # bytes of a prefix store


def has_stored(engine: Engine) -> bool:
    """Whether matrices of the target's layers are as a quantised checkpoint stores them."""
    weights = engine.worker.models.target.weights
    experts = [own.down for each in weights.experts if each is not None for own in each.bank.places]
    return any(isinstance(each, StoredMatrix) for each in (*experts, *(layer.o.weight for layer in weights.layers)))


@pytest.mark.few(19)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_every_mode_says_what_the_target_says_alone(pairs: Callable[[str], Pair], name: str, mode: str) -> None:
    pair = pairs(name)
    config = read_config(pair[0])
    sizes, offload = possible(config, MODES[mode])
    if why := refusal(config, sizes):
        with pytest.raises(UsageError, match=why):
            engine_of(pair, sizes, prompt_tokens=CONTEXT, offload=offload)
        return
    with engine_of(pair, sizes, prompt_tokens=CONTEXT, offload=offload) as engine:
        assert has_stored(engine) == bool(config.stored_in)
        assert say(engine) == alone(pair)
        assert level_stats(engine, "target").accepted > 0 or sizes.lookup
        experts = engine.stats.decode_link.experts
        assert (experts.misses > 0) == (config.experts is not None and "weights" in offload)


@pytest.mark.few(8)
@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.twin is not None])
def test_in_fp32_a_checkpoint_says_what_its_numbers_say_as_another_one(
    pairs: Callable[[str], Pair], tmp_path: Path, name: str
) -> None:
    pair, make = pairs(name), MODELS[name].twin
    assert make is not None
    other = make(pair[0], tmp_path)
    assert alone(pair, "fp32") == alone((other, other), "fp32")
    assert len({*alone(pair, "fp32")}) > 2


@pytest.mark.few(3)
@pytest.mark.usefixtures("forked_here")
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_say_the_same(pairs: Callable[[str], Pair], name: str) -> None:
    pair = pairs(name)
    sizes, _ = possible(read_config(pair[0]), (replace(DRAFTED, draft_gamma=0), frozenset()))
    with engine_of(pair, sizes, prompt_tokens=CONTEXT, ranks=2, dtype="fp32") as engine:
        assert say(engine) == alone(pair, "fp32")


@pytest.mark.few(2)
@pytest.mark.parametrize("name", MODELS)
def test_a_session_is_gone_on_with(pairs: Callable[[str], Pair], name: str, tmp_path: Path) -> None:
    pair = pairs(name)
    sizes, _ = possible(read_config(pair[0]), (DRAFTED, frozenset()))
    with engine_of(pair, sizes, prompt_tokens=CONTEXT) as engine:
        assert say(engine) == alone(pair)
        with Store.open(tmp_path / "session", identity_of(pair[0], engine.plan)) as store:
            engine.save(store, {})
    with engine_of(pair, sizes, prompt_tokens=CONTEXT) as engine:
        with Store.open(tmp_path / "session", identity_of(pair[0], engine.plan)) as store:
            assert engine.restore(store, PROMPT) >= len(PROMPT) - 16
        assert say(engine, reuse=True) == alone(pair)


@pytest.mark.few(2)
@pytest.mark.parametrize("mode", ["draft and retrieval", "lookups"])
@pytest.mark.parametrize("name", MODELS)
def test_sequences_of_a_batch_say_what_each_says_alone(pairs: Callable[[str], Pair], name: str, mode: str) -> None:
    pair = pairs(name)
    sizes, offload = possible(read_config(pair[0]), MODES[mode])
    with engine_of(pair, sizes, prompt_tokens=CONTEXT, offload=offload, num_sequences=3) as engine:
        asked.check(engine, asked.some(4, seed=2, most=150, output=20))


@pytest.mark.few(2)
@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_from_the_prefix_store_says_the_same(
    pairs: Callable[[str], Pair], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix, "LEAST_TOKENS", 100)
    pair, texts = pairs(name), list[list[int]]()
    sizes, _ = possible(
        read_config(pair[0]), (replace(DRAFTED, prefill_block=32), frozenset())
    )  # a page is whole blocks

    def open_store(plan: Plan) -> PrefixStore:
        return PrefixStore(tmp_path, Conditions.of(pair[0], plan), limit=ROOM, on_note=pytest.fail)

    for stored in (0, 96):
        with engine_of(pair, sizes, prompt_tokens=CONTEXT, open_store=open_store) as engine:
            texts.append(say(engine))
            assert engine.stats.stored_tokens >= stored
            assert stored or engine.keep() >= 96
    assert texts[0] == texts[1]
