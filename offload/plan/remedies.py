"""Changes that would make a request fit: each is tried alone, by planning it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from offload.errors import DoesNotFit
from offload.plan.hardware import Hardware
from offload.plan.placement import largest
from offload.plan.request import Request

_CARDS = (16, 24, 32, 48, 80, 96, 141)  # GB that cards are sold with
_MOST_HOST = 2**14  # GB


def remedies(request: Request, *, num_prompt_tokens: int, max_tokens: int) -> list[str]:
    """The nearest changes of the machine under which so many tokens fit, as a user would say them."""

    def fits(**changes: Any) -> bool:
        changed = replace(request, hardware=replace(request.hardware, **changes))
        try:
            changed.plan(num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens)
        except DoesNotFit:
            return False
        return True

    return list(_remedies(request.hardware, fits))


def _remedies(hardware: Hardware, fits: Callable[..., bool]) -> Iterator[str]:
    if not hardware.is_cpu:
        for count in (2, 4, 8):
            if count > hardware.num_devices and fits(num_devices=count):
                yield f"{count} such GPUs"
                break
        for size in _CARDS:
            if size * 1e9 > hardware.device_free_bytes and fits(device_free_bytes=int(size * 1e9)):
                yield f"{'a GPU' if hardware.num_devices == 1 else 'GPUs'} of {size} GB"
                break
    free = -(-hardware.host_free_bytes // 10**9)
    if fits(host_free_bytes=_MOST_HOST * 10**9):
        spared = largest(lambda less: fits(host_free_bytes=(_MOST_HOST - less) * 10**9), _MOST_HOST)
        least = _MOST_HOST - spared
        if least > free:
            yield f"{least} GB of free host memory"
