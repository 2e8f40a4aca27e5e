"""Cluster files that come with the package, known by their names."""

from importlib.resources import files

# Read as data: this layer imports no other part of the package.
_FOLDER = files("labkit") / "cluster" / "presets"


def cluster_presets() -> dict[str, str]:
    """The text of each preset's YAML file by its name."""
    return {
        file.name.removesuffix(".yaml"): file.read_text(encoding="utf-8")
        for file in sorted(_FOLDER.iterdir(), key=lambda file: file.name)
        if file.name.endswith(".yaml")
    }
