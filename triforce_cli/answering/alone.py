"""One prompt answered on an engine of its own: what `generate` and `ask` do once they know what is to be read."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from offload.errors import Differs
from triforce_cli.answering.answer import Answer
from triforce_cli.answering.ending import Unfinished, ends_here, may_not_match
from triforce_cli.answering.forms import Written
from triforce_cli.answering.kept import kept, open_for_text
from triforce_cli.answering.request import Prompt, Wanted
from triforce_cli.answering.writer import Writer
from triforce_cli.choice import Models
from triforce_cli.deadline import Deadline
from triforce_cli.documents.reading import OnRead
from triforce_cli.engine import Prepared, open_engine, prepare
from triforce_cli.outfile import OutputFile
from triforce_cli.output import Output
from triforce_cli.prompt import PromptText
from triforce_cli.render.stats import compared

if TYPE_CHECKING:
    from offload.engine.engine import Engine, Step
    from offload.engine.request import GenerationRequest
    from offload.plan.planner import Options, Plan


class Source(Protocol):
    """What a command has the model read. answer_name: what messages call the text. ends_line: of text."""

    @property
    def answer_name(self) -> str: ...

    @property
    def ends_line(self) -> bool: ...

    def read(self, output: Output, on_read: OnRead) -> PromptText:
        """The text that is sent, before models are looked at."""
        ...

    def prompt_of(self, sent: PromptText, prepared: Prepared, output: Output, on_read: OnRead) -> Prompt:
        """The prompt that is made of it."""
        ...


@dataclass(frozen=True, kw_only=True)
class Alone:
    """Everything that is asked for but the prompt. given: a plan to use. session: the folder that keeps rows. file: in
    place of standard output. compares: decode again without speculation, and compare."""

    wanted: Wanted
    models: Models
    options: Options
    given: Plan | None
    session: Path | None
    read_only: bool
    timeout: float | None
    compares: bool
    written: Written
    file: Path | None
    quiet: bool

    def run(self, source: Source) -> None:
        """Read the prompt, plan, load, generate. Text appears as it is accepted."""
        deadline, output = Deadline(self.timeout), Output(quiet=self.quiet)
        with self._file(output), self._writer(output, source) as writer, output:
            on_read = deadline.heard(output.report)
            sent = source.read(output, on_read)
            prepared = prepare(self.models, self.options, output, sampling=self.wanted.sampling, given=self.given)
            prompt = source.prompt_of(sent, prepared, output, on_read)
            plan = prepared.request.plan(num_prompt_tokens=len(prompt.tokens), max_tokens=self.wanted.max_tokens)
            output.planned(plan)
            answer = Answer(prompt, self.wanted, prepared.tokenizer)
            with ExitStack() as stack:
                store = None
                if self.session is not None:
                    store = stack.enter_context(open_for_text(prepared, plan, self.session, read_only=self.read_only))
                on_progress = deadline.heard(output.progress)
                engine = stack.enter_context(open_engine(prepared, plan, on_progress=on_progress))
                writer.begin(engine, answer, sent.text)
                if store is not None:
                    stack.enter_context(kept(store, engine, prompt.tokens, output))
                self._generate(engine, answer, writer, output, deadline)
            writer.remark = self._remark(answer, plan, source)

    def _generate(self, engine: Engine, answer: Answer, writer: Writer, output: Output, deadline: Deadline) -> None:
        """Raises Differs where the text without speculation is compared, and is another."""
        most = engine.plan.request.max_tokens
        request = answer.prompt.request(self.wanted, max_tokens=most, reuse=self.session is not None)
        with closing(engine.generate(request, on_progress=deadline.heard(output.progress))) as steps:
            for step in deadline.within(steps):
                writer.add(step)
                if self.written.as_json or self.file:
                    output.report("decode", answer.num_tokens, most, "tokens")
        if not self.compares:
            return
        with closing(_plainly(engine, request, output)) as steps:
            tokens = [token for step in deadline.within(steps) for token in step.tokens]
        greedy = self.wanted.sampling.greedy
        if writer.stats is not None:
            output.table(compared(writer.stats, engine.stats, greedy=greedy))
        if greedy and tokens != answer.tokens:
            raise Differs("without speculation the text is another; triforce verify shows where it begins to differ")

    def _remark(self, answer: Answer, plan: Plan, source: Source) -> str:
        """What to say of an answer that was cut. Raises Unfinished where it has to follow a constraint."""
        if answer.finish != "length":
            return ""
        full = plan.request.max_tokens < self.wanted.max_tokens
        limit = None if full else f"--max-tokens {self.wanted.max_tokens}"
        name = f"the {source.answer_name}"
        if (constraint := self.wanted.sampling.constraint) is None:
            return ends_here(name, limit)
        remedy = "shorten the prompt" if full else "raise it"
        raise Unfinished(may_not_match(name, limit, constraint.name, remedy))

    def _file(self, output: Output) -> AbstractContextManager[object]:
        if self.file is None:
            return nullcontext()
        file = OutputFile(self.file, note=output.note)
        output.write_to(file)
        return file

    def _writer(self, output: Output, source: Source) -> Writer:
        return Writer(output, self.written, self.models, ends_line=source.ends_line)


def _plainly(engine: Engine, request: GenerationRequest, output: Output) -> Generator[Step, None, None]:
    """The same request without speculation."""
    output.end_shown_line()
    done = 0
    for step in engine.generate(replace(request, speculation=False), on_progress=output.progress):
        done += len(step.tokens)
        output.report("without speculation", done, engine.plan.request.max_tokens, "tokens")
        yield step
