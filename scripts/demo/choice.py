"""The choice of blocks by a trained index, on texts that the model has not seen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from . import settings
from .data import Corpus
from .flash import Flash
from .indexed import IndexedAttention, parts

LENGTH = 4096  # tokens of a window
TAIL = 512  # last positions of a window that count
WINDOWS = 2  # of each document
KINDS = {"prose": settings.HELD_OUT_BOOKS, "code": settings.HELD_OUT_MODULES}


@torch.compiler.set_stance("force_eager")  # for a few windows nothing is compiled
def evaluate(model: Flash, corpus: Corpus) -> dict[str, object]:
    """Nats a token with the index's choice and with all blocks, and what the blocks that each layer's rows choose have
    of the attention, on prose and on code."""
    found = dict[str, object]()
    for kind, names in KINDS.items():
        rows = [row for name in names for row in windows(corpus.ids[name])]
        shares = [held(model, row) for row in rows]
        nats = {"chosen": fmean(loss(model.eval(), row) for row in rows)}
        nats["all"] = fmean(loss(model.train(), row) for row in rows)
        layers = [{name: fmean(each[at][name] for each in shares) for name in own} for at, own in enumerate(shares[0])]
        found[kind] = {"nats": nats, "layers": layers}
    return found


def windows(ids: np.ndarray) -> Iterator[Tensor]:
    """Evenly spaced windows of a document, int64 [1, LENGTH + 1], each opening with <s>."""
    for start in np.linspace(0, len(ids) - LENGTH, WINDOWS).astype(int):
        window = ids[start : start + LENGTH].astype(np.int64)
        yield torch.from_numpy(np.concatenate(([settings.BOS_ID], window)))[None]


@torch.no_grad()
def loss(model: Flash, row: Tensor) -> float:
    """Mean cross entropy, nats a token, of the last positions of a window."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = F.linear(model.hidden(row[:, :-1])[:, -TAIL:], model.embedding().bfloat16())
    return F.cross_entropy(logits[0].float(), row[0, -TAIL:]).item()


@torch.no_grad()
def held(model: Flash, row: Tensor) -> list[dict[str, float]]:
    """`kept` of each layer that attends."""
    with inputs(model) as found, torch.autocast("cpu", dtype=torch.bfloat16):
        model.eval().hidden(row[:, :-1])
        return [kept(*each) for each in found]


@contextmanager
def inputs(model: Flash) -> Iterator[list[tuple[IndexedAttention, tuple[Tensor, Tensor, Tensor]]]]:
    """Layers that attend with their inputs, as they come."""
    attending, found = [each for each in model.modules() if isinstance(each, IndexedAttention)], []
    hooks = [each.register_forward_pre_hook(lambda own, args: found.append((own, args))) for each in attending]
    yield found
    for hook in hooks:
        hook.remove()


def kept(attention: IndexedAttention, inputs: tuple[Tensor, Tensor, Tensor]) -> dict[str, float]:
    """The share of the attention to whole blocks that the blocks have which the last rows choose. Beside it those of as
    many others: the best, the last, and any on average."""
    q, k, _, queries, keys, _ = attention.before(*inputs)
    *_, part = parts(q, k, queries, keys, attention.ratio)
    mass, most, number = part.mass(part.shares()), attention.most, torch.arange(part.blocks)
    seen = (~part.hidden()).sum(-1, keepdim=True)
    found = {
        "chosen": mass * part.chosen(most),
        "best": mass.topk(most, -1).values,
        "last": mass * ((number >= seen - most) & (number < seen)),
        "any": mass * (most / seen),
    }
    return {name: (each.sum(-1) / mass.sum(-1)).mean().item() for name, each in found.items()}
