"""The folder list is the architecture: imports only go down, and each library has one home."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "labkit"

# From the top down. A layer may import itself and what stands below; siblings in one row do not meet.
LAYERS: list[set[str]] = [
    {"__main__", "__init__"},
    {"cli"},
    {"bench"},
    {"lab"},
    {"launch"},
    {"engine"},
    {"sync", "tasks"},
    {"comm", "data", "memory"},
    {"cluster", "optim"},
    {"runfolder"},
    {"config"},
    {"seeding", "errors", "processes"},
]
DEPTH = {name: depth for depth, row in enumerate(LAYERS) for name in row}

# A library, and the only places that may name it.
HOMES = {
    "torch.distributed": {"comm", "launch/elastic.py", "bench"},
    "mlflow": {"lab/tracking"},
    "papermill": {"lab"},
    "ipywidgets": {"lab/widgets"},
    "zmq": {"comm"},
    "pyarrow": {"data"},
    "PIL": {"data"},
}
NO_TORCH = {"lab", "cli", "config", "cluster", "runfolder.py", "errors.py", "seeding.py"}
# Run in the fork server, which has torch; everything else of `launch` is imported by notebooks.
FORK_SERVER = {
    "supervisor",
    "member",
    "groups",
    "local",
    "elastic",
    "preload",
    "peers",
    "forked",
    "machines",
    "verdict",
}


def _files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _imports(file: Path) -> Iterator[tuple[str, bool]]:
    """Modules that a file imports, and whether at import time (not inside a function or for types only)."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    late: set[ast.AST] = set()
    for node in ast.walk(tree):
        is_types_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if is_types_only or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            late.update(ast.walk(node))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node not in late
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module, node not in late
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node not in late


def _layer(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _is_in(file: Path, places: set[str]) -> bool:
    path = file.relative_to(PACKAGE).as_posix()
    return any(path == place or path.startswith(f"{place}/") or path == f"{place}.py" for place in places)


def test_every_module_belongs_to_a_layer() -> None:
    assert {_layer(file) for file in _files()} <= set(DEPTH)


@pytest.mark.parametrize("file", _files(), ids=lambda file: file.relative_to(PACKAGE).as_posix())
def test_imports_only_go_down(file: Path) -> None:
    own = _layer(file)
    for module, _ in _imports(file):
        parts = module.split(".")
        if parts[0] != "labkit" or len(parts) < 2 or parts[1] not in DEPTH or own == "__init__":
            continue
        target = parts[1]
        assert target == own or DEPTH[target] > DEPTH[own], f"{own} must not import {module}"


@pytest.mark.parametrize("library", HOMES)
def test_each_library_has_one_home(library: str) -> None:
    for file in _files():
        for module, _ in _imports(file):
            if module == library or module.startswith(f"{library}."):
                assert _is_in(file, HOMES[library]), f"{file.name} names {library}"


def test_what_a_notebook_imports_needs_no_torch() -> None:
    for file in _files():
        is_light = _is_in(file, NO_TORCH) or (_layer(file) == "launch" and file.stem not in FORK_SERVER)
        if not is_light:
            continue
        for module, is_early in _imports(file):
            parts = module.split(".")
            heavy = parts[0] == "torch" or (
                parts[:2] == ["labkit", "launch"] and parts[2:3] and parts[2] in FORK_SERVER
            )
            heavy = heavy or parts[:2] in (["labkit", "sync"], ["labkit", "tasks"], ["labkit", "comm"])
            assert not (heavy and is_early), f"{file.relative_to(PACKAGE)} imports {module}"


def test_the_top_level_holds_what_was_agreed() -> None:
    agreed = {"requirements.txt", "README.md", "notebooks", "labkit", "tests", "runs", "environment.yml"}
    agreed |= {"Makefile", "pyproject.toml", ".ci", ".gitignore", ".git"}
    made = {
        ".venv",
        ".mypy_cache",
        ".ruff_cache",
        ".pytest_cache",
        ".hypothesis",
        "labkit_lab.egg-info",
        "build",
    }
    assert {path.name for path in PACKAGE.parent.iterdir()} <= agreed | made
