"""Text to tokens and back, as it is generated: whole characters only, and stop strings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, cast

from offload.errors import ModelError
from offload.plan.fields import read_json

MAX_FILE_BYTES = 1 << 26  # of a tokenizer's file; the largest published ones are half as large
_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")  # tokenizer.json as it is, under two names
_REPLACEMENT = "\ufffd"
_BEFORE = ("\n", "0")  # what a piece is encoded behind, so that it does not count as the beginning of a text


class Tokenizer:
    """A Hugging Face tokenizer from local files. Never runs remote code, never downloads."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Raises ModelError where the folder has no tokenizer that loads. Costs memory in proportion to its files."""
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if (folder / name).is_file() and (folder / name).stat().st_size > MAX_FILE_BYTES:
                raise ModelError(f"{folder / name} is over the limit of {MAX_FILE_BYTES} bytes; is it really a {name}?")
        with _refusing(f"{folder}: no usable tokenizer", "tokenizer.json is needed, whole; download it again"):
            return cls(_class_for(folder).from_pretrained(str(folder), local_files_only=True, trust_remote_code=False))

    def __len__(self) -> int:
        return len(self._inner)

    @property
    def eos_token_id(self) -> int | None:
        return cast("int | None", self._inner.eos_token_id)

    def encode(self, text: str) -> list[int]:
        """Tokens of `text`, with the special tokens that the model wants at the start. Raises ModelError where the
        tokenizer turns out to be damaged."""
        tokens = self._encode(text, add_special_tokens=True)
        eos = self._inner.eos_token_id
        # Some tokenizers also close the text; a prompt goes on.
        return tokens[:-1] if len(tokens) > 1 and tokens[-1] == eos else tokens

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
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        with self._checked("encode"):
            return cast("list[int]", self._inner.encode(text, add_special_tokens=add_special_tokens, verbose=False))

    def added_tokens(self, *, special: bool) -> dict[str, int]:
        """Strings that become one token wherever they stand in a text. special: only those that are no text."""
        tokens = self._inner.added_tokens_decoder.items()
        return {token.content: i for i, token in tokens if token.special or not special}

    @property
    def chat_template(self) -> str | None:
        """The tokenizer's own template for conversations, if it has one."""
        template = self._inner.chat_template
        return cast("str | None", template.get("default") if isinstance(template, Mapping) else template)

    def render_chat(self, messages: Sequence[Mapping[str, str]], template: str, **variables: str) -> str:
        """Text of `messages` (role, content), up to where the next reply begins. Special tokens have their names.

        template: Jinja, run in a sandbox. Raises whatever the template raises.
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
            return cast(str, self._inner.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def vocabulary(self) -> dict[str, int]:
        return cast("dict[str, int]", self._inner.get_vocab())

    def _checked(self, what: str) -> AbstractContextManager[None]:
        return _refusing(f"{self._inner.name_or_path}: the tokenizer cannot {what}", "download its files again")


def _class_for(folder: Path) -> Any:
    """The class that AutoTokenizer would choose. Where that is the plain one it is not asked: to find out it imports
    half of transformers, which takes longer than all else up to the first token."""
    if _is_plain(folder):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def _is_plain(folder: Path) -> bool:
    """Is tokenizer.json all there is to it?"""
    config = folder / "tokenizer_config.json"
    if not (config.is_file() and (folder / "tokenizer.json").is_file()):
        return False
    return read_json(config, max_bytes=MAX_FILE_BYTES).get("tokenizer_class") in _PLAIN_CLASSES


@contextmanager
def _refusing(what: str, remedy: str) -> Iterator[None]:
    """The libraries raise whatever a damaged file makes them raise; their panics are not even an Exception."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, ModelError) or not _is_theirs(error):
            raise
        raise ModelError(f"{what} ({error}); {remedy}") from error


def _is_theirs(error: BaseException) -> bool:
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


class Detokenizer:
    """Text of a growing sequence, in pieces that never split a character.

    Decoding a token alone is wrong (leading spaces, bytes of one character spread over tokens), so each piece is the
    difference of two decodings that start at the same earlier token. Text that ends inside a character waits.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int]) -> None:
        """context: the prompt; only its end is looked at."""
        self._tokenizer = tokenizer
        self._tokens = list(context[-8:])
        while self._tokens and tokenizer.decode(self._tokens).startswith(_REPLACEMENT):
            self._tokens.pop(0)  # the cut went through a character
        self._start, self._end = 0, len(self._tokens)

    def push(self, token: int) -> str:
        """The text that is complete with this token, maybe none."""
        self._tokens.append(token)
        before = self._tokenizer.decode(self._tokens[self._start : self._end])
        after = self._tokenizer.decode(self._tokens[self._start :])
        if after.endswith(_REPLACEMENT) or len(after) <= len(before):
            return ""
        self._start, self._end = self._end, len(self._tokens)
        return after[len(before) :]

    def flush(self) -> str:
        """What is left at the end, an unfinished character as the replacement character."""
        before = self._tokenizer.decode(self._tokens[self._start : self._end])
        after = self._tokenizer.decode(self._tokens[self._start :])
        self._start = self._end = len(self._tokens)
        return after[len(before) :]


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
