"""Messages in the form of the OpenAI API, for a chat template. The template decides which roles may follow each
other."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from offload import strict_json
from offload.errors import UsageError
from triforce_cli.documents import Document
from triforce_cli.tools.calls import MAX_DEPTH

Note = Callable[[str], None]  # takes a line for the log

BROKEN = "INVALID_JSON"  # the argument that holds arguments which are no JSON object, as Anthropic's API has it
_ONLY_TEXTS = "only texts can be read: of a model that takes pictures or sound this program runs the text part only"
LEFT_OUT = "[{} left out: only text can be read]"  # in place of a part that is no text
_TEXTS = ("text", "input_text", "output_text", "refusal")  # types of parts that are texts


@dataclass(frozen=True)
class Messages:
    """Messages before a reply. said: role and content of each, and its other fields (tool_calls, tool_call_id, name).
    content: a text, or None beside tool calls. begin: the beginning of the reply, if the last message is the
    assistant's. notes: lines for the log on parts that were left out or changed."""

    said: tuple[Mapping[str, Any], ...]
    begin: str = ""
    notes: tuple[str, ...] = ()

    @property
    def have_calls(self) -> bool:
        """True if a message has tool calls."""
        return any("tool_calls" in message for message in self.said)

    @property
    def documents(self) -> tuple[Document, ...]:
        """The messages' texts as documents, for citations: "message 1", ..."""
        texts = ((number, message["content"]) for number, message in enumerate(self.said, start=1))
        return tuple(Document(f"message {number}", text) for number, text in texts if text)


def read(messages: Sequence[Mapping[str, Any]]) -> Messages:
    """The messages, checked. New ones, behind the last reply, have to be texts; earlier ones are taken as they are, but
    for parts that no text can stand for. Raises UsageError for an invalid message, and if there is none to answer."""
    notes, first_new = list[str](), num_old(messages)
    said = [
        _message(message, f"message {number}", notes.append, is_new=number > first_new)
        for number, message in enumerate(messages, start=1)
    ]
    begin = ""
    if said and said[-1]["role"] == "assistant" and "tool_calls" not in said[-1]:
        begin = str(said.pop()["content"])
    if not said:
        raise UsageError("there is no message to answer")
    return Messages(tuple(said), begin, tuple(notes))


def num_old(messages: Sequence[Any]) -> int:
    """The number of messages up to the last reply. A call and its thoughts are one, also as items of their own."""
    return max((number for number, message in enumerate(messages, start=1) if _is_reply(message)), default=0)


def _is_reply(message: Any) -> bool:
    if not isinstance(message, Mapping):
        return False
    kind = message.get("type")
    return message.get("role") == "assistant" or (
        isinstance(kind, str) and (kind.endswith("_call") or kind == "reasoning")
    )


def text_of(content: Any, place: str, note: Note | None, *, instead: str = LEFT_OUT) -> str:
    """The text of a content: a text, or the joined texts of its parts. note: hears of parts that are no text, for which
    `instead` stands with their type; None: such a part raises UsageError. place: of the content, in messages."""
    parts = content if isinstance(content, list) else [content]
    if note is None and not parts:
        raise UsageError(f"{place} has a content that is no text; only texts can be read")
    return "".join(_text_of_part(part, place, note, instead) for part in parts)


def _text_of_part(part: Any, place: str, note: Note | None, instead: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(kind, str) and kind in _TEXTS:
        text = part.get("refusal" if kind == "refusal" else "text")
        if isinstance(text, str):
            return text
    said = f"of the type {json.dumps(kind)[:80]}, which is no text" if isinstance(kind, str) else "that is no text"
    if note is None:
        raise UsageError(f"{place} has a content {said}; {_ONLY_TEXTS}")
    note(f"{place} has a content {said}: it is left out")
    return instead.format(kind if isinstance(kind, str) else "content")


def _message(given: Mapping[str, Any], place: str, note: Note, *, is_new: bool) -> dict[str, Any]:
    """The message, checked, without fields that are null and without an empty list of calls: clients and servers write
    both for unused fields. Older names of fields are replaced by the newer ones."""
    message = {
        name: value for name, value in given.items() if value is not None and (name, value) != ("tool_calls", [])
    }
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise UsageError(f"{place} has the role {role!r}, it must be a text such as user")
    if message.pop("audio", None) is not None:
        note(f"{place} has audio, which is no text: it is left out")
    if (older := message.pop("function_call", None)) is not None:
        message.setdefault("tool_calls", [{"type": "function", "function": older}])
    if "tool_calls" in message:
        message["tool_calls"] = _calls(message["tool_calls"], place, note)
    refusal = message.pop("refusal", None)
    content = message.get("content")
    if role == "assistant":
        content = refusal if content is None else content
        is_call = content is None and "tool_calls" in message
        text = None if is_call else text_of("" if content is None else content, place, note, instead="")
    elif role in ("tool", "function"):
        message["role"], text = "tool", result_of(content, place, note)
    else:
        text = text_of(content, place, None if is_new else note)
    return message | {"content": text}


def result_of(content: Any, place: str, note: Note) -> str:
    """The text of a tool's result; of one that is neither a text nor parts of one, its JSON."""
    is_value = content is not None and not isinstance(content, str | list)
    written = json.dumps(content, ensure_ascii=False) if is_value else content
    return text_of("" if written is None else written, place, note)


def _calls(calls: Any, place: str, note: Note) -> list[dict[str, Any]]:
    """The tool calls of a message, with arguments as an object: clients write them as a JSON text, and templates expect
    the object."""
    if not isinstance(calls, list) or not calls:
        raise UsageError(f"{place} has tool_calls that are no list of calls")
    return [_call(call, place, note) for call in calls]


def _call(call: Any, place: str, note: Note) -> dict[str, Any]:
    """A tool call of a message, with its arguments parsed. A custom tool's is the call of a function with one text."""
    custom = call.get("custom") if isinstance(call, dict) else None
    if isinstance(custom, dict):
        others = {name: value for name, value in call.items() if name != "custom"}
        named: Any = {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
        call = {**others, "type": "function", "function": named}
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UsageError(f'{place} has a call that is not {{"function": {{"name": ..., "arguments": ...}}}}')
    found = _arguments(function.get("arguments"))
    if found.keys() == {BROKEN}:
        note(f"{place} calls {function['name'][:80]} with arguments that are no JSON object: their text is given")
    return {**call, "function": {**function, "arguments": found}}


def _arguments(given: Any) -> dict[str, Any]:
    """The arguments of a call as an object. Models write broken ones, and clients send them back."""
    if isinstance(given, dict):
        return given
    text = "" if given is None else given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    with suppress(ValueError, RecursionError):
        found = strict_json.parse(text) if text.strip() else {}
        strict_json.check_writable(found, MAX_DEPTH, "it")
        if isinstance(found, dict):
            return found
    return {BROKEN: text}
