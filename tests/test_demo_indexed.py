"""The lean model with an index that scripts/train_demo.py trains, on a small shape over random weights."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from offload.config.reading import read_config

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
from demo import export, settings
from demo.flash import Flash
from demo.indexed import Indexer, Part, with_index

TOKENIZER = Path(__file__).resolve().parent.parent / "triforce_cli" / "models" / "demo-target"
SHAPE = replace(
    settings.INDEXED, hidden=64, layers=4, heads=2, kv_heads=1, intermediate=16, shared=32, experts=4, period=2,
    key_heads=2, value_heads=4, state_dim=16, streams=3, rank=8, index_heads=8, index_dim=32, budget=16,
)  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Flash:
    torch.manual_seed(0)
    made = Flash(SHAPE)
    with torch.no_grad():
        for weight in made.parameters():
            weight += 0.1 * torch.randn_like(weight)
    return made


def test_an_exported_model_chooses_as_transformers_does(model: Flash, tmp_path: Path) -> None:
    """`export` compares logits of 128 tokens, of which a row attends to at most 19."""
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, tokenizer)
    export.export(model, tokenizer, tmp_path / "model")
    config = read_config(tmp_path / "model")
    assert config.indexer is not None
    assert config.indexer.most_blocks == 4
    assert config.growing == (1, 3)


def test_only_its_divergence_from_attention_trains_the_index(model: Flash) -> None:
    ids = torch.randint(settings.VOCAB_SIZE, (2, 81), generator=torch.Generator().manual_seed(0))
    model.train()
    losses, found = (model.loss, with_index(model)), list[dict[str, torch.Tensor]]()
    for loss in losses:
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss(ids).backward()
        found.append({name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None})
    assert {name for name, _ in model.named_parameters() if name not in found[0]} == {
        name for name in found[1] if "indexer" in name
    }
    assert all(grad.abs().max() > 0 for name, grad in found[1].items() if "indexer" in name)


def test_the_divergence_is_0_where_scores_are_the_masses_logarithms() -> None:
    """Of one head of one number, by which scores can be anything that is not negative."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 8, 4), torch.randn(1, 2, 8, 4)
    part = Part(q, k, torch.ones(1, 1, 8, 1), torch.zeros(1, 1, 2, 1), 0, 4)
    mass = part.mass(part.shares())
    of_last = mass[0, 7] / mass[0, 7].sum()
    fitted = replace(part, keys=(5 + of_last.log())[None, None, :, None])
    lost = [each.divergence(each.shares()) for each in (part, fitted)]
    assert part.hidden().tolist() == [[True, True]] * 3 + [[False, True]] * 4 + [[False, False]]
    assert lost[0] > 1e-4
    assert lost[1].abs() < 1e-6


def test_keys_are_those_of_whole_blocks() -> None:
    """A token behind the last whole block changes none; one within it changes its own alone."""
    torch.manual_seed(0)
    indexer, x = Indexer(SHAPE), torch.randn(1, 11, SHAPE.hidden)
    cos, sin = Flash(SHAPE).rope(11, torch.float32)
    before = indexer(x, cos, sin)[1]
    assert before.shape == (1, 1, 2, SHAPE.index_dim)
    for token, changed in ((9, [False, False]), (5, [False, True]), (0, [True, False])):
        other = x.clone()
        other[0, token] += 1
        assert (indexer(other, cos, sin)[1] != before).any(-1).flatten().tolist() == changed
