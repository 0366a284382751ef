"""The gated delta rule and Mamba-2 on a GPU, by two launches: of all tokens' states and outputs; and, once these have
read their inputs, of the outputs' norms and gates and of what is held of the tokens.

Where the number of replayed tokens is on the GPU it is read there, so a graph may contain the launches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offload.config.mixers import DeltaRule, HeadStates, Mamba2
from offload.kernels.gpu.delta_programs import ADVANCE, FINISH
from offload.kernels.recurrence import Held, RecurrenceWeights, Replayed
from offload.native.launch import launch

COLUMNS = 8  # of a head's state, of a program: they fit into one warp's registers, so that no sum leaves it
NUMBERS = 128  # of an input, of a program that moves them
ROWS = 8  # that it moves at a time
WARP = 1024  # numbers at most, of a part of a row that one warp norms
MOST_ROWS = 128  # of a launch that settles: their outputs are fp32
REGISTERS = 192  # at most, of a thread: ten programs on a multiprocessor; a compiler left alone may take 230
REGISTERS_BY_CHANNEL = 224  # the same where a key's channels have decays: with fewer some would spill
ALIGNMENT = 16  # numbers, at multiples of which rows begin in their memory, which itself is aligned
States = DeltaRule | Mamba2


def run_states(
    states: States, weights: RecurrenceWeights, held: Held, rows: Tensor, replayed: Replayed, *, settles: bool
) -> Tensor:
    """`RunRecurrence` by two launches. With `settles` rows run in parts of at most MOST_ROWS, by two launches each."""
    if not settles or len(rows) <= MOST_ROWS:
        return _run(states, weights, held, rows, replayed, settles=settles)
    first, *others = rows.split(MOST_ROWS)
    out = [_run(states, weights, held, first, replayed, settles=True)]
    out += [_run(states, weights, held, part, Replayed(0), settles=True) for part in others]
    return torch.cat(out)


def is_aligned(states: HeadStates) -> bool:
    """Whether everything that a token has begins at a multiple of 16 numbers, if the first token's does."""
    return states.kept % ALIGNMENT == states.out_size % ALIGNMENT == 0


def state_constants(states: States) -> dict[str, object]:
    """The constants of `advance_states`."""
    found = _shape(states) | {
        "KEY_SIZE": states.key_size, "KEY_DIM": states.key_dim, "KEY_PADDED": _padded(states.key_dim),
        "TILED": -1, "COLUMNS": COLUMNS, "STEPS": 1.0, "EPS": 0.0, "SCALE": states.key_dim**-0.5,
        "BIASED": isinstance(states, Mamba2) and states.taps_bias, "BY_CHANNEL": False, "LEAST": None,
    }  # fmt: skip
    if isinstance(states, DeltaRule):
        found |= {"STEPS": float(states.steps), "EPS": states.eps, "BY_CHANNEL": states.by_channel}
        found |= {"LEAST": states.least, "TILED": -1 if states.tiled is None else states.tiled % states.num_key_heads}
    return found


def most_registers(states: States) -> int:
    """The registers of a thread of `advance_states` at most."""
    return REGISTERS_BY_CHANNEL if isinstance(states, DeltaRule) and states.by_channel else REGISTERS


def row_constants(states: States) -> dict[str, object]:
    """The constants of `finish_rows`."""
    norm, groups = states.norm, parts_of_row(states)
    return _shape(states) | {
        "EPS": 0.0 if norm is None else norm.eps, "NORMED": norm is not None, "GROUPS": groups,
        "GROUP_PADDED": _padded(states.out_size // groups), "NUMBERS": NUMBERS, "ROWS": ROWS,
        "SIGMOID": isinstance(states, DeltaRule) and states.gate == "sigmoid",
    }  # fmt: skip


def parts_of_row(states: States) -> int:
    """The parts of a row that a program norms."""
    by_head = not isinstance(states, Mamba2) or states.norm is None
    return states.num_heads if by_head else states.num_key_heads


def row_warps(states: States) -> int:
    """The warps of a program of `finish_rows`."""
    return -(-_padded(states.out_size // parts_of_row(states)) // WARP)


def _shape(states: States) -> dict[str, object]:
    return {
        "CHANNELS": states.channels, "TIMES": states.rates[-1], "HEADS": states.num_heads,
        "VALUE_DIM": states.value_dim, "WIDTH": states.width, "WIDTH_PADDED": _padded(states.width),
        "MAMBA": int(isinstance(states, Mamba2)),
    }  # fmt: skip


def _run(
    states: States, weights: RecurrenceWeights, held: Held, rows: Tensor, replayed: Replayed, *, settles: bool
) -> Tensor:
    norm = weights.norm
    assert norm is None or (norm.bias is None and not norm.norm.centred)
    aligned = is_aligned(states)
    if aligned and (rows.storage_offset() % ALIGNMENT or rows.stride(0) % ALIGNMENT):
        rows = rows.clone(memory_format=torch.contiguous_format)
    num_rows, there, count = len(rows), replayed.there, -1
    if there is None:
        there, count = torch.empty(1, dtype=torch.long, device=rows.device), replayed.count  # it is not read
    seen = torch.empty(num_rows, states.out_size, device=rows.device)
    out = torch.empty_like(seen, dtype=rows.dtype)
    numbers = rows.stride(0), count, num_rows, int(settles)
    vectors = weights.taps, weights.taps_bias, weights.decay, weights.time_bias, weights.skip
    given = [weights.taps if each is None else each for each in vectors]  # what there is not is not read
    launch(
        ADVANCE[aligned],
        (-(-states.value_dim // COLUMNS), states.num_heads),
        (held.state, held.inputs, rows, *given, there, seen, *numbers),
        **state_constants(states),
        num_warps=1,
        maxnreg=most_registers(states),
        enable_fp_fusion=False,
    )
    launch(
        FINISH[aligned],
        (num_rows * parts_of_row(states) + -(-states.kept // NUMBERS),),
        (seen, rows, held.inputs, seen if norm is None else norm.weight, there, out, *numbers),
        **row_constants(states),
        num_warps=row_warps(states),
        enable_fp_fusion=False,
    )
    return out


def _padded(number: int) -> int:
    """The least power of two that is as large."""
    return 1 << (number - 1).bit_length()
