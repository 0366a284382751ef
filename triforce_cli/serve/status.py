"""The status of the server as JSON. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from triforce_cli import __version__
from triforce_cli.render.plan import sentence
from triforce_cli.serve.requests import RATE_SECONDS, Course, Requests

if TYPE_CHECKING:
    from offload.plan.planner import Plan
    from triforce_cli.serve.store_use import StoreUse


def planned(plan: Plan, device: str) -> dict[str, Any]:
    """The part of the status that follows from the plan. device: its name."""
    placement, num_devices = plan.placement, plan.request.num_devices
    devices = [placement.device_bytes] + [placement.other_device_bytes] * (num_devices - 1)
    return {
        "plan": sentence(plan, device),
        "at_a_time": plan.request.num_sequences,
        "memory": {
            "devices": [{"name": device, **_memory(purposes)} for purposes in devices],
            "host": _memory(placement.host_bytes),
        },
    }


def document(
    fixed: Mapping[str, Any], requests: Requests, store: StoreUse | None, *, uptime: float, is_stopping: bool
) -> dict[str, Any]:
    """The status. fixed: the part of it that does not change. uptime: in seconds."""
    read, written = requests.rates()
    return {
        "status": "stopping" if is_stopping else "ok",
        "version": __version__,
        "uptime_seconds": round(uptime, 1),
        **fixed,
        "store": None if store is None else {"bytes": store.nbytes, "limit_bytes": store.limit},
        "running": [_request(requests, course) for course in requests.of("reading", "writing")],
        "waiting": [_request(requests, course) for course in requests.of("waiting")],
        "rates": {
            "seconds": RATE_SECONDS,
            "read_tokens_per_second": round(read, 2),
            "written_tokens_per_second": round(written, 2),
        },
        "drafts": {
            level: {"drafted": drafted, "accepted": accepted, "acceptance": round(accepted / drafted, 4)}
            for level, (drafted, accepted) in requests.drafts.items()
            if drafted
        },
        "expert_reads": vars(requests.disk) if requests.disk.reads else None,
        "expert_hit_rate": None if (rate := requests.experts.hit_rate) is None else round(rate, 4),
    }


def _memory(purposes: Mapping[str, int]) -> dict[str, Any]:
    return {"bytes": sum(purposes.values()), "by_purpose": {name: each for name, each in purposes.items() if each}}


def _request(requests: Requests, course: Course) -> dict[str, Any]:
    return {
        "id": course.job.name.rpartition(" ")[2],
        "api": course.api,
        "state": course.state,
        "prompt_tokens": course.num_prompt,
        "read_tokens": course.num_read,
        "cached_tokens": course.num_cached,
        "written_tokens": course.num_written,
        "seconds": round(requests.seconds(course), 2),
    }
