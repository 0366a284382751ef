"""Seconds of a model's passes on a CPU by rows and cached tokens: measured on its shapes, or estimated from rates.

Measured ones are kept in the file of rates, by machine, threads, shapes, dtype and the kernels that were asked for.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from offload.config.model import ModelConfig
from offload.fields import Kind, fields_of, list_of, number, whole
from offload.plan.machine import KERNELS
from offload.plan.rates import Rates, change_records, read_records

ROWS = (1, 2, 4, 8, 16, 32, 64)
_SHAPES = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")

_CURVES = ("fixed", "layer", "token", "near_token")
_CODED = "coded_token"
_SECONDS = number(1e-15, 1e6)  # within what machines take: what is divided by it is a number
_CURVE = list_of(_SECONDS, length=len(ROWS))
_KINDS = {  # of the fields of a record
    **dict.fromkeys(_CURVES, _CURVE),
    **dict.fromkeys(("num_tokens", "num_near"), whole()),
    **dict.fromkeys(("prefill_row", "prefill_pair"), _SECONDS),
    "mass_share": number(0, 10),
    "kernels": Kind("a name", lambda value: isinstance(value, str) and value != ""),
    _CODED: Kind("a list", lambda value: value == [] or _CURVE.fits(value)),
}

_PASS_SECONDS = 3e-4  # Python of a pass outside its layers, the draw and the check of what was drafted
_LAYER_SECONDS = 6e-5  # calls of one layer
_CALL_SECONDS = 3e-5  # the part of it that is its attention's, for each sequence
_WEIGHT_ROW = 0.05  # of the seconds of reading the weights, what each further row adds
_TOKEN_ROW = 0.06  # the same of the cache
_CODED_SHARE = 5 / 16
_MASS_SHARE = 0.12
_DECODED_BYTES = 2  # on two cores 0.15 ns, a little more than a number of 16 bits takes
_PREFILL_SHARE = 0.2  # of the rate of large products


@dataclass(frozen=True)
class PassTimes:
    """Seconds of the parts of a pass, each for so many rows as `ROWS` says.

    fixed: outside the layers: embedding, logits, draw, Python. layer: of one layer, all but its attention to cached
    tokens. token: of one layer, of the attention to each of `num_tokens` cached tokens and more; near_token: to each of
    `num_near` and fewer, which the CPU's caches keep from one pass to the next; coded_token: to each token with 4
    bits a number, () where no kernel attends to these. mass_share: of the seconds of
    attention, what keeping its masses adds. prefill_row: of one layer and each row of a prefill; prefill_pair: of one
    layer and each pair of a row and a token that it sees. kernels: those that ran; "" for times that were not measured.
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
        """Of a pass of `rows` rows over `num_tokens` cached tokens in each of `num_layers` layers. coded: of tokens
        with 4 bits a number; where that was not measured, in proportion to the bits. sequences: that share the pass,
        each with so many rows and tokens. beside: further tokens, as they are."""
        token = _at(self.coded_token, rows) if coded and self.coded_token else self._token(num_tokens, rows)
        if coded and not self.coded_token:
            token *= _CODED_SHARE
        attended = num_tokens * token * (1.0 + self.mass_share * masses) + beside * self._token(beside, rows)
        more, all_rows = sequences - 1, sequences * rows
        fixed, layer = (
            _at(self.fixed, all_rows) + more * _PASS_SECONDS,
            _at(self.layer, all_rows) + more * _CALL_SECONDS,
        )
        return fixed + num_layers * (layer + sequences * attended)

    def _token(self, num_tokens: float, rows: int) -> float:
        """Of one layer and each of `num_tokens` tokens: the fewer of them the CPU's caches keep, the longer."""
        near, far = _at(self.near_token, rows), _at(self.token, rows)
        between = (num_tokens - self.num_near) / max(self.num_tokens - self.num_near, 1)
        return near + (far - near) * min(max(between, 0.0), 1.0)

    def prefill(self, num_layers: float, num_tokens: int, pairs: int) -> float:
        """Seconds of a prefill of `num_tokens` rows. pairs: of a row and a token that it sees, in all layers."""
        return num_layers * num_tokens * self.prefill_row + pairs * self.prefill_pair


@dataclass(frozen=True)
class Times:
    """Of the models of a request; None: not measured. coded: of the target with quantised weights, by their number,
    as far as that was measured."""

    target: PassTimes | None = None
    draft: PassTimes | None = None
    coded: Mapping[int, PassTimes] = field(default_factory=dict)


UNKNOWN = Times()


