"""Remedies that edit the job file: each is given as data beside its text, and leads to no second rejection."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

import honed
from honed.check import preflight
from honed.check.checklist import Asked
from honed.spec import jobfile, problem
from honed.spec.config import Config
from honed.spec.problem import InvalidSpecError
from honed.system.device import Device
from honed.system.error import BY_CODE, HonedError, ModelError
from honed.system.layout import Layout
from told import refused
from zoo import plain

SOURCE = Path(honed.__file__).parent
CPU = Device("cpu", "a processor", total_bytes=24 * 2**30, free_bytes=20 * 2**30)
HELD_OUT: dict[str, Any] = {"eval_split": 0.5}
BEST: dict[str, Any] = {"load_best_model_at_end": True, "save_strategy": "epoch"}

#: Phrases of a hint that is an edit of the job file.
_EDIT = re.compile(r"\bleave [`\w.]+ out\b|\bremove (it\b|`[\w.]+`|\w*[_.]\w+)|\bwrite [\w.]+: ")
#: Faults of a text, or of rows, not of a key in the job file. A fetch's fault applies to all jobs that share the fetch,
#: each of which has its data set under a key of its own.
_NOT_THE_FILE = {"document.py", "hubdata.py", "remove `weight` from the turns to train on"}


def hints_of_edits() -> list[tuple[str, int, str]]:
    """Return each error that honed raises with such a hint and no fix: file, line, hint."""
    kinds = {kind.__name__ for kind in BY_CODE.values()} | {"refuse", "fault"}
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds):
                continue
            given = {each.arg: each.value for each in node.keywords}
            hint = ast.unparse(given["hint"]) if "hint" in given else ""
            if _EDIT.search(hint) and not {"fix", "write"} & given.keys():
                found.append((path.name, node.lineno, hint))
    return found


def test_a_hint_to_edit_the_job_file_has_its_fix_beside_it() -> None:
    assert not [each for each in hints_of_edits() if not _NOT_THE_FILE & {each[0], each[2].strip("f'\"")}]


@pytest.mark.parametrize(
    "keys",
    [
        {"training": {**BEST, "metric_for_best_model": "eval_los"}, **HELD_OUT},
        {"training": {**BEST, "metric_for_best_model": "bleurt", "greater_is_better": True}, **HELD_OUT},
        {"training": {**BEST, "greater_is_better": True}, **HELD_OUT},
        {"training": {**BEST, "metric_for_best_model": "eval_mean_token_accuracy"}, **HELD_OUT},
        {
            "training": {**BEST, "metric_for_best_model": "predictions/exact_match"},
            "predictions": {"prompts": ["a"]},
            **HELD_OUT,
        },
        {"training": {**BEST, "metric_for_best_model": "predictions/token_f1", "greater_is_better": False}, **HELD_OUT},
        {**HELD_OUT, "eval_datasets": [{"path": "/d"}]},
        {"predictions": {"prompts": ["a"], "metrics": ["exact_match"]}},
        {"training": {"padding_free": True}},
        {"training": {"loss_type": "dft", "label_smoothing_factor": 0.1}},
        {
            "training": {
                "lr_scheduler_type": "cosine_with_min_lr",
                "lr_scheduler_kwargs": {"min_lr": 1e-6, "min_lr_rate": 0.1},
            }
        },
        {"training": {"lr_scheduler_type": "warmup_stable_decay", "max_steps": 200}},
        {"media": {"min_pixels": 5000, "max_image_size": 64}},
        {"notify": {}},
    ],
    ids=str,
)
def test_keys_that_do_not_go_together_have_a_fix_that_settles_it(keys: dict[str, Any]) -> None:
    data = {"base_model": "/m", "datasets": [{"path": "/d"}], **keys}
    with pytest.raises(InvalidSpecError) as refused:
        jobfile.validate(data)
    assert refused.value.fix
    jobfile.validate(problem.mended(data, refused.value.fix))


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Any]:
    rows = tmp_path / "data/rows.jsonl"
    rows.parent.mkdir()
    return plain.spec(plain.write_base_model(tmp_path / "model"), plain.write_dataset(rows))


def check(tmp_path: Path, data: dict[str, Any]) -> list[str]:
    layout = Layout(tmp_path / "root")
    layout.jobs_dir.mkdir(parents=True, exist_ok=True)
    path = tmp_path / "job.json"
    path.write_text(json.dumps(data))
    return preflight.check(path, Asked(layout, config=Config(), device=CPU)).warnings


@pytest.mark.parametrize(
    ("keys", "fix"),
    [
        ({"output_dir": "{tmp}/full"}, {"output_dir": "{tmp}/full-2"}),
        ({"output_dir": "{tmp}/data/out", "datasets": [{"path": "{tmp}/data"}]}, {"output_dir": None}),
        ({"output_dir": "{tmp}/root/var/spool/honed/x"}, {"output_dir": None}),
        ({"datasets": [{"path": "{tmp}/data/rows.jsonl", "split": "train"}]}, {"datasets.0.split": None}),
        ({"lora": {"layers_to_transform": [0, 3]}}, {"lora.layers_to_transform": [0]}),
        ({"model_type": "qwen3"}, {"model_type": None}),
        ({"trust_remote_code": True}, {"trust_remote_code": None}),
        ({"training": {"use_liger_kernel": True}, "resources": {"gpus": 0}}, {"training.use_liger_kernel": None}),
        ({"attn_implementation": "flash_attention_2"}, {"attn_implementation": None}),
    ],
    ids=str,
)
def test_what_a_check_refuses_has_a_fix_that_it_accepts(
    tmp_path: Path, data: dict[str, Any], keys: dict[str, Any], fix: dict[str, Any]
) -> None:
    plain.write_dataset(tmp_path / "other.jsonl")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").touch()
    asked = json.loads(json.dumps(data | keys).replace("{tmp}", str(tmp_path)))
    with pytest.raises(HonedError) as refused:
        check(tmp_path, asked)
    said = json.loads(json.dumps(fix).replace("{tmp}", str(tmp_path)))
    assert said.items() <= refused.value.fix.items()
    check(tmp_path, problem.mended(asked, refused.value.fix))


@pytest.mark.parametrize("kind", ["PROMPT_TUNING", "IA3", "LOHA"])
def test_an_adapter_that_is_no_lora_is_refused_with_what_is_trained(
    tmp_path: Path, data: dict[str, Any], kind: str
) -> None:
    adapter = plain.write_adapter(tmp_path / "adapter")
    stored = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**stored, "peft_type": kind}))
    with refused(ModelError, f"peft_type '{kind}' is not supported: only LoRA adapters"):
        check(tmp_path, {**data, "lora": None, "adapter": str(adapter)})
