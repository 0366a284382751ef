"""`triforce ask`: one question, one answer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offload.engine.request import check_logprobs
from offload.errors import UsageError
from triforce_cli import options
from triforce_cli.asking import Ask
from triforce_cli.chat.tools import read_tools
from triforce_cli.commands.chat import (
    Files,
    System,
    Template,
    TemplateArguments,
    ThinkingOption,
    ThinkingTokens,
    check_thinking,
    template_variables,
)
from triforce_cli.commands.generate import (
    AsEvents,
    Compare,
    Destination,
    ShowStats,
    Stop,
    Timeout,
    check_lengths,
    destination,
    form_of,
    stops_of,
)
from triforce_cli.control import ControlFlags
from triforce_cli.flags import (
    CacheFlags,
    ModelFlags,
    PlacementFlags,
    ProgramFlags,
    SessionFlags,
    named_documents,
    plan_options,
    question_of,
    spread,
)
from triforce_cli.given import beside_given
from triforce_cli.options import option
from triforce_cli.utf8 import decode_argument, read_text, user_path, without_line_end

QUESTION = "Question"

Question = Annotated[
    str | None,
    typer.Argument(
        metavar="QUESTION", help="What to ask. Without it, a file or piped text is the question.", show_default=False
    ),
]
MoreWords = Annotated[
    list[str] | None, typer.Argument(metavar="WORD", help="Of a question without quotes: refused.", hidden=True)
]
QuestionFile = Annotated[
    Path | None,
    option("--prompt-file", 'UTF-8 text with the question; "-" is standard input.', QUESTION, metavar="PATH"),
]
SystemFile = Annotated[
    Path | None, option("--system-file", "The system message, from a file.", QUESTION, metavar="PATH")
]
BeginReply = Annotated[
    str,
    option(
        "--begin-reply",
        "What the answer begins with; the model goes on from there.",
        QUESTION,
        metavar="TEXT",
        show_default=False,
    ),
]
Variables = Annotated[
    list[str] | None,
    option(
        "--var",
        "Fill {NAME} in question, system message and begin-reply; @FILE is a file's text. Can be repeated.",
        QUESTION,
        metavar="NAME=TEXT",
    ),
]


Tools = Annotated[
    Path | None,
    option(
        "--tools",
        "Tools that the model may call, in JSON as the OpenAI API has them; --json has its calls.",
        QUESTION,
        metavar="FILE",
        hidden=True,
    ),
]


@spread
def ask(
    question: Question = None,
    *,
    more_words: MoreWords = None,
    models: ModelFlags,
    file: Files = None,
    include: options.Include = None,
    prompt_file: QuestionFile = None,
    system: System = "",
    system_file: SystemFile = None,
    begin_reply: BeginReply = "",
    var: Variables = None,
    template: Template = "auto",
    max_tokens: options.MaxTokens = 1024,
    sampling: ControlFlags,
    stop: Stop = None,
    timeout: Timeout = None,
    plan: options.GivenPlan = None,
    decoding: CacheFlags,
    placement: PlacementFlags,
    session: SessionFlags,
    output: Destination = None,
    stats: ShowStats = False,
    compare: Compare = False,
    cite: options.Cite = False,
    tools: Tools = None,
    thinking: ThinkingOption = "show",
    thinking_tokens: ThinkingTokens = None,
    template_arg: TemplateArguments = None,
    logprobs: options.Logprobs = None,
    json: options.AsJson = False,
    jsonl: AsEvents = False,
    quiet: options.Quiet = False,
    program: ProgramFlags,
) -> Ask:
    """Ask a question about documents: one answer to standard output, by the model's chat template.

    Piped text is a document, or without a question the question itself.

    Example: triforce ask 'What does it conclude?' --file report.txt --model path/to/model
    """
    from triforce_cli.chat.formats import NAMES

    check_lengths(max_tokens, sampling.min_tokens, timeout)
    check_logprobs(logprobs)
    if logprobs is not None and not (json or jsonl):
        raise UsageError("--logprobs go into JSON; add --json or --jsonl")
    if system and system_file is not None:
        raise UsageError("--system and --system-file are two system messages; give one of them")
    if template not in NAMES:
        raise UsageError(f"template is {template!r}, it must be one of {', '.join(NAMES)}")
    if system_file is not None:
        system = without_line_end(read_text(user_path(str(system_file)), "the system message"))
    chosen, given = beside_given(plan, plan_options(decoding, **vars(placement), masses=cite))
    return Ask(
        prompt=None if question is None else question_of(question, more_words or (), file),
        question_file=None if prompt_file is None else user_path(str(prompt_file)),
        documents=named_documents("--file", file, None, include),
        system=decode_argument("--system", system),
        begin_reply=decode_argument("--begin-reply", begin_reply),
        template=template,
        variables=dict(_variable(text) for text in var or ()),
        max_tokens=max_tokens,
        sampling=sampling.params(),
        stops=stops_of(stop),
        timeout=timeout,
        options=chosen,
        given=given,
        models=models.chosen(),
        session=session.path(),
        read_only=session.read_only,
        form=form_of(json=json, jsonl=jsonl),
        file=destination(output),
        echo=False,
        show_stats=stats,
        compare=compare,
        cites=cite,
        thinking=check_thinking(thinking, thinking_tokens),
        thinking_tokens=thinking_tokens,
        template_variables=template_variables(template_arg or ()),
        tools=None if tools is None else read_tools(read_text(user_path(str(tools)), "the tools")),
        logprobs=logprobs,
        quiet=quiet,
    )


def _variable(text: str) -> tuple[str, str]:
    """From NAME=TEXT or NAME=@FILE."""
    name, equals, value = decode_argument("--var", text).partition("=")
    if not equals or not name.isidentifier():
        raise UsageError(f"var is {text!r}, it must be NAME=TEXT or NAME=@FILE")
    return name, read_text(user_path(value[1:]), f"the variable {name}") if value.startswith("@") else value
