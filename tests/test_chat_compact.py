"""A summary in place of the oldest turns: what it keeps, what it frees, how it is taken back."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from offload.errors import DoesNotFit, UsageError
from test_chat_dialogue import Make, make, models
from triforce_cli.chat import slash
from triforce_cli.chat.compact import BEGIN, REQUEST, Compaction, beginning, fitting
from triforce_cli.chat.dialogue import Dialogue
from triforce_cli.prompts.conversation import Conversation, Document, Turn

__all__ = ["make", "models"]  # fixtures

BOOK, NOTES = Document("book", "a text"), Document("notes", "some notes")
TURNS = (
    Turn("one", (BOOK,), "first", (1, 2), True),
    Turn("two", (), "second", (3,), True),
    Turn("three", (NOTES,), "third", (), False),
)
CONVERSATION = Conversation("be brief", TURNS, (Document("new", "more"),))


def test_a_summary_keeps_documents_and_later_turns_and_can_be_taken_back() -> None:
    compaction = Compaction.of(TURNS[:2], "in short")
    done = compaction.done(CONVERSATION)
    assert done.turns == (Turn(REQUEST, (BOOK,), "in short", (), True), TURNS[2])
    assert (done.system, done.pending_documents) == (CONVERSATION.system, CONVERSATION.pending_documents)
    assert compaction.undone(done) == CONVERSATION
    later = done.asked("four").answered("fourth", [9], complete=True)
    assert compaction.undone(later).turns == (*TURNS, later.turns[-1])
    for gone in (done.drop_turns(1), done.clear()):
        with pytest.raises(UsageError, match="no longer in the conversation"):
            compaction.undone(gone)
    for nothing in ("", BEGIN):
        with pytest.raises(UsageError, match="no summary"):
            Compaction.of(TURNS[:1], nothing)


def test_the_model_reads_the_turns_that_are_replaced_and_no_others() -> None:
    asked = beginning(CONVERSATION, 2)
    assert asked == replace(CONVERSATION, turns=TURNS[:2], pending_documents=(), question=REQUEST)


@pytest.mark.parametrize(("limit", "count"), [(1000, 3), (729, 3), (728, 2), (500, 0)])
def test_as_many_turns_as_have_room_with_their_summary(limit: int, count: int) -> None:
    assert fitting(CONVERSATION, 3, lambda asked: 110 * len(asked.turns) - 1, limit) == count


@pytest.fixture
def dialogue(make: Make, monkeypatch: pytest.MonkeyPatch) -> Dialogue:
    monkeypatch.setattr("triforce_cli.chat.dialogue.MAX_TOKENS", 20)
    dialogue = make()
    for question in ("hello " * 60, "what is it", "and then"):
        dialogue.say(question)
    return dialogue


def run(dialogue: Dialogue, line: str, notes: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(dialogue.output, "note", notes.append)
    slash.run(dialogue, line)
    return notes[-1]


def test_a_chat_goes_on_after_its_summary(
    dialogue: Dialogue, make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before, notes = dialogue.conversation, list[str]()
    shown = list[str]()
    monkeypatch.setattr(dialogue.output, "thought", shown.append)
    capsys.readouterr()
    note = run(dialogue, "/compact", notes, monkeypatch)
    assert re.match(r"the summary is [\d,]+ tokens shorter than the 2 oldest turns, which /compact undo", note)
    [summary, last] = dialogue.conversation.turns
    assert (summary.user, summary.reply) == (REQUEST, "".join(shown).strip())
    assert summary.reply.startswith(BEGIN)
    assert last == before.turns[2]
    assert capsys.readouterr().out == ""
    dialogue.say("go on")
    assert len(dialogue.conversation.turns) == 3
    run(dialogue, "/compact undo", notes, monkeypatch)
    assert dialogue.conversation.turns == (*before.turns, dialogue.conversation.turns[-1])
    with pytest.raises(UsageError, match="nothing was compacted"):
        dialogue.undo_compaction()


def test_a_summary_that_frees_nothing_changes_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triforce_cli.chat.dialogue.MAX_TOKENS", 20)
    dialogue = make()
    dialogue.say("hello")
    before = dialogue.conversation
    with pytest.raises(UsageError, match=r"would be \d+ tokens longer than the oldest turn; the conversation stays"):
        slash.run(dialogue, "/compact")
    assert dialogue.conversation == before
    with pytest.raises(UsageError, match="nothing was compacted"):
        dialogue.undo_compaction()


def test_a_number_says_how_many(dialogue: Dialogue, monkeypatch: pytest.MonkeyPatch) -> None:
    before = dialogue.conversation
    assert "the oldest turn," in run(dialogue, "/compact 1", [], monkeypatch)
    assert dialogue.conversation.turns[1:] == before.turns[1:]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/compact 9", "9 turns cannot be compacted; there are 3"),
        ("/compact all", "all is no number of turns"),
        ("/compact undo", "nothing was compacted"),
    ],
)
def test_what_cannot_be_is_said_and_changes_nothing(dialogue: Dialogue, line: str, message: str) -> None:
    before = dialogue.conversation
    with pytest.raises(UsageError, match=message):
        slash.run(dialogue, line)
    assert dialogue.conversation == before


def test_without_turns_or_room_nothing_changes(make: Make, dialogue: Dialogue, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no message was sent yet"):
        slash.run(make(), "/compact")
    monkeypatch.setattr(dialogue.engine, "limit", 300)
    with pytest.raises(DoesNotFit, match="no room for a summary, even of the oldest turn"):
        slash.run(dialogue, "/compact")


def test_a_summary_that_is_stopped_changes_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch, dialogue: Dialogue
) -> None:
    def stopped(text: str) -> None:
        raise KeyboardInterrupt

    dialogue.interactive = True
    before, notes = dialogue.conversation, list[str]()
    monkeypatch.setattr(dialogue.output, "thought", stopped)
    assert run(dialogue, "/compact", notes, monkeypatch) == "stopped; the conversation stays"
    assert dialogue.conversation == before
    monkeypatch.setattr(dialogue.output, "thought", lambda text: None)
    dialogue.say("go on")
    assert len(dialogue.conversation.turns) == 4


def test_a_full_context_offers_it(dialogue: Dialogue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialogue.engine, "limit", dialogue.num_used + 3)
    with pytest.raises(DoesNotFit, match="/compact replaces the oldest turns by a summary"):
        dialogue.say("a question that has no room in what is left of the context")
