"""Many kinds of broken job files at once: each is rejected with a reason, none is lost, and a good one then runs."""

from __future__ import annotations

import json
import os
import time

from harness import Instance

from honed.job.job import State
from waiting import wait_for

#: name → (bytes, text that the reason must contain). `{model}` and `{data}` are filled in.
BROKEN = {
    "typo.yaml": ("base_model: {model}\ndatasets: [{{path: {data}}}]\ntraining:\n  learning_rat: 1\n", "line 4: training.learning_rat"),
    "old_name.yaml": ("base_model: {model}\ndatasets: [{{path: {data}}}]\ntraining: {{warmup_ratio: 0.1}}\n", "warmup_steps"),
    "axolotl.yaml": ("base_model: {model}\ndatasets: [{{path: {data}}}]\nmicro_batch_size: 2\n", "per_device_train_batch_size"),
    "llamafactory.yaml": ("base_model: {model}\ndatasets: [{{path: {data}}}]\ncutoff_len: 2\n", "max_length"),
    "type.yaml": ("base_model: {model}\npriority: high\ndatasets: [{{path: {data}}}]\n", "line 2: priority"),
    "owned.yaml": ("base_model: {model}\ndatasets: [{{path: {data}}}]\ntraining: {{bf16: true}}\n", "dtype"),
    "tag.yaml": ("base_model: !!python/object/apply:os.system ['touch /tmp/pwned']\n", "line 1"),
    "alias.yaml": ("a: &a [1]\nb: [*a, *a]\n", "line 1"),
    "duplicate.yaml": ("base_model: {model}\nname: a\nname: b\n", "line 3"),
    "syntax.yaml": ("base_model: {model}\n  datasets: [\n", "line"),
    "list.yaml": ("- 1\n- 2\n", "mapping"),
    "empty.yaml": ("", "empty"),
    "binary.yaml": ("\x00\x01\x02", ""),
    "half.json": ('{{"base_model": "{model}", "datasets": [', "line 1"),
    "duplicate.json": ('{{"name": "a",\n"name": "b"}}', "line 2"),
    "nan.json": ('{{"base_model": "{model}", "priority": NaN, "datasets": [{{"path": "{data}"}}]}}', "line 1: 'NaN'"),
    "syntax.toml": ("base_model = {model}\n", "line 1"),
    "unknown.toml": ('base_model = "{model}"\ndatasets = [{{path = "{data}"}}]\n[lora]\nrank = 8\n', "line 4: lora.rank"),
    "no_model.yaml": ("base_model: /nowhere/model\ndatasets: [{{path: {data}}}]\n", "/nowhere/model"),
    "no_data.yaml": ("base_model: {model}\ndatasets: [{{path: /nowhere/rows.jsonl}}]\n", "/nowhere/rows.jsonl"),
    "columns.yaml": ("base_model: {model}\ndatasets: [{{path: {odd}}}]\n", "colour"),
    "two_gpus.yaml": ("base_model: {model}\ndatasets: [{{path: {data}}}]\nresources: {{gpus: 2}}\n", "resources.gpus: 2 GPUs are wanted"),
    "full_4bit.yaml": ("base_model: {model}\ndatasets: [{{path: {data}}}]\nquantization: 4bit\n", "quantization"),
    "merge.yaml": ("kind: merge\nbase_model: {model}\nadapter: {model}\noutput_dir: /tmp/x\n", "merge"),
    "outside.yaml": ("base_model: {model}\ndatasets: [{{path: {data}}}]\noutput_dir: {data}/deep\n", "output_dir"),
    "job.txt": ("base_model: {model}\n", ".yaml"),
    "nested.yaml": ("a: " + "[" * 200 + "]" * 200, ""),
    "huge.json": ('{{"x": "' + "y" * 300_000 + '"}}', "larger than"),
}  # fmt: skip


