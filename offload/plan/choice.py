"""The choice of a composition: all candidates are placed and priced, and the best one that fits is taken."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from offload.formats.layout import CODE_BITS
from offload.plan.bits import cache_problem, weights_problem
from offload.plan.composition import PLAIN, Composition, compositions, finer
from offload.plan.cost import Cost
from offload.plan.options import Options
from offload.plan.placement import place, shortage
from offload.plan.sizing import Sizing
from offload.speed.cpu_pass import runs_experts
from offload.speed.curves import in_bits

WORTH_TRYING = 1.1  # times the best prediction: texts and machines differ from the average
_WORTH_THE_CPU = 0.95  # times the seconds of a token whose experts the GPU runs
_CPU_STEPS = 12  # numbers of layers with experts that are weighed for the CPU
_CHEAPER_PASS = 0.85  # times a full pass: a retrieval level that costs more adds nothing to the draft and lookups


def choose(sizing: Sizing, capacity: int, cpu_experts: int) -> tuple[Cost, Cost]:
    """The cost of the planned composition, and that of the part of its levels that is predicted to be the fastest, such
    as the draft and the target alone. If no composition fits, both are the smallest one.

    A retrieval level is planned if it is predicted to be not much slower: draft and lookups propose to the target
    directly, too, and the proposer that suits a text is found during generation. An unused level costs only memory. On
    a GPU, where a budget displaces layers and tiles, more budgets near the planned one are weighed. cpu_experts: see
    `choose_cpu_experts`.
    """
    costs = list(_placed(sizing, capacity, _candidates(sizing, capacity), cpu_experts))
    fitting = _fitting(costs)
    if not fitting:
        return _smallest(costs), _smallest(costs)
    planned, part = _fastest(fitting)
    if sizing.hardware.is_cpu:
        return planned, part
    near = _placed(sizing, capacity, finer(planned.composition, sizing.options, capacity), cpu_experts)
    return _fastest([*fitting, *_fitting(near)])


def least_shortage(sizing: Sizing, capacity: int) -> str | None:
    """The memory that is short for `capacity` tokens with the smallest composition; None: some composition fits."""
    tried, cpu_experts = list[Cost](), _asked_of_cpu(sizing)
    for cost in _placed(sizing, capacity, _candidates(sizing, capacity), cpu_experts):
        if _fitting([cost]):
            return None
        tried.append(cost)
    return shortage(sizing, _smallest(tried).placement)


def _fastest(fitting: Sequence[Cost]) -> tuple[Cost, Cost]:
    """The costs that `choose` returns."""
    worthwhile = [cost for cost in fitting if cost.composition.inner is None or _proposes_cheaply(cost)] or fitting
    best = min(worthwhile, key=lambda cost: (cost.per_token, cost.composition.budget))
    retrieving = [cost for cost in fitting if _may_retrieve(cost, best)]
    if best.sizing.options.gamma is not None or not retrieving:
        return best, best
    planned = min(retrieving, key=lambda cost: cost.per_drafted_token)
    return planned, best if best.composition.inner is None else planned


def _candidates(sizing: Sizing, capacity: int) -> Iterator[Composition]:
    """The candidate compositions. Quantised weights and a quantised cache are among them if possible; on a CPU, only if
    they were measured."""
    is_cpu, curves = sizing.hardware.is_cpu, sizing.curves
    attends = curves.coded_cache if is_cpu else sizing.hardware.has_kernels  # attention to 4 bits is faster than to 16
    known = [bits for bits in CODE_BITS if in_bits(bits) in curves.weights or not is_cpu]
    asked = sizing.options.budget is not None and sizing.options.kv_bits is not None
    return compositions(
        sizing.options,
        capacity,
        with_draft=sizing.draft is not None,
        weight_bits=(16,) if weights_problem(sizing) else (16, *known),
        kv_bits=(16, 4) if attends and not cache_problem(sizing) else (16,),
        retrieves=sizing.num_growing > 0 and sizing.target.indexer is None,
        coded_chunks=asked or not is_cpu,  # a part of the cache saves device memory, which a CPU does not have
    )


def choose_cpu_experts(sizing: Sizing, capacity: int) -> int:
    """The number of layers whose experts the CPU may run: the user's; all, where it shares each layer's with the GPU;
    or that with which a token is predicted to take the least time, plain or as the target proposes to itself where the
    CPU runs none.

    Where they are not shared, the CPU rounds in another order than a GPU, and a seed is to give the same text with
    every way to speculate. So the number depends on the model, the memory and the machine, not on drafts and the
    options of levels.
    """
    hardware, every = sizing.hardware, sizing.target.num_expert_layers
    if sizing.options.cpu_experts is not None or hardware.is_cpu or not runs_experts(sizing.target, hardware):
        return _asked_of_cpu(sizing)
    if sizing.shares_experts:
        return every
    own = replace(sizing, draft=None, options=_without_levels(sizing.options))
    found = list(_placed(own, capacity, _candidates(own, capacity), 0))
    if not any(cost.placement.expert_slots for cost in found):
        return 0
    best = min(_fitting(found) or found, key=lambda cost: cost.per_token).composition

    def seconds(number: int) -> float:
        return min(cost.per_token for cost in _placed(own, capacity, (PLAIN, best), number))

    number = min(sorted({every * step // _CPU_STEPS for step in range(_CPU_STEPS + 1)}), key=seconds)
    return number if seconds(number) < _WORTH_THE_CPU * seconds(0) else 0


def _asked_of_cpu(sizing: Sizing) -> int:
    return min(sizing.options.cpu_experts or 0, sizing.target.num_expert_layers)


def _without_levels(options: Options) -> Options:
    """The options of places alone."""
    kept = ("context", "device", "gpus", "dtype", "offload", "device_memory", "host_memory", "link_gbps", "link_bits")
    return Options(**{name: getattr(options, name) for name in kept})


def _placed(sizing: Sizing, capacity: int, found: Iterable[Composition], cpu_experts: int) -> Iterator[Cost]:
    """Compositions in their placements, priced lazily. Proposing over the whole exact cache is left out if that cache
    would cross a link."""
    costs = (Cost(sizing, place(sizing, capacity, each, cpu_experts), capacity, each) for each in found)
    return (cost for cost in costs if not (_proposes_over_the_cache(cost) and "kv" in cost.placement.offload))


def _proposes_over_the_cache(cost: Cost) -> bool:
    return cost.composition.inner == "self" and not cost.composition.keeps_copies


def _fitting(costs: Iterable[Cost]) -> list[Cost]:
    return [cost for cost in costs if shortage(cost.sizing, cost.placement) is None]


def _smallest(costs: Iterable[Cost]) -> Cost:
    return min(costs, key=lambda cost: cost.placement.total_device_bytes + cost.placement.total_host_bytes)


def _may_retrieve(cost: Cost, best: Cost) -> bool:
    """Whether the retrieval level of `cost` may be planned although `best` is predicted to be the fastest."""
    if cost.composition.inner is None or cost.composition.draft < best.composition.draft:
        return False
    return _proposes_cheaply(cost) and min(cost.per_token, cost.per_drafted_token) <= WORTH_TRYING * best.per_token


def _proposes_cheaply(cost: Cost) -> bool:
    rows = cost.sizing.rows
    return cost.retrieval_pass(rows) <= _CHEAPER_PASS * cost.full_pass(rows)
