"""The offers of a machine: models with their plans on it, the ablest that write as fast as one reads first. Pure
functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from offload.config.model import ModelConfig
from offload.errors import DoesNotFit, UsageError
from offload.plan.options import Options
from offload.plan.planner import Plan
from offload.plan.request import Request
from offload.speed.hardware import Hardware

NUMBER = 3
CONTEXT = 16_384  # tokens that are planned for, if nothing else is said
MAX_TOKENS = 256  # of them written
READING = 5.0  # tokens a second: 250 English words a minute
_ON_HOST = {"target experts": "experts", "target layers": "weights", "kv cache": "cache"}  # by their purposes


class Candidate(Protocol):
    """A model that may be offered. form: of its weights. num_bytes: of its files. model: its name for --model. pull:
    the arguments of the command that fetches it; () if it is here. draft: the model that it is used with."""

    @property
    def name(self) -> str: ...

    @property
    def form(self) -> str: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def model(self) -> str: ...

    @property
    def pull(self) -> tuple[str, ...]: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def draft(self) -> ModelConfig | None: ...


@dataclass(frozen=True)
class Offer:
    """A model and its plan for a context."""

    candidate: Candidate
    request: Request
    plan: Plan

    @cached_property
    def longest(self) -> int:
        """The longest context that fits, in tokens."""
        return replace(self.request, options=Options()).longest_context()

    @property
    def seconds_per_token(self) -> float:
        """The predicted time."""
        return self.plan.predicted.seconds_per_token

    @property
    def tokens_per_second(self) -> float:
        """The predicted rate."""
        return 1 / self.seconds_per_token

    @property
    def on_host(self) -> tuple[str, ...]:
        """The parts of which a GPU's plan has some in host memory: "experts", "weights", "cache"."""
        return tuple(name for purpose, name in _ON_HOST.items() if self.plan.placement.host_bytes.get(purpose))


def offers(
    candidates: Iterable[Candidate],
    hardware: Hardware,
    *,
    request_of: Callable[[Request], Request] = lambda request: request,
    number: int = NUMBER,
    context: int = CONTEXT,
) -> list[Offer]:
    """The offers, at most `number`: the first candidates that write READING tokens a second, then the fastest of the
    others. candidates: the ablest first; those after the last that is needed are not planned. request_of: completes a
    request, with measured curves. context: tokens to plan for, where a model takes as many."""
    quick: list[Offer] = []
    slow: list[Offer] = []
    for candidate in candidates:
        if len(quick) == number:
            break
        if (offer := offer_of(candidate, hardware, request_of=request_of, context=context)) is not None:
            (quick if offer.tokens_per_second >= READING else slow).append(offer)
    return [*quick, *sorted(slow, key=lambda offer: -offer.tokens_per_second)][:number]


def offer_of(
    candidate: Candidate,
    hardware: Hardware,
    *,
    request_of: Callable[[Request], Request] = lambda request: request,
    context: int = CONTEXT,
) -> Offer | None:
    """The offer of one model; None if it does not fit the machine's memory: how fast experts are read from its file is
    not known before it is there."""
    if candidate.num_bytes > _memory(hardware):  # told without a plan
        return None
    context = min(context, candidate.config.context_limit)
    try:
        request = request_of(Request(candidate.config, candidate.draft, Options(context=context), hardware))
        plan = request.plan(num_prompt_tokens=context - MAX_TOKENS, max_tokens=MAX_TOKENS)
    except (DoesNotFit, UsageError):  # or the devices cannot share it
        return None
    return None if plan.placement.expert_places else Offer(candidate, request, plan)


def _memory(hardware: Hardware) -> int:
    devices = hardware.device_free_bytes * (1 if hardware.is_cpu else hardware.num_devices)
    return devices + (0 if hardware.is_cpu else hardware.host_free_bytes)
