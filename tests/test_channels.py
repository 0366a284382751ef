"""Replies in OpenAI's harmony format: thoughts, answers and calls of a model that says in headers which is which."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kit.harmony import ANSWER, NEXT, SPECIAL, TEMPLATE, THOUGHTS, harmony
from kit.models import byte_tokenizer
from offload.decode.distribution import distribution_of
from offload.decode.sampling import SamplingParams, ThoughtBudget
from offload.engine.step import Step
from offload.fields import record, versioned
from offload.grammar.constraint import Constraint
from offload.text.reply_text import ReplyText
from offload.text.tokenizer import Tokenizer
from triforce_cli.answering.answer import Answer
from triforce_cli.answering.request import Prompt, Wanted
from triforce_cli.answering.resumable import VERSION, Resumable
from triforce_cli.answering.thoughts import Channels, Splitter, marks_of, switched_off, without_thoughts
from triforce_cli.options.answering import Layout
from triforce_cli.prompts.conversation import Conversation
from triforce_cli.prompts.formats import ChatFormat
from triforce_cli.prompts.messages import read

MARKS = Channels()
WANTED = Wanted(max_tokens=99, sampling=SamplingParams())
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '{"city": "Oslo"}'
LATER = f"{NEXT}<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{CALL}"
EARLIER = f"{NEXT} to=functions.weather<|channel|>commentary json<|message|>{CALL}"
PREAMBLE = f"{NEXT}<|channel|>commentary<|message|>I look."
CASES = [  # (reply, thoughts, text)
    (f"{THOUGHTS}hm so{NEXT}{ANSWER}Yes.\n", "hm so", "Yes.\n"),
    (f"{ANSWER}Yes.", "", "Yes."),
    (f"{THOUGHTS} hm \n{NEXT}{ANSWER} Yes.<|end|>", "hm", "Yes."),
    (f"{THOUGHTS}hm{NEXT}{THOUGHTS}so{NEXT}{ANSWER}Yes.", "hm\n\nso", "Yes."),
    (f"{THOUGHTS}hm{PREAMBLE}{NEXT}{ANSWER}Yes.", "hm", "I look.\n\nYes."),
    (f"{THOUGHTS}hm{LATER}", "hm", f"to=functions.weather {CALL}"),
    (f"{THOUGHTS}hm{EARLIER}", "hm", f"to=functions.weather {CALL}"),
    (LATER.removeprefix(NEXT), "", f"to=functions.weather {CALL}"),
    (EARLIER.removeprefix(NEXT), "", f"to=functions.weather {CALL}"),
    (f"{THOUGHTS}hm{PREAMBLE}{LATER}", "hm", f"I look.\n\nto=functions.weather {CALL}"),
    (f"<|channel|>analysis to=functions.weather code<|message|>{CALL}", "", f"to=functions.weather {CALL}"),
    (f"<|channel|>commentary to=weather <|constrain|>json<|message|>{CALL}", "", f"to=functions.weather {CALL}"),
    (f" to=weather<|channel|>commentary json<|message|>{CALL}", "", f"to=functions.weather {CALL}"),
    ("<|message|>Yes.", "", "Yes."),
    (f"{THOUGHTS}hm{ANSWER}Yes.", "hm", "Yes."),  # marks that are missing, or too many
    (f"{THOUGHTS}hm<|start|>assistant{ANSWER}Yes.<|message|>No.", "hm", "Yes.\n\nNo."),
    ("<|start|>assistant<|channel|>final <|constrain|>json<|message|>{}", "", "{}"),
    ("Yes, a < b.", "", "Yes, a < b."),  # a model that writes no header
    (f"{THOUGHTS}hm{NEXT}<|channel|>fin", "hm", ""),  # cut within a header
    (f"{THOUGHTS}hm{NEXT}", "hm", ""),
    ("<|channel|>", "", ""),
    (f"{THOUGHTS}hm <|en", "hm <|en", ""),
    (f"{ANSWER}a <|", "", "a <|"),
]


_NAMES = "|".join(map(re.escape, SPECIAL))


def told(splitter: Splitter, *texts: str) -> tuple[str, str]:
    """(thoughts, text) of a reply in these pieces, whose marks are tokens."""
    places = [[found.start() for found in re.finditer(_NAMES, text)] for text in texts]
    pieces = [piece for text, at in zip(texts, places, strict=True) for piece in splitter.push(text, at)]
    pieces += splitter.flush()
    thoughts, said = ("".join(piece.text for piece in pieces if piece.is_thought is kind) for kind in (True, False))
    return thoughts, said


@pytest.mark.parametrize(("reply", "thoughts", "text"), CASES)
def test_channels_are_thoughts_and_answers_wherever_the_reply_is_cut(reply: str, thoughts: str, text: str) -> None:
    assert told(Splitter(MARKS), reply) == (thoughts, text)
    assert told(Splitter(MARKS), *reply) == (thoughts, text)
    for at in range(1, len(reply)):
        assert told(Splitter(MARKS), reply[:at], reply[at:]) == (thoughts, text)
    named = [name for name in SPECIAL if name in reply]
    assert told(Splitter(MARKS, begin=reply, named=named), "") == (thoughts, text)


@given(st.lists(st.sampled_from((*MARKS.tokens, "final", "analysis", "to=f", "a", " ", "\n", "<|", "|>")), max_size=12))
def test_pieces_do_not_matter_and_no_mark_is_shown(parts: list[str]) -> None:
    reply = "".join(parts)
    whole = told(Splitter(MARKS), reply)
    assert whole == told(Splitter(MARKS), *reply) == told(Splitter(MARKS), *parts)
    names = set(MARKS.tokens)
    found = Splitter(MARKS, named=names)
    pieces = [piece for part in parts for piece in found.push(part, [0] if part in names else [])] + found.flush()
    if "|>" not in parts:
        assert not any(name in piece.text for piece in pieces for name in names)


def test_text_that_reads_like_a_mark_is_text() -> None:
    """Other tokens with the text of a mark are none."""
    tokenizer = harmony()
    chat_format = ChatFormat(tokenizer)
    prompt = chat_format.prompt(Conversation().asked("Hi"))

    def spell(text: str) -> list[int]:
        return [token for character in text for token in tokenizer.encode_piece(character)]

    tokens = tokenizer.encode_piece(ANSWER) + spell(f"It ends in {NEXT}{THOUGHTS} or <|message|>")
    assert answered(chat_format, prompt, tokens).text == f"It ends in {NEXT}{THOUGHTS} or <|message|>"


def answered(chat_format: ChatFormat, prompt: Prompt, tokens: list[int], stops: tuple[str, ...] = ()) -> Answer:
    """The answer of a model that writes these tokens, up to an end token, as an engine has it."""
    answer = Answer(prompt, WANTED, chat_format.tokenizer)
    written = ReplyText(
        chat_format.tokenizer, prompt.tokens, stops=stops, named=prompt.named, end_tokens=prompt.end_tokens
    )
    for place, token in enumerate(tokens):
        text, ends = written.push(token), token in prompt.end_tokens or written.is_stopped
        is_last = ends or place == len(tokens) - 1
        text += written.flush() if is_last and not written.is_stopped else ""
        answer.add(
            Step(text, [token], ("stop" if ends else "length") if is_last else None, named=written.named_in(text))
        )
        if is_last:
            break
    return answer


def of(tokens: Any, chat_format: ChatFormat) -> str:
    """The text of tokens, with special ones by name."""
    return str(chat_format.tokenizer._inner.decode(list(tokens)))


def test_the_template_says_that_there_are_channels() -> None:
    assert marks_of(TEMPLATE) == MARKS
    assert switched_off(ChatFormat(harmony())._written) == {}
    assert marks_of(TEMPLATE.replace("<|channel|>", "")) is None


@pytest.mark.parametrize("special", [True, False])
def test_a_reply_ends_with_itself_and_not_with_a_message(special: bool) -> None:
    """The template writes <|end|> after an earlier reply, so it ended the reply behind its thoughts."""
    chat_format = ChatFormat(harmony(special=special))
    tokens = chat_format.tokenizer.added_tokens(special=False)
    assert chat_format.end_tokens == {tokens["<|return|>"], tokens["<|call|>"]}
    assert chat_format.stops == ()
    prompt = chat_format.prompt(Conversation().asked("Hi"))
    reply = chat_format.tokenizer.encode_piece(f"{THOUGHTS}hm{NEXT}{ANSWER}Yes.<|return|>{NEXT} no")
    found = answered(chat_format, prompt, reply)
    assert (found.text, "".join(part.thoughts for part in found.parts)) == ("Yes.", "hm")
    assert found.finish == "stop"
    called = answered(chat_format, prompt, chat_format.tokenizer.encode_piece(f"{THOUGHTS}hm{LATER}<|call|>{NEXT} no"))
    assert called.text == f"to=functions.weather {CALL}"


def test_without_the_tokens_their_texts_end_a_reply() -> None:
    inner = byte_tokenizer()
    inner.chat_template = TEMPLATE
    chat_format = ChatFormat(Tokenizer(inner))
    assert (chat_format.end_tokens, chat_format.stops) == (frozenset(), ("<|return|>", "<|call|>"))
    prompt = chat_format.prompt(Conversation().asked("Hi"))
    reply = list(f"{THOUGHTS}hm{NEXT}{ANSWER}Yes.<|return|>no".encode())
    tokens = [token for byte in reply for token in chat_format.tokenizer.encode_piece(chr(byte))]
    assert answered(chat_format, prompt, tokens, prompt.stops).text == "Yes."


def test_off_begins_with_the_answer_or_with_empty_thoughts_where_a_call_may_come() -> None:
    asked = Conversation().asked("Hi")
    usual, off = ChatFormat(harmony()), ChatFormat(harmony(), thinks=False)
    assert of(usual.prompt(asked).tokens, usual).endswith("Hi<|end|><|start|>assistant")
    assert of(off.prompt(asked).tokens, off).endswith(f"Hi{NEXT}{ANSWER}")
    assert told(off.prompt(asked).splitter(), "Yes.<|end|>") == ("", "Yes.")
    tooled = ChatFormat(harmony(), variables={"tools": [TOOL]}, thinks=False)
    assert of(tooled.prompt(asked).tokens, tooled).endswith(f"Hi{NEXT}{THOUGHTS}{NEXT}")
    assert told(tooled.prompt(asked).splitter(), f"{ANSWER}Yes.") == ("", "Yes.")
    bound = replace(WANTED, sampling=SamplingParams(constraint=Constraint("regex", "a+")))
    for wanted, end in ((replace(WANTED, thinks=False), f"{THOUGHTS}{NEXT}"), (bound, ANSWER), (WANTED, "")):
        layout = Layout("auto", {"tools": [TOOL]}).format(harmony(), wanted)
        assert of(layout.prompt(asked).tokens, layout).endswith(f"Hi{NEXT}{end}")


def test_what_a_reply_begins_with_is_of_the_answer_unless_it_has_a_header() -> None:
    chat_format, asked = ChatFormat(harmony()), Conversation().asked("Hi")
    prompt = chat_format.prompt(asked, "Well,")
    assert of(prompt.tokens, chat_format).endswith(f"Hi{NEXT}{ANSWER}Well,")
    assert told(prompt.splitter(), " yes.") == ("", "Well, yes.")
    assert told(prompt.without_begin().splitter(), " yes.") == ("", "Well, yes.")
    assert prompt.without_begin().earlier.num_text == len("Well,")
    prompt = chat_format.prompt(asked, f"{THOUGHTS}Well,")
    assert of(prompt.tokens, chat_format).endswith(f"Hi{NEXT}{THOUGHTS}Well,")
    assert told(prompt.splitter(), f" so{NEXT}{ANSWER}Yes") == ("Well, so", "Yes")
    messages = read([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well,"}])
    assert of(chat_format.prompt_of_messages(messages).tokens, chat_format).endswith(f"Hi{NEXT}{ANSWER}Well,")


def test_a_template_may_write_the_header_itself() -> None:
    opens = TEMPLATE.replace("{{ '<|start|>assistant' }}", f"{{{{ '<|start|>assistant{THOUGHTS}' }}}}")
    asked = Conversation().asked("Hi")
    prompt = ChatFormat(harmony(opens)).prompt(asked)
    assert told(prompt.splitter(), f"hm{NEXT}{ANSWER}Yes") == ("hm", "Yes")
    assert prompt.budget(5) == ThoughtBudget(5, f"{NEXT}{ANSWER}")
    answers = ChatFormat(harmony(opens.replace(f"assistant{THOUGHTS}'", f"assistant{ANSWER}'")))
    for prompt in (answers.prompt(asked), answers.prompt(asked, "Yes")):
        assert of(prompt.tokens, answers).removesuffix("Yes").endswith(f"Hi{NEXT}{ANSWER}")
        assert told(prompt.splitter(), "Yes"[len(prompt.begin) - len(ANSWER) :] + "<|end|>") == ("", "Yes")
    off = ChatFormat(harmony(opens), thinks=False)
    assert of(off.prompt(asked).tokens, off).endswith(f"{THOUGHTS}{NEXT}{ANSWER}")
    assert told(off.prompt(asked).splitter(), "Yes") == ("", "Yes")


def test_earlier_turns_have_the_answer_alone_and_its_own_tokens() -> None:
    """A reply with its headers is refused by the template; the answer's tokens are those that were generated."""
    chat_format = ChatFormat(harmony())
    spell = chat_format.tokenizer.encode_piece
    conversation = Conversation().asked("Hi")
    prompt = chat_format.prompt(conversation)
    reply = spell(f"{THOUGHTS}secret{NEXT}{ANSWER}Yes.<|return|>")
    text, tokens = chat_format.remembered(answered(chat_format, prompt, reply))
    assert (text, of(tokens, chat_format)) == ("Yes.", "Yes.<|return|>")
    conversation = conversation.answered(text, tokens, complete=True)
    assert chat_format.adopted(conversation) == conversation
    closing = chat_format.closing_tokens(conversation)
    assert of(closing, chat_format).endswith(f"Hi{NEXT}{ANSWER}Yes.<|end|><|start|>user<|message|>")
    assert closing[: len(prompt.tokens)] == list(prompt.tokens)
    following = chat_format.prompt(conversation.asked("And?")).tokens
    assert following[: len(closing)] == closing
    said = [("user", "Hi"), ("assistant", text), ("user", "And?")]
    messages = [{"role": role, "content": content} for role, content in said]
    assert of(following, chat_format) == chat_format.tokenizer.render_chat(messages, TEMPLATE)


