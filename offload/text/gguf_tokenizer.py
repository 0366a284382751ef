"""Tokenizers of GGUF files. Of a byte-level tokenizer's pre-tokenizer, a file has only the name.

The name is `tokenizer.ggml.pre`. It stands for the pre-tokenizer in the tokenizer.json of the models with that name,
as listed in llama.cpp's llama-vocab.cpp. Unknown names are refused, since a guess would silently give other tokens.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import PreTokenizer

from offload.config.gguf_header import Header, Items, read_header
from offload.config.gguf_tokens import CONTROL, NORMAL, PIECES, UNKNOWN, USER_DEFINED, end_texts, token_id
from offload.errors import ModelError
from offload.text.gguf_pieces import ids_of, pieces, ranked_merges

BYTE_LEVEL, MERGED_PIECES = "gpt2", "gemma4"  # the `tokenizer.ggml.model` of these files
_KNOWN = (BYTE_LEVEL, PIECES, MERGED_PIECES)
_SPECIAL = ("bos", "eos")
_NAME = "general.name"
_STRIPPING = ("phi-3", "phi3")  # parts of names of models whose special tokens include the white space after them
_NOT_STRIPPING = ("<unk>", "<s>", "<|endoftext|>")
_END = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_CASED_END = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_END}"
_QWEN2 = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_END}"
_QWEN35 = (
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_CASED_END}"
_GPT4O = rf"{_CASED[0]}{_SHORT}?|{_CASED[1]}{_SHORT}?|\p{{N}}{{1,3}}|{_CASED_END}"
_THREES = r"\d{1,3}(?=(?:\d{3})*\b)"  # digits of a number, counted from its end
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")


def _gpt2() -> PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _digits() -> PreTokenizer:
    """A pre-tokenizer that makes every digit its own piece."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _splits(*patterns: str) -> Callable[[], PreTokenizer]:
    def make() -> PreTokenizer:
        cuts: list[Any] = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
        return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return make


