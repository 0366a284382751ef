"""`triforce tokens`: the lengths of documents in tokens, compared with the model's context and this machine's
memory."""

from __future__ import annotations

from triforce_cli.documents.reading import joined, read_documents
from triforce_cli.documents.selection import Named
from triforce_cli.options import options
from triforce_cli.options.call import spread
from triforce_cli.options.flags import CacheFlags, ModelFlags, PlacementFlags, plan_options
from triforce_cli.render import tokens as render_tokens
from triforce_cli.render.tokens import Counted, Counts
from triforce_cli.screen.output import Output
from triforce_cli.screen.utf8 import STDIN


@spread
def tokens(
    files: options.DocumentFiles = None,
    *,
    include: options.Include = None,
    models: ModelFlags,
    placement: PlacementFlags,
    json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Count the tokens of documents, each and all in one prompt, and say whether that fits.

    Beside them stand the model's context and the longest context that this machine has memory for. Reads config.json
    and the tokenizer; no weights are loaded.

    Example: triforce tokens papers/ notes.md --include '*.pdf'
    """
    documents = Named(tuple(files or (STDIN,)), tuple(include or ()))
    chosen = models.chosen(weights=False, quiet=quiet)
    wanted = plan_options(CacheFlags(), **vars(placement))
    with Output(quiet=quiet) as output:
        output.note(chosen.note)
        readings = read_documents(documents, "the text", note=output.note, on_read=output.report)
        output.wait("counting")
        from offload.plan.request import Request
        from offload.text.tokenizer import Tokenizer

        tokenizer = Tokenizer.from_folder(chosen.target)
        request = Request.on_this_machine(chosen.target, chosen.draft, wanted)
        counts = Counts(
            model=chosen.target.name,
            documents=tuple(Counted(reading, tokenizer.num_tokens(reading.text)) for reading in readings),
            num_tokens=tokenizer.num_tokens(joined(readings)),
            context=request.target.context_limit,
            fitting=request.longest_context(),
        )
        if json:
            output.document(render_tokens.document(counts))
        else:
            output.text(render_tokens.report(counts, width=output.text_width))
