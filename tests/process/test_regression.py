"""A model that knew its answers and gets worse: a guard's verdict, and the warning without a guard."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import yaml
from harness import RealInstance
from test_report import Page

from zoo.model import build_checkpoint, write_facts


def first_line(page: Page) -> str:
    """Return the text below the job's name."""
    return page.shown.split("honed ")[0]


def honectl(real: RealInstance, *arguments: str) -> str:
    return real.honectl(*arguments, check=True).stdout


def test_a_trained_model_made_worse_is_regressed_with_its_guard_and_a_success_with_a_warning_without(
    real: RealInstance,
) -> None:
    model = build_checkpoint(real.root / "llama", "llama")
    rows = write_facts(real.root / "facts.jsonl", 4)
    common = {"datasets": [{"path": str(rows)}], "dtype": "float32"}
    good = {"max_steps": 60, "learning_rate": 5e-3, "per_device_train_batch_size": 4}
    bad = {"max_steps": 40, "learning_rate": 0.3, "eval_strategy": "steps", "eval_steps": 2}
    spoilt = common | {"base_model": "job:good", "lora": {"r": 4}, "eval_split": 0.5, "training": bad}
    jobs: dict[str, dict[str, Any]] = {
        "good": common | {"base_model": str(model), "predictions": {"sample_frequency": "off"}, "training": good},
        "guarded": spoilt | {"guard": {"metric": "token_f1", "max_drop": 0.1, "patience": 2}},
        "unguarded": spoilt | {"training": bad | {"max_steps": 6}},
    }
    for name, spec in jobs.items():
        path = real.root / f"{name}.yaml"
        path.write_text(yaml.safe_dump(spec))
        shutil.copy(path, real.incoming_dir)
    real.start("--drain")
    assert real.wait(deadline_sec=800) == 0
    guarded, unguarded = real.show("guarded"), real.show("unguarded")
    assert (guarded["state"], guarded["outcome"]) == ("failed", "regressed"), real.log
    assert (unguarded["state"], unguarded["outcome"]) == ("succeeded", "succeeded"), real.log

    # The guard ended it early; its adapter is kept, but not where a good one would be.
    assert guarded["metrics"]["guard_before"] == 1.0
    assert guarded["progress"]["step"] == 4, "two evaluations below the line"
    output = real.layout.job(guarded["id"]).dir / "output"
    assert not output.exists()
    kept = Path(guarded["artifacts"]["output_dir"])
    assert kept == output.with_name("output.regressed")
    assert (kept / "adapter_model.safetensors").exists()
    assert json.loads((kept / "honed.json").read_text())["job"]["name"] == "guarded"

    pages = {each["id"]: Page.of(real.layout.job(each["id"]).report_path) for each in (guarded, unguarded)}
    assert "regressed: token_f1 fell from 1.000 to 0." in first_line(pages[guarded["id"]])
    _, *after = pages[guarded["id"]].shown.split("How to load and serve it")
    assert after, "in the contents, and above the code"
    assert str(kept) in after[-1]
    assert "succeeded, but worse than it began: eval_loss rose from 0." in first_line(pages[unguarded["id"]])
    outcomes = [
        keys["class"]
        for page in pages.values()
        for tag, keys in page.elements
        if tag == "p" and (keys.get("class") or "").startswith("outcome")
    ]
    assert outcomes == ["outcome bad", "outcome warn"]

    assert "token_f1 was below 0.900 at 2 evaluations in a row: training ends at step 4" in real.log
    assert "(guarded): token_f1 fell from 1.000 to 0." in real.log
    assert "(guarded): attempt 1: regressed" in real.log
    assert "(unguarded): the model ended worse than it began: eval_loss rose from 0." in real.log
    assert "regressed" in (said := honectl(real, "show", "guarded"))
    assert "token_f1 fell from 1.000 to 0." in said
    assert "but worse than it began: eval_loss rose from 0." in honectl(real, "show", "unguarded")