def estimated(config: ModelConfig, itemsize: int, rates: Rates) -> PassTimes:
    """Where nothing was measured: reading at the rate of `rates`, and a share of it for each further row. To decode a
    number of a stored matrix takes as long as to read _DECODED_BYTES."""
    num_bytes = _read_bytes(config, itemsize, ModelConfig.layer_weight_bytes)
    rest = _read_bytes(config, itemsize, lambda model, item: model.weight_bytes(item) - model.layers_weight_bytes(item))
    token = config.layer_kv_bytes(itemsize) / rates.device_read
    flops = _PREFILL_SHARE * rates.flops

    def read(seconds: float, row_share: float, calls: float = 0.0) -> tuple[float, ...]:
        return tuple(calls + seconds * (1.0 + row_share * (rows - 1)) for rows in ROWS)

    return PassTimes(
        fixed=read(rest / rates.device_read, _WEIGHT_ROW, _PASS_SECONDS),
        layer=read(num_bytes / rates.device_read, _WEIGHT_ROW, _LAYER_SECONDS),
        token=read(token, _TOKEN_ROW),
        near_token=read(token, _TOKEN_ROW),
        num_tokens=1,
        num_near=0,
        mass_share=_MASS_SHARE,
        prefill_row=2 * config.layer_matrix_elements() / flops,
        prefill_pair=4 * config.num_heads * config.head_dim / flops,
    )


def _read_bytes(config: ModelConfig, itemsize: int, of: Callable[[ModelConfig, int], int]) -> int:
    """Of a model as it is or, where these are more, those of _DECODED_BYTES for each of its numbers."""
    if not (config.stored_in or config.table_encoding or config.head_encoding):
        return of(config, itemsize)
    return max(of(config, itemsize), of(config.plain, _DECODED_BYTES))


def key_of(config: ModelConfig, dtype: str, weight_bits: int = 16) -> str:
    """The key of a model's record: its shapes, how each matrix is stored, dtype (bf16, fp16 or fp32), the bits of its
    weights where these are fewer, and whether kernels are asked for."""
    attention, inner = config.block.attention, config.block.feed_forward
    shapes = {name: getattr(config, name) for name in _SHAPES} | {
        "qkv_bias": int(attention.bias),
        "o_bias": int(attention.out_bias),
        "mlp_bias": int(inner.bias),
        "qk_norm": int(attention.qk_norm is not None),
    }
    named = " ".join(f"{name}={value}" for name, value in shapes.items())
    form = "" if config.is_llama_shaped else f" {config.family}"
    form += " values=keys" if attention.values_are_keys else ""
    of_layer = config.block.encodings
    stored = *of_layer.qkv, of_layer.o, *of_layer.gate_up, of_layer.down, config.head_encoding
    form += f" stored={','.join(stored)}" if any(stored) else ""
    bits = f" weights={weight_bits}" if weight_bits < 16 else ""
    return f"{named}{form} {dtype}{bits} kernels={os.environ.get(KERNELS) or 'on'}"


def load_times(machine: str, device: str, key: str) -> PassTimes | None:
    """What was measured of the model `key` on `device` of `machine`; None: nothing, or the record is damaged."""
    models = read_records(machine).get(_passes(device))
    return _times(models.get(key)) if isinstance(models, dict) else None


def save_times(machine: str, device: str, measured: Mapping[str, PassTimes], *, anew: bool = False) -> Path:
    """Add what was `measured`, by `key_of`, to the file of rates, and return its path. What another process has
    measured of the same kernels meanwhile stays, since plans follow from it by now. OSError.

    anew: replace it, and forget the other models of this device, since the machine may have changed.
    """

    def change(records: dict[str, Any]) -> dict[str, Any]:
        known = records.get(_passes(device))
        models = known if isinstance(known, dict) and not anew else {}
        missing = {key: asdict(times) for key, times in measured.items() if not _is_of(models.get(key), times.kernels)}
        return records | {_passes(device): models | missing}

    return change_records(machine, change)


def _passes(device: str) -> str:
    return f"{device}, passes"


def _is_of(record: object, kernels: str) -> bool:
    """Whether it has times of these kernels."""
    times = _times(record)
    return times is not None and times.kernels == kernels


def _times(record: object) -> PassTimes | None:
    """What a record of the file says; None where it is damaged."""
    try:
        source = fields_of(record, "")
        values = {each.name: source.get(each.name, _KINDS[each.name]) for each in fields(PassTimes)}
    except ValueError:
        return None
    return PassTimes(**values | {name: tuple(values[name]) for name in (*_CURVES, _CODED)})


def _at(curve: tuple[float, ...], rows: int) -> float:
    """The value at `rows`, between those of `ROWS` along straight lines, beyond the last one in proportion."""
    if rows >= ROWS[-1]:
        return curve[-1] * rows / ROWS[-1]
    after = max(bisect_left(ROWS, rows), 1)
    below, above = ROWS[after - 1 : after + 1]
    low, high = curve[after - 1 : after + 1]
    return low + (high - low) * (rows - below) / (above - below)
