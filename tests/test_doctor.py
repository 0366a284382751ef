"""`triforce doctor`: what it measures and keeps, what it says, and what it advises."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from offload import machine
from offload.bench import checks, measure
from offload.bench import diagnosis as roof
from offload.bench.checks import Check
from offload.bench.diagnosis import Diagnosis, Gpu, GpuRates, LinkRates, Processor, Record, Software
from offload.kernels import cpu
from offload.machine import KERNELS, Driver, Machine, Pcie, machine_name
from offload.plan import what_if
from offload.plan.what_if import CONTEXTS, MODELS, Expectation, expectations
from offload.speed import hardware as probing
from offload.speed.hardware import RTX_4090, TWO_CORES, Hardware, Rates, probe, rates_key
from offload.speed.rates import FOLDER_VARIABLE, load_rates, rates_file, save_rates, typical
from offload.transfer.link import PacedLink
from triforce_cli.app import main
from triforce_cli.render import doctor as render_doctor
from triforce_cli.render.advice import advice
from triforce_cli.screen.output import Output
from triforce_cli.setup.choice import embedded_model

GIB = 2**30
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
ONE_MODEL = {"Llama-3.1-8B": MODELS["Llama-3.1-8B"]}
MEASURED = Rates(1e9, 2e9, 3e9, 4e9, 5e9, measured=True)

LAPTOP = Diagnosis(
    machine=Machine(
        system="Linux-6.8",
        processor="Some laptop's CPU",
        features=("avx2",),
        num_cores=8,
        host_bytes=16 * GIB,
        host_free_bytes=12 * GIB,
        memlock_bytes=8 << 20,
        numa_nodes=(0,),
        usable_numa_nodes=(0,),
    ),
    processor=Processor(
        num_threads=4,
        busy_share=0.01,
        fast_bf16=False,
        read=40e9,
        weights_read=30e9,
        link=LinkRates(9e9, 10e9, 14e9),
        bf16_flops=2e9,
        fp32_flops=300e9,
    ),
    gpus=(),
    together=None,
    driver=None,
    software=Software("3.12.1", "2.13.0+cpu", None, "5.23.0", "torch products", None, "avx2"),
)
CHECKS = [
    Check("cpu", "copies", "4 rounds of 64 MiB came back as they were", "", 0.1),
    *(Check("cpu", f"attention, {model}, bf16", "errors of 4e-03", "", 0.5) for model in ("13B", "8B")),
]
WRONG = Check("cpu", "attention, 13B, fp32", "errors of 2e-01, at most 2e-05", "use another path", 0.5)
X16 = Pcie("0000:01:00.0", generation=4, width=16, max_generation=4, max_width=16, numa_node=0)
GPU = Gpu(
    device="cuda:0",
    name="NVIDIA GeForce RTX 4090",
    compute_capability="8.9",
    total_bytes=24 * GIB,
    free_bytes=23 * GIB,
    pcie=X16,
    peers=(),
    rates=GpuRates(read=0.95e12, weights_read=0.9e12, link=LinkRates(25e9, 26e9, 45e9), flops=160e12),
)
DRIVER = Driver("570.86", "12.8", (GPU.name,))
BOX = replace(
    LAPTOP,
    machine=replace(LAPTOP.machine, memlock_bytes=None, host_bytes=128 * GIB, host_free_bytes=120 * GIB),
    processor=replace(LAPTOP.processor, fast_bf16=True, bf16_flops=900e9),
    gpus=(GPU,),
    driver=DRIVER,
    software=replace(LAPTOP.software, torch="2.13.0", torch_cuda="12.8"),
)
X8 = replace(X16, width=8)
SLOW = replace(GPU, pcie=X8, rates=GpuRates(0.95e12, 0.9e12, LinkRates(13e9, 13e9, 24e9), 160e12))
TWO_ON_X8 = replace(
    BOX, gpus=(SLOW, replace(SLOW, device="cuda:1", peers=("cuda:0",))), together=LinkRates(25e9, 25.5e9, 46e9)
)


def with_gpu(**changes: Any) -> Diagnosis:
    return replace(BOX, gpus=(replace(GPU, **changes),))


@pytest.fixture
def rates_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this test's rates."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, rates_folder: Path) -> Mock:
    """Measures little, in a fraction of a second, and plans for one model. Returns what times passes of models."""
    monkeypatch.setattr(what_if, "MODELS", ONE_MODEL)
    monkeypatch.setattr(checks, "check_device", lambda hardware, target, draft, on_step: [])
    timed = Mock()  # what it stands for has tests of its own
    monkeypatch.setattr("offload.engine.engine.time_again", timed)
    monkeypatch.setattr(roof, "READ_BYTES", 4 << 20)
    monkeypatch.setattr(roof, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(roof, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(measure, "MAX_PRODUCT_SIZE", 256)
    for name in ("READ_SECONDS", "COPY_SECONDS", "PRODUCT_SECONDS"):
        monkeypatch.setattr(measure, name, 0.0)
    return timed


class TestCommand:
    def test_json_is_one_object_with_the_facts(self, quick, capfd, monkeypatch):
        monkeypatch.setattr(what_if, "MODELS", MODELS)
        assert main(["doctor", "--json"]) == 0
        out, err = capfd.readouterr()
        found = json.loads(out)
        assert out.count("\n") == 1
        assert {"machine", "processor", "gpus", "driver", "software", "rates", "expected", "advice"} <= found.keys()
        assert found["processor"]["num_threads"] == torch.get_num_threads()
        assert found["software"]["torch"] == torch.__version__
        assert found["software"]["kernels"] == getattr(cpu.kernels(), "instruction_set", None)
        assert found["software"]["kernels_problem"] == cpu.kernels().reason
        assert found["machine"]["host_free_bytes"] < found["machine"]["host_bytes"]
        assert found["rates"]["cpu"]["device_read"] == found["processor"]["weights_read"] > 1e6
        assert found["rates"]["cpu"]["host_read"] == found["processor"]["read"] > 1e6
        assert len(found["expected"]) == len(MODELS) * len(CONTEXTS)
        assert "rates kept for the planner in " + found["record"]["path"] in err
        quick.assert_called_once_with(embedded_model("demo-target"), embedded_model("demo-draft"))

    def test_the_planner_sees_what_was_measured(self, quick, capfd):
        assert probe("cpu").rates == TWO_CORES
        assert main(["doctor", "--json", "--quiet"]) == 0
        out, err = capfd.readouterr()
        assert vars(probe("cpu").rates) == json.loads(out)["rates"]["cpu"]
        assert probe("cpu").rates.measured
        assert err == ""

    @pytest.mark.parametrize("columns", [None, "40", "132"])
    def test_text_fits_the_terminal_and_is_plain(self, columns, quick, capfd, monkeypatch):
        monkeypatch.delenv("COLUMNS", raising=False)
        if columns:
            monkeypatch.setenv("COLUMNS", columns)
        assert main(["doctor"]) == 0
        out, err = capfd.readouterr()
        assert max(map(len, out.splitlines())) <= int(columns or 80)
        assert "\x1b" not in out + err
        for title in ("machine", "CPU, measured", "software", "to expect on", "advice"):
            assert f"\n{title}" in "\n" + out
        assert [line for line in err.splitlines() if not line.startswith("rates kept")] == []

    def test_a_folder_that_cannot_be_written_is_a_note_and_no_failure(self, quick, capfd, monkeypatch, tmp_path):
        (tmp_path / "file").write_text("not a folder")
        monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "file" / "cache"))
        assert main(["doctor"]) == 0
        out, err = capfd.readouterr()
        assert "rates not kept" in err
        assert FOLDER_VARIABLE in err
        assert "advice" in out
        assert probe("cpu").rates == TWO_CORES

    def test_shows_what_it_is_doing(self, quick, monkeypatch):
        labels: list[str] = []
        monkeypatch.setattr(Output, "wait", lambda output, label: labels.append(label))
        assert main(["doctor", "--json"]) == 0
        assert labels[:4] == ["starting", "looking at the machine", "measuring memory", "measuring copies"]

    def test_a_report_has_everything_and_replaces_the_file_at_once(self, quick, capfd, monkeypatch, tmp_path):
        monkeypatch.setattr(checks, "check_device", lambda hardware, target, draft, on_step: CHECKS)
        file = tmp_path / "report.json"
        file.write_text("old")
        assert main(["doctor", "--json", "--report", str(file)]) == 0
        written = json.loads(file.read_text())
        assert written == json.loads(capfd.readouterr().out)
        assert [check["name"] for check in written["checks"]] == [check.name for check in CHECKS]
        assert all(check["passed"] for check in written["checks"])
        assert [path.name for path in tmp_path.glob("report*")] == ["report.json"]

    def test_a_report_that_cannot_be_written_is_told_before_anything_is_measured(self, quick, capfd, tmp_path):
        assert main(["doctor", "--report", str(tmp_path)]) == 2
        assert "it is a folder" in capfd.readouterr().err

    def test_a_check_that_failed_is_shown_with_its_remedy_and_is_a_failure(self, quick, capfd, monkeypatch, tmp_path):
        monkeypatch.setattr(checks, "check_device", lambda hardware, target, draft, on_step: [*CHECKS, WRONG])
        assert main(["doctor", "--report", str(tmp_path / "report.json")]) == 5
        out, err = capfd.readouterr()
        assert "attention  WRONG, 1 of 3" in out
        found = " ".join(out.split())
        assert "FAILED attention, 13B, fp32: errors of 2e-01, at most 2e-05. use another path" in found
        assert "1 of 4 checks failed: cpu: attention, 13B, fp32" in err
        assert not json.loads((tmp_path / "report.json").read_text())["checks"][-1]["passed"]

    @WITHOUT_GPU
    def test_without_a_gpu_it_says_so_and_measures_the_rest(self, quick, capfd):
        assert main(["doctor", "--json"]) == 0
        found = json.loads(capfd.readouterr().out)
        assert (found["gpus"], found["together"]) == ([], None)
        assert "no CUDA device: everything runs on the CPU" in found["advice"]
        assert list(found["rates"]) == ["cpu"]


class TestRates:
    def test_come_back_as_they_were_measured(self, rates_folder):
        assert load_rates("this machine", "CPU, 2 threads") is None
        assert save_rates("this machine", {"CPU, 2 threads": MEASURED}) == rates_file()
        assert load_rates("this machine", "CPU, 2 threads") == MEASURED
        assert rates_file().parent == rates_folder
        together = replace(MEASURED, links=6e9)
        save_rates("this machine", {"GPU 1": together})
        assert load_rates("this machine", "GPU 1") == together

    @pytest.mark.parametrize("links", [None, "absent", "fast", 0, True])
    def test_of_an_older_program_come_back_without_what_it_did_not_measure(self, links, rates_folder):
        save_rates("M", {"D": MEASURED})
        known = json.loads(rates_file().read_text())
        known["M"]["D"] |= {"links": links}
        if links == "absent":
            del known["M"]["D"]["links"]
        rates_file().write_text(json.dumps(known))
        assert load_rates("M", "D") == MEASURED

    def test_of_another_machine_or_device_are_not_taken_and_stay(self, rates_folder):
        save_rates("another machine", {"CPU, 2 threads": MEASURED})
        save_rates("this machine", {"GPU 1": MEASURED})
        assert load_rates("this machine", "CPU, 2 threads") is None
        assert load_rates("this machine", "GPU 2") is None
        faster = replace(MEASURED, to_device=9e9)
        save_rates("this machine", {"GPU 2": faster})
        assert load_rates("this machine", "GPU 1") == MEASURED
        assert load_rates("this machine", "GPU 2") == faster
        assert load_rates("another machine", "CPU, 2 threads") == MEASURED

    @pytest.mark.parametrize(
        "text", ["", "{", "[]", "null", "\xff", '{"M": []}', '{"M": {"D": 3}}', '{"M": {"D": {}}}']
    )
    def test_in_a_damaged_file_are_as_if_never_measured(self, text, rates_folder):
        rates_folder.mkdir()
        rates_file().write_text(text, encoding="latin-1")
        assert load_rates("M", "D") is None
        assert probe("cpu").rates == TWO_CORES
        save_rates("M", {"D": MEASURED})
        assert load_rates("M", "D") == MEASURED

    @pytest.mark.parametrize("value", ["0", "-1e9", "1e999", "NaN", "true", '"8e9"', "null", "[]"])
    def test_that_no_machine_has_are_not_taken(self, value, rates_folder):
        save_rates("M", {"D": MEASURED})
        rates_file().write_text(rates_file().read_text().replace(str(MEASURED.host_read), value))
        assert load_rates("M", "D") is None

    def test_are_replaced_at_once_or_not_at_all(self, rates_folder, monkeypatch):
        save_rates("M", {"D": MEASURED})

        def fail(source: object, target: object) -> None:
            raise OSError("disk full")

        monkeypatch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="disk full"):
            save_rates("M", {"D": replace(MEASURED, flops=1.0)})
        assert load_rates("M", "D") == MEASURED
        assert sorted(file.name for file in rates_folder.iterdir()) == ["hardware.json", "hardware.lock"]

    def test_serve_the_probe_of_the_same_machine_with_the_same_threads(self, rates_folder):
        save_rates("another machine", {rates_key("cpu"): MEASURED})
        assert probe("cpu").rates == TWO_CORES
        save_rates(machine_name(), {rates_key("cpu"): MEASURED})
        assert probe("cpu").rates == MEASURED
        threads = torch.get_num_threads()
        torch.set_num_threads(threads + 1)
        try:
            assert probe("cpu").rates == TWO_CORES
        finally:
            torch.set_num_threads(threads)

    def test_of_tests_are_not_those_of_the_developer(self):
        from test_cli_fake import environment

        assert environment()[FOLDER_VARIABLE] == os.environ[FOLDER_VARIABLE] == str(rates_file().parent)


def written(root: Path, **files: str) -> Path:
    """`root` with files in it; "__" in a name stands for "/"."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


