"""An answer being generated: its steps, each split into thoughts and text, with scores and citations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from triforce_cli.answering.citations import Citation, citations
from triforce_cli.answering.ending import LENGTH, STOP
from triforce_cli.answering.request import Prompt, Wanted
from triforce_cli.answering.thoughts import Piece
from triforce_cli.ground.deadline import Deadline

if TYPE_CHECKING:
    from offload.decode.logprobs import TokenScore
    from offload.engine.step import Step
    from offload.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"  # in place of a part of a character


@dataclass(frozen=True)
class Part:
    """A step of an answer. text: the text after the thoughts; thoughts: the thoughts before it. A step's last
    characters may be held back for a later part, until it is certain which of the two they are. written: the step's own
    text, with marks. scores: of the tokens, as JSON: ids, texts and log-probabilities in nats, also of the likeliest
    tokens, and the bytes of a part of a character. finish, stop: see Step."""

    text: str
    thoughts: str
    written: str = ""
    tokens: Sequence[int] = ()
    scores: Sequence[Mapping[str, Any]] = ()
    finish: str | None = None
    stop: str = ""


class Answer:
    """The parts of an answer so far. finish: the finish reason, see triforce_cli.answering.ending; "" before the end.
    citations: None until the answer ends by itself, and if none are wanted. deadline: by default that of `wanted`, from
    now on."""

    def __init__(
        self, prompt: Prompt, wanted: Wanted, tokenizer: Tokenizer, *, deadline: Deadline | None = None
    ) -> None:
        self.prompt, self.wanted = prompt, wanted
        self.deadline = deadline or Deadline(wanted.timeout)
        self.parts: list[Part] = []
        self.num_tokens = 0
        self.finish = ""
        self.citations: list[Citation] | None = None
        self._tokenizer = tokenizer
        self._splitter = prompt.splitter()
        self._earlier = {
            False: prompt.earlier.num_text,
            True: prompt.earlier.num_thoughts,
        }  # characters; True: thoughts
        self._num_split = {False: 0, True: 0}

    def add(self, step: Step) -> Part:
        """Add a step, and return its part."""
        pieces = self._splitter.push(step.text, step.named)
        if step.finish is not None:
            pieces += self._splitter.flush()
        self.num_tokens += len(step.tokens)
        text, thoughts = self._told_apart(pieces)
        scores = [self._score(score) for score in step.scores]
        self.parts.append(Part(text, thoughts, step.text, step.tokens, scores, step.finish, step.stop))
        self.finish = step.finish or ""
        if self.finish and self.wanted.cites:
            read, documents = self.prompt.tokens, self.prompt.documents
            self.citations = citations(step.passages, read, documents, self._tokenizer, self.text)
        return self.parts[-1]

    def end(self, early: str) -> Part | None:
        """End the answer: for the reason `early`, unless it has ended by itself. Returns the part with the text that
        was held back, None if there is none."""
        if self.finish:
            return None
        self.finish = early
        if not self.parts or not (pieces := self._splitter.flush()):
            return None
        self.parts.append(Part(*self._told_apart(pieces)))
        return self.parts[-1]

    @property
    def is_over(self) -> bool:
        """Whether the answer has ended, or its deadline has passed."""
        return bool(self.finish) or self.deadline.has_passed

    @property
    def is_cut(self) -> bool:
        """Whether the answer ended before the model, or a limit of tokens, ended it."""
        return self.finish not in ("", STOP, LENGTH)

    @property
    def text(self) -> str:
        """The text so far, without thoughts."""
        return "".join(part.text for part in self.parts)

    @property
    def num_written(self) -> tuple[int, int]:
        """The characters of text and of thoughts that are written once the answer ends, by earlier runs, too."""
        held = [] if self.finish else copy(self._splitter).flush()
        said, thoughts = (self._num_split[kind] + len(_joined(held, is_thought=kind)) for kind in (False, True))
        return max(self._earlier[False], said), max(self._earlier[True], thoughts)

    @property
    def written(self) -> str:
        """Everything that the model wrote so far, with thoughts and their marks."""
        return "".join(part.written for part in self.parts)

    @property
    def tokens(self) -> list[int]:
        return [token for part in self.parts for token in part.tokens]

    @property
    def stop(self) -> str:
        """The wanted stop string that ended the answer, or ""."""
        stop = self.parts[-1].stop if self.parts else ""
        return stop if stop in self.wanted.stops else ""

    def as_dict(self, *, note: Callable[[str], None]) -> dict[str, Any]:
        """The answer, which has ended, as JSON, without parts that were not wanted. note: called with a note on
        unreadable tool calls."""
        text, thoughts = self.text, "".join(part.thoughts for part in self.parts)
        found: dict[str, Any] = {"text": text, "tokens": self.tokens}
        if self.wanted.logprobs is not None:
            found["logprobs"] = [score for part in self.parts for score in part.scores]
        found["finish_reason"] = self.finish
        if self.prompt.calls is not None:
            found["tool_calls"], notice = self.prompt.calls.read(text)
            note(notice)
        if thoughts:
            found["thoughts"] = thoughts
        if self.citations is not None:
            found["citations"] = [each.as_dict() for each in self.citations]
        return found

    def _told_apart(self, pieces: Sequence[Piece]) -> tuple[str, str]:
        """(text, thoughts) of the pieces, without the characters that an earlier run has written."""
        return self._new(pieces, is_thought=False), self._new(pieces, is_thought=True)

    def _new(self, pieces: Sequence[Piece], *, is_thought: bool) -> str:
        text, before = _joined(pieces, is_thought=is_thought), self._num_split[is_thought]
        self._num_split[is_thought] += len(text)
        return text[max(self._earlier[is_thought] - before, 0) :]

    def _score(self, score: TokenScore) -> dict[str, Any]:
        def one(token: int, logprob: float) -> dict[str, Any]:
            text = self._tokenizer.decode([token])
            found = {"token": token, "text": text, "logprob": round(logprob, 6)}
            is_part = _REPLACEMENT in text and (data := self._tokenizer.bytes_of(token)) not in (None, text.encode())
            return found | ({"bytes": list(data or b"")} if is_part else {})

        return one(score.token, score.logprob) | {"top": [one(*pair) for pair in score.likeliest]}


def _joined(pieces: Sequence[Piece], *, is_thought: bool) -> str:
    return "".join(each.text for each in pieces if each.is_thought is is_thought)
