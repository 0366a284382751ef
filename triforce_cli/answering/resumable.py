"""An answer that a session keeps, so that another run can go on from where it stopped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from offload.errors import UsageError
from offload.fields import Kind, record, versioned, whole
from triforce_cli.answering.request import Earlier, Prompt
from triforce_cli.answering.thoughts import Marks, known
from triforce_cli.ground.text import path_text

if TYPE_CHECKING:
    from offload.session.manifest import Manifest
    from triforce_cli.answering.answer import Answer

VERSION = 1
_COMMANDS = {True: "ask", False: "generate"}
Token = Annotated[int, Kind("a token id", whole(0, 2**31 - 1).fits)]


@dataclass(frozen=True)
class Resumable:
    """An answer so far. num_prompt: tokens of its prompt. num_rows: the session's tokens with which prompt and answer
    begin; rest: those after them. num_text, num_thoughts: characters that were written. ended: there is no more of it.
    The other fields are those of `Prompt`; named: tokens by their names."""

    num_prompt: int
    num_rows: int
    rest: tuple[Token, ...]
    num_text: int
    num_thoughts: int
    ended: bool
    is_chat: bool
    begin: str
    marks: Marks | None
    begun: bool
    named: dict[str, Token]
    end_tokens: tuple[Token, ...]
    stops: tuple[str, ...]

    @classmethod
    def of(cls, answer: Answer, rows: Sequence[int]) -> Resumable:
        """The answer so far, in a session that has `rows`."""
        from offload.engine.prefix import num_common

        prompt = answer.prompt
        tokens = [*prompt.tokens, *answer.tokens]
        num_rows, (num_text, num_thoughts) = num_common(rows, tokens), answer.num_written
        return cls(
            num_prompt=len(prompt.tokens) - prompt.earlier.num_tokens,
            num_rows=num_rows,
            rest=tuple(tokens[num_rows:]),
            num_text=num_text,
            num_thoughts=num_thoughts,
            ended=answer.finish == "stop",
            is_chat=prompt.is_chat,
            begin=prompt.begin,
            marks=prompt.marks,
            begun=prompt.begun,
            named={name: token for token, name in prompt.named.items()},
            end_tokens=tuple(sorted(prompt.end_tokens)),
            stops=prompt.stops,
        )

    def as_dict(self) -> dict[str, Any]:
        """The answer as JSON values, which `record` reads."""
        lists = {name: list(value) for name, value in vars(self).items() if isinstance(value, tuple)}
        return {"version": VERSION, **asdict(self), **lists}

    def prompt(self, rows: Sequence[int]) -> Prompt:
        """The prompt that ends with the answer so far. rows: the session's tokens."""
        tokens = [*rows[: self.num_rows], *self.rest]
        return Prompt(
            tokens,
            is_chat=self.is_chat,
            begin=self.begin,
            marks=None if self.marks is None else known(self.marks.open, self.marks.close),
            begun=self.begun,
            named={token: name for name, token in self.named.items()},
            end_tokens=frozenset(self.end_tokens),
            stops=self.stops,
            earlier=Earlier(len(tokens) - self.num_prompt, self.num_text, self.num_thoughts),
        )


def begun_prompt(folder: Path, *, is_chat: bool) -> Prompt:
    """The prompt that goes on with the last answer of the session in `folder`. is_chat: of `ask`, not of `generate`.
    Raises SessionError if there is no session, UsageError if it has no answer to go on with."""
    from offload.session import catalogue

    manifest, name = catalogue.inspect(folder), path_text(folder)
    begun = _begun(manifest, name)
    if begun.is_chat != is_chat:
        raise UsageError(
            f"the answer in {name} is of triforce {_COMMANDS[begun.is_chat]}; triforce {_COMMANDS[begun.is_chat]} "
            "--continue goes on with it"
        )
    if begun.ended:
        raise UsageError(
            f"the answer in {name} has ended, so there is nothing to go on with; ask anew without --continue"
        )
    return begun.prompt(manifest.tokens)


def _begun(manifest: Manifest, name: str) -> Resumable:
    if manifest.extra.get("kind") == "chat":
        raise UsageError(f"{name} is kept by a chat, in which a message goes on; triforce chat --session opens it")
    if "answer" not in manifest.extra:
        raise UsageError(
            f"{name} does not say where its answer stopped: an earlier version wrote it; ask anew without --continue, "
            "with the same session"
        )
    try:
        begun = record(Resumable, versioned(manifest.extra["answer"], VERSION, "answer"), "answer")
        if begun.num_rows > len(manifest.tokens) or not 0 < begun.num_prompt <= begun.num_rows + len(begun.rest):
            raise ValueError("answer.num_prompt and answer.num_rows are not of the session's tokens")
    except ValueError as error:
        raise UsageError(f"{name} has an answer that cannot be read: {error}; ask anew without --continue") from error
    return begun
