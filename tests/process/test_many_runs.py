"""Many runs: lists, refused files beside jobs, new jobs made of old ones, and comparisons."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys

import pytest
from harness import Instance, said_on_terminal

from honed.cli import command_line, contrast, honectl, nearest
from honed.job.job import State
from honed.job.shape import Prediction
from zoo import plain


@pytest.fixture
def runs(instance: Instance) -> Instance:
    """Three jobs that have ended, one of them failed, and one refused file."""
    instance.drop("succeed.low", name="succeed.low", training={"learning_rate": 1e-4})
    instance.drop("succeed.high", name="succeed.high", training={"learning_rate": 2e-4}, priority=5)
    instance.drop("fail", name="fail", retry={"max_attempts": 1})
    instance.drop("odd", colour="red")
    assert instance.drain() == 0
    return instance


def names(instance: Instance, *arguments: str) -> list[str]:
    return instance.honectl("list", "-o", "name", *arguments, check=True).stdout.split()


def test_a_list_is_sorted_filtered_and_has_the_columns_that_were_asked_for(runs: Instance) -> None:
    assert names(runs, "--sort=priority")[-1] == "succeed.high"
    assert names(runs, "--sort=-priority")[0] == "succeed.high"
    assert names(runs, "--filter", "state=failed") == ["fail"]
    assert names(runs, "--filter", "priority>=5", "--filter", "name~SUCCEED") == ["succeed.high"]
    assert names(runs, "--filter", "state!=failed", "--sort", "id", "--limit", "1") == [
        min(names(runs, "--filter", "state=succeeded"), key=lambda name: runs.job(name).id)  # type: ignore[union-attr]
    ]
    head, *rows = runs.honectl("list", "-o", "columns=id,model,data", check=True).stdout.splitlines()
    assert head.split() == ["id", "model", "data"]
    assert all(row.split()[1:] == [runs.model.name, runs.dataset.name] for row in rows)
    (row,) = json.loads(runs.honectl("list", "-o", "json", "succeed.low", check=True).stdout)
    assert (row["model"], row["data"]) == (str(runs.model), [str(runs.dataset)])
    assert row["elapsed_sec"] > 0
    assert "ETA" not in said_on_terminal(runs, 200, "list")
    unknown = runs.honectl("list", "--sort", "scoer")
    assert unknown.returncode == 2
    assert "did you mean score?" in unknown.stderr
    assert "not a comparison" in runs.honectl("list", "--filter", "loss").stderr


@pytest.mark.parametrize(
    ("test", "said"),
    [
        ("state=runing", "did you mean state=running?"),
        ("state!=pending", "did you mean state=queued?"),
        ("state~xyz", "There are: queued, held"),
        ("class=hihg", "no class 'hihg'"),
        ("sweep=gird", "did you mean sweep=grid?"),
        ("group=77", "did you mean sweep?"),
        ("sweep=77", "There are: grid,"),
        ("id=abc", "not a number"),
        ("submitted>2026", "submitted is no number"),
        ("user=rooot", "there is no user 'rooot'"),
    ],
)
def test_a_filter_that_no_job_could_meet_is_refused_with_the_nearest_value(
    runs_of_sweep: Instance, test: str, said: str
) -> None:
    done = runs_of_sweep.honectl("list", "--filter", test)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in " ".join(done.stderr.split())


def test_filters_know_sweeps_users_and_the_head_of_the_queue(runs_of_sweep: Instance) -> None:
    (number,) = {job.group["id"] for job in runs_of_sweep.spool.all_jobs().values() if job.group}
    for test in ("sweep=GRID", f"sweep={number}", "sweep~seed 2", "user=root" if os.getuid() == 0 else "state!=held"):
        assert "grid-2" in names(runs_of_sweep, "--filter", test), test
    assert names(runs_of_sweep, "--filter", "sweep!=grid") == ["succeed.other"]
    assert names(runs_of_sweep, "--filter", "priority=head") == []
    assert names(runs_of_sweep, "--filter", "sweep=grid", "--state", "succeeded") == []


@pytest.fixture(scope="module")
def runs_of_sweep(tmp_path_factory: pytest.TempPathFactory) -> Instance:
    """A sweep of ten jobs that have failed, and another job."""
    instance = Instance(tmp_path_factory.mktemp("sweep"))
    instance.drop("fail", name="grid", sweep={"training.seed": [*range(1, 11)]}, retry={"max_attempts": 1})
    instance.drop("succeed.other", name="succeed.other")
    assert instance.drain() == 0
    return instance


def test_a_sweep_is_named_where_a_job_is_asked_for(runs_of_sweep: Instance) -> None:
    """A verb acts on the jobs of the sweep where that makes sense, and says which there are where it does not."""
    jobs = sorted(job.id for job in runs_of_sweep.spool.all_jobs().values() if job.group)
    for verb in (["logs"], ["predictions"], ["diff", "succeed.other"], ["watch", "--json"], ["report"], ["rerun"]):
        done = runs_of_sweep.honectl(*verb, "grid")
        assert done.returncode == 2, verb
        told = " ".join((done.stdout + done.stderr).split())
        assert f"'grid' is a sweep of 10 jobs, {jobs[0]} to {jobs[-1]}" in told, verb
        assert f"such as {jobs[0]}; honectl show grid lists them" in told
    pinned = runs_of_sweep.honectl("pin", "grid", check=True).stdout
    assert pinned.count("pinned: neither prune") == 10
    assert all(runs_of_sweep.spool.job(number).is_pinned for number in jobs)  # type: ignore[union-attr]
    compared = runs_of_sweep.honectl("compare", "--json", "grid", check=True)
    assert len(json.loads(compared.stdout)["jobs"]) == len(contrast.MARKS)
    assert f"the {len(contrast.MARKS)} of its 10 jobs with the lowest evaluation loss" in compared.stderr
    assert runs_of_sweep.honectl("unpin", "grid", check=True).stdout.count("not pinned") == 10
    assert runs_of_sweep.honectl("requeue", "grid", check=True).stdout.count("queued") == 10
    refused = runs_of_sweep.honectl("requeue", "grid")
    assert refused.returncode == 2
    assert "none of its 10 jobs is failed or cancelled" in refused.stderr
    runs_of_sweep.honectl("cancel", "grid", check=True)


def test_a_refused_file_is_listed_and_shown_beside_the_jobs(runs: Instance) -> None:
    assert "1 rejected file, the newest odd.json" in runs.honectl("list", check=True).stdout
    listed = runs.honectl("list", "--rejected", check=True).stdout
    assert "odd.json" in listed
    assert "colour" in listed
    for name in ("odd.json", "odd"):
        assert "colour" in runs.honectl("show", name, check=True).stdout
    assert runs.honectl("show", "nothing").returncode == 2


def test_what_show_says_first_is_how_the_job_ended_and_why(runs: Instance) -> None:
    lines = runs.honectl("show", "fail", check=True).stdout.splitlines()
    assert lines[0].endswith("(fail): failed")
    assert lines[1].startswith("killed: the worker exited")
    facts = [line.split()[0] for line in lines if line.strip()]
    assert facts.index("model") < facts.index("data") < facts.index("duration") < facts.index("output_dir")


def test_a_rerun_is_a_new_job_of_the_same_file_with_the_changes(runs: Instance) -> None:
    runs.start()
    old = runs.job("succeed.low")
    assert old is not None
    refused = runs.honectl("requeue", str(old.id))
    assert refused.returncode == 2
    assert f"honectl rerun {old.id}" in refused.stderr
    done = runs.honectl("rerun", "succeed.low", "--set", "training.learning_rate=3e-4", "--set", "lora={r: 2}")
    assert done.returncode == 0, done.stderr
    new = runs.wait_state("succeed.low-2", State.SUCCEEDED)
    assert str(runs.layout.job(new.id).spec_path) in done.stdout
    spec = json.loads(runs.honectl("show", "--json", str(new.id), check=True).stdout)["spec"]
    assert (spec["training"]["learning_rate"], spec["lora"]["r"]) == (3e-4, 2)
    assert runs.job("succeed.low") == old
    assert spec.get("group") is None
    assert "succeed.low-3" in runs.honectl("rerun", str(new.id), check=True).stdout
    for setting, said in (("training.learning_rat=1", "learning_rate"), ("nothing", "KEY=VALUE"), ("lora.r=-1", "r")):
        wrong = runs.honectl("rerun", "succeed.low", "--set", setting)
        assert wrong.returncode in (1, 2)
        assert said in wrong.stderr
    typo = runs.honectl("rerun", "succeed.low", "--set", "training.learning_rat=1e-3").stderr
    assert "--set training.learning_rat: unknown key" in typo
    assert "did you mean --set training.learning_rate=0.001?" in typo  # and not: remove it, the right one is set, too
    assert "line " not in typo
    assert ".yaml" not in typo
    assert runs.job("succeed.low-4") is None


def test_a_rerun_that_is_a_sweep_names_all_of_its_jobs(runs: Instance) -> None:
    runs.start()
    done = runs.honectl("rerun", "succeed.low", "--set", "sweep={lora.r: [2, 4, 8]}", "--name", "succeed.grid")
    assert done.returncode == 0, done.stderr
    numbers = sorted(job.id for job in runs.spool.all_jobs().values() if job.group)
    assert f"(succeed.grid): 3 jobs, {numbers[0]} to {numbers[2]}" in done.stdout
    one = runs.honectl("rerun", "succeed.grid-2", "--set", "sweep={lora.r: [2, 4]}", "--json", check=True)
    told = json.loads(one.stdout)
    assert (told["state"], told["num_jobs"], len(told["jobs"])) == ("sweep", 2, 2)


def test_two_jobs_are_told_apart_and_compared(runs: Instance) -> None:
    told = json.loads(runs.honectl("diff", "--json", "succeed.low", "succeed.high", check=True).stdout)
    assert told["spec"] == {"training.learning_rate": [1e-4, 2e-4], "priority": [0, 5]}
    # What the machine had free when each was planned is no difference of the runs.
    assert not [key for key in told["plan"] if key.endswith(("free_bytes", "available_bytes"))]
    assert "training.learning_rate" in runs.honectl("diff", "succeed.low", "succeed.high", check=True).stdout
    done = runs.honectl("compare", "--json", "succeed.low", "succeed.high", "fail", check=True)
    whole = json.loads(done.stdout)
    assert [job["name"] for job in whole["jobs"]] == ["succeed.low", "succeed.high", "fail"]
    assert [bool(course) for course in whole["losses"]] == [True, True, False]
    drawn = runs.honectl("compare", "succeed.low", "succeed.high", check=True).stdout
    assert "\x1b" not in drawn
    assert max(map(len, drawn.splitlines())) <= 100
    assert runs.honectl("compare", "succeed.low").returncode == 2


@pytest.mark.parametrize(
    ("verb", "said"),
    [("check", "reading the model and the data"), ("doctor", "looking at the configuration, the packages")],
)
def test_a_verb_that_takes_a_while_says_first_what_it_does(verb: str, said: str, runs_of_sweep: Instance) -> None:
    job = next(iter(runs_of_sweep.spool.all_jobs()))
    file = [str(runs_of_sweep.layout.job(job).spec_path)] if verb == "check" else []
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "honed.cli.honectl", "--root", str(runs_of_sweep.root), verb, *file]
    with subprocess.Popen(
        words, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "xterm"}
    ) as process:
        os.close(theirs)
        told = b""
        with contextlib.suppress(OSError):  # EIO: the other side is closed
            while said.encode() not in told and (part := os.read(ours, 1000)):
                told += part
        assert process.poll() is None, told
        process.kill()
    os.close(ours)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_plot_keeps_to_its_width_and_marks_each_curve(width: int) -> None:
    courses = [[(step, 3 - step / 50) for step in range(1, 101)], [(step, 2.0) for step in range(1, 51)]]
    lines = [line.plain for line in contrast.plot(courses, width=width)]
    assert max(map(len, lines)) <= width
    assert {"a", "b"} <= set("".join(lines[1:-2]))
    assert lines[1].strip().startswith("2.98")
    assert lines[-1].endswith("step 100")


def test_answers_are_compared_where_two_jobs_have_predicted_the_same_example() -> None:
    def row(prompt: str, prediction: str, step: int = 9) -> Prediction:
        return {
            "epoch": 1.0,
            "step": step,
            "sample_index": 0,
            "prompt": prompt,
            "ground_truth": "Oslo",
            "prediction": prediction,
        }

    first = [row("Norway?", "Rome", step=0), row("Norway?", "Oslo"), row("Italy?", "Rome")]
    assert contrast.shared_answers([first, [row("Norway?", "Bergen")], []]) == [
        {"prompt": "Norway?", "ground_truth": "Oslo", "predictions": ["Oslo", "Bergen", None]}
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("lst", "did you mean honectl list?"),
        ("squeue", "that is honectl list here"),
        ("scancel 7", "that is honectl cancel ID here"),
        ("rm 7", "that is honectl prune ID here"),
        ("modify 7", "that is honectl edit ID here"),
        ("train a.yaml", "that is honectl submit FILE here"),
        ("tail 7", "that is honectl logs -f ID here"),
        ("list --srot=id", "--srot: did you mean --sort?"),
        ("list --format wide", "--format: did you mean --output?"),
    ],
)
def test_a_wrong_verb_or_option_is_answered_with_the_right_one(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        honectl.main(words.split())
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_every_verb_that_a_hint_names_exists() -> None:
    verbs = {name for name, _, _ in command_line.verbs(command_line.parser())}
    named = {meant.split()[1] for meant in nearest.MEANINGS if not meant.startswith("honectl --")}
    assert named <= verbs
    assert not {word for words in nearest.MEANINGS.values() for word in words} & verbs


def test_the_log_of_a_job_has_sentences_and_no_values_of_python(runs: Instance) -> None:
    told = runs.honectl("logs", "succeed.low", check=True).stdout
    assert "the worker has started" in told
    assert not any(sign in told for sign in ("{'", "['", "None", "True", "[]"))


def test_a_check_says_on_a_terminal_what_it_reads(instance: Instance) -> None:
    path = instance.root / "a.json"
    path.write_text(json.dumps(plain.spec(instance.model, instance.dataset)))
    assert "a.json: reading the model and the data" in said_on_terminal(instance, 80, "check", str(path))
    assert "reading the model" not in instance.honectl("check", str(path), check=True).stderr
