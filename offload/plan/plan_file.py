"""A plan that the user gives: every decision that affects the text of a seed is kept, and only the placement of weights
and caches is planned anew for this machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from offload.config.model import ModelConfig
from offload.errors import DoesNotFit, ModelError, UsageError
from offload.plan.cost import Cost
from offload.plan.model_key import key_of
from offload.plan.options import Options
from offload.plan.placement import Placement, place, shortage
from offload.plan.planner import Plan, capacity_of, check_link
from offload.plan.sizing import Sizing

_ROUNDING = ("page_tokens", "tile_tokens", "window_pages", "rows", "prefill_block", "fused_prefill")  # of a placement
_SPELT = {"lookup": "no-lookup", "speculation": "no-speculation", "masses": "cite"}  # on the command line


def read_plan(document: object) -> Plan:
    """The plan in `document`, or in its key "plan", as `--json` prints it. Raises ValueError."""
    data = document.get("plan", document) if isinstance(document, dict) else document
    plan = Plan.from_dict(data)
    composition, request = plan.composition, plan.request
    if request.num_sequences != 1:
        raise ValueError(f"plan.request.num_sequences is {request.num_sequences}; it must be a plan for one sequence")
    if request.num_prompt_tokens < 1 or request.max_tokens < 1:
        raise ValueError(f"plan.request.capacity is {request.capacity}; it must be of a prompt and new tokens")
    _pinning(plan, Options())  # checks sizes
    most = max(request.capacity, composition.chunk)
    if composition.budget % composition.chunk or composition.budget > most:
        raise ValueError(f"plan.composition.budget is {composition.budget}; it must be whole chunks, up to {most}")
    if plan.predicted.full_pass_seconds <= 0.0:
        raise ValueError(f"plan.predicted.full_pass_seconds is {plan.predicted.full_pass_seconds}; it must be above 0")
    return plan


def options_beside(plan: Plan, options: Options) -> Options:
    """The options to place `plan` with: the user's, on the kind of device and in the dtype of the plan. Raises
    UsageError for an option that contradicts the plan."""
    request, plain = plan.request, Options()
    for name, decided in _decided(plan).items():
        given = getattr(options, name)
        if given not in (getattr(plain, name), decided):
            option = f"--{_SPELT.get(name, name.replace('_', '-'))}"
            value = "" if isinstance(given, bool) else f" {given}"
            raise UsageError(f"{option}{value} is not what the plan of --plan has; leave out {option} or --plan")
    device = request.device.partition(":")[0]
    if not options.device.startswith((device, "auto")):
        raise UsageError(f"--device is {options.device} and the plan of --plan is for {device}; leave out one of them")
    return replace(
        options,
        device=device if options.device == "auto" else options.device,
        gpus=request.num_devices,
        dtype=request.dtype,
    )


def plan_again(plan: Plan, sizing: Sizing, *, num_prompt_tokens: int, max_tokens: int) -> Plan:
    """`plan` for another request that fits into its capacity, placed on this machine. sizing: with options as from
    `options_beside`.

    Raises ModelError if the plan is for other models, UsageError if this machine would round differently, and
    DoesNotFit.
    """
    _check_models(plan, sizing.target, sizing.draft)
    capacity, composition = plan.request.capacity, plan.composition
    _check_room(capacity, num_prompt_tokens, max_tokens)
    before = capacity - max_tokens
    capacity_of(replace(sizing, options=_pinning(plan, sizing.options)), before, max_tokens, [])  # checks the options
    sizing = replace(sizing, options=replace(sizing.options, context=capacity))
    capacity_of(sizing, before, max_tokens, [])
    cost = Cost(sizing, place(sizing, capacity, composition, plan.placement.cpu_experts), capacity, composition)
    check_link(sizing.options, cost.placement)
    for problem in _problems(plan, cost):
        raise DoesNotFit(f"the plan of --plan {problem}; leave out --plan for one that suits this machine")
    _check_rounding(plan, cost.placement)
    request = replace(
        plan.request,
        device=sizing.hardware.device,
        device_name=sizing.hardware.device_name,
        num_prompt_tokens=before,
        max_tokens=max_tokens,
    )
    return replace(plan, request=request, placement=cost.placement, notes=())


def _decided(plan: Plan) -> dict[str, object]:
    """The options that reproduce the plan's levels, by field name."""
    composition, request = plan.composition, plan.request
    return {
        "context": request.capacity,
        "budget": composition.budget,
        "chunk": composition.chunk,
        "gamma": None if "target" in composition.adaptive else composition.gamma,
        "draft_gamma": None if composition.inner in composition.adaptive else composition.draft_gamma,
        "weight_bits": composition.weight_bits,
        "kv_bits": composition.kv_bits,
        "sinks": composition.sinks,
        "window": composition.window,
        "lookup": composition.lookup,
        "speculation": composition.gamma > 0,
        "masses": composition.mass_chunk is not None,
        "cpu_experts": plan.placement.cpu_experts,
        "dtype": request.dtype,
        "gpus": request.num_devices,
    }


def _pinning(plan: Plan, options: Options) -> Options:
    """`options` that ask for the plan's levels, so that they are checked like a user's options. Raises UsageError."""
    composition = plan.composition
    return replace(
        options,
        context=plan.request.capacity,
        budget=composition.budget or None,
        chunk=composition.chunk,
        gamma=composition.gamma,
        draft_gamma=composition.draft_gamma,
        weight_bits=composition.weight_bits,
        kv_bits=composition.kv_bits,
        sinks=composition.sinks,
        window=composition.window,
        dtype=plan.request.dtype,
    )


def _check_models(plan: Plan, target: ModelConfig, draft: ModelConfig | None) -> None:
    request = plan.request
    _check_model("model", request.target, key_of(target, request.dtype))
    if plan.composition.draft:
        if draft is None or request.draft is None:
            raise ModelError("the plan of --plan has a draft and there is none; name it with --draft")
        _check_model("draft", request.draft, key_of(draft, request.dtype))


def _check_model(role: str, planned: str, here: str) -> None:
    if planned != here:
        theirs, ours = (
            sorted(set(one.split()) - set(other.split())) for one, other in ((planned, here), (here, planned))
        )
        raise ModelError(
            f"the plan of --plan is for another {role} ({' '.join(theirs) or 'in another form'}; here "
            f"{' '.join(ours) or 'in another form'}); name that one with --{role}, or leave out --plan"
        )


def _check_room(capacity: int, num_prompt_tokens: int, max_tokens: int) -> None:
    if num_prompt_tokens + max_tokens > capacity:
        room = capacity - num_prompt_tokens
        remedy = f"try --max-tokens {room}" if room > 0 else "leave out --plan"
        raise DoesNotFit(
            f"the plan of --plan has room for {capacity} tokens; the prompt has {num_prompt_tokens} and --max-tokens "
            f"is {max_tokens}: {remedy}"
        )


def _problems(plan: Plan, cost: Cost) -> Iterator[str]:
    if (short := shortage(cost.sizing, cost.placement)) is not None:
        yield f"needs {short}"
    if plan.composition.inner == "self" and not plan.composition.keeps_copies and "kv" in cost.placement.offload:
        yield "proposes over the whole cache, which would cross a link here"


def _check_rounding(plan: Plan, here: Placement) -> None:
    """Raise UsageError if sums would be computed in another order than on the machine of the plan."""
    for name in _ROUNDING:
        planned, found = getattr(plan.placement, name), getattr(here, name)
        if planned != found:
            raise UsageError(
                f"plan.placement.{name} is {planned} and would be {found} here, where sums round in another way; leave "
                "out --plan"
            )
