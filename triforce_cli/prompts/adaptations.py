"""Adaptations of messages to chat templates that refuse them as they are: the same texts under other roles, in another
order, or with fewer borders."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from triforce_cli.prompts.messages import Messages

Said = Sequence[Mapping[str, Any]]  # of `Messages`

_THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # fields of thoughts, as transformers reads them
_GAP = "\n\n"  # between texts that become one


def adaptations(messages: Messages) -> Iterator[Messages]:
    """Yield the messages as they are, then adaptations of them, each further from the original, with a note on it."""
    stages = [messages]
    for adapt, note in _STEPS:
        said, before = tuple(adapt(stages[-1].said)), stages[-1]
        notes = (f"{note}: the model's chat template refuses them otherwise",) if note and said != before.said else ()
        stages.append(replace(before, said=said, notes=(*before.notes, *notes)))
    tried: list[Said] = []
    for stage in stages:
        for said in (stage.said, tuple(map(_with_thoughts_joined, stage.said))):
            if said not in tried:
                tried.append(said)
                yield replace(stage, said=said)


def with_calls_as_texts(messages: Messages) -> Messages:
    """The messages for a chat template without a place for tool calls: calls are text of the assistant's, results of
    the user's."""
    note = "earlier tool calls and their results are written as text: the model's chat template has no place for them"
    return replace(messages, said=tuple(map(_with_calls_as_text, messages.said)), notes=(*messages.notes, note))


def _with_calls_as_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if message["role"] == "tool":
        return {**message, "role": "user"}
    if "tool_calls" not in message:
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    calls = [{name: function[name] for name in ("name", "arguments")} for function in functions]
    texts = [message["content"], *(json.dumps(call, ensure_ascii=False) for call in calls)]
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**others, "content": "\n".join(filter(None, texts))}


def _with_older_roles(said: Said) -> Iterator[Mapping[str, Any]]:
    """The role "developer" is replaced by the older "system"."""
    return ({**each, "role": "system"} if each["role"] == "developer" else each for each in said)


def _with_system_first(said: Said) -> Iterator[Mapping[str, Any]]:
    """All system messages are one, the first."""
    system = [each for each in said if each["role"] == "system"]
    if system:
        yield {**system[0], "content": _GAP.join(each["content"] for each in system if each["content"])}
    yield from (each for each in said if each["role"] != "system")


def _with_turns(said: Said) -> Iterator[Mapping[str, Any]]:
    """Neighbours of one role are one message, other than results of tools."""
    last: Mapping[str, Any] | None = None
    for each in said:
        if last is not None and last["role"] == each["role"] != "tool" and "tool_calls" not in last:
            texts = [text for text in (last["content"], each["content"]) if text]
            last = {**last, **each, "content": _GAP.join(texts) if texts else each["content"]}
            continue
        if last is not None:
            yield last
        last = each
    if last is not None:
        yield last


def _with_system_in_question(said: Said) -> Iterator[Mapping[str, Any]]:
    """The system message begins the first one of the user's."""
    system = [each["content"] for each in said if each["role"] == "system" and each["content"]]
    asked = next((each for each in said if each["role"] == "user"), None)
    for each in said:
        if each is asked:
            yield {**each, "content": _GAP.join([*system, each["content"]])}
        elif each["role"] != "system" or asked is None:
            yield each


def _with_thoughts_joined(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The content of a message that has tool calls and thoughts stands at the end of these: some templates take one of
    both."""
    thoughts = next((message[name] for name in _THOUGHTS if isinstance(message.get(name), str)), "")
    if not (thoughts and message["content"] and "tool_calls" in message):
        return message
    others = {name: value for name, value in message.items() if name not in _THOUGHTS}
    return others | {"content": None, _THOUGHTS[0]: f"{thoughts}{_GAP}{message['content']}"}


_STEPS: tuple[tuple[Callable[[Said], Iterator[Mapping[str, Any]]], str], ...] = (
    (_with_older_roles, ""),
    (_with_system_first, "system messages are joined at the front"),
    (_with_turns, "messages of one role in a row are joined"),
    (_with_system_in_question, "system messages are joined to the first question"),
)
