"""Calls of tools in replies, in the forms that models write."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken

from kit.models import byte_tokenizer
from offload import strict_json
from offload.decode.distribution import grammar_of
from offload.errors import UsageError
from offload.grammar.constraint import Constraint
from offload.grammar.grammar import GrammarState
from offload.text.tokenizer import Tokenizer
from triforce_cli.tools import call_forms
from triforce_cli.tools.bare_calls import BareCalls
from triforce_cli.tools.call_forms import FORMS
from triforce_cli.tools.call_grammar import with_calls
from triforce_cli.tools.calls import MAX_DEPTH, MOST_BROKEN, Calls
from triforce_cli.tools.choice import ToolChoice

Thoughts = tuple[str, str] | None

PARAMETERS = {
    "city": {"type": "string"}, "days": {"type": "integer"}, "metric": {"type": "boolean"}, "at": {"type": "object"},
    "list": {"type": ["array", "null"]}, "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "scale": {"type": "number"},
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": PARAMETERS}}}
    for name in ("get_weather", "get_time")
]
PARIS = {"name": "get_weather", "arguments": {"city": "Paris"}}
TIME: dict[str, Any] = {"name": "get_time", "arguments": {}}
JSON, TIME_JSON = json.dumps(PARIS), json.dumps(TIME)
LLAMA = '{"name": "get_weather", "parameters": {"city": "Paris"}}'


def read(reply: str, template: str = "") -> list[dict[str, Any]]:
    return Calls(TOOLS, template).read(reply)[0]


def notice(reply: str, template: str = "") -> str:
    return Calls(TOOLS, template).read(reply)[1]


def tagged(*arguments: tuple[str, str], name: str = "get_weather") -> str:
    """As Qwen3-Coder writes a call."""
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
    return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (f"I ask.\n<tool_call>\n{JSON}\n</tool_call>", [PARIS]),
        (f"<tool_call>\n{JSON}\n</tool_call>\n<tool_call>\n{TIME_JSON}\n</tool_call>", [PARIS, TIME]),
        (f"<tool_call>\n{JSON}", [PARIS]),
        ('<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>', [PARIS]),
        (f"<tool_call>```json\n{JSON}\n```</tool_call>", [PARIS]),
        (f"[TOOL_CALLS] [{JSON}, {TIME_JSON}]", [PARIS, TIME]),
        (f"[TOOL_CALLS][{JSON}]\nDone [1].", [PARIS]),
        ('[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]get_time[ARGS]{}', [PARIS, TIME]),
        ('[TOOL_CALLS]get_weather[CALL_ID]a1B2[ARGS]{"city": "Paris"}', [PARIS]),
        ('[TOOL_CALLS]get_weather{"city": "Paris"}', [PARIS]),
        (LLAMA, [PARIS]),
        (f"<|python_tag|>{LLAMA}", [PARIS]),
        (f"I look. <|python_tag|>{LLAMA}", [PARIS]),
        (f'{LLAMA}; {{"name": "get_time", "parameters": {{}}}}', [PARIS, TIME]),
        (f"[{JSON}, {TIME_JSON}]", [PARIS, TIME]),
        (f"```json\n{JSON}\n```", [PARIS]),
        (f"```\n[{JSON}]\n```\n", [PARIS]),
        ('[get_weather(city="Paris"), get_time()]', [PARIS, TIME]),
        ('<|python_start|>[get_weather(city="Paris")]<|python_end|>', [PARIS]),
        ('I ask.\n<function_calls>\nget_weather(city="Paris")\nget_time()\n</function_calls>', [PARIS, TIME]),
        (tagged(("city", "Paris")), [PARIS]),
        (tagged(("city", "Paris")) + tagged(name="get_time"), [PARIS, TIME]),
        ("<function=get_weather>\n<parameter=city>\nParis</parameter>", [PARIS]),
        ("<function=get_weather>\n<parameter=city>\nParis\n</tool_call>", [PARIS]),
        ("<function=get_weather><parameter=city>a </parameter></function> b</parameter></function>",
         [{"name": "get_weather", "arguments": {"city": "a </parameter></function> b"}}]),
        ('<tool_call>{"name": "get_time"}</tool_call>', [TIME]),
        ('<tool_call>{"name": "get_time", "arguments": null}\n{"name": "get_weather", "arguments": {"city": "Paris"}}',
         [TIME, PARIS]),
        ('<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>', [PARIS]),
        ("<start_function_call>call:get_weather{city:<escape>Paris<escape>}<end_function_call>", [PARIS]),
        ('<|tool_call>call:get_weather{city:<|"|>{a: "b"}, c:<|"|>,n:{k:[1,true]}}',
         [{"name": "get_weather", "arguments": {"city": '{a: "b"}, c:', "n": {"k": [1, True]}}}]),
        ('<tool_calls>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</tool_calls>', [PARIS]),
        ('[get_weather(city="Paris", x=true, y=null)]',
         [{"name": "get_weather", "arguments": {"city": "Paris", "x": True, "y": None}}]),
        ('<function=get_weather>{"city": "Paris"}</function>', [PARIS]),
        (
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>\n"
            "<tool_call>get_time\n</tool_call>",
            [PARIS, TIME],
        ),
        ('<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n</invoke>', [PARIS]),
        (DEEPSEEK.format('function<｜tool▁sep｜>get_weather\n```json\n{"city": "Paris"}\n```'), [PARIS]),
        (DEEPSEEK.format('get_weather<｜tool▁sep｜>{"city": "Paris"}'), [PARIS]),
        (f"<|tool_call|>[{JSON}]<|/tool_call|>", [PARIS]),
        (f"<TOOLCALL>[{JSON}]</TOOLCALL>", [PARIS]),
        (
            '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris"}}]',
            [PARIS],
        ),
    ],
)  # fmt: skip
def test_a_call_is_read_in_the_form_that_its_model_writes(reply: str, expected: list[dict[str, Any]]) -> None:
    assert Calls(TOOLS, "").read(reply) == (expected, "")


@pytest.mark.parametrize(
    "text", ["the </tool_call> token", "<tool_call>", "[1] </function> }", 'a "b" \\ \n', "Köln 😀"]
)
@pytest.mark.parametrize("form", ["<tool_call>{}</tool_call>", "[TOOL_CALLS][{}]", "<|tool_call|>[{}]", "{}", "[{}]"])
@pytest.mark.parametrize("ascii", [True, False])
def test_an_argument_in_json_may_hold_marks(text: str, form: str, ascii: bool) -> None:
    """The first </tool_call> ended a call, and the call was lost."""
    call = {"name": "get_weather", "arguments": {"city": text, "at": {"a": [1, {"b": None}]}}}
    assert read(form.replace("{}", json.dumps(call, ensure_ascii=ascii))) == [call]


def test_an_argument_between_tags_may_hold_the_marks_of_calls() -> None:
    for text in ("the </tool_call> token", "</function>"):
        call = [{"name": "get_weather", "arguments": {"city": text}}]
        assert read(tagged(("city", text))) == call
        glm = f"<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
        assert read(glm) == call


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("city", "5", "5"), ("city", "true", "true"), ("city", " a\n\n  b ", " a\n\n  b "), ("city", "", ""),
        ("days", "5", 5), ("days", "five", "five"), ("days", "true", "true"), ("days", "1" * 5000, "1" * 5000),
        ("scale", "2", 2), ("scale", "2.5", 2.5), ("scale", "NaN", "NaN"), ("scale", "1e999", "1e999"),
        ("metric", "true", True), ("metric", "False", False), ("metric", "1", "1"),
        ("at", '{"a": [1]}', {"a": [1]}), ("at", "[1]", "[1]"), ("at", "{", "{"),
        ("list", '["a"]', ["a"]), ("list", "null", None), ("limit", "7", 7), ("limit", "None", None),
        ("unknown", "5", "5"), ("unknown", "{}", "{}"),
    ],
)  # fmt: skip
def test_an_argument_between_tags_is_of_the_type_that_is_declared(key: str, text: str, value: Any) -> None:
    assert read(tagged((key, text))) == [{"name": "get_weather", "arguments": {key: value}}]


def test_a_schema_that_says_nothing_makes_texts() -> None:
    for parameters in (None, [], {"properties": []}, {"properties": {"a": 3}}, {"properties": {"a": {"type": [3]}}}):
        tools = [{"function": {"name": "f", "parameters": parameters}}]
        reply = tagged(("a", "5"), name="f")
        assert Calls(tools, "").read(reply)[0] == [{"name": "f", "arguments": {"a": "5"}}]


@pytest.mark.parametrize(
    "reply",
    [
        "It is sunny.", '{"name": "Ann", "parameters": {"age": 3}}', '{"name": "get_weather"}', "[1, 2]", "[]", "",
        f"{JSON} is what I would write.", '{"name": ["get_weather"], "arguments": {}}', "[print(a=1)]",
        "[get_weather('Paris')]", "get_weather(city=open('x'))", "[get_weather(**{})]",
    ],
)  # fmt: skip
def test_an_answer_is_no_call(reply: str) -> None:
    assert Calls(TOOLS, "").read(reply) == ([], "")


@pytest.mark.parametrize(
    "reply",
    [
        "<tool_call>{</tool_call>", '<tool_call>{"name": "get_weather", "argu', '[TOOL_CALLS]get_weather[ARGS]{"city"',
        '<tool_call>{"name": "launch", "arguments": {}}</tool_call>', tagged(name="launch"),
        '<tool_call>{"name": "get_weather", "arguments": {"city": "\\ud83d"}}</tool_call>',
        '<tool_call>{"name": "get_weather", "arguments": {"days": NaN}}</tool_call>',
        f'<tool_call>{{"name": "get_weather", "arguments": {{"at": {"[" * MAX_DEPTH + "]" * MAX_DEPTH}}}}}</tool_call>',
        f"<tool_call>{'[' * 900}{']' * 900}</tool_call>", f"<tool_call>{'[' * 100_000}",
        "<|python_start|>[get_weather(city={1, 2})]", "<|python_start|>[get_weather(scale=1e999)]",
    ],
)  # fmt: skip
def test_a_call_that_cannot_be_read_is_said_and_is_no_call(reply: str) -> None:
    """A text that UTF-8 cannot write, or a value that JSON has not, ended the program when the call was written."""
    assert Calls(TOOLS, "").read(reply) == (
        [],
        "the answer begins a tool call that cannot be read as one of a tool that was offered",
    )


def test_a_broken_call_beside_others_is_said() -> None:
    reply = f"<tool_call>{JSON}</tool_call><tool_call>{{</tool_call>"
    assert read(reply) == [PARIS]
    assert notice(reply).startswith("1 of 2 tool calls cannot be read")


@pytest.mark.parametrize(
    ("template", "reads", "leaves"),
    [
        ("<tool_call>", f"<tool_call>{JSON}", f"[TOOL_CALLS][{JSON}]"),
        ("[TOOL_CALLS]", f"[TOOL_CALLS][{JSON}]", f"<tool_call>{JSON}"),
        ("<tool_call>", f"<tool_call>{JSON}", f"It is {JSON}"),
        ("<|python_tag|>", LLAMA, f"<tool_call>{JSON}"),
        ("<tool_call> <function=", tagged(("city", "Paris")), f"<|tool_call|>[{JSON}]"),
        ("<tool_call> <arg_key>", "<tool_call>get_time</tool_call>", f"[TOOL_CALLS][{JSON}]"),
        ("<｜tool▁call▁begin｜>", DEEPSEEK.format("get_time<｜tool▁sep｜>{}"), f"[TOOL_CALLS][{JSON}]"),
    ],
)
def test_the_marks_of_a_template_say_which_forms_there_are(template: str, reads: str, leaves: str) -> None:
    """A model of ChatML that explains Mistral's marks makes no call."""
    assert read(reads, template)
    assert Calls(TOOLS, template).read(leaves) == ([], "")


