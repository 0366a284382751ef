"""In how many bits numbers are proposed with and cross a link, where they can.

The target may propose to itself with quantised weights or over its quantised cache. Cached keys and values, and
weights, cross a link in 12 of their 16 bits where they are packed (formats/packed.py), weights in 9 where their codes
in 4 bits are on the device, in 8 beside 6 bits (formats/residuals.py). None is lost.
"""

from __future__ import annotations

from offload.errors import UsageError
from offload.formats.layout import (
    BESIDE_CODES,
    CODE_GROUP,
    CODE_TILE,
    PACKED_TOKENS,
    WIDEST_GPU_HEAD,
    takes_codes,
    takes_kv_codes,
)
from offload.plan.composition import CODED_CHUNK, Composition, takes_coded_chunks
from offload.plan.machine import KERNELS
from offload.plan.sizing import Sizing

ALL_WINDOWS = "every layer of the model sees a window of its last tokens, which stays on the device"
CPU_RESTORED = 2.7e9  # bytes a second of bf16 that two cores make of codes and the rest in a pass; packed ones 20e9
_SLOWER = 8.0  # than the device's memory is a link at least that packing is worth: unpacking moves 3.5 bytes a number


def check_quantised(sizing: Sizing) -> None:
    """Raise UsageError where the user wants weights or a quantised cache and they cannot be."""
    options = sizing.options
    for name, bits, find in (
        ("weight-bits", options.weight_bits, weights_problem),
        ("kv-bits", options.kv_bits, cache_problem),
    ):
        if bits not in (None, 16) and (problem := find(sizing)):
            raise UsageError(f"{name} is {bits}: {problem}")


def cache_problem(sizing: Sizing) -> str:
    """Why the target cannot propose to itself over its cache, or a part of it, in 4 bits, "" where it can."""
    hardware, head_dim, options = sizing.hardware, sizing.target.head_dim, sizing.options
    if not sizing.num_growing:
        return ALL_WINDOWS
    if not takes_kv_codes(head_dim, hardware.is_cpu):
        group = "8" if hardware.is_cpu else f"16, up to {WIDEST_GPU_HEAD}"
        return f"heads of {head_dim} numbers are not whole groups of {group}"
    if options.budget is not None and not takes_coded_chunks(options):
        return (
            f"budget is {options.budget}, and quantised chunks have {CODED_CHUNK} tokens; "
            f"leave out --budget, or try --chunk {CODED_CHUNK}"
        )
    return ""


def weights_problem(sizing: Sizing) -> str:
    """Why the target cannot propose to itself with weights in 4 or 6 bits, "" where it can."""
    hardware = sizing.hardware
    if stored := sizing.target.stored_in:
        return f"the model's own weights are quantised ({', '.join(stored)}), and no second copy of them is made"
    if not takes_codes(products := sizing.shard.all_products):
        shapes = ", ".join(f"{outputs} x {inputs}" for outputs, inputs, _ in products)
        return (
            f"weights of {shapes} (outputs x inputs) are not whole groups of {CODE_GROUP} inputs and {CODE_TILE} "
            "outputs"
        )
    if hardware.is_cpu:
        return ""
    if sizing.itemsize != 2:
        return f"on {hardware.device} rows of 16 bits alone are multiplied with them; try --dtype bf16"
    if not hardware.has_kernels:
        return f"{hardware.device} multiplies them by kernels in Triton; pip install triton, without {KERNELS}=off"
    if not hardware.fast_bf16:
        return f"{hardware.device} multiplies them by kernels that need compute capability 8.0 or later"
    return ""


def link_bits(sizing: Sizing, composition: Composition) -> int:
    """Of a cached number that crosses the link, 16 or 12: the user's choice, or 12 where that can be and is quicker; 9
    for 12 where the target proposes over its cache in 4 bits. Raises UsageError where the user wants 12 and that cannot
    be."""
    chunk = composition.chunk if composition.budget else PACKED_TOKENS
    few = 9 if composition.keeps_all_codes and _restores(sizing) else 12
    return few if _fewer(sizing, _packing_cache_problem(sizing, chunk) or _packing_problem(sizing)) else 16


def weight_link_bits(sizing: Sizing, composition: Composition) -> int:
    """The same of a weight, and 9 or 8 where the target proposes with its weights in 4 or 6 bits. 16: as it is stored,
    which for quantised ones is fewer."""
    if sizing.target.stored_in:
        return 16
    few = BESIDE_CODES[composition.weight_bits] if composition.weight_bits < 16 and _restores(sizing) else 12
    return few if _fewer(sizing, _packing_problem(sizing)) else 16


def _restores(sizing: Sizing) -> bool:
    """Whether numbers are made of their codes and the rest faster than a link brings what is packed: on a CPU by a
    slow link alone, unless the user wants them quantised."""
    options, hardware = sizing.options, sizing.hardware
    if not hardware.is_cpu or options.link_bits is not None:
        return True
    return 2 * sizing.link_rate <= CPU_RESTORED


def _fewer(sizing: Sizing, problem: str) -> bool:
    """Whether numbers cross in fewer bits. problem: why they cannot, or ""."""
    options, hardware = sizing.options, sizing.hardware
    if options.link_bits == 12 and problem:
        raise UsageError(f"link-bits is 12: {problem}")
    if options.link_bits is not None:
        return options.link_bits == 12
    return not problem and sizing.link_rate * _SLOWER <= hardware.rates.device_read


def _packing_cache_problem(sizing: Sizing, chunk: int) -> str:
    """Why cached numbers cannot cross in 12 bits, "" where they can, as weights do. chunk: tokens that are read
    together."""
    hardware, head_dim = sizing.hardware, sizing.target.head_dim
    groups = 4 if hardware.is_cpu else 16
    if head_dim > WIDEST_GPU_HEAD and not hardware.is_cpu:
        return f"heads have {head_dim} numbers, and a GPU's kernels know up to {WIDEST_GPU_HEAD}"
    if head_dim % groups:
        return f"heads of {head_dim} numbers are not whole groups of {groups}"
    if chunk % PACKED_TOKENS:
        return f"chunk is {chunk}, and {PACKED_TOKENS} tokens are packed together; try --chunk {PACKED_TOKENS}"
    return ""


def _packing_problem(sizing: Sizing) -> str:
    """Why no numbers can cross in 12 bits, "" where they can."""
    hardware = sizing.hardware
    if sizing.dtype != "bf16":
        return f"{sizing.dtype} is not packed, bf16 alone is"
    if not hardware.packs:
        return f"the CPU's kernels pack, and are not there; triforce version says why, without {KERNELS}=off"
    if not hardware.is_cpu and not hardware.has_kernels:
        return f"{hardware.device} unpacks by kernels in Triton; pip install triton, without {KERNELS}=off"
    if not hardware.is_cpu and not hardware.fast_bf16:
        return f"{hardware.device} unpacks by kernels that need compute capability 8.0 or later"
    return ""
