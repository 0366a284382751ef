"""The tokenizer of a GGUF file, as tokenizer.json. How byte-level ones cut text before merges the file only names.

The name is `tokenizer.ggml.pre`. What each stands for is a fact of the models that have it: the pre-tokenizers of their
tokenizer.json, which llama.cpp's llama-vocab.cpp lists. A name that is not here is refused, since a guess gives other
tokens without a word.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import PreTokenizer

from offload.errors import ModelError

BYTE_LEVEL = "gpt2"  # the `tokenizer.ggml.model` of these files
_CONTROL, _USER_DEFINED = 3, 4  # types of tokens
_END = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_CASED_END = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_END}"
_QWEN2 = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_END}"
_SEED = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_CASED_END}"
_GPT4O = rf"{_CASED[0]}{_SHORT}?|{_CASED[1]}{_SHORT}?|\p{{N}}{{1,3}}|{_CASED_END}"
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
    """Every digit is a piece of its own."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _splits(*patterns: str) -> Callable[[], PreTokenizer]:
    def make() -> PreTokenizer:
        cuts: list[Any] = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
        return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return make


_KINDS: tuple[tuple[Callable[[], PreTokenizer], tuple[str, ...]], ...] = (
    (_gpt2, ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "gigachat", "mellum")),
    (_digits, ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2")),
    (_splits(_LLAMA3), ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")),
    (_splits(_LLAMA3), ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe")),
    (_splits(_QWEN2), ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan")),
    (_splits(_QWEN2), ("solar-open", "grok-2")),
    (_splits(_SEED), ("seed-coder",)),
    (_splits(_TEKKEN), ("tekken",)),
    (_splits(_GPT4O), ("gpt-4o", "llama4", "kanana2", "minimax-m2")),
    (_splits(*_DEEPSEEK_V3), ("deepseek-v3", "hunyuan-dense", "joyai-llm")),
    (_splits(*_DEEPSEEK_CODER), ("deepseek-coder",)),
)  # fmt: skip
CUTS = {name: make for make, names in _KINDS for name in names}
# Words that are tokens are taken whole, and a text begins with the first special token unless the file says otherwise.
_WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
_COMPOSED = ("qwen2", "command-r")  # their tokenizers compose characters first (NFC)


def write(reader: Any, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json of a GGUFReader's file with byte-level tokens.

    Raises ModelError where the file names no way to cut text, or one that is not known."""
    values = _Values(reader)
    pre = values.get("pre")
    if pre not in CUTS:
        named = "names no way to cut text (tokenizer.ggml.pre)" if pre in (None, "default") else f"cuts text as {pre!r}"
        raise ModelError(
            f"its tokenizer {named}, and other cuts would give other tokens; known are {', '.join(sorted(CUTS))}. "
            "Pull the model's safetensors, which have a tokenizer.json"
        )
    tokens: list[str] = values.get("tokens")
    special = {name: tokens[i] for name in ("bos", "eos") if (i := values.get(f"{name}_token_id")) is not None}
    settings: dict[str, object] = {f"{name}_token": token for name, token in special.items()}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if (template := values.get("chat_template", "tokenizer.")) is not None:
        settings["chat_template"] = template
    add_bos = values.get("add_bos_token")
    begins = special.get("bos") if (pre in _WHOLE_WORDS if add_bos is None else add_bos) else None
    _pipeline(values, tokens, pre, begins).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


def set_space(reader: Any, folder: Path) -> None:
    """In the tokenizer.json of a SentencePiece vocabulary: put no space before a text where the file says so, which
    transformers does not read."""
    if _Values(reader).get("add_space_prefix") is not False:
        return
    pipeline = Tokenizer.from_file(str(folder / "tokenizer.json"))
    pipeline.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    pipeline.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    pipeline.save(str(folder / "tokenizer.json"))


class _Values:
    """Metadata of a GGUFReader's tokenizer, by the end of the key; None where there is none."""

    def __init__(self, reader: Any) -> None:
        self._fields = reader.fields

    def get(self, key: str, prefix: str = "tokenizer.ggml.") -> Any:
        field = self._fields.get(prefix + key)
        return None if field is None else field.contents()


def _pipeline(values: _Values, tokens: list[str], pre: str, begins: str | None) -> Tokenizer:
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        raise ModelError("its tokenizer has one token twice; fetch it again")
    merges: list[tuple[str, str]] = []
    for merge in values.get("merges") or ():
        at = merge.index(" ", 1)
        merges.append((merge[:at], merge[at + 1 :]))
    pipeline = Tokenizer(BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _WHOLE_WORDS))
    if pre in _COMPOSED:
        pipeline.normalizer = normalizers.NFC()
    pipeline.pre_tokenizer, pipeline.decoder = CUTS[pre](), decoders.ByteLevel()
    kinds = list(zip(tokens, values.get("token_type") or (), strict=False))
    control = [AddedToken(token, special=True, normalized=False) for token, kind in kinds if kind == _CONTROL]
    pipeline.add_special_tokens(control)
    pipeline.add_tokens([AddedToken(token, normalized=False) for token, kind in kinds if kind == _USER_DEFINED])
    if begins is not None:
        pipeline.add_special_tokens([AddedToken(begins, special=True, normalized=False)])
        pipeline.post_processor = processors.TemplateProcessing(
            single=[begins, "$A"], pair=None, special_tokens=[(begins, vocabulary[begins])]
        )
    return pipeline
