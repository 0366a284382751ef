"""Measurement of the seconds of a model's passes on this CPU, over made-up weights of its shapes: see `PassTimes`.

The trial model has as many layers as exceed the CPU's caches, each used once in a pass. A large model is measured by a
layer or two, and different runs take turns, so that none finds its memory in the caches. A small model is measured
whole, in consecutive runs, as passes follow each other. A measurement takes less than a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from offload.formats.layout import CODE_BITS, takes_codes, takes_kv_codes
from offload.formats.stored import StoredMatrix
from offload.kernels.cpu import kernels, of_model
from offload.kernels.device import DeviceKernels
from offload.kernels.norms import NormWeights, dtype_of
from offload.kernels.rope import ScoringWeights, scorings
from offload.kv.full import FullCache
from offload.kv.quantised import QuantisedCache
from offload.machine import machine_name
from offload.model.decoder import Decoder
from offload.model.level import Level
from offload.model.loading import DTYPES
from offload.model.passes import forward
from offload.model.quantised import quantised_weights
from offload.pages.tiles import TileShape
from offload.plan.options import PAGE_TOKENS, Options
from offload.plan.request import Request
from offload.plan.sizing import BLOCK_ROWS
from offload.speed.curves import ROWS
from offload.speed.expert_times import cpu_runs, load_expert_times, save_expert_times
from offload.speed.hardware import rates_key
from offload.speed.pass_times import PassTimes, key_of, load_times, save_times
from offload.speed.routing import independent_rows
from offload.transfer.hidden_rows import ResidentRows
from offload.transfer.memory import Memory
from offload.weights.embedding import Embedding
from offload.weights.layers import ResidentLayers
from offload.weights.layout import LayerLayout, LayerWeights, scoring_weights
from offload.weights.linear import Linear
from offload.weights.loader import Weights
from offload.worker.expert_timer import VALUE, fill, made_up_experts, time_experts
from offload.worker.timed_runs import Point, Run, least_seconds

LAYER_BYTES = 32 * 2**20  # of weights, or all of a smaller model's
CACHE_BYTES = 128 * 2**20  # of keys and values: more than the CPU's caches hold
NEAR_BYTES = 32 * 2**20  # of keys and values that the CPU's caches hold beside a small model's weights
MAX_TOKENS = 16384
MASS_ROWS, MASS_CHUNK = 8, 16
CODED_ROWS = ROWS[:5]  # the time of more rows is proportional to their number
PREFILL_FLOPS = 2e10  # of the products of a measured prefill
LIMIT_SECONDS, LIMIT_RATE = 2.0, 1e8  # beyond these seconds, plus a layer's bytes at this rate, the CPU is too busy
_LEAST = 1e-13  # seconds: below a clock's resolution

Model = tuple[ModelConfig, int]  # a model, and the bits of its weights; 16 where they are not quantised


def timed(request: Request) -> Request:
    """`request` with the times of its models' passes, including the target's over quantised weights, or for a GPU those
    of the experts that it may leave to the CPU. Missing times are measured on the CPU and saved to a file. Times that
    cannot be saved are not used, since the next start would make another plan."""
    if not request.hardware.is_cpu:
        return _experts_timed(request)
    if request.hardware.num_devices > 1:
        return request
    models = _models(request)
    try:
        _remember([model for model in models if not _is_timed(model, request.dtype)], request.dtype)
    except OSError:
        return request
    known = request.with_known_times()
    coded = {bits: each for bits, each in known.times.coded.items() if (request.target, bits) in models}
    return replace(known, times=replace(known.times, coded=coded))  # saved times may be of kernels that do not run now


def _experts_timed(request: Request) -> Request:
    if not cpu_runs(request.target, request.hardware):
        return request
    key, device = request.experts_key, (machine_name(), rates_key("cpu"))
    known = load_expert_times(*device, key)
    if known is None or known.kernels != kernels().name:
        if (times := time_experts(request.target, request.dtype)) is None:
            return request
        with suppress(OSError):
            save_expert_times(*device, key, times)
    return request.with_known_times()


def time_again(target: Path, draft: Path | None) -> None:
    """Time the passes of two models on this CPU anew, and drop other models' saved times: the machine may have changed.
    Nothing is done where times cannot be saved."""
    request = Request.on_this_machine(target, draft, Options(device="cpu"))
    with suppress(OSError):
        _remember(_models(request), request.dtype, anew=True)


def _models(request: Request) -> list[Model]:
    """The models whose passes are timed."""
    models = [(config, 16) for config in (request.target, request.draft) if config is not None]
    return [*models, *((request.target, bits) for bits in _code_bits(request))]


def _code_bits(request: Request) -> Sequence[int]:
    """The bits of quantised weights with which the target may be its own draft."""
    options, products = request.options, request.target.all_products
    wanted, others = options.speculation and options.gamma != 0, request.target.stored_in or request.target.experts
    if not wanted or others or not takes_codes(products) or not _kernels(request.target).usable:
        return ()
    return [bits for bits in CODE_BITS if options.weight_bits in (None, bits)]


def _remember(models: Sequence[Model], dtype: str, *, anew: bool = False) -> None:
    """Time the passes of `models` and save the times. anew: see `save_times`. Raises OSError."""
    found = {key_of(config, dtype, bits): time_passes(config, dtype, bits) for config, bits in models}
    measured = {key: times for key, times in found.items() if times is not None}
    if measured:
        save_times(machine_name(), rates_key("cpu"), measured, anew=anew)


@torch.inference_mode()
def time_passes(config: ModelConfig, dtype: str, weight_bits: int = 16) -> PassTimes | None:
    """The times of a model's passes; None where the CPU is too busy. dtype: bf16, fp16 or fp32. weight_bits: fewer than
    16 for quantised weights, without a prefill. Temporary memory: LAYER_BYTES of weights (at least a layer), as much
    for logits, and CACHE_BYTES."""
    return _Trial(config, DTYPES[dtype], weight_bits).times()


def _is_timed(model: Model, dtype: str) -> bool:
    """Whether there are saved times of the kernels that would run now."""
    config, bits = model
    known = load_times(machine_name(), rates_key("cpu"), key_of(config, dtype, bits))
    return known is not None and known.kernels == _kernels_name(config)


class _Trial:
    """A trial model: a few layers, all of the growing kind, part of a vocabulary, and a full cache."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, weight_bits: int) -> None:
        item, config = dtype.itemsize, replace(config, blocks=(config.block,) * config.num_layers)
        self._config, self._kernels, self._coded = config, _kernels(config), weight_bits < 16
        self._block = 1 if self._kernels.usable else BLOCK_ROWS
        self._limit = LIMIT_SECONDS + _layer_bytes(config, item) / LIMIT_RATE
        room = LAYER_BYTES * 4 if self._coded else LAYER_BYTES  # bytes of the exact layers
        self._num_layers = _between(1, room // _layer_bytes(config, item), config.num_layers)
        self._vocab_size = _between(1, LAYER_BYTES // (config.hidden_size * item), config.vocab_size)
        per_token = config.layer_kv_bytes(item)
        most = min(config.context_limit - 2 * ROWS[-1], MAX_TOKENS)
        self._num_tokens = _between(1, CACHE_BYTES // (self._num_layers * per_token), most)
        self._is_whole = self._num_layers == config.num_layers
        near = NEAR_BYTES // (self._num_layers * per_token) if self._is_whole else self._num_tokens
        self._num_near = _between(1, near, self._num_tokens)
        self._weights = _made_up(config, dtype, self._num_layers, self._vocab_size)
        if self._coded:
            memory = Memory(torch.device("cpu"))
            self._weights = quantised_weights(self._weights, config, weight_bits, memory, self._kernels).weights
        self._cache = self._full_cache(dtype)
        self._quantised = self._quantised_cache() if not self._coded else None
        self._prefill_rows = _between(64, int(PREFILL_FLOPS / (2 * config.layer_row_elements())), 512)
        self._prefill_before = self._num_tokens

    def times(self) -> PassTimes | None:
        points = {**self._passes(), **self._logits_and_draws(), **self._prefills()}
        if self._is_whole:  # runs of a kind follow each other, the one of a single row comes last
            points = dict(sorted(points.items(), key=lambda point: (point[0][0], -point[0][1])))
        if (taken := least_seconds(points, self._limit)) is None:
            return None

        def of(part: str) -> list[float]:
            return [taken[part, rows] for rows in ROWS]

        def attended(part: str, num_tokens: int) -> tuple[float, ...]:
            """Seconds of one layer for each of `num_tokens` tokens."""
            more = [much - least for much, least in zip(of(part), of("short"), strict=True)]
            return _rising([seconds / (self._num_layers * num_tokens) for seconds in more])

        left_out = self._config.vocab_size / self._vocab_size - 1
        fixed = [sum(each) for each in zip(of("fixed"), (left_out * s for s in of("logits")), of("draw"), strict=True)]
        layers = [short - fixed for short, fixed in zip(of("short"), of("fixed"), strict=True)]
        kept = max(taken["long", MASS_ROWS] - taken["short", MASS_ROWS], _LEAST)
        masses = max(taken["masses", MASS_ROWS] - taken["long", MASS_ROWS], 0.0)
        prefill_row, prefill_pair = self._prefill_seconds(taken)
        for rows in ROWS[len(CODED_ROWS) :] if self._quantised is not None else ():
            beyond = taken["coded", CODED_ROWS[-1]] - taken["short", CODED_ROWS[-1]]
            taken["coded", rows] = taken["short", rows] + beyond * rows / CODED_ROWS[-1]
        token = attended("long", self._num_tokens)
        near_token = tuple(map(min, attended("near", self._num_near), token))
        return PassTimes(
            fixed=_rising(fixed),
            layer=_rising([seconds / self._num_layers for seconds in layers]),
            token=token,
            near_token=near_token,
            num_tokens=self._num_tokens,
            num_near=self._num_near,
            mass_share=min(masses / kept, 1.0),
            prefill_row=prefill_row,
            prefill_pair=prefill_pair,
            kernels=_kernels_name(self._config),
            coded_token=attended("coded", self._num_tokens) if self._quantised is not None else (),
        )

    def _passes(self) -> dict[Point, Run]:
        """Passes with logits of all rows: of no layer, and of all layers over an empty cache, a part and a full one."""
        none, whole = self._with_layers(0), self._with_layers(self._num_layers)

        def run(level: Level, rows: int, num_tokens: int, masses: bool = False) -> None:
            self._cache.record_mass = masses
            self._cache.restored(num_tokens)
            forward(level, _tokens(rows, self._vocab_size), rows)

        points: dict[Point, Run] = {("masses", MASS_ROWS): partial(run, whole, MASS_ROWS, self._num_tokens, True)}
        for rows in ROWS:
            points["fixed", rows] = partial(run, none, rows, 0)
            points["short", rows] = partial(run, whole, rows, 0)
            points["near", rows] = partial(run, whole, rows, self._num_near)
            points["long", rows] = partial(run, whole, rows, self._num_tokens)
        if self._quantised is not None:
            points |= {("coded", rows): partial(self._run_coded, self._quantised, rows) for rows in CODED_ROWS}
        return points

    def _run_coded(self, quantised: QuantisedCache, rows: int) -> None:
        """Run a pass over the tokens in 4 bits."""
        quantised.truncate(self._num_tokens)
        level = Level("self", self._decoder(self._num_layers), quantised, vocab_size=self._vocab_size)
        forward(level, [0] * rows, rows)

    def _logits_and_draws(self) -> dict[Point, Run]:
        """Logits of the part of the vocabulary, and a draw from all of it after `rows` - 1 drafted tokens."""
        config, decoder = self._config, self._decoder(0)
        dtype, random, sampling = self._weights.embedding.dtype, SeededSource(0), SamplingParams()

        def draw(logits: Tensor) -> None:
            probs = warp(logits, sampling)
            verify([0] * (len(probs) - 1), probs[1:].unbind(), probs, random)

        points: dict[Point, Run] = {}
        for rows in ROWS:
            hidden = torch.full((rows + -rows % self._block, config.hidden_size), VALUE, dtype=dtype)
            logits = torch.zeros(rows, config.vocab_size, dtype=dtype)
            logits[:, 0] = 50.0  # a sure distribution, as most are
            points["logits", rows] = partial(decoder.logits, hidden, block=self._block)
            points["draw", rows] = partial(draw, logits)
        return points

    def _prefill_seconds(self, taken: Mapping[Point, float]) -> tuple[float, float]:
        """(seconds of a row, seconds of a pair of a row and a token that it attends to) in a prefill. The least value
        for quantised weights, which have no prefill."""
        if self._coded:
            return _LEAST, _LEAST
        rows, before = self._prefill_rows, self._prefill_before
        pair = max((taken["prefill", before] - taken["prefill", 0]) / (rows * before), _LEAST)
        return max(taken["prefill", 0] / rows - pair * rows / 2, _LEAST), pair

    def _prefills(self) -> dict[Point, Run]:
        """Prefills of a block by one layer, after no tokens and after some; empty for quantised weights."""
        if self._coded:
            return {}
        decoder, tokens = self._decoder(1), _tokens(self._prefill_rows, self._vocab_size)
        dtype = self._weights.embedding.dtype
        rows = ResidentRows(self._cache.arena, self._config.hidden_size, dtype, block=len(tokens))

        def run(before: int) -> None:
            self._cache.restored(before)
            decoder.prefill(self._cache, tokens, rows)

        return {("prefill", before): partial(run, before) for before in (0, self._prefill_before)}

    def _with_layers(self, count: int) -> Level:
        """A level with the first `count` layers; with 0, only the rest of a pass."""
        return Level("target", self._decoder(count), self._cache, vocab_size=self._vocab_size, block=self._block)

    def _quantised_cache(self) -> QuantisedCache | None:
        """The quantised cache of all tokens of the full cache; None where no kernel attends to it."""
        if not self._kernels.usable or not takes_kv_codes(self._config.head_dim):
            return None
        memory, num_tokens = Memory(torch.device("cpu")), self._num_tokens
        cache = QuantisedCache(self._cache, memory, num_tokens=num_tokens, drafted=ROWS[-1], kernels=self._kernels)
        self._cache.restored(num_tokens)
        cache.refresh()
        return cache

    def _decoder(self, num_layers: int) -> Decoder:
        layers = ResidentLayers(list(self._weights.layers)[:num_layers], 0)
        return Decoder(self._config, replace(self._weights, layers=layers), kernels=self._kernels)

    def _full_cache(self, dtype: torch.dtype) -> FullCache:
        config, room = self._config.changed(num_layers=self._num_layers), self._num_tokens + 512 + ROWS[-1]
        shape = TileShape(config.num_kv_heads, config.head_dim, PAGE_TOKENS, -(-room // PAGE_TOKENS), dtype)
        cache = FullCache(
            Memory(torch.device("cpu")),
            shape,
            num_layers=self._num_layers,
            scorings=scorings(config, room, room, "cpu", dtype, weights=self._weights.scoring),
            mass_chunk=MASS_CHUNK,
            kernels=self._kernels,
        )
        cache.reserve(room)
        for layer in range(self._num_layers):
            cache.pages.store.home(layer, 0).fill_(VALUE)  # an unwritten page has no physical memory
        return cache


def _made_up(config: ModelConfig, dtype: torch.dtype, num_layers: int, vocab_size: int) -> Weights:
    layout, random = LayerLayout.of(config, dtype), torch.Generator().manual_seed(0)

    layers, scoring = list[LayerWeights](), list[ScoringWeights]()
    for _ in range(num_layers):
        buffer = torch.empty(layout.num_bytes, dtype=torch.uint8)
        fill(layout, buffer)
        layers.append(layout.bind(buffer))
        scoring.append(scoring_weights(config.block.attention, layout, buffer, buffer.device))
        if (router := layers[-1].router) is not None:  # what layers add is the same in all numbers of a row
            router.matrix.normal_(generator=random).sub_(router.matrix.mean(1, keepdim=True))

    def matrix(outputs: int, encoded: str) -> Tensor | StoredMatrix:
        if not encoded:
            return torch.full((outputs, config.hidden_size), VALUE, dtype=dtype)
        kind = ENCODINGS[encoded]
        return StoredMatrix(torch.zeros(outputs, kind.row_bytes(config.hidden_size), dtype=torch.uint8), kind)

    table, head = matrix(vocab_size, config.table_encoding), matrix(vocab_size, config.head_encoding)
    if config.experts is not None:
        table = torch.randn(vocab_size, config.hidden_size, generator=random).to(dtype)
    ones = torch.ones(config.hidden_size, dtype=dtype_of(config.norm, dtype))
    norm = NormWeights(config.norm, ones, ones if config.norm.bias else None)
    embedding = Embedding(table, torch.device("cpu"), dtype)
    own = (made_up_experts(config, dtype, config.experts.count) for _ in layers) if config.experts is not None else ()
    return Weights(embedding, ResidentLayers(layers, 0), norm, Linear(head, None), tuple(scoring), tuple(own))


def _layer_bytes(config: ModelConfig, dtype_bytes: int) -> int:
    """Bytes of a layer with its experts."""
    return config.layer_weight_bytes(dtype_bytes) + config.experts_bytes(dtype_bytes)


def _tokens(rows: int, vocab_size: int) -> list[int]:
    """The tokens of a pass of `rows` rows: as many different ones as rows of a text choose experts independently, of a
    vocabulary that may be smaller."""
    distinct = min(round(independent_rows(rows)), vocab_size)
    return [row % distinct for row in range(rows)]


def _kernels_name(config: ModelConfig) -> str:
    """The name of the kernels on which the model's passes run here."""
    return _kernels(config).name


def _kernels(config: ModelConfig) -> DeviceKernels:
    return of_model(torch.device("cpu"), config)


def _rising(seconds: Sequence[float]) -> tuple[float, ...]:
    """The seconds made positive and monotone: no more than for any larger number of rows. The excess is other load."""
    least, risen = inf, []
    for value in reversed(seconds):
        least = min(least, max(value, _LEAST))
        risen.append(least)
    return tuple(reversed(risen))


def _between(least: int, value: int, most: int) -> int:
    return max(least, min(value, most))
