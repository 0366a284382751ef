"""The planner: a request is planned once, by arithmetic alone, into a frozen `Plan`, and the engine is built only from
it.

Planning is deterministic: the same request with the same rates gives the same plan, and so the same seed gives the same
text. Nothing is measured here: curves are measured before the first plan.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from offload.config.model import ModelConfig
from offload.errors import DoesNotFit, UsageError
from offload.fields import fields_of, record, shown, versioned
from offload.plan.bits import ALL_WINDOWS, check_quantised, chooses
from offload.plan.choice import choose, choose_cpu_experts, least_shortage
from offload.plan.composition import Composition
from offload.plan.cost import Cost, Prediction, predict
from offload.plan.drafts import check_draft, check_keys_are_there
from offload.plan.model_key import key_of
from offload.plan.options import Options
from offload.plan.placement import Placement, largest
from offload.plan.sizing import Sizing
from offload.speed.cpu_pass import runs_experts

__all__ = ["Options", "Plan", "PlannedRequest", "capacity_of", "check_link", "has_room", "largest_context", "make_plan"]

VERSION = 1  # of a plan's JSON: changes when the same plan and seed would give another text
_PINNED_IN_WSL = 10**9  # bytes of host memory that CUDA can often pin in WSL 2
# Fields of removed mechanisms in older plans: 0, false or null if unused.
_GONE = {
    "request": ("turns",),
    "placement": ("host_tiles", "attended_bytes", "host_bytes_per_second"),
    "predicted": ("full_host_bytes",),
}


@dataclass(frozen=True, kw_only=True)
class PlannedRequest:
    """A request as it is planned: the device and dtype chosen for "auto", and the tokens that fit in the context.

    target, draft: the models by `key_of`, with the dtype and whether kernels are requested. device: "cpu" or "cuda:N",
    the first of `num_devices`. device_name: the product name. dtype: bf16, fp16 or fp32. num_sequences: sequences that
    run at a time, each with caches of `capacity` tokens.
    """

    target: str
    draft: str | None
    device: str
    device_name: str
    num_devices: int
    dtype: str
    num_prompt_tokens: int
    max_tokens: int
    num_sequences: int = 1

    @property
    def capacity(self) -> int:
        """The size of a sequence's caches in tokens."""
        return self.num_prompt_tokens + self.max_tokens


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of one request: all decisions, and their predicted seconds. notes: notes for the user."""

    request: PlannedRequest
    composition: Composition
    placement: Placement
    predicted: Prediction
    notes: tuple[str, ...] = ()

    @property
    def predicted_seconds(self) -> float:
        """The predicted seconds of the whole request."""
        return self.predicted.first_token_seconds + self.request.max_tokens * self.predicted.seconds_per_token

    def as_dict(self) -> dict[str, Any]:
        """The plan as JSON values, with the version of the format, and with the derived `capacity` and `levels`."""
        parts = {"version": VERSION} | asdict(self)
        parts["request"]["capacity"] = self.request.capacity
        parts["composition"]["levels"] = self.composition.levels
        return parts

    @classmethod
    def from_dict(cls, data: object) -> Plan:
        """The plan from a result of `as_dict`, also after a round trip through JSON: identical to the last bit. Raises
        ValueError, which names the key that is unknown, missing or wrong."""
        parts = versioned(data, VERSION, "plan")
        for part in _GONE.keys() & parts.keys():
            parts[part] = _without_zeros(parts[part], _GONE[part], f"plan.{part}")
        derived = {place: _taken(parts, *place) for place in (("request", "capacity"), ("composition", "levels"))}
        plan = record(cls, parts, "plan")
        for (part, key), value in derived.items():
            if (follows := getattr(getattr(plan, part), key)) != (tuple(value) if isinstance(value, list) else value):
                raise ValueError(f"plan.{part}.{key} is {shown(value)}; from the rest follows {follows}")
        return plan


def _without_zeros(part: object, names: Collection[str], place: str) -> object:
    """The part of a plan without the optional keys `names`, which must be 0, false or null. Raises ValueError."""
    if not isinstance(part, dict):
        return part
    for name in names:
        if value := part.get(name):
            raise ValueError(f"{place}.{name} is {reprlib.repr(value)}; this version does not do that: plan again")
    return {name: value for name, value in part.items() if name not in names}


def _taken(parts: dict[str, object], part: str, key: str) -> object:
    """Remove a derived value from a part and return it. Raises ValueError."""
    whole = fields_of(parts, "plan").inner(part)
    value = whole.present(key)
    parts[part] = {name: each for name, each in whole.data.items() if name != key}
    return value


def make_plan(sizing: Sizing, *, num_prompt_tokens: int, max_tokens: int) -> Plan:
    """Plan a request. Raises UsageError, and, if the context or the memory is too small, DoesNotFit, which names the
    sizes that would fit."""
    target, draft, options, hardware = sizing.target, sizing.draft, sizing.options, sizing.hardware
    notes = [f"the text of a {target.wrapper} model: it sees no pictures here"] if target.wrapper else []
    if table := target.layer_table_bytes(sizing.itemsize):
        notes.append(
            f"a table of {table / 1e9:.3g} GB is read by rows from the model's file, and takes no memory of its own"
        )
    notes += target.quantisation.remarks if target.quantisation else []
    capacity = capacity_of(sizing, num_prompt_tokens, max_tokens, notes)
    _check_memory(sizing, capacity, num_prompt_tokens)
    cpu_experts = choose_cpu_experts(sizing, capacity)
    cost, best = choose(sizing, capacity, cpu_experts)
    plain, _ = choose(_without_speculation(sizing), capacity, cpu_experts)
    check_link(options, cost.placement)
    check_keys_are_there(sizing, cost.composition, cost.placement)
    return Plan(
        request=PlannedRequest(
            target=key_of(target, sizing.dtype),
            draft=None if draft is None else key_of(draft, sizing.dtype),
            device=hardware.device,
            device_name=hardware.device_name,
            num_devices=hardware.num_devices,
            dtype=sizing.dtype,
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=capacity - num_prompt_tokens,
        ),
        composition=cost.composition,
        placement=cost.placement,
        predicted=predict(cost, best, plain, num_prompt_tokens),
        notes=(*notes, *_unused(options, cost), *_reading(cost), *_advice(cost)),
    )


def has_room(sizing: Sizing, *, num_prompt_tokens: int, max_tokens: int) -> bool:
    """Whether there is memory for a request, without the other decisions of `make_plan`. Raises the same errors."""
    return least_shortage(sizing, capacity_of(sizing, num_prompt_tokens, max_tokens, [])) is None


def largest_context(sizing: Sizing, limit: int) -> int:
    """The largest context in tokens, up to `limit`, that fits in memory with the models; 0 if none fits."""
    return largest(lambda tokens: least_shortage(sizing, tokens) is None, limit)


def capacity_of(sizing: Sizing, num_prompt_tokens: int, max_tokens: int, notes: list[str]) -> int:
    """The capacity in tokens of a request, whose options are checked. notes: receives notes for the user. Raises
    UsageError, DoesNotFit."""
    capacity = _fit_context(sizing.target, sizing.options, num_prompt_tokens, max_tokens, notes)
    check_quantised(sizing)
    check_draft(sizing)
    _check_windows(sizing)
    _check_cpu_experts(sizing)
    if sizing.options.link_gbps is not None and not sizing.hardware.is_cpu:
        raise UsageError(f"link-gbps paces the link of a CPU; on {sizing.hardware.device} the link is the GPU's own")
    return capacity


def check_link(options: Options, placement: Placement) -> None:
    """Raise UsageError if a link is paced and nothing crosses it."""
    if options.link_gbps is not None and not placement.offload:
        raise UsageError("link-gbps paces a link and nothing is offloaded; add --offload weights,kv")


def _check_windows(sizing: Sizing) -> None:
    """Raise UsageError for options that a model without a growing cache, or with an indexer, does not support."""
    if (indexer := sizing.target.indexer) is not None and sizing.options.budget is not None:
        raise UsageError(f"budget is {sizing.options.budget}: {chooses(indexer)}; leave out --budget")
    if sizing.num_growing:
        return
    if sizing.options.budget is not None:
        raise UsageError(f"budget is {sizing.options.budget}: {ALL_WINDOWS}; leave out --budget")
    if "kv" in (sizing.options.offload or ()):
        raise UsageError(f"offload names kv: {ALL_WINDOWS}; try --offload weights")


def _check_cpu_experts(sizing: Sizing) -> None:
    """Raise UsageError where the CPU is to run experts and cannot, or where there are none."""
    asked, target = sizing.options.cpu_experts, sizing.target
    if asked and target.experts is None:
        raise UsageError(f"cpu-experts is {asked} and the model has no experts; leave out --cpu-experts")
    if asked and not runs_experts(target, sizing.hardware):
        raise UsageError(f"cpu-experts is {asked} and this CPU has no kernels for them; triforce doctor says why")


def _without_speculation(sizing: Sizing) -> Sizing:
    return replace(sizing, options=replace(sizing.options, speculation=False))


def _unused(options: Options, cost: Cost) -> list[str]:
    """The user's options that have no effect in this plan."""
    composition = cost.composition
    weight_bits, kv_bits = (None if bits == 16 else bits for bits in (options.weight_bits, options.kv_bits))
    used = cost.placement.cpu_experts
    pairs = (
        (
            "cpu-experts",
            options.cpu_experts,
            used,
            "no experts are on the host; --offload weights would leave them there",
        ),
        ("gamma", options.gamma, composition.gamma, "nothing is drafted"),
        ("draft-gamma", options.draft_gamma, composition.draft_gamma, "nothing is drafted for a retrieval level"),
        ("budget", options.budget, composition.budget, "there is no retrieval level"),
        ("weight-bits", weight_bits, composition.weight_bits < 16, "the target does not propose to itself"),
        ("kv-bits", kv_bits, composition.kv_bits < 16, "the target does not propose to itself"),
        ("chunk", options.chunk, composition.budget, "there is no retrieval level"),
    )
    return [f"--{name} {given} is not used: {why}" for name, given, used, why in pairs if given and not used]


