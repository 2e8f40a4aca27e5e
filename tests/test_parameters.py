"""Laws of the typed parameter layer: what a notebook declares, what it is given, what it then sees."""

import datetime
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_notebooks import make_notebook, notebook_of, read_strictly
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from labkit.errors import ConfigError
from labkit.lab.batch import run_notebook
from labkit.lab.parameters import already_injected, collect, inject, json_safe, literal, read_schema

DECLARED = """\
'''What this notebook takes.'''
from typing import Literal
learning_rate: float = 1e-3  # learning rate
mesh: tuple[int, int] = (1, 1)
batch: int = 8
run: str = "a"
version = "1.0"  # a str by its default
flag: bool = False
limit: int | None = None
ids: list[int] = []
names: list[str] = []
kind: Literal["sgd", "1"] = "sgd"
table: dict = {}
note: "str | None" = None
anything = None
spread: tuple[float, ...] = (float("nan"), -float("inf"))
"""
SCHEMA = read_schema(notebook_of(parameters=DECLARED))


def from_text(text: str) -> Any:
    (value,) = collect(SCHEMA, texts=[text]).values()
    return value


def from_value(name: str, value: Any) -> Any:
    return collect(SCHEMA, {name: value})[name]


def same(left: Any, right: Any) -> bool:
    """Equal in value and type; NaN equals NaN."""
    return literal(left) == literal(right)


# What is declared


def test_a_declaration_gives_name_default_annotation_and_help() -> None:
    parameter = SCHEMA["learning_rate"]
    assert (parameter.default, parameter.kind, parameter.help) == (1e-3, "float", "learning rate")
    assert SCHEMA["version"].kind == "str" and SCHEMA["note"].kind == "str | None"
    assert list(SCHEMA)[:3] == ["learning_rate", "mesh", "batch"]
    assert math.isnan(SCHEMA["spread"].default[0]) and SCHEMA["spread"].default[1] == -math.inf


def test_a_notebook_without_a_parameters_cell_is_refused() -> None:
    with pytest.raises(ConfigError, match="must have a parameters cell, got no code cell tagged"):
        read_schema(notebook_of("lr = 0.1", parameters=None), "nb.ipynb")


def test_a_tagged_markdown_cell_is_no_parameters_cell() -> None:
    cell = new_markdown_cell("x = 1", metadata={"tags": ["parameters"]})
    with pytest.raises(ConfigError, match="no code cell tagged"):
        read_schema(new_notebook(cells=[cell]))


