"""A widened model gives the logits of its source: every family, every kind of rotary scaling, every grouping of heads.

fp32 unless said. Tolerance: 1e-5 of the largest logit (sums run in another order).
"""

from __future__ import annotations

import json
import shutil
import sys
from collections import namedtuple
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from kit.models import FAMILIES, SMALL, Sizes, full_cache, load, random_model, random_tokens, resident_rows, save
from offload.config.config_json import config_of
from offload.config.reading import read_config
from offload.engine.engine import load_tokenizer
from offload.errors import DoesNotFit, ModelError, TriforceError, UsageError
from offload.weights.checkpoint import Checkpoint, check_model

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import widen

TOLERANCE = 1e-5
LENGTH = 61
PRETRAINED = 32  # positions; all scalings but "default" are shown beyond them
DEMO = Path(__file__).resolve().parent.parent / "triforce_cli" / "models" / "demo-target"
# No ratio to SMALL is a power of two, but for the heads of 8: neither factor is exact.
WIDE = {
    "hidden_size": 96, "num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 16,
    "intermediate_size": 80,
}  # fmt: skip
STRETCHED = {"original_max_position_embeddings": PRETRAINED, "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **STRETCHED}
# Name -> fields of config.json in the form of transformers 5 (rope_parameters) or of version 4 (rope_scaling).
ROPES: dict[str, dict[str, object]] = {
    "default": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "theta unnamed": {"rope_scaling": None},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}},
    "yarn": {"rope_parameters": {"rope_type": "yarn", "beta_fast": 4.0, "rope_theta": 500.0, **STRETCHED}},
    "yarn, old form": {"rope_theta": 500.0, "rope_scaling": {"type": "yarn", "finetuned": True, **STRETCHED}},
    "yarn, not truncated": {"rope_theta": 500.0, "rope_scaling": {"type": "yarn", "truncate": False, **STRETCHED}},
    "llama3": {"max_position_embeddings": 128, "rope_parameters": {"rope_theta": 500.0, **LLAMA3}},
    "llama3, old form": {"max_position_embeddings": 128, "rope_theta": 500.0, "rope_scaling": LLAMA3},
}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0}}


def small(folder: Path, family: str = "llama-gqa", rope: Mapping[str, object] = ROPES["default"], **fields) -> Path:
    """A tiny random model with the rotary fields `rope` in its config, in folder/narrow."""
    path = save(random_model(family, **fields), folder / "narrow")
    config = json.loads((path / "config.json").read_text())
    config.pop("rope_parameters", None)
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": PRETRAINED} | rope))
    return path


def widened(source: Path, dtype: torch.dtype = torch.float32, **sizes: int) -> Path:
    dest = source.parent / "wide"
    widen.widen(source, dest, WIDE | sizes, dtype)
    return dest


@torch.inference_mode()
def theirs(folder: Path, tokens: list[int], positions: Tensor | None = None) -> Tensor:
    """transformers' logits after each token [n, V], computed in fp32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    mask = torch.ones(1, len(tokens), dtype=torch.int64)  # else gaps in the positions read as packed sequences
    places = None if positions is None else positions[None]
    logits: Tensor = model(torch.tensor([tokens]), attention_mask=mask, position_ids=places).logits[0]
    return logits


@torch.inference_mode()
def ours(folder: Path, tokens: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Our engine's logits after each token [n, V]."""
    decoder = load(folder, dtype=dtype)
    cache = full_cache(decoder, Sizes(capacity=len(tokens), page=64))
    rows = resident_rows(decoder, 64)
    decoder.prefill(cache, tokens, rows)
    return decoder.logits(rows.rows).float()


