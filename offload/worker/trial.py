"""A trial model: made-up weights and a full cache on this CPU, whose passes are timed. All its layers are alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from offload.config.encodings import encoded
from offload.config.model import ModelConfig, llama_shaped
from offload.kernels.device import DeviceKernels
from offload.kernels.norms import NormWeights, dtype_of
from offload.kernels.rope import ScoringWeights, scorings
from offload.kv.full import FullCache
from offload.kv.quantised import QuantisedCache
from offload.model.decoder import Decoder
from offload.model.level import Level
from offload.model.passes import forward
from offload.model.quantised import quantised_weights
from offload.pages.tiles import TileShape
from offload.plan.options import PAGE_TOKENS
from offload.plan.sizing import BLOCK_ROWS
from offload.speed.curves import ROWS
from offload.transfer.hidden_rows import ResidentRows
from offload.transfer.memory import Memory
from offload.weights.embedding import Embedding
from offload.weights.layers import ResidentLayers
from offload.weights.layout import LayerLayout, LayerWeights, scoring_weights
from offload.weights.linear import Linear
from offload.weights.loader import Weights

SMALL = llama_shaped("llama", 1024, 128, 256, 8, 2, 2, 64, 2**20)  # nearly all is calls
LARGE = llama_shaped("llama", 64, 1024, 2816, 4, 8, 8, 128, 2**20)  # mostly bytes: 13e6 numbers in a layer
PREFILL_ROWS = 256
_VALUE = 0.01  # of all weights: a product's time does not depend on it
_MASS_CHUNK = 16


def in_form(config: ModelConfig, encoding: str) -> ModelConfig:
    """`config` with all matrices of its layers in an encoding."""
    tables = (config.names.embeddings, config.names.head)
    return encoded(config, lambda name: "" if name in tables else encoding)


@dataclass(frozen=True)
class Trial:
    """A trial model and its cache of up to `num_tokens` tokens. weight_bits: fewer than 16 for quantised weights."""

    config: ModelConfig
    dtype: torch.dtype
    kernels: DeviceKernels
    num_tokens: int = 0
    weight_bits: int = 16

    def run(self, rows: int, num_tokens: int = 0, *, num_layers: int | None = None, masses: bool = False) -> None:
        """A pass of `rows` rows over `num_tokens` cached tokens, with the logits of all rows. num_layers: 0 for a pass
        of no layer; by default all run."""
        self._cache.record_mass = masses
        self._cache.restored(num_tokens)
        level = self._levels[self.config.num_layers if num_layers is None else num_layers]
        forward(level, [0] * rows, rows)

    def run_coded(self, rows: int) -> None:
        """A pass of `rows` rows over all tokens with 4 bits a number."""
        self._quantised.truncate(self.num_tokens)
        forward(self._coded_level, [0] * rows, rows)

    def prefill(self, before: int) -> None:
        """A prefill of PREFILL_ROWS rows by the first layer after `before` tokens."""
        self._cache.restored(before)
        self._first_layer.prefill(self._cache, [0] * PREFILL_ROWS, self._prefill_rows)

    def _level(self, cache: FullCache | QuantisedCache, num_layers: int) -> Level:
        block = 1 if self.kernels.usable else BLOCK_ROWS
        return Level("trial", self._decoder(num_layers), cache, vocab_size=self.config.vocab_size, block=block)

    @cached_property
    def _levels(self) -> Mapping[int, Level]:
        """Levels of no layer and of all, by their number."""
        return {number: self._level(self._cache, number) for number in (0, self.config.num_layers)}

    @cached_property
    def _coded_level(self) -> Level:
        return self._level(self._quantised, self.config.num_layers)

    def _decoder(self, num_layers: int) -> Decoder:
        layers = ResidentLayers(list(self._weights.layers)[:num_layers], 0)
        return Decoder(self.config, replace(self._weights, layers=layers), kernels=self.kernels)

    @cached_property
    def _weights(self) -> Weights:
        exact = self._made_up()
        if self.weight_bits == 16:
            return exact
        memory = Memory(torch.device("cpu"))
        return quantised_weights(exact, self.config, self.weight_bits, memory, self.kernels).weights

    def _made_up(self) -> Weights:
        config, dtype, cpu = self.config, self.dtype, torch.device("cpu")
        layout, layers, scoring = LayerLayout.of(config, dtype), list[LayerWeights](), list[ScoringWeights]()
        for _ in range(config.num_layers):
            buffer = torch.empty(layout.num_bytes, dtype=torch.uint8)
            for view in layout.views.values():
                view.of(buffer).fill_(_VALUE)
            layers.append(layout.bind(buffer))
            scoring.append(scoring_weights(config.block.attention, layout, buffer, cpu))
        table = torch.full((config.vocab_size, config.hidden_size), _VALUE, dtype=dtype)
        ones = torch.ones(config.hidden_size, dtype=dtype_of(config.norm, dtype))
        norm = NormWeights(config.norm, ones, ones if config.norm.bias else None)
        head = Linear(table.clone(), None)
        return Weights(Embedding(table, cpu, dtype), ResidentLayers(layers, 0), norm, head, tuple(scoring), ())

    @cached_property
    def _cache(self) -> FullCache:
        config, room = self.config, self.num_tokens + PREFILL_ROWS + ROWS[-1]
        shape = TileShape(config.num_kv_heads, config.kv_dim, PAGE_TOKENS, -(-room // PAGE_TOKENS), self.dtype)
        cache = FullCache(
            Memory(torch.device("cpu")),
            shape,
            num_layers=config.num_layers,
            scorings=scorings(config, room, room, "cpu", self.dtype, weights=self._weights.scoring),
            mass_chunk=_MASS_CHUNK,
            kernels=self.kernels,
        )
        cache.reserve(room)
        for layer in range(config.num_layers):
            cache.pages.store.home(layer, 0).fill_(_VALUE)  # an unwritten page has no physical memory
        return cache

    @cached_property
    def _quantised(self) -> QuantisedCache:
        memory, num_tokens = Memory(torch.device("cpu")), self.num_tokens
        cache = QuantisedCache(self._cache, memory, num_tokens=num_tokens, drafted=ROWS[-1], kernels=self.kernels)
        self._cache.restored(num_tokens)
        cache.refresh()
        return cache

    @cached_property
    def _first_layer(self) -> Decoder:
        return self._decoder(1)

    @cached_property
    def _prefill_rows(self) -> ResidentRows:
        return ResidentRows(self._cache.arena, self.config.hidden_size, self.dtype, block=PREFILL_ROWS)
