"""The gated delta rule on a GPU, by two launches: of all tokens' states and outputs; and, once these have read their
inputs, of the outputs' norms and gates and of what is held of the tokens.

Where the number of replayed tokens is on the GPU it is read there, so a graph may contain the launches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offload.config.block import DeltaRule
from offload.kernels.gpu.delta_programs import ADVANCE, FINISH
from offload.kernels.recurrence import Held, RecurrenceWeights, Replayed
from offload.native.launch import launch

COLUMNS = 8  # of a head's state, of a program: they fit into one warp's registers, so that no sum leaves it
NUMBERS = 128  # of an input, of a program that moves them
ROWS = 8  # that it moves at a time
MOST_ROWS = 128  # of a launch that settles: their outputs are fp32
REGISTERS = 192  # at most, of a thread: ten programs on a multiprocessor; a compiler left alone may take 230
ALIGNMENT = 16  # numbers, at multiples of which rows begin in their memory, which itself is aligned


def delta_rule(
    delta: DeltaRule, weights: RecurrenceWeights, held: Held, rows: Tensor, replayed: Replayed, *, settles: bool
) -> Tensor:
    """`RunRecurrence` by two launches. With `settles` rows run in parts of at most MOST_ROWS, by two launches each."""
    if not settles or len(rows) <= MOST_ROWS:
        return _run(delta, weights, held, rows, replayed, settles=settles)
    first, *others = rows.split(MOST_ROWS)
    out = [_run(delta, weights, held, first, replayed, settles=True)]
    out += [_run(delta, weights, held, part, Replayed(0), settles=True) for part in others]
    return torch.cat(out)


def is_aligned(delta: DeltaRule) -> bool:
    """Whether everything that a token has begins at a multiple of 16 numbers, if the first token's does."""
    return delta.kept % ALIGNMENT == delta.out_size % ALIGNMENT == 0


def state_constants(delta: DeltaRule) -> dict[str, object]:
    """The constants of `advance_states`."""
    return _shape(delta) | {
        "KEY_SIZE": delta.key_size, "KEY_DIM": delta.key_dim, "KEY_PADDED": _padded(delta.key_dim),
        "TILED": -1 if delta.tiled is None else delta.tiled % delta.num_key_heads, "COLUMNS": COLUMNS,
        "STEPS": float(delta.steps), "EPS": delta.eps, "SCALE": delta.key_dim**-0.5,
    }  # fmt: skip


def row_constants(delta: DeltaRule) -> dict[str, object]:
    """The constants of `finish_rows`."""
    padded = _padded(delta.value_dim)
    return _shape(delta) | {"EPS": delta.norm.eps, "VALUE_PADDED": padded, "NUMBERS": NUMBERS, "ROWS": ROWS}


def _shape(delta: DeltaRule) -> dict[str, object]:
    return {
        "CHANNELS": delta.channels, "HEADS": delta.num_heads, "VALUE_DIM": delta.value_dim, "WIDTH": delta.width,
        "WIDTH_PADDED": _padded(delta.width),
    }  # fmt: skip


def _run(
    delta: DeltaRule, weights: RecurrenceWeights, held: Held, rows: Tensor, replayed: Replayed, *, settles: bool
) -> Tensor:
    assert weights.norm is not None
    assert weights.norm.bias is None
    assert not delta.norm.centred
    aligned = is_aligned(delta)
    if aligned and (rows.storage_offset() % ALIGNMENT or rows.stride(0) % ALIGNMENT):
        rows = rows.clone(memory_format=torch.contiguous_format)
    num_rows, there, count = len(rows), replayed.there, -1
    if there is None:
        there, count = torch.empty(1, dtype=torch.long, device=rows.device), replayed.count  # it is not read
    seen = torch.empty(num_rows, delta.out_size, device=rows.device)
    out = torch.empty_like(seen, dtype=rows.dtype)
    numbers = rows.stride(0), count, num_rows, int(settles)
    vectors = weights.taps, weights.decay, weights.time_bias
    launch(
        ADVANCE[aligned],
        (-(-delta.value_dim // COLUMNS), delta.num_heads),
        (held.state, held.inputs, rows, *vectors, there, seen, *numbers),
        **state_constants(delta),
        num_warps=1,
        maxnreg=REGISTERS,
        enable_fp_fusion=False,
    )
    launch(
        FINISH[aligned],
        (num_rows * delta.num_heads + -(-delta.kept // NUMBERS),),
        (seen, rows, held.inputs, weights.norm.weight, there, out, *numbers),
        **row_constants(delta),
        num_warps=1,
        enable_fp_fusion=False,
    )
    return out


def _padded(number: int) -> int:
    """The least power of two that is as large."""
    return 1 << (number - 1).bit_length()
