"""A figure that can be redrawn while the notebook's cell is long done: live, or still where it must be."""

import time
from typing import Any, Protocol

import ipywidgets
import plotly.graph_objects as go

from labkit.lab.show import figure_bundle

_DATA = ("x", "y", "z", "text", "width", "textposition")
_STILL_INTERVAL_S = 5.0


class FigureView(Protocol):
    """Something in the notebook that shows the newest figure."""

    widget: Any
    hint: str

    def show(self, figure: go.Figure, is_last: bool = False) -> None:
        """Show a figure with the same traces as the first one. Safe on any one thread."""
        ...


class LiveFigure:
    """Replaces the data of a plotly widget; axes that the user zoomed stay as they are.

    A plotly widget is drawn before the page knows how wide it is, so it gets plotly's 700 px. It takes
    its place's width when `autosize` is switched on afterwards: here at every other update, and
    once the page has answered.
    """

    hint = ""

    def __init__(self, figure: go.Figure) -> None:
        self.widget: Any = go.FigureWidget(figure)
        self.widget._config = {"displaylogo": False, "responsive": True}
        self._fit_when_drawn()

    def _fit_when_drawn(self) -> None:
        self.widget.layout.autosize = False
        self.widget.on_edits_completed(self._fit)

    def _fit(self) -> None:
        self.widget.layout.autosize = True

    def show(self, figure: go.Figure, is_last: bool = False) -> None:
        """One message to the page, whatever has changed."""
        with self.widget.batch_update():
            self.widget.layout.autosize = not self.widget.layout.autosize
            for old, new in zip(self.widget.data, figure.data, strict=True):
                for name in _DATA:
                    value = new[name] if name in new else None
                    if value is not None and not _same(old[name], value):
                        old[name] = value
        if is_last:
            self._fit_when_drawn()


class StillFigure:
    """Redraws the whole figure every few seconds; needs no anywidget."""

    hint = (
        "The figure is redrawn every 5 s. For one that moves, install anywidget "
        "(pip install anywidget), restart the kernel and reload this page."
    )

    def __init__(self, figure: go.Figure) -> None:
        self.widget: Any = ipywidgets.Output()
        self._shown_at = float("-inf")
        self.show(figure)

    def show(self, figure: go.Figure, is_last: bool = False) -> None:
        """Set the output as a trait: capturing from a thread does not reach the page."""
        if not is_last and time.monotonic() - self._shown_at < _STILL_INTERVAL_S:
            return
        self._shown_at = time.monotonic()
        output = {"output_type": "display_data", "data": figure_bundle(figure), "metadata": {}}
        self.widget.outputs = (output,)


def figure_view(figure: go.Figure) -> FigureView:
    """A live view, or a still one where anywidget is missing."""
    try:
        return LiveFigure(figure)
    except ImportError:
        return StillFigure(figure)


def _same(old: Any, new: Any) -> bool:
    if isinstance(new, str) or old is None:
        return bool(old == new)
    return len(old) == len(new) and all(a == b for a, b in zip(old, new, strict=True))
