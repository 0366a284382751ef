"""A tiny pair of models whose matrices and heads are whole groups of codes, and engines of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kit.models import Sizes, changed, perturbed, random_model, save, tiny_engine, tiny_plan
from kit.processor import best
from offload.engine.engine import Engine
from offload.engine.prefix import OpenStore
from offload.metrics import LevelStats

SHAPES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "head_dim": 16}


DRAFTED = Sizes(gamma=6, draft_gamma=3, budget=64, chunk=16, window=32, any_rows=True, page=32, capacity=600)
PLAIN = replace(DRAFTED, gamma=0, draft_gamma=0)


def saved(root: Path, **sizes: int) -> tuple[Path, Path]:
    """Target and draft. The vocabulary is no whole number of tiles. sizes: others than SHAPES."""
    model = random_model("qwen2", vocab_size=264, seed=11, max_position_embeddings=1024, **{**SHAPES, **sizes})
    target = save(model, root / "target", tokenizer=True)
    return target, save(perturbed(model, 0.03), root / "draft", tokenizer=True)


def engine_of(
    folders: tuple[Path, Path],
    sizes: Sizes,
    *,
    prompt_tokens: int,
    ranks: int = 1,
    dtype: str = "bf16",
    offload: frozenset[str] = frozenset(),
    num_sequences: int = 1,
    open_store: OpenStore | None = None,
) -> Engine:
    """With the draft where `sizes` wants one. Skips where there are no kernels."""
    best()
    target, draft = folders
    wanted = draft if sizes.draft_gamma else None
    plan = tiny_plan(
        target, wanted, sizes, num_prompt_tokens=prompt_tokens, max_tokens=60, dtype=dtype, offload=offload,
        num_sequences=num_sequences,
    )  # fmt: skip
    return tiny_engine(changed(plan, num_devices=ranks), target, wanted, open_store)


def level_stats(engine: Engine, name: str) -> LevelStats:
    return next(level for level in engine.stats.levels if level.name == name)
