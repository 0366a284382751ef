"""Our logits are transformers' logits: every family, every kind of rotary scaling, prefill, decoding and both mixed.

fp32, the same weights read from the same folder. Tolerance: 1e-4 of the largest logit (sums run in another order).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from kit.models import FAMILIES, LateLink, Sizes, full_cache, load, random_model, random_tokens, resident_rows, save
from kit.processor import OPERATORS, of
from offload.config.rope import Rope
from offload.kv import Cache
from offload.model.decoder import Decoder
from offload.model.level import Level
from offload.model.passes import Pass, forward

TOLERANCE = 1e-4
LENGTH = 45
PRETRAINED = 32  # positions; all scalings but "default" are shown beyond them
THETA = 500.0
# Name -> fields of config.json in the form of transformers 5 (rope_parameters) or of version 4 (rope_scaling).
ROPES: dict[str, dict[str, object]] = {
    "default": {"max_position_embeddings": 128, "rope_parameters": {"rope_type": "default", "rope_theta": THETA}},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": THETA}},
    # transformers stretches to the length of the forward, we to the capacity: they agree where these are equal
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": THETA}},
    "yarn": {
        "max_position_embeddings": 4 * PRETRAINED,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": PRETRAINED, "rope_theta": THETA,
            "beta_fast": 4.0, "beta_slow": 1.0,
        },
    },
    "yarn, old form": {
        "max_position_embeddings": 4 * PRETRAINED,
        "rope_theta": THETA,
        "rope_scaling": {
            "type": "yarn", "factor": 4.0, "original_max_position_embeddings": PRETRAINED, "finetuned": True,
        },
    },
    "llama3": {
        "max_position_embeddings": 4 * PRETRAINED,
        "rope_parameters": {
            "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": PRETRAINED, "rope_theta": THETA,
        },
    },
}  # fmt: skip
SIZES = Sizes(capacity=LENGTH, rows=4, prefill_block=7, page=8, pages=2)


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, rope = request.param
    path = save(random_model(family), tmp_path_factory.mktemp("model"))
    config = json.loads((path / "config.json").read_text())
    config.pop("rope_parameters", None)
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": PRETRAINED} | ROPES[rope]))
    return path


EVERY = [  # in an order in which the first few are of each family, and of each kind of positions
    pytest.param((family, rope), id=f"{family}, {rope}")
    for first in range(len(ROPES))
    for family, rope in zip(FAMILIES, islice(cycle(ROPES), first, None), strict=False)
]


@torch.inference_mode()
def reference(folder: Path, tokens: list[int]) -> Tensor:
    """transformers' logits after each token: [n, V]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def assert_same_logits(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max()) <= TOLERANCE * float(theirs.abs().max())


@torch.inference_mode()
def in_prefill(
    decoder: Decoder, cache: Cache, tokens: list[int], prefill_block: int, together: int | None = None
) -> Tensor:
    """The logits of all rows of one forward in phase "prefill". together: rows over which experts run at once."""
    parts = list[Tensor]()
    rows = resident_rows(decoder, prefill_block, together)
    decoder.prefill(cache, tokens, rows, on_hidden=lambda start, x: parts.append(x.clone()))
    return decoder.logits(torch.cat(parts))


def in_decoding(decoder: Decoder, cache: Cache, tokens: list[int], step: int) -> Tensor:
    """The logits of all rows, `step` tokens to a forward of padded rows, every second one run wrongly first."""
    level = Level("target", decoder, cache, vocab_size=decoder.config.vocab_size, block=SIZES.block)
    logits = []
    for start in range(0, len(tokens), step):
        some = tokens[start : start + step]
        if start // step % 2:
            length = cache.length
            forward(level, [*some[:1], 0, 1, 2, 3, 4, 5], 1)
            cache.truncate(length)
        logits.append(forward(level, some, len(some)))
    return torch.cat(logits)


