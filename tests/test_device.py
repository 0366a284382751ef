"""The device that computes: current in each thread that launches on it, summing in fp32, reading pinned blocks."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from kit.models import GREEDY, Sizes, random_model, save, tiny_engine, tiny_plan
from offload.engine.request import GenerationRequest
from offload.transfer.device import sum_in_fp32, use_device
from offload.transfer.memory import Memory

MATMUL = torch.backends.cuda.matmul
REDUCTIONS = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Devices that were made current."""
    found: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    return found


def test_a_gpu_is_made_current_and_a_cpu_is_not(chosen: list[torch.device]) -> None:
    use_device(torch.device("cpu"))
    assert not chosen
    use_device(torch.device("cuda:1"))
    assert chosen == [torch.device("cuda:1")]


def test_partial_sums_are_left_alone_for_a_cpu_and_kept_in_fp32_on_a_gpu() -> None:
    before = [getattr(MATMUL, name) for name in REDUCTIONS]
    try:
        for name in REDUCTIONS:
            setattr(MATMUL, name, True)
        sum_in_fp32(torch.device("cpu"))
        assert [getattr(MATMUL, name) for name in REDUCTIONS] == [True, True]
        sum_in_fp32(torch.device("cuda:0"))
        assert [getattr(MATMUL, name) for name in REDUCTIONS] == [False, False]
    finally:
        for name, value in zip(REDUCTIONS, before, strict=True):
            setattr(MATMUL, name, value)


def test_an_engine_makes_its_device_current_in_every_thread_that_asks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread begins with cuda:0: the work ahead of a chat on cuda:1 launched kernels on the wrong GPU."""
    used: list[tuple[int, str]] = []
    folder = save(random_model(vocab_size=264, seed=11), tmp_path, tokenizer=True)
    plan = tiny_plan(folder, folder, Sizes(gamma=3, draft_gamma=1), num_prompt_tokens=40, max_tokens=20)
    with tiny_engine(plan, folder, folder) as engine:
        monkeypatch.setattr(
            "offload.engine.engine.use_device", lambda device: used.append((threading.get_ident(), device.type))
        )
        prompt = [5 + i % 200 for i in range(40)]
        ahead = threading.Thread(target=engine.precompute, args=(prompt[:30],))
        ahead.start()
        ahead.join(60)
        list(engine.generate(GenerationRequest(prompt, GREEDY, max_tokens=4, reuse=True)))
    assert used == [(ahead.ident, "cpu"), (threading.get_ident(), "cpu")]


class Runtime:
    """Of the CUDA runtime, what pins: the flags that it was asked for."""

    def __init__(self) -> None:
        self.flags: list[int] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.flags.append(flags)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0


def test_host_blocks_are_pinned_for_all_gpus_and_for_kernels_that_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr("offload.transfer.memory._numa_node", lambda device: None)
    Memory(torch.device("cuda:0")).allocate((4096,), torch.uint8, tier="host", purpose="test")
    portable, mapped = 1, 2  # of cudaHostRegister
    assert runtime.flags == [portable | mapped]
