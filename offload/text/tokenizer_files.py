"""Loading of the tokenizer of a model folder or GGUF file. It never runs remote code and never downloads.

A tokenizer.json alone decides the ids of a text: its normalizer, pre-tokenizer, model, added tokens and post-processor,
whatever class tokenizer_config.json names. tokenizer_config.json gives the names of special tokens and the chat
template. transformers' classes are not used: in version 5 they rebuild parts of the pipeline by the class's name.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import tokenizers

from offload.config.gguf_header import is_gguf
from offload.errors import ModelError
from offload.strict_json import read_json
from offload.text import gguf_tokenizer

MAX_FILE_BYTES = 1 << 26  # limit of a tokenizer's file; the largest published ones have half of it
FILE, CONFIG_FILE, ADDED_FILE = "tokenizer.json", "tokenizer_config.json", "added_tokens.json"
TEMPLATE_FILE, OLDER_TEMPLATE_FILE = "chat_template.jinja", "chat_template.json"
OLDER_FILES = (  # vocabulary files of folders without tokenizer.json
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt", "merges.txt"),
)
_ALL_FILES = (FILE, CONFIG_FILE, ADDED_FILE, *OLDER_FILES, TEMPLATE_FILE, OLDER_TEMPLATE_FILE)
# Special tokens of classes, where tokenizer_config.json names none.
_CLASS_TOKENS = {
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>"},
    "GPT2Tokenizer": {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
    "Qwen2Tokenizer": {"eos_token": "<|endoftext|>"},
}


def load(folder: Path) -> tuple[Any, tokenizers.Tokenizer]:
    """(transformers' tokenizer, for special tokens and chat templates; the pipeline from text to ids and back).

    Raises ModelError, and any error of the libraries for a damaged file.
    """
    if is_gguf(folder):
        return gguf_tokenizer.load(folder)
    if not any((folder / name).is_file() for name in (FILE, *OLDER_FILES)):
        raise ModelError(
            f"{folder} has no tokenizer: none of {FILE}, {', '.join(OLDER_FILES)} is there; copy it from where the "
            "model comes from"
        )
    for path in (folder / name for name in _ALL_FILES):
        if path.is_file():
            _check_file(path)
    inner, pipeline = _from_file(folder) if (folder / FILE).is_file() else _from_older_files(folder)
    if (folder / OLDER_TEMPLATE_FILE).is_file() and not (folder / TEMPLATE_FILE).is_file():
        inner.chat_template = _with_template(inner.chat_template, folder / OLDER_TEMPLATE_FILE)
    return inner, pipeline


def _with_template(others: object, path: Path) -> object:
    """The chat template of a processor's file at `path`, which takes precedence over tokenizer_config.json, as
    chat_template.jinja does over both. transformers' processors of text and images read it, its tokenizers do not."""
    template = read_json(path, max_bytes=MAX_FILE_BYTES).get("chat_template")
    if not isinstance(template, str):
        raise ModelError(f'{path} has no text "chat_template"; download it again')
    return {**others, "default": template} if isinstance(others, Mapping) else template


def _check_file(path: Path) -> None:
    """Raises PermissionError for an unreadable file, and ModelError for one that is too large: the libraries' own
    errors name neither."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size > MAX_FILE_BYTES:
            raise ModelError(f"{path} is over the limit of {MAX_FILE_BYTES} bytes; is it really a {path.name}?")


def _from_file(folder: Path) -> tuple[Any, tokenizers.Tokenizer]:
    from transformers import PreTrainedTokenizerFast

    pipeline = tokenizers.Tokenizer.from_file(str(folder / FILE))
    pipeline.no_truncation()
    pipeline.no_padding()
    settings = read_json(folder / CONFIG_FILE, max_bytes=MAX_FILE_BYTES) if (folder / CONFIG_FILE).is_file() else {}
    _check_ids(pipeline, folder / FILE)
    _add_declared(pipeline, settings, folder)
    # transformers gets an empty pipeline, so that it does not change the added tokens of this one.
    empty = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner = PreTrainedTokenizerFast.from_pretrained(
        str(folder), tokenizer_object=empty, local_files_only=True, trust_remote_code=False
    )
    for name, token in _CLASS_TOKENS.get(str(settings.get("tokenizer_class")).removesuffix("Fast"), {}).items():
        if name not in settings and getattr(inner, name) is None and pipeline.token_to_id(token) is not None:
            setattr(inner, name, token)
    return inner, pipeline


def _from_older_files(folder: Path) -> tuple[Any, tokenizers.Tokenizer]:
    """The tokenizer of vocab.json and merges.txt, or of tokenizer.model. transformers' class builds the pipeline, since
    the files do not describe the pre-tokenizer."""
    from transformers import AutoTokenizer

    inner = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    pipeline = getattr(inner, "backend_tokenizer", None)
    if pipeline is None:
        raise ModelError(
            f"{folder}: a {type(inner).__name__} has no {FILE}, which is needed; get one from whoever made the model, "
            "or from another version of it"
        )
    added = {str(token) for token in pipeline.get_added_tokens_decoder().values()}
    if pipeline.get_vocab().keys() <= added:  # a class that found none of its files has special tokens alone
        raise ModelError(f"{folder}: no file that a {type(inner).__name__} reads has tokens; {FILE} is needed")
    return inner, pipeline


def _check_ids(pipeline: tokenizers.Tokenizer, path: Path) -> None:
    """Raises ModelError where an added token's id differs from the file's: the library numbers added tokens from the
    highest id of the vocabulary, without gaps."""
    for token in _added_tokens(path):
        text, number = token["content"], token["id"]
        if pipeline.token_to_id(text) != number:
            raise ModelError(
                f"{path}: added token {text!r} has id {number}, but the tokenizers library makes it "
                f"{pipeline.token_to_id(text)}, as ids of added tokens follow each other; put {text!r} into the "
                "vocabulary of the file's model as well"
            )


def _add_declared(pipeline: tokenizers.Tokenizer, settings: Mapping[str, object], folder: Path) -> None:
    """Add the tokens of tokenizer_config.json, or else of added_tokens.json, that tokenizer.json does not have.

    Raises ModelError where they cannot have the declared ids. For all other tokens tokenizer.json decides."""
    declared, where = settings.get("added_tokens_decoder"), folder / CONFIG_FILE
    if declared is None and (folder / ADDED_FILE).is_file():
        where = folder / ADDED_FILE
        declared = {number: {"content": text, "normalized": False} for text, number in read_json(where).items()}
    tokens: list[tuple[int, dict[str, Any]]] = [(int(i), token) for i, token in cast(Any, declared or {}).items()]
    for number, token in sorted(tokens, key=lambda numbered: numbered[0]):
        text = token["content"]
        if pipeline.token_to_id(text) is not None:
            continue
        taken = pipeline.id_to_token(number)
        if taken is None:
            pipeline.add_tokens([tokenizers.AddedToken(**token)])
        if taken is not None or pipeline.token_to_id(text) != number:
            there = "no room there" if taken is None else f"{taken!r} there"
            raise ModelError(
                f"{where}: token {text!r} has id {number}, {FILE} does not know it and has {there}; save both files "
                "together again"
            )


def _added_tokens(path: Path) -> list[dict[str, Any]]:
    """The added tokens in a tokenizer.json. The rest is not parsed: it is large, and the library has read it."""
    text = path.read_text(encoding="utf-8")
    start = re.search(r'"added_tokens"\s*:\s*(?=\[)', text)
    return cast("list[dict[str, Any]]", json.JSONDecoder().raw_decode(text, start.end())[0]) if start else []
