"""The text of a reply, token by token, up to a stop string, with the places of named tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from offload.text.stops import StopStrings
from offload.text.tokenizer import Detokenizer, Tokenizer


class AnswerPlace(Protocol):
    """The place of the answer in a reply with thoughts, as far as its text has come. is_open: whether it is not known
    yet if the text so far is part of it. answer_from: the index of the answer that the text ends with, or None."""

    @property
    def is_open(self) -> bool: ...

    @property
    def answer_from(self) -> int | None: ...

    def push(self, text: str, named: Sequence[int]) -> object:
        """More text. named: the indices in it of tokens that are written by name."""
        ...

    def flush(self) -> object:
        """The end of the text."""
        ...


class ReplyText:
    """The growing text of a reply. Stop strings are found anywhere in it, also in names of tokens; those of the answer
    only there."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        *,
        stops: Sequence[str],
        named: Mapping[int, str],
        end_tokens: Collection[int] = (),
        answer: AnswerPlace | None = None,
        of_answer: Sequence[str] = (),
    ) -> None:
        """named: see `Detokenizer`. end_tokens: tokens that add no text. answer: None: all of the text. of_answer: stop
        strings of the answer."""
        unwritten = tokenizer.unwritten(end_tokens) if stops or of_answer else {}
        names = {name: token for name, token in unwritten.items() if token not in named}
        self._stops = StopStrings(stops, names, of_answer=of_answer)
        self._answer = answer if of_answer else None
        self._open: list[tuple[str, int | None]] = []  # texts of which it is not known yet if they are of the answer
        self._detokenizer = Detokenizer(tokenizer, prompt, named=named)
        self._named, self._end_tokens = named, end_tokens
        self._num_read = self._num_shown = 0  # characters
        self._places: list[int] = []

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string ended the text."""
        return self._stops.found

    @property
    def stop(self) -> str:
        """The stop string that ended the text, or ""."""
        return self._stops.stop

    def push(self, token: int) -> str:
        """The text that `token` makes certain: neither part of a character nor of a stop string."""
        text = "" if token in self._end_tokens else self._detokenizer.push(token)
        self._num_read += len(text)
        named = [len(text) - len(self._named[token])] if text and token in self._named else []
        self._places += [self._num_read - len(text) + place for place in named]
        return self._told(text, token, named)

    def flush(self) -> str:
        """The text that was held back, at the end of the reply."""
        text = self._told(self._detokenizer.flush(), None, ())
        if self._answer is not None:
            self._answer.flush()
        return text + self._settled() + self._stops.flush()

    def _told(self, text: str, token: int | None, named: Sequence[int]) -> str:
        """The text that is certain with `text`, which `token` has completed."""
        if self._answer is not None:
            self._answer.push(text, named)
        self._open.append((text, token))
        return "" if self._answer is not None and self._answer.is_open else self._settled()

    def _settled(self) -> str:
        """The text that is certain of the texts whose kind is known now."""
        start = 0 if self._answer is None else self._answer.answer_from
        shown = "".join(self._stops.push(text, token, answer_from=start) for text, token in self._open)
        self._open.clear()
        return shown

    def named_in(self, text: str) -> tuple[int, ...]:
        """The places of names in `text`, which must follow the text of the previous call."""
        start, self._num_shown = self._num_shown, self._num_shown + len(text)
        found = [place - start for place in self._places if place < self._num_shown]
        del self._places[: len(found)]
        return tuple(found)
