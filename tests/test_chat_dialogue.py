"""Conversations without a terminal: what the caches hold after any of them, and what is not computed twice."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kit.examples import at_most
from kit.models import DYNAMIC_ROPE, GREEDY, random_model, save
from offload.decode.sampling import SamplingParams
from offload.engine.engine import Engine
from offload.engine.step import Step
from offload.errors import DoesNotFit, ModelError, SessionError, UsageError
from offload.grammar.constraint import Constraint
from offload.plan.planner import Options
from offload.progress import OnProgress, Progress, Stage, ignore
from triforce_cli.answering.answer import Answer, Part
from triforce_cli.answering.ending import End
from triforce_cli.answering.request import Prompt, Wanted
from triforce_cli.chat import slash
from triforce_cli.chat.background import BackgroundWork
from triforce_cli.chat.dialogue import Dialogue
from triforce_cli.chat.engine import LEAST_CAPACITY, ChatEngine
from triforce_cli.chat.notes import cut_short
from triforce_cli.chat.settings import Settings
from triforce_cli.commands.chat import _converse
from triforce_cli.ground.deadline import Deadline, TimedOut
from triforce_cli.prompts.conversation import Conversation, Document
from triforce_cli.prompts.formats import ChatFormat
from triforce_cli.screen.output import Output
from triforce_cli.setup.choice import Models
from triforce_cli.setup.engine import prepare

# A row computed in another phase or block differs by rounding only: fp32, two layers, keys and values of size about 1.
TOLERANCE = 5e-5
PATIENCE_SECONDS = 300.0
REGEX = Constraint("regex", "a+")
GREEDILY = Wanted(sampling=SamplingParams(temperature=0.0, top_p=1.0), max_tokens=16)

Make = Callable[..., Dialogue]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """They see far enough that a cache has to grow."""
    root, far = tmp_path_factory.mktemp("models"), 4 * LEAST_CAPACITY
    target = random_model(vocab_size=264, seed=11, max_position_embeddings=far)
    draft = random_model(vocab_size=264, seed=12, num_hidden_layers=1, max_position_embeddings=far)
    return Models(
        target=save(target, root / "target", tokenizer=True),
        draft=save(draft, root / "draft", tokenizer=True),
        embedded=False,
    )


@pytest.fixture(scope="module")
def make(models: Models) -> Iterator[Make]:
    """New dialogues, each with an engine of its own: make(interactive=)."""
    with ExitStack() as stack:

        def new(*, interactive: bool = False, speculation: bool = True) -> Dialogue:
            options = Options(dtype="fp32", device="cpu", offload=frozenset(), speculation=speculation)
            prepared = prepare(models, options, Output(quiet=True))
            engine = stack.enter_context(ChatEngine(prepared, on_note=lambda line: None))
            dialogue = Dialogue(
                engine,
                ChatFormat(prepared.tokenizer, "chatml"),
                GREEDILY,
                Output(quiet=True),
                conversation=Conversation(),
                interactive=interactive,
            )
            return stack.enter_context(closing(dialogue))

        yield new


def engine_of(dialogue: Dialogue) -> Engine:
    assert dialogue.engine._engine is not None
    return dialogue.engine._engine


def rows_of(dialogue: Dialogue, length: int) -> torch.Tensor:
    engine = engine_of(dialogue)
    engine.worker.full.wait_home()
    return engine.worker.full.pages.reader.tokens(0, length).clone()


def finish_ahead(dialogue: Dialogue) -> None:
    """Finish the background work, as if the person typed for a long time."""
    dialogue.work_ahead()
    dialogue._background.wait(lambda progress: None)


def continuation(dialogue: Dialogue, tokens: Sequence[int]) -> list[int]:
    steps = dialogue.engine.answer(Prompt(tokens), Wanted(sampling=GREEDY, max_tokens=12), ignore)
    return [token for step in steps for token in step.tokens]


def check_against_a_fresh_start(dialogue: Dialogue, make: Make) -> None:
    """The rows of all that was said, and the reply to one more message."""
    said = dialogue.format.closing_tokens(dialogue.conversation)
    finish_ahead(dialogue)
    assert engine_of(dialogue).prefix.tokens == said
    assert engine_of(dialogue).worker.full.length == len(said)
    fresh = make(speculation=False)
    prompt = dialogue.format.prompt(dialogue.conversation.asked("and then?")).tokens
    wanted = continuation(fresh, prompt)
    gap = (rows_of(dialogue, len(said)) - rows_of(fresh, len(said))).abs().max()
    assert gap < TOLERANCE
    assert continuation(dialogue, prompt) == wanted
    assert engine_of(dialogue).stats.reused_tokens == len(said)


# Lines as a person types them; /drop and /undo may find nothing to take away
LINES = ("hello", "what is it", "/undo", "/regen", "/edit something else", "/system be brief", "/system none",
         "/file {notes}", "/drop notes", "/drop 1", "/clear")  # fmt: skip


@at_most(12)
@given(steps=st.lists(st.tuples(st.sampled_from(LINES), st.sampled_from(["no", "begun", "done"])), max_size=9))
def test_after_any_conversation_the_cache_and_the_reply_are_those_of_a_fresh_start(
    make: Make, tmp_path: Path, steps: list[tuple[str, str]]
) -> None:
    (tmp_path / "notes").write_text("all work and no play " * 30)
    dialogue = make()
    for line, ahead in [("hello", "no"), *steps]:
        with suppress(UsageError):
            send(dialogue, line.format(notes=tmp_path / "notes"))
        if ahead == "begun":  # and broken off by the next line, or waited for
            dialogue.work_ahead()
        elif ahead == "done":
            finish_ahead(dialogue)
    check_against_a_fresh_start(dialogue, make)


def send(dialogue: Dialogue, line: str) -> None:
    if slash.is_command(line):
        slash.run(dialogue, line)
    else:
        dialogue.say(line)


def test_white_space_around_what_is_typed_is_no_part_of_a_message(make: Make) -> None:
    dialogue = make()
    send(dialogue, "  a word \n")
    assert [turn.user for turn in dialogue.conversation.turns] == ["a word"]
    send(dialogue, "/edit   another ")
    assert [turn.user for turn in dialogue.conversation.turns] == ["another"]
    send(dialogue, "/system  Be brief. ")
    assert dialogue.conversation.system == "Be brief."


@pytest.mark.parametrize("ahead", [False, True])
def test_work_done_ahead_leaves_the_message_alone_to_compute(make: Make, ahead: bool) -> None:
    dialogue = make()
    dialogue.say("hello")
    dialogue.add({Document("notes", "all work and no play " * 50): ""})
    said = dialogue.num_used
    if ahead:
        finish_ahead(dialogue)
    dialogue.say("what is it")
    reused = engine_of(dialogue).stats.reused_tokens
    assert reused == said if ahead else reused < said - 1000


def test_a_second_try_computes_the_message_again_and_nothing_before_it(make: Make) -> None:
    dialogue = make()
    dialogue.add({Document("notes", "all work and no play " * 50): ""})
    dialogue.say("hello")
    reply = dialogue.conversation.turns[-1]
    finish_ahead(dialogue)
    slash.run(dialogue, "/regen")
    stats = engine_of(dialogue).stats
    assert stats.prompt_tokens - stats.reused_tokens <= engine_of(dialogue).plan.placement.rows
    assert dialogue.conversation.turns == (reply,)
    check_against_a_fresh_start(dialogue, make)  # the work ahead is done again, though the conversation is the same


def test_each_reply_has_a_seed_of_its_own(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    dialogue, answer, seeds = make(), Engine.generate, []

    def watched(*args: Any, **settings: Any) -> Iterator[Step]:
        seeds.append(args[1].sampling.seed)
        return answer(*args, **settings)

    monkeypatch.setattr(Engine, "generate", watched)
    sampled = replace(GREEDILY, sampling=SamplingParams(temperature=1.0, top_p=1.0, seed=5))
    dialogue.settings = Settings(sampling=sampled.sampling, max_tokens=sampled.max_tokens)
    for line in ("hello", "/regen", "what is it"):
        send(dialogue, line)
    assert seeds == [5, 6, 7]
    loaded = Dialogue(
        dialogue.engine,
        dialogue.format,
        sampled,
        dialogue.output,
        conversation=dialogue.conversation,
        interactive=False,
    )
    with closing(loaded):
        loaded.say("and then?")
    assert seeds[3:] == [7]  # after two turns


def test_a_reply_may_fill_the_context_to_its_last_token(models: Models) -> None:
    options = Options(dtype="fp32", device="cpu", offload=frozenset(), context=64)
    with ChatEngine(prepare(models, options, Output(quiet=True)), on_note=lambda line: None) as engine:
        steps = engine.answer(Prompt([65] * 60), Wanted(sampling=GREEDY, max_tokens=99), ignore)
        assert len([token for step in steps for token in step.tokens]) == engine.limit - 60 == 4


def test_where_positions_turn_by_the_capacity_all_of_the_context_is_planned_at_once(tmp_path: Path) -> None:
    model = random_model(vocab_size=264, seed=11, max_position_embeddings=LEAST_CAPACITY, rope_parameters=DYNAMIC_ROPE)
    models = Models(target=save(model, tmp_path, tokenizer=True), draft=None, embedded=False)
    options = Options(dtype="fp32", device="cpu", offload=frozenset())
    with ChatEngine(prepare(models, options, Output(quiet=True)), on_note=lambda line: None) as engine:
        engine.ready(10, lambda progress: None)
        assert engine.plan is not None
        assert engine.plan.request.capacity == engine.limit == 2 * LEAST_CAPACITY


def test_a_conversation_of_a_session_has_the_capacity_it_had_before(models: Models, tmp_path: Path) -> None:
    options = Options(dtype="fp32", device="cpu", offload=frozenset())
    prepared = prepare(models, options, Output(quiet=True))
    for num_tokens in (LEAST_CAPACITY + 1, 2):
        with ChatEngine(prepared, session=tmp_path / "session", on_note=lambda line: None) as engine:
            assert engine.ready(num_tokens, ignore).plan.request.capacity == 2 * LEAST_CAPACITY
            engine.precompute([65], ignore)
            engine.keep({}, [], ignore)


@pytest.mark.parametrize(("stage", "ends"), [("prefill", False), ("save", False), ("restore", True)])
def test_cancelled_work_stops_where_a_prefill_or_a_save_reports_progress(stage: Stage, ends: bool) -> None:
    background, begun, cancelled, ended = BackgroundWork(), Event(), Event(), Event()

    def work(on_progress: OnProgress) -> None:
        on_progress(Progress(stage, 0, 2, "bytes"))
        begun.set()
        assert cancelled.wait(PATIENCE_SECONDS)
        on_progress(Progress(stage, 1, 2, "bytes"))
        ended.set()

    with closing(background):
        background.start(work, "purpose")
        assert begun.wait(PATIENCE_SECONDS)
        background.break_off(lambda progress: cancelled.set())
        assert ended.is_set() == ends


def fail(*args: object, **settings: object) -> None:
    raise ModelError("the disk is gone")


def test_an_error_of_work_done_ahead_comes_with_the_next_message(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    dialogue = make()
    dialogue.say("hello")
    before = dialogue.conversation
    with monkeypatch.context() as patch:
        patch.setattr(dialogue.engine, "keep", fail)
        dialogue.work_ahead()
        with pytest.raises(ModelError, match="the disk is gone"):
            dialogue.say("what is it")
    assert dialogue.conversation == before
    assert dialogue.taken_draft() == "what is it"
    dialogue.say("what is it")
    assert len(dialogue.conversation.turns) == 2
    check_against_a_fresh_start(dialogue, make)


def test_a_person_hears_of_an_error_ahead_and_has_the_reply_all_the_same(
    make: Make, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With a full disk no message was ever answered."""
    dialogue = make(interactive=True)
    monkeypatch.setattr(dialogue.engine, "keep", fail)
    dialogue.work_ahead()
    dialogue.say("hello")
    assert len(dialogue.conversation.turns) == 1
    assert "error: the disk is gone" in capfd.readouterr().err