class TestMachine:
    def test_reads_what_linux_tells(self, tmp_path):
        cpuinfo = (
            "processor\t: 0\nmodel name\t: Quick CPU\nflags\t\t: fpu avx512_bf16 avx2\n\nmodel name\t: Quick CPU\n"
        )
        nodes = {
            "sys__devices__system__node__node0__cpulist": "0-4095",
            "sys__devices__system__node__node1__cpulist": "5000-5003,5008",
        }
        found = machine.look(written(tmp_path, proc__cpuinfo=cpuinfo, **nodes))
        assert (found.processor, found.features) == ("Quick CPU", ("avx2", "avx512_bf16"))
        assert (found.numa_nodes, found.usable_numa_nodes) == ((0, 1), (0,))
        assert machine_name(tmp_path) == f"Quick CPU, {os.cpu_count()} cores"

    def test_knows_linux_in_windows_by_its_kernels_release(self, tmp_path):
        release = "proc__sys__kernel__osrelease"
        assert not machine.look(written(tmp_path, **{release: "6.8.0-51-generic\n"})).in_wsl
        assert machine.look(written(tmp_path, **{release: "5.15.167.4-microsoft-standard-WSL2\n"})).in_wsl
        paths = ("/mnt/c", "/mnt/d/models/m.gguf", "/mnt/data/m", "/home/c", "/mnt/wsl/x")
        assert [machine.on_windows_drive(Path(path)) for path in paths] == [True, True, False, False, False]

    def test_elsewhere_does_without(self, tmp_path):
        found = machine.look(tmp_path)
        assert (found.features, found.numa_nodes) == ((), ())
        assert found.num_cores >= 1
        assert found.processor

    def test_a_containers_memory_limit_counts_and_its_file_cache_does_not(self, tmp_path):
        group = {
            "sys__fs__cgroup__memory.max": f"{1 << 20}\n",
            "sys__fs__cgroup__memory.current": "700000\n",
            "sys__fs__cgroup__memory.stat": "anon 500000\ninactive_file 150000\nactive_file 50000\nfile 200000\n",
        }
        found = machine.look(written(tmp_path, **group))
        assert (found.host_bytes, found.host_free_bytes) == (1 << 20, (1 << 20) - 500_000)
        written(tmp_path, **{"sys__fs__cgroup__memory.max": "max\n"})
        assert machine.look(tmp_path).host_bytes > 1 << 20


