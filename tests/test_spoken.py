"""The text of a reply outside its tool calls, as it is told piece by piece."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from test_calls import JSON, PARIS, TIME, TIME_JSON, TOOLS, tagged
from triforce_cli.serve.spoken import Spoken
from triforce_cli.tools.calls import FORMS, Calls
from triforce_cli.tools.choice import ToolChoice
from triforce_cli.tools.growing import MOST_BEFORE, Growth

GLM = "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>"
MINIMAX = '<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n</invoke>'
HERMES = f"<tool_call>\n{JSON}\n</tool_call>"
# (marks in a template, calls as its model writes them)
MARKED = [
    ("<tool_call> <function= <parameter=", tagged(("city", "Paris"))),
    ("<tool_call> </tool_call> <arg_key> <arg_value>", GLM),
    ("<invoke name=", MINIMAX),
    ("<tool_call> </tool_call>", HERMES),
    ("<tool_call> </tool_call>", f"{HERMES}\n<tool_call>\n{TIME_JSON}\n</tool_call>"),
    ("[TOOL_CALLS]", f"[TOOL_CALLS] [{JSON}]"),
    ("[TOOL_CALLS] [ARGS]", '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}'),
    (
        "<｜tool▁call▁begin｜> <｜tool▁sep｜>",
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n{"city": "Paris"}',
    ),
    ("<｜tool▁call▁begin｜> <｜tool▁sep｜>", '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}'),
    ("<|tool_call|>", f"<|tool_call|>[{JSON}]<|/tool_call|>"),
    ("<TOOLCALL>", f"<TOOLCALL>[{JSON}]</TOOLCALL>"),
    ("<tool_calls>", f"<tool_calls>[{JSON}]</tool_calls>"),
    ("<|tool_call> <tool_call|>", '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>'),
    ("<start_function_call>", "<start_function_call>call:get_weather{city:<escape>Paris<escape>}<end_function_call>"),
    ("<|START_ACTION|>", f"<|START_ACTION|>[{JSON}]<|END_ACTION|>"),
    ("<|python_tag|>", f"<|python_tag|>{JSON}"),
    ("<|python_start|> <|python_end|>", '<|python_start|>[get_weather(city="Paris")]<|python_end|>'),
    ("<function_calls>", '<function_calls>\nget_weather(city="Paris")\n</function_calls>'),
    ("<|channel|>commentary", 'to=functions.get_weather {"city": "Paris"}'),
]
BARE = [
    ("<|python_tag|>", JSON),
    ("<|python_tag|>", f"{JSON}; {TIME_JSON}"),
    ("<|python_tag|>", f"```json\n{JSON}\n```"),
    ("<|python_tag|>", f"\n\n[{JSON}]"),
    ("<|python_start|> <|python_end|>", '[get_weather(city="Paris")]'),
    ("<function_calls>", 'get_weather(city="Paris")\nget_time()'),
    ("<function_calls>", 'get_weather (city="Paris")'),
    ("", 'get_weather\n{"city": "Paris"}'),
]
MARKS = sorted({mark for form in FORMS for mark in form.marks})
LETTERS = st.sampled_from(("a", "B", " ", "\n", "<", "[", "|", "{", "t", "ö", "😀", ".", "(", "`", '"'))
TEXTS = st.lists(LETTERS | st.sampled_from(("a < b", "I ask.\n", "the ", "<tool", "[1]", "<|")), max_size=8).map(
    "".join
)
CUTS = st.lists(st.integers(1, 9), max_size=40)


def test_there_is_a_reply_in_every_form() -> None:
    """One without marks is of a template without any."""
    templates = [template for template, _ in (*MARKED, *BARE)]
    told_by = {form: any(form.is_asked_for(each) if form.marks else not each for each in templates) for form in FORMS}
    assert all(told_by.values()), told_by


def split(text: str, cuts: Sequence[int]) -> list[str]:
    """The text in pieces of these lengths; the last is the rest."""
    pieces = []
    for cut in cuts:
        pieces.append(text[:cut])
        text = text[cut:]
    return [*pieces, text]


def told(template: str, pieces: Sequence[str]) -> tuple[list[str], str, list[dict[str, object]]]:
    """(text that each piece lets out, that the end does, the calls)."""
    shown, rest, calls = grown(template, pieces)
    return shown, rest, [{"name": name, "arguments": json.loads(arguments)} for name, arguments in calls]


def grown(template: str, pieces: Sequence[str]) -> tuple[list[str], str, list[tuple[str, str]]]:
    """The same, with the arguments' texts."""
    spoken, calls = Spoken(Calls(TOOLS, template)), list[tuple[str, str]]()

    def add(growth: Sequence[Growth]) -> None:
        for each in growth:
            assert each.number in (len(calls) - 1, len(calls))
            begun = calls.pop() if each.number < len(calls) else (each.name, "")
            assert each.name == begun[0]
            calls.append((each.name, begun[1] + each.arguments))

    shown = []
    for piece in pieces:
        text, growth = spoken.push(piece)
        shown.append(text)
        add(growth)
    rest, growth = spoken.end()
    add(growth)
    return shown, rest, calls


