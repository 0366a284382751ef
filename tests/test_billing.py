"""Claude Code's billing block: left out of prompts where it is exactly that, and nothing else ever is."""

from __future__ import annotations

from typing import Any

import pytest

from kit.served import CHAT, Server, request
from triforce_cli.apis.billing import without_billing

PROMPT = "You are Claude Code."
BLOCKS = [
    "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=sdk-cli; cch=36ee5;",
    "x-anthropic-billing-header: cc_version=2.1.197.f51; cc_entrypoint=cli;",
    "x-anthropic-billing-header: cc_version=2.1.197.4f3; cc_entrypoint=cli; cch=00000; cc_workload=cron; "
    "cc_is_subagent=true;",
]
OTHERS = [
    f"{PROMPT} {BLOCKS[0]}",
    f"{BLOCKS[0]} {PROMPT}",
    "x-anthropic-billing-header: is what a user asks about;",
    "x-anthropic-billing-header: cc_entrypoint=cli;",
    f"> {BLOCKS[0]}\n{PROMPT}",
]


def parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in texts]


@pytest.mark.parametrize("block", BLOCKS)
def test_the_block_is_left_out_of_each_form_of_a_system_prompt(block: str) -> None:
    notes: list[str] = []
    told = {"model": "m", "messages": [{"role": "user", "content": block}]}
    for content, rest in (
        (f"{block}\n{PROMPT}", PROMPT),
        (block, ""),
        (parts(block, PROMPT), parts("", PROMPT)),
        (parts(f"{block}\n\n{PROMPT}"), parts(PROMPT)),
    ):
        assert without_billing({**told, "system": content}, notes.append) == {**told, "system": rest}
        for role in ("system", "developer"):
            asked, user = {"role": role, "content": content}, {"role": "user", "content": "?"}
            shorter = without_billing({"messages": [asked, user]}, notes.append)
            assert shorter == {"messages": [{"role": role, "content": rest}, user]}
    assert len(notes) == 12


@pytest.mark.parametrize("text", OTHERS)
def test_no_other_text_is_left_out(text: str) -> None:
    """Neither one that is much like it, nor the block itself anywhere else."""
    notes: list[str] = []
    block = BLOCKS[0]
    users = [{"role": "user", "content": block}, {"role": "user", "content": parts(block)}]
    for body in (
        {"system": text, "messages": users},
        {"system": parts(text, block), "messages": users},
        {"system": parts(PROMPT, block)},
        {"messages": [{"role": "system", "content": text}, *users]},
        {"messages": [{"role": "system", "content": PROMPT}, {"role": "system", "content": block}]},
        {"messages": users},
        {"prompt": block},
        *({"system": odd, "messages": odd} for odd in (None, 7, [], [7], [{"type": "text", "text": 7}], {})),
    ):
        assert without_billing(body, notes.append) is body
    assert not notes


def test_the_server_leaves_it_out_and_says_so_once_unless_it_is_to_keep_it() -> None:
    body = {**request("hi", max_tokens=9), "system": parts(BLOCKS[0], PROMPT)}
    with Server() as server:
        assert server.client.ask("/v1/messages", body).status == 200
        assert server.client.ask("/v1/messages/count_tokens", body).body == {"input_tokens": len(f"{PROMPT}hi")}
        assert server.client.ask(CHAT, request("hi")).status == 200
        assert server.model.said == [f"{PROMPT}hi", "hi"]
        [note] = server.notes
        assert note.endswith(": the system prompt begins with Claude Code's billing block: it is left out")
    with Server(keeps_billing=True) as server:
        assert server.client.ask("/v1/messages", body).status == 200
        assert (server.model.said, server.notes) == ([f"{BLOCKS[0]}{PROMPT}hi"], [])
