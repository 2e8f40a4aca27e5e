"""A run as a person watches it: state, curves that move, a Stop button, and why it failed."""

import threading
from collections.abc import Callable
from typing import Any

import ipywidgets

from labkit import launch
from labkit.errors import LabkitError
from labkit.lab.figures import overview
from labkit.lab.progress import progress_of
from labkit.lab.series import SeriesReader, folder_of
from labkit.lab.widgets import markup
from labkit.lab.widgets.figure_view import figure_view
from labkit.lab.widgets.keyboard import column
from labkit.runfolder import RunStatus

_POLL_S = 0.5


class Dashboard:
    """Watches one run, whoever started it; after a reload or a kernel restart just make a new one.

    A thread of its own looks at the run folder twice a second and changes the widgets' traits, so
    the view moves while the kernel is busy or idle. It ends when the run has ended.

    Args:
        run: A run's handle, its folder, its key, the beginning of its key, or `latest`.
        on_final: Called once, from that thread, when the run has ended.

    Raises:
        ConfigError: there is no such run.
    """

    def __init__(self, run: Any = "latest", *, on_final: Callable[[RunStatus], None] | None = None) -> None:
        self.run: launch.Run = run if isinstance(run, launch.Run) else launch.attach(folder_of(run))
        self._on_final = on_final
        self._closed = threading.Event()
        self._stopping = threading.Lock()
        self._reader = SeriesReader(self.run.folder)
        self._reader.update()
        self._make_widgets()
        self._draw(self.run.status())
        self._thread = threading.Thread(
            target=self._follow, name=f"labkit-dashboard-{self.run.folder.key}", daemon=True
        )
        self._thread.start()

    def _make_widgets(self) -> None:
        self._status = ipywidgets.HTML()
        self._view = figure_view(overview(self._reader.series))
        self._failure = ipywidgets.HTML()
        self._stop_button = ipywidgets.Button(
            description="Stop", button_style="danger", tooltip="Stop all workers of this run"
        )
        self._stop_button.on_click(lambda _: self.stop())
        hint = ipywidgets.HTML(markup.stop_hint(self.run.folder))
        self.widget = column(
            [
                self._status,
                ipywidgets.HBox([self._stop_button, hint], layout={"flex_flow": "row wrap"}),
                self._failure,
                self._view.widget,
                ipywidgets.HTML(markup.note(self._view.hint)),
            ]
        )

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        return self.widget._repr_mimebundle_(**kwargs)

    def stop(self) -> None:
        """Ask the run to stop. Returns at once, from any thread; asking again changes nothing."""
        if not self._stopping.acquire(blocking=False):
            return
        self._stop_button.disabled, self._stop_button.description = True, "Stopping"
        threading.Thread(target=self._stop, name="labkit-dashboard-stop", daemon=True).start()

    def _stop(self) -> None:
        try:
            self.run.stop()
        except LabkitError as error:
            self._failure.value = markup.alert(str(error))

    def close(self) -> None:
        """Take the view away. The run goes on."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._view.close()
        for widget in (*self.widget.children, self.widget):
            widget.close()

    def _follow(self) -> None:
        try:
            while not self._closed.wait(_POLL_S):
                status = self.run.status()  # before the events: a final state means that all are written
                self._reader.update()
                self._draw(status)
                if status.state.is_final:
                    self._finish(status)
                    return
        except Exception as error:  # a thread has nobody to raise to
            self._failure.value = markup.alert(
                f"This view has stopped, the run goes on: {error!r}. Run the cell again."
            )

    def _finish(self, status: RunStatus) -> None:
        if self._on_final is not None:
            self._on_final(status)

    def _draw(self, status: RunStatus) -> None:
        is_final = status.state.is_final
        progress = progress_of(self._reader.series)
        self._status.value = markup.status_line(self.run.folder, status, progress)
        self._view.show(overview(self._reader.series), is_last=is_final)
        if is_final:
            self._stop_button.disabled, self._stop_button.description = True, "Stop"
        if status.error is not None:
            self._failure.value = markup.failure(self.run.folder, status)
