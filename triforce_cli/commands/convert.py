"""`triforce convert`: pickled or GGUF weights to safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offload.errors import shell_line
from triforce_cli.ground.text import path_text
from triforce_cli.options import options
from triforce_cli.options.call import spread
from triforce_cli.options.options import option
from triforce_cli.screen.output import Output
from triforce_cli.screen.utf8 import user_path

Source = Annotated[
    Path,
    typer.Argument(
        metavar="DIR", help="A folder with config.json and pytorch_model*.bin, or with a GGUF file; or a GGUF file."
    ),
]
Target = Annotated[
    Path | None,
    option(
        "--output",
        "The folder to make; without it one among the pulled models.",
        options.OUTPUT,
        short="-o",
        metavar="DIR",
    ),
]


@spread
def convert(
    source: Source,
    *,
    output: Target = None,
    quiet: options.Quiet = False,
) -> None:
    """Convert a folder with pytorch_model*.bin, bit for bit, or a GGUF file (to fp16), into a folder of safetensors.

    The source is not changed, and no code in it is run. GGUF needs: pip install gguf accelerate

    Example: triforce convert downloads/old-llama --output models/old-llama
    """
    named = None if output is None else user_path(str(output))
    found = user_path(str(source))
    with Output(quiet=quiet) as shown:
        shown.wait("converting")
        from offload.hub import convert as hub

        folder = hub.output_folder(found, named)
        hub.convert(found, folder, report=shown.report)
        shown.text(f"{path_text(folder)}\n")
        name = path_text(folder) if named else f"{folder.parent.name}/{folder.name}"
        shown.note(f"next: {shell_line('triforce', 'generate', '--model', name, '--prompt-file', 'FILE')}")
