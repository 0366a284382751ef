"""`triforce verify`: check that the output is exactly the target's own."""

from __future__ import annotations

from typing import Annotated

from offload.errors import Differs, UsageError
from triforce_cli.documents.prompt import read_prompt
from triforce_cli.options import options
from triforce_cli.options.call import spread
from triforce_cli.options.control import GreedySampling
from triforce_cli.options.flags import DocumentFlags, EngineFlags, ModelFlags
from triforce_cli.options.options import number, option, whole
from triforce_cli.render import verify as render_verify
from triforce_cli.screen.output import Output
from triforce_cli.setup.engine import open_engine

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
    engine: EngineFlags,
    json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
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
    setup = engine.setup(models, quiet=quiet)
    named = documents.named()
    with Output(quiet=quiet) as output:
        text = read_prompt(named, prompt, note=output.note, on_read=output.report).text
        prepared = setup.prepare(output, sampling=sampling)
        from offload.bench.exactness import check_exactness

        tokens = prepared.prompt_tokenizer.encode(text)
        plan = prepared.request.plan(num_prompt_tokens=len(tokens), max_tokens=max_tokens)
        output.planned(plan)
        with open_engine(prepared, plan, on_progress=output.progress) as opened:
            found = check_exactness(
                opened,
                tokens,
                sampling,
                max_tokens=max_tokens,
                num_recomputed=positions,
                tolerance=tolerance,
                on_progress=output.progress,
            )
        if json:
            output.document(render_verify.document(found, plan, sampling))
        else:
            tokenizer = prepared.tokenizer
            output.text(render_verify.report(found, plan, sampling, lambda token: tokenizer.decode([token])))
    if not found.holds:
        raise Differs(render_verify.failure(found))
