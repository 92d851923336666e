"""A training and the evaluation of what it made, dropped together."""

from __future__ import annotations

import pytest
from harness import RealInstance

from honed.job.job import State
from waiting import wait_for
from zoo.model import build_checkpoint, write_facts


@pytest.mark.timeout(1200)
def test_an_evaluation_of_a_jobs_adapter_shows_the_figures_of_its_end(real: RealInstance) -> None:
    base = str(build_checkpoint(real.root / "llama", "llama"))
    data = write_facts(real.root / "facts.jsonl", 12)
    tests = [{"path": str(write_facts(real.root / name, 6))} for name in ("first.jsonl", "second.jsonl")]
    real.start()
    asked = {"base_model": base, "eval_datasets": tests, "predictions": {"num_samples": 4, "max_new_tokens": 4}}
    real.drop("again", kind="evaluate", datasets=[], lora=None, adapter="job:once", **asked)
    real.drop("chained", kind="evaluate", datasets=[], lora=None, base_model="job:again", eval_datasets=tests)
    real.drop("once", datasets=[{"path": str(data)}], training={"max_steps": 4}, **asked)
    job = real.wait_state("again", State.SUCCEEDED)
    reason = wait_for(lambda: real.rejected().get("chained.json"), what="the refusal")
    assert "is an evaluation, which produces no model" in reason
    once, again = real.show("once"), real.show("again")
    named = ("eval_loss", "predictions/")
    figures = {name: value for name, value in once["metrics"].items() if name.startswith(named)}
    assert {"eval_loss", "eval_loss/first", "eval_loss/second", "predictions/exact_match/first"} <= set(figures)
    assert {name: again["metrics"][name] for name in figures} == figures
    assert again["artifacts"]["output_dir"] is None
    memory = again["memory"]["estimated"]
    assert (memory["gradient_bytes"], memory["optimizer_bytes"]) == (0, 0)
    page = real.layout.job(job.id).report_path
    text = wait_for(
        lambda: page.exists() and "By data set and tag" in (found := page.read_text()) and found, what="the report"
    )
    assert "succeeded" in text
    assert "How to load" not in text
