"""Distillation of the draft from the target."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .model import Llama

TEACHER_LENGTH = 640  # tokens the target reads
DRAFT_LENGTH = 512  # of them, tokens the draft reads
SINKS = 16  # first positions a streaming cache keeps
SHARP = 0.6  # temperature the demo samples at


class Lesson:
    """Draft and target side by side on the same text, the draft with a gap in it.

    At run time the draft sees 16 sink tokens and then the recent ones, numbered as if nothing lay between.  So the
    draft's window is cut the same way: the sinks, then the text from a random place on.
    """

    def __init__(self, teacher: Llama, draft: Llama) -> None:
        self.teacher, self.draft = teacher, draft

    def compare(self, ids: Tensor) -> Tensor:
        """ids int64 [batch, TEACHER_LENGTH + 1] -> the three measures of `measures`."""
        gap = int(torch.randint(0, TEACHER_LENGTH - DRAFT_LENGTH + 1, ()))
        kept = torch.cat((torch.arange(SINKS), torch.arange(SINKS + gap, DRAFT_LENGTH + gap)))
        with torch.no_grad():
            wanted = self.teacher.hidden(ids[:, :-1])[:, kept]
        given = self.draft.hidden(ids[:, kept])
        return measures(wanted, given, self.teacher.embedding(), self.draft.embedding(), ids[:, kept + 1])

    def loss(self, ids: Tensor) -> Tensor:
        """KL divergence to the target + half the rejection rate at temperature SHARP + a tenth of the cross entropy."""
        divergence, lost, entropy = self.compare(ids)
        return divergence + 0.5 * lost + 0.1 * entropy

    def overlap(self, ids: Tensor) -> Tensor:
        """Mean probability that a drafted token is accepted at temperature SHARP."""
        return 1.0 - self.compare(ids)[1]


@torch.compile(dynamic=False)
def measures(wanted: Tensor, given: Tensor, wanted_head: Tensor, given_head: Tensor, ids: Tensor) -> Tensor:
    """Hidden states [batch, length, size], heads [vocab, size], next ids [batch, length] -> float32 [3].

    Mean KL(target || draft) in nats, mean total variation at temperature SHARP, mean cross entropy in nats.
    """
    wanted_logits = F.linear(wanted, wanted_head.to(wanted.dtype)).float()
    given_logits = F.linear(given, given_head.to(given.dtype)).float()
    wanted_log, given_log = wanted_logits.log_softmax(-1), given_logits.log_softmax(-1)
    divergence = (wanted_log.exp() * (wanted_log - given_log)).sum(-1).mean()
    sharp_gap = (wanted_logits / SHARP).softmax(-1) - (given_logits / SHARP).softmax(-1)
    entropy = F.nll_loss(given_log.flatten(0, 1), ids.flatten())
    return torch.stack((divergence, 0.5 * sharp_gap.abs().sum(-1).mean(), entropy))
