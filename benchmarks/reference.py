"""The reference to measure against: transformers' own `generate` on the same weights."""

from __future__ import annotations

import offload  # noqa: F401  # isort: skip  # before torch, which reads its threads' wait policy once

import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig, LogitsProcessor
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from offload.decode.sampling import SamplingParams
from offload.errors import DoesNotFit, TriforceError
from offload.model.loading import DTYPES

SDPA, EAGER = "sdpa", "eager"
CHOICES = {"attention": (SDPA, EAGER)}


class Reference:
    """A model in transformers, with its usual cache; cache and weights are on the device."""

    def __init__(
        self,
        model: Path,
        *,
        dtype: str,
        device: str,
        attention: str = SDPA,
        draft: Path | None = None,
        lookup: int | None = None,
    ) -> None:
        """Load the model. dtype: bf16, fp16 or fp32. attention: "sdpa" or "eager", for decoding; prefill uses sdpa,
        since eager attention materialises the score matrix of the prompt. draft, lookup: speculate with this model, or
        with prompt lookup of that many tokens; only with sdpa. Raises DoesNotFit, TriforceError."""
        assert attention == SDPA or (draft is None and lookup is None)
        logging.disable_progress_bar()
        logging.set_verbosity_error()
        try:
            self._model = _load(model, dtype, device)
            self._speculation: dict[str, Any] = {"prompt_lookup_num_tokens": lookup} if lookup else {}
            if draft is not None:
                self._speculation = {"assistant_model": _load(draft, dtype, device)}
        except torch.OutOfMemoryError as error:
            raise _too_large(device) from error
        except (OSError, ValueError, ImportError) as error:
            said = (str(error).splitlines() or [type(error).__name__])[0]  # further lines list the known models
            raise TriforceError(f"transformers cannot load {model}: {said}") from error
        self._device, self._attention = device, attention
        self._prompt: list[int] = []
        self._cache: Any = None

    def generate(
        self, prompt: Sequence[int], sampling: SamplingParams, *, max_tokens: int, end_tokens: Collection[int]
    ) -> tuple[list[int], list[float]]:
        """Generate a text -> (tokens, seconds from the start at which each was known). The prompt's rows except the
        last, which gives the first token, stay cached for the next call with the same prompt. With speculation they do
        not: transformers would write another text."""
        if self._prompt == list(prompt) and not self._speculation:
            self._cache.crop(len(prompt) - 1 - self._cache.get_seq_length())  # negative: counted from the end
        else:
            self._prompt, self._cache = list(prompt), DynamicCache()
        clock, ids = _Clock(), torch.tensor([list(prompt)], device=self._device)
        torch.manual_seed(sampling.seed or 0)
        start = time.perf_counter()
        try:
            if self._attention != SDPA:
                self._read(ids[:, self._cache.get_seq_length() : -1])
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=self._cache,
                max_new_tokens=max_tokens,
                eos_token_id=sorted(end_tokens) or None,
                pad_token_id=0,  # a batch of one is not padded
                streamer=clock,
                **self._speculation,
                **_sampling_arguments(sampling),
            )
        except torch.OutOfMemoryError as error:
            raise _too_large(self._device) from error
        return output[0, len(prompt) :].tolist(), [moment - start for moment in clock.moments[len(prompt) :]]

    def _read(self, ids: torch.Tensor) -> None:
        """Prefill a new prompt without its last token; nothing if the prompt is cached. Then switch to the requested
        attention."""
        if ids.shape[1] > 0:
            self._model.set_attn_implementation(SDPA)
            with torch.inference_mode():
                self._model(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._model.set_attn_implementation(self._attention)

    def generate_all(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int, end_tokens: Collection[int]
    ) -> tuple[list[list[int]], float]:
        """Generate greedy texts in a batch -> (tokens of each after its first, seconds from the first tokens on). The
        prompts have equal lengths, so none is padded; a text that has ended is padded until the last one ends."""
        read, ids = _FirstPass(), torch.tensor([list(prompt) for prompt in prompts], device=self._device)
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            eos_token_id=sorted(end_tokens) or None,
            pad_token_id=0,
            logits_processor=[read],
            do_sample=False,
        )
        return output[:, ids.shape[1] + 1 :].tolist(), time.perf_counter() - read.end


class _FirstPass(LogitsProcessor):
    """A processor that notes the end of the first pass. end: a `time.perf_counter`."""

    end = 0.0

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.end = self.end or time.perf_counter()
        return scores


class _Clock(BaseStreamer):
    """A streamer that notes the time of each token on the host; the first call passes the prompt."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.moments += [time.perf_counter()] * value.numel()

    def end(self) -> None: ...


def _load(model: Path, dtype: str, device: str) -> Any:
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        str(model), dtype=DTYPES[dtype], local_files_only=True, trust_remote_code=False, use_safetensors=True
    )
    loaded.to(device).eval().generation_config = GenerationConfig()  # the caller's sampling, not the folder's
    return loaded


def _sampling_arguments(sampling: SamplingParams) -> dict[str, Any]:
    """The arguments of transformers' `generate` for the same distribution."""
    if sampling.temperature == 0.0:
        return {"do_sample": False}
    return {"do_sample": True} | {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p")}


def _too_large(device: str) -> DoesNotFit:
    return DoesNotFit(
        f"transformers keeps weights and cache on {device}, which has no room for them; try a shorter context"
    )
