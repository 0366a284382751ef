"""`triforce verify`: check that the output is exactly the target's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from offload.errors import Differs, UsageError
from triforce_cli.documents.prompt import read_prompt
from triforce_cli.documents.selection import Named
from triforce_cli.options import options
from triforce_cli.options.control import GreedySampling
from triforce_cli.options.flags import (
    CacheFlags,
    DocumentFlags,
    ModelFlags,
    PlacementFlags,
    ProgramFlags,
    plan_options,
    spread,
)
from triforce_cli.options.options import number, option, whole
from triforce_cli.render import verify as render_verify
from triforce_cli.screen.output import Output
from triforce_cli.setup.choice import Models
from triforce_cli.setup.engine import open_engine, prepare
from triforce_cli.setup.plan_file import beside_given

if TYPE_CHECKING:
    from offload.decode.sampling import SamplingParams
    from offload.plan.options import Options
    from offload.plan.planner import Plan

CHECKS = "What is compared"
MOST_RECOMPUTED = 4  # by default

NumRecomputed = Annotated[
    int | None,
    option(
        "--positions",
        f"Recompute this many tokens by a prefill from the start; without it {MOST_RECOMPUTED}, or all of fewer.",
        CHECKS,
        metavar="N",
        parser=whole,
    ),
]
Tolerance = Annotated[
    float | None,
    option(
        "--tolerance",
        "Largest difference of a recomputed logit, in standard deviations of its row; without it one that suits the "
        "arithmetic.",
        CHECKS,
        metavar="X",
        parser=number,
    ),
]


@dataclass(frozen=True, kw_only=True)
class Verify:
    """One `triforce verify`, parsed."""

    documents: Named
    prompt: str | None
    max_tokens: int
    sampling: SamplingParams
    num_recomputed: int
    tolerance: float | None
    options: Options
    given: Plan | None
    models: Models
    as_json: bool
    quiet: bool

    def run(self) -> None:
        """Generate, replay and report. Raises Differs after the report if a token differs."""
        output = Output(quiet=self.quiet)
        with output:
            prompt = read_prompt(self.documents, self.prompt, note=output.note, on_read=output.report).text
            prepared = prepare(self.models, self.options, output, sampling=self.sampling, given=self.given)
            sampling = self.sampling
            from offload.bench.exactness import check_exactness

            tokenizer = prepared.tokenizer
            tokens = prepared.prompt_tokenizer.encode(prompt)
            plan = prepared.request.plan(num_prompt_tokens=len(tokens), max_tokens=self.max_tokens)
            output.planned(plan)
            with open_engine(prepared, plan, on_progress=output.progress) as engine:
                found = check_exactness(
                    engine,
                    tokens,
                    sampling,
                    max_tokens=self.max_tokens,
                    num_recomputed=self.num_recomputed,
                    tolerance=self.tolerance,
                    on_progress=output.progress,
                )
            if self.as_json:
                output.document(render_verify.document(found, plan, sampling))
            else:
                output.text(render_verify.report(found, plan, sampling, lambda token: tokenizer.decode([token])))
        if not found.holds:
            raise Differs(render_verify.failure(found))


@spread
def verify(
    *,
    models: ModelFlags,
    documents: DocumentFlags,
    prompt: options.Prompt = None,
    max_tokens: options.MaxTokens = 64,
    sampling: GreedySampling,
    positions: NumRecomputed = None,
    tolerance: Tolerance = None,
    plan: options.GivenPlan = None,
    decoding: CacheFlags,
    placement: PlacementFlags,
    json: options.AsJson = False,
    quiet: options.Quiet = False,
    program: ProgramFlags,
) -> Verify:
    """Check that the output is exact: generate, then replay every token without speculation.

    Each token is decoded again by itself. The logits that it was drawn from must have the same bits, and it must be the
    likeliest token at temperature 0, else one of nonzero probability. Some tokens are computed once more by a prefill
    from the start, which sums in another order: their logits must agree within a tolerance. Differences are shown with
    their margins, and the exit code is 5.

    Example: triforce verify --prompt-file book.txt --max-tokens 100
    """
    options.check_max_tokens(max_tokens)
    if positions is None:
        positions = min(MOST_RECOMPUTED, max_tokens)
    if not 0 <= positions <= max_tokens:
        raise UsageError(f"positions is {positions}, it must be from 0 to the {max_tokens} of --max-tokens")
    if tolerance is not None and not 0 <= tolerance < 1e9:
        raise UsageError(f"tolerance is {tolerance:g}, it must be from 0 to below 1000000000")
    chosen, given = beside_given(plan, plan_options(decoding, **vars(placement)))
    return Verify(
        documents=documents.named(),
        prompt=prompt,
        max_tokens=max_tokens,
        sampling=sampling,
        num_recomputed=positions,
        tolerance=tolerance,
        options=chosen,
        given=given,
        models=models.chosen(),
        as_json=json,
        quiet=quiet,
    )
