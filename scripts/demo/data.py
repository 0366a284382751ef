"""Token streams and training windows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from . import settings
from .corpus import Document


class Corpus:
    """All documents as token ids."""

    def __init__(self, documents: list[Document], tokens: Path) -> None:
        arrays = np.load(tokens)
        self.documents = documents
        self.ids: dict[str, np.ndarray] = {document.name: arrays[document.name] for document in documents}

    def training(self) -> list[Document]:
        """Documents a model may see."""
        return [document for document in self.documents if not document.held_out]

    def pass_stream(self, rng: np.random.Generator) -> np.ndarray:
        """One weighted pass, uint16 [tokens]: shuffled `<s> text </s>` documents, light ones as a random slice."""
        pieces: list[np.ndarray] = []
        for document in self.training():
            ids = self.ids[document.name]
            whole, part = divmod(document.weight, 1.0)
            pieces += [wrap(ids)] * int(whole)
            size = int(part * len(ids))
            start = int(rng.integers(0, len(ids) - size + 1))
            if size:
                pieces.append(wrap(ids[start : start + size]))
        order = rng.permutation(len(pieces))
        return np.concatenate([pieces[index] for index in order])

    def windows(self, length: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
        """Endless training windows, uint16 [length + 1], each position of a pass in exactly one window.

        Every window opens with `<s>`, as every prompt does at run time: the first position becomes the attention
        sink that cache policies keep.
        """
        while True:
            stream = self.pass_stream(rng)[int(rng.integers(0, length)) :]
            rows = len(stream) // length
            table = stream[: rows * length].reshape(rows, length)
            for row in rng.permutation(rows):
                yield np.concatenate(([settings.BOS_ID], table[row])).astype(np.uint16)

    def long_windows(self, length: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
        """Endless windows, uint16 [length + 1], each within one document long enough to hold it."""
        long = [d for d in self.training() if len(self.ids[d.name]) > length]
        share = np.array([d.weight * len(self.ids[d.name]) for d in long])
        while True:
            ids = self.ids[long[int(rng.choice(len(long), p=share / share.sum()))].name]
            start = int(rng.integers(0, len(ids) - length + 1))
            yield np.concatenate(([settings.BOS_ID], ids[start : start + length])).astype(np.uint16)


def wrap(ids: np.ndarray) -> np.ndarray:
    """`<s> ids </s>`."""
    return np.concatenate(([settings.BOS_ID], ids, [settings.EOS_ID])).astype(np.uint16)


def batches(windows: Iterator[np.ndarray], size: int) -> Iterator[torch.Tensor]:
    """Groups windows into int64 [size, length + 1]."""
    while True:
        yield torch.from_numpy(np.stack([next(windows) for _ in range(size)]).astype(np.int64))
