"""Log-probabilities of tokens as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offload.decode.logprobs import TokenScore
    from offload.decode.tokenizer import Tokenizer


def logprobs(scores: Sequence[TokenScore], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """An object for each token: its id, text and log-probability in nats, and the same of the likeliest ones."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        return {"token": token, "text": tokenizer.decode([token]), "logprob": round(logprob, 6)}

    return [one(score.token, score.logprob) | {"top": [one(*pair) for pair in score.likeliest]} for score in scores]