class NvmlError(Exception):
    pass


def fake_nvml(**answers: Any) -> SimpleNamespace:
    """The library with two GPUs; a question without an answer is not supported."""

    def answer(name: str) -> Callable[..., Any]:
        def ask(*args: object) -> Any:
            if name not in answers:
                raise NvmlError(name)
            return answers[name]

        return ask

    names = (
        "nvmlSystemGetCudaDriverVersion_v2",
        "nvmlSystemGetDriverVersion",
        "nvmlDeviceGetCount",
        "nvmlDeviceGetName",
    )
    names += (
        "nvmlDeviceGetHandleByIndex",
        "nvmlDeviceGetHandleByUUID",
        "nvmlDeviceGetPciInfo",
        "nvmlShutdown",
        "nvmlInit",
    )
    names += ("nvmlDeviceGetCurrPcieLinkWidth", "nvmlDeviceGetCurrPcieLinkGeneration", "nvmlDeviceGetMaxPcieLinkWidth")
    names += ("nvmlDeviceGetGpuMaxPcieLinkGeneration", "nvmlDeviceGetMaxPcieLinkGeneration", "nvmlDeviceGetMemoryInfo")
    return SimpleNamespace(NVMLError=NvmlError, **{name: answer(name) for name in names})


GPUS = {
    "nvmlInit": None,
    "nvmlShutdown": None,
    "nvmlSystemGetCudaDriverVersion_v2": 12080,
    "nvmlSystemGetDriverVersion": "570.86",
    "nvmlDeviceGetCount": 2,
    "nvmlDeviceGetName": "RTX",
    "nvmlDeviceGetHandleByIndex": object(),
    "nvmlDeviceGetHandleByUUID": object(),
    "nvmlDeviceGetPciInfo": SimpleNamespace(domain=0, bus=0x41, device=0),
    "nvmlDeviceGetCurrPcieLinkWidth": 8,
    "nvmlDeviceGetCurrPcieLinkGeneration": 3,
    "nvmlDeviceGetMaxPcieLinkWidth": 8,
    "nvmlDeviceGetGpuMaxPcieLinkGeneration": 5,
    "nvmlDeviceGetMaxPcieLinkGeneration": 4,
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(free=20 * GIB),
}


