"""Fixtures of all tests. Tests neither read nor change the developer's models, sessions and measured rates."""

from __future__ import annotations

import gc
import logging
import os
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from functools import cache
from heapq import heappop, heapreplace
from itertools import combinations
from math import inf
from typing import TYPE_CHECKING

import pytest
import typer
from hypothesis import HealthCheck, settings

from kit.examples import USUAL
from offload.hub.names import FOLDER_VARIABLE as MODELS_VARIABLE
from offload.speed.rates import FOLDER_VARIABLE
from triforce_cli.ground import answer_log
from triforce_cli.screen.busy import OtherPrograms
from triforce_cli.settings import configuration

if TYPE_CHECKING:
    from pathlib import Path

    from kit.forked import Forked
    from offload.speed.curves import Curve, Curves

FEW = 12  # cases of a matrix, a test that is parametrized more than once, without --deep
Values = tuple[tuple[str, int], ...]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--deep", action="store_true", help="try every case, instead of a few of each kind (far slower)")
    parser.addoption("--examples", type=int, help="of Hypothesis, for each test (default: 12, or 300 with --deep)")


def pytest_configure(config: pytest.Config) -> None:
    """Forget what the developer set by variables, before tests are collected: some are made of what is set then.

    torch's threads cost more than they give with tiny models, and far more on a busy machine.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    ignored = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    num_examples = config.getoption("examples") or (300 if config.getoption("deep") else USUAL)
    settings.register_profile("tests", deadline=None, suppress_health_check=ignored, max_examples=num_examples)
    settings.load_profile("tests")
    logging.getLogger().addHandler(logging.NullHandler())  # else libraries' warnings are written, see __main__.py
    for name in list(os.environ):
        if name.startswith("TRIFORCE_") and not name.startswith("TRIFORCE_TEST_"):  # those are for tests
            del os.environ[name]


@pytest.fixture(scope="session", autouse=True)
def _folders_and_configuration_of_their_own(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[None]:
    """Rates that `triforce doctor` measured here would change plans, models that were pulled what names mean, and the
    developer's configuration everything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(tmp_path_factory.mktemp("cache")))
        patch.setenv(MODELS_VARIABLE, str(tmp_path_factory.mktemp("models")))
        patch.setenv(configuration.VARIABLE, os.devnull)
        patch.setenv(answer_log.FOLDER_VARIABLE, str(log := tmp_path_factory.mktemp("log")))
        (log / answer_log.NAME).touch()  # no first use, which would be said
        patch.setattr(OtherPrograms, "share", lambda self: 0.0)  # no note of what else this machine does
        patch.setattr(typer.main, "get_command", cache(typer.main.get_command))  # all options again for each run
        patch.setattr("offload.worker.timed_runs.MOST_PREEMPTIONS", inf)  # other tests run on the same cores
        if not pytestconfig.getoption("deep"):
            patch.setattr("offload.worker.curve_timer.time_curves", _typical)
            patch.setattr("offload.worker.curve_timer.time_weights", _scaled)
            _save_typical()
        yield


def _typical(dtype: str) -> Curves:
    """In place of measured curves, which take seconds, many more on a busy machine, and give other plans in each run.
    They have tests of their own."""
    from offload.kernels.cpu import kernels
    from offload.speed.curves import typical
    from offload.speed.rates import TWO_CORES

    curves = typical(TWO_CORES.device_read, TWO_CORES.flops)
    coded = tuple(5 / 16 * seconds for seconds in curves.cache) if kernels().usable else None
    return replace(curves, coded_cache=coded, kernels=kernels().name)


def _scaled(dtype: str, form: str, known: Curves) -> Curve:
    return known.weights_of(form)


def _save_typical() -> None:
    """To the file of rates, as if they had been measured, for the programs that tests start: beside other tests a
    program finds the CPU too busy, saves nothing, and so each would measure for seconds."""
    from offload.formats.encodings import ENCODINGS
    from offload.formats.layout import CODE_BITS
    from offload.machine import machine_name
    from offload.model.loading import DTYPES
    from offload.speed.curve_file import save_curves
    from offload.speed.curves import in_bits
    from offload.speed.hardware import rates_key

    forms = ("", *ENCODINGS, *map(in_bits, CODE_BITS))
    for dtype in DTYPES:
        curves = _typical(dtype)
        every = replace(curves, weights={form: curves.weights_of(form) for form in forms})
        save_curves(machine_name(), rates_key("cpu"), dtype, every)


@pytest.fixture(scope="session")
def num_cases(pytestconfig: pytest.Config) -> Callable[[int], int]:
    """Of so many random cases, how many are tried: all with --deep, else a tenth."""
    return lambda number: number if pytestconfig.getoption("deep") else number // 10


@pytest.fixture
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the waits for the disk; the order of sync calls is tested separately."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """A target and its draft by the model's name in contract.py, made once."""
    from kit.contract import MODELS

    root, names = tmp_path_factory.mktemp("pairs"), [*MODELS]
    return cache(lambda name: MODELS[name].make(root / str(names.index(name))))


@pytest.fixture
def forked_here() -> Iterator[list[Forked]]:
    """The ranks that engines start are forks of this process, which is quicker than processes of their own."""
    from kit.forked import forked_ranks

    with forked_ranks() as started:
        yield started


@pytest.fixture
def triforce(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """(exit code, standard output, standard error) of `triforce ARGS`, run in this process."""
    from triforce_cli.app import main

    def triforce(*args: str) -> tuple[int, str, str]:
        capfd.readouterr()
        return main(list(args)), *capfd.readouterr()

    return triforce


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Nothing that is imported and collected is garbage, and to look at it again and again takes seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Unless all are wanted, leave FEW cases of a matrix, n of a test marked few(n), and none of one marked `deep`.
    Skip what is marked `cuda` where there is no such device."""
    if not config.getoption("deep"):
        kept = {item for item in items if not item.get_closest_marker("deep")}
        kept -= set(_beyond_a_few([item for item in items if item in kept]))
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))


def _beyond_a_few(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """All but those that together have every value of every parameter, and every two of them, about equally often."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        num_left = len(cases) - _num_kept(cases)
        if num_left:
            yield from _least_missed(cases, num_left)


def _least_missed(cases: list[pytest.Function], num_left: int) -> list[pytest.Function]:
    """So many of them, when the others are chosen one by one: always that whose values were met least often."""
    values = [_values(case) for case in cases]
    met: Counter[Values] = Counter()
    queue = [(0, place) for place in range(len(cases))]  # how often they were met, when that was last looked at
    while len(queue) > num_left:
        place = queue[0][1]
        times = sum(met[each] for each in values[place])
        if times == queue[0][0]:  # of the others none was met less often, since that only grows
            met.update(values[place])
            heappop(queue)
        else:
            heapreplace(queue, (times, place))
    return [cases[place] for _, place in queue]


def _num_kept(cases: list[pytest.Function]) -> int:
    """n of few(n); of a matrix FEW, or as many as a parameter has values; else all."""
    marker = cases[0].get_closest_marker("few")
    if marker:
        return min(marker.args[0], len(cases))
    if sum(1 for _ in cases[0].iter_markers("parametrize")) < 2:
        return len(cases)
    columns = zip(*(case.callspec.params.values() for case in cases), strict=True)
    return min(max(FEW, *(len({id(value) for value in column}) for column in columns)), len(cases))


def _values(case: pytest.Function) -> list[Values]:
    """Each parameter's, and every two of them."""
    values = [(name, id(value)) for name, value in case.callspec.params.items()]
    return [*combinations(values, 1), *combinations(values, 2)]
