"""Results of `triforce bench` so far, written as a table or one JSON object, and a plot."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from triforce_cli import __version__, plot
from triforce_cli.output import Output
from triforce_cli.render import bench as render_bench
from triforce_cli.signals import Terminated

if TYPE_CHECKING:
    from offload.bench.comparison import Comparison


class Findings:
    """Collects comparisons. Leaving it as a context hands them over, also where it was asked to end, but not after an
    error.

    The output must have been left before, so that the table finds a clean screen.
    """

    def __init__(self, output: Output, *, as_json: bool, plot_file: Path | None) -> None:
        self._output, self._as_json, self._plot_file = output, as_json, plot_file
        self._about: dict[str, object] | None = None
        self._comparisons: list[Comparison] = []

    def __enter__(self) -> Findings:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._about is not None and (kind is None or issubclass(kind, KeyboardInterrupt | Terminated)):
            self._hand_over(self._about, interrupted=kind is not None)

    def begin(self, about: dict[str, object]) -> None:
        """From here on there is something to hand over. about: what JSON says of all contexts."""
        self._about = about

    def add(self, comparison: Comparison) -> None:
        self._comparisons.append(comparison)

    def _hand_over(self, about: dict[str, object], *, interrupted: bool) -> None:
        if self._as_json:
            contexts = [render_bench.document(comparison) for comparison in self._comparisons]
            document = about | {"contexts": contexts, "interrupted": interrupted, "version": __version__}
            self._output.document(document)
        elif self._comparisons:
            self._output.text(render_bench.report(self._comparisons, width=self._output.text_width))
        if self._plot_file is not None and self._comparisons:
            plot.draw(self._comparisons, self._plot_file)
            self._output.note(f"drawn in {self._plot_file}")