def test_a_reply_that_cannot_be_made_again_stays_and_its_question_is_not_asked_twice(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialogue = make(interactive=True)
    dialogue.say("hello")
    before = dialogue.conversation
    monkeypatch.setattr(dialogue.engine, "answer", fail)
    with pytest.raises(ModelError):
        send(dialogue, "/regen")
    assert dialogue.conversation == before
    assert dialogue.taken_draft() == ""
    with pytest.raises(ModelError):
        send(dialogue, "a new question")
    assert dialogue.taken_draft() == "a new question"


def test_a_reply_whose_time_is_over_is_kept_as_far_as_it_came(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    dialogue, add, seconds = make(), Answer.add, [0.0]

    def late(answer: Answer, step: Step) -> Part:
        part = add(answer, step)
        seconds[0] += 1.0
        return part

    monkeypatch.setattr(Deadline.__init__, "__defaults__", (lambda: seconds[0],))
    monkeypatch.setattr(Answer, "add", late)
    notes: list[str] = []
    monkeypatch.setattr(dialogue.output, "note", notes.append)
    send(dialogue, "hello")
    whole = dialogue.conversation.turns[-1].reply_tokens
    dialogue.wanted = replace(dialogue.wanted, timeout=0.5)  # over after the first step, whose length varies
    for _ in range(2):  # each reply has its own
        notes.clear()
        send(dialogue, "/regen")
        turn = dialogue.conversation.turns[-1]
        assert turn.reply_tokens == whole[: len(turn.reply_tokens)]
        assert 0 < len(turn.reply_tokens) < len(whole)
        assert not turn.complete
        assert notes == ["out of time; what had come is kept"]
    assert dialogue.ends[-2:] == [End("reply 2", "timeout"), End("reply 3", "timeout")]
    monkeypatch.setattr(
        dialogue.engine, "answer", lambda prompt, wanted, on_progress: on_progress(Progress("prefill", 1, 2, "tokens"))
    )
    dialogue.wanted = replace(dialogue.wanted, timeout=1e-9)
    monkeypatch.setattr(Deadline.__init__, "__defaults__", (iter(range(9)).__next__,))
    with pytest.raises(TimedOut):
        send(dialogue, "a new question")
    assert dialogue.taken_draft() == "a new question"


class Script:
    """A reader of these lines; None: the end of input, for once."""

    def __init__(self, *lines: str | None) -> None:
        self._lines = list(lines)

    def read(self, draft: str) -> str | None:
        return self._lines.pop(0)


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_a_person_whose_session_cannot_be_kept_may_save_the_conversation_and_try_again(
    make: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    failures: int,
) -> None:
    dialogue, kept = make(interactive=True), []

    def keep(extra: object, documents: object, on_progress: object) -> None:
        kept.append(extra)
        if dialogue.conversation.turns and len(kept) <= 1 + failures:
            raise SessionError("the disk is full")

    monkeypatch.setattr(dialogue.engine, "store", SimpleNamespace(tokens=[], num_loadable=lambda kept, count: count))
    monkeypatch.setattr(dialogue.engine, "keep", keep)
    file = tmp_path / "saved.json"
    dialogue.work_ahead()
    dialogue._background.wait(lambda progress: None)  # of the empty conversation: this one is kept
    lines = ("A question", None, *((f"/save {file}", None) if failures else ()))
    reader = Script(*lines)
    if failures == 2:
        with pytest.raises(SessionError):
            _converse(dialogue, reader)  # type: ignore[arg-type]
    else:
        _converse(dialogue, reader)  # type: ignore[arg-type]
    err = capfd.readouterr().err
    assert err.count("error: the disk is full") == min(failures, 1)
    assert file.exists() == (failures > 0)
    if failures:
        assert Conversation.from_json(file.read_text(), "saved").turns == dialogue.conversation.turns
    assert reader._lines == []


def test_a_script_whose_session_cannot_be_kept_ends_with_the_error(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    dialogue = make()
    monkeypatch.setattr(dialogue.engine, "store", SimpleNamespace(tokens=[], num_loadable=lambda kept, count: count))
    monkeypatch.setattr(dialogue.engine, "keep", fail)
    with pytest.raises(ModelError, match="the disk is gone"):
        _converse(dialogue, Script("A question", None))  # type: ignore[arg-type]


def test_a_prefill_that_is_broken_off_leaves_all_as_it_was(make: Make) -> None:
    dialogue = make()
    dialogue.say("hello")
    finish_ahead(dialogue)
    before, said = dialogue.conversation, dialogue.num_used
    dialogue.add({Document("book", "all work and no play " * 500): ""})
    dialogue.work_ahead()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (progress := dialogue._background.progress) is None or progress.done == 0:
        assert time.monotonic() < deadline
        time.sleep(0.001)  # the work ahead needs the interpreter too
    dialogue.change(before)
    assert dialogue._background.progress is None
    assert progress.done < progress.total
    assert engine_of(dialogue).prefix.tokens == dialogue.format.closing_tokens(before)
    assert engine_of(dialogue).worker.full.length == said
    check_against_a_fresh_start(dialogue, make)


def test_leaving_waits_for_no_prefill_that_no_session_keeps(make: Make) -> None:
    """Ctrl-D after /file waited for all of it, and Ctrl-C then was an unexpected error."""
    dialogue = make()
    dialogue.add({Document("book", "all work and no play " * 500): ""})
    dialogue.work_ahead()
    dialogue.finish_ahead()
    dialogue.close()
    assert len(engine_of(dialogue).prefix.tokens) < dialogue.num_used


def test_a_cache_that_grows_keeps_what_was_computed(make: Make) -> None:
    dialogue = make()
    dialogue.add({Document("notes", "all work and no play " * 180): ""})
    dialogue.say("hello")
    finish_ahead(dialogue)
    said = dialogue.num_used
    before = rows_of(dialogue, said)
    assert engine_of(dialogue).plan.request.capacity == LEAST_CAPACITY
    dialogue.say("word " * 100)
    assert engine_of(dialogue).plan.request.capacity == 2 * LEAST_CAPACITY
    assert engine_of(dialogue).stats.reused_tokens >= said - engine_of(dialogue).plan.placement.rows
    assert torch.equal(rows_of(dialogue, said), before)
    check_against_a_fresh_start(dialogue, make)


def test_a_message_that_does_not_fit_changes_nothing(make: Make) -> None:
    dialogue = make()
    dialogue.say("hello")
    before = dialogue.conversation
    with pytest.raises(DoesNotFit, match=r"16,384; /drop 1 \(the oldest turn\) frees \d+"):
        dialogue.say("x" * 4 * LEAST_CAPACITY)
    assert dialogue.conversation == before
    assert dialogue.taken_draft() == "x" * 4 * LEAST_CAPACITY
    check_against_a_fresh_start(dialogue, make)


def test_a_full_context_is_never_more_than_full_and_drops_free_what_they_say(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said "8,197 of 8,192 tokens", and that /drop 1 frees 8,192."""
    dialogue = make()
    dialogue.output, notes = Output(), list[str]()
    monkeypatch.setattr(dialogue.output, "note", notes.append)
    dialogue.change(dialogue.conversation.with_system("be brief").with_document(Document("b.txt", "word " * 20)))
    for message in ("one", "two", "three", "four"):
        dialogue.say(message)
    used = dialogue.num_used
    for limit in (used - 3, used, used + 5):
        notes.clear()
        dialogue.engine.limit = limit
        dialogue._warn_of_the_end()
        [said] = notes
        assert said.startswith("the context is nearly full" if limit > used else "the context is full: ")
        left = f"all {limit:,} tokens of context used, 3 more are needed" if limit < used else f"{limit - used} left"
        assert left in said
        assert re.match(f"context {min(used, limit):,} of {limit:,}", dialogue.status())
        offered = re.findall(r"/drop (\S+)[^,;]* frees (\d+)", said)
        assert [argument for argument, _ in offered] == ["b.txt", "1", "2"]
        before = dialogue.conversation
        for argument, freed in offered:
            slash.run(dialogue, f"/drop {argument}")
            assert notes[-1].endswith(f" {max(limit - used, 0) + int(freed):,} left")
            dialogue.change(before)


def test_where_says_in_which_chats_it_works(make: Make) -> None:
    dialogue = make()
    with pytest.raises(UsageError, match="works in a chat that begins with --cite, and this one does not"):
        slash.run(dialogue, "/where")
    dialogue.wanted = replace(dialogue.wanted, cites=True)
    with pytest.raises(UsageError, match="the last reply attended to no document"):
        slash.run(dialogue, "/where")


@pytest.mark.parametrize(
    ("max_tokens", "constraint", "said"),
    [
        (8, None, "the reply ends here, at max-tokens 8; ask to go on, or /set max-tokens 16 and /regen"),
        (None, None, "the reply ends here, where the context does; /drop makes room"),
        (8, REGEX, "the reply ends at max-tokens 8 and may not match the regex; /set max-tokens 16 and /regen"),
        (None, REGEX, "the reply ends where the context does and may not match the regex; /drop makes room"),
    ],
)
def test_a_reply_that_is_cut_says_where_and_what_to_do(
    max_tokens: int | None, constraint: Constraint | None, said: str
) -> None:
    assert cut_short(max_tokens, constraint) == said


def test_a_conversation_that_the_template_refuses_is_not_loaded(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was refused and loaded all the same; then the chat ended."""
    dialogue = make()
    dialogue.say("hello")
    before = dialogue.conversation
    (tmp_path / "saved").write_text(Conversation(system="be brief").to_json())
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    monkeypatch.setattr(dialogue.format, "template", refusing + dialogue.format.template)
    with pytest.raises(UsageError, match="no system"):
        slash.run(dialogue, f"/load {tmp_path / 'saved'}")
    assert dialogue.conversation == before


def test_the_highest_seed_answers_more_than_one_message(make: Make) -> None:
    """Bug: the seed of the second reply was past the highest, and the chat ended there."""
    dialogue = make()
    slash.run(dialogue, f"/set seed {2**63 - 1}")
    assert [dialogue.settings.params(count).seed for count in range(3)] == [2**63 - 1, 0, 1]


@pytest.mark.parametrize("number", ["²", "9" * 5000])
def test_a_number_of_turns_that_is_none_names_no_document(make: Make, number: str) -> None:
    with pytest.raises(UsageError, match="there is no document"):
        slash.run(make(), f"/drop {number}")


def test_a_template_that_takes_no_other_message_says_so_when_there_is_one(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the work ahead was refused before anybody could type, again and again without end."""
    dialogue = make(interactive=True)
    refusing = "{% if messages | length > 1 %}{{ raise_exception('one message') }}{% endif %}"
    monkeypatch.setattr(dialogue.format, "template", refusing + dialogue.format.template)
    dialogue.say("hello")
    finish_ahead(dialogue)
    with pytest.raises(UsageError, match=r"\(one message\); begin a new conversation \(/clear\), or choose another"):
        dialogue.say("and then?")
    slash.run(dialogue, "/clear")
    dialogue.say(dialogue.taken_draft())
    assert [turn.user for turn in dialogue.conversation.turns] == ["and then?"]


@pytest.mark.parametrize("line", ["/file ~nobody-at-all/x", "/save ~nobody-at-all/x", "/load ~nobody-at-all/x"])
def test_a_home_that_there_is_not_is_an_error_of_the_user(make: Make, line: str) -> None:
    with pytest.raises(UsageError, match="nobody-at-all"):
        slash.run(make(), line)


def test_a_document_that_is_there_is_not_added_again(make: Make, tmp_path: Path) -> None:
    """As a chat with --file does that goes on with a session."""
    dialogue, book = make(), tmp_path / "book.txt"
    book.write_text("It was a dark night.")
    slash.run(dialogue, f"/file {book}")
    there = dialogue.conversation
    slash.run(dialogue, f"/file {book}")
    assert dialogue.conversation is there


def test_a_save_replaces_conversations_and_nothing_else(make: Make, tmp_path: Path) -> None:
    """/save with the name of the document replaced the document."""
    dialogue, book, saved = make(), tmp_path / "a book.txt", tmp_path / "saved.json"
    book.write_text("It was a dark night.")
    slash.run(dialogue, f"/file '{book}'")
    with pytest.raises(UsageError, match="is there and no saved conversation, so it stays"):
        slash.run(dialogue, f"/save {book}")
    assert book.read_text() == "It was a dark night."
    with pytest.raises(UsageError, match="too long"):
        slash.run(dialogue, f"/save {tmp_path / ('x' * 300)}")
    for _ in range(2):
        slash.run(dialogue, f'/save "{saved}"')
        assert Conversation.from_json(saved.read_text(), "saved") == dialogue.conversation
