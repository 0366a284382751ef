"""`triforce generate`: continue a long prompt, or many."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from offload.errors import UsageError
from triforce_cli.answering.recorder import MOST_OF_TEXT, ending
from triforce_cli.answering.request import Prompt
from triforce_cli.documents.prompt import read_prompt
from triforce_cli.options import options
from triforce_cli.options.answering import AnswerFlags, ChatFlags, GoesOn, WantedFlags, check_goes_on, destination
from triforce_cli.options.call import Changed, spread
from triforce_cli.options.flags import AUTO, DocumentFlags, EngineFlags, LogFlags, ModelFlags, SessionFlags, StoreFlags
from triforce_cli.options.options import OUTPUT, PROMPT, option, switch
from triforce_cli.screen.utf8 import decode_argument, user_path

InputLines = Annotated[
    Path | None,
    option(
        "--input-jsonl",
        'Many prompts, in JSON lines: "prompt", "id", "seed" ...; "-" is standard input.',
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
MessageTemplate = Annotated[
    str,
    option(
        "--template",
        "How messages of --input-jsonl are laid out: auto, llama2, chatml, vicuna or plain.",
        PROMPT,
        metavar="NAME",
        hidden=True,
    ),
]
MessageThoughts = Annotated[
    str,
    option(
        "--thinking", "off: replies to messages of --input-jsonl have no thoughts.", PROMPT, metavar="HOW", hidden=True
    ),
]
Echo = Annotated[bool, switch("--echo", "Begin with the prompt; JSON has it too.", OUTPUT)]


@dataclass(frozen=True, kw_only=True)
class MessageFlags(ChatFlags):
    """Options for lines with messages, which use a chat template."""

    template: MessageTemplate = "auto"
    thinking: MessageThoughts = "show"


@dataclass(frozen=True, kw_only=True)
class ContinuedFlags(WantedFlags):
    """Wishes for a text that continues the prompt."""

    chat: MessageFlags
    max_tokens: options.MaxTokens = 256


@spread
def generate(
    *,
    models: ModelFlags,
    documents: DocumentFlags,
    prompt: options.Prompt = None,
    input_jsonl: InputLines = None,
    output_jsonl: OutputLines = None,
    batch: Together = AUTO,
    wanted: ContinuedFlags,
    engine: EngineFlags,
    session: SessionFlags,
    store: StoreFlags,
    go_on: GoesOn = False,
    log: LogFlags,
    changed: Changed,
    echo: Echo = False,
    form: AnswerFlags,
) -> None:
    """Continue a long prompt, exactly as the target model alone would, in fewer passes over its cache.

    Only generated text goes to standard output, as soon as it is accepted. With --input-jsonl many prompts are
    continued, several at a time.

    Example: triforce generate --prompt-file book.txt --max-tokens 200 --stats
    """
    if go_on:
        check_goes_on(
            prompt_file=documents.prompt_file, prompt=prompt, input_jsonl=input_jsonl, output_jsonl=output_jsonl,
            batch=batch != AUTO, echo=echo, cite=form.cite, **wanted.chat.given(),
        )  # fmt: skip
    if echo and form.extract:
        raise UsageError("--echo begins with the prompt and --extract writes a code block alone; give one of them")
    num_sequences = _number_at_a_time(batch)
    wishes = wanted.checked(cites=form.cite, logprobs=form.logprobs)
    setup = engine.setup(models, store, cites=form.cite, quiet=form.quiet)
    named = documents.named()
    if input_jsonl is not None or output_jsonl is not None or num_sequences is not None:
        _check_batch(input_jsonl, (named, prompt, session.path()), form)
        from triforce_cli.batch import Batch

        Batch(
            source=user_path(str(input_jsonl)),
            target=destination(output_jsonl),
            wanted=wishes,
            num_sequences=num_sequences,
            layout=wanted.chat.layout(),
            setup=setup,
            echo=echo,
            quiet=form.quiet,
        ).run()
        return
    answer = form.single(
        wishes,
        setup,
        session,
        goes_on=go_on,
        written=form.written(name="text", ends_line=False, echo=echo),
        recorder=log.recorder("generate", setup.models, changed),
        forms="--json, --jsonl or --input-jsonl",
    )
    with answer.under_way():
        if go_on:
            answer.go_on(is_chat=False)
            return
        sent = read_prompt(named, prompt, note=answer.output.note, on_read=answer.on_read)
        prepared = answer.prepare()
        tokens = prepared.prompt_tokenizer.encode(sent.text)
        question = decode_argument("--prompt", prompt or "") or ending(sent.text, MOST_OF_TEXT)
        answer.generate(prepared, Prompt(tokens, sent.documents), sent.text, question=question)


def _check_batch(source: Path | None, given: Iterable[object], form: AnswerFlags) -> None:
    """Raises UsageError for options that do not apply to many prompts. given: values of some of these."""
    if source is None:
        raise UsageError("--output-jsonl and --batch are for many prompts; name them with --input-jsonl FILE")
    if any((*given, form.output, form.jsonl, form.stats, form.compare, form.extract)):
        raise UsageError(
            "--input-jsonl answers in JSON lines of its own; leave out --prompt-file, --prompt, --session, --cache, "
            "--output, --extract, --jsonl, --stats and --compare (--output-jsonl FILE names where the lines go)"
        )


def _number_at_a_time(text: str) -> int | None:
    """The number of prompts at a time; None for "auto"."""
    if text == AUTO:
        return None
    found = options.count(text)
    if found is None:
        raise UsageError(f"batch is {text[:40]!r}, it must be {AUTO} or a whole number from 1 to {options.MOST}")
    return found
