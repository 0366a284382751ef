"""HTTP APIs: their requests in our fields, our answers in their replies, whole and as a stream."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.api_clients import CLIENTS, parse, without_names
from offload.decode.sampling import SamplingParams
from offload.errors import UsageError
from triforce_cli.answering.request import Wanted
from triforce_cli.apis.api import PLACE, Api, ApiError, CallPiece, Ended, Event, Reply, Said, ToolCall, Usage
from triforce_cli.apis.chat_completions import ChatCompletions
from triforce_cli.apis.completions import Completions
from triforce_cli.apis.messages import Messages
from triforce_cli.apis.responses import Responses
from triforce_cli.batch.records import check_known, read_record, read_records
from triforce_cli.serve.reader import FIELDS, by_prompt, parsed
from triforce_cli.tools.choice import ANY, ToolChoice

Json = dict[str, Any]
CHAT, TEXT, RESPONSES, MESSAGES = ChatCompletions(), Completions(), Responses(), Messages()
APIS: tuple[Api, ...] = (CHAT, TEXT, RESPONSES, MESSAGES)
EVERY = pytest.mark.parametrize("api", APIS, ids=lambda api: api.path)
DEFAULTS = Wanted(max_tokens=100, sampling=SamplingParams())
HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "f", "description": "of x", "parameters": SCHEMA}}
FLAT = {"type": "function", "name": "f", "description": "of x", "parameters": SCHEMA}
CUSTOM = {"name": "f", "description": "of x", "input_schema": SCHEMA}
LEAST: dict[Api, Json] = {
    CHAT: {"messages": HI}, TEXT: {"prompt": "x"}, RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": HI, "max_tokens": 5},
}  # fmt: skip
READ: dict[Api, Json] = {
    CHAT: {"messages": HI}, TEXT: {"prompt": "x", "max_tokens": 16}, RESPONSES: {"messages": HI},
    MESSAGES: {"messages": HI, "max_tokens": 5},
}  # fmt: skip


def unheard(note: str) -> None:
    raise AssertionError(note)


def fields_of(api: Api, body: Mapping[str, Any]) -> Json:
    """The fields of a request of which nothing is left out."""
    return api.fields(body, unheard)


@EVERY
def test_the_least_request_can_be_answered(api: Api) -> None:
    assert fields_of(api, LEAST[api]) == READ[api]
    record = read_record(READ[api], 1, PLACE, DEFAULTS)
    assert (record.prompt, record.messages is None) == (("x", True) if api is TEXT else ("", False))


@pytest.mark.parametrize(
    ("api", "given", "found"),
    [
        (CHAT, {"max_tokens": 3}, {"max_tokens": 3}),
        (CHAT, {"max_completion_tokens": 3}, {"max_tokens": 3}),
        (CHAT, {"max_tokens": 3, "max_completion_tokens": 3}, {"max_tokens": 3}),
        (CHAT, {"max_tokens": None, "max_completion_tokens": 3}, {"max_tokens": 3}),
        (CHAT, {"logprobs": True}, {"logprobs": 0}),
        (CHAT, {"logprobs": True, "top_logprobs": 4}, {"logprobs": 4}),
        (CHAT, {"logprobs": False, "top_logprobs": 4}, {}),
        (CHAT, {"reasoning_effort": "low"}, {"template_args": {"reasoning_effort": "low"}}),
        (CHAT, {"chat_template_kwargs": {"a": 1}}, {"template_args": {"a": 1}}),
        (
            CHAT,
            {"reasoning_effort": "low", "chat_template_kwargs": {"a": 1}},
            {"template_args": {"reasoning_effort": "low", "a": 1}},
        ),
        (CHAT, {"response_format": {"type": "text"}}, {}),
        (CHAT, {"response_format": {"type": "json_object"}}, {"json_schema": {"type": "object"}}),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            {"json_schema": SCHEMA},
        ),
        (CHAT, {"tools": [TOOL]}, {"tools": [TOOL]}),
        (CHAT, {"tools": [TOOL], "tool_choice": "none"}, {}),
        (CHAT, {"tools": [TOOL], "tool_choice": "auto"}, {"tools": [TOOL], "tool_choice": "auto"}),
        (CHAT, {"parallel_tool_calls": False}, {"parallel_tool_calls": False}),
        (CHAT, {"tools": [TOOL], "tool_choice": "required"}, {"tools": [TOOL], "tool_choice": "required"}),
        (CHAT, {"temperature": 0.5, "stop": ["a"], "seed": 3}, {"temperature": 0.5, "stop": ["a"], "seed": 3}),
        (CHAT, {"top_k": 4, "thinking": "off"}, {"top_k": 4, "thinking": "off"}),
        (TEXT, {"prompt": ["y"]}, {"prompt": "y"}),
        (TEXT, {"max_tokens": 3}, {"max_tokens": 3}),
        (TEXT, {"logprobs": 2}, {"logprobs": 2}),
        (TEXT, {"echo": True, "suffix": "", "best_of": 1}, {}),
        (TEXT, {"temperature": 0.5, "stop": "a", "seed": 3}, {"temperature": 0.5, "stop": "a", "seed": 3}),
        (RESPONSES, {"instructions": "Be."}, {"messages": [{"role": "system", "content": "Be."}, *HI]}),
        (RESPONSES, {"max_output_tokens": 3}, {"max_tokens": 3}),
        (RESPONSES, {"tools": [FLAT]}, {"tools": [TOOL]}),
        (RESPONSES, {"tools": [{**FLAT, "strict": True}]},
         {"tools": [{"type": "function", "function": {**TOOL["function"], "strict": True}}]}),  # type: ignore[dict-item]
        (RESPONSES, {"tools": [FLAT], "tool_choice": "none"}, {"tool_choice": "none"}),
        (RESPONSES, {"tools": []}, {}),
        (RESPONSES, {"include": ["message.output_text.logprobs"]}, {"logprobs": 0}),
        (RESPONSES, {"include": ["message.output_text.logprobs"], "top_logprobs": 3}, {"logprobs": 3}),
        (RESPONSES, {"include": ["reasoning.encrypted_content"], "top_logprobs": 3}, {}),
        (RESPONSES, {"reasoning": {"effort": "low", "summary": "auto"}},
         {"template_args": {"reasoning_effort": "low"}}),
        (RESPONSES, {"text": {"format": {"type": "text"}, "verbosity": "low"}}, {}),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "n", "strict": True, "schema": SCHEMA}}},
         {"json_schema": SCHEMA}),
        (RESPONSES, {"text": {"format": {"type": "json_object"}}}, {"json_schema": {"type": "object"}}),
        (RESPONSES, {"store": False, "truncation": "disabled", "previous_response_id": None}, {}),
        (RESPONSES, {"temperature": 0.5, "top_p": 0.5}, {"temperature": 0.5, "top_p": 0.5}),
        (MESSAGES, {"system": "Be."}, {"messages": [{"role": "system", "content": "Be."}, *HI]}),
        (MESSAGES, {"system": [{"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}},
                               {"type": "text", "text": "."}]},
         {"messages": [{"role": "system", "content": "Be."}, *HI]}),
        (MESSAGES, {"tools": [CUSTOM]}, {"tools": [TOOL]}),
        (MESSAGES, {"tools": [{**CUSTOM, "type": "custom", "cache_control": {"type": "ephemeral"}}]},
         {"tools": [TOOL]}),
        (MESSAGES, {"tools": [CUSTOM], "tool_choice": {"type": "none"}},
         {"tool_choice": "none", "parallel_tool_calls": True}),
        (MESSAGES, {"tools": [CUSTOM], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
         {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}),
        (MESSAGES, {"tools": [{**CUSTOM, "strict": True}]},
         {"tools": [{"type": "function", "function": {**TOOL["function"], "strict": True}}]}),  # type: ignore[dict-item]
        (MESSAGES, {"stop_sequences": ["a"]}, {"stop": ["a"]}),
        (MESSAGES, {"stop_sequences": []}, {}),
        (MESSAGES, {"thinking": {"type": "disabled"}}, {"thinking": "off"}),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 9}}, {"thinking": "show", "thinking_tokens": 9}),
        (MESSAGES, {"thinking": {"type": "adaptive"}}, {}),
        (MESSAGES, {"temperature": 0.5, "top_p": 0.5, "top_k": 3}, {"temperature": 0.5, "top_p": 0.5, "top_k": 3}),
        (MESSAGES, {"metadata": {"user_id": "u"}, "service_tier": "auto", "stream": True}, {}),
        (MESSAGES, {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}, {}),
        (MESSAGES, {"output_config": {"effort": "high"}}, {}),
        (MESSAGES, {"diagnostics": {"previous_message_id": None}, "container": None, "mcp_servers": None}, {}),
        (MESSAGES, {"cache_control": {"type": "ephemeral"}, "mcp_servers": []}, {}),
        (CHAT, {"verbosity": "low"}, {}),
        (RESPONSES, {"max_tool_calls": 3}, {}),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, {"json_schema": SCHEMA}),
    ],
)  # fmt: skip
def test_a_field_is_read_as_ours(api: Api, given: Json, found: Json) -> None:
    assert fields_of(api, LEAST[api] | given) == READ[api] | found
    read_record(fields_of(api, LEAST[api] | given), 1, PLACE, DEFAULTS)


OPENAI_IGNORED = {
    "model": "m", "user": "u", "metadata": {"a": "b"}, "service_tier": "auto", "safety_identifier": "s",
    "prompt_cache_key": "k", "prompt_cache_retention": "24h", "stream_options": {"include_usage": True}, "n": 1,
    "stream": True,
}  # fmt: skip


@pytest.mark.parametrize("name", OPENAI_IGNORED)
@pytest.mark.parametrize("api", [CHAT, TEXT, RESPONSES], ids=lambda api: api.path)
def test_what_does_not_affect_the_text_is_ignored(api: Api, name: str) -> None:
    if (api, name) != (RESPONSES, "n"):
        assert fields_of(api, LEAST[api] | {name: OPENAI_IGNORED[name]}) == READ[api]


@EVERY
def test_null_is_as_absent(api: Api) -> None:
    names = ["temperature", "top_p", "stream", "model", "metadata", "service_tier"]
    if api is not MESSAGES:
        names += ["seed", "stop", "user", "stream_options", "store", "tool_choice", "logprobs", "tools"]
    assert fields_of(api, LEAST[api] | dict.fromkeys(names)) == READ[api]


@pytest.mark.parametrize(
    ("api", "given", "message"),
    [
        (CHAT, {"n": 0}, "n is 0; it must be a whole number from 1"),
        (CHAT, {"store": True}, "store is true"),
        (CHAT, {"stream": 1}, "stream is 1, it can only be true or false"),
        (CHAT, {"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        (CHAT, {"stream_options": []}, "stream_options"),
        (CHAT, {"stream_options": {"include_usage": "x"}}, "include_usage"),
        (CHAT, {"modalities": ["audio"]}, "modalities"),
        (CHAT, {"tool_choice": "required"}, "tool_choice demands a call, and no functions are offered"),
        (CHAT, {"tool_choice": "any"}, 'tool_choice is "any", it can be "none", "auto"'),
        (CHAT, {"tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice is {"),
        (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
         'tool_choice names "g", which is none of the functions'),
        (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice names null"),
        (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function", "function": 3}}, "tool_choice is {"),
        (CHAT, {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": [3]}}, "tool_choice is {"),
        (CHAT, {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": [{"name": []}]}},
         "tool_choice names []"),
        (CHAT, {"logprobs": 1}, "logprobs is 1"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs needs logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": "x"}, "logprobs is"),
        (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens and max_completion_tokens"),
        (CHAT, {"max_tokens": 0}, "max_tokens is 0"),
        (CHAT, {"response_format": "json"}, "response_format"),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format"),
        (CHAT, {"response_format": {"type": ["text"]}}, "response_format"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": None}}}, "response_format"),
        (CHAT, {"response_format": {"type": "text", "x": 1}}, "response_format of type text has 'x'"),
        (CHAT, {"reasoning_effort": "low", "chat_template_kwargs": 3}, "template_args is 3"),
        (CHAT, {"functions": [TOOL]}, "no field 'functions'"),
        (CHAT, {"max_token": 3}, "did you mean 'max_tokens'"),
        (CHAT, {"temperature": "hot"}, "temperature"),
        (TEXT, {"prompt": [1, 2]}, "prompt is [1, 2], it must be a text or a list of texts"),
        (TEXT, {"prompt": []}, "prompt is []"),
        (TEXT, {"prompt": ["a", ["b"]]}, "prompt"),
        (TEXT, {"prompt": [[1]]}, "prompt"),
        (TEXT, {"prompt": None}, "prompt is null"),
        (TEXT, {"prompt": ""}, 'prompt is ""'),
        (TEXT, {"n": 1.0}, "n is 1.0"),
        (TEXT, {"best_of": 2}, "best_of is 2, it can only be 1"),
        (TEXT, {"n": 3, "best_of": 2}, "best_of is 2, it can only be 3"),
        (TEXT, {"suffix": "x"}, 'suffix is "x"'),
        (TEXT, {"echo": "x"}, 'echo is "x"'),
        (TEXT, {"logprobs": True}, "logprobs is true"),
        (TEXT, {"messages": HI}, 'a "prompt" and "messages"'),
        (TEXT, {"tools": [TOOL]}, "tools is for a chat template"),
        (RESPONSES, {"store": True}, "store is true"),
        (RESPONSES, {"background": True}, "background is true"),
        (RESPONSES, {"truncation": "auto"}, "truncation"),
        (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id"),
        (RESPONSES, {"conversation": "c"}, "conversation"),
        (RESPONSES, {"prompt": {"id": "p"}}, "prompt"),
        (RESPONSES, {"tool_choice": {"type": "web_search"}}, "tool_choice"),
        (RESPONSES, {"tools": [{"type": "web_search"}]}, "tool 1 is of the type \"web_search\""),
        (RESPONSES, {"tools": ["x"]}, "tool 1"),
        (RESPONSES, {"tools": "x"}, "tools are no list"),
        (RESPONSES, {"include": "x"}, "include is no list"),
        (RESPONSES, {"text": []}, "text is []"),
        (RESPONSES, {"text": {"x": 1}}, "text has 'x'"),
        (RESPONSES, {"text": {"format": {"type": "grammar"}}}, "response_format"),
        (RESPONSES, {"reasoning": "low"}, "reasoning is \"low\""),
        (RESPONSES, {"max_output_tokens": 0}, "max_tokens is 0"),
        (RESPONSES, {"input": None}, "input is null"),
        (RESPONSES, {"input": []}, "messages"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "item 1 of input is of the type"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "item 1 of input has"),
        (RESPONSES, {"input": [{"content": "x"}]}, "has the role None"),
        (MESSAGES, {"max_tokens": None}, "max_tokens is missing"),
        (MESSAGES, {"max_tokens": 0}, "max_tokens is 0"),
        (MESSAGES, {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        (MESSAGES, {"context_management": {"edits": {"type": "x"}}}, "context_management"),
        (MESSAGES, {"output_config": {"tone": "kind"}}, "output_config has 'tone'"),
        (CHAT, {"prompt": "x", "messages": None}, "has no messages"),
        (CHAT, {"prompt": []}, "leave one of them out"),
        (CHAT, {"max_tokens": "x", "max_completion_tokens": 5}, "one limit"),
        (CHAT, {"response_format": {"type": "json_object"}, "json_schema": {}}, "json_schema is said twice"),
        (CHAT, {"template_args": {}, "chat_template_kwargs": {}}, "template_args is said twice"),
        (CHAT, {"reasoning_effort": "low", "template_args": {"reasoning_effort": "high"}}, "said twice"),
        (CHAT, {"n": True}, "n is true"),
        (RESPONSES, {"max_output_tokens": 5, "max_tokens": 2}, "max_tokens is said twice"),
        (RESPONSES, {"text": {"format": {"type": "json_object"}}, "json_schema": {}}, "json_schema is said twice"),
        (RESPONSES, {"reasoning": {"effort": "low"}, "template_args": {}}, "template_args is said twice"),
        (MESSAGES, {"thinking": {"type": "enabled"}}, "budget_tokens"),
        (MESSAGES, {"thinking": {"type": "disabled", "budget_tokens": 5}}, "budget_tokens"),
        (CHAT, {"logprobs": True, "top_logprobs": []}, "logprobs"),
        (MESSAGES, {"messages": None}, "messages are null"),
        (MESSAGES, {"messages": "hi"}, "messages are \"hi\""),
        (MESSAGES, {"messages": ["hi"]}, "message 1 is no object"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 'type "image"'),
        (MESSAGES, {"messages": [*HI, {"role": "assistant", "content": "a"}, {"role": "user", "content": [
            {"type": "text", "text": "see"}, {"type": "image"}]}]}, 'message 3 has a content of the type "image"'),
        (RESPONSES, {"input": [{"role": "assistant", "content": "a"}, {"role": "user", "content": [
            {"type": "input_image"}]}]}, 'item 2 of input has a content of the type "input_image"'),
        (TEXT, {"echo": True, "logprobs": 0}, "echo and logprobs are not answered together"),
        (CHAT, {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, 'tool 1 is of the type "custom"'),
        (MESSAGES, {"system": 3}, "system has a content that is no text"),
        (MESSAGES, {"n": 1}, "no field 'n'"),
        (MESSAGES, {"seed": 1}, "no field 'seed'"),
        (MESSAGES, {"tool_choice": {"type": "required"}}, 'tool_choice is of the type "required", it can be auto'),
        (MESSAGES, {"tool_choice": {"type": "tool", "name": "f"}}, 'tool_choice names "f"'),
        (MESSAGES, {"tool_choice": "auto"}, "tool_choice"),
        (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tool 1"),
        (MESSAGES, {"tools": 3}, "tools are no list"),
        (MESSAGES, {"thinking": {"type": "sometimes"}}, "thinking is of the type"),
        (MESSAGES, {"thinking": {"type": ["x"]}}, "thinking is of the type"),
        (MESSAGES, {"thinking": "on"}, "thinking is \"on\""),
        (MESSAGES, {"stop_sequences": [""]}, "stop"),
        (MESSAGES, {"stream": "yes"}, "stream"),
    ],
)  # fmt: skip
def test_a_field_that_is_not_supported_is_refused_by_its_name(api: Api, given: Json, message: str) -> None:
    with pytest.raises(UsageError) as error:
        read(api, LEAST[api] | given)
    assert message in str(error.value)
    assert str(error.value).startswith(PLACE)


@pytest.mark.parametrize(
    ("given", "seed"),
    [(-1, None), (0, 0), (7, 7), (2**63 - 1, 2**63 - 1), (-2, 2**63 - 2), (-(2**63), 0), (None, None)],
)
@pytest.mark.parametrize("api", [CHAT, TEXT, RESPONSES], ids=lambda api: api.path)
def test_a_seed_has_64_bits_and_a_sign(api: Api, given: int | None, seed: int | None) -> None:
    """-1 draws one in other programs; it was refused, as all negative ones."""
    fields = fields_of(api, LEAST[api] | {"seed": given})
    defaults = Wanted(max_tokens=100, sampling=SamplingParams(seed=None if given is None else 5))
    assert read_record(fields, 1, PLACE, defaults).wanted.sampling.seed == seed


@pytest.mark.parametrize("given", [2**63, -(2**63) - 1, 1.0, True, "1"])
def test_other_seeds_are_refused(given: Any) -> None:
    with pytest.raises(UsageError, match="seed is"):
        read(CHAT, LEAST[CHAT] | {"seed": given})


def test_a_field_of_ours_does_not_replace_the_input_of_a_response() -> None:
    """`messages` beside `input` was answered, and `input` was ignored."""
    with pytest.raises(UsageError, match="messages"):
        read(RESPONSES, {"input": "hi", "messages": [{"role": "user", "content": "another"}]})


def read(api: Api, body: Mapping[str, Any]) -> int:
    """As the server does. Returns the number of choices."""
    fields, num = api.fields(body, str), api.num_choices(body)
    each = by_prompt(fields)
    if num * len(each) > 64:
        raise UsageError(f"{num} answers to {len(each)} prompts")
    for one in each:
        check_known(one, FIELDS, PLACE, "")
        read_record(one, 0, PLACE, DEFAULTS)
    return num * len(each)


F = {"type": "function", "name": "f"}
OF_F = {"type": "function", "function": {"name": "f"}}
TWO = [{"name": "f"}, {"name": "g"}]
ALLOWED = [F, {"type": "function", "name": "g"}]


@pytest.mark.parametrize(
    ("api", "body", "expected"),
    [
        (CHAT, {}, ANY),
        (CHAT, {"tool_choice": "auto", "parallel_tool_calls": None}, ANY),
        (CHAT, {"parallel_tool_calls": True}, ANY),
        (CHAT, {"parallel_tool_calls": False}, ToolChoice(is_one=True)),
        (CHAT, {"tool_choice": "required"}, ToolChoice(is_due=True)),
        (CHAT, {"tool_choice": OF_F}, ToolChoice(is_due=True, names=frozenset("f"))),
        (CHAT, {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [OF_F]}}},
         ToolChoice(is_due=True, names=frozenset("f"))),
        (RESPONSES, {"parallel_tool_calls": False}, ToolChoice(is_one=True)),
        (RESPONSES, {"tool_choice": "required", "parallel_tool_calls": True}, ToolChoice(is_due=True)),
        (RESPONSES, {"tool_choice": F}, ToolChoice(is_due=True, names=frozenset("f"))),
        (RESPONSES, {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": ALLOWED}},
         ToolChoice(names=frozenset("fg"))),
        (MESSAGES, {"tool_choice": {"type": "auto"}}, ANY),
        (MESSAGES, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": False}}, ANY),
        (MESSAGES, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, ToolChoice(is_one=True)),
        (MESSAGES, {"tool_choice": {"type": "any"}}, ToolChoice(is_due=True)),
        (MESSAGES, {"tool_choice": {"type": "tool", "name": "f"}}, ToolChoice(is_due=True, names=frozenset("f"))),
    ],
)  # fmt: skip
def test_a_client_chooses_which_calls_there_may_be(api: Api, body: Json, expected: ToolChoice) -> None:
    kinds = {CHAT: {"type": "function"}, RESPONSES: {"type": "function"}, MESSAGES: {"input_schema": {}}}
    tools = [{**kinds[api], "function": each} if api is CHAT else {**kinds[api], **each} for each in TWO]
    assert read_record(fields_of(api, LEAST[api] | {"tools": tools} | body), 1, PLACE, DEFAULTS).choice == expected


def called(name: str, arguments: str, identifier: str) -> Json:
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_items_of_a_response_become_messages_in_their_order() -> None:
    items = [
        {"role": "user", "content": "Weather?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "I "}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "look."}]},
        {"type": "reasoning", "encrypted_content": "gibberish", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I ask."}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}", "status": "completed"},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "sun"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Again."}]},
        {"type": "function_call", "call_id": "c3", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c3", "output": ""},
        {"role": "developer", "content": [{"type": "input_text", "text": "Be"}, {"type": "text", "text": " brief."}]},
    ]
    assert fields_of(RESPONSES, {"input": items})["messages"] == [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant", "content": "I ask.", "reasoning_content": "I look.",
            "tool_calls": [called("f", "{}", "c1"), called("g", '{"a": 1}', "c2")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "tool", "tool_call_id": "c2", "content": "sun"},
        {"role": "assistant", "content": None, "reasoning_content": "Again.", "tool_calls": [called("f", "{}", "c3")]},
        {"role": "tool", "tool_call_id": "c3", "content": ""},
        {"role": "developer", "content": "Be brief."},
    ]  # fmt: skip


CALLED_BEFORE = [
    {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin"},
    {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done"},
    {"type": "local_shell_call", "call_id": "c2", "action": {"type": "exec", "command": ["ls"]}, "status": "completed"},
    {"type": "local_shell_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "a"}]},
    {"type": "function_call", "call_id": "c3", "name": "f", "arguments": "{"},
    {"type": "function_call_output", "call_id": "c3", "output": [{"type": "input_image", "image_url": "data:"}]},
    {"type": "function_call_output", "call_id": "c4", "output": None},
    {"type": "function_call_output", "call_id": "c5", "output": {"exit": 0}},
]  # fmt: skip
LEFT_OUT = [
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
    {"type": "image_generation_call", "id": "ig_1", "result": "AAAA"},
    {"type": "file_search_call", "id": "fs_1", "queries": ["x"]},
    {"type": "code_interpreter_call", "id": "ci_1", "code": "1", "outputs": []},
    {"type": "mcp_list_tools", "id": "l", "server_label": "s", "tools": []},
    {"type": "computer_call_output", "call_id": "unknown", "output": {"type": "computer_screenshot"}},
    {"type": "compaction", "encrypted_content": "x"},
    {"type": "of_tomorrow"},
]  # fmt: skip


def test_items_that_other_tools_left_are_taken_or_left_out_with_a_note() -> None:
    """One of them ended the talk."""
    notes: list[str] = []
    found = RESPONSES.fields({"input": [*HI, *LEFT_OUT, *CALLED_BEFORE, *HI]}, notes.append)["messages"]
    assert [message["role"] for message in found] == ["user", *["assistant", "tool"] * 3, "tool", "tool", "user"]
    assert [message["tool_calls"][0]["function"] for message in found if "tool_calls" in message] == [
        {"name": "apply_patch", "arguments": {"input": "*** Begin"}},
        {"name": "local_shell", "arguments": {"type": "exec", "command": ["ls"]}},
        {"name": "f", "arguments": "{"},
    ]
    assert [message["content"] for message in found if message["role"] == "tool"] == [
        "Done", "a", "[input_image left out: only text can be read]", "", '{"exit": 0}',
    ]  # fmt: skip
    assert [note.split('"')[1] for note in notes] == [*(item["type"] for item in LEFT_OUT), "input_image"]
    with pytest.raises(UsageError, match="the server keeps no items"):
        RESPONSES.fields({"input": [*HI, {"type": "item_reference", "id": "x"}]}, unheard)


def test_a_call_is_a_reply_so_what_is_before_it_is_not_new() -> None:
    """A picture before a call ended the talk, in this API alone."""
    picture = {"role": "user", "content": [{"type": "input_text", "text": "See"}, {"type": "input_image"}]}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "1", "output": "done"}
    notes: list[str] = []
    found = RESPONSES.fields({"input": [picture, call, result]}, notes.append)["messages"]
    assert found[0]["content"] == "See[input_image left out: only text can be read]"
    assert len(notes) == 1
    with pytest.raises(UsageError):
        RESPONSES.fields({"input": [picture]}, unheard)


@pytest.mark.parametrize("call", [[], {}, 1, None])
def test_a_call_id_of_any_type_is_no_unexpected_error(call: object) -> None:
    item = {"type": "custom_tool_call_output", "call_id": call, "output": "x"}
    notes: list[str] = []
    RESPONSES.fields({"input": [*HI, item, *HI]}, notes.append)
    assert len(notes) == 1


def test_parallel_calls_are_switched_by_a_truth_value() -> None:
    body = {"max_tokens": 5, "messages": HI, "tool_choice": {"type": "auto", "disable_parallel_tool_use": "yes"}}
    with pytest.raises(UsageError, match="disable_parallel_tool_use"):
        MESSAGES.fields(body, unheard)


def test_earlier_messages_of_a_response_are_taken_as_they_are() -> None:
    notes: list[str] = []
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "See "}, {"type": "input_image"}]},
        {"role": "assistant", "content": [
            {"type": "refusal", "refusal": "No."}, {"type": "of_tomorrow"},
            {"type": "output_text", "text": " Yes.", "annotations": [{"type": "url_citation"}], "logprobs": []}]},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": [{"type": "of_yesterday"}]},
        *HI,
    ]  # fmt: skip
    found = RESPONSES.fields({"input": items}, notes.append)["messages"]
    assert [message["content"] for message in found] == [
        "See [input_image left out: only text can be read]", "No. Yes.", "", "", "hi",
    ]  # fmt: skip
    assert [note.split('"')[1] for note in notes] == ["input_image", "of_tomorrow", "of_yesterday"]


def test_blocks_that_other_tools_left_are_taken_or_left_out_with_a_note() -> None:
    notes: list[str] = []
    source = {"type": "text", "media_type": "text/plain", "data": "It rained."}
    blocks = [
        {"role": "user", "content": [
            {"type": "document", "source": source, "title": "May", "citations": {"enabled": True}},
            {"type": "search_result", "source": "http://x", "title": "T", "content": [{"type": "text", "text": "wet"}]},
            {"type": "image", "source": {}}, {"type": "text", "text": "When?", "cache_control": {"type": "ephemeral"}},
        ]},
        {"role": "assistant", "content": [
            {"type": "redacted_thinking", "data": "x"}, {"type": "server_tool_use", "id": "s", "name": "web_search",
                                                         "input": {}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
            {"type": "text", "text": "In May.", "citations": [{"type": "char_location"}]},
            {"type": "tool_use", "id": "c", "name": "f", "input": {}, "caller": {"type": "direct"}},
        ]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "is_error": False, "content": [
            {"type": "text", "text": "a"}, {"type": "image", "source": {}},
            {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "b"}]}}]}]},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "y"}]},
        *HI,
    ]  # fmt: skip
    found = MESSAGES.fields({"messages": blocks, "max_tokens": 1}, notes.append)["messages"]
    assert [message["content"] for message in found] == [
        "May\nIt rained.\n\nT\nhttp://x\nwet\n\n[image left out: only text can be read]When?", "In May.",
        "a[image left out: only text can be read]b\n\n", "", "", "hi",
    ]  # fmt: skip
    assert [note.split('"')[1] for note in notes] == [
        "image", "redacted_thinking", "server_tool_use", "web_search_tool_result", "image",
        "redacted_thinking",
    ]  # fmt: skip
    assert found[1]["tool_calls"] == [called("f", {}, "c")]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("api", "function", "other"),
    [
        (CHAT, TOOL, {"type": "custom", "custom": {"name": "g"}}),
        (CHAT, TOOL, {"type": "web_search"}),
        (RESPONSES, FLAT, {"type": "web_search", "search_context_size": "low"}),
        (RESPONSES, FLAT, {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}}),
        (RESPONSES, FLAT, {"type": "local_shell"}),
        (RESPONSES, FLAT, {"type": "image_generation"}),
        (MESSAGES, CUSTOM, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}),
        (MESSAGES, CUSTOM, {"type": "bash_20250124", "name": "bash"}),
        (MESSAGES, CUSTOM, {"type": "mcp_toolset", "mcp_server_name": "x"}),
    ],
)
def test_tools_that_cannot_be_offered_are_left_out_with_a_note(api: Api, function: Json, other: Json) -> None:
    """Codex offers some beside its functions, and got no answer."""
    notes: list[str] = []
    assert api.fields(LEAST[api] | {"tools": [function, other]}, notes.append) == READ[api] | {"tools": [TOOL]}
    assert [note[:30] for note in notes] == [f'tool 2 is of the type "{other["type"]}"'[:30]]
    with pytest.raises(UsageError, match="tool 1 is of the type"):
        api.fields(LEAST[api] | {"tools": [other]}, str)


def test_a_line_of_a_batch_has_notes_on_what_is_left_out() -> None:
    line = {"custom_id": "a", "body": {"messages": HI, "tools": [TOOL, {"type": "web_search"}]}}
    (record,) = read_records(json.dumps(line), "f", DEFAULTS)
    assert [note.partition(" and")[0] for note in record.notes] == ['tool 2 is of the type "web_search"']


def test_thoughts_belong_to_the_reply_after_them() -> None:
    thoughts = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    items = [{"role": "user", "content": "a"}, thoughts, {"role": "user", "content": "b"},
             {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}, thoughts]  # fmt: skip
    found = fields_of(RESPONSES, {"input": items})["messages"]
    assert [message["role"] for message in found] == ["user", "user", "assistant"]
    assert not any("reasoning_content" in message for message in found)


def test_calls_after_results_are_of_another_message() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "x"}
    found = fields_of(RESPONSES, {"input": [*HI, call, result, call, call, result]})["messages"]
    assert [message["role"] for message in found] == ["user", "assistant", "tool", "assistant", "tool"]
    assert [len(message.get("tool_calls", ())) for message in found] == [0, 1, 0, 2, 0]


def test_blocks_become_messages_with_results_before_the_text() -> None:
    blocks = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "I look.", "signature": "s"},
            {"type": "text", "text": "I "},
            {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
            {"type": "text", "text": "ask."},
            {"type": "tool_use", "id": "c2", "name": "g", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "text", "text": "Here: "},
            {"type": "tool_result", "tool_use_id": "c1", "content": "rain"},
            {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "s"},
                                                                     {"type": "text", "text": "un"}]},
            {"type": "tool_result", "tool_use_id": "c3", "is_error": True},
            {"type": "text", "text": "and?", "cache_control": {"type": "ephemeral"}},
        ]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c4", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c4", "content": "x"}]},
    ]  # fmt: skip
    assert fields_of(MESSAGES, {"messages": blocks, "max_tokens": 1})["messages"] == [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant", "content": "I ask.", "reasoning_content": "I look.",
            "tool_calls": [called("f", {"a": 1}, "c1"), called("g", {}, "c2")],  # type: ignore[arg-type]
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "tool", "tool_call_id": "c2", "content": "sun"},
        {"role": "tool", "tool_call_id": "c3", "content": ""},
        {"role": "user", "content": "Here: and?"},
        {"role": "assistant", "content": None, "tool_calls": [called("f", {}, "c4")]},  # type: ignore[arg-type]
        {"role": "tool", "tool_call_id": "c4", "content": "x"},
    ]  # fmt: skip


def test_tokens_are_counted_without_a_limit_of_the_answer() -> None:
    assert MESSAGES.prompt_fields({"messages": HI, "system": "Be.", "tools": [CUSTOM]}, unheard) == {
        "messages": [{"role": "system", "content": "Be."}, *HI],
        "tools": [TOOL],
    }


# Arbitrary requests: words that the code looks for, at any place.
NAMES = (
    *("model", "messages", "input", "instructions", "prompt", "system", "tools", "tool_choice", "max_tokens", "stop"),
    *("max_completion_tokens", "max_output_tokens", "stream", "stream_options", "include_usage", "logprobs", "include"),
    *("top_logprobs", "response_format", "text", "format", "schema", "json_schema", "reasoning", "effort", "summary"),
    *("reasoning_effort", "chat_template_kwargs", "template_args", "parallel_tool_calls", "thinking", "budget_tokens"),
    *("stop_sequences", "temperature", "seed", "logit_bias", "echo", "n", "best_of", "suffix", "metadata", "store"),
    *("type", "role", "content", "name", "function", "parameters", "arguments", "id", "call_id", "output", "strict"),
    *("input_schema", "tool_use_id", "disable_parallel_tool_use", "thinking_tokens", "timeout", "user", "choice"),
)
WORDS = (
    *("auto", "none", "function", "custom", "message", "function_call", "function_call_output", "reasoning", "user"),
    *("assistant", "system", "tool", "text", "input_text", "output_text", "tool_use", "tool_result", "thinking", "{}"),
    *("enabled", "disabled", "adaptive", "json_schema", "json_object", "low", "off", "message.output_text.logprobs"),
    "\ud800",
)
names = st.sampled_from(NAMES) | st.text(st.characters(), max_size=3)
scalars = (
    st.none() | st.booleans() | st.integers(-2, 70) | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(WORDS) | st.sampled_from(WORDS) | st.text(st.characters(), max_size=5)
)  # fmt: skip
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=5), max_leaves=20
)
typed = st.fixed_dictionaries(
    {"type": st.sampled_from(WORDS)},
    optional={"role": st.sampled_from(WORDS), "content": values, "text": values, "name": scalars, "input": values,
              "arguments": values, "call_id": scalars, "output": values, "thinking": values, "function": values},
)  # fmt: skip
lists = st.lists(typed | values, max_size=4)
bodies = st.dictionaries(names, values | lists, max_size=6)


@EVERY
@given(body=bodies, more=st.booleans())
def test_any_request_is_read_or_refused(api: Api, body: Json, more: bool) -> None:
    """And the reply to one that is read can be written, whatever it repeats of the request."""
    body = (LEAST[api] | body) if more else body
    try:
        num = read(api, body)
    except (UsageError, ApiError) as error:
        str(error).encode()
        return
    ended = Ended(text="t", thoughts="", calls=(), scores=(), finish="stop", usage=Usage(1))
    reply = api.reply(body, "m")
    whole = reply.document([replace(ended, choice=number) for number in range(num)])
    written = json.dumps(whole, ensure_ascii=False, allow_nan=False)
    written += "".join(str(event) for event in told(reply, [Said("t")], ended))
    written.encode()


@pytest.mark.parametrize("given", [{"metadata": {"a": "\ud800"}}, {"tools": [{"\ud800": 1}]}, {"user": "\udfff"}])
def test_what_a_reply_may_repeat_can_be_written(given: Json) -> None:
    """Half of a surrogate pair was found out when the reply was written, after the work."""
    with pytest.raises(ApiError, match="half of a surrogate pair"):
        parsed(json.dumps({"input": "x"} | given).encode())


def told(reply: Reply, pieces: Sequence[Said], ended: Ended) -> list[Event]:
    """The events of a reply. Calls that `pieces` lack come whole at its end."""
    events = [*reply.begin(Usage(ended.usage.prompt))]
    begun = {piece.number for said in pieces for piece in said.calls}
    calls = [CallPiece(i, each.id, each.name, each.arguments, True) for i, each in enumerate(ended.calls)]
    for said in (*pieces, Said("", calls=[each for each in calls if each.number not in begun])):
        events += reply.add(said)
    return [*events, *reply.end(ended), *reply.close([ended])]


def score(text: str, *likeliest: str) -> Json:
    return {"token": 1, "text": text, "logprob": -0.5, "top": [{"token": 2, "text": each, "logprob": -0.25}
                                                               for each in likeliest]}  # fmt: skip


@st.composite
def replies(draw: st.DrawFn) -> tuple[list[Said], Ended]:
    """The pieces of a reply, and its end. Thoughts come before the text; scores are of the text."""
    scored = draw(st.booleans())
    letters = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)

    def piece(text: str, thoughts: str) -> Said:
        count = draw(st.integers(0, 2)) if scored and text and not thoughts else 0
        return Said(text, thoughts, [score(draw(letters), "a", "b") for _ in range(count)])

    pieces = [piece("", draw(letters)) for _ in range(draw(st.integers(0, 3)))]
    if pieces and draw(st.booleans()):
        pieces.append(piece(draw(letters), draw(letters)))  # the step in which thoughts end
    pieces += [piece(draw(letters), "") for _ in range(draw(st.integers(0, 4)))]
    calls = [
        ToolCall(f"call_{number}", draw(st.sampled_from(("f", "g"))), draw(st.sampled_from(("{}", '{"a": "é\\n"}'))))
        for number in range(draw(st.integers(0, 3)))
    ]
    for number, call in enumerate(calls[: draw(st.integers(0, 3))]):
        ends = [0, *sorted(draw(st.lists(st.integers(0, len(call.arguments)), max_size=3))), len(call.arguments)]
        parts = [call.arguments[start:end] for start, end in pairwise(ends)]
        grown = [CallPiece(number, call.id, call.name, part, i == 0) for i, part in enumerate(parts)]
        pieces += [Said("", calls=[piece]) for piece in grown] if draw(st.booleans()) else [Said("", calls=grown)]
    prompt, answer = draw(st.integers(1, 9)), draw(st.integers(0, 9))
    return pieces, Ended(
        text="".join(said.text for said in pieces),
        thoughts="".join(said.thoughts for said in pieces),
        calls=tuple(calls),
        scores=[each for said in pieces for each in said.scores],
        finish=draw(st.sampled_from(("stop", "length"))),
        usage=Usage(prompt, draw(st.integers(0, prompt)), answer, draw(st.integers(0, answer))),
    )


@pytest.mark.parametrize(
    "api",
    [
        CHAT,
        TEXT,
        MESSAGES,
        RESPONSES,
    ],
    ids=lambda api: api.path,
)
@given(replies(), st.booleans())
def test_a_stream_is_the_whole_reply(api: Api, reply: tuple[list[Said], Ended], logprobs: bool) -> None:
    pieces, ended = reply
    body = LEAST[api] | ({} if api in (RESPONSES, MESSAGES) else {"stream_options": {"include_usage": True}})
    if api is TEXT:
        ended = Ended(**{**vars(ended), "thoughts": "", "calls": ()})
        pieces = [Said(said.text, "", said.scores) for said in pieces if not said.calls]
        body["echo"] = logprobs
    whole = api.reply(body, "m").document([ended])
    events = parse("".join(map(str, told(api.reply(body, "m"), pieces, ended))))
    assert without_names(CLIENTS[api.path](events)) == without_names(whole)


def test_tokens_of_a_choice_are_placed_within_its_own_text() -> None:
    reply = TEXT.reply({"prompt": ["ab", "abcdef"], "echo": True}, "m")
    said = [
        Said("It", scores=[score("It")]),
        Said(" no", scores=[score(" no")], choice=1),
        Said("s", scores=[score("s")]),
    ]
    events = [*reply.begin(Usage(1)), *(event for each in said for event in reply.add(each))]
    chunks = [event.data["choices"][0] for event in events if isinstance(event.data, Mapping)]
    assert [each["index"] for each in chunks] == [0, 1, 0, 1, 0]
    assert [each["logprobs"]["text_offset"] for each in chunks[2:]] == [[2], [6], [4]]


@pytest.mark.parametrize("api", [CHAT, TEXT], ids=lambda api: api.path)
def test_usage_is_streamed_to_who_asks_for_it(api: Api) -> None:
    ended = Ended(text="a", thoughts="", calls=(), scores=(), finish="stop", usage=Usage(3, 0, 1))
    for body, count in (({}, 0), ({"stream_options": {}}, 0), ({"stream_options": {"include_usage": True}}, 1)):
        events = parse("".join(map(str, told(api.reply(LEAST[api] | body, "m"), [Said("a")], ended))))
        assert sum(data != "[DONE]" and bool(data.get("usage")) for _, data in events) == count
        CLIENTS[api.path](events)


ENDED = Ended(
    text="It rains.", thoughts="hm", calls=(ToolCall("call_1", "f", '{"a": 1}'),), scores=(), finish="stop",
    usage=Usage(prompt=10, cached=4, answer=7, thoughts=2),
)  # fmt: skip


def ended(**changes: Any) -> Ended:
    return Ended(**{**vars(ENDED), **changes})


def test_a_message_that_waits_has_more_than_pings() -> None:
    """Claude Code counts no pings: after 300 seconds of them it gave up, and asked again without a stream, 300 seconds
    at a time."""
    reply = MESSAGES.reply({}, "m")
    events = [*reply.begin(Usage(10))]
    call = [CallPiece(0, "call_1", "f", '{"a"', True), CallPiece(0, "call_1", "f", ": 1}", False)]
    for said in (Said("", "hm"), Said("It "), Said("rains."), *(Said("", calls=[piece]) for piece in call)):
        for _ in range(25):
            events += reply.keep_alive()
        events += reply.add(said)
    for _ in range(25):
        events += reply.keep_alive()
    events += reply.end(ENDED)
    names = [event.name for event in events]
    assert names[1:20] == ["ping"] * 19
    assert names[20:22] == ["content_block_start", "content_block_delta"]
    assert names.count("ping") == 6 * 24
    summed = CLIENTS[MESSAGES.path](parse("".join(map(str, events))))
    blocks = MESSAGES.reply({}, "m").document([ENDED])["content"]
    assert without_names(summed["content"]) == without_names([{"type": "text", "text": ""}, *blocks])


def test_a_chat_completion() -> None:
    whole = CHAT.reply({}, "m").document([ENDED])
    assert whole["id"].startswith("chatcmpl-")
    assert (whole["object"], whole["model"], type(whole["created"])) == ("chat.completion", "m", int)
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    message = {"role": "assistant", "content": "It rains.", "reasoning_content": "hm", "tool_calls": [call]}
    assert whole["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "tool_calls"}]
    assert whole["usage"] == {
        "prompt_tokens": 10, "completion_tokens": 7, "total_tokens": 17,
        "prompt_tokens_details": {"cached_tokens": 4}, "completion_tokens_details": {"reasoning_tokens": 2},
    }  # fmt: skip


def test_a_completion() -> None:
    whole = TEXT.reply({"prompt": "Well: ", "echo": True}, "m").document([ENDED])
    assert whole["id"].startswith("cmpl-")
    assert (whole["object"], whole["usage"]["total_tokens"]) == ("text_completion", 17)
    assert whole["choices"] == [
        {"index": 0, "text": "Well: It rains.", "logprobs": None, "finish_reason": "stop"},
    ]


def test_a_response() -> None:
    body = {"instructions": "Be.", "metadata": {"a": "b"}, "tools": [FLAT], "temperature": 0.5}
    whole = RESPONSES.reply(body, "m").document([ENDED])
    assert whole["id"].startswith("resp_")
    assert {name: whole[name] for name in ("object", "model", "status", "error", "incomplete_details", "store")} == {
        "object": "response", "model": "m", "status": "completed", "error": None, "incomplete_details": None,
        "store": False,
    }  # fmt: skip
    assert {name: whole[name] for name in body} == body
    assert without_names(whole["output"]) == [
        {"type": "reasoning", "summary": [], "status": "completed",
         "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "It rains.", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "name": "f", "arguments": '{"a": 1}', "status": "completed"},
    ]  # fmt: skip
    assert [item["id"].partition("_")[0] for item in whole["output"]] == ["rs", "msg", "fc"]
    assert whole["output"][2]["call_id"] == "call_1"
    assert whole["usage"] == {
        "input_tokens": 10, "input_tokens_details": {"cached_tokens": 4},
        "output_tokens": 7, "output_tokens_details": {"reasoning_tokens": 2}, "total_tokens": 17,
    }  # fmt: skip


def test_a_message() -> None:
    whole = MESSAGES.reply({}, "m").document([ENDED])
    assert whole.pop("id").startswith("msg_")
    assert whole == {
        "type": "message", "role": "assistant", "model": "m", "stop_reason": "tool_use", "stop_sequence": None,
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "It rains."},
            {"type": "tool_use", "id": "call_1", "name": "f", "input": {"a": 1}},
        ],
        "usage": {"input_tokens": 6, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 0,
                  "output_tokens": 7},
    }  # fmt: skip


@pytest.mark.parametrize("calls", [(), ENDED.calls])
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_the_reason_of_the_end(calls: tuple[ToolCall, ...], finish: str) -> None:
    whole = ended(calls=calls, finish=finish)
    cut = finish == "length"
    assert CHAT.reply({}, "m").document([whole])["choices"][0]["finish_reason"] == (
        "length" if cut else "tool_calls" if calls else "stop"
    )
    assert TEXT.reply({"prompt": "x"}, "m").document([whole])["choices"][0]["finish_reason"] == finish
    assert MESSAGES.reply({}, "m").document([whole])["stop_reason"] == (
        "max_tokens" if cut else "tool_use" if calls else "end_turn"
    )
    response = RESPONSES.reply({}, "m").document([whole])
    assert (response["status"], response["incomplete_details"]) == (
        ("incomplete", {"reason": "max_output_tokens"}) if cut else ("completed", None)
    )


@pytest.mark.parametrize(
    ("changes", "reason", "stop"),
    [
        ({"stop": "END", "calls": ()}, "stop_sequence", "END"), ({"stop": "END"}, "tool_use", None),
        ({"stop": "", "calls": ()}, "end_turn", None), ({"finish": "length", "calls": ()}, "max_tokens", None),
    ],
)  # fmt: skip
def test_the_stop_sequence_that_ended_a_message_is_named(changes: Json, reason: str, stop: str | None) -> None:
    """It was not told from the model's own end."""
    whole = MESSAGES.reply({}, "m").document([ended(**changes)])
    events = parse("".join(map(str, told(MESSAGES.reply({}, "m"), [], ended(**changes)))))
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, stop)
    assert CLIENTS[MESSAGES.path](events)["stop_reason"] == reason
    assert CLIENTS[MESSAGES.path](events)["stop_sequence"] == stop