@pytest.mark.few(7)
@pytest.mark.parametrize("operators", OPERATORS)
@pytest.mark.parametrize("folder", EVERY, indirect=True)
def test_prefill_decoding_and_both_mixed_give_the_logits_of_transformers(folder: Path, operators: str) -> None:
    tokens = random_tokens(LENGTH)
    theirs, decoder = reference(folder, tokens), load(folder, kernels=of(operators))
    assert_same_logits(in_prefill(decoder, full_cache(decoder, SIZES), tokens, SIZES.prefill_block), theirs)
    assert_same_logits(in_decoding(decoder, full_cache(decoder, SIZES), tokens, 5), theirs)
    link = LateLink(late_in=True, late_out=True)
    mixed = full_cache(decoder, SIZES, link=link)
    decoder.prefill(mixed, tokens[:16], resident_rows(decoder, 7))
    parts = [in_decoding(decoder, mixed, tokens[16:22], 3)]
    parts.append(in_prefill(decoder, mixed, tokens[22:41], 9))
    parts.append(in_decoding(decoder, mixed, tokens[41:], 1))
    assert_same_logits(torch.cat(parts), theirs[16:])


@pytest.mark.few(4)
@pytest.mark.parametrize("operators", OPERATORS)
@pytest.mark.parametrize("folder", [(family, "default") for family in FAMILIES], indirect=True, ids=FAMILIES)
def test_sequences_of_any_lengths_in_one_pass_give_the_logits_of_transformers(folder: Path, operators: str) -> None:
    """More rows together, and in one of them, than the kernels take where torch's operators would do, too."""
    decoder = load(folder, kernels=of(operators))
    sizes, rows = replace(SIZES, capacity=256), (3, 90, 1)
    texts = [random_tokens(21 + count, seed=count) for count in rows]
    caches = [full_cache(decoder, sizes) for _ in texts]
    for cache, text in zip(caches, texts, strict=True):
        decoder.prefill(cache, text[:21], resident_rows(decoder, 7))
    sizes = {"vocab_size": decoder.config.vocab_size, "block": SIZES.block}
    levels = [Level("target", decoder, cache, **sizes) for cache in caches]
    asked = [Pass(level, text[21:], len(text) - 21) for level, text in zip(levels, texts, strict=True)]
    levels[0].run(asked)
    for text, [ours] in zip(texts, (each.made for each in asked), strict=True):
        assert_same_logits(ours, reference(folder, text)[21:])


@pytest.mark.parametrize("folder", [("llama-mha", rope) for rope in ROPES], indirect=True, ids=ROPES)
def test_another_token_or_another_scaling_is_far_outside_the_tolerance(folder: Path) -> None:
    tokens = random_tokens(LENGTH)
    theirs, decoder = reference(folder, tokens), load(folder)
    changed = [*tokens[:3], tokens[3] + 1, *tokens[4:]]
    plain = Decoder(decoder.config.changed(rope=Rope(theta=THETA)), decoder.weights)
    runs = [in_prefill(decoder, full_cache(decoder, SIZES), changed, SIZES.prefill_block)]
    if decoder.config.rope.kind != "default":
        runs.append(in_prefill(plain, full_cache(plain, SIZES), tokens, SIZES.prefill_block))
    for ours in runs:
        assert float((ours - theirs)[-1].abs().max()) > 20 * TOLERANCE * float(theirs.abs().max())


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": PRETRAINED, "rope_theta": THETA}
ABSENT = object()
# What a config says in another way than usual, and transformers runs. Contexts are shorter than 256 tokens.
WRITTEN: list[tuple[str, dict[str, object]]] = [
    ("llama-gqa", {"hidden_act": "swish", "num_experts_per_tok": 0, "use_sliding_window": True, "torch_dtype": "half"}),
    ("llama-gqa", {"rms_norm_eps": ABSENT, "max_position_embeddings": ABSENT, "rope_parameters": ABSENT}),
    ("llama-mha", {"num_key_value_heads": ABSENT, "head_dim": ABSENT, "eos_token_id": -1}),
    ("mistral", {"attention_bias": True, "mlp_bias": True, "sliding_window": 256}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2, "layer_types": ABSENT}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 256, "max_window_layers": 0, "layer_types": ABSENT}),
    ("qwen2", {"attention_bias": False, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2, "layer_types": ABSENT}),
    ("llama-gqa", {"rope_parameters": {**YARN, "mscale": 0, "mscale_all_dim": 0.7}}),
    ("llama-gqa", {"rope_parameters": {**YARN, "mscale": 2.0, "mscale_all_dim": 0.7}}),
    ("llama-gqa", {"rope_parameters": {**YARN, "beta_fast": 0, "beta_slow": 0, "truncate": None}}),
    ("llama-gqa", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": THETA}}),
    ("llama-gqa", {"rope_parameters": {**YARN, "factor": None}}),
    ("llama-gqa", {"rope_scaling": {**YARN, "type": "yarn"}, "rope_parameters": YARN}),
]  # fmt: skip


