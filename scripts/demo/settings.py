"""All settings of the demo pair and of the models beside it: data, shapes, training phases and paths."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SEED = 20240607
VOCAB_SIZE = 4096
BOS, EOS = "<s>", "</s>"
BOS_ID, EOS_ID = 0, 1

HELD_OUT_BOOKS = ("austen-persuasion", "chesterton-thursday")
HELD_OUT_SPEECHES = 6  # the most recent ones
HELD_OUT_MODULES = ("argparse", "tarfile")  # of Python's library, which the mixture reads too
NO_LIBRARY = {"site-packages", "test", "tests", "idlelib", "lib2to3"}  # folders
WRAPPED_SHARE = 0.15  # share of a book's weight that keeps its hard line breaks

# How often a document is seen per pass, relative to a speech.  Novels and stories are what the demo should sound
# like; numbered Bible verses, blank verse and First-Folio spelling would otherwise leak into its prose.
DEFAULT_BOOK_WEIGHT = 2.0
BOOK_WEIGHTS = {
    "bible-kjv": 0.15,
    "milton-paradise": 0.2,
    "whitman-leaves": 0.2,
    "blake-poems": 0.2,
    "shakespeare-caesar": 0.2,
    "shakespeare-hamlet": 0.2,
    "shakespeare-macbeth": 0.2,
}
SPEECH_WEIGHT = 0.8


@dataclass(frozen=True)
class Shape:
    """A Llama architecture (multi-head attention, tied embeddings), or with experts Qwen3's of mixtures."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    max_positions: int
    yarn_factor: float | None = None  # None: plain rotary positions
    experts: int = 0  # of a layer, each of size `intermediate`; 0: a dense network
    used: int = 0  # of them, by a row

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


@dataclass(frozen=True, kw_only=True)
class IndexedShape(Shape):
    """The architecture of Qwen3.8-Flash-Next: recurrent layers, every `period`-th attending to blocks that an index
    chooses, residual streams, and a network beside the experts."""

    kv_heads: int
    shared: int  # size of the network beside the experts
    period: int  # layers from one that attends to the next one
    key_heads: int  # of a recurrent layer
    value_heads: int
    state_dim: int  # of these heads
    streams: int
    rank: int  # of the matrices that mix the streams
    rotated: int  # numbers of an attention head that are rotated
    index_heads: int
    index_dim: int
    ratio: int  # tokens of a block
    budget: int  # tokens of the blocks that a row chooses

    def attends(self, layer: int) -> bool:
        return (layer + 1) % self.period == 0


TRAINED_POSITIONS = 2048
YARN_FACTOR = 16.0
TARGET = Shape(hidden=384, layers=8, heads=6, intermediate=640, max_positions=TRAINED_POSITIONS)
TARGET_LONG = Shape(hidden=384, layers=8, heads=6, intermediate=640, max_positions=32768, yarn_factor=YARN_FACTOR)
DRAFT = Shape(hidden=128, layers=3, heads=2, intermediate=352, max_positions=TRAINED_POSITIONS)
MIXTURE = Shape(hidden=256, layers=4, heads=4, intermediate=128, max_positions=TRAINED_POSITIONS, experts=64, used=4)
INDEXED = IndexedShape(
    hidden=256, layers=4, heads=4, intermediate=64, max_positions=16384, experts=8, used=2, kv_heads=2, shared=384,
    period=2, key_heads=4, value_heads=8, state_dim=32, streams=2, rank=32, rotated=16, index_heads=4, index_dim=64,
    ratio=4, budget=512,
)  # fmt: skip


@dataclass(frozen=True)
class Phase:
    """A run of optimizer steps at one sequence length."""

    steps: int
    batch: int  # sequences per step
    length: int  # tokens predicted per sequence


@dataclass(frozen=True)
class Schedule:
    """Phases run back to back under one warmup-stable-decay learning-rate curve."""

    phases: tuple[Phase, ...]
    matrix_lr: float  # Muon, on the 2-D weights inside the layers
    other_lr: float  # AdamW, on the embedding and the norms
    warmup: int  # steps
    decay_share: float  # last share of all steps, in which the rate falls linearly to `final_share`
    final_share: float = 0.0
    weight_decay: float = 0.05

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    @property
    def tokens(self) -> int:
        return sum(phase.steps * phase.batch * phase.length for phase in self.phases)

    def rate(self, step: int) -> float:
        """Share of the peak learning rate at a step counted from 0."""
        left = (self.steps - step) / max(1.0, self.decay_share * self.steps)
        return min(1.0, (step + 1) / max(1, self.warmup), self.final_share + (1 - self.final_share) * left)


@dataclass(frozen=True)
class Paths:
    """Files and folders that the steps write and later steps read."""

    out: Path

    @property
    def documents(self) -> Path:
        return self.out / "documents.jsonl"

    @property
    def tokenizer(self) -> Path:
        return self.out / "tokenizer"

    @property
    def tokens(self) -> Path:
        return self.out / "tokens.npz"

    def checkpoint(self, name: str) -> Path:
        return self.out / f"{name}.pt"

    def model(self, name: str) -> Path:
        return self.out / f"demo-{name}"
