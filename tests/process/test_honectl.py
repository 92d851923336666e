"""honectl as people and scripts call it, with honed up and down."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import Instance

import warm
from honed.job.job import State
from waiting import wait_for
from zoo import plain


def job_file(instance: Instance, name: str, **keys: Any) -> Path:
    path = instance.root / f"{name}.json"
    path.write_text(json.dumps(plain.spec(instance.model, instance.dataset, **keys)))
    return path


@pytest.mark.quick
def test_submit_waits_and_its_status_is_the_jobs(instance: Instance) -> None:
    instance.start()
    good = instance.honectl("submit", "--wait", str(job_file(instance, "succeed")))
    assert good.returncode == 0, good.stderr
    assert "job 1 (succeed)" in good.stdout
    assert "succeeded" in good.stdout
    bad = instance.honectl("submit", "--wait", str(job_file(instance, "explain")))
    assert bad.returncode == 1
    assert "mask_invalid: trained on the prompt" in bad.stdout


def test_submit_refuses_before_it_drops(instance: Instance) -> None:
    instance.start()
    done = instance.honectl("submit", str(job_file(instance, "bad", colour="red")))
    assert done.returncode == 1
    assert "colour" in done.stderr
    assert list(instance.incoming_dir.iterdir()) == []
    assert instance.rejected() == {}
    assert instance.honectl("submit", "/nowhere.yaml").returncode == 2
    files = (job_file(instance, "good"), job_file(instance, "bad", colour="red"))
    answers = json.loads(instance.honectl("submit", "--json", *map(str, files)).stdout)
    assert [(each["state"], each.get("error", {}).get("code")) for each in answers] == [
        (None, None),
        ("rejected", "spec_invalid"),
    ]
    assert list(instance.incoming_dir.iterdir()) == []
    done = instance.honectl("submit", *map(str, files))
    assert "nothing was submitted: 1 of 2 files would be rejected" in done.stdout
    assert list(instance.incoming_dir.iterdir()) == []


def test_submit_tells_the_warnings_of_the_check(instance: Instance) -> None:
    instance.start()
    low = {"max_steps": 4, "learning_rate": 1e-9}
    files = [
        job_file(instance, "slow", lora={"r": 4}, training=low),
        job_file(instance, "after", depends_on=["slow"]),
    ]
    done = instance.honectl("submit", *map(str, files))
    assert done.returncode == 0, done.stderr
    assert "  warning: training.learning_rate: 1e-09" in done.stdout
    assert "there is no job" not in done.stdout


def test_a_file_that_is_refused_is_the_answer_no_whatever_is_asked_of_it(instance: Instance) -> None:
    no_row = instance.root / "rows.jsonl"
    no_row.write_text("")
    for path in (
        job_file(instance, "no-model", base_model="/nowhere"),
        job_file(instance, "no-row", datasets=[{"path": str(no_row)}]),
        job_file(instance, "no-package", report_to=["mlflow"]),
    ):
        assert instance.honectl("check", str(path)).returncode == 1
        for verb in ("check", "plan", "preview", "trial", "submit"):
            done = instance.honectl(verb, "--json", str(path))
            assert done.returncode == 1, (verb, path, done.stderr)
            told = json.loads(done.stdout)
            answer = told[0] if isinstance(told, list) else told
            assert answer["error"]["message"], (verb, path)


def test_check_says_which_jobs_are_not_there_yet(instance: Instance) -> None:
    path = job_file(instance, "later", depends_on=["sooner"])
    instance.start()
    done = instance.honectl("check", str(path))
    assert done.returncode == 0
    assert "depends_on: there is no job 'sooner' yet" in " ".join(done.stdout.split())
    together = instance.honectl("check", str(path), str(job_file(instance, "sooner")))
    assert "there is no job" not in together.stdout
    instance.honectl("submit", "--hold", str(job_file(instance, "sooner")))
    assert "there is no job" not in instance.honectl("check", str(path)).stdout


def test_an_empty_root_is_none(instance: Instance) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from honed.system import layout; print(layout.default_root())"],
        env={**os.environ, "HONED_ROOT": ""},
        cwd=instance.root,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "/\n"


def test_submit_hold_keeps_it_until_release(instance: Instance) -> None:
    instance.start()
    done = instance.honectl("submit", "--hold", "--json", str(job_file(instance, "succeed")))
    assert json.loads(done.stdout)[0]["state"] == "held"
    assert instance.honectl("release", "succeed").returncode == 0
    instance.wait_state("succeed", State.SUCCEEDED)


def test_staged_copies_go_when_their_job_has_succeeded_or_is_refused(instance: Instance) -> None:
    instance.configure(f'[policy]\nallowed_paths = ["{instance.root}/elsewhere"]\n')
    instance.layout.staged_dir.mkdir(parents=True)
    instance.start()
    kept = instance.honectl("submit", "--stage", "--wait", str(job_file(instance, "explain")))
    assert "mask_invalid" in kept.stdout
    (place,) = instance.layout.staged_dir.iterdir()  # a failed job may go on with them
    done = instance.honectl("submit", "--stage", "--wait", str(job_file(instance, "succeed")))
    assert done.returncode == 0, done.stderr
    wait_for(lambda: list(instance.layout.staged_dir.iterdir()) == [place], what="the copies gone")
    wait_for(lambda: "job 2 (succeed): removed its staged copies" in instance.log, what="a word of it")
    refused = instance.honectl("submit", "--stage", str(job_file(instance, "no-room", output_dir="/nowhere/out")))
    assert refused.returncode == 1
    assert list(instance.layout.staged_dir.iterdir()) == [place]


def test_check_and_plan_speak_to_people_and_to_scripts(instance: Instance) -> None:
    good, bad = job_file(instance, "good"), job_file(instance, "bad", lora={"rank": 8})
    done = instance.honectl("check", str(good), str(bad))
    assert done.returncode == 1
    assert f"{good}: ok" in done.stdout
    assert "lora.rank" in done.stdout
    answers = json.loads(instance.honectl("check", "--json", str(good), str(bad)).stdout)
    assert [answer["ok"] for answer in answers] == [True, False]
    assert answers[1]["error"]["code"] == "spec_invalid"
    assert answers[0]["faults"] == []
    (fault,) = answers[1]["faults"]
    assert set(fault) == {"key", "line", "code", "message", "hint", "fix"}
    assert (fault["key"], fault["code"]) == ("lora.rank", "spec_invalid")
    assert answers[0]["sampled"] is False
    plan = json.loads(instance.honectl("plan", "--json", str(good)).stdout)
    assert plan["backend"]["name"] in {"transformers", "unsloth"}
    assert set(plan["precision"]["reasons"]) >= {"load_dtype"}
    assert plan["checkpoint"]["stored_dtypes"] == {"float32": plan["checkpoint"]["num_parameters"]}
    assert plan["memory"]["weights_bytes"] > 0
    assert "backend" in instance.honectl("plan", str(good)).stdout
    low = job_file(instance, "low", lora={"r": 4})
    assert "optim: adamw_torch_fused\n  the default of training.optim\n" in instance.honectl("plan", str(low)).stdout
    asked = job_file(instance, "asked", training={"optim": "adafactor"})
    assert "optim: adafactor\n  as the job asks\n" in instance.honectl("plan", str(asked)).stdout


def test_list_and_show_have_the_contracts_keys(instance: Instance) -> None:
    instance.drop("succeed")
    assert instance.drain() == 0
    (row,) = json.loads(instance.honectl("list", "--json").stdout)
    assert set(row) >= {"id", "name", "state", "outcome", "priority", "submitted_at", "progress"}
    assert set(row["progress"]) == {"step", "num_steps", "epoch", "loss", "eta_sec"}
    shown = json.loads(instance.honectl("show", "--json", "succeed").stdout)
    assert set(shown) >= {"spec", "plan", "attempts", "error", "artifacts", "metrics"}
    assert set(shown["attempts"][0]) >= {"number", "backend", "started_at", "ended_at", "outcome", "step"}
    assert set(shown["artifacts"]) >= {"output_dir", "report", "merged"}
    assert "succeeded" in instance.honectl("show", "1").stdout
    assert "succeeded" in instance.honectl("list").stdout


def test_show_has_the_memory_that_was_estimated_beside_what_was_used(instance: Instance) -> None:
    instance.drop("succeed")
    assert instance.drain() == 0
    memory = json.loads(instance.honectl("show", "--json", "succeed").stdout)["memory"]
    assert memory["used"] == {"weights_bytes": 3 * 2**20, "adapter_bytes": 2**20, "optimizer_bytes": 2**21}
    assert memory["estimated"] == json.loads(instance.honectl("show", "--json", "1").stdout)["plan"]["memory"]
    lines = [line.split() for line in instance.honectl("show", "1").stdout.splitlines()]
    assert ["memory", "estimated", "used"] in lines
    assert next(line for line in lines if line[:1] == ["weights"])[-2:] == ["3.0", "MiB"]


def test_changes_work_with_honed_down(instance: Instance) -> None:
    instance.start()
    assert instance.honectl("pause").returncode == 0
    instance.drop("succeed")
    instance.wait_state("succeed", State.QUEUED)
    instance.kill(signal.SIGTERM)
    assert instance.honectl("hold", "succeed").returncode == 0
    assert instance.wait_state("succeed", State.HELD)
    assert instance.honectl("release", "1").returncode == 0
    assert instance.honectl("resume").returncode == 0
    assert instance.drain() == 0
    assert instance.wait_state("succeed", State.SUCCEEDED)


def test_what_is_not_there_or_not_possible_is_said_in_one_line(instance: Instance) -> None:
    instance.start()
    for arguments, status in ((("show", "nobody"), 2), (("cancel", "99"), 2), (("dance",), 2), ((), 2)):
        done = instance.honectl(*arguments)
        assert done.returncode == status, arguments
        assert "Traceback" not in done.stderr
    instance.stop()
    nowhere = subprocess.run(
        [sys.executable, "-m", "honed.cli.honectl", "--root", "/nowhere", "list"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert nowhere.returncode == 69
    assert "the spool does not exist" in nowhere.stderr


def test_logs_tell_what_the_attempts_told(instance: Instance) -> None:
    instance.drop("die-3")
    assert instance.drain() == 0
    told = instance.honectl("logs", "die-3")
    assert told.returncode == 0
    assert "attempt 2" in told.stdout
    assert "resumes from step 2" in told.stdout
    assert "the libraries chatter" in instance.honectl("logs", "--raw", "die-3").stdout


def test_watch_in_a_pipe_prints_lines_until_all_is_over(instance: Instance) -> None:
    instance.drop("succeed")
    instance.start()
    done = instance.honectl("watch")
    assert done.returncode == 0
    assert "job 1 (succeed): succeeded" in done.stdout


def test_logs_and_watch_print_json_lines(instance: Instance) -> None:
    instance.drop("die-3")
    assert instance.drain() == 0
    told = [json.loads(line) for line in instance.honectl("logs", "--json", "die-3").stdout.splitlines()]
    assert {each["attempt"] for each in told} == {1, 2}
    assert {"started", "step", "resumed"} <= {each["event"] for each in told}
    assert all(isinstance(each["time"], float) for each in told)
    instance.drop("succeed")
    instance.start()
    instance.wait_state("succeed", *State)
    watched = [json.loads(line) for line in instance.honectl("watch", "--json", "succeed").stdout.splitlines()]
    assert (watched[-1]["name"], watched[-1]["state"]) == ("succeed", "succeeded")
    refused = instance.honectl("logs", "--json", "--raw", "succeed")
    assert refused.returncode == 2
    assert "cannot be combined with --raw or --explain" in refused.stdout


def test_text_from_a_job_file_cannot_paint_the_terminal(instance: Instance) -> None:
    instance.drop("succeed", name="succeed.\x1b[31mred\x1b]0;title\x07 [bold]x[/bold]")
    assert instance.drain() == 0
    assert len(list(instance.spool.jobs(State.SUCCEEDED))) + len(instance.rejected()) == 1
    for arguments in (("list",), ("show", "1"), ("logs", "1")):
        done = instance.honectl(*arguments, env={**os.environ, "FORCE_COLOR": "1"})
        assert "\x1b[31mred" not in done.stdout
        assert "\x1b]0" not in done.stdout
    assert "\x1b[31mred" not in instance.log


def test_a_name_that_two_jobs_share_is_ambiguous_until_one_is_over(instance: Instance) -> None:
    instance.start()
    instance.client.ask("pause")
    instance.drop("a", name="succeed.same")
    instance.drop("b", name="succeed.same")
    wait_for(lambda: len(list(instance.spool.jobs(State.QUEUED))) == 2, what="both")
    done = instance.honectl("cancel", "succeed.same")
    assert done.returncode == 2
    assert "1, 2" in done.stderr
    assert instance.honectl("cancel", "2").returncode == 0
    assert instance.honectl("cancel", "succeed.same").returncode == 0


def test_doctor_says_what_this_machine_has(instance: Instance) -> None:
    """torch fails at once, as a broken one does: the unit tests and the booted machine's import the real one."""
    instance.start()
    (instance.root / "torch.py").write_text("raise ImportError('libcudart.so: no such file')\n")
    done = instance.honectl("doctor", "--json", env=os.environ | {"PYTHONPATH": str(instance.root)})
    found = json.loads(done.stdout)
    [broken] = [item for item in found if item["check"] == "torch loads"]
    assert (broken["status"], "libcudart.so" in broken["detail"], done.returncode) == ("error", True, 1)
    assert all(set(item) >= {"check", "status", "detail", "hint"} for item in found)
    assert {item["status"] for item in found} <= {"ok", "warning", "error"}


def test_a_shell_completes_the_numbers_and_names_of_jobs_with_honed_up_and_down(instance: Instance) -> None:
    def numbers() -> list[str]:
        command = [sys.executable, "-m", "honed.cli.honectl", "--job-numbers"]
        return warm.run(command, env=os.environ | {"HONED_ROOT": str(instance.root)}, check=True).stdout.split()

    instance.start()
    assert numbers() == []
    instance.honectl("submit", "--hold", str(job_file(instance, "later")), check=True)
    instance.honectl("submit", "--wait", str(job_file(instance, "succeed")), check=True)
    assert numbers() == ["1", "2", "later", "succeed"], "held jobs before finished ones, as in the list"
    instance.stop()
    assert numbers() == ["1", "2", "later", "succeed"]
    # bash would run it.
    (instance.layout.spool_dir / "queued/$(id>owned).json").touch()
    (instance.layout.spool_dir / "queued/\N{ARABIC-INDIC DIGIT THREE}.json").touch()
    (instance.layout.spool_dir / "queued/3.json").write_text('{"name": "$(id>owned)"}')
    assert sorted(numbers()) == ["1", "2", "3", "later", "succeed"]
