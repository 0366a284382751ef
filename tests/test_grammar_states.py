"""A state says the same wherever it has been before: rewinds, looks ahead, tokens that may not follow, errors."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kit.api_schemas import record
from kit.constrained import ARITHMETIC, EACH, compiled, demo, gguf_bytes, ids, llama_like, of_schema, spelled, walk
from offload.errors import ModelError
from offload.grammar import grammar as grammar_module
from offload.grammar.constraint import Kind
from offload.grammar.grammar import Grammar
from offload.text.tokenizer import Tokenizer


def test_every_end_token_is_allowed_where_the_text_may_end_and_nothing_after_it() -> None:
    grammar = compiled(demo, "regex", "a|ab", (700, 1200, 9999))
    assert grammar.end_tokens == {1, 700, 1200}
    state = grammar.state()
    assert not {1, 700, 1200}.intersection(ids(state.allowed()))
    assert state.advance([700]) == 0
    [a] = spelled(demo(), "a")
    assert state.advance([a, 700, a]) == 2
    assert (state.place, state.is_complete, state.forced(), state.longest([1])) == (2, True, [], 0)
    assert state.advance([700]) == state.advance([a]) == 0
    assert state.allowed().all()
    state.rewind(1)
    assert {1, 700, 1200}.issubset(ids(state.allowed()))
    assert state.is_complete


def test_a_word_that_ends_the_text_is_no_part_of_it() -> None:
    """A caller may name any token as an end."""
    word = demo().vocabulary()["there"]
    state = compiled(demo, "regex", "(there|x)+", (word,)).state()
    assert (state.allowed()[word], state.advance([word])) == (False, 0)
    assert state.advance([*spelled(demo(), "there"), word]) == 6
    *certain, end = compiled(demo, "choice", '["there"]', (word,)).state().forced()
    assert (demo().decode(certain), end, word in certain) == ("there", 1, False)


def test_a_grammar_may_name_special_tokens_and_the_end() -> None:
    state = compiled(demo, "grammar", 'start: "a" <s> "b" </s>').state()
    [a, b] = spelled(demo(), "ab")
    assert state.forced() == [a, 0, b, 1]
    assert state.advance([a, 0, b]) == 3
    assert not state.is_complete
    assert (state.advance([1]), state.is_complete) == (1, True)
    state.rewind(1)
    assert ids(state.allowed()) == [0]


ORDER = {"type": "integer", "maximum": 30, "minimum": 2}
PERSON = record(["orderNumber"], orderNumber=ORDER, colour={"enum": ["red", "redder"]})
OFFERED = st.lists(
    st.one_of(
        st.tuples(st.just("advance"), st.lists(st.integers(0, 5), max_size=5)),
        st.tuples(st.just("rewind"), st.integers(0, 12)),
        st.tuples(st.sampled_from(["masks", "forced", "guessed", "longest"]), st.lists(st.integers(0, 5), max_size=4)),
    ),
    max_size=12,
)


@pytest.mark.parametrize(("make", "kind", "text"), [
    (demo, "json-schema", json.dumps(PERSON)),
    (llama_like, "json-schema", json.dumps(PERSON)),
    (gguf_bytes, "regex", "(ab|abc)*d?"),
    (llama_like, "grammar", ARITHMETIC),
    (demo, "choice", '["the cat", "the dog", "then"]'),
])  # fmt: skip
@given(actions=OFFERED, seed=st.integers(0, 3))
def test_any_advances_and_rewinds_give_what_a_fresh_state_gives(
    make: Callable[[], Tokenizer], kind: Kind, text: str, actions: list[tuple[str, object]], seed: int
) -> None:
    """Tokens that may not follow are offered too, and end tokens."""
    grammar, draw = compiled(make, kind, text), random.Random(seed)
    state, taken = grammar.state(), list[int]()
    for action, argument in actions:
        if action == "rewind":
            assert isinstance(argument, int)
            taken = taken[:argument]
            state.rewind(min(argument, state.place))
        else:
            assert isinstance(argument, list)
            tokens = drawn(grammar, taken, argument, draw)
            if action == "advance":
                taken += tokens[: state.advance(tokens)]
            elif action in ("forced", "guessed"):
                getattr(state, action)()
            else:
                getattr(state, action)(tokens)
        fresh = grammar.state()
        assert fresh.advance(taken) == len(taken) == state.place
        assert torch.equal(state.allowed(), fresh.allowed())
        assert (state.is_complete, state.forced()) == (fresh.is_complete, fresh.forced())
        ended = bool(taken) and taken[-1] in grammar.end_tokens
        assert state.is_over is (ended or grammar.end_tokens.issuperset(ids(state.allowed())))
        assert state.guessed() == fresh.guessed()


def drawn(grammar: Grammar, taken: list[int], kinds: list[int], draw: random.Random) -> list[int]:
    """Tokens behind `taken`: 0 any id, 1 an end token, else one that may follow."""
    state, tokens = grammar.state(), list[int]()
    state.advance(taken)
    for kind in kinds:
        any_id, end = draw.randrange(grammar.vocab_size), draw.choice(sorted(grammar.end_tokens))
        allowed = ids(state.allowed())
        tokens.append([any_id, end, *[draw.choice(allowed)] * 4][kind])
        state.advance(tokens[-1:])
    return tokens


@EACH
def test_masks_are_those_of_each_place(make: Callable[[], Tokenizer]) -> None:
    grammar = of_schema(make, PERSON)
    tokens = walk(grammar, make(), seed=3)
    assert tokens is not None
    state = grammar.state()
    state.advance(tokens[:2])
    masks = state.masks(tokens[2:])
    assert (state.place, masks.shape) == (2, (len(tokens) - 1, grammar.vocab_size))
    for place, mask in enumerate(masks, 2):
        fresh = grammar.state()
        fresh.advance(tokens[:place])
        assert torch.equal(mask, fresh.allowed())
    wrong = next(i for i in range(grammar.vocab_size) if not masks[0][i])
    masks = state.masks([tokens[2], wrong, tokens[3]])
    assert masks[2:].all()
    assert not masks[1].all()
    assert state.longest([*tokens[2:4], wrong, tokens[4]]) == 2


@EACH
def test_what_is_certain_is_forced_in_the_tokens_that_the_tokenizer_cuts_it_into(make: Callable[[], Tokenizer]) -> None:
    tokenizer, state = make(), compiled(make, "choice", json.dumps(["the abcab"])).state()
    run = state.forced()
    assert run == [*tokenizer.encode_piece("the abcab"), tokenizer.eos_token_id]
    for token, mask in zip(run, state.masks(run), strict=False):
        assert ids(mask) == [token]
    assert state.place == 0


def test_a_run_stops_where_two_texts_part_and_is_no_longer_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    state = compiled(demo, "choice", '["the cat sat", "the cat is"]').state()
    assert demo().decode(state.forced()) == "the cat"
    state = compiled(demo, "regex", "(abc){100}").state()
    assert len(state.forced()) == grammar_module.MAX_FORCED
    monkeypatch.setattr(grammar_module, "MAX_FORCED", 5)
    assert len(state.forced()) == 5


def test_a_names_part_that_two_fields_share_is_not_forced_in_tokens_of_its_own() -> None:
    """As "order" before "orderId" and "orderName" would be: the model has seen other tokens there."""
    assert "there" in demo().vocabulary()
    state = of_schema(demo, record([], theory={"type": "null"}, there={"type": "null"})).state()
    assert state.advance(demo().encode_piece('{"')) > 0
    assert state.forced() == []
    assert {demo().vocabulary()[name] for name in ("th", "the", "there")} <= set(ids(state.allowed()))


def test_a_text_that_grows_too_complex_is_an_error_and_a_rewind_leads_out_of_it() -> None:
    """More alternatives at once than the library follows: its matchers never recover from an error by themselves."""
    alternatives = "\n    | ".join(f'"xa" "{i}" start?' for i in range(3000))
    state = compiled(demo, "grammar", f'start: "y"\n    | {alternatives}').state()
    tokens = spelled(demo(), "xa")
    before = state.allowed()
    with pytest.raises(ModelError, match=r"after . tokens: .*; make the constraint simpler"):
        state.masks(tokens)
    assert state.place == 0
    assert torch.equal(state.allowed(), before)
    assert state.advance(spelled(demo(), "y")) == 1
    assert state.is_complete
