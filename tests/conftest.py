"""What holds for all tests: they neither see nor change what the developer's machine remembers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from offload.plan.rates import FOLDER_VARIABLE


@pytest.fixture(scope="session", autouse=True)
def _rates_file_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Rates that `triforce doctor` measured here would change plans."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(tmp_path_factory.mktemp("cache")))
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
