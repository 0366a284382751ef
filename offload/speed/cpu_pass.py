"""Seconds of a model's passes on a CPU: the bytes that they read, times the curves of the kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from offload.config.matrices import expert_matrices
from offload.config.model import ModelConfig
from offload.config.networks import Experts
from offload.formats.encodings import ENCODINGS
from offload.formats.layout import EXPERT_ALIGNMENT, code_bytes
from offload.speed.curves import FAR_BYTES, NEAR_BYTES, Curves, at, in_bits
from offload.speed.hardware import Hardware
from offload.speed.routing import distinct_experts, over_groups

_CODED_SHARE = 5 / 16  # of attention to 16 bits, where attention to 4 bits was not measured
_PANEL_SHARE, _MAKING_ROWS = 0.85, 16.0  # of a prefill's experts: of the rate of large products; see docs/memory.md
_ATTENTION_SHARE = 0.5  # of a layer's calls


def runs_experts(config: ModelConfig, hardware: Hardware) -> bool:
    """Whether the host's CPU can run a model's experts."""
    if config.experts is None:
        return False
    sizes = config.hidden_size, config.experts.row_size(config.hidden_size)
    return hardware.packs and not any(size % EXPERT_ALIGNMENT for size in sizes)


def shares_experts(config: ModelConfig, hardware: Hardware, dtype: str) -> bool:
    """Whether the CPU may run any of a layer's experts for the device, since both give their rows the same bits: a
    GPU's kernels for 16 bits those in fixed point, a CPU all. dtype: of the rows."""
    if not runs_experts(config, hardware):
        return False
    if hardware.is_cpu:
        return True
    kinds = (kind for kind, _ in config.kinds if kind.block.experts is not None)
    forms = {part.encoding for kind in kinds for part in expert_matrices(kind.block, kind.hidden_size).values()}
    in_fixed_point = all(form and ENCODINGS[form].has_integers for form in forms)
    return hardware.has_kernels and dtype != "fp32" and in_fixed_point


def matrix_bytes(config: ModelConfig, itemsize: int, weight_bits: int = 16) -> Mapping[str, int]:
    """Bytes of the matrices of all layers, without experts, and of the head, by form: see `Curves.weights`. A head in
    an encoding stays as it is stored."""
    found, head = Counter[str](), config.head
    coded = in_bits(weight_bits) if weight_bits < 16 else ""
    for kind, number in config.kinds:
        if coded:
            products = kind.products.values()
            found[coded] += number * sum(code_bytes(outputs, inputs, weight_bits) for outputs, inputs, _ in products)
            continue
        for matrix in (each for parts in kind.layer_matrices().values() for each in parts):
            found[matrix.encoding] += number * matrix.nbytes(itemsize)
    if coded and not head.encoding:
        found[coded] += code_bytes(head.outputs, head.inputs, weight_bits)
    else:
        found[head.encoding] += head.nbytes(itemsize)
    return found


