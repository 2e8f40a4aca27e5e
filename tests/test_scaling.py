"""What strategies send and cost, by hand; a small grid on emulated nodes; the ladder; the notebook."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from support import need
from test_notebooks import MAX_KB, _outputs, _papermill, _printed

from labkit.bench.ladder import _report
from labkit.config import ExperimentConfig, from_overrides, load_cluster
from labkit.engine.events import EventLog
from labkit.errors import ConfigError
from labkit.lab import scaling
from labkit.lab.scaling import Climb, Ladder, Point, Result, Study
from labkit.lab.show import PLOTLY_MIME
from labkit.lab.timeline import timeline, timeline_table
from labkit.launch.emulation import build
from labkit.runfolder import RunFolder, all_runs, write_atomically

M = 1_000_000.0
SMALL: dict[str, Any] = {
    "name": "scaling",
    "strategies": ["allreduce", "hierarchical"],
    "shapes": ["2x2"],
    "link_mbit": [200],
    "samples_per_worker": 8,
    "model": {"name": "mlp", "hidden_sizes": [64]},
    "max_steps": 20,
    "step_padding_s": 0.02,
    "overrides": {"engine.num_threads": 1, "launch.is_tracked": False},
}


def _config(**overrides: Any) -> ExperimentConfig:
    return from_overrides({key.replace("__", "."): value for key, value in overrides.items()})


# --- what is sent, by hand ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"sync": "hierarchical"}, [1.5 * M] * 4),
        ({"sync__name": "hierarchical", "sync__wire": "bfloat16"}, [0.75 * M] * 4),
        ({"sync": "allreduce"}, [2 * 15 / 16 * M] * 4),
        ({"sync": "parameter_server"}, [12 * M, 4 * M, 4 * M, 4 * M]),
        # Parameters and momentum, every eighth step.
        ({"sync": "local_sgd"}, [2 * 15 / 16 * 2 * M / 8] * 4),
        ({"sync__name": "local_sgd", "sync__momentum": "kept"}, [2 * 15 / 16 * M / 8] * 4),
    ],
)
def test_bytes_of_four_nodes_of_four_workers(overrides: dict[str, Any], expected: list[float]) -> None:
    assert scaling.sent_bytes(_config(cluster="4x4", **overrides), M) == pytest.approx(expected)


def test_unequal_nodes_send_as_many_gradients_as_they_have_workers() -> None:
    config = _config(cluster="1+3+4-1gbit", sync="parameter_server")
    assert scaling.sent_bytes(config, M) == [7 * M, 3 * M, 4 * M]
    assert scaling.shape_text(config.cluster) == "1+3+4"


@pytest.mark.parametrize("sync", ["hierarchical", "allreduce", "parameter_server", "local_sgd"])
def test_one_node_sends_nothing_and_has_no_bound(sync: str) -> None:
    config = _config(cluster="1x4", cluster__link_mbit=100, sync=sync)
    assert scaling.sent_bytes(config, M) == [0.0]
    assert (scaling.wire_s(config, M), scaling.bound_s(config, M)) == (0.0, 0.0)


def test_a_run_that_ends_inside_a_period_sends_for_whole_ones_alone() -> None:
    config = _config(cluster="2x1", sync="local_sgd")
    assert scaling.sent_bytes(config, M, 20)[0] == pytest.approx(2 * M * 2 / 20)


def test_the_bound_is_the_gradient_over_the_payload_rate_of_the_slowest_link() -> None:
    config = _config(cluster="4x4", cluster__link_mbit=1000, sync="hierarchical")
    assert scaling.bound_s(config, 40e6) == pytest.approx(1.5 * 40e6 * 8 / 0.956e9)
    assert scaling.wire_s(config, 40e6) == scaling.bound_s(config, 40e6)
    slow = _config(cluster="4x2-slow-link")
    assert scaling.slowest_mbit(slow.cluster) == 100
    assert (
        scaling.slowest_mbit(load_cluster("4x4")) is None and scaling.bound_s(_config(cluster="4x4"), M) == 0
    )


def test_a_server_takes_everything_before_it_gives_anything() -> None:
    config = _config(cluster="4x4", cluster__link_mbit=1000, sync="parameter_server")
    assert scaling.wire_s(config, M) == pytest.approx(2 * 12 * M * 8 / 0.956e9)
    assert scaling.bound_s(config, M) == pytest.approx(1.5 * M * 8 / 0.956e9)


# --- one run in a few numbers --------------------------------------------------------------------------------


def test_the_first_steps_do_not_count_and_one_hiccup_does_not_either() -> None:
    assert scaling.typical_s([9.0, 9.0, 9.0, 1.0, 2.0, 3.0, 50.0, 2.0]) == 2.0
    assert scaling.typical_s([4.0]) == 4.0


def test_a_period_counts_as_a_whole() -> None:
    # Three cheap steps and one that synchronises: the median of single steps would not see it.
    assert scaling.typical_s([1.0, 1.0, 1.0, 5.0] * 4, period=4) == 2.0


def _folder(path: Path, *, sent: int = 30 * 15 * 10**5, is_late: bool = False) -> RunFolder:
    """A run of 30 steps on 2x2 with 250,000 parameters: M is a million bytes, each node sends as many."""
    folder = RunFolder(path)
    folder.create(
        _config(
            cluster="2x2", cluster__link_mbit=100, sync="allreduce", launch__is_emulated=True,
            engine__global_batch_size=32,
        )
    )  # fmt: skip
    for rank in range(4):
        log = EventLog(folder.events_file(rank), 1)
        log.write("start", rank=rank, node=f"node{rank // 2}", num_params=250_000, start_step=0)
        for step in range(1, 31):
            log.write("step", step=step, samples=8, step_s=0.5, compute_s=0.1, communicate_s=0.4)
        if is_late:
            log.write(
                "message", text="emulated compute was too short: 9 of 30 micro-steps really took longer."
            )
        counted = sent if rank % 2 == 0 else None
        log.write("end", step=30, node_sent_bytes=counted, resident_bytes=10_000_000 + rank)
        log.close()
    final = {"val/accuracy": 0.75, "val/loss": 0.5}
    write_atomically(folder.result_file, json.dumps({"final": final}))
    return folder


def test_a_run_is_summed_up_from_its_folder(tmp_path: Path) -> None:
    point = scaling.sum_up(_folder(tmp_path / "run"))
    assert (point.strategy, point.shape, point.num_nodes, point.num_workers) == ("allreduce", "2x2", 2, 4)
    assert (point.step_s, point.samples_per_s, point.link_mbit) == (0.5, 64.0, 100.0)
    assert point.block_step_s == (0.5,) * 5
    assert point.sent_bytes == point.expected_bytes == (1.5e6, 1.5e6)
    assert (point.busiest_bytes, point.all_bytes) == (1.5e6, 3e6)
    assert point.wire_s == pytest.approx(1.5e6 * 8 / 95.6e6)
    assert point.bound_s == pytest.approx(1e6 * 8 / 95.6e6)
    assert point.memory_bytes == (20_000_001, 20_000_005)
    assert (point.accuracy, point.loss, point.doubts) == (0.75, 0.5, ())


def test_wrong_bytes_and_late_compute_cast_doubt(tmp_path: Path) -> None:
    point = scaling.sum_up(_folder(tmp_path / "run", sent=30 * 17 * 10**5, is_late=True))
    assert len(point.doubts) == 3
    assert point.doubts[0] == "node 0 sent 1,700,000 bytes per step where 1,500,000 were expected"
    assert point.doubts[2] == "emulated compute was too short"


def test_the_timeline_has_a_row_for_each_worker_and_the_same_numbers_in_its_table(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "run")
    figure = timeline(folder, first_step=10, num_steps=2)
    drawn = {trace.name: trace for trace in figure.data if len(trace.y)}
    assert list(drawn) == ["computing", "communicating"]
    assert list(drawn["computing"].y).count("2 · node1") == 2
    assert sum(drawn["computing"].x) == pytest.approx(4 * 2 * 100)
    row = timeline_table(folder, first_step=10, num_steps=2).rows[2]
    assert row[0] == "2 · node1" and row[1] == pytest.approx(200) and row[3] == pytest.approx(800)


# --- the grid ----------------------------------------------------------------------------------------------


def _study(**changes: Any) -> Study:
    return Study.from_parameters({**SMALL, "is_emulated": False, **changes})


def test_every_worker_has_equally_many_samples_on_every_shape() -> None:
    study = _study(shapes=["1x4", "4x4"], link_mbit=[100, 1000])
    configs = study.configs()
    assert [config.engine.global_batch_size for config in configs] == [32] * 2 + [128] * 4
    assert [config.cluster.link_mbit for config in configs] == [None] * 2 + [1000.0] * 2 + [100.0] * 2
    assert [config.sync.name for config in configs[:2]] == ["allreduce", "hierarchical"]


def test_a_study_says_plainly_that_links_are_not_shaped(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "LINKS ARE NOT SHAPED (is_emulated is false)" in str(_study())

    def refuse(cluster: object) -> None:
        raise ConfigError("launch.is_emulated must be allowed to make network namespaces, got: EPERM.")

    monkeypatch.setattr("labkit.lab.scaling._study.check", refuse)
    study = _study(is_emulated=True)
    assert "LINKS ARE NOT SHAPED, everything runs on loopback: launch.is_emulated must" in str(study)
    assert not any(config.launch.is_emulated for config in study.configs())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategies": ["allreduse"]}, "strategies must be some of .*, got 'allreduse'. Did you mean 'allreduce'"),
        ({"strategies": "allreduce"}, r"strategies must be a list, got 'allreduce'. Use \['allreduce'\]"),
        ({"link_mbit": 100}, r"link_mbit must be a list, got 100. Use \[100\]"),
        ({"strategies": []}, r"strategies must be given, got \[\]"),
        ({"shapes": ["4x"]}, "cluster"),
        ({"link_mbit": [-1]}, "link_mbit must be greater than 0"),
        ({"samples_per_worker": 0}, "samples_per_worker must be given, got 0"),
        ({"max_step": 3}, "Did you mean 'max_steps'?"),
    ],
)  # fmt: skip
def test_refuses_a_study_that_makes_no_sense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _study(**changes)


ALONE = Point(
    "allreduce", "1x1", 1, 1, None, True, 10, 250_000, 0.1, (0.1,), (), (0.0,), 0.0, 0.0, (50e6,), 0.9, 0.3, "a", ()
)  # fmt: skip


def _point(strategy: str, shape: str, mbit: float | None, step_s: float, bound_s: float) -> Point:
    num_nodes, per_node = map(int, shape.split("x"))
    return replace(
        ALONE, strategy=strategy, shape=shape, num_nodes=num_nodes, num_workers=num_nodes * per_node,
        batch_size=10 * num_nodes * per_node, link_mbit=mbit, step_s=step_s, bound_s=bound_s,
        expected_bytes=(1e6,) * num_nodes, sent_bytes=(1.1e6,) * num_nodes, memory_bytes=(60e6,) * num_nodes,
    )  # fmt: skip


RESULT = Result(
    tuple(
        _point(name, shape, mbit, step_s, 0.0 if shape == "1x4" else 200 / (mbit or 1))
        for shape, mbit in [("1x4", None), ("1x4", None), ("4x4", 1000.0), ("4x4", 200.0)]
        for name, step_s in [("allreduce", 0.25), ("hierarchical", 0.2)]
    ),
    ALONE,
    {("allreduce", "4x4"): 50e6},
    "shaped",
)


def test_efficiency_is_against_as_many_workers_that_need_not_talk() -> None:
    point = RESULT.at("hierarchical", "4x4", 200.0)
    assert scaling.efficiency(point, ALONE) == pytest.approx(0.5)
    # Compute takes 0.1 s and the wire a second: no step is shorter than a second.
    assert scaling.bound_samples_per_s(point, ALONE) == pytest.approx(160)
    assert scaling.bound_samples_per_s(RESULT.at("hierarchical", "4x4", 1000.0), ALONE) == pytest.approx(800)


def test_a_shape_of_one_node_is_the_same_at_every_rate() -> None:
    assert RESULT.rates == [1000.0, 200.0] and RESULT.shapes == ["1x4", "4x4"]
    assert RESULT.at("allreduce", "1x4", 200.0) == RESULT.at("allreduce", "1x4", 1000.0)


def test_memory_for_the_model_is_what_is_held_beyond_a_run_without_one() -> None:
    assert RESULT.memory_bytes(RESULT.at("allreduce", "4x4", 200.0)) == 10e6
    assert RESULT.memory_bytes(RESULT.at("hierarchical", "4x4", 200.0)) == 60e6


def test_the_verdict_says_what_is_left_and_where_another_was_faster() -> None:
    verdict = RESULT.verdict()
    assert verdict.is_met and "On 4x4 at 200 Mbit/s" in verdict.text
    assert "allreduce 40%, hierarchical 50%" in verdict.text
    swapped = [replace(p, step_s=0.4) if p.strategy == "hierarchical" else p for p in RESULT.points]
    beaten = replace(RESULT, points=tuple(swapped)).verdict()
    assert not beaten.is_met
    assert "not the fastest exact one on 4x4 at 1000 Mbit/s, 4x4 at 200 Mbit/s" in beaten.text


@pytest.mark.parametrize("draw", [scaling.throughput, scaling.efficiencies, scaling.node_costs])
def test_every_figure_has_a_line_for_each_strategy_and_a_bound(draw: Any) -> None:
    figure: go.Figure = draw(RESULT)
    named = [trace.name for trace in figure.data if trace.showlegend]
    assert named[:2] == ["allreduce", "hierarchical"] and len(named) == 3
    assert len({(trace.line.dash, trace.marker.symbol) for trace in figure.data if trace.showlegend}) == 3
    assert len(json.dumps(figure.to_json())) < 20_000


# --- the ladder ------------------------------------------------------------------------------------------------


def test_each_rung_changes_one_part_and_keeps_the_others() -> None:
    configs = Ladder.default(**{"launch.is_emulated": False}).configs(0.1, 2.0)
    assert list(configs) == list(scaling.PARTS)
    names = list(configs)[1:]
    syncs = [configs[name].sync.model_dump() for name in names]
    changed = [
        {key for key in after if after[key] != before[key]}
        for before, after in zip(syncs, syncs[1:], strict=False)
    ]
    assert changed == [{"chunk_bytes"}, {"is_overlapped"}, {"wire"}, set()]
    native, last = configs["native"], configs["large_batch"]
    assert native.sync.name == "parameter_server"
    assert {config.engine.num_epochs for config in configs.values()} == {native.engine.num_epochs}
    assert (native.optimizer.name, last.optimizer.name) == ("sgd", "lars")
    assert (native.engine.global_batch_size, last.engine.global_batch_size) == (64, 128)
    assert last.engine.step_padding_s > native.engine.step_padding_s
    assert {configs[name].engine.global_batch_size for name in names[:-1]} == {64}


def _climb() -> Climb:
    native = replace(
        _point("parameter_server", "4x4", 1000.0, 1.6, 0.1), accuracy=0.9, sent_bytes=(24e6, 8e6)
    )
    ours = replace(_point("hierarchical", "4x4", 1000.0, 0.2, 0.1), accuracy=0.9, sent_bytes=(4e6, 4e6))
    large = replace(ours, batch_size=640, step_s=0.25, accuracy=0.88)
    rungs = {
        "native": native,
        "two_levels": ours,
        "chunks": replace(ours, step_s=0.199),
        "large_batch": large,
    }
    return Climb(
        rungs, dict.fromkeys(rungs, 50e6), "shaped", 0.1, 1.5, {"sgd": 0.1, "lars": 2.0}, {"sgd": 0.8, "lars": 0.9}
    )  # fmt: skip


def test_what_a_rung_gives_is_said_also_where_it_gives_nothing() -> None:
    climb = _climb()
    assert climb.vs_native("two_levels") == pytest.approx(8.0)
    assert climb.bytes_per_sample("native") == pytest.approx(32e6 / 160)
    assert climb.gives("two_levels") == "throughput x8.00, bytes x0.25"
    assert climb.gives("chunks") == "nothing in throughput or bytes"
    assert climb.gives("large_batch") == "throughput x3.18, bytes x0.25; accuracy -2.0 points"
    # Compute of four times the samples would take 0.4 s instead of 0.15 s.
    assert climb.proportional_samples_per_s() == pytest.approx(640 / 0.5)


def test_a_climb_is_read_back_as_it_was_written(runs: Path) -> None:
    assert scaling.read_climb("x") is None
    (runs / "x").mkdir()
    scaling.record_climb(_climb(), "x")
    assert scaling.read_climb("x") == _climb()


def test_the_ladder_is_drawn_tabled_and_reported_whole() -> None:
    climb = _climb()
    figure = scaling.ladder(climb)
    assert len(figure.data) == 4 and all(len(trace.y) == 4 for trace in figure.data)
    assert figure.data[0].text[1] == "800  (x8.0)"
    assert "nothing in throughput" in str(scaling.ladder_table(climb))
    report = _report(climb)
    assert report.figures["throughput_vs_native_two_levels"] == 16.0  # of the blocks: 0.1 s each
    assert report.figures["memory_per_node_mib_native"] == pytest.approx(10e6 / 2**20, rel=1e-3)
    assert any("Had it grown with the batch" in note for note in report.notes)


# --- for real ----------------------------------------------------------------------------------------------------


@pytest.fixture
def netns() -> None:
    try:
        build(load_cluster("1x1")).close()
    except ConfigError as error:
        need(False, str(error))


@pytest.mark.netns
@pytest.mark.parametrize("strategy", ["parameter_server", "hierarchical_bfloat16"])
def test_an_emulated_run_sends_what_the_formula_says(runs: Path, netns: None, strategy: str) -> None:
    study = _study(is_emulated=True, strategies=[strategy], step_padding_s=0.0, max_steps=8)
    (config,) = study.configs()
    point = scaling.run_point(from_overrides({"model.hidden_sizes": [512]}, base=config))
    assert point.is_emulated and point.strategy == strategy
    assert point.sent_bytes == pytest.approx(point.expected_bytes, rel=0.05)
    assert len(point.memory_bytes) == 2 and min(point.memory_bytes) > 1e6


@pytest.mark.netns
def test_the_notebook_runs_small_and_records_its_verdict(runs: Path, tmp_path: Path, netns: None) -> None:
    values = {name: value for name, value in SMALL.items() if name != "name"}
    code, said, executed = _papermill("03_scaling.ipynb", runs, tmp_path, yaml=json.dumps(values))
    assert code == 0, said
    assert len(_outputs(executed, PLOTLY_MIME)) == 4
    assert (tmp_path / "out.ipynb").stat().st_size < MAX_KB * 1000
    printed = _printed(executed)
    assert "links are shaped" in printed and "2/2 hierarchical on 2x2, 200 Mbit/s" in printed
    assert "No ladder has been climbed here" in printed
    record = json.loads(scaling.record_file("scaling").read_text())
    assert len(record["points"]) == 2 and "On 2x2 at 200 Mbit/s" in record["verdict"]["text"]
    assert len(all_runs(runs)) == 1 + 2 + 2, "one alone, two points, two without a model"


@pytest.mark.slow
def test_the_notebook_says_plainly_when_links_are_not_shaped(runs: Path, tmp_path: Path) -> None:
    values = {**SMALL, "strategies": ["hierarchical"], "max_steps": 4, "is_emulated": False}
    code, said, executed = _papermill("03_scaling.ipynb", runs, tmp_path, yaml=json.dumps(values))
    assert code == 0, said
    assert "LINKS ARE NOT SHAPED (is_emulated is false)" in _printed(executed)
    record = json.loads(scaling.record_file("scaling").read_text())
    assert "on loopback" in record["verdict"]["text"] and "NOT SHAPED" in record["verdict"]["text"]
