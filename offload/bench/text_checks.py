"""Checks that a device generates the correct text with small models: part of `triforce doctor`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offload.bench.exactness import check_exactness
from offload.bench.findings import REPORT, TOLERANCES, Named, Shown, error_of
from offload.decode.sampling import SamplingParams
from offload.engine.engine import Engine, load_tokenizer, plan_request
from offload.engine.request import GenerationRequest
from offload.formats.layout import CODE_BITS
from offload.model.graphs import VARIABLE
from offload.model.level import Level
from offload.model.passes import forward
from offload.plan.planner import Options
from offload.speed.hardware import Hardware

PROMPT = [5 + at * at % 1000 for at in range(2000)]  # long enough for retrieval
NUM_TOKENS = 16  # generated
GREEDY = SamplingParams(temperature=0.0)
GAMMA = 4  # tokens that are drafted for a pass, whatever pays


def text_checks(hardware: Hardware, target: Path, draft: Path | None) -> Iterator[Named]:
    """The text checks of one device, with small models."""
    for offload in ("", "kv", "kv,weights"):
        where = f"with {offload} offloaded" if offload else "with nothing offloaded"
        yield f"text, {where}", partial(_text, hardware, target, draft, offload), REPORT
    if hardware.packs and hardware.fast_bf16 and hardware.has_kernels:
        yield "text, quantised", partial(_quantised, hardware, target, draft), f"add --link-bits 16; {REPORT}"
    if not hardware.is_cpu:
        yield (
            "graphs",
            partial(_graphs, hardware, target, draft),
            f"{VARIABLE}=off launches kernels one by one; {REPORT}",
        )


def _text(hardware: Hardware, target: Path, draft: Path | None, offload: str) -> Shown:
    """Check a speculative text against a replay by the target alone, token by token."""
    with _engine(hardware, target, draft, offload, gamma=GAMMA) as engine:  # else none may be drafted here
        found = check_exactness(engine, PROMPT, GREEDY, max_tokens=NUM_TOKENS, num_recomputed=1)
    if found.holds:
        return True, f"{len(found.tokens)} tokens are the target's own, bit for bit"
    return False, f"{len(found.inexact)} of {len(found.tokens)} tokens ARE NOT the target's own"


def _quantised(hardware: Hardware, target: Path, draft: Path | None) -> Shown:
    """Check texts proposed by quantised copies of weights and cache, with both crossing the link, against the target
    alone with nothing offloaded."""

    def text(offload: str, **options: Any) -> list[int]:
        with _engine(hardware, target, draft, offload, dtype="bf16", **options) as engine:
            steps = engine.generate(GenerationRequest(PROMPT, GREEDY, max_tokens=NUM_TOKENS))
            return [token for step in steps for token in step.tokens]

    few: dict[str, Any] = {"kv_bits": 4, "link_bits": 12, "gamma": 7}
    expected = text("", speculation=False)
    same = all(text("kv,weights", weight_bits=bits, **few) == expected for bits in CODE_BITS)
    shown = "the same text" if same else "ANOTHER TEXT"
    return same, f"{shown} of weights and cache on the device and beside copies in 4 and 6 bits"


def _graphs(hardware: Hardware, target: Path, draft: Path | None) -> Shown:
    """Compare logits of passes that run as graphs with the same passes launched kernel by kernel."""
    errors, same = [0.0], True
    with _engine(hardware, target, draft, "") as engine:
        for sampling in (SamplingParams(seed=0), GREEDY):  # draws are part of the graphs
            for _ in engine.generate(GenerationRequest(PROMPT, sampling, max_tokens=NUM_TOKENS)):
                pass
        for level in engine.levels.values():
            for num_rows in (1, 3):
                one_by_one, as_graphs = (_passes(level, num_rows, graphs) for graphs in (False, True))
                errors.append(error_of(as_graphs, one_by_one.double()))
                same &= torch.equal(as_graphs, one_by_one)
        most = TOLERANCES[engine.plan.request.dtype]
    shown = "the same bits" if same else f"differences of up to {max(errors):.1e}, at most {most:.0e}"
    return max(errors) <= most, f"{shown} of passes as graphs and launched one by one"


def _passes(level: Level, num_rows: int, graphs: bool) -> Tensor:
    """Logits of three successive passes. With graphs the first one is still launched kernel by kernel."""
    length, logits = level.length, []
    for number in range(3):
        if not graphs:
            level.forget_graphs()
        logits.append(forward(level, range(5 + number, 5 + number + num_rows), num_rows).cpu())
    level.truncate(length)
    return torch.cat(logits)


def _engine(hardware: Hardware, target: Path, draft: Path | None, offload: str, **options: object) -> Engine:
    wanted = {"device": hardware.device, "offload": frozenset(filter(None, offload.split(","))), **options}
    asked = Options(**wanted)  # type: ignore[arg-type]
    plan = plan_request(target, draft, asked, num_prompt_tokens=len(PROMPT), max_tokens=NUM_TOKENS)
    return Engine.load(plan, target, draft, load_tokenizer(target, draft))
