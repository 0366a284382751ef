"""What is asked of an engine: a prompt, and how it is to be continued."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # torch comes with it
    from offload.decode.sampling import SamplingParams


@dataclass(frozen=True)
class GenerationRequest:
    """Continue `prompt`, token ids, for at most `max_tokens` tokens.

    stop: strings that end the text before themselves; tokens after the one that completes one are dropped.
    end_tokens: ids that end the text, besides the model's own.
    reuse: take the cached rows of the longest common prefix, whichever passes computed them: the same rows but for
    rounding. Otherwise only rows that a prefill of this prompt would give bit for bit are taken over (whole blocks that
    prompts begin with alike), and the text does not depend on what the engine was asked before.
    speculation: off, it is decoded plainly, whatever the plan has; what lies where stays as planned.
    """

    prompt: Sequence[int]
    sampling: SamplingParams
    max_tokens: int
    stop: Sequence[str] = ()
    end_tokens: Collection[int] = ()
    reuse: bool = False
    speculation: bool = True
