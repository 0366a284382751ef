"""The encodings of a model's matrices where its checkpoint stores some in blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from offload.config.block import Block, Encodings
from offload.config.matrices import BESIDE, LOW_RANK, STREAMS, Matrix, expert_matrices, layer_parts, mixer_shapes
from offload.config.mixers import Attention
from offload.config.model import ModelConfig
from offload.config.names import TensorNames
from offload.config.next_token import head_of
from offload.config.ngrams import NGrams
from offload.errors import ModelError


def encoded(config: ModelConfig, encoding_of: Callable[[str], str]) -> ModelConfig:
    """`config` with the encodings of its matrices. encoding_of: maps a matrix name, as in
    `weights.tensors.expected_tensors`, to its encoding, "" for plain numbers."""

    def of_layers(model: ModelConfig) -> tuple[Block, ...]:
        every = ((block, model.layer_name(index)) for index, block in enumerate(model.blocks))
        return tuple(
            replace(
                block,
                encodings=_of_layer(block, model.names, layer, encoding_of),
                ngrams=block.ngrams and _of_ngrams(block.ngrams, model.names, layer, encoding_of),
            )
            for block, layer in every
        )

    table, head = encoding_of(config.names.embeddings), head_of(config)
    return replace(
        config,
        blocks=of_layers(config),
        table_encoding=table,
        head_encoding=table if config.tie_embeddings else encoding_of(config.names.head),
        next_token=None if head is None else of_layers(head)[0],
        layer_table=config.layer_table
        and replace(
            config.layer_table,
            encoding=encoding_of(config.names.layer_table),
            projection_encoding=encoding_of(config.names.layer_projection),
        ),
        last_mean_encodings=tuple(map(encoding_of, config.of_last_mean)) or config.last_mean_encodings,  # type: ignore[arg-type]
    )


def matrices(config: ModelConfig) -> dict[str, Matrix]:
    """All matrices of a checkpoint of `config`, by the names that `encoded` asks for; of a next-token head its own."""
    found = dict[str, Matrix]()
    if not config.is_head:
        found |= {config.names.embeddings: config.table}
        found |= {} if config.tie_embeddings else {config.names.head: config.head}
        found |= config.of_layer_table | config.of_last_mean
    for index, block in enumerate(config.blocks):
        layer, names = config.layer_name(index), _MatrixNames.of(block, config.names)
        parts = layer_parts(block, config.hidden_size)
        of_operators = {"qkv": names.qkv, "o": (names.o,), "gate_up": names.gate_up, "down": (names.down,)}
        of_operators |= {"to_latent": names.around_experts[:1], "from_latent": names.around_experts[1:]}
        of_operators |= {"input_gate": names.inputs[:1], "input_out": names.inputs[1:]}
        of_operators |= dict(zip(BESIDE, (names.beside[:-1], names.beside[-1:]), strict=True))
        means = [each for own in (names.streams[:3], names.streams[3:]) for each in (own[:2], own[2:])]
        of_operators |= dict(zip(STREAMS, means, strict=True))
        for operator, own_names in of_operators.items():
            for name, part in zip(own_names, parts.get(operator, ()), strict=True):
                if part.outputs and part.inputs:
                    _add(found, layer + name, part)
        for name, part in _stored_of_mixer(block, config.names):
            _add(found, layer + name, part)
        if (grams := block.ngrams) is not None:
            for name, (outputs, inputs, kind) in zip(names.ngrams, grams.products.values(), strict=True):
                _add(found, layer + name, Matrix(outputs, inputs, kind))
            for name, shape in zip(config.ngram_parts(index), grams.part_shapes, strict=True):
                _add(found, name, Matrix(*shape, grams.table_encoding))
        for own, part in zip(names.experts, expert_matrices(block, config.hidden_size).values(), strict=True):
            for name, count in Counter(own).items():  # one for all experts, or one each
                _add(found, layer + name, replace(part, outputs=count * part.outputs))
    return found


def _stored_of_mixer(block: Block, names: TensorNames) -> Iterator[tuple[str, Matrix]]:
    """The names and shapes of a mixer's matrices beside qkv and o, as the checkpoint has them."""
    for operator, (outputs, inputs) in mixer_shapes(block.mixer).items():
        if _is_transposed(operator, names):
            assert block.attention.latent is not None
            rank = block.attention.latent.rank
            outputs, inputs = outputs // rank * inputs, rank
        yield _of_mixer(operator, names), Matrix(outputs, inputs)


def _of_mixer(operator: str, names: TensorNames) -> str:
    """The name of one of these."""
    return f"{getattr(names.recurrence if operator in LOW_RANK else names, operator)}.weight"


def _is_transposed(operator: str, names: TensorNames) -> bool:
    """Whether an operator is made of columns of the checkpoint's tensor. It is plain then."""
    return operator == "k_b" and not names.splits_latent


def _add(found: dict[str, Matrix], name: str, part: Matrix) -> None:
    """Add a part of the matrix `name`; parts with the same name are one matrix."""
    before = found.get(name)
    found[name] = replace(part, outputs=part.outputs + (before.outputs if before else 0))