def test_two_parameters_cells_are_refused() -> None:
    cells = [new_code_cell("x = 1", metadata={"tags": ["parameters"]}) for _ in range(2)]
    with pytest.raises(ConfigError, match="must have one parameters cell, got 2"):
        read_schema(new_notebook(cells=cells))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "gpus = 2\ntotal = gpus * 8",
            "total must be set to a literal, got `gpus \\* 8`. Compute it in the next",
        ),
        ("x = 2 * 8", "must be set to a literal"),
        ("x = f(1)", "must be set to a literal"),
        ("x = {1, 2}", "must be a number, text, .* got set"),
        ("x = b'1'", "got bytes"),
        ("a, b = 1, 2", "must hold only lines like `lr: float = 1e-3`, got `a, b = .* Move it"),
        ("a = b = 1", "must hold only lines like"),
        ("import os", "must hold only lines like .* in line 1"),
        ("x: int", "must hold only lines like"),
        ("x += 1", "must hold only lines like"),
        ("%matplotlib inline", "must be Python, got `%matplotlib inline` in line 1"),
        ("lambda: float = 1.0", "'lambda' is a reserved word; rename it to 'lambda_'"),
        ("weight-decay = 0.1", "rename it to 'weight_decay'"),
        ("In = 1", "In must have another name"),
        ("_x = 1", "_x must have another name"),
        ("x = 1\nx = 2", "must be set once, got it twice"),
        ("x: Path = 'a'", "must be annotated with int, float, .* got `Path`"),
        ("x: list[Path] = []", "must be annotated with"),
        ("x: int = 'a'", "x must be int, got 'a'"),
        ("x: int = None", "x must be int, got None"),
    ],
)
def test_refuses_what_is_no_literal_with_a_plain_name(source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_schema(notebook_of(parameters=source), "nb.ipynb")


# What is given: every row of papermill's mistakes, and the rest of the types


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("learning_rate=1e-4", 1e-4),  # YAML 1.1 reads text
        ("learning_rate=3", 3.0),
        ("learning_rate=.nan", math.nan),
        ("learning_rate=nan", math.nan),
        ("learning_rate=-inf", -math.inf),
        ("mesh=[2, 1]", (2, 1)),
        ("mesh=(2, 1)", (2, 1)),  # papermill: the text "(2, 1)"
        ("batch=007", 7),
        ("batch=1_000", 1000),
        ("batch=1e3", 1000),
        ("run=007", "007"),  # papermill: 7
        ("version=1_000", "1_000"),  # papermill: 1000
        ("run=true", "true"),
        ("run=", ""),
        ("run=a: b: c", "a: b: c"),
        ("run=k=v", "k=v"),
        ("flag=true", True),  # papermill: the text 'true'
        ("flag=True", True),
        ("limit=null", None),  # papermill: the text 'null'
        ("limit=None", None),
        ("limit=3", 3),
        ("ids=[1,2]", [1, 2]),  # papermill: the text '[1,2]'
        ("names=[a, 007, true, null]", ["a", "007", "true", "null"]),
        ("kind=1", "1"),
        ("note=007", "007"),
        ("note=null", None),
        ("table={lr: 1e-4, 1: a, null: b}", {"lr": 1e-4, 1: "a", None: "b"}),
        ("anything=007", 7),
        ("anything=[1, {a: true}]", [1, {"a": True}]),
        ("spread=[1, 2]", (1.0, 2.0)),
    ],
)
def test_a_text_is_read_as_declared(text: str, right: Any) -> None:
    assert same(from_text(text), right)


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [
        ("mesh", (2, 1), (2, 1)),
        ("mesh", [2, 1], (2, 1)),
        ("ids", (2, 1), [2, 1]),
        ("batch", np.int64(3), 3),
        ("batch", np.array(3), 3),
        ("batch", 3.0, 3),
        ("learning_rate", np.float32(0.1), 0.1),
        ("learning_rate", np.float64(0.1), 0.1),
        ("learning_rate", math.nan, math.nan),
        ("flag", np.bool_(True), True),
        ("ids", np.arange(3), [0, 1, 2]),
        ("anything", np.eye(2), [[1.0, 0.0], [0.0, 1.0]]),
        ("run", datetime.date(2020, 1, 2), "2020-01-02"),
        ("run", np.datetime64("2020-01-02"), "2020-01-02"),
        ("run", Path("a/b"), "a/b"),
        ("table", {1: "a", None: (1, np.int8(2))}, {1: "a", None: (1, 2)}),
        ("limit", None, None),
    ],
)
def test_a_python_value_keeps_its_meaning(name: str, value: Any, right: Any) -> None:
    assert same(from_value(name, value), right)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch", True),
        ("batch", 1.5),
        ("batch", "3"),
        ("flag", 1),
        ("flag", "yes"),
        ("learning_rate", True),
        ("mesh", (1, 2, 3)),
        ("kind", "adam"),
        ("anything", {1, 2}),
        ("anything", 1j),
        ("anything", object()),
        ("run", None),
    ],
)
def test_refuses_a_value_of_another_type_and_names_both(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"parameter {name} must be .*, got "):
        from_value(name, value)


def test_a_value_that_fails_inside_says_where() -> None:
    with pytest.raises(ConfigError, match=r"ids must be list\[int\], got \[1, 'a'\] \(at \[1\]\)"):
        from_value("ids", [1, "a"])


