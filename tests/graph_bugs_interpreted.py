"""Bugs that are planted into passes as CUDA graphs, see `graph_scenes`: test_gpu_kernels.py runs this in a
process of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kit.graph_scenes import (
    CODED,
    PLAIN,
    Case,
    assert_seen,
    saved,
)
from test_paper_bugs import Bug

CASES = {
    "target": Case("target"),
    "target that records masses": Case("target", replace(PLAIN, gamma=4)),
    "cache in 4 bits": Case("self", CODED),
    "windows": Case("target", model="qwen2, windows"),
    "windows, drafted rows": Case("self", CODED, "qwen2, windows"),
    "states": Case("target", model="qwen3_5"),
}
FULL, PLACES, LEVEL = "offload.kv.full", "offload.kv.places", "offload.model.level"
ATTENTION, ROTATION = "offload.kernels.gpu.attention", "offload.kernels.gpu.rotation"
STATES = "offload.kv.states"
LAYER_STATES = "offload.kv.layer_states"
BUGS = [
    ("target", Bug("a graph serves however far rows reach", FULL,
                   "return self._places.number, self._reach, kept",
                   "return self._places.number, kept")),
    ("target", Bug("positions are those of the recorded pass", PLACES,
                   "numbers[2 : 2 + num_rows]", "numbers[2 : 2 + num_rows].clone()")),
    ("target", Bug("slots are those of the recorded pass", PLACES,
                   "numbers[2 + num_rows :]", "numbers[2 + num_rows :].clone()")),
    ("target", Bug("passes of any number of logits share a graph", LEVEL,
                   "*sizes, *map(len, given)", "*map(len, given)")),
    ("target", Bug("the rows whose logits are wanted are those of the recorded pass", LEVEL,
                   "hidden.index_select(0, *rows) if rows else hidden",
                   "hidden[len(first.tokens) - first.num_logits : len(first.tokens)]")),
    ("target that records masses", Bug("masses stay in the graph's own memory", FULL,
                                       "self._mass[layer][:, :, : mass.shape[2]].copy_(mass)",
                                       "self._mass = [*self._mass[:layer], mass, *self._mass[layer + 1 :]]")),
    ("target that records masses", Bug("a graph keeps masses in memory that was given back", FULL,
                                       "self._reach, kept", "self._reach, self._records")),
    ("cache in 4 bits", Bug("a graph attends to the codes that were there", ATTENTION,
                            "COUNTED=bounds is not None", "COUNTED=False")),
    ("cache in 4 bits", Bug("a graph of fewer codes serves", "offload.kv.quantised",
                            "self._held.shape, self._attention.graph_key", "self._held.shape")),
    ("windows", Bug("a window begins where the recorded pass's did", ATTENTION, "RING=run.ring", "RING=False")),
    ("states", Bug("as many tokens are replayed as in the recorded pass", LAYER_STATES,
                   "self._there if self._alike and not settles else None", "None")),
    ("states", Bug("states stay where a graph found them", STATES, "self.layers.ran(self._start)", "pass")),
    ("states", Bug("a graph reads inputs that were given back", LAYER_STATES,
                   "self._number, self.states.data_ptr(), self.inputs.data_ptr()", "self._number")),
    ("windows, drafted rows", Bug("drafted rows take the place of known ones", ROTATION,
                                  "BOUNDED=places.bounds is not None", "BOUNDED=False")),
]  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return saved(tmp_path_factory.mktemp("graphs"))


@pytest.mark.parametrize(("name", "bug"), BUGS, ids=[bug.description for _, bug in BUGS])
def test_a_planted_bug_is_seen(name: str, bug: Bug, folders: Callable[[str], Path]) -> None:
    assert_seen(folders(CASES[name].model), CASES[name], bug)