@pytest.mark.parametrize("without_marks", [False, True])
@pytest.mark.parametrize(("template", "calls"), MARKED)
@given(before=TEXTS, after=st.sampled_from(("", "\n", " Done.", "</s>")), cuts=CUTS)
@example(before="I ask.\n", after="", cuts=[1] * 80)
@example(before="a < b", after="", cuts=[])
@example(before="", after="", cuts=[])
def test_the_text_before_calls_is_all_that_is_told(
    template: str, calls: str, without_marks: bool, before: str, after: str, cuts: list[int]
) -> None:
    """Whatever comes before them, but for marks, and in whatever pieces. without_marks: a template that has none, whose
    model may write any form."""
    reply = before + calls + after
    if any(mark in before + calls[:1] for mark in MARKS) or Calls(TOOLS, template).read(reply)[0][:1] != [PARIS]:
        return  # another reply than was meant
    shown, rest, found = told("" if without_marks else template, split(reply, cuts))
    if without_marks and not found:
        assert "".join(shown) + rest == reply
        return
    assert found[0] == PARIS
    assert "".join(shown) + rest == before


@pytest.mark.parametrize("template", ["", None])
@pytest.mark.parametrize(("own", "calls"), BARE)
@given(cuts=CUTS)
@example(cuts=[1] * 200)
def test_nothing_of_a_reply_that_is_calls_alone_is_told(
    own: str, calls: str, template: str | None, cuts: list[int]
) -> None:
    shown, rest, found = told(own if template is None else template, split(calls, cuts))
    assert ("".join(shown) + rest, found[0]) == ("", PARIS)


@pytest.mark.parametrize(
    "calls", ['[get_weather(city="{}")]', '{{"name": "get_weather", "parameters": {{"city": "{}"}}}}']
)
@pytest.mark.parametrize("mark", ["<tool_call>", "[TOOL_CALLS]", "<function_calls>"])
def test_a_mark_in_an_argument_of_a_reply_without_marks_is_no_text(calls: str, mark: str) -> None:
    reply = calls.format(f"a {mark} b")
    shown, rest, found = told("", list(reply))
    assert found[0]["arguments"] == {"city": f"a {mark} b"}
    assert "".join(shown) + rest == ""


FRAGMENTS = (*MARKS, "a", " ", "\n", "<", "{", "}", "[", "]", "get_time", "()", "```json", '"', "name", ":", JSON[:20])


@pytest.mark.parametrize("template", ["", *sorted({template for template, _ in MARKED})])
@given(reply=st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join), cuts=CUTS)
def test_a_reply_without_calls_is_told_whole(template: str, reply: str, cuts: list[int]) -> None:
    calls = Calls(TOOLS, template).read(reply)[0]
    shown, rest, found = told(template, split(reply, cuts))
    assert found == calls
    if not calls:
        assert "".join(shown) + rest == reply


