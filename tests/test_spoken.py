"""The text of a reply outside its tool calls, as it is told piece by piece."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from test_calls import JSON, PARIS, TIME, TIME_JSON, TOOLS, tagged
from triforce_cli.serve.spoken import Spoken
from triforce_cli.tools.calls import FORMS, Calls

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
    """(what each piece lets out, what the end does, the calls)."""
    spoken = Spoken(Calls(TOOLS, template))
    shown = [spoken.push(piece) for piece in pieces]
    return shown, *spoken.end()


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
    assert [spoken.push(piece) for piece in pieces] == pieces
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
        shown += spoken.push(piece)
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
