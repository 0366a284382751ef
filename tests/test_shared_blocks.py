"""Blocks that several sequences share: every row is in one of them, once, and each sequence gets its own back."""

from __future__ import annotations

import random

import pytest
import torch

from offload.kernels.rows import Blocks
from offload.model.shared_blocks import SharedBlocks

CPU = torch.device("cpu")


@pytest.mark.parametrize("sizes", [(16,), (1, 4, 8), (2, 8, 32)])
@pytest.mark.parametrize("seed", range(20))
def test_each_sequence_gets_its_rows_back_and_padding_that_is_its_own(sizes: tuple[int, ...], seed: int) -> None:
    chance, blocks = random.Random(seed), Blocks(sizes)
    counts = [chance.randint(1, 40) for _ in range(chance.randint(2, 8))]
    found = SharedBlocks.of(counts, blocks, CPU)
    assert found.sizes == blocks.cut(sum(counts))
    rows = torch.randn(sum(found.sizes), 3)
    apart = found.apart(rows).split([blocks.padded(count) for count in counts])
    for own, rest in zip(rows[: sum(counts)].split(counts), apart, strict=True):
        assert torch.equal(rest[: len(own)], own)
        assert torch.equal(rest[len(own) :], own[-1:].expand(len(rest) - len(own), -1))
    again = found.joined(torch.cat(apart))
    assert again.shape == rows.shape
    assert torch.equal(again[: sum(counts)], rows[: sum(counts)])
    assert torch.equal(again[sum(counts) :], rows[:1].expand(len(rows) - sum(counts), -1))


def test_as_many_sequences_share_a_block_as_fit() -> None:
    """A GPU's blocks have 16 rows: 16 sequences of one row each, or two that verify 8, read every weight once."""
    blocks = Blocks((16,))
    assert SharedBlocks.of([1] * 16, blocks, CPU).sizes == [16]
    assert SharedBlocks.of([8, 8], blocks, CPU).sizes == [16]
    assert SharedBlocks.of([8, 9], blocks, CPU).sizes == [16, 16]
