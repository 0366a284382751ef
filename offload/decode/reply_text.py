"""The text of a reply, token by token, up to a stop string, with the places of named tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from offload.decode.stops import StopStrings
from offload.decode.tokenizer import Detokenizer, Tokenizer


class ReplyText:
    """The growing text of a reply. Stop strings are found anywhere in it, also in names of tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        *,
        stops: Sequence[str],
        named: Mapping[int, str],
        end_tokens: Collection[int] = (),
    ) -> None:
        """named: see `Detokenizer`. end_tokens: tokens that add no text."""
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
        """The text that `token` makes certain: neither part of a character nor of a stop string."""
        text = "" if token in self._end_tokens else self._detokenizer.push(token)
        self._num_read += len(text)
        if text and token in self._named:
            self._places.append(self._num_read - len(self._named[token]))
        return self._stops.push(text, token)

    def flush(self) -> str:
        """The text that was held back, at the end of the reply."""
        text = self._stops.push(self._detokenizer.flush())
        return text + self._stops.flush()

    def named_in(self, text: str) -> tuple[int, ...]:
        """The places of names in `text`, which must follow the text of the previous call."""
        start, self._num_shown = self._num_shown, self._num_shown + len(text)
        found = [place - start for place in self._places if place < self._num_shown]
        del self._places[: len(found)]
        return tuple(found)
