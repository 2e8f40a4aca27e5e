"""Probing: times of batches, memory's limit, links, and what goes into the cluster's file."""

import json
from pathlib import Path
from typing import Any

import pytest

import labkit
from labkit.cli import main
from labkit.cluster.placement import placements
from labkit.cluster.profile import fit_rounds, profile, uncertainty
from labkit.config import from_mapping, load_cluster
from labkit.errors import ConfigError, RunFailed
from labkit.lab import heterogeneity
from labkit.launch.emulation import check
from tests.support import need

SIZES = (1, 2, 4, 8, 16)

# --- from measurements to a profile ------------------------------------------------------------------------


def rounds(alpha_s: float, beta_s: float, factors: tuple[float, ...]) -> list[dict[int, float]]:
    return [{size: factor * (alpha_s + beta_s * size) for size in SIZES} for factor in factors]


def test_a_line_is_found_again() -> None:
    found = profile(rounds(0.01, 0.002, (1.0, 1.0, 1.0)), max_micro_batch_size=16)
    assert (found.alpha_s, found.beta_s) == (pytest.approx(0.01), pytest.approx(0.002))
    assert (found.smallest, found.largest, found.max_micro_batch_size) == (1, 16, 16)
    assert (found.residual, found.uncertainty) == (0.0, 0.0)


def test_one_bad_round_does_not_count() -> None:
    device, _ = fit_rounds(rounds(0.01, 0.002, (1.0, 5.0, 1.0)))
    assert device.time_s(16) == pytest.approx(0.042)


def test_uncertainty_is_how_far_the_halves_disagree() -> None:
    assert uncertainty(rounds(0.01, 0.002, (1.0,))) == 1.0
    assert uncertainty(rounds(0.01, 0.002, (1.0, 1.2))) == pytest.approx(0.1 / 1.1)
    assert uncertainty(rounds(0.01, 0.002, (1.0, 1.2, 1.0, 1.2))) == pytest.approx(0.1 / 1.1)


# --- the real thing -------------------------------------------------------------------------------------------

PADDED = {"model": "mlp", "engine": {"global_batch_size": 16, "step_padding_s": 0.04, "num_threads": 1}}


def unlike(**sections: Any) -> Any:
    nodes = [{"name": "fast", "workers": 2, "speed": 4}, {"name": "slow", "workers": 1}]
    return from_mapping({**PADDED, "cluster": {"nodes": nodes}, **sections})


def test_a_probe_finds_speeds_and_links_and_plans_by_them(runs: Path, tmp_path: Path) -> None:
    found = heterogeneity.probe(unlike(), wait=lambda run: run.wait(120))
    fast, also_fast, slow = (worker.profile for worker in found.workers)
    assert slow.beta_s / fast.beta_s == pytest.approx(4, rel=0.25)
    assert (slow.smallest, slow.largest, slow.max_micro_batch_size) == (1, 16, None)
    assert {(link.source, link.target) for link in found.links} == {
        ("fast", "slow"),
        ("slow", "fast"),
        ("fast", "fast"),
    }
    assert found.gradient_bytes == 4 * (64 * 128 + 128 + 128 * 10 + 10)
    assert [row[0] for row in heterogeneity.profile_table(found).rows] == [
        "0 on fast",
        "1 on fast",
        "2 on slow",
    ]
    assert len(heterogeneity.profiles(found).data) == 6
    assert len(heterogeneity.link_table(found).rows) == 3
    file = found.save(tmp_path / "probed.yaml")
    assert load_cluster(str(file)) == found.cluster
    plan = labkit.make_plan(unlike(cluster=str(file)))
    assert plan.origin == "planned" and plan.local_batch_sizes[2] in (1, 2, 3)
    assert also_fast.beta_s == pytest.approx(fast.beta_s, rel=0.2)


def test_saving_keeps_the_comments_at_the_top(tmp_path: Path) -> None:
    config = unlike()
    workers = tuple(
        heterogeneity.WorkerProbe(place, (), profile(rounds(0.0, 1e-5, (1.0, 1.0))))
        for place in placements(config.cluster)
    )
    file = tmp_path / "cluster.yaml"
    file.write_text("# our machines\n# of 2026\nnodes: []\n# gone\n")
    heterogeneity.Probe(config, workers, (), 4).save(file)
    assert file.read_text().startswith("# our machines\n# of 2026\nnodes:\n")
    assert "1.0e-05" in file.read_text()
    with pytest.raises(ConfigError, match="--output must be a file that can be written"):
        heterogeneity.Probe(config, workers, (), 4).save(tmp_path)


