"""`triforce score`: log-likelihoods of texts under a model, and how far other models' distributions are from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offload.errors import DoesNotFit, UsageError
from offload.speed.hardware import Launched
from triforce_cli.documents.texts import Text, read_texts
from triforce_cli.options import callbacks, completion, options
from triforce_cli.options.call import spread
from triforce_cli.options.fetching import make_present
from triforce_cli.options.flags import CacheFlags, PlacementFlags, plan_options
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
        callback=callbacks.models_without_aliases,
        autocompletion=completion.models,
        readable=False,  # the error of the model has the remedy
    ),
]
Worst = Annotated[
    int, option("--worst", "Show so many of the least likely tokens of each text.", SCORES, metavar="N", parser=whole)
]
EachToken = Annotated[bool, switch("--tokens", "In JSON, the log-probability of every token too.", options.OUTPUT)]
AsLines = Annotated[bool, switch("--jsonl", "Write a JSON line for each text.", options.OUTPUT)]


@spread
def score(
    files: Files = None,
    *,
    model: options.Model = None,
    against: Against = None,
    yes: options.FetchYes = False,
    placement: PlacementFlags,
    worst: Worst = 5,
    tokens: EachToken = False,
    json: options.AsJson = False,
    jsonl: AsLines = False,
    quiet: options.Quiet = False,
) -> None:
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
    make_present(model, *others, yes=yes, quiet=quiet)
    models = _models((model, *others))
    wanted = plan_options(CacheFlags(no_speculation=True), **vars(placement))
    with Output(quiet=quiet) as output:
        contents = read_texts(tuple(files or ()), note=output.note, on_read=output.report)
        prepared = prepare(next(iter(models.values())), wanted, output)
        texts = [Text.of(name, content, prepared.prompt_tokenizer) for name, content in contents.items()]
        _check(max(texts, key=_num_tokens), models)
        width, piece = _common_width(prepared, models), prepared.tokenizer.piece

        def written(text: Text, found: Scores) -> None:
            """Without other models to compare with, a line is written after its text."""
            if jsonl and not others:
                output.document(render_score.line(text, found, {}, piece, worst=worst, tokens=tokens))

        references: list[Reference | None] = [None] * len(texts)
        judged: list[Judged] = []
        for name, chosen in models.items():
            if judged:
                prepared = _another(chosen, wanted, output)
            judged.append(Judged(name, *_scored(prepared, texts, references, width, output, written)))
        if json:
            output.document(render_score.document(texts, judged, piece, worst=worst, tokens=tokens))
        elif not jsonl:
            output.text(render_score.report(texts, judged, piece, worst=worst, width=output.text_width))
        elif others:
            for line in render_score.lines(texts, judged, piece, worst=worst, tokens=tokens):
                output.document(line)


def _models(names: Sequence[Path | None]) -> dict[str, Models]:
    """The models by the names that the user gave, the reference first. Raises UsageError, ModelError."""
    found: dict[str, Models] = {}
    for named in names:
        chosen = choose_models(named, NONE)
        name = chosen.target.name if named is None else str(named)
        if name in found:
            raise UsageError(f"the model {name} is named twice; name each once")
        found[name] = chosen
    return found


def _check(longest: Text, models: Mapping[str, Models]) -> None:
    """Raises DoesNotFit if the text is longer than a model's context."""
    from offload.config.reading import read_config

    for name, chosen in models.items():
        if len(longest.tokens) > (context := read_config(chosen.target).context_limit):
            raise DoesNotFit(
                f"{longest.name} has {len(longest.tokens):,} tokens and the context of {name} is {context:,}: "
                "split the text, or score a part of it"
            )


def _common_width(prepared: Prepared, models: Mapping[str, Models]) -> int | None:
    """The number of tokens in all models' vocabularies; None with one model. Raises ModelError."""
    if len(models) == 1:
        return None
    from offload.engine.scores import num_common_tokens

    target, tokenizer = prepared.models.target, prepared.tokenizer
    return min(num_common_tokens(target, tokenizer, each.target) for each in list(models.values())[1:])


def _another(models: Models, wanted: Options, output: Output) -> Prepared:
    """Prepare the next model. The one before must be closed; its memory is freed first for the plan."""
    from offload.engine.scores import give_memory_back

    give_memory_back()
    return prepare(models, wanted, output)


def _scored(
    prepared: Prepared,
    texts: Sequence[Text],
    references: list[Reference | None],
    width: int | None,
    output: Output,
    on_scored: Callable[[Text, Scores], None],
) -> tuple[tuple[Scores, ...], Plan]:
    """The scores of one model and its plan, made for the longest text. references: for each text, the reference to
    compare with; missing ones are set. Of several models, the first one's final norm and head stay on the device, and
    its last hidden rows on the host: tokens of all texts x hidden size x 2 bytes (fp32: 4)."""
    longest, total = max(map(_num_tokens, texts)), sum(map(_num_tokens, texts)) - len(texts)
    plan = prepared.request.plan(num_prompt_tokens=longest - 1, max_tokens=1)
    output.planned(plan)
    scores: list[Scores] = []
    with open_engine(prepared, plan, on_progress=output.progress) as engine:
        for number, text in enumerate(texts):
            found = engine.score(
                text.tokens,
                num_tokens=width,
                keep_rows=width is not None and references[number] is None,
                reference=references[number],
                on_progress=_part(output.progress, sum(len(each.likeliest) for each in scores), total),
            )
            references[number] = references[number] or found.reference
            scores.append(replace(found, reference=None))
            on_scored(text, found)
    return tuple(scores), plan


def _num_tokens(text: Text) -> int:
    return len(text.tokens)


def _part(on_progress: OnProgress, before: int, total: int) -> OnProgress:
    """Progress of one text as progress over all texts. before: tokens done before it."""
    return lambda part: on_progress(replace(part, done=before + part.done, total=total))