def _reading(cost: Cost) -> Iterator[str]:
    """A note on experts that are read from the model's file."""
    sizing, places = cost.sizing, cost.placement.expert_places
    if not places:
        return
    hardware, read = sizing.hardware, cost.read_bytes(1)
    origin = "measured" if hardware.disk_measured else "assumed"
    yield (
        f"{places} of {sizing.num_experts} experts of each layer have room in memory, the others are read from the "
        f"model's file when a token wants them: about {read / 1e6:,.0f} MB a token, "
        f"{1e3 * read / hardware.disk_read:,.0f} ms at {hardware.disk_read / 1e9:.2g} GB/s ({origin}); more memory, or "
        "a model that fits, is faster"
    )


def _advice(cost: Cost) -> Iterator[str]:
    """Notes on changes that would make this plan faster."""
    target, resident = cost.sizing.target, cost.placement.resident_layers
    if cost.sizing.hardware.is_cpu:
        return
    if resident < target.num_layers:
        composition = cost.composition
        passes = "full pass" if composition.weight_bits < 16 else "pass"
        if composition.inner is not None and composition.weight_bits == 16:
            passes += ", those of the retrieval level too"
        yield (
            f"{target.num_layers - resident} of {target.num_layers} layers do not fit the device: "
            f"{cost.streamed_weights / 1e9:.1f} GB cross the link in every {passes}"
        )
    pinned = cost.placement.total_host_bytes
    if cost.sizing.hardware.in_wsl and pinned > _PINNED_IN_WSL:
        yield (
            f"{pinned / 1e9:.1f} GB of host memory are pinned, and in WSL 2 CUDA often refuses more than "
            f"{_PINNED_IN_WSL / 1e9:.0f} GB: if it does, plan for the GPU alone (a smaller model, --context or "
            "--kv-bits 4), or use Linux itself"
        )


