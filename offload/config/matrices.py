"""The weight matrices of a layer, as products use them and as a checkpoint stores them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from offload.config.block import Block
from offload.config.mixers import Attention, DeltaRule, Mixer
from offload.config.ngrams import OF_NGRAMS
from offload.formats.encodings import ENCODINGS

BY_HEAD = ("k_b", "v_b")  # of latent attention: heads' matrices one below the other, each for that head's rows
LOW_RANK = ("gates_b", "times_b")  # of a delta rule
BESIDE = ("states_in", "states_out")  # of a recurrence beside attention
# Of the streams, before the mixer and before the network: the matrices of the normed streams, and what follows them.
STREAMS = ("mixer_low", "mixer_up", "network_low", "network_up")
AROUND_EXPERTS, OF_INPUT = ("to_latent", "from_latent"), ("input_gate", "input_out")
# The last ones few layers have.
OPERATORS = (
    *("qkv", "o", "gate_up", "down", "q_b", *BY_HEAD, *LOW_RANK, *BESIDE, *AROUND_EXPERTS, *OF_INPUT, *STREAMS),
    *OF_NGRAMS,
)
ALIGNMENT = 64  # bytes, of each tensor within a layer


@dataclass(frozen=True)
class Matrix:
    """A weight matrix [outputs, inputs], in blocks of `encoding`, or as plain numbers if that is ""."""

    outputs: int
    inputs: int
    encoding: str = ""

    def nbytes(self, dtype_bytes: int) -> int:
        """Bytes of the matrix: plain numbers take `dtype_bytes` each, blocks are padded to whole units of ALIGNMENT."""
        if not self.encoding:
            return self.outputs * self.inputs * dtype_bytes
        return -(-self.outputs * ENCODINGS[self.encoding].row_bytes(self.inputs) // ALIGNMENT) * ALIGNMENT


def layer_parts(block: Block, hidden_size: int) -> dict[str, tuple[Matrix, ...]]:
    """The parts of each of the layer's OPERATORS from top to bottom, ordered as in `Encodings`."""
    return {
        name: tuple(
            Matrix(rows, inputs, kind) for rows, kind in zip(outputs, kinds or [""] * len(outputs), strict=True)
        )
        for name, (outputs, inputs, kinds) in _shapes(block, hidden_size).items()
    }


def layer_products(block: Block, hidden_size: int) -> dict[str, tuple[int, int, bool]]:
    """The (outputs, inputs, has a bias) of each of the layer's OPERATORS as it runs, all of its parts being one."""
    mixer, inner = block.mixer, block.feed_forward
    biases = {"qkv": mixer.bias, "o": mixer.out_bias, "gate_up": inner.bias, "down": inner.bias}
    return {
        name: (sum(outputs), inputs, biases.get(name, False))
        for name, (outputs, inputs, _) in _shapes(block, hidden_size).items()
    }


def _shapes(block: Block, hidden_size: int) -> dict[str, tuple[tuple[int, ...], int, tuple[str, ...]]]:
    """The shapes of the layer's OPERATORS: of each the outputs of its parts, the inputs, and its parts' encodings, if
    known."""
    mixer, inner, stored = block.mixer, block.feed_forward, block.encodings
    further = mixer_shapes(mixer)
    shapes = {
        "qkv": (mixer.parts, hidden_size, stored.qkv),
        "o": ((hidden_size,), mixer.out_size, (stored.o,)),
        "gate_up": ((inner.size,) * (1 + inner.gated), hidden_size, stored.gate_up),
        "down": ((hidden_size,), inner.size, (stored.down,)),
        **{
            name: ((outputs,), inputs, (kind,))
            for (name, (outputs, inputs)), kind in zip(
                further.items(), stored.of_mixer or [""] * len(further), strict=True
            )
        },
    }
    if block.beside is not None:
        shapes["states_in"] = block.beside.parts, hidden_size, stored.beside[:-1]
        shapes["states_out"] = (hidden_size,), block.beside.out_size, stored.beside[-1:]
    if block.experts is not None and block.has_latents:
        size = block.experts.latent
        shapes["to_latent"] = (size,), hidden_size, stored.around_experts[:1]
        shapes["from_latent"] = (hidden_size,), size, stored.around_experts[1:]
    if size := block.input_size:
        shapes["input_gate"] = ((size,), hidden_size, stored.inputs[:1])
        shapes["input_out"] = ((hidden_size,), size, stored.inputs[1:])
    if (streams := block.streams) is not None:
        width, kinds = streams.count * hidden_size, [stored.streams[:3], stored.streams[3:]]
        for low, up, own in zip(STREAMS[::2], STREAMS[1::2], kinds, strict=True):
            shapes[low], shapes[up] = (streams.low_parts, width, own[:2]), ((width,), streams.rank, own[2:])
    if block.ngrams is not None:
        products = block.ngrams.products.items()
        shapes |= {name: ((outputs,), inputs, (kind,)) for name, (outputs, inputs, kind) in products}
    return shapes


