"""What is asked of an engine: a prompt, and how it is to be continued."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offload.config.model import ModelConfig
from offload.decode.sampling import SamplingParams
from offload.errors import UsageError

if TYPE_CHECKING:
    from offload.decode.tokenizer import Tokenizer

MOST_LOGPROBS = 20


@dataclass(frozen=True)
class GenerationRequest:
    """Continue `prompt`, token ids, for at most `max_tokens` tokens.

    stop: strings that end the text before themselves; tokens after the one that completes one are dropped. Where one
    names a special token, that token counts as its name.
    end_tokens: ids that end the text, besides the model's own.
    reuse: take the cached rows of the longest common prefix, whichever passes computed them: the same rows but for
    rounding. Otherwise only rows that a prefill of this prompt would give bit for bit are taken over (whole blocks that
    prompts begin with alike), and the text does not depend on what the engine was asked before.
    logprobs: how likely the target finds each token, and so many of the likeliest ones in its place; None: not asked.
    passages: of the prompt, so many that the text's tokens attended to most come with its last step; 0: none. The plan
    has to record masses.
    named: tokens that the text has by these names; special ones are no text otherwise.
    speculation: off, it is decoded plainly, whatever the plan has; what lies where stays as planned.
    """

    prompt: Sequence[int]
    sampling: SamplingParams
    max_tokens: int
    stop: Sequence[str] = ()
    end_tokens: Collection[int] = ()
    reuse: bool = False
    speculation: bool = True
    logprobs: int | None = None
    passages: int = 0
    named: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_logprobs(self.logprobs)


def check_logprobs(count: int | None) -> None:
    """Raises UsageError."""
    if count is not None and not 0 <= count <= MOST_LOGPROBS:
        raise UsageError(f"logprobs is {count}, it must be from 0 to {MOST_LOGPROBS}")


def end_tokens_of(model: ModelConfig, tokenizer: Tokenizer) -> frozenset[int]:
    """The model's own."""
    own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    return frozenset((*model.eos_token_ids, *own))


def check_sampling(sampling: SamplingParams, model: ModelConfig, tokenizer: Tokenizer) -> bool:
    """Whether the distribution of a place depends on the tokens before it, otherwise than through the logits. Raises
    UsageError, before anything is loaded, for what `sampling` asks and this model cannot do: a bias of what is no token
    of it, a constraint that cannot be followed."""
    from offload.decode.distribution import distribution_of  # torch comes with it

    ends = end_tokens_of(model, tokenizer)
    found = distribution_of(sampling, tokenizer, num_prompt=1, vocab_size=model.vocab_size, end_tokens=ends)
    return found.adjust is not None
