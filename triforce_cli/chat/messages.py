"""Messages as the OpenAI API has them: role and content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from offload.errors import UsageError
from triforce_cli.chat.conversation import Conversation

ROLES = ("system", "user", "assistant")
_SYSTEM = ("system", "developer")


def read(messages: Sequence[Mapping[str, Any]]) -> tuple[Conversation, str]:
    """(the conversation with its open question, what the reply begins with: the last message, where it is the
    assistant's). Raises UsageError for what is no conversation.

    First at most one system message, then the user and the assistant in turns.
    """
    conversation, begin, last = Conversation(), "", ""
    for number, message in enumerate(messages, start=1):
        role, content = _role(message, number), _content(message, number)
        if role == "system":
            if number > 1:
                raise UsageError(f"message {number} is a system message; it may only be the first one")
            conversation = conversation.with_system(content)
        elif role == last or (role == "assistant" and not last):
            raise UsageError(
                f"message {number} is of the {role}, and so is the one before; user and assistant take turns"
            )
        elif role == "user":
            if begin:
                conversation, begin = conversation.answered(begin, (), complete=True), ""
            conversation = conversation.asked(content)
        else:
            begin = content
        last = role if role != "system" else ""
    if conversation.question is None:
        raise UsageError("there is no message of the user to answer")
    return conversation, begin


def _role(message: Mapping[str, Any], number: int) -> str:
    role = message.get("role")
    if role in _SYSTEM:
        return "system"
    if role not in ROLES:
        raise UsageError(f"message {number} has the role {role!r}, it must be one of {', '.join(ROLES)}")
    return str(role)


def _content(message: Mapping[str, Any], number: int) -> str:
    """A text, or a list of parts that are texts."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in parts]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise UsageError(f"message {number} has a content that is no text; only texts can be read")
    return "".join(text for text in texts if text)
