"""Attention to what an index chooses, as transformers has it, and what its cache keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kit.families import random_tiny, save_tiny
from kit.models import Sizes, load, random_tokens, target_cache
from kit.processor import OPERATORS, of
from test_parity import assert_same_logits, in_decoding, in_prefill

NAME = "qwen4_exp"
LENGTHS = (60, 61, 62, 63)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(NAME, tmp_path_factory.mktemp("indexed") / NAME)


def theirs(tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        found: Tensor = random_tiny(NAME)(torch.tensor([tokens])).logits[0]
    return found


@pytest.mark.parametrize("operators", OPERATORS)
@pytest.mark.parametrize("length", LENGTHS)
def test_beyond_the_budget_logits_are_those_of_transformers(folder: Path, length: int, operators: str) -> None:
    tokens = random_tokens(length)
    wanted, sizes = theirs(tokens), Sizes(capacity=length, rows=4, prefill_block=7, page=8, pages=2)
    decoder = load(folder, kernels=of(operators))
    assert_same_logits(in_prefill(decoder, target_cache(decoder, sizes), tokens, 7), wanted)
    assert_same_logits(in_decoding(decoder, target_cache(decoder, sizes), tokens, 5), wanted)
