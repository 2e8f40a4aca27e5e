"""Figures and the tables beside them: what they show, how small they stay, nothing by colour alone."""

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from labkit.lab import figures, tables
from labkit.lab.report import read_verdict, record_verdict, write_notebook_html, write_report
from labkit.lab.series import Series, read_series
from labkit.lab.show import PLOTLY_MIME, figure_bundle
from labkit.runfolder import RunState
from tests.made_runs import MadeRun

NAMES = ["overview", *tables.ALL]


@pytest.fixture
def series(runs: Path) -> Series:
    return read_series(MadeRun(runs, total_steps=60).start().steps(1, 60).folder)


def _draw(name: str, series: Series) -> Any:
    return getattr(figures, name)(series)


def _lines(figure: go.Figure) -> list[Any]:
    return [trace for trace in figure.data if trace.type == "scatter" and trace.mode == "lines+markers"]


def _sizes(node: Any) -> Iterator[float]:
    """Every font size in a figure."""
    if isinstance(node, dict):
        for key, value in node.items():
            if "font" in key and isinstance(value, dict) and "size" in value:
                yield value["size"]
            yield from _sizes(value)
    elif isinstance(node, list):
        for item in node:
            yield from _sizes(item)


def _num_drawn(page: str) -> int:
    """Figures that a page draws."""
    return len(re.findall(r'Plotly\.newPlot\(\s*"', page))


