"""The share of proposed tokens that the target accepts, before a text has shown it.

Fits to what the demo pair, SmolLM2 and Qwen2.5-Coder accept (docs/log.md).
"""

from __future__ import annotations

from math import hypot, log, sqrt

DRAFT_ACCEPTANCE = 0.5  # of a small draft's tokens, by the target or a part of it
LOOKUP_TOKENS = 1.2  # of a round with a looked up token, where texts repeat little (Qwen2.5-Coder's prose: 1.3)

_WEIGHTS_REFUSED = {16: 0.0, 6: 0.85, 4: 3.0}  # by bits, over the root of the hidden size
_CACHE_REFUSED = {16: 0.0, 4: 0.02}  # by bits
_UNREAD_REFUSED = 0.031  # times the logarithm of one over the share that is read


def own_acceptance(hidden_size: int, weight_bits: int, kv_bits: int, share: float) -> float:
    """Of tokens that the target proposes by itself, with fewer bits of its weights and of its cache, over `share` of
    the tokens in the cache. These are independent errors, so their squares add, and in proportion to their size tokens
    are refused."""
    weights = _WEIGHTS_REFUSED[weight_bits] / sqrt(hidden_size)
    return max(1.0 - hypot(weights, _CACHE_REFUSED[kv_bits], _UNREAD_REFUSED * log(1.0 / share)), 0.0)


def expected_tokens(acceptance: float, gamma: int) -> float:
    """Tokens per round with independent acceptances (Leviathan et al. 2023, equation 1)."""
    return gamma + 1.0 if acceptance >= 1.0 else (1.0 - acceptance ** (gamma + 1)) / (1.0 - acceptance)