class TestDriver:
    @pytest.fixture
    def use(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[SimpleNamespace], None]:
        return lambda library: monkeypatch.setitem(sys.modules, "pynvml", library)

    def test_tells_its_version_and_gpus(self, use):
        use(fake_nvml(**GPUS))
        assert machine.driver() == Driver("570.86", "12.8", ("RTX", "RTX"))

    def test_and_the_kernel_tell_what_the_link_is_and_what_the_gpu_could_do(self, use, tmp_path):
        use(fake_nvml(**GPUS))
        folder = "sys__bus__pci__devices__0000:41:00.0__"
        written(tmp_path, **{folder + "max_link_width": "16\n", folder + "numa_node": "1\n"})
        assert machine.pcie("ab-cd", tmp_path) == Pcie("0000:41:00.0", 3, 8, 5, 16, 1, 4)
        written(tmp_path, **{folder + "max_link_width": "255\n", folder + "numa_node": "-1\n"})
        assert machine.pcie("ab-cd", tmp_path) == Pcie("0000:41:00.0", 3, 8, 5, 8, None, 4)

    def test_tells_what_an_idle_link_will_carry(self):
        """An idle GPU slows its link down; while bytes cross it, it is as fast as GPU and slot together."""
        idle = replace(X16, generation=1, width=8, max_generation=5)
        assert idle.bytes_per_second == 8 * 0.25e9
        assert replace(idle, slot_generation=4).busy_bytes_per_second == 8 * 1.969e9
        assert idle.busy_bytes_per_second == 8 * 3.938e9
        assert replace(idle, generation=9).busy_bytes_per_second is None

    def test_tells_the_free_memory_of_a_gpu(self, use):
        use(fake_nvml(**GPUS))
        assert machine.free_gpu_bytes("ab-cd") == 20 * GIB
        use(fake_nvml(nvmlInit=None, nvmlShutdown=None))
        assert machine.free_gpu_bytes("ab-cd") is None

    def test_that_does_not_answer_is_unknown(self, use, tmp_path):
        use(fake_nvml())
        assert machine.driver() is None
        assert machine.pcie("ab-cd") is None
        assert machine.free_gpu_bytes("ab-cd") is None
        use(fake_nvml(**{name: answer for name, answer in GPUS.items() if "LinkWidth" not in name}))
        assert machine.pcie("ab-cd", tmp_path) is None

    @WITHOUT_GPU
    def test_that_is_not_there_is_none(self):
        assert machine.pcie("ab-cd") is None


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, count: int, free: Callable[[int], int] = lambda _: 23 * GIB) -> None:
    """`count` GPUs that torch sees; their memory and arithmetic are the CPU's."""
    properties = SimpleNamespace(name="RTX", major=8, minor=9, total_memory=24 * GIB, uuid="ab-cd")
    fakes = {
        "device_count": lambda: count,
        "get_device_properties": lambda device: properties,
        "mem_get_info": lambda device: (free(int(str(device)[-1])), 24 * GIB),
        "can_device_access_peer": lambda one, other: (one, other) == (0, 1),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(roof, "_device", lambda index: torch.device("cpu"))
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(**GPUS))


AT_X8 = 25e9 / 31.5e9 * 8 * 1.969e9  # bytes per second of a PCIe 4.0 link with eight lanes


