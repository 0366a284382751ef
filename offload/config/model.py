"""The model config: a frozen description of a model's layers, and the byte and FLOP formulas that follow from it.

The decoder, the planner, the reader of checkpoints and the kernels depend on the config and never on a family's name. A
family (offload/config/families) derives it from the fields of a config.json.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from offload.config.assistant import Assistant
from offload.config.block import FACTOR_BYTES, Block, Encodings
from offload.config.layer_table import LayerTable
from offload.config.matrices import (
    BY_HEAD,
    Matrix,
    expert_bytes,
    expert_parameters,
    layer_matrices,
    layer_products,
    mixer_shapes,
)
from offload.config.mixers import Attention, Indexer, Recurrence
from offload.config.names import TensorNames
from offload.config.networks import Experts, FeedForward
from offload.config.ngrams import NGrams
from offload.config.norm import Norm
from offload.config.rope import Rope
from offload.config.schemes import Quantisation
from offload.config.streams import Streams
from offload.config.vectors import layer_norms, layer_vectors


@dataclass(frozen=True)
class ModelConfig:
    """The config of a decoder model. `offload.config.reading` builds it from a config.json and validates; the
    constructor does not.

    blocks: the layers, first to last, of which one attends at least. Growing layers have heads of one shape, layers
    with a window too, and layers with a state one mixer. Layers that share keys and values come last. norm: the final
    norm. embedding_scale, logits_scale: factors on embeddings and logits. rounds_embedding_scale: the factor is rounded
    to the dtype first. logits_cap: the cap of scaled logits, as `Attention.cap` of scores. embedding_norm: the norm of
    embeddings. dtype: the dtype that the weights are meant to be computed in. wrapper: the model_type of the model that
    contains this language model. table_encoding, head_encoding: of the embedding's table and of the head, see
    `Encodings`; both are the same if the head is the table. quantisation: the rules from which the encodings follow, if
    config.json has some. next_token: the layer of its next-token head (MTP), if it has one. suppressed: tokens that are
    never drawn. layer_table: of the inputs of layers. assistant: this is a draft without a cache, all of whose layers
    share keys and values. is_head: this is such a head by itself (config/next_token.py). last_mean_encodings: of the
    matrices of the mean of the last streams, where all layers have residual streams.
    """

    family: str
    vocab_size: int
    hidden_size: int
    blocks: tuple[Block, ...]
    max_positions: int
    norm: Norm = field(default_factory=Norm)
    embedding_scale: float = 1.0
    rounds_embedding_scale: bool = False
    logits_scale: float = 1.0
    logits_cap: float | None = None
    embedding_norm: Norm | None = None
    tie_embeddings: bool = False
    names: TensorNames = field(default_factory=TensorNames)
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    wrapper: str = ""
    table_encoding: str = ""
    head_encoding: str = ""
    quantisation: Quantisation | None = field(default=None, compare=False)
    next_token: Block | None = None
    suppressed: tuple[int, ...] = ()
    is_head: bool = False
    layer_table: LayerTable | None = None
    assistant: Assistant | None = None
    last_mean_encodings: tuple[str, str] = ("", "")

    @property
    def num_layers(self) -> int:
        return len(self.blocks)

    @cached_property  # plans ask for it thousands of times
    def block(self) -> Block:
        """One of the growing layers, or else the first layer that attends, for properties that they share. If layers
        have experts, one of them."""
        among = [self.blocks[layer] for layer in self.growing or self.attending] or self.blocks
        return next((block for block in among if block.experts), among[0])

    @cached_property
    def _alone(self) -> tuple[ModelConfig, ...]:
        made = {block: replace(self, blocks=(block,)) for block in dict.fromkeys(self.blocks)}
        return tuple(made[block] for block in self.blocks)

    def layer(self, index: int) -> ModelConfig:
        """A model of that layer alone, for values that depend on its shape."""
        return self._alone[index]

    def layer_name(self, index: int) -> str:
        """The prefix of the tensor names in a layer."""
        return self.names.next_token.layer if self.is_head else f"{self.names.body}layers.{index}."

    @cached_property
    def kinds(self) -> tuple[tuple[ModelConfig, int], ...]:
        """One layer of each kind, as from `layer`, and the number of such layers."""
        first = {block: at for at, block in reversed([*enumerate(self.blocks)])}
        return tuple((self._alone[first[block]], number) for block, number in Counter(self.blocks).items())

    @cached_property
    def num_parts(self) -> int:
        """The number of mixers and networks, the parts of layers that are added to their rows."""
        return sum(block.num_parts for block in self.blocks)

    @property
    def windowed_block(self) -> Block | None:
        """One of the layers that have a window."""
        return self.blocks[self.windowed[0]] if self.windowed else None

    @cached_property
    def kv_shapes(self) -> tuple[tuple[int, int], ...]:
        """The (KV heads, numbers of each in a cache) of each layer; (0, 0) of one that does not attend."""
        attended = (each.mixer if isinstance(each.mixer, Attention) else None for each in self.blocks)
        return tuple((each.num_kv_heads, each.kv_dim) if each else (0, 0) for each in attended)

    @cached_property
    def head_dims(self) -> tuple[int, ...]:
        """The distinct head_dims of all layers."""
        return tuple(dict.fromkeys(block.attention.head_dim for block in self.blocks if block.attends))

    @property
    def has_one_shape(self) -> bool:
        """Whether all layers have heads of one shape."""
        return len({*self.kv_shapes}) == 1

    @property
    def num_heads(self) -> int:
        """The query heads of `block`; other layers may have more or fewer, as many as their KV heads divide."""
        return self.block.attention.num_heads

    @cached_property
    def head_counts(self) -> tuple[int, ...]:
        """The distinct numbers of query heads of all layers."""
        return tuple(dict.fromkeys(each.attention.num_heads for each in self.blocks if each.attends))

    @property
    def num_kv_heads(self) -> int:
        return self.block.attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.block.attention.head_dim

    @property
    def kv_dim(self) -> int:
        return self.block.attention.kv_dim

    @property
    def intermediate_size(self) -> int:
        return self.block.feed_forward.size

    @property
    def rope(self) -> Rope:
        """The rotary positions of the layers that have them: of the growing layers if they do."""
        growing = (self.blocks[layer].attention.rope for layer in self.growing)
        every = (each.attention.rope for each in self.blocks if each.attends)
        return next((rope for rope in (*growing, *every) if rope is not None), Rope())

    @cached_property
    def growing(self) -> tuple[int, ...]:
        """The layers with keys and values of their own whose rows see all tokens, by number: each has a cache."""
        return tuple(at for at in self._caching if self.blocks[at].attention.window is None)

    @cached_property
    def windowed(self) -> tuple[int, ...]:
        """The layers with keys and values of their own whose rows see a window."""
        return tuple(at for at in self._caching if self.blocks[at].attention.window is not None)

    @property
    def _caching(self) -> tuple[int, ...]:
        return tuple(at for at in self.attending if not self.blocks[at].attention.shares)

    @cached_property
    def attending(self) -> tuple[int, ...]:
        """The layers that attend, with a window or without."""
        return tuple(at for at, block in enumerate(self.blocks) if block.attends)

    @cached_property
    def sources(self) -> Mapping[int, int]:
        """For each layer that attends the one whose keys and values it reads: itself, or for one that shares the last
        one before it that has some and sees as much."""
        last, found = dict[bool, int](), dict[int, int]()
        for at in self.attending:
            own = self.blocks[at].attention
            if not own.shares:
                last[own.window is None] = at
            if (source := last.get(own.window is None)) is not None:  # else this is a layer by itself
                found[at] = source
        return found

    def readers(self, caches: Sequence[int]) -> tuple[int, ...]:
        """The layers that read the keys and values of layers `caches`."""
        return tuple(at for at, source in self.sources.items() if source in caches)

    def reads(self, caches: Sequence[int]) -> tuple[int, ...]:
        """The cache that each of `readers` reads, by its place among `caches`."""
        return tuple(caches.index(self.sources[at]) for at in self.readers(caches))

    @cached_property
    def prefilled(self) -> ModelConfig:
        """The model's first layers, up to the last one that a later token sees something of, which is all of a prompt
        that has to run: a layer behind it shares the keys and values of others."""
        shares = [block.attends and block.attention.shares for block in self.blocks]
        return replace(self, blocks=self.blocks[: max((at + 1 for at, own in enumerate(shares) if not own), default=0)])

    @cached_property
    def shares_windows(self) -> bool:
        """Whether layers read the keys and values of another one's window."""
        return len(self.readers(self.windowed)) > len(self.windowed)

    @cached_property
    def stateful(self) -> tuple[int, ...]:
        """The layers with a recurrent state."""
        return tuple(at for at, block in enumerate(self.blocks) if block.recurs)

    @cached_property
    def with_ngrams(self) -> tuple[int, ...]:
        """The layers with an n-gram embedding."""
        return tuple(at for at, block in enumerate(self.blocks) if block.ngrams is not None)

    def ngrams(self, layer: int) -> NGrams:
        """The n-gram embedding of a layer that has one."""
        found = self.blocks[layer].ngrams
        assert found is not None
        return found

    def ngram_tables(self) -> list[Matrix]:
        """The tables of n-grams of all layers that have one."""
        return [Matrix(*self.ngrams(layer).table) for layer in self.with_ngrams]

    def ngram_parts(self, layer: int) -> list[str]:
        """The names of the parts of the layer's table of n-grams."""
        parts = range(len(self.ngrams(layer).part_shapes))
        return [f"{self.layer_name(layer)}{self.names.ngrams.table.format(part)}.weight" for part in parts]

    @property
    def recurrence(self) -> Recurrence | None:
        """The mixer of the layers with a state."""
        return self.blocks[self.stateful[0]].recurrence if self.stateful else None

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """The window in tokens of each layer that has one."""
        windows = (self.blocks[layer].attention.window for layer in self.readers(self.windowed))
        return tuple(window for window in windows if window is not None)

    @property
    def streams(self) -> Streams | None:
        """The residual streams of all layers; None for one residual row."""
        return self.blocks[0].streams if self.blocks else None

    @property
    def row_size(self) -> int:
        """Numbers of a hidden row between layers."""
        return self.hidden_size * (self.streams.count if self.streams else 1)

    @cached_property
    def indexer(self) -> Indexer | None:
        """The indexer of the growing layers, if they choose what they attend to."""
        return self.block.attention.indexer if self.growing else None

    @property
    def window(self) -> int:
        """Tokens of the longest window; 0 if there is none."""
        return max(self.windows, default=0)

    @property
    def is_llama_shaped(self) -> bool:
        """Whether the layers are Llama's except for sizes, biases, q/k norms of heads, positions and encodings."""
        norm, block = self.norm, replace(self.block, encodings=Encodings())
        plain = replace(
            Block(block.mixer, block.feed_forward, before_attention=norm, before_feed_forward=norm),
            mixer=replace(
                block.attention,
                v_norm=None,
                values_are_keys=False,
                norms_whole=False,
                weighs_heads=False,
                weighs_rotated=False,
                scale=None,
                window=None,
                cap=None,
                gate=False,
                sink_logits=False,
                shares=False,
                latent=None,
                indexer=None,
            ),
            feed_forward=replace(block.feed_forward, activation="silu", gated=True),
        )
        return (
            block == plain
            and not (norm.centred or norm.plus_one or norm.bias or norm.fp32)
            and self.has_one_shape
            and self.embedding_scale == 1
            and self.embedding_norm is None
        )

    @property
    def reads_hidden(self) -> bool:
        """Whether it drafts from its target's hidden rows: as a next-token head, or as an assistant."""
        return self.is_head or self.assistant is not None

    @property
    def context_limit(self) -> int:
        """The longest supported context in positions. Configs often keep `max_position_embeddings` at the unscaled
        length."""
        return self.rope.context_limit(self.max_positions)

    def mapped(self, change: Callable[[Block], Block]) -> ModelConfig:
        """The config with `change` applied to every layer, and to that of the next-token head."""
        changed = {block: change(block) for block in set(self.blocks)}
        next_token = self.next_token and change(self.next_token)
        return replace(self, blocks=tuple(changed[block] for block in self.blocks), next_token=next_token)

    def changed(
        self, *, num_layers: int | None = None, intermediate_size: int | None = None, **fields: Any
    ) -> ModelConfig:
        """The config with other sizes or positions in every layer. fields: num_heads, num_kv_heads, head_dim and rope
        of the layers that attend, or fields of `ModelConfig`."""
        own = {name: fields.pop(name) for name in ("num_heads", "num_kv_heads", "head_dim", "rope") if name in fields}

        def change(block: Block) -> Block:
            size = block.feed_forward.size if intermediate_size is None else intermediate_size
            feed_forward = replace(block.feed_forward, size=size)
            mixer = replace(block.attention, **own) if block.attends else block.mixer
            return replace(block, mixer=mixer, feed_forward=feed_forward)

        changed = replace(self.mapped(change), **fields)
        if num_layers is None:
            return changed
        repeated = changed.blocks * -(-num_layers // self.num_layers)
        return replace(changed, blocks=repeated[:num_layers])

    @cached_property  # plans ask for these thousands of times
    def products(self) -> Mapping[str, tuple[int, int, bool]]:
        """The (outputs, inputs, has a bias) of the products of `block` by their operators, see `layer_products`. The
        products of experts are left out. Of latent attention those by head count as one, of all heads' outputs."""
        return layer_products(self.block, self.hidden_size)

    @cached_property
    def all_products(self) -> tuple[tuple[int, int, bool], ...]:
        """The distinct products of all layers."""
        return tuple(dict.fromkeys(each for kind, _ in self.kinds for each in kind.products.values()))

    @cached_property
    def head_products(self) -> tuple[tuple[int, int, bool], ...]:
        """The distinct products of single heads of latent attention, as in `products`."""
        every = ((kind.block.mixer, mixer_shapes(kind.block.mixer)) for kind, _ in self.kinds)
        found = (
            (mixer.num_heads, *shapes[name])
            for mixer, shapes in every
            for name in BY_HEAD
            if isinstance(mixer, Attention) and shapes
        )
        return tuple(dict.fromkeys((outputs // heads, inputs, False) for heads, outputs, inputs in found))

    @cached_property
    def experts(self) -> Experts | None:
        """The mixture of experts of the layers that have one."""
        return next((kind.block.experts for kind, _ in self.kinds if kind.block.experts is not None), None)

    @cached_property
    def num_expert_layers(self) -> int:
        """The number of layers that have a mixture of experts."""
        return sum(block.experts is not None for block in self.blocks)

    def layer_matrices(self) -> dict[str, tuple[Matrix, ...]]:
        """The weight matrices of the products of `block`, see `matrices.layer_matrices`."""
        return self._matrices

    @cached_property
    def _matrices(self) -> dict[str, tuple[Matrix, ...]]:
        return layer_matrices(self.block, self.hidden_size)

    @cached_property
    def stored_in(self) -> tuple[str, ...]:
        """The distinct encodings of the layers' matrices in the checkpoint; () if all are plain."""
        every = (name for block in self.blocks for name in block.encodings.every)
        return tuple(dict.fromkeys(filter(None, every)))

    @cached_property
    def plain(self) -> ModelConfig:
        """The description of the model with plain numbers in all matrices."""

        def change(block: Block) -> Block:
            return replace(block, encodings=Encodings(), ngrams=block.ngrams and block.ngrams.stored("", "", ""))

        layers = self.layer_table and replace(self.layer_table, encoding="", projection_encoding="")
        plain = {"table_encoding": "", "head_encoding": "", "layer_table": layers, "last_mean_encodings": ("", "")}
        return replace(self, blocks=self.mapped(change).blocks, **plain)  # type: ignore[arg-type]

    @property
    def table(self) -> Matrix:
        """The embedding's table."""
        return Matrix(self.vocab_size, self.hidden_size, self.table_encoding)

    @property
    def head(self) -> Matrix:
        """The matrix of the logits: the embedding's table itself if it is tied."""
        return Matrix(self.vocab_size, self.hidden_size, self.head_encoding)

    @cached_property
    def of_layer_table(self) -> dict[str, Matrix]:
        """The layer table and the projection of embeddings beside it, by name; empty without them."""
        if (own := self.layer_table) is None:
            return {}
        numbers = self.num_layers * own.size
        return {
            self.names.layer_table: Matrix(self.vocab_size, numbers, own.encoding),
            self.names.layer_projection: Matrix(numbers, self.hidden_size, own.projection_encoding),
        }

    @cached_property
    def of_last_mean(self) -> dict[str, Matrix]:
        """The matrices of the mean of the last streams, by name; empty without streams."""
        if (streams := self.streams) is None:
            return {}
        names, (down, up) = self.names.streams, self.last_mean_encodings
        return {
            f"{self.last_streams}{names.down}.weight": Matrix(streams.rank, self.row_size, down),
            f"{self.last_streams}{names.up}.weight": Matrix(self.row_size, streams.rank, up),
        }

    @property
    def last_streams(self) -> str:
        """The prefix of the tensor names of the mean of the last streams."""
        return self.names.next_token.streams if self.is_head else self.names.body + self.names.streams.last

    @property
    def last_norm(self) -> tuple[str, int]:
        """The name of the last norm, and the numbers of its weight."""
        if self.streams is not None:
            return self.last_streams + self.names.streams.norm, self.row_size
        return self.names.next_token.norm if self.is_head else self.names.norm, self.hidden_size

    def layer_table_bytes(self, dtype_bytes: int) -> int:
        """Bytes of the layer table, which is read by rows from its file; 0 without one."""
        return self.of_layer_table[self.names.layer_table].nbytes(dtype_bytes) if self.layer_table else 0

    def layer_matrix_elements(self) -> int:
        """Elements of the matrices of `block`, without its experts."""
        return sum(outputs * inputs for outputs, inputs, _ in self.products.values())

    def layer_row_elements(self) -> int:
        """Elements of the matrices of `block` that a row is multiplied with, two FLOPs for each. The router, the
        experts in use and the projection of embeddings to the layer's input count."""
        experts, always = self.block.experts, self.layer_matrix_elements() + self.block.input_size * self.hidden_size
        if experts is None:
            return always
        each = expert_parameters(self.block, self.hidden_size)
        return always + experts.used * each + experts.num_scores * self.hidden_size

    def expert_bytes(self, dtype_bytes: int) -> int:
        """Bytes of one expert of `block`; 0 if it has none."""
        return expert_bytes(self.block, self.hidden_size, dtype_bytes)

    def experts_bytes(self, dtype_bytes: int, most: int = 0) -> int:
        """Bytes of the experts of `block`, all or at most so many; 0 if it has none."""
        count = self.block.experts.count if self.block.experts else 0
        return min(most or count, count) * self.expert_bytes(dtype_bytes)

    def layer_parameters(self) -> int:
        """Parameters of `block`: matrices, biases, norms, vectors and experts."""
        rest, norms = self._layer_numbers
        vectors = sum(map(math.prod, layer_vectors(self.block, self.hidden_size).values()))
        count = self.block.experts.count if self.block.experts else 0
        experts = count * expert_parameters(self.block, self.hidden_size)
        return rest + sum(size for size, _ in norms) + vectors + self.block.multiplied + experts

    def all_layers(self, of_one: Callable[[ModelConfig], int]) -> int:
        """The sum of `of_one` over all layers."""
        return sum(number * of_one(kind) for kind, number in self.kinds)

    @cached_property
    def _layer_numbers(self) -> tuple[int, tuple[tuple[int, Norm], ...]]:
        """The number of elements of matrices and biases, and the size of each norm's vectors."""
        biases = sum(outputs for outputs, _, has_bias in self.products.values() if has_bias)
        return self.layer_matrix_elements() + biases, tuple(layer_norms(self.block, self.hidden_size).values())

    @cached_property
    def tables(self) -> frozenset[tuple[Rope | None, int]]:
        """The distinct pairs of rotary positions and numbers of a position: each pair has a table of its own."""
        attended = (block.attention for block in self.blocks if block.attends)
        return frozenset((each.rope, each.table_dim) for each in attended)

    def num_parameters(self) -> int:
        """Parameters of the whole model; tied embeddings count once."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        layers = self.all_layers(ModelConfig.layer_parameters)
        inputs = sum(each.outputs * each.inputs for each in self.of_layer_table.values())
        inputs += self.layer_table.size if self.layer_table else 0
        inputs += sum(each.outputs * each.inputs for each in self.of_last_mean.values())
        return embeddings + inputs + layers + self.row_size * (1 + self.norm.bias)

    def weight_bytes(self, dtype_bytes: int) -> int:
        """Bytes of all weights at `dtype_bytes` per element."""
        vectors = self.row_size * (1 + self.norm.bias) * self.norm.itemsize(dtype_bytes)
        tables = self.table.nbytes(dtype_bytes) + (0 if self.tie_embeddings else self.head.nbytes(dtype_bytes))
        tables += sum(each.nbytes(dtype_bytes) for each in (*self.of_layer_table.values(), *self.of_last_mean.values()))
        own = self.assistant.matrices(self.hidden_size) if self.assistant else {}
        tables += sum(each.nbytes(dtype_bytes) for each in own.values())
        vectors += self.layer_table.size * self.layer_table.norm.itemsize(dtype_bytes) if self.layer_table else 0
        return self.layers_weight_bytes(dtype_bytes) + tables + vectors

    def layers_weight_bytes(self, dtype_bytes: int) -> int:
        """Bytes of the weights of all layers, with their experts."""
        return self.all_layers(lambda layer: layer.layer_weight_bytes(dtype_bytes) + layer.experts_bytes(dtype_bytes))

    def layer_weight_bytes(self, dtype_bytes: int) -> int:
        """Bytes of the weights of `block` at `dtype_bytes` per element, or in their encodings, without experts."""
        if dtype_bytes not in self._layer_bytes:  # a plan asks for it ten thousand times
            self._layer_bytes[dtype_bytes] = self._count_layer_bytes(dtype_bytes)
        return self._layer_bytes[dtype_bytes]

    @cached_property
    def _layer_bytes(self) -> dict[int, int]:
        return {}

    def _count_layer_bytes(self, dtype_bytes: int) -> int:
        rest, norms = self._layer_numbers
        biases = rest - self.layer_matrix_elements()
        matrices = sum(part.nbytes(dtype_bytes) for parts in self._matrices.values() for part in parts)
        vectors = sum(size * norm.itemsize(dtype_bytes) for size, norm in norms)
        vectors += 4 * sum(map(math.prod, layer_vectors(self.block, self.hidden_size).values()))
        return matrices + biases * dtype_bytes + vectors + FACTOR_BYTES * self.block.multiplied

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of keys and values that one token adds, over the growing layers."""
        return len(self.growing) * self.layer_kv_bytes(dtype_bytes)

    def layer_kv_bytes(self, dtype_bytes: int) -> int:
        """Bytes of the keys and values of a token in `block`; 0 if it has none of its own."""
        has_some = self.block.attends and not self.block.attention.shares
        return 2 * self.block.attention.kv_size * dtype_bytes if has_some else 0

    def read_kv_bytes(self, dtype_bytes: int) -> int:
        """Bytes of keys and values that a row reads for each token that it attends to, over the layers that see all
        tokens: those that share a cache read it once each."""
        return len(self.readers(self.growing)) * self.layer_kv_bytes(dtype_bytes)

    def state_bytes(self) -> int:
        """Bytes of the states of all layers that have one, in fp32."""
        return 0 if self.recurrence is None else 4 * len(self.stateful) * math.prod(self.recurrence.state_shape)

    def window_kv_bytes(self, dtype_bytes: int) -> int:
        """Bytes of the keys and values of a token in a layer with a window; 0 if there is none."""
        return 0 if self.windowed_block is None else 2 * self.windowed_block.attention.kv_size * dtype_bytes

    def seen_pairs(self, num_tokens: int) -> int:
        """The number of (row, attended token) pairs of `num_tokens` rows over all layers. Pairs in layers with other
        query sizes count as the number of pairs of `block` that cost the same."""
        seen = 0
        for kind, number in self.kinds:
            if not kind.block.attends:
                continue
            attention = kind.block.attention
            pairs = number * _pairs(num_tokens, min(attention.reach or num_tokens, num_tokens))
            seen += pairs * attention.q_size // self.block.attention.q_size
        return seen

    def prefill_flops(self, num_tokens: int) -> int:
        """FLOPs (a multiply-add is two) of a causal forward over `num_tokens` rows with logits of the last row only.

        A row attends to keys: 2 H D FLOPs each for the score and for the value. A state is multiplied with the key and
        the query, scaled, and has the update added: 7 FLOPs for each of its numbers. Norms, rotary, convolution and
        softmax are left out.
        """
        run = self.prefilled
        products = 2 * run.all_layers(ModelConfig.layer_row_elements) * num_tokens
        attention = 4 * run.block.attention.q_size * run.seen_pairs(num_tokens)
        states = 7 * self.state_bytes() // 4 * num_tokens
        return products + attention + states + 2 * self.vocab_size * self.hidden_size * (num_tokens > 0)


def _pairs(num_tokens: int, window: int) -> int:
    """The number of (row, attended token) pairs in one layer: row t, counted from 1, sees min(t, window) tokens."""
    return window * (window + 1) // 2 + (num_tokens - window) * window


def llama_shaped(
    family: str,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_positions: int,
    eps: float = 1e-6,
    rope: Rope | None = None,
    *,
    attention: Mapping[str, Any] | None = None,
    mlp_bias: bool = False,
    **others: Any,
) -> ModelConfig:
    """A config with identical layers, with RMS norms of `eps` before attention and feed-forward network.

    attention: further fields of `Attention`. others: fields of `ModelConfig`.
    """
    norm = Norm(eps)
    block = Block(
        Attention(num_heads, num_kv_heads, head_dim, rope or Rope(), **(attention or {})),
        FeedForward(intermediate_size, bias=mlp_bias),
        before_attention=norm,
        before_feed_forward=norm,
    )
    return ModelConfig(family, vocab_size, hidden_size, (block,) * num_layers, max_positions, norm, **others)
