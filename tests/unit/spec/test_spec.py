"""Job specs: which load, and which are rejected with which messages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import reference
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from honed.spec import export, jobfile, rule, setting, spec
from honed.spec.config import ClassConfig, Config
from honed.spec.problem import InvalidSpecError
from honed.spec.spec import JobSpec
from honed.system import quote
from honed.system.error import SpecError

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = sorted((ROOT / "etc/examples").iterdir())
BAD_SPECS = sorted(path for path in (ROOT / "tests/data/bad_specs").iterdir() if path.suffix != ".expected")
GOOD_SPECS = sorted((ROOT / "tests/data/good_specs").iterdir())
LEAST: dict[str, Any] = {"base_model": "/srv/models/m", "datasets": [{"path": "/srv/data/d.jsonl"}]}


def loads(data: dict[str, Any]) -> JobSpec:
    return jobfile.loads(json.dumps(data).encode(), ".json")


def refusal(data: dict[str, Any]) -> str:
    with pytest.raises(SpecError) as caught:
        loads(data)
    return caught.value.shown


@pytest.mark.parametrize("path", BAD_SPECS, ids=lambda path: path.name)
def test_a_bad_spec_is_refused_in_these_words(path: Path) -> None:
    with pytest.raises(InvalidSpecError) as caught:
        jobfile.load(path)
    assert caught.value.shown + "\n" == path.with_name(f"{path.name}.expected").read_text(encoding="utf-8")
    assert caught.value.shown.splitlines() == [quote.show(str(problem)) for problem in caught.value.problems]


@pytest.mark.parametrize("path", [*EXAMPLES, *GOOD_SPECS], ids=lambda path: path.name)
def test_a_sample_spec_loads(path: Path) -> None:
    jobfile.load(path)


def test_the_sample_says_the_same_in_yaml_json_and_toml() -> None:
    in_yaml, in_json, in_toml = (
        jobfile.load(ROOT / f"etc/examples/lora.{suffix}") for suffix in ("yaml", "json", "toml")
    )
    assert in_yaml == in_json == in_toml


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_a_spec_comes_back_from_its_plan_as_it_was(path: Path) -> None:
    loaded = jobfile.load(path)
    dumped = json.loads(json.dumps(loaded.model_dump(mode="json", exclude_unset=False)))
    again = JobSpec.model_validate(dumped)
    assert again == loaded
    assert again.training.as_kwargs() == loaded.training.as_kwargs()


def test_training_hands_on_what_was_set_and_nothing_else() -> None:
    loaded = loads({**LEAST, "training": {"learning_rate": 1e-4, "max_length": None, "seed": 42}})
    assert loaded.training.as_kwargs() == {"max_length": None, "learning_rate": 1e-4, "seed": 42}
    assert loaded.training.per_device_train_batch_size == 8


def test_the_least_spec_is_full_fine_tuning_with_defaults() -> None:
    loaded = loads(LEAST)
    assert (loaded.lora, loaded.quantization, loaded.dtype, loaded.backend) == (None, "none", "auto", "auto")
    assert (loaded.resources.gpus, loaded.retry.max_attempts, loaded.predictions.num_samples) == (1, 3, 5)


@pytest.mark.parametrize("word", ["yes", "on", "true"])
def test_words_of_yaml_1_1_are_flags_where_a_flag_is_wanted_and_words_elsewhere(word: str) -> None:
    text = f"base_model: /m\ndatasets: [{{path: /d}}]\ntraining:\n  packing: {word}\n  eval_strategy: no\n"
    loaded = jobfile.loads((text + "predictions: {sample_frequency: off}\n").encode(), ".yaml")
    assert loaded.training.packing is True
    assert loaded.training.eval_strategy == "no"
    assert loaded.predictions.sample_frequency == "off"


@pytest.mark.parametrize("base_model", ["/srv/models/m", "Qwen/Qwen3-1.7B", "job:stage-1", "job:12"])
def test_a_base_model_is_a_directory_a_hub_id_or_a_job(base_model: str) -> None:
    assert loads({**LEAST, "base_model": base_model}).base_model == base_model


@pytest.mark.parametrize(
    "base_model", ["gpt2", "a/b/c", "../m", "~/m", "", "job:", "https://x.org/m", "-a/b", "a/../b"]
)
def test_anything_else_is_no_base_model(base_model: str) -> None:
    assert refusal({**LEAST, "base_model": base_model}).startswith("line 1: base_model: ")


@pytest.mark.parametrize("item", export.EXPORTS, ids=lambda item: item.name)
def test_an_export_is_asked_for_by_a_key_of_a_training_and_by_default_by_none(item: export.Export) -> None:
    assert item not in export.asked(loads(LEAST))
    assert JobSpec.model_fields[item.key].default == export.NONE[item.key]
    document = {**LEAST, item.key: "bfloat16", "lora": {}}
    assert export.asked(loads(document)) == export.asked(document) == [item]
    if item.adapter_reason:
        assert item.adapter_reason in refusal({**LEAST, item.key: "bfloat16"})


MERGE: dict[str, Any] = {"kind": "merge", "base_model": "/srv/models/m", "adapter": "/srv/adapters/a"}


def test_a_merge_takes_a_base_model_and_an_adapter_and_waits_for_no_gpu() -> None:
    loaded = loads({**MERGE, "dtype": "float16", "output_dir": "/srv/out", "priority": 2, "retry": {"max_attempts": 1}})
    assert (loaded.kind, loaded.adapter, loaded.dtype, loaded.resources.gpus) == (
        "merge",
        "/srv/adapters/a",
        "float16",
        0,
    )
    assert loads({**MERGE, "resources": {"gpus": 1}}).resources.gpus == 1
    loads({**MERGE, "datasets": [], "lora": None})


@pytest.mark.parametrize("key", sorted(set(JobSpec.model_fields) - rule.MERGE_KEYS))
def test_a_merge_has_nothing_of_training(key: str) -> None:
    values = {
        "datasets": [{"path": "/d"}],
        "eval_datasets": [{"path": "/d"}],
        "eval_split": 0.1,
        "lora": {},
        "backend": "unsloth",
        "quantization": "4bit",
        "attn_implementation": "sdpa",
        "training": {"max_steps": 3},
        "save_merged": "bfloat16",
        "predictions": {"num_samples": 1},
        "save_interval_sec": 5.0,
        "early_stopping_patience": 2,
        "guard": {"metric": "exact_match"},
        "trial": True,
        "report_to": ["wandb"],
        "chat_template_kwargs": {"a": 1},
        "media": {"num_frames": 4},
        "divergence": {"num_steps": 2},
        "adapter_dtype": "bfloat16",
        "training_chat_template": "trl",
        "parts": {"vision": "eye"},
        "train_parts": ["projector"],
        "master_weights": "none",
        "save_dtype": "float32",
        "parallel": "ddp",
        "batch": {"effective": 8},
    }
    assert f"{key}: a merge has none" in refusal({**MERGE, key: values[key]})


EVALUATION: dict[str, Any] = {
    "kind": "evaluate",
    "base_model": "/srv/models/m",
    "eval_datasets": [{"path": "/srv/data/d.jsonl"}],
}


def test_an_evaluation_takes_a_model_an_adapter_or_none_and_data_sets() -> None:
    assert loads(EVALUATION).resources.gpus == 1
    assert loads({**EVALUATION, "resources": {"gpus": 2}}).resources.num_ranks == 2
    loads({**EVALUATION, "quantization": "4bit", "adapter": "job:a", "predictions": {"num_samples": 100}})
    loads({**EVALUATION, "training": {"max_length": 512, "per_device_eval_batch_size": 4, "seed": 1}})
    assert "eval_datasets: missing" in refusal({"kind": "evaluate", "base_model": "/m"})
    assert "adapter_dtype: there is no adapter" in refusal({**EVALUATION, "adapter_dtype": "bfloat16"})
    assert "predictions.sample_frequency" in refusal({**EVALUATION, "predictions": {"sample_frequency": 5}})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("datasets", [{"path": "/d"}]),
        ("eval_split", 0.1),
        ("lora", {}),
        ("guard", {"metric": "exact_match"}),
        ("output_dir", "/srv/out"),
        ("save_merged", "bfloat16"),
        ("trial", True),
        ("early_stopping_patience", 2),
        ("training.learning_rate", 1e-4),
        ("training.num_train_epochs", 1.0),
        ("training.optim", "sgd"),
    ],
)
def test_an_evaluation_has_nothing_of_training(key: str, value: Any) -> None:
    section, _, name = key.partition(".")
    told = refusal({**EVALUATION, section: {name: value} if name else value})
    assert f"{key}: an evaluation has none" in told


def test_a_merge_without_an_adapter_is_refused() -> None:
    assert "adapter: missing" in refusal({"kind": "merge", "base_model": "/m"})


def test_what_another_job_makes_may_be_base_model_and_adapter() -> None:
    loaded = loads({**LEAST, "base_model": "job:first one", "adapter": "job:7"})
    assert spec.references(loaded) == {"base_model": "first one", "adapter": "7"}
    assert spec.references(loads(LEAST)) == {}
    for adapter in ("job:", "a/b", "~/a", "../a"):
        assert "adapter: " in refusal({**LEAST, "adapter": adapter})


def test_steps_may_be_a_number_or_a_share_and_stay_what_they_are() -> None:
    training = {"warmup_steps": 0.1, "save_steps": 25, "logging_steps": 0.5}
    assert loads({**LEAST, "training": training}).training.as_kwargs() == training


def test_one_reporter_may_stand_alone() -> None:
    assert loads({**LEAST, "report_to": "wandb"}).report_to == ["wandb"]
    assert loads({**LEAST, "report_to": "none"}).report_to == []
    assert loads({**LEAST, "depends_on": [3, "first"]}).depends_on == ["3", "first"]


def test_predictions_have_a_share_of_the_run_unless_their_number_is_asked_for() -> None:
    assert loads(LEAST).predictions.max_share == 0.1
    asked = loads({**LEAST, "predictions": {"num_samples": 50}})
    assert asked.predictions.max_share is None
    assert loads({**LEAST, "predictions": {"num_samples": 50, "max_share": 0.2}}).predictions.max_share == 0.2
    # plan.json has every key, and its defaults must not count as explicit settings.
    for each in (loads(LEAST), asked):
        assert JobSpec.model_validate(each.model_dump(mode="json")) == each


def test_metrics_are_auto_or_names() -> None:
    assert loads(LEAST).predictions.metrics == "auto"
    assert loads({**LEAST, "predictions": {"metrics": "rouge_l"}}).predictions.metrics == ["rouge_l"]
    assert "metrics: expected auto, or a list of metric names" in refusal({**LEAST, "predictions": {"metrics": []}})


def test_what_predictions_need_to_choose_or_to_be_measured_is_told() -> None:
    best = {"load_best_model_at_end": True, "save_strategy": "epoch", "metric_for_best_model": "predictions/token_f1"}
    right = {**LEAST, "eval_split": 0.1, "training": best}
    loads(right)
    assert "sample_frequency: eval" in refusal({**right, "predictions": {"sample_frequency": "epoch"}})
    assert "no reference answers" in refusal({**right, "predictions": {"prompts": ["Who?"]}})
    assert "no reference answers" in refusal({**LEAST, "predictions": {"prompts": ["Who?"], "metrics": ["rouge_l"]}})
    guard = {"metric": "exact_match", "patience": 2}
    never = {**LEAST, "eval_split": 0.1, "guard": guard, "training": {"eval_strategy": "no"}}
    assert "guard.patience: needs evaluations" in refusal(never)


def test_epochs_and_steps_may_both_be_given() -> None:
    loads({**LEAST, "training": {"num_train_epochs": 3, "max_steps": 100, "packing": True}})


def test_an_empty_list_of_held_out_data_beside_a_split_is_fine() -> None:
    loads({**LEAST, "eval_datasets": [], "eval_split": 0.05, "adapter": None, "lora": None, "quantization": "none"})


def test_a_rule_is_silent_about_keys_that_are_refused_anyway() -> None:
    data = {**LEAST, "eval_split": 7, "training": {"eval_strategy": "steps"}}
    assert "nothing to evaluate" not in refusal(data)


def test_the_value_of_a_secret_is_never_shown() -> None:
    for data in (
        {**LEAST, "hf_token": "hf_secret123"},
        {**LEAST, "training": {"hub_token": "hf_secret123"}},
        {**LEAST, "notify": {"webhook": "https://me:hf_secret123@example.org/x"}},
        {**LEAST, "my_api_key": {"deep": "hf_secret123"}},
    ):
        said = refusal(data)
        assert "a job file must not contain secrets" in said
        assert "hf_secret123" not in said


def test_what_is_told_is_one_line_a_problem_whatever_the_keys() -> None:
    said = refusal({**LEAST, "a\nb": 1, "x" * 10_000: 2, "training": {"learning_rate": "x\n" * 500}})
    assert len(said.splitlines()) == 3
    assert max(map(len, said.splitlines())) < 250


def test_a_file_of_nothing_but_unknown_keys_is_refused_in_time() -> None:
    began = time.process_time()
    said = refusal({f"learn_{number}": 1 for number in range(15_000)})
    assert time.process_time() - began < 30  # 0.1 here; a hang, not a slow machine
    assert said.splitlines()[-1].startswith("and 14")


# --- Files ------------------------------------------------------------------------------------------------------------


def _file(path: Path) -> Path:
    path.write_text("base_model: /m\ndatasets: [{path: /d}]\n")
    return path


def test_a_regular_file_loads_whatever_the_case_of_its_suffix(tmp_path: Path) -> None:
    jobfile.load(_file(tmp_path / "job.YAML"))


def test_what_is_not_a_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    _file(tmp_path / "job.yaml")
    (tmp_path / "link.yaml").symlink_to(tmp_path / "job.yaml")
    (tmp_path / "dangling.yaml").symlink_to(tmp_path / "nowhere")
    (tmp_path / "directory.yaml").mkdir()
    os.mkfifo(tmp_path / "fifo.yaml")
    (tmp_path / "device.yaml").symlink_to("/dev/zero")
    for name, said in {
        "link": "is a symbolic link",
        "dangling": "is a symbolic link",
        "directory": "is a directory",
        "fifo": "is a FIFO",
        "device": "is a symbolic link",
        "missing": "no such file",
    }.items():
        with pytest.raises(SpecError, match=said):
            jobfile.load(tmp_path / f"{name}.yaml")
    with pytest.raises(SpecError, match="is a device"):
        jobfile.load(Path("/dev/zero"), max_bytes=10)


def test_a_file_over_the_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    path.write_text("a: " + "x" * 1000)
    with pytest.raises(SpecError, match="a job file may have at most 100"):
        jobfile.load(path, max_bytes=100)


# --- Any spec, any bytes ----------------------------------------------------------------------------------------------

_text = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1, max_size=12)
_path = _text.map(lambda text: "/" + text)
_value: st.SearchStrategy[Any] = st.recursive(
    st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False, allow_infinity=False) | _text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3),
    max_leaves=6,
)
_specs = st.fixed_dictionaries(
    {
        "base_model": _path,
        "datasets": st.lists(
            st.fixed_dictionaries({"path": _path}, optional={"columns": st.dictionaries(_text, st.just("c"))}),
            min_size=1,
            max_size=3,
        ),
    },
    optional={
        "priority": st.integers(-100, 100),
        "chat_template_kwargs": st.dictionaries(_text, _value, max_size=3),
        "eval_split": st.floats(0.01, 0.5),
        "lora": st.fixed_dictionaries({}, optional={"r": st.integers(1, 64), "use_dora": st.booleans()}),
        "training": st.fixed_dictionaries(
            {},
            optional={
                "learning_rate": st.floats(1e-9, 1e-2),
                "num_train_epochs": st.floats(0.1, 10) | st.integers(1, 9),
                "save_steps": st.integers(1, 500) | st.floats(0.01, 0.9),
                "packing": st.booleans(),
            },
        ),
        "report_to": st.lists(st.sampled_from(["wandb", "mlflow"]), max_size=2),
    },
)


def _toml(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case float():
            return repr(value)
        case list():
            return f"[{', '.join(map(_toml, value))}]"
        case dict():
            return f"{{{', '.join(f'{_toml(key)} = {_toml(item)}' for key, item in value.items())}}}"
        case _:
            return json.dumps(value, ensure_ascii=False)


class _Quoting(yaml.SafeDumper):
    """A dumper that quotes all texts: PyYAML writes some without quotes that others read as numbers, such as 08."""


_Quoting.add_representer(str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"'))


@given(_specs)
@settings(max_examples=60)
def test_the_same_spec_is_the_same_in_all_three_formats(data: dict[str, Any]) -> None:
    as_yaml = yaml.dump(data, Dumper=_Quoting, allow_unicode=True).encode()
    as_toml = "".join(f"{key} = {_toml(value)}\n" for key, value in data.items()).encode()
    as_json = json.dumps(data, indent="\t").encode()
    loaded = jobfile.loads(as_json, ".json")
    assert jobfile.loads(as_yaml, ".yaml") == loaded
    assert jobfile.loads(as_toml, ".toml") == loaded
    assert JobSpec.model_validate(json.loads(loaded.model_dump_json())) == loaded


_keys = st.sampled_from(
    [
        *JobSpec.model_fields,
        "r",
        "path",
        "lr",
        "hf_token",
        "warmup_ratio",
        "learning_rate",
        "eval_strategy",
        "fraction",
        "metric",
        "x",
    ]
)
_anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 3)
    | st.floats(-1, 2)
    | st.sampled_from(["", "/a", "none", "steps", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_keys, inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.slow
@given(st.dictionaries(_keys, _anything, min_size=1, max_size=8))
@settings(max_examples=150)
def test_any_mapping_loads_or_is_refused_key_by_key(data: dict[str, Any]) -> None:
    try:
        loads(data)
    except InvalidSpecError as error:
        assert all(problem.key for problem in error.problems)
        assert len({problem.key for problem in error.problems}) <= len(error.problems)


@given(st.binary(max_size=200), st.sampled_from([".yaml", ".yml", ".json", ".toml"]))
@settings(max_examples=80)
def test_random_bytes_are_refused_with_a_spec_error(data: bytes, suffix: str) -> None:
    with pytest.raises(SpecError):
        jobfile.loads(data, suffix)


# --- The pages and the sample configuration ---------------------------------------------------------------------------


@pytest.mark.slow
def test_the_reference_is_what_the_types_say() -> None:
    assert reference.main(["--check", str(ROOT / "docs")]) == 0, "python scripts/reference.py --write docs/"


@pytest.mark.slow
def test_a_stale_page_is_found(tmp_path: Path) -> None:
    (tmp_path / "etc/examples").mkdir(parents=True)
    (tmp_path / "etc/examples/lora.yaml").write_text("base_model: /m\n")
    assert reference.main(["--write", str(tmp_path / "docs")]) == 0
    assert reference.main(["--check", str(tmp_path / "docs")]) == 0
    (tmp_path / "docs/job-spec.md").write_text("old")
    assert reference.main(["--check", str(tmp_path / "docs")]) == 1


def test_the_sample_configuration_has_every_key_with_its_default() -> None:
    text = (ROOT / "etc/honed.toml").read_text()
    assert Config.model_validate(tomllib.loads(text)) == Config()
    told = tomllib.loads(
        "\n".join(
            line if line.startswith("[") else line.removeprefix("#")
            for line in text.splitlines()
            if line.startswith("[") or (line.startswith("#") and not line.startswith("# ") and "(not set)" not in line)
        )
    )
    assert told.pop("classes") == {"NAME": ClassConfig().model_dump(exclude_none=True)}
    assert told["slurm"].pop("profiles") == {"NAME": {"default": False}}
    assert told.pop("users") == {"NAME": {}}  # all of its keys are not set
    assert Config.model_validate(told) == Config()
    for name, section in setting.sections(Config):
        for key in section.model_fields.keys() - setting.tables_in(section):
            assert f"\n#{key} = " in text, f"{name}.{key}"


def test_reading_specs_needs_no_training_library() -> None:
    code = "import sys, honed.spec.spec; print(*(set(sys.modules) & {'torch', 'transformers', 'trl', 'numpy'}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