@pytest.mark.parametrize("calls", [(), ENDED.calls])
def test_a_reply_without_text(calls: tuple[ToolCall, ...]) -> None:
    whole = ended(text="", thoughts="", calls=calls)
    message = CHAT.reply({}, "m").document([whole])["choices"][0]["message"]
    assert message["content"] == (None if calls else "")
    output = RESPONSES.reply({}, "m").document([whole])["output"]
    assert [item["type"] for item in output] == ["function_call" if calls else "message"]
    assert [block["type"] for block in MESSAGES.reply({}, "m").document([whole])["content"]] == ["tool_use"] * len(
        calls
    )


SMILE = "😀".encode()
HALF = {"token": 3, "text": "\ufffd", "logprob": -0.5, "bytes": [*SMILE[:2]]}
OTHER = {"token": 4, "text": "\ufffd", "logprob": -1.5, "bytes": [*SMILE[2:]]}
SCORES = [score("é", "é", "e"), {**HALF, "top": [HALF, OTHER]}, score("b", "c"), score("\ufffd")]
OPENAI_SCORES = [
    {"token": "é", "logprob": -0.5, "bytes": [0xC3, 0xA9], "top_logprobs": [
        {"token": "é", "logprob": -0.25, "bytes": [0xC3, 0xA9]}, {"token": "e", "logprob": -0.25, "bytes": [101]}]},
    {"token": "\ufffd", "logprob": -0.5, "bytes": [0xF0, 0x9F], "top_logprobs": [
        {"token": "\ufffd", "logprob": -0.5, "bytes": [0xF0, 0x9F]},
        {"token": "\ufffd", "logprob": -1.5, "bytes": [0x98, 0x80]}]},
    {"token": "b", "logprob": -0.5, "bytes": [98], "top_logprobs": [{"token": "c", "logprob": -0.25, "bytes": [99]}]},
    {"token": "\ufffd", "logprob": -0.5, "bytes": [0xEF, 0xBF, 0xBD], "top_logprobs": []},
]  # fmt: skip


