"""Text to tokens and back, as it is generated: whole characters only, and stop strings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from itertools import dropwhile, islice
from pathlib import Path
from typing import Any, cast

from offload.decode import tokenizer_files
from offload.decode.characters import Characters, characters_of
from offload.errors import ModelError, unreadable

_BEFORE = ("\n", "0")  # what a piece is encoded behind, so that it does not count as the beginning of a text
_NUM_BEFORE = 8  # tokens of a context that are looked at, special ones apart
_INSIDE = re.compile("<0x[89ABab].>")  # a byte in the middle of a character, where there is a token for each byte


class Tokenizer:
    """A Hugging Face tokenizer from local files: the ids are those of its tokenizer.json.

    A special token that stands in a text, by its name, becomes its id there, as every added token of tokenizer.json.
    """

    def __init__(self, inner: Any, pipeline: Any = None) -> None:
        """inner: transformers' tokenizer, for special tokens and chat templates. pipeline: from text to ids and back, a
        `tokenizers.Tokenizer`; None: the one of `inner`."""
        self._inner = inner
        self._pipeline = inner.backend_tokenizer if pipeline is None else pipeline

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Raises ModelError where the folder has no tokenizer that loads. Costs memory in proportion to its files."""
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

    def encode(self, text: str) -> list[int]:
        """Tokens of `text`, with the special tokens that tokenizer.json puts at the start. Raises ModelError where the
        tokenizer turns out to be damaged."""
        found, count = self._encoded(text)
        return cast("list[int]", found.ids)[:count]

    def places(self, text: str) -> list[int]:
        """Of each token of `encode`, where it begins in `text`, in characters; 0 where it is none of it. A token that
        is a part of a character has the place of that. Raises ModelError as `encode` does."""
        found, count = self._encoded(text)
        return [first for first, _ in found.offsets[:count]]

    def piece(self, token: int) -> str:
        """A token by itself, as it is to be shown: its text, or its name where it is none."""
        return self.decode([token]) or str(self._pipeline.id_to_token(token) or f"<{token}>")

    def _encoded(self, text: str) -> tuple[Any, int]:
        """The pipeline's encoding, and how many of its tokens count."""
        with self._checked("encode"):
            found = self._pipeline.encode(text)
        tokens, was_put = found.ids, found.special_tokens_mask
        # Some tokenizers also close the text; a prompt goes on. What a person wrote at its end stays.
        closed = len(tokens) > 1 and was_put[-1] and tokens[-1] == self.eos_token_id
        return found, len(tokens) - int(closed)

    def start_tokens(self) -> list[int]:
        """The special tokens that the model wants at the start of a text."""
        tokens = self.encode("0")
        return tokens[: len(tokens) - len(self._pieces("0"))]

    def encode_piece(self, text: str, *, first: bool = False, until: str = "") -> list[int]:
        """Tokens of `text` as a part of a longer text, special tokens only where `text` names them.

        first: nothing comes before it. until: what comes right after it; it may decide how the end is cut into tokens.
        Where tokens would reach over an end of `text`, it is encoded without what lies there.
        """
        for after in dict.fromkeys((until, "")):
            for before in ("",) if first else _BEFORE:
                tokens = self._between(before, text, after)
                if tokens is not None:
                    return tokens
        return self._pieces(text)

    def _between(self, before: str, text: str, after: str) -> list[int] | None:
        """Tokens of `text` between the others, None where a token reaches from one into the next."""
        head, whole = self._pieces(before), self._pieces(before + text + after)
        tail = self._between(_BEFORE[0], after, "") if after else []
        end = len(whole) - len(tail or ())
        fits = tail is not None and whole[: len(head)] == head and whole[end:] == tail
        return whole[len(head) : end] if fits else None

    def _pieces(self, text: str) -> list[int]:
        with self._checked("encode"):
            return cast("list[int]", self._pipeline.encode(text, add_special_tokens=False).ids)

    def added_tokens(self, *, special: bool) -> dict[str, int]:
        """Strings that become one token wherever they stand in a text. special: only those that are no text."""
        tokens = self._pipeline.get_added_tokens_decoder().items()
        return {token.content: i for i, token in tokens if token.special or not special}

    @property
    def chat_template(self) -> str | None:
        """The tokenizer's own template for conversations, if it has one."""
        template = self._inner.chat_template
        return cast("str | None", template.get("default") if isinstance(template, Mapping) else template)

    @property
    def named_templates(self) -> tuple[str, ...]:
        """Where there are several templates, their names."""
        template = self._inner.chat_template
        return tuple(template) if isinstance(template, Mapping) else ()

    def render_chat(self, messages: Sequence[Mapping[str, object]], template: str, **variables: object) -> str:
        """Text of `messages` (role; content: text or a list of parts), up to where the next reply begins.

        Special tokens have their names. template: Jinja, run in a sandbox. Raises whatever the template raises.
        """
        rendered = self._inner.apply_chat_template(
            [dict(message) for message in messages],
            chat_template=template,
            tokenize=False,
            add_generation_prompt=True,
            **variables,
        )
        return cast(str, rendered)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`, U+FFFD where their bytes are no character. Raises ModelError as `encode` does."""
        with self._checked("decode"):
            return cast(str, self._pipeline.decode(tokens, skip_special_tokens=True))

    def written(self, token: int) -> str | None:
        """A token as the vocabulary has it, None for special ones and ids without one: they are no text."""
        return None if token in self._special_ids else cast("str | None", self._pipeline.id_to_token(token))

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self.added_tokens(special=True).values())

    def characters(self) -> Characters:
        """What makes whole characters of tokens as written, before `join`."""
        with self._checked("decode"):
            return characters_of(self._pipeline.decoder)

    def join(self, strings: Sequence[str]) -> str:
        """Text of tokens as written. Raises ModelError as `encode` does."""
        decoder = self._pipeline.decoder
        with self._checked("decode"):
            return " ".join(strings) if decoder is None else cast(str, decoder.decode(strings))

    def vocabulary(self) -> dict[str, int]:
        return cast("dict[str, int]", self._pipeline.get_vocab())

    def _checked(self, what: str) -> AbstractContextManager[None]:
        return _refusing(f"{self._inner.name_or_path}: the tokenizer cannot {what}", "download its files again")


@contextmanager
def _refusing(what: str, remedy: str) -> Iterator[None]:
    """The libraries raise whatever a damaged file makes them raise; their panics are not even an Exception."""
    try:
        yield
    except PermissionError as error:
        raise unreadable(Path(what), error) from error
    except BaseException as error:
        if isinstance(error, ModelError) or not _is_theirs(error):
            raise
        said = str(error).strip().partition("\n")[0].rstrip(": ")  # libraries go on with advice
        raise ModelError(f"{what} ({said}); {remedy}") from error


def _is_theirs(error: BaseException) -> bool:
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


class Detokenizer:
    """Text of a growing sequence, in pieces that never split a character.

    Decoding a token alone is wrong (leading spaces), so each piece is the difference of two decodings that begin with
    the same earlier text. Of a sequence that ends inside a character, that character waits, and nothing else. The work
    for a token does not grow with the sequence.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int]) -> None:
        """context: the prompt; only its end is looked at."""
        self._tokenizer, self._characters = tokenizer, tokenizer.characters()
        self._before: list[str] = []
        last = list(islice(filter(None, map(tokenizer.written, reversed(context))), _NUM_BEFORE))
        for token in dropwhile(_INSIDE.fullmatch, reversed(last)):
            self._before += self._characters.push(token)

    def push(self, token: int) -> str:
        """The text that is complete with this token, maybe none."""
        written = self._tokenizer.written(token)
        return self._text(self._characters.push(written)) if written else ""

    def flush(self) -> str:
        """What is left at the end, an unfinished character as the replacement character."""
        return self._text(self._characters.flush())

    def _text(self, strings: list[str]) -> str:
        if not strings:
            return ""
        before = self._tokenizer.join(self._before)
        text = self._tokenizer.join([*self._before, *strings])[len(before) :]
        if text:
            self._before = strings
        elif not before:  # the beginning of a text; it may matter to what comes next
            self._before += strings
        return text


class StopStrings:
    """Passes text on until one of `stops` appears in it; holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """The text that is safe to show. After the stop string that is the first to be complete nothing more comes."""
        if self.found:
            return ""
        self._held += text
        hits = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if hits:
            self.found = True
            _, at = min(hits)
            shown, self._held = self._held[:at], ""
            return shown
        cut = len(self._held) - self._num_held()
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        """What was held back and turned out to be no stop string."""
        shown, self._held = self._held, ""
        return shown

    def _num_held(self) -> int:
        """The longest end of the text that is a beginning of some stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for count in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-count:]) for stop in self._stops):
                return count
        return 0
