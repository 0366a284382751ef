"""The training steps and their schedules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from . import distill, indexed, mixture, settings, training
from .data import Corpus
from .flash import Flash
from .model import LanguageModel, Llama
from .settings import Paths, Phase, Schedule
from .training import Loss, Run

TARGET_SCHEDULE = Schedule(
    phases=(Phase(1750, 16, 512), Phase(250, 4, 2048)),
    matrix_lr=0.02,
    other_lr=2e-3,
    warmup=40,
    decay_share=0.45,
    final_share=0.05,
)
STRETCH_SCHEDULE = Schedule(
    phases=(
        Phase(12, 1, 8192),
        Phase(4, 1, 16384),
        Phase(2, 1, 32768),
        Phase(2, 1, 16384),
        Phase(8, 1, 8192),
    ),
    matrix_lr=0.003,
    other_lr=3e-4,
    warmup=4,
    decay_share=0.8,
)
DRAFT_SCHEDULE = Schedule(
    phases=(Phase(1500, 8, distill.TEACHER_LENGTH),),
    matrix_lr=0.02,
    other_lr=3e-3,
    warmup=40,
    decay_share=0.5,
)
MIXTURE_SCHEDULE = Schedule(
    phases=(Phase(450, 16, 512),),
    matrix_lr=0.02,
    other_lr=2e-3,
    warmup=40,
    decay_share=1 / 3,
    final_share=0.05,
)

INDEXED_SCHEDULE = replace(MIXTURE_SCHEDULE, phases=(Phase(620, 1, 4096),))


def train_target(corpus: Corpus, paths: Paths) -> None:
    """From scratch: most steps at 512 positions, the last at 2048."""
    torch.manual_seed(settings.SEED)
    model = Llama(settings.TARGET)
    _train_on_books(model, "target", TARGET_SCHEDULE, model.loss, corpus, paths)


def train_stretch(corpus: Corpus, paths: Paths) -> None:
    """Continue training the target with YaRN positions on long documents, 8K to 32K positions per step."""
    model = Llama(settings.TARGET_LONG)
    training.load_weights(model, paths.checkpoint("target"))

    def source(phase: Phase, rng: np.random.Generator) -> Iterator[np.ndarray]:
        return corpus.long_windows(phase.length, rng)

    training.train(
        Run(
            model=model,
            schedule=STRETCH_SCHEDULE,
            source=source,
            loss=model.loss,
            checkpoint=paths.checkpoint("stretch"),
            check=model.loss,
            check_ids=training.held_out_windows(corpus, 8192, per_book=1),
        )
    )


def train_draft(corpus: Corpus, paths: Paths) -> None:
    """A small model learns the stretched target's distribution."""
    teacher = Llama(settings.TARGET_LONG)
    training.load_weights(teacher, paths.checkpoint("stretch"))
    teacher.requires_grad_(False)
    torch.manual_seed(settings.SEED)
    draft = Llama(settings.DRAFT)
    lesson = distill.Lesson(teacher, draft)

    def source(phase: Phase, rng: np.random.Generator) -> Iterator[np.ndarray]:
        return corpus.windows(phase.length, rng)

    training.train(
        Run(
            model=draft,
            schedule=DRAFT_SCHEDULE,
            source=source,
            loss=lesson.loss,
            checkpoint=paths.checkpoint("draft"),
            check=lesson.overlap,
            check_ids=training.held_out_windows(corpus, distill.TEACHER_LENGTH, per_book=8),
        )
    )


def train_mixture(corpus: Corpus, paths: Paths) -> None:
    """A mixture of experts from scratch, at 512 positions."""
    torch.manual_seed(settings.SEED)
    model = Llama(settings.MIXTURE)
    _train_on_books(model, "mixture", MIXTURE_SCHEDULE, mixture.balanced(model), corpus, paths)


def train_indexed(corpus: Corpus, paths: Paths) -> None:
    """A model with an index from scratch, at 4096 positions."""
    torch.manual_seed(settings.SEED)
    model = Flash(settings.INDEXED)
    _train_on_books(model, "indexed", INDEXED_SCHEDULE, indexed.with_index(model), corpus, paths)


def _train_on_books(
    model: LanguageModel, name: str, schedule: Schedule, loss: Loss, corpus: Corpus, paths: Paths
) -> None:
    """Training on windows of the corpus, long ones within one document. loss: of a batch."""
    length = schedule.phases[0].length

    def source(phase: Phase, rng: np.random.Generator) -> Iterator[np.ndarray]:
        own = corpus.windows if phase.length <= settings.TRAINED_POSITIONS else corpus.long_windows
        return own(phase.length, rng)

    training.train(
        Run(
            model=model,
            schedule=schedule,
            source=source,
            loss=loss,
            checkpoint=paths.checkpoint(name),
            check=model.loss,
            check_ids=training.held_out_windows(corpus, length, per_book=4096 // length),
        )
    )
