"""A pytest plugin: the small cases of the GPU's kernels, which Triton's interpreter runs elsewhere, on a real GPU.

usage: PYTHONPATH=tests python -m pytest -p kit.on_gpu tests/*_interpreted.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

# Tensors of these go to the CPU's kernels or caches too, or are engines on paper.
ON_THE_HOST = (
    "test_a_refresh_by_the_kernel_holds_what_one_by_the_host_does",
    "test_every_cache_attends_as_with_torchs_operators",
    "test_caches_attend_as_by_torchs_operators",
    "test_numbers_are_unpacked_bit_for_bit",
    "test_pages_are_unpacked_bit_for_bit",
    "test_residuals_are_left_alone",
    "test_chunks_and_ranges_come_from_packed_homes",
    "test_the_cache_on_a_gpu_follows_the_full_one",
    "test_each_fault_is_seen",  # some read beyond a tensor's end
    "test_slots_give_the_bits_of_resident_experts",
    "test_nothing_behind_the_bank_is_read",
    "test_nothing_behind_a_matrix_is_read",
)
FP32 = 1e-5  # a GPU's exp2 is an approximation


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave those out, and what needs a folder of a model: engines."""
    for item in items:
        engine = {"folder", "folders"} & {*getattr(item, "fixturenames", ())}
        if engine or item.name.partition("[")[0] in ON_THE_HOST:
            item.add_marker(pytest.mark.skip(reason="not of the GPU's kernels alone"))


@pytest.fixture(autouse=True)
def _tensors_are_made_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import gpu_interpreted

    generator: Callable[..., torch.Generator] = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device="cuda": generator(device=device))
    monkeypatch.setitem(gpu_interpreted.TOLERANCE, torch.float32, FP32)
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)
