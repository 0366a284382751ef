"""`triforce generate`: continue a long prompt, or many."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from offload.errors import UsageError
from triforce_cli.answering.recorder import MOST_OF_TEXT, ending
from triforce_cli.answering.request import Prompt
from triforce_cli.answering.single import SingleRequest
from triforce_cli.commands import Command
from triforce_cli.documents.prompt import read_prompt
from triforce_cli.documents.selection import Named
from triforce_cli.options import options
from triforce_cli.options.answering import (
    AnswerFlags,
    ChatFlags,
    EndFlags,
    GoesOn,
    alone,
    check_goes_on,
    destination,
    setup,
    wanted,
)
from triforce_cli.options.control import Sampling
from triforce_cli.options.flags import (
    AUTO,
    CacheFlags,
    Changed,
    DocumentFlags,
    LogFlags,
    ModelFlags,
    PlacementFlags,
    ProgramFlags,
    SessionFlags,
    StoreFlags,
    spread,
)
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
class Generate:
    """One `triforce generate` of one prompt, parsed: documents, and a text below them."""

    documents: Named
    prompt: str | None
    alone: SingleRequest

    @property
    def as_json(self) -> bool:
        return self.alone.written.as_json

    def run(self) -> None:
        """Read the prompt, then continue it."""
        with self.alone.begun() as run:
            if self.alone.goes_on:
                run.go_on(is_chat=False)
                return
            sent = read_prompt(self.documents, self.prompt, note=run.output.note, on_read=run.on_read)
            prepared = run.prepare()
            tokens = prepared.prompt_tokenizer.encode(sent.text)
            question = decode_argument("--prompt", self.prompt or "") or ending(sent.text, MOST_OF_TEXT)
            run.answer(prepared, Prompt(tokens, sent.documents), sent.text, question=question)


@spread
def generate(
    *,
    models: ModelFlags,
    documents: DocumentFlags,
    prompt: options.Prompt = None,
    input_jsonl: InputLines = None,
    output_jsonl: OutputLines = None,
    batch: Together = AUTO,
    messages: MessageFlags,
    max_tokens: options.MaxTokens = 256,
    sampling: Sampling,
    ends: EndFlags,
    plan: options.GivenPlan = None,
    decoding: CacheFlags,
    placement: PlacementFlags,
    session: SessionFlags,
    store: StoreFlags,
    go_on: GoesOn = False,
    log: LogFlags,
    changed: Changed,
    echo: Echo = False,
    answer: AnswerFlags,
    program: ProgramFlags,
) -> Command:
    """Continue a long prompt, exactly as the target model alone would, in fewer passes over its cache.

    Only generated text goes to standard output, as soon as it is accepted. With --input-jsonl many prompts are
    continued, several at a time.

    Example: triforce generate --prompt-file book.txt --max-tokens 200 --stats
    """
    if go_on:
        check_goes_on(
            prompt_file=documents.prompt_file, prompt=prompt, input_jsonl=input_jsonl, output_jsonl=output_jsonl,
            batch=batch != AUTO, echo=echo, cite=answer.cite, **messages.given(),
        )  # fmt: skip
    if echo and answer.extract:
        raise UsageError("--echo begins with the prompt and --extract writes a code block alone; give one of them")
    num_sequences = _number_at_a_time(batch)
    asked = wanted(max_tokens, sampling, ends=ends, cites=answer.cite, logprobs=answer.logprobs, chat=messages)
    started = setup(models, decoding, placement, store, cites=answer.cite, plan=plan)
    if input_jsonl is None and output_jsonl is None and num_sequences is None:
        return Generate(
            documents=documents.named(),
            prompt=prompt,
            alone=alone(
                asked,
                setup=started,
                session=session,
                goes_on=go_on,
                answer=answer,
                recorder=log.recorder("generate", started.models, changed),
                written=replace(answer.written(), name="text", ends_line=False, echo=echo),
                forms="--json, --jsonl or --input-jsonl",
            ),
        )
    _check_batch(
        input_jsonl,
        (
            *(documents.named(), prompt, session.path(), answer.output, answer.jsonl, answer.stats, answer.compare),
            answer.extract,
        ),
    )
    from triforce_cli.batch import Batch

    return Batch(
        source=user_path(str(input_jsonl)),
        target=destination(output_jsonl),
        wanted=asked,
        num_sequences=num_sequences,
        layout=messages.layout(),
        setup=started,
        echo=echo,
        quiet=answer.quiet,
    )


def _check_batch(source: Path | None, others: Iterable[object]) -> None:
    """Raises UsageError for options that do not apply to many prompts."""
    if source is None:
        raise UsageError("--output-jsonl and --batch are for many prompts; name them with --input-jsonl FILE")
    if any(others):
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
