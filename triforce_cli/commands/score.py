"""`triforce score`: log-likelihoods of texts under a model, and how far other models' distributions are from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from offload.errors import DoesNotFit, UsageError
from offload.speed.hardware import Launched
from triforce_cli.documents.texts import Text, read_texts
from triforce_cli.options import completion, options
from triforce_cli.options.flags import CacheFlags, PlacementFlags, ProgramFlags, plan_options, spread
from triforce_cli.options.options import option, switch, whole
from triforce_cli.render import score as render_score
from triforce_cli.render.score import Judged
from triforce_cli.screen.output import Output
from triforce_cli.setup.choice import NONE, Models, choose_models
from triforce_cli.setup.engine import Prepared, open_engine, prepare

if TYPE_CHECKING:
    from offload.engine.scores import Reference, Scores
    from offload.plan.options import Options
    from offload.plan.planner import Plan
    from offload.progress import OnProgress

SCORES = "What is scored"

Files = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="FILE",
        help='Texts: UTF-8, PDF, web pages, .docx, EPUB; "-" is standard input, the default where text is piped in.',
    ),
]
Against = Annotated[
    list[Path] | None,
    option(
        "--against",
        "Another model with the same vocabulary, to see how far its distributions are from those of --model; may be "
        "repeated.",
        options.MODELS,
        metavar="MODEL",
        callback=options.models_without_aliases,
        autocompletion=completion.models,
        readable=False,  # the error of the model has the remedy
    ),
]
Worst = Annotated[
    int, option("--worst", "Show so many of the least likely tokens of each text.", SCORES, metavar="N", parser=whole)
]
EachToken = Annotated[bool, switch("--tokens", "In JSON, the log-probability of every token too.", options.OUTPUT)]
AsLines = Annotated[bool, switch("--jsonl", "Write a JSON line for each text.", options.OUTPUT)]


@dataclass(frozen=True, kw_only=True)
class Score:
    """One `triforce score`, parsed. models: by the names that the user gave, the reference first."""

    files: tuple[Path, ...]
    models: dict[str, Models]
    worst: int
    form: Literal["text", "json", "jsonl"]
    tokens: bool
    options: Options
    quiet: bool

    @property
    def as_json(self) -> bool:
        """True if results, and so errors, are JSON."""
        return self.form != "text"

    def run(self) -> None:
        """Score the texts with one model after the other. With several models, the first one's final norm and head stay
        on the device, and its last hidden rows on the host: tokens of all texts x hidden size x 2 bytes (fp32: 4)."""
        with Output(quiet=self.quiet) as output:
            contents = read_texts(self.files, note=output.note, on_read=output.report)
            prepared = prepare(next(iter(self.models.values())), self.options, output)
            texts = [Text.of(name, content, prepared.prompt_tokenizer) for name, content in contents.items()]
            self._check(max(texts, key=_num_tokens))
            tokenizer, width = prepared.tokenizer, self._common_width(prepared)
            references: list[Reference | None] = [None] * len(texts)
            judged: list[Judged] = []
            for name, models in self.models.items():
                if judged:
                    prepared = self._another(models, output)
                judged.append(Judged(name, *self._scored(prepared, texts, references, width, output)))
            self._write(texts, judged, tokenizer.piece, output)

    @property
    def _compares(self) -> bool:
        return len(self.models) > 1

    def _check(self, longest: Text) -> None:
        """Raises DoesNotFit if the text is longer than a model's context."""
        from offload.config.reading import read_config

        for name, models in self.models.items():
            if len(longest.tokens) > (context := read_config(models.target).context_limit):
                raise DoesNotFit(
                    f"{longest.name} has {len(longest.tokens):,} tokens and the context of {name} is {context:,}: "
                    "split the text, or score a part of it"
                )

    def _common_width(self, prepared: Prepared) -> int | None:
        """The number of tokens in all models' vocabularies; None with one model. Raises ModelError."""
        if not self._compares:
            return None
        from offload.engine.scores import num_common_tokens

        target, tokenizer = prepared.models.target, prepared.tokenizer
        return min(num_common_tokens(target, tokenizer, each.target) for each in list(self.models.values())[1:])

    def _another(self, models: Models, output: Output) -> Prepared:
        """Prepare the next model. The one before must be closed; its memory is freed first for the plan."""
        from offload.engine.scores import give_memory_back

        give_memory_back()
        return prepare(models, self.options, output)

    def _scored(
        self,
        prepared: Prepared,
        texts: Sequence[Text],
        references: list[Reference | None],
        width: int | None,
        output: Output,
    ) -> tuple[tuple[Scores, ...], Plan]:
        """The scores of one model and its plan, made for the longest text. references: for each text, the reference to
        compare with; missing ones are set."""
        longest, total = max(map(_num_tokens, texts)), sum(map(_num_tokens, texts)) - len(texts)
        plan = prepared.request.plan(num_prompt_tokens=longest - 1, max_tokens=1)
        output.planned(plan)
        scores: list[Scores] = []
        with open_engine(prepared, plan, on_progress=output.progress) as engine:
            for number, text in enumerate(texts):
                found = engine.score(
                    text.tokens,
                    num_tokens=width,
                    keep_rows=self._compares and references[number] is None,
                    reference=references[number],
                    on_progress=_part(output.progress, sum(len(each.likeliest) for each in scores), total),
                )
                references[number] = references[number] or found.reference
                scores.append(replace(found, reference=None))
                if self.form == "jsonl" and not self._compares:
                    output.document(self._line(text, found, prepared.tokenizer.piece))
        return tuple(scores), plan

    def _line(self, text: Text, scores: Scores, piece: Callable[[int], str]) -> dict[str, Any]:
        return render_score.line(text, scores, {}, piece, worst=self.worst, tokens=self.tokens)

    def _write(
        self, texts: Sequence[Text], judged: Sequence[Judged], piece: Callable[[int], str], output: Output
    ) -> None:
        if self.form == "json":
            output.document(render_score.document(texts, judged, piece, worst=self.worst, tokens=self.tokens))
        elif self.form == "jsonl":
            if self._compares:  # otherwise each line was written after its text
                for line in render_score.lines(texts, judged, piece, worst=self.worst, tokens=self.tokens):
                    output.document(line)
        else:
            output.text(render_score.report(texts, judged, piece, worst=self.worst, width=output.text_width))


def _num_tokens(text: Text) -> int:
    return len(text.tokens)


def _part(on_progress: OnProgress, before: int, total: int) -> OnProgress:
    """Progress of one text as progress over all texts. before: tokens done before it."""
    return lambda part: on_progress(replace(part, done=before + part.done, total=total))


@spread
def score(
    files: Files = None,
    *,
    model: options.Model = None,
    against: Against = None,
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
    models = {}
    for named in (model, *others):
        chosen = choose_models(named, NONE)
        name = chosen.target.name if named is None else str(named)
        if name in models:
            raise UsageError(f"the model {name} is named twice; name each once")
        models[name] = chosen
    return Score(
        files=tuple(files or ()),
        models=models,
        worst=worst,
        form="json" if json else "jsonl" if jsonl else "text",
        tokens=tokens,
        options=plan_options(CacheFlags(no_speculation=True), **vars(placement)),
        quiet=quiet,
    )
