"""The choice of bits per number: for self-proposing with quantised weights or cache, and for crossing a link.

The target may propose to itself with quantised weights or over its quantised cache. Packed keys, values and weights
cross a link in 12 of their 16 bits (formats/packed.py). Weights cross in 9 bits if their 4-bit codes are on the device,
in 8 beside 6-bit codes (formats/residuals.py). No bit is lost.
"""

from __future__ import annotations

from offload.config.mixers import Indexer
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
from offload.machine import KERNELS
from offload.plan.composition import CODED_CHUNK, Composition, takes_coded_chunks
from offload.plan.sizing import Sizing

ALL_WINDOWS = "every layer of the model sees a window of its last tokens, which stays on the device"
CPU_RESTORED = 2.7e9  # bytes of bf16 a second that two cores restore from codes and residuals; from packed ones 20e9
_SLOWER = 8.0  # memory rate over link rate from which packing pays: unpacking moves 3.5 bytes a number


def chooses(indexer: Indexer) -> str:
    """The reason why a copy of a part of the cache, or of all in fewer bits, has nothing to win with an indexer."""
    return f"a row attends to {indexer.most_tokens} tokens that the model's own index chooses, whatever the length"


def check_quantised(sizing: Sizing) -> None:
    """Raise UsageError if the user asks for quantised weights or a quantised cache that are not possible."""
    options = sizing.options
    for name, bits, find in (
        ("weight-bits", options.weight_bits, weights_problem),
        ("kv-bits", options.kv_bits, cache_problem),
    ):
        if bits not in (None, 16) and (problem := find(sizing)):
            raise UsageError(f"{name} is {bits}: {problem}")


def cache_problem(sizing: Sizing) -> str:
    """The reason why the target cannot propose to itself over its cache, or a part of it, in 4 bits; "" if it can."""
    hardware, target, options = sizing.hardware, sizing.target, sizing.options
    head_dim = target.kv_dim if hardware.is_cpu else target.head_dim
    if not sizing.num_growing:
        return ALL_WINDOWS
    if target.indexer is not None:
        return chooses(target.indexer)
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
    """The reason why the target cannot propose to itself with weights in 4 or 6 bits; "" if it can."""
    hardware = sizing.hardware
    if stored := sizing.target.stored_in:
        return f"the model's own weights are quantised ({', '.join(stored)}), and no second copy of them is made"
    if sizing.target.experts is not None:
        return "the model's layers have experts, of which a token reads a few as they are, and no second copy is made"
    shard = sizing.shard
    if not takes_codes(products := (*shard.all_products, *shard.head_products)):
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
    """The bits of a cached number that crosses the link: 16 or 12 as the user chooses, or 12 if that is possible and
    quicker. 9 replaces 12 if the target proposes over its whole cache in 4 bits. Raises UsageError if the user asks for
    12 and that is not possible."""
    chunk = composition.chunk if composition.budget else PACKED_TOKENS
    few = 9 if composition.keeps_all_codes and _restores(sizing) else 12
    return few if _fewer(sizing, _packing_cache_problem(sizing, chunk) or _packing_problem(sizing)) else 16


def weight_link_bits(sizing: Sizing, composition: Composition) -> int:
    """The bits of a weight that crosses the link: 16 or 12, or 9 or 8 if the target proposes with weights in 4 or 6
    bits. 16 means the stored encoding, which has fewer bits for quantised weights."""
    if sizing.target.stored_in:
        return 16
    few = BESIDE_CODES[composition.weight_bits] if composition.weight_bits < 16 and _restores(sizing) else 12
    return few if _fewer(sizing, _packing_problem(sizing)) else 16


def _restores(sizing: Sizing) -> bool:
    """Whether restoring numbers from codes and residuals is faster than transferring packed numbers: on a CPU only for
    a slow link, unless the user sets the link's bits."""
    options, hardware = sizing.options, sizing.hardware
    if not hardware.is_cpu or options.link_bits is not None:
        return True
    return 2 * sizing.link_rate <= CPU_RESTORED


def _fewer(sizing: Sizing, problem: str) -> bool:
    """Whether numbers cross the link in fewer than 16 bits. problem: the reason why they cannot, or ""."""
    options, hardware = sizing.options, sizing.hardware
    if options.link_bits == 12 and problem:
        raise UsageError(f"link-bits is 12: {problem}")
    if options.link_bits is not None:
        return options.link_bits == 12
    return not problem and sizing.link_rate * _SLOWER <= hardware.rates.device_read


def _packing_cache_problem(sizing: Sizing, chunk: int) -> str:
    """The reason why cached numbers cannot cross the link in 12 bits where weights can, or "". chunk: tokens that are
    read together."""
    hardware, target = sizing.hardware, sizing.target
    if target.indexer is not None:
        return f"blocks of {target.indexer.ratio} tokens cross by themselves, and {PACKED_TOKENS} are packed together"
    head_dim, groups = (target.kv_dim, 4) if hardware.is_cpu else (target.head_dim, 16)
    if head_dim > WIDEST_GPU_HEAD and not hardware.is_cpu:
        return f"heads have {head_dim} numbers, and a GPU's kernels know up to {WIDEST_GPU_HEAD}"
    if head_dim % groups:
        return f"heads of {head_dim} numbers are not whole groups of {groups}"
    if chunk % PACKED_TOKENS:
        return f"chunk is {chunk}, and {PACKED_TOKENS} tokens are packed together; try --chunk {PACKED_TOKENS}"
    return ""


def _packing_problem(sizing: Sizing) -> str:
    """The reason why no numbers can cross the link in 12 bits, or ""."""
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
