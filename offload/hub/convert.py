"""A folder with pickled weights, or a GGUF file, to a new folder with safetensors. What is converted stays as it is."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from offload.errors import ModelError, UsageError
from offload.hub import choice
from offload.hub.disk import check_room, disk_error
from offload.hub.gguf import dequantise
from offload.hub.library import Origin
from offload.hub.names import LOCAL, is_id, models_folder
from offload.hub.pickles import convert_shard
from offload.hub.pull import Report, write_index
from offload.plan.config import ModelConfig
from offload.transfer.checkpoint import Checkpoint, check_model


def output_folder(source: Path, output: Path | None) -> Path:
    """Where the converted model goes: `output`, or local/NAME among the models. Raises UsageError where it is there
    already."""
    if output is None:
        name = source.absolute().stem if source.suffix == ".gguf" else source.absolute().name
        if not is_id(f"{LOCAL}/{name}"):
            raise UsageError(f"{name!r} cannot be a model's name; name a folder with --output DIR")
        output = models_folder() / LOCAL / name
    if output.exists():
        raise UsageError(f"{output} exists; remove it, or name another folder with --output DIR")
    return output


def convert(source: Path, output: Path, *, report: Report) -> None:
    """Make the folder `output`, whole or not at all, of the model in `source`, a folder or a GGUF file.

    Memory: little, of shards in torch's old format as much as one; of a GGUF file, as all of it unpacked. Raises
    TriforceError of several kinds.
    """
    make = _maker(source)
    try:
        with _built(output) as folder:
            make(folder, report)
            with Checkpoint.open(folder) as checkpoint:
                check_model(checkpoint, ModelConfig.from_folder(folder))
            files = tuple(sorted(path.name for path in folder.iterdir()))
            Origin(source=str(source.absolute()), files=files).write(folder)
    except OSError as error:
        raise disk_error(error, output, f"run 'triforce convert {source}' again") from error


def _maker(source: Path) -> Callable[[Path, Report], None]:
    """How `source` is converted. Raises ModelError for what cannot be, or need not."""
    if source.is_file() and source.suffix == ".gguf":
        return lambda folder, report: dequantise(source, folder)
    if not source.is_dir():
        raise ModelError(f"{source} is neither a folder nor a GGUF file; 'triforce pull OWNER/NAME' fetches models")
    name = choice.weights_name(path.name for path in source.iterdir())
    if name in (choice.BIN_FILE, choice.BIN_INDEX_FILE):
        return lambda folder, report: _convert_pickles(source, folder, source / str(name), report)
    if name is not None:
        raise ModelError(f"{source} holds safetensors and needs no conversion; use it: --model {source}")
    files = sorted(source.glob("*.gguf"))
    if len(files) > 1:
        raise ModelError(f"{source} holds {len(files)} GGUF files; give one of them, such as {files[0]}")
    if not files:
        raise ModelError(f"{source} holds no weights: neither pytorch_model*.bin nor a GGUF file")
    return lambda folder, report: dequantise(files[0], folder)


def _convert_pickles(source: Path, folder: Path, weights: Path, report: Report) -> None:
    config = ModelConfig.from_folder(source)
    names = choice.shards(weights)
    for name in names:
        if not (source / name).is_file():
            raise ModelError(f"{source}: {name} is missing; the download is not complete")
    sizes = [(source / name).stat().st_size for name in names]
    check_room(folder, sum(sizes), "name a folder on another disk with --output DIR")
    for text in choice.TEXT_FILES:
        if (source / text).is_file():
            shutil.copyfile(source / text, folder / text)
    targets = [folder / choice.converted_name(name, names) for name in names]
    for number, (name, target) in enumerate(zip(names, targets, strict=True)):
        report("convert", sum(sizes[:number]), sum(sizes))
        convert_shard(source / name, target, source=name, tied=config.tie_embeddings)
    report("convert", sum(sizes), sum(sizes))
    if len(targets) > 1:
        write_index(folder, targets)


@contextmanager
def _built(output: Path) -> Iterator[Path]:
    """A folder that becomes `output` at the end, and is gone where the end is not reached."""
    folder = output.with_name(f".{output.name}.part")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
        folder.rename(output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
