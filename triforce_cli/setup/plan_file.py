"""`--plan FILE`: a plan from an earlier run, so that a seed gives the same text again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from offload import strict_json
from offload.errors import UsageError
from triforce_cli.ground.text import path_text
from triforce_cli.screen.utf8 import read_text, user_path

if TYPE_CHECKING:
    from offload.plan.options import Options
    from offload.plan.planner import Plan


def beside_given(file: Path | None, options: Options) -> tuple[Options, Plan | None]:
    """The options without those that a given plan decides, and the plan in `file`, or None. Raises UsageError for a
    file that is no plan, and for an option that contradicts the plan."""
    if file is None:
        return options, None
    from offload.plan.plan_file import options_beside, read_plan

    text = read_text(user_path(str(file)), "the plan")
    try:
        plan = read_plan(strict_json.parse(text))
    except (ValueError, RecursionError, UsageError) as error:
        raise UsageError(f"{path_text(file)} holds no plan of this program: {error}; --json prints one") from error
    return options_beside(plan, options), plan
