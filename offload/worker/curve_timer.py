"""Measurement of the curves of this CPU's kernels (`Curves`), over made-up models of fixed shapes.

A small model is nearly all calls, a large one mostly bytes; what a pass takes over more tokens is attention to them. So
the curves are of no model, and are measured once for a dtype, and once for each form of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path

import torch
from torch import Tensor

from offload.config.model import ModelConfig
from offload.decode.random_source import SeededSource
from offload.decode.sampling import SamplingParams
from offload.decode.verify import verify
from offload.decode.warp import warp
from offload.formats.encodings import ENCODINGS
from offload.formats.layout import CODE_BITS, takes_codes
from offload.kernels.cpu import kernels
from offload.machine import machine_name
from offload.model.loading import DTYPES
from offload.plan.options import Options
from offload.plan.request import Request
from offload.speed.cpu_pass import matrix_bytes, runs_experts
from offload.speed.curve_file import load_curves, save_curves
from offload.speed.curves import FAR_BYTES, NEAR_BYTES, ROWS, Curve, Curves, in_bits
from offload.speed.hardware import rates_key
from offload.worker.timed_runs import Point, Run, median_seconds
from offload.worker.trial import LARGE, PREFILL_ROWS, SMALL, Trial, in_form

VOCABULARY = 2**15  # tokens
MASS_ROWS = 8
CODED_ROWS = ROWS[:5]  # the time of more rows is proportional to their number
LIMIT_SECONDS = 20.0  # of a measurement, beyond which the CPU is too busy
_LEAST = 1e-18  # seconds of a byte: below a clock's resolution

_Taken = Mapping[Point, float]


def timed(request: Request) -> Request:
    """`request` with the curves of this CPU's kernels, with each form of weights that it needs. Missing ones are
    measured and saved to a file. Curves that cannot be saved are not used, since the next start would make another
    plan."""
    if (wanted := _forms(request)) is None:
        return request
    with suppress(OSError):
        _remember(request, wanted)
    known = request.with_known_curves()
    return known if known.curves and known.curves.kernels == kernels().name else replace(known, curves=None)


def time_again(target: Path, draft: Path | None) -> None:
    """Measure the curves for two models on this CPU anew, and drop the saved ones: the machine may have changed.
    Nothing is done where curves cannot be saved."""
    request = Request.on_this_machine(target, draft, Options(device="cpu"))
    with suppress(OSError):
        _remember(request, _forms(request) or (), anew=True)


def _forms(request: Request) -> Sequence[str] | None:
    """The forms of weights in the models that this CPU runs for `request`; None if it runs none, or shares its threads
    among ranks."""
    target, hardware = request.target, request.hardware
    if not hardware.is_cpu:
        return [*_encodings(target)] if runs_experts(target, hardware) else None
    if hardware.num_devices > 1:
        return None
    models = (target, request.draft) if request.draft is not None else (target,)
    return [*dict.fromkeys(each for model in models for each in _encodings(model)), *_codes(request)]


def _encodings(config: ModelConfig) -> Iterator[str]:
    yield from config.stored_in
    if config.head_encoding:
        yield config.head_encoding


def _codes(request: Request) -> Iterator[str]:
    """The forms of quantised weights with which the target may be its own draft."""
    options, target = request.options, request.target
    wanted = options.speculation and options.gamma != 0 and kernels().usable
    if wanted and not target.stored_in and target.experts is None and takes_codes(target.all_products):
        yield from (in_bits(bits) for bits in CODE_BITS if options.weight_bits in (None, bits))


def _remember(request: Request, forms: Collection[str], *, anew: bool = False) -> None:
    """Measure the missing curves for a dtype and save them. anew: see `save_curves`. Raises OSError."""
    here, dtype = (machine_name(), rates_key("cpu")), request.dtype
    known = None if anew else load_curves(*here, dtype)
    found = known if known and known.kernels == kernels().name else time_curves(dtype)
    missing = [form for form in forms if found is not None and form not in found.weights]
    if found is None or (found is known and not missing):
        return
    more = {form: curve for form in missing if (curve := time_weights(dtype, form, found)) is not None}
    save_curves(*here, dtype, replace(found, weights=found.weights | more), anew=anew)


@torch.inference_mode()
def time_curves(dtype: str) -> Curves | None:
    """The curves of this CPU's kernels for plain weights; None where the CPU is too busy. dtype: bf16, fp16 or fp32.
    Temporary memory: 100 or 200 MB of weights and FAR_BYTES twice."""
    size = DTYPES[dtype].itemsize
    small = Trial(SMALL, DTYPES[dtype], kernels(), NEAR_BYTES // SMALL.kv_bytes_per_token(size))
    large = Trial(LARGE, DTYPES[dtype], kernels(), FAR_BYTES // LARGE.kv_bytes_per_token(size))
    passes = median_seconds({**_small_points(small), **_large_points(large)}, LIMIT_SECONDS)
    prefills = median_seconds(_prefills(large), LIMIT_SECONDS) if passes else None
    if not (passes and prefills):
        return None
    taken = passes | prefills
    layer = _curve(taken, "short", "none", SMALL.num_layers)
    cache = _curve(taken, "far", "large", FAR_BYTES)
    masses = taken["masses", MASS_ROWS] - taken["far", MASS_ROWS]
    attended = max(taken["far", MASS_ROWS] - taken["large", MASS_ROWS], _LEAST)
    product, pair = _prefill(taken, large)
    return Curves(
        calls=_rising([taken["none", rows] + taken["draw", rows] for rows in ROWS]),
        layer=layer,
        vocabulary=_curve(taken, "large draw", "draw", VOCABULARY - SMALL.vocab_size),
        weights={"": _byte(taken, [taken["none", rows] for rows in ROWS], layer, large)},
        cache=cache,
        near_cache=tuple(map(min, _curve(taken, "near", "short", NEAR_BYTES), cache)),
        coded_cache=_coded(taken) if kernels().usable else None,
        mass_share=min(max(masses, 0.0) / attended, 1.0),
        product=product,
        pair=pair,
        kernels=kernels().name,
    )


@torch.inference_mode()
def time_weights(dtype: str, form: str, known: Curves) -> Curve | None:
    """The curve of weights in `form`, see `Curves.weights`; None where the CPU is too busy. known: the other curves."""
    bits = next((bits for bits in CODE_BITS if in_bits(bits) == form), 16)
    config = in_form(LARGE, form if form in ENCODINGS else "")
    trial = Trial(config, DTYPES[dtype], kernels(), weight_bits=bits)
    taken = median_seconds({("large", rows): partial(trial.run, rows) for rows in ROWS}, LIMIT_SECONDS)
    if taken is None:
        return None
    return _byte(taken, known.calls, known.layer, trial)


def _small_points(small: Trial) -> dict[Point, Run]:
    """Passes of no layer, and of all over no tokens and over those that stay in the CPU's caches; draws after as many
    drafted tokens as rows. Runs of a kind follow each other, as passes do."""
    kinds: dict[str, Callable[[int], object]] = {
        "none": partial(small.run, num_layers=0),
        "short": small.run,
        "near": partial(small.run, num_tokens=small.num_tokens),
        "draw": _draw(SMALL.vocab_size, small.dtype),
        "large draw": _draw(VOCABULARY, small.dtype),
    }
    return {(kind, rows): partial(run, rows) for kind, run in kinds.items() for rows in ROWS}


def _large_points(large: Trial) -> dict[Point, Run]:
    """Passes over no tokens and over more than the CPU's caches keep, in 16 bits or more and in 4."""
    far = large.num_tokens
    points = dict[Point, Run]()
    for rows in ROWS:
        points["large", rows], points["far", rows] = partial(large.run, rows), partial(large.run, rows, far)
    points["masses", MASS_ROWS] = partial(large.run, MASS_ROWS, far, masses=True)
    if large.kernels.usable:
        points |= {("coded", rows): partial(large.run_coded, rows) for rows in CODED_ROWS}
    return points


