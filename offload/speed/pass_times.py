"""Seconds of a model's passes on a CPU by rows and cached tokens: measured on its shapes, or estimated from rates.

Measured times are kept in the file of rates, by machine, threads, shapes, dtype and requested kernels.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from offload.config.model import ModelConfig
from offload.fields import Kind, fields_of, number, whole
from offload.machine import KERNELS
from offload.speed.curves import CURVE, KERNELS_NAME, ROWS, SECONDS, at
from offload.speed.expert_times import EXPERTS, ExpertTimes
from offload.speed.model_times import Measured
from offload.speed.rates import Rates, change_records
from offload.speed.routing import read_bytes

_SHAPES = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")

_CURVES = ("fixed", "layer", "token", "near_token")
_CODED = "coded_token"
_KINDS = {  # of the fields of a record
    **dict.fromkeys(_CURVES, CURVE),
    **dict.fromkeys(("num_tokens", "num_near"), whole()),
    **dict.fromkeys(("prefill_row", "prefill_pair"), SECONDS),
    "mass_share": number(0, 10),
    "kernels": KERNELS_NAME,
    _CODED: Kind("a list", lambda value: value == [] or CURVE.fits(value)),
}

_PASS_SECONDS = 3e-4  # Python of a pass outside its layers, the draw and the check of drafted tokens
_LAYER_SECONDS = 6e-5  # calls of one layer
_CALL_SECONDS = 3e-5  # the part of that for attention, per sequence
_WEIGHT_ROW = 0.05  # of the seconds of reading the weights, for each further row
_TOKEN_ROW = 0.06  # of the seconds of reading the cache, for each further row
_CODED_SHARE = 5 / 16
_MASS_SHARE = 0.12
_STORED_BYTES = 1  # a number of a stored matrix takes at least as long to multiply as so many bytes to read
_STORED_ROW = 0.3  # of the seconds of a row with stored matrices, for each further row
_PREFILL_SHARE = 0.2  # of the rate of large products


@dataclass(frozen=True)
class PassTimes:
    """Seconds of the parts of a pass, each for every row count in `ROWS`.

    fixed: outside the layers: embedding, logits, draw, Python. layer: of one layer, all but its attention to cached
    tokens. token: attention of one layer per cached token, for `num_tokens` tokens and more. near_token: the same for
    `num_near` tokens and fewer, which the CPU's caches keep from one pass to the next. coded_token: the same per token
    with 4 bits a number, () if there is no kernel. mass_share: the share of attention seconds that recording masses
    adds. prefill_row: of one layer per row of a prefill. prefill_pair: of one layer per (row, attended token) pair.
    kernels: the kernels that ran; "" for estimated times.
    """

    fixed: tuple[float, ...]
    layer: tuple[float, ...]
    token: tuple[float, ...]
    near_token: tuple[float, ...]
    num_tokens: int
    num_near: int
    mass_share: float
    prefill_row: float
    prefill_pair: float
    kernels: str = ""
    coded_token: tuple[float, ...] = ()

    def seconds(
        self,
        num_layers: float,
        num_tokens: float,
        rows: int,
        *,
        masses: bool = False,
        coded: bool = False,
        sequences: int = 1,
        beside: float = 0.0,
    ) -> float:
        """Seconds of a pass of `rows` rows over `num_tokens` cached tokens in each of `num_layers` layers. coded: the
        tokens have 4 bits a number; if that was not measured, in proportion to the bits. sequences: number of sequences
        in the pass, each with these rows and tokens. beside: further exact tokens."""
        token = at(self.coded_token, rows) if coded and self.coded_token else self._token(num_tokens, rows)
        if coded and not self.coded_token:
            token *= _CODED_SHARE
        attended = num_tokens * token * (1.0 + self.mass_share * masses) + beside * self._token(beside, rows)
        more, all_rows = sequences - 1, sequences * rows
        fixed, layer = (
            at(self.fixed, all_rows) + more * _PASS_SECONDS,
            at(self.layer, all_rows) + more * _CALL_SECONDS,
        )
        return fixed + num_layers * (layer + sequences * attended)

    def _token(self, num_tokens: float, rows: int) -> float:
        """Seconds of attention of one layer per token, among `num_tokens` tokens: longer if the CPU's caches keep fewer
        of them."""
        near, far = at(self.near_token, rows), at(self.token, rows)
        between = (num_tokens - self.num_near) / max(self.num_tokens - self.num_near, 1)
        return near + (far - near) * min(max(between, 0.0), 1.0)

    def prefill(self, num_layers: float, num_tokens: int, pairs: int) -> float:
        """Seconds of a prefill of `num_tokens` rows. pairs: number of (row, attended token) pairs in all layers."""
        return num_layers * num_tokens * self.prefill_row + pairs * self.prefill_pair


@dataclass(frozen=True)
class Times:
    """The measured pass times of a request's models; None: not measured. coded: of the target with quantised weights,
    by bits, as far as measured. experts: of the target's, run by the CPU for a GPU."""

    target: PassTimes | None = None
    draft: PassTimes | None = None
    coded: Mapping[int, PassTimes] = field(default_factory=dict)
    experts: ExpertTimes | None = None


