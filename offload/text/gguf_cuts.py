"""Pre-tokenizers of byte-level tokenizers in GGUF files, by the name that a file has of them.

The name, `tokenizer.ggml.pre`, stands for the pre-tokenizer in the tokenizer.json of the models with that name, as
llama.cpp's llama-vocab.cpp lists them; where the two differ, the models' own is meant. Unknown names are refused, since
a guess would silently give other tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

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
_NOT_HAN = tuple(pattern.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]") for pattern in _CASED)
_KIMI = rf"\p{{Han}}+|{_NOT_HAN[0]}{_SHORT}?|{_NOT_HAN[1]}{_SHORT}?|\p{{N}}{{1,3}}|{_END}"
_LINES = r"(?:\r?\n)+(?!\r?\n)"
_THREES = r"\d{1,3}(?=(?:\d{3})*\b)"  # digits of a number, counted from its end
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
_CASED_LETTERS = (  # of scripts with cases, but not all of them
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-"
    "\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-"
    "\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    "\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-"
    "\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_LLM = (
    _DEEPSEEK_CODER[0],
    rf"\s?[{_CASED_LETTERS}]+",
    r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    *_DEEPSEEK_CODER[3:],
)
_TRINITY = (
    # Digits by threes from the end of a number: in chunks of a multiple of three, which bounds the look ahead.
    r"\p{Nd}{1,510}(?=(?>\p{Nd}{510})*(?:\P{Nd}|$))|\G\p{Nd}{510}",
    r"\A\p{Nd}{1,2}(?=\p{Nd}{3}+\z)",
    r"\A\p{Nd}{3}|\G\p{Nd}{3}",
    # Scripts without spaces between words.
    r"[\u4e00-\u9fff\u3040-\u309f\u30a0-\u30ff\u3400-\u4dbf\uf900-\ufaff\uff65-\uff9f\u2f00-\u2fdf]+"
    r"|[\u0e00-\u0e7f]+|[\u0e80-\u0eff]+|[\u1780-\u17ff]+|[\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff]+"
    r"|[\uac00-\ud7af\u1100-\u11ff]+",
    _DEEPSEEK_V3[2],
)
_PHRASES = (  # letters with single spaces between them are one piece
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)


def _gpt2() -> PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _digits() -> PreTokenizer:
    """A pre-tokenizer that makes every digit its own piece."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _splits(*patterns: str, lines: bool = False) -> Callable[[], PreTokenizer]:
    """The function that makes a pre-tokenizer of patterns, one after the other. lines: first, a run of line ends begins
    a new piece."""

    def make() -> PreTokenizer:
        cuts: list[Any] = [pre_tokenizers.Split(Regex(_LINES), behavior="merged_with_next")] if lines else []
        cuts += [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
        return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return make


_KINDS: tuple[tuple[Callable[[], PreTokenizer], tuple[str, ...]], ...] = (
    (_gpt2, ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "gigachat", "mellum")),
    (_gpt2, ("a.x-4.0",)),
    (_digits, ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2")),
    (_splits(_LLAMA3), ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")),
    (_splits(_LLAMA3), ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe")),
    (_splits(_QWEN2), ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan")),
    (_splits(_QWEN2), ("solar-open", "grok-2", "bailingmoe", "bailingmoe2", "llada-moe")),
    (_splits(_QWEN35), ("qwen35",)),
    (_splits(_SEED), ("seed-coder",)),
    (_splits(_TEKKEN), ("tekken",)),
    (_splits(_GPT4O), ("gpt-4o", "llama4", "kanana2", "minimax-m2")),
    (_splits(_THREES, _GPT4O), ("tiny_aya", "cohere2moe")),
    (_splits(*_DEEPSEEK_V3), ("deepseek-v3", "hunyuan-dense", "joyai-llm")),
    (_splits(*_DEEPSEEK_CODER), ("deepseek-coder",)),
    (_splits(*_DEEPSEEK_LLM), ("deepseek-llm",)),
    (_splits(*_TRINITY), ("afmoe",)),
    (_splits(_QWEN2, lines=True), ("laguna",)),
    (_splits(_PHRASES), ("exaone-moe",)),
    (_splits(_KIMI), ("kimi-k2",)),
)  # fmt: skip
CUTS = {name: make for make, names in _KINDS for name in names}
