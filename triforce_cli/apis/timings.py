"""The times of an answer under llama.cpp's names, which many clients show."""

from __future__ import annotations

from typing import Any

from offload.metrics import Stats


def timings(stats: Stats) -> dict[str, Any]:
    """The times of an answer. prompt: its tokens that were read anew, up to the first token of the answer. predicted:
    its tokens; their rate is of those after the first. draft: drafted for the target, and accepted by it."""
    rate, milliseconds = stats.prompt_tokens_per_second, stats.milliseconds_per_token
    target = next((level for level in stats.levels if level.name == "target"), None)
    drafts = {"draft_n": target.drafted, "draft_n_accepted": target.accepted} if target and target.drafted else {}
    return {
        "cache_n": stats.reused_tokens,
        "prompt_n": stats.prompt_tokens - stats.reused_tokens,
        "prompt_ms": _rounded(1000 * stats.first_token_seconds),
        "prompt_per_token_ms": _rounded(1000 / rate if rate else None),
        "prompt_per_second": _rounded(rate),
        "predicted_n": stats.output_tokens,
        "predicted_ms": _rounded(1000 * stats.decode_seconds),
        "predicted_per_token_ms": _rounded(milliseconds),
        "predicted_per_second": _rounded(stats.decode_tokens_per_second),
        **drafts,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