def test_scores() -> None:
    whole = ended(scores=SCORES, thoughts="", calls=())
    chat = CHAT.reply({}, "m").document([whole])["choices"][0]
    assert chat["logprobs"] == {"content": OPENAI_SCORES, "refusal": None}
    (item,) = RESPONSES.reply({}, "m").document([whole])["output"]
    assert item["content"][0]["logprobs"] == OPENAI_SCORES
    text = TEXT.reply({"prompt": "Well", "echo": True}, "m").document([whole])["choices"][0]
    assert text["logprobs"] == {
        "tokens": ["é", "bytes:\\xf0\\x9f", "b", "\ufffd"], "token_logprobs": [-0.5] * 4,
        "text_offset": [4, 5, 6, 7], "top_logprobs": [
            {"é": -0.25, "e": -0.25}, {"bytes:\\xf0\\x9f": -0.5, "bytes:\\x98\\x80": -1.5}, {"c": -0.25}, {}],
    }  # fmt: skip


def test_events_of_a_message_in_their_order() -> None:
    pieces = [Said("", "h"), Said("It ", "m"), Said("rains.")]
    events = told(MESSAGES.reply({}, "m"), pieces, ENDED)
    assert [(event.name, event.data.get("index")) for event in events if isinstance(event.data, dict)] == [
        ("message_start", None), ("content_block_start", 0), ("content_block_delta", 0), ("content_block_delta", 0),
        ("content_block_stop", 0), ("content_block_start", 1), ("content_block_delta", 1), ("content_block_delta", 1),
        ("content_block_stop", 1), ("content_block_start", 2), ("content_block_delta", 2), ("content_block_stop", 2),
        ("message_delta", None), ("message_stop", None),
    ]  # fmt: skip
    start = events[0].data
    assert isinstance(start, dict)
    assert start["message"]["usage"]["input_tokens"] == 10


