"""The reader of folders with a quantization_config, in which several tensors store one matrix.

Of a module X, by its scheme's packing, with G groups of inputs that share a scale:
awq     X.qweight I32 [inputs, outputs / 8], X.qzeros I32 [G, outputs / 8], X.scales [G, outputs]
gptq    X.qweight I32 [inputs * bits / 32, outputs], X.qzeros I32 [G, outputs * bits / 32], X.scales [G, outputs],
        X.g_idx I32 [inputs] where groups are not in order
packed  X.weight_packed I32 [outputs, inputs * bits / 32], X.weight_scale [outputs, G], X.weight_shape I64 [2],
        X.weight_zero_point I32 [outputs * bits / 32, G] or I8 [outputs, G], X.weight_g_idx I32 [inputs]
bytes   X.weight I8 or F8_E4M3 [outputs, inputs], X.weight_scale or X.weight_scale_inv, X.weight_zero_point I8
fp4     X.weight U8 [outputs, inputs / 2], X.weight_scale F8_E4M3 (NVFP4) or U8 (MXFP4) [outputs, G], of NVFP4
        X.weight_scale_2 F32 []
packed_fp4  the same as X.weight_packed and X.weight_scale, of NVFP4 X.weight_global_scale F32 [1]
mxfp4   X_blocks and X_scales, see weights/mxfp4.py
Parts that X lacks may be those of the table that X is a part of, which all its parts share.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from offload.config.encodings import matrices
from offload.config.matrices import Matrix
from offload.config.model import ModelConfig
from offload.config.modelopt import TENSOR_SCALE
from offload.config.quantisation import scheme_of
from offload.config.schemes import Scheme
from offload.errors import ModelError
from offload.weights import mxfp4
from offload.weights.entry import Entry, Made, RowCodes
from offload.weights.mxfp4 import NO_NUMBER
from offload.weights.tensors import expected_tensors
from offload.weights.unpacking import TENSOR_DIVISOR, Packed

Shapes = tuple[tuple[int, ...], ...]

_PARTS = {
    "awq": ("qweight", "qzeros", "scales", "g_idx"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "packed": ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
    "bytes": ("weight", "weight_scale", "weight_scale_inv", "weight_zero_point"),
    "fp4": ("weight", "weight_scale", TENSOR_SCALE),
    "packed_fp4": ("weight_packed", "weight_scale", TENSOR_DIVISOR),
}
_OPTIONAL = ("g_idx", "weight_shape", "weight_zero_point", "weight_g_idx")
_MARKS = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", *mxfp4.PARTS)  # of a quantised module
_SCALES = {
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn,
    "E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
_EXPONENTS = ("F8_E8M0", "U8")  # e8m0
_NARROWER = ("F16", "BF16", *_EXPONENTS)  # allowed in place of fp32 scales
# Tensors of quantised activations and KV caches, which this program does not support.
_UNUSED = re.compile(
    r"\.((input|output)_(scale|zero_point|global_scale|scale_ub)|(input_)?activation_scale|[kqv]_(scale|zero_point)"
    r"|(self_attn|attn)\.[kqv]_proj\.output_scale)$"
)


def gathered(entries: Mapping[str, Entry], config: ModelConfig, folder: Path) -> dict[str, Entry]:
    """The entries under the names of `expected_tensors`: the parts of each quantised matrix become one entry, in blocks
    or, if no encoding of this program holds it, in plain numbers. Tensors of quantised activations are left out, and so
    are zero biases that config.json does not have. Idempotent. ModelError for parts that are missing, unknown or of a
    wrong shape."""
    assert config.quantisation is not None
    rest = {name: entry for name, entry in entries.items() if not _UNUSED.search(name)}
    expected, shared = expected_tensors(config), set[str]()
    for name, matrix in matrices(config).items():
        module, scheme = name.removesuffix(".weight"), scheme_of(name, config.quantisation, config)
        table = config.names.ngrams.whole_table(module)
        if scheme is None:
            marks = [f"{each}{mark}" for each in filter(None, (module, table)) for mark in _MARKS]
            if found := [mark for mark in marks if mark in rest]:
                raise ModelError(
                    f"{folder}: quantization_config leaves {module} as plain numbers, but there is {found[0]}; the "
                    "weights or config.json are another model's"
                )
            continue
        if name in rest and isinstance(rest[name].file, _Reader | mxfp4.Mxfp4File):
            continue
        if scheme.packing == "mxfp4":
            halves = {part: rest.pop(f"{module}{part}") for part in mxfp4.PARTS if f"{module}{part}" in rest}
            rest[name] = mxfp4.entry_of(module, matrix, halves, folder)
            continue
        if f"{module}.pre_quant_scale" in rest:
            raise ModelError(
                f"{folder}: {module}.pre_quant_scale multiplies activations, which this program does not implement; "
                "fetch the model in another quantisation (TensorRT-LLM runs this one)"
            )
        of_table, own = _parts_of(table, scheme, rest), _parts_of(module, scheme, rest)
        shared.update(of_table.values())
        parts = {part: rest[stored] for part, stored in (of_table | own).items()}
        for stored in own.values():
            del rest[stored]
        rest[name] = _Reader.entry(module, scheme, matrix, parts, folder)
        bias = rest.get(f"{module}.bias")
        if bias is not None and f"{module}.bias" not in expected and not bias.file.get_tensor(bias.stored_name).any():
            del rest[f"{module}.bias"]
    return {name: entry for name, entry in rest.items() if name not in shared}


def _parts_of(module: str, scheme: Scheme, entries: Mapping[str, Entry]) -> dict[str, str]:
    """The names of a module's parts that are there, by part."""
    return {part: name for part in _PARTS[scheme.packing] if (name := f"{module}.{part}") in entries}


