"""A conversation is a value: what each operation makes of it, and what the reader refuses."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.examples import at_most
from offload.errors import UsageError
from triforce_cli.prompts.conversation import VERSION, Conversation, Document, Turn

BOOK, NOTE = Document("book.txt", "It was a dark night.\n"), Document("note.txt", "1")
FIRST = Turn("who?", (BOOK,), "me", (5, 6), True)
SECOND = Turn("why?", (), "so", (7,), False)
BOTH = Conversation(system="be brief", turns=(FIRST, SECOND), date="26 Jul 2024")

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
DOCUMENTS = st.lists(st.builds(Document, TEXT, TEXT), max_size=2).map(tuple)
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple)
TURNS = st.lists(st.builds(Turn, TEXT, DOCUMENTS, TEXT, TOKENS, st.booleans()), max_size=3).map(tuple)
CONVERSATIONS = st.builds(Conversation, TEXT, TURNS, DOCUMENTS, st.none() | TEXT, TEXT)


def test_an_answer_makes_a_turn_of_the_question_and_the_pending_documents():
    asked = Conversation().with_document(BOOK).asked(" who?\n")
    assert (asked.question, asked.turns, asked.documents) == (" who?\n", (), (BOOK,))
    answered = asked.answered("me", [5, 6], complete=True)
    first = replace(FIRST, user=" who?\n")
    assert answered == Conversation(turns=(first,))
    assert answered.asked("why?").answered("so", (7,), complete=False).turns == (first, SECOND)


def test_an_open_question_is_replaced_by_another():
    assert Conversation().asked("one").asked("two").question == "two"


@pytest.mark.parametrize("message", ["", " \n\t"])
def test_an_empty_message_is_refused(message):
    with pytest.raises(UsageError, match="the message is empty; it needs at least one character"):
        Conversation().asked(message)


def test_only_a_question_is_answered():
    with pytest.raises(UsageError, match="there is no message to answer"):
        BOTH.answered("x", (), complete=True)


def test_undo_is_the_state_before_the_message_was_sent():
    before = Conversation(system="be brief").with_document(BOOK)
    after = before.asked("who?").answered("me", (5,), complete=True)
    assert after.undo() == (before, "who?")
    assert after.with_document(NOTE).undo() == (before.with_document(NOTE), "who?")
    assert BOTH.undo() == (replace(BOTH, turns=(FIRST,)), "why?")


def test_undo_takes_an_open_question_back_and_no_turn():
    assert BOTH.asked("what?").undo() == (BOTH, "what?")


def test_undo_keeps_the_newer_of_two_documents_of_one_name():
    newer = Document("book.txt", "another edition")
    conversation, _ = Conversation(turns=(FIRST,)).with_document(newer).undo()
    assert conversation.pending_documents == (newer,)


def test_regenerate_opens_the_last_question_with_its_documents():
    once = Conversation(turns=(FIRST,))
    assert once.regenerate() == Conversation(pending_documents=(BOOK,), question="who?")
    assert once.regenerate().answered("me", (5, 6), complete=True) == once
    assert once.asked("why?").regenerate() == once.asked("why?")  # a reply that never began


def test_edit_replaces_the_last_question():
    assert BOTH.edit("how? ") == replace(BOTH, turns=(FIRST,), question="how? ")
    assert Conversation(turns=(FIRST,)).edit("how?").pending_documents == (BOOK,)


@pytest.mark.parametrize("operation", [Conversation.undo, Conversation.regenerate, lambda c: c.edit("x")])
def test_nothing_can_be_taken_back_from_an_empty_conversation(operation):
    with pytest.raises(UsageError, match=r"there is nothing to (undo|answer again|edit): no message was sent yet"):
        operation(Conversation(system="be brief"))


def test_the_system_message_changes_and_goes():
    assert BOTH.with_system(" be long ").system == " be long "
    assert BOTH.with_system("  ").system == ""


def test_a_document_that_is_added_again_is_the_newer_one_and_comes_last():
    newer = Document("book.txt", "another edition")
    conversation = Conversation().with_document(BOOK).with_document(NOTE).with_document(newer)
    assert conversation.pending_documents == (NOTE, newer)


def test_a_dropped_document_is_gone_from_turns_and_from_what_is_pending():
    conversation = BOTH.with_document(NOTE).with_document(BOOK).drop_document("book.txt")
    assert conversation.documents == (NOTE,)
    assert [turn.user for turn in conversation.turns] == ["who?", "why?"]
    with pytest.raises(UsageError, match=r"no document 'book.txt' in this conversation; there are: 'note.txt'"):
        conversation.drop_document("book.txt")


def test_the_oldest_turns_are_dropped_with_their_documents():
    assert BOTH.drop_turns(1) == replace(BOTH, turns=(SECOND,))
    assert BOTH.drop_turns(2).documents == ()
    for count in (0, 3, -1):
        with pytest.raises(UsageError, match=f"{count} turns cannot be dropped; there are 2"):
            BOTH.drop_turns(count)


def test_clear_keeps_the_system_message_only():
    assert BOTH.with_document(NOTE).asked("x").clear() == Conversation(system="be brief", date="26 Jul 2024")


HALF = "a\udc80b"  # what a terminal makes of a byte that is not UTF-8


@pytest.mark.parametrize(
    "operation",
    [
        lambda c: c.asked(HALF),
        lambda c: c.with_system(HALF),
        lambda c: c.with_document(Document(HALF, "")),
        lambda c: c.with_document(Document("x", HALF)),
        lambda c: c.asked("x").answered(HALF, (), complete=True),
    ],
)
def test_text_that_no_tokenizer_takes_is_refused(operation):
    with pytest.raises(UsageError, match="has bytes that are not UTF-8"):
        operation(Conversation())


# JSON


@given(CONVERSATIONS)
@at_most(100)
def test_a_saved_conversation_is_the_same_when_it_is_read(conversation):
    assert Conversation.from_json(conversation.to_json(), "chat.json") == conversation
    data = conversation.to_data()
    assert Conversation.from_data(data, "session") == conversation
    assert json.loads(json.dumps(data)) == data  # plain JSON: lists, no tuples


def saved(**changes: Any) -> dict[str, Any]:
    return {**BOTH.to_data(), **changes}


def turn(**changes: Any) -> dict[str, Any]:
    (first, *_) = saved()["turns"]
    return saved(turns=[first, {**first, **changes}])


def without(name: str) -> dict[str, Any]:
    data = saved()
    del data[name]
    return data


WRONG = [
    ([], r"it is \[\]; it must be an object"),
    (None, "it is null; it must be an object"),
    (without("turns"), "turns is missing"),
    (without("version"), "version is missing"),
    (saved(extra=1), "extra is not known"),
    (saved(version=2), f"version is 2; this program reads version {VERSION}"),
    (saved(version=10**5000), "version is a huge number"),
    (saved(version=True), "version is true"),
    (saved(version=1.0), "version is 1.0"),
    (saved(version="1"), 'version is "1"'),
    (saved(system=None), "system is null; it must be a text"),
    (saved(date=3), "date is 3; it must be a text"),
    (saved(question=["x"]), r'question is \["x"\]; it must be a text'),
    (saved(turns={}), "turns is {}; it must be a list"),
    (saved(turns="ab"), 'turns is "ab"; it must be a list'),
    (saved(turns=["x"]), r'turns\[0\] is "x"; it must be an object'),
    (saved(pending_documents=[{"name": "x"}]), r"pending_documents\[0\].text is missing"),
    (saved(pending_documents=[{"name": "x", "text": 1}]), r"pending_documents\[0\].text is 1; it must be a text"),
    (turn(complete=1), r"turns\[1\].complete is 1; it must be true or false"),
    (turn(user=1.5), r"turns\[1\].user is 1.5; it must be a text"),
    (turn(reply={"a": 1}), r'turns\[1\].reply is {"a": 1}; it must be a text'),
    (
        turn(reply_tokens=[1, True]),
        r"turns\[1\].reply_tokens\[1\] is true; it must be a token id",
    ),
    (turn(reply_tokens=[-1]), r"turns\[1\].reply_tokens\[0\] is -1; it must be a token id"),
    (
        turn(reply_tokens=[2**31]),
        r"turns\[1\].reply_tokens\[0\] is 2147483648; it must be a token id",
    ),
    (turn(reply_tokens=[1.0]), r"turns\[1\].reply_tokens\[0\] is 1.0; it must be a token id"),
    (turn(documents=None), r"turns\[1\].documents is null; it must be a list"),
    (turn(**{"x" * 10_000: 1}), r"turns\[1\].x{37}\.\.\. is not known$"),
]


@pytest.mark.parametrize(("data", "message"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_wrong_is_said_with_its_place(data, message):
    with pytest.raises(UsageError, match=rf"^chat.json is not a saved conversation: {message}"):
        Conversation.from_data(data, "chat.json")


@pytest.mark.parametrize(
    "text",
    ["", "{", "nul", "[" * 100_000, '{"a":' * 100_000, "1" * 10_000, '{"version": NaN}', "\x00", '{"version": 1e999}'],
)
def test_text_that_is_no_conversation_is_refused_and_never_crashes(text):
    with pytest.raises(UsageError, match=r"^chat.json is not a saved conversation: "):
        Conversation.from_json(text, "chat.json")


def test_a_field_that_occurs_twice_is_refused_by_name():
    text = json.dumps(BOTH.to_data())
    with pytest.raises(UsageError, match="a field occurs twice: 'system'"):
        Conversation.from_json(f'{{"system": "", {text[1:]}', "chat.json")


def test_half_a_character_in_a_file_is_refused():
    with pytest.raises(UsageError, match=r"turns\[1\].reply has half of a surrogate pair"):
        Conversation.from_json(json.dumps(turn(reply=HALF)), "chat.json")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.data())
@at_most(300)
def test_a_value_in_any_place_is_read_as_it_is_or_refused(data):
    """No other error, and no conversation that differs from the file."""
    record = BOTH.with_document(NOTE).asked("x").to_data()
    place: Any = record
    while True:
        key = data.draw(st.sampled_from(sorted(place)) if isinstance(place, dict) else st.integers(0, len(place) - 1))
        if not isinstance(place[key], (dict, list)) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(JSON)
    with contextlib.suppress(UsageError):
        assert Conversation.from_data(record, "x").to_data() == record


@given(st.text(max_size=20) | st.binary(max_size=20).map(lambda data: data.decode("latin-1")))
@at_most(200)
def test_any_text_is_read_or_refused(text):
    with pytest.raises(UsageError):
        Conversation.from_json(text, "x")
