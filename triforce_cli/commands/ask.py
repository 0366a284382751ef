"""`triforce ask`: one question, one answer."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offload.errors import UsageError
from triforce_cli.answering.single import SingleRequest
from triforce_cli.documents import Document
from triforce_cli.documents.reading import read_documents
from triforce_cli.documents.selection import Named
from triforce_cli.options import completion, options
from triforce_cli.options.answering import (
    AnswerFlags,
    ChatFlags,
    EndFlags,
    Files,
    GoesOn,
    Layout,
    System,
    alone,
    check_goes_on,
    setup,
    wanted,
)
from triforce_cli.options.control import Sampling
from triforce_cli.options.flags import (
    CacheFlags,
    Changed,
    LogFlags,
    ModelFlags,
    PlacementFlags,
    ProgramFlags,
    SessionFlags,
    StoreFlags,
    named_documents,
    question_of,
    spread,
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
class Ask:
    """One `triforce ask`, parsed. question: None if it is in `question_file` or, without one, in standard input; with a
    question, standard input is a document. documents: before the question. fillings: of the placeholders in the
    question, the system message and the beginning of the reply. template: the prompt to put the question into, maybe
    one without a place for it."""

    template: PromptTemplate | None
    question: str | None
    question_file: Path | None
    documents: Named
    system: str
    begin_reply: str
    layout: Layout
    fillings: Mapping[str, str]
    alone: SingleRequest

    @property
    def as_json(self) -> bool:
        return self.alone.written.as_json

    def run(self) -> None:
        """Read the question, then the documents, and answer."""
        with self.alone.begun() as run:
            if self.alone.goes_on:
                run.go_on(is_chat=True)
                return
            output = run.output
            texts = self._texts(output)
            prepared = run.prepare()
            output.note(prepared.models.answers_note)
            chat_format = self.layout.format(prepared.prompt_tokenizer, self.alone.wanted)
            output.note(chat_format.notice)
            check_variables(chat_format.template, {"tools"} & self.layout.variables.keys())
            documents = read_documents(self.documents, "the document", note=output.note, on_read=run.on_read)
            found = [*(reading.document for reading in documents), *self._piped(output)]
            conversation = self._conversation(texts.system, found).asked(texts.prompt)
            prompt = chat_format.prompt(conversation, texts.begin_reply)
            run.answer(prepared, prompt, texts.prompt, question=texts.prompt)

    @property
    def _takes_question(self) -> bool:
        return self.template is None or self.template.takes_input

    def _texts(self, output: Output) -> PromptTemplate:
        """The question, the system message and the beginning of the reply, in the template's place where given."""
        question = self._question(output) if self._takes_question else ""
        system = filled(self.system, self.fillings, "the system message")
        begin = filled(self.begin_reply, self.fillings, "the beginning of the reply")
        if self.template is None:
            return PromptTemplate("", question, system, begin)
        texts = self.template.filled({**self.fillings, INPUT: question})
        return replace(texts, system=system or texts.system, begin_reply=begin or texts.begin_reply)

    def _question(self, output: Output) -> str:
        """The question, its placeholders filled. Piped text has none: it is data, and its braces stay."""
        if self.question is not None and self.question_file is not None:
            raise UsageError("there are two questions: in --prompt-file and on the command line; give one of them")
        if self.question is not None:
            return filled(self.question, self.fillings, "the question")
        if self.question_file is None and stdin_is_terminal():
            raise UsageError("there is no question; triforce ask 'What is it about?' --file report.pdf")
        file = self.question_file or STDIN
        text = without_line_end(read_input(file, "the question", note=output.note))
        return text if file == STDIN else filled(text, self.fillings, "the question")

    def _piped(self, output: Output) -> list[Document]:
        """Standard input as a document, if the question is on the command line."""
        if (self.question is None and self._takes_question) or stdin_is_terminal() or STDIN in self.documents.paths:
            return []
        piped = read_input(STDIN, "a document", note=output.note)
        output.note(taken(piped, "a document") if piped.strip() else "")
        return [Document(PIPED, piped)] if piped.strip() else []

    def _conversation(self, system: str, documents: Iterable[Document]) -> Conversation:
        from triforce_cli.prompts.conversation import Conversation

        conversation = Conversation(date=time.strftime("%d %b %Y"))
        conversation = conversation.with_system(system)
        for document in documents:
            conversation = conversation.with_document(document)
        return conversation


def _template(named: PromptTemplate, fillings: Mapping[str, str], *, is_asked: bool) -> PromptTemplate:
    """The template, if what is given fits its placeholders. is_asked: there is a question. Raises UsageError."""
    named.check(tuple(fillings))
    if is_asked and not named.takes_input:
        raise UsageError(
            f"the template {named.name} has no {{{INPUT}}}, so there is no place for the question; leave it out"
        )
    return named


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
    chat: ChatFlags,
    max_tokens: options.MaxTokens = 1024,
    sampling: Sampling,
    ends: EndFlags,
    plan: options.GivenPlan = None,
    decoding: CacheFlags,
    placement: PlacementFlags,
    session: SessionFlags,
    store: StoreFlags,
    log: LogFlags,
    changed: Changed,
    answer: AnswerFlags,
    tools: Tools = None,
    go_on: GoesOn = False,
    program: ProgramFlags,
) -> Ask:
    """Ask a question about documents: one answer to standard output, by the model's chat template.

    Piped text is a document, or without a question the question itself.

    Example: triforce ask 'What does it conclude?' --file report.txt --model path/to/model
    """
    if go_on:
        check_goes_on(
            QUESTION=question, file=file, include=include, prompt_file=prompt_file, system=system,
            system_file=system_file, begin_reply=begin_reply, var=var, tools=tools, cite=answer.cite,
            **chat.given(),
        )  # fmt: skip
    asked = wanted(max_tokens, sampling, ends=ends, cites=answer.cite, logprobs=answer.logprobs, chat=chat)
    started = setup(models, decoding, placement, store, cites=answer.cite, plan=plan)
    if system and system_file is not None:
        raise UsageError("--system and --system-file are two system messages; give one of them")
    if system_file is not None:
        system = without_line_end(read_text(user_path(str(system_file)), "the system message"))
    offered = {} if tools is None else {"tools": read_tools(read_text(user_path(str(tools)), "the tools"))}
    fillings = fillings_of(var or ())
    template = None
    if prompt_template is not None:
        named = options.configuration_of(ctx).templates().named(prompt_template)
        template = _template(named, fillings, is_asked=question is not None or prompt_file is not None)
    return Ask(
        template=template,
        question=None if question is None else question_of(question, more_words or (), file),
        question_file=None if prompt_file is None else user_path(str(prompt_file)),
        documents=named_documents("--file", file, None, include),
        system=decode_argument("--system", system),
        begin_reply=decode_argument("--begin-reply", begin_reply),
        layout=chat.layout(**offered),
        fillings=fillings,
        alone=alone(
            asked,
            setup=started,
            session=session,
            goes_on=go_on,
            answer=answer,
            recorder=log.recorder("ask", started.models, changed),
            written=replace(answer.written(), shows_thoughts=chat.how() == "show"),
        ),
    )
