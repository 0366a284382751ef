"""`triforce pull`: a model from the hub."""

from __future__ import annotations

from typing import Annotated

import typer

from offload.errors import UsageError
from offload.hub.names import MAIN, pull_command, repository_of
from triforce_cli.ground.text import path_text
from triforce_cli.options import completion, options
from triforce_cli.options.call import spread
from triforce_cli.options.options import option, switch
from triforce_cli.render import models as render_models
from triforce_cli.screen.output import Output

SOURCE = "What to fetch"

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="OWNER/NAME on the hub, or a short name (triforce models lists them).",
        autocompletion=completion.pullable,
    ),
]
Revision = Annotated[str, option("--revision", "Branch, tag or commit of the repository.", SOURCE, metavar="NAME")]
ConfigOnly = Annotated[
    bool, switch("--config-only", "Config and tokenizer without the weights: all that triforce plan needs.", SOURCE)
]

File = Annotated[
    str | None,
    option(
        "--file",
        "This GGUF file of the repository, with its other parts if it has some, and nothing else.",
        SOURCE,
        short="-f",
        metavar="NAME.gguf",
    ),
]


@spread
def pull(
    model: ModelName,
    *,
    revision: Revision = MAIN,
    config_only: ConfigOnly = False,
    file: File = None,
    json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Fetch a model, or the changed files of one, from the hub into the user's data folder.

    Only weights (safetensors; pytorch_model.bin is converted), config and tokenizer are fetched, never code; with
    --file a GGUF file, which is run as it is. The same
    command resumes an interrupted pull. Every file is checked against the hub's hash. TRIFORCE_MODELS_DIR names another
    folder.

    Example: triforce pull yarn-llama-2-7b-128k
    """
    if not revision:
        raise UsageError("revision is empty; give a branch, a tag or a commit, or leave it out for main")
    if file is not None and config_only:
        raise UsageError("--file fetches a whole GGUF file; leave --config-only out")
    repository = repository_of(model)
    with Output(quiet=quiet) as output:
        output.wait(f"asking the hub for {repository}")
        from offload.hub import pull as hub
        from offload.hub.library import name_of

        def announce(plan: hub.PullPlan) -> None:
            for line in render_models.pull_plan(plan):
                output.note(line)

        try:
            plan = hub.pull(
                repository,
                revision,
                config_only=config_only,
                on_plan=announce,
                report=output.report,
                file=file or "",
            )
        except KeyboardInterrupt:
            output.note(f"stopped; {pull_command(repository, revision, file or '')} resumes it")
            raise
        if json:
            output.document(render_models.pulled_document(plan))
        else:
            output.text(f"{path_text(plan.folder)}\n")
            name = name_of(repository, "" if file is None else plan.files[0].name)
            output.note(render_models.next_command(name, config_only=config_only))