def _fit_context(
    target: ModelConfig, options: Options, num_prompt_tokens: int, max_tokens: int, notes: list[str]
) -> int:
    """The capacity in tokens: room for the prompt and the output within the context."""
    limit = target.context_limit
    context = options.context or limit
    if context > limit:
        raise DoesNotFit(
            f"context {context} is asked for and the model's limit is {limit} tokens; try --context {limit}"
        )
    if num_prompt_tokens == 0:
        raise UsageError("the prompt is empty; give at least one character")
    if num_prompt_tokens >= context:
        whose = "--context" if options.context else "the model's limit"
        raise DoesNotFit(
            f"the prompt has {num_prompt_tokens} tokens and {whose} is {context}; with --max-tokens {max_tokens} "
            f"at most {max(context - max_tokens, 1)} prompt tokens fit: shorten the prompt"
            + (f" or raise --context (up to {limit})" if options.context and options.context < limit else "")
        )
    room = context - num_prompt_tokens
    if max_tokens > room:
        notes.append(f"--max-tokens {max_tokens} cut to {room}: the context of {context} tokens ends there")
    return num_prompt_tokens + min(max_tokens, room)


def _check_memory(sizing: Sizing, capacity: int, num_prompt_tokens: int) -> None:
    """Raise DoesNotFit, with the largest context that would fit, if device or host memory is too small."""
    if (short := least_shortage(sizing, capacity)) is None:
        return
    fits = largest(lambda tokens: least_shortage(sizing, tokens) is None, capacity)
    needs, remedy = "the model", "no context fits; take a smaller one, 'triforce start' lists some"
    if fits:
        needs = f"a context of {capacity} tokens ({num_prompt_tokens} of prompt)"
        remedy = f"the largest context that fits is {fits} tokens"
    if not sizing.hardware.is_cpu and sizing.options.offload not in (None, {"weights", "kv"}):
        remedy += "; --offload auto moves to the host what has no room on the device"
    raise DoesNotFit(f"{needs} needs {short}; {remedy}")