_KINDS: tuple[tuple[Callable[[], PreTokenizer], tuple[str, ...]], ...] = (
    (_gpt2, ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "gigachat", "mellum")),
    (_gpt2, ("a.x-4.0",)),
    (_digits, ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2")),
    (_splits(_LLAMA3), ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")),
    (_splits(_LLAMA3), ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe")),
    (_splits(_QWEN2), ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan")),
    (_splits(_QWEN2), ("solar-open", "grok-2")),
    (_splits(_QWEN35), ("qwen35",)),
    (_splits(_SEED), ("seed-coder",)),
    (_splits(_TEKKEN), ("tekken",)),
    (_splits(_GPT4O), ("gpt-4o", "llama4", "kanana2", "minimax-m2")),
    (_splits(_THREES, _GPT4O), ("tiny_aya",)),
    (_splits(*_DEEPSEEK_V3), ("deepseek-v3", "hunyuan-dense", "joyai-llm")),
    (_splits(*_DEEPSEEK_CODER), ("deepseek-coder",)),
)  # fmt: skip
CUTS = {name: make for make, names in _KINDS for name in names}
# Pre-tokenizers for which words that are tokens are not merged, and texts begin with the first special token unless the
# file says otherwise.
_WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
_COMPOSED = ("qwen2", "qwen35", "command-r")  # their tokenizers compose characters first (NFC)


def load(path: Path) -> tuple[Any, Tokenizer]:
    """(transformers' tokenizer, for special tokens and chat templates; the pipeline from text to ids and back).

    Raises ModelError where the file has no tokenizer, or one of an unknown kind."""
    from transformers import PreTrainedTokenizerFast

    pipeline, settings = _of_file(path)
    # transformers gets an empty pipeline, so that it does not change the added tokens of this one.
    empty = Tokenizer(BPE())
    return PreTrainedTokenizerFast(tokenizer_object=empty, name_or_path=str(path), **settings), pipeline


def _of_file(path: Path, *, ranked: bool = False) -> tuple[Tokenizer, dict[str, Any]]:
    """The pipeline and settings of a file, see `of_values`. Raises ModelError."""
    try:
        return of_values(values_of(read_header(path)), ranked=ranked)
    except ModelError as error:
        said = str(error)
        raise (error if said.startswith(str(path)) else ModelError(f"{path}: {said}")) from error


def write(path: Path, folder: Path) -> None:
    """Write a file's tokenizer as tokenizer.json and tokenizer_config.json in `folder`. Raises ModelError, also where a
    tokenizer.json cannot express how the file cuts text."""
    pipeline, settings = _of_file(path, ranked=True)
    pipeline.save(str(folder / "tokenizer.json"))
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


def values_of(header: Header) -> dict[str, Any]:
    """The file's name and the metadata of its tokenizer, with lists read. Keys are the last parts of the metadata's
    keys; keys of templates are whole."""
    found: dict[str, Any] = {_NAME: header.values.get(_NAME)}
    for key, value in header.values.items():
        if key.startswith("tokenizer."):
            name = key.removeprefix("tokenizer.ggml.")
            found[name] = value.read() if isinstance(value, Items) else value
    return found


def of_values(values: Mapping[str, Any], *, ranked: bool = False) -> tuple[Tokenizer, dict[str, Any]]:
    """The pipeline, and the settings (names of special tokens, chat templates). ranked: one that a tokenizer.json can
    express. Raises ModelError."""
    kind, tokens = values.get("model"), values.get("tokens")
    if kind not in _KNOWN or not isinstance(tokens, list) or not all(type(each) is str for each in tokens):
        what = "no tokens" if tokens is None else f"tokens of kind {kind!r}"
        raise ModelError(
            f"its tokenizer has {what}, and known are {', '.join(_KNOWN)}; pull the model's safetensors, which "
            "have a tokenizer.json"
        )
    _check_counts(values, tokens)
    ids = {name: token_id(values, name, len(tokens)) for name in _SPECIAL}
    special = {name: tokens[i] for name, i in ids.items() if i is not None and tokens[i]}
    pipeline = _byte_level(values, tokens) if kind == BYTE_LEVEL else _pieces(values, tokens, kind, ranked=ranked)
    _add_tokens(pipeline, values, tokens, special.get("bos") if _begins(values, kind) else None)
    settings: dict[str, Any] = {f"{name}_token": token for name, token in special.items()}
    if (templates := _templates(values)) is not None:
        settings["chat_template"] = templates
    return pipeline, settings


def _check_counts(values: Mapping[str, Any], tokens: list[str]) -> None:
    """Raises ModelError where a token occurs twice or counts differ. Empty tokens may repeat: no text contains them."""
    count, named = len(tokens), Counter(filter(None, tokens))
    if twice := [token for token, times in named.items() if times > 1]:
        raise ModelError(f"its tokenizer has one token twice, {twice[0]!r}; fetch it again")
    for key, what in (("scores", "scores"), ("token_type", "types")):
        found = values.get(key) or [0] * count
        if not isinstance(found, list) or len(found) < count or not all(type(each) in (int, float) for each in found):
            told = f"{len(found)} {what}" if isinstance(found, list) else f"no list of {what}"
            raise ModelError(f"its tokenizer has {count} tokens and {told}, not a number for each; fetch it again")


def _begins(values: Mapping[str, Any], kind: str) -> bool:
    """Whether texts begin with the first special token."""
    said = None if kind == MERGED_PIECES else values.get("add_bos_token")  # llama.cpp does not read it for these
    return (kind in (PIECES, MERGED_PIECES) or values.get("pre") in _WHOLE_WORDS) if said is None else bool(said)


def _templates(values: Mapping[str, Any]) -> str | dict[str, str] | None:
    prefix = "tokenizer.chat_template"
    named = {key.removeprefix(prefix + "."): text for key, text in values.items() if key.startswith(prefix + ".")}
    default = values.get(prefix)
    return default if not named else {**({} if default is None else {"default": default}), **named}


def _byte_level(values: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    pre = values.get("pre")
    if pre not in CUTS:
        named = "names no way to cut text (tokenizer.ggml.pre)" if pre in (None, "default") else f"cuts text as {pre!r}"
        raise ModelError(
            f"its tokenizer {named}, and other cuts would give other tokens; known are {', '.join(sorted(CUTS))}. "
            "Pull the model's safetensors, which have a tokenizer.json"
        )
    model = BPE(vocab=ids_of(tokens), merges=_merges(values, tokens), ignore_merges=pre in _WHOLE_WORDS)
    pipeline = Tokenizer(model)
    if pre in _COMPOSED:
        pipeline.normalizer = normalizers.NFC()
    pipeline.pre_tokenizer, pipeline.decoder = CUTS[pre](), decoders.ByteLevel()
    return pipeline


def _pieces(values: Mapping[str, Any], tokens: list[str], kind: str, *, ranked: bool) -> Tokenizer:
    if kind == MERGED_PIECES and "merges" not in values:
        raise ModelError("its tokenizer has no merges (tokenizer.ggml.merges); fetch it again")
    if kind == MERGED_PIECES:
        return pieces(values, tokens, _merges(values, tokens))
    return pieces(values, tokens, ranked_merges(values, tokens) if ranked else None)


def _merges(values: Mapping[str, Any], tokens: list[str]) -> list[tuple[str, str]]:
    """The merges of a file. Repeated pairs count once, at the first place. Pairs that form no token, or consist of
    none, are dropped. Raises ModelError."""
    merges, ids = dict[tuple[str, str], None](), ids_of(tokens)
    for merge in values.get("merges") or []:
        at = merge.find(" ", 1)
        if at < 0:
            raise ModelError(f"its tokenizer merges {merge!r}, which is no pair; fetch it again")
        left, right = merge[:at], merge[at + 1 :]
        if left in ids and right in ids and left + right in ids:
            merges[left, right] = None
    return list(merges)


def _add_tokens(pipeline: Tokenizer, values: Mapping[str, Any], tokens: list[str], begins: str | None) -> None:
    name, ends = str(values.get(_NAME)).lower(), end_texts(values, tokens)
    strips = any(part in name for part in _STRIPPING)
    added = []
    for token, kind in zip(tokens, values.get("token_type") or [NORMAL] * len(tokens), strict=False):
        special = kind in (CONTROL, UNKNOWN) or token in ends or token == begins
        if special or kind == USER_DEFINED:
            rstrip = strips and token not in _NOT_STRIPPING
            added.append(AddedToken(token, special=special, normalized=False, rstrip=rstrip))
    pipeline.add_tokens(added)
    if begins:
        pipeline.post_processor = processors.TemplateProcessing(
            single=[begins, "$A"], pair=None, special_tokens=[(begins, tokens.index(begins))]
        )
