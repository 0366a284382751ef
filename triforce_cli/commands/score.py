"""`triforce score`: how likely a model finds texts, and how far other models are from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from offload.errors import DoesNotFit, UsageError
from offload.plan.hardware import Launched
from triforce_cli import options
from triforce_cli.choice import NONE, Models, choose_models
from triforce_cli.engine import Prepared, open_engine, prepare
from triforce_cli.flags import CacheFlags, PlacementFlags, ProgramFlags, plan_options, spread
from triforce_cli.options import option, switch, whole
from triforce_cli.output import Output
from triforce_cli.render import score as render_score
from triforce_cli.render.score import Judged
from triforce_cli.signals import deferred
from triforce_cli.texts import Text, read_texts

if TYPE_CHECKING:
    from offload.engine.scores import Reference, Scores
    from offload.plan.options import Options
    from offload.plan.planner import Plan
    from offload.progress import OnProgress

SCORES = "What is scored"

Files = Annotated[
    list[Path] | None,
    typer.Argument(metavar="FILE", help='UTF-8 texts; "-" is standard input, the default where text is piped in.'),
]
Against = Annotated[
    list[Path] | None,
    option(
        "--against",
        "Another model with the same vocabulary, to see how far its distributions are from those of --model; may be "
        "repeated.",
        options.MODELS,
        metavar="MODEL",
        readable=False,  # a model's own error says what to do
    ),
]
Worst = Annotated[
    int, option("--worst", "Show so many of the least likely tokens of each text.", SCORES, metavar="N", parser=whole)
]
EachToken = Annotated[bool, switch("--tokens", "In JSON, the log-probability of every token too.", options.OUTPUT)]
AsLines = Annotated[bool, switch("--jsonl", "Write a JSON line for each text.", options.OUTPUT)]


@dataclass(frozen=True, kw_only=True)
class Score:
    """One `triforce score`, parsed. named: the models as the user named them, the reference first."""

    files: tuple[Path, ...]
    models: tuple[Models, ...]
    named: tuple[str, ...]
    worst: int
    form: Literal["text", "json", "jsonl"]
    tokens: bool
    options: Options
    quiet: bool

    @property
    def as_json(self) -> bool:
        """Errors are JSON too."""
        return self.form != "text"

    def run(self) -> None:
        """Models are loaded one after the other; of the first one its head stays on the device and the texts' last
        hidden rows on the host, where there are others."""
        with Output(quiet=self.quiet) as output:
            contents = read_texts(self.files, note=output.note)
            prepared = prepare(self.models[0], self.options, output)
            texts = [Text.of(name, content, prepared.tokenizer) for name, content in contents.items()]
            width = self._common_width(prepared)
            judged: list[Judged] = []
            references: list[Reference | None] = [None] * len(texts)
            for number, models in enumerate(self.models):
                if number:
                    prepared = self._another(models, output)
                scores, plan = self._scored(prepared, texts, references, width, output, keep=self._compares > number)
                references = [each.reference for each in scores] if not number else references
                bare = tuple(replace(each, reference=None) for each in scores)
                judged.append(Judged(self.named[number], bare, plan))
                del scores
            self._write(texts, judged, prepared.tokenizer.piece, output)

    @property
    def _compares(self) -> bool:
        return len(self.models) > 1

    def _common_width(self, prepared: Prepared) -> int | None:
        """Tokens that all models have; None where there is one model. Raises ModelError before anything is loaded."""
        if not self._compares:
            return None
        from offload.engine.vocabulary import num_common_tokens

        target, tokenizer = prepared.models.target, prepared.tokenizer
        return min(num_common_tokens(target, tokenizer, models.target) for models in self.models[1:])

    def _another(self, models: Models, output: Output) -> Prepared:
        """After the one before was closed, whose memory is free then for the plan."""
        from offload.engine.scores import give_memory_back

        give_memory_back()
        return prepare(models, self.options, output)

    def _scored(
        self,
        prepared: Prepared,
        texts: Sequence[Text],
        references: Sequence[Reference | None],
        width: int | None,
        output: Output,
        *,
        keep: bool,
    ) -> tuple[list[Scores], Plan]:
        """Of one model, planned once, for the longest text. keep: what others are compared with."""
        longest = max(texts, key=lambda text: len(text.tokens))
        plan = _plan(prepared, longest)
        output.planned(plan)
        scores: list[Scores] = []
        total = sum(len(text.tokens) - 1 for text in texts)
        with open_engine(prepared, plan, on_progress=output.progress) as engine:
            for text, reference in zip(texts, references, strict=True):
                before = sum(len(each.log_probabilities) for each in scores)
                found = engine.score(
                    text.tokens,
                    num_tokens=width,
                    keep_rows=keep,
                    reference=reference,
                    on_progress=_part(output.progress, before, total),
                )
                scores.append(found)
        return scores, plan

    def _write(
        self, texts: Sequence[Text], judged: Sequence[Judged], piece: Callable[[int], str], output: Output
    ) -> None:
        if self.form == "json":
            output.document(render_score.document(texts, judged, piece, worst=self.worst, tokens=self.tokens))
        elif self.form == "jsonl":
            for number in range(len(texts)):
                output.document(render_score.line(texts, judged, number, piece, worst=self.worst, tokens=self.tokens))
        else:
            output.text(render_score.report(texts, judged, piece, worst=self.worst, width=output.text_width))


def _part(on_progress: OnProgress, before: int, total: int) -> OnProgress:
    """Of one text, as a part of all, of whose tokens so many are done."""
    return lambda part: on_progress(replace(part, done=before + part.done, total=total))


def _plan(prepared: Prepared, longest: Text) -> Plan:
    """Raises DoesNotFit."""
    count, context = len(longest.tokens), prepared.request.context
    if count > context:
        raise DoesNotFit(
            f"{longest.name} has {count:,} tokens and the context of {prepared.models.target} is {context:,}: split "
            "the text, or score a part of it"
        )
    with deferred():
        return prepared.request.plan(num_prompt_tokens=count - 1, max_tokens=1)


@spread
def score(
    files: Files = None,
    *,
    model: options.Model = None,
    against: Against = None,
    context: options.Context = None,
    placement: PlacementFlags,
    worst: Worst = 5,
    tokens: EachToken = False,
    json: options.AsJson = False,
    jsonl: AsLines = False,
    quiet: options.Quiet = False,
    program: ProgramFlags,
) -> Score:
    """Say how likely a model finds texts: log-likelihood, perplexity and the least likely tokens.

    Texts of any length go through the prefill that prompts take, over links and on several GPUs. With --against other
    models, quantised ones for example, are scored too and compared with --model: mean KL divergence, and how often
    both find the same token likeliest.

    Example: triforce score book.txt notes.txt --worst 10
    """
    others = tuple(against or ())
    if json and jsonl:
        raise UsageError("--json and --jsonl are two forms of one answer; give one of them")
    if tokens and not (json or jsonl):
        raise UsageError("--tokens adds to JSON; give --json or --jsonl too")
    if not 0 <= worst <= options.MOST:
        raise UsageError(f"worst is {worst}, it must be from 0 to {options.MOST}")
    if others and Launched.look() is not None:
        raise UsageError("--against loads one model after the other, which torchrun's ranks cannot; use --gpus N")
    models = tuple(choose_models(each, NONE) for each in (model, *others))
    return Score(
        files=tuple(files or ()),
        models=models,
        named=tuple(str(name or each.target.name) for name, each in zip((model, *others), models, strict=True)),
        worst=worst,
        form="json" if json else "jsonl" if jsonl else "text",
        tokens=tokens,
        options=plan_options(CacheFlags(context=context, no_speculation=True), **vars(placement)),
        quiet=quiet,
    )
