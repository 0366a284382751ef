"""Advice from the results of `triforce doctor`. Each line is a finding and its remedy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from offload.units import size
from triforce_cli.ground.text import gigabytes
from triforce_cli.screen.busy import BUSY_SHARE

if TYPE_CHECKING:
    from offload.bench.diagnosis import Diagnosis, Gpu
    from offload.machine import Pcie

REAL_SHARE = 0.6  # of a PCIe link's nominal rate; good copies exceed it
TOGETHER_SHARE = 0.8  # of the GPUs' rates alone, summed; below it, they share a bottleneck
MEMORY_SHARE = 0.8  # of the CPU's read rate; if memory is the limit, all links together exceed it
FREE_SHARE = 0.85  # of a GPU's memory; less is free if other programs use it


def advice(diagnosis: Diagnosis) -> list[str]:
    """Lines of advice; none if nothing can be improved."""
    lines = [*_no_gpu(diagnosis)]
    for gpu in diagnosis.gpus:
        lines += [f"{gpu.device}: {line}" for line in _gpu(gpu)]
    lines += [*_several(diagnosis), *_wsl(diagnosis), *_pinning(diagnosis)]
    return [*lines, *_nodes(diagnosis), *_processor(diagnosis)]


def _no_gpu(diagnosis: Diagnosis) -> Iterator[str]:
    if diagnosis.gpus:
        return
    driver, software = diagnosis.driver, diagnosis.software
    yield "no CUDA device: everything runs on the CPU"
    if driver is None or not driver.gpu_names:
        return
    here = f"{driver.gpu_names[0]} with driver {driver.version} is present"
    if software.torch_cuda is None:
        yield (
            f"{here}, but torch {software.torch} is a build without CUDA: reinstall torch with CUDA "
            "(pytorch.org/get-started); in a clone, delete .venv and run scripts/demo.sh again"
        )
    else:
        yield (
            f"{here}, but torch sees none: the driver runs CUDA up to {driver.cuda}, torch is built for "
            f"{software.torch_cuda}; update the driver if that is newer, else look at CUDA_VISIBLE_DEVICES"
        )


def _gpu(gpu: Gpu) -> Iterator[str]:
    if gpu.problem:
        yield f"could not be measured ({gpu.problem}): see what nvidia-smi says"
        return
    if gpu.free_bytes < FREE_SHARE * gpu.total_bytes:
        yield (
            f"{gigabytes(gpu.total_bytes - gpu.free_bytes)} of its {gigabytes(gpu.total_bytes)} are in use: "
            "end other programs on it (nvidia-smi lists them), or let the display use another GPU"
        )
    if gpu.pcie is not None:
        yield from _pcie(gpu, gpu.pcie)


def _pcie(gpu: Gpu, pcie: Pcie) -> Iterator[str]:
    if pcie.width < pcie.max_width:
        share = {2: "half", 4: "a quarter", 8: "an eighth"}.get(pcie.max_width // pcie.width, "a part")
        yield (
            f"PCIe {pcie.generation}.0 x{pcie.width}: the slot gives {share} of what the GPU can do; "
            f"move it to an x{pcie.max_width} slot, or take out what shares its lanes"
        )
    if pcie.generation < pcie.max_generation:
        yield (
            f"PCIe {pcie.generation}.0 and the GPU can do {pcie.max_generation}.0: set the slot's speed in the "
            "firmware (BIOS), and try without a riser cable; the board may not do more"
        )
    on_paper, real = pcie.bytes_per_second, gpu.rates.link.to_device if gpu.rates else None
    if on_paper and real and real < REAL_SHARE * on_paper:
        yield (
            f"copies to it reach {gigabytes(real)}/s of the {gigabytes(on_paper)}/s that its PCIe link carries: "
            "look for other traffic on the link, slow host memory, or a virtual machine in between"
        )


def _several(diagnosis: Diagnosis) -> Iterator[str]:
    together, links = diagnosis.together, [gpu.rates.link for gpu in diagnosis.gpus if gpu.rates]
    if together is None:
        return
    alone, read = sum(link.to_device for link in links), diagnosis.processor.read
    found = f"{gigabytes(together.to_device)}/s together, {gigabytes(alone)}/s alone and added up"
    if together.to_device >= TOGETHER_SHARE * alone:
        return
    if together.to_device >= MEMORY_SHARE * read:
        yield (
            f"the GPUs get all that host memory gives: {found}, and the CPU reads {gigabytes(read)}/s; fill all "
            "of its channels, with the fastest modules that the board takes"
        )
    else:
        yield f"the GPUs share a way to the host: {found}; put them in slots with lanes of their own to the CPU"


def _wsl(diagnosis: Diagnosis) -> Iterator[str]:
    machine = diagnosis.machine
    if not machine.in_wsl:
        return
    yield (
        f"WSL 2 gives Linux {gigabytes(machine.host_bytes)} of Windows' memory, half of it by default: for more, write "
        "memory=48GB, say, below [wsl2] into .wslconfig in your Windows user folder, and run wsl --shutdown"
    )
    yield (
        "files on drives of Windows (/mnt/c, ...) are read slowly: keep models in folders of Linux, as triforce pull "
        "does"
    )
    if diagnosis.gpus:
        yield (
            "in WSL 2 CUDA often pins no more than 1 GB of host memory, whatever ulimit says: weights and caches that "
            "do not fit the GPU may be refused there; Linux itself has no such limit"
        )


def _pinning(diagnosis: Diagnosis) -> Iterator[str]:
    machine = diagnosis.machine
    limit = machine.memlock_bytes
    if diagnosis.gpus and not machine.in_wsl and limit is not None and limit < machine.host_bytes:
        yield (
            f"memlock limit {size(limit)}: where pinning host memory for the GPU fails, raise it "
            "(ulimit -l unlimited, or memlock in /etc/security/limits.conf)"
        )


def _nodes(diagnosis: Diagnosis) -> Iterator[str]:
    usable = diagnosis.machine.usable_numa_nodes
    for gpu in diagnosis.gpus:
        node = gpu.pcie.numa_node if gpu.pcie else None
        if node is not None and set(usable) != {node} and len(diagnosis.machine.numa_nodes) > 1:
            yield (
                f"{gpu.device} hangs on NUMA node {node} and this process may run on {_listed(usable)}: "
                f"numactl --cpunodebind={node} --preferred={node} triforce ... keeps its memory near"
            )


def _processor(diagnosis: Diagnosis) -> Iterator[str]:
    cpu = diagnosis.processor
    if cpu.busy_share > BUSY_SHARE:
        yield (
            f"other programs use {cpu.busy_share:.0%} of the CPU, so it measures slower than it is: "
            "end them and run triforce doctor again"
        )
    if not cpu.fast_bf16:
        yield "bf16 is not fast on this CPU: on it, fp32 is used"
    elif cpu.bf16_flops < cpu.fp32_flops:
        yield "bf16 products are slower than fp32 ones on this CPU: on it, try --dtype fp32"
    if cpu.num_threads < diagnosis.machine.num_cores // 2:  # hyper-threads may count each core twice
        yield (
            f"torch uses {cpu.num_threads} of {diagnosis.machine.num_cores} cores: unset OMP_NUM_THREADS, "
            "or set it to the number of physical cores"
        )


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers)) or "none"
