"""A small client of each HTTP API: it puts a reply together from a stream's events, and checks their order as the API's
public reference has it. No tests in here."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Document = dict[str, Any]
Events = Sequence[tuple[str, Any]]  # (name, data); data is a text where it is no JSON


def parse(text: str) -> list[tuple[str, Any]]:
    """The events in the text of a stream; comments are left out."""
    assert not text or text.endswith("\n\n"), text[-80:]
    found = []
    for block in text.split("\n\n")[:-1]:
        lines = [line.partition(": ") for line in block.split("\n")]
        fields = {name: value for name, _, value in lines if name}
        assert set(fields) <= {"event", "data"}, block
        if fields:
            data = fields["data"]
            found.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return found


def of_chat_completions(events: Events) -> Document:
    """As OpenAI's clients add up `chat.completion.chunk`s."""
    chunks = _chunks(events, "chat.completion.chunk")
    return _completion(chunks, "chat.completion", [*map(_message, _choices(chunks))])


def _message(parts: Sequence[Document]) -> Document:
    """A choice of a chat completion, of its chunks."""
    message: dict[str, Any] = {"role": "", "content": ""}
    calls: dict[int, Any] = {}
    logprobs: list[Any] = []
    assert parts[0]["delta"] == {"role": "assistant", "content": ""}
    for choice in parts:
        delta = choice["delta"]
        assert set(delta) <= {"role", "content", "reasoning_content", "tool_calls"}
        for name in ("role", "content", "reasoning_content"):
            if name in delta:
                message[name] = message.get(name, "") + delta[name]
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(calls)
                calls[call["index"]] = {name: call[name] for name in ("id", "type", "function")}
            else:
                assert (set(call), call["index"]) == ({"index", "function"}, len(calls) - 1)
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        logprobs += (choice["logprobs"] or {"content": []})["content"]
    if calls:
        message["tool_calls"] = list(calls.values())
        message["content"] = message["content"] or None
    scored = {"content": logprobs, "refusal": None} if logprobs else None
    return {"message": message, "logprobs": scored, **_ended(parts)}


def of_completions(events: Events) -> Document:
    chunks = _chunks(events, "text_completion")
    return _completion(chunks, "text_completion", [*map(_text, _choices(chunks))])


def _text(parts: Sequence[Document]) -> Document:
    """A choice of a completion, of its chunks."""
    scored = dict[str, list[Any]]()
    for choice in parts:
        for name, values in (choice["logprobs"] or {}).items():
            scored.setdefault(name, []).extend(values)
    return {"text": "".join(choice["text"] for choice in parts), "logprobs": scored or None, **_ended(parts)}


def _choices(chunks: Sequence[Document]) -> list[list[Document]]:
    """The chunks of each choice, in the order of their numbers."""
    every = [choice for chunk in chunks for choice in chunk["choices"]]
    numbers = sorted({choice["index"] for choice in every})
    assert numbers == list(range(len(numbers)))
    return [[choice for choice in every if choice["index"] == number] for number in numbers]


def _ended(parts: Sequence[Document]) -> Document:
    """The number and the end of a choice, which only its last chunk has."""
    *before, last = parts
    assert all(choice["finish_reason"] is None and "timings" not in choice for choice in before)
    assert last["finish_reason"] is not None
    return {name: last[name] for name in ("index", "finish_reason", "timings") if name in last}


def _chunks(events: Events, kind: str) -> list[Document]:
    """The data of all events but for the last, which says that it is."""
    assert {name for name, _ in events} == {""}
    assert [data for _, data in events if isinstance(data, str)] == ["[DONE]"] == [events[-1][1]]
    chunks = [data for _, data in events[:-1]]
    for chunk in chunks:
        assert {name: chunk[name] for name in ("id", "created", "model")} == {
            name: chunks[0][name] for name in ("id", "created", "model")
        }
        assert chunk["object"] == kind
    with_usage = [chunk for chunk in chunks if chunk.get("usage") is not None]
    assert [chunk for chunk in chunks if not chunk["choices"]] == with_usage
    assert with_usage in ([], chunks[-1:])
    assert {"usage" in chunk for chunk in chunks} == {bool(with_usage)}
    return chunks


def _completion(chunks: Sequence[Document], kind: str, choices: Sequence[Document]) -> Document:
    last = chunks[-1]
    more = {name: last[name] for name in ("usage", "timings") if last.get(name)}
    assert not any("timings" in chunk for chunk in chunks[:-1])
    return {name: last[name] for name in ("id", "created", "model")} | {"object": kind, "choices": choices} | more


