"""`triforce text`: documents as the model reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from offload.errors import UsageError
from triforce_cli import __version__
from triforce_cli.documents.places import marked
from triforce_cli.documents.reading import Reading, joined, read_documents
from triforce_cli.documents.selection import Named
from triforce_cli.options import options
from triforce_cli.options.call import spread
from triforce_cli.options.options import OUTPUT, switch
from triforce_cli.screen.output import Output
from triforce_cli.screen.utf8 import STDIN

Places = Annotated[
    bool,
    switch(
        "--places",
        'Above every page, chapter and heading write a line with its name in citations, such as "--- p. 4 ---". '
        "Without it the text is the model's alone.",
        OUTPUT,
    ),
]


@spread
def text(
    files: options.DocumentFiles = None,
    *,
    include: options.Include = None,
    places: Places = False,
    json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Write the text that the model reads of documents, byte for byte.

    Several are written as one prompt, each below a heading with its name. Lines of citations are counted in a
    document's text. No model is needed.

    Example: triforce text report.pdf | grep -n tenant
    """
    if places and json:
        raise UsageError("--json has the places of each document; leave --places out")
    documents = Named(tuple(files or (STDIN,)), tuple(include or ()))
    with Output(quiet=quiet) as output:
        readings = read_documents(documents, "the text", note=output.note, on_read=output.report)
        if json:
            output.document(_document(readings))
        elif places:
            output.text(joined([replace(each, text=marked(each.text, each.places)) for each in readings]))
        else:
            output.text(joined(readings))


def _document(readings: Sequence[Reading]) -> dict[str, Any]:
    """The documents as JSON."""
    return {
        "documents": [
            {
                "name": reading.name,
                "kind": reading.kind,
                "text": reading.text,
                "places": [
                    place.as_dict() | {"start": place.start, "line": reading.text.count("\n", 0, place.start) + 1}
                    for place in reading.places
                ],
                "remarks": list(reading.remarks),
            }
            for reading in readings
        ],
        "version": __version__,
    }
