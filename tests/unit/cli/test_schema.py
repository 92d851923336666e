"""The JSON Schema of job files: it refuses nothing that `check` accepts, and each fault of a single key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from jsonschema import Draft202012Validator, ValidationError
from pydantic import BaseModel
from pydantic import ValidationError as Refused

from honed.cli import schema
from honed.spec import document, jobfile
from honed.spec.field import kinds, members
from honed.spec.problem import KeyPath, as_path, mended
from honed.spec.spec import InvalidSpecError, JobSpec

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = sorted((ROOT / "etc/examples").iterdir())
GOOD_SPECS = sorted((ROOT / "tests/data/good_specs").iterdir())
BAD_SPECS = sorted(path for path in (ROOT / "tests/data/bad_specs").iterdir() if path.suffix != ".expected")
LEAST: dict[str, Any] = {"base_model": "/srv/models/m", "datasets": [{"path": "/srv/data/d.jsonl"}]}

#: Faults that only `honectl check` finds, by kind.
TOGETHER, FORM, YAML, NUMBER = "keys that do not go together", "form of a text", "text of the file", "8.0 is 8 in JSON"
ONLY_CHECK = {
    "adapter-dtype-full.yaml: adapter_dtype": TOGETHER,
    "base-model-bare.yaml: base_model": FORM,
    "best-no-multiple.yaml: training.load_best_model_at_end": TOGETHER,
    "best-other-strategy.yaml: training.load_best_model_at_end": TOGETHER,
    "best-without-eval.yaml: training.load_best_model_at_end": TOGETHER,
    "date.yaml: name": YAML,
    "empty-value.yaml: lora": YAML,
    "eval-without-data.yaml: training.eval_strategy": TOGETHER,
    "fractions.yaml: datasets.1": TOGETHER,
    "gpus.yaml: batch.effective": TOGETHER,
    "guard-without-data.yaml: guard": TOGETHER,
    "hub-datasets.yaml: datasets.1.path": FORM,
    "hub-datasets.yaml: datasets.2.path": FORM,
    "hub-datasets.yaml: datasets.3.path": FORM,
    "hub-datasets.yaml: datasets.4.path": FORM,
    "hub-keys.yaml: datasets.0.name": TOGETHER,
    "hub-keys.yaml: datasets.0.revision": TOGETHER,
    "lora-and-adapter.yaml: lora": TOGETHER,
    "master-weights-adapter.yaml: master_weights": TOGETHER,
    "master-weights-adapter.yaml: save_dtype": TOGETHER,
    "master-weights-dtype.yaml: master_weights": TOGETHER,
    "master-weights-dtype.yaml: training.optim": TOGETHER,
    "media-sizes.yaml: media.min_pixels": TOGETHER,
    "media.yaml: lora.finetune_language_layers": TOGETHER,
    "merged-without-lora.yaml: save_merged": TOGETHER,
    "name-number.yaml: name": FORM,
    "name-slash.yaml: name": FORM,
    "notify-nobody.yaml: notify": TOGETHER,
    "overflow-float.yaml: eval_split": YAML,
    "packing-without-length.yaml: training.packing": TOGETHER,
    "padding-free.yaml: training.padding_free": TOGETHER,
    "padding-free.yaml: training.dataloader_prefetch_factor": TOGETHER,
    **{
        f"paths.yaml: {key}": FORM
        for key in (
            "base_model",
            "adapter",
            "output_dir",
            "chat_template",
            "datasets.0.path",
            "datasets.0.media_dir",
            "datasets.1.path",
        )
    },
    "patience-without-eval.yaml: early_stopping_patience": TOGETHER,
    "quantized-full.yaml: quantization": TOGETHER,
    "several-at-once.yaml: datasets.0.path": FORM,
    "several-at-once.yaml: datasets.1": TOGETHER,
    "sexagesimal.yaml: time_limit_sec": YAML,
    "split-and-eval.yaml: eval_split": TOGETHER,
    "target-modules-comma.yaml: lora.target_modules": FORM,
    "target-modules-pattern.yaml: lora.target_modules": FORM,
    "token-value.yaml: datasets.0.path": "a secret",
    "train-parts-lora.yaml: train_parts": TOGETHER,
    "types.yaml: training.per_device_train_batch_size": NUMBER,
}

#: Values of every type, tried for every key.
VALUES: tuple[Any, ...] = (
    *(None, True, False, "yes", "Off", "auto", "none", "eval", "trl", "only", "gaussian", "/srv/x", "x", ""),
    *(-1, 0, 1, 2, 100, 10**9, 0.0, 0.05, 0.5, 1.5, -0.5),
    *([], ["x"], [1], [""], [0], ["tensorboard"], ["language"], "wandb", {}, {"a": "b"}, {"a": 1}),
)


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    made = schema.made()
    Draft202012Validator.check_schema(made)
    return Draft202012Validator(made)


def places(errors: Iterator[ValidationError]) -> Iterator[KeyPath]:
    """Yield the paths that errors are about."""
    for error in errors:
        yield tuple(error.absolute_path)
        yield from places(iter(error.context or ()))


@pytest.mark.parametrize("path", [*EXAMPLES, *GOOD_SPECS], ids=lambda path: path.name)
def test_the_schema_accepts_the_samples(path: Path, validator: Draft202012Validator) -> None:
    assert [*places(validator.iter_errors(jobfile.read(path).data))] == []


def test_every_yaml_and_toml_sample_names_the_schema() -> None:
    first = {path: path.read_text(encoding="utf-8").splitlines()[0] for path in EXAMPLES if path.suffix != ".json"}
    named = {
        path: path.parent / line.rpartition("=" if path.suffix == ".yaml" else " ")[2] for path, line in first.items()
    }
    assert all(line.startswith(("# yaml-language-server: $schema=", "#:schema ")) for line in first.values())
    assert {place.resolve() for place in named.values()} == {ROOT / "etc" / schema.NAME}


def test_the_schema_refuses_each_fault_of_a_single_key(validator: Draft202012Validator) -> None:
    only_check = {}
    for path in BAD_SPECS:
        try:
            parsed = jobfile.read(path)
        except InvalidSpecError:
            continue  # not a mapping of keys to values at all
        with pytest.raises(InvalidSpecError) as caught:
            jobfile.of(parsed)
        found = [*places(validator.iter_errors(parsed.data))]
        for each in caught.value.problems:
            key = as_path(each.key)
            if not any(place in (key, key[:-1]) for place in found):
                only_check[f"{path.name}: {each.key}"] = each.message
    assert only_check.keys() == ONLY_CHECK.keys(), only_check


def test_the_schema_and_check_agree_on_every_value_of_every_key(validator: Draft202012Validator) -> None:
    too_strict, too_lenient = [], []
    for key in every_key(JobSpec):
        for value in VALUES:
            data = with_value(key, value)
            is_refused = next(validator.iter_errors(data), None) is not None
            kinds_of_errors = errors_of(data)
            if not kinds_of_errors and is_refused:
                too_strict.append((key, value))
            # A custom error is about the form of a text; a float that is whole is an integer in JSON.
            if kinds_of_errors & SINGLE and not is_refused and value != 0.0:
                too_lenient.append((key, value, kinds_of_errors))
    assert too_strict == []
    assert too_lenient == []


#: pydantic's errors about the name, type, range or choice of a value.
SINGLE = {
    "extra_forbidden",
    "int_type",
    "float_type",
    "string_type",
    "bool_type",
    "list_type",
    "dict_type",
    "literal_error",
    "greater_than",
    "greater_than_equal",
    "less_than",
    "less_than_equal",
    "too_short",
}


def errors_of(data: dict[str, Any]) -> set[str]:
    try:
        JobSpec.model_validate(data)
    except Refused as error:
        return {each["type"] for each in error.errors()}
    return set()


def with_value(key: str, value: Any) -> dict[str, Any]:
    """Return a least job with one more value; sections on the way get what they require."""
    data: dict[str, Any] = json.loads(json.dumps(LEAST))
    if key.startswith("eval_datasets."):
        data["eval_datasets"] = [{"path": "/srv/data/e.jsonl"}]
    if key.startswith("guard."):
        data["guard"] = {"metric": "exact_match"}
    if value is not None:
        return mended(data, {key: value})
    above = data
    for part in as_path(key)[:-1]:
        above = above[part] if isinstance(part, int) else above.setdefault(part, {})
    above[as_path(key)[-1]] = None
    return data


def every_key(model: type[BaseModel], above: str = "") -> Iterator[str]:
    for name, annotation in kinds(model).items():
        yield f"{above}{name}"
        for member in members(annotation):
            is_list = get_origin(member) is list
            inner = get_args(member)[0] if is_list else member
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from every_key(inner, f"{above}{name}.{'0.' if is_list else ''}")


def test_keys_that_hold_anchors_are_accepted(validator: Draft202012Validator) -> None:
    parsed = document.parse(b"x-common: &c {r: 8}\nbase_model: /m\ndatasets: [{path: /d}]\nlora: *c\n", ".yaml")
    assert [*places(validator.iter_errors(parsed.data | {"x-common": {"r": 8}}))] == []
