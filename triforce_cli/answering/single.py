"""The answer to one prompt, on an engine of its own, as `generate` and `ask` give it."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from offload.errors import Differs
from triforce_cli.answering.answer import Answer
from triforce_cli.answering.code import last_block
from triforce_cli.answering.ending import LENGTH, NoCode, Unfinished, ends_here, may_not_match, no_code
from triforce_cli.answering.forms import Written
from triforce_cli.answering.recorder import Recorder
from triforce_cli.answering.request import Prompt, Wanted
from triforce_cli.answering.session import kept, open_for_text, rows_kept
from triforce_cli.answering.writer import Writer
from triforce_cli.ground.deadline import Deadline
from triforce_cli.ground.outfile import OutputFile
from triforce_cli.render.stats import compared
from triforce_cli.screen.output import Output
from triforce_cli.setup.engine import Prepared, Setup, open_engine

if TYPE_CHECKING:
    from offload.engine.engine import Engine
    from offload.engine.request import GenerationRequest
    from offload.engine.step import Step
    from offload.plan.planner import Plan


@dataclass(kw_only=True)
class SingleAnswer:
    """The answer to one prompt. session: the folder that keeps KV rows. file: the output in place of standard output.
    compares: decode again without speculation, and compare. recorder: of the answer log, if it is used. on_read: called
    with the progress of reading documents."""

    wanted: Wanted
    setup: Setup
    session: Path | None
    read_only: bool
    compares: bool
    written: Written
    file: Path | None
    recorder: Recorder | None
    quiet: bool

    def __post_init__(self) -> None:
        self.output = output = Output(quiet=self.quiet)
        self._deadline = Deadline(self.wanted.timeout)
        self._writer, self._question = Writer(output, self.written, self.setup.models), ""
        self.on_read, self._on_progress = self._deadline.heard(output.report), self._deadline.heard(output.progress)

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """At its end, also after an error, the answer so far is written, then recorded."""
        began = time.monotonic()
        try:
            with self._file(), self._writer, self.output:
                yield
        finally:
            if self.recorder is not None and self._writer.answer is not None:
                seconds = time.monotonic() - began
                self.recorder.record(self._writer.answer, self.output, question=self._question, seconds=seconds)

    def _file(self) -> AbstractContextManager[object]:
        if self.file is None:
            return nullcontext()
        file = OutputFile(self.file, note=self.output.note)
        self.output.write_to(file)
        return file

    def prepare(self) -> Prepared:
        """Load the tokenizer and inspect the machine; see triforce_cli.setup.engine."""
        return self.setup.prepare(self.output, sampling=self.wanted.sampling)

    def go_on(self, *, is_chat: bool) -> None:
        """Go on with the session's last answer. is_chat: of `ask`, not of `generate`."""
        from triforce_cli.answering.resumable import begun_prompt

        assert self.session is not None
        prompt = begun_prompt(self.session, is_chat=is_chat)
        self.generate(self.prepare(), prompt, "", question="")

    def generate(self, prepared: Prepared, prompt: Prompt, text: str, *, question: str) -> None:
        """Plan, load, generate. Text appears as it is accepted. text: the prompt's text. question: the part of it that
        is recorded."""
        self._question = question
        wanted, session = self.wanted, self.session
        plan = prepared.request.plan(num_prompt_tokens=len(prompt.tokens), max_tokens=wanted.max_tokens)
        self.output.planned(plan)
        answer = Answer(prompt, wanted, prepared.tokenizer, deadline=self._deadline)
        with ExitStack() as stack:
            store = None
            if session is not None:
                store = stack.enter_context(open_for_text(prepared, plan, session, read_only=self.read_only))
            engine = stack.enter_context(open_engine(prepared, plan, on_progress=self._on_progress))
            self._writer.begin(engine, answer, text)
            if store is None:
                stack.enter_context(rows_kept(engine, [document.name for document in prompt.documents], self.output))
            else:
                stack.enter_context(kept(store, engine, answer, self.output))
            request = prompt.request(wanted, max_tokens=plan.request.max_tokens, reuse=store is not None)
            self._decode(engine, request, answer)
            if self.compares:
                self._compare(engine, request, answer)
        if answer.finish == LENGTH:
            self._writer.remark = self._remark(plan)
        if self.written.form == "code" and last_block(answer.text, answer.finish) is None:
            raise NoCode(no_code(f"the {self.written.name}"))

    def _decode(self, engine: Engine, request: GenerationRequest, answer: Answer) -> None:
        with closing(engine.generate(request, on_progress=self._on_progress)) as steps:
            for step in self._deadline.within(steps, is_end=_is_end):
                if not answer.parts and (stored := engine.stats.stored_tokens):
                    self.output.note(f"{stored:,} of {len(request.prompt):,} prompt tokens are from the store")
                self._writer.add(step)
                if not self.written.streams or self.file:
                    self.output.report("decode", answer.num_tokens, request.max_tokens, "tokens")

    def _compare(self, engine: Engine, request: GenerationRequest, answer: Answer) -> None:
        """Decode again without speculation. Raises Differs if the decoding is greedy and the texts differ."""
        with closing(self._plainly(engine, request)) as steps:
            tokens = [token for step in self._deadline.within(steps, is_end=_is_end) for token in step.tokens]
        if self._writer.stats is not None:
            self.output.table(compared(self._writer.stats, engine.stats, greedy=request.sampling.greedy))
        if request.sampling.greedy and tokens != answer.tokens:
            raise Differs("without speculation the text is another; triforce verify shows where it begins to differ")

    def _plainly(self, engine: Engine, request: GenerationRequest) -> Generator[Step, None, None]:
        self.output.end_shown_line()
        done = 0
        for step in engine.generate(replace(request, speculation=False), on_progress=self.output.progress):
            done += len(step.tokens)
            self.output.report("without speculation", done, request.max_tokens, "tokens")
            yield step

    def _remark(self, plan: Plan) -> str:
        """The note on an answer that was cut. Raises Unfinished if the answer has to follow a constraint."""
        name = f"the {self.written.name}"
        full = plan.request.max_tokens < self.wanted.max_tokens
        limit = None if full else f"--max-tokens {self.wanted.max_tokens}"
        if self.wanted.sampling.constraint is None:
            is_kept = self.session is not None and not self.read_only
            return ends_here(name, limit, "--continue goes on" if is_kept else "")
        remedy = "shorten the prompt" if full else "raise it"
        raise Unfinished(may_not_match(name, limit, self.wanted.sampling.constraint.name, remedy))


def _is_end(step: Step) -> bool:
    return step.finish is not None
