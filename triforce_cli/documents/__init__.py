"""Documents: files, folders and patterns that a person names, as texts."""

from dataclasses import dataclass, field

from offload.fields import LATER
from triforce_cli.documents.places import Place


@dataclass(frozen=True)
class Document:
    """A text that the model reads, and its name. places: in order, where the text was made of pages, chapters or
    sections; they tell no two documents apart, since sessions of before have none."""

    name: str
    text: str
    places: tuple[Place, ...] = field(default=(), compare=False, metadata={LATER: True})
