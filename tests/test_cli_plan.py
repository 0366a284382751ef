"""`triforce plan`: known models on assumed cards, what does not fit, and JSON; from config.json alone."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

LLAMA = {
    "model_type": "llama", "vocab_size": 32000, "rms_norm_eps": 1e-5, "torch_dtype": "float16", "hidden_act": "silu",
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
YARN = {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "finetuned": True}
TARGET = LLAMA | {
    "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40,
    "max_position_embeddings": 4096, "rope_scaling": YARN,
}  # fmt: skip
DRAFT = LLAMA | {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 2, "num_attention_heads": 12,
    "max_position_embeddings": 2048,
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders 13b and 68m with nothing but a config.json."""
    folder = tmp_path_factory.mktemp("configs")
    for name, config in (("13b", TARGET), ("68m", DRAFT)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder


def run(models: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "triforce_cli", "plan", "--model", str(models / "13b"), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def planned(models: Path, *args: str) -> dict[str, object]:
    done = run(models, "--draft", str(models / "68m"), "--json", *args)
    assert (done.returncode, done.stderr) == (0, "")
    return dict(json.loads(done.stdout)["plan"])


def test_a_13b_model_at_120k_on_two_cards_and_on_one(models: Path) -> None:
    """Two cards hold the weights and stream the cache; one streams weights too, and says what would end that."""
    two = planned(models, "--context", "120000", "--gpus", "2")
    assert (two["offload"], two["resident_layers"]) == (["kv"], 40)
    assert sum(two["device_bytes"].values()) <= 24e9  # type: ignore[attr-defined]
    assert two["predicted"]["seconds_per_token"] < 0.2 * two["predicted"]["plain_seconds_per_token"]  # type: ignore[index]
    one = planned(models, "--context", "120000", "--gpus", "1")
    assert one["offload"] == ["kv", "weights"]
    assert 0 < one["resident_layers"] < 40  # type: ignore[operator]
    assert any("low-bit" in note for note in one["notes"])  # type: ignore[attr-defined]


def test_it_answers_in_under_a_second_without_torch(models: Path) -> None:
    began = time.perf_counter()
    program = (
        "import sys; from triforce_cli.app import main; "
        f"code = main(['plan', '--model', {str(models / '13b')!r}, '--gpus', '2', '--json']); "
        "sys.exit(code or ('torch' in sys.modules) * 99)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert time.perf_counter() - began < 5  # a loaded machine; alone it is a quarter of a second


def test_the_report_names_tiers_residency_levels_and_predictions(models: Path) -> None:
    done = run(models, "--draft", str(models / "68m"), "--context", "120000", "--gpus", "2")
    assert (done.returncode, done.stderr) == (0, "")
    for part in (
        "13b, 120,000 tokens (256 of them new), fp16, on 2 x RTX 4090", "typical rates", "each device",
        "40 of 40 layers", "of 600 tiles of 8,192 tokens", "draft -> retrieval -> target", "without speculation",
        "tokens a full pass",
    ):  # fmt: skip
        assert part in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_what_does_not_fit_exits_3_with_the_nearest_changes_that_would(models: Path) -> None:
    done = run(models, "--context", "120000", "--gpus", "1", "--host-memory", "64")
    assert (done.returncode, done.stdout) == (3, "")
    assert "GB of host memory, 64 GB are free" in done.stderr
    context = int(done.stderr.split("largest context that fits is ")[1].split()[0])
    memory = done.stderr.split(" GB of free host memory")[0].split()[-1]
    assert run(models, "--context", str(context), "--gpus", "1", "--host-memory", "64").returncode == 0
    assert run(models, "--context", "120000", "--gpus", "1", "--host-memory", memory).returncode == 0
    assert run(models, "--context", str(context + 1), "--gpus", "1", "--host-memory", "64").returncode == 3
    less = str(int(memory) - 1)
    assert run(models, "--context", "120000", "--gpus", "1", "--host-memory", less).returncode == 3


def test_a_card_named_by_its_memory_and_its_link_is_planned_for(models: Path) -> None:
    large = planned(models, "--context", "32000", "--gpus", "1", "--gpu-memory", "80")
    assert large["offload"] == []
    slow = planned(models, "--context", "120000", "--gpus", "2", "--link-gbps", "12.5", "--no-speculation")
    fast = planned(models, "--context", "120000", "--gpus", "2", "--link-gbps", "25", "--no-speculation")
    ratio = slow["predicted"]["seconds_per_token"] / fast["predicted"]["seconds_per_token"]  # type: ignore[index]
    assert ratio == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("--gpus", "3"), "gpus is 3, it must be 1, 2, 4 or 8"),
        (("--gpus", "1", "--gpu-memory", "-1"), "gpu-memory is -1.0"),
        (("--gpus", "1", "--link-gbps", "0"), "link-gbps is 0.0"),
        (("--gpus", "1", "--context", "100", "--max-tokens", "100"), "max-tokens is 100"),
    ],
)
def test_silly_machines_are_refused_by_name(models: Path, args: tuple[str, ...], named: str) -> None:
    done = run(models, *args)
    assert (done.returncode, done.stdout) == (2, "")
    assert named in done.stderr