def error(logits: Tensor, expected: Tensor) -> float:
    """The largest difference, over the largest logit."""
    assert logits.shape == expected.shape
    return float((logits - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("family", [family for family in FAMILIES if "qwen3" not in family])
def test_every_family_keeps_its_logits(tmp_path: Path, family: str) -> None:
    source, tokens = small(tmp_path, family), random_tokens(LENGTH)
    expected, wide = theirs(source, tokens), widened(source)
    assert not read_config(wide).tie_embeddings, "the models imitated have a head of their own"
    assert error(theirs(wide, tokens), expected) <= TOLERANCE
    assert error(ours(wide, tokens), expected) <= TOLERANCE


@pytest.mark.few(8)
@pytest.mark.parametrize("head_dim", [8, 12, 16, 24])
@pytest.mark.parametrize("rope", ROPES)
def test_every_rotary_scaling_turns_larger_heads_as_it_turns_the_small_ones(
    tmp_path: Path, rope: str, head_dim: int
) -> None:
    source, tokens = small(tmp_path, rope=ROPES[rope]), random_tokens(LENGTH)
    wide, expected = widened(source, head_dim=head_dim), ours(source, tokens)
    assert error(ours(wide, tokens), expected) <= TOLERANCE
    assert error(theirs(wide, tokens), expected) <= TOLERANCE


def test_dynamic_scaling_needs_heads_of_the_same_size(tmp_path: Path) -> None:
    source, tokens = small(tmp_path, rope=DYNAMIC), random_tokens(LENGTH)
    expected, wide = theirs(source, tokens), widened(source, head_dim=8)
    assert error(theirs(wide, tokens), expected) <= TOLERANCE
    assert error(ours(wide, tokens), expected) <= TOLERANCE
    with pytest.raises(UsageError, match=r"dynamic RoPE rotates heads of 16 unlike heads of 8; .*2 times as"):
        widen.widen(source, tmp_path / "larger", WIDE, torch.float32)


GROUPS = {  # heads of the source, of the wide model; (query heads, KV heads)
    "6 groups of 1 into 8 of 1": ((6, 6), (8, 8)),
    "6 groups of 1 into 8 of 4": ((6, 6), (32, 8)),
    "3 groups of 3 into 8 of 4": ((9, 3), (32, 8)),
    "3 groups of 3 into 32 of 1": ((9, 3), (32, 32)),
    "2 groups of 4 into 4 of 3": ((8, 2), (12, 4)),
    "2 groups of 4 into 7 of 3": ((8, 2), (21, 7)),
    "1 group of 4 into 1 of 4": ((4, 1), (4, 1)),
}


@pytest.mark.parametrize(("narrow", "wide"), GROUPS.values(), ids=GROUPS)
def test_every_query_head_keeps_its_kv_head(tmp_path: Path, narrow: tuple[int, int], wide: tuple[int, int]) -> None:
    fields = {"hidden_size": 8 * narrow[0], "num_attention_heads": narrow[0], "num_key_value_heads": narrow[1]}
    source, tokens = small(tmp_path, **fields), random_tokens(LENGTH)
    folder = widened(source, num_attention_heads=wide[0], num_key_value_heads=wide[1])
    assert error(ours(folder, tokens), ours(source, tokens)) <= TOLERANCE


@torch.inference_mode()
def test_repeated_layers_and_heads_attend_like_those_they_repeat(tmp_path: Path) -> None:
    """Otherwise all chunks of those layers and heads had the same mass, and retrieval would fetch nothing for them."""
    folder = widened(small(tmp_path), hidden_size=120, num_attention_heads=10, num_key_value_heads=5)
    weights = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    of_layer = [0, 0, 0, 1, 1]
    for name in ("q_proj", "k_proj", "v_proj"):
        rows = [weights[f"model.layers.{index}.self_attn.{name}.weight"] for index in range(5)]
        assert all(torch.equal(rows[index], rows[of_layer.index(layer)]) for index, layer in enumerate(of_layer))
        assert not torch.equal(rows[2], rows[3])
        heads = rows[0].unflatten(0, (5, -1))  # by KV head
        assert torch.equal(heads[4], heads[0])
        assert heads.flatten(1).any(1).all()
    used = [bool(weights[f"model.layers.{index}.self_attn.o_proj.weight"].any()) for index in range(5)]
    assert used == [False, False, True, False, True]


def test_the_demo_target_keeps_its_logits_also_far_beyond_its_pretrained_length(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 512, "num_hidden_layers": 10, "num_attention_heads": 8, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 768,
    }  # fmt: skip
    source, dest, tokens = DEMO, tmp_path / "wide", random_tokens(100, vocabulary=4096)
    widen.widen(source, dest, sizes, torch.float32)
    assert error(ours(dest, tokens), ours(source, tokens)) <= TOLERANCE
    positions = torch.arange(100) * 320  # up to 31,680; pretrained were 2048
    expected = theirs(source, tokens, positions)
    assert error(theirs(dest, tokens, positions), expected) <= TOLERANCE
    assert error(theirs(dest, tokens), expected) > 1e-2, "the positions must matter"


def test_bf16_rounds_norms_and_queries_once_more(tmp_path: Path) -> None:
    """So logits are close but not equal. Computed in fp32, from a source whose weights are bf16 as well."""
    tokens = random_tokens(200, vocabulary=4096)
    sizes = dict(zip(widen.FLAGS, (512, 8, 6, 6, 128, 640), strict=True))
    widen.widen(DEMO, tmp_path / "wide", sizes, torch.bfloat16)
    logits, expected = ours(tmp_path / "wide", tokens), ours(DEMO, tokens)
    assert 1e-4 < error(logits, expected) <= 1e-2
    assert (logits.argmax(-1) == expected.argmax(-1)).float().mean() >= 0.98


def test_bf16_rounds_nothing_where_both_ratios_are_powers_of_four(tmp_path: Path) -> None:
    source, tokens = small(tmp_path), random_tokens(LENGTH)
    rounded = save(random_model().bfloat16(), tmp_path / "rounded")
    shutil.copy(source / "config.json", rounded)
    wide = widened(rounded, torch.bfloat16, hidden_size=128, head_dim=32)
    assert error(ours(wide, tokens), ours(rounded, tokens)) <= TOLERANCE


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [("llama2-7b", 6_738_415_616), ("llama2-13b", 13_015_864_320), ("llama-3.1-8b", 8_030_261_248)],
)
def test_the_sizes_imitated_have_the_published_number_of_parameters(name: str, num_parameters: int) -> None:
    config = config_of(
        {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, **widen.LIKE[name]}
    )
    assert config.num_parameters() == num_parameters


def command(source: Path, dest: Path, *more: str) -> list[str]:
    sizes = [word for key, flag in widen.FLAGS.items() for word in (flag, str(WIDE[key]))]
    return [str(source), str(dest), *sizes, *more]


def test_the_command_writes_a_whole_folder_and_says_its_bytes(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source = save(random_model(), tmp_path / "narrow", tokenizer=True)
    dest = tmp_path / "new" / "wide"
    dest.mkdir(parents=True)
    widen.main(command(source, dest, "--like", "llama2-7b", "--dtype", "fp16"))
    captured = capsys.readouterr()
    # 96 * (4 * 96 + 3 * 80 + 2) * 5 layers + 96 * (2 * 96 + 1) outside them, 2 bytes each
    assert "the wide model: 638 kB of weights, 1.92 kB of KV per token" in captured.out
    assert "llama2-7b in the same dtype: 13.5 GB of weights, 524 kB of KV per token" in captured.out
    assert captured.err.splitlines()[-1] == "7 of 7 files"
    config = read_config(dest)
    with Checkpoint.open(dest) as checkpoint:
        check_model(checkpoint, config)
        assert {checkpoint.dtype(name) for name in checkpoint.names()} == {torch.float16}
    assert (config.dtype, config.vocab_size) == ("float16", SMALL["vocab_size"])
    assert load_tokenizer(dest, None).encode("abc") == load_tokenizer(source, None).encode("abc")
    assert [path.name for path in dest.parent.iterdir()] == ["wide"]


REFUSED: dict[str, tuple[str, dict[str, int], type[TriforceError], str]] = {
    "narrower": ("llama-gqa", {"hidden_size": 31}, UsageError, "--hidden is 31; .*at least 32"),
    "shallower": ("llama-gqa", {"num_hidden_layers": 1}, UsageError, "--layers is 1; .*at least 2"),
    "smaller heads": ("llama-gqa", {"head_dim": 6}, UsageError, "--head-dim is 6; .*at least 8"),
    "smaller MLP": ("llama-gqa", {"intermediate_size": 47}, UsageError, "--intermediate is 47; .*at least 48"),
    "no heads": ("llama-gqa", {"num_key_value_heads": 0}, UsageError, "--kv-heads is 0; .*at least 1"),
    "uneven": ("llama-gqa", {"num_key_value_heads": 4}, ModelError, "num_key_value_heads is 4; .*divisor"),
    "huge theta": ("llama-gqa", {"head_dim": 64}, ModelError, "heads of 64 instead of 8: .*rope_theta is 3.9.*"),
    "few KV heads": (
        "llama-gqa", {"num_attention_heads": 3, "num_key_value_heads": 3}, UsageError,
        "4 query heads over 2 KV heads need 4 KV heads of 1; the wide model has 3",
    ),
    "q/k norms": ("qwen3", {}, ModelError, "qwen3 cannot be widened, only llama"),
}  # fmt: skip


@pytest.mark.parametrize(("family", "sizes", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_with_numbers(
    tmp_path: Path, family: str, sizes: dict[str, int], kind: type[TriforceError], message: str
) -> None:
    source = small(tmp_path, family)
    with pytest.raises(kind, match=message):
        widened(source, **sizes)
    assert list(tmp_path.iterdir()) == [source]


def test_weights_beyond_fp16_are_refused_and_nothing_stays(tmp_path: Path) -> None:
    model = random_model()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = 1e5
    source = save(model, tmp_path / "narrow")
    with pytest.raises(ModelError, match=r"layers.1.mlp.up_proj.weight has weights beyond the range of torch.float16"):
        widened(source, torch.float16)
    assert list(tmp_path.iterdir()) == [source]


def test_a_full_disk_or_a_folder_in_use_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = small(tmp_path)
    with pytest.raises(UsageError, match="exists and is not an empty folder"):
        widen.widen(source, source, WIDE, torch.float32)
    (tmp_path / "wide.partial").mkdir()
    with pytest.raises(UsageError, match=r"wide.partial is left from an interrupted run"):
        widened(source)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(widen.shutil, "disk_usage", lambda path: usage(2**20, 2**20 - 4096, 4096))
    with pytest.raises(DoesNotFit, match=r"needs 1.28 MB of disk, 4.10 kB are free"):
        widened(source)


def test_the_command_ends_in_a_message_and_an_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for arguments, exit_code, message in (
        ([str(tmp_path), str(tmp_path / "wide"), "--hidden", "64"], 2, "--layers, --heads, --kv-heads, --head-dim"),
        (command(tmp_path / "none", tmp_path / "wide"), 4, "there is no folder"),
        (command(small(tmp_path), tmp_path / "narrow" / "config.json" / "wide"), 1, "config.json"),
    ):
        with pytest.raises(SystemExit) as caught:
            widen.main(arguments)
        assert caught.value.code == exit_code
        assert message in capsys.readouterr().err
