"""A question that is asked once: the model's chat template around documents and a message, and one answer."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from offload.errors import UsageError
from triforce_cli.chat.tools import check_variables
from triforce_cli.citations import ASKED
from triforce_cli.commands.generate import Generate, Prompted
from triforce_cli.deadline import Deadline
from triforce_cli.documents import Document
from triforce_cli.documents.reading import read_documents
from triforce_cli.engine import Prepared
from triforce_cli.output import Output
from triforce_cli.utf8 import PIPED, STDIN, read_input, stdin_is_terminal, taken, without_line_end

if TYPE_CHECKING:
    from triforce_cli.chat.thoughts import Thinking

_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")


@dataclass(frozen=True, kw_only=True)
class Ask(Generate):
    """One `triforce ask`, parsed. prompt: the question; question_file: where it stands otherwise; with neither it is
    what is piped in, and with a question that is a document. documents: before it. variables: fill the placeholders of
    the question, the system message and the beginning of the reply. With a constraint a model writes no thoughts: they
    would have to follow it."""

    system: str
    question_file: Path | None
    begin_reply: str
    template: str
    variables: Mapping[str, str]
    cites: bool
    thinking: Thinking
    thinking_tokens: int | None
    template_variables: Mapping[str, Any]
    tools: list[dict[str, Any]] | None
    ends_line: ClassVar[bool] = True
    text_name: ClassVar[str] = "answer"

    def read(self, output: Output, deadline: Deadline) -> str:
        """The question."""
        if self.prompt is not None and self.question_file is not None:
            raise UsageError("there are two questions: in --prompt-file and on the command line; give one of them")
        text = self.prompt
        if text is None:
            if self.question_file is None and stdin_is_terminal():
                raise UsageError("there is no question; triforce ask 'What is it about?' --file report.pdf")
            text = without_line_end(read_input(self.question_file or STDIN, "the question", note=output.note))
        return filled(text, self.variables, "the question")

    def prompted(self, prepared: Prepared, text: str, output: Output) -> Prompted:
        from triforce_cli.chat.conversation import Conversation
        from triforce_cli.chat.formats import ChatFormat

        output.note(self.models.answers_note)
        chat_format = ChatFormat(
            prepared.prompt_tokenizer,
            self.template,
            variables=dict(self.template_variables) | ({} if self.tools is None else {"tools": self.tools}),
            thinks=self.thinking != "off" and self.sampling.constraint is None,
        )
        output.note(chat_format.notice)
        if self.tools is not None:
            check_variables(chat_format.template, ("tools",))
        conversation = Conversation(date=time.strftime("%d %b %Y"))
        conversation = conversation.with_system(filled(self.system, self.variables, "the system message"))
        for found in read_documents(self.documents, "the document", note=output.note, on_read=output.report):
            conversation = conversation.with_document(Document(found.name, found.text))
        if self.prompt is not None and not stdin_is_terminal() and STDIN not in self.documents.paths:
            piped = read_input(STDIN, "a document", note=output.note)
            if piped.strip():
                output.note(taken(piped, "a document"))
                conversation = conversation.with_document(Document(PIPED, piped))
        begin = filled(self.begin_reply, self.variables, "the beginning of the reply")
        opening = chat_format.opening(conversation.asked(text), begin)
        return Prompted(
            opening.tokens,
            documents=conversation.documents,
            opening=opening,
            shows_thoughts=self.thinking == "show",
            thoughts=opening.budget(self.thinking_tokens),
            end_tokens=chat_format.end_tokens,
            stops=chat_format.stops,
            passages=ASKED if self.cites else 0,
        )


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