class TestSeveral:
    """The hardware of GPUs that wait for one another."""

    def test_have_the_links_of_their_slots(self, rates_folder, monkeypatch):
        pretend_gpus(monkeypatch, 2)
        found = probe("auto", 2)
        assert (found.num_devices, found.rates.to_device, found.rates.measured) == (2, pytest.approx(AT_X8), False)
        assert found.rates.to_device == pytest.approx(12.5e9, rel=0.01)
        monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
        assert probe("auto", 2).rates == RTX_4090

    def test_count_as_the_slowest(self, rates_folder, monkeypatch):
        pretend_gpus(monkeypatch, 2)
        uuids = {"cuda:0": "one", "cuda:1": "two"}
        own = torch.cuda.get_device_properties("cuda:0")
        monkeypatch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda name: SimpleNamespace(**vars(own) | {"uuid": uuids[name], "major": 8 if name == "cuda:0" else 7}),
        )
        fast, slow = replace(MEASURED, to_device=9e9, links=9e9), replace(MEASURED, device_read=2e9, links=8e9)
        save_rates(machine_name(), {rates_key("cuda:0"): fast, rates_key("cuda:1"): slow})
        assert probe("auto").rates == fast
        assert probe("auto").fast_bf16
        both = probe("auto", 2)
        assert both.rates == replace(MEASURED, device_read=2e9, links=8e9)
        assert not both.fast_bf16
        save_rates(machine_name(), {rates_key("cuda:1"): replace(slow, to_device=0.0)})  # as if never measured
        assert not probe("auto", 2).rates.measured
        assert probe("auto", 2).rates.to_device == 9e9

    def test_have_kernels_where_triton_is_and_nobody_turned_them_off(self, rates_folder, monkeypatch):
        pretend_gpus(monkeypatch, 1)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.delenv(KERNELS, raising=False)
        monkeypatch.setattr(probing, "installed_version", lambda package: "3.0" if package == "triton" else None)
        assert probe("auto").has_kernels
        monkeypatch.setenv(KERNELS, "off")
        assert not probe("auto").has_kernels
        monkeypatch.delenv(KERNELS)
        monkeypatch.setattr(torch.version, "cuda", None)
        assert not probe("auto").has_kernels
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(probing, "installed_version", lambda package: None)
        assert not probe("auto").has_kernels

    def test_have_the_memory_of_the_fullest(self, rates_folder, monkeypatch):
        pretend_gpus(monkeypatch, 2)
        assert probe("auto").device_free_bytes == 23 * GIB
        assert probe("auto", 2).device_free_bytes == 20 * GIB - (512 << 20)  # which CUDA will take there, too
        pretend_gpus(monkeypatch, 2, lambda index: 18 * GIB)
        assert probe("auto", 2).device_free_bytes == 18 * GIB

    @pytest.mark.parametrize(
        ("number", "hosts", "links", "rate"),
        [(1, 1, None, 25e9), (2, 1, None, 21e9), (4, 2, None, 21e9), (2, 2, None, 25e9), (2, 1, 30e9, 15e9),
         (2, 1, 90e9, 25e9), (1, 1, 20e9, 20e9)],
    )  # fmt: skip
    def test_share_what_the_memory_of_their_host_gives(self, number, hosts, links, rate):
        rates = replace(RTX_4090, host_read=42e9, links=links)
        gpus = Hardware("cuda:0", "gpu", GIB, GIB, True, rates, number, hosts)
        assert gpus.link_rate == rate
        assert replace(gpus, device="cpu").link_rate == 25e9  # the ranks of a CPU have their shares already

    def test_are_more_than_two_in_a_server_alone(self):
        assert [typical(number).host_read for number in (1, 2, 4)] == [72e9, 72e9, 165e9]


class TestGpus:
    def test_are_measured_alone_and_together(self, quick, monkeypatch):
        pretend_gpus(monkeypatch, 2)
        steps: list[str] = []
        found = roof.diagnose(steps.append)
        assert [gpu.device for gpu in found.gpus] == ["cuda:0", "cuda:1"]
        assert found.together is not None
        assert found.together.to_host > 1e6
        assert [gpu.peers for gpu in found.gpus] == [("cuda:1",), ()]
        assert found.gpus[0].pcie is not None
        assert (found.gpus[0].compute_capability, found.gpus[0].problem) == ("8.9", "")
        assert {"measuring cuda:0", "measuring cuda:1", "measuring the GPUs together"} <= set(steps)
        own = found.gpus[1].rates
        assert own is not None
        expected = Rates(
            own.link.to_device, own.link.to_host, own.weights_read, found.processor.read, own.flops, measured=True
        )
        assert found.rates["cuda:1"] == replace(expected, links=found.together.to_device)
        assert found.rates["cpu"].links is None

    def test_together_are_busy_on_all_links_in_one_direction_the_other_and_both(self, quick, monkeypatch):
        pretend_gpus(monkeypatch, 2)
        links, under_way = [], []
        link_copies, copy_rate = measure.link_copies, measure.copy_rate

        def opened(*args: Any) -> measure.Copies:
            links.append(link_copies(*args))
            return links[-1]

        def timed(copies: list[measure.Copy], num_bytes: int) -> float:
            ways = [(end, way) for copy in copies for end, link in enumerate(links)
                    for way in ("to_device", "to_host") if getattr(link, way) is copy]  # fmt: skip
            under_way.append(sorted(ways))
            return copy_rate(copies, num_bytes)

        monkeypatch.setattr(measure, "link_copies", opened)
        monkeypatch.setattr(measure, "copy_rate", timed)
        roof.diagnose(lambda step: None)
        both = [(end, way) for end in (3, 4) for way in ("to_device", "to_host")]  # after the CPU's and each GPU's
        assert under_way[-3:] == [both[::2], both[1::2], both]

    def test_rates_serve_the_probe_of_the_gpu_wherever_it_is_in_the_list(self, quick, monkeypatch):
        pretend_gpus(monkeypatch, 1)
        assert probe("auto").rates == replace(RTX_4090, to_device=AT_X8, to_host=AT_X8)
        found = roof.diagnose(lambda step: None)
        assert roof.remember(found).problem == ""
        assert probe("cuda").rates == found.rates["cuda:0"]
        pretend_gpus(monkeypatch, 2)
        assert probe("cuda:1").rates == found.rates["cuda:0"]

    def test_that_fail_are_reported_and_the_others_measured(self, quick, monkeypatch):
        def free(index: int) -> int:
            if index == 0:
                raise RuntimeError("CUDA error: out of memory\nmore")
            return 23 * GIB

        pretend_gpus(monkeypatch, 2, free)
        found = roof.diagnose(lambda step: None)
        assert (found.gpus[0].problem, found.gpus[0].rates) == ("CUDA error: out of memory", None)
        assert (found.device, found.together) == ("cuda:1", None)
        assert roof.usable_hardware(found).rates == found.rates["cuda:1"]
        assert any("cuda:0: could not be measured (CUDA error: out of memory)" in line for line in advice(found))

    def test_that_are_full_are_reported(self, quick, monkeypatch):
        pretend_gpus(monkeypatch, 1, lambda index: 100_000_000)
        found = roof.diagnose(lambda step: None)
        assert found.gpus[0].problem == "only 0.10 GB of its memory are free"
        assert found.device == "cpu"

    @pytest.mark.cuda
    def test_that_are_real_are_faster_than_the_processor(self, quick):
        found = roof.diagnose(lambda step: None)
        assert len(found.gpus) == torch.cuda.device_count()
        for gpu in found.gpus:
            assert gpu.problem == ""
            assert gpu.rates is not None
            assert gpu.rates.link.to_device > 1e8


