"""The GPU on paper has teeth: each of these mistakes in a schedule, planted in the real source, is reported.

Values are right with all of them, since the GPU on paper computes at once; on a real GPU they would be wrong now and
then. Left out, because nothing goes wrong without them today: copies on the stream that computes (they only take
longer), the wait for what an abandoned slot still gets before another copy into it (both are in one stream), the same
at the start of the streamed layers, and the host's wait until gathered chunks have left (a copy that blocks follows,
and the stream that it waits for has waited for them).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from inspect import unwrap
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

from kit.models import GREEDY, save_pair
from offload.engine.engine import Engine
from offload.engine.request import GenerationRequest
from offload.model.torch_layers import TorchLayers
from paper.engines import CASES, NUM_NEW, OTHER, PROMPT, Pair, engine_on_paper, said
from paper.gpu import PaperGpu

GONE = "in a graph uses memory that was given back"
RACE, DROPPED, MIXED, UNPINNED = "race: ", "given back while", "on the GPU and on the host", "not pinned"
LINK, MEMORY, WEIGHTS = "offload.transfer.link", "offload.transfer.memory", "offload.weights.layers"
ACCESS, READER, FETCH = "offload.pages.access", "offload.pages.reader", "offload.kv.fetch"
HIDDEN_ROWS = "offload.transfer.hidden_rows"
TRAFFIC, MOVER = "offload.pages.traffic", "offload.pages.mover"


@dataclass(frozen=True)
class Bug:
    """`old` becomes `new`, of as many lines, in a module's source. case: of CASES. reported: words of the report."""

    description: str
    module: str
    old: str
    new: str
    case: str = "plain, both streamed"
    reported: str = RACE


