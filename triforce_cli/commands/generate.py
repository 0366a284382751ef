"""`triforce generate`: continue a long prompt."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from offload.engine.request import GenerationRequest, check_logprobs
from offload.errors import Differs, UsageError
from triforce_cli import options
from triforce_cli.answer import Answer, FormName, make_form
from triforce_cli.batch import Batch
from triforce_cli.choice import Models
from triforce_cli.commands import Command
from triforce_cli.control import ControlFlags
from triforce_cli.deadline import Deadline
from triforce_cli.documents.selection import Named
from triforce_cli.ending import Unfinished, ends_here, may_not_match
from triforce_cli.engine import Prepared, open_engine, open_session, prepare
from triforce_cli.flags import (
    AUTO,
    CacheFlags,
    DocumentFlags,
    ModelFlags,
    PlacementFlags,
    ProgramFlags,
    SessionFlags,
    plan_options,
    spread,
)
from triforce_cli.given import beside_given
from triforce_cli.options import OUTPUT, PROMPT, SAMPLING, number, option, switch
from triforce_cli.outfile import OutputFile
from triforce_cli.output import Output
from triforce_cli.prompt import read_prompt
from triforce_cli.render.stats import compared
from triforce_cli.utf8 import STDIN, decode_argument, user_path

if TYPE_CHECKING:
    from offload.decode.sampling import SamplingParams, ThoughtBudget
    from offload.engine.engine import Engine, Step
    from offload.metrics import Stats
    from offload.plan.planner import Options, Plan
    from offload.session.store import Store
    from triforce_cli.chat.thoughts import Opening, Splitter
    from triforce_cli.documents import Document

Stop = Annotated[
    list[str] | None,
    option(
        "--stop",
        "Stop before this text; can be repeated.",
        SAMPLING,
        metavar="TEXT",
    ),
]
InputLines = Annotated[
    Path | None,
    option(
        "--input-jsonl",
        'Continue many prompts: JSON lines with "prompt" and optionally "id", "max_tokens", "seed" ...; "-" is '
        "standard input.",
        PROMPT,
        metavar="FILE",
    ),
]
OutputLines = Annotated[
    Path | None,
    option(
        "--output-jsonl",
        "Append the results to this file; the same command resumes an interrupted run.",
        PROMPT,
        metavar="FILE",
    ),
]
Together = Annotated[
    str,
    option(
        "--batch",
        "Prompts that run at a time.",
        PROMPT,
        metavar="N",
    ),
]
Timeout = Annotated[
    float | None,
    option(
        "--timeout",
        "Stop after this many seconds, loading included (exit code 124); with many prompts, for each.",
        SAMPLING,
        metavar="SECONDS",
        parser=number,
    ),
]
AsEvents = Annotated[
    bool,
    switch("--jsonl", "Write a JSON line for each event: plan, prefill, token, done, error.", OUTPUT),
]
Echo = Annotated[bool, switch("--echo", "Begin with the prompt; JSON has it too.", OUTPUT)]
Destination = Annotated[
    Path | None,
    option(
        "--output",
        "Write to this file instead of standard output, atomically; an interrupted run leaves FILE.partial.",
        OUTPUT,
        short="-o",
        metavar="FILE",
    ),
]
ShowStats = Annotated[bool, switch("--stats", "After the text, print statistics to standard error.", OUTPUT)]

Compare = Annotated[
    bool,
    switch("--compare", "Then decode again without speculation; compare time and text (standard error).", OUTPUT),
]


@dataclass(frozen=True)
class Prompted:
    """What the model reads, and how its answer ends: besides the model's own ends, at `end_tokens` and `stops`.
    passages: of `documents`, that the answer attends to most, so many are looked at. opening: of a reply to a
    conversation, which may begin with thoughts; None: the text is all that is written.
    shows_thoughts: to the person. thoughts: what limits them."""

    tokens: Sequence[int]
    end_tokens: frozenset[int] = frozenset()
    stops: tuple[str, ...] = ()
    passages: int = 0
    documents: tuple[Document, ...] = ()
    opening: Opening | None = None
    shows_thoughts: bool = False
    thoughts: ThoughtBudget | None = None

    def shown(self, steps: Iterable[Step], on_thought: Callable[[str], None]) -> Iterator[Step]:
        """`steps` with the text that is said; thoughts are heard by `on_thought`."""
        splitter = None if self.opening is None else self.opening.splitter()
        for step in steps:
            yield step if splitter is None else replace(step, text=self._said(splitter, step, on_thought))

    def _said(self, splitter: Splitter, step: Step, on_thought: Callable[[str], None]) -> str:
        parts = splitter.push(step.text, step.named) + (splitter.flush() if step.finish is not None else [])
        for part in parts:
            if part.is_thought:
                on_thought(part.text)
        return "".join(part.text for part in parts if not part.is_thought)


@dataclass(frozen=True, kw_only=True)
class Generate:
    """One `triforce generate` of one prompt, parsed."""

    documents: Named
    prompt: str | None
    max_tokens: int
    sampling: SamplingParams
    stops: tuple[str, ...]
    timeout: float | None
    options: Options
    given: Plan | None
    models: Models
    session: Path | None
    read_only: bool
    form: FormName
    file: Path | None
    echo: bool
    show_stats: bool
    compare: bool
    logprobs: int | None
    quiet: bool
    ends_line: ClassVar[bool] = False  # of text that is complete
    text_name: ClassVar[str] = "text"

    @property
    def as_json(self) -> bool:
        return self.form != "text"

    def run(self) -> None:
        """Read the prompt, plan, load, generate. Text appears as it is accepted."""
        deadline, output = Deadline(self.timeout), Output(quiet=self.quiet)
        with self._file(output), self._answer(output) as answer, output:
            self._generate(self.read(output, deadline), answer, output, deadline)

    def read(self, output: Output, deadline: Deadline) -> str:
        """The text that is sent."""
        return read_prompt(self.documents, self.prompt, note=output.note, on_read=deadline.heard(output.report))

    def prompted(self, prepared: Prepared, text: str, output: Output) -> Prompted:
        """What the model reads of it."""
        return Prompted(prepared.prompt_tokenizer.encode(text))

    def _generate(self, prompt: str, answer: Answer, output: Output, deadline: Deadline) -> None:
        prepared = prepare(self.models, self.options, output, sampling=self.sampling, given=self.given)
        prompted = self.prompted(prepared, prompt, output)
        tokens = prompted.tokens
        plan = prepared.request.plan(num_prompt_tokens=len(tokens), max_tokens=self.max_tokens)
        output.planned(plan)
        on_progress = deadline.heard(output.progress)
        with ExitStack() as stack:
            store = self._open_session(prepared, plan, stack)
            engine = stack.enter_context(open_engine(prepared, plan, on_progress=on_progress))
            answer.begin(plan, engine, prompt)
            if prompted.passages:
                answer.cite(tokens, prompted.documents)
            answer.calls = prompted.opening.calls if prompted.opening else None
            if store is not None:
                stack.enter_context(self._kept(store, engine, tokens, output))
            request = replace(self._request(prompted, plan), reuse=store is not None, logprobs=self.logprobs)
            steps = stack.enter_context(closing(engine.generate(request, on_progress=on_progress)))
            on_thought = partial(answer.thought, shown=prompted.shows_thoughts)
            for step in prompted.shown(deadline.within(steps), on_thought):
                answer.add(step)
                if self.as_json or self.file:
                    output.report("decode", answer.num_tokens, plan.request.max_tokens, "tokens")
            if self.compare:
                steps = stack.enter_context(closing(self._decode_plainly(engine, prompted, plan, output)))
                self._compare(answer, list(deadline.within(steps)), engine.stats, output)
            if answer.finish == "length":
                answer.remark = self._cut(plan)

    def _cut(self, plan: Plan) -> str:
        """What to say of a text that was cut. Raises Unfinished where it has to follow a constraint."""
        full = plan.request.max_tokens < self.max_tokens
        limit = None if full else f"--max-tokens {self.max_tokens}"
        if (constraint := self.sampling.constraint) is None:
            return ends_here(f"the {self.text_name}", limit)
        remedy = "shorten the prompt" if full else "raise it"
        raise Unfinished(may_not_match(f"the {self.text_name}", limit, constraint.name, remedy))

    def _request(self, prompted: Prompted, plan: Plan) -> GenerationRequest:
        return GenerationRequest(
            prompted.tokens,
            replace(self.sampling, thoughts=prompted.thoughts) if prompted.thoughts else self.sampling,
            max_tokens=plan.request.max_tokens,
            stop=(*self.stops, *prompted.stops),
            end_tokens=prompted.end_tokens,
            passages=prompted.passages,
            named={} if prompted.opening is None else prompted.opening.named,
        )

    def _decode_plainly(
        self, engine: Engine, prompted: Prompted, plan: Plan, output: Output
    ) -> Generator[Step, None, None]:
        """The same request without speculation."""
        output.end_shown_line()
        request = replace(self._request(prompted, plan), reuse=self.session is not None, speculation=False)
        steps = engine.generate(request, on_progress=output.progress)
        done = 0
        for step in steps:
            done += len(step.tokens)
            output.report("without speculation", done, plan.request.max_tokens, "tokens")
            yield step

    def _compare(self, answer: Answer, plain: Sequence[Step], plain_stats: Stats, output: Output) -> None:
        """Raises Differs where there is one text and it is another."""
        same = [token for step in plain for token in step.tokens] == answer.tokens
        greedy = self.sampling.greedy
        if answer.stats is not None:
            output.table(compared(answer.stats, plain_stats, greedy=greedy))
        if greedy and not same:
            raise Differs("without speculation the text is another; triforce verify shows where it begins to differ")

    def _open_session(self, prepared: Prepared, plan: Plan, stack: ExitStack) -> Store | None:
        if self.session is None:
            return None
        store = stack.enter_context(open_session(prepared, plan, self.session, read_only=self.read_only))
        if store.extra and not self.read_only and store.extra.get("kind") != "text":
            raise UsageError(f"{self.session} is kept by a chat; name another session, or add --read-only")
        return store

    @contextmanager
    def _kept(self, store: Store, engine: Engine, tokens: Sequence[int], output: Output) -> Iterator[None]:
        """Restore the session's rows for this prompt. At the end, also after an interrupt, save the rows if there are
        more of them."""
        from offload.engine.prefix import num_common

        common, began = engine.restore(store, tokens, on_progress=output.progress), num_common(store.tokens, tokens)
        replaced = len(store.tokens) - began
        try:
            yield
        finally:
            output.end_shown_line()
            if not self.read_only and engine.num_cached > common:
                engine.save(store, {"kind": "text"}, on_progress=output.progress)
                if replaced > began:
                    output.note(
                        f"session: {replaced:,} tokens of what was kept did not begin this prompt and are replaced"
                    )
            lost = f"; {began:,} begin what was kept, and windows have lost some that they need"
            output.note(
                f"session: {common:,} of {len(tokens):,} prompt tokens were there{lost if common < began else ''}"
            )

    def _file(self, output: Output) -> AbstractContextManager[object]:
        if self.file is None:
            return nullcontext()
        file = OutputFile(self.file, note=output.note)
        output.write_to(file)
        return file

    def _answer(self, output: Output) -> Answer:
        form = make_form(self.form, output, echo=self.echo, ends_line=self.ends_line)
        return Answer(output, form, model=self.models.as_dict(), echo=self.echo, show_stats=self.show_stats)


@spread
def generate(
    *,
    models: ModelFlags,
    documents: DocumentFlags,
    prompt: options.Prompt = None,
    input_jsonl: InputLines = None,
    output_jsonl: OutputLines = None,
    batch: Together = AUTO,
    max_tokens: options.MaxTokens = 256,
    sampling: ControlFlags,
    stop: Stop = None,
    timeout: Timeout = None,
    plan: options.GivenPlan = None,
    decoding: CacheFlags,
    placement: PlacementFlags,
    session: SessionFlags,
    output: Destination = None,
    echo: Echo = False,
    stats: ShowStats = False,
    compare: Compare = False,
    logprobs: options.Logprobs = None,
    json: options.AsJson = False,
    jsonl: AsEvents = False,
    quiet: options.Quiet = False,
    program: ProgramFlags,
) -> Command:
    """Continue a long prompt, exactly as the target model alone would, in fewer passes over its cache.

    Only generated text goes to standard output, as soon as it is accepted. With --input-jsonl many prompts are
    continued, several at a time.

    Example: triforce generate --prompt-file book.txt --max-tokens 200 --stats
    """
    stops = stops_of(stop)
    check_lengths(max_tokens, sampling.min_tokens, timeout)
    check_logprobs(logprobs)
    if logprobs is not None and not (json or jsonl or input_jsonl):
        raise UsageError("--logprobs go into JSON; add --json, --jsonl or --input-jsonl")
    num_sequences = _number_at_a_time(batch)
    chosen, given = beside_given(plan, plan_options(decoding, **vars(placement)))
    if input_jsonl is not None or output_jsonl is not None or num_sequences is not None:
        _check_batch(input_jsonl, (documents.named(), prompt, session.path(), output, jsonl, stats, compare))
        return Batch(
            source=user_path(str(input_jsonl)),
            target=destination(output_jsonl),
            max_tokens=max_tokens,
            sampling=sampling.params(),
            stops=stops,
            timeout=timeout,
            num_sequences=num_sequences,
            logprobs=logprobs,
            options=chosen,
            given=given,
            models=models.chosen(),
            echo=echo,
            quiet=quiet,
        )
    return Generate(
        documents=documents.named(),
        prompt=prompt,
        max_tokens=max_tokens,
        sampling=sampling.params(),
        stops=stops,
        timeout=timeout,
        options=chosen,
        given=given,
        models=models.chosen(),
        session=session.path(),
        read_only=session.read_only,
        form=form_of(json=json, jsonl=jsonl),
        file=destination(output),
        echo=echo,
        show_stats=stats,
        compare=compare,
        logprobs=logprobs,
        quiet=quiet,
    )


def destination(named: Path | None) -> Path | None:
    """The named file as a path; None: standard output."""
    return None if named in (None, STDIN, Path("/dev/stdout")) else user_path(str(named))


def _check_batch(source: Path | None, others: Iterable[object]) -> None:
    """Raises UsageError for options that do not apply to many prompts."""
    if source is None:
        raise UsageError("--output-jsonl and --batch are for many prompts; name them with --input-jsonl FILE")
    if any(others):
        raise UsageError(
            "--input-jsonl answers in JSON lines of its own; leave out --prompt-file, --prompt, --session, --cache, "
            "--output, --jsonl, --stats and --compare (--output-jsonl FILE names where the lines go)"
        )


def _number_at_a_time(text: str) -> int | None:
    """None: auto."""
    if text == AUTO:
        return None
    found = options.count(text)
    if found is None:
        raise UsageError(f"batch is {text[:40]!r}, it must be {AUTO} or a whole number from 1 to {options.MOST}")
    return found


def form_of(*, json: bool, jsonl: bool) -> FormName:
    """Raises UsageError."""
    if json and jsonl:
        raise UsageError("--json and --jsonl are two forms of one answer; give one of them")
    return "json" if json else "jsonl" if jsonl else "text"


def check_lengths(max_tokens: int, min_tokens: int, timeout: float | None) -> None:
    """Raises UsageError."""
    options.check_max_tokens(max_tokens)
    options.check_min_tokens(min_tokens, max_tokens)
    if timeout is not None and not 0 < timeout < 1e9:
        raise UsageError(f"timeout is {timeout:g}, it must be above 0 and below 1000000000 seconds")


def stops_of(texts: Sequence[str] | None) -> tuple[str, ...]:
    """Raises UsageError."""
    stops = tuple(decode_argument("--stop", text) for text in texts or ())
    if "" in stops:
        raise UsageError("stop is empty, it must be at least one character")
    return stops
