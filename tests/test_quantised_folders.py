"""Folders with a quantization_config: which encodings follow, and that every number is the one its format means.

References read one packed number after the other, as the formats' own libraries define them, and compute in the
scale's dtype; what a library of a format is there, it is asked as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from kit.examples import at_most
from kit.families import TINY
from kit.models import Sizes, load, random_model, random_tokens, target_cache, tiny_plan
from offload.config.config_json import config_of
from offload.config.encodings import matrices
from offload.config.model import ModelConfig
from offload.config.reading import read_config
from offload.config.schemes import Quantisation, Rule, Scheme, is_pattern
from offload.errors import ModelError
from offload.formats.encodings import ENCODINGS
from offload.formats.stored import StoredMatrix
from offload.kernels.device import NONE
from offload.session.fingerprints import model_digest
from offload.weights import linear
from offload.weights.checkpoint import Checkpoint, check_model
from offload.weights.unpacking import Packed
from test_parity import assert_same_logits, in_decoding, in_prefill

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
DOWN = "model.layers.0.mlp.down_proj"  # [64, 96]
GATE = "model.layers.0.mlp.gate_proj"  # [96, 64]
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WORD = 1 << 32
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A format. stored: quantization_config. make: (outputs, inputs, generator) -> the parts of a module. meant:
    (parts, outputs, inputs) -> its numbers in the scale's dtype. kinds: the encodings of `DOWN` and `GATE`."""

    stored: dict[str, Any]
    make: Callable[[int, int, torch.Generator], Tensors]
    meant: Callable[[Tensors, int, int], Tensor]
    kinds: tuple[str, str]
    dtype: str = "float16"
    fields: dict[str, Any] = field(default_factory=dict)


def words(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Any bits; the first two words are the least and the largest numbers."""
    made = torch.randint(-(1 << 31), 1 << 31, shape, generator=generator).to(torch.int32)
    made.view(-1)[:2] = torch.tensor([0, -1])
    return made


def some_scales(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Of several sizes, among them 0, a negative one, and ones whose products are subnormal or too large for fp16."""
    made = torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-4, 2, shape, generator=generator)
    special = torch.tensor([0.0, -0.5, 6e-7, 30000.0])
    flat = made.view(-1)
    if len(flat) > 4:
        flat[:4] = special
    return made.to(dtype)


