"""Whether the target may propose to itself with its weights or its quantised cache, as far as arithmetic says."""

from __future__ import annotations

from offload.errors import UsageError
from offload.plan.composition import CODED_CHUNK, takes_coded_chunks
from offload.plan.machine import KERNELS
from offload.plan.sizing import CODE_GROUP, CODE_TILE, Sizing, takes_codes, takes_kv_codes


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
    if not takes_kv_codes(head_dim, hardware.is_cpu):
        return f"heads of {head_dim} numbers are not whole groups of {8 if hardware.is_cpu else 16}"
    if not hardware.is_cpu and not hardware.has_kernels:
        return f"{hardware.device} attends to it by kernels in Triton; pip install triton, without {KERNELS}=off"
    if options.budget is not None and not takes_coded_chunks(options):
        return (
            f"budget is {options.budget}, and quantised chunks have {CODED_CHUNK} tokens; "
            f"leave out --budget, or try --chunk {CODED_CHUNK}"
        )
    return ""


def weights_problem(sizing: Sizing) -> str:
    """Why the target cannot propose to itself with weights in 4 or 6 bits, "" where it can."""
    hardware = sizing.hardware
    if not takes_codes(products := sizing.shard.layer_products()):
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