def test_a_message_to_a_tool_is_a_call_where_the_template_has_channels() -> None:
    """Its name stands at the beginning of a line; the same text elsewhere, or of another model, is none."""
    call = 'to=functions.get_weather {"city": "Paris"}'
    assert Calls(TOOLS, "<|channel|>commentary").read(f"I look.\n\n{call}\n\nto=functions.get_time {{}}") == (
        [PARIS, TIME], "",
    )  # fmt: skip
    assert read(f"Write {call} then.", "<|channel|>commentary") == read(call) == read(call, "<tool_call>") == []
    for broken in ("to=functions.get_weather Paris", "to=functions.get_money {}", call[:-1]):
        assert read(broken, "<|channel|>commentary") == []
        assert "begins a tool call" in notice(broken, "<|channel|>commentary")


@pytest.mark.parametrize("template", ["", "<tool_call>", "[TOOL_CALLS]", "<|python_tag|>"])
def test_a_reply_that_is_nothing_but_json_is_a_call_if_it_names_an_offered_tool(template: str) -> None:
    """Small models forget the marks."""
    call = [{"name": "get_weather", "arguments": {"city": "Paris"}}]
    for reply in (JSON, f"```json\n{JSON}\n```"):
        assert Calls(TOOLS, template).read(reply) == (call, "")
    for reply in (JSON.replace("get_weather", "get_money"), f"{JSON} is it", '{"name": "get_weather"}'):
        assert Calls(TOOLS, template).read(reply)[0] == []


