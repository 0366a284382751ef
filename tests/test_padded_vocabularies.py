"""Padded vocabularies: models have more logits than their tokenizer has tokens, and none of the others is ever drawn,
proposed or fed to a model, however likely it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.asked import Asked, alone, together
from kit.models import TOKENIZER_SIZE, Sizes, random_model, save, tiny_plan
from kit.processor import OPERATORS, process_uses
from offload.decode.sampling import SamplingParams
from offload.engine.engine import Engine, load_tokenizer, plan_request
from offload.engine.request import GenerationRequest
from offload.plan.options import Options
from offload.weights.embedding import Embedding

PROMPT = [5 + at * at % 250 for at in range(300)]
OTHERS: dict[str, dict[str, Any]] = {
    "alone": {"speculation": False},
    "a draft": {"gamma": 3},
    "lookup": {"lookup": True},
    "itself, quantised": {"weight_bits": 4, "kv_bits": 4, "gamma": 3},
}


def padded(folder: Path, size: int, seed: int) -> Path:
    """A model whose padding has the largest logits of all."""
    model = random_model(
        seed=seed, vocab_size=size, max_position_embeddings=1024, hidden_size=64, intermediate_size=128, head_dim=16
    )
    with torch.no_grad():
        model.lm_head.weight[TOKENIZER_SIZE:] *= 50
    return save(model, folder, tokenizer=True)


@pytest.mark.parametrize("temperature", [0.0, 2.0])
@pytest.mark.parametrize("how", OTHERS)
def test_padding_is_never_said_nor_embedded(
    how: str, temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = padded(tmp_path / "target", 272, 0)
    draft = padded(tmp_path / "draft", 320, 1) if how == "a draft" else None
    seen, rows = set[int](), Embedding.rows

    def watched(self: Embedding, tokens: Tensor, out: Tensor | None = None) -> Tensor:
        seen.update(tokens.tolist())
        return rows(self, tokens, out)

    monkeypatch.setattr(Embedding, "rows", watched)
    sampling = SamplingParams(temperature=temperature, seed=3)
    options = Options(device="cpu", **OTHERS[how])
    plan = plan_request(target, draft, options, num_prompt_tokens=len(PROMPT), max_tokens=40)
    with Engine.load(plan, target, draft, load_tokenizer(target, draft)) as engine:
        steps = engine.generate(GenerationRequest(PROMPT, sampling, max_tokens=40))
        said = [token for step in steps for token in step.tokens]
    assert said
    assert max(said) < TOKENIZER_SIZE
    assert seen
    assert max(seen) < TOKENIZER_SIZE


@pytest.mark.parametrize("operators", OPERATORS)
def test_nor_is_it_said_where_sequences_share_passes(operators: str, tmp_path: Path) -> None:
    """In blocks of rows, too, as torch's operators run them; and alone in such blocks."""
    target = padded(tmp_path / "target", 272, 0)
    sampling = SamplingParams(temperature=2.0, seed=3)
    requests = [Asked(PROMPT[:num_tokens], sampling, 12) for num_tokens in (60, 41)]
    with process_uses(operators):
        plan = tiny_plan(target, None, Sizes(), num_prompt_tokens=60, max_tokens=12, num_sequences=2)
        with Engine.load(plan, target, None, load_tokenizer(target, None)) as engine:
            said = [*together(engine, requests)[0], alone(engine, requests[0])]
    assert [len(text) for text in said] == [12] * 3
    assert max(map(max, said)) < TOKENIZER_SIZE
