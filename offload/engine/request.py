"""Generation requests: a prompt, and how to continue it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offload.decode.sampling import SamplingParams
from offload.errors import UsageError

if TYPE_CHECKING:
    from offload.config.model import ModelConfig
    from offload.text.reply_text import AnswerPlace
    from offload.text.tokenizer import Tokenizer

MOST_LOGPROBS = 20


@dataclass(frozen=True)
class GenerationRequest:
    """A request to continue `prompt`, token ids, for at most `max_tokens` tokens.

    stop: strings before which the text ends; tokens after the one that completes a string are dropped. A string that
    names a special token also matches that token. answer_stop: such strings that count only in the answer, behind
    thoughts. answer: makes what tells where that is; None: all of the text.
    end_tokens: ids that end the text, besides the model's own.
    begun: the number of the prompt's last tokens that belong to the text, from an earlier request. Penalties,
    constraints, limits on thoughts and stop strings count them in; the first step's text begins with theirs.
    reuse: use the cached rows of the longest common prefix, whichever passes computed them; they may differ in
    rounding. Otherwise only rows that a prefill of this prompt would give bit for bit are reused (whole blocks with
    which both prompts begin), and the text does not depend on earlier requests.
    logprobs: the number of likeliest tokens to return with each token's log probability; None: no log probabilities.
    passages: the number of passages of the prompt that the text draws on to return with the last step, see
    `Attended`; 0: none. The plan must record masses.
    named: tokens to write in the text by the given names; otherwise special tokens have no text.
    speculation: False decodes plainly, whatever the plan says; the placement stays as planned.
    """

    prompt: Sequence[int]
    sampling: SamplingParams
    max_tokens: int
    stop: Sequence[str] = ()
    answer_stop: Sequence[str] = ()
    answer: Callable[[], AnswerPlace] | None = None
    end_tokens: Collection[int] = ()
    begun: int = 0
    reuse: bool = False
    speculation: bool = True
    logprobs: int | None = None
    passages: int = 0
    named: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_logprobs(self.logprobs)
        if not 0 <= self.begun < max(len(self.prompt), 1):
            raise UsageError(
                f"begun is {self.begun}, the prompt has {len(self.prompt)} tokens, the first of them its own"
            )


def check_logprobs(count: int | None) -> None:
    """Raises UsageError for a number of log probabilities out of range."""
    if count is not None and not 0 <= count <= MOST_LOGPROBS:
        raise UsageError(f"logprobs is {count}, it must be from 0 to {MOST_LOGPROBS}")


def end_tokens_of(model: ModelConfig, tokenizer: Tokenizer) -> frozenset[int]:
    """The model's own end tokens, from its config and its tokenizer."""
    own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    return frozenset((*model.eos_token_ids, *own))


def check_sampling(sampling: SamplingParams, model: ModelConfig, tokenizer: Tokenizer) -> bool:
    """Whether the distribution at a place depends on earlier tokens other than through the logits. Raises UsageError,
    before weights are loaded, for parameters that this model does not support: a bias of an unknown token, a constraint
    that cannot be used."""
    from offload.decode.distribution import distribution_of  # imports torch
    from offload.worker.models import num_scored

    ends = end_tokens_of(model, tokenizer)
    size, never = num_scored(model, len(tokenizer)), model.suppressed  # as the engine has it, so a grammar is its own
    found = distribution_of(sampling, tokenizer, num_prompt=1, vocab_size=size, end_tokens=ends, suppressed=never)
    return found.adjust is not None
