"""The text of a reply as its tokens come, up to a stop string, with the places of tokens that it has by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from offload.decode.tokenizer import Detokenizer, StopStrings, Tokenizer


class ReplyText:
    """Stop strings are looked for in all of it, names of tokens included."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], *, stops: Sequence[str], named: Mapping[int, str]
    ) -> None:
        """named: see `Detokenizer`."""
        self._detokenizer, self._stops = Detokenizer(tokenizer, prompt, named=named), StopStrings(stops)
        self._named = named
        self._num_read = self._num_shown = 0  # characters
        self._places: list[int] = []

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string ended the text."""
        return self._stops.found

    def push(self, token: int) -> str:
        """The text that is certain with this token."""
        text = self._detokenizer.push(token)
        self._num_read += len(text)
        if token in self._named:
            self._places.append(self._num_read - len(self._named[token]))
        return self._stops.push(text)

    def flush(self) -> str:
        """What was held back, at the end."""
        text = self._stops.push(self._detokenizer.flush())
        return text + self._stops.flush()

    def named_in(self, text: str) -> tuple[int, ...]:
        """Where names begin in `text`, which comes after that of the call before."""
        start, self._num_shown = self._num_shown, self._num_shown + len(text)
        found = [place - start for place in self._places if place < self._num_shown]
        del self._places[: len(found)]
        return tuple(found)