@dataclass(frozen=True)
class CpuPass:
    """The passes of a model on a CPU. itemsize: bytes of a plain number. weight_bits: of the weights, fewer than 16 if
    they are quantised."""

    config: ModelConfig
    itemsize: int
    curves: Curves
    weight_bits: int = 16

    def seconds(
        self,
        rows: int,
        growing: float,
        windows: float = 0.0,
        *,
        masses: bool = False,
        coded: bool = False,
        sequences: int = 1,
    ) -> float:
        """Seconds of a pass of `rows` rows of each of `sequences` sequences.

        growing, windows: bytes of the keys and values in plain numbers that a row of a sequence attends to in growing
        layers, all of them, and in layers with a window. coded: those of growing layers have 4 bits a number. masses:
        they are recorded.
        """
        curves, num_layers, all_rows = self.curves, self.config.num_layers, sequences * rows
        queries, cached = rows * self._queries, growing + windows
        plain = self._attended(cached, queries)
        long = plain * (1.0 + curves.mass_share * masses)
        if coded:
            long = at(curves.coded_cache, queries) if curves.coded_cache else _CODED_SHARE * plain
        attention = growing * long + windows * plain
        more = (sequences - 1) * (curves.calls[0] + num_layers * _ATTENTION_SHARE * curves.layer[0])
        calls = at(curves.calls, all_rows) + num_layers * at(curves.layer, all_rows) + more
        draws = self.config.vocab_size * at(curves.vocabulary, all_rows)
        return calls + draws + self._products(all_rows) + sequences * attention

    def prefill(self, num_tokens: int, expert_rows: int) -> float:
        """Seconds of a prefill of `num_tokens` rows. expert_rows: over which a layer's experts run at once."""
        config = self.config.prefilled
        numbers = config.all_layers(ModelConfig.layer_matrix_elements)
        pairs = config.seen_pairs(num_tokens) * config.num_heads * config.head_dim
        experts = over_groups(num_tokens, expert_rows, self._prefilled_experts)
        return num_tokens * numbers * self.curves.product + experts + pairs * self.curves.pair

    def _prefilled_experts(self, rows: int) -> float:
        """Seconds of the experts of all layers over `rows` rows of a prefill: of their products, and of making the
        numbers of the distinct ones, which takes as long as the products of a few rows."""
        seconds = 0.0
        for kind, number in self.config.kinds:
            if (experts := kind.block.experts) is not None:
                elements = sum(
                    each.outputs * each.inputs for each in expert_matrices(kind.block, kind.hidden_size).values()
                )
                multiplied = rows * experts.used + _MAKING_ROWS * distinct_experts(experts, rows)
                seconds += number * elements * multiplied * self.curves.product / _PANEL_SHARE
        return seconds

    def experts(self, rows: int) -> float:
        """Seconds of the experts of all layers in a pass of `rows` rows: of reading the distinct ones that the rows
        choose, each for its share of them."""
        return sum(number * self._of_experts(own, sizes, rows) for number, own, sizes in self._mixtures)

    def _of_experts(self, experts: Experts, sizes: Mapping[str, int], rows: int) -> float:
        distinct = distinct_experts(experts, rows)
        own_rows = rows * experts.used / distinct
        return distinct * self._read(sizes, own_rows)

    @cached_property
    def _queries(self) -> int:
        """Query rows for each KV head of a row."""
        return self.config.num_heads // self.config.num_kv_heads

    def _attended(self, num_bytes: float, queries: int) -> float:
        """Seconds for each byte of the cache, of which the CPU's caches keep the fewer the more there are."""
        near, far = at(self.curves.near_cache, queries), at(self.curves.cache, queries)
        between = (num_bytes - NEAR_BYTES) / (FAR_BYTES - NEAR_BYTES)
        return near + (far - near) * min(max(between, 0.0), 1.0)

    def _products(self, rows: int) -> float:
        """Seconds of the products of all layers and of the logits of all rows."""
        return self._read(self._matrices, rows) + self.experts(rows)

    def _read(self, sizes: Mapping[str, int], rows: float) -> float:
        """Seconds of the products of `rows` rows with matrices. sizes: their bytes, by form."""
        return sum(size * at(self.curves.weights_of(form), rows) for form, size in sizes.items())

    @cached_property
    def _matrices(self) -> Mapping[str, int]:
        return matrix_bytes(self.config, self.itemsize, self.weight_bits)

    @cached_property
    def _mixtures(self) -> Sequence[tuple[int, Experts, Mapping[str, int]]]:
        """(number of layers, experts, bytes of one expert's matrices by form) of each kind of layer with experts."""
        found = []
        for kind, number in self.config.kinds:
            if kind.block.experts is not None:
                sizes = Counter[str]()
                for matrix in expert_matrices(kind.block, kind.hidden_size).values():
                    sizes[matrix.encoding] += matrix.nbytes(self.itemsize)
                found.append((number, kind.block.experts, sizes))
        return found
