"""`triforce ask`: one question, one answer."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload.errors import UsageError
from triforce_cli import options
from triforce_cli.answering.alone import Alone
from triforce_cli.answering.options import (
    AnswerFlags,
    EndFlags,
    Files,
    System,
    Template,
    ThoughtFlags,
    alone,
    check_template,
    wanted,
)
from triforce_cli.chat.tools import check_variables, read_tools
from triforce_cli.control import ControlFlags
from triforce_cli.documents import Document
from triforce_cli.documents.reading import read_documents
from triforce_cli.documents.selection import Named
from triforce_cli.flags import (
    CacheFlags,
    ModelFlags,
    PlacementFlags,
    ProgramFlags,
    SessionFlags,
    named_documents,
    question_of,
    spread,
)
from triforce_cli.options import option
from triforce_cli.output import Output
from triforce_cli.utf8 import (
    PIPED,
    STDIN,
    decode_argument,
    read_input,
    read_text,
    stdin_is_terminal,
    taken,
    user_path,
    without_line_end,
)

if TYPE_CHECKING:
    from triforce_cli.chat.conversation import Conversation

_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")

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


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One `triforce ask`, parsed. question: where it does not stand in `question_file`; with neither it is what is
    piped in, and with a question that is a document. documents: before it. fillings: of the placeholders in question,
    system message and beginning of the reply. template_variables: tools that are offered, too."""

    question: str | None
    question_file: Path | None
    documents: Named
    system: str
    begin_reply: str
    template: str
    fillings: Mapping[str, str]
    template_variables: Mapping[str, Any]
    alone: Alone

    @property
    def as_json(self) -> bool:
        return self.alone.written.as_json

    def run(self) -> None:
        """Read the question, then documents, and answer."""
        from triforce_cli.chat.formats import ChatFormat

        with self.alone.begun() as run:
            output = run.output
            question = filled(self._question(output), self.fillings, "the question")
            prepared = run.prepare()
            output.note(prepared.models.answers_note)
            thinks, tokenizer = self.alone.wanted.may_think, prepared.prompt_tokenizer
            chat_format = ChatFormat(tokenizer, self.template, variables=self.template_variables, thinks=thinks)
            output.note(chat_format.notice)
            check_variables(chat_format.template, {"tools"} & self.template_variables.keys())
            documents = read_documents(self.documents, "the document", note=output.note, on_read=run.on_read)
            conversation = self._conversation([*(reading.document for reading in documents), *self._piped(output)])
            begin = filled(self.begin_reply, self.fillings, "the beginning of the reply")
            run.answer(prepared, chat_format.prompt(conversation.asked(question), begin), question)

    def _question(self, output: Output) -> str:
        if self.question is not None and self.question_file is not None:
            raise UsageError("there are two questions: in --prompt-file and on the command line; give one of them")
        if self.question is not None:
            return self.question
        if self.question_file is None and stdin_is_terminal():
            raise UsageError("there is no question; triforce ask 'What is it about?' --file report.pdf")
        return without_line_end(read_input(self.question_file or STDIN, "the question", note=output.note))

    def _piped(self, output: Output) -> list[Document]:
        """Standard input as a document, beside a question of the command line."""
        if self.question is None or stdin_is_terminal() or STDIN in self.documents.paths:
            return []
        piped = read_input(STDIN, "a document", note=output.note)
        output.note(taken(piped, "a document") if piped.strip() else "")
        return [Document(PIPED, piped)] if piped.strip() else []

    def _conversation(self, documents: Iterable[Document]) -> Conversation:
        from triforce_cli.chat.conversation import Conversation

        conversation = Conversation(date=time.strftime("%d %b %Y"))
        conversation = conversation.with_system(filled(self.system, self.fillings, "the system message"))
        for document in documents:
            conversation = conversation.with_document(document)
        return conversation


def filled(text: str, variables: Mapping[str, str], what: str) -> str:
    """`text` with its {placeholders} replaced; without variables as it is. Raises UsageError for one that is unknown.
    {{ and }} are braces."""
    if not variables:
        return text
    parts = re.split(r"(\{\{|\}\})", text)
    return "".join(
        part[0] if part in ("{{", "}}") else _PLACEHOLDER.sub(_value(variables, what), part) for part in parts
    )


def _value(variables: Mapping[str, str], what: str) -> Callable[[re.Match[str]], str]:
    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name not in variables:
            known = ", ".join(variables)
            raise UsageError(f"{what} has the placeholder {{{name}}}; --var names {known}; {{{{ and }}}} are braces")
        return variables[name]

    return value


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
    ends: EndFlags,
    plan: options.GivenPlan = None,
    decoding: CacheFlags,
    placement: PlacementFlags,
    session: SessionFlags,
    answer: AnswerFlags,
    tools: Tools = None,
    thoughts: ThoughtFlags,
    program: ProgramFlags,
) -> Ask:
    """Ask a question about documents: one answer to standard output, by the model's chat template.

    Piped text is a document, or without a question the question itself.

    Example: triforce ask 'What does it conclude?' --file report.txt --model path/to/model
    """
    asked = wanted(
        max_tokens, sampling, stops=ends.stops(), cites=answer.cite, logprobs=answer.logprobs, thoughts=thoughts
    )
    if system and system_file is not None:
        raise UsageError("--system and --system-file are two system messages; give one of them")
    if system_file is not None:
        system = without_line_end(read_text(user_path(str(system_file)), "the system message"))
    offered = {} if tools is None else {"tools": read_tools(read_text(user_path(str(tools)), "the tools"))}
    return Ask(
        question=None if question is None else question_of(question, more_words or (), file),
        question_file=None if prompt_file is None else user_path(str(prompt_file)),
        documents=named_documents("--file", file, None, include),
        system=decode_argument("--system", system),
        begin_reply=decode_argument("--begin-reply", begin_reply),
        template=check_template(template),
        fillings=dict(_variable(text) for text in var or ()),
        template_variables=thoughts.variables() | offered,
        alone=alone(
            asked,
            models=models,
            plan=plan,
            decoding=decoding,
            placement=placement,
            session=session,
            timeout=ends.seconds(),
            answer=answer,
            written=replace(answer.written(), shows_thoughts=thoughts.how() == "show"),
        ),
    )


def _variable(text: str) -> tuple[str, str]:
    """From NAME=TEXT or NAME=@FILE."""
    name, equals, value = decode_argument("--var", text).partition("=")
    if not equals or not name.isidentifier():
        raise UsageError(f"var is {text!r}, it must be NAME=TEXT or NAME=@FILE")
    return name, read_text(user_path(value[1:]), f"the variable {name}") if value.startswith("@") else value