BUGS = [
    Bug("copies wait for nothing", LINK, "            for event in after:", "            for event in ():"),
    Bug(
        "computation waits for no copy",
        LINK, "torch.cuda.current_stream(self._device).wait_event(self.event)", "pass",
    ),
    Bug(
        "the host waits for no copy",
        LINK, "        self.event.synchronize()", "        pass", "retrieval, kv streamed",
    ),
    Bug(
        "what was computed is recorded on the stream of copies",
        LINK, "return CudaEvent(torch.cuda.current_stream(self._device))", "return CudaEvent(self._in)",
    ),
    Bug(
        "a copy's end is recorded before it",
        LINK,
        "                part.copy_(from_part, non_blocking=True)\n            end = CudaEvent(stream, timing=timed)\n",
        "                end = CudaEvent(stream, timing=timed)\n"
        "                part.copy_(from_part, non_blocking=True)\n",
    ),
    Bug(
        "a copy's end is recorded on the other stream",
        LINK,
        "end = CudaEvent(stream, timing=timed)",
        "end = CudaEvent(self._out if timed else self._in, timing=timed)",
    ),
    Bug(
        "a copy waits for the first of its events only",
        LINK, "            for event in after:", "            for event in after[:1]:", "plain, kv streamed",
    ),
    Bug(
        "new rows go home before they are computed",
        MOVER, "home[0, pages], tile[0, pages], (ready,))", "home[0, pages], tile[0, pages], ())",
    ),
    Bug(
        "a home is read before new rows are in it",
        TRAFFIC, "return () if event is None else (event,)", "return ()", "plain, kv streamed",
    ),
    Bug(
        "nobody waits until new rows are home",
        TRAFFIC,
        "            self._last.synchronize()\n        self._last",
        "            pass\n        self._last",
        "tail alone, kv streamed",
    ),
    Bug(
        "a tile is attended to before it came",
        ACCESS, "        slot.full.wait()\n        slot.opened", "        pass\n        slot.opened",
    ),
    Bug(
        "a slot is taken while its tile is attended to",
        ACCESS, "self._slot(layer, index).free = self._link.record()", "pass", "plain, kv streamed",
    ),
    Bug(
        "a slot is taken while its new rows go home",
        ACCESS, "            slot.left = event", "            pass", "plain, kv streamed",
    ),
    Bug(
        "a fetch waits for no free slot",
        ACCESS, "(slot.full, slot.free, slot.left)", "(slot.full, slot.left)", "plain, kv streamed",
    ),
    Bug(
        "a fetch waits for no new rows to leave the slot",
        ACCESS, "(slot.full, slot.free, slot.left)", "(slot.full, slot.free)", "plain, kv streamed",
    ),
    Bug(
        "a prefill writes homes that are being fetched ahead",
        ACCESS, "            slot.full.wait()  # homes", "            pass  # homes", "adaptive, both streamed",
    ),
    Bug(
        "a prefill attends to tiles before they came",
        ACCESS,
        "            full.wait()\n            self._mover",
        "            pass\n            self._mover",
    ),
    Bug("a prefill's tiles are taken by the next layer at once", ACCESS, "(free, *left)", "left"),
    Bug("a prefill's tiles are taken while new rows leave them", ACCESS, "(free, *left)", "(free,)"),
    Bug(
        "an empty slot is written to at once",
        MOVER, "            return All(after)", "            return All(())", "plain, kv streamed",
    ),
    Bug(
        "chunks are put in their places before they came",
        READER, ".synchronize()", "", "retrieval, kv streamed",
    ),
    Bug(
        "chunks arrive in memory that is still computed with",
        READER, "(self._link.record(),)", "()", "retrieval, kv streamed",
    ),
    Bug(
        "chunks are gathered in memory that is not pinned",
        READER,
        "self._memory.allocate(\n",
        "(lambda size, dtype, **_: torch.zeros(size, dtype=dtype))(\n",
        "retrieval, kv streamed",
        UNPINNED,
    ),
    Bug(
        "the block in which chunks were gathered is dropped while they leave",
        READER,
        "        self._link.to_device(arrived, staged, (self._link.record(),)).synchronize()",
        "        self._link.to_device(arrived, staged, (self._link.record(),)); self._gathered = staged = part = None",
        "retrieval, kv streamed",
        DROPPED,
    ),
    Bug(
        "host blocks are not pinned",
        MEMORY, "            self._pin(mapping, block)", "            pass", reported=UNPINNED,
    ),
    Bug(
        "host blocks are pinned for a moment",
        MEMORY,
        "        mapping.unpin = partial(runtime.cudaHostUnregister, block.data_ptr())",
        "        runtime.cudaHostUnregister(block.data_ptr())",
        reported=UNPINNED,
    ),
    Bug(
        "a layer is used before it came",
        WEIGHTS, "            self._full[slot].wait()", "            pass", "plain, weights streamed",
    ),
    Bug(
        "a layer's slot is taken before it is used",
        WEIGHTS,
        "                yield self._bound[slot, id(layout)]",
        "                self._fetch(layer + len(self._staging)); yield self._bound[slot, id(layout)]",
    ),
    Bug("a layer's slot is taken while it is used", WEIGHTS, "content, (self._link.record(),))", "content, ())"),
    Bug(
        "hidden rows are worked on before they came",
        HIDDEN_ROWS, "            self._ready[place % len(self._slots)].wait()", "            pass",
    ),
    Bug(
        "hidden rows leave before they are computed",
        HIDDEN_ROWS, "self._in_slot(place), (computed,))", "self._in_slot(place))",
    ),
    Bug(
        "hidden rows come to a slot while others leave it",
        HIDDEN_ROWS, "(*arrives, (computed, self._left))", "(*arrives, (computed,))",
    ),
    Bug(
        "the first layer makes hidden rows while others leave their slot",
        HIDDEN_ROWS, "            self._ready[slot] = self._left", "            pass",
    ),
    Bug(
        "the last layer's hidden rows come to a slot while others are worked on there",
        HIDDEN_ROWS, "(*arrives, (computed, self._left))", "(*arrives, (self._left,))",
    ),
    Bug(
        "there is a slot less for hidden rows than are under way",
        HIDDEN_ROWS,
        "return self._slots[place % len(self._slots)]",
        "return self._slots[place % (len(self._slots) - 1)]",
    ),
    Bug(
        "tokens stay on the host",
        "offload.model.level",
        "sent(torch.tensor([*tokens, *[filler] * padding], dtype=torch.long), self._decoder.device)",
        "torch.tensor([*tokens, *[filler] * padding], dtype=torch.long)",
        reported=MIXED,
    ),
    Bug(
        "uniforms come from memory that is not pinned",
        "offload.transfer.memory", "values.pin_memory().to(", "values.to(", reported=UNPINNED,
    ),
    Bug(
        "a graph reads the places of a forward that is over",
        "offload.kv.places",
        "sent_to(kept, numbers) if num_rows <= MAX_ROWS else sent(numbers, self._device)",
        "sent(numbers, self._device)",
        "draft, kv streamed",
        GONE,
    ),
    Bug(
        "a level looks at its logits while they are recorded",
        "offload.model.level",
        "logits = self._decoder.logits(hidden.index_select(0, *rows) if rows else hidden, block=block)",
        "logits = self._decoder.logits(hidden + ids[0][0].item(), block=block)",
        "draft, kv streamed",
        "the host waits in a graph",
    ),
    Bug(
        "a draft looks at its token while it is recorded",
        "offload.decode.gpu_draws",
        "token, mass = _draw(probs[0], uniform)",
        "token, mass = _draw(probs[0], uniform); token.item()",
        "draft, kv streamed",
        "the host waits in a graph",
    ),
    Bug(
        "a verification looks at what it accepts while it is recorded",
        "offload.decode.gpu_draws",
        "token, mass = _draw(last, uniforms.index_select(0, n))",
        "token, mass = _draw(last, uniforms.index_select(0, n)); accepted.item()",
        "draft, kv streamed",
        "the host waits in a graph",
    ),
    Bug(
        "positions are on the host",
        "offload.kernels.attention", "num_rows, device=query.device)", "num_rows)", reported=MIXED,
    ),
    Bug(
        "chunks are gathered before new rows are home",
        FETCH, "            self._full.pages.follow_home()", "            pass", "retrieval, kv streamed",
    ),
    Bug(
        "the host gathers chunks while new rows are on their way home",
        TRAFFIC, "            self._last.wait()", "            pass", "retrieval, kv streamed",
    ),
    Bug(
        "a tail is gathered before new rows are home",
        FETCH,
        "        if wanted is None:\n            self._full.pages.wait_home()",
        "        if wanted is None:\n            pass",
        "tail alone, kv streamed",
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_pair(tmp_path_factory.mktemp("models"), context=256)


def edited_source(bug: Bug) -> str:
    """The source of the bug's module with the bug."""
    source = Path(str(importlib.import_module(bug.module).__file__)).read_text(encoding="utf-8")
    assert source.count(bug.old) == 1, f"{bug.module} has {source.count(bug.old)} times {bug.old!r}"
    assert bug.old.count("\n") == bug.new.count("\n")
    return source.replace(bug.old, bug.new)


def plant(bug: Bug, patch: pytest.MonkeyPatch) -> None:
    """Put the functions that the edit changes in the place of the real ones."""
    module, source = importlib.import_module(bug.module), edited_source(bug)
    edited = ModuleType(module.__name__)
    edited.__file__ = module.__file__
    exec(compile(source, str(module.__file__), "exec"), vars(edited))
    changed = list(_changed(module, edited))
    assert changed
    for owner, name, function in changed:
        patch.setattr(owner, name, function)


def _changed(real: Any, edited: Any) -> Iterator[tuple[object, str, object]]:
    for name, value in vars(edited).items():
        own = vars(real).get(name)
        if isinstance(value, FunctionType) and isinstance(own, FunctionType):
            if unwrap(value).__code__ != unwrap(own).__code__:
                users = [module for key, module in sys.modules.items() if key.startswith("offload.")]
                yield from ((each, name, value) for each in [real, *users] if vars(each).get(name) is own)
        elif isinstance(value, property) and isinstance(own, property):
            if value.fget.__code__ != own.fget.__code__:  # type: ignore[union-attr]
                yield real, name, value
        elif isinstance(value, type) and isinstance(own, type) and value.__module__ == own.__module__ and value != own:
            yield from _changed(own, value)


def rehearse(case: str, pair: Pair) -> Iterator[PaperGpu]:
    """The GPU after each step of some requests, one of which is broken off."""
    with engine_on_paper(CASES[case], pair) as (engine, gpu):
        for prompt in (PROMPT, OTHER):
            yield from (
                gpu for _ in engine.generate(GenerationRequest(prompt, GREEDY, max_tokens=NUM_NEW, reuse=False))
            )
        _broken_off(engine, PROMPT)
        yield gpu
        said(engine, OTHER)
        yield gpu


def _broken_off(engine: Engine, prompt: Sequence[int]) -> None:
    with pytest.MonkeyPatch.context() as patch, suppress(KeyboardInterrupt):
        left, attend = iter(range(30)), TorchLayers._attended

        def interrupted(*args: Any) -> Any:
            if next(left, None) is None:
                raise KeyboardInterrupt
            return attend(*args)

        patch.setattr(TorchLayers, "_attended", interrupted)
        said(engine, prompt)


FIRST = {(bug.module, bug.reported): bug for bug in reversed(BUGS)}  # of each module and kind: tried by default


@pytest.mark.few(5)
@pytest.mark.parametrize(
    "bug",
    [pytest.param(bug, marks=[] if bug in FIRST.values() else [pytest.mark.deep]) for bug in BUGS],
    ids=lambda bug: bug.description,
)
def test_a_planted_bug_is_reported(bug: Bug, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(bug, monkeypatch)
    problems: list[str] = []
    for gpu in rehearse(bug.case, pair):
        problems = gpu.problems  # it goes on when the engine is closed
        if any(bug.reported in problem for problem in problems):
            break
    assert any(bug.reported in problem for problem in problems), problems


def test_each_module_has_the_text_of_its_bugs() -> None:
    """Also of bugs that only passes in Triton's interpreter show, with --deep."""
    pytest.importorskip("triton")
    import graph_bugs_interpreted
    import mixture_graphs_interpreted

    for bug in (*BUGS, *(bug for _, bug in (*graph_bugs_interpreted.BUGS, *mixture_graphs_interpreted.BUGS))):
        assert edited_source(bug)


@pytest.mark.few(1)
@pytest.mark.parametrize("case", sorted({bug.case for bug in BUGS}, key=[*CASES].index))
def test_without_a_bug_nothing_is_reported(case: str, pair: Pair) -> None:
    [problems, *_] = [gpu.problems for gpu in rehearse(case, pair)]
    assert problems == []
