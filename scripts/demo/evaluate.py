"""Held-out loss by context length, draft-target agreement, and sample text."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from . import settings, training
from .corpus import Document
from .data import Corpus
from .distill import SINKS
from .model import Llama
from .settings import Paths

LENGTHS = (2048, 8192, 16384, 32768)  # tokens of context
TAIL = 512  # last positions of a window that count
ENDS_PER_BOOK = 2
DRAFT_SEES = 256  # tokens: sinks and the most recent
AGREEMENT_WINDOW = 1024  # tokens the target sees
AGREEMENT_WINDOWS = 6  # per book
AGREEMENT_STRIDE = 8  # tokens between compared positions
TEMPERATURE, TOP_P = 0.6, 0.9
PROMPTS = (
    "It was a bright cold morning, and the old captain",
    "Anne had not expected to see him again, but",
    "Fellow-Citizens of the Senate and House of Representatives:",
)
SAMPLE_TOKENS = 160


@torch.no_grad()
def evaluate(corpus: Corpus, paths: Paths) -> dict[str, object]:
    """Measures the finished pair and writes evaluation.json."""
    target, draft = Llama(settings.TARGET_LONG), Llama(settings.DRAFT)
    training.load_weights(target, paths.checkpoint("stretch"))
    training.load_weights(draft, paths.checkpoint("draft"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result: dict[str, object] = {
            "target_loss": losses_by_length(target, corpus),
            "draft_loss_at_2048": mean_loss(draft, corpus, 2048),
            "agreement": agreement(target, draft, corpus),
        }
    result["samples"] = samples(paths.model("target"))
    (paths.out / "evaluation.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


def losses_by_length(model: Llama, corpus: Corpus) -> dict[str, dict[str, float]]:
    """Loss at each context length; all lengths are scored on the very same tokens."""
    table: dict[str, dict[str, float]] = {}
    for length in LENGTHS:
        nats = mean_loss(model, corpus, length)
        table[str(length)] = {"nats_per_token": nats, "bits_per_byte": nats / math.log(2) / bytes_per_token(corpus)}
        print(f"context {length}: {table[str(length)]}", file=sys.stderr, flush=True)
    return table


def mean_loss(model: Llama, corpus: Corpus, length: int) -> float:
    """Mean cross entropy, nats per token, over the last TAIL positions of held-out windows of `length` tokens."""
    total = 0.0
    ends = [(name, end) for name in settings.HELD_OUT_BOOKS for end in window_ends(corpus.ids[name])]
    for name, end in ends:
        ids = corpus.ids[name][end - length : end].astype(np.int64)
        row = torch.from_numpy(np.concatenate(([settings.BOS_ID], ids)))[None]
        hidden = model.hidden(row[:, :-1])[:, -TAIL:]
        logits = F.linear(hidden, model.embedding().to(hidden.dtype))
        total += F.cross_entropy(logits[0].float(), row[0, -TAIL:]).item()
    return total / len(ends)


def window_ends(ids: np.ndarray) -> list[int]:
    """Ends of the scored stretches in a book; each has the longest context before it."""
    return [int(end) for end in np.linspace(max(LENGTHS), len(ids), ENDS_PER_BOOK)]


def bytes_per_token(corpus: Corpus) -> float:
    """UTF-8 bytes per token over the held-out books."""
    books: list[Document] = [d for d in corpus.documents if d.name in settings.HELD_OUT_BOOKS]
    return sum(len(d.text.encode()) for d in books) / sum(len(corpus.ids[d.name]) for d in books)


def agreement(target: Llama, draft: Llama, corpus: Corpus) -> dict[str, float]:
    """Mean over held-out positions of sum(min(p_target, p_draft)), the chance that a drafted token is accepted.

    The target reads the whole window; the draft reads its first SINKS and its most recent tokens, DRAFT_SEES in all.
    """
    sharp, plain = [], []
    for row in training.held_out_windows(corpus, AGREEMENT_WINDOW, AGREEMENT_WINDOWS):
        ends = torch.arange(DRAFT_SEES, AGREEMENT_WINDOW + 1, AGREEMENT_STRIDE)
        wanted = target(row[None])[0, ends - 1].float()
        recent = ends[:, None] - torch.arange(DRAFT_SEES - SINKS, 0, -1)
        seen = torch.cat((row[:SINKS].expand(len(ends), -1), row[recent]), dim=1)
        given = draft.hidden(seen)[:, -1]
        given = F.linear(given, draft.embedding().to(given.dtype)).float()
        sharp.append(overlap(nucleus(wanted), nucleus(given)))
        plain.append(overlap(wanted.softmax(-1), given.softmax(-1)))
    return {
        f"temperature {TEMPERATURE} top-p {TOP_P}": torch.cat(sharp).mean().item(),
        "temperature 1": torch.cat(plain).mean().item(),
        "positions": float(len(torch.cat(plain))),
    }


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """[positions, vocab] twice -> [positions]."""
    return torch.minimum(p, q).sum(-1)


def nucleus(logits: Tensor) -> Tensor:
    """Probabilities at TEMPERATURE cut to the smallest set that holds TOP_P of the mass, [positions, vocab]."""
    shares, order = (logits / TEMPERATURE).softmax(-1).sort(-1, descending=True)
    shares = shares.masked_fill(shares.cumsum(-1) - shares >= TOP_P, 0.0)
    return torch.zeros_like(shares).scatter(-1, order, shares / shares.sum(-1, keepdim=True))


def samples(folder: Path) -> list[dict[str, str]]:
    """Text from the saved target: one sample at TEMPERATURE per prompt, and one greedy continuation."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(settings.SEED)
    plans = [(prompt, True) for prompt in PROMPTS] + [(PROMPTS[1], False)]
    return [
        {"prompt": prompt, "how": how(drawn), "text": continuation(model, tokenizer, prompt, drawn)}
        for prompt, drawn in plans
    ]


def how(drawn: bool) -> str:
    """Names the decoding of a sample."""
    return f"temperature {TEMPERATURE}, top-p {TOP_P}" if drawn else "greedy"


def continuation(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, prompt: str, drawn: bool) -> str:
    """SAMPLE_TOKENS new tokens after a prompt."""
    inputs = tokenizer(prompt, return_tensors="pt")
    choice = {"do_sample": True, "temperature": TEMPERATURE, "top_p": TOP_P} if drawn else {"do_sample": False}
    ids = model.generate(
        inputs.input_ids,
        attention_mask=inputs.attention_mask,
        max_new_tokens=SAMPLE_TOKENS,
        pad_token_id=settings.EOS_ID,
        top_k=0 if drawn else None,
        **choice,
    )
    return str(tokenizer.decode(ids[0], skip_special_tokens=True))
