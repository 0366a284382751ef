"""`triforce bench`: plain decoding against TriForce, in one run."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated

from offload.errors import DoesNotFit, UsageError
from offload.interrupts import Terminated
from triforce_cli import __version__
from triforce_cli.documents.prompt import LIBRARY, library_text, read_prompt
from triforce_cli.documents.selection import Named
from triforce_cli.options import options
from triforce_cli.options.call import spread
from triforce_cli.options.control import BASIC, BasicGreedySampling
from triforce_cli.options.flags import LevelFlags, ModelFlags, PlacementFlags, named_documents, plan_options
from triforce_cli.options.options import option, whole
from triforce_cli.render import bench as render_bench
from triforce_cli.screen.output import Output
from triforce_cli.screen.progress import TimeLeft
from triforce_cli.setup.engine import Prepared, open_engine, prepare

if TYPE_CHECKING:
    from offload.bench.comparison import Comparison
    from offload.bench.trial import Step, Trial

USUAL_CONTEXTS = (4096, 8192, 16384)
MOST_REPEATS = 1000

BENCH = "Benchmark"

BenchText = Annotated[
    list[Path] | None,
    option(
        "--prompt-file",
        'Documents whose beginning is the prompt, as of triforce generate; "-" is standard input. Without it, sources '
        "of Python's standard library.",
        BENCH,
        short="-f",
        metavar="PATH",
    ),
]
Contexts = Annotated[
    str | None,
    option(
        "--contexts",
        "Lengths to compare at, prompt and output together. Without it 4096, 8192 and 16384, as far as model and text "
        "go.",
        BENCH,
        metavar="TOKENS,...",
    ),
]
Repeats = Annotated[
    int,
    option("--repeats", "Measure each so often, in turns, after a warm-up.", BENCH, metavar="N", parser=whole),
]


class Findings:
    """The comparisons so far. As a context manager it writes them at the end, also after an interrupt, but not after an
    error.

    Leave the output's context first, so that the table does not mix with a progress display.
    """

    def __init__(self, output: Output, *, as_json: bool) -> None:
        self._output, self._as_json = output, as_json
        self._about: dict[str, object] | None = None
        self._comparisons: list[Comparison] = []

    def __enter__(self) -> Findings:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._about is not None and (kind is None or issubclass(kind, KeyboardInterrupt | Terminated)):
            self._hand_over(self._about, interrupted=kind is not None)

    def begin(self, about: dict[str, object]) -> None:
        """Begin; from now on there are results to write. about: the part of the JSON that all contexts share."""
        self._about = about

    def add(self, comparison: Comparison) -> None:
        self._comparisons.append(comparison)

    def _hand_over(self, about: dict[str, object], *, interrupted: bool) -> None:
        if self._as_json:
            contexts = [render_bench.document(comparison) for comparison in self._comparisons]
            document = about | {"contexts": contexts, "interrupted": interrupted, "version": __version__}
            self._output.document(document)
        elif self._comparisons:
            self._output.text(render_bench.report(self._comparisons, width=self._output.text_width))


@spread
def bench(
    *,
    models: ModelFlags,
    prompt_file: BenchText = None,
    more_files: options.MoreFiles = None,
    include: options.Include = None,
    contexts: Contexts = None,
    repeats: Repeats = 5,
    max_tokens: options.MaxTokens = 128,
    sampling: BasicGreedySampling,
    levels: LevelFlags,
    placement: PlacementFlags,
    json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure plain decoding against TriForce on your machine, model and text, in one run.

    Each context is prefilled once and continued by both in turns, so that a slow moment of the machine affects both.
    Plain decoding takes one pass per token, with the same weights in the same places. At temperature 0 the texts are
    checked to be the same. The table shows medians and, below them, minimum and maximum. Ctrl-C keeps the contexts that
    are finished.

    Example: triforce bench --prompt-file book.txt --contexts 4096,16384
    """
    if max_tokens < 2:
        raise UsageError(f"max-tokens is {max_tokens}, it must be 2 or more: the first token is not timed")
    if not 1 <= repeats <= MOST_REPEATS:
        raise UsageError(f"repeats is {repeats}, it must be from 1 to {MOST_REPEATS}")
    documents = named_documents("--prompt-file", prompt_file, more_files, include)
    lengths, wanted = _numbers("contexts", contexts), plan_options(levels, **vars(placement))
    chosen = models.chosen(quiet=quiet)
    output = Output(quiet=quiet)
    with Findings(output, as_json=json) as findings, output:
        text = _text(documents, output)
        prepared = prepare(chosen, wanted, output, sampling=sampling, measures=True)
        from offload.bench.environment import environment
        from offload.bench.trial import Trial

        request, tokens = prepared.request, prepared.tokenizer.encode(text)
        trials = []
        for context in _context_lengths(lengths, len(tokens), request.target.context_limit, max_tokens):
            prompt = tuple(tokens[: context - max_tokens])
            plan = request.plan(num_prompt_tokens=len(prompt), max_tokens=max_tokens)
            trials.append(Trial(prompt=prompt, plan=plan, sampling=sampling, max_tokens=max_tokens, repeats=repeats))
        output.planned(*(trial.plan for trial in trials))
        source = str(documents) if documents else LIBRARY
        findings.begin(
            {
                "environment": environment(),
                "model": chosen.as_dict(),
                "prompt": {"source": source, "sha256": hashlib.sha256(text.encode()).hexdigest()},
                "sampling": {name: getattr(sampling, name) for name in BASIC},
                "max_tokens": max_tokens,
                "repeats": repeats,
            }
        )
        left = TimeLeft([trial.predicted_seconds(step) for trial in trials for step in trial.steps])
        for trial in trials:
            comparison = _compare(trial, prepared, left, output)
            findings.add(comparison)
            output.note(render_bench.summary_line(comparison))


