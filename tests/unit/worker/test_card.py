"""The model card: hostile names and paths in it stay text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from honed.system.layout import Layout
from honed.worker import assignment as assignments
from honed.worker.assignment import Assignment
from honed.worker.model import card

HOSTILE = [
    "![a](//evil.example/a.png)",
    "<img src=//evil.example/b.png>",
    "[a](//evil.example)",
    "`` ` ``",
    "a\nb\x1b[2J",
]


@pytest.mark.parametrize("hostile", HOSTILE)
@pytest.mark.parametrize("kind", ["sft", "merge"])
def test_what_a_job_names_makes_no_image_and_no_link(tmp_path: Path, kind: str, hostile: str) -> None:
    made = card.made(_assignment(tmp_path, kind, hostile), {"metrics": {hostile: 1.0, "train_loss": 0.5}}, manifest="m")
    assert "\x1b" not in made
    body = made.split("---\n", 2)[2]
    shown = _without_code(body)
    # What is left outside of code spans has each active character behind a backslash.
    for active in ("![", "<img", "](", "`"):
        assert active not in shown.replace(f"\\{active[0]}", ""), body
    assert "# " in body


def test_a_base_models_name_is_read_again_as_it_was(tmp_path: Path) -> None:
    for name in ('/d/\U0001f600 "x"', "/d/a\u2028b\u202e"):
        made = card.made(_assignment(tmp_path / name[3], "sft", name), {"metrics": {}}, manifest="m")
        assert yaml.safe_load(made.split("---\n")[1])["base_model"] == name


def _assignment(root: Path, kind: str, hostile: str) -> Assignment:
    layout = Layout(root).job(1)
    layout.dir.mkdir(parents=True)
    model_dir = root / "model"
    model_dir.mkdir()
    precision = {
        "load_dtype": "float32",
        "compute_dtype": None,
        "bf16": False,
        "fp16": False,
        "reasons": {},
        "adapter_dtype": "float32",
        "quantization": "none",
        "attn_implementation": "sdpa",
    }
    spec = {"base_model": "/d/model", "datasets": [{"path": "/d/rows.jsonl"}], "lora": {"r": 4}}
    layout.plan_path.write_text(
        json.dumps(
            {
                "job": {"id": 1, "name": hostile, "instance": "/i"},
                "spec": spec,
                "base_model_path": str(model_dir),
                "output_dir": str(root / "out"),
                "backend": {"name": "transformers", "reasons": []},
                "date": "2026-11-29T12:00:00+00:00",
                "precision": precision,
            }
        )
    )
    read = assignments.read(layout.dir, 1)
    datasets = [each.model_copy(update={"path": hostile}) for each in read.spec.datasets]
    named = {"kind": kind, "base_model": hostile, "adapter": hostile, "datasets": datasets}
    return replace(read, spec=read.spec.model_copy(update=named), base_model_path=model_dir / hostile)


def _without_code(text: str) -> str:
    """Return Markdown without its code spans, each of which ends with as many backticks as it begins with."""
    kept, place = "", 0
    while place < len(text):
        if text[place] == "\\":
            kept += text[place : place + 2]
            place += 2
            continue
        if text[place] != "`":
            kept += text[place]
            place += 1
            continue
        length = len(text[place:]) - len(text[place:].lstrip("`"))
        end = place + length
        while True:
            end = text.index("`" * length, end)
            run = len(text[end:]) - len(text[end:].lstrip("`"))
            if run == length:
                break
            end += run
        place = end + length
    return kept
