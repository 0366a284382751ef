"""What cannot be followed is refused before anything is generated: the place, the reason, a remedy."""

from __future__ import annotations

import json

import pytest
import tokenizers
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from kit.api_schemas import record
from kit.constrained import compiled, demo
from offload.errors import ModelError, UsageError
from offload.grammar.constraint import Constraint, Kind
from offload.grammar.grammar import Grammar, GrammarState
from offload.text.tokenizer import Tokenizer
from test_tokenizer import byte_level

NOT_JSON: list[tuple[Kind, str, str]] = [
    ("json-schema", '{"a":}', "the JSON schema is not JSON: Expecting value (line 1, column 6); correct it there"),
    ("json-schema", '{"a":1,\n"a":2}', "the JSON schema is not JSON: a field occurs twice: 'a'; correct it there"),
    ("json-schema", "[" * 9999, "the JSON schema is not JSON: it is nested too deep; correct it there"),
    ("json-schema", "[1]", "a JSON schema is an object, true or false, and this one is [1]"),
    ("choice", "a, b", "the list of choices is not JSON: Expecting value (line 1, column 1); correct it there"),
    ("choice", "[]", 'the choices are a JSON list of strings, as ["yes", "no"], and this is []'),
    ("choice", '["a", 1]', 'the choices are a JSON list of strings, as ["yes", "no"], and this is ["a", 1]'),
    ("choice", r'["\ud800"]', "the choices have half of a surrogate pair, which is no character; take it out"),
]
OTHERS = "say the same with other keywords, or take these out"
FITS = "change it so that some text fits"
SMALLER = "make it smaller: fewer alternatives and smaller bounds"
LOOKS = "say it without (?=...), (?!...), (?<=...), \\b, and ^ or $ inside"
NO_LOOKS = "look-around, including look-ahead and look-behind, is not supported"
ONE_OF = "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf"
UPSIDE_DOWN = {"type": "integer", "minimum": 3, "maximum": 1}
SCHEMAS: list[tuple[object, str, str]] = [
    (False, "it is false, no text fits it", "write true, or a schema"),
    ({"properties": {"a/b": {"items": {"not": {}}}}}, 'at /properties/a~1b/items: Unimplemented keys: ["not"]', OTHERS),
    ({"examples": [{"if": 1}], "$defs": {"a": {"if": {}, "then": {}}}, "$ref": "#/$defs/a"},
     'at /$defs/a: Unimplemented keys: ["if", "then"]', OTHERS),
    ({"x-guidance": {"lenient": True}, "not": {}}, "x-guidance has lenient, which would ignore keywords",
     "correct it there"),
    ({"x-guidance": 3}, "x-guidance is 3, it must be an object", "correct it there"),
    (UPSIDE_DOWN, "Unsatisfiable schema: minimum (3) is greater than maximum (1)", FITS),
    (record(n=UPSIDE_DOWN), "Unsatisfiable schema: required property 'n' is unsatisfiable", FITS),
    ({"$ref": "#"}, "no text fits it", FITS),
    ({"items": {"$ref": "#/nope"}}, "at /items: Pointer '/nope' does not exist", "correct it there"),
    ({"oneOf": [{"type": "string"}, {"minLength": 2}]}, ONE_OF, "write anyOf"),
    ({"type": "string", "pattern": "ab(?=c)"}, f"{NO_LOOKS} (column 3 of the regex)", LOOKS),
]  # fmt: skip
RUST, LARK = "the syntax is that of Rust's regex crate", "the syntax is llguidance's variant of Lark"
REGEXES = [
    ("a(", "column 2: unclosed group", RUST),
    (r"(a)\1", "column 4: backreferences are not supported", RUST),
    ("a(?=b)", f"column 2: {NO_LOOKS}", LOOKS),
    (r"[^\s\S]", "no text fits it", FITS),
]
GRAMMARS = [
    ('start: "a"\n  | b', 'line 1, column 8: unknown name: "b"', LARK),
    ("start: A\nA: /(/", "line 2, column 4: unclosed group (column 1 of the regex)", LARK),
    ('x: "a"', "no start rule found", LARK),
    (
        'start: "a"\n\nfoo bar',
        "line 3, column 5: Expected token ':', found 'rule_name' (at \"bar\" ('rule_name'))",
        LARK,
    ),
    ("start: start", "no text fits it", FITS),
]


