"""The training loop shared by all models: resumable, deterministic, with progress on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from . import settings
from .data import Corpus, batches
from .model import LanguageModel
from .settings import Phase, Schedule

CHECKPOINT_EVERY = 50  # steps
REPORT_EVERY = 20.0  # seconds
Loss = Callable[[Tensor], Tensor]  # int64 [batch, length + 1] -> scalar
Source = Callable[[Phase, np.random.Generator], Iterator[np.ndarray]]


@dataclass(frozen=True)
class Run:
    """A training run: the model, its data, loss and schedule, and the checkpoint."""

    model: LanguageModel
    schedule: Schedule
    source: Source
    loss: Loss
    checkpoint: Path
    check: Loss  # held-out measure, reported with each checkpoint
    check_ids: Tensor  # int64 [windows, length + 1]


def optimizers(model: nn.Module, schedule: Schedule) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding, the norms, routers and experts."""
    named = list(model.named_parameters())
    is_matrix = {name: p.ndim == 2 and "embed" not in name and "mlp.gate." not in name for name, p in named}
    matrices = [p for name, p in named if is_matrix[name]]
    others = [p for name, p in named if not is_matrix[name]]
    muon = torch.optim.Muon(matrices, lr=schedule.matrix_lr, weight_decay=schedule.weight_decay, momentum=0.95)
    adam = torch.optim.AdamW(others, lr=schedule.other_lr, betas=(0.9, 0.95), weight_decay=0.0)
    return [muon, adam]


def phase_batches(run: Run) -> Iterator[Tensor]:
    """The batch of every step, in order; each phase has its own seed so that a resumed run sees the same data."""
    for index, phase in enumerate(run.schedule.phases):
        source = batches(run.source(phase, np.random.default_rng((settings.SEED, index))), phase.batch)
        for _ in range(phase.steps):
            yield next(source)


def train(run: Run) -> None:
    """Runs the schedule, from the checkpoint if there is one."""
    torch.manual_seed(settings.SEED)
    opts = optimizers(run.model, run.schedule)
    first = restore(run, opts)
    clock = Clock(run.schedule, first)
    run.model.train()
    for step, ids in enumerate(phase_batches(run)):
        if step < first:
            continue
        loss = take_step(run, opts, ids, run.schedule.rate(step))
        clock.tick(step, ids, loss)
        if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == run.schedule.steps:
            save(run, opts, step + 1)


def take_step(run: Run, opts: list[torch.optim.Optimizer], ids: Tensor, rate: float) -> float:
    """One optimizer step; returns the training loss in nats per token."""
    for opt, peak in zip(opts, (run.schedule.matrix_lr, run.schedule.other_lr), strict=True):
        for group in opt.param_groups:
            group["lr"] = peak * rate
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = run.loss(ids)
    loss.backward()
    nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    for opt in opts:
        opt.step()
        opt.zero_grad(set_to_none=True)
    return loss.item()


def restore(run: Run, opts: list[torch.optim.Optimizer]) -> int:
    """Loads the checkpoint, if there is one, and returns the step to go on from."""
    if not run.checkpoint.exists():
        return 0
    state = torch.load(run.checkpoint, weights_only=True)
    run.model.load_state_dict(state["model"])
    for opt, saved in zip(opts, state["optimizers"], strict=True):
        opt.load_state_dict(saved)
    return int(state["step"])


def save(run: Run, opts: list[torch.optim.Optimizer], step: int) -> None:
    """Writes the checkpoint atomically and reports the held-out loss."""
    state = {"model": run.model.state_dict(), "optimizers": [opt.state_dict() for opt in opts], "step": step}
    part = run.checkpoint.with_suffix(".part")
    torch.save(state, part)
    part.replace(run.checkpoint)
    print(f"  step {step}: held-out {held_out(run):.4f}", file=sys.stderr, flush=True)


def held_out(run: Run) -> float:
    """The held-out measure, in batches shaped like the first phase's so that nothing is compiled for it alone."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values = [run.check(rows).item() for rows in run.check_ids.split(run.schedule.phases[0].batch)]
    return sum(values) / len(values)


def load_weights(model: LanguageModel, checkpoint: Path) -> None:
    """Loads the final weights of another run."""
    if not checkpoint.exists():
        raise SystemExit(f"{checkpoint.name} is missing: run the step that makes it first")
    model.load_state_dict(torch.load(checkpoint, weights_only=True)["model"])


def held_out_windows(corpus: Corpus, length: int, per_book: int) -> Tensor:
    """Evenly spaced windows of the held-out books, int64 [books * per_book, length + 1], each opening with <s>."""
    rows = []
    for name in settings.HELD_OUT_BOOKS:
        ids = corpus.ids[name].astype(np.int64)
        for start in np.linspace(0, len(ids) - length, per_book).astype(int):
            rows.append(np.concatenate(([settings.BOS_ID], ids[start : start + length])))
    return torch.from_numpy(np.stack(rows))


class Clock:
    """Progress lines: loss, speed, time left."""

    def __init__(self, schedule: Schedule, first: int) -> None:
        self.schedule = schedule
        self.total = schedule.tokens
        self.done = sum(
            phase.batch * phase.length
            for step, phase in enumerate(p for p in schedule.phases for _ in range(p.steps))
            if step < first
        )
        self.fresh = 0
        self.began = self.reported = time.monotonic()
        self.losses: list[float] = []

    def tick(self, step: int, ids: Tensor, loss: float) -> None:
        """Counts one step; reports every REPORT_EVERY seconds and after the last step."""
        tokens = ids.shape[0] * (ids.shape[1] - 1)
        self.fresh += tokens
        self.done += tokens
        self.losses.append(loss)
        now = time.monotonic()
        if now - self.reported < REPORT_EVERY and step + 1 != self.schedule.steps:
            return
        self.reported = now
        speed = self.fresh / (now - self.began)
        minutes = (self.total - self.done) / speed / 60
        print(
            f"step {step + 1}/{self.schedule.steps} length {ids.shape[1] - 1} "
            f"loss {sum(self.losses) / len(self.losses):.4f} "
            f"{speed:.0f} tok/s, {minutes:.1f} min left",
            file=sys.stderr,
            flush=True,
        )
        self.losses = []
