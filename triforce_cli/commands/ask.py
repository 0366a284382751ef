"""`triforce ask`: one question, one answer."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offload.errors import UsageError
from triforce_cli.documents import Document
from triforce_cli.documents.reading import read_documents
from triforce_cli.options import callbacks, completion, options
from triforce_cli.options.answering import AnswerFlags, Files, GoesOn, System, WantedFlags, check_goes_on
from triforce_cli.options.call import Changed, spread
from triforce_cli.options.flags import (
    EngineFlags,
    LogFlags,
    ModelFlags,
    SessionFlags,
    StoreFlags,
    named_documents,
    question_of,
)
from triforce_cli.options.options import option
from triforce_cli.screen.output import Output
from triforce_cli.screen.utf8 import (
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
from triforce_cli.settings.placeholders import filled, fillings_of
from triforce_cli.settings.prompt_templates import INPUT, PromptTemplate
from triforce_cli.tools.tools import check_variables, read_tools

if TYPE_CHECKING:
    from triforce_cli.prompts.conversation import Conversation

QUESTION = "Question"

Question = Annotated[
    str | None,
    typer.Argument(
        metavar="QUESTION", help="What to ask. Without it, a file or piped text is the question.", show_default=False
    ),
]
MoreWords = Annotated[
    list[str] | None,
    typer.Argument(metavar="WORD", help="Further words of a question without quotes, which are refused.", hidden=True),
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
        "Fill {NAME} in question, system message and begin-reply, not in piped text; @FILE is a file's text. Can be "
        "repeated.",
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


Template = Annotated[
    str | None,
    option(
        "--prompt-template",
        "A prompt template of the configuration file; its {input} is the question. (--template is the layout of "
        "messages.)",
        QUESTION,
        short="-t",
        autocompletion=completion.templates,
        metavar="NAME",
    ),
]


@dataclass(frozen=True, kw_only=True)
class QuestionSource:
    """A question, as it was given. text: None if it is in `file` or, without one, in standard input; with a text,
    standard input is a document. documents: other paths of documents. fillings: of the placeholders in the question,
    the system message and the beginning of the reply. template: the prompt to put the question into, maybe one without
    a place for it."""

    template: PromptTemplate | None
    text: str | None
    file: Path | None
    documents: tuple[Path, ...]
    system: str
    begin_reply: str
    fillings: Mapping[str, str]

    def __post_init__(self) -> None:
        """Check that what is given fits the template's placeholders. Raises UsageError."""
        if self.template is None:
            return
        self.template.check(tuple(self.fillings))
        if not self.template.takes_input and (self.text is not None or self.file is not None):
            raise UsageError(
                f"the template {self.template.name} has no {{{INPUT}}}, so there is no place for the question; leave "
                "it out"
            )

    @property
    def _takes_question(self) -> bool:
        return self.template is None or self.template.takes_input

    def texts(self, output: Output) -> PromptTemplate:
        """The question, the system message and the beginning of the reply, in the template's place where given."""
        question = self._text(output) if self._takes_question else ""
        system = filled(self.system, self.fillings, "the system message")
        begin = filled(self.begin_reply, self.fillings, "the beginning of the reply")
        if self.template is None:
            return PromptTemplate("", question, system, begin)
        texts = self.template.filled({**self.fillings, INPUT: question})
        return replace(texts, system=system or texts.system, begin_reply=begin or texts.begin_reply)

    def _text(self, output: Output) -> str:
        """The question, its placeholders filled. Piped text has none: it is data, and its braces stay."""
        if self.text is not None and self.file is not None:
            raise UsageError("there are two questions: in --prompt-file and on the command line; give one of them")
        if self.text is not None:
            return filled(self.text, self.fillings, "the question")
        if self.file is None and stdin_is_terminal():
            raise UsageError("there is no question; triforce ask 'What is it about?' --file report.pdf")
        file = self.file or STDIN
        text = without_line_end(read_input(file, "the question", note=output.note))
        return text if file == STDIN else filled(text, self.fillings, "the question")

    def piped(self, output: Output) -> list[Document]:
        """Standard input as a document, if the question is on the command line."""
        if (self.text is None and self._takes_question) or stdin_is_terminal() or STDIN in self.documents:
            return []
        piped = read_input(STDIN, "a document", note=output.note)
        output.note(taken(piped, "a document") if piped.strip() else "")
        return [Document(PIPED, piped)] if piped.strip() else []


