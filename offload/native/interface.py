"""The functions and structures of kernels.cpp, for ctypes. The headers document the fields."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_double, c_int64, c_size_t, c_uint64, c_void_p
from typing import Protocol

import torch

DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


class Library(Protocol):
    """The CPU's kernels, loaded."""

    @property
    def library(self) -> ctypes.CDLL: ...


def _pointers(*names: str) -> list[tuple[str, type]]:
    return [(name, c_void_p) for name in names]


def _integers(*names: str) -> list[tuple[str, type]]:
    return [(name, c_int64) for name in names]


class Matrix(ctypes.Structure):
    """A stored weight matrix, see stored_forms.h."""

    _fields_ = [*_pointers("rows", "book"), *_integers("kind", "numbers", "nbytes", "tail")]


class Product(ctypes.Structure):
    """A product with its norm and ending, see products.h."""

    _fields_ = [
        *_pointers("x", "norm", "norm_bias"),
        ("weight", Matrix),
        ("up", Matrix),
        *_pointers("bias", "out", "widened", "widened_up"),
        *_integers("x_stride", "out_stride", "inputs", "outputs", "bits", "ending", "activation"),
        *_integers("centred", "norm_fp32", "beside", "fixed"),
        ("epsilon", c_double),
        ("factor", c_double),
    ]


class Run(ctypes.Structure):
    """A run of keys and values, see attention.h."""

    _fields_ = [
        *_pointers("keys", "values"),
        *_integers("head_stride", "page_stride", "first", "tokens", "room", "page", "span"),
        *_integers("slot", "query", "windowed", "coded"),
    ]


class Encoding(ctypes.Structure):
    """Keys and values to encode, and their blocks of codes, see kv_codes.h."""

    _fields_ = [
        *_pointers("keys", "values", "blocks"),
        *_integers("layer_stride", "head_stride", "layer_bytes", "head_bytes"),
        *_integers("layers", "kv_heads", "groups", "head_dim"),
    ]


class PackedShape(ctypes.Structure):
    """The shape of a packed block, see packed.h."""

    _fields_ = [*_integers("numbers", "group", "room")]


class Residual(ctypes.Structure):
    """A weight matrix split into codes and residual, see residuals.h."""

    _fields_ = [
        *_pointers("weight", "blocks", "low", "heads", "fours", "escapes"),
        *_integers("outputs", "inputs", "bits"),
    ]


class PageShape(ctypes.Structure):
    """The shape of a page of keys and values, see kv_residuals.h."""

    _fields_ = [*_integers("kv_heads", "page_tokens", "head_dim")]


class Attention(ctypes.Structure):
    """An attention of new rows with its results, see attention.h."""

    _fields_ = [
        *_pointers("queries", "partials", "masses"),
        *_integers("rows", "group", "kv_heads", "head_dim", "joined", "position", "window"),
        *_integers("chunk", "chunks", "out_stride", "slots"),
        ("scale", c_double),
        ("cap", c_double),
        *_pointers("mass", "out", "sums", "sink_logits"),
    ]


class Tiles(ctypes.Structure):
    """Tiles in blocks of tokens, see chosen.h. kept: what they are described by."""

    kept: object
    _fields_ = [*_pointers("keys", "values"), *_integers("head_stride", "page_stride", "page", "tile", "size")]


class Chosen(ctypes.Structure):
    """Lists of blocks to attend to, see chosen.h."""

    _fields_ = [("tiles", Tiles), *_pointers("blocks", "tokens"), *_integers("most", "span")]


class Choosing(ctypes.Structure):
    """A choice of blocks, see choosing.h."""

    _fields_ = [
        ("scored", Product),
        *_pointers("scores", "visible", "chosen"),
        *_integers("rows", "heads", "most"),
    ]


class Rotation(ctypes.Structure):
    """New rows to rotate and to append to a cache, see rotation.h."""

    _fields_ = [
        *_pointers("q", "k", "v", "cos", "sin", "growth", "q_weight", "k_weight", "queries", "runs"),
        *_integers("count", "q_stride", "k_stride", "v_stride", "rows", "group", "kv_heads", "head_dim"),
        *_integers("joined", "width", "position", "last", "index"),
    ]


class HeadNorm(ctypes.Structure):
    """A norm of heads, see rotation.h."""

    _fields_ = [*_pointers("x", "norm"), *_integers("fp32", "heads", "dim", "stride"), ("epsilon", c_double)]


