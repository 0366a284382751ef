"""What tests have in common, above all that they neither see nor change what the developer's machine remembers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from offload.hub.names import FOLDER_VARIABLE as MODELS_VARIABLE
from offload.plan.rates import FOLDER_VARIABLE
from triforce_cli import configuration


def pytest_configure() -> None:
    """Forget what the developer set by variables, before tests are collected: some are made of what is set then."""
    for name in list(os.environ):
        if name.startswith("TRIFORCE_") and name != "TRIFORCE_TEST_MODELS":  # that one is for tests
            del os.environ[name]


@pytest.fixture(scope="session", autouse=True)
def _folders_and_configuration_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Rates that `triforce doctor` measured here would change plans, models that were pulled what names mean, and the
    developer's configuration everything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(tmp_path_factory.mktemp("cache")))
        patch.setenv(MODELS_VARIABLE, str(tmp_path_factory.mktemp("models")))
        patch.setenv(configuration.VARIABLE, os.devnull)
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """torch's threads cost more than they give with tiny models, and far more on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def triforce(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """(exit code, standard output, standard error) of `triforce ARGS`, run in this process."""
    from triforce_cli.app import main

    def triforce(*args: str) -> tuple[int, str, str]:
        capfd.readouterr()
        return main(list(args)), *capfd.readouterr()

    return triforce


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `cuda` where there is no such device."""
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))
