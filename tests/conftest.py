"""Fixtures and leak guards of the whole suite."""

from pathlib import Path

import pytest


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty runs folder of the test's own."""
    folder = tmp_path / "runs"
    folder.mkdir()
    monkeypatch.setenv("LABKIT_RUNS", str(folder))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return folder
