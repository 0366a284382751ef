"""Bytes of recurrent states: on the device with the inputs of the tokens after them, and of checkpoints on the host."""

from __future__ import annotations

from offload.config.model import ModelConfig
from offload.plan.composition import Composition

CHECKPOINT_BYTES = 1 << 31  # of all sequences, unless fewer than LEAST of each would fit
MOST, LEAST = 12, 2  # checkpoints of a sequence: enough for distances that double up to 262,144 tokens
_ROWS = 16  # to a multiple of which a pass may be padded


def held_rows(composition: Composition, rows: int) -> int:
    """The inputs that are held of a sequence: of the rows of its longest pass. rows: of the prompt's end, and of a
    block."""
    return -(-(composition.gamma + 2 * rows) // _ROWS) * _ROWS


def level_bytes(config: ModelConfig, num_rows: int, itemsize: int) -> int:
    """Device bytes of the states of one level, with so many inputs."""
    return config.state_bytes() + _inputs(config, num_rows, itemsize) + _of_ngrams(config, num_rows, itemsize)


def checkpoint_bytes(config: ModelConfig, itemsize: int) -> int:
    """Host bytes of one checkpoint."""
    return config.state_bytes() + _inputs(config, 0, itemsize) + _of_ngrams(config, 0, itemsize)


def num_checkpoints(config: ModelConfig, itemsize: int, num_sequences: int) -> int:
    """The number of checkpoints of each sequence; 0 without states."""
    if not config.stateful:
        return 0
    fitting = CHECKPOINT_BYTES // (checkpoint_bytes(config, itemsize) * num_sequences)
    return min(max(fitting, LEAST), MOST)


def _inputs(config: ModelConfig, num_rows: int, itemsize: int) -> int:
    """Bytes of the inputs of `num_rows` tokens, and of those before them that the convolution reads."""
    recurrence = config.recurrence
    return (
        0
        if recurrence is None
        else len(config.stateful) * (recurrence.width - 1 + num_rows) * recurrence.kept * itemsize
    )


def _of_ngrams(config: ModelConfig, num_rows: int, itemsize: int) -> int:
    """Bytes of the rows that the convolutions of n-grams read, as `_inputs`."""
    every = (config.ngrams(layer).convolution for layer in config.with_ngrams)
    return sum((own.width - 1 + num_rows) * own.kept * itemsize for own in every)
