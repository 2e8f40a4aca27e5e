"""One configuration: typed, frozen, checked before anything starts, and printed so that it loads back equal."""

import dataclasses
import datetime
import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pydantic
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from labkit.config import (
    ExperimentConfig,
    from_mapping,
    from_overrides,
    from_parameters,
    json_schema,
    load,
    parse_yaml,
    plain,
    to_yaml,
)
from labkit.errors import ConfigError


def _refused(overrides: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        from_overrides(overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- loading and printing -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["cluster=3x2", "optimizer.learning_rate=1e-5", "seed=7"],
        ["model=gpt", "data=text", "optimizer=adamw", "optimizer.epsilon=1e-10"],
        ["model={name: 'my.models:build', options: {depth: 3, sizes: [1, 2.5], note: 'yes'}}"],
        ["model={name: 'my.models:build', options: {'08': '08', '1e5': '1e5', '0o17': '0o17', on: '1:30'}}"],
        ["engine.clip_norm=1", "schedule.name=step", "schedule.milestones=[10, 20]"],
    ],
)
def test_what_is_printed_loads_back_equal(tmp_path: Path, overrides: list[str]) -> None:
    config = from_overrides(overrides)
    file = tmp_path / "printed.yaml"
    file.write_text(to_yaml(config))
    assert load(file) == config
    assert from_mapping(yaml.safe_load(to_yaml(config))) == config  # a YAML 1.1 reader sees the same
    assert from_mapping(json.loads(json.dumps(config.model_dump(mode="json")))) == config


@given(
    rate=st.floats(min_value=1e-12, max_value=1e6),
    batch=st.integers(1, 1500),
    seed=st.integers(0, 2**63 - 1),
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True),
)
def test_any_numbers_and_names_survive_printing(rate: float, batch: int, seed: int, name: str) -> None:
    settings = {
        "engine.global_batch_size": batch,
        "optimizer.learning_rate": rate,
        "seed": seed,
        "name": name,
    }
    config = from_overrides(settings)
    assert from_mapping(parse_yaml(to_yaml(config))) == config


def test_a_configuration_can_not_be_changed() -> None:
    config = from_overrides([])
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.seed = 1  # type: ignore[misc]


def test_a_cluster_file_is_found_beside_the_experiment(tmp_path: Path) -> None:
    (tmp_path / "pair.yaml").write_text(
        "nodes:\n- {name: a, workers: 2, device: cpu}\n- {name: b, workers: 1}\n"
    )
    (tmp_path / "run.yaml").write_text("cluster: pair.yaml\n")
    cluster = load(tmp_path / "run.yaml").cluster
    assert [(node.name, len(node.workers)) for node in cluster.nodes] == [("a", 2), ("b", 1)]
    assert cluster.nodes[0].workers[0].device == "cpu"


def test_a_new_model_name_drops_the_old_models_settings() -> None:
    base = from_overrides(["model.name=mlp", "model.hidden_sizes=[8]"])
    assert from_overrides(["model.name=convnet"], base=base).model.name == "convnet"
    kept = from_overrides(["optimizer.name=adamw"], base=from_overrides(["optimizer.learning_rate=0.25"]))
    assert kept.optimizer.learning_rate == 0.25  # both optimizers know it


def test_overrides_may_stand_in_any_order() -> None:
    one = from_overrides(["model.width=64", "data.name=text", "model.name=gpt"])
    assert one == from_overrides(["model.name=gpt", "model.width=64", "data.name=text"])


def test_the_schema_accepts_what_labkit_accepts_and_refuses_what_it_refuses() -> None:
    validator = jsonschema.Draft202012Validator(json_schema())
    good = from_overrides(["cluster=2x2"]).model_dump(mode="json")
    validator.validate(good)
    for bad in (
        {**good, "sed": 1},
        {**good, "engine": {"global_batch_size": 0}},
        {**good, "sync": {"name": "x"}},
    ):
        assert not validator.is_valid(bad)


# --- YAML as people write it -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("[1e-4, 3E5]", [1e-4, 3e5]),
        (".5", 0.5),
        ("no", "no"),
        ("on", "on"),
        ("010", 10),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("0x1F", 31),
        ("0o17", 15),
        ("true", True),
        ("null", None),
        ("2026-01-02", "2026-01-02"),
        ("2x2", "2x2"),
        ("'1'", "1"),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: Any) -> None:
    found = parse_yaml(text)
    assert found == value and type(found) is type(value)


