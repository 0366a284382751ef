"""`triforce convert`: pickled or GGUF weights to safetensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from offload.errors import shell_line
from triforce_cli.ground.text import path_text
from triforce_cli.options import options
from triforce_cli.options.flags import ProgramFlags, spread
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


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """One `triforce convert`, parsed."""

    source: Path
    output: Path | None
    quiet: bool

    def run(self) -> None:
        """Convert, and print the new folder's path and name."""
        with Output(quiet=self.quiet) as output:
            output.wait("converting")
            from offload.hub.convert import convert, output_folder

            folder = output_folder(self.source, self.output)
            convert(self.source, folder, report=output.report)
            output.text(f"{path_text(folder)}\n")
            name = path_text(folder) if self.output else f"{folder.parent.name}/{folder.name}"
            output.note(f"next: {shell_line('triforce', 'generate', '--model', name, '--prompt-file', 'FILE')}")


@spread
def convert(
    source: Source,
    *,
    output: Target = None,
    quiet: options.Quiet = False,
    program: ProgramFlags,
) -> Conversion:
    """Convert a folder with pytorch_model*.bin, bit for bit, or a GGUF file (to fp16), into a folder of safetensors.

    The source is not changed, and no code in it is run. GGUF needs: pip install gguf accelerate

    Example: triforce convert downloads/old-llama --output models/old-llama
    """
    folder = None if output is None else user_path(str(output))
    return Conversion(source=user_path(str(source)), output=folder, quiet=quiet)
