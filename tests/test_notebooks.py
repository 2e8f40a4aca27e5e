"""The notebooks: clean as files, and run by plain papermill."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

import labkit
from labkit.config import from_parameters
from labkit.lab import heterogeneity, large_batch, scaling
from labkit.lab.show import PLOTLY_MIME
from labkit.runfolder import RunFolder, RunState, all_runs

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MAX_KB = 300
STUDIES: dict[str, Any] = {  # of several runs
    "03_scaling.ipynb": scaling.Study.from_parameters,
    "04_large_batch.ipynb": large_batch.Study.from_parameters,
    "05_heterogeneity.ipynb": heterogeneity.Study.from_parameters,
    "06_input.ipynb": labkit.input.Study.from_parameters,
    "07_memory.ipynb": labkit.activations.Study.from_parameters,
}


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _code(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in _read(path)["cells"] if cell["cell_type"] == "code"]


def _parameters(path: Path) -> dict[str, Any]:
    """Names and values of the parameters cell; a line that is no annotated literal fails."""
    lines = ast.parse("".join(_code(path)[0]["source"])).body
    found = {}
    for line in lines:
        assert isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name), ast.unparse(line)
        assert line.value is not None, ast.unparse(line)
        found[line.target.id] = ast.literal_eval(line.value)
    return found


# --- as files ----------------------------------------------------------------------------------------


def test_there_are_notebooks() -> None:
    assert [path.name for path in NOTEBOOKS if path.name.startswith(("00", "02"))] == [
        "00_quickstart.ipynb",
        "02_train.ipynb",
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_in_git_is_valid_small_and_without_outputs(path: Path) -> None:
    nbformat.validate(nbformat.read(path, as_version=4))
    notebook = _read(path)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert "widgets" not in notebook["metadata"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in _code(path))
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    assert path.stat().st_size < 200_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_the_first_code_cell_and_no_other_holds_the_parameters(path: Path) -> None:
    tags = [cell["metadata"].get("tags", []) for cell in _code(path)]
    assert "parameters" in tags[0] and not any("parameters" in others for others in tags[1:])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_parameters_are_annotated_literals_that_each_say_what_they_are(path: Path) -> None:
    assert _parameters(path)
    assert all("  # " in line for line in "".join(_code(path)[0]["source"]).splitlines())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_the_default_parameters_are_an_experiment(path: Path) -> None:
    STUDIES.get(path.name, from_parameters)(_parameters(path))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_asks_one_question_and_holds_no_library_code(path: Path) -> None:
    first = _read(path)["cells"][0]
    assert first["cell_type"] == "markdown" and first["source"][0].startswith("# ")
    assert first["source"][0].strip().endswith("?")
    for cell in _code(path):
        source = "".join(cell["source"])
        assert len(source.splitlines()) <= 12
        assert not any(
            isinstance(node, (ast.FunctionDef, ast.ClassDef)) for node in ast.walk(ast.parse(source))
        )


# --- run by plain papermill ------------------------------------------------------------------------------


def _papermill(
    notebook: str, runs: Path, cwd: Path, *parameters: str, yaml: str = "{}"
) -> tuple[int, str, Any]:
    """Run a notebook from `cwd`; exit code, what papermill said, the executed notebook."""
    out = cwd / "out.ipynb"
    pairs = [part for text in parameters for part in ("-p", *text.split("=", 1))]
    command = [
        sys.executable,
        "-m",
        "papermill",
        str(FOLDER / notebook),
        str(out),
        "--no-progress-bar",
        *pairs,
        "-y",
        yaml,
    ]
    environment = {**os.environ, "LABKIT_RUNS": str(runs)}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    return done.returncode, done.stderr, _read(out)


def _outputs(notebook: Any, kind: str) -> list[Any]:
    found = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    return [output["data"][kind] for output in found if kind in output.get("data", {})]


def _printed(notebook: Any) -> str:
    found = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    return "".join("".join(output["text"]) for output in found if output["output_type"] == "stream")


def _only_run(runs: Path) -> RunFolder:
    (folder,) = all_runs(runs)
    return folder


@pytest.mark.parametrize(
    ("notebook", "parameters"),
    [
        pytest.param("00_quickstart.ipynb", ["num_epochs=2", "cluster=2x2"], marks=pytest.mark.slow),
        ("02_train.ipynb", ["model=mlp", "num_epochs=2", "learning_rate=0.05", "seed=3"]),
    ],
    ids=["quickstart", "train"],
)
def test_a_notebook_trains_from_any_folder_and_stays_small(
    runs: Path, tmp_path: Path, notebook: str, parameters: list[str]
) -> None:
    cwd = tmp_path / "an ümlaut"
    cwd.mkdir()
    code, said, executed = _papermill(notebook, runs, cwd, *parameters)
    assert code == 0, said
    folder = _only_run(runs)
    config = folder.read_config()
    assert config.engine.num_epochs == 2
    assert folder.read_status().state is RunState.FINISHED
    assert folder.read_json(folder.result_file)["step"] == 48
    assert folder.read_json(folder.verdict_file)["is_met"] is True
    assert len(_outputs(executed, PLOTLY_MIME)) == 3
    assert not _outputs(executed, "application/vnd.jupyter.widget-view+json")
    assert "widgets" not in executed["metadata"]
    assert (cwd / "out.ipynb").stat().st_size < MAX_KB * 1000
    assert "finished at step 48/48" in _printed(executed)
    json.loads(
        (cwd / "out.ipynb").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON")
    )


def test_a_failed_run_fails_its_notebook_with_the_root_cause_first(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "broken_model.py").write_text(
        "def build(data_info):\n    raise ValueError('no such layer')\n"
    )
    code, said, executed = _papermill("02_train.ipynb", runs, tmp_path, "model=broken_model:build")
    assert code != 0
    status = _only_run(runs).read_status()
    assert status.state is RunState.FAILED and status.error is not None
    assert "no such layer" in status.error.message
    (error,) = [o for c in executed["cells"] for o in c.get("outputs", []) if o["output_type"] == "error"]
    assert error["ename"] == "RunFailed" and status.error.message in error["evalue"]
    lines = "\n".join(error["traceback"])
    assert "broken_model.py" in lines and "labkit/lab/" not in lines, "the worker's traceback, not ours"
    assert _only_run(runs).read_json(_only_run(runs).verdict_file)["is_met"] is False


def test_a_typo_in_a_parameter_stops_the_notebook_before_anything_starts(runs: Path, tmp_path: Path) -> None:
    code, said, _ = _papermill("02_train.ipynb", runs, tmp_path, "leraning_rate=0.5")
    assert code != 0 and "learning_rate" in said
    assert all_runs(runs) == []
