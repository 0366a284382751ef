"""The recorder of a command's answers, which puts them into the answer log."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from offload.errors import TriforceError
from triforce_cli.ground.text import path_text

if TYPE_CHECKING:
    from triforce_cli.answering.answer import Answer
    from triforce_cli.screen.output import Output
    from triforce_cli.setup.choice import Models

MOST_QUESTION = 20_000  # characters; of a longer question the end
MOST_OF_TEXT = 300  # characters of a text to continue, which may be a document
_CUT = "... "
_ELSEWHERE = ("prompt", "model", "seed")  # options that an entry has fields of its own for


class Recorder:
    """The recorder of one command's answers. An answer that cannot be recorded is a note, once, and no error.

    options: those of the command line that differ from their defaults, in JSON values.
    """

    def __init__(self, command: str, models: Models, options: Mapping[str, Any]) -> None:
        self._command, self._model = command, path_text(models.target).rpartition("/")[2]
        self._options = {name: value for name, value in options.items() if name not in _ELSEWHERE}
        self._has_failed = False

    def record(
        self,
        answer: Answer,
        output: Output,
        *,
        question: str,
        seconds: float,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Put an answer that has ended, with at least one token, into the log. The first use of the log is said.
        options: that have changed since the command began."""
        from triforce_cli.ground.answer_log import AnswerLog, Entry

        if not answer.num_tokens:
            return
        entry = Entry(
            time=time.time(),
            command=self._command,
            model=self._model,
            seed=answer.wanted.sampling.seed,
            options=self._options | dict(options or {}),
            prompt_tokens=len(answer.prompt.tokens),
            question=ending(question, MOST_QUESTION),
            documents=tuple(document.name for document in answer.prompt.documents),
            answer=answer.text,
            finish=answer.finish,
            seconds=round(seconds, 3),
        )
        try:
            log = AnswerLog.of_user()
            is_new = not log.exists()
            log.add(entry)
        except TriforceError as error:
            output.note("" if self._has_failed else f"not in the log of answers: {error}; --no-log leaves it out")
            self._has_failed = True
            return
        if is_new:
            kept = f"questions and answers are kept in {log.file}, for you alone (triforce log)"
            output.note(f"{kept}; --no-log leaves them out")


def ending(text: str, most: int) -> str:
    """The end of a text, at most so many characters."""
    return text if len(text) <= most else f"{_CUT}{text[-most:]}"