@pytest.mark.parametrize(("kind", "text", "said"), NOT_JSON)
def test_what_is_not_even_json_of_the_right_shape(kind: Kind, text: str, said: str) -> None:
    assert refused(kind, text) == said


@pytest.mark.parametrize(("schema", "said", "remedy"), SCHEMAS)
def test_a_schema_that_cannot_be_followed(schema: object, said: str, remedy: str) -> None:
    assert refused("json-schema", json.dumps(schema)) == f"the JSON schema cannot be followed: {said}; {remedy}"


@pytest.mark.parametrize(("regex", "said", "remedy"), REGEXES)
def test_a_regex_that_cannot_be_followed(regex: str, said: str, remedy: str) -> None:
    assert refused("regex", regex) == f"the regex cannot be followed: {said}; {remedy}"


@pytest.mark.parametrize(("text", "said", "remedy"), GRAMMARS)
def test_a_grammar_that_cannot_be_followed(text: str, said: str, remedy: str) -> None:
    assert refused("grammar", text) == f"the grammar cannot be followed: {said}; {remedy}"


def test_what_is_too_large() -> None:
    said = refused("json-schema", json.dumps({"enum": list(range(100_000))}))
    limit = "initial lexer configuration (grammar) too big (limit for this grammar: 1000000)"
    assert said == f"the JSON schema cannot be followed: {limit}; {SMALLER}"


DEEP = 60_000
_LINK, _LAST = '"a{}": {{"items": {{"$ref": "#/$defs/a{}"}}}},', '"a{}": {{}}'
BRACKETS = "(" * DEEP + "a" + ")" * DEEP


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("regex", BRACKETS, "exceed the maximum number of nested parentheses/brackets"),
        ("regex", "(?:" * DEEP, "unclosed group"),
        ("regex", "[" * DEEP, "unclosed character class"),
        ("regex", "a" + "*" * DEEP, "exceed the maximum number of nested parentheses/brackets"),
        ("grammar", f"start: {BRACKETS}", "lark grammar too deeply nested"),
        ("grammar", f"start: /{BRACKETS}/", "exceed the maximum number of nested parentheses/brackets"),
        ("grammar", "start: " + "[" * DEEP, "lark grammar too deeply nested"),
        ("json-schema", json.dumps({"pattern": BRACKETS}), "exceed the maximum number of nested parentheses/brackets"),
        ("json-schema", '{"items":' * DEEP + "{}" + "}" * DEEP, "it is nested too deep"),
        ("json-schema", '{"anyOf":[' * 200 + "{}" + "]}" * 200, "recursion limit exceeded"),
        ("choice", json.dumps(["(" * 2 * 10**6]), "has 2000004 characters, over the limit of 1048576; make it smaller"),
    ],
    ids=lambda value: value[:20],
)
def test_brackets_without_end_are_refused(kind: Kind, text: str, said: str) -> None:
    assert said in refused(kind, text)


@pytest.mark.parametrize("text", ["(" * 50 + "a" + "*)*" * 50, "(a*)*(a|a)*(a|aa)*b", "(((a?)+)*)+b"])
def test_nested_quantifiers_match_in_time(text: str) -> None:
    """Of a matcher that goes back they take the power of the text's length."""
    state = compiled(demo, "regex", text).state()
    (letter,) = demo().encode_piece("a")
    assert state.advance([letter] * 500) == 500


