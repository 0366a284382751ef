"""Checks that a device computes correctly, which only the machine itself can show; run by `triforce doctor`.

Attention and products run at the shapes of well-known models, in the way that the engine would choose, and are compared
with fp64, with rows taken one at a time, and with a cache whose tiles cross the link. Inputs are random, with a fixed
seed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

from offload.bench.findings import REPORT, TOLERANCES, Named, Shown, error_of
from offload.bench.fixed_checks import fixed_checks
from offload.bench.kernel_checks import kernel_checks
from offload.bench.state_checks import state_checks
from offload.bench.text_checks import text_checks
from offload.config.model import ModelConfig
from offload.errors import TriforceError
from offload.kernels.attention import fold, unfold
from offload.kernels.choice import fitting
from offload.kernels.cpu import CpuKernels
from offload.kernels.products import Step, Steps, room_to_widen
from offload.model.loading import DTYPES
from offload.plan.options import PAGE_TOKENS
from offload.plan.planner import Options, Plan
from offload.plan.request import Request
from offload.plan.what_if import LLAMA2_13B, LLAMA31_8B
from offload.speed.hardware import Hardware
from offload.transfer.link import make_link
from offload.transfer.memory import Memory
from offload.weights.homes import HomeMaker
from offload.weights.layout import LayerLayout
from offload.worker.assemble import block_rows, full_cache, scorings_of

MODELS = {"Llama-2-13B": LLAMA2_13B, "Llama-3.1-8B": LLAMA31_8B}
# A GPU's kernels take heads past 256 numbers in parts.
WIDE = {"heads of 512": LLAMA31_8B.changed(num_heads=16, num_kv_heads=2, head_dim=512)}
NUM_TOKENS, NUM_ROWS = 3 * PAGE_TOKENS + 100, 16  # prefilled tokens, and rows decoded after them
COMPARED = 64  # last rows of the prefill
NARROW = 1024  # feed-forward rows of a layer with packed weights: few, as that is enough
COPY_BYTES = 64 * 2**20
COPY_ROUNDS = 4
PURPOSE = "checking"
OTHER_PATH = "TRIFORCE_KERNELS=off runs torch's operators in place of the kernels"


@dataclass(frozen=True)
class Check:
    """One comparison on `device`. found: its numbers in words. problem: the remedy; "" if the check passed."""

    device: str
    name: str
    found: str
    problem: str
    seconds: float

    @property
    def passed(self) -> bool:
        return not self.problem


def check_device(hardware: Hardware, target: Path, draft: Path | None, on_step: Callable[[str], None]) -> list[Check]:
    """All checks of one device; they take some seconds. A check that cannot run fails with the error's text. target,
    draft: small models that generate a text. on_step: called with the name of the next check."""
    found = []
    for name, run, remedy in [*_checks(hardware), *text_checks(hardware, target, draft)]:
        on_step(f"checking {hardware.device}: {name}")
        start = time.perf_counter()
        try:
            passed, shown = run()
        except (RuntimeError, TriforceError) as error:
            passed, shown = False, (str(error).splitlines() or [type(error).__name__])[0]
        found.append(Check(hardware.device, name, shown, "" if passed else remedy, time.perf_counter() - start))
    return found


def _checks(hardware: Hardware) -> Iterator[Named]:
    broken = f"{OTHER_PATH}; {REPORT}"
    yield "copies", partial(_copies, hardware), "the memory, the GPU or its slot changes bytes: test them"
    for model, config in (MODELS if hardware.is_cpu else MODELS | WIDE).items():
        for dtype in _dtypes(hardware):
            trial = Trial(config.changed(num_layers=1), hardware, dtype)
            of = f"{model}, {dtype}"
            yield f"attention, {of}", trial.attention, broken
            yield f"rows of attention, {of}", trial.rows, broken
            yield f"streamed tiles, {of}", trial.streamed, f"text may change with --offload kv; {REPORT}"
            if trial.packs:
                yield f"packed tiles, {of}", trial.packed, f"add --link-bits 16; {REPORT}"
                yield f"packed weights, {of}", trial.packed_weights, f"add --link-bits 16; {REPORT}"
            yield f"products, {of}", trial.products, broken
    yield from kernel_checks(hardware, _dtypes(hardware), broken)
    yield from fixed_checks(hardware, _dtypes(hardware), broken)
    yield from state_checks(hardware, _dtypes(hardware), broken)


def _dtypes(hardware: Hardware) -> list[str]:
    """The dtypes to check: the device's fast ones and fp32, and fp16 on a GPU."""
    half = ["bf16"] if hardware.fast_bf16 else []
    return [*half, *([] if hardware.is_cpu else ["fp16"]), "fp32"]


