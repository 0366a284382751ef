"""Keys and values in 4 bits: made from exact ones by the device's kernels, and attended to in `kernels.spans` or
`kernels.gpu.attention`.

By groups of `GROUP` tokens a key is low + step * code of its channel, and by `CHANNELS` a value of its token;
step and low are bf16. Channels of keys have magnitudes of their own, tokens of values (KIVI, Liu et al. 2024, § 3).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from offload.kernels.gpu import GpuKernels
from offload.kernels.native import Kernels
from offload.kernels.native.interface import DTYPES, Encoding
from offload.plan.sizing import KV_CODE_GROUP, KV_VALUE_GROUP, kv_code_bytes

GROUP, CHANNELS = KV_CODE_GROUP, KV_VALUE_GROUP

Order = Literal["lanes", "matrices"]


@dataclass(frozen=True)
class KVCodes:
    """Whole groups of tokens of layers.

    blocks: uint8 [L, H_kv, groups, bytes]: steps and lows of keys, their codes, and the same of values; see
    native/kv_codes.h. head_dim: channels D. order: of the codes: "lanes", as there, for a CPU's vectors, or
    "matrices", for a GPU, D a multiple of 16: keys [16 tokens, D] and values [D, 16 tokens], as tensor cores take
    them, the last 16 tokens in the high halves.
    """

    blocks: Tensor
    head_dim: int
    order: Order = "lanes"

    @staticmethod
    def shape_of_blocks(
        num_layers: int, num_kv_heads: int, num_tokens: int, head_dim: int
    ) -> tuple[int, int, int, int]:
        """For the whole groups of so many tokens."""
        return num_layers, num_kv_heads, num_tokens // GROUP, kv_code_bytes(head_dim)

    def groups(self, start: int, stop: int) -> KVCodes:
        """Those numbers `start` to `stop`."""
        return replace(self, blocks=self.blocks[:, :, start:stop])


def order_for(kernels: Kernels | GpuKernels) -> Order:
    """Of codes that these kernels attend to."""
    return "matrices" if isinstance(kernels, GpuKernels) else "lanes"


def encode(rows: Tensor, into: KVCodes, kernels: Kernels | GpuKernels, wanted: Tensor | None = None) -> None:
    """Fill `into` with the codes of rows, [L, 2, H_kv, tokens, D] with each head's [tokens, D] contiguous: on all
    threads or, on a GPU, by one launch. wanted: there, int64 [L, H_kv, groups] contiguous, the groups that are
    negative stay as they are."""
    assert into.order == order_for(kernels)
    num_layers, _, num_kv_heads, num_tokens, dim = rows.shape
    assert rows.stride()[3:] == (dim, 1)
    assert into.blocks.shape == KVCodes.shape_of_blocks(num_layers, num_kv_heads, num_tokens, dim)
    assert into.blocks.stride()[2:] == (into.blocks.shape[3], 1)
    if isinstance(kernels, GpuKernels):
        from offload.kernels.gpu.kv_codes import encode as encode_on_gpu  # it imports Triton

        return encode_on_gpu(rows, into.blocks, wanted)
    assert kernels.library is not None
    assert wanted is None
    at = rows.data_ptr()
    encoding = Encoding(
        at, at + rows.stride(1) * rows.itemsize, into.blocks.data_ptr(),
        rows.stride(0), rows.stride(2), into.blocks.stride(0), into.blocks.stride(1),
        num_layers, num_kv_heads, num_tokens // GROUP, dim,
    )  # fmt: skip
    kernels.library.encode_kv(DTYPES[rows.dtype], ctypes.byref(encoding), torch.get_num_threads())
    return None