@given(reply=TEXTS, cuts=CUTS)
def test_without_tools_every_piece_is_told_as_it_comes(reply: str, cuts: list[int]) -> None:
    spoken = Spoken(None)
    pieces = split(reply, cuts)
    assert [spoken.push(piece) for piece in pieces] == [(piece, []) for piece in pieces]
    assert spoken.end() == ("", [])


@pytest.mark.parametrize("template", sorted({template for template, _ in MARKED}))
@given(reply=st.lists(st.sampled_from(FRAGMENTS) | LETTERS, max_size=8).map("".join), cuts=CUTS)
def test_no_more_is_held_back_than_may_become_a_mark(template: str, reply: str, cuts: list[int]) -> None:
    """In a reply that is not calls alone."""
    reply = f"É {reply}"
    openings = Calls(TOOLS, template).openings
    spoken, come, shown = Spoken(Calls(TOOLS, template)), "", ""
    for piece in split(reply, cuts):
        come += piece
        shown += spoken.push(piece)[0]
        ends = (
            at
            for at in range(len(come) + 1)
            if any(come.startswith(mark, at) or mark.startswith(come[at:]) for mark in openings)
        )
        assert shown == come[: next(ends)]


@pytest.mark.parametrize("template", ["<tool_call>", "<|python_tag|>", ""])
def test_an_ordinary_sentence_is_told_at_once(template: str) -> None:
    words = ["Well,", " it", " is", " a < b", " and", " a <", " b.", "\n", "It", " rains"]
    told_at_once = ["Well,", " it", " is", " a < b", " and", " a ", "< b.", "\n", "It", " rains"]
    assert told(template, words)[0] == told_at_once


@pytest.mark.parametrize("template", ["<tool_call>", "<|python_tag|>", ""])
def test_the_first_word_waits_for_the_next_where_it_may_be_the_name_of_a_call(template: str) -> None:
    has_names = template != "<tool_call>"  # calls of this form begin with the mark
    told_of_it = ["", "get it", ", and"] if has_names else ["get", " it", ", and"]
    assert told(template, ["get", " it", ", and"])[0] == told_of_it
    assert told(template, ["It", " rains", ", and"])[0] == ["It", " rains", ", and"]
    assert told(template, ["\n", "É", "té"])[0] == ["", "\nÉ", "té"]
    assert told(template, ["{", "}"]) == (["", "{}"], "", [])


def test_calls_in_the_order_in_which_they_come() -> None:
    assert told("<tool_call>", list(MARKED[4][1])) == ([""] * len(MARKED[4][1]), "", [PARIS, TIME])


