"""The set-up files agree with each other and with what labkit imports."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
IMPORT_NAMES = {
    "pyzmq": "zmq",
    "PyYAML": "yaml",
    "pillow": "PIL",
    "scikit-learn": "sklearn",
    "ipython": "IPython",
}
COMES_ALONG = {"pydantic_core"}  # pydantic asks for its exact version
NOT_IMPORTED = {"ipykernel", "jupyterlab", "sklearn"}  # started, read, used by another library


def pins(name: str) -> dict[str, str]:
    """Exact version of each package a requirements file names."""
    lines = (ROOT / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def declared(requirements: list[str]) -> set[str]:
    return {re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0] for line in requirements}


def third_party_imports() -> set[str]:
    """Top-level names, outside the standard library, that the package imports anywhere."""
    found: set[str] = set()
    for file in (ROOT / "labkit").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(str(node.module).split(".")[0])
    return {name for name in found if name not in sys.stdlib_module_names and name != "labkit"}


def test_every_declared_package_is_pinned_and_the_reverse() -> None:
    assert declared(PYPROJECT["project"]["dependencies"]) == set(pins("requirements.txt"))
    assert declared(PYPROJECT["project"]["optional-dependencies"]["test"]) == set(
        pins("tests/requirements.txt")
    )


def test_a_pin_is_one_exact_version() -> None:
    for name in ("requirements.txt", "tests/requirements.txt"):
        lines = [line for line in (ROOT / name).read_text().splitlines() if line and line[0] not in "#-"]
        assert lines and all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][^ ;]*", line) for line in lines)


def test_what_is_imported_is_declared_and_the_reverse() -> None:
    names = {IMPORT_NAMES.get(name, name) for name in declared(PYPROJECT["project"]["dependencies"])}
    peers = declared(PYPROJECT["project"]["optional-dependencies"]["bench"])
    names |= {name.replace("-", "_") for name in peers}  # a benchmark says so when one is missing
    assert third_party_imports() - COMES_ALONG == names - NOT_IMPORTED


def test_pins_are_what_these_tests_run_with() -> None:
    for name, version in {**pins("requirements.txt"), **pins("tests/requirements.txt")}.items():
        assert importlib.metadata.version(name).split("+")[0] == version, name


def test_every_dependency_says_why_it_is_there() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.findall(r'^    "[A-Za-z].*$', text.split("[tool.")[0], flags=re.MULTILINE)
    assert len(listed) > 20
    assert all(re.search(r",\s+# \w+", line) for line in listed)


def test_conda_takes_its_list_from_requirements_txt() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    python, pip, rest = environment["dependencies"]
    assert python.startswith("python=3.1") and pip == "pip"
    assert rest == {"pip": ["-r requirements.txt"]}


def test_the_name_on_the_index_is_not_used() -> None:
    assert PYPROJECT["project"]["name"] == "labkit-lab"
    assert "pip install labkit" not in (ROOT / "README.md").read_text()


def test_no_machine_path_or_registry_in_the_set_up() -> None:
    names = ["Makefile", "README.md", "pyproject.toml", "requirements.txt", "tests/requirements.txt"]
    for name in [*names, "environment.yml", ".ci/run"]:
        text = (ROOT / name).read_text()
        assert not re.search(r"/home/|/root/|/work/|/opt/|//[a-z.]*pypi|find-links", text), name


@pytest.mark.parametrize("python", ["/nonexistent/python3", "fake"])
def test_make_names_the_remedy_for_an_old_or_missing_python(python: str, tmp_path: Path) -> None:
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\ncase $1 in --version) echo Python 3.9.18;; *) exit 1;; esac\n")
    old.chmod(0o755)
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("requirements.txt", "pyproject.toml"):
        (tmp_path / name).write_text("")
    given = str(old) if python == "fake" else python
    done = make(tmp_path, "run", f"PYTHON={given}")
    assert done.returncode
    assert "labkit needs Python 3.11 or newer" in done.stderr and given in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_make_installs_once_and_again_only_when_a_list_changes(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("requirements.txt", "pyproject.toml"):
        (tmp_path / name).write_text("")
    bin_dir = tmp_path / ".venv" / "bin"
    bin_dir.mkdir(parents=True)
    (bin_dir / "python").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    (bin_dir / "python").chmod(0o755)

    def calls() -> list[str]:
        (tmp_path / "calls").unlink(missing_ok=True)
        assert make(tmp_path, "run").returncode == 0
        return (tmp_path / "calls").read_text().splitlines()

    run = "-m labkit run notebooks/00_quickstart.ipynb"
    first = calls()
    assert len(first) == 2 and first[0].endswith("install --disable-pip-version-check -r requirements.txt")
    assert first[1] == run
    assert calls() == [run]
    os.utime(tmp_path / "requirements.txt", (2e9, 2e9))
    assert len(calls()) == 2


def test_make_clean_keeps_the_runs(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    for folder in (".venv/bin", "runs/a/b", "labkit/__pycache__", "tests", "notebooks", ".mypy_cache"):
        (tmp_path / folder).mkdir(parents=True)
    assert make(tmp_path, "clean").returncode == 0
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")}
    assert left == {"Makefile", "runs", "runs/a", "runs/a/b", "labkit", "tests", "notebooks"}


def make(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["make", *words], cwd=folder, capture_output=True, text=True, timeout=60)
