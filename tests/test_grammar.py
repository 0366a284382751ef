"""Text under a constraint is what was asked for, whatever tokens are drawn."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from kit.api_schemas import SCHEMAS
from kit.constrained import (
    ARITHMETIC,
    EACH,
    MORE,
    ROOT,
    TOKENIZERS,
    compiled,
    demo,
    ids,
    llama_like,
    of_schema,
    spelled,
    text_of,
    walk,
)
from offload.grammar.constraint import Constraint
from offload.grammar.grammar import Grammar
from offload.grammar.grammar_tokenizer import Vocabulary, spellings
from offload.text.tokenizer import Tokenizer

WALKS = 2


class TwoOfOneText:
    """A tokenizer that has two tokens for A and for AB, and writes another text than it is given."""

    def vocabulary(self) -> dict[str, int]:
        letters = {chr(code): code for code in range(0x20, 0x7F)}
        return letters | {"AB": 300, "<A>": 301, "<AB>": 302}

    def added_tokens(self, *, special: bool) -> dict[str, int]:
        return {}

    def characters(self) -> TwoOfOneText:
        return self

    def bytes_of(self, written: str) -> bytes:
        return (written.strip("<>") or written).encode()

    def join(self, strings: list[str]) -> str:
        return "".join(strings)

    def encode_piece(self, text: str) -> list[int]:
        return [0x20]


def test_of_two_tokens_with_one_text_the_first_is_written_and_both_are_allowed() -> None:
    """As where a vocabulary has a byte's token beside the letter's."""
    tokenizer: Any = TwoOfOneText()
    vocabulary = Vocabulary(tokenizer, 303, [299])
    assert vocabulary("ABA") == [300, ord("A")]
    assert (vocabulary.tokens[302], vocabulary.tokens[301]) == (b"AB", b"A")


@pytest.mark.parametrize("name", SCHEMAS)
def test_whatever_is_drawn_the_text_is_an_instance_of_the_schema(name: str, pytestconfig: pytest.Config) -> None:
    """By default until as many texts have ended as there are tokenizers."""
    validator = jsonschema.Draft202012Validator
    checker, ended = validator(SCHEMAS[name], format_checker=validator.FORMAT_CHECKER), 0
    for seed in range(WALKS):
        if ended >= len(TOKENIZERS) and not pytestconfig.getoption("deep"):
            break
        for make in TOKENIZERS:
            tokens = walk(of_schema(make, SCHEMAS[name]), make(), seed)
            if tokens is not None:
                ended += 1
                text = text_of(make(), tokens)
                checker.validate(json.loads(text))
                assert make().decode(tokens) == text
    assert ended >= len(TOKENIZERS)


REGEXES = ["[a-c]{2,5}", "(yes|no)( maybe)?", r"\d{3}-[A-F]+x", "\u00e9+\U0001f44d?", "^a|b$", r" a\n{2}", ".{0,9}"]


@pytest.mark.parametrize("regex", REGEXES)
def test_all_of_the_text_matches_the_regex(regex: str) -> None:
    for make in TOKENIZERS:
        walks = [walk(compiled(make, "regex", regex), make(), seed) for seed in range(4)]
        texts = [text_of(make(), tokens) for tokens in walks if tokens is not None]
        assert texts
        assert all(re.fullmatch(regex, text) for text in texts), texts


CHOICES = ["yes", "yes, of course", "no", "", " the", "<s>", "</s>", "\u00e9\U0001f44d", "new\nline\x00", 'a"b\\/.*|(']


@EACH
def test_the_text_is_one_of_the_choices_and_may_be_any(make: Callable[[], Tokenizer]) -> None:
    tokenizer, grammar = make(), compiled(make, "choice", json.dumps(CHOICES))
    for seed in range(20):
        tokens = walk(grammar, tokenizer, seed)
        assert tokens is not None
        assert text_of(tokenizer, tokens) in CHOICES
    for choice in CHOICES:
        state = grammar.state()
        tokens = spelled(tokenizer, choice)
        assert state.advance(tokens) == len(tokens)
        assert state.is_complete


@EACH
def test_a_grammar_is_followed(make: Callable[[], Tokenizer]) -> None:
    tokenizer, ended = make(), 0
    for seed in range(12):
        tokens = walk(compiled(make, "grammar", ARITHMETIC), tokenizer, seed, 60)
        if tokens is not None:
            ended += 1
            ast.parse(text_of(tokenizer, tokens), mode="eval")
    assert ended > 3


@EACH
def test_special_tokens_and_ids_without_one_are_no_text(make: Callable[[], Tokenizer]) -> None:
    tokenizer, state = make(), of_schema(make, {"type": "string"}).state()
    assert state.advance(spelled(tokenizer, '"a')) == 2
    allowed = state.allowed()
    assert allowed.shape == (len(tokenizer) + MORE,)
    special = set(tokenizer.added_tokens(special=True).values())
    assert not special.intersection(ids(allowed))
    assert not allowed[len(tokenizer) :].any()
    assert state.advance([len(tokenizer)]) == state.advance([len(tokenizer) + MORE + 5]) == state.advance([-1]) == 0


def test_fewer_logits_than_tokens() -> None:
    tokenizer = demo()
    state = Grammar.compiled(Constraint("regex", "[a-z ]+"), tokenizer, 500, [1]).state()
    assert state.allowed().shape == (500,)
    assert state.advance([max(tokenizer.encode_piece("there"))]) == 0


def test_words_that_carry_a_space_begin_no_text_without_one() -> None:
    tokenizer = llama_like()
    names = tokenizer.vocabulary()
    state = compiled(llama_like, "regex", r" ?\{").state()
    assert ids(state.allowed()) == sorted(
        [names["{"], names["\u2581"], names["\u2581{"], names["<0x20>"], names["<0x7B>"]]
    )
    state = compiled(llama_like, "regex", r"[ {]*\}").state()
    assert state.advance([names["\u2581{"]]) == 1
    assert ids(of_schema(llama_like, {"type": "object"}).state().allowed()) == [names["{"]]


def test_where_a_text_is_certain_only_the_tokens_of_its_own_cut_are_allowed() -> None:
    """Step 1 of docs/sampling.md: other tokens that spell it get no probability, though they go on to a valid text."""
    tokenizer, texts = demo(), spellings(demo())
    assert sum(b"nothing".startswith(data) for data in texts.values()) > 1
    assert ids(compiled(demo, "regex", "nothing").state().allowed()) == tokenizer.encode_piece("nothing")[:1]
    state = compiled(demo, "regex", "no(thing|body)").state()
    assert state.advance(spelled(tokenizer, "no")) == 2
    ways = {token for token, data in texts.items() if b"thing".startswith(data) or b"body".startswith(data)}
    assert ids(state.allowed()) == sorted(ways)


def test_whitespace_is_bounded() -> None:
    """Bug of others: where any number of spaces is allowed, small models write spaces until the last token."""
    tokenizer, grammar = demo(), of_schema(demo, {"type": "object"})
    for text, taken in (
        ('{ "a": 1,\n  "b" : [ ]\n}', None),
        ('{"a":1}', None),
        ('{  "a"', "{ "),
        ("{\n\n", "{\n"),
        ("{\n" + 21 * " ", "{\n" + 20 * " "),
        (" {", ""),
        ("{} ", "{}"),
    ):
        state = grammar.state()
        count = state.advance(spelled(tokenizer, text))
        assert text[:count] == (text if taken is None else taken)


def test_a_schema_may_choose_its_whitespace_itself() -> None:
    schema = {"type": "array", "x-guidance": {"whitespace_pattern": "[ ]{0,3}"}}
    assert of_schema(demo, schema).state().advance(spelled(demo(), "[    ")) == 4


def test_true_is_any_json_and_keywords_that_only_describe_are_passed_over() -> None:
    for schema in (True, {}, {"title": "t", "x-own": 1, "examples": [{"not": 1}]}):
        state = of_schema(demo, schema).state()
        assert state.advance(spelled(demo(), '{"a":[1,null,"x"]}')) == 18
        assert state.is_complete


def test_a_token_spells_what_decoding_shows_behind_another_one() -> None:
    for make in TOKENIZERS:
        tokenizer = make()
        for token, data in spellings(tokenizer).items():
            text = data.decode(errors="replace")
            assert "\ufffd" in text or text_of(tokenizer, [token]) == text


@pytest.mark.parametrize("module", ["grammar", "grammar_tokenizer", "constraint"])
def test_importing_the_modules_does_not_load_the_library(module: str) -> None:
    """It takes .1 s that most runs have no use for."""
    tree = ast.parse((ROOT / "offload" / "grammar" / f"{module}.py").read_text(encoding="utf-8"))
    at_once = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert at_once
    assert not any("llguidance" in ast.unparse(node) for node in at_once)
    assert any("llguidance" in ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