UNKNOWN = Times()


def estimated(config: ModelConfig, itemsize: int, rates: Rates) -> PassTimes:
    """Estimated pass times, if none were measured: reading at the rate of `rates`, and a share of that for each further
    row, a larger one where matrices are stored."""
    rest = _read_bytes(config, itemsize, lambda model, item: model.weight_bytes(item) - model.layers_weight_bytes(item))
    token = config.layer_kv_bytes(itemsize) / rates.device_read
    flops, row = _PREFILL_SHARE * rates.flops, _STORED_ROW if config.stored_in else _WEIGHT_ROW

    def read(seconds: float, row_share: float, calls: float = 0.0) -> tuple[float, ...]:
        return tuple(calls + seconds * (1.0 + row_share * (rows - 1)) for rows in ROWS)

    of_layer = [_read_bytes(config, itemsize, partial(read_bytes, rows=rows)) / rates.device_read for rows in ROWS]
    layer = zip(ROWS, of_layer, strict=True)

    return PassTimes(
        fixed=read(rest / rates.device_read, row, _PASS_SECONDS),
        layer=tuple(_LAYER_SECONDS + seconds + of_layer[0] * row * (rows - 1) for rows, seconds in layer),
        token=read(token, _TOKEN_ROW),
        near_token=read(token, _TOKEN_ROW),
        num_tokens=1,
        num_near=0,
        mass_share=_MASS_SHARE,
        prefill_row=2 * config.layer_row_elements() / flops,
        prefill_pair=4 * config.num_heads * config.head_dim / flops,
    )


def _read_bytes(config: ModelConfig, itemsize: int, of: Callable[[ModelConfig, int], float]) -> float:
    """The bytes read for a model: its stored bytes, or _STORED_BYTES for each number if that is more."""
    if not (config.stored_in or config.table_encoding or config.head_encoding):
        return of(config, itemsize)
    return max(of(config, itemsize), of(config.plain, _STORED_BYTES))


def key_of(config: ModelConfig, dtype: str, weight_bits: int = 16) -> str:
    """The key of a model's record: shapes, encodings of the matrices, dtype (bf16, fp16 or fp32), the bits of its
    weights if fewer, and whether kernels are requested."""
    attention, inner = config.block.attention, config.block.feed_forward
    own = config.block.experts
    experts = {} if own is None else {"experts": own.count, "used": own.used, "of": own.network.size}
    shapes = {name: getattr(config, name) for name in _SHAPES} | {
        "qkv_bias": int(attention.bias),
        "o_bias": int(attention.out_bias),
        "mlp_bias": int(inner.bias),
        "qk_norm": int(attention.qk_norm is not None),
        **experts,
    }
    named = " ".join(f"{name}={value}" for name, value in shapes.items())
    form = "" if config.is_llama_shaped else f" {config.family}"
    form += " values=keys" if attention.values_are_keys else ""
    stored = *config.block.encodings.every, config.head_encoding
    form += f" stored={','.join(stored)}" if any(stored) else ""
    bits = f" weights={weight_bits}" if weight_bits < 16 else ""
    return f"{named}{form} {dtype}{bits} kernels={os.environ.get(KERNELS) or 'on'}"


def load_times(machine: str, device: str, key: str) -> PassTimes | None:
    """The measured times of the model `key` on `device` of `machine`; None if there are none or the record is
    damaged."""
    return _PASSES.load(machine, device, key)


def save_times(machine: str, device: str, measured: Mapping[str, PassTimes], *, anew: bool = False) -> Path:
    """Add the times `measured`, by `key_of`, to the file of rates, see `Measured.added`, and return its path. OSError.

    anew: replace existing times, and drop the other models of this device and the times of experts, since the machine
    may have changed.
    """
    dropped = (_PASSES.record(device), EXPERTS.record(device)) if anew else ()

    def change(records: dict[str, Any]) -> dict[str, Any]:
        kept = {name: each for name, each in records.items() if name not in dropped}
        return _PASSES.added(kept, device, measured)

    return change_records(machine, change)


def _times(record: object) -> PassTimes | None:
    """The times in a record of the file; None if it is damaged."""
    try:
        source = fields_of(record, "")
        values = {each.name: source.get(each.name, _KINDS[each.name]) for each in fields(PassTimes)}
    except ValueError:
        return None
    return PassTimes(**values | {name: tuple(values[name]) for name in (*_CURVES, _CODED)})


_PASSES = Measured("passes", _times)
