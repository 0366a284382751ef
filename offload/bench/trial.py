"""The trial of several ways of decoding one prompt, run in turns, so that a slow moment of the machine does not hit
only one of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from offload.bench.comparison import PLAIN, TRANSFORMERS, TRIFORCE, WAYS, Comparison, Run
from offload.bench.launches import launches
from offload.decode.sampling import SamplingParams
from offload.engine.request import GenerationRequest
from offload.errors import DoesNotFit, TriforceError
from offload.plan.options import DTYPE_BYTES
from offload.plan.planner import Plan
from offload.plan.request import Request
from offload.seeds import seed_after

if TYPE_CHECKING:
    from offload.engine.engine import Engine
    from offload.metrics import Stats
    from offload.progress import OnProgress

WARM_UP = 0  # the turn that is not counted; it prefills the prompt
WARM_UP_TOKENS = 16


class Other(Protocol):
    """A program to measure against, such as transformers (`Reference`)."""

    def generate(
        self, prompt: Sequence[int], sampling: SamplingParams, *, max_tokens: int, end_tokens: Collection[int]
    ) -> tuple[list[int], list[float]]:
        """Generate a text -> (tokens, seconds from the start at which each was known). A prompt is prefilled once, when
        it is new."""
        ...


@dataclass(frozen=True)
class Step:
    """One run of the schedule."""

    way: str
    turn: int


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A trial: one prompt, which every way continues. sampling.seed: of the first turn; each turn has the next seed;
    None: every run draws afresh. repeats: counted turns. against: whether transformers takes part."""

    prompt: tuple[int, ...]
    plan: Plan
    sampling: SamplingParams
    max_tokens: int
    repeats: int
    against: bool = False

    @property
    def ways(self) -> tuple[str, ...]:
        return WAYS if self.against else (PLAIN, TRIFORCE)

    @property
    def steps(self) -> list[Step]:
        """The warm-up, then the turns. Every other turn is in reverse order, so that a machine that gets slower affects
        all ways equally."""
        turns = range(WARM_UP, self.repeats + 1)
        return [Step(way, turn) for turn in turns for way in (self.ways if turn % 2 == 0 else self.ways[::-1])]

    def num_tokens(self, step: Step) -> int:
        return min(WARM_UP_TOKENS, self.max_tokens) if step.turn == WARM_UP else self.max_tokens

    def predicted_seconds(self, step: Step) -> float:
        """The predicted seconds of one run, by the plan; another program is assumed to be as fast as plain decoding."""
        predicted = self.plan.predicted
        per_token = predicted.seconds_per_token if step.way == TRIFORCE else predicted.plain_seconds_per_token
        prefills = step.turn == WARM_UP and step.way != TRIFORCE
        return self.num_tokens(step) * per_token + prefills * predicted.first_token_seconds

    def run(
        self, engine: Engine, other: Other | None, *, on_step: Callable[[Step], None], on_progress: OnProgress
    ) -> Comparison:
        """Run all steps -> their comparison. Engine and `other` cache the prompt once it is prefilled. Raises
        TriforceError if the model ends its text too early to be timed."""
        runs: list[Run] = []
        prefill_rates: dict[str, float] = {}
        for step in self.steps:
            on_step(step)
            if step.way == TRANSFORMERS and other is not None:
                run, rate = self._by_other(step, other, engine.end_tokens)
            else:
                run, rate = self._by_engine(step, engine, on_progress)
            if step.turn > WARM_UP:
                runs.append(run)
            elif rate is not None:
                prefill_rates[step.way] = rate
        greedy = self.sampling.temperature == 0.0
        return Comparison(
            plan=self.plan, greedy=greedy, prefill_rates=prefill_rates, runs=tuple(runs), launches=launches(engine)
        )

    def _by_engine(self, step: Step, engine: Engine, on_progress: OnProgress) -> tuple[Run, float | None]:
        """One run by the engine -> (its measurements, prompt tokens per second if any were prefilled)."""
        said = engine.generate(
            GenerationRequest(
                self.prompt, self._sampling(step), max_tokens=self.num_tokens(step), speculation=step.way == TRIFORCE
            ),
            on_progress=on_progress,
        )
        tokens = [token for part in said for token in part.tokens]
        stats = engine.stats
        rate = None if stats.reused_tokens else stats.prompt_tokens_per_second
        return self._run(step, tokens, stats.milliseconds_per_token, stats), rate

    def _by_other(self, step: Step, other: Other, end_tokens: frozenset[int]) -> tuple[Run, float | None]:
        tokens, moments = other.generate(
            self.prompt, self._sampling(step), max_tokens=self.num_tokens(step), end_tokens=end_tokens
        )
        milliseconds = milliseconds_after_first(moments)
        return self._run(step, tokens, milliseconds, None), len(self.prompt) / moments[0]

    def _run(self, step: Step, tokens: list[int], milliseconds: float | None, stats: Stats | None) -> Run:
        if milliseconds is None:
            raise TriforceError(
                f"after {len(self.prompt):,} tokens of prompt the model ended its text with token {len(tokens)}, too "
                "early to be timed; name another text with --prompt-file, or another --seed with --temperature 1"
            )
        return Run(way=step.way, turn=step.turn, tokens=tuple(tokens), milliseconds_per_token=milliseconds, stats=stats)

    def _sampling(self, step: Step) -> SamplingParams:
        return replace(self.sampling, seed=seed_after(self.sampling.seed, max(step.turn - 1, 0)))


def milliseconds_after_first(moments: Sequence[float]) -> float | None:
    """Milliseconds per token after the first round's tokens; tokens of one round arrive together. None if all arrived
    with the first."""
    later = [moment for moment in moments if moment > moments[0]]
    return 1000 * (moments[-1] - moments[0]) / len(later) if later else None


def check_other_fits(request: Request, plan: Plan) -> None:
    """Check that transformers fits beside the engine: it keeps all weights and its cache on the device. Raises
    DoesNotFit."""
    hardware, itemsize = request.hardware, DTYPE_BYTES[plan.request.dtype]
    used = plan.placement.total_device_bytes + (plan.placement.total_host_bytes if hardware.is_cpu else 0)
    free = (hardware.host_free_bytes if hardware.is_cpu else hardware.device_free_bytes) - used
    target = request.target
    capacity = plan.request.capacity
    cached = target.all_layers(lambda layer: layer.layer_kv_bytes(itemsize))
    needed = target.weight_bytes(itemsize) + capacity * cached
    if needed > free:
        raise DoesNotFit(
            f"transformers needs {needed / 1e9:.3g} GB on {plan.request.device} for a context of {capacity} tokens and "
            f"{max(free, 0) / 1e9:.3g} GB are left beside the engine; leave out --against transformers, or try shorter "
            "--contexts"
        )