class TestDiagnosis:
    def test_finds_a_flash_attention_without_importing_it(self, tmp_path, monkeypatch):
        written(tmp_path, **{"flash_attn__module.py": ""}).joinpath("flash_attn", "__init__.py").write_text("1 / 0")
        monkeypatch.syspath_prepend(tmp_path)
        assert roof.software().flash_attn == "of unknown version"
        assert "flash_attn" not in sys.modules

    @pytest.mark.parametrize(("diagnosis", "flops"), [(LAPTOP, 300e9), (BOX, 900e9)])
    def test_rates_of_the_processor_are_those_of_the_type_it_is_fast_at(self, diagnosis, flops):
        assert diagnosis.rates["cpu"] == Rates(9e9, 10e9, 30e9, 40e9, flops, measured=True)

    def test_names_the_first_gpu_that_works_else_the_cpu(self):
        broken = replace(GPU, rates=None, problem="lost")
        assert [LAPTOP.device, BOX.device, replace(BOX, gpus=(broken,)).device] == ["cpu", "cuda:0", "cpu"]
        assert replace(BOX, gpus=(broken, replace(GPU, device="cuda:1"))).device == "cuda:1"

    def test_measures_each_direction_by_itself_and_both(self, monkeypatch):
        monkeypatch.setattr(measure, "copy_rate", lambda copies, num_bytes: num_bytes * sum(copy() for copy in copies))
        ends = [measure.Copies(lambda: 1, lambda: 10, 8), measure.Copies(lambda: 100, lambda: 1000, 8)]
        assert roof._link_rates(ends[:1]) == LinkRates(8, 80, 88)
        assert roof._link_rates(ends) == LinkRates(808, 8080, 8888)


class Clock:
    """perf_counter of a machine on which running something takes as long as `seconds` says, one after the other."""

    def __init__(self, *seconds: float) -> None:
        self._times = [time for pause in seconds for time in (0.0, pause)]

    def __call__(self) -> float:
        return self._times.pop(0)


class TestMeasures:
    CPU = torch.device("cpu")

    def test_the_best_run_counts_and_they_go_on_for_a_while(self, monkeypatch):
        monkeypatch.setattr(measure, "COPY_SECONDS", 10.0)
        monkeypatch.setattr(measure.time, "perf_counter", Clock(3.0, 2.0, 0.5, 1.0, 4.0))
        assert measure.copy_rate([lambda: lambda: None], 1000) == 1000 * measure.COPIES_PER_RUN / 0.5

    def test_copies_at_once_are_all_started_before_any_is_waited_for(self, monkeypatch):
        events: list[str] = []

        def copy(name: str) -> measure.Copy:
            def start() -> Callable[[], object]:
                events.append(f"start {name}")
                return lambda: events.append("wait")

            return start

        monkeypatch.setattr(measure.time, "perf_counter", Clock(1.0, 1.0, 1.0))
        rate = measure.copy_rate([copy("a"), copy("b")], 1000)
        once = ["start a", "start b"] * measure.COPIES_PER_RUN + ["wait"] * 2 * measure.COPIES_PER_RUN
        assert events == once * measure.MIN_RUNS
        assert rate == 2 * measure.COPIES_PER_RUN * 1000

    def test_a_read_is_its_bytes_over_its_seconds(self, monkeypatch):
        monkeypatch.setattr(measure.time, "perf_counter", Clock(*[0.5] * 3, *[0.25] * 3))
        rates = measure.read_rates(self.CPU, torch.bfloat16, 1 << 20)
        assert rates == (2 * (1 << 20), 4 * (1 << 20))

    def test_products_grow_until_one_takes_long(self, monkeypatch):
        monkeypatch.setattr(measure.time, "perf_counter", Clock(*[0.04] * 3, *[0.06] * 3))
        assert measure.product_rate(self.CPU, torch.float32) == 2 * 512**3 / 0.06

    def test_copies_go_over_the_link_in_their_direction(self):
        with closing(PacedLink(None)) as link:
            copies = measure.link_copies(link, self.CPU, 1000)
            copies.to_device()()
            assert (link.stats.bytes_to_device, link.stats.bytes_to_host) == (1000, 0)
            copies.to_host()()
            assert (link.stats.bytes_to_device, link.stats.bytes_to_host) == (1000, 1000)


