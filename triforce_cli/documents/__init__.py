"""Documents: from the paths that a person names to texts."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Document:
    """A named text that the model reads."""

    name: str
    text: str
