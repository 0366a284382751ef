"""The text of a reply as its tokens come, up to a stop string, with the places of tokens that it has by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from offload.decode.stops import StopStrings
from offload.decode.tokenizer import Detokenizer, Tokenizer


class ReplyText:
    """Stop strings are looked for in all of it, names of tokens included."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        *,
        stops: Sequence[str],
        named: Mapping[int, str],
        end_tokens: Collection[int] = (),
    ) -> None:
        """named: see `Detokenizer`. end_tokens: are no text."""
        unwritten = tokenizer.unwritten(end_tokens) if stops else {}
        self._stops = StopStrings(stops, {name: token for name, token in unwritten.items() if token not in named})
        self._detokenizer = Detokenizer(tokenizer, prompt, named=named)
        self._named, self._end_tokens = named, end_tokens
        self._num_read = self._num_shown = 0  # characters
        self._places: list[int] = []

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string ended the text."""
        return self._stops.found

    def push(self, token: int) -> str:
        """The text that is certain with this token."""
        text = "" if token in self._end_tokens else self._detokenizer.push(token)
        self._num_read += len(text)
        if text and token in self._named:
            self._places.append(self._num_read - len(self._named[token]))
        return self._stops.push(text, token)

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
