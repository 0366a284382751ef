"""Convert a folder with pickled weights, or a GGUF file, to a new folder with safetensors. The source is kept."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from offload.config.reading import read_config
from offload.errors import ModelError, UsageError, quoted_line, shell_line
from offload.hub import files
from offload.hub.disk import check_room, disk_error
from offload.hub.gguf import dequantise
from offload.hub.library import Origin
from offload.hub.names import LOCAL, is_id, models_folder
from offload.hub.pickles import convert_shard
from offload.hub.pull import Report, write_index
from offload.weights.checkpoint import Checkpoint, check_model


def output_folder(source: Path, output: Path | None) -> Path:
    """The folder of the converted model: `output`, or local/NAME among the models. UsageError if it exists already."""
    if output is None:
        name = source.absolute().stem if source.suffix == ".gguf" else source.absolute().name
        if not is_id(f"{LOCAL}/{name}"):
            raise UsageError(f"{name!r} cannot be a model's name; name a folder with --output DIR")
        output = models_folder() / LOCAL / name
    if output.exists():
        raise UsageError(f"{output} exists; remove it, or name another folder with --output DIR")
    return output


def convert(source: Path, output: Path, *, report: Report) -> None:
    """Convert the model in `source`, a folder or a GGUF file, into the new folder `output`.

    `output` appears only when it is complete. Memory: for a GGUF file all of its weights, unpacked; for pickles in
    torch's format of before 2020 one shard; otherwise little. Raises TriforceError.
    """
    fill = _converter(source)
    try:
        with _new_folder(output) as folder:
            fill(folder, report)
            with Checkpoint.open(folder) as checkpoint:
                check_model(checkpoint, read_config(folder))
            names = tuple(sorted(path.name for path in folder.iterdir()))
            Origin(source=str(source.absolute()), files=names).write(folder)
    except OSError as error:
        raise disk_error(error, output, f"run {quoted_line('triforce', 'convert', str(source))} again") from error


def _converter(source: Path) -> Callable[[Path, Report], None]:
    """The function that converts `source` into a folder. ModelError if it cannot or need not be converted."""
    if source.is_file() and source.suffix == ".gguf":
        return lambda folder, report: dequantise(source, folder)
    if not source.is_dir():
        raise ModelError(f"{source} is neither a folder nor a GGUF file; 'triforce pull OWNER/NAME' fetches models")
    name = files.weights_file(path.name for path in source.iterdir())
    if name in (files.BIN_FILE, files.BIN_INDEX_FILE):
        return lambda folder, report: _convert_pickles(source, folder, source / str(name), report)
    if name is not None:
        raise ModelError(
            f"{source} holds safetensors and needs no conversion; use it: {shell_line('--model', str(source))}"
        )
    found = sorted(source.glob("*.gguf"))
    if len(found) > 1:
        raise ModelError(f"{source} holds {len(found)} GGUF files; give one of them, such as {found[0]}")
    if not found:
        raise ModelError(f"{source} holds no weights: neither pytorch_model*.bin nor a GGUF file")
    return lambda folder, report: dequantise(found[0], folder)


def _convert_pickles(source: Path, folder: Path, weights: Path, report: Report) -> None:
    config = read_config(source)
    names = files.shards(weights)
    for name in names:
        if not (source / name).is_file():
            raise ModelError(f"{source}: {name} is missing; the download is not complete")
    sizes = [(source / name).stat().st_size for name in names]
    check_room(folder, sum(sizes), "name a folder on another disk with --output DIR")
    for text in files.TEXT_FILES:
        if (source / text).is_file():
            shutil.copyfile(source / text, folder / text)
    targets = [folder / files.converted_name(name, names) for name in names]
    for number, (name, target) in enumerate(zip(names, targets, strict=True)):
        report("convert", sum(sizes[:number]), sum(sizes))
        convert_shard(source / name, target, source=name, tied=config.tie_embeddings)
    report("convert", sum(sizes), sum(sizes))
    if len(targets) > 1:
        write_index(folder, targets)


@contextmanager
def _new_folder(output: Path) -> Iterator[Path]:
    """A temporary folder that is renamed to `output` at the end, and removed if the body fails."""
    folder = output.with_name(f".{output.name}.part")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
        folder.rename(output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
