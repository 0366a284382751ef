"""Compaction of a conversation: the model's own summary in place of the oldest turns. Their documents stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from offload.errors import UsageError
from triforce_cli.prompts.conversation import Conversation, Turn

REQUEST = (
    "Write a summary of the conversation above: who I am, what I asked, what you answered, every name, number and "
    "date, what was decided and what is still open. At most 200 words."
)
BEGIN = "Summary: The user"  # of the reply: a model of 1.5B else says that it knows of no conversation
MAX_TOKENS = 400  # of a summary


@dataclass(frozen=True)
class Compaction:
    """The replacement of turns by a summary, which `undone` takes back."""

    replaced: tuple[Turn, ...]
    summary: Turn

    @classmethod
    def of(cls, oldest: Sequence[Turn], reply: str) -> Compaction:
        """Replace the turns `oldest` by `reply`, the model's answer to REQUEST, with BEGIN. Raises UsageError if that
        is all."""
        if reply in ("", BEGIN):
            raise UsageError("the model wrote no summary; the conversation stays, and /drop makes room")
        documents = tuple(document for turn in oldest for document in turn.documents)
        return cls(tuple(oldest), Turn(REQUEST, documents, reply, (), complete=True))

    def done(self, conversation: Conversation) -> Conversation:
        """The conversation with the summary in place of its first turns."""
        return replace(conversation, turns=(self.summary, *conversation.turns[len(self.replaced) :]))

    def undone(self, conversation: Conversation) -> Conversation:
        """The conversation with its turns back, and those after them. Raises UsageError if the summary is no longer its
        first turn."""
        if conversation.turns[:1] != (self.summary,):
            raise UsageError("the summary is no longer in the conversation; the turns before it cannot come back")
        return replace(conversation, turns=(*self.replaced, *conversation.turns[1:]))


def beginning(conversation: Conversation, num_turns: int) -> Conversation:
    """The first turns of a conversation, with the request for a summary as the open question."""
    turns = conversation.turns[:num_turns]
    return replace(conversation, turns=turns, pending_documents=(), question=None).asked(REQUEST)


def fitting(conversation: Conversation, most: int, num_tokens: Callable[[Conversation], int], limit: int) -> int:
    """The number of oldest turns, up to `most`, whose summary fits the context; 0 if none. num_tokens: of a prompt.
    limit: of the context."""
    fits = (number for number in range(most, 0, -1) if _needed(conversation, number, num_tokens) <= limit)
    return next(fits, 0)


def _needed(conversation: Conversation, num_turns: int, num_tokens: Callable[[Conversation], int]) -> int:
    return num_tokens(beginning(conversation, num_turns)) + MAX_TOKENS