class Experts(ctypes.Structure):
    """A mixture of experts, see experts.h."""

    _fields_ = [
        ("scored", Product),
        ("gate_up", Product),
        ("down", Product),
        *_pointers("bank_place", "router", "router_bias", "router_scale", "normed", "scores"),
        *_pointers("line_of", "row_of", "expert_of", "starts", "chosen", "weights", "beside", "out", "laid"),
        *_pointers("decoded"),
        *_integers("step", "count", "num_scores", "used", "lines", "renormalised", "sigmoid", "biased"),
        *_integers("needs_softmax", "ranks_scores", "groups", "groups_used", "group_best", "floored"),
        *_integers("rounds_scores", "rounds_shares"),
        *((name, c_double) for name in ("score_scale", "score_cap", "factor", "sum_factor", "both_factor", "eps")),
    ]


class Delta(ctypes.Structure):
    """A gated delta rule, or Mamba-2, over new rows, see delta.h."""

    _fields_ = [
        *_pointers("state", "held", "rows", "out", "taps", "taps_bias", "decay", "time_bias", "skip", "norm", "gated"),
        *_pointers("scratch"),
        *_integers("held_stride", "rows_stride", "count", "new_rows", "settles"),
        *_integers("key_heads", "heads", "key_dim", "value_dim", "width", "norm_fp32", "tiled", "is_mamba"),
        *_integers("by_channel", "bounded", "gates_by_sigmoid"),
        *((name, c_double) for name in ("steps", "least", "epsilon", "norm_epsilon")),
    ]


class Convolution(ctypes.Structure):
    """A short convolution over new rows, gated or dilated, see convolution.h."""

    _fields_ = [
        *_pointers("held", "rows", "out", "taps", "bias"),
        *_integers("held_stride", "rows_stride", "count", "new_rows", "settles", "channels", "width", "dilation"),
    ]


_FUNCTIONS: dict[str, tuple[type | None, list[type]]] = {
    "wait_by": (None, [ctypes.c_int]),
    "post": (None, [c_void_p, c_uint64]),
    "await_count": (ctypes.c_int, [c_void_p, c_uint64, c_int64]),
    "add_parts": (None, [c_int64, POINTER(c_size_t), c_int64, c_void_p, c_int64]),
    "run_products": (None, [c_int64, POINTER(Product), c_int64, c_int64, c_int64]),
    "encode": (None, [c_int64, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64]),
    "decode_rows": (None, [c_int64, POINTER(Matrix), c_int64, c_int64, c_void_p, c_int64]),
    "encode_kv": (None, [c_int64, POINTER(Encoding), c_int64]),
    "pack": (None, [c_void_p, c_void_p, c_int64, c_void_p, POINTER(PackedShape), c_int64]),
    "unpack": (None, [c_void_p, c_int64, POINTER(PackedShape), c_int64]),
    "count_residual": (ctypes.c_int, [POINTER(Residual), c_int64]),
    "split_residual": (None, [POINTER(Residual), c_int64]),
    "restore_residual": (None, [POINTER(Residual), c_int64]),
    "split_off_kv": (None, [c_void_p, c_int64, c_void_p, POINTER(PageShape), c_int64, c_int64, c_int64]),
    "restore_kv": (None, [c_void_p, c_int64, POINTER(PageShape), c_int64, c_int64]),
    "widened_room": (c_int64, [c_int64, c_int64]),
    "append_rows": (None, [c_int64, POINTER(Rotation)]),
    "norm_heads": (None, [c_int64, POINTER(HeadNorm), c_int64, c_int64]),
    "scratch_room": (c_int64, [c_int64, c_int64, c_int64, c_int64, c_int64]),
    "attend_runs": (None, [c_int64, POINTER(Attention), POINTER(Run), c_int64, c_void_p, c_int64, c_int64, c_int64]),
    "chosen_room": (c_int64, [c_int64, c_int64, c_int64, c_int64, c_int64]),
    "attend_chosen": (None, [c_int64, POINTER(Attention), POINTER(Chosen), c_void_p, c_int64, c_int64]),
    "choose": (None, [c_int64, POINTER(Choosing), c_int64]),
    "merge_runs": (None, [c_int64, POINTER(Attention), c_int64]),
    "delta_room": (c_int64, [POINTER(Delta)]),
    "run_delta": (None, [c_int64, POINTER(Delta), c_int64]),
    "run_convolution": (None, [c_int64, POINTER(Convolution), c_int64]),
    "route": (None, [c_int64, POINTER(Experts), c_int64, c_int64]),
    "run_mixture": (None, [c_int64, POINTER(Experts), c_int64, c_int64]),
    "run_experts": (None, [c_int64, POINTER(Experts), c_int64]),
    "arrange_share": (c_int64, [POINTER(Experts), c_int64]),
    "gather_share": (None, [c_int64, POINTER(Experts), c_int64, c_void_p, c_int64]),
    "run_many_experts": (None, [c_int64, POINTER(Experts), c_int64, c_int64]),
    "sum_experts": (None, [c_int64, POINTER(Experts), c_int64, c_int64]),
}


def declare(library: ctypes.CDLL) -> None:
    """Declare the types of all functions to ctypes."""
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
