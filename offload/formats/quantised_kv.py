"""Keys and values in 4 bits: made from exact ones by the CPU's kernels, by torch's operators or, in
quantised_kv_gpu.py, by a GPU, and attended to as coded runs (`kernels.runs`).

By groups of `GROUP` tokens a key is low + step * code of its channel, and by `CHANNELS` a value of its token;
step and low are bf16. Channels of keys have magnitudes of their own, tokens of values (KIVI, Liu et al. 2024, § 3).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from offload.formats.layout import KV_CODE_GROUP, KV_CODE_LANES, KV_VALUE_GROUP, kv_code_bytes
from offload.formats.quantised import group_codes
from offload.native.interface import DTYPES, Encoding, Library

GROUP, CHANNELS = KV_CODE_GROUP, KV_VALUE_GROUP
_HALF = GROUP // 2

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
        """The shape of `blocks` for the whole groups of `num_tokens` tokens."""
        return num_layers, num_kv_heads, num_tokens // GROUP, kv_code_bytes(head_dim)

    def groups(self, start: int, stop: int) -> KVCodes:
        """The groups `start` to `stop`, as views."""
        return replace(self, blocks=self.blocks[:, :, start:stop])

    def rows(self, dtype: torch.dtype) -> Tensor:
        """The numbers that the codes stand for, computed in fp32 and rounded to `dtype`: [L, 2, H_kv, tokens, D]."""
        return self._by_token(*(low + step * codes for step, low, codes in self._parts())).to(dtype)

    def steps(self) -> Tensor:
        """The step of each number: fp32 [L, 2, H_kv, tokens, D]."""
        return self._by_token(*(step.expand_as(codes) for step, _, codes in self._parts()))

    def _parts(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Steps, lows and codes, of keys and then of values: [L, H_kv, groups, channels, GROUP], or that broadcast."""
        parts = [part.contiguous() for part in self.blocks.split(_sizes(self.head_dim), 3)]
        scales = [_scales(parts[0], 1), [x.repeat_interleave(CHANNELS, 3) for x in _scales(parts[2], GROUP)]]
        for units, codes in zip(scales, _codes(parts[1], parts[3], self.order), strict=True):
            step, low = (each[..., : codes.shape[3], :] for each in units)
            yield step, low, codes

    def _by_token(self, keys: Tensor, values: Tensor) -> Tensor:
        """[L, H_kv, groups, channels, GROUP] each -> [L, 2, H_kv, tokens, D]"""
        return torch.stack([x.transpose(3, 4)[..., : self.head_dim].flatten(2, 3) for x in (keys, values)], 1)


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


def encode_with_torch(rows: Tensor, into: KVCodes) -> None:
    """Fill `into` with the codes of rows by torch's operators, in either order of codes. The codes are those of
    `encode`, bit for bit."""
    dim = check_rows(rows, into, into.order)[4]
    keys, values = rows.unflatten(3, (-1, GROUP)).unbind(1)  # [L, H, groups, GROUP, D]
    key_scales, keys = group_codes(keys.transpose(3, 4))  # [L, H, groups, D, 2], [..., D, GROUP]
    missing = -dim % CHANNELS
    values = torch.cat([values, values[..., -(dim % CHANNELS) :][..., :1].expand(*values.shape[:-1], missing)], 4)
    value_scales, values = group_codes(values.unflatten(4, (-1, CHANNELS)).transpose(3, 4))
    values = values.transpose(3, 4).flatten(4)[..., :dim]  # [..., GROUP, D]
    if into.order == "matrices":
        keys = keys.transpose(3, 4).unflatten(3, (2, _HALF))
        values = values.unflatten(3, (2, _HALF)).transpose(4, 5)
    else:
        values = pad(values, (0, -dim % KV_CODE_LANES)).unflatten(3, (2, _HALF // 4, 4)).movedim(5, 6)
        keys = keys.unflatten(3, (2, -1, 4)).movedim(5, 6)
    parts = [
        key_scales.view(torch.uint8),
        keys.select(3, 0) | keys.select(3, 1) << 4,
        value_scales.view(torch.uint8),
        values.select(3, 0) | values.select(3, 1) << 4,
    ]
    into.blocks.copy_(torch.cat([part.flatten(3) for part in parts], 3))


def check_rows(rows: Tensor, into: KVCodes, order: Order) -> torch.Size:
    """Do these rows fit these codes, and are both as the kernels take them? -> The rows' shape."""
    num_layers, _, num_kv_heads, num_tokens, dim = rows.shape
    assert into.order == order
    assert rows.stride()[3:] == (dim, 1)
    assert into.blocks.shape == KVCodes.shape_of_blocks(num_layers, num_kv_heads, num_tokens, dim)
    assert into.blocks.stride()[2:] == (into.blocks.shape[3], 1)
    return rows.shape


def _codes(keys: Tensor, values: Tensor, order: Order) -> tuple[Tensor, Tensor]:
    """One a byte, [L, H, groups, channels, GROUP], of keys and of values."""
    if order == "matrices":
        keys = _halves(keys.unflatten(3, (_HALF, -1)), 3).transpose(3, 4)
        return keys, _halves(values.unflatten(3, (-1, _HALF)), 4)
    keys = _halves(keys.unflatten(3, (-1, GROUP, 4)).transpose(4, 5).flatten(3, 4), 3)
    return keys, _halves(values.unflatten(3, (_HALF // 4, -1, 4)).transpose(3, 4).flatten(4, 5), 4)


def _sizes(dim: int) -> list[int]:
    """Bytes of the parts of a block."""
    lanes = -(-dim // KV_CODE_LANES) * KV_CODE_LANES
    return [4 * dim, _HALF * dim, 4 * GROUP * -(-dim // CHANNELS), _HALF * lanes]


def _scales(part: Tensor, repeated: int) -> tuple[Tensor, Tensor]:
    """Step and low, fp32 [L, H, groups, number, 1 or GROUP]."""
    units = part.view(torch.bfloat16).float()
    step, low = units.unflatten(3, (-1, repeated, 2)).unbind(5)
    return step, low


def _halves(codes: Tensor, dim: int) -> Tensor:
    """Codes of the low halves of bytes, then of the high ones, along `dim`."""
    return torch.cat([codes & 15, codes >> 4], dim)
