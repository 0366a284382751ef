"""The number of kernels of a layer's pass over few rows on one GPU, from the layer's description.

They are those of `model.torch_layers` and `kernels.gpu`, which tests/test_real_sizes.py counts on paper, but for those
of n-grams, most of which are torch's operators and counted here. Not in them: attention to further runs of a long
cache, and matrices of one product that are stored in unlike encodings.
"""

from __future__ import annotations

from collections.abc import Sequence

from offload.config.block import Block, Encodings
from offload.config.mixers import Attention, DeltaRule, Recurrence, ShortConvolution
from offload.config.model import ModelConfig
from offload.config.norm import Norm
from offload.plan.sizing import rows_in

_ATTENTION = 3  # rotation, a run, the merge
_GATE = 2  # of the heads' output: its function, the product
_LATENT = 6  # by head two products and the copies that they read, halves joined, of queries and of a token's row
_LOW_RANK = 5  # of a delta rule: two products, what they read, rows joined
_EXPERTS = 6  # scores, choice, order, two products, the sum
_MEAN = 3  # of streams, between two products: the norm, gates, the mean
_INDEX = 30  # a product, norms, rotations, pooling, the choice and its blocks
_BLOCKS = 10  # more of a layer whose chosen blocks are on the host: slots, copies there and back
_PART = 18  # of further rows, where slots do not have what all choose: these, their places, attention
_NGRAMS = 45  # two products, three norms, the score with its root and sign, the gate, values, the convolution
_APART = 3  # more where gate and up are stored in unlike encodings


def layer_kernels(block: Block) -> int:
    """The kernels of a layer whose rows have 16 bits."""
    return _mixer(block) + _network(block) + _input(block) + _streams(block) + block.multiplied


def block_kernels(model: ModelConfig, rows: int, slots: int) -> int:
    """More kernels of a pass of `rows` rows that choose blocks which are on the host. slots: of a layer; 0: no block is
    on the host."""
    if not slots or model.indexer is None:
        return 0
    parts = -(-rows // rows_in(model.indexer, slots))
    return len(model.growing) * (_BLOCKS + (parts - 1) * _PART)


def _mixer(block: Block) -> int:
    if not block.has_mixer:
        return 0
    own, before = block.encodings, _norms(block.before_attention)
    mixing = _attention(block.attention, own) if block.attends else _recurrence(block.recurrence)
    found = before + _product(own.qkv) + mixing + _product((own.o,)) + _norms(block.after_attention) + 1
    if block.beside is not None:
        found += before + 2 * _product(own.beside) + _recurrence(block.beside) + 1
    return found


def _attention(attention: Attention, encodings: Encodings) -> int:
    found = _ATTENTION + _GATE * attention.gate + _INDEX * (attention.indexer is not None)
    if attention.latent is not None:
        of_rank = _norms(attention.qk_norm)
        return found + _LATENT + of_rank + (of_rank + 1 if attention.latent.query_rank else 0)
    of_heads = attention.qk_norm
    return found + (_norms(of_heads) if attention.shares else 2 * _norms(of_heads) + _norms(attention.v_norm))


def _recurrence(recurrence: Recurrence) -> int:
    low_rank = _LOW_RANK * (isinstance(recurrence, DeltaRule) and bool(recurrence.low_rank))
    return low_rank + (1 if isinstance(recurrence, ShortConvolution) else 2)


def _network(block: Block) -> int:
    if not block.has_network:
        return 0
    own, experts = block.encodings, block.experts
    read = block.before_attention if block.side_by_side else block.before_feed_forward
    activation = 1 if block.feed_forward.gated else 2
    dense = _norms(read) + _product(own.gate_up) + activation + _product((own.down,)) if block.feed_forward.size else 0
    added = _norms(block.after_feed_forward) + 1
    if experts is None:
        return dense + added
    apart = _APART * (len(set(own.experts[:-1])) > 1)
    mixed = _norms(block.before_experts or read) + _norms(block.before_router) + _EXPERTS + apart
    if experts.latent:
        mixed += _norms(block.before_experts or read) + 2 * _product(own.around_experts)
    joined = _norms(block.after_experts) + _norms(block.after_network) + 1 if block.joins else 0
    return dense + mixed + joined + added


def _input(block: Block) -> int:
    """Kernels of the layer's own input: two products, the activation, the gate, what is added."""
    return 2 * _product(block.encodings.inputs) + 3 + _norms(block.after_input) if block.input_size else 0


def _streams(block: Block) -> int:
    """Kernels of the means over streams that mixer and network read, and of n-grams."""
    if block.streams is None:
        return 0
    down, inject, up = (block.encodings.streams or ("", "", ""))[:3]
    mean = _MEAN + _product((down, inject)) + _product((up,))
    return (block.has_mixer + block.has_network) * mean + _NGRAMS * (block.ngrams is not None)


def _norms(norm: Norm | None) -> int:
    """Kernels of a norm; of one in fp32 also the copies to it and back."""
    return 0 if norm is None else 3 if norm.fp32 else 1


def _product(encodings: Sequence[str]) -> int:
    """Kernels of a product: of a matrix in blocks one multiplies and one adds up."""
    return 1 + any(encodings)