def test_events_of_a_response_in_their_order() -> None:
    pieces = [Said("", "h"), Said("It ", "m"), Said("rains.")]
    events = told(RESPONSES.reply({}, "m"), pieces, ENDED)
    assert [(event.name.removeprefix("response."), event.data.get("output_index")) for event in events
            if isinstance(event.data, dict)] == [
        ("created", None), ("in_progress", None),
        ("output_item.added", 0), ("content_part.added", 0), ("reasoning_text.delta", 0), ("reasoning_text.delta", 0),
        ("reasoning_text.done", 0), ("content_part.done", 0), ("output_item.done", 0),
        ("output_item.added", 1), ("content_part.added", 1), ("output_text.delta", 1), ("output_text.delta", 1),
        ("output_text.done", 1), ("content_part.done", 1), ("output_item.done", 1),
        ("output_item.added", 2), ("function_call_arguments.delta", 2), ("function_call_arguments.done", 2),
        ("output_item.done", 2), ("completed", None),
    ]  # fmt: skip
    whole = RESPONSES.reply({}, "m").document([ENDED])
    assert without_names(CLIENTS[RESPONSES.path](parse("".join(map(str, events))))) == without_names(whole)


@pytest.mark.parametrize("begun", [False, True])
def test_a_stream_that_fails_says_so_at_its_end(begun: bool) -> None:
    error = ApiError(503, "no room", "busy")
    said = {api: list(_failed(api, error, begun)) for api in APIS}
    for api in (CHAT, TEXT):
        (event,) = said[api]
        body = {"error": {"message": "no room", "type": "server_error", "param": None, "code": "busy"}}
        assert (event.name, event.data) == ("", body)
    (event,) = said[MESSAGES]
    body = {"type": "error", "error": {"type": "overloaded_error", "message": "no room"}}
    assert (event.name, event.data) == ("error", body)
    (event,) = said[RESPONSES]
    assert isinstance(event.data, dict)
    response = event.data["response"]
    assert (event.name, response["status"]) == ("response.failed", "failed")
    assert response["error"] == {"code": "busy", "message": "no room"}


