"""Activations made of e^x: the bits of a number are the same in a tensor of any size and layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from offload.kernels import exponentials
from offload.kernels.exponentials import grown, sigmoid, silu, softplus

SIZES = (1, 7, 64, 2047, 2048, 2049, 4096, 6001, 16384, 16385, 40000)  # about those of one thread, and of few numbers
Activation = Callable[[Tensor], Tensor]


def one_by_one(activation: Activation, x: Tensor) -> Tensor:
    """In pieces of 64, each by itself."""
    return torch.cat([activation(part.clone()) for part in x.flatten().split(64)]).view(x.shape)


def some(size: int, dtype: torch.dtype) -> Tensor:
    x = 30 * torch.randn(size, generator=torch.Generator().manual_seed(size))
    x[: min(size, 3)] = torch.tensor([0.0, -200.0, 200.0])[:size]
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", [grown, sigmoid, silu, softplus])
def test_a_numbers_bits_do_not_depend_on_the_others(activation: Activation, dtype: torch.dtype) -> None:
    for size in SIZES:
        x = some(size, dtype)
        wanted, wide = one_by_one(activation, x), torch.stack([x, x], 1)
        assert torch.equal(activation(x), wanted)
        assert torch.equal(activation(x[None].expand(3, -1))[2], wanted)
        assert torch.equal(activation(wide[:, 1]), wanted)
        assert torch.equal(activation(wide.t())[0], wanted)
        assert torch.equal(x, some(size, dtype))


def test_torchs_own_sigmoid_would_fail() -> None:
    with pytest.raises(AssertionError):
        test_a_numbers_bits_do_not_depend_on_the_others(torch.sigmoid, torch.float32)


def test_a_part_that_is_left_out_is_seen() -> None:
    """A mutant: numbers after the last whole part stay as they are."""

    def mutant(x: Tensor) -> Tensor:
        found = x.neg().contiguous()
        for part in found.view(-1).split(exponentials._ALONE)[: max(found.numel() // exponentials._ALONE, 1)]:
            part.exp_()
        return found.add_(1)

    with pytest.raises(AssertionError):
        test_a_numbers_bits_do_not_depend_on_the_others(mutant, torch.float32)