def written(folder: Path, family: str, changes: dict[str, object]) -> Path:
    """A random model with another config.json."""
    save(random_model(family), folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    content = {key: value for key, value in config.items() if value is not ABSENT}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def assert_runs_as_in_transformers(folder: Path) -> None:
    tokens = random_tokens(LENGTH)
    theirs, decoder = reference(folder, tokens), load(folder)
    assert_same_logits(in_prefill(decoder, full_cache(decoder, SIZES), tokens, SIZES.prefill_block), theirs)


@pytest.mark.parametrize(("family", "changes"), WRITTEN, ids=[f"{name}-{'-'.join(more)}" for name, more in WRITTEN])
def test_configs_mean_what_they_mean_to_transformers(tmp_path: Path, family: str, changes: dict[str, object]) -> None:
    """Bug: these were refused, as if they changed the arithmetic."""
    assert_runs_as_in_transformers(written(tmp_path, family, changes))


def test_kv_heads_that_mistral_does_not_name_are_eight(tmp_path: Path) -> None:
    model = random_model("mistral", num_attention_heads=8, num_key_value_heads=8)
    save(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "num_key_value_heads"}))
    assert_runs_as_in_transformers(tmp_path)


HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
STORED: dict[str, tuple[str, Callable[[str], str]]] = {
    "the head alone": ("llama-tied", lambda name: HEAD if name == EMBEDDINGS else name),
    "without the body's prefix": ("qwen3-tied", lambda name: name.removeprefix("model.")),
    "with a value head": ("llama-gqa", lambda name: name),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("stored", STORED)
def test_weights_mean_what_they_mean_to_transformers(tmp_path: Path, stored: str, dtype: torch.dtype) -> None:
    family, name_of = STORED[stored]
    save(random_model(family), tmp_path)
    tensors = {name_of(name): tensor.to(dtype) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    if stored == "with a value head":
        tensors |= {"v_head.summary.weight": torch.ones(1, 32), "v_head.summary.bias": torch.ones(1)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_runs_as_in_transformers(tmp_path)


def test_a_real_model_gives_the_logits_of_transformers() -> None:
    root = os.environ.get("TRIFORCE_TEST_MODELS")
    if not root or not (Path(root) / "SmolLM2-135M-Instruct").is_dir():
        pytest.skip("TRIFORCE_TEST_MODELS names no folder with SmolLM2-135M-Instruct in it")
    folder = Path(root) / "SmolLM2-135M-Instruct"
    text = "The river Rhine rises in the Swiss Alps and flows north. Its largest tributaries are the Aare, the"
    tokens = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    theirs, decoder = reference(folder, tokens), load(folder)
    sizes = replace(SIZES, capacity=64, page=16)
    cache = full_cache(decoder, sizes)
    assert_same_logits(in_prefill(decoder, cache, tokens[:10], 7), theirs[:10])
    assert_same_logits(in_decoding(decoder, cache, tokens[10:], 5), theirs[10:])