def _failed(api: Api, error: ApiError, begun: bool) -> list[Event]:
    reply = api.reply(LEAST[api], "m")
    if begun:
        list(reply.begin(Usage(1)))
        list(reply.add(Said("a")))
    return list(reply.fail(error))


@pytest.mark.parametrize(
    ("status", "openai", "anthropic"),
    [
        (400, "invalid_request_error", "invalid_request_error"),
        (401, "authentication_error", "authentication_error"),
        (403, "permission_error", "permission_error"),
        (404, "not_found_error", "not_found_error"),
        (408, "invalid_request_error", "invalid_request_error"),
        (413, "invalid_request_error", "request_too_large"),
        (429, "rate_limit_error", "rate_limit_error"),
        (500, "server_error", "api_error"),
        (503, "server_error", "overloaded_error"),
    ],
)
def test_errors_have_the_type_that_clients_know(status: int, openai: str, anthropic: str) -> None:
    error = ApiError(status, "m", "c")
    for api in (CHAT, TEXT, RESPONSES):
        assert api.error(error) == {"error": {"message": "m", "type": openai, "param": None, "code": "c"}}
    assert MESSAGES.error(error) == {"type": "error", "error": {"type": anthropic, "message": "m"}}


def test_an_event_is_one_block_whatever_it_says() -> None:
    data = {"a": "x\n\ny\r\u2028é\x00"}
    for name in ("", "n"):
        assert parse(str(Event(data, name))) == [(name, data)]
        assert str(Event(data, name)).count("\n") == (3 if name else 2)
