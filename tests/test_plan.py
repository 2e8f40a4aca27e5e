"""Plans: which split is run, what it promises, as a file, and if the cluster were different."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.cluster.cost import exposed_s, payload_rate, wire_s
from labkit.cluster.plan import make_plan, predict
from labkit.cluster.plan_file import pin, read_plan, save_plan
from labkit.config import ExperimentConfig, from_mapping, from_overrides, load_cluster
from labkit.errors import ConfigError
from labkit.lab import heterogeneity
from labkit.lab.heterogeneity import diff_table, doubts, plan_figure, plan_lines, plan_table, what_if


def worker(speed: float, alpha_s: float = 0.0, **others: Any) -> dict[str, Any]:
    """A worker that was measured: `speed` samples/s in large batches."""
    limit = others.pop("max_micro_batch_size", None)
    profile = {"alpha_s": alpha_s, "beta_s": 1 / speed, "largest": 1000, "max_micro_batch_size": limit}
    return {"profile": profile, **others}


def experiment(workers: list[dict[str, Any]], batch: int = 64, **sections: Any) -> ExperimentConfig:
    """Each worker on a node of its own."""
    nodes = [{"name": f"n{index}", "workers": [one]} for index, one in enumerate(workers)]
    engine = {"global_batch_size": batch, **sections.pop("engine", {})}
    return from_mapping({"cluster": {"nodes": nodes}, "engine": engine, **sections})


FOUR = [worker(400.0), worker(400.0), worker(100.0), worker(100.0)]


# --- which split ---------------------------------------------------------------------------------------------


def test_four_fast_and_slow_workers_by_hand() -> None:
    plan = make_plan(experiment(FOUR))
    assert (plan.origin, plan.local_batch_sizes) == ("planned", (26, 26, 6, 6))


def test_what_the_cluster_gives_comes_first() -> None:
    given_sizes = [{**one, "local_batch_size": size} for one, size in zip(FOUR, (1, 2, 3, 58), strict=True)]
    plan = make_plan(experiment(given_sizes))
    assert (plan.origin, plan.local_batch_sizes) == ("given", (1, 2, 3, 58))


def test_without_profiles_or_when_asked_the_split_is_even() -> None:
    assert make_plan(from_overrides(["cluster=1x3"])).local_batch_sizes == (22, 21, 21)
    plan = make_plan(experiment(FOUR, shares={"name": "even"}))
    assert (plan.origin, plan.local_batch_sizes) == ("even", (16, 16, 16, 16))
    some = [FOUR[0], {"device": "cpu"}]
    assert make_plan(experiment(some)).origin == "even"


def test_a_device_short_of_memory_takes_micro_steps() -> None:
    config = experiment([worker(400.0, max_micro_batch_size=8), worker(100.0)], 50)
    plan = make_plan(config)
    assert plan.local_batch_sizes == (40, 10)
    assert plan.micro_batch_sizes == (8, None)
    smaller = from_overrides({"engine.micro_batch_size": 4}, base=config)
    assert make_plan(smaller).micro_batch_sizes == (4, 4)


@pytest.mark.parametrize(
    ("workers", "shares", "message"),
    [
        ([FOUR[0], {}], "planned", "must have a profile of every worker with shares.name 'planned', got none of worker 1"),
        ([worker(1.0, max_batch_size=10), worker(1.0, max_batch_size=20)], "planned", "34"),
        ([{"max_batch_size": 10}, {}], "even", "max_batch_size of worker 0 must be at least its even share of 32"),
    ],
)  # fmt: skip
def test_a_split_that_can_not_be_is_refused(workers: list[dict[str, Any]], shares: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(experiment(workers, shares={"name": shares}))


@pytest.mark.parametrize("speed", ["0", "-1", "nan"])
def test_a_speed_that_is_none_is_refused(speed: str) -> None:
    nodes = f"{{nodes: [{{name: a, workers: 2, speed: {speed}}}]}}"
    with pytest.raises(ConfigError, match="speed must be"):
        from_overrides([f"cluster={nodes}"])


def test_rebalancing_needs_a_strategy_that_knows_all_times() -> None:
    with pytest.raises(ConfigError, match="shares.is_rebalanced must be false with sync.name 'local_sgd'"):
        from_overrides(["sync=local_sgd", "shares.is_rebalanced=true"])


def test_a_plan_that_can_not_be_starts_nothing(runs: Path) -> None:
    import labkit

    config = from_overrides({"shares.name": "planned"})
    with pytest.raises(ConfigError, match="labkit probe"):
        labkit.start(config)
    assert not list(runs.glob("*/*"))


# --- what it promises -----------------------------------------------------------------------------------------


def with_links(config: ExperimentConfig, mbit: float, gradient_bytes: int) -> ExperimentConfig:
    names = [node.name for node in config.cluster.nodes]
    links = [{"source": a, "target": b, "mbit": mbit, "latency_s": 0} for a in names for b in names if a != b]
    values = config.model_dump(mode="json")
    values["cluster"] |= {"measured_links": links, "gradient_bytes": gradient_bytes}
    return from_mapping(values)


def test_a_prediction_by_hand() -> None:
    found = predict(experiment(FOUR, 100), make_plan(experiment(FOUR, 100)))
    assert found is not None
    assert found.step_s == pytest.approx(0.1)
    assert found.samples_per_s == pytest.approx(1000) == found.limit_samples_per_s
    assert found.equal_split_s == pytest.approx(0.25)
    assert predict(from_overrides([]), make_plan(from_overrides([]))) is None


def test_what_the_backward_pass_does_not_hide_is_added() -> None:
    # 100 Mbit/s carry 1.25 MB in 0.1 s: an all-reduce over four nodes moves 1.5 times the gradient.
    config = with_links(experiment(FOUR, 100, sync="hierarchical"), 100.0, 10_000_000)
    assert payload_rate(config.cluster) == 100.0
    assert wire_s(config, 10_000_000) == pytest.approx(1.2)
    chunk = 2**20 / 10_000_000
    assert exposed_s(config, 0.1) == pytest.approx(1.2 - 0.1 * 2 / 3 * (1 - chunk))
    assert exposed_s(config, 100.0) == pytest.approx(1.2 * chunk)  # all but the last chunk is hidden
    late = from_overrides({"sync.is_overlapped": False}, base=config)
    assert exposed_s(late, 100.0) == pytest.approx(1.2)


@given(st.lists(st.floats(1, 1000), min_size=1, max_size=6), st.integers(6, 500))
def test_a_plan_is_never_slower_than_an_equal_split(speeds: list[float], batch: int) -> None:
    config = experiment([worker(speed, alpha_s=0.01) for speed in speeds], batch)
    found = predict(config, make_plan(config))
    assert found is not None
    assert found.step_s <= found.equal_split_s * (1 + 1e-12)
    assert found.samples_per_s <= found.limit_samples_per_s * (1 + 1e-12)


def test_what_may_be_off_is_said() -> None:
    config = experiment(FOUR, 64)
    assert doubts(config, make_plan(config)) == []
    values = config.model_dump(mode="json")
    values["cluster"]["profiled_model"] = "another"
    values["cluster"]["nodes"][0]["workers"][0]["profile"]["largest"] = 8
    odd = from_mapping(values)
    first, second = doubts(odd, make_plan(odd))
    assert first.startswith("profiles are of another, not of convnet")
    assert second == "worker 0 would compute 26 samples at once; 1 to 8 were measured"


def test_a_plan_as_table_figure_and_lines() -> None:
    config = experiment(FOUR, 100)
    plan = make_plan(config)
    assert [row[:3] for row in plan_table(config, plan).rows] == [
        ("0 on n0", "40", "40.0%"),
        ("1 on n1", "40", "40.0%"),
        ("2 on n2", "10", "10.0%"),
        ("3 on n3", "10", "10.0%"),
    ]
    bars = plan_figure(config, plan).data[0]
    assert list(bars.x) == pytest.approx([100.0] * 4)
    assert "2.50 times as long" in plan_lines(config, plan)[2]
    unknown = from_overrides(["cluster=1x2"])
    assert "labkit probe" in plan_lines(unknown, make_plan(unknown))[0]
    assert list(plan_figure(unknown, make_plan(unknown)).data[0].x) == [32, 32]


# --- groups ------------------------------------------------------------------------------------------------------


def test_without_an_asynchronous_strategy_all_are_one_group() -> None:
    assert make_plan(experiment(FOUR)).groups == ((0, 1, 2, 3),)


def test_the_hybrid_groups_like_workers() -> None:
    plan = make_plan(with_links(experiment(FOUR, 480, sync="hybrid"), 1000.0, 1_300_000))
    assert (plan.groups, plan.shares) == (((0, 1), (2, 3)), (384, 96))
    assert plan.why_groups.startswith("4 workers in 2 groups")


def test_a_prediction_for_groups_by_hand() -> None:
    config = with_links(experiment(FOUR, 100, sync="hybrid"), 1000.0, 1_000_000)
    found = predict(config, make_plan(config))
    assert found is not None and found.samples_per_s == pytest.approx(1000)  # all hides behind 0.1 s
    slow = with_links(
        experiment(FOUR, 100, sync={"name": "hybrid", "groups": [[0, 1], [2, 3]]}), 100.0, 1_000_000
    )
    found = predict(slow, make_plan(slow))
    # 1 MB takes 80 ms: sums and shares 1 + 1 of it, pushes and pulls (3 + 1) / 4
    assert found is not None and found.step_s == pytest.approx(0.24)
    table = plan_table(slow, make_plan(slow))
    assert table.columns[4] == "group" and [row[4] for row in table.rows] == ["0", "0", "1", "1"]
    assert "groups: groups are given" in plan_lines(slow, make_plan(slow))


def test_groups_that_the_links_can_not_carry_are_taken_apart() -> None:
    # 0.48 s of computing; 3 MB take 0.24 s at 100 Mbit/s, 3.25 times of which a group of two would need
    plan = make_plan(with_links(experiment(FOUR, 480, sync="hybrid"), 100.0, 3_000_000))
    assert plan.groups == ((0,), (1,), (2,), (3,))
    assert plan.why_groups.startswith("every worker for itself: links are too slow for groups")


def test_without_profiles_every_node_is_a_group_and_given_groups_come_first() -> None:
    assert make_plan(from_overrides(["cluster=2x2", "sync=hybrid"])).groups == ((0, 1), (2, 3))
    assert make_plan(from_overrides(["cluster=2x2", "sync=ssp"])).groups == ((0,), (1,), (2,), (3,))
    given_groups = from_overrides(["cluster=2x2", "sync=hybrid", "sync.groups=[[0, 3], [1, 2]]"])
    assert make_plan(given_groups).groups == ((0, 3), (1, 2))


def test_a_group_without_samples_is_refused() -> None:
    idle = [{**one, "local_batch_size": size} for one, size in zip(FOUR, (64, 0, 0, 0), strict=True)]
    with pytest.raises(ConfigError, match=r"every group must get at least one sample, got none for \[1\]"):
        make_plan(experiment(idle, sync="ssp"))


# --- as a file --------------------------------------------------------------------------------------------------


def test_a_plan_is_saved_changed_by_hand_and_pinned(tmp_path: Path) -> None:
    config, file = experiment(FOUR), tmp_path / "plan.yaml"
    save_plan(config, make_plan(config), file)
    assert read_plan(file) == {"n0": [26], "n1": [26], "n2": [6], "n3": [6]}
    file.write_text(
        file.read_text().replace("n0:\n  - 26", "n0:\n  - 25").replace("n3:\n  - 6", "n3:\n  - 7")
    )
    pinned = pin(config, read_plan(file), str(file))
    assert make_plan(pinned).local_batch_sizes == (25, 26, 6, 7)
    assert make_plan(pinned).origin == "given"
    changed = diff_table(config, make_plan(pinned), make_plan(config))
    assert changed.rows == (("0 on n0", "25", "26", "+1"), ("3 on n3", "7", "6", "-1"))


@pytest.mark.parametrize("name", ["08", "1e5", "0o17", "no"])
def test_a_plan_of_a_node_that_is_named_like_a_number_reads_back(tmp_path: Path, name: str) -> None:
    config = from_mapping({"cluster": {"nodes": [{"name": name, "workers": [{}, {}]}]}})
    file = tmp_path / "plan.yaml"
    save_plan(config, make_plan(config), file)
    assert read_plan(file) == {name: list(make_plan(config).local_batch_sizes)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("local_batch_sizes: {n0: [64]}", r"must be for this cluster \(n0: 1, n1: 1, n2: 1, n3: 1\), got one for n0: 1"),
        ("local_batch_sizes: {n0: [26], n1: [26], n2: [6], n3: [5]}", r"must sum to engine.global_batch_size \(64\), got 26 \+ 26 \+ 6 \+ 5 = 63"),
        ("local_batch_sizes: {n0: [-1], n1: [26], n2: [6], n3: [6]}", "a list of whole numbers for each node"),
        ("local_batch_sizes: {n0: [true], n1: [26], n2: [6], n3: [6]}", "a list of whole numbers for each node"),
        ("shares: 3", "must hold local_batch_sizes"),
        ("[", "must be YAML"),
    ],
)  # fmt: skip
def test_a_bad_plan_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        pin(experiment(FOUR), read_plan(file), str(file))
    assert "plan.yaml" in str(caught.value)
    with pytest.raises(ConfigError, match="must be a readable file"):
        read_plan(tmp_path / "none.yaml")


# --- if it were different ----------------------------------------------------------------------------------------


def test_what_if_plans_anew_and_drops_pins() -> None:
    config = with_links(experiment([{**one, "local_batch_size": 16} for one in FOUR]), 1000.0, 4)
    same = what_if(config)
    assert make_plan(same).local_batch_sizes == (26, 26, 6, 6)
    other = what_if(config, global_batch_size=100, speeds={"n2": 4, "n3": 4}, link_mbit=10.0)
    assert make_plan(other).local_batch_sizes == (25, 25, 25, 25)
    assert payload_rate(other.cluster) == 10.0


def test_the_explorer_follows_its_sliders() -> None:
    import labkit

    explorer = labkit.PlanExplorer(with_links(experiment(FOUR), 1000.0, 4))
    assert explorer.plan.local_batch_sizes == (26, 26, 6, 6)
    explorer._batch.value = 100
    explorer._speeds["n2"].value = explorer._speeds["n3"].value = 4.0
    assert explorer.plan.local_batch_sizes == (25, 25, 25, 25)
    assert "25" in explorer._table.value
    explorer._link.value = 10.0
    assert explorer.config.cluster.measured_links[0].mbit == pytest.approx(10.0)
    with pytest.raises(ConfigError, match="labkit probe"):
        labkit.PlanExplorer(from_overrides(["cluster=1x2"]))


def test_a_study_names_what_is_wrong() -> None:
    values = {"cluster": "4x1-unlike", "step_padding_s": 0.1, "throttled_rank": 1, "throttle_factor": 3.0}
    values |= {"hybrid": {"optimizer.momentum": 0.5}, "max_steps": 10}
    assert heterogeneity.Study.from_parameters(values).base.cluster == load_cluster("4x1-unlike")
    with pytest.raises(ConfigError, match="throttled_rank must be one of the 4 workers, got 4"):
        heterogeneity.Study.from_parameters({**values, "throttled_rank": 4})
    with pytest.raises(ConfigError, match="throttle_factor must be above 0, got 0"):
        heterogeneity.Study.from_parameters({**values, "throttle_factor": 0})