def test_a_key_that_stands_twice_is_an_error() -> None:
    with pytest.raises(ConfigError, match="line 2, column 1: the key 'seed' stands twice"):
        parse_yaml("seed: 1\nseed: 2\n", "it")


def test_a_tag_can_not_run_code() -> None:
    with pytest.raises(ConfigError, match="must be YAML"):
        parse_yaml("!!python/object/apply:os.system ['true']")


# --- plain values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "right"),
    [
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.array([1, 2]), [1, 2]),
        ((2, 1), [2, 1]),
        ({"a": (np.int8(1), None)}, {"a": [1, None]}),
        (Path("x/y"), "x/y"),
        (datetime.date(2026, 1, 2), "2026-01-02"),
        (True, True),
        (None, None),
    ],
)
def test_library_values_become_plain_ones(value: Any, right: Any) -> None:
    found = plain(value)
    assert found == right and type(found) is type(right)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, "x must be a finite number, got nan"),
        ({"a": [math.inf]}, "x.a[0] must be a finite number, got inf"),
        ({1: "a"}, "x must have text keys, got the key 1. Write it as '1'"),
        ({None: "a"}, "x must have text keys, got the key None"),
        (object, "x must be a number, text"),
    ],
)
def test_what_has_no_plain_form_is_refused(value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plain(value, "x")
    assert str(caught.value).startswith(message)


# --- bad input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("modle=mlp", "modle must be a known key. Did you mean 'model'?"),
        ("sync.nam=x", "sync.nam must be a known key. Did you mean 'name'?"),
        ("model.hiden_sizes=[3]", "model.hiden_sizes must be a known key."),
        ("model=mpl", "model.name must be one of mlp, convnet, gpt or your own as module:function, got 'mpl'. Did you mean 'mlp'?"),
        ("optimizer=adam", "optimizer.name must be one of sgd, adamw, lars, got 'adam'. Did you mean 'adamw'?"),
        ("sync.name=ring", "sync.name must be one of allreduce, hierarchical, parameter_server, local_sgd, hybrid, async_parameter_server, ssp, got 'ring'."),
        ("seed=true", "seed must be a whole number, got True."),
        ("seed=-1", "seed must be at least 0, got -1."),
        ("engine.global_batch_size=0", "engine.global_batch_size must be greater than 0, got 0. It is: samples per update"),
        ("engine.global_batch_size=-4", "engine.global_batch_size must be greater than 0, got -4."),
        ("engine.global_batch_size=2.5", "engine.global_batch_size must be a whole number, got 2.5."),
        ("engine.global_batch_size=ten", "engine.global_batch_size must be a whole number, got 'ten'."),
        ("engine.global_batch_size=1501", "engine.global_batch_size must be at most the number of training samples (1500), got 1501."),
        ("optimizer.learning_rate=0", "optimizer.learning_rate must be greater than 0.0, got 0."),
        ("optimizer.learning_rate=.nan", "configuration.optimizer.learning_rate must be a finite number, got nan."),
        ("optimizer.is_nesterov=1", "optimizer.is_nesterov must be true or false, got 1."),
        ("optimizer={name: sgd, momentum: 0, is_nesterov: true}", "optimizer.momentum must be greater than 0 with optimizer.is_nesterov"),
        ("cluster=4x", "cluster must be NODESxWORKERS, a .yaml file or a mapping, got '4x'."),
        ("cluster=0x2", "cluster must be NODESxWORKERS"),
        ("cluster=nowhere.yaml", "cluster must be an existing file, got"),
        ("cluster={nodes: []}", "cluster.nodes must have at least 1 entries, got []."),
        ("cluster={nodes: [{name: a, workers: 0}]}", "workers of node 'a' must be at least 1, got 0."),
        ("cluster={nodes: [{name: a, workers: 1}, {name: a, workers: 1}]}", "cluster.nodes must have names that differ, got 'a' twice."),
        ("cluster={nodes: [{name: a, workers: [{devise: cpu}]}]}", "cluster.nodes.0.workers.0.devise must be a known key. Did you mean 'device'?"),
        ("cluster={nodes: [{name: a, workers: 1, device: gpu}]}", "cluster.nodes.0.workers.0.device must match the pattern"),
        ("cluster=1x65", "engine.global_batch_size must be at least the number of workers (65), got 64."),
        ("model=gpt", "data.name must be 'text' (or your own) with model 'gpt', got 'digits'."),
        ("model={name: 'a b:c'}", "name must be module:function, got 'a b:c'."),
        ("name=../evil", "name must match the pattern"),
        ("name=notebooks", "name must not be a folder that labkit keeps under runs/, got 'notebooks'."),
        ("seed", "override must be key=value, got 'seed'."),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_that_names_value_and_remedy(override: str, message: str) -> None:
    assert _refused([override]).startswith(message)


def test_local_batches_must_sum_to_the_global_batch() -> None:
    cluster = "cluster={nodes: [{name: a, workers: [{local_batch_size: 40}, {local_batch_size: 30}]}]}"
    message = _refused([cluster])
    assert "must sum to engine.global_batch_size (64), got 40 + 30 = 70" in message
    assert "engine.global_batch_size=70" in message
    assert from_overrides([cluster, "engine.global_batch_size=70"]).engine.global_batch_size == 70


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (["engine.num_epochs=2"], 48),
        (["engine.max_steps=5"], 5),
        (["data=text", "model=gpt", "engine.max_steps=5"], 5),
    ],
)
def test_a_schedule_shorter_than_its_warmup_is_refused(overrides: list[str], steps: int) -> None:
    from_overrides([*overrides, f"schedule.warmup_steps={steps}"])
    message = f"schedule.warmup_steps must be at most the {steps} steps of the run, got {steps + 1}"
    with pytest.raises(ConfigError, match=message):
        from_overrides([*overrides, f"schedule.warmup_steps={steps + 1}"])


