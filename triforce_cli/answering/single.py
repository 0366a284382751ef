"""One prompt answered on an engine of its own, as `generate` and `ask` do."""

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


@dataclass(frozen=True, kw_only=True)
class SingleRequest:
    """One request without its prompt. session: the folder that keeps KV rows. goes_on: the prompt ends with the last
    answer of the session, which goes on. file: the output in place of standard output. compares: decode again without
    speculation, and compare. recorder: of the answer log, if it is used."""

    wanted: Wanted
    setup: Setup
    session: Path | None
    read_only: bool
    goes_on: bool
    compares: bool
    written: Written
    file: Path | None
    recorder: Recorder | None
    quiet: bool

    @property
    def is_kept(self) -> bool:
        """True if a session keeps the answer."""
        return self.session is not None and not self.read_only

    @contextmanager
    def begun(self) -> Iterator[Run]:
        """The run of this request. At its end, also after an error, the answer so far is written, then recorded."""
        began = time.monotonic()
        deadline, output = Deadline(self.wanted.timeout), Output(quiet=self.quiet)
        writer = Writer(output, self.written, self.setup.models)
        run = Run(self, output, deadline, writer)
        try:
            with self._file(output), writer, output:
                yield run
        finally:
            if self.recorder is not None and writer.answer is not None:
                seconds = time.monotonic() - began
                self.recorder.record(writer.answer, output, question=run.question, seconds=seconds)

    def _file(self, output: Output) -> AbstractContextManager[object]:
        if self.file is None:
            return nullcontext()
        file = OutputFile(self.file, note=output.note)
        output.write_to(file)
        return file


class Run:
    """An answer being generated. on_read: called with the progress of reading documents. question: as it is
    recorded."""

    def __init__(self, alone: SingleRequest, output: Output, deadline: Deadline, writer: Writer) -> None:
        self.output, self.question = output, ""
        self.on_read = deadline.heard(output.report)
        self._alone, self._deadline, self._writer = alone, deadline, writer
        self._on_progress = deadline.heard(output.progress)

    def prepare(self) -> Prepared:
        """Load the tokenizer and inspect the machine; see triforce_cli.setup.engine."""
        return self._alone.setup.prepare(self.output, sampling=self._alone.wanted.sampling)

    def go_on(self, *, is_chat: bool) -> None:
        """Go on with the session's last answer. is_chat: of `ask`, not of `generate`."""
        from triforce_cli.answering.resumable import begun_prompt

        assert self._alone.session is not None
        prompt = begun_prompt(self._alone.session, is_chat=is_chat)
        self.answer(self.prepare(), prompt, "", question="")

    def answer(self, prepared: Prepared, prompt: Prompt, text: str, *, question: str) -> None:
        """Plan, load, generate. Text appears as it is accepted. text: the prompt's text. question: the part of it that
        is recorded."""
        self.question = question
        wanted, session = self._alone.wanted, self._alone.session
        plan = prepared.request.plan(num_prompt_tokens=len(prompt.tokens), max_tokens=wanted.max_tokens)
        self.output.planned(plan)
        answer = Answer(prompt, wanted, prepared.tokenizer, deadline=self._deadline)
        with ExitStack() as stack:
            store = None
            if session is not None:
                store = stack.enter_context(open_for_text(prepared, plan, session, read_only=self._alone.read_only))
            engine = stack.enter_context(open_engine(prepared, plan, on_progress=self._on_progress))
            self._writer.begin(engine, answer, text)
            if store is None:
                stack.enter_context(rows_kept(engine, [document.name for document in prompt.documents], self.output))
            else:
                stack.enter_context(kept(store, engine, answer, self.output))
            request = prompt.request(wanted, max_tokens=plan.request.max_tokens, reuse=store is not None)
            self._generate(engine, request, answer)
            if self._alone.compares:
                self._compare(engine, request, answer)
        if answer.finish == LENGTH:
            self._writer.remark = self._remark(plan)
        if self._alone.written.form == "code" and last_block(answer.text, answer.finish) is None:
            raise NoCode(no_code(f"the {self._alone.written.name}"))

    def _generate(self, engine: Engine, request: GenerationRequest, answer: Answer) -> None:
        with closing(engine.generate(request, on_progress=self._on_progress)) as steps:
            for step in self._deadline.within(steps, is_end=_is_end):
                if not answer.parts and (stored := engine.stats.stored_tokens):
                    self.output.note(f"{stored:,} of {len(request.prompt):,} prompt tokens are from the store")
                self._writer.add(step)
                if not self._alone.written.streams or self._alone.file:
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
        wanted, name = self._alone.wanted, f"the {self._alone.written.name}"
        full = plan.request.max_tokens < wanted.max_tokens
        limit = None if full else f"--max-tokens {wanted.max_tokens}"
        if wanted.sampling.constraint is None:
            return ends_here(name, limit, "--continue goes on" if self._alone.is_kept else "")
        remedy = "shorten the prompt" if full else "raise it"
        raise Unfinished(may_not_match(name, limit, wanted.sampling.constraint.name, remedy))


def _is_end(step: Step) -> bool:
    return step.finish is not None