def _compare(trial: Trial, prepared: Prepared, left: TimeLeft, output: Output) -> Comparison:
    """Run one trial on an engine of its own, whose memory is freed afterwards."""

    def show(step: Step) -> None:
        output.wait(render_bench.step_line(trial, step, left.next_step()))

    with open_engine(prepared, trial.plan, on_progress=output.progress) as engine:
        comparison = trial.run(engine, on_step=show, on_progress=output.progress)
    del engine
    gc.collect()
    return comparison


def _context_lengths(wanted: Sequence[int] | None, num_tokens: int, limit: int, max_tokens: int) -> list[int]:
    """The requested contexts, ascending, or the usual ones. num_tokens: of the text. Raises UsageError, DoesNotFit."""
    longest = min(num_tokens + max_tokens, limit)
    usual = [context for context in USUAL_CONTEXTS if max_tokens < context <= longest] or [longest]
    contexts = sorted(set(usual if wanted is None else wanted))
    shortest, most = contexts[0], contexts[-1]
    if most > limit:
        raise DoesNotFit(f"contexts has {most} and the model's limit is {limit} tokens; try --contexts {limit}")
    if shortest <= max_tokens:
        raise UsageError(f"a context of {shortest} has no room for --max-tokens {max_tokens} and a prompt")
    if most > longest:
        raise UsageError(
            f"the text has {num_tokens} tokens and a context of {most} takes {most - max_tokens} of them "
            f"(--max-tokens {max_tokens}); give a longer --prompt-file, or try --contexts {longest}"
        )
    return contexts


def _text(documents: Named, output: Output) -> str:
    if documents:
        return read_prompt(documents, None, note=output.note, on_read=output.report).text
    output.note(f"no --prompt-file given: the prompts are {LIBRARY}")
    return library_text()


def _numbers(name: str, text: str | None) -> tuple[int, ...] | None:
    """Numbers from a list: (4096, 8192) from "4096,8192". Raises UsageError, which calls the list `name`."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    wrong = next((part for part in parts if options.count(part) is None), None)
    if wrong is not None:
        raise UsageError(f"{name} has {wrong!r}, it must be whole numbers from 1 to {options.MOST}, like 4096,8192")
    return tuple(map(int, parts))
