"""The common tokens of two models' vocabularies."""

from __future__ import annotations

from pathlib import Path

from offload.config.reading import read_config
from offload.decode.tokenizer import Tokenizer
from offload.errors import ModelError
from offload.worker.models import num_scored


def num_common_tokens(model: Path, tokenizer: Tokenizer, other: Path) -> int:
    """The number of ids, from 0 on, that are the same tokens in both models. Reads no weights.

    An id without a token in one model may have one in the other: GGUF files name a vocabulary's padding. Raises
    ModelError where an id stands for two tokens, or where each model has tokens that the other lacks.
    """
    theirs = Tokenizer.from_folder(other)
    names = [{number: name for name, number in each.vocabulary().items()} for each in (tokenizer, theirs)]
    both = names[0].keys() & names[1].keys()
    differ = next((number for number in sorted(both) if names[0][number] != names[1][number]), None)
    if differ is not None or len(both) < min(map(len, names)):
        what = "" if differ is None else f", token {differ} is {names[1][differ]!r} for {names[0][differ]!r}"
        raise ModelError(
            f"{other} has another vocabulary ({len(names[1])} tokens) than {model} ({len(names[0])} tokens){what}; "
            "distributions are compared over the same tokens: name models with one tokenizer"
        )
    sizes = [num_scored(read_config(path), len(each)) for path, each in ((model, tokenizer), (other, theirs))]
    return min(sizes)
