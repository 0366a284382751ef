"""The libraries of the CPU's kernels: found, checked, their team of threads; without them, the reason."""

from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kit.processor import SETS, best, built, left_to_torch, on_this_machine
from offload.engine.engine import kernels_problem
from offload.errors import UsageError
from offload.kernels import cpu
from offload.kernels.cpu import CpuKernels, instruction_sets, load
from offload.kernels.device import DeviceKernels
from offload.kernels.products import Step, Steps, room_to_widen
from offload.plan.what_if import LLAMA2_7B

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def here() -> CpuKernels:
    return best()


def sums(found: CpuKernels, x: torch.Tensor, how_many: int) -> list[float]:
    """The sums of `how_many` equal parts of x: a product with a row of ones, by all of torch's threads."""
    weight = x.reshape(how_many, -1)
    row, out = torch.ones(1, weight.shape[1]), torch.zeros(1, how_many)
    step = Step(row, weight, None, out)
    Steps(found, [step], room_to_widen(1, weight.shape[1])).run(1)
    return out[0].tolist()


def test_this_machines_library_is_loaded_and_its_threads_work(here: CpuKernels) -> None:
    assert here.instruction_set == on_this_machine()[0]
    assert sums(here, torch.arange(8.0), 4) == [1, 5, 9, 13]
    assert sums(here, torch.arange(8.0), 1) == [28]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", on_this_machine()[::-1])
def test_every_instruction_set_of_this_machine_is_chosen_as_torch_chooses(name: str) -> None:
    """ATEN_CPU_CAPABILITY, which torch reads at its start, sets both."""
    built(name)
    code = "from offload.kernels import cpu; found = cpu.kernels(); print(found.reason or found.instruction_set)"
    capability = SETS[platform.machine()][name].lower()
    if not capability and name != on_this_machine()[0]:
        pytest.skip("a better one is chosen here, whatever torch is told")
    variables = os.environ | ({"ATEN_CPU_CAPABILITY": capability} if capability else {})
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=variables, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [name]


@pytest.mark.parametrize("name", on_this_machine())
def test_every_library_of_this_machine_sums(name: str) -> None:
    assert sums(built(name), torch.arange(900.0), 9) == torch.arange(900.0).reshape(9, 100).sum(-1).tolist()


@pytest.mark.parametrize(
    ("system", "machine", "capability", "features", "names"),
    [
        ("linux", "x86_64", "AVX512", "avx512_bf16 amx_bf16", ("amx", "avx512_bf16", "avx512")),
        ("linux", "x86_64", "AVX512", "avx512_bf16", ("avx512_bf16", "avx512")),
        ("linux", "x86_64", "AVX512", "", ("avx512",)),
        ("linux", "x86_64", "AVX2", "", ("avx2",)),
        ("linux", "x86_64", "DEFAULT", "", ()),
        ("linux", "aarch64", "DEFAULT", "", ("neon",)),
        ("linux", "aarch64", "SVE256", "", ("neon",)),
        ("linux", "riscv64", "DEFAULT", "", ()),
        ("darwin", "arm64", "DEFAULT", "", ()),
        ("darwin", "x86_64", "AVX2", "", ()),
    ],
)
def test_the_instruction_sets_suit_the_machine(
    system: str, machine: str, capability: str, features: str, names: tuple[str, ...]
) -> None:
    assert instruction_sets(system, machine, capability, features.split()) == names