def test_each_is_refused_with_its_reason_and_a_good_job_after_them_is_done(instance: Instance) -> None:
    odd = instance.root / "odd.jsonl"
    odd.write_text(json.dumps({"colour": "red", "size": 3}) + "\n")
    instance.start()
    for name, (text, _) in BROKEN.items():
        filled = text.format(model=instance.model, data=instance.dataset, odd=odd)
        (instance.incoming_dir / name).write_text(filled)
    (instance.incoming_dir / "link.yaml").symlink_to("/etc/passwd")
    os.mkfifo(instance.incoming_dir / "pipe.yaml")
    (instance.incoming_dir / "directory.yaml").mkdir()
    instance.drop("succeed")
    num_broken = len(BROKEN) + 2
    wait_for(lambda: len(instance.rejected()) == num_broken, what="all refusals")
    instance.wait_state("succeed", State.SUCCEEDED)

    reasons = instance.rejected()
    for name, (text, word) in BROKEN.items():
        assert word in reasons[name], f"{name}: {reasons[name]}"
        wait_for(instance.kept(name).exists, what=f"{name} in rejected/")  # it is moved after its reason was written
        assert instance.kept(name).read_text() == text.format(model=instance.model, data=instance.dataset, odd=odd)
    for name in ("link.yaml", "pipe.yaml"):
        assert instance.reason(name).kept_path is None
        assert "regular file" in reasons[name] or "symbolic link" in reasons[name]
    assert "Traceback" not in instance.log
    assert "Traceback" not in "".join(reasons.values())
    # It may hold somebody's work.
    wait_for(lambda: os.listdir(instance.incoming_dir) == ["directory.yaml"], what="that alone in incoming/")  # noqa: PTH208
    wait_for(lambda: "'directory.yaml' in" in instance.log, what="a word of it")
    assert instance.process is not None
    assert instance.process.poll() is None


def test_a_half_written_file_is_not_taken(instance: Instance) -> None:
    instance.start()
    good = json.dumps({"base_model": str(instance.model), "datasets": [{"path": str(instance.dataset)}]})
    with (instance.incoming_dir / "succeed.json").open("w") as file:
        for piece in (good[:20], good[20:60], good[60:]):
            file.write(piece)
            file.flush()
            time.sleep(0.4)
            assert instance.rejected() == {}
    instance.wait_state("succeed", State.SUCCEEDED)


def test_two_jobs_for_one_output_directory_are_not_both_accepted(instance: Instance) -> None:
    instance.start()
    instance.client.ask("pause")
    instance.drop("succeed.a", output_dir=str(instance.root / "out"))
    instance.wait_state("succeed.a", State.QUEUED)
    instance.drop("succeed.b", output_dir=str(instance.root / "out/deeper"))
    wait_for(lambda: "succeed.b.json" in instance.rejected(), what="the refusal")
    assert "is job 1's" in instance.rejected()["succeed.b.json"]


def test_a_hundred_bad_files_do_not_keep_a_good_one_waiting_for_ever(instance: Instance) -> None:
    for number in range(100):
        (instance.incoming_dir / f"bad{number}.yaml").write_text("nonsense: true\n")
    instance.drop("succeed")
    instance.start("--drain")
    assert instance.wait() == 0
    assert len(instance.rejected()) == 100
    job = instance.job("succeed")
    assert job is not None
    assert job.state is State.SUCCEEDED


def test_damaged_leftovers_of_a_crash_keep_neither_honed_from_starting_nor_others_jobs(instance: Instance) -> None:
    """One thing of each kind that a start recovers is not what honed leaves there: it is named in the journal."""
    spool_dir = instance.layout.spool_dir
    damaged = [
        spool_dir / "queued/.9001.json.tmp",
        spool_dir / "queued/9002.json",
        spool_dir / "edits/.9003.yaml.tmp",
        spool_dir / "edits/9004.yaml",
        spool_dir / "sweeps/9005/not-a-number",
        spool_dir / "claimed/9006/.a.yaml.tmp",
        spool_dir / "rejected/.a.yaml.reason.tmp",
        spool_dir / "ended/9007",
    ]
    for path in damaged:
        path.mkdir(parents=True)
    (spool_dir / "sweeps/.9008.new").touch()
    instance.layout.jobs_dir.mkdir(parents=True, exist_ok=True)
    (instance.layout.jobs_dir / "9009").touch()
    instance.drop("succeed")
    instance.start()
    instance.wait_state("succeed", State.SUCCEEDED)
    for path in damaged:
        known = path.parent if path.parent.name.isdecimal() else path  # a sweep and a claim are one item
        wait_for(lambda known=known: f"{known}: " in instance.log, what=str(path))  # type: ignore[misc]
        assert path.is_dir() or path.suffix == ".json", path  # a damaged entry goes into corrupt/