def chain(link: str, last: str) -> str:
    return "".join(link.format(number, number + 1) for number in range(4000)) + last.format(4000)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("grammar", "start: r0\n" + chain("r{}: r{}\n", 'r{}: "a"\n')),
        ("grammar", "start: R0\n" + chain("R{}: R{}\n", "R{}: /a/\n")),
        (
            "json-schema",
            f'{{"$ref": "#/$defs/a0", "$defs": {{{chain(_LINK, _LAST)}}}}}',
        ),
    ],
    ids=["rules", "terminals", "references"],
)
def test_rules_that_name_each_other_do_not_end_the_process(kind: Kind, text: str) -> None:
    """Bug: the library follows them one inside the other, on a stack that 1,000 of them exceeded (a segmentation
    fault). They are compiled on a stack of their own, and followed on any."""
    state = compiled(demo, kind, text).state()
    assert state.allowed().any()
    state.rewind(0)


NESTED = "(a{1,1000}){1,1000}"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "((a{1,1000}){1,1000}){1,1000}"),
        ("regex", NESTED),
        ("regex", "(a{1,100}){1,100}"),
        ("regex", "((ab){0,300}(ba)?){1,300}"),
        ("regex", "a{1000000}"),
        ("grammar", f"start: A\nA: /{NESTED}/"),
        ("json-schema", json.dumps({"type": "string", "pattern": f"^{NESTED}$"})),
        ("json-schema", json.dumps({"type": "array", "items": {"type": "string", "pattern": f"^{NESTED}$"}})),
    ],
)
def test_repetitions_that_the_library_would_give_up_on_are_refused_before(kind: Kind, text: str) -> None:
    """Bug: a text ended after 16 tokens, as "the library does not follow a text of 16 tokens twice"."""
    said = refused(kind, text)
    assert "lexer error: too many expressions constructed" in said
    assert said.endswith(SMALLER)
    assert "tokens of a trial: " in said or text == "a{1000000}"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", r"([a-z0-9-]{1,63}\.){1,126}[a-z]{2,63}"),
        ("regex", r"(.{1,1000}\n){1,1000}"),
        ("regex", r"(\w+ ){1,5000}"),
        ("regex", "(a{1,10}){1,100}"),
        ("regex", "a{1,1000000}"),
        ("json-schema", json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000})),
        ("json-schema", json.dumps({"type": "string", "maxLength": 1_000_000})),
    ],
)
def test_large_bounds_alone_are_followed(kind: Kind, text: str) -> None:
    compiled(demo, kind, text)


def test_a_library_that_gives_up_says_why() -> None:
    """Bug: its words were lost where it gives up on the same text again."""
    state = compiled(demo, "regex", "(a{1,10}){1,1000}").state()
    (letter,) = demo().encode_piece("a")
    with pytest.raises(ModelError, match=r"after \d+ tokens: lexer error: too many expressions.*make the constraint"):
        _follow(state, [letter] * 2000)


def _follow(state: GrammarState, tokens: list[int]) -> None:
    for token in tokens:
        state.allowed()
        state.advance([token])


def refused(kind: Kind, text: str) -> str:
    with pytest.raises(UsageError) as caught:
        compiled(demo, kind, text)
    return str(caught.value)


def test_a_kind_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageError, match="one of json-schema, regex, choice, grammar, not 'xml'"):
        Constraint("xml", "")  # type: ignore[arg-type]


def test_a_tokenizer_that_cannot_write_every_letter_is_refused() -> None:
    inner = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="a"))
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>"))
    with pytest.raises(UsageError, match=r"no token for .*take a model with a byte-level tokenizer"):
        Grammar.compiled(Constraint("regex", "a+"), tokenizer, 3, [2])


def test_a_model_without_an_end_token_is_refused() -> None:
    with pytest.raises(UsageError, match="needs a token that ends the text, and this model has none"):
        Grammar.compiled(Constraint("regex", "a+"), byte_level(), 300, [300])