def test_marks_are_those_of_the_templates_forms() -> None:
    assert Calls(TOOLS, "<tool_call>").marks == {"<tool_call>", "</tool_call>"}
    assert {mark for form in FORMS for mark in (*form.marks, *form.around)} == Calls(TOOLS, "").marks


@pytest.mark.parametrize("around", ["<seed:tool_call>", "<minimax:tool_call>", "<｜tool▁calls▁begin｜>"])
def test_a_mark_around_calls_begins_them(around: str) -> None:
    """Seed-OSS's was told as text before the call."""
    assert around in Calls(TOOLS, "").openings


BOX = {"type": "object", "properties": {"w": {"type": "integer"}}}
OPEN: dict[str, Any] = {
    "properties": {
        "ref": {"$ref": "#/$defs/Box"}, "chain": {"$ref": "#/$defs/Chain"}, "text": {"$ref": "#/$defs/Name"},
        "lost": {"$ref": "#/$defs/Nobody"}, "far": {"$ref": "http://x/y"}, "loop": {"$ref": "#/$defs/Loop"},
        "any": {}, "said": {"description": "a size"}, "maybe": {"anyOf": [{"$ref": "#/$defs/Box"}, {"type": "null"}]},
        "nested": {"anyOf": [{"oneOf": [{"type": "integer"}]}]}, "number": {"enum": [1, 2]}, "one": {"const": True},
        "word": {"enum": ["1", "2"]}, "tilde": {"$ref": "#/$defs/a~1b~0c"}, "all": {"allOf": [{"type": "integer"}]},
    },
    "$defs": {
        "Box": BOX, "Chain": {"$ref": "#/$defs/Box"}, "Name": {"type": "string"}, "a/b~c": {"type": "integer"},
        "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"$ref": "#"}]},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        *((key, '{"w": 3}', {"w": 3}) for key in ("ref", "chain", "lost", "far", "loop", "any", "said", "maybe")),
        ("ref", "[3]", "[3]"), ("chain", "3", "3"), ("text", '{"w": 3}', '{"w": 3}'), ("text", "None", "None"),
        ("any", "3", 3), ("any", "[1]", [1]), ("any", "null", None), ("any", "True", True), ("any", "x", "x"),
        ("any", '"x"', '"x"'), ("maybe", "null", None), ("maybe", "x", "x"), ("nested", "5", 5), ("number", "2", 2),
        ("one", "true", True), ("word", "1", "1"), ("tilde", "4", 4), ("all", "6", 6), ("undeclared", "3", "3"),
    ],
)  # fmt: skip
def test_an_argument_whose_type_is_not_written_out_is_json_where_it_is_json(key: str, text: str, value: Any) -> None:
    """An object whose type was a reference came as a text."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": OPEN}}]
    assert Calls(tools, "").read(tagged((key, text), name="f"))[0] == [{"name": "f", "arguments": {key: value}}]


def test_whole_numbers_of_integers_are_integers_and_those_of_numbers_are_not() -> None:
    """5 == 5.0 in Python, and not in JSON."""
    (found,) = read(tagged(("days", "5.0"), ("scale", "5.0"), ("limit", "2.0")))
    assert json.dumps(found["arguments"]) == '{"days": 5, "scale": 5.0, "limit": 2}'


@pytest.mark.parametrize("value", ["x", "  x = 1", "x\n\n", "x\n", "\n\nx", "\n", "", " "])
def test_line_ends_and_spaces_of_a_value_are_its_own(value: str) -> None:
    """Only the line end between a value and each of its tags belongs to these; GLM writes none there."""
    glm = f"<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"
    assert read(tagged(("city", value))) == read(glm) == [{"name": "get_weather", "arguments": {"city": value}}]
    if not value.startswith("\n"):
        seed = f"<function=get_weather><parameter=city>{value}</parameter></function>"
        minimax = f'<invoke name="get_weather"><parameter name="city">{value}</parameter></invoke>'
        assert read(seed) == read(minimax) == read(glm)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ('get_weather\n{"city": "Paris"}', [PARIS]),
        ('\nget_weather \n{"city": "Paris"}\n', [PARIS]),
        ('get_weather\n{"city": "Paris"}\nget_time\n{}', [PARIS, TIME]),
        ('forecast\n{"city": "Paris"}', []), ('get_weather {"city": "Paris"}', []),
        ('get_weather\n{"city": "Paris"} is it', []), ('I ask get_weather\n{"city": "Paris"}', []),
        ('get_weather\n["Paris"]', []), ("get_weather\n{", []),
    ],
)  # fmt: skip
def test_a_name_on_a_line_before_json_is_a_call_where_templates_have_no_marks(reply: str, expected: list[Any]) -> None:
    """GLM-4-0414 writes calls so."""
    assert read(reply) == expected
    assert read(reply, "<tool_call>") == []


def bare(*pieces: str, template: str = "") -> list[bool]:
    calls = BareCalls(Calls(TOOLS, template))
    return [calls.push(piece) for piece in pieces]


ANSWER = Constraint("json-schema", '{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}')
MINIMAX = '<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n</invoke>'
WRITTEN = [  # (template, calls that its form allows, calls that it does not)
    ("<tool_call>",
     [f"<tool_call>\n{JSON}\n</tool_call>", f"<tool_call>{JSON}</tool_call>\n<tool_call>{TIME_JSON}</tool_call>"],
     [JSON, f"<tool_call>{JSON.replace('get_', 'set_')}</tool_call>", "<tool_call>x", "<tool_call>{}"]),
    ("<tool_call> <function= <parameter=",
     [tagged(("city", "a\n</p> \"é"), ("days", "3")), tagged(name="get_time"), f"<tool_call>{JSON}</tool_call>"],
     [tagged(name="put"), "<tool_call>\n<function=get_time>x"]),
    ("<function=",
     ['<function=get_weather>{"city": "Paris"}</function>', tagged(("city", "a")) + tagged(("city", "b"))],
     ["<function=put>"]),
    ("<seed:tool_call> <function=", [tagged(("city", "x")).replace("tool_call>", "seed:tool_call>")], []),
    ("<tool_call> <arg_key>",
     ["<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>a\n</arg_value>\n</tool_call>",
      "<tool_call>get_time</tool_call>"], ["<tool_call>put"]),
    ("[TOOL_CALLS]", [f"[TOOL_CALLS][{JSON}, {TIME_JSON}]", '[TOOL_CALLS]get_weather{"city": "Paris"}'],
     ["[TOOL_CALLS]x"]),
    ("[TOOL_CALLS] [ARGS]", ['[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]get_time[ARGS]{}'], []),
    ("<｜tool▁sep｜>", [DEEPSEEK.format("get_time<｜tool▁sep｜>{}").removesuffix("<｜tool▁calls▁end｜>"),
      DEEPSEEK.format("function<｜tool▁sep｜>get_time\n```json\n{}\n```").removesuffix("<｜tool▁calls▁end｜>")], []),
    ("<|tool_call|>", [f"<|tool_call|>[{JSON}]", f"<|tool_call|>[{JSON}]<|/tool_call|>"],
     [f"<|tool_call|>{JSON[:9]}x"]),
    ("<TOOLCALL>", [f"<TOOLCALL>[{JSON}]</TOOLCALL>"], []),
    ("<tool_calls>", [f"<tool_calls>\n[{JSON}]\n</tool_calls>"], []),
    ("<invoke name=", ["<minimax:tool_call>\n" + MINIMAX + "\n</minimax:tool_call>", f"<minimax:tool_call>\n{MINIMAX}"
      f"{MINIMAX}</minimax:tool_call>"], ['<minimax:tool_call><invoke name="put">', "<minimax:tool_call>x"]),
    ("<|python_tag|>", [LLAMA, f"{LLAMA}; {LLAMA}"], [LLAMA.replace("get_weather", "x")]),
]  # fmt: skip


EACH_FORM = pytest.mark.parametrize(("template", "allowed", "refused"), WRITTEN, ids=[row[0] for row in WRITTEN])


class Followed:
    """A constraint on replies with calls, for a tokenizer in which marks are tokens, special or not."""

    def __init__(
        self, calls: Calls, answer: Constraint | None = None, *, special: bool = False, thoughts: Thoughts = None
    ) -> None:
        inner = byte_tokenizer()
        marks = sorted(calls.marks | {*(thoughts or ()), *(each.mark for each in calls.written)} - {""})
        inner.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in marks])
        self.tokenizer = Tokenizer(inner)
        ids = self.tokenizer.added_tokens(special=False)
        named = {ids[mark]: mark for mark in marks} if special else {}
        end = self.tokenizer.eos_token_id or 0
        constraint = with_calls(answer, calls, named, thoughts)
        self.grammar = grammar_of(constraint, self.tokenizer, len(self.tokenizer), frozenset({end}))

    def __call__(self, text: str, *, whole: bool = True) -> bool:
        """Whether the text is one that may be written, whole or as a beginning."""
        state, tokens = self.grammar.state(), self.tokenizer.encode_piece(text)
        return state.advance(tokens) == len(tokens) and (not whole or state.is_complete)


@EACH_FORM
@pytest.mark.parametrize("special", [False, True])
def test_a_reply_beside_a_schema_is_a_call_or_follows_it(
    template: str, allowed: list[str], refused: list[str], special: bool
) -> None:
    """The schema held everywhere, and no call could be made. Where marks are special tokens, too."""
    follows = Followed(Calls(TOOLS, template), ANSWER, special=special)
    for text in allowed:
        assert read(text, template)
        assert follows(text), text
    assert follows('{"a": true}')
    for text in (*refused, '{"a": 1', "It is", '{"name": "set'):
        assert not follows(text, whole=False), text


@EACH_FORM
@pytest.mark.parametrize("special", [False, True])
def test_calls_that_are_due_are_all_that_can_be_written(
    template: str, allowed: list[str], refused: list[str], special: bool
) -> None:
    """Of the functions that are allowed, and one where more are not wanted."""
    due, time = Calls(TOOLS, template, ToolChoice(is_due=True)), frozenset({"get_time"})
    follows = Followed(due, special=special)
    one = Followed(replace(due, choice=ToolChoice(is_due=True, is_one=True)), special=special)
    named = Followed(replace(due, choice=ToolChoice(is_due=True, names=time)), ANSWER, special=special)
    for text in allowed:
        assert follows(text), text
        assert one(text) is (len(read(text, template)) == 1), text
        assert named(text) is all(call["name"] == "get_time" for call in read(text, template)), text
    for text in (*refused, '{"a": true}', "It is", "", "x" + allowed[0]):
        assert not any(follows(text) for follows in (follows, one, named)), text


@EACH_FORM
@pytest.mark.parametrize("special", [False, True])
def test_text_may_stand_before_calls_that_are_made_and_are_not_due(
    template: str, allowed: list[str], refused: list[str], special: bool
) -> None:
    """And instead of them; all else that a reader could take for a call cannot be written."""
    calls = Calls(TOOLS, template, ToolChoice(is_one=True))
    assert calls.follow
    follows, is_bare = Followed(calls, special=special), not calls.written[0].mark
    for text in ("", "It is a < b [1].\n", "\n\nSee: {}"):
        assert follows(text), text
    for text in allowed:
        is_one = len(read(text, template)) == 1
        assert follows(text) is is_one
        assert follows(f"I ask.\n{text}") is (is_one or is_bare), text
        assert calls.read(f"I ask.\n{text}")[0] == ([] if is_bare else read(text, template)[:1])
    for text in refused:
        assert text == JSON or not follows(text) or not calls.read(text)[0], text
    for text in (JSON, f"```json\n{JSON}\n```"):  # as a model writes it that forgets the marks
        assert follows(text)
    assert calls.read(JSON)[0] == [PARIS]
    assert follows('{"a": 1}')


STRICT = {
    "type": "object", "$defs": {"Unit": {"enum": ["C", "F"], "type": "string"}}, "additionalProperties": False,
    "properties": {"city": {"type": "string"}, "unit": {"$ref": "#/$defs/Unit"},
                   "days": {"type": "integer", "minimum": 1},
                   "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}},
    "required": ["city", "unit"],
}  # fmt: skip
WEATHER = {"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": STRICT}}
GOOD: list[dict[str, Any]] = [
    {"city": "Paris", "unit": "C"}, {"city": "a</x>\nb", "unit": "F", "days": 12, "note": None},
    {"city": "", "unit": "C", "note": "n"},
]  # fmt: skip
BAD: list[dict[str, Any]] = [
    {}, {"city": "Paris"}, {"city": "Paris", "unit": "K"}, {"city": "Paris", "unit": "C", "days": 0},
    {"city": "Paris", "unit": "C", "days": "x"}, {"city": "Paris", "unit": "C", "more": 1}, {"unit": "C"},
]  # fmt: skip


def in_tags(call: str, argument: str) -> Callable[[dict[str, Any]], str]:
    def written(arguments: dict[str, Any]) -> str:
        values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
        return call.format("".join(argument.format(key, value) for key, value in values.items()))

    return written


def in_json(call: str, key: str = "arguments") -> Callable[[dict[str, Any]], str]:
    return lambda arguments: call.format(json.dumps({"name": "get_weather", key: arguments}))


FORMS_OF_ARGUMENTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "<tool_call>": in_json("<tool_call>\n{}\n</tool_call>"),
    "[TOOL_CALLS]": in_json("[TOOL_CALLS][{}]"),
    "[TOOL_CALLS] [ARGS]": lambda arguments: f"[TOOL_CALLS]get_weather[ARGS]{json.dumps(arguments)}",
    "<|python_tag|>": in_json("{}", "parameters"),
    "<function=": in_tags("<function=get_weather>\n{}</function>", "<parameter={}>\n{}\n</parameter>\n"),
    "<arg_key>": in_tags(
        "<tool_call>get_weather\n{}</tool_call>", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
    ),
    "<invoke name=": in_tags(
        '<minimax:tool_call>\n<invoke name="get_weather">\n{}</invoke>\n</minimax:tool_call>',
        '<parameter name="{}">{}</parameter>\n',
    ),
}


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("template", FORMS_OF_ARGUMENTS)
@pytest.mark.parametrize("strict", [False, True])
def test_arguments_follow_their_schema(template: str, strict: bool, special: bool) -> None:
    """Of strict functions always, of others where calls are due."""
    weather = {**WEATHER, "function": {**WEATHER["function"], "strict": strict}}
    calls = Calls([weather, TOOLS[1]], template, ToolChoice() if strict else ToolChoice(is_due=True))
    follows, written = Followed(calls, special=special), FORMS_OF_ARGUMENTS[template]
    for arguments in GOOD:
        text = written(arguments)
        assert follows(text), text
        assert calls.read(text)[0] == [{"name": "get_weather", "arguments": arguments}]
    for arguments in BAD:
        assert not follows(written(arguments)), arguments
        assert not follows(in_json("{}")(arguments))
    assert follows(in_json("{}")(GOOD[0])) is strict


@pytest.mark.parametrize(
    ("template", "parameters", "message"),
    [
        ("<tool_call>", {"properties": {"a": {"type": "strnig"}}}, "at /properties/a: Invalid type"),
        ("<tool_call>", {"type": "string"}, 'the type is "string"'),
        ("<function=", {"properties": {"a": {"type": "string", "pattern": "b"}}}, "the argument 'a' cannot be"),
        ("<function=", {"properties": {"a": {"type": ["string", "integer"], "minimum": 3}}}, "'a' cannot be followed"),
        ("<function=", {"properties": {"a>": {"type": "string"}}}, "the argument 'a>' cannot be named"),
        ("<function=", {"properties": {"a": {}}, "patternProperties": {"^x": {}}}, "patternProperties cannot be"),
        ("<function=", {"properties": {"a": {}}, "required": ["b"]}, "b is required"),
    ],
)  # fmt: skip
def test_a_schema_that_calls_cannot_follow_is_refused(template: str, parameters: Any, message: str) -> None:
    weather = {"name": "get_weather", "strict": True, "parameters": parameters}
    calls = Calls([{"type": "function", "function": weather}], template)
    with pytest.raises(UsageError, match=f"the arguments of the function 'get_weather'.*{message}"):
        with_calls(None, calls, {})


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("opened", [False, True])
def test_thoughts_come_before_calls_that_are_due(opened: bool, special: bool) -> None:
    calls = Calls(TOOLS, "<tool_call>", ToolChoice(is_due=True))
    follows = Followed(calls, special=special, thoughts=("" if opened else "<think>", "</think>"))
    call, thoughts = f"<tool_call>\n{JSON}\n</tool_call>", "I may call <tool> {\n\n"
    begin = "" if opened else "<think>"
    assert follows(f"{begin}{thoughts}</think>\n\n{call}")
    assert follows(call) is not opened
    assert not follows(f"{begin}{thoughts}</think>\n\nIt is", whole=False)
    assert not follows(f"{begin}{thoughts}")


@pytest.mark.parametrize("template", ["", "<|tool_call>", "<|channel|>commentary", "<function_calls>"])
def test_tools_beside_a_schema_are_refused_where_the_form_of_calls_cannot_be_followed(template: str) -> None:
    with pytest.raises(UsageError, match="tools beside a JSON schema"):
        with_calls(ANSWER, Calls(TOOLS, template), {})
    with pytest.raises(UsageError, match="tool_choice and strict functions need a grammar of calls"):
        with_calls(None, Calls(TOOLS, template, ToolChoice(is_due=True)), {})
    assert not Calls(TOOLS, template, ToolChoice(is_one=True)).follow


@pytest.mark.parametrize(("template", "is_refused"), [("<function=", True), ("<tool_call>", False)])
def test_a_tool_that_no_call_can_name_is_refused_beside_a_schema(template: str, is_refused: bool) -> None:
    """The grammar allowed its call, and no reader took it. In JSON any name can be read."""
    calls = Calls([{"type": "function", "function": {"name": "ns/tool 1"}}], template)
    if not is_refused:
        assert "ns/tool 1" in with_calls(ANSWER, calls, {}).calls
        return
    with pytest.raises(UsageError, match="the tool 'ns/tool 1' has characters that calls of this model cannot name"):
        with_calls(ANSWER, calls, {})


STARTS = [
    JSON, f" {JSON}; {TIME_JSON}", f"[{JSON}, {TIME_JSON}]", f"```json\n{JSON}\n```", f"```{JSON}```", LLAMA,
    'get_weather(city="a)b")', "[get_weather(city='it\\'s'), get_time()]", "get_time()\nget_time()",
    'get_weather\n{"city": "}"}', '{"name": "get_weather", "arguments": {"city": "\\"}"}}',
]  # fmt: skip


@pytest.mark.parametrize("reply", STARTS)
def test_a_reply_that_becomes_calls_can_become_calls_at_every_letter(reply: str) -> None:
    assert read(reply)
    assert bare(*reply) == [True] * len(reply)
    assert bare(reply) == [True]


@pytest.mark.parametrize(
    ("pieces", "template"),
    [
        (["`", "read"], ""), (["``", "`python"], ""), (["[", "1] says"], ""), (["[", "link](x)"], ""), (["The"], ""),
        (["get", "s"], ""), (["get_weather", " is"], ""), (["get_weather", ", and"], ""), (["get_wea", "\n"], ""),
        (['{"a": 1', "}"], ""), (["{x", "}"], ""), (["{", ")"], ""), ([JSON, " is it"], ""), (["-", " a"], ""),
        (['{"a": "\\"', '"} is'], ""), (["get_weather", "(city)"], ""),
        ([JSON.replace("get_weather", "get_money")[:-1], "}"], ""),
        (["get_weather", "("], "<tool_call>"), (["get_weather\n", "{"], "<tool_call>"),
        (["]", ""], ""), (["[", "["], ""),
    ],
)  # fmt: skip
def test_a_reply_is_held_back_only_while_it_can_become_calls(pieces: list[str], template: str) -> None:
    """An answer that began with a backtick or a bracket came whole, at its end."""
    assert bare(*pieces, template=template)[-1] is False


class Counted:
    """Counts the characters that are walked through for values that are none: json counts lines up to them."""

    def __init__(self) -> None:
        self.num_walked = 0

    def raw_decode(self, text: str, start: int) -> tuple[Any, int]:
        try:
            return json.JSONDecoder().raw_decode(text, start)
        except ValueError:
            self.num_walked += start
            raise


UNITS = [
    "<tool_call>", "[TOOL_CALLS]", "[TOOL_CALLS]f[CALL_ID]", "<tool_call>{", '<tool_call>["","', "<|tool_call|>[",
    "<｜tool▁call▁begin｜>f<｜tool▁sep｜>", "[TOOL_CALLS]get_time[ARGS]", "<function=f>", "[", "```", "{", "; ",
]  # fmt: skip


@pytest.mark.parametrize(
    "cut", ["<function=get_weather>\n<parameter=city>\nPar", "<function=get_time>", "<function=get"]
)
def test_a_call_that_was_cut_between_tags_is_none(cut: str) -> None:
    """Half a value was taken for the whole one."""
    calls, said = Calls(TOOLS, "").read(f"<tool_call>\n{cut}")
    assert calls == []
    assert "begins a tool call" in said


@pytest.mark.parametrize("unit", UNITS)
def test_a_reply_full_of_marks_takes_no_quadratic_time(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A megabyte of marks took a minute."""
    length, counted = 100_000, Counted()
    monkeypatch.setattr(strict_json, "DECODER", counted)
    Calls(TOOLS, "").read(unit * (length // len(unit)))
    assert counted.num_walked <= len(FORMS) * MOST_BROKEN * length / 10  # of 5e8 and more
    for end in (" ", "\n", "a", "<"):
        Calls(TOOLS, "").read(unit + end * length)  # no pattern tries all of the ways to share them out


def test_calls_as_python_writes_them_are_bounded() -> None:
    for unit in ("-", "(", "[", "a.", "1+", "not ", "lambda:", "f(a=", "f'{", "a\n"):
        assert read(unit * (call_forms._LONGEST_EXPRESSION // len(unit))) == []
    assert read("[get_time()]" + " " * call_forms._LONGEST_EXPRESSION) == [TIME]
    assert read('[get_weather(city="' + "a" * call_forms._LONGEST_EXPRESSION + '")]') == []


def test_python_warns_of_nothing(recwarn: pytest.WarningsRecorder) -> None:
    assert read('[get_weather(city="\\d")]') == [{"name": "get_weather", "arguments": {"city": "\\d"}}]
    of_source = (SyntaxWarning, DeprecationWarning)  # garbage of other tests may have warnings of its own
    assert not [each for each in recwarn if issubclass(each.category, of_source)]


class Unbounded:
    """A library's matcher that allows five tokens, and forgets after a step back over token 9 that there were any."""

    def __init__(self) -> None:
        self._num_left, self._tokens = 5, list[int]()

    def try_consume_tokens(self, tokens: list[int]) -> int:
        taken = tokens[: self._num_left]
        self._num_left -= len(taken)
        self._tokens += taken
        return len(taken)

    def rollback(self, count: int) -> bool:
        gone = self._tokens[-count:]
        del self._tokens[-count:]
        self._num_left += 5 if 9 in gone else count
        return True

    def is_error(self) -> bool:
        return False


def test_a_step_back_over_a_mark_forgets_no_bound_before_it() -> None:
    """A model that wrote spaces before its call wrote them without end: the library forgot how many there were."""
    grammar: Any = SimpleNamespace(vocab_size=10, end_tokens=frozenset(), marks=frozenset({9}), matcher=Unbounded)
    state = GrammarState(grammar)
    assert state.advance([1, 1, 1, 1, 9]) == 5
    state.rewind(4)
    assert state.advance([1, 1]) == 1
