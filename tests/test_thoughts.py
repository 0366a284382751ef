"""Thoughts at the beginning of a reply: told apart from what is said, limited, or not written at all."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kit.sampling_reference import Letters
from offload.decode.distribution import distribution_of
from offload.decode.sampling import SamplingParams, ThoughtBudget
from offload.errors import UsageError
from offload.text.characters import Characters
from offload.text.reply_text import ReplyText
from triforce_cli.answering.thoughts import Marks, Piece, Splitter, known, marks_of, switched_off
from triforce_cli.options.answering import ChatFlags
from triforce_cli.prompts.conversation import Conversation, Document
from triforce_cli.prompts.formats import ChatFormat

MARKS = Marks("<think>", "</think>")
QWEN = (  # the shape of Qwen3's
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1].lstrip('\n') }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
R1 = (  # the shape of DeepSeek-R1's
    "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]<think>\n{% endif %}"
)

LATE = (  # a model that opens its thoughts itself
    "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def told(texts: list[str], *, begun: bool = False, marks: Marks | None = MARKS) -> tuple[str, str]:
    """(thoughts, what is said)."""
    splitter = Splitter(marks, begun=begun)
    parts = [part for text in texts for part in splitter.push(text)] + splitter.flush()
    thoughts, said = ("".join(part.text for part in parts if part.is_thought is thought) for thought in (True, False))
    return thoughts, said


CASES = [
    ("<think>\nhm\n</think>\n\nYes.", False, ("hm", "Yes.")),
    ("\n<think>a <b> </thin c</think>d", False, ("a <b> </thin c", "d")),
    ("Yes, <think>no</think>.", False, ("", "Yes, <think>no</think>.")),
    ("hm\n</think>\n\nYes.\n", True, ("hm", "Yes.\n")),
    ("never ends ", True, ("never ends ", "")),
    ("<think>\n\n</think>\n\nYes.", False, ("", "Yes.")),
    ("<thin", False, ("", "<thin")),
    ("  x", False, ("", "x")),
]


@pytest.mark.parametrize(("text", "begun", "expected"), CASES)
def test_thoughts_are_told_apart_wherever_the_text_is_cut(text: str, begun: bool, expected: tuple[str, str]) -> None:
    assert told([text], begun=begun) == expected
    assert told(list(text), begun=begun) == expected
    for at in range(1, len(text)):
        assert told([text[:at], text[at:]], begun=begun) == expected


@given(st.text("<>/think ab\n", max_size=30), st.lists(st.integers(1, 5), max_size=30), st.booleans())
def test_pieces_do_not_matter_and_nothing_but_marks_and_space_is_lost(text: str, cuts: list[int], begun: bool) -> None:
    pieces, left = list[str](), text
    for cut in cuts:
        pieces.append(left[:cut])
        left = left[cut:]
    thoughts, said = told([*pieces, left], begun=begun)
    assert (thoughts, said) == told([text], begun=begun)
    lost = len("".join(text.split())) - len("".join((thoughts + said).split()))
    assert lost in (0, len(MARKS.close), len(MARKS.open), len(MARKS.open) + len(MARKS.close))


def test_without_marks_all_is_said() -> None:
    assert told(["<think>x</think>y"], marks=None) == ("", "<think>x</think>y")


def test_marks_and_switches_are_the_templates_own() -> None:
    assert marks_of(QWEN) == MARKS
    assert marks_of("{{ messages }}") is None
    for template, off in ((QWEN, {"enable_thinking": False}), (R1, {}), (LATE, {})):
        assert switched_off(format_of(template)._written) == off


class Piped:
    """A tokenizer of characters with a template, as far as ChatFormat needs one."""

    def __init__(self, template: str) -> None:
        import jinja2

        self.chat_template, self._jinja = template, jinja2.Environment()
        self.named_templates = ()

    def start_tokens(self) -> list[int]:
        return []

    def added_tokens(self, *, special: bool) -> dict[str, int]:
        return {}

    def check(self, count: int) -> None: ...

    def encode_piece(self, text: str, *, first: bool = False, until: str = "") -> list[int]:
        return list(map(ord, text))

    def decode(self, tokens: Any) -> str:
        return "".join(map(chr, tokens))

    def render_chat(self, messages: Any, template: str, **variables: object) -> str:
        rendered = self._jinja.from_string(template).render(messages=messages, add_generation_prompt=True, **variables)
        return str(rendered)


def format_of(template: str, **settings: Any) -> ChatFormat:
    tokenizer: Any = Piped(template)
    return ChatFormat(tokenizer, **settings)


def prompt(chat_format: ChatFormat, begin: str = "") -> str:
    return chat_format.tokenizer.decode(chat_format.prompt(Conversation().asked("Hi"), begin).tokens)


def test_a_template_that_opens_thoughts_has_them_begun() -> None:
    found = format_of(R1)
    opening = found.prompt(Conversation().asked("Hi"))
    assert [part.is_thought for part in opening.splitter().push("hm")] == [True]
    found = format_of(QWEN)
    opening = found.prompt(Conversation().asked("Hi"))
    assert [part.is_thought for part in opening.splitter().push("Yes, I do")] == [False]
    assert [part.is_thought for part in opening.splitter().push("<think>I do")] == [True]


def test_off_is_the_templates_switch_or_a_reply_that_begins_behind_its_thoughts() -> None:
    assert prompt(format_of(QWEN, thinks=False)).endswith("assistant\n<think>\n\n</think>\n\n")
    assert prompt(format_of(R1, thinks=False)).endswith("[assistant]<think>\n\n</think>\n\n")
    assert prompt(format_of(LATE, thinks=False)).endswith("[assistant]<think>\n\n</think>\n\n")
    for template in (QWEN, R1, LATE):
        found = format_of(template, thinks=False)
        opening = found.prompt(Conversation().asked("Hi"))
        assert told_by(opening.splitter(), "Yes.") == [("Yes.", False)]


def told_by(splitter: Splitter, text: str) -> list[tuple[str, bool]]:
    return [(part.text, part.is_thought) for part in splitter.push(text) + splitter.flush()]


def test_thoughts_of_earlier_replies_are_fed_back_where_the_template_does_it_alone() -> None:
    said = "<think>\nhm, secret\n</think>\n\nYes."
    conversation = Conversation().asked("Hi").answered(said, tuple(map(ord, said)), complete=True).asked("And?")
    for template in (QWEN, R1):
        text = format_of(template).tokenizer.decode(format_of(template).prompt(conversation).tokens)
        assert "secret" not in text
        assert "Yes." in text
    keeps = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]{# </think> #}"
    assert "secret" in format_of(keeps).tokenizer.decode(format_of(keeps).prompt(conversation).tokens)


def test_the_next_prompt_begins_as_the_one_before_up_to_the_thoughts_that_are_left_out() -> None:
    """So the rows of all before them are used again."""
    said = "<think>\nhm, secret\n</think>\n\nYes."
    for template, opened in ((QWEN, ""), (R1, "<think>\n"), (LATE, "")):
        chat_format = format_of(template)
        conversation = Conversation().asked("Hi")
        first = chat_format.prompt(conversation).tokens
        answered = conversation.answered(said, tuple(map(ord, said)), complete=True)
        second = chat_format.prompt(answered.asked("And?")).tokens
        kept = len(first) - len(opened)
        assert second[:kept] == first[:kept]
        assert chat_format.tokenizer.decode(second[kept:]).lstrip().startswith("Yes.")


def test_variables_reach_the_template() -> None:
    found = format_of(QWEN, variables={"enable_thinking": False})
    assert prompt(found).endswith("<think>\n\n</think>\n\n")


def test_a_budget_ends_thoughts_once_and_is_a_function_of_the_text() -> None:
    letters: Any = Letters(6)  # "f" closes
    sampling = SamplingParams(temperature=0.0, thoughts=ThoughtBudget(2, "efe"))
    sampling = replace(sampling, thoughts=ThoughtBudget(2, "efe"))
    found = distribution_of(sampling, letters, num_prompt=1, vocab_size=6, end_tokens=())
    rows = torch.tensor([[9.0, 0, 0, 0, 0, 0]] * 7)

    def greedy(tokens: list[int], count: int) -> list[int]:
        return found.probs(rows[:count], tokens).argmax(-1).tolist()

    assert greedy([0, 1, 2, 4, 5, 4, 0], 7) == [0, 0, 4, 5, 4, 0, 0]  # after two tokens "efe", then freely
    closed = distribution_of(
        replace(sampling, thoughts=ThoughtBudget(2, "f")), letters, num_prompt=1, vocab_size=6, end_tokens=()
    )
    assert closed.probs(rows[:4], [0, 5, 1, 2]).argmax(-1).tolist() == [0, 0, 0, 0]  # closed before


class Words:
    """A tokenizer in which each of `words` is a token, by its number; `special` ones are no text, `added` ones are."""

    def __init__(self, *words: str, special: Collection[str] = (), added: Collection[str] = ()) -> None:
        self._words, self._special, self._added = words, special, added

    def added_tokens(self, *, special: bool) -> dict[str, int]:
        names = self._special if special else (*self._special, *self._added)
        return {name: self._words.index(name) for name in names}

    def written(self, token: int) -> str | None:
        return None if self._words[token] in self._special else self._words[token]

    def characters(self) -> Characters:
        return Characters()

    def unwritten(self, more: Collection[int] = ()) -> dict[str, int]:
        return {self._words[i]: i for i in range(len(self._words)) if self.written(i) is None or i in more}

    def join(self, strings: Sequence[str]) -> str:
        return "".join(strings)

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(filter(None, map(self.written, tokens)))

    def encode_piece(self, text: str) -> list[int]:
        found = []
        while text:
            found.append(next(i for i, word in enumerate(self._words) if word and text.startswith(word)))
            text = text[len(self._words[found[-1]]) :]
        return found


MARKED = ("[THINK]", "[/THINK]", "\n", "hm", "Yes", "[/TH", "INK]", " ")
KINDS: dict[str, Any] = {
    "special": Words(*MARKED, special=MARKED[:2]),
    "added": Words(*MARKED, added=MARKED[:2]),
    "texts": Words("[TH", "INK]\n", "\n", "hm", "Yes", "[/TH", "INK]", " "),
}
THINK = Marks("[THINK]", "[/THINK]")


def read(words: Any, tokens: Sequence[int], *, stops: Sequence[str] = (), **begins: Any) -> tuple[str, str]:
    """(thoughts, what is said) of a reply of these tokens."""
    added = words.added_tokens(special=False)
    named = {added[mark]: mark for mark in (THINK.open, THINK.close) if mark in added}
    written = ReplyText(words, (), stops=stops, named=named)
    splitter = Splitter(THINK, named=named.values(), **begins)
    parts: list[Piece] = []
    for token in tokens:
        text = written.push(token)
        parts += splitter.push(text, written.named_in(text))
    text = "" if written.is_stopped else written.flush()
    parts += splitter.push(text, written.named_in(text)) + splitter.flush()
    thoughts, said = ("".join(part.text for part in parts if part.is_thought is kind) for kind in (True, False))
    return thoughts, said


def stopped(reply: Sequence[str], stops: Sequence[str], **begins: Any) -> tuple[str, str]:
    """(the text of a reply of these tokens, the stop string that ended it). A stop string counts in the answer."""
    words = Words(*dict.fromkeys(reply))
    splitter = Splitter(THINK, **begins)
    written = ReplyText(words, (), stops=["|"], named={}, answer=splitter, of_answer=stops)  # type: ignore[arg-type]
    text = ""
    for word in reply:
        text += written.push([*dict.fromkeys(reply)].index(word))
        if written.is_stopped:
            return text, written.stop
    return text + written.flush(), written.stop


@pytest.mark.parametrize(
    ("reply", "begins", "expected"),
    [
        (
            ["[THINK]", "9.8 or 9.1", "[/TH", "INK]", "It is ", "9.", "8", "."],
            {},
            ("[THINK]9.8 or 9.1[/THINK]It is ", "9.8"),
        ),
        (["[TH", "INK]9.8[/THINK]It is 9.8."], {}, ("[THINK]9.8[/THINK]It is ", "9.8")),
        (["9.8 or", "[/THINK]", "9.8"], {"begun": True}, ("9.8 or[/THINK]", "9.8")),
        (["It is 9.8"], {}, ("It is ", "9.8")),
        (["9.8", " it is"], {}, ("", "9.8")),
        (["\n", "[TH", "9.8"], {}, ("\n[TH", "9.8")),
        ([" ", "9", ".8"], {}, (" ", "9.8")),
        (["[TH"], {}, ("[TH", "")),
        (["9.8 or"], {"begun": True}, ("9.8 or", "")),
        (["[THINK]a|b"], {}, ("[THINK]a", "|")),
        (["so", "[/THINK]", "It is 9.8"], {"begun": True, "begin": "[THINK]And "}, ("so[/THINK]It is ", "9.8")),
        (
            ["so 9.8[/THINK]It is 9.8"],
            {"begun": True, "begin": "[THINK]And "},
            ("so 9.8[/THINK]It is ", "9.8"),
        ),
        ([".8", " 9.8"], {"begin": "[THINK]hm[/THINK]It is 9"}, (".8 ", "9.8")),
        (["[THINK]hm[/THINK]", " ", "9", "9.8"], {}, ("[THINK]hm[/THINK] 9", "9.8")),
    ],
)
def test_a_stop_string_within_thoughts_ends_nothing(
    reply: list[str], begins: dict[str, Any], expected: tuple[str, str]
) -> None:
    """The thoughts were cut where they named it, and no answer came."""
    assert stopped(reply, ["9.8"], **begins) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_marks_are_found_whether_they_are_special_tokens_tokens_or_texts(kind: str) -> None:
    """Special tokens are no text: thoughts between them came out as the answer."""
    tokens = [0, 2, 3, 1, 2, 4] if kind != "texts" else [0, 1, 3, 5, 6, 2, 4]
    assert read(KINDS[kind], tokens) == ("hm", "Yes")
    assert read(KINDS[kind], tokens, stops=("hmY", "mYe")) == ("hm", "Yes")
    assert read(KINDS[kind], tokens, stops=("[/THINK]",)) == ("hm", "")


@pytest.mark.parametrize("kind", ["special", "added"])
def test_a_mark_that_is_a_token_is_no_other_text(kind: str) -> None:
    assert read(KINDS[kind], [0, 3, 5, 6, 3, 1, 4]) == ("hm[/THINK]hm", "Yes")
    assert read(KINDS[kind], [3, 5, 6, 1, 4], begun=True) == ("hm[/THINK]", "Yes")
    assert read(KINDS[kind], [1, 4], begin="[THINK]hm") == ("hm", "Yes")
    assert read(KINDS[kind], [0, 3, 1, 4], begun=True) == ("hm", "Yes")  # opened once more


LINES = ("a", "b", "<think>", "</think>", "\n\n", "\n", "<thi", "nk>", "</thi")


@pytest.mark.parametrize("words", [Words(*LINES, added=LINES[2:4]), Words(*LINES, special=LINES[2:4]), Words(*LINES)])
def test_a_budget_is_of_thoughts_that_a_reply_opens_and_ends_with_all_of_the_close(words: Any) -> None:
    """It closed thoughts that nobody had opened, in the middle of the answer; and the line breaks behind the mark
    were never looked at."""

    def greedy(budget: ThoughtBudget, wanted: Sequence[int]) -> list[int]:
        sampling = SamplingParams(temperature=0.0, thoughts=budget)
        found = distribution_of(sampling, words, num_prompt=1, vocab_size=len(LINES), end_tokens=())
        tokens = [0]
        for token in wanted:
            logits = torch.zeros(1, len(LINES))
            logits[0, token] = 1.0
            tokens.append(int(found.probs(logits, tokens).argmax()))
        return tokens[1:]

    opened, begun = ThoughtBudget(2, "\n</think>\n\n", "<think>"), ThoughtBudget(2, "\n</think>\n\n")
    assert greedy(begun, [0] * 7) == [0, 0, 5, 3, 4, 0, 0]
    assert greedy(opened, [0] * 7) == [0] * 7
    assert greedy(opened, [5, 2, *[0] * 6]) == [5, 2, 0, 0, 5, 3, 4, 0]
    assert greedy(opened, [2, 0, 3, 1, 1, 1]) == [2, 0, 3, 1, 1, 1]
    assert greedy(opened, [0, 2, 0, 0, 0]) == [0, 2, 0, 0, 0]
    if not words.added_tokens(special=False):
        assert greedy(opened, [6, 7, *[0] * 6]) == [6, 7, 0, 0, 5, 3, 4, 0]
        assert greedy(begun, [8, 7, *[0] * 4]) == [8, 7, 0, 0, 0, 0]


MENTIONED = "{% for m in messages %}[{{ m.content }}]{% endfor %}[assistant]{# <think> </think> #}"
# As EXAONE 4: no thoughts unless they are asked for.
UNASKED = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    "{% if enable_thinking is defined and enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"
)


@pytest.mark.parametrize("template", [QWEN, R1, LATE, MENTIONED, UNASKED])
def test_there_is_a_budget_only_while_there_may_be_thoughts(template: str) -> None:
    asked = Conversation().asked("Hi")
    usual = format_of(template).prompt(asked).budget(5)
    close = "\n</think>\n\n"
    opens = {R1: ThoughtBudget(5, close), UNASKED: None}
    assert usual == opens.get(template, ThoughtBudget(5, close, "<think>"))
    assert format_of(template).prompt(asked).budget(None) is None
    assert format_of(template).prompt(asked, "The answer").budget(5) is None
    assert format_of(template).prompt(asked, "<think>Well").budget(5) == ThoughtBudget(5, close)
    assert format_of(template).prompt(asked, "<think>Well</think>So").budget(5) is None
    if template != MENTIONED:
        switched = format_of(template, thinks=False).prompt(asked)
        assert switched.budget(5) is None
        assert switched.marks is None


@pytest.mark.parametrize("written", ["<think>", "</think>", "<think>\n", "What is <think>"])
def test_marks_that_a_person_wrote_open_and_close_nothing(written: str) -> None:
    """A question that ended in <think> swallowed the answer."""
    for template in (MENTIONED, R1.replace(".split('</think>')[-1]", "")):
        usual = format_of(template).prompt(Conversation().asked("Hi"))
        document = Conversation().with_document(Document("a", written)).asked("Hi")
        for conversation in (Conversation().asked(written), Conversation().with_system(written).asked("Hi"), document):
            opening = format_of(template).prompt(conversation)
            assert (opening.marks, opening.begun) == (usual.marks, usual.begun)


def test_what_a_reply_begins_with_is_said_unless_it_has_marks() -> None:
    found = format_of(R1)
    asked = Conversation().asked("Hi")
    assert told_by(found.prompt(asked, "Yes,").splitter(), " I do") == [("Yes, I do", False)]
    assert prompt(found, "Yes,").endswith("[assistant]<think>\n\n</think>\n\nYes,")
    assert told_by(found.prompt(asked, "well</think>").splitter(), "Yes") == [("well", True), ("Yes", False)]
    assert prompt(found, "well</think>").endswith("[assistant]<think>\nwell</think>")
    opened = format_of(LATE).prompt(asked, "<think>\nwell")
    assert told_by(opened.splitter(), " then</think>Yes") == [("well then", True), ("Yes", False)]


def test_a_switch_that_is_off_by_default_is_a_switch() -> None:
    """With a schema an empty pair of marks was written behind the one that the template had written."""
    assert switched_off(format_of(UNASKED)._written) == {"enable_thinking": False}
    assert prompt(format_of(UNASKED, thinks=False)) == prompt(format_of(UNASKED))
    assert prompt(format_of(UNASKED)).endswith("[assistant]<think>\n\n</think>\n\n")


def test_what_is_wrong_is_said() -> None:
    assert ChatFlags(thinking="hide", thinking_tokens=5).how() == "hide"
    assert ChatFlags(template_arg=["a=false", "b=x y", "c=3"]).layout().variables == {"a": False, "b": "x y", "c": 3}
    for wrong in (ChatFlags(thinking="loud"), ChatFlags(thinking_tokens=-1)):
        with pytest.raises(UsageError, match="must be"):
            wrong.how()
    with pytest.raises(UsageError, match="NAME=VALUE"):
        ChatFlags(template_arg=["a"]).layout()


@pytest.mark.parametrize("cuts", [1, 2, 5, 100])
@pytest.mark.parametrize("stop", ["\n", "\n\n"])
def test_white_space_behind_thoughts_is_no_part_of_the_answer(stop: str, cuts: int) -> None:
    """A stop string of white space left every answer of a model that thinks empty."""
    reply = "[THINK]\nlet me\n\nsee\n[/THINK]\n\nHello there.\n\nMore text"
    words = [reply[at : at + cuts] for at in range(0, len(reply), cuts)]
    assert stopped(words, [stop]) == (reply[: reply.index("there.") + 6], stop)


def test_a_reply_without_the_header_that_is_due_is_an_answer_and_has_its_stop_strings() -> None:
    channels = known("<|channel|>analysis<|message|>", "<|end|>")
    words = Words("ab ", "cd")
    splitter = Splitter(channels)
    written = ReplyText(words, (), stops=(), named={}, answer=splitter, of_answer=["b"])  # type: ignore[arg-type]
    assert (written.push(0) + written.push(1) + written.flush(), written.stop) == ("a", "b")
