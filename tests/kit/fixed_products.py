"""Products of stored matrices in fixed point by a GPU's programs, in Triton's interpreter or on a GPU, beside their
definition. No tests in here."""

from __future__ import annotations

import torch
from torch import Tensor

from kit import fixed
from kit.stored import made_up
from offload.formats.encodings import ENCODINGS
from offload.formats.fixed_gpu import counts_of
from offload.formats.stored import StoredMatrix
from offload.formats.stored_codes_gpu import book_of
from offload.kernels.gpu import experts as by_triton
from offload.kernels.gpu.fixed_rows import FixedRows
from offload.native.launch import launch

FIXED = [name for name, own in ENCODINGS.items() if own.has_integers]


def normal(*size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def same(found: Tensor, wanted: Tensor) -> bool:
    """Whether the bits are the same, but for those of what is no number."""
    found, wanted = found.cpu().float(), wanted.float()
    return torch.equal(found.isnan(), wanted.isnan()) and torch.equal(*(bits(each) for each in (found, wanted)))


def bits(x: Tensor) -> Tensor:
    return x.nan_to_num(7.0, torch.inf, -torch.inf).view(torch.int32)


def rows_of(inputs: int) -> Tensor:
    """Rows that are typical, of many magnitudes, with groups of zeros, of small and of large numbers, and of what is no
    number; and whose mantissas are ones."""
    x = normal(9, inputs, seed=3)
    powers = torch.randint(-20, 20, (inputs,), generator=torch.Generator().manual_seed(4), device=x.device)
    x[1] = x[1].ldexp(powers)
    x[2, :32], x[2, -32:] = 0.0, -0.0
    x[3, 5], x[3, -1], x[4, 33] = torch.inf, -torch.inf, torch.nan
    x[5] = x[5].sign() * (2 - 2**-7)
    x[5, 32:] *= 2 ** (torch.arange(inputs - 32, device=x.device) % 13 - 6.0)
    x[6], x[7] = x[6] * 2.0**-24, x[7] * 2.0**13
    x[8] *= 2.0**-62
    return x


def product(x: Tensor, stored: StoredMatrix, *, tile: int = 8) -> Tensor:
    """The product by the GPU's programs, fp32 [T, outputs]."""
    own, outputs, tiles = FixedRows.of(x, stored.encoding), len(stored.rows), -(-len(x) // tile)
    out = torch.full((len(x), outputs), torch.nan, device=x.device)
    pairs = torch.arange(tiles * tile, dtype=torch.int32, device=x.device)
    pairs[len(x) :] = -1
    zeros = torch.zeros(tiles, dtype=torch.int32, device=x.device)
    given = own.planes, own.units, own.sums, pairs, zeros, zeros[:1], stored.rows, book_of(stored)
    sizes = len(x), 1, x.shape[1] // 32, outputs, 0, 0, 0, 0, outputs
    tiling = stored.encoding.fixed_tiling
    launch(
        by_triton.multiply_fixed, (tiles, -(-outputs // tiling.outputs)), (*given, counts_of(x.device), out, *sizes),
        GATED=False, ADDED=False, ACTIVATION=-1, ROWS=tile, OUTPUTS=tiling.outputs, FORM=stored.encoding,
        num_warps=tiling.warps, num_stages=tiling.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def defined(x: Tensor, stored: StoredMatrix) -> Tensor:
    """The product by its definition, on the CPU."""
    with torch.device("cpu"):
        return fixed.product(x.cpu(), StoredMatrix(stored.rows.cpu(), stored.encoding))


def matrix(name: str, *, blocks: int = 0, outputs: int = 37, seed: int = 1) -> StoredMatrix:
    """By default with inputs that are no multiple of those of a step, where that is possible."""
    own = ENCODINGS[name]
    return made_up(name, outputs, (blocks or max(2, 288 // own.numbers)) * own.numbers, seed)


def has_the_defined_bits(name: str, dtype: torch.dtype, device: torch.device | str) -> bool:
    """Whether products with a matrix of this encoding have the bits of their definition, in tiles of either number of
    lines, not all of them in use."""
    made = matrix(name)
    stored, x = StoredMatrix(made.rows.to(device), made.encoding), rows_of(made.shape[1]).to(device, dtype)
    wanted = defined(x, stored)
    return all(same(product(x, stored, tile=tile), wanted) for tile in (8, 16))
