"""What a constraint proposes: what has to follow, and what follows in JSON of the text's own style."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from kit.api_schemas import record
from kit.constrained import EACH, demo, of_schema, text_of
from offload.decode.grammar_proposer import LIKELY, SURE, AllowedLookupProposer, GrammarProposer
from offload.decode.grammar_text import GrammarText
from offload.grammar.grammar import Grammar
from offload.text.tokenizer import Tokenizer

PROMPT = [5, 6, 7]
AGES = record(name={"type": "string"}, years={"type": "integer"}, alive={"type": "boolean"}, home=record(city={}))
WHOLE = json.dumps({"name": "Ann", "years": 30, "alive": True, "home": {"city": "Rome"}}, indent=2)


def proposer_of(grammar: Grammar) -> tuple[GrammarProposer, GrammarText]:
    text = GrammarText(grammar.state(), len(PROMPT), grammar.vocab_size)
    return GrammarProposer(text), text


def proposed(proposer: GrammarProposer, generated: list[int]) -> tuple[list[int], int]:
    """Tokens and their grade."""
    offer = proposer.offer([*PROMPT, *generated])
    assert offer.num_tokens is not None
    proposal = proposer.propose([*PROMPT, *generated], offer.num_tokens)
    assert proposal.grades == [offer.grade] * offer.num_tokens
    return proposal.tokens, offer.grade


@EACH
@pytest.mark.parametrize(("before", "wanted"), [
    ("{", '\n  "name": "'),
    ('{\n  "name": "Ann",', '\n  "years": '),
    ('{\n    "name": "Ann",\n', '    "years": '),
    ('{"name": "Ann",', ' "years": '),
    ('{"name":"Ann", "years"', ":"),
    ('{"name":"Ann","years":3', ""),
    ('{\n  "name": "Ann",\n  "years": 30,\n  "alive": true', ',\n  "home": {\n    "city": "'),
])  # fmt: skip
def test_names_and_the_space_between_values_are_proposed_in_the_style_of_the_text(
    make: Callable[[], Tokenizer], before: str, wanted: str
) -> None:
    tokenizer, grammar = make(), of_schema(make, AGES)
    proposer, _ = proposer_of(grammar)
    generated = [*grammar.cut(before)]
    tokens, grade = proposed(proposer, generated)
    while grade == SURE and tokens:  # as the speculator asks once more behind what was certain
        generated += tokens
        tokens, grade = proposed(proposer, generated)
    assert grade == LIKELY
    assert text_of(tokenizer, [*generated, *tokens]) == before + wanted


@EACH
def test_what_has_to_follow_is_proposed_and_surer_than_guesses(make: Callable[[], Tokenizer]) -> None:
    grammar = of_schema(make, {"const": "there"})
    proposer, _ = proposer_of(grammar)
    tokens, grade = proposed(proposer, grammar.cut('"'))
    assert grade == SURE > LIKELY
    assert (tokens[-1] in grammar.end_tokens) == (text_of(make(), tokens[:-1]) == 'there"')


@EACH
def test_proposals_are_a_function_of_the_tokens_before(make: Callable[[], Tokenizer]) -> None:
    """In any order of going on and back, as after rejections, and all of them may follow."""
    grammar, tokens = of_schema(make, AGES), of_schema(make, AGES).cut(WHOLE)
    proposer, text = proposer_of(grammar)
    fresh = [proposed(proposer_of(grammar)[0], tokens[:place]) for place in range(len(tokens) + 1)]
    assert sum(grade == LIKELY and len(found) > 1 for found, grade in fresh) > 3
    for place in (*range(len(tokens) + 1), *range(len(tokens), -1, -1), 7, 2, 9, 9):
        found, grade = proposed(proposer, tokens[:place])
        assert (found, grade) == fresh[place]
        assert text.num_allowed([*PROMPT, *tokens[:place]], found) == len(found)
        wrong = next(token for token in range(grammar.vocab_size) if token not in found[:1])
        proposed(proposer, [*tokens[:place], *found, wrong])  # drafted on, and then rejected


def test_a_style_is_forgotten_with_what_was_rolled_back() -> None:
    proposer, _ = proposer_of(of_schema(demo, AGES))
    broken, flat = (demo().encode_piece(text) for text in ('{\n\t"name": "Ann",', '{"name": "Ann",'))
    guess = proposed(proposer, flat)
    assert demo().decode(proposed(proposer, broken)[0]).startswith("\n\t")
    assert proposed(proposer, flat) == guess
    assert demo().decode(guess[0]).startswith(" ")


def test_nothing_is_proposed_inside_a_string_or_for_other_texts_than_json() -> None:
    proposer, _ = proposer_of(of_schema(demo, AGES))
    assert proposed(proposer, demo().encode_piece('{"name": "Ann, ')) == ([], LIKELY)
    assert proposed(proposer, demo().encode_piece("this is none")) == ([], LIKELY)


def test_lookups_end_before_what_may_not_follow() -> None:
    found = demo().encode_piece('{"name": "Ann", "nobody": 1}')
    text = GrammarText(of_schema(demo, AGES).state(), len(found), len(demo()) + 7)
    begun = found[:6]
    offer = AllowedLookupProposer(text).offer([*found, *begun])
    assert 0 < (offer.num_tokens or 0) < len(found) - len(begun)
