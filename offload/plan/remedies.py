"""What would make a request fit that does not: each change tried alone, by planning it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from offload.errors import DoesNotFit
from offload.plan.config import ModelConfig
from offload.plan.hardware import Hardware
from offload.plan.placement import largest
from offload.plan.planner import Options, Plan, make_plan

_CARDS = (16, 24, 32, 48, 80, 96, 141)  # GB that cards are sold with
_MOST_HOST = 2**14  # GB


@dataclass(frozen=True)
class Request:
    """Everything that `make_plan` takes."""

    target: ModelConfig
    draft: ModelConfig | None
    options: Options
    hardware: Hardware
    num_prompt_tokens: int
    max_tokens: int

    def plan(self) -> Plan:
        """Raises DoesNotFit."""
        return make_plan(
            self.target, self.draft, self.options, self.hardware,
            num_prompt_tokens=self.num_prompt_tokens, max_tokens=self.max_tokens,
        )  # fmt: skip

    def fits(self) -> bool:
        try:
            self.plan()
        except DoesNotFit:
            return False
        return True


def remedies(request: Request) -> list[str]:
    """The nearest changes of the machine or the request under which it fits, as a user would say them."""
    return list(_remedies(request))


def _remedies(request: Request) -> Iterator[str]:
    hardware = request.hardware
    if not hardware.is_cpu:
        for count in (2, 4, 8):
            if count > hardware.num_devices and _on(request, num_devices=count).fits():
                yield f"{count} such GPUs"
                break
        for size in _CARDS:
            if size * 1e9 > hardware.device_free_bytes and _on(request, device_free_bytes=int(size * 1e9)).fits():
                yield f"{'a GPU' if hardware.num_devices == 1 else 'GPUs'} of {size} GB"
                break
    free = -(-hardware.host_free_bytes // 10**9)
    if _on(request, host_free_bytes=_MOST_HOST * 10**9).fits():
        spared = largest(lambda less: _on(request, host_free_bytes=(_MOST_HOST - less) * 10**9).fits(), _MOST_HOST)
        least = _MOST_HOST - spared
        if least > free:
            yield f"{least} GB of free host memory"


def _on(request: Request, **changes: Any) -> Request:
    return replace(request, hardware=replace(request.hardware, **changes))