def _conversation(system: str, documents: Iterable[Document]) -> Conversation:
    from triforce_cli.prompts.conversation import Conversation

    conversation = Conversation(date=time.strftime("%d %b %Y")).with_system(system)
    for document in documents:
        conversation = conversation.with_document(document)
    return conversation


def _system(text: str, file: Path | None) -> str:
    """The system message. Raises UsageError."""
    if text and file is not None:
        raise UsageError("--system and --system-file are two system messages; give one of them")
    if file is not None:
        text = without_line_end(read_text(user_path(str(file)), "the system message"))
    return decode_argument("--system", text)


@spread
def ask(
    ctx: typer.Context,
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
    prompt_template: Template = None,
    var: Variables = None,
    wanted: WantedFlags,
    engine: EngineFlags,
    session: SessionFlags,
    store: StoreFlags,
    log: LogFlags,
    changed: Changed,
    form: AnswerFlags,
    tools: Tools = None,
    go_on: GoesOn = False,
) -> None:
    """Ask a question about documents: one answer to standard output, by the model's chat template.

    Piped text is a document, or without a question the question itself.

    Example: triforce ask 'What does it conclude?' --file report.txt --model path/to/model
    """
    if go_on:
        check_goes_on(
            QUESTION=question, file=file, include=include, prompt_file=prompt_file, system=system,
            system_file=system_file, begin_reply=begin_reply, var=var, tools=tools, cite=form.cite,
            **wanted.chat.given(),
        )  # fmt: skip
    wishes = wanted.checked(cites=form.cite, logprobs=form.logprobs)
    setup = engine.setup(models, store, cites=form.cite, quiet=form.quiet)
    system = _system(system, system_file)
    offered = {} if tools is None else {"tools": read_tools(read_text(user_path(str(tools)), "the tools"))}
    layout = wanted.chat.layout(**offered)
    documents = named_documents("--file", file, None, include)
    templates = callbacks.configuration_of(ctx).templates
    source = QuestionSource(
        template=None if prompt_template is None else templates().named(prompt_template),
        text=None if question is None else question_of(question, more_words or (), file),
        file=None if prompt_file is None else user_path(str(prompt_file)),
        documents=documents.paths,
        system=system,
        begin_reply=decode_argument("--begin-reply", begin_reply),
        fillings=fillings_of(var or ()),
    )
    written = form.written(shows_thoughts=wanted.chat.how() == "show")
    recorder = log.recorder("ask", setup.models, changed)
    answer = form.single(wishes, setup, session, goes_on=go_on, written=written, recorder=recorder)
    with answer.under_way():
        if go_on:
            answer.go_on(is_chat=True)
            return
        output = answer.output
        texts = source.texts(output)
        prepared = answer.prepare()
        output.note(prepared.models.answers_note)
        chat_format = layout.format(prepared.prompt_tokenizer, wishes)
        output.note(chat_format.notice)
        check_variables(chat_format.template, {"tools"} & layout.variables.keys())
        readings = read_documents(documents, "the document", note=output.note, on_read=answer.on_read)
        conversation = _conversation(texts.system, [*(each.document for each in readings), *source.piped(output)])
        prompt = chat_format.prompt(conversation.asked(texts.prompt), texts.begin_reply)
        answer.generate(prepared, prompt, texts.prompt, question=texts.prompt)