class TestExpectations:
    @pytest.mark.parametrize(
        ("model", "gigabytes", "kv_bytes"),
        [("7B", 13.5, 524_288), ("13B", 26.0, 819_200), ("Llama-3.1-8B", 16.1, 131_072)],
    )
    def test_are_for_the_published_sizes(self, model, gigabytes, kv_bytes):
        target, _ = MODELS[model]
        assert target.weight_bytes(2) / 1e9 == pytest.approx(gigabytes, rel=5e-3)
        assert target.kv_bytes_per_token(2) == kv_bytes
        assert target.context_limit == 131_072

    def test_are_those_of_the_rates(self, monkeypatch):
        monkeypatch.setattr(what_if, "MODELS", ONE_MODEL)

        def seconds(rates: Rates) -> list[float | None]:
            hardware = Hardware("cuda:0", "RTX", 23 * GIB, 500 * GIB, True, rates)
            return [e.plan.predicted.seconds_per_token if e.plan else None for e in expectations(hardware)]

        fast, slow = seconds(RTX_4090), seconds(replace(RTX_4090, to_device=RTX_4090.to_device / 2))
        assert len(fast) == len(CONTEXTS)
        assert None not in fast
        assert sum(filter(None, slow)) > 1.2 * sum(filter(None, fast))

    def test_name_what_is_missing(self):
        tight = expectations(Hardware("cpu", "CPU", 12 * GIB, 12 * GIB, True))
        assert all(e.plan is None for e in tight)
        assert all("are free" in e.problem for e in tight)


class TestReport:
    @pytest.mark.parametrize("width", [20, 40, 57, 80, 100, 300])
    @pytest.mark.parametrize("diagnosis", [LAPTOP, BOX, TWO_ON_X8], ids=["laptop", "box", "two"])
    def test_fits_any_width(self, diagnosis, width):
        text = render_doctor.report(diagnosis, [], some_expectations(), width=width)
        assert max(map(len, text.splitlines())) <= min(max(width, 40), 100)

    def test_of_two_gpus_shows_each_and_both(self):
        text = render_doctor.report(TWO_ON_X8, [], some_expectations(), width=100, disk=3.4e9)
        assert "disk of the models, measured\n  direct reads  3.40 GB/s\n" in text
        assert text.count("PCIe      4.0 x8, the GPU can do 4.0 x16") == 2
        assert "copies       25.0 GB/s to device, 25.5 to host, 46.0 both at once, added up" in text
        assert "peer access  cuda:1 to cuda:0" in text
        assert "to expect on cuda:0, predicted" in text
        assert "driver     570.86, for CUDA up to 12.8" in text

    def test_of_a_laptop_says_that_there_is_none(self):
        text = render_doctor.report(LAPTOP, [], some_expectations(), width=80)
        assert "GPUs       none" in text
        assert "GPUs together" not in text
        assert "13B 128K" in text
        assert "does not fit: needs" in text

    def test_counts_the_checks_of_each_kind_that_hold(self):
        text = render_doctor.report(BOX, [*CHECKS, replace(CHECKS[0], device="cuda:0")], [], width=100)
        assert "cpu, checked\n  copies     right, 1 of 1\n  attention  right, 2 of 2\n" in text
        assert "cuda:0, checked\n  copies  right, 1 of 1\n" in text

    def test_names_the_processors_kernels_or_why_there_are_none(self):
        assert "kernels    avx2, for the CPU" in render_doctor.report(LAPTOP, [], [], width=100)
        without = replace(LAPTOP.software, kernels=None, kernels_problem="TRIFORCE_KERNELS is off")
        text = render_doctor.report(replace(LAPTOP, software=without), [], [], width=100)
        assert "kernels    none: TRIFORCE_KERNELS is off" in text

    def test_names_a_flash_attention_that_is_there_and_not_used(self):
        assert "flash" not in render_doctor.report(BOX, [], [], width=100)
        found = replace(BOX, software=replace(BOX.software, flash_attn="2.8.1"))
        assert "torch products; flash-attn 2.8.1 found, for GPUs only" in render_doctor.report(found, [], [], width=100)

    def test_as_a_document_is_json(self):
        document = render_doctor.document(TWO_ON_X8, CHECKS, some_expectations(), Record("file", "disk full"))
        assert json.loads(json.dumps(document, allow_nan=False))["record"] == {"path": "file", "problem": "disk full"}


