"""`labkit run NOTEBOOK.ipynb`: hand a notebook to the batch runner and say how it went."""

from labkit.cli.experiment import Choice


def run_notebook(
    choice: Choice, timeout_s: float | None, *, is_forced: bool, is_dry: bool, is_json: bool
) -> int:
    """Run a notebook.

    Returns:
        The exit code.
    """
    raise NotImplementedError
