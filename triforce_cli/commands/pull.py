"""`triforce pull`: a model from the hub, and the GGUF files of a repository by their headers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from offload.errors import UsageError
from offload.hub.names import MAIN, models_folder, repository_of, tagged
from triforce_cli.chat.keys import pressed
from triforce_cli.ground.text import path_text
from triforce_cli.options import completion, options
from triforce_cli.options.call import spread
from triforce_cli.options.fetching import fetched
from triforce_cli.options.options import option, switch
from triforce_cli.render import models as render_models
from triforce_cli.screen.output import Output

if TYPE_CHECKING:
    from offload.hub.files import GgufModel
    from offload.hub.pull import PullPlan
    from offload.hub.remote import Listing
    from triforce_cli.render.repository import Repository

SOURCE = "What to fetch"
CONTEXT = 32_768  # tokens that speeds are predicted with

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="OWNER/NAME on the hub, OWNER/NAME:LABEL for a GGUF file, or a short name (triforce models lists them).",
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
        metavar="PATH.gguf",
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

    Only weights (safetensors; pytorch_model.bin is converted), config and tokenizer are fetched, never code. Of GGUF
    files OWNER/NAME:Q4_K_M fetches the one with that label, --file one by its path, each with its other parts, and
    OWNER/NAME alone lists them: kinds of encoding, what fits this machine, predicted speed. The same command resumes an
    interrupted pull. Every file is checked against the hub's hash. TRIFORCE_MODELS_DIR names another folder.

    Example: triforce pull yarn-llama-2-7b-128k
    """
    if not revision:
        raise UsageError("revision is empty; give a branch, a tag or a commit, or leave it out for main")
    repository, label = tagged(model) or (repository_of(model), "")
    if label and file is not None:
        raise UsageError(f"{label!r} and --file name a GGUF file each; give one of them")
    if (label or file is not None) and config_only:
        raise UsageError(f"{'--file' if file else model} fetches a whole GGUF file; leave --config-only out")
    with Output(quiet=quiet) as output:
        output.wait(f"asking the hub for {repository}")
        from offload.hub import files
        from offload.hub.remote import list_repository

        listing = list_repository(repository, revision, file=file or "", label=label)
        gguf = files.labelled(listing, label) if label else None if file is None else files.gguf_model(listing, file)
        if gguf is None and not config_only and files.has_gguf_alone(listing):
            gguf = _chosen(listing, output, as_json=json)
            if gguf is None:
                return
        plan = fetched(output, listing, gguf=gguf, config_only=config_only)
        if json:
            output.document(render_models.pulled_document(plan))
        else:
            output.text(f"{path_text(plan.folder)}\n")
            name = gguf.model if gguf and gguf.named.get("label") else _name_of(plan, gguf)
            output.note(render_models.next_command(name, config_only=config_only))


def _name_of(plan: PullPlan, gguf: GgufModel | None) -> str:
    """The model's name for --model."""
    from offload.hub.library import name_of

    return name_of(plan.listing.repository, "" if gguf is None else gguf.parts[0].name)


def _chosen(listing: Listing, output: Output, *, as_json: bool) -> GgufModel | None:
    """The GGUF model whose key a person presses, once all are listed; None if nobody is there, or wants one."""
    from triforce_cli.render import repository as render

    found = _shown(listing, output)
    if as_json:
        output.document(render.document(found))
        return None
    output.text(render.page(found, width=output.width))
    if not found.keys or not output.is_dialogue:
        output.note(render.next_command(found))
        return None
    key = pressed(found.keys, output, render.question(found))
    output.note(key or "q", urgent=True)
    return found.fitting[int(key) - 1].gguf if key else None


def _shown(listing: Listing, output: Output) -> Repository:
    """The GGUF models of a repository on this machine, by their headers. Raises TriforceError."""
    from offload.hub.disk import free_bytes
    from offload.hub.files import gguf_models
    from offload.hub.headers import Described, Refused, describe
    from offload.hub.offers import offers
    from offload.plan.request import Request
    from offload.speed.hardware import probe
    from triforce_cli.render.repository import Repository, Shown

    models, hardware = gguf_models(listing), probe("auto")
    headers = [*describe(listing, models, report=lambda done: output.report("headers", done, len(models), "files"))]
    output.wait("planning")
    known = {each.model: each for each in headers if isinstance(each, Described)}
    ablest = sorted(known.values(), key=lambda each: (each.is_plain, -each.num_bytes))
    measured = Request.with_known_curves
    fitting = {
        offer.candidate.model: offer
        for offer in offers(ablest, hardware, request_of=measured, number=len(ablest), context=CONTEXT)
    }
    smallest = sorted(known.values(), key=lambda each: each.num_bytes)
    names = [*fitting, *(each.model for each in smallest if each.model not in fitting)]
    return Repository(
        listing=listing,
        hardware=hardware,
        folder=models_folder(),
        disk_free_bytes=free_bytes(models_folder()),
        context=CONTEXT,
        models=[
            *(Shown(gguf=known[name].gguf, kinds=known[name].kinds, offer=fitting.get(name)) for name in names),
            *(
                Shown(gguf=each.gguf, kinds=each.kinds, problem=each.problem)
                for each in headers
                if isinstance(each, Refused)
            ),
        ],
    )