class _Addresses(HTMLParser):
    """Everything that a page would fetch."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        wanted = {"script": "src", "img": "src", "link": "href", "iframe": "src"}.get(tag)
        self.found += [value for name, value in attrs if name == wanted and value]


# --- what is shown ---------------------------------------------------------------------------------


def test_loss_shows_every_step_and_every_evaluation(series: Series) -> None:
    train, val = _lines(figures.loss(series))
    assert list(train.x) == list(range(1, 61))
    assert list(val.x) == [10, 20, 30, 40, 50, 60]


def test_staleness_is_counted_in_figure_table_and_report(runs: Path) -> None:
    made = MadeRun(runs, total_steps=10).start().steps(1, 10)
    made.say_staleness(10, {"0": 6, "1": 3, "4": 3})
    series = read_series(made.folder)
    (bars,) = figures.staleness(series).data
    assert (list(bars.x), list(bars.y)) == ([0, 1, 4], [6, 3, 3])
    assert tables.staleness(series).rows == (("0", 6, 0.5), ("1", 3, 0.25), ("4", 3, 0.25))
    assert _num_drawn(write_report(made.folder).read_text()) == len(tables.ALL) + 1
    assert "no step is done yet" in figures.staleness(Series()).layout.title.subtitle.text


def test_parts_of_a_step_stack_up_to_its_time(series: Series) -> None:
    bars = [trace for trace in figures.step_time(series).data if trace.type == "bar"]
    heights = [sum(values) for values in zip(*(bar.y for bar in bars), strict=True)]
    assert heights == pytest.approx([17.0] * len(heights))


def test_every_worker_has_a_bar_and_the_slow_one_is_longest(series: Series) -> None:
    bars = figures.workers(series).data
    lengths = {label: sum(bar.x[index] for bar in bars) for index, label in enumerate(bars[0].y)}
    assert len(lengths) == 4 and max(lengths, key=lambda label: lengths[label]) == "1 · node0"


def test_the_heat_map_has_a_row_for_each_worker(series: Series) -> None:
    (heat,) = figures.worker_heatmap(series).data
    assert len(heat.y) == 4 and len(heat.z) == 4
    assert len(heat.x) == len(heat.z[0]) + 1, "edges of the stretches"


def test_a_loss_that_is_not_finite_is_a_gap_with_a_cross_at_the_first(runs: Path) -> None:
    made = MadeRun(runs).start()
    for step, loss in enumerate([2.0, 1.5, float("nan"), float("inf"), 3.0], start=1):
        made.step(step, loss=loss)
    figure = figures.loss(read_series(made.folder))
    assert list(_lines(figure)[0].y) == [2.0, 1.5, None, None, 3.0]
    (cross,) = [trace for trace in figure.data if trace.marker.symbol == "x" and len(trace.x)]
    assert (cross.x[0], cross.y[0], cross.text[0]) == (3, 1.5, "train nan at step 3")


def test_subtitles_say_how_much_of_the_run_is_shown(runs: Path) -> None:
    made = MadeRun(runs, total_steps=60)
    assert "no step is done yet" in figures.loss(read_series(made.folder)).layout.title.subtitle.text
    made.start().steps(1, 20)
    assert (
        "4 workers, step 20 of 60 so far" in figures.loss(read_series(made.folder)).layout.title.subtitle.text
    )
    made.steps(21, 60)
    assert "4 workers, all 60 steps" in figures.loss(read_series(made.folder)).layout.title.subtitle.text


# --- for every figure ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_and_its_table_draw_from_nothing(name: str) -> None:
    assert _draw(name, Series()).to_json()
    assert str(getattr(tables, name)(Series()))


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_has_a_title_and_names_its_axes(name: str, series: Series) -> None:
    figure = _draw(name, series)
    texts = [figure.layout.title.text or "", *(note.text for note in figure.layout.annotations)]
    assert any(texts)
    named_by_heading = {"yaxis4"} if name == "overview" else set()
    axes = {axis for axis in figure.layout if axis.startswith(("xaxis", "yaxis"))} - named_by_heading
    assert axes and all(figure.layout[axis].title.text for axis in axes)


@pytest.mark.parametrize("name", NAMES)
def test_no_text_is_smaller_than_12_px(name: str, series: Series) -> None:
    sizes = list(_sizes(json.loads(_draw(name, series).to_json())))
    assert sizes and min(sizes) >= 12


@pytest.mark.parametrize("name", ["loss", "accuracy"])
def test_lines_differ_in_colour_dash_and_marker_and_carry_their_name(name: str, series: Series) -> None:
    figure = _draw(name, series)
    first, second = _lines(figure)
    assert first.line.color != second.line.color
    assert first.line.dash != second.line.dash
    assert first.marker.symbol != second.marker.symbol
    labels = [trace.text[0].split()[0] for trace in figure.data if trace.mode == "text"]
    assert labels == ["train", "val"]


def test_names_of_lines_that_end_at_the_same_height_do_not_overlap(series: Series) -> None:
    places = {trace.textposition for trace in figures.loss(series).data if trace.mode == "text"}
    assert places == {"top right", "bottom right"}


@pytest.mark.parametrize("name", ["step_time", "workers"])
def test_parts_differ_in_colour_and_pattern(name: str, series: Series) -> None:
    bars = _draw(name, series).data
    assert len({bar.marker.color for bar in bars}) == len(bars)
    assert len({bar.marker.pattern.shape for bar in bars}) == len(bars)


def test_a_figure_of_a_long_run_stays_small(runs: Path) -> None:
    series = Series(total_steps=50_000)
    for step in range(1, 50_001):
        series.clock.add(step, float(step))
        series.samples.add(step, 64.0 * step)
        for metric in ("train/loss", "perf/step_ms", "perf/compute_ms"):
            series.metrics.setdefault(metric, type(series.clock)()).add(step, 1.0 / step)
    assert max(len(trace.x) for trace in figures.overview(series).data) <= 2000
    assert len(figures.overview(series).to_json()) < 150_000


def test_the_overview_always_has_the_same_traces(series: Series) -> None:
    shape = [
        (trace.type, trace.mode if trace.type == "scatter" else "")
        for trace in figures.overview(Series()).data
    ]
    assert shape == [
        (trace.type, trace.mode if trace.type == "scatter" else "") for trace in figures.overview(series).data
    ]


# --- tables ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_table_has_headings_and_a_caption(name: str, series: Series) -> None:
    table = getattr(tables, name)(series)
    assert table.rows and all(len(row) == len(table.columns) for row in table.rows)
    html = table.to_html()
    assert "<caption>" in html and 'scope="col"' in html and 'scope="row"' in html


def test_a_table_says_what_the_figure_shows(series: Series) -> None:
    table = tables.workers(series)
    assert table.columns[2] == "computing (ms)"
    assert [row[2] for row in table.rows] == pytest.approx([10.0, 20.0, 10.0, 10.0])
    assert tables.loss(series).rows[-1][2] == pytest.approx(series.last("val/loss"))


def test_text_in_a_table_is_not_taken_for_markup() -> None:
    html = tables.Table("<b>", ("a & b",), (("<script>",),)).to_html()
    assert "<script>" not in html and "&lt;script&gt;" in html


# --- notebook outputs and pages --------------------------------------------------------------------


def test_a_figure_in_a_notebook_is_plotly_json_alone_and_strict(series: Series) -> None:
    bundle = figure_bundle(figures.overview(series))
    assert set(bundle) == {PLOTLY_MIME, "text/plain"}
    json.dumps(bundle, allow_nan=False)
    assert bundle["text/plain"].startswith("[figure] Loss; Throughput; Time of a step")


def test_the_report_is_one_file_that_asks_for_nothing_from_a_network(runs: Path) -> None:
    made = MadeRun(runs).start().steps(1, 30)
    made.fail()
    record_verdict(made.folder, "It broke <early>.", is_met=False)
    page = write_report(made.folder).read_text(encoding="utf-8")
    assert _num_drawn(page) == len(tables.ALL)
    assert _Addresses(page).found == []
    assert page.index("worker 2 on node1 failed") < page.index("Plotly.newPlot(")
    assert "Verdict: no. It broke &lt;early&gt;." in page
    assert "python -m labkit run name=made cluster=2x2" in page


def test_the_page_of_an_executed_notebook_draws_its_figures(
    runs: Path, tmp_path: Path, series: Series
) -> None:
    import nbformat.v4 as v4

    outputs = [
        v4.new_output("display_data", data=figure_bundle(_draw(n, series))) for n in ("loss", "workers")
    ]
    cell = v4.new_code_cell("show", outputs=outputs)
    notebook = tmp_path / "done.ipynb"
    notebook.write_text(json.dumps(v4.new_notebook(cells=[cell])))
    page = write_notebook_html(notebook)
    assert page == tmp_path / "done.html"
    text = page.read_text(encoding="utf-8")
    assert _num_drawn(text) == 2
    assert text.count("plotly.js v") == 1, "plotly.js comes along once"
    assert _Addresses(text).found == []
    assert PLOTLY_MIME in notebook.read_text(), "the notebook itself is left as it was"


# --- verdict ---------------------------------------------------------------------------------------


def test_a_verdict_is_recorded_beside_the_result_and_read_back(runs: Path) -> None:
    made = MadeRun(runs).start().steps(1, 5)
    made.set_state(RunState.FINISHED)
    verdict = record_verdict(made.folder, "It learns.", is_met=True)
    assert read_verdict(made.folder) == verdict
    assert str(verdict) == "Verdict: yes. It learns."


def test_while_a_run_goes_on_no_verdict_is_recorded(runs: Path) -> None:
    made = MadeRun(runs).start().steps(1, 5)
    assert "Run this cell again" in str(record_verdict(made.folder, "It learns.", is_met=True))
    assert read_verdict(made.folder) is None