def test_an_unannotated_default_is_said_to_be_the_reason() -> None:
    schema = read_schema(notebook_of(parameters="momentum = 0"))
    with pytest.raises(ConfigError, match="momentum must be int, got 0.9. Its default 0 says the type"):
        collect(schema, texts=["momentum=0.9"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("leraning_rate=0.1", "'leraning_rate' must be one that .* Did you mean 'learning_rate'"),
        ("learning-rate=0.1", "Did you mean 'learning_rate'"),
        ("lambda=0.1", "'lambda' .a reserved word of Python. must be one"),
        ("learning_rate", "must be name=value"),
        ("=3", "must be name=value"),
    ],
)
def test_refuses_an_unknown_name_and_names_the_nearest(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        collect(SCHEMA, texts=[text])


def test_a_yaml_file_is_read_as_yaml_1_2_and_as_declared(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text("learning_rate: 1e-4\nrun: 007\nnames: [a, 010, yes]\nids: [1, 2]\nnote: no\n")
    read = collect(SCHEMA, files=[file])
    right = {"learning_rate": 1e-4, "run": "007", "names": ["a", "010", "yes"], "ids": [1, 2], "note": "no"}
    assert same(read, right)


def test_a_sweep_list_in_yaml_holds_floats(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text("rates: [1e-4, 3e-4]\n")
    schema = read_schema(notebook_of(parameters="rates: list[float] = []"))
    assert collect(schema, files=[file]) == {"rates": [0.0001, 0.0003]}


def test_a_json_file_keeps_nan_and_escapes(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    file.write_text('{"learning_rate": NaN, "run": "\\ud83d\\ude00", "limit": null}')
    assert same(
        collect(SCHEMA, files=[file]), {"learning_rate": math.nan, "run": "\U0001f600", "limit": None}
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.yaml", "a: [1", "must be YAML"),
        ("p.json", "{", "must be JSON"),
        ("p.yaml", "- 1\n", "must hold a mapping of parameter names"),
        ("p.yaml", "lr: 1\n", "'lr' must be one that the notebook declares"),
    ],
)
def test_refuses_a_broken_file(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        collect(SCHEMA, files=[tmp_path / name])


def test_refuses_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be readable text, got .*none.yaml"):
        collect(SCHEMA, files=[tmp_path / "none.yaml"])


def test_texts_win_over_values_and_values_over_files(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text("batch: 1\nrun: file\nkind: sgd\n")
    read = collect(SCHEMA, {"batch": 2, "run": "value"}, texts=["batch=3"], files=[file])
    assert read == {"batch": 3, "run": "value", "kind": "sgd"}


# What is injected

_plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.none() | st.integers() | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(_plain)
@settings(max_examples=200, deadline=None)
def test_a_literal_evaluates_to_an_equal_value(value: Any) -> None:
    read = eval(literal(value))
    assert repr(read) == repr(value) and type(read) is type(value)


@given(_plain)
@settings(max_examples=200, deadline=None)
def test_the_json_rendition_is_strict_json(value: Any) -> None:
    json.dumps(json_safe(value), allow_nan=False)


def test_the_injected_cell_stands_behind_the_parameters_cell_and_replaces_an_older_one() -> None:
    notebook = notebook_of("print(x)")
    once = inject(notebook, {"x": 2})
    twice = inject(once, {"x": 3})
    tags = [cell.metadata.get("tags", []) for cell in twice.cells]
    assert tags == [["parameters"], ["injected-parameters"], []]
    assert "x = 3" in twice.cells[1].source and len(notebook.cells) == 2
    assert twice.metadata.papermill.parameters == {"x": 3}


def test_an_executed_copy_gives_its_own_parameters_again() -> None:
    schema = read_schema(notebook_of(parameters="x: tuple[int, ...] = ()\ny: float = 0.0"))
    executed = inject(
        notebook_of(parameters="x: tuple[int, ...] = ()\ny: float = 0.0"), {"x": (1,), "y": math.inf}
    )
    assert already_injected(executed, schema) == {"x": (1,), "y": math.inf}


# The same through a real kernel

GIVEN: dict[str, Any] = {
    "learning_rate": math.nan,
    "mesh": (2, 1),
    "batch": np.int64(3),
    "run": Path("007"),
    "flag": True,
    "limit": None,
    "ids": np.arange(2),
    "table": {1: "a", None: ("b", np.float32(0.1)), (1, 2): [math.inf]},
    "note": 'quote " and \\ and \n and {braces} and \U0001f600',
}


def test_the_kernel_sees_equal_values_of_the_same_types(runs: Path, tmp_path: Path) -> None:
    path = make_notebook(
        tmp_path / "types.ipynb",
        "total = batch * sum(mesh)",
        "import pathlib\nseen = {name: globals()[name] for name in "
        + repr([*GIVEN, "version", "spread", "total"])
        + "}\npathlib.Path('seen.txt').write_text(repr(seen))",
        parameters=DECLARED,
    )
    result = run_notebook(path, GIVEN, texts=["version=1_000"])
    assert result.exit_code == 0
    seen = eval((tmp_path / "seen.txt").read_text(), {"nan": math.nan, "inf": math.inf})
    right = {
        "learning_rate": math.nan,
        "mesh": (2, 1),
        "batch": 3,
        "run": "007",
        "flag": True,
        "limit": None,
        "ids": [0, 1],
        "table": {1: "a", None: ("b", 0.1), (1, 2): [math.inf]},
        "note": GIVEN["note"],
        "version": "1_000",
        "spread": (math.nan, -math.inf),
        "total": 9,  # a derived value in its own cell follows the given ones
    }
    assert same(seen, right)
    executed = read_strictly(result.notebook)
    assert executed.metadata.papermill.parameters.learning_rate is None
    json.loads(result.folder.parameters_file.read_text(), parse_constant=pytest.fail)


@pytest.mark.parametrize(
    ("parameters", "text"), [("learning_rate: float = 0.1", "leraning_rate=1"), (None, "lr=9")]
)
def test_a_wrong_parameter_starts_no_kernel(
    runs: Path, tmp_path: Path, parameters: str | None, text: str
) -> None:
    path = make_notebook(
        tmp_path / "nb.ipynb",
        "lr = 0.1",
        "import pathlib; pathlib.Path('ran').touch()",
        parameters=parameters,
    )
    with pytest.raises(ConfigError) as caught:
        run_notebook(path, texts=[text])
    assert caught.value.exit_code == 2
    assert not (tmp_path / "ran").exists() and not list(runs.iterdir())
