"""Let the keyboard work inside widgets: JupyterLab would take their keys for its own commands.

With the focus on a drop-down list, typing `m` turns the cell into Markdown and an arrow moves to the
next cell, both of which lose the form. JupyterLab leaves the keys of an element alone that has the
attribute `data-lm-suppress-shortcuts`, which only a script on the page can give it. The same script gives a
slider the name that stands beside it: ipywidgets leaves its handle without one.
"""

from collections.abc import Sequence
from typing import Any

import ipywidgets

_CLASS = "labkit-keys"
_SCRIPT = f"""
export default {{
  render({{ el }}) {{
    const mark = (tries) => {{
      const box = el.closest(".{_CLASS}");
      const leaveAlone = (event) => event.target.setAttribute("data-lm-suppress-shortcuts", "true");
      const name = () => {{
        for (const slider of box.querySelectorAll(".widget-slider, .widget-hslider")) {{
          const label = slider.querySelector(".widget-label");
          const handle = slider.querySelector("[role=slider]");
          if (label && handle && handle.ariaLabel !== label.textContent) handle.ariaLabel = label.textContent;
        }}
      }};
      if (box) {{
        box.addEventListener("focusin", leaveAlone);
        new MutationObserver(name).observe(box, {{ childList: true, subtree: true }});
        name();
      }} else if (tries > 0) setTimeout(() => mark(tries - 1), 100);
    }};
    mark(100);
  }},
}};
"""


def column(children: Sequence[Any]) -> Any:
    """Widgets below each other, over the whole width, that get every key while they have the focus."""
    box = ipywidgets.VBox([*children, *_guard()], layout={"width": "100%"})
    box.add_class(_CLASS)
    return box


def _guard() -> list[Any]:
    try:
        import anywidget
    except ImportError:
        return []
    guard = type("KeyGuard", (anywidget.AnyWidget,), {"_esm": _SCRIPT})
    return [guard(layout={"display": "none"})]