def _prefills(large: Trial) -> dict[Point, Run]:
    """Prefills after no tokens and after many."""
    return {("prefill", before): partial(large.prefill, before) for before in (0, large.num_tokens)}


def _draw(vocab_size: int, dtype: torch.dtype) -> Callable[[int], Tensor]:
    """Draws from a vocabulary, from sure distributions, as most are."""
    logits, sampling, random = torch.zeros(ROWS[-1], vocab_size, dtype=dtype), SamplingParams(), SeededSource(0)
    logits[:, 0] = 50.0

    def draw(rows: int) -> Tensor:
        probs = warp(logits[:rows].clone(), sampling)
        verify([0] * (rows - 1), probs[1:].unbind(), probs, random)
        return probs

    return draw


def _curve(taken: _Taken, kind: str, less: str, share: float) -> Curve:
    """The seconds by which passes of `kind` take longer than those of `less`, for each of `share` parts."""
    return _rising([(taken[kind, rows] - taken[less, rows]) / share for rows in ROWS])


def _byte(taken: _Taken, calls: Sequence[float], layer: Curve, large: Trial) -> Curve:
    """Seconds of a byte of the weights of `large`, in passes without what their calls take."""
    num_bytes = sum(matrix_bytes(large.config, large.dtype.itemsize, large.weight_bits).values())
    every = zip(ROWS, calls, layer, strict=True)
    own = (taken["large", rows] - of_pass - LARGE.num_layers * of_layer for rows, of_pass, of_layer in every)
    return _rising([seconds / num_bytes for seconds in own])


def _coded(taken: _Taken) -> Curve:
    known = [(taken["coded", rows] - taken["large", rows]) / FAR_BYTES for rows in CODED_ROWS]
    beyond = [known[-1] * rows / CODED_ROWS[-1] for rows in ROWS[len(CODED_ROWS) :]]
    return _rising([*known, *beyond])


def _prefill(taken: _Taken, large: Trial) -> tuple[float, float]:
    """Seconds of a prefill for each number of a matrix and row, and for each number of a query row and token."""
    heads, before = LARGE.num_heads * LARGE.head_dim, large.num_tokens
    pair = (taken["prefill", before] - taken["prefill", 0]) / (PREFILL_ROWS * before * heads)
    own = PREFILL_ROWS**2 / 2 * heads * max(pair, _LEAST)
    product = (taken["prefill", 0] - own) / (PREFILL_ROWS * LARGE.layer_matrix_elements())
    return max(product, _LEAST), max(pair, _LEAST)


def _rising(seconds: Sequence[float]) -> Curve:
    """The seconds made positive and monotone: no more than for any larger number of rows. The excess is other load."""
    least, risen = inf, []
    for value in reversed(seconds):
        least = min(least, max(value, _LEAST))
        risen.append(least)
    return tuple(reversed(risen))
