"""Job files that honectl init writes: accepted, within this machine's memory, and with the data's own facts."""

from __future__ import annotations

import argparse
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from honed.cli import command_line, draft, init
from honed.cli.instance import Instance
from honed.spec import jobfile
from honed.system import device, layout
from honed.system.error import MemoryShortError, UsageError
from zoo import family, model, plain

FORMATS = get_args(model.Format)


@pytest.fixture
def instance(tmp_path: Path) -> Instance:
    return Instance(layout.of(tmp_path / "root"))


def options(*words: str) -> argparse.Namespace:
    return command_line.parser().parse_args(["init", *words])


def run(instance: Instance, *words: str) -> int:
    return init.init(instance, options(*words))


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("data_format", FORMATS)
def test_the_file_is_accepted_for_each_format_and_family(
    name: str, data_format: Any, instance: Instance, tmp_path: Path
) -> None:
    base = family.write(tmp_path / "model", name)
    rows = model.write_facts(tmp_path / "facts.jsonl", 16, format=data_format)
    output = tmp_path / "job.yaml"
    assert run(instance, "--model", str(base), "--data", str(rows), "-o", str(output)) == 0
    verdict = draft.check_one(instance, output)
    assert verdict.plan is not None
    assert verdict.plan.memory.fits
    assert verdict.warnings == []
    assert f"16 rows of {data_format}" in output.read_text()


@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_the_method_is_the_one_that_was_asked_for(method: str, instance: Instance, tmp_path: Path) -> None:
    base = plain.write_base_model(tmp_path / "model")
    rows = plain.write_dataset(tmp_path / "2026.jsonl", num_rows=4)
    output = tmp_path / "job.yaml"
    run(instance, "--model", str(base), "--data", str(rows), "--method", method, "-o", str(output))
    made = jobfile.load(output)
    assert (made.lora is not None, made.quantization) == (method != "full", "4bit" if method == "qlora" else "none")
    assert made.name == "job-2026"  # a name of digits alone would be a number
    assert made.eval_split is None  # four rows are too few to hold some out


def reserve(instance: Instance, num_available: int) -> None:
    """Leave jobs only so many bytes of this machine's memory."""
    path = instance.layout.config_path
    path.parent.mkdir(parents=True)
    path.write_text(f"[device]\nreserve_bytes = {device.cpu().total_bytes - num_available}\n")


def test_batches_and_more_shrink_until_the_job_fits_and_the_file_says_so(instance: Instance, tmp_path: Path) -> None:
    base = plain.write_base_model(tmp_path / "model")
    rows = tmp_path / "long.jsonl"
    rows.write_text("".join(json.dumps({"text": f"{n} word " * 450}) + "\n" for n in range(12)))
    output = tmp_path / "job.yaml"
    words = ("--model", str(base), "--data", str(rows))
    run(instance, *words, "-o", str(output))
    before = draft.check_one(instance, output)
    assert before.plan is not None
    reserve(instance, before.plan.memory.total_bytes // 3)
    smaller = tmp_path / "smaller.yaml"
    run(instance, *words, "-o", str(smaller))
    after = draft.check_one(instance, smaller)
    assert after.plan is not None
    assert after.plan.memory.fits
    first, second = before.spec.training, after.spec.training
    assert second.per_device_train_batch_size < first.per_device_train_batch_size
    product = second.per_device_train_batch_size * second.gradient_accumulation_steps
    assert product == first.per_device_train_batch_size * first.gradient_accumulation_steps


def test_a_model_that_never_fits_is_refused_with_the_reason(instance: Instance, tmp_path: Path) -> None:
    base = plain.write_base_model(tmp_path / "model")
    rows = plain.write_dataset(tmp_path / "rows.jsonl")
    reserve(instance, 1000)
    output = tmp_path / "job.yaml"
    with pytest.raises(MemoryShortError):
        run(instance, "--model", str(base), "--data", str(rows), "-o", str(output))
    assert not output.exists()


def test_the_corrections_of_the_check_are_applied_and_named(instance: Instance, tmp_path: Path) -> None:
    """Held-out files beside others: the check names the split."""
    base = plain.write_base_model(tmp_path / "model")
    sets = tmp_path / "sets"
    sets.mkdir()
    plain.write_dataset(sets / "train.jsonl", num_rows=40)
    plain.write_dataset(sets / "test.jsonl", num_rows=8, first=100)
    output = tmp_path / "job.yaml"
    run(instance, "--model", str(base), "--data", str(sets), "-o", str(output))
    made = jobfile.load(output)
    assert made.datasets[0].split == "train"
    assert "split: train" in output.read_text()


def test_rows_that_cannot_be_held_out_are_all_trained_on(instance: Instance, tmp_path: Path) -> None:
    base = plain.write_base_model(tmp_path / "model")
    rows = tmp_path / "same.jsonl"
    rows.write_text('{"text": "the same"}\n' * 40)
    output = tmp_path / "job.yaml"
    run(instance, "--model", str(base), "--data", str(rows), "-o", str(output))
    assert jobfile.load(output).eval_split is None


def test_nothing_is_overwritten_and_what_is_missing_is_named(
    instance: Instance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base = plain.write_base_model(tmp_path / "model")
    rows = plain.write_dataset(tmp_path / "rows.jsonl")
    (tmp_path / "rows.yaml").write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        run(instance, "--model", str(base), "--data", str(rows))
    assert (tmp_path / "rows.yaml").read_text() == "mine"
    with pytest.raises(UsageError, match="no such file"):
        run(instance, "--model", str(base), "--data", "nowhere.jsonl")
    done = subprocess.run(
        [sys.executable, "-m", "honed.cli.honectl", "init", "--model", str(base)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "--data" in done.stderr) == (2, True)


def test_it_asks_in_a_terminal_and_asks_again_after_a_wrong_answer(tmp_path: Path) -> None:
    plain.write_base_model(tmp_path / "model")
    plain.write_dataset(tmp_path / "rows.jsonl", num_rows=40)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "honed.cli.honectl", "--root", str(tmp_path / "root"), "init"]
    asked = subprocess.Popen(command, cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs, close_fds=True)
    os.close(theirs)
    said = b""
    answers = iter([b"nowhere\n", b"model\n", b"rows.jsonl\n", b"full\n"])
    try:
        while True:
            if said.count(b"): ") > 0 and said.endswith(b"): "):
                os.write(ours, next(answers))
            said += os.read(ours, 4096)
    except OSError:  # the other end is closed
        pass
    assert asked.wait(timeout=60) == 0, said
    assert b"no such file or directory" in said
    assert jobfile.load(tmp_path / "rows.yaml").lora is None
