"""Chats with a model whose layers have states: turns, undo, edits and work ahead keep what was computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.examples import at_most
from kit.families import save_tiny
from kit.heads import SHAPES, with_head
from offload.errors import UsageError
from offload.plan.planner import Options
from test_chat_dialogue import GREEDILY, LINES, Make, check_against_a_fresh_start, engine_of, finish_ahead, send
from triforce_cli.chat import slash
from triforce_cli.chat.dialogue import Dialogue
from triforce_cli.chat.engine import LEAST_CAPACITY, ChatEngine
from triforce_cli.prompts.conversation import Conversation, Document
from triforce_cli.prompts.formats import ChatFormat
from triforce_cli.screen.output import Output
from triforce_cli.setup.choice import Models, choose_models
from triforce_cli.setup.engine import prepare


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """With a next-token head, which is the draft."""
    shapes = {**SHAPES, "max_position_embeddings": 4 * LEAST_CAPACITY}
    folder = with_head(save_tiny("qwen3_5", tmp_path_factory.mktemp("models") / "hybrid", tokenizer=True, **shapes))
    found = choose_models(folder, None)
    assert found.draft == folder
    return found


@pytest.fixture(scope="module")
def make(models: Models) -> Iterator[Make]:
    """New dialogues, each with an engine of its own."""
    with ExitStack() as stack:

        def new(*, interactive: bool = False, speculation: bool = True) -> Dialogue:
            options = Options(dtype="fp32", device="cpu", offload=frozenset(), speculation=speculation)
            prepared = prepare(models, options, Output(quiet=True))
            engine = stack.enter_context(ChatEngine(prepared, on_note=lambda line: None))
            made = ChatFormat(prepared.tokenizer, "chatml")
            dialogue = Dialogue(
                engine, made, GREEDILY, Output(quiet=True), conversation=Conversation(), interactive=interactive
            )
            return stack.enter_context(closing(dialogue))

        yield new


@at_most(6)
@given(steps=st.lists(st.tuples(st.sampled_from(LINES), st.sampled_from(["no", "begun", "done"])), max_size=9))
def test_after_any_conversation_the_cache_and_the_reply_are_those_of_a_fresh_start(
    make: Make, tmp_path: Path, steps: list[tuple[str, str]]
) -> None:
    (tmp_path / "notes").write_text("all work and no play " * 30)
    dialogue = make()
    for line, ahead in [("hello", "no"), *steps]:
        with suppress(UsageError):
            send(dialogue, line.format(notes=tmp_path / "notes"))
        if ahead == "begun":
            dialogue.work_ahead()
        elif ahead == "done":
            finish_ahead(dialogue)
    check_against_a_fresh_start(dialogue, make)


def again(dialogue: Dialogue) -> int:
    """Tokens of the last prompt that ran."""
    stats = engine_of(dialogue).stats
    return stats.prompt_tokens - stats.reused_tokens


def test_a_turn_runs_its_own_message_and_nothing_before_it(make: Make) -> None:
    dialogue = make()
    dialogue.add({Document("notes", "all work and no play " * 60): ""})
    for message in ("hello", "what is it", "and then"):
        before = len(engine_of(dialogue).prefix.tokens) if dialogue.conversation.turns else 0
        dialogue.say(message)
        if before:
            assert engine_of(dialogue).stats.reused_tokens >= before - 1
    check_against_a_fresh_start(dialogue, make)


@pytest.mark.few(1)
@pytest.mark.parametrize("line", ["/regen", "/edit something else"])
def test_a_turn_that_is_made_again_reads_no_document_again(make: Make, line: str) -> None:
    dialogue = make()
    dialogue.add({Document("notes", "all work and no play " * 60): ""})
    dialogue.say("hello")
    dialogue.say("what is it")
    slash.run(dialogue, line)
    assert again(dialogue) < 200
    check_against_a_fresh_start(dialogue, make)


def test_a_turn_that_is_taken_back_comes_back_to_the_one_before(make: Make) -> None:
    dialogue = make()
    dialogue.add({Document("notes", "all work and no play " * 60): ""})
    dialogue.say("hello")
    dialogue.say("what is it")
    slash.run(dialogue, "/undo")
    dialogue.say("something else")
    assert again(dialogue) < 200
    check_against_a_fresh_start(dialogue, make)


def test_a_cache_that_grows_keeps_what_was_computed(make: Make) -> None:
    dialogue = make()
    dialogue.add({Document("notes", "all work and no play " * 180): ""})
    dialogue.say("hello")
    finish_ahead(dialogue)
    said = dialogue.num_used
    assert engine_of(dialogue).plan.request.capacity == LEAST_CAPACITY
    dialogue.say("word " * 100)
    assert engine_of(dialogue).plan.request.capacity == 2 * LEAST_CAPACITY
    assert engine_of(dialogue).stats.reused_tokens >= said - engine_of(dialogue).plan.placement.rows
    check_against_a_fresh_start(dialogue, make)
