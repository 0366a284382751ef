"""The parts of a sequence's caches that are kept in files: rows of its tokens, states, and a next-token head's rows."""

from __future__ import annotations

from dataclasses import dataclass

from offload.session.hidden import HiddenRows
from offload.session.page import PagedRows, WindowRows
from offload.session.states import StateRows


@dataclass(frozen=True)
class Kept:
    """The parts of a sequence's caches that sessions and the prefix store write and fill. rows: of the layers that keep
    every token. windows: of the layers with a window. states: of the layers with a state. hidden: the model's last
    hidden rows, which a next-token head reads. A part that the model does not have is None."""

    rows: PagedRows
    windows: WindowRows | None = None
    states: StateRows | None = None
    hidden: HiddenRows | None = None

    @property
    def paged(self) -> dict[str, PagedRows]:
        """The parts that are kept page by page, by their names."""
        return {"rows": self.rows} if self.windows is None else {"rows": self.rows, "windows": self.windows}

    def clear(self) -> None:
        """Drop the contents, before all of them are filled again. Rows may still be on their way to their pages, after
        an interrupted forward."""
        for part in self.paged.values():
            part.restored(0)
            part.wait_home()
        if self.states is not None:
            self.states.restored(0)
        if self.hidden is not None:
            self.hidden.truncate(0)