def test_a_library_that_the_system_forbids_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    best, *others = on_this_machine() or [""]
    if "avx512" not in others or not built(others[0]):
        pytest.skip("this machine has one kind of instructions")
    monkeypatch.setattr(
        cpu, "load", lambda folder, name: DeviceKernels(reason="no") if name == best else load(folder, name)
    )
    cpu.kernels.cache_clear()
    assert cpu.kernels().instruction_set == others[0]
    cpu.kernels.cache_clear()


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Within the test the kernels are looked for again."""
    monkeypatch.setattr(cpu, "kernels", cpu.kernels.__wrapped__)
    monkeypatch.delenv(cpu.VARIABLE, raising=False)
    return monkeypatch


class TestWithoutTheLibraryTheReasonIsSaid:
    def test_it_was_not_built(self, tmp_path: Path) -> None:
        assert load(tmp_path, "avx2") == DeviceKernels(reason="the kernels were not built; run pip install again")

    def test_the_compiler_failed(self, tmp_path: Path) -> None:
        (tmp_path / "unbuilt.txt").write_text("No module named ziglang\n")
        reason = "the kernels were not built (No module named ziglang); run pip install again"
        assert load(tmp_path, "avx2") == DeviceKernels(reason=reason)

    def test_it_is_of_other_sources(self, here: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cpu, "ABI", cpu.ABI + 1)
        found = load(cpu.FOLDER, here.instruction_set)
        assert not found.usable
        assert "built from other sources" in found.reason
        assert "run pip install again" in found.reason

    def test_it_is_damaged(self, tmp_path: Path) -> None:
        (tmp_path / "avx2.so").write_bytes(b"not a library")
        found = load(tmp_path, "avx2")
        assert not found.usable
        assert found.reason.startswith("the kernels cannot be loaded: ")

    def test_the_user_turned_it_off(self, anew: pytest.MonkeyPatch) -> None:
        anew.setenv(cpu.VARIABLE, "off")
        assert cpu.kernels() == DeviceKernels(reason="TRIFORCE_KERNELS is off")

    def test_the_processor_is_another(self, anew: pytest.MonkeyPatch) -> None:
        anew.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
        anew.setattr(platform, "machine", lambda: "x86_64")
        assert cpu.kernels().reason.startswith("there are no kernels for this CPU")

    def test_a_word_that_is_neither_on_nor_off_is_refused(self, anew: pytest.MonkeyPatch) -> None:
        anew.setenv(cpu.VARIABLE, "no")
        with pytest.raises(UsageError, match="TRIFORCE_KERNELS is 'no'; on and off are known"):
            cpu.kernels()


def test_what_a_library_has_no_function_for_is_left_to_torch(here: CpuKernels) -> None:
    assert left_to_torch(here) == {"whose", "order", "prefill", "multiply", "gated", "streams", "copies", "take_slots"}


def test_two_threads_that_call_at_once_get_right_results(here: CpuKernels) -> None:
    wrong: list[list[float]] = []

    def call(value: int) -> None:
        x = torch.full((1 << 12,), float(value))
        results = [sums(here, x, 4) for _ in range(200)]
        wrong.extend(result for result in results if result != [value * 1024.0] * 4)

    callers = [threading.Thread(target=call, args=(value,)) for value in (1, 2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


OUTPUTS = 100  # several items for the team


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def right(here: CpuKernels, value: int) -> bool:
    return sums(here, torch.full((OUTPUTS, 64), float(value)).flatten(), OUTPUTS) == [64.0 * value] * OUTPUTS


def test_every_item_is_summed_once_by_any_number_of_threads_for_several_callers(
    here: CpuKernels, threads: Callable[[int], None]
) -> None:
    """One caller at a time has the team, the others work alone."""
    wrong = []

    def call(value: int) -> None:
        for turn in range(300):
            threads(turn % 5 + 1)
            if not right(here, value + turn):
                wrong.append((value, turn))

    callers = [threading.Thread(target=call, args=(value,)) for value in (1, 2, 3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


def test_nobody_waits_for_a_helper_that_draws_no_item(here: CpuKernels, threads: Callable[[int], None]) -> None:
    """A child has none of its parent's helpers, though the library counts them: as if the system never ran them."""
    threads(3)
    assert right(here, 1)
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        os._exit(0 if right(here, 2) else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_dim": 513}, "heads of 2, 4, .* numbers, not of 513"),
        ({"head_dim": 2048}, "heads of 2, 4, .* numbers, not of 2048"),
        ({"intermediate_size": 333}, "an even number of inputs, not of 333"),
    ],
)
def test_a_model_that_the_kernels_do_not_know_is_told_why(
    here: CpuKernels, changes: dict[str, int], reason: str
) -> None:
    """On a CPU; the engine says it once."""
    assert kernels_problem("cpu", LLAMA2_7B) == ""
    assert re.search(reason, kernels_problem("cpu", LLAMA2_7B.changed(**changes)))
