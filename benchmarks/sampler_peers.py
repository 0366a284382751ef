"""transformers and llama.cpp with their own samplers, for samplers.py: texts, logits and distributions."""

from __future__ import annotations

import offload  # noqa: F401  # isort: skip  # before torch, which reads its threads' wait policy once

import math
import os
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peer import Peer, without_openmp
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig

from offload.decode.sampling import SamplingParams
from offload.errors import TriforceError

PROCESS = Path(__file__).parent / "sampler_process.py"
# In this program's order. llama.cpp's "penalties" includes presence and frequency.
LLAMA_CPP_ORDER = ["penalties", "dry", "top_n_sigma", "temperature", "top_k", "top_p", "min_p", "typ_p", "xtc"]
SPARE = 16  # tokens of context beyond prompt and output
WHOLE_TEXT = 1 << 20  # tokens of llama.cpp's window, which has no value for "all"


@dataclass(frozen=True)
class Written:
    """A text of transformers. tokens: [n] after a prompt. logits, scores: [n, V] fp32 before and after its samplers."""

    tokens: list[int]
    logits: Tensor
    scores: Tensor


class Transformers:
    """transformers with a model in fp32. The rows of the last prompt, except the last row, are kept for a repeated
    prompt."""

    def __init__(self, folder: Path) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, local_files_only=True)
        model.generation_config = GenerationConfig()  # sampling is set here, not by the folder
        warnings.filterwarnings("ignore", module="transformers")  # on texts that end before their least length
        self._model, self._prompt, self._cache = model.eval(), list[int](), DynamicCache()

    def write(
        self, prompt: Sequence[int], sampling: SamplingParams, *, max_tokens: int, end_tokens: Collection[int]
    ) -> Written:
        if self._prompt == list(prompt):
            self._cache.crop(len(prompt) - 1 - self._cache.get_seq_length())  # negative: counted from the end
        else:
            self._prompt, self._cache = list(prompt), DynamicCache()
        ids = torch.tensor([list(prompt)])
        torch.manual_seed(sampling.seed or 0)
        found = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=self._cache,
            max_new_tokens=max_tokens,
            eos_token_id=sorted(end_tokens) or None,
            pad_token_id=0,
            output_logits=True,
            output_scores=True,
            return_dict_in_generate=True,
            **transformers_options(sampling),
        )
        return Written(found.sequences[0, len(prompt) :].tolist(), torch.cat(found.logits), torch.cat(found.scores))

    def logits(self, prompt: Sequence[int]) -> Tensor:
        """The logits of the next token, [V]."""
        return self.write(prompt, SamplingParams(temperature=0.0), max_tokens=1, end_tokens=()).logits[0]


def transformers_options(sampling: SamplingParams) -> dict[str, Any]:
    """The arguments of transformers' `generate` for the same distribution."""
    options: dict[str, Any] = {
        "repetition_penalty": sampling.repetition_penalty,
        "no_repeat_ngram_size": sampling.no_repeat_ngram or None,
        "min_new_tokens": sampling.min_tokens or None,
        "sequence_bias": {(token,): bias for token, bias in sampling.logit_bias} or None,
        "do_sample": not sampling.greedy,
    }
    if not sampling.greedy:
        options |= {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "typical_p")}
        options["min_p"] = sampling.min_p or None
    return options


class LlamaCpp:
    """llama.cpp with a GGUF file in fp32 and the model's own vocabulary: DRY's breakers are texts."""

    def __init__(self, python: str, file: Path, *, context: int, vocab_size: int) -> None:
        options = {
            "model": str(file),
            "context": context + SPARE,
            "slots": 1,
            "threads": torch.get_num_threads(),
            "prompt_threads": torch.get_num_threads(),
            "cache": "f32",
            "flash": False,
            "ubatch": 512,
            **dict.fromkeys(("draft", "lookup", "rows")),
        }
        environment = without_openmp(os.environ) | {"OMP_WAIT_POLICY": "passive"}
        self._peer = Peer("llama.cpp", [python, str(PROCESS)], options, environment)
        self._size = vocab_size

    def close(self) -> None:
        self._peer.close()

    def text(self, prompt: Sequence[int], sampling: SamplingParams, *, max_tokens: int) -> list[int]:
        """The text's tokens without the end token."""
        asked = {"prompt": list(prompt), "max_tokens": max_tokens, "n_probs": 1} | llama_cpp_options(sampling)
        tokens: list[int] = self._peer.ask({"completion": asked})["tokens"]
        return tokens

    def logprobs(self, prompt: Sequence[int]) -> Tensor:
        """The log-probabilities of the next token, before all samplers, [V] fp64."""
        return self._first_place(prompt, {"samplers": ["temperature"], "temperature": 1.0}, -math.inf)

    def probs(self, prompt: Sequence[int], sampling: SamplingParams) -> Tensor:
        """The probabilities of the next token, after all samplers, [V] fp64. They are normalised: llama.cpp adds in
        fp32, and its sum differs from 1 by up to 3e-4."""
        row = self._first_place(prompt, llama_cpp_options(sampling) | {"post_sampling_probs": True}, 0.0)
        return row / row.sum()

    def _first_place(self, prompt: Sequence[int], options: dict[str, Any], other: float) -> Tensor:
        asked = {"prompt": list(prompt), "max_tokens": 1, "n_probs": self._size} | options
        pairs = self._peer.ask({"completion": asked})["about"]["first_place"]
        if not pairs:
            raise TriforceError("llama.cpp ended the text; its probabilities are not known then")
        tokens, numbers = zip(*pairs, strict=True)
        row = torch.full((self._size,), other, dtype=torch.float64)
        row[list(tokens)] = torch.tensor(numbers, dtype=torch.float64)
        return row


def llama_cpp_options(sampling: SamplingParams) -> dict[str, Any]:
    """The server's parameters for the same distribution."""
    return {
        "samplers": LLAMA_CPP_ORDER,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "typical_p": sampling.typical_p,
        "top_n_sigma": sampling.top_n_sigma or -1.0,
        "xtc_probability": sampling.xtc_probability,
        "xtc_threshold": sampling.xtc_threshold,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repeat_last_n": sampling.penalty_window or WHOLE_TEXT,
        "dry_multiplier": sampling.dry_multiplier,
        "dry_base": sampling.dry_base,
        "dry_allowed_length": sampling.dry_allowed_length,
        "dry_penalty_last_n": sampling.dry_window or WHOLE_TEXT,
        "dry_sequence_breakers": list(sampling.dry_breakers),
        "logit_bias": [list(pair) for pair in sampling.logit_bias],
        "seed": sampling.seed or 0,
    }
