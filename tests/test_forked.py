"""Forks in which tests run programs: what they begin with, which makes them cheap."""

from __future__ import annotations

import pytest

from kit.forked import said_in_a_fork

MISSING = "import sys; from kit.forked import LIBRARIES; print([each for each in LIBRARIES if each not in sys.modules])"
KNOWN = """
from offload.kernels.cpu import kernels
from offload.machine import machine_name
from offload.speed.curve_file import load_curves
from offload.speed.hardware import rates_key
found = [load_curves(machine_name(), rates_key("cpu"), dtype) for dtype in ("bf16", "fp16", "fp32")]
print([curves is not None and curves.kernels == kernels().name for curves in found])
"""


def test_they_begin_with_all_libraries() -> None:
    """The server of forks says nothing of a name that it cannot import: kit.programs was loaded by every fork anew."""
    assert said_in_a_fork(MISSING) == "[]\n"


def test_programs_measure_no_curves(pytestconfig: pytest.Config) -> None:
    """Each did, for seconds, where other tests disturbed it."""
    if pytestconfig.getoption("deep"):
        pytest.skip("with --deep they do")
    assert said_in_a_fork(KNOWN) == "[True, True, True]\n"
