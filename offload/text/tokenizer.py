"""Tokenizer: from text to tokens, and back to whole characters while a text is generated."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from itertools import dropwhile, islice
from pathlib import Path
from typing import Any, cast

from offload.errors import DoesNotFit, ModelError, unreadable
from offload.interrupts import poll
from offload.text import chat_template, tokenizer_files
from offload.text.characters import Characters, characters_of
from offload.text.long_texts import PART, Coverage, parts

_BEFORE = ("\n", "0")  # texts before an encoded piece, so that it does not count as the beginning of a text
_NUM_BEFORE = 8  # tokens of a context that are decoded again, special ones not counted
_INSIDE = re.compile("<0x[89ABab].>")  # a byte in the middle of a character, where there is a token for each byte


class Tokenizer:
    """A Hugging Face tokenizer from local files, with the ids of its tokenizer.json.

    The name of a special token in a text is encoded as its id, as for every added token of tokenizer.json.
    """

    def __init__(self, inner: Any, pipeline: Any = None, *, most: int | None = None) -> None:
        """inner: transformers' tokenizer, for special tokens and chat templates. pipeline: a `tokenizers.Tokenizer`,
        from text to ids and back; None: the one of `inner`. most: see `limited`."""
        self._inner, self._most = inner, most
        self._pipeline = inner.backend_tokenizer if pipeline is None else pipeline

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Load a folder's tokenizer. Raises ModelError where none loads. Memory is proportional to its files."""
        with _refusing(f"{folder}: no usable tokenizer", "tokenizer.json is needed, whole; download it again"):
            return cls(*tokenizer_files.load(folder))

    def __len__(self) -> int:
        """One more than the highest id. Not every id below it need be a token."""
        return self._num_ids

    @cached_property
    def _num_ids(self) -> int:
        return 1 + max(self.vocabulary().values(), default=-1)

    @property
    def eos_token_id(self) -> int | None:
        token = self._inner.eos_token
        return None if token is None else cast("int | None", self._pipeline.token_to_id(str(token)))

    def limited(self, most: int) -> Tokenizer:
        """The tokenizer with a limit: encoding raises DoesNotFit as soon as a text certainly has more than `most`
        tokens."""
        return Tokenizer(self._inner, self._pipeline, most=most)

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`, with the special tokens that tokenizer.json puts at the start. Raises ModelError where
        the tokenizer is damaged, DoesNotFit where the text is too long to encode."""
        return [token for tokens, _ in self._parts(text) for token in tokens]

    def places(self, text: str) -> list[int]:
        """The character of `text` at which each token of `encode` begins; 0 for tokens that are no part of it. A token
        inside a character has that character's place. Raises as `encode` does."""
        return [place for _, places in self._parts(text) for place in places]

    def num_tokens(self, text: str) -> int:
        """The number of tokens of `encode`, in memory that does not grow with the text. Raises as `encode` does."""
        return sum(len(tokens) for tokens, _ in self._parts(text))

    def piece(self, token: int) -> str:
        """A token by itself, for display: its text, or its name where it has none."""
        return self.decode([token]) or str(self._pipeline.id_to_token(token) or f"<{token}>")

    def _parts(self, text: str, *, special: bool = True) -> Iterator[tuple[list[int], list[int]]]:
        """(tokens, their places) of consecutive parts of a text. special: with special tokens at the start."""
        if len(text) <= PART:
            yield self._whole(text, special)
            return
        if self._most is not None and self._coverage is not None:
            self.check(self._coverage.fewest(text))
        start = self.start_tokens() if special else []
        yield start, [0] * len(start)
        count = len(start)
        for tokens, places in parts(partial(self._encoded, special=False), self._coverage, text):
            count += len(tokens)
            self.check(count)
            yield tokens, places

    def _whole(self, text: str, special: bool) -> tuple[list[int], list[int]]:
        found = self._encoded(text, special=special)
        tokens, was_put = found.ids, found.special_tokens_mask
        # Some tokenizers append an end token, which is removed, since a prompt goes on. One in the text itself stays.
        closed = special and len(tokens) > 1 and was_put[-1] and tokens[-1] == self.eos_token_id
        count = len(tokens) - int(closed)
        return tokens[:count], [first for first, _ in found.offsets[:count]]

    def _encoded(self, text: str, *, special: bool) -> Any:
        poll()
        with self._checked("encode"):
            return self._pipeline.encode(text, add_special_tokens=special)

    @cached_property
    def _coverage(self) -> Coverage | None:
        return Coverage.of(self._pipeline)

    def check(self, count: int) -> None:
        """Raises DoesNotFit if a text of at least `count` tokens is over the limit."""
        if self._most is not None and count > self._most:
            raise DoesNotFit(
                f"the text has at least {count:,} tokens and the context is {self._most:,}: shorten the text, or raise "
                "the context where the model's limit allows it (--context)"
            )

    def start_tokens(self) -> list[int]:
        """The special tokens that the model expects at the start of a text."""
        tokens = self.encode("0")
        return tokens[: len(tokens) - len(self._pieces("0"))]

    def encode_piece(self, text: str, *, first: bool = False, until: str = "") -> list[int]:
        """The tokens of `text` as a part of a longer text, with special tokens only where `text` names them.

        first: `text` begins the longer text. until: the text directly after it, which may change the tokens at its end.
        Where tokens would cross an end of `text`, it is encoded without the text on that side.
        """
        for after in dict.fromkeys((until, "")):
            for before in ("",) if first else _BEFORE:
                tokens = self._between(before, text, after)
                if tokens is not None:
                    return tokens
        return self._pieces(text)

    def _between(self, before: str, text: str, after: str) -> list[int] | None:
        """The tokens of `text` between the two others; None where a token crosses from one text to the next."""
        head, whole = self._pieces(before), self._pieces(before + text + after)
        tail = self._between(_BEFORE[0], after, "") if after else []
        end = len(whole) - len(tail or ())
        fits = tail is not None and whole[: len(head)] == head and whole[end:] == tail
        return whole[len(head) : end] if fits else None

    def _pieces(self, text: str) -> list[int]:
        return [token for tokens, _ in self._parts(text, special=False) for token in tokens]

    def added_tokens(self, *, special: bool) -> dict[str, int]:
        """The strings that are one token anywhere in a text, by name. special: only tokens that have no text."""
        tokens = self._pipeline.get_added_tokens_decoder().items()
        return {token.content: i for i, token in tokens if token.special or not special}

    @property
    def chat_template(self) -> str | None:
        """The tokenizer's own chat template, if it has one."""
        template = self._inner.chat_template
        return cast("str | None", template.get("default") if isinstance(template, Mapping) else template)

    @property
    def named_templates(self) -> tuple[str, ...]:
        """The names of the chat templates, where there are several."""
        template = self._inner.chat_template
        return tuple(template) if isinstance(template, Mapping) else ()

    def render_chat(self, messages: Sequence[Mapping[str, object]], template: str, **variables: object) -> str:
        """The text of `messages` (role; content: text or a list of parts), up to where the next reply begins.

        Special tokens are written by name. template: Jinja, run in a sandbox. Raises TooMuchText, and any error of the
        template.
        """
        return chat_template.render(template, messages, self._inner.special_tokens_map | variables)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, with U+FFFD for bytes that are no character. Raises ModelError as `encode` does."""
        with self._checked("decode"):
            return cast(str, self._pipeline.decode(tokens, skip_special_tokens=True))

    def unwritten(self, more: Collection[int] = ()) -> dict[str, int]:
        """The added tokens without text, by name: special tokens, and the tokens in `more`."""
        special = self._special_ids
        return {name: i for name, i in self.added_tokens(special=False).items() if i in special or i in more}

    def written(self, token: int) -> str | None:
        """A token's string in the vocabulary; None for special tokens and ids without a token, which have no text."""
        return None if token in self._special_ids else cast("str | None", self._pipeline.id_to_token(token))

    def bytes_of(self, token: int) -> bytes | None:
        """The bytes that a token adds to a text, perhaps a part of a character; None if only `join` tells its text."""
        written = self.written(token)
        return None if written is None else self.characters().bytes_of(written)

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self.added_tokens(special=True).values())

    def characters(self) -> Characters:
        """The assembly of whole characters from tokens' vocabulary strings, before `join`."""
        with self._checked("decode"):
            return characters_of(self._pipeline.decoder)

    def join(self, strings: Sequence[str]) -> str:
        """The text of tokens' vocabulary strings. Raises ModelError as `encode` does."""
        decoder = self._pipeline.decoder
        with self._checked("decode"):
            return " ".join(strings) if decoder is None else cast(str, decoder.decode(strings))

    def vocabulary(self) -> dict[str, int]:
        return cast("dict[str, int]", self._pipeline.get_vocab())

    def _checked(self, what: str) -> AbstractContextManager[None]:
        return _refusing(f"{self._inner.name_or_path}: the tokenizer cannot {what}", "download its files again")


@contextmanager
def _refusing(what: str, remedy: str) -> Iterator[None]:
    """Turn the libraries' errors into ModelError. A damaged file can raise anything, even a panic, which is no
    Exception."""
    try:
        yield
    except PermissionError as error:
        raise unreadable(Path(what), error) from error
    except BaseException as error:
        if isinstance(error, ModelError | MemoryError) or not _is_theirs(error):
            raise
        said = str(error).strip().partition("\n")[0].rstrip(": ")  # further lines are advice
        raise ModelError(f"{what} ({said}); {remedy}") from error


def _is_theirs(error: BaseException) -> bool:
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


class Detokenizer:
    """The text of a growing sequence, in pieces that never split a character.

    Decoding a token alone is wrong (leading spaces), so each piece is the difference of two decodings that begin with
    the same earlier text. Only an unfinished character at the end is held back. The work for a token does not grow with
    the sequence.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], *, named: Mapping[int, str] | None = None) -> None:
        """context: the prompt; only its end is decoded. named: tokens to write by the given names, also special tokens,
        which otherwise have no text."""
        self._tokenizer, self._characters, self._named = tokenizer, tokenizer.characters(), named or {}
        self._before: list[str] = []
        last = list(islice(filter(None, map(tokenizer.written, reversed(context))), _NUM_BEFORE))
        for token in dropwhile(_INSIDE.fullmatch, reversed(last)):
            self._before += self._characters.push(token)

    def push(self, token: int) -> str:
        """The text that `token` completes, perhaps empty."""
        if token in self._named:
            return self.flush() + self._named[token]
        written = self._tokenizer.written(token)
        return self._text(self._characters.push(written)) if written else ""

    def flush(self) -> str:
        """The remaining text at the end; an unfinished character is the replacement character."""
        return self._text(self._characters.flush())

    def _text(self, strings: list[str]) -> str:
        if not strings:
            return ""
        before = self._tokenizer.join(self._before)
        text = self._tokenizer.join([*self._before, *strings])[len(before) :]
        if text:
            self._before = strings
        elif not before:  # the beginning of a text; the next token may depend on it
            self._before += strings
        return text