def groups_of(inputs: int, size: int) -> int:
    return 1 if size == -1 else -(-inputs // size)


def group(at: int, size: int) -> int:
    return 0 if size == -1 else at // size


def gptq(bits: int, size: int, *, order: bool = False, trivial: bool = False) -> Callable[..., Tensors]:
    def make(outputs: int, inputs: int, generator: torch.Generator) -> Tensors:
        groups = groups_of(inputs, size)
        made = {
            "qweight": words((inputs * bits // 32, outputs), generator),
            "qzeros": words((groups, outputs * bits // 32), generator),
            "scales": some_scales((groups, outputs), torch.float16, generator),
        }
        in_order = torch.tensor([group(at, size) for at in range(inputs)], dtype=torch.int32)
        if order:
            made["g_idx"] = in_order[torch.randperm(inputs, generator=generator)]
        return made | ({"g_idx": in_order} if trivial else {})

    return make


def gptq_meant(bits: int, size: int, add: int) -> Callable[[Tensors, int, int], Tensor]:
    """GPTQModel: scales[g_idx] * (weight - zeros[g_idx]), after `add` was added to the packed zeros."""

    def meant(parts: Tensors, outputs: int, inputs: int) -> Tensor:
        weight, zeros, scales = parts["qweight"].tolist(), parts["qzeros"].tolist(), parts["scales"]
        order = parts["g_idx"].tolist() if "g_idx" in parts else [group(at, size) for at in range(inputs)]
        mask, each = (1 << bits) - 1, 32 // bits
        codes = [
            [
                (weight[at // each][out] % WORD >> at % each * bits & mask)
                - ((zeros[order[at]][out // each] + add) % WORD >> out % each * bits & mask)
                for at in range(inputs)
            ]
            for out in range(outputs)
        ]
        return scales[order].T * torch.tensor(codes, dtype=torch.int16)

    return meant


def awq(size: int) -> Callable[..., Tensors]:
    def make(outputs: int, inputs: int, generator: torch.Generator) -> Tensors:
        return {
            "qweight": words((inputs, outputs // 8), generator),
            "qzeros": words((groups_of(inputs, size), outputs // 8), generator),
            "scales": some_scales((groups_of(inputs, size), outputs), torch.float16, generator),
        }

    return make


def awq_meant(size: int) -> Callable[[Tensors, int, int], Tensor]:
    """AutoAWQ's WQLinear_GEMM packs outputs 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits on."""

    def meant(parts: Tensors, outputs: int, inputs: int) -> Tensor:
        weight, zeros = parts["qweight"].tolist(), parts["qzeros"].tolist()
        shifts = [4 * (0, 2, 4, 6, 1, 3, 5, 7).index(out % 8) for out in range(outputs)]

        def number(row: list[int], out: int) -> int:
            return row[out // 8] % WORD >> shifts[out] & 15

        codes = [
            [number(weight[at], out) - number(zeros[group(at, size)], out) for at in range(inputs)]
            for out in range(outputs)
        ]
        order = [group(at, size) for at in range(inputs)]
        return torch.tensor(codes, dtype=torch.int8) * parts["scales"][order].T

    return meant


def grid(strategy: str, outputs: int, inputs: int) -> tuple[int, ...]:
    name, _, size = strategy.partition(" ")
    if name == "block":
        rows, columns = map(int, size.split("x"))
        return -(-outputs // rows), -(-inputs // columns)
    return {"tensor": (1,), "channel": (outputs, 1), "group": (outputs, -(-inputs // int(size or 1)))}[name]


def spread(scales: Tensor, strategy: str, outputs: int, inputs: int) -> Tensor:
    """A scale for each number, [outputs, inputs]."""
    name, _, size = strategy.partition(" ")
    if name == "tensor":
        return scales.reshape(1, 1).expand(outputs, inputs)
    if name == "channel":
        return scales.reshape(outputs, 1).expand(outputs, inputs)
    rows, columns = map(int, size.split("x")) if name == "block" else (1, int(size))
    return torch.stack([scales[out // rows, [at // columns for at in range(inputs)]] for out in range(outputs)])


def packed(
    bits: int, strategy: str, scales: torch.dtype, zeros: str = "", order: bool = False
) -> Callable[..., Tensors]:
    """compressed-tensors' pack-quantized. zeros: "packed", "plain" as older versions had them, or none."""

    def make(outputs: int, inputs: int, generator: torch.Generator) -> Tensors:
        shape = grid(strategy, outputs, inputs)
        made = {
            "weight_packed": words((outputs, -(-inputs * bits // 32)), generator),
            "weight_scale": some_scales(shape, scales, generator),
            "weight_shape": torch.tensor([outputs, inputs]),
        }
        if zeros == "packed":
            made["weight_zero_point"] = words((-(-outputs * bits // 32), shape[1]), generator)
        elif zeros:
            least = 1 << bits - 1
            made["weight_zero_point"] = torch.randint(-least, least, shape, generator=generator).to(torch.int8)
        if order:
            plain = torch.tensor([at // 32 for at in range(inputs)], dtype=torch.int32)
            made["weight_g_idx"] = plain[torch.randperm(inputs, generator=generator)]
        return made

    return make


def packed_meant(bits: int, strategy: str) -> Callable[[Tensors, int, int], Tensor]:
    """(q - zero point).to(scale.dtype) * scale, of numbers that were packed with half their range added."""

    def meant(parts: Tensors, outputs: int, inputs: int) -> Tensor:
        weight, mask, half, each = parts["weight_packed"].tolist(), (1 << bits) - 1, 1 << bits - 1, 32 // bits
        codes = torch.tensor(
            [
                [(weight[out][at // each] % WORD >> at % each * bits & mask) - half for at in range(inputs)]
                for out in range(outputs)
            ]
        )
        scales, zeros = parts["weight_scale"], parts.get("weight_zero_point")
        if zeros is not None and zeros.dtype == torch.int32:
            rows = zeros.tolist()
            zeros = torch.tensor(
                [
                    [(word % WORD >> out % each * bits & mask) - half for word in rows[out // each]]
                    for out in range(outputs)
                ]
            )
        if zeros is not None:
            codes = codes - spread(zeros, strategy, outputs, inputs)
        wide = spread(scales, strategy, outputs, inputs)
        if "weight_g_idx" in parts:
            wide = scales[:, parts["weight_g_idx"].long()]
        return codes.to(scales.dtype) * wide

    return meant


def in_bytes(
    kind: torch.dtype, strategy: str, scales: torch.dtype, name: str = "weight_scale", zeros: bool = False
) -> Callable[..., Tensors]:
    def make(outputs: int, inputs: int, generator: torch.Generator) -> Tensors:
        numbers = torch.randint(0, 256, (outputs, inputs), generator=generator).to(torch.uint8)  # e4m3's NaN too
        shape = grid(strategy, outputs, inputs)
        if scales == torch.float8_e8m0fnu:
            found = torch.randint(100, 140, shape, generator=generator).to(torch.uint8).view(scales)
        else:
            found = some_scales(shape, scales, generator)
        made = {"weight": numbers.view(kind), name: found}
        if zeros:
            made["weight_zero_point"] = torch.randint(-128, 128, shape, generator=generator).to(torch.int8)
        return made

    return make


def bytes_meant(strategy: str, scales: torch.dtype | None = None) -> Callable[[Tensors, int, int], Tensor]:
    """weight.to(scale.dtype) * scale, and zero points taken away before. scales: their dtype, else as stored."""

    def meant(parts: Tensors, outputs: int, inputs: int) -> Tensor:
        stored = next(parts[name] for name in ("weight_scale", "weight_scale_inv") if name in parts)
        wide = spread(stored.to(scales or stored.dtype), strategy, outputs, inputs)
        numbers = parts["weight"].to(wide.dtype)
        if "weight_zero_point" in parts:
            numbers = numbers - spread(parts["weight_zero_point"], strategy, outputs, inputs).to(wide.dtype)
        return numbers * wide

    return meant


E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def e4m3(byte: int) -> float:
    """The number of a byte: a sign, four bits of an exponent, three of a fraction."""
    exponent, fraction, sign = byte >> 3 & 15, byte & 7, -1 if byte & 128 else 1
    if byte & 127 == 127:
        return float("nan")
    return sign * (fraction * 2.0**-9 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7))


def in_fp4(codes: str, scales: torch.dtype, size: int, whole: str = "") -> Callable[..., Tensors]:
    """Two codes in a byte, a scale for `size` inputs of a row, and one of the tensor. codes, whole: their parts."""

    def make(outputs: int, inputs: int, generator: torch.Generator) -> Tensors:
        nothing = int(scales == torch.uint8)  # 255 is no number there
        found = torch.randint(256 - nothing, (outputs, inputs // size), generator=generator, dtype=torch.uint8)
        made = {
            codes: torch.randint(256, (outputs, inputs // 2), generator=generator, dtype=torch.uint8),
            "weight_scale": found.view(scales),
        }
        of_tensor = 0.1 + torch.rand(() if whole == "weight_scale_2" else (1,), generator=generator)
        return made | ({whole: of_tensor} if whole else {})

    return make


def fp4_meant(parts: Tensors, outputs: int, inputs: int) -> Tensor:
    """Neighbours share a byte, the first one in the low half. ModelOpt multiplies a group's scale with the tensor's,
    compressed-tensors divides by it; then the code is multiplied. Each in fp32."""
    codes = next(parts[name] for name in ("weight_packed", "weight") if name in parts).tolist()
    scales = parts["weight_scale"]
    size, bytes_of = inputs // scales.shape[1], scales.view(torch.uint8).tolist()
    read = e4m3 if scales.dtype == E4M3 else lambda byte: 2.0 ** (byte - 127)
    steps = torch.tensor([[read(byte) for byte in row] for row in bytes_of])
    if "weight_scale_2" in parts:
        steps = steps * parts["weight_scale_2"]
    if "weight_global_scale" in parts:
        steps = steps / parts["weight_global_scale"]
    halves = [[codes[out][at // 2] >> 4 * (at % 2) & 15 for at in range(inputs)] for out in range(outputs)]
    numbers = torch.tensor([[E2M1[code & 7] * (-1 if code & 8 else 1) for code in row] for row in halves])
    return numbers * steps[:, [at // size for at in range(inputs)]]


def mx8(outputs: int, inputs: int, generator: torch.Generator) -> Tensors:
    """MXFP8: scales of every exponent, the least one among them."""
    made = in_bytes(E4M3, f"group {GROUP}", F32)(outputs, inputs, generator)
    found = torch.randint(255, made["weight_scale"].shape, generator=generator, dtype=torch.uint8)
    found[0, 0] = 0
    return made | {"weight_scale": found}


def mx8_meant(parts: Tensors, outputs: int, inputs: int) -> Tensor:
    scales = torch.tensor([[2.0 ** (byte - 127) for byte in row] for row in parts["weight_scale"].tolist()])
    return parts["weight"].float() * spread(scales, f"group {GROUP}", outputs, inputs)


def in_four(outputs: int, inputs: int, generator: torch.Generator) -> Tensors:
    """FP8 by blocks, whose scales ModelOpt has as [rows, 1, columns, 1]."""
    made = in_bytes(E4M3, "block 128x128", F32)(outputs, inputs, generator)
    return made | {"weight_scale": made["weight_scale"][:, None, :, None]}


def in_four_meant(parts: Tensors, outputs: int, inputs: int) -> Tensor:
    grid_of = parts["weight_scale"][:, 0, :, 0]
    return parts["weight"].float() * spread(grid_of, "block 128x128", outputs, inputs)


def group_config(form: str, weights: Mapping[str, Any], **others: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": dict(weights), **others}},
        "quantization_status": "compressed", "kv_cache_scheme": None, "sparsity_config": {}, "transform_config": {},
    }  # fmt: skip


def ints(bits: int, strategy: str, symmetric: bool = True, **others: Any) -> dict[str, Any]:
    name, _, size = strategy.partition(" ")
    return {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": name, "dynamic": False,
        "group_size": int(size) if size else -1 if name == "channel" else None, **others,
    }  # fmt: skip


def floats(strategy: str) -> dict[str, Any]:
    name, _, size = strategy.partition(" ")
    sizes = [int(each) for each in size.split("x")] if size else None
    return {"num_bits": 8, "type": "float", "symmetric": True, "strategy": name, "block_structure": sizes}


GROUP = 32


def four_or_eight(bits: int, size: int) -> dict[str, Any]:
    strategy = "tensor_group" if size == 16 else "group"
    return {"num_bits": bits, "type": "float", "symmetric": True, "strategy": strategy, "group_size": size}


F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
E4M3, I8 = torch.float8_e4m3fn, torch.int8
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
V2 = {"checkpoint_format": "gptq_v2"}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
LESS4, LESS8 = 0x11111111, 0x01010101
MODELOPT: dict[str, Any] = {"quant_method": "modelopt", "ignore": ["lm_head"]}
FP4: dict[str, Any] = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "ch_axis": -1, "scale_format": "e8m0"}
QUARK: dict[str, Any] = {
    "quant_method": "quark", "exclude": ["lm_head"], "layer_quant_config": {}, "layer_type_quant_config": {},
    "global_quant_config": {"weight": FP4, "input_tensors": FP4 | {"is_dynamic": True}, "output_tensors": None},
    "export": {"pack_method": "reorder", "weight_format": "real_quantized"},
}  # fmt: skip
DYNAMIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
CASES = {
    "awq": Case(AWQ, awq(32), awq_meant(32), ("INT4_F16/32", "INT4_F16/32")),
    "awq-channel": Case(AWQ | {"group_size": -1}, awq(-1), awq_meant(-1), ("INT4_F16/32", "INT4_F16/64")),
    "awq-bf16-model": Case(AWQ, awq(32), awq_meant(32), ("INT4_F16/32", "INT4_F16/32"), dtype="bfloat16"),
    "gptq": Case(GPTQ, gptq(4, 32), gptq_meant(4, 32, LESS4), ("INT4_F16/32", "INT4_F16/32")),
    "gptq-v2": Case(GPTQ | V2, gptq(4, 32), gptq_meant(4, 32, 0), ("INT4_F16/32", "INT4_F16/32")),
    "gptq-8": Case(GPTQ | {"bits": 8}, gptq(8, 32), gptq_meant(8, 32, LESS8), ("INT8_F16/32", "INT8_F16/32")),
    "gptq-8-v2-channel": Case(
        GPTQ | V2 | {"bits": 8, "group_size": -1, "desc_act": True},
        gptq(8, -1, trivial=True), gptq_meant(8, -1, 0), ("INT8_F16/32", "INT8_F16/64"),
    ),
    "gptq-in-order": Case(GPTQ, gptq(4, 32, trivial=True), gptq_meant(4, 32, LESS4), ("INT4_F16/32", "INT4_F16/32")),
    "gptq-partial-group": Case(
        GPTQ | {"group_size": 64}, gptq(4, 64), gptq_meant(4, 64, LESS4), ("INT4_F16/32", "INT4_F16/64")
    ),
    "gptq-act-order": Case(GPTQ | {"desc_act": True}, gptq(4, 32, order=True), gptq_meant(4, 32, LESS4), ("", "")),
    "gptq-16": Case(GPTQ | {"group_size": 16}, gptq(4, 16), gptq_meant(4, 16, LESS4), ("", "")),
    "packed": Case(
        group_config("pack-quantized", ints(4, "group 32")), packed(4, "group 32", BF16), packed_meant(4, "group 32"),
        ("INT4_BF16/32", "INT4_BF16/32"), "bfloat16",
    ),
    "packed-zeros": Case(
        group_config("pack-quantized", ints(4, "group 32", False)), packed(4, "group 32", F16, "packed"),
        packed_meant(4, "group 32"), ("INT4_F16/32", "INT4_F16/32"),
    ),
    "packed-old-zeros": Case(
        group_config("pack-quantized", ints(4, "group 32", False)), packed(4, "group 32", F16, "plain"),
        packed_meant(4, "group 32"), ("INT4_F16/32", "INT4_F16/32"),
    ),
    "packed-channel": Case(
        group_config("pack-quantized", ints(4, "channel")), packed(4, "channel", BF16), packed_meant(4, "channel"),
        ("INT4_BF16/32", "INT4_BF16/64"), "bfloat16",
    ),
    "packed-8-channel-zeros": Case(
        group_config("pack-quantized", ints(8, "channel", False), input_activations=DYNAMIC),
        packed(8, "channel", BF16, "packed"), packed_meant(8, "channel"), ("INT8_BF16/32", "INT8_BF16/64"), "bfloat16",
    ),
    "packed-act-order": Case(
        group_config("pack-quantized", ints(4, "group 32", actorder="group")), packed(4, "group 32", F16, order=True),
        packed_meant(4, "group 32"), ("", ""),
    ),
    "packed-fp32": Case(
        group_config("pack-quantized", ints(4, "group 32")), packed(4, "group 32", F32), packed_meant(4, "group 32"),
        ("", ""), "float32",
    ),
    "int8": Case(
        group_config("int-quantized", ints(8, "channel"), input_activations=DYNAMIC), in_bytes(I8, "channel", BF16),
        bytes_meant("channel"), ("INT8_BF16/32", "INT8_BF16/64"), "bfloat16",
    ),
    "int8-zeros": Case(
        group_config("int-quantized", ints(8, "channel", False)), in_bytes(I8, "channel", F16, zeros=True),
        bytes_meant("channel"), ("INT8_F16/32", "INT8_F16/64"),
    ),
    "int8-tensor-zeros": Case(
        group_config("int-quantized", ints(8, "tensor", False)), in_bytes(I8, "tensor", F16, zeros=True),
        bytes_meant("tensor"), ("INT8_F16/32", "INT8_F16/64"),
    ),
    "float8-tensor": Case(
        group_config("float-quantized", floats("tensor")), in_bytes(E4M3, "tensor", BF16), bytes_meant("tensor"),
        ("FP8_BF16/32", "FP8_BF16/64"), "bfloat16",
    ),
    "float8-channel": Case(
        group_config("float-quantized", floats("channel"), input_activations=DYNAMIC | {"type": "float"}),
        in_bytes(E4M3, "channel", F16), bytes_meant("channel"), ("FP8_F16/32", "FP8_F16/64"),
    ),
    "float8-block": Case(
        group_config("float-quantized", floats("block 40x32")), in_bytes(E4M3, "block 40x32", F32),
        bytes_meant("block 40x32"), ("FP8_F32/32", "FP8_F32/32"), "float32",
    ),
    "fp8": Case(
        FP8 | {"weight_block_size": [32, 32]}, in_bytes(E4M3, "block 32x32", F32, "weight_scale_inv"),
        bytes_meant("block 32x32"), ("FP8_F32/32", "FP8_F32/32"), "bfloat16",
    ),
    "fp8-bf16-scales": Case(
        FP8 | {"weight_block_size": [64, 64]}, in_bytes(E4M3, "block 64x64", BF16, "weight_scale_inv"),
        bytes_meant("block 64x64", F32), ("FP8_F32/32", "FP8_F32/64"), "bfloat16",
    ),
    "fp8-ue8m0": Case(
        FP8 | {"weight_block_size": [32, 32], "scale_fmt": "ue8m0"},
        in_bytes(E4M3, "block 32x32", torch.float8_e8m0fnu, "weight_scale_inv"), bytes_meant("block 32x32", F32),
        ("FP8_F32/32", "FP8_F32/32"), "bfloat16",
    ),
    "fp8-tensor": Case(
        FP8 | {"weight_block_size": None}, in_bytes(E4M3, "tensor", F32, "weight_scale_inv"), bytes_meant("tensor"),
        ("FP8_F32/32", "FP8_F32/64"), "bfloat16",
    ),
    "autofp8": Case(
        FP8 | {"activation_scheme": "static", "ignored_layers": ["re:.*lm_head"]}, in_bytes(E4M3, "tensor", F32),
        bytes_meant("tensor"), ("FP8_F32/32", "FP8_F32/64"), "float16",
    ),
    "modelopt": Case(
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"], "kv_cache_scheme": {"num_bits": 8}},
        in_bytes(E4M3, "tensor", F32), bytes_meant("tensor"), ("FP8_F32/32", "FP8_F32/64"), "bfloat16",
    ),
    "modelopt-channel": Case(
        MODELOPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, in_bytes(E4M3, "channel", F32), bytes_meant("channel"),
        ("FP8_F32/32", "FP8_F32/64"), "bfloat16",
    ),
    "modelopt-blocks": Case(
        MODELOPT | {"quant_algo": "fp8_pb_wo"}, in_four, in_four_meant, ("FP8_F32/32", "FP8_F32/64"), "bfloat16",
        {"hidden_size": 192, "intermediate_size": 160},
    ),
    "modelopt-mxfp8": Case(
        MODELOPT | {"quant_algo": "MXFP8"}, mx8, mx8_meant, ("FP8_F32/32", "FP8_F32/32"), "bfloat16",
    ),
    "mxfp8": Case(
        group_config("mxfp8-quantized", four_or_eight(8, 32)), mx8, mx8_meant, ("FP8_F32/32", "FP8_F32/32"), "bfloat16",
    ),
    "nvfp4": Case(
        MODELOPT | {"quant_algo": "NVFP4", "group_size": 16}, in_fp4("weight", E4M3, 16, "weight_scale_2"), fp4_meant,
        ("", "NVFP4"), "bfloat16",
    ),
    "nvfp4-32": Case(
        MODELOPT | {"quant_algo": "W4A16_NVFP4", "group_size": 32}, in_fp4("weight", E4M3, 32, "weight_scale_2"),
        fp4_meant, ("", "NVFP4"), "bfloat16",
    ),
    "nvfp4-packed": Case(
        group_config("nvfp4-pack-quantized", four_or_eight(4, 16)),
        in_fp4("weight_packed", E4M3, 16, "weight_global_scale"), fp4_meant, ("", "NVFP4_INV"), "bfloat16",
    ),
    "mxfp4-packed": Case(
        group_config("mxfp4-pack-quantized", four_or_eight(4, 32)), in_fp4("weight_packed", torch.uint8, 32), fp4_meant,
        ("MXFP4", "MXFP4"), "bfloat16",
    ),
    "quark": Case(
        QUARK, in_fp4("weight", torch.uint8, 32), fp4_meant, ("MXFP4", "MXFP4"), "bfloat16",
    ),
    "fbgemm": Case(
        {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}, in_bytes(E4M3, "channel", F32),
        bytes_meant("channel"), ("FP8_F32/32", "FP8_F32/64"), "bfloat16",
    ),
}  # fmt: skip


def linears(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the modules of the layers."""
    return {
        name.removesuffix(".weight"): (matrix.outputs, matrix.inputs)
        for name, matrix in matrices(config).items()
        if ".layers." in name
    }


def write(folder: Path, case: Case, *, left: tuple[str, ...] = (), family: str = "llama-gqa") -> Path:
    """A folder with random packed matrices in all modules but those that are left."""
    folder.mkdir(parents=True, exist_ok=True)
    model = random_model(family, **{**SIZES, **case.fields})
    data = model.config.to_dict() | {"dtype": case.dtype, "architectures": [type(model).__name__]}
    generator = torch.Generator().manual_seed(3)
    tensors = {name: tensor.to(getattr(torch, case.dtype)).contiguous() for name, tensor in model.state_dict().items()}
    if config_of(data).tie_embeddings:
        del tensors["lm_head.weight"]
    for module, (outputs, inputs) in linears(config_of(data)).items():
        if module not in left:
            del tensors[f"{module}.weight"]
            parts = case.make(outputs, inputs, generator)
            tensors |= {f"{module}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(data | {"quantization_config": case.stored}))
    return folder


def changed(folder: Path, change: Callable[[Tensors], Tensors | None]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors) or tensors, folder / "model.safetensors")
    return folder


def parts_of(folder: Path, module: str) -> Tensors:
    tensors = load_file(folder / "model.safetensors")
    return {name.removeprefix(f"{module}."): each for name, each in tensors.items() if name.startswith(f"{module}.")}


def opened(folder: Path) -> tuple[Checkpoint, ModelConfig]:
    config, checkpoint = read_config(folder), Checkpoint.open(folder)
    check_model(checkpoint, config)
    return checkpoint, config


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        opened(folder)
    assert caught.value.exit_code == 4
    return str(caught.value)


def read(checkpoint: Checkpoint, module: str, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    out = torch.empty(shape, dtype=dtype)
    checkpoint.read_into(f"{module}.weight", out)
    return out


def same(found: Tensor, meant: Tensor) -> bool:
    """The same bits, but any NaN is a NaN."""
    assert found.dtype == meant.dtype
    return torch.equal(found.isnan(), meant.isnan()) and torch.equal(
        found.nan_to_num(0, 1, 2).float(), meant.nan_to_num(0, 1, 2).float()
    )


@pytest.fixture(autouse=True)
def _by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are decoded by torch's operators, which the kernels are compared with elsewhere."""
    monkeypatch.setattr(linear.cpu, "kernels", lambda: NONE)


@pytest.mark.parametrize("name", CASES)
def test_every_number_is_the_one_that_its_format_means(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    checkpoint, config = opened(write(tmp_path, case))
    with checkpoint:
        for module, (outputs, inputs) in linears(config).items():
            meant = case.meant(parts_of(tmp_path, module), outputs, inputs)
            for dtype in DTYPES:
                found = read(checkpoint, module, (outputs, inputs), dtype)
                assert same(found, meant.to(dtype)), (module, dtype)


@pytest.mark.parametrize("name", CASES)
def test_config_json_alone_says_how_matrices_are_stored(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    checkpoint, config = opened(write(tmp_path, case))
    assert config == config_of(json.loads((tmp_path / "config.json").read_text()))
    stored = matrices(config)
    assert (stored[f"{DOWN}.weight"].encoding, stored[f"{GATE}.weight"].encoding) == case.kinds
    assert stored["lm_head.weight"].encoding == stored["model.embed_tokens.weight"].encoding == ""
    with checkpoint:
        assert {each: checkpoint.encoding(each) for each in stored} == {
            each: matrix.encoding for each, matrix in stored.items()
        }


@pytest.mark.parametrize("name", ["awq", "gptq-8", "packed-zeros", "int8-zeros", "fp8"])
def test_rows_and_columns_of_blocks_are_those_of_the_matrix(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    checkpoint, config = opened(write(tmp_path, case))
    kind = ENCODINGS[matrices(config)[f"{DOWN}.weight"].encoding]
    rows, columns = range(8, 40), range(32, 96)
    place = torch.empty(len(rows), kind.row_bytes(len(columns)), dtype=torch.uint8)
    with checkpoint:
        checkpoint.read_stored(f"{DOWN}.weight", place, rows=rows, columns=columns)
        whole = read(checkpoint, DOWN, (64, 96), F32)
    assert same(StoredMatrix(place, kind).matrix(F32), whole[8:40, 32:96])


@pytest.mark.parametrize("name", ["fp8", "autofp8", "fbgemm", "mxfp8", "nvfp4", "nvfp4-packed", "quark"])
def test_some_rows_of_floats_are_unpacked_without_the_others(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer of Qwen3.5 reads its queries and gates head by head; each time all of them were unpacked."""
    sizes = list[int]()

    def packed(scheme: Scheme, outputs: int, *others: Any) -> Packed:
        sizes.append(outputs)
        return Packed(scheme, outputs, *others)

    monkeypatch.setattr("offload.weights.quantised_folder.Packed", packed)
    checkpoint, _ = opened(write(tmp_path, CASES[name]))
    with checkpoint:
        for module, shape in ((DOWN, (64, 96)), (GATE, (96, 64))):
            whole = read(checkpoint, module, shape, F32)
            for rows in (range(8, 40), range(3, 60, 7)):
                part = torch.empty(len(rows), shape[1])
                checkpoint.read_into(f"{module}.weight", part, rows=rows)
                assert same(part, whole[list(rows)])
    assert sizes == [64, 32, 9, 96, 32, 9]


@pytest.mark.parametrize("columns", [range(16, 64), range(32, 80)])
def test_columns_that_cut_a_block_at_either_end_are_refused(columns: range, tmp_path: Path) -> None:
    checkpoint, _ = opened(write(tmp_path, CASES["awq"]))
    with checkpoint, pytest.raises(ModelError, match=rf"{columns.start} to {columns.stop} would cut"):
        checkpoint.read_stored(f"{DOWN}.weight", torch.empty(64, 1, dtype=torch.uint8), columns=columns)


@pytest.mark.few(1)
@pytest.mark.parametrize("piece", [1300, 800])
def test_large_matrices_are_unpacked_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """1,300 numbers are 13 outputs, which would end inside a word of packed outputs."""
    whole, parts = [], []
    for name in CASES:
        case = CASES[name]
        for numbers, found in ((1 << 21, whole), (piece, parts)):
            monkeypatch.setattr("offload.weights.unpacking._PIECE", numbers)
            monkeypatch.setattr("offload.weights.e2m1._PIECE", numbers // 64)
            checkpoint, config = opened(write(tmp_path / name, case))
            with checkpoint:
                found += [read(checkpoint, module, linears(config)[module], F32) for module in (DOWN, GATE)]
    assert all(map(same, whole, parts))


def test_groups_are_in_order_where_some_of_them_were_never_set(tmp_path: Path) -> None:
    """compressed-tensors takes an order in which any group is -1 for none."""

    def partly(tensors: Tensors) -> None:
        tensors[f"{DOWN}.weight_g_idx"][50] = -1

    numbers = []
    for fault in (partly, drop(f"{DOWN}.weight_g_idx"), lambda tensors: None):
        folder = changed(write(tmp_path / str(len(numbers)), CASES["packed-act-order"]), fault)
        checkpoint, _ = opened(folder)
        with checkpoint:
            numbers.append(read(checkpoint, DOWN, (64, 96), F32))
    assert same(numbers[0], numbers[1])
    assert not same(numbers[0], numbers[2])


LEFT = "model.layers.0.self_attn.o_proj"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("awq", {"modules_to_not_convert": ["o_proj"]}),
        ("awq", {"modules_to_not_convert": [LEFT]}),
        ("gptq", {"dynamic": {r"-:.*\.o_proj$": {}}}),
        ("gptq", {"modules_in_block_to_quantize": [["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
                                                   ["mlp.up_proj", "mlp.gate_proj"], ["mlp.down_proj"]]}),
        ("packed", {"ignore": ["lm_head", LEFT]}),
        ("packed", {"ignore": ["lm_head", r"re:.*self_attn\.o_proj"]}),
        ("float8-channel", {"ignore": ["lm_head", r"re:model\.layers\.0\.self_attn\.o"]}),
        ("fp8", {"modules_to_not_convert": ["lm_head", LEFT]}),
        ("fp8", {"modules_to_not_convert": ["lm_head", "model.layers.*.o_proj"]}),
        ("modelopt", {"ignore": ["lm_head", "*.o_proj"]}),
        ("autofp8", {"ignored_layers": ["lm_head", r"re:.*o_proj"]}),
    ],
)  # fmt: skip
def test_modules_that_are_left_are_plain_numbers(name: str, says: dict[str, Any], tmp_path: Path) -> None:
    case = replace(CASES[name], stored=CASES[name].stored | says)
    checkpoint, config = opened(write(tmp_path, case, left=(LEFT,)))
    stored = matrices(config)
    assert [each for each in linears(config) if not stored[f"{each}.weight"].encoding] == [LEFT]
    with checkpoint:
        found = read(checkpoint, LEFT, (64, 64), getattr(torch, case.dtype))
    assert torch.equal(found, load_file(tmp_path / "model.safetensors")[f"{LEFT}.weight"])


def test_a_rule_of_gptqmodel_may_store_modules_otherwise(tmp_path: Path) -> None:
    eight = gptq(8, 16)

    def make(outputs: int, inputs: int, generator: torch.Generator) -> Tensors:
        return (
            eight(outputs, inputs, generator)
            if (outputs, inputs) == (64, 96)
            else gptq(4, 32)(outputs, inputs, generator)
        )

    stored = GPTQ | {"dynamic": {r"+:.*down_proj": {"bits": 8, "group_size": 16}, ".*down": {"bits": 4}}}
    checkpoint, config = opened(write(tmp_path, replace(CASES["gptq"], stored=stored, make=make)))
    with checkpoint:
        found = read(checkpoint, DOWN, (64, 96), F32)
    assert same(found, gptq_meant(8, 16, LESS8)(parts_of(tmp_path, DOWN), 64, 96).float())
    assert config.layer_matrices()["down"][0].encoding == "" != config.layer_matrices()["o"][0].encoding


def test_a_head_may_be_quantised_and_fused_matrices_too(tmp_path: Path) -> None:
    config = config_of(PHI3 | {"quantization_config": GPTQ | {"lm_head": True}})
    stored = {name: (matrix.outputs, matrix.inputs, matrix.encoding) for name, matrix in matrices(config).items()}
    assert stored == {
        "model.embed_tokens.weight": (96, 64, ""),
        "lm_head.weight": (96, 64, "INT4_F16/32"),
        "model.layers.0.self_attn.qkv_proj.weight": (128, 64, "INT4_F16/32"),
        "model.layers.0.self_attn.o_proj.weight": (64, 64, "INT4_F16/32"),
        "model.layers.0.mlp.gate_up_proj.weight": (192, 64, "INT4_F16/32"),
        "model.layers.0.mlp.down_proj.weight": (64, 96, "INT4_F16/32"),
    }


def test_embeddings_are_plain_but_those_that_a_list_names() -> None:
    """A table of inputs of layers was taken for a matrix of a layer."""
    config = TINY["gemma4, inputs of layers"].config() | {"hidden_size_per_layer_input": 64}
    named = {"modules_to_convert": ["embed_tokens", "lm_head"]}
    for stored, kinds in (
        (FP8, ("", "")),
        (FP8 | named, ("FP8_F32/32", "")),
        (FP8 | named | {"modules_to_not_convert": ["model.embed_tokens"]}, ("", "")),
        (FP8 | {"modules_to_convert": ["embed_tokens_per_layer"]}, ("", "FP8_F32/128")),
    ):
        found = config_of(config | {"quantization_config": stored})
        assert found.layer_table is not None
        assert (found.table_encoding, found.layer_table.encoding) == kinds
        assert found.layer_table.projection_encoding


WORDS = ("layers", "1", "11", "gate", "gate_proj")
NAMES = st.lists(st.sampled_from(WORDS), min_size=1, max_size=3).map(".".join)
GLOBS = st.lists(st.sampled_from(("*", "?", *WORDS)), min_size=1, max_size=3).map(".".join)


@pytest.mark.parametrize(("way", "patterns"), [("is", NAMES), ("class", NAMES), ("names", NAMES), ("glob", GLOBS)])
@given(data=st.data())
@at_most(200)
def test_names_that_are_looked_up_together_mean_what_each_means(
    way: Any, patterns: st.SearchStrategy[str], data: st.DataObject
) -> None:
    """A list of a thousand modules was gone through for each of 75,000 experts."""
    module, rules = data.draw(NAMES), [Rule(way, each) for each in data.draw(st.lists(patterns, max_size=3))]
    found = Quantisation((*rules, Rule("holds", "", Scheme("bytes", 8)))).scheme((module,), module)
    assert (found is None) == any(rule.means(module, module) for rule in rules)


def test_groups_of_several_schemes_are_told_by_their_targets() -> None:
    """An exact name goes before an expression, and that before a class; what is ignored is plain."""
    four, eight, fp8 = ints(4, "group 32"), ints(8, "channel"), floats("channel")
    stored = {
        "quant_method": "compressed-tensors", "format": "mixed-precision", "ignore": ["lm_head", "re:.*k_proj"],
        "config_groups": {
            "a": {"targets": ["Linear"], "weights": four, "format": "pack-quantized"},
            "b": {"targets": ["re:.*mlp.*"], "weights": eight, "format": "int-quantized"},
            "c": {"targets": [DOWN, "Embedding"], "weights": fp8, "format": "float-quantized"},
            "d": {"targets": ["re:.*v_proj"], "weights": None, "format": "float-quantized"},
        },
    }  # fmt: skip
    config = config_of(plain_config() | {"dtype": "bfloat16", "quantization_config": stored})
    kinds = {name.split(".")[-2]: matrix.encoding for name, matrix in matrices(config).items()}
    assert kinds == {
        "embed_tokens": "FP8_BF16/64", "lm_head": "", "q_proj": "INT4_BF16/32", "k_proj": "", "v_proj": "",
        "o_proj": "INT4_BF16/32", "gate_proj": "INT8_BF16/64", "up_proj": "INT8_BF16/64", "down_proj": "FP8_BF16/32",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["a", "model.a", "zeta.a"])
def test_a_name_goes_before_an_expression_wherever_it_is_in_the_alphabet(name: str) -> None:
    """Of expressions the alphabet's first one does, as in compressed-tensors."""
    stored = {
        "quant_method": "compressed-tensors", "format": "mixed-precision",
        "config_groups": {
            "0": {"targets": ["re:.*a"], "weights": ints(8, "channel"), "format": "int-quantized"},
            "1": {"targets": [name], "weights": ints(4, "group 32"), "format": "pack-quantized"},
            "2": {"targets": ["re:.*"], "weights": floats("channel"), "format": "float-quantized"},
        },
    }  # fmt: skip
    read = config_of(plain_config() | {"quantization_config": stored}).quantisation
    assert read is not None
    for module, expected in ((name, (4, False)), ("another.a", (8, True))):
        scheme = read.scheme((module,), "Linear")
        assert scheme is not None
        assert (scheme.bits, scheme.is_float) == expected


@cache
def _plain_config() -> dict[str, Any]:
    return random_model(**SIZES).config.to_dict() | {"architectures": ["LlamaForCausalLM"]}


def plain_config() -> dict[str, Any]:
    return dict(_plain_config())


PHI3: dict[str, Any] = {
    "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "vocab_size": 96, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "original_max_position_embeddings": 256, "tie_word_embeddings": False,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("size", "inputs", "kind"),
    [(128, 4096, "/128"), (64, 4096, "/64"), (32, 96, "/32"), (-1, 4096, "/128"), (-1, 96, "/32"), (256, 4096, "/128"),
     (1024, 11008, "/128"), (96, 192, "/32"), (128, 64, "/64"), (48, 96, None), (16, 64, None), (32, 48, None)],
)  # fmt: skip
def test_blocks_are_as_long_as_groups_and_inputs_allow(size: int, inputs: int, kind: str | None) -> None:
    found = Scheme("awq", 4, max(size, 0)).encoding(inputs)
    assert found == (f"INT4_F16{kind}" if kind else "")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 'quant_method is "bitsandbytes"'),
    ({"bits": 4}, "quant_method is missing"),
    ({"quant_method": "hqq"}, 'quant_method is "hqq"'),
    ({"quant_method": "mxfp4", "modules_to_not_convert": "lm_head"}, 'modules_to_not_convert is "lm_head"'),
    (AWQ | {"bits": 8}, "bits is 8; it must be 4"),
    (AWQ | {"bits": True}, "bits is true"),
    (AWQ | {"version": "gemv"}, 'version is "gemv"; it must be gemm'),
    (AWQ | {"group_size": 0}, "group_size is 0"),
    (AWQ | {"group_size": 1 << 60}, "group_size is 1152921504606846976"),
    (AWQ | {"modules_to_not_convert": "lm_head"}, 'modules_to_not_convert is "lm_head"'),
    (AWQ | {"modules_to_not_convert": ["(?i)x"]}, 'modules_to_not_convert is ["(?i)x"]'),
    (AWQ | {"modules_to_not_convert": [1]}, "modules_to_not_convert is [1]"),
    (GPTQ | {"bits": 3}, "bits is 3; it must be 4 or 8"),
    (GPTQ | {"checkpoint_format": "marlin"}, 'checkpoint_format is "marlin"'),
    (GPTQ | {"pack_dtype": "int64"}, 'pack_dtype is "int64"'),
    (GPTQ | {"dynamic": {"+:.*down": {"bits": 2}}}, "dynamic +:.*down: bits is 2"),
    (GPTQ | {"dynamic": {"+:(a+)+$": {"bits": 8}}}, "dynamic is"),
    (GPTQ | {"dynamic": {"+:[": {"bits": 8}}}, "dynamic is"),
    (GPTQ | {"dynamic": ["x"]}, 'dynamic is ["x"]'),
    (GPTQ | {"rotation": "hadamard"}, 'rotation is "hadamard"'),
    (FP8 | {"weight_block_size": [0, 128]}, "weight_block_size[0] is 0; it must be a whole number from 1"),
    (FP8 | {"weight_block_size": [128]}, "weight_block_size is [128]"),
    (FP8 | {"fmt": "e5m2"}, 'fmt is "e5m2"'),
    (FP8 | {"modules_to_convert": "embed_tokens"}, 'modules_to_convert is "embed_tokens"; it must be a list'),
    ({"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4"}, "transformers and vLLM run it"),
    ({"quant_method": "exl3", "bits": 3.0}, "ExLlamaV3 and TabbyAPI run it"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "its pre_quant_scale multiplies activations"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_MXFP4_FP8"}, 'quant_algo is "W4A8_MXFP4_FP8"; it must be one of'),
    (MODELOPT | {"quant_algo": "NVFP4", "group_size": 64}, "group_size is 64; it must be 16 or 32"),
    (MODELOPT | {"quant_algo": "MIXED_PRECISION"}, "quantized_layers is missing"),
    (MODELOPT | {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"x": {"quant_algo": "INT4"}}},
     'quantized_layers: x: quant_algo is "INT4"'),
    (MODELOPT | {"quant_algo": 4}, "quant_algo is 4"),
    (QUARK | {"global_quant_config": {"weight": FP4 | {"dtype": "fp6_e2m3"}}}, "MXFP6 on AMD GPUs"),
    (QUARK | {"layer_quant_config": {"*.mlp.*": {"weight": FP4 | {"group_size": 64}}}}, "group_size is 64"),
    (QUARK | {"layer_type_quant_config": {"Linear": {}}}, "layer_type_quant_config is"),
    (QUARK | {"algo_config": [{"name": "quarot", "r1": True}]}, "without rotations"),
    ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["*" * 7]}, "ignore is"),
    (group_config("nvfp4-pack-quantized", ints(4, "group 16")), 'type is "int"; it must be float'),
    (group_config("nvfp4-pack-quantized", four_or_eight(4, 32)), "group_size is 32; it must be 16"),
    (group_config("mxfp8-quantized", four_or_eight(8, 32) | {"symmetric": False}), "symmetric is false"),
    (group_config("mxfp6-pack-quantized", four_or_eight(6, 32)), 'format is "mxfp6-pack-quantized"'),
    (group_config("dense", ints(4, "group 32")), 'format is "dense"'),
    (group_config("pack-quantized", ints(3, "group 32")), "num_bits is 3; it must be 4 or 8"),
    (group_config("pack-quantized", floats("channel")), 'type is "float"; it must be int'),
    (group_config("float-quantized", floats("channel") | {"num_bits": 4}), "num_bits is 4; it must be 8"),
    (group_config("float-quantized", floats("channel") | {"symmetric": False}), "symmetric is false"),
    (group_config("int-quantized", ints(8, "channel") | {"strategy": "token"}), 'strategy is "token"'),
    (group_config("int-quantized", ints(8, "channel") | {"dynamic": True}), "dynamic is true"),
    (group_config("int-quantized", ints(8, "channel", scale_dtype="torch.int8")), 'scale_dtype is "torch.int8"'),
    (group_config("float-quantized", floats("block 0x1")), "block_structure[0] is 0"),
    (group_config("int-quantized", ints(8, "channel")) | {"config_groups": {"W8A8": ["Linear"]}}, 'W8A8 is ["Linear"]'),
    (group_config("int-quantized", ints(8, "channel")) | {"transform_config": {"a": 1}}, "transform_config is"),
    (group_config("int-quantized", ints(8, "channel")) | {"sparsity_config": {"format": "sparse-bitmask"}},
     "sparsity_config is"),
    (group_config("int-quantized", ints(8, "channel")) | {"ignore": ["re:(x*)*"]}, "ignore is"),
]  # fmt: skip


@pytest.mark.parametrize(("stored", "named"), REFUSED, ids=[named for _, named in REFUSED])
def test_what_is_not_known_is_refused_by_name(stored: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError) as caught:
        config_of(plain_config() | {"quantization_config": stored}, name="config.json")
    assert str(caught.value).startswith("config.json: quantization_config: ")
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("text", "is_one"),
    [(r".*\.layers\.(1|2)\..*", True), ("model.layers.0", True), (r"^(?!.*layers\.\d+\.mlp).*$", True),
     ("a?" * 30 + "a" * 30, False), (".*" * 7, False), ("(ab|a)*c", False), ("x" * 201, False),
     ("a{99999999999}", False), ("(", False), (7, False)],
)  # fmt: skip
def test_expressions_that_could_take_forever_are_none(text: object, is_one: bool) -> None:
    assert is_pattern(text) == is_one


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from(["", "re:.*", "-:x"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["targets", "weights", "+:a", "format"]), inner)
    ),
)


def places(value: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """Of everything inside a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [each for key, inner in inside for each in places(inner, (*path, key))]


@given(data=st.data())
@at_most(300)
def test_a_damaged_description_is_refused_or_read(data: st.DataObject) -> None:
    stored = json.loads(json.dumps(data.draw(st.sampled_from([case.stored for case in CASES.values()]))))
    stored |= {"dynamic": {"-:x": {}}, "modules_in_block_to_quantize": None, "sparsity_config": {}, "scale_dtype": None}
    *path, last = data.draw(st.sampled_from(places(stored)))
    holder = stored
    for key in path:
        holder = holder[key]
    holder[last] = data.draw(JSON)
    with suppress(ModelError):
        config_of(plain_config() | {"quantization_config": stored})


def drop(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        del tensors[name]

    return change


def put(name: str, tensor: Tensor) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name] = tensor

    return change


FAULTS: list[tuple[str, Callable[[Tensors], None], str]] = [
    ("awq", drop(f"{DOWN}.qzeros"), f"there is no {DOWN}.qzeros"),
    ("awq", drop(f"{DOWN}.qweight"), f"there is no {DOWN}.qweight"),
    ("awq", put(f"{DOWN}.qweight", torch.zeros(96, 9, dtype=torch.int32)), "has shape [96, 9]; by config.json"),
    ("awq", put(f"{DOWN}.scales", torch.zeros(3, 64).bool()), "scales is stored as BOOL; by config.json it must be"),
    ("awq", put(f"{DOWN}.qzeros", torch.zeros(3, 8)), "qzeros is stored as F32; by config.json it must be I32"),
    ("awq", put(f"{DOWN}.lora_A", torch.zeros(3, 8)), f"1 unexpected ({DOWN}.lora_A)"),
    ("awq", put("lm_head.qweight", torch.zeros(3, 8)), "leaves lm_head as plain numbers, but there is lm_head.qweight"),
    ("awq", put(f"{DOWN}.bias", torch.ones(64)), f"1 unexpected ({DOWN}.bias)"),
    ("gptq", put(f"{DOWN}.g_idx", torch.arange(96, dtype=torch.int32)), "which quantization_config does not say"),
    ("gptq-act-order", put(f"{DOWN}.g_idx", torch.full((96,), 3, dtype=torch.int32)), "beyond the 3 there are"),
    ("gptq-act-order", put(f"{DOWN}.g_idx", torch.full((96,), -2, dtype=torch.int32)), "beyond the 3 there are"),
    ("packed-zeros", drop(f"{DOWN}.weight_zero_point"), f"there is no {DOWN}.weight_zero_point"),
    ("packed", put(f"{DOWN}.weight_shape", torch.tensor([64, 97])), "is [64, 97], config.json says [64, 96]"),
    ("packed", put(f"{GATE}.weight_scale", torch.ones(96, 2).half()), "is stored as F16; by config.json it must be"),
    ("int8", put(f"{DOWN}.weight", torch.zeros(64, 96)), "weight is stored as F32; by config.json it must be I8"),
    ("fp8", put(f"{DOWN}.weight_scale_inv", torch.ones(3, 3)), "has shape [3, 3]; by config.json it must be [2, 3]"),
    ("fp8", drop(f"{DOWN}.weight_scale_inv"), f"there is no {DOWN}.weight_scale; fetch it again"),
    ("float8-channel", put(f"{DOWN}.weight", torch.zeros(64, 96).to(torch.float8_e5m2)), "is stored as F8_E5M2"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fault", "named"), FAULTS, ids=[named for *_, named in FAULTS])
def test_a_faulty_tensor_is_named(name: str, fault: Callable[[Tensors], None], named: str, tmp_path: Path) -> None:
    folder = changed(write(tmp_path, CASES[name]), fault)
    with pytest.raises(ModelError) as caught:
        read(opened(folder)[0], DOWN, (64, 96), F32)
    assert named in str(caught.value)
    assert caught.value.exit_code == 4


def test_a_module_that_is_not_quantised_after_all_is_named(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, CASES["fp8"], left=(LEFT,)))
    assert f"{LEFT} is quantised, by quantization_config" in message
    assert "name it among the modules that are not quantised" in message


def test_what_belongs_to_activations_and_caches_and_biases_of_zero_is_left_out(tmp_path: Path) -> None:
    """AutoGPTQ once gave every module a bias; AutoFP8 and llm-compressor keep scales of inputs and caches."""
    layer = "model.layers.0.self_attn"
    scales = (f"{DOWN}.input_scale", f"{DOWN}.activation_scale", f"{layer}.k_scale", f"{layer}.k_proj.output_scale")
    further = {f"{DOWN}.bias": torch.zeros(64)} | {name: torch.ones(1) for name in scales}
    checkpoint, config = opened(changed(write(tmp_path, CASES["autofp8"]), lambda tensors: tensors | further))
    with checkpoint:
        assert set(checkpoint.names()) == {*matrices(config), *(f"model.{name}.weight" for name in (
            "norm", "layers.0.input_layernorm", "layers.0.post_attention_layernorm"))}  # fmt: skip


def test_a_second_check_changes_nothing(tmp_path: Path) -> None:
    checkpoint, config = opened(write(tmp_path, CASES["packed"]))
    with checkpoint:
        check_model(checkpoint, config)
        assert checkpoint.encoding(f"{DOWN}.weight") == "INT4_BF16/32"


@pytest.mark.parametrize(
    ("name", "says"),
    [("int8", "quantised activations"), ("float8-channel", "quantised activations"), ("fp8", "quantised activations"),
     ("gptq-act-order", "7 quantised matrices are kept as plain numbers, 61.4 kB in 16 bits"),
     ("awq", ""), ("packed", "")],
)  # fmt: skip
def test_what_a_user_should_know_is_remarked(name: str, says: str, tmp_path: Path) -> None:
    config = read_config(write(tmp_path, CASES[name]))
    assert config.quantisation is not None
    assert says in " ".join(config.quantisation.remarks)
    assert bool(config.quantisation.remarks) == bool(says)


def test_a_plan_has_the_remarks_as_notes(tmp_path: Path) -> None:
    plan = tiny_plan(write(tmp_path, CASES["fp8"]), None, Sizes(), num_prompt_tokens=20, max_tokens=4)
    assert any("quantised activations" in note for note in plan.notes)


def test_a_scheme_for_the_cache_is_remarked() -> None:
    stored = group_config("float-quantized", floats("tensor")) | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    config = config_of(plain_config() | {"quantization_config": stored})
    assert config.quantisation is not None
    assert "keys and values are exact" in config.quantisation.remarks[0]


@pytest.mark.parametrize("name", ["fp8", "fp8-bf16-scales", "fp8-ue8m0", "fp8-tensor"])
def test_transformers_reads_the_same_numbers_from_fp8(name: str, tmp_path: Path) -> None:
    case = replace(CASES[name], fields={"intermediate_size": 128})  # its own division must leave nothing over
    folder = write(tmp_path, case)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    theirs, (checkpoint, config) = model.state_dict(), opened(folder)
    with checkpoint:
        for module, shape in linears(config).items():
            assert same(read(checkpoint, module, shape, BF16), theirs[f"{module}.weight"]), module


OF_OLDER_VERSIONS = {"packed-old-zeros", "packed-act-order"}  # than 0.20, which reads neither


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if "config_groups" in case.stored and name not in OF_OLDER_VERSIONS]
)
def test_compressed_tensors_reads_the_same_numbers(name: str, tmp_path: Path) -> None:
    library = pytest.importorskip("compressed_tensors")
    case = CASES[name]
    checkpoint, config = opened(write(tmp_path, case))
    stored = library.quantization.QuantizationConfig.model_validate(case.stored)
    scheme = stored.config_groups["group_0"]
    compressor = library.compressors.BaseCompressor.get_value_from_registry(stored.format)
    with checkpoint:
        for module, shape in linears(config).items():
            meant = compressor.decompress(parts_of(tmp_path, module), scheme)["weight"]
            for dtype in (BF16,) if name in ("nvfp4-packed", "mxfp8") else DTYPES:  # they round to bf16 there
                assert same(read(checkpoint, module, shape, dtype), meant.to(dtype)), (module, dtype)


def calm(tensors: Tensors) -> Tensors:
    """The same with scales of one size and no NaN, so that logits say something."""
    generator = torch.Generator().manual_seed(5)
    made = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(("scales", "weight_scale", "weight_scale_inv")):
            made[name] = (0.004 + 0.02 * torch.rand(tensor.shape, generator=generator)).to(tensor.dtype)
        elif tensor.dtype == E4M3:
            made[name] = (3 * torch.randn(tensor.shape, generator=generator)).to(E4M3)
    return made


@pytest.mark.parametrize("name", ["awq", "gptq-act-order", "gptq-8", "packed-zeros", "int8-zeros", "fp8"])
@torch.inference_mode()
def test_logits_are_those_of_transformers_with_the_same_numbers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    folder = changed(write(tmp_path, case), calm)
    model = random_model(**SIZES)
    stored, config = load_file(folder / "model.safetensors"), read_config(folder)
    numbers = {name: tensor for name, tensor in stored.items() if name in model.state_dict()}
    for module, shape in linears(config).items():
        numbers[f"{module}.weight"] = case.meant(parts_of(folder, module), *shape)
    model.load_state_dict(numbers)
    tokens = random_tokens(40)
    theirs = model(torch.tensor([tokens])).logits[0]
    decoder, sizes = load(folder), Sizes()
    assert theirs.std() > 0.1
    assert_same_logits(in_prefill(decoder, target_cache(decoder, sizes), tokens, sizes.prefill_block), theirs)
    assert_same_logits(in_decoding(decoder, target_cache(decoder, sizes), tokens, 3), theirs)


def test_a_session_is_of_the_numbers_that_quantization_config_gives(tmp_path: Path) -> None:
    """The same files mean other numbers where they are read as gptq_v2."""
    checkpoint, config = opened(write(tmp_path, CASES["gptq"]))
    with checkpoint:
        files = checkpoint.files()
    other = config_of(plain_config() | {"quantization_config": GPTQ | V2})
    assert model_digest(config, files) == model_digest(read_config(tmp_path), files) != model_digest(other, files)


def test_the_text_of_a_wrapped_model_is_read_under_any_of_its_names(tmp_path: Path) -> None:
    """What is ignored may be named as the model is wrapped now, as it was once, or as the text alone."""
    text = PHI3 | {"model_type": "mistral", "num_key_value_heads": 2, "head_dim": 16, "sliding_window": None}
    text = {
        key: value for key, value in text.items() if key not in ("architectures", "original_max_position_embeddings")
    }
    wrapped = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "text_config": text}
    for left in (
        "model.language_model.layers.0.self_attn.o_proj", "language_model.model.layers.0.self_attn.o_proj", LEFT,
    ):  # fmt: skip
        stored = group_config("pack-quantized", ints(4, "group 32")) | {"ignore": [left, "language_model.lm_head"]}
        for data in (wrapped | {"quantization_config": stored},
                     wrapped | {"text_config": text | {"quantization_config": stored}}):  # fmt: skip
            config = config_of(data | {"dtype": "float16"})
            kinds = {name.split(".")[-2]: matrix.encoding for name, matrix in matrices(config).items()}
            plain = {name for name, kind in kinds.items() if not kind}
            assert plain == {"embed_tokens", "lm_head", "o_proj"}


def test_two_different_descriptions_are_refused() -> None:
    both = plain_config() | {"quantization_config": GPTQ, "compression_config": AWQ}
    with pytest.raises(ModelError, match="is there twice and differs"):
        config_of(both)
    assert config_of(both | {"compression_config": GPTQ}).quantisation is not None


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(
    ("name", "scales", "kinds"),
    [("packed", F16, ("INT4_F16/32", "INT4_F16/32")), ("packed", F32, ("", "")),
     ("float8-channel", F32, ("FP8_F32/32", "FP8_F32/64"))],
)  # fmt: skip
def test_scales_have_the_dtype_that_the_folder_has(
    name: str, scales: torch.dtype, kinds: tuple[str, str], sharded: bool, tmp_path: Path
) -> None:
    """Some folders keep them in another dtype than the model's; a number is rounded to theirs."""
    case = CASES[name]
    folder = changed(
        write(tmp_path, case),
        lambda tensors: {each: part.to(scales) if "scale" in each else part for each, part in tensors.items()},
    )
    if sharded:
        tensors = load_file(folder / "model.safetensors")
        weight_map = {each: f"{'b' if 'mlp' in each else 'a'}.safetensors" for each in tensors}
        for shard in ("a", "b"):
            own = {each: part for each, part in tensors.items() if weight_map[each].startswith(shard)}
            save_file(own, folder / f"{shard}.safetensors")
        (folder / "model.safetensors").rename(folder / "whole")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    checkpoint, config = opened(folder)
    stored = matrices(config)
    assert (stored[f"{DOWN}.weight"].encoding, stored[f"{GATE}.weight"].encoding) == kinds
    if sharded:
        (folder / "whole").rename(folder / "model.safetensors")
    with checkpoint:
        for module, shape in linears(config).items():
            meant = case.meant(parts_of(folder, module), *shape)
            assert meant.dtype == scales
            assert all(same(read(checkpoint, module, shape, dtype), meant.to(dtype)) for dtype in DTYPES)


def test_quantised_weights_without_a_description_are_told(tmp_path: Path) -> None:
    folder = write(tmp_path, CASES["gptq"])
    data = json.loads((folder / "config.json").read_text())
    del data["quantization_config"]
    (folder / "config.json").write_text(json.dumps(data))
    assert "config.json has no quantization_config that says how" in refusal(folder)


def test_names_without_model_before_them_are_read(tmp_path: Path) -> None:
    folder = changed(
        write(tmp_path, CASES["gptq"]),
        lambda tensors: {each.removeprefix("model."): part for each, part in tensors.items()},
    )
    checkpoint, _ = opened(folder)
    with checkpoint:
        found = read(checkpoint, DOWN, (64, 96), F32)
    parts = parts_of(folder, DOWN.removeprefix("model."))
    assert same(found, gptq_meant(4, 32, LESS4)(parts, 64, 96).float())
