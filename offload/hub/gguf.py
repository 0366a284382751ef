"""Unpack a GGUF file to fp16 safetensors, by transformers. Needs the packages of the extra `gguf`."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partialmethod
from pathlib import Path
from typing import Any

from offload.config.gguf_header import Header, read_header
from offload.errors import DoesNotFit, ModelError
from offload.interrupts import waiting
from offload.machine import free_host_bytes
from offload.text import gguf_tokenizer

_WEIGHT_BYTES = 4 + 2  # per weight while unpacking: fp32, and fp16 beside it


def dequantise(file: Path, folder: Path) -> None:
    """Write weights (fp16), config and tokenizer of `file` into `folder`.

    Memory: 6 bytes per weight. Raises ModelError if the file is damaged or transformers cannot read it, DoesNotFit if
    memory is short.
    """
    _check_packages()
    _check_memory(file, _open(file))
    try:
        with _quiet(), waiting():
            gguf_tokenizer.write(file, folder)
            _unpack(file, folder)
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from error
    except Exception as error:  # a damaged file can raise any kind of error in the library
        raise ModelError(
            f"{file} cannot be converted ({error}); look for a repository with safetensors, or a GGUF file of a Llama, "
            "Mistral or Qwen model"
        ) from error


def _named(file: Path) -> dict[str, Any]:
    return {"gguf_file": file.name, "local_files_only": True, "trust_remote_code": False}


def _unpack(file: Path, folder: Path) -> None:
    """Unpack by transformers. Raises ModelError if the file lacks a weight: transformers would initialise it at
    random."""
    import torch
    import transformers

    named = _named(file)
    if hasattr(transformers, "GgufConfig"):  # otherwise weights may stay packed, for kernels that are downloaded
        named["quantization_config"] = transformers.GgufConfig(dequantize=True)
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        str(file.parent), dtype=torch.float16, output_loading_info=True, **named
    )
    model, found = loaded
    wrong = sorted(name for key in ("missing_keys", "mismatched_keys") for name in map(str, found[key]))
    if wrong:
        raise ModelError(f"it lacks {len(wrong)} weights of its model ({wrong[0]}, ...); fetch it again")
    model.save_pretrained(folder)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' progress bars and load reports."""
    from tqdm.auto import tqdm
    from transformers.utils import logging

    level, shown = logging.get_verbosity(), tqdm.__init__
    logging.set_verbosity_error()
    tqdm.__init__ = partialmethod(shown, disable=True)  # there is no other switch once tqdm is imported
    try:
        yield
    finally:
        logging.set_verbosity(level)
        tqdm.__init__ = shown


def _check_packages() -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(f"reading GGUF files needs {' and '.join(missing)}: pip install {' '.join(missing)}")


def _open(file: Path) -> Header:
    """The header by our own reader, whose refusals keep a damaged file from the library's, which may never end."""
    return read_header(file)


def _check_memory(file: Path, header: Header) -> None:
    num_weights = sum(math.prod(tensor.shape) for tensor in header.tensors.values())
    needed, free = _WEIGHT_BYTES * num_weights, free_host_bytes()
    if needed > free:
        raise DoesNotFit(
            f"unpacking {file.name} takes {needed / 1e9:.3g} GB of memory, {free / 1e9:.3g} GB are free; "
            "pull the model as safetensors instead"
        )
