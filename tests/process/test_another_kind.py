"""Another kind of job: an entry in spec/kind.py, a recipe, and a form of rows with two answers, in a copy of honed."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import ColdInstance

import honed
from honed.job import event
from honed.system.personpath import PersonPath
from waiting import wait_for
from zoo.model import build_checkpoint, write_facts

FILES = Path(__file__).parents[1] / "data/kind"
#: The entry of SFT, before which that of the new kind is put.
BEFORE = '        Kind("sft", '
ENTRY = (
    '        Kind("prefer", True, True, "trained", "pair", ("preference",), '
    "has_batches=True, needs_device=True, freezes_base=False),\n"
)


@pytest.fixture
def copied(tmp_path: Path) -> Iterator[ColdInstance]:
    """A honed that runs from a copy of the package with one entry and two files more."""
    copy = tmp_path / "copy"
    shutil.copytree(Path(honed.__file__).parent, copy / "honed", ignore=shutil.ignore_patterns("__pycache__"))
    kinds = copy / "honed/spec/kind.py"
    source = kinds.read_text()
    assert source.count(BEFORE) == 1
    kinds.write_text(source.replace(BEFORE, ENTRY + BEFORE))
    shutil.copy(FILES / "prefer.py", copy / "honed/worker/recipe")
    shutil.copy(FILES / "pair.py", copy / "honed/inputs/form")
    (tmp_path / "root").mkdir()
    made = ColdInstance(tmp_path / "root")
    made.environment["PYTHONPATH"] = str(copy)
    yield made
    made.end()


def pairs(path: Path, num_rows: int = 12) -> Path:
    """Write capitals with a right and a wrong answer; some prompts are conversations."""
    rows = [
        json.loads(line) for line in write_facts(path, num_rows, format="prompt_completion").read_text().splitlines()
    ]
    answers = [row["completion"] for row in rows]
    for number, (row, wrong) in enumerate(zip(rows, [*answers[1:], answers[0]], strict=True)):
        row |= {"chosen": row.pop("completion"), "rejected": wrong}
        if number % 2:
            row["prompt"] = [{"role": "user", "content": row["prompt"]}]
            for name in ("chosen", "rejected"):
                row[name] = [{"role": "assistant", "content": row[name]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.timeout(1200)
def test_a_kind_is_an_entry_a_recipe_and_a_form_of_rows(copied: ColdInstance) -> None:
    asked = {
        "kind": "prefer",
        "base_model": str(build_checkpoint(copied.root / "llama", "llama")),
        "backend": "transformers",
        "eval_split": 0.25,
        "predictions": {"num_samples": 2, "max_new_tokens": 4},
        "training": {
            "max_steps": 12,
            "per_device_train_batch_size": 3,
            "learning_rate": 1e-2,
            "eval_strategy": "epoch",
        },
    }
    rows, facts = pairs(copied.root / "pairs.jsonl"), write_facts(copied.root / "facts.jsonl", 4)
    copied.drop("other", **asked | {"datasets": [{"path": str(facts)}]})
    copied.drop("prefer", **asked | {"datasets": [{"path": str(rows)}]})
    copied.start("--drain")
    assert copied.wait(deadline_sec=1000) == 0, copied.account()
    assert "preference needs `prompt`, `chosen` and `rejected`" in copied.rejected()["other.json"], copied.account()

    honectl = [sys.executable, "-m", "honed.cli.honectl", "--root", str(copied.root)]
    answer = subprocess.run(
        [*honectl, "show", "prefer", "--json"], env=copied.environment, capture_output=True, text=True, check=True
    )
    shown = json.loads(answer.stdout)
    layout = copied.layout.job(shown["id"])
    assert shown["state"] == "succeeded", layout.attempt(1).log_path.read_text()[-3000:]
    events = event.read(PersonPath.own(layout.attempt(1).events_path), 0).events
    losses = [item.data["loss"] for item in events if item.kind == "step"]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)  # the model is the reference
    assert losses[-1] < 0.5
    measured = [item.data["metrics"]["eval_loss"] for item in events if item.kind == "evaluation"]
    assert measured[0] == pytest.approx(math.log(2), abs=1e-6)
    assert measured[-1] != measured[0]
    first = next(item.data["segments"] for item in events if item.kind == "example")
    assert sum(piece["trained"] for piece in first) == 2  # the two answers
    counts = next(item.data for item in events if item.kind == "data")
    assert (counts["num_train"], counts["num_eval"], counts["num_dropped"]) == (9, 3, 0)
    assert (Path(shown["artifacts"]["output_dir"]) / "adapter_model.safetensors").exists()
    page = wait_for(lambda: layout.report_path.exists() and layout.report_path.read_text(), what="the report")
    assert "prefer" in page
    assert "succeeded" in page
