"""An answer's steps become parts: text, thoughts, scores, citations, and what was held back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from kit.models import byte_tokenizer
from offload.decode.logprobs import TokenScore
from offload.decode.sampling import SamplingParams, ThoughtBudget
from offload.engine.passages import Passage
from offload.engine.step import Step
from offload.text.tokenizer import Tokenizer
from triforce_cli.answering.answer import Answer, Part
from triforce_cli.answering.request import Prompt, Wanted
from triforce_cli.answering.several import Answers
from triforce_cli.answering.thoughts import Marks
from triforce_cli.documents import Document
from triforce_cli.ground.deadline import Deadline
from triforce_cli.tools.calls import Calls

MARKS = Marks("<think>", "</think>")
WANTED = Wanted(max_tokens=9, sampling=SamplingParams())
REPLY = Prompt([1, 2], is_chat=True, marks=MARKS)


class Letters:
    """A tokenizer whose tokens are characters."""

    def decode(self, tokens: Any) -> str:
        return "".join(map(chr, tokens))


def answer_to(prompt: Prompt, wanted: Wanted = WANTED) -> Answer:
    tokenizer: Any = Letters()
    return Answer(prompt, wanted, tokenizer)


def step(text: str, finish: Any = None, **more: Any) -> Step:
    return Step(text, list(map(ord, text)), finish, **more)


def told(part: Part | None) -> tuple[str, str]:
    assert part is not None
    return part.text, part.thoughts


def test_a_step_has_the_end_of_thoughts_and_the_beginning_of_the_text() -> None:
    answer = answer_to(REPLY)
    assert [told(answer.add(step(text))) for text in (" <thi", "nk>Well, ", "so</think>\n\nYes", ".")] == [
        ("", ""),
        ("", "Well,"),
        ("Yes", " so"),
        (".", ""),
    ]
    assert answer.text == "Yes."
    assert answer.written == " <think>Well, so</think>\n\nYes."
    assert answer.tokens == list(map(ord, answer.written))
    assert answer.num_tokens == len(answer.tokens)


def test_what_is_held_back_comes_with_the_last_step_or_where_the_answer_is_broken_off() -> None:
    """`ask` lost it where its time was over."""
    for finish, text in (("stop", " <thi"), ("length", "<")):
        answer = answer_to(REPLY)
        assert told(answer.add(step(text, finish))) == (text.strip(), "")
        assert answer.finish == finish
        assert answer.end("timeout") is None
        assert (answer.finish, answer.is_cut) == (finish, False)
    answer = answer_to(REPLY)
    answer.add(step("<think>Well</thi"))
    assert (answer.finish, answer.is_cut) == ("", False)
    assert told(answer.end("timeout")) == ("", "</thi")
    assert (answer.finish, answer.is_cut) == ("timeout", True)
    assert answer.end("interrupted") is None
    assert answer.finish == "timeout"


def test_an_answer_that_has_not_begun_has_nothing_held_back() -> None:
    assert answer_to(Prompt([1], is_chat=True, begin="Under")).end("interrupted") is None
    answer = answer_to(Prompt([1], is_chat=True, begin="Under"))
    assert told(answer.add(step(" it", "stop"))) == ("Under it", "")


def test_a_text_that_is_continued_keeps_its_white_space_and_has_no_thoughts() -> None:
    answer = answer_to(Prompt([1]))
    assert told(answer.add(step("\n <think>a</think>", "stop"))) == ("\n <think>a</think>", "")


def test_json_has_what_is_wanted_and_no_more() -> None:
    def found(prompt: Prompt, wanted: Wanted) -> dict[str, Any]:
        answer, notes = answer_to(prompt, wanted), list[str]()
        score = TokenScore(97, -0.5, ((98, -1.0),))
        answer.add(step("a", "stop", scores=(score,) if wanted.logprobs else (), passages=(Passage(0, 2, (0.25,)),)))
        return answer.as_dict(note=notes.append)

    plain = {"text": "a", "tokens": [97], "finish_reason": "stop"}
    assert found(REPLY, WANTED) == plain
    wanted = Wanted(max_tokens=9, sampling=SamplingParams(), logprobs=1, cites=True)
    read = list(map(ord, "Nobody came."))
    prompt = Prompt(read, (Document("d", "Nobody came."),), calls=Calls([], "<tool_call>"))
    scored = [{"token": 97, "text": "a", "logprob": -0.5, "top": [{"token": 98, "text": "b", "logprob": -1.0}]}]
    more = found(prompt, wanted)
    assert {name: more[name] for name in plain} == plain
    assert (more["logprobs"], more["tool_calls"], list(more)) == (
        scored, [], ["text", "tokens", "logprobs", "finish_reason", "tool_calls", "citations"],
    )  # fmt: skip


def test_a_score_has_the_bytes_of_a_part_of_a_character() -> None:
    """Its text is U+FFFD, of which its bytes cannot be told."""
    tokenizer = Tokenizer(byte_tokenizer())
    smile, replacement = (list(text.encode()) for text in ("😀", "\ufffd"))
    answer = Answer(REPLY, Wanted(max_tokens=9, sampling=SamplingParams(), logprobs=1), tokenizer)
    tokens = [*tokenizer.encode_piece("a😀\ufffd")]
    scores = tuple(TokenScore(token, -0.5, ((token, -0.5),)) for token in tokens)
    found = answer.add(Step("a😀\ufffd", tokens, "stop", scores=scores)).scores
    assert found[0] == {"token": tokens[0], "text": "a", "logprob": -0.5, "top": [
        {"token": tokens[0], "text": "a", "logprob": -0.5}]}  # fmt: skip
    assert [each["bytes"] for each in found[1:]] == [[byte] for byte in (*smile, *replacement)]
    assert [each["top"][0]["bytes"] for each in found[1:]] == [[byte] for byte in (*smile, *replacement)]


def test_stop_strings_count_in_the_answer_unless_they_name_a_mark_of_thoughts() -> None:
    wanted = Wanted(max_tokens=9, sampling=SamplingParams(), stops=("END", "</think>"))
    request = replace(REPLY, stops=("User:",)).request(wanted, max_tokens=9)
    assert (request.stop, request.answer_stop) == (("</think>", "User:"), ("END",))
    assert request.answer is not None
    plain = Prompt([1], stops=("User:",)).request(wanted, max_tokens=9)
    assert (plain.stop, plain.answer_stop, plain.answer) == (("END", "</think>", "User:"), (), None)


def test_the_stop_string_that_ended_an_answer_is_one_that_was_wanted() -> None:
    wanted = Wanted(max_tokens=9, sampling=SamplingParams(), stops=("END",))
    for stop, named in (("END", "END"), ("User:", ""), ("", "")):
        answer = answer_to(replace(REPLY, stops=("User:",)), wanted)
        assert answer.stop == ""
        answer.add(step("a", "stop", stop=stop))
        assert answer.stop == named


def test_an_answers_own_words_rank_its_citations() -> None:
    text = "Nobody came here. The spare keys are under the mat."
    prompt = Prompt(list(map(ord, text)), (Document("d", text),))
    answer = answer_to(prompt, Wanted(max_tokens=9, sampling=SamplingParams(), cites=True))
    answer.add(step("Under "))
    answer.add(step("the mat", "stop", passages=(Passage(0, 17, (0.5,)), Passage(17, len(text), (0.25,)))))
    assert [each.share for each in answer.citations or ()] == [0.25, 0.5]


@pytest.mark.parametrize(
    ("prompt", "budget"),
    [
        (REPLY, ThoughtBudget(5, MARKS.closes(may_call=False), MARKS.open)),
        (Prompt([1], is_chat=True), None),
        (Prompt([1]), None),
    ],
)
def test_a_request_has_what_is_wanted_and_what_the_template_says(prompt: Prompt, budget: ThoughtBudget | None) -> None:
    wanted = Wanted(max_tokens=9, sampling=SamplingParams(top_k=4), stops=("a",), cites=True, thought_tokens=5)
    request = prompt.request(wanted, max_tokens=7, reuse=True)
    assert (request.prompt, request.max_tokens, request.reuse) == (list(prompt.tokens), 7, True)
    assert (request.sampling.top_k, request.sampling.thoughts) == (4, budget)
    assert request.passages > 0
    ends = Prompt([1], end_tokens=frozenset({3}), stops=("b",), named={5: "<x>"}).request(wanted, max_tokens=99)
    assert (ends.stop, ends.end_tokens, ends.named, ends.max_tokens) == (("a", "b"), frozenset({3}), {5: "<x>"}, 9)


@pytest.mark.parametrize(
    ("begin", "text", "thoughts"),
    [
        ("", "It is", ""),
        ("So: ", "It is", ""),
        ("<think>hm</think>\n\nSo: ", "It is", ""),
        ("<think>hm", "is it", " so"),
    ],
)
def test_an_api_does_not_write_the_beginning_of_a_reply_that_the_client_has(
    begin: str, text: str, thoughts: str
) -> None:
    prompt = Prompt([1], is_chat=True, begin=begin, marks=MARKS).without_begin()
    assert told(answer_to(prompt).add(step(f"{thoughts}</think>{text}" if thoughts else text, "stop"))) == (
        text,
        thoughts,
    )


def test_a_prompt_of_several_is_read_until_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault lived: without the deadline it was read to its end, and its answer was cut as late."""
    heard, seconds = list[int](), count()

    class Reading(list[object]):
        """In place of `Sequences`: a prefill of ten steps."""

        has_room = True

        def __init__(self, engine: object) -> None: ...

        def join(self, key: int, request: object, *, on_progress: Callable[[int], None]) -> None:
            for step in range(10):
                on_progress(step)

        def leave(self, key: int, *, on_end: object) -> str:
            return "its statistics"

        def close(self) -> None: ...

    monkeypatch.setattr("offload.engine.sequences.Sequences", Reading)
    engine: Any = SimpleNamespace(plan=SimpleNamespace(request=SimpleNamespace(capacity=99)))
    deadline = Deadline(3.0, lambda: float(next(seconds)))
    late = Answer(REPLY, WANTED, Tokenizer(byte_tokenizer()), deadline=deadline)
    with Answers[int](engine) as answers:
        assert list(answers.each([(7, late)], on_progress=heard.append)) == [(7, late, "its statistics")]  # type: ignore[arg-type]
    assert (heard, late.finish) == ([0, 1, 2], "timeout")
