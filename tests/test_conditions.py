"""The conditions of a prefill: whatever decides bits of its rows is in the prefix store's key."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kit.forked import said_in_a_fork
from kit.models import Sizes, changed, save_pair, tiny_plan
from kit.processor import threads
from kit.store_users import CONDITIONS
from offload.kernels.choice import of_model
from offload.kernels.device import DeviceKernels
from offload.kernels.rounding import rounding
from offload.kv.parts import first_page_seen
from offload.plan.planner import Plan
from offload.session import conditions
from offload.session.conditions import Conditions

CPU = torch.device("cpu")
# The code of a process that reads the key of a plan's rows: of torch's instruction set, too.
DIGEST = """
import json, sys, pathlib
from offload.plan.planner import Plan
from offload.session.conditions import Conditions
print(Conditions.of(pathlib.Path(sys.argv[1]), Plan.from_dict(json.load(open(sys.argv[2])))).digest)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pair(tmp_path_factory.mktemp("models"), context=512)[0]


@pytest.fixture(scope="module")
def plan(folder: Path) -> Plan:
    return tiny_plan(folder, None, Sizes(), num_prompt_tokens=100, max_tokens=20, dtype="bf16")


def patched(name: str, value: object) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(name, value)


SETTINGS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "torch": patched("torch.__version__", "2.99.0"),
    "triforce": patched("importlib.metadata.version", lambda name: "9.9.9"),
    "machine": patched("offload.session.conditions.machine_name", lambda: "another"),
    "torch's instruction set": patched("torch.backends.cpu.get_cpu_capability", lambda: "another"),
    "the processor's instructions": patched("offload.session.conditions.cpu_features", lambda: ("avx2", "sse9")),
    "how sums round": patched("offload.session.conditions.rounding_of", lambda *args: "otherwise"),
    "kernels": patched("offload.session.conditions.of_model", lambda *args: DeviceKernels(reason="off")),
    "bits": patched("offload.session.conditions.BITS", -1),
}


@pytest.mark.parametrize("change", SETTINGS.values(), ids=SETTINGS)
def test_rows_of_another_process_have_another_key(
    folder: Path, plan: Plan, change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: rows of AVX-512 were read under AVX2, where no kernels run; and machines share "Intel(R) Xeon(R)
    Processor"."""
    digest = Conditions.of(folder, plan).digest
    if change is SETTINGS["kernels"] and not of_model(CPU, conditions.read_config(folder)).usable:
        pytest.skip("no kernels here")
    change(monkeypatch)
    assert Conditions.of(folder, plan).digest != digest


@pytest.mark.parametrize(
    "values",
    [
        {"fused_prefill": False},
        {"prefill_block": 16},
        {"window_pages": 3},
        {"page_tokens": 16},
        {"dtype": "fp32"},
        {"device_name": "another"},
        {"num_devices": 2},
    ],
    ids=str,
)
def test_rows_of_another_plan_have_another_key(folder: Path, plan: Plan, values: dict[str, object]) -> None:
    assert Conditions.of(folder, changed(plan, **values)).digest != Conditions.of(folder, plan).digest


def test_rows_by_another_number_of_threads_have_another_key(folder: Path, plan: Plan) -> None:
    found = set[str]()
    for count in (1, 2, 3):
        with threads(count):
            found.add(Conditions.of(folder, plan).digest)
    assert len(found) == 3


def test_files_that_were_written_since_have_another_key(folder: Path, plan: Plan) -> None:
    digest = Conditions.of(folder, plan).digest
    weights = folder / "model.safetensors"
    status = weights.stat()
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert Conditions.of(folder, plan).digest != digest


def test_a_process_that_is_kept_from_newer_instructions_has_another_key(
    folder: Path, plan: Plan, tmp_path: Path
) -> None:
    (tmp_path / "plan").write_text(json.dumps(plan.as_dict()))
    arguments = [str(folder), str(tmp_path / "plan")]
    kept = os.environ | {"ATEN_CPU_CAPABILITY": "default", "TRIFORCE_KERNELS": "off"}
    told = subprocess.run(
        [sys.executable, "-c", DIGEST, *arguments], env=kept, capture_output=True, text=True, check=True
    )
    digests = [said_in_a_fork(DIGEST, *arguments, TRIFORCE_KERNELS="off").strip(), told.stdout.strip()]
    assert digests[0] != digests[1]
    assert len(digests[0]) == 32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_fingerprint_of_rounding_is_the_same_every_time(dtype: torch.dtype) -> None:
    rounding.cache_clear()
    found = {rounding.__wrapped__(dtype, 1) for _ in range(5)}
    assert len(found) == 1


@pytest.mark.parametrize("operator", ["linear", "rms_norm", "silu", "attend_joined", "attend"])
def test_the_fingerprint_tells_each_operator(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a last bit of one number."""
    from offload.kernels import rounding as module

    plain, run = rounding.__wrapped__(torch.float32, 1), getattr(module, operator)

    def nudged(*args: object, **more: object) -> object:
        found = run(*args, **more)
        numbers = found if isinstance(found, torch.Tensor) else found.out
        numbers.view(-1)[0] = numbers.view(-1)[0].nextafter(torch.tensor(torch.inf))
        return found

    monkeypatch.setattr(module, operator, nudged)
    assert rounding.__wrapped__(torch.float32, 1) != plain


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 9, 514])
def test_the_first_stored_page_is_that_of_the_first_token_that_is_seen(window: int) -> None:
    """A planted fault lived: with a window of 514 and 1,541 tokens a page was left out whose last token is seen."""
    page = CONDITIONS.identity.page_tokens
    for num_tokens in (*range(6 * page), 1536, 1541):
        seen = range(max(num_tokens - window + 1, 0), num_tokens + 1)  # by the row that comes next
        assert first_page_seen(num_tokens, window, page) == seen[0] // page