@cache
def some_expectations() -> list[Expectation]:
    """Of a model that does not fit at each length, and of one with a long name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(what_if, "MODELS", {name: MODELS[name] for name in ("13B", "Llama-3.1-8B")})
        return expectations(Hardware("cuda:0", "RTX", 23 * GIB, 60 * GIB, True, RTX_4090))


ADVICE: list[tuple[str, Diagnosis, str]] = [
    ("a laptop", LAPTOP, "no CUDA device: everything runs on the CPU"),
    ("no bf16", LAPTOP, "bf16 is not fast on this CPU: on it, fp32 is used"),
    ("a lone driver", replace(LAPTOP, driver=DRIVER), "torch 2.13.0+cpu is a build without CUDA: reinstall torch"),
    ("an old driver", replace(BOX, gpus=()), "the driver runs CUDA up to 12.8, torch is built for 12.8"),
    (
        "eight lanes",
        TWO_ON_X8,
        "cuda:1: PCIe 4.0 x8: the slot gives half of what the GPU can do; move it to an x16 slot",
    ),
    ("four lanes", with_gpu(pcie=replace(X16, width=4)), "gives a quarter of what the GPU can do"),
    ("an old slot", with_gpu(pcie=replace(X16, generation=3)), "cuda:0: PCIe 3.0 and the GPU can do 4.0"),
    (
        "slow copies",
        with_gpu(rates=GpuRates(1e12, 1e12, LinkRates(10e9, 25e9, 30e9), 1e14)),
        "reach 10.0 GB/s of the 31.5 GB/s",
    ),
    ("a full GPU", with_gpu(free_bytes=12 * GIB), "12.9 GB of its 25.8 GB are in use"),
    ("a shared way", replace(TWO_ON_X8, together=LinkRates(15e9, 15e9, 30e9)), "15.0 GB/s together, 26.0 GB/s alone"),
    (
        "slow memory",
        replace(TWO_ON_X8, together=LinkRates(20e9, 20e9, 30e9), processor=replace(BOX.processor, read=24e9)),
        "the GPUs get all that host memory gives: 20.0 GB/s together, 26.0 GB/s alone and added up, and the CPU "
        "reads 24.0 GB/s",
    ),
    (
        "little pinning",
        replace(BOX, machine=replace(BOX.machine, memlock_bytes=8 << 20)),
        "memlock limit 8.39 MB: where pinning host memory",
    ),
    (
        "another node",
        replace(BOX, machine=replace(BOX.machine, numa_nodes=(0, 1), usable_numa_nodes=(0, 1))),
        "cuda:0 hangs on NUMA node 0 and this process may run on 0, 1: numactl --cpunodebind=0 --preferred=0",
    ),
    ("few threads", replace(BOX, processor=replace(BOX.processor, num_threads=1)), "torch uses 1 of 8 cores"),
    ("a busy machine", replace(BOX, processor=replace(BOX.processor, busy_share=0.5)), "other programs use 50%"),
    ("slow bf16", replace(BOX, processor=replace(BOX.processor, bf16_flops=1e9)), "try --dtype fp32"),
]


class TestAdvice:
    @pytest.mark.parametrize(("diagnosis", "line"), [case[1:] for case in ADVICE], ids=[case[0] for case in ADVICE])
    def test_names_what_is_wrong(self, diagnosis, line):
        assert [given for given in advice(diagnosis) if line in given]

    def test_is_silent_about_a_good_box(self):
        assert advice(BOX) == []
        assert "nothing to improve was found" in render_doctor.report(BOX, [], [], width=80)

    def test_knows_the_limits_of_wsl(self):
        """A limit of memlock is not the one that counts there."""
        box = replace(BOX, machine=replace(BOX.machine, in_wsl=True, memlock_bytes=8 << 20))
        lines = advice(box)
        assert any("CUDA often pins no more than 1 GB" in line for line in lines)
        assert not [line for line in lines if "memlock" in line]
        for diagnosis in (box, replace(LAPTOP, machine=replace(LAPTOP.machine, in_wsl=True))):
            assert any(".wslconfig" in line for line in advice(diagnosis))
            assert "in Windows (WSL 2)" in render_doctor.report(diagnosis, CHECKS, [], width=100)
        assert not any("WSL" in line for line in (*advice(BOX), *advice(LAPTOP)))

    def test_says_nothing_of_pinning_to_who_pins_nothing(self):
        assert not [line for line in advice(LAPTOP) if "memlock" in line]

    def test_is_done_with_nodes_once_the_process_is_bound(self):
        bound = replace(BOX, machine=replace(BOX.machine, numa_nodes=(0, 1), usable_numa_nodes=(0,)))
        assert advice(bound) == []

    def test_of_two_gpus_on_half_the_lanes_is_one_line_each(self):
        assert [line[:19] for line in advice(TWO_ON_X8)] == ["cuda:0: PCIe 4.0 x8", "cuda:1: PCIe 4.0 x8"]


@pytest.mark.parametrize(
    ("torch_version", "triton", "device", "kernels", "said"),
    [
        ("2.13.0", "3.7.1", "cuda", "on", False),
        ("2.15.0+cu130", "3.9.0", "cuda", "on", False),
        ("2.16.0", "3.10.0", "cuda", "on", True),
        ("2.13.0", "3.9.0", "cuda", "on", True),
        ("2.16.0", None, "cuda", "on", False),
        ("2.16.0", "3.10.0", "cpu", "on", False),
        ("2.16.0", "3.10.0", "cuda", "off", False),
    ],
)
def test_versions_that_nobody_tested_are_named(
    torch_version: str, triton: str | None, device: str, kernels: str, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "installed_version", {"torch": torch_version, "triton": triton}.get)
    monkeypatch.setenv(KERNELS, kernels)
    note = machine.untested_versions(device)
    assert note.startswith(f"torch {torch_version} with Triton {triton} has not been tested" if said else "")
    assert bool(note) == said


def test_a_run_says_once_that_its_versions_are_untested(triforce: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.machine.untested_versions", lambda device: f"nobody tested this {device}")
    with open(os.devnull, encoding="utf-8") as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        code, _, err = triforce("generate", "--prompt", "Once", "--max-tokens", "1")
    assert (code, err.count("nobody tested this cpu")) == (0, 1)
