"""Messages in the form of the OpenAI API, for a chat template. The template decides which roles may follow each
other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from offload import strict_json
from offload.errors import UsageError
from triforce_cli.answering.calls import MAX_DEPTH
from triforce_cli.documents import Document

_REFUSED = ("audio", "function_call")  # fields that no template reads: their content would be lost
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # fields of thoughts, as transformers reads them


@dataclass(frozen=True)
class Messages:
    """Messages before a reply. said: role and content of each, and its other fields (tool_calls, tool_call_id, name).
    content: a text, or None beside tool calls. begin: the beginning of the reply, if the last message is the
    assistant's."""

    said: tuple[Mapping[str, Any], ...]
    begin: str = ""

    @property
    def have_calls(self) -> bool:
        """True if a message has tool calls."""
        return any("tool_calls" in message for message in self.said)

    @property
    def documents(self) -> tuple[Document, ...]:
        """The messages' texts as documents, for citations: "message 1", ..."""
        texts = ((number, message["content"]) for number, message in enumerate(self.said, start=1))
        return tuple(Document(f"message {number}", text) for number, text in texts if text)

    def with_older_roles(self) -> Messages:
        """The messages with the role "developer" replaced by the older "system", for templates that do not know it."""
        said = ({**each, "role": "system"} if each["role"] == "developer" else each for each in self.said)
        return replace(self, said=tuple(said))

    def with_thoughts_joined(self) -> Messages:
        """The messages with the content of one that has tool calls and thoughts at the end of these, for templates that
        take one of both."""
        return replace(self, said=tuple(map(_joined, self.said)))


def read(messages: Sequence[Mapping[str, Any]]) -> Messages:
    """The messages, checked. Raises UsageError for an invalid message, and if there is none to answer."""
    said = [_message(message, number) for number, message in enumerate(messages, start=1)]
    begin = ""
    if said and said[-1]["role"] == "assistant" and "tool_calls" not in said[-1]:
        begin = str(said.pop()["content"])
    if not said:
        raise UsageError("there is no message to answer")
    return Messages(tuple(said), begin)


def _message(given: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The message, checked, without fields that are null and without an empty list of calls: clients and servers write
    both for unused fields."""
    message = {
        name: value for name, value in given.items() if value is not None and (name, value) != ("tool_calls", [])
    }
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise UsageError(f"message {number} has the role {role!r}, it must be a text such as user")
    if refused := [name for name in _REFUSED if name in message]:
        raise UsageError(f"message {number} has {refused[0]}, which cannot be read; use content or tool_calls")
    if "tool_calls" in message:
        message["tool_calls"] = _calls(message["tool_calls"], number)
    content = None if message.get("content") is None and "tool_calls" in message else _content(message, number)
    return message | {"content": content}


def _joined(message: Mapping[str, Any]) -> Mapping[str, Any]:
    thoughts = next((message[name] for name in _THOUGHTS if isinstance(message.get(name), str)), "")
    if not (thoughts and message["content"] and "tool_calls" in message):
        return message
    others = {name: value for name, value in message.items() if name not in _THOUGHTS}
    return others | {"content": None, _THOUGHTS[0]: f"{thoughts}\n\n{message['content']}"}


def _content(message: Mapping[str, Any], number: int) -> str:
    """The content of a message: a text, or the joined texts of a list of parts."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in parts]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise UsageError(f"message {number} has a content that is no text; only texts can be read")
    return "".join(text for text in texts if text)


def _calls(calls: Any, number: int) -> list[dict[str, Any]]:
    """The tool calls of a message, with arguments as an object: clients write them as a JSON text, and templates expect
    the object."""
    if not isinstance(calls, list) or not calls:
        raise UsageError(f"message {number} has tool_calls that are no list of calls")
    return [_call(call, number) for call in calls]


def _call(call: Any, number: int) -> dict[str, Any]:
    """A tool call of a message, with its arguments parsed."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UsageError(f'message {number} has a call that is not {{"function": {{"name": ..., "arguments": ...}}}}')
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = strict_json.parse(arguments or "{}")
            strict_json.check_writable(arguments, MAX_DEPTH, "it")
        except (ValueError, RecursionError) as error:
            raise UsageError(
                f"message {number} calls {function['name']} with arguments that are no JSON ({error})"
            ) from error
    if not isinstance(arguments, dict):
        raise UsageError(f"message {number} calls {function['name']} with arguments that are no object")
    return {**call, "function": {**function, "arguments": arguments}}