def test_local_batches_are_given_for_all_or_none() -> None:
    message = _refused(["cluster={nodes: [{name: a, workers: [{local_batch_size: 64}, {}]}]}"])
    assert "for all 2 workers or for none, got 1" in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes: [", "must be YAML, got a fault, line"),
        ("just text", "must hold a mapping with `nodes`"),
        ("nodes:\n  - name: a\n    workers: many\n", "cluster.nodes.0.workers"),
    ],
)
def test_a_cluster_file_that_is_none_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        from_overrides(["cluster=bad.yaml"], folder=tmp_path)
    assert message in str(caught.value)


def test_text_settings_keep_their_text() -> None:
    assert from_overrides(["name=007"]).name == "007"
    assert from_overrides(["name=true"]).name == "true"


# --- a notebook's parameters ------------------------------------------------------------------------------------


def test_parameters_set_sections_unique_settings_and_anything_by_its_dotted_key() -> None:
    namespace = {
        "model": "mlp",
        "cluster": "1x2",
        "learning_rate": np.float64(0.5),
        "hidden_sizes": (3, 4),
        "clip_norm": None,
        "overrides": {"schedule.name": "cosine"},
        "_private": 3,
        "json": json,
        "function": _refused,
    }
    config = from_parameters(namespace)
    assert config == from_overrides(
        [
            "model=mlp",
            "cluster=1x2",
            "optimizer.learning_rate=0.5",
            "model.hidden_sizes=[3,4]",
            "schedule.name=cosine",
        ]
    )


@pytest.mark.parametrize(
    ("namespace", "message"),
    [
        (
            {"leraning_rate": 0.1},
            "parameter 'leraning_rate' must be a known name. Did you mean 'learning_rate'?",
        ),
        ({"overrides": 3}, "overrides must be a mapping"),
        ({"learning_rate": -1.0}, "optimizer.learning_rate must be greater than 0.0, got -1.0"),
        ({"zzz": 1}, "parameter 'zzz' must be a known name"),
    ],
)
def test_bad_parameters_are_refused(namespace: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_parameters(namespace)
    assert str(caught.value).startswith(message)


def test_a_working_notebook_may_have_variables_of_its_own() -> None:
    assert from_parameters({"zzz": 1, "seed": 3}, is_strict=False).seed == 3
    with pytest.raises(ConfigError, match="Did you mean 'seed'"):
        from_parameters({"sed": 1}, is_strict=False)


def test_every_setting_says_what_it_is() -> None:
    schema = json_schema()
    for name, section in schema["$defs"].items():
        for key, field in section.get("properties", {}).items():
            assert field.get("description") or key in ("name", "nodes", "workers"), f"{name}.{key}"


def test_experiments_are_values() -> None:
    assert from_overrides([]) == ExperimentConfig()
    assert not dataclasses.is_dataclass(ExperimentConfig)
