"""A planning request: models, options and the state of the machine, to be planned for any number of tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from offload.config.model import ModelConfig
from offload.config.reading import draft_config, read_config
from offload.interrupts import poll
from offload.machine import machine_name
from offload.plan.batching import plan_together
from offload.plan.options import DTYPE_BYTES, Options
from offload.plan.plan_file import plan_again
from offload.plan.planner import Plan, has_room, largest_context, make_plan
from offload.plan.shards import check_divides
from offload.plan.sizing import Sizing
from offload.speed.cpu_pass import runs_experts
from offload.speed.curve_file import load_curves
from offload.speed.curves import Curves
from offload.speed.hardware import Hardware, probe, rates_key
from offload.speed.rates import disk_of, load_disk_rate


@dataclass(frozen=True)
class Request:
    """The models, options and machine to plan for. hardware: as probed before anything was loaded, so that later plans
    of one engine count nothing twice. curves: the measured ones of this CPU. given: a plan to use instead of a new
    one. Raises UsageError if the devices cannot share the target."""

    target: ModelConfig
    draft: ModelConfig | None
    options: Options
    hardware: Hardware
    curves: Curves | None = None
    given: Plan | None = None

    def __post_init__(self) -> None:
        check_divides(self.target, self.hardware.num_devices)

    @classmethod
    def on_this_machine(cls, model: Path, draft: Path | None, options: Options) -> Request:
        """A request on this machine as it is now. Raises ModelError, UsageError."""
        return cls.of(model, draft, options, probe(options.device, options.gpus))

    @classmethod
    def of(cls, model: Path, draft: Path | None, options: Options, hardware: Hardware) -> Request:
        """A request on `hardware`, with the stored curves and rate of the disk. Raises ModelError, UsageError."""
        used = draft if options.speculation else None
        configs = read_config(model), None if used is None else draft_config(used, model)
        known = hardware.with_disk(load_disk_rate(machine_name(), disk_of(model)))
        return cls(*configs, options, known).with_known_curves()

    def with_known_curves(self) -> Request:
        """The request with the stored curves of this CPU for its dtype, if the CPU runs some of its model."""
        if not (self.hardware.is_cpu or runs_experts(self.target, self.hardware)):
            return self
        return replace(self, curves=load_curves(machine_name(), rates_key("cpu"), self.dtype))

    @property
    def dtype(self) -> str:
        """The dtype, chosen for "auto": bf16, fp16 or fp32."""
        options, hardware = self.options, self.hardware
        if options.dtype != "auto":
            return options.dtype
        if hardware.is_cpu:  # fp16 products are far slower than both on CPUs
            return "bf16" if hardware.fast_bf16 and self.target.dtype != "float32" else "fp32"
        name = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}[self.target.dtype]
        return "fp16" if name == "bf16" and not hardware.fast_bf16 else name

    @property
    def may_read_experts(self) -> bool:
        """Whether the model's experts may have no room in memory, so that some are read from its file."""
        target, hardware, cap = self.target, self.hardware, self.options.host_memory
        room = hardware.host_free_bytes if cap is None else min(hardware.host_free_bytes, int(cap * 1e9))
        return target.experts is not None and target.weight_bytes(DTYPE_BYTES[self.dtype]) > room * hardware.num_hosts

    @property
    def context(self) -> int:
        """The context in tokens: the user's, or the model's limit."""
        return self.options.context or self.target.context_limit

    def plan(self, *, num_prompt_tokens: int, max_tokens: int) -> Plan:
        """The plan for these tokens. Raises DoesNotFit, UsageError, and ModelError if a given plan is for other
        models."""
        poll()
        if self.given is not None:
            return plan_again(self.given, self._sizing, num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens)
        return make_plan(self._sizing, num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens)

    def fits(self, *, num_prompt_tokens: int, max_tokens: int) -> bool:
        """Whether there is memory for the request, as `plan` would decide, but faster. Raises the same errors."""
        return has_room(self._sizing, num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens)

    def together(self, plan: Plan, num_sequences: int | None, *, most: int) -> Plan:
        """`plan`, which this request gave, for several sequences at a time: see `plan_together`."""
        return plan_together(plan, self._sizing, num_sequences, most=most)

    def largest_context(self) -> int:
        """The largest part of `context`, in tokens, that fits in memory; 0 if none fits."""
        return largest_context(self._sizing, self.context)

    def longest_context(self) -> int:
        """The longest context in tokens that fits in memory, up to the model's limit, regardless of the user's
        context."""
        return largest_context(self._sizing, self.target.context_limit)

    @property
    def _sizing(self) -> Sizing:
        return Sizing(self.target, self.draft, self.options, self.hardware, self.dtype, measured=self.curves)