def of_responses(events: Events) -> Document:
    """The response of the last event, once everything in it was told before."""
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert all(name == data["type"] for name, data in events)
    names = [name for name, _ in events]
    assert names[:2] == ["response.created", "response.in_progress"]
    for _, data in events[:2]:
        response = data["response"]
        assert (response["status"], response["output"], response["usage"]) == ("in_progress", [], None)
    items: list[Document] = []
    item: Document | None = None
    for name, data in events[2:-1]:
        if name == "response.in_progress":  # still
            assert (data["response"]["status"], data["response"]["output"]) == ("in_progress", items)
            continue
        if name == "response.output_item.added":
            assert item is None
            item = data["item"]
            assert (data["output_index"], item["status"]) == (len(items), "in_progress")
            continue
        assert item is not None, name
        assert data["output_index"] == len(items)
        if name == "response.output_item.done":
            assert data["item"] == {**item, "status": "completed"}
            items.append(data["item"])
            item = None
            continue
        assert data["item_id"] == item["id"]
        _TO_ITEM[item["type"]](item, name, data)
    assert item is None
    name, data = events[-1]
    whole: Document = data["response"]
    assert name == f"response.{whole['status']}"
    assert whole["output"] == items
    return whole


def _to_item(item: Document, name: str, data: Document) -> None:
    """An event within a message or reasoning, which have one part each."""
    kind = {"message": "output_text", "reasoning": "reasoning_text"}[item["type"]]
    assert data["content_index"] == 0
    if name == "response.content_part.added":
        assert (item["content"], data["part"]["text"], data["part"]["type"]) == ([], "", kind)
        item["content"].append(data["part"])
        return
    (part,) = item["content"]
    if name == f"response.{kind}.delta":
        assert "done" not in part
        part["text"] += data["delta"]
        if kind == "output_text":
            part["logprobs"] = part["logprobs"] + data["logprobs"]
    elif name == f"response.{kind}.done":
        assert (data["text"], data.get("logprobs")) == (part["text"], part.get("logprobs"))
        part["done"] = True
    else:
        assert (name, part.pop("done")) == ("response.content_part.done", True)
        assert data["part"]["text"] == part["text"]


def _to_call(item: Document, name: str, data: Document) -> None:
    if name == "response.function_call_arguments.delta":
        item["arguments"] += data["delta"]
    else:
        assert name == "response.function_call_arguments.done"
        assert (data["arguments"], data["name"]) == (item["arguments"], item["name"])


_TO_ITEM: dict[str, Callable[[Document, str, Document], None]] = {
    "message": _to_item, "reasoning": _to_item, "function_call": _to_call,
}  # fmt: skip
_DELTAS = {
    "text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}  # fmt: skip


def _input(text: str) -> Any:
    """The arguments of a call; of one that was cut what a whole message has of them."""
    try:
        return json.loads(text)
    except ValueError:
        return {"INVALID_JSON": text}


def of_messages(events: Events) -> Document:
    """As Anthropic's clients add up the events of a message."""
    assert all(name == data["type"] for name, data in events)
    names = [name for name, _ in events]
    assert (names[0], names[-2:]) == ("message_start", ["message_delta", "message_stop"])
    message: Document = dict(events[0][1]["message"])
    assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], None, None)
    blocks: list[Document] = []
    texts: list[str] | None = None
    for name, data in events[1:-2]:
        if name == "ping":
            continue
        if name == "content_block_start":
            assert (texts, data["index"]) == (None, len(blocks))
            block, texts = dict(data["content_block"]), []
            blocks.append(block)
            kind, key = _DELTAS[block["type"]]
            continue
        assert data["index"] == len(blocks) - 1
        assert texts is not None
        if name == "content_block_delta":
            assert data["delta"]["type"] == kind
            texts.append(data["delta"][key])
            continue
        assert name == "content_block_stop"
        whole, texts = "".join(texts), None
        blocks[-1] |= {"input": _input(whole)} if key == "partial_json" else {key: whole}
    assert texts is None
    last: Mapping[str, Any] = events[-2][1]
    return message | {"content": blocks} | last["delta"] | {"usage": last["usage"]}


CLIENTS: dict[str, Callable[[Events], Document]] = {
    "/v1/chat/completions": of_chat_completions, "/v1/completions": of_completions, "/v1/responses": of_responses,
    "/v1/messages": of_messages,
}  # fmt: skip


def without_names(value: Any) -> Any:
    """Without what differs between two replies to one request: identifiers and times."""
    if isinstance(value, dict):
        names = ("id", "created", "created_at", "item_id", "call_id", "timings")
        return {name: without_names(each) for name, each in value.items() if name not in names}
    return [without_names(each) for each in value] if isinstance(value, list) else value
