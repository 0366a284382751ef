"""A running chat: messages, replies, and the background work for the next message."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from offload.errors import DoesNotFit, TriforceError, UsageError
from triforce_cli.answering.answer import Answer, Part
from triforce_cli.answering.citations import Citation, cited
from triforce_cli.answering.ending import INTERRUPTED, LENGTH, STOP, TIMEOUT, End
from triforce_cli.answering.forms import Written
from triforce_cli.answering.recorder import Recorder
from triforce_cli.answering.request import Prompt, Wanted
from triforce_cli.chat import notes
from triforce_cli.chat.background import BackgroundWork
from triforce_cli.chat.compact import BEGIN, MAX_TOKENS, Compaction, beginning, fitting
from triforce_cli.chat.droppable import drops
from triforce_cli.chat.mentions import mentions_in, typed
from triforce_cli.chat.notes import Drop
from triforce_cli.chat.settings import Settings
from triforce_cli.chat.signals import Stopped, stoppable
from triforce_cli.documents import Document
from triforce_cli.documents.reading import read_documents
from triforce_cli.documents.selection import Named
from triforce_cli.prompts.conversation import Conversation
from triforce_cli.screen.utf8 import STDIN

if TYPE_CHECKING:
    from offload.progress import OnProgress, Progress
    from triforce_cli.chat.engine import ChatEngine
    from triforce_cli.prompts.formats import ChatFormat
    from triforce_cli.screen.output import Output

_SHOWN_TOKENS = 256  # tokens; a shorter prefill shows no progress


class Dialogue:
    """A conversation and the engine that replies.

    interactive: a person types; Ctrl-C stops a reply. After every change, background work prefills the certain
    beginning of the next prompt, and saves the session. recorder: of the answer log, if it is used.
    """

    def __init__(
        self,
        engine: ChatEngine,
        chat_format: ChatFormat,
        wanted: Wanted,
        output: Output,
        *,
        conversation: Conversation,
        interactive: bool,
        written: Written | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.engine, self.format, self.wanted, self.output = engine, chat_format, wanted, output
        self.settings = self._first_settings = Settings(sampling=wanted.sampling, max_tokens=wanted.max_tokens)
        self.conversation, self.interactive = conversation, interactive
        self.citations = list[Citation]()  # in the last reply
        self.ends = list[End]()  # of all replies
        self._form, self._recorder = (written or Written()).make(output), recorder
        self.draft = ""  # text to edit as the next message, as it is typed
        self.edits_drafts = interactive  # an editor can show the draft
        self._precomputed: list[int] = []  # tokens of the background work
        self._background = BackgroundWork()
        self._num_replies = len(conversation.turns)
        self._closing: tuple[Conversation, list[int]] | None = None
        self._compaction: Compaction | None = None  # the last one

    def taken_draft(self) -> str:
        """The draft of the next message, as it is typed; returned once."""
        draft, self.draft = self.draft, ""
        return draft

    def offer(self, message: str) -> None:
        """Make a message the draft of the next one: no command, and no mention."""
        self.draft = _no_command(typed(message))

    def with_mentions(self, message: str) -> str:
        """The message without the marks of the documents that it mentions, which are added before it. If they cannot
        be, it becomes the draft as it was typed."""
        found = mentions_in(message)
        if found.paths:
            self.draft = _no_command(message)
            self.add_documents(Named(found.paths))
            self.draft = ""
        return found.text

    def say(self, text: str) -> None:
        """Send a message, without surrounding white space, and show the reply. A message that cannot be answered
        becomes the draft."""
        self.answer(self.conversation.asked(text.strip()))

    def answer(self, asked: Conversation, *, again: bool = False) -> None:
        """Show the reply to the open question and add it, possibly incomplete, to the conversation. again: the question
        already has a reply, which stays if there is no new one."""
        question = "" if again else asked.question or ""
        try:
            prompt = self.format.prompt(asked)
            self._check_room(len(prompt.tokens) + 1)
            answer, stopped = self._show_reply(prompt, asked)
        except TriforceError:
            self.offer(question)
            raise
        except Stopped as early:
            self.offer(question)
            stays = "the reply before stays" if again else "the message can be sent again"
            self.output.note(f"stopped before the first word; {stays}")
            early.end()
            return
        if answer.finish == LENGTH:
            full = len(prompt.tokens) + answer.num_tokens >= self.engine.limit
            constraint = self.settings.sampling.constraint
            self.output.note(notes.cut_short(None if full else self.settings.max_tokens, constraint))
        self._warn_of_the_end()
        if stopped is not None:
            stopped.end()

    def change(self, conversation: Conversation) -> None:
        """Replace the conversation."""
        if not self._follows(self._certain(conversation)):
            with self.output:
                self._background.break_off(self._show)
        self.conversation = conversation

    def compact(self, num_turns: int | None) -> None:
        """Replace the oldest turns by the model's summary of them, which is shown first. num_turns: how many; None: all
        but the last one. Fewer are replaced if a summary of all would not fit. Raises UsageError, DoesNotFit."""
        conversation, count = self.conversation, len(self.conversation.turns)
        if not count:
            raise UsageError("there is nothing to compact: no message was sent yet")
        if num_turns is not None and num_turns > count:
            raise UsageError(f"{num_turns} turns cannot be compacted; there are {count}")
        most = num_turns or max(count - 1, 1)
        count = fitting(
            conversation, most, lambda asked: len(self.format.prompt(asked, BEGIN).tokens), self.engine.limit
        )
        if not count:
            raise DoesNotFit(notes.no_room_for_a_summary(self._drops()))
        answer = self._aside(beginning(conversation, count), BEGIN)
        if answer is None:
            return
        compaction = Compaction.of(conversation.turns[:count], answer.text.strip())
        done = compaction.done(conversation)
        freed = self.num_used - len(self._certain(done))
        if freed <= 0:
            raise UsageError(notes.nothing_freed(count, -freed))
        self._compaction = compaction
        self.change(done)
        self.output.note(notes.compacted(count, freed, self.num_used, self.engine.limit))

    def undo_compaction(self) -> None:
        """Take the last compaction back. Raises UsageError."""
        if self._compaction is None:
            raise UsageError("nothing was compacted in this chat")
        self.change(self._compaction.undone(self.conversation))
        self._compaction = None

    def _aside(self, asked: Conversation, begin: str) -> Answer | None:
        """The answer to a question beside the conversation, shown on standard error as it comes; None if it was
        stopped. begin: its beginning."""
        sampling = replace(self.settings.params(self._num_replies), constraint=None)
        wanted = Wanted(sampling=sampling, max_tokens=MAX_TOKENS, thinks=self.wanted.thinks)
        prompt = self.format.prompt(asked, begin)
        answer = Answer(prompt, wanted, self.format.tokenizer)
        try:
            with self.output, stoppable(by_ctrl_c=self.interactive):
                self._wait_ahead()
                self._background.forget()
                with closing(self.engine.answer(prompt, wanted, self._show)) as steps:
                    for step in steps:
                        self.output.thought(answer.add(step).text)
                self.output.end_thought()
        except Stopped as stopped:
            self.output.end_thought()
            self.output.note("stopped; the conversation stays")
            stopped.end()
            return None
        return answer

    def add_documents(self, named: Named) -> None:
        """Add documents before the next message, all that are named or none. A document that is already in the
        conversation, as after loading a session, is not added again. Raises UsageError, DoesNotFit."""
        if STDIN in named.paths:
            raise UsageError("standard input is where messages come from; name a file")
        with self.output:
            readings = read_documents(named, "the document", note=self.output.note, on_read=self.output.report)
        there = self.conversation.documents
        kinds = {each.document: "" if each.kind == "text" else each.shown_kind for each in readings}
        self.add({document: kind for document, kind in kinds.items() if document not in there})

    def add(self, kinds: Mapping[Document, str]) -> None:
        """Add the documents, all or none. kinds: the file type of each, "" for text."""
        if not kinds:
            return
        changed = self.conversation
        for document in kinds:
            changed = changed.with_document(document)
        used, before = len(self.format.closing_tokens(changed)), self.num_used
        self._check_room(used + 1)
        self.change(changed)
        counts = [part.num_tokens for part in self.format.parts(changed) if part.kind == "document"][-len(kinds) :]
        named = [(document.name, kind) for document, kind in kinds.items()]
        rows = zip(named, counts, strict=True) if len(counts) == len(named) else [(("documents", ""), used - before)]
        for line in notes.documents_added(list(rows), used, self.engine.limit):
            self.output.note(line)
        self._warn_of_the_end()

    @property
    def num_used(self) -> int:
        """Tokens of the conversation up to the next message."""
        if self._closing is None or self._closing[0] is not self.conversation:
            self._closing = self.conversation, self._certain(self.conversation)
        return len(self._closing[1])

    def work_ahead(self) -> None:
        """Start the background work for the next message."""
        conversation, tokens = self.conversation, self._certain(self.conversation)

        def work(on_progress: OnProgress) -> None:
            self.engine.precompute(tokens, on_progress)
            self.engine.keep(_session_data(conversation), _names(conversation), on_progress)

        self._background.start(work, conversation, follows=self._follows(tokens))
        self._precomputed = tokens

    def _certain(self, conversation: Conversation) -> list[int]:
        """The tokens that the next prompt is certain to begin with; none if the template refuses another message, which
        is reported when one is sent."""
        try:
            return self.format.closing_tokens(conversation)
        except TriforceError:
            return []

    def _follows(self, tokens: list[int]) -> bool:
        """True if `tokens` begin with the tokens of the background work."""
        return tokens[: len(self._precomputed)] == self._precomputed

    def finish_ahead(self) -> None:
        """Wait for the session to be saved at the end of the chat, if there is one."""
        if self.engine.store is None:
            return
        try:
            with self.output, stoppable(by_ctrl_c=self.interactive):
                self._background.wait(self._show)
        except Stopped as stopped:
            stopped.end()
            self.output.note("stopped; the session is as it was after the turn before")

    def keep(self) -> None:
        """Save the conversation and the rows computed so far. Nothing more is computed: there may be no time for it."""
        with self.output:
            self._background.break_off(self._show)
            self.engine.restore(self._certain(self.conversation), self._show)
            self.engine.keep(_session_data(self.conversation), _names(self.conversation), self._show)

    def status(self) -> str:
        """The status line: context used, speed of the last reply, progress of the background work."""
        return notes.status(self.num_used, self.engine.limit, self.engine.stats, self._background, self.output.width)

    def close(self) -> None:
        self._background.close()

    def _show_reply(self, prompt: Prompt, asked: Conversation) -> tuple[Answer, Stopped | None]:
        """Show the reply, as far as it came, and add it to the conversation. Returns what stopped it, too, if anything
        did. Raises Stopped, and TimedOut, before the first word."""
        settings, stopped, began = self.settings, None, time.monotonic()
        wanted = replace(self.wanted, sampling=settings.params(self._num_replies), max_tokens=settings.max_tokens)
        with self.output:
            with stoppable(by_ctrl_c=self.interactive):
                self._wait_ahead()
                self._background.forget()
            answer = Answer(prompt, wanted, self.format.tokenizer)
            try:
                with stoppable(by_ctrl_c=self.interactive):
                    self._show_steps(answer)
            except Stopped as error:
                if not answer.parts:
                    raise
                stopped = error
            self._num_replies += 1
            rest = answer.end(TIMEOUT if stopped is None else INTERRUPTED)
            self.conversation = asked.answered(*self.format.remembered(answer), complete=answer.finish == STOP)
            try:
                with stoppable(by_ctrl_c=self.interactive):
                    self._show_end(answer, rest, prompt)
            except Stopped as error:
                stopped = error
            constraint = wanted.sampling.constraint
            name = "" if constraint is None else constraint.name
            self.ends.append(End(f"reply {self._num_replies}", answer.finish, name))
            self._record(answer, asked.question or "", time.monotonic() - began)
        return answer, stopped

    def _record(self, answer: Answer, question: str, seconds: float) -> None:
        if self._recorder is not None:
            options = self.settings.since(self._first_settings)
            self._recorder.record(answer, self.output, question=question, seconds=seconds, options=options)

    def _show_steps(self, answer: Answer) -> None:
        """Show steps until the reply ends or its deadline passes."""
        on_progress = answer.deadline.heard(self._show)
        with closing(self.engine.answer(answer.prompt, answer.wanted, on_progress)) as steps:
            for step in steps:
                self._form.add(answer.add(step))
                if step.finish is None and answer.deadline.has_passed:
                    return

    def _show_end(self, answer: Answer, rest: Part | None, prompt: Prompt) -> None:
        """Show `rest`, the text that was held back, how the reply ended, and its citations."""
        if rest is not None:
            self._form.add(rest)
        if answer.is_cut:
            self.output.end_line()
            self.output.note("stopped" if answer.finish == INTERRUPTED else "out of time; what had come is kept")
        stats = None if self.engine.stats is None else self.engine.stats.as_dict()
        self._form.end(answer.as_dict(note=self.output.note) | {"stats": stats})
        self.citations = answer.citations or []
        if prompt.documents and answer.citations is not None:
            self.output.note(cited(answer.citations))

    def _wait_ahead(self) -> None:
        """Wait for the background work. An interactive chat shows a failed save as an error and goes on."""
        try:
            self._background.wait(self._show)
        except TriforceError as error:
            if not self.interactive:
                raise
            self.output.error(str(error))

    def _show(self, progress: Progress) -> None:
        if progress.unit == "bytes" or progress.total >= _SHOWN_TOKENS:
            self.output.progress(progress)

    def _check_room(self, num_tokens: int) -> None:
        if num_tokens > self.engine.limit:
            raise DoesNotFit(notes.too_long(num_tokens, self.engine.limit, self._drops()))

    def _warn_of_the_end(self) -> None:
        """Note what can be dropped if the longest reply and a message of that length might not fit."""
        left = self.engine.limit - self.num_used
        if left < min(max(2 * self.settings.max_tokens, self.engine.limit // 10), self.engine.limit // 4):
            self.output.note(notes.nearly_full(self.num_used, self.engine.limit, self._drops()))

    def _drops(self) -> list[Drop]:
        return drops(self.conversation, self.format, self._freed)

    def _freed(self, less: Conversation) -> int:
        """The tokens of context that replacing the conversation by `less` would free."""
        limit, used = self.engine.limit, self.num_used
        left = len(self._certain(less)) or used  # if the template refuses it, nothing is freed
        return max(limit - left, 0) - max(limit - used, 0)


def _no_command(typed: str) -> str:
    return f"/{typed}" if typed.startswith("/") else typed


def _names(conversation: Conversation) -> list[str]:
    return [document.name for document in conversation.documents]


def _session_data(conversation: Conversation) -> dict[str, object]:
    """The data that a chat stores in its session."""
    return {"kind": "chat", "conversation": conversation.to_data()}
