"""Choices for /drop: the documents and turns of a conversation that make room in the context."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from triforce_cli.chat.notes import NUM_OFFERED, Drop
from triforce_cli.prompts.conversation import Conversation

if TYPE_CHECKING:
    from triforce_cli.prompts.formats import ChatFormat


def drops(conversation: Conversation, chat_format: ChatFormat, freed: Callable[[Conversation], int]) -> list[Drop]:
    """The largest documents and the oldest turns that /drop takes, with the tokens of context that dropping them frees.
    Empty if the template's text cannot be split into parts. freed: the tokens that another conversation in place of
    this one frees."""
    sizes = Counter[str]()
    for part in chat_format.parts(conversation):
        if part.kind == "document":
            sizes[part.name] += part.num_tokens
        elif part.kind == "conversation":
            return []
    found = [Drop(name, 0, freed(conversation.drop_document(name))) for name, _ in sizes.most_common(NUM_OFFERED)]
    num_turns = len(conversation.turns)
    for count in sorted({min(1, num_turns), num_turns // 2} - {0}):
        found.append(Drop(str(count), count, freed(conversation.drop_turns(count))))
    return [drop for drop in found if drop.num_tokens > 0]
