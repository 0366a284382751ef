"""Documents: files, folders and patterns that a person names, as texts."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Document:
    """A text that the model reads, and its name."""

    name: str
    text: str