def mixer_shapes(mixer: Mixer) -> dict[str, tuple[int, int]]:
    """The (outputs, inputs) of a mixer's operators beside qkv and o. Of latent attention: q_b, of queries, if they are
    products with low-rank rows; k_b, [rank, plain] for each head, its keys' matrix transposed; v_b. Of a delta rule of
    low rank: of its gates and its times."""
    if isinstance(mixer, DeltaRule) and mixer.low_rank:
        return {"gates_b": (mixer.out_size, mixer.low_rank), "times_b": (mixer.num_times, mixer.low_rank)}
    if not isinstance(mixer, Attention) or (latent := mixer.latent) is None:
        return {}
    heads = mixer.num_heads
    queries = {"q_b": (heads * latent.query_dim, latent.query_rank)} if latent.query_rank else {}
    return {**queries, "k_b": (heads * latent.rank, latent.plain), "v_b": (heads * latent.value_dim, latent.rank)}


def expert_matrices(block: Block, hidden_size: int) -> dict[str, Matrix]:
    """The matrices of each of the layer's experts: its gate, if it has one, up and down; empty without experts."""
    if block.experts is None:
        return {}
    network, row = block.experts.network, block.experts.row_size(hidden_size)
    shapes = {"gate": (network.size, row), "up": (network.size, row), "down": (row, network.size)}
    names = tuple(shapes) if network.gated else ("up", "down")
    kinds = block.encodings.experts or ("",) * len(names)
    return {name: Matrix(*shapes[name], kind) for name, kind in zip(names, kinds, strict=True)}


def expert_vectors(block: Block, hidden_size: int) -> dict[str, int]:
    """The sizes of the biases of each of the layer's experts, by name: of gate and up, if it has a gate, and down."""
    if block.experts is None or not block.experts.network.bias:
        return {}
    network = block.experts.network
    return {"gate_up.bias": (1 + network.gated) * network.size, "down.bias": block.experts.row_size(hidden_size)}


def expert_parameters(block: Block, hidden_size: int) -> int:
    """Parameters of one of the layer's experts; 0 without any."""
    matrices = expert_matrices(block, hidden_size).values()
    return sum(each.outputs * each.inputs for each in matrices) + sum(expert_vectors(block, hidden_size).values())


def expert_bytes(block: Block, hidden_size: int, dtype_bytes: int) -> int:
    """Bytes of one of the layer's experts, each of its tensors in whole units of ALIGNMENT; 0 without any."""
    sizes = [each.nbytes(dtype_bytes) for each in expert_matrices(block, hidden_size).values()]
    sizes += [size * dtype_bytes for size in expert_vectors(block, hidden_size).values()]
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)


def layer_matrices(block: Block, hidden_size: int) -> dict[str, tuple[Matrix, ...]]:
    """The matrices of each of the layer's OPERATORS: its parts, with neighbours of one encoding joined."""
    return {name: _joined(parts) for name, parts in layer_parts(block, hidden_size).items()}


def _joined(parts: Iterable[Matrix]) -> tuple[Matrix, ...]:
    found: list[Matrix] = []
    for part in parts:
        if found and found[-1].encoding == part.encoding:
            found[-1] = replace(part, outputs=found[-1].outputs + part.outputs)
        else:
            found.append(part)
    return tuple(found)
