"""Parts that OpenAI's APIs share: errors, usage, log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triforce_cli.apis.api import ApiError, Score, Usage

_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error",
}  # fmt: skip


def error(failed: ApiError) -> dict[str, Any]:
    """The body of an error's response."""
    kind = _TYPES.get(failed.status, "invalid_request_error" if failed.status < 500 else "server_error")
    return {"error": {"message": str(failed), "type": kind, "param": None, "code": failed.code or None}}


def usage(used: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": used.prompt,
        "completion_tokens": used.answer,
        "total_tokens": used.prompt + used.answer,
        "prompt_tokens_details": {"cached_tokens": used.cached},
        "completion_tokens_details": {"reasoning_tokens": used.thoughts},
    }


def logprob(score: Score) -> dict[str, Any]:
    """A token's score with those of the likeliest ones in its place."""
    return _one(score) | {"top_logprobs": [_one(each) for each in score["top"]]}


def _one(score: Mapping[str, Any]) -> dict[str, Any]:
    text = score["text"]
    whole = "\ufffd" not in text  # otherwise the token is a part of a character
    return {"token": text, "logprob": score["logprob"], "bytes": list(text.encode()) if whole else None}