def test_what_a_conversation_keeps_is_copied_as_it_is() -> None:
    reply = f"It ends in {NEXT}, and <|message|> begins."
    assert without_thoughts(reply, MARKS, begun=False) == reply


def test_a_reply_between_other_marks_is_kept_with_its_thoughts() -> None:
    """What a template does with them is its affair."""
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]{# <think> </think> #}"
    chat_format = ChatFormat(harmony(template))
    reply = chat_format.tokenizer.encode_piece("<think>hm</think>Yes.")
    answer = answered(chat_format, chat_format.prompt(Conversation().asked("Hi")), reply)
    assert (answer.text, chat_format.remembered(answer)) == ("Yes.", ("<think>hm</think>Yes.", reply))


def test_a_reply_without_thoughts_is_read_once() -> None:
    """The next prompt begins with all tokens of the one before and of its answer."""
    chat_format = ChatFormat(harmony(), thinks=False)
    conversation = Conversation().asked("Hi")
    prompt = chat_format.prompt(conversation)
    reply = chat_format.tokenizer.encode_piece("Yes.")
    text, tokens = chat_format.remembered(answered(chat_format, prompt, [*reply, min(prompt.end_tokens)]))
    closing = chat_format.closing_tokens(conversation.answered(text, tokens, complete=True))
    assert closing[: len(prompt.tokens) + len(reply)] == [*prompt.tokens, *reply]


@pytest.mark.parametrize(
    ("reply", "text"),
    [(f"{THOUGHTS}hm", ""), (f"{THOUGHTS}hm{PREAMBLE}{NEXT}{ANSWER}Yes.", "I look.\n\nYes."),
     (f"{THOUGHTS}hm{LATER}<|call|>", f"to=functions.weather {CALL}"), (f"{THOUGHTS}hm{NEXT}<|channel|>", "")],
)  # fmt: skip
def test_what_is_no_single_message_is_kept_as_its_text(reply: str, text: str) -> None:
    chat_format = ChatFormat(harmony())
    conversation = Conversation().asked("Hi")
    answer = answered(chat_format, chat_format.prompt(conversation), chat_format.tokenizer.encode_piece(reply))
    assert chat_format.remembered(answer) == (text, [])
    following = chat_format.prompt(conversation.answered(text, [], complete=True).asked("And?")).tokens
    assert f"{NEXT}{ANSWER}{text}<|end|><|start|>user<|message|>And?" in of(following, chat_format)


def test_a_message_of_an_api_may_have_text_and_thoughts_beside_its_calls() -> None:
    """The template takes one of both; a client sends back what it was told."""
    chat_format = ChatFormat(harmony())
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": CALL}}
    said: list[dict[str, Any]] = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "wet"},
    ]
    text = of(chat_format.prompt_of_messages(read(said), {"tools": [TOOL]}).tokens, chat_format)
    behind = f"<|start|>user<|message|>Rain?{NEXT}{THOUGHTS}hm\n\nI look.{EARLIER}<|call|>"
    assert text.endswith(f'{behind}<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"wet"{NEXT}')
    said[1] = said[1] | {"content": None}
    text = of(chat_format.prompt_of_messages(read(said), {"tools": [TOOL]}).tokens, chat_format)
    assert f"{THOUGHTS}hm{EARLIER}" in text