@dataclass(frozen=True)
class _Reader:
    """A `TensorFile` that unpacks a matrix on each access. kind: its encoding, "" for plain numbers."""

    module: str
    scheme: Scheme
    outputs: int
    inputs: int
    kind: str
    parts: Mapping[str, Entry]

    @classmethod
    def entry(cls, module: str, scheme: Scheme, matrix: Matrix, parts: Mapping[str, Entry], folder: Path) -> Entry:
        kind = scheme.encoding(matrix.inputs)
        made = cls(module, scheme, matrix.outputs, matrix.inputs, kind, parts)
        made._check(folder)
        main = parts[_PARTS[scheme.packing][0]]
        shape, rows, codes = (matrix.outputs, matrix.inputs), None, None
        if scheme.is_float:
            rows, codes = made.rows, RowCodes(main, made.maker)
        dtype = kind or scheme.numbers
        return replace(main, file=made, shape=shape, dtype=dtype, rows=rows, is_gathered=True, codes=codes)

    def get_tensor(self, name: str) -> Tensor:
        """The matrix: uint8 [outputs, bytes], or [outputs, inputs] in its scheme's dtype. Memory: the result and a few
        MiB."""
        parts = self._parts
        self._check_shape_part(parts)
        scales = self._scales(parts)
        packed = Packed(self.scheme, self.outputs, self.inputs, parts, scales, self._order(parts, scales.shape[1]))
        return packed.blocks(self.kind) if self.kind else packed.numbers()

    def rows(self, rows: range) -> Tensor:
        """Some rows of floats, as of the whole matrix. A layer with a gate for each head reads its queries so."""
        codes = self._parts[_PARTS[self.scheme.packing][0]][rows.start : rows.stop : rows.step]
        return self.maker()(codes, torch.arange(rows.start, rows.stop, rows.step))

    def maker(self) -> Made:
        """See `RowCodes`; of floats."""
        main, parts = _PARTS[self.scheme.packing][0], self._parts
        scales, scheme = self._scales(parts), self.scheme
        stored = parts.pop(main).dtype
        if len(scales) > 1:
            scheme = replace(scheme, outputs=1)

        def made(codes: Tensor, numbers: Tensor) -> Tensor:
            own = scales[numbers // self.scheme.outputs] if len(scales) > 1 else scales
            packed = Packed(scheme, len(numbers), self.inputs, parts | {main: codes.view(stored)}, own)
            return packed.blocks(self.kind) if self.kind else packed.numbers()

        return made

    @property
    def _parts(self) -> dict[str, Tensor]:
        return {part: entry.file.get_tensor(entry.stored_name) for part, entry in self.parts.items()}

    def _scales(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The scales, [rows of scales, groups]."""
        stored = parts[self._scale_part]
        if stored.dtype == torch.uint8:
            if self.scheme.is_e2m1 and (stored == NO_NUMBER).any():
                raise ModelError(
                    f"{self._named('weight_scale')} has a scale of {NO_NUMBER}, which is NaN; download it again"
                )
            stored = stored.view(torch.float8_e8m0fnu)
        stored = stored.to(_SCALES[self.scheme.scales])
        return stored.T if self._is_transposed else stored.reshape(self._grid(stored.numel()))

    def _order(self, parts: Mapping[str, Tensor], num_groups: int) -> Tensor | None:
        """The group of each input, int64 [inputs]; None if they are in order."""
        stored = next((parts[part] for part in ("g_idx", "weight_g_idx") if part in parts), None)
        if stored is None or (stored == -1).any():  # -1: not set by compressed-tensors
            return None
        size, order = self.scheme.inputs or self.inputs, stored.long()
        if torch.equal(order, torch.arange(self.inputs) // size):
            return None
        if self.kind:
            raise ModelError(
                f"{self._named('g_idx')}: groups are not in order, which quantization_config does not say; set "
                "desc_act (GPTQ) or actorder to true in config.json"
            )
        if int(order.min()) < 0 or int(order.max()) >= num_groups:
            raise ModelError(f"{self._named('g_idx')} names a group beyond the {num_groups} there are; fetch it again")
        return order

    def _check_shape_part(self, parts: Mapping[str, Tensor]) -> None:
        shape = parts["weight_shape"].tolist() if "weight_shape" in parts else [self.outputs, self.inputs]
        if shape != [self.outputs, self.inputs]:
            raise ModelError(
                f"{self._named('weight_shape')} is {shape}, config.json says {[self.outputs, self.inputs]}; "
                "fetch both again, of one version"
            )

    def _check(self, folder: Path) -> None:
        needed = [part for part in self._shapes if part not in _OPTIONAL and part not in self.parts]
        zeros = "weight_zero_point"
        if self.scheme.has_zeros and zeros in _PARTS[self.scheme.packing] and zeros not in self.parts:
            needed.append(zeros)
        if needed:
            hint = (
                "name it among the modules that are not quantised, if it is not" if self._is_plain else "fetch it again"
            )
            raise ModelError(
                f"{folder}: {self.module} is quantised, by quantization_config, and there is no "
                f"{self.module}.{needed[0]}; {hint}"
            )
        whole = 32 // self.scheme.bits  # numbers in a word
        if self._is_transposed and (self.outputs % whole or (self.scheme.packing == "gptq" and self.inputs % whole)):
            raise ModelError(
                f"{folder}: {self.module} is {[self.outputs, self.inputs]} by config.json, which the format "
                f"{self.scheme.packing} cannot pack in words of {whole}; fetch weights and config.json of one version"
            )
        for part, entry in self.parts.items():
            dtypes, shapes = self._dtypes(part), self._shapes.get(part, ())
            if entry.dtype not in dtypes:
                raise ModelError(
                    f"{entry.path}: {self.module}.{part} is stored as {entry.dtype}; by config.json it must be "
                    f"{' or '.join(dtypes)}"
                )
            if entry.shape not in shapes:
                possible = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
                raise ModelError(
                    f"{entry.path}: {self.module}.{part} has shape {list(entry.shape)}; by config.json it must be "
                    f"{possible}"
                )

    @property
    def _is_plain(self) -> bool:
        weight = self.parts.get("weight")
        return weight is not None and weight.dtype in ("F64", "F32", "F16", "BF16")

    @property
    def _is_transposed(self) -> bool:
        return self.scheme.packing in ("awq", "gptq")

    @property
    def _scale_part(self) -> str:
        names = ("scales", "weight_scale_inv", "weight_scale")
        return next((name for name in names if name in self.parts), "weight_scale")

    def _grid(self, num_scales: int = 0) -> tuple[int, int]:
        """Rows and columns of the scales, ignoring further dimensions of 1."""
        if num_scales == 1:
            return 1, 1
        outputs, inputs = self.scheme.outputs or self.outputs, self.scheme.inputs or self.inputs
        return -(-self.outputs // outputs), -(-self.inputs // inputs)

    def _dtypes(self, part: str) -> tuple[str, ...]:
        if self.scheme.is_e2m1 and part != "weight_scale":
            return ("F32",) if part in (TENSOR_SCALE, TENSOR_DIVISOR) else ("U8",)
        if self.scheme.scales == "E8M0":
            return _EXPONENTS
        if part in ("scales", "weight_scale", "weight_scale_inv"):
            return (self.scheme.scales, *(_NARROWER if self.scheme.widens else ()))
        if part == "weight":
            return ("F8_E4M3",) if self.scheme.is_float else ("I8",)
        if part == "weight_zero_point":
            return ("I32", "I8") if self.scheme.packing == "packed" else ("I8",)
        return ("I64", "I32") if part == "weight_shape" else ("I32",)

    @property
    def _shapes(self) -> dict[str, Shapes]:
        """The allowed shapes of the parts."""
        bits, (rows, groups) = self.scheme.bits, self._grid()
        by_inputs, by_outputs = -(-self.inputs * bits // 32), -(-self.outputs * bits // 32)  # words
        if self._is_transposed:
            weight = (self.inputs, by_outputs) if self.scheme.packing == "awq" else (by_inputs, self.outputs)
            zeros, scales = (groups, by_outputs), (groups, self.outputs)
            return {"qweight": (weight,), "qzeros": (zeros,), "scales": (scales,), "g_idx": ((self.inputs,),)}
        grids: Shapes = ((rows, groups),)
        if self.scheme.is_e2m1:
            main, _, whole = _PARTS[self.scheme.packing]
            of_tensor: dict[str, Shapes] = {whole: ((), (1,)) if whole == TENSOR_SCALE else ((1,),)}
            shapes = {main: ((self.outputs, -(-self.inputs // 2)),), "weight_scale": grids}
            return shapes | (of_tensor if self.scheme.scales == "F8_E4M3" else {})
        grids += ((rows, 1, groups, 1),)  # as ModelOpt has those of blocks
        grids += ((rows * groups,),) if 1 in (rows, groups) else ()
        grids += ((), (1,), (1, 1)) if rows * groups == 1 or self.scheme.widens else ()
        if self.scheme.packing == "bytes":
            return {"weight": ((self.outputs, self.inputs),), self._scale_part: grids, "weight_zero_point": grids}
        are_packed = "weight_zero_point" in self.parts and self.parts["weight_zero_point"].dtype == "I32"
        return {
            "weight_packed": ((self.outputs, by_inputs),), "weight_scale": grids, "weight_shape": ((2,),),
            "weight_zero_point": ((by_outputs, groups),) if are_packed else grids, "weight_g_idx": ((self.inputs,),),
        }  # fmt: skip

    def _named(self, part: str) -> str:
        entry = next(iter(self.parts.values()))
        return f"{entry.path}: {self.module}.{part}"