@dataclass(frozen=True)
class Rows:
    """Random attention inputs: q [n, H, D], k and v [n, H_kv, D], not rotated, on the CPU."""

    q: Tensor
    k: Tensor
    v: Tensor

    def part(self, start: int, stop: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Rows `start` to `stop`, on `device`."""
        q, k, v = (tensor[start:stop].to(device).contiguous() for tensor in (self.q, self.k, self.v))
        return q, k, v


@dataclass(frozen=True)
class Trial:
    """The trial of one layer of a model on one device in one dtype. config: of one layer."""

    config: ModelConfig
    hardware: Hardware
    dtype: str

    def attention(self) -> Shown:
        """Compare the last rows of a prefill, and rows of a pass, with fp64."""
        prefill, decode = self._run(self._plan(""))
        exact = self._exact
        errors = [error_of(prefill, exact[:COMPARED]), error_of(decode, exact[COMPARED:])]
        shown = f"errors of {errors[0]:.1e} in prefill and {errors[1]:.1e} in decoding"
        return max(errors) <= TOLERANCES[self.dtype], f"{shown}, at most {TOLERANCES[self.dtype]:.0e}"

    def rows(self) -> Shown:
        """Check that a row has the same bits alone and among others."""
        plan = self._plan("")
        _, together = self._run(plan)
        _, alone = self._run(plan, apart=True)
        return _same(together, alone, f"of {NUM_ROWS} rows together and one at a time")

    def streamed(self) -> Shown:
        """Check that results have the same bits whether tiles cross the link or not."""
        runs = [self._run(self._plan(offload)) for offload in ("", "kv")]
        here, away = (torch.cat(run) for run in runs)
        return _same(here, away, "of tiles on the device and streamed")

    @property
    def packs(self) -> bool:
        """Whether pages of this dtype may cross a link packed."""
        device = torch.device(self.hardware.device)
        unpacks = self.hardware.is_cpu or fitting(device, self.config.head_dim, ()).usable
        return self.dtype == "bf16" and self.hardware.packs and unpacks

    def packed(self) -> Shown:
        """Check that results have the same bits if tiles cross the link packed."""
        here, away = (torch.cat(self._run(plan)) for plan in (self._plan(""), self._plan("kv", link_bits=12)))
        return _same(here, away, "of tiles on the device and streamed in 12 bits")

    def packed_weights(self) -> Shown:
        """Check that a layer's weights have the same bits if they cross the link packed, or as residuals of codes in 4
        or 6 bits."""
        config = self.config.changed(intermediate_size=NARROW)
        layout, same = LayerLayout.of(config, DTYPES[self.dtype]), True
        exact = torch.zeros(layout.num_bytes, dtype=torch.uint8)
        for view in layout.views.values():
            view.of(exact).normal_(generator=torch.Generator().manual_seed(view.offset))
        for bits in (12, 9, 8):
            home = HomeMaker(Memory(self._device), bits).make(exact.clone(), layout, config)
            layer = torch.zeros_like(exact, device=self._device)
            home.open(home.content.to(self._device), layer)
            same &= torch.equal(layer.cpu(), exact)
        shown = "the same bits" if same else "OTHER BITS"
        return same, f"{shown} of weights as they are, packed and beside codes"

    def products(self) -> Shown:
        """Compare each of a layer's products with fp64, and check that a row has the same bits alone and among
        others."""
        errors, same = [], True
        for outputs, inputs, _ in self.config.products.values():
            generator = torch.Generator().manual_seed(outputs + inputs)
            x = torch.randn(NUM_ROWS, inputs, generator=generator).to(DTYPES[self.dtype])
            weight = (torch.randn(min(outputs, 2048), inputs, generator=generator) / inputs**0.5).to(x.dtype)
            together = self._product(x, weight)
            errors.append(error_of(together, x.double() @ weight.double().T))
            same &= torch.equal(together, torch.cat([self._product(row[None], weight) for row in x]))
        shown = f"errors of up to {max(errors):.1e}, at most {TOLERANCES[self.dtype]:.0e}"
        bits = "the same bits" if same else "OTHER BITS"
        return same and max(errors) <= TOLERANCES[self.dtype], f"{shown}; {bits} of rows together and one at a time"

    def _run(self, plan: Plan, *, apart: bool = False) -> tuple[Tensor, Tensor]:
        """Attention by the engine's cache -> (the last COMPARED rows of the prefill, the decoded rows), [n, H * D] on
        the CPU. apart: each decoded row in a pass of its own."""
        device, block = self._device, block_rows(plan, self.config)
        link = make_link(device) if plan.placement.offload else None
        with closing(link) if link is not None else nullcontext():
            cache = full_cache(plan, self.config, Memory(device), link)
            prefilled = []
            cache.begin("prefill", NUM_TOKENS)
            for start in range(0, NUM_TOKENS, plan.placement.prefill_block):
                stop = min(start + plan.placement.prefill_block, NUM_TOKENS)
                prefilled.append(cache.attend(0, *self._rows.part(start, stop, device)).cpu())
            cache.advance(NUM_TOKENS)
            decode = []
            count = 1 if apart else NUM_ROWS
            for at in range(NUM_TOKENS, LENGTH, count):
                padded = count + -count % block
                cache.begin("decode", padded)
                decode.append(cache.attend(0, *self._rows.part(at, at + padded, device))[:count].cpu())
                cache.advance(count)
            cache.wait_home()
            cache.release()
        return torch.cat(prefilled)[-COMPARED:], torch.cat(decode)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        """The product x [n, inputs] @ weight^T as a pass computes it, [n, outputs] on the CPU."""
        kernels = fitting(self._device, self.config.head_dim, [*self.config.products.values()])
        if isinstance(kernels, CpuKernels):
            out = torch.empty(len(x), len(weight), dtype=x.dtype)
            Steps(kernels, [Step(x, weight, None, out)], room_to_widen(*x.shape)).run(len(x))
            return out
        padding = -len(x) % block_rows(self._plan(""), self.config)
        padded = torch.cat([x, x.new_zeros(padding, x.shape[1])])
        return linear(padded.to(self._device), weight.to(self._device))[: len(x)].cpu()

    @cached_property
    def _rows(self) -> Rows:
        """The random inputs, with further rows at the end for the padding of a block."""
        generator, config = torch.Generator().manual_seed(0), self.config
        sizes = [(LENGTH + PADDING, heads, config.head_dim) for heads in (config.num_heads, *[config.num_kv_heads] * 2)]
        q, k, v = (torch.randn(size, generator=generator).to(DTYPES[self.dtype]) for size in sizes)
        return Rows(2 * q, k, v)

    @cached_property
    def _exact(self) -> Tensor:
        """The compared rows of the prefill and the decoded rows, in fp64: [n, H * D]."""
        scoring, first = scorings_of(self._plan(""), self.config)[0], NUM_TOKENS - COMPARED
        q, k = scoring.rope.to("cpu").rotated(self._rows.q[:LENGTH], self._rows.k[:LENGTH], 0)
        q = q[first:]
        folded = fold(q, self.config.num_kv_heads).double()
        scores = folded @ k.permute(1, 2, 0).double() * self.config.block.attention.score_scale
        group = self.config.num_heads // self.config.num_kv_heads
        last = torch.arange(first, LENGTH).repeat(group)
        scores.masked_fill_(torch.arange(LENGTH) > last[:, None], -torch.inf)
        values = k if scoring.joined else self._rows.v[:LENGTH]
        return unfold(scores.softmax(-1) @ values.transpose(0, 1).double(), LENGTH - first)

    @property
    def _device(self) -> torch.device:
        return torch.device(self.hardware.device)

    def _plan(self, offload: str, *, link_bits: int = 16) -> Plan:
        """The plan of one layer whose cache has several tiles, none of them on the device if it is offloaded."""
        options = Options(device=self.hardware.device, dtype=self.dtype, speculation=False)
        plan = Request(self.config, None, options, self.hardware).plan(
            num_prompt_tokens=NUM_TOKENS, max_tokens=NUM_ROWS
        )
        offloaded = tuple(filter(None, [offload]))
        tiles = 0 if offload else -(-(LENGTH + PADDING) // PAGE_TOKENS)
        placement = replace(
            plan.placement, tile_tokens=PAGE_TOKENS, offload=offloaded, resident_tiles=tiles, link_bits=link_bits
        )
        return replace(plan, placement=placement)


LENGTH = NUM_TOKENS + NUM_ROWS
PADDING = 64  # rows of a block, at most


def _copies(hardware: Hardware) -> Shown:
    """Check that random bytes are unchanged after a copy to the device and back; two copies at a time keep both
    directions busy."""
    device = torch.device(hardware.device)
    allocate = partial(Memory(device).allocate, (COPY_BYTES,), torch.uint8, purpose=PURPOSE)
    sent, generator = allocate(tier="host"), torch.Generator().manual_seed(0)
    ways = [(allocate(tier="device"), allocate(tier="host")) for _ in range(2)]
    with closing(make_link(device)) as link:
        for _ in range(COPY_ROUNDS):
            sent.random_(generator=generator)
            for event in [link.to_host(back, there, (link.to_device(there, sent),)) for there, back in ways]:
                event.synchronize()
            if not all(torch.equal(back, sent) for _, back in ways):
                return False, "BYTES CHANGED on their way"
    return True, f"{COPY_ROUNDS} rounds of {COPY_BYTES >> 20} MiB came back as they were"


def _same(one: Tensor, other: Tensor, what: str) -> Shown:
    if torch.equal(one, other):
        return True, f"the same bits {what}"
    return False, f"{int((one != other).any(-1).sum())} of {len(one)} rows have OTHER BITS {what}"
