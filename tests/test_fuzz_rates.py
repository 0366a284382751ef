"""Whatever is in the file of measured rates: what cannot be a rate counts as not measured, and there is a plan."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from random import Random

import pytest

from kit.fuzzing import damaged_json, put
from offload.machine import machine_name
from offload.speed.hardware import rates_key
from offload.speed.rates import FOLDER_VARIABLE, TWO_CORES, load_rates, rates_file
from triforce_cli.app import main
from triforce_cli.setup.choice import choose_models

NUM_CASES = 200
PLAN = ["plan", "--model", str(choose_models(None, None).target), "--device", "cpu"]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    return rates_file()


def plan(capfd: pytest.CaptureFixture[str], *args: str) -> str:
    code = main([*PLAN, *args])
    out, err = capfd.readouterr()
    assert (code, err) == (0, ""), err
    return out


def test_there_is_a_plan_whatever_is_in_the_file(
    file: Path, num_cases: Callable[[int], int], capfd: pytest.CaptureFixture[str]
) -> None:
    measured = {machine_name(): {rates_key("cpu"): asdict(TWO_CORES)}}
    taken: Counter[bool] = Counter()
    for number in range(num_cases(NUM_CASES)):
        put(file, damaged_json(measured, Random(number)))
        assert json.loads(plan(capfd, "--json"))["plan"]
        taken[load_rates(machine_name(), rates_key("cpu")) is not None] += 1
    assert min(taken.values()) > 0.05 * taken.total()


@pytest.mark.parametrize("name", ["to_device", "device_read", "host_read", "flops"])
@pytest.mark.parametrize("value", [5e-324, 1e-300, 1.0])
def test_rates_that_would_take_forever_are_no_rates(
    file: Path, name: str, value: float, capfd: pytest.CaptureFixture[str]
) -> None:
    """Seconds became infinite, and plans an unexpected error."""
    put(file, json.dumps({machine_name(): {rates_key("cpu"): asdict(TWO_CORES) | {name: value}}}).encode())
    assert load_rates(machine_name(), rates_key("cpu")) is None
    assert "typical" in plan(capfd)
