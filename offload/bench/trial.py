"""The trial of plain decoding and TriForce on one prompt, run in turns, so that a slow moment of the machine does not
hit only one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from offload.bench.comparison import PLAIN, TRIFORCE, WAYS, Comparison, Run
from offload.bench.launches import launches
from offload.decode.sampling import SamplingParams
from offload.engine.request import GenerationRequest
from offload.errors import TriforceError
from offload.plan.planner import Plan
from offload.seeds import seed_after

if TYPE_CHECKING:
    from offload.engine.engine import Engine
    from offload.progress import OnProgress

WARM_UP = 0  # the turn that is not counted; it prefills the prompt
WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Step:
    """One run of the schedule."""

    way: str
    turn: int


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A trial: one prompt, which both ways continue. sampling.seed: of the first turn; each turn has the next seed;
    None: every run draws afresh. repeats: counted turns."""

    prompt: tuple[int, ...]
    plan: Plan
    sampling: SamplingParams
    max_tokens: int
    repeats: int

    @property
    def steps(self) -> list[Step]:
        """The warm-up, then the turns. Every other turn is in reverse order, so that a machine that gets slower affects
        all ways equally."""
        turns = range(WARM_UP, self.repeats + 1)
        return [Step(way, turn) for turn in turns for way in (WAYS if turn % 2 == 0 else WAYS[::-1])]

    def num_tokens(self, step: Step) -> int:
        return min(WARM_UP_TOKENS, self.max_tokens) if step.turn == WARM_UP else self.max_tokens

    def predicted_seconds(self, step: Step) -> float:
        """The predicted seconds of one run, by the plan."""
        predicted = self.plan.predicted
        per_token = predicted.seconds_per_token if step.way == TRIFORCE else predicted.plain_seconds_per_token
        prefills = step.turn == WARM_UP and step.way == PLAIN
        return self.num_tokens(step) * per_token + prefills * predicted.first_token_seconds

    def run(self, engine: Engine, *, on_step: Callable[[Step], None], on_progress: OnProgress) -> Comparison:
        """Run all steps -> their comparison. The engine caches the prompt once it is prefilled. Raises TriforceError if
        the model ends its text too early to be timed."""
        runs: list[Run] = []
        prefill_rates: dict[str, float] = {}
        for step in self.steps:
            on_step(step)
            run, rate = self._run(step, engine, on_progress)
            if step.turn > WARM_UP:
                runs.append(run)
            elif rate is not None:
                prefill_rates[step.way] = rate
        greedy = self.sampling.temperature == 0.0
        return Comparison(
            plan=self.plan, greedy=greedy, prefill_rates=prefill_rates, runs=tuple(runs), launches=launches(engine)
        )

    def _run(self, step: Step, engine: Engine, on_progress: OnProgress) -> tuple[Run, float | None]:
        """One run -> (its measurements, prompt tokens per second if any were prefilled)."""
        said = engine.generate(
            GenerationRequest(
                self.prompt, self._sampling(step), max_tokens=self.num_tokens(step), speculation=step.way == TRIFORCE
            ),
            on_progress=on_progress,
        )
        tokens = tuple(token for part in said for token in part.tokens)
        stats = engine.stats
        if (milliseconds := stats.milliseconds_per_token) is None:
            raise TriforceError(
                f"after {len(self.prompt):,} tokens of prompt the model ended its text with token {len(tokens)}, too "
                "early to be timed; name another text with --prompt-file, or another --seed with --temperature 1"
            )
        rate = None if stats.reused_tokens else stats.prompt_tokens_per_second
        return Run(way=step.way, turn=step.turn, tokens=tokens, milliseconds_per_token=milliseconds, stats=stats), rate

    def _sampling(self, step: Step) -> SamplingParams:
        return replace(self.sampling, seed=seed_after(self.sampling.seed, max(step.turn - 1, 0)))