OTHERS = ("python_", "<function", "<invoke", "<arg_", "<tool_call|>", "<start_f")  # forms in which no call grows
IN_JSON = [row for row in MARKED if not any(mark in row[0] for mark in OTHERS)]
ARGUMENTS = '{"city": "P\\"}]\\\\", "at": {"a": [1, {"b": "</tool_call>"}]}, "days": 1e3}'
GROWING = [
    *IN_JSON,
    ("<tool_call>", f"<tool_call>{TIME_JSON}{JSON}"),
    ("<tool_call>",
     '<tool_call>```json\n{"name": "get_weather", "arguments": ' + ARGUMENTS + "}\n```</tool_call> <tool_call>" + JSON),
    ("[TOOL_CALLS]", f"[TOOL_CALLS] [{TIME_JSON}, {JSON.replace('Paris', 'P' * MOST_BEFORE)}, {JSON}]"),
    ("[TOOL_CALLS]", f'[TOOL_CALLS] [{JSON[:-1]}, "id": "a1"}}, {TIME_JSON}, {JSON}]'),
    ("[TOOL_CALLS] [ARGS]", f"[TOOL_CALLS]get_weather[CALL_ID]x1[ARGS]{ARGUMENTS}[TOOL_CALLS]get_time[ARGS]{{}}"),
    ("<｜tool▁call▁begin｜> <｜tool▁sep｜>",
     f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{ARGUMENTS}\n```"
     "<｜tool▁call▁end｜>"),
    ("<|START_ACTION|>",
     f'<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {ARGUMENTS}}}\n]'),
    ("<tool_call>", f'<tool_call>{JSON}</tool_call><tool_call>{{"arguments": {{}}, "name": "get_time"}}</tool_call>'),
    ("<tool_call>", f'<tool_call>{JSON}</tool_call><tool_call>{{"name": "put", "arguments": {{}}}}{HERMES}'),
]  # fmt: skip


@pytest.mark.parametrize(("template", "calls"), GROWING)
@pytest.mark.parametrize("without_marks", [False, True])
def test_arguments_in_json_grow_as_they_are_written(template: str, calls: str, without_marks: bool) -> None:
    """A letter at a time, in the model's own words."""
    reader, written = Calls(TOOLS, "" if without_marks else template), "I ask.\n" + calls
    if not reader.read(written)[0]:
        return  # a form that is read only where the template asks for it
    spoken = Spoken(reader)
    told = [spoken.push(letter)[1] for letter in written]
    first = min(at for text in ('{"city', "{}") if (at := written.find(text)) >= 0)
    end = written.index("}", first)
    assert not any(told[:first])
    assert [each.arguments for growth in told[first:end] for each in growth] == [*written[first:end]]


@pytest.mark.parametrize(("template", "calls"), GROWING)
@pytest.mark.parametrize("without_marks", [False, True])
@given(before=st.sampled_from(("", "I ask.\n", "a < b")), cuts=CUTS, end=st.integers(0, 400))
def test_growing_calls_are_those_of_the_whole_reply(
    template: str, calls: str, without_marks: bool, before: str, cuts: list[int], end: int
) -> None:
    """Whatever the pieces; also of a reply that was cut, whose last call may be half."""
    template = "" if without_marks else template
    reply = (before + calls)[:end]
    shown, rest, found = grown(template, split(reply, cuts))
    shown_at_once, rest_at_once, found_at_once = grown(template, [reply])
    assert ("".join(shown) + rest, found) == ("".join(shown_at_once) + rest_at_once, found_at_once)
    read = Calls(TOOLS, template).read(reply)[0]
    assert [{"name": name, "arguments": json.loads(arguments)} for name, arguments in found[: len(read)]] == read
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in found[:-1])
    assert all(arguments in reply for _, arguments in found[len(read) :])
    if reply == before + calls:
        assert len(found) == len(read)


@given(st.lists(st.sampled_from((*FRAGMENTS, JSON, TIME_JSON, "[ARGS]{", "}", '"arguments": {')), max_size=12), CUTS)
@pytest.mark.parametrize("template", ["", "<tool_call>", "[TOOL_CALLS] [ARGS]"])
def test_any_reply_is_told_the_same_in_any_pieces(template: str, parts: list[str], cuts: list[int]) -> None:
    reply = "<tool_call>" * (template == "<tool_call>") + "".join(parts)
    shown, rest, found = grown(template, split(reply, cuts))
    shown_at_once, rest_at_once, found_at_once = grown(template, [reply])
    assert ("".join(shown) + rest, found) == ("".join(shown_at_once) + rest_at_once, found_at_once)


def test_a_call_with_much_before_its_arguments_comes_whole() -> None:
    gap = " " * MOST_BEFORE
    for pieces in ([f"<tool_call>{gap}{JSON}"], list(f"<tool_call>{gap}{JSON}")):
        spoken = Spoken(Calls(TOOLS, "<tool_call>"))
        assert [spoken.push(piece) for piece in pieces] == [("", [])] * len(pieces)
        assert spoken.end() == ("", [Growth(0, "get_weather", '{"city": "Paris"}')])


def test_one_call_alone_grows_where_no_more_are_wanted() -> None:
    spoken = Spoken(Calls(TOOLS, "<tool_call>", ToolChoice(is_one=True)))
    told = [growth for letter in f"{HERMES}{HERMES}" for growth in spoken.push(letter)[1]]
    assert "".join(growth.arguments for growth in told) == '{"city": "Paris"}'
    assert spoken.end() == ("", [])