def test_effort_is_a_variable_of_the_template() -> None:
    chat_format = ChatFormat(harmony(), variables={"reasoning_effort": "high"})
    assert "Reasoning: high" in of(chat_format.prompt(Conversation().asked("Hi")).tokens, chat_format)


@pytest.mark.parametrize("special", [True, False])
def test_a_budget_ends_thoughts_with_the_header_of_the_answer(special: bool) -> None:
    chat_format = ChatFormat(harmony(special=special))
    tokenizer, asked = chat_format.tokenizer, Conversation().asked("Hi")
    budget = chat_format.prompt(asked).budget(2)
    assert budget == ThoughtBudget(2, f"{NEXT}{ANSWER}", THOUGHTS)
    tooled = ChatFormat(harmony(), variables={"tools": [TOOL]}).prompt(asked).budget(2)
    assert tooled == ThoughtBudget(2, NEXT, THOUGHTS)
    assert chat_format.prompt(asked, "Well").budget(2) is None
    assert ChatFormat(harmony(), thinks=False).prompt(asked).budget(2) is None

    def greedy(wanted: str, budget: ThoughtBudget = budget) -> str:
        """What a model writes that wants to write this."""
        sampling = SamplingParams(temperature=0.0, thoughts=budget)
        size = len(tokenizer)
        found = distribution_of(sampling, tokenizer, num_prompt=1, vocab_size=size, end_tokens=())
        tokens = [0]
        for token in tokenizer.encode_piece(wanted):
            logits = torch.zeros(1, size)
            logits[0, token] = 1.0
            tokens.append(int(found.probs(logits, tokens).argmax()))
        return of(tokens[1:], chat_format)

    closed = len(tokenizer.encode_piece(f"{NEXT}{ANSWER}"))
    assert greedy(f"{THOUGHTS}hm{'x' * closed}y") == f"{THOUGHTS}hm{NEXT}{ANSWER}y"
    for free in (f"{THOUGHTS}h{NEXT}{ANSWER}Yes, it does.", f"{ANSWER}Yes, it does.", f"{THOUGHTS}h{LATER}"):
        assert greedy(free) == free
    begun = replace(budget, open="")
    assert greedy(f"hm{'x' * closed}y", begun) == f"hm{NEXT}{ANSWER}y"


