"""A figure that can be redrawn while the notebook's cell is long done: live, or still where it must be."""

import functools
import json
import time
from typing import Any, Protocol

import ipywidgets
import plotly.graph_objects as go
import traitlets
from plotly.offline import get_plotlyjs

from labkit.lab.show import PLOTLY_MIME, figure_bundle

_STILL_INTERVAL_S = 5.0

_SCRIPT = """
const load = (source) => {
  const text = `const module = { exports: {} }; const exports = module.exports; ${source}
    ;export default module.exports;`;
  const url = URL.createObjectURL(new Blob([text], { type: "text/javascript" }));
  return import(url).then((library) => library.default);
};

export default {
  async render({ model, el }) {
    const box = document.createElement("div");
    box.style.width = "100%";
    el.append(box);
    const figure = await model.widget_manager.get_model(model.get("figure"));
    globalThis.labkitPlotly ??= load(model.get("source"));
    const plotly = await globalThis.labkitPlotly;
    const draw = () => {
      const { data, layout, config } = JSON.parse(figure.get("value"));
      return plotly.react(box, data, layout, config);
    };
    await draw();
    figure.on("change:value", draw);
    const observer = new ResizeObserver(() => plotly.Plots.resize(box));
    observer.observe(el);
    return () => {
      observer.disconnect();
      figure.off("change:value", draw);
      plotly.purge(box);
    };
  },
};
"""


class FigureView(Protocol):
    """Something in the notebook that shows the newest figure."""

    widget: Any
    hint: str

    def show(self, figure: go.Figure, is_last: bool = False) -> None:
        """Show a figure. Safe on any one thread."""
        ...

    def close(self) -> None:
        """Take it away."""
        ...


class LiveFigure:
    """Sends the whole figure each time; the page redraws what differs and keeps the user's zoom.

    Not plotly's FigureWidget, which stands still on a busy machine: a model of anywidget that is not
    loaded within two seconds drops every update for ever, and FigureWidget's are 4.8 MB. Here the
    figure travels in a plain text model, plotly.js is loaded once a page, and the figure takes
    the width there is.

    Raises:
        ImportError: anywidget is missing.
    """

    hint = ""

    def __init__(self, figure: go.Figure) -> None:
        self.text = ipywidgets.Text(_content(figure))
        self.widget: Any = _plot_class()(source=get_plotlyjs(), figure=self.text.model_id)

    def show(self, figure: go.Figure, is_last: bool = False) -> None:
        """One message to the page, and none when nothing has changed."""
        self.text.value = _content(figure)

    def close(self) -> None:
        """Take it away."""
        self.text.close()
        self.widget.close()


@functools.cache
def _plot_class() -> Any:
    import anywidget

    class LivePlot(anywidget.AnyWidget):  # type: ignore[misc]
        """A plotly figure in the page."""

        _esm = _SCRIPT
        figure = traitlets.Unicode().tag(sync=True)
        source = traitlets.Unicode().tag(sync=True)

    return LivePlot


def _content(figure: go.Figure) -> str:
    return json.dumps(figure_bundle(figure)[PLOTLY_MIME])


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

    def close(self) -> None:
        """Take it away."""
        self.widget.close()


def figure_view(figure: go.Figure) -> FigureView:
    """A live view, or a still one where anywidget is missing."""
    try:
        return LiveFigure(figure)
    except ImportError:
        return StillFigure(figure)
