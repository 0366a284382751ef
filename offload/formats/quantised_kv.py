"""Keys and values in 4 bits: made from exact ones by the CPU or, in quantised_kv_gpu.py, by a GPU, and attended to in
`kernels.spans` or `kernels.gpu.attention`.

By groups of `GROUP` tokens a key is low + step * code of its channel, and by `CHANNELS` a value of its token;
step and low are bf16. Channels of keys have magnitudes of their own, tokens of values (KIVI, Liu et al. 2024, § 3).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from offload.formats.layout import KV_CODE_GROUP, KV_VALUE_GROUP, kv_code_bytes
from offload.native.interface import DTYPES, Encoding, Library

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


def encode(rows: Tensor, into: KVCodes, kernels: Library) -> None:
    """Fill `into` with the codes of rows, [L, 2, H_kv, tokens, D] with each head's [tokens, D] contiguous, on all
    threads."""
    num_layers, _, num_kv_heads, num_tokens, dim = check_rows(rows, into, "lanes")
    at = rows.data_ptr()
    encoding = Encoding(
        at, at + rows.stride(1) * rows.itemsize, into.blocks.data_ptr(),
        rows.stride(0), rows.stride(2), into.blocks.stride(0), into.blocks.stride(1),
        num_layers, num_kv_heads, num_tokens // GROUP, dim,
    )  # fmt: skip
    kernels.library.encode_kv(DTYPES[rows.dtype], ctypes.byref(encoding), torch.get_num_threads())


def check_rows(rows: Tensor, into: KVCodes, order: Order) -> torch.Size:
    """Do these rows fit these codes, and are both as the kernels take them? -> The rows' shape."""
    num_layers, _, num_kv_heads, num_tokens, dim = rows.shape
    assert into.order == order
    assert rows.stride()[3:] == (dim, 1)
    assert into.blocks.shape == KVCodes.shape_of_blocks(num_layers, num_kv_heads, num_tokens, dim)
    assert into.blocks.stride()[2:] == (into.blocks.shape[3], 1)
    return rows.shape
