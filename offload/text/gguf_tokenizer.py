"""Tokenizers of GGUF files, from their metadata."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE

from offload.config.gguf_header import Header, Items, read_header
from offload.config.gguf_tokens import CONTROL, NORMAL, PIECES, UNKNOWN, USER_DEFINED, end_texts, token_id
from offload.errors import ModelError
from offload.text.gguf_cuts import CUTS
from offload.text.gguf_pieces import ids_of, pieces, ranked_merges

BYTE_LEVEL, MERGED_PIECES = "gpt2", "gemma4"  # the `tokenizer.ggml.model` of these files
_KNOWN = (BYTE_LEVEL, PIECES, MERGED_PIECES)
_SPECIAL = ("bos", "eos")
_NAME = "general.name"
_STRIPPING = ("phi-3", "phi3")  # parts of names of models whose special tokens include the white space after them
_NOT_STRIPPING = ("<unk>", "<s>", "<|endoftext|>")
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
