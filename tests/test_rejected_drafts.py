"""Logits after rejected drafts beside transformers', of families whose layers keep states, latents, windows or rows of
others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kit.families import random_tiny, save_tiny
from kit.models import Sizes, load, random_tokens, resident_rows, target_cache
from offload.model.level import Level
from offload.model.passes import forward
from test_parity import assert_same_logits

SIZES = Sizes(capacity=230, rows=4, prefill_block=32, page=16, pages=4)
LATENTS = ("glm4_moe_lite", "mistral4", "deepseek_v2", "deepseek_v3", "kimi_linear", "bailing_hybrid")
STATES = ("lfm2", "lfm2_moe", "lfm3", "nemotron_h", "granitemoehybrid", "falcon_h1", "qwen3_next", "qwen3_5_moe")
OTHERS = ("qwen4_exp, n-grams", "gemma4, inputs of layers", "laguna", "cohere2_moe", "afmoe", "minimax_m2")


@pytest.mark.few(4)
@pytest.mark.parametrize("drafts", [1, 3, 8, 64])
@pytest.mark.parametrize("name", [*LATENTS, *STATES, *OTHERS])
def test_logits_are_those_of_transformers(tmp_path: Path, name: str, drafts: int) -> None:
    """Rejections at every place in turn."""
    tokens, at = random_tokens(170), 66
    with torch.inference_mode():
        theirs = random_tiny(name)(torch.tensor([tokens])).logits[0]
    decoder = load(save_tiny(name, tmp_path))
    cache = target_cache(decoder, SIZES)
    decoder.prefill(cache, tokens[:at], resident_rows(decoder, 32))
    level, good = Level("target", decoder, cache, vocab_size=decoder.config.vocab_size, block=SIZES.block), 0
    while at + drafts < len(tokens) and good <= drafts:
        wrong = [(token + 1) % 50 for token in tokens[at + 1 + good : at + 1 + drafts]]
        logits = forward(level, [*tokens[at : at + 1 + good], *wrong], drafts + 1)[: good + 1]
        assert_same_logits(logits, theirs[at : at + 1 + good])
        at += 1 + good
        cache.truncate(at)
        good = (good + 1 + drafts // 16) % (drafts + 1)