MODEL = """
import torch

class Hungry(torch.nn.Module):
    def __init__(self, limit, text):
        super().__init__()
        self.layer, self.limit, self.text = torch.nn.Linear(64, 10), limit, text

    def forward(self, x):
        if len(x) > self.limit:
            raise RuntimeError(self.text)
        return self.layer(x.flatten(1))

def build(data_info, limit, text):
    return Hungry(limit, text)
"""


def hungry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, text: str) -> Any:
    (tmp_path / "hungry_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = {"name": "hungry_model:build", "options": {"limit": limit, "text": text}}
    return from_mapping({**PADDED, "model": model, "cluster": "1x1"})


def test_memorys_limit_is_found_between_powers_of_two(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = hungry(tmp_path, monkeypatch, 11, "CUDA out of memory. Tried to allocate 20 GiB")
    found = heterogeneity.probe(config, wait=lambda run: run.wait(120))
    (worker,) = found.workers
    assert worker.profile.max_micro_batch_size == 11
    assert worker.reason.startswith("CUDA out of memory")
    assert sorted(worker.rounds[0]) == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("out of memory", r"model must run with one sample on worker 0 \(node0\), got out of memory"),
        ("shapes differ", r"model must run with 1 samples on worker 0 \(node0\), got shapes differ"),
    ],
)
def test_a_model_that_fails_at_every_size_is_named(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    with pytest.raises(RunFailed, match=message):
        heterogeneity.probe(hungry(tmp_path, monkeypatch, 0, text), wait=lambda run: run.wait(120))


def _can_emulate() -> bool:
    try:
        check(load_cluster("2x1"))
    except ConfigError:
        return False
    return True


def test_an_emulated_link_is_measured(runs: Path, tmp_path: Path) -> None:
    need(_can_emulate(), "nodes can't be emulated here: needs iproute2 and the right to make namespaces")
    file = tmp_path / "c.yaml"
    nodes = "nodes: [{name: a, workers: 1, up_mbit: 25}, {name: b, workers: 1}]"
    file.write_text(f"# two\nlink_mbit: 50\n{nodes}\n")
    words = ["model=mlp", "engine.global_batch_size=8", "engine.step_padding_s=0.02", "--emulate"]
    assert main(["probe", str(file), *words, "--figure", str(tmp_path / "f.html"), "--json"]) == 0
    rates = {(link.source, link.target): link.mbit for link in load_cluster(str(file)).measured_links}
    assert rates["a", "b"] == pytest.approx(0.956 * 25, rel=0.15)
    assert rates["b", "a"] == pytest.approx(0.956 * 50, rel=0.15)
    assert file.read_text().startswith("# two\n")
    assert "plotly" in (tmp_path / "f.html").read_text()


# --- command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["2x2"], "--output must be given for a cluster that is no file of yours, got '2x2'"),
        (["2x2", "--output", "no/such/folder/c.yaml"], "--output must be in a folder that exists"),
        (["2x2", "--output", "c.yaml", "--cluster", "1x1"], "the cluster must be the first word"),
        (["2x3x", "--output", "c.yaml"], "cluster must be NODESxWORKERS"),
    ],
)
def test_bad_words_are_refused(
    runs: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["probe", *words]) == 2
    assert message in capsys.readouterr().err


def test_plan_on_the_command_line(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster, plan = tmp_path / "c.yaml", tmp_path / "plan.yaml"
    lines = [
        f"{{name: {n}, workers: 1, profile: {{alpha_s: 0, beta_s: {b}}}}}" for n, b in (("a", 1), ("b", 3))
    ]
    cluster.write_text(f"nodes: [{', '.join(lines)}]\n")
    words = ["--cluster", str(cluster), "engine.global_batch_size=8"]
    assert main(["plan", *words, "--save", str(plan)]) == 0
    assert "8 samples per step, split so that all finish together" in capsys.readouterr().out
    assert main(["plan", *words, "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["local_batch_sizes"] == {"a": [6], "b": [2]} and read["gain"] == pytest.approx(2)
    plan.write_text(plan.read_text().replace("- 6", "- 7").replace("- 2", "- 1"))
    assert main(["plan", *words, "--diff", str(plan)]) == 0
    assert "+1" in capsys.readouterr().out
    assert main(["plan", *words, "--plan", str(plan), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["origin"] == "given"
    assert main(["config", *words, "--plan", str(plan), "--json"]) == 0
    nodes = json.loads(capsys.readouterr().out)["cluster"]["nodes"]
    assert [node["workers"][0]["local_batch_size"] for node in nodes] == [7, 1]
