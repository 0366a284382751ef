"""The n-gram embedding of a layer: rows of a large table that hashes of a token and of those before it choose (Qwen4's
per-layer embedding)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice

from offload.config.mixers import DilatedConvolution
from offload.config.norm import Norm

OF_NGRAMS = ("ngram_keys", "ngram_values")  # the matrices of a layer that embeddings are multiplied with
NGRAM_NORMS = ("ngram_key_norm", "ngram_query_norm", "ngram_norm")  # its norm vectors
_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15  # of SplitMix64
_LAYER_STEP = 10007  # between the seeds of two such layers
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)  # Miller-Rabin is exact with these below 3.3e24


@dataclass(frozen=True)
class NGrams:
    """The n-gram embedding of one layer. An n-gram is a token with those before it, of 2 to `size` tokens; its hash
    chooses one row in each of its `heads`, which are parts of the table. A token's embedding is its `num_heads` rows of
    `row_size` numbers, joined.

    The hash of an n-gram is the XOR of its ids, each times the multiplier of its distance, in 64-bit integers that
    wrap; the row is its remainder by the head's size. An id on the other side of an `eos`, or before the text, counts
    as eos; an eos does not cut its own n-grams.

    The layer's rows are `streams` streams of `hidden_size` numbers. The embedding's product with a key for each stream
    gates its value, and a convolution over the normed gated values is added to them. norm: of the keys, of the streams
    and of the gated values, each stream by itself. taps, dilation: of the convolution. num_rows: of the table, with
    padding; parts: that it has in a folder. table_encoding, key_encoding, value_encoding: see `Encodings`.
    """

    size: int
    heads: int
    row_size: int
    multipliers: tuple[int, ...]
    head_sizes: tuple[int, ...]
    num_rows: int
    eos: int
    hidden_size: int
    streams: int
    taps: int = 4
    dilation: int = 3
    norm: Norm = field(default_factory=lambda: Norm(plus_one=True, fp32=True))
    parts: int = 1
    table_encoding: str = ""
    key_encoding: str = ""
    value_encoding: str = ""

    @property
    def context(self) -> int:
        """The ids before a token that its n-grams have."""
        return self.size - 1

    @property
    def num_heads(self) -> int:
        """The rows of a token."""
        return self.context * self.heads

    @property
    def width(self) -> int:
        """Numbers of a token's embedding."""
        return self.num_heads * self.row_size

    @property
    def offsets(self) -> tuple[int, ...]:
        """The first row of each head."""
        return tuple(accumulate(self.head_sizes[:-1], initial=0))

    @property
    def hashes(self) -> tuple[tuple[int, ...], ...]:
        """The integers that hash: multipliers, sizes of heads, and their offsets."""
        return self.multipliers, self.head_sizes, self.offsets

    @property
    def channels(self) -> int:
        """Numbers of all streams of a token."""
        return self.streams * self.hidden_size

    @property
    def convolution(self) -> DilatedConvolution:
        """The convolution over the normed gated values."""
        return DilatedConvolution(self.channels, self.taps, self.dilation)

    @property
    def table(self) -> tuple[int, int, str]:
        """The (rows, numbers of a row, encoding) of the table."""
        return self.num_rows, self.row_size, self.table_encoding

    @property
    def part_shapes(self) -> tuple[tuple[int, int], ...]:
        """The shapes of the table's parts."""
        each = -(-self.num_rows // self.parts)
        return tuple((min(each, self.num_rows - first), self.row_size) for first in range(0, self.num_rows, each))

    def stored(self, table: str, keys: str, values: str) -> NGrams:
        """The n-gram embedding with other encodings."""
        return replace(self, table_encoding=table, key_encoding=keys, value_encoding=values)

    @property
    def products(self) -> Mapping[str, tuple[int, int, str]]:
        """The (outputs, inputs, encoding) of the matrices that embeddings are multiplied with, by name."""
        keys, values = (self.channels, self.key_encoding), (self.hidden_size, self.value_encoding)
        return {name: (size, self.width, kind) for name, (size, kind) in zip(OF_NGRAMS, (keys, values), strict=True)}

    @property
    def norms(self) -> Mapping[str, tuple[int, Norm]]:
        """The size and the norm of each norm vector, by name."""
        return dict.fromkeys(NGRAM_NORMS, (self.channels, self.norm))


def multipliers(seed: int, vocab_size: int, size: int, *, index: int = 0) -> tuple[int, ...]:
    """The odd factors of ids, by their distance from the token: numbers of SplitMix64 (Steele, Lea and Flood 2014,
    doi:10.1145/2660193.2660195), below 2^63 / vocab_size, so that an id's product does not wrap. index: of the layer
    among those with n-grams."""
    half = max(1, ((1 << 63) - 1) // max(vocab_size, 1) // 2)
    first = seed + _LAYER_STEP * index
    return tuple(2 * (_splitmix(first + _GAMMA * (place + 1)) % half) + 1 for place in range(size))


def head_sizes(base: int, num_heads: int, *, index: int = 0) -> tuple[int, ...]:
    """The sizes of heads: consecutive primes from `base` on, each layer's after those of the layers before it. index:
    as for `multipliers`."""
    first = index * num_heads
    return tuple(islice(_primes(base), first, first + num_heads))


def padded(num_rows: int, multiple: int) -> int:
    """The rows of the table as it is stored."""
    return -(-num_rows // multiple) * multiple


def _splitmix(value: int) -> int:
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _primes(first: int) -> Iterator[int]:
    number = max(first, 2)
    while True:
        if _is_prime(number):
            yield number
        number += 1


def _is_prime(number: int) -> bool:
    """Whether a number is prime, by the test of Miller and Rabin."""
    for prime in _WITNESSES:
        if number % prime == 0:
            return number == prime
    twos = ((number - 1) & -(number - 1)).bit_length() - 1
    for witness in _WITNESSES:
        power = pow(witness, (number - 1) >> twos, number)
        if power in (1, number - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % number
            if power == number - 1:
                break
        else:
            return False
    return True