@pytest.mark.parametrize("cut", range(1, 40))
def test_an_answer_goes_on_where_a_session_keeps_it(cut: int) -> None:
    chat_format = ChatFormat(harmony())
    tokenizer = chat_format.tokenizer
    for begin, reply in (
        ("", f"{THOUGHTS}Long thoughts{NEXT}{ANSWER}Yes, it does."),
        ("So", ", yes, it really does so."),
    ):
        prompt, tokens = chat_format.prompt(Conversation().asked("Hi"), begin), tokenizer.encode_piece(reply)
        if cut >= len(tokens):
            continue
        first = answered(chat_format, prompt, tokens[:cut])
        kept = json.loads(json.dumps(Resumable.of(first, []).as_dict()))
        again = record(Resumable, versioned(kept, VERSION, ""), "").prompt([])
        assert again.marks == prompt.marks
        second = Answer(again, WANTED, tokenizer)
        written = ReplyText(tokenizer, prompt.tokens, stops=(), named=again.named)
        text = "".join(map(written.push, tokens))
        second.add(Step(text, tokens[cut:], "stop", named=written.named_in(text)))
        whole = answered(chat_format, prompt, tokens)
        for kind in ("text", "thoughts"):
            parts = "".join(getattr(part, kind) for part in (*first.parts, *second.parts))
            assert parts == "".join(getattr(part, kind) for part in whole.parts)