@dataclass(frozen=True)
class _MatrixNames:
    """The names of a layer's matrices within the layer, ordered as in `Encodings`. A fused matrix occurs once for each
    of its parts. experts: the names for all experts of each of their matrices. around_experts: () where
    they read hidden rows. beside: () where nothing is beside attention. streams, ngrams: () where there are none."""

    qkv: tuple[str, ...]
    o: str
    gate_up: tuple[str, ...]
    down: str
    experts: tuple[tuple[str, ...], ...]
    around_experts: tuple[str, ...]
    inputs: tuple[str, ...]
    beside: tuple[str, ...]
    streams: tuple[str, ...]
    ngrams: tuple[str, ...]

    @classmethod
    def of(cls, block: Block, names: TensorNames) -> _MatrixNames:
        inner, out = block.feed_forward, names.attention + names.out if block.attends else names.recurrence.out
        qkv = [*names.recurrence.parts[: len(block.mixer.parts)]]
        qkv = _attention(block.attention, names) if block.attends else qkv
        gate, up, down = names.network(block)
        gate_up = [gate, up] if inner.gated else [up]
        latents = [names.experts.to_latent, names.experts.from_latent] if block.has_latents else []
        beside = [*names.recurrence.parts, names.recurrence.out] if block.beside is not None else []
        given = [names.input_gate, names.input_out] if block.input_size else []
        experts = tuple(_of_experts(getattr(names.experts, name), block) for name in expert_matrices(block, 1))
        own, means = names.streams, list[str]()
        if block.streams is not None:
            means = [prefix + name for prefix in (own.mixer, own.network) for name in (own.down, own.inject, own.up)]
        grams = [names.ngrams.keys, names.ngrams.values] if block.ngrams is not None else []
        projections, of_network, *others = (
            tuple(f"{name}.weight" for name in part) for part in (qkv, gate_up, latents, given, beside, means, grams)
        )
        return cls(projections, f"{out}.weight", of_network, f"{down}.weight", experts, *others)


def _of_experts(name: str, block: Block) -> tuple[str, ...]:
    """The names of one matrix of all the layer's experts."""
    count = block.experts.count if block.experts else 0
    return tuple(f"{name.format(number)}.weight" for number in range(count))


def _attention(attention: Attention, names: TensorNames) -> list[str]:
    """The names of the matrices of an attention's projections."""
    if attention.latent is not None:
        queries = names.low_queries if attention.latent.query_rank else names.queries
        return [queries, names.latent_rows, *[names.gate] * attention.gate]
    letters = "q" if attention.shares else "qk" if attention.values_are_keys else "qkv"
    gate = [names.gate] * attention.gate
    gate += [names.index.queries, names.index.key] if attention.indexer is not None else []
    return [names.fused_qkv or f"{names.attention}{letter}_proj" for letter in letters] + gate


def _of_layer(block: Block, names: TensorNames, layer: str, encoding_of: Callable[[str], str]) -> Encodings:
    """The encodings of one layer, whose tensors' names begin with `layer`. Raises ModelError if experts differ."""

    def of(name: str) -> str:
        return encoding_of(layer + name)

    stored, has_network = _MatrixNames.of(block, names), block.feed_forward.size > 0
    found = Encodings(
        tuple(map(of, stored.qkv)) if block.has_mixer else (),
        of(stored.o) if block.has_mixer else "",
        tuple(map(of, stored.gate_up)) if has_network else (),
        of(stored.down) if has_network else "",
        tuple(_alike(encoding_of, [layer + name for name in own]) for own in stored.experts),
        tuple(map(of, stored.around_experts)),
        tuple(map(of, stored.inputs)),
        tuple("" if _is_transposed(name, names) else of(_of_mixer(name, names)) for name in mixer_shapes(block.mixer)),
        tuple(map(of, stored.beside)),
        tuple(map(of, stored.streams)),
    )
    return found if any(found.every) else Encodings()


def _of_ngrams(own: NGrams, names: TensorNames, layer: str, encoding_of: Callable[[str], str]) -> NGrams:
    """An n-gram embedding with the encodings of its table and its matrices. ModelError if parts of the table differ."""
    parts = [f"{layer}{names.ngrams.table.format(part)}.weight" for part in range(len(own.part_shapes))]
    found = (encoding_of(f"{layer}{name}.weight") for name in (names.ngrams.keys, names.ngrams.values))
    return own.stored(_alike(encoding_of, parts), *found)


def _alike(encoding_of: Callable[[str], str], names: Sequence[str]) -> str:
    """The encoding of one matrix of all experts, or of all parts of a table. Raises ModelError if they differ."""
    found = dict.fromkeys(map(encoding_of, dict.fromkeys(names)))
    if len(found) > 1:
        kinds = ", ".join(kind or "plain numbers" for kind in found)
        raise ModelError(f"{names[0]} and its like in the layer are in {kinds}; all must be alike")
    return next(iter(found))
