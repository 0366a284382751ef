"""`triforce plan`: known models on assumed GPUs, what does not fit, and JSON; from config.json alone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.families import save_tiny
from kit.planned import Plans
from kit.terminals import Terminal
from offload.formats.layout import CACHED_SHARE
from offload.machine import machine_name
from offload.speed.hardware import rates_key
from offload.speed.rates import RTX_4090, TWO_CORES, save_rates
from offload.units import size
from test_cli_fake import ROOT, environment, play
from test_doctor import pretend_gpus
from triforce_cli.ground.text import duration, latency

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
LLAMA = {
    "model_type": "llama", "vocab_size": 32000, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "hidden_act": "silu",
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


@pytest.fixture(scope="module", autouse=True)
def _the_same_is_planned_once() -> Iterator[None]:
    """Most of these commands ask for one that another asked for."""
    with pytest.MonkeyPatch.context() as patch:
        Plans().keep(patch)
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders 13b and 68m with nothing but a config.json."""
    folder = tmp_path_factory.mktemp("configs")
    for name, config in (("13b", TARGET), ("68m", DRAFT)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder


class Plan:
    """`triforce plan` of the 13B model."""

    def __init__(self, models: Path, triforce: Callable[..., tuple[int, str, str]]) -> None:
        self.models, self._triforce = models, triforce

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Without a draft; in this process."""
        return subprocess.CompletedProcess(args, *self._triforce("plan", "--model", str(self.models / "13b"), *args))

    def text(self, *args: str) -> str:
        done = self.run("--draft", str(self.models / "68m"), *args)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    def document(self, *args: str) -> dict[str, Any]:
        return dict(json.loads(self.text("--json", *args)))

    def planned(self, *args: str) -> dict[str, Any]:
        return dict(self.document(*args)["plan"])

    def report(self, *args: str) -> list[str]:
        """Lines of the report, each with single spaces."""
        return [" ".join(line.split()) for line in self.text(*args).splitlines()]


@pytest.fixture
def plan(models: Path, triforce: Callable[..., tuple[int, str, str]]) -> Plan:
    return Plan(models, triforce)


def test_a_13b_model_at_120k_on_two_gpus_and_on_one(plan: Plan) -> None:
    """Two GPUs hold quantised copies of weights and cache, one of weights alone; the exact ones stream."""
    two = plan.planned("--context", "120000", "--gpus", "2")
    assert two["placement"]["offload"] == ["kv", "weights"]
    assert (two["composition"]["weight_bits"], two["composition"]["kv_bits"]) == (6, 4)
    assert (two["placement"]["link_bits"], two["placement"]["weight_link_bits"]) == (9, 8)
    assert sum(two["placement"]["device_bytes"].values()) <= 24e9
    assert two["predicted"]["seconds_per_token"] < 0.2 * two["predicted"]["plain_seconds_per_token"]
    one = plan.planned("--context", "120000", "--gpus", "1")
    assert one["placement"]["offload"] == ["kv", "weights"]
    assert one["placement"]["resident_layers"] < 40
    assert (one["placement"]["link_bits"], one["placement"]["weight_link_bits"]) == (12, 8)
    assert one["composition"]["weight_bits"] == 6
    assert any("cross the link in every full pass" in note for note in one["notes"])


def test_it_answers_without_torch(plan: Plan) -> None:
    program = (
        "import sys; from triforce_cli.app import main; "
        f"code = main(['plan', '--model', {str(plan.models / '13b')!r}, '--gpus', '2', '--gamma', '7', '--json']); "
        "sys.exit(code or ('torch' in sys.modules) * 99)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0


def test_the_report_names_tiers_residency_levels_and_predictions(plan: Plan) -> None:
    done = plan.run("--draft", str(plan.models / "68m"), "--context", "120000", "--gpus", "2")
    assert (done.returncode, done.stderr) == (0, "")
    for part in (
        "13b, 120,000 tokens (256 of them new), bf16, on 2 x RTX 4090", "typical rates", "rank 0", "rank 1",
        "1 of 40 layers", "0 of 600 tiles of 8,192 tokens", "prefill", "draft -> self -> target", "without speculation",
        "tokens a full pass", "sums over the ranks",
    ):  # fmt: skip
        assert part in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


SPECULATION = pytest.mark.parametrize("given", [("--no-speculation",), ()], ids=["without speculation", ""])


@pytest.mark.few(1)
@SPECULATION
def test_what_does_not_fit_exits_3_with_the_nearest_changes_that_would(plan: Plan, given: tuple[str, ...]) -> None:
    gpu = ("--gpus", "1", *given)
    done = plan.run("--context", "120000", *gpu, "--host-memory", "64")
    assert (done.returncode, done.stdout) == (3, "")
    assert "GB of host memory, 64 GB are free" in done.stderr
    context = int(done.stderr.split("largest context that fits is ")[1].split()[0])
    memory = done.stderr.split(" GB of free host memory")[0].split()[-1]
    assert plan.run("--context", str(context), *gpu, "--host-memory", "64").returncode == 0
    assert plan.run("--context", "120000", *gpu, "--host-memory", memory).returncode == 0
    assert plan.run("--context", str(context + 1), *gpu, "--host-memory", "64").returncode == 3
    less = str(int(memory) - 1)
    assert plan.run("--context", "120000", *gpu, "--host-memory", less).returncode == 3


def test_a_gpu_named_by_its_memory_and_its_link_is_planned_for(plan: Plan) -> None:
    large = plan.planned("--context", "32000", "--gpus", "1", "--gpu-memory", "80")
    assert large["placement"]["offload"] == []
    slow = plan.planned("--context", "120000", "--gpus", "2", "--link-gbps", "12.5", "--no-speculation")
    fast = plan.planned("--context", "120000", "--gpus", "2", "--link-gbps", "25", "--no-speculation")
    ratio = slow["predicted"]["seconds_per_token"] / fast["predicted"]["seconds_per_token"]
    assert ratio == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("--gpus", "3"), "gpus is 3, it must be 1, 2, 4 or 8"),
        (("--gpus", "1", "--gpu-memory", "-1"), "gpu-memory is -1.0"),
        (("--gpus", "1", "--link-gbps", "0"), "link-gbps is 0.0"),
        (("--gpus", "1", "--context", "100", "--max-tokens", "100"), "max-tokens is 100"),
        (("--gpus", "1", "--context", "100", "--fit"), "--fit looks for the longest context and --context says 100"),
        pytest.param(("--gpu-memory", "24"), "this machine has none; add --gpus 1", marks=WITHOUT_GPU),
        pytest.param(("--host-gbps", "24"), "host-gbps is about GPUs and this machine has none", marks=WITHOUT_GPU),
        (("--gpus", "2", "--host-gbps", "0"), "host-gbps is 0.0"),
        (("--gpus", "2", "--host-gbps", "42", "--device", "cpu"), "host-gbps is about GPUs and --device is cpu"),
        (("--gpus", "1", "--gpu-memory", "24", "--device", "cpu"), "gpu-memory is about GPUs and --device is cpu"),
    ],
)
def test_silly_machines_are_refused_by_name(plan: Plan, args: tuple[str, ...], named: str) -> None:
    done = plan.run(*args)
    assert (done.returncode, done.stdout) == (2, "")
    assert named in done.stderr


def test_gpus_that_cannot_share_a_model_are_refused(plan: Plan) -> None:
    """As `generate` refuses them: 12 heads, in eight parts."""
    done = plan.run("--model", str(plan.models / "68m"), "--gpus", "8", "--context", "1000")
    assert (done.returncode, done.stdout) == (2, "")
    assert "gpus is 8, and 12 heads" in done.stderr
    assert "--gpus may be 1, 2, 3, 4, 6" in done.stderr
    assert plan.run("--model", str(plan.models / "68m"), "--gpus", "4", "--context", "1000").returncode == 0


class TestReport:
    def test_every_byte_is_in_the_table_and_they_add_up(self, plan: Plan) -> None:
        args = ("--context", "120000", "--gpus", "1")
        found, lines = plan.planned(*args), plan.report(*args)
        device, host = found["placement"]["device_bytes"], found["placement"]["host_bytes"]
        for name in device | host:
            shown = " ".join(size(tier[name]) if name in tier else "-" for tier in (device, host))
            assert any(line.startswith(f"{name} {shown}") for line in lines), name
        assert f"all {size(sum(device.values()))} {size(sum(host.values()))}" in lines
        assert "free 24.0 GB 128 GB" in lines
        layers, crossing = host["target layers"], found["predicted"]["full_link_bytes"]
        assert f"streams {size(layers)} of target layers and {size(crossing - layers)} of kv cache a full pass" in lines
        assert "link 12 of the cache's 16 bits and 8 of the weights', none is lost" in lines
        share = round(100 * sum(host.values()) / 128e9)
        (bar,) = [line for line in lines if line.startswith("host [")]
        assert bar.endswith(f"] {share}%")
        assert bar.count("#") == round(40 * sum(host.values()) / 128e9)

    def test_predictions_stand_beside_plain_decoding(self, plan: Plan) -> None:
        args = ("--context", "120000", "--gpus", "1")
        predicted, lines = plan.planned(*args)["predicted"], plan.report(*args)
        own, plain = predicted["seconds_per_token"], predicted["plain_seconds_per_token"]
        assert f"first token {duration(predicted['first_token_seconds'])}" in lines
        assert any(line.startswith(f"a token {latency(own)} {latency(plain)} ") for line in lines)
        assert any(f"{plain / own:.1f} times as long" in line for line in lines)
        plain_lines = plan.report(*args, "--no-speculation")
        assert f"a token {latency(plain)}" in plain_lines
        assert "predicted plain" in plain_lines

    def test_a_processor_has_one_memory(self, plan: Plan) -> None:
        done = plan.run("--model", str(plan.models / "68m"), "--context", "1000", "--device", "cpu", "--offload", "kv")
        assert (done.returncode, done.stderr) == (0, "")
        assert "memory  " in done.stdout
        assert "the same" in next(line for line in done.stdout.splitlines() if line.startswith("free"))

    def test_rates_are_called_typical_given_or_measured(self, plan: Plan, tmp_path: Path, monkeypatch: Any) -> None:
        """A link that was only assumed was called measured, and one that the user gave was called typical."""
        gpu = ("--gpus", "1", "--context", "120000", "--no-speculation")
        assert "link 25.0 GB/s, device memory 1,000 GB/s (typical rates)" in plan.report(*gpu)
        given = "link 12.0 GB/s (given), device memory 1,000 GB/s (typical)"
        assert given in plan.report(*gpu, "--link-gbps", "12")
        here = ("--model", str(plan.models / "68m"), "--device", "cpu", "--no-speculation")
        monkeypatch.setenv("TRIFORCE_CACHE_DIR", str(tmp_path))
        assert any("(typical rates)" in line for line in plan.report(*here))
        rates = {"to_device": 7e9, "device_read": 9e9}
        save_rates(machine_name(), {rates_key("cpu"): replace(TWO_CORES, **rates)})
        assert "link 7.00 GB/s, device memory 9.00 GB/s (measured rates)" in plan.report(*here)
        given = "link 1.00 GB/s (given), device memory 9.00 GB/s (measured)"
        assert given in plan.report(*here, "--link-gbps", "1")
        origin = plan.document(*here, "--link-gbps", "1")["hardware"]["origin"]
        assert origin == {"link": "given", "host": "measured", "others": "measured"}

    def test_each_rank_has_its_bytes(self, plan: Plan) -> None:
        """Head and draft are on the first of two; each pins half of the host's bytes and moves half of what streams."""
        args = ("--context", "120000", "--gpus", "2")
        found, lines = plan.document(*args), plan.report(*args)
        placement, first, second = found["plan"]["placement"], *found["ranks"]
        device, other, host = (placement[name] for name in ("device_bytes", "other_device_bytes", "host_bytes"))
        for name in device | other | host:
            shown = " ".join(size(tier[name]) if name in tier else "-" for tier in (device, other, host))
            assert any(line.startswith(f"{name} {shown}") for line in lines), name
        assert [rank["device_bytes"] for rank in (first, second)] == [sum(device.values()), sum(other.values())]
        assert [rank["rank"] for rank in (first, second)] == [0, 1]
        assert first["host_bytes"] == second["host_bytes"] == sum(host.values()) // 2
        assert f"each rank {size(first['host_bytes'])}" in lines
        crossing = size(second["full_link_bytes"])
        streams = f"streams {size(host['target layers'])} of target layers and"
        assert any(line.startswith(streams) and line.endswith("of kv cache a full pass,") for line in lines)
        assert f"{crossing} over each link" in lines
        moved = host["target layers"] + CACHED_SHARE[9] * 120_000 * 2 * 2 * 40 * 5120
        assert 2 * second["full_link_bytes"] == pytest.approx(moved, rel=0.03)
        shares = [round(100 * rank["device_bytes"] / 24e9) for rank in (first, second)]
        bars = [line for line in lines if line.startswith("rank") and "[" in line]
        assert [line.split()[-1] for line in bars] == [f"{share}%" for share in shares]
        four = ("--context", "120000", "--gpus", "4", "--no-speculation")
        assert any("ranks 1-3" in line for line in plan.report(*four))
        assert len(plan.document(*four)["ranks"]) == 4
        assert "over each link" not in plan.text("--context", "120000", "--gpus", "1")

    def test_the_memory_of_the_host_slows_the_links_of_several(self, plan: Plan) -> None:
        args = ("--context", "120000", "--gpus", "2", "--no-speculation")
        free, slow = plan.document(*args), plan.document(*args, "--host-gbps", "42")
        assert (free["hardware"]["link_rate"], slow["hardware"]["link_rate"]) == (25e9, 21e9)
        assert slow["hardware"]["origin"] == {"link": "typical", "host": "given", "others": "typical"}
        ratio = slow["plan"]["predicted"]["seconds_per_token"] / free["plan"]["predicted"]["seconds_per_token"]
        assert ratio == pytest.approx(25 / 21)
        assert "host memory slows each link to 21.0 GB/s (given)" in plan.report(*args, "--host-gbps", "42")
        assert "host memory slows" not in plan.text(*args)
        one = plan.document("--context", "120000", "--gpus", "1", "--host-gbps", "20")
        assert one["hardware"]["link_rate"] == 20e9
        fast = plan.document(*args, "--link-gbps", "50")["hardware"]
        assert (fast["rates"]["to_device"], fast["link_rate"]) == (50e9, 36e9)

    @pytest.mark.parametrize(
        "args", [(), pytest.param(("--link-gbps", "12.5"), marks=pytest.mark.deep), ("--host-gbps", "42")]
    )
    def test_what_the_documents_say_of_two_gpus_is_what_it_says(self, plan: Plan, args: tuple[str, ...]) -> None:
        found = plan.document("--context", "120000", "--gpus", "2", *args)
        predicted, link = found["plan"]["predicted"], found["hardware"]["link_rate"] / 1e9
        moved = f"{found['ranks'][0]['full_link_bytes'] / 1e9:.1f} GB"
        names = ("full_pass_seconds", "seconds_per_token", "plain_seconds_per_token")
        times = " | ".join(latency(predicted[name]) for name in names)
        rows = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8").splitlines()
        assert any(f"| {link:g} GB/s" in row and f"{moved} | {times} |" in row for row in rows)
        rows = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8").splitlines()
        own, plain = times.split(" | ")[1:]
        assert any(f"| {duration(predicted['first_token_seconds'])} | {own}" in row and plain in row for row in rows)

    def test_gpus_of_this_machine_are_planned_for_as_they_were_measured(
        self, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pretend_gpus(monkeypatch, 2)
        monkeypatch.setenv("TRIFORCE_CACHE_DIR", str(tmp_path))
        measured = replace(RTX_4090, to_device=20e9, to_host=20e9, links=30e9)
        save_rates(machine_name(), {rates_key("cuda:0"): measured})
        two = ("--context", "60000", "--gpus", "2", "--no-speculation")
        found = plan.document(*two, "--device", "cuda", "--host-memory", "128")
        assert (found["hardware"]["device_name"], found["hardware"]["num_devices"]) == ("RTX", 2)
        assert found["hardware"]["link_rate"] == found["plan"]["placement"]["link_bytes_per_second"] == 15e9
        assert set(found["hardware"]["origin"].values()) == {"measured"}
        one = ("--context", "30000", "--gpus", "1", "--device", "cuda", "--no-speculation")
        changed = plan.document(*one, "--host-memory", "128", "--host-gbps", "10")
        assert changed["hardware"]["link_rate"] == 10e9
        assert plan.document(*two)["hardware"]["device_name"] == "RTX 4090"

    def test_processes_on_a_cpu_share_it(self, plan: Plan) -> None:
        here = ("--model", str(plan.models / "68m"), "--device", "cpu", "--context", "1000", "--no-speculation")
        two = plan.document(*here, "--gpus", "2")
        assert (two["plan"]["request"]["device"], two["plan"]["request"]["num_devices"]) == ("cpu", 2)
        one = plan.document(*here, "--gpus", "1")
        assert one["plan"] == plan.planned(*here)


class TestFit:
    @pytest.mark.deep
    def test_it_plans_the_longest_context_that_fits(self, plan: Plan) -> None:
        machine = ("--gpus", "1", "--host-memory", "64")
        found = plan.document(*machine, "--fit")
        longest = found["fit"]["longest_context"]
        assert found["plan"]["request"]["capacity"] == longest
        assert found["fit"]["limit"] == 131072
        draft = ("--draft", str(plan.models / "68m"))
        assert plan.run(*draft, *machine, "--context", str(longest)).returncode == 0
        assert plan.run(*draft, *machine, "--context", str(longest + 1)).returncode == 3
        assert any(
            f"longest context that fits (the model knows {131072:,})" in line for line in plan.report(*machine, "--fit")
        )

    def test_it_goes_no_further_than_the_model(self, plan: Plan) -> None:
        args = ("--gpus", "2", "--fit")
        assert plan.document(*args)["fit"] == {"longest_context": 131072, "limit": 131072}
        assert "this is the longest context that fits (as long as the model knows)" in plan.report(*args)

    def test_nothing_fits_exits_3(self, plan: Plan) -> None:
        done = plan.run("--gpus", "1", "--host-memory", "1", "--fit", "--no-speculation")
        assert (done.returncode, done.stdout) == (3, "")
        assert "no context fits; take a smaller one, 'triforce start' lists some" in done.stderr


class TestScreen:
    """In forks of this process, which have its plans."""

    @pytest.fixture
    def arguments(self, plan: Plan) -> list[str]:
        plan.text("--context", "120000", "--gpus", "2")
        names = ("--model", str(plan.models / "13b"), "--draft", str(plan.models / "68m"))
        return ["plan", *names, "--context", "120000", "--gpus", "2"]

    @staticmethod
    def terminal(arguments: list[str], *, columns: int = 80, **variables: str) -> Terminal:
        def begin() -> None:
            play(arguments, environment(**variables), stand_in=False)

        return Terminal(["true"], env={}, rows=70, columns=columns, begin=begin)

    @pytest.mark.few(1)
    @pytest.mark.parametrize("columns", [60, 80])
    def test_it_fits_the_terminal(
        self, plan: Plan, arguments: list[str], columns: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        terminal = self.terminal(arguments, columns=columns)
        assert terminal.finish() == 0
        bar = next(line for line in terminal.lines if line.startswith("rank 1       ["))
        assert bar.endswith("%")
        token = next(line for line in terminal.lines if line.startswith("a token"))
        assert token.split()[2:7] == ["69.5", "ms", "1.23", "s", "without"]
        assert "\x1b[1m" in terminal.written  # headings are bold
        assert "\x1b[32m" in terminal.written
        monkeypatch.setenv("COLUMNS", str(columns))
        assert terminal.shown.splitlines() == plan.text(*arguments[-4:]).splitlines()  # nothing was wrapped
        terminal.close()

    def test_without_colour_where_none_is_wanted(self, arguments: list[str]) -> None:
        terminal = self.terminal(arguments, NO_COLOR="1")
        assert terminal.finish() == 0
        assert "a token" in terminal.shown
        assert "\x1b[32m" not in terminal.written
        assert "\x1b[33m" not in terminal.written
        terminal.close()

    def test_a_pipe_gets_the_same_80_columns_without_codes_whatever_the_terminal(self, models: Path) -> None:
        """In processes of their own, for the locale."""
        names = ("--model", str(models / "13b"), "--draft", str(models / "68m"))
        sizes = ("--gpus", "1", "--context", "99000", "--gamma", "7", "--draft-gamma", "2", "--weight-bits", "6")
        said = {
            subprocess.run(
                [sys.executable, "-m", "triforce_cli", "plan", *names, *sizes],
                env=environment(**variables),
                cwd=ROOT,
                capture_output=True,
                check=True,
            ).stdout
            for variables in ({}, {"TERM": "dumb", "LC_ALL": "C"})
        }
        (text,) = said
        assert b"\x1b" not in text
        lines = text.decode("ascii").splitlines()
        assert max(map(len, lines)) <= 80
        assert lines == [line.rstrip() for line in lines]
        assert any(line.startswith("note") for line in lines)  # which says what streams


def test_plan_says_what_is_read_from_the_file_of_a_mixture_larger_than_memory(
    tmp_path: Path, triforce: Callable[..., tuple[int, str, str]]
) -> None:
    folder = save_tiny("qwen3_moe", tmp_path / "model", hidden_size=512, moe_intermediate_size=1024)
    words = ["plan", "--model", str(folder), "--draft", "none", "--gpus", "1", "--offload", "weights"]
    words += ["--context", "200"]
    code, out, _ = triforce(*words, "--max-tokens", "20", "--host-memory", "0.1")
    assert code == 0
    assert re.search(r"target experts .* of each layer's 8 experts, the others in the file", " ".join(out.split()))
    assert re.search(r"experts .* a token from the model.s file \(.* at 2\.50* GB/s, assumed\)", " ".join(out.split()))
    code, out, _ = triforce(*words, "--max-tokens", "20")
    assert code == 0
    assert "file" not in out
