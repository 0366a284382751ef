"""Checks of a device's kernels on small inputs, one of each sort that the other checks do not run: activations,
products with quantised and with stored matrices, and mixtures of experts; part of `triforce doctor`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import get_args

import torch
from torch import Tensor
from torch.nn.functional import linear

from offload.bench.findings import TOLERANCES, Named, Shown, error_of
from offload.config.networks import Activation, Experts, FeedForward
from offload.config.norm import Norm
from offload.formats.encodings import ENCODINGS
from offload.formats.layout import CODE_BITS
from offload.formats.quantised import Codes, encode_with_torch
from offload.formats.stored import StoredMatrix
from offload.kernels import activation
from offload.kernels.choice import fitting
from offload.kernels.device import DeviceKernels
from offload.kernels.experts import Mixture, Router, RunExperts, run_experts
from offload.kernels.norms import NormWeights
from offload.model.loading import DTYPES
from offload.plan.what_if import LLAMA31_8B
from offload.speed.hardware import Hardware
from offload.weights.expert_layout import bank_of, layout_of
from offload.weights.experts import ResidentExperts

NUM_ROWS, OUTPUTS, INPUTS = 5, 96, 512
# One of each sort of blocks.
STORED = ("Q4_K", "Q6_K", "MXFP4", "IQ4_NL", "INT4_BF16/32", "FP8_F32/128", "Q3_K", "IQ3_XXS", "IQ1_M", "NVFP4_INV")
EXPERTS = Experts(FeedForward(64), 8, 2)
_MOST_BYTE = 0x3B  # with no larger byte no float is infinite or NaN, whichever kind the bytes are of


def kernel_checks(hardware: Hardware, dtypes: Sequence[str], remedy: str) -> Iterator[Named]:
    """The checks of one device in each of `dtypes`."""
    device = torch.device(hardware.device)
    kernels = fitting(device, LLAMA31_8B.head_dim, ())
    for dtype in dtypes:
        given = kernels, device, DTYPES[dtype]
        yield f"products, gated activations, {dtype}", partial(_activations, *given), remedy
        if kernels.usable:
            yield f"products, 4 and 6 bits, {dtype}", partial(_quantised, *given), remedy
        yield f"products, stored matrices, {dtype}", partial(_stored, *given), remedy
        if kernels.experts is not None and dtype != "fp32":
            yield f"products, experts, {dtype}", partial(_experts, *given), remedy


def _activations(kernels: DeviceKernels, device: torch.device, dtype: torch.dtype) -> Shown:
    """Compare each activation of gated rows with torch's operators in fp64."""
    x = _normal(NUM_ROWS, 2 * OUTPUTS, seed=1).to(dtype)
    known: tuple[Activation, ...] = get_args(Activation)
    return _within(dtype, [(kernels.gated(x.to(device), each), activation.gated(x.double(), each)) for each in known])


def _quantised(kernels: DeviceKernels, device: torch.device, dtype: torch.dtype) -> Shown:
    """Compare products with codes in 4 and 6 bits with fp64."""
    x, weight = _normal(NUM_ROWS, INPUTS, seed=2).to(dtype), _normal(OUTPUTS, INPUTS, seed=3).to(dtype)
    pairs = []
    for bits in CODE_BITS:
        codes = Codes(torch.zeros(Codes.shape_of_blocks(weight.shape, bits), dtype=torch.uint8))
        encode_with_torch(weight, codes)
        found = kernels.multiply(x.to(device), Codes(codes.blocks.to(device)), None)
        pairs.append((found, x.double() @ codes.matrix(dtype).double().T))
    return _within(dtype, pairs)


def _stored(kernels: DeviceKernels, device: torch.device, dtype: torch.dtype) -> Shown:
    """Compare products with matrices as checkpoints store them with fp64, and their decoded numbers with torch's."""
    x, pairs, same = _normal(NUM_ROWS, INPUTS, seed=4).to(dtype), [], True
    for name in STORED:
        shape = OUTPUTS, ENCODINGS[name].row_bytes(INPUTS)
        rows = torch.randint(_MOST_BYTE + 1, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
        if name == "MXFP4":  # a block's scale is a power of 2, of which 127 is the first that is not below 1
            rows.view(OUTPUTS, -1, ENCODINGS[name].nbytes)[..., 0] = 127
        if ENCODINGS[name].tail:  # a row's own scale, by which not every number is divided without rounding
            rows[:, -ENCODINGS[name].tail :] = torch.tensor([3.0]).view(torch.uint8)
        here, there = StoredMatrix(rows, ENCODINGS[name]), StoredMatrix(rows.to(device), ENCODINGS[name])
        numbers = here.matrix(dtype)
        same &= torch.equal(kernels.decode_stored(there, dtype).cpu(), numbers)
        pairs.append((kernels.multiply_stored(x.to(device), there, None), x.double() @ numbers.double().T))
    passed, shown = _within(dtype, pairs)
    return same and passed, f"{shown}; {'the same' if same else 'OTHER'} numbers as torch's"


def _experts(kernels: DeviceKernels, device: torch.device, dtype: torch.dtype) -> Shown:
    """Compare a mixture of experts with torch's operators, on the CPU."""
    run = kernels.experts
    assert run is not None
    config = LLAMA31_8B.changed(hidden_size=INPUTS).mapped(lambda block: replace(block, experts=EXPERTS))
    rows = _normal(NUM_ROWS, INPUTS, seed=6).to(dtype)
    router, weight = _normal(EXPERTS.count, INPUTS, seed=7), 1 + _normal(INPUTS, seed=8) / 4
    layout = layout_of(config, dtype)
    content = torch.zeros(EXPERTS.count, layout.num_bytes, dtype=torch.uint8)
    for number, buffer in enumerate(content):
        for place, view in enumerate(layout.views.values()):
            view.of(buffer).copy_(_normal(*view.shape, seed=10 * number + place) / INPUTS**0.5)

    def on(where: torch.device, run: RunExperts) -> Tensor:
        norm = NormWeights(Norm(1e-5), weight.to(where, dtype))
        mixture = Mixture(EXPERTS, Router(router.to(where)), norm)
        return run(mixture, ResidentExperts(bank_of(layout, content.to(where))), rows.to(where))

    by_torch = partial(run_experts, multiply=_product)
    return _within(dtype, [(on(device, run), on(torch.device("cpu"), by_torch).double())])


def _product(x: Tensor, matrix: Tensor | StoredMatrix, bias: Tensor | None) -> Tensor:
    assert isinstance(matrix, Tensor)
    return linear(x, matrix, bias)


def _within(dtype: torch.dtype, pairs: Sequence[tuple[Tensor, Tensor]]) -> Shown:
    """Whether each value found is its exact one but for rounding."""
    name = next(name for name, each in DTYPES.items() if each is dtype)
    error, most = max(error_of(found.cpu(), exact) for found, exact in pairs), TOLERANCES[name]
    return error <= most, f"errors of up to {error:.1e}, at most {most:.0e}"


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
