"""Text under a constraint is what was asked for, whatever tokens are drawn, and its states come back exactly."""

from __future__ import annotations

import ast
import json
import random
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import jsonschema
import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from offload.decode import grammar as grammar_module
from offload.decode.constraint import Constraint, Kind
from offload.decode.grammar import Grammar, GrammarState
from offload.decode.grammar_tokenizer import spellings
from offload.decode.tokenizer import Tokenizer
from offload.errors import ModelError, UsageError
from schemas import SCHEMAS, record
from test_gguf_tokenizer import made, pieces
from test_tokenizer import byte_level

ROOT = Path(__file__).resolve().parent.parent
MORE = 7  # logits that no token has
WALKS, MAX_TOKENS = 2, 160


@cache
def demo() -> Tokenizer:
    return Tokenizer.from_folder(ROOT / "triforce_cli" / "models" / "demo-target")


@cache
def llama_like() -> Tokenizer:
    """Words carry the space before them, bytes are tokens, "a" and <0x61> are two tokens for one letter."""
    words = [
        "\u2581",
        *'{}[]:,"abcdetrunfls\u00e9',
        "\u2581{",
        '\u2581"',
        "true",
        "\u2581the",
        "null",
        "ab",
        '":',
        '",',
    ]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    merges = [("\u2581", "{"), ("\u2581", '"'), ("a", "b"), ('"', ":"), ('"', ",")]
    vocabulary = {name: i for i, name in enumerate(names)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>"))
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>"))


@cache
def gguf_bytes() -> Tokenizer:
    return made("smollm")


@cache
def gguf_pieces() -> Tokenizer:
    return pieces()


TOKENIZERS = (demo, llama_like, gguf_bytes, gguf_pieces)
EACH = pytest.mark.parametrize("make", TOKENIZERS)


@cache
def compiled(make: Callable[[], Tokenizer], kind: Kind, text: str, more_ends: tuple[int, ...] = ()) -> Grammar:
    tokenizer = make()
    assert tokenizer.eos_token_id is not None
    return Grammar.compiled(
        Constraint(kind, text), tokenizer, len(tokenizer) + MORE, {tokenizer.eos_token_id, *more_ends}
    )


def of_schema(make: Callable[[], Tokenizer], schema: object) -> Grammar:
    return compiled(make, "json-schema", json.dumps(schema))


def ids(mask: torch.Tensor) -> list[int]:
    return [int(i) for i in mask.nonzero().flatten()]


def walk(grammar: Grammar, tokenizer: Tokenizer, seed: int, max_tokens: int = MAX_TOKENS) -> list[int] | None:
    """Tokens up to an end token, drawn from those that are allowed; None where there was none in time. Often those that
    close something are drawn, as most draws would never end."""
    draw, state, closing = random.Random(seed), grammar.state(), closers(tokenizer)
    for _ in range(max_tokens):
        allowed = ids(state.allowed())
        closes = [token for token in allowed if token in closing or token in grammar.end_tokens]
        token = draw.choice(closes if closes and draw.random() < 0.4 else allowed)
        assert state.advance([token]) == 1
        if token in grammar.end_tokens:
            return state_tokens(state)
    return None


def state_tokens(state: GrammarState) -> list[int]:
    return list(state._tokens)


@cache
def closers(tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset(token for token, data in spellings(tokenizer).items() if data.strip()[:1] in (b'"', b"}", b"]"))


def text_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Of tokens behind others: at the beginning of a text some decoders leave out a space."""
    before = tokenizer.encode("a")
    return tokenizer.decode([*before, *tokens]).removeprefix(tokenizer.decode(before))


@pytest.mark.parametrize("name", SCHEMAS)
def test_whatever_is_drawn_the_text_is_an_instance_of_the_schema(name: str) -> None:
    validator = jsonschema.Draft202012Validator
    checker, ended = validator(SCHEMAS[name], format_checker=validator.FORMAT_CHECKER), 0
    for make in TOKENIZERS:
        for seed in range(WALKS):
            tokens = walk(of_schema(make, SCHEMAS[name]), make(), seed)
            if tokens is not None:
                ended += 1
                text = text_of(make(), tokens)
                checker.validate(json.loads(text))
                assert make().decode(tokens) == text
    assert ended >= len(TOKENIZERS)


REGEXES = ["[a-c]{2,5}", "(yes|no)( maybe)?", r"\d{3}-[A-F]+x", "\u00e9+\U0001f44d?", "^a|b$", r" a\n{2}", "(?i)the", ".{0,9}"]  # fmt: skip


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


def spelled(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of `text`, a byte each."""
    tokens = {data: token for token, data in sorted(spellings(tokenizer).items(), reverse=True)}
    return [tokens[bytes([byte])] for byte in text.encode()]


ARITHMETIC = """
start: sum
sum: product (("+" | "-") product)*
product: atom (("*" | "/") atom)*
atom: NUMBER | "(" sum ")"
NUMBER: /[1-9][0-9]{0,3}/
"""


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


PERSON = record(["orderNumber"], orderNumber={"type": "integer", "maximum": 30, "minimum": 2}, colour={"enum": ["red", "redder"]})  # fmt: skip
OFFERED = st.lists(
    st.one_of(
        st.tuples(st.just("advance"), st.lists(st.integers(0, 5), max_size=5)),
        st.tuples(st.just("rewind"), st.integers(0, 12)),
        st.tuples(st.sampled_from(["masks", "forced", "longest"]), st.lists(st.integers(0, 5), max_size=4)),
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
            elif action == "forced":
                state.forced()
            else:
                getattr(state, action)(tokens)
        fresh = grammar.state()
        assert fresh.advance(taken) == len(taken) == state.place
        assert torch.equal(state.allowed(), fresh.allowed())
        assert (state.is_complete, state.forced()) == (fresh.is_complete, fresh.forced())


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


REFUSED: list[tuple[Kind, object, str]] = [
    ("json-schema", '{"a":}', "the JSON schema is not JSON: Expecting value (line 1, column 6); correct it there"),
    ("json-schema", '{"a":1,\n"a":2}', "the JSON schema is not JSON: a field occurs twice: 'a'; correct it there"),
    ("json-schema", "[" * 9999, "the JSON schema is not JSON: it is nested too deep; correct it there"),
    ("json-schema", [1], "a JSON schema is an object, true or false, and this one is [1]"),
    ("json-schema", False, "the JSON schema cannot be followed: it is false, no text fits it; write true, or a schema"),
    ("json-schema", {"properties": {"a/b": {"items": {"not": {}}}}}, "the JSON schema cannot be followed: at /properties/a~1b/items: Unimplemented keys: [\"not\"]; say the same with other keywords, or take these out"),
    ("json-schema", {"properties": {"a": {"format": "foo"}}}, "the JSON schema cannot be followed: at /properties/a: Unknown format: foo; take the format out, or say it as a pattern"),
    ("json-schema", {"x-guidance": {"lenient": True}, "not": {}}, 'the JSON schema cannot be followed: Unimplemented keys: ["not"]; say the same with other keywords, or take these out'),
    ("json-schema", record(n={"type": "integer", "minimum": 3, "maximum": 1}), "the JSON schema cannot be followed: Unsatisfiable schema: required property 'n' is unsatisfiable; change it so that some text fits"),
    ("json-schema", {"type": "integer", "minimum": 3, "maximum": 1}, "the JSON schema cannot be followed: Unsatisfiable schema: minimum (3) is greater than maximum (1); change it so that some text fits"),
    ("json-schema", {"type": "string", "pattern": "ab(?=c)"}, "the JSON schema cannot be followed: look-around, including look-ahead and look-behind, is not supported (column 3 of the regex); say it without (?=...), (?!...), (?<=...), \\b, and ^ or $ inside"),
    ("json-schema", {"$ref": "#"}, "the JSON schema cannot be followed: no text fits it; change it so that some text fits"),
    ("json-schema", {"items": {"$ref": "#/nope"}}, "the JSON schema cannot be followed: at /items: Pointer '/nope' does not exist; correct it there"),
    ("json-schema", {"oneOf": [{"type": "string"}, {"minLength": 2}]}, "the JSON schema cannot be followed: oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf; write anyOf"),
    ("regex", "a(", "the regex cannot be followed: column 2: unclosed group; the syntax is that of Rust's regex crate"),
    ("regex", r"[^\s\S]", "the regex cannot be followed: no text fits it; change it so that some text fits"),
    ("regex", "(a|bc){1,1000000}", "the regex cannot be followed: lexer error: too many expressions constructed; make it smaller: fewer alternatives and smaller bounds"),
    ("choice", [], 'the choices are a JSON list of strings, as ["yes", "no"], and this is []'),
    ("choice", ["a", 1], 'the choices are a JSON list of strings, as ["yes", "no"], and this is ["a", 1]'),
    ("choice", "a, b", "the list of choices is not JSON: Expecting value (line 1, column 1); correct it there"),
    ("choice", ["\ud800"], "the choices have half of a surrogate pair, which is no character; take it out"),
    ("grammar", 'start: "a"\n  | b', "the grammar cannot be followed: line 1, column 8: unknown name: \"b\"; the syntax is llguidance's variant of Lark"),
    ("grammar", 'x: "a"', "the grammar cannot be followed: no start rule found; the syntax is llguidance's variant of Lark"),
    ("grammar", 'start: "a"\n\nfoo bar', "the grammar cannot be followed: line 3, column 5: Expected token ':', found 'rule_name' (at \"bar\" ('rule_name')); the syntax is llguidance's variant of Lark"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "said"), REFUSED)
def test_what_cannot_be_followed_is_refused_with_the_place_and_the_remedy(kind: Kind, text: object, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        compiled(demo, kind, text if isinstance(text, str) else json.dumps(text))
    assert str(caught.value) == said


def test_a_kind_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageError, match="one of json-schema, regex, choice, grammar, not 'xml'"):
        Constraint("xml", "")  # type: ignore[arg-type]


def test_a_tokenizer_that_cannot_write_every_letter_is_refused() -> None:
    inner = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="a"))
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>"))
    with pytest.raises(UsageError, match="no token for .*take a model with a byte-level tokenizer"):
        Grammar.compiled(Constraint("regex", "a+"), tokenizer, 3, [2])


def test_a_model_without_an_end_token_is_refused() -> None:
    with pytest.raises(UsageError, match="needs a token that ends the text, and this model has none"):
        Grammar.compiled(Constraint("regex", "a+"), byte_level(), 300, [300])


def test_a_text_that_grows_too_complex_is_an_error_and_a_rewind_leads_out_of_it() -> None:
    """More alternatives at once than the library follows: its matchers never recover from an error by themselves."""
    alternatives = "\n    | ".join(f'"xa" "{i}" start?' for i in range(3000))
    state = compiled(demo, "grammar", f'start: "y"\n    | {alternatives}').state()
    tokens = spelled(demo(), "xa")
    before = state.allowed()
    with pytest.raises(ModelError, match="after . tokens: .*; make the constraint simpler"):
        state.masks(tokens)
    assert state.place == 0
    assert torch.equal(state.allowed(), before)
    assert state.advance(spelled(demo(), "y")) == 1
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
    tree = ast.parse((ROOT / "offload" / "decode" / f"{module}.py").read_text(encoding="utf-8"))
    at_once = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert at_once
    assert not any("llguidance" in ast.unparse(node) for node in at_once)
    assert any("llguidance" in ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
