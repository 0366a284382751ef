"""Messages on chat templates that are missing, or that refuse a conversation."""

from __future__ import annotations

from collections.abc import Sequence

from triforce_cli.prompts.conversation import Conversation
from triforce_cli.prompts.guards import CUT
from triforce_cli.prompts.script import MARK
from triforce_cli.prompts.templates import OWN

_MOST_SAID = 400  # characters of a template's error message
REMEDY = f"choose another template (--template {'|'.join(OWN)})"


def no_template(named: Sequence[str]) -> str:
    found = f"no default chat template, only others ({', '.join(named)})" if named else "no chat template"
    return (
        f"the model has {found}: messages are written as a plain dialogue (User: ... Assistant: ...); "
        f"--template {'|'.join(OWN)} chooses another format"
    )


def refusal_of_messages(error: Exception) -> str:
    return f"the model's chat template refuses these messages ({_said(error)})"


def refusal(conversation: Conversation, error: Exception) -> str:
    again = conversation.turns and conversation.question is not None
    remedy = f"begin a new conversation (/clear), or {REMEDY}" if again else REMEDY
    if conversation.system:
        remedy = f"it may have no place for a system message: clear it (/system), or {remedy}"
    return f"the model's chat template refuses this conversation ({_said(error)}); {remedy}"


def _said(error: Exception) -> str:
    """The template's error message, cut to the length of a line; the error's type if it has no message."""
    said = str(error).replace(CUT, "").replace(MARK, "") or type(error).__name__
    return said if len(said) <= _MOST_SAID else said[:_MOST_SAID] + " ..."
