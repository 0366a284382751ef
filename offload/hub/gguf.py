"""A GGUF file, unpacked by transformers to fp16 safetensors. Needs the packages of the extra `gguf`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partialmethod
from pathlib import Path
from typing import Any

from offload.errors import DoesNotFit, ModelError
from offload.plan.machine import free_host_bytes

_WEIGHT_BYTES = 4 + 2  # of each while it is unpacked: fp32, and fp16 beside it


def dequantise(file: Path, folder: Path) -> None:
    """Write weights, config and tokenizer of `file` into `folder`.

    Memory: six bytes a weight. Raises ModelError for what transformers does not read, DoesNotFit.
    """
    _check_packages()
    _check_memory(file)
    try:
        with _quiet():
            _unpack(file, folder)
    except ModelError:
        raise
    except Exception as error:  # the library raises whatever the file makes it raise
        raise ModelError(
            f"{file} cannot be converted ({error}); look for a repository with safetensors, or a GGUF file of a Llama, "
            "Mistral or Qwen model"
        ) from error


def _unpack(file: Path, folder: Path) -> None:
    """ModelError where a weight is not in the file: transformers would make one up."""
    import torch
    import transformers

    named: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True, "trust_remote_code": False}
    transformers.AutoTokenizer.from_pretrained(str(file.parent), **named).save_pretrained(folder)
    if hasattr(transformers, "GgufConfig"):  # else weights may stay packed, for kernels that it fetches
        named["quantization_config"] = transformers.GgufConfig(dequantize=True)
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        str(file.parent), dtype=torch.float16, output_loading_info=True, **named
    )
    model, found = loaded
    wrong = sorted(name for key in ("missing_keys", "mismatched_keys") for name in map(str, found[key]))
    if wrong:
        raise ModelError(f"{file} lacks {len(wrong)} weights of its model ({wrong[0]}, ...); fetch it again")
    model.save_pretrained(folder)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's bars and its reports on what it loads."""
    from tqdm.auto import tqdm
    from transformers.utils import logging

    level, shown = logging.get_verbosity(), tqdm.__init__
    logging.set_verbosity_error()
    tqdm.__init__ = partialmethod(shown, disable=True)  # it has no other switch once it is imported
    try:
        yield
    finally:
        logging.set_verbosity(level)
        tqdm.__init__ = shown


def _check_packages() -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(f"reading GGUF files needs {' and '.join(missing)}: pip install {' '.join(missing)}")


def _check_memory(file: Path) -> None:
    from gguf import GGUFReader

    try:
        num_weights = sum(int(tensor.n_elements) for tensor in GGUFReader(file).tensors)
    except Exception as error:  # struct and numpy errors of every kind
        raise ModelError(f"{file} is no whole GGUF file ({error}); fetch it again") from error
    needed, free = _WEIGHT_BYTES * num_weights, free_host_bytes()
    if needed > free:
        raise DoesNotFit(
            f"unpacking {file.name} takes {needed / 1e9:.3g} GB of memory, {free / 1e9:.3g} GB are free; "
            "pull the model as safetensors instead"
        )
