"""What holds for all tests: they neither see nor change what the developer's machine remembers."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from offload.hub.names import FOLDER_VARIABLE as MODELS_VARIABLE
from offload.plan.rates import FOLDER_VARIABLE
from triforce_cli import configuration


@pytest.fixture(scope="session", autouse=True)
def _folders_and_configuration_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Rates that `triforce doctor` measured here would change plans, models that were pulled what names mean, and the
    developer's configuration everything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(tmp_path_factory.mktemp("cache")))
        patch.setenv(MODELS_VARIABLE, str(tmp_path_factory.mktemp("models")))
        patch.setenv(configuration.VARIABLE, os.devnull)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `cuda` where there is no such device."""
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))
