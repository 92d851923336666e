"""The metrics of a real daemon, as honed-web and honectl tell them; and a full disk, as the control socket tells it."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import Instance
from prometheus_client.parser import text_string_to_metric_families

from honed.job import query
from honed.job.job import State
from honed.page.metrics import scrape
from honed.page.source import Source
from honed.system.error import HonedError
from waiting import wait_for
from zoo import plain

ETC = Path(__file__).parents[2] / "etc"
#: The words of PromQL, and the labels, in the expressions of etc/.
METRIC = re.compile(r"\b(?:honed|process)_[a-z0-9_]+\b")


def told(instance: Instance) -> dict[str, dict[tuple[str, ...], float]]:
    """Return what `honectl metrics` prints, by the sample's name and the values of its labels."""
    done = instance.honectl("metrics")
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(done.stdout):
        assert family.documentation
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def test_each_event_is_counted_once_by_daemons_that_are_killed_and_nothing_lowers_a_counter(instance: Instance) -> None:
    instance.configure("[retention]\nmax_rejected_age_days = 99\n")
    instance.start()
    for name in ("succeed", "die-2", "shrink-1", "crash"):
        instance.drop(name, retry={"max_attempts": 2}, training={"per_device_train_batch_size": 2})
        (instance.incoming_dir / f"bad-{name}.json").write_text("{")
        done = State.FAILED if name == "crash" else State.SUCCEEDED
        instance.wait_state(name, done)
        wait_for(lambda name=name: f"bad-{name}.json" in instance.rejected(), what="a rejection")  # type: ignore[misc]
        instance.kill(signal.SIGKILL)  # with or without a write since the end
        instance.start()
    instance.client.ask("requeue", id="crash")
    wait_for(lambda: len(job.ends) == 2 if (job := instance.job("crash")) else False, what="a second end")
    instance.kill(signal.SIGKILL)
    instance.start()
    wait_for(lambda: told(instance)["honed_jobs_finished_total"].get(("killed",)) == 2, what="the last write")
    found = told(instance)
    assert found["honed_jobs_finished_total"] == {("succeeded",): 3, ("killed",): 2}
    assert found["honed_jobs_rejected_total"] == {("spec_invalid",): 4}
    attempts = [attempt for job in instance.spool.all_jobs().values() for attempt in job.attempts]
    assert sum(found["honed_attempts_finished_total"].values()) == len(attempts) == 9
    assert sum(found["honed_device_seconds_total"].values()) == pytest.approx(sum(each.spent_sec for each in attempts))
    assert found["honed_out_of_memory_adjustments_total"] == {(): 1}
    assert found["honed_resumes_total"] == {(): sum(each.is_resumed for each in attempts)}
    assert "honed_removed_bytes_total" not in found
    assert found["honed_queue_wait_seconds_count"] == {(): 4}
    assert found["honed_check_duration_seconds_count"][("accepted",)] == 4
    assert found["honed_queue_wait_seconds_bucket"][("+Inf",)] == 4
    assert instance.honectl("prune", "--keep", "0").returncode == 0
    wait_for(lambda: not instance.entries(), what="the prune")
    wait_for(lambda: "honed_removed_bytes_total" in told(instance), what="the bytes")
    assert told(instance)["honed_removed_bytes_total"][("job",)] > 1000
    instance.layout.database_path.unlink()
    instance.stop()
    instance.start()
    kept = {name: values for name, values in found.items() if name.endswith(("_total", "_count", "_bucket", "_sum"))}
    now = told(instance)
    assert {name: now[name] for name in kept if "process" not in name} == {
        name: values for name, values in kept.items() if "process" not in name
    }


def test_a_resumed_attempt_is_known_to_a_daemon_that_did_not_see_it_resume(instance: Instance) -> None:
    instance.drop("die-2-200")
    instance.start()
    wait_for(lambda: "resumes from step" in instance.log, what="a resumption")
    instance.kill(signal.SIGKILL)
    instance.start()
    job = instance.wait_state("die-2-200", State.SUCCEEDED)
    assert [each.is_resumed for each in job.attempts] == [False, True]


def test_bytes_of_checkpoints_are_counted_once_though_honed_is_killed_after_they_were_reported(
    instance: Instance,
) -> None:
    """The fake worker says how much it has written; the last word is bounded."""
    instance.start()
    instance.drop("slow-4000")
    wait_for(lambda: instance.job("slow-4000") and instance.show("slow-4000")["progress"]["step"], what="a step")
    instance.client.ask("hold", id="slow-4000")
    job = instance.wait_state("slow-4000", State.HELD)
    (checkpoint,) = (event for event in events(instance, job.id) if event["event"] == "checkpoint")
    assert job.attempts[0].checkpoint_bytes == checkpoint["num_bytes"] > 0
    instance.kill(signal.SIGKILL)
    instance.layout.database_path.unlink()
    instance.start()
    wait_for(lambda: "honed_written_bytes_total" in told(instance), what="the bytes")
    assert told(instance)["honed_written_bytes_total"] == {("checkpoint",): checkpoint["num_bytes"]}


def events(instance: Instance, job_id: int) -> list[dict[str, Any]]:
    path = instance.layout.job(job_id).attempt(1).events_path
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_while_honed_is_down_its_counters_stay_and_what_only_it_knows_is_left_out(instance: Instance) -> None:
    instance.drop("succeed")
    assert instance.drain() == 0
    found = told(instance)
    assert found["honed_up"] == {(): 0}
    assert found["honed_jobs_finished_total"] == {("succeeded",): 1}
    assert "honed_degraded" not in found
    assert not any(name.startswith("process_") for name in found)  # honectl's own are no metric


def test_what_is_wrong_is_told_by_kind(instance: Instance) -> None:
    instance.start()
    assert set(told(instance)["honed_degraded"].items()) == {
        (("machine",), 0),
        (("device",), 0),
        (("damaged_entries",), 0),
        (("internal",), 0),
    }
    assert told(instance)["honed_process_resident_memory_bytes"][()] > 1e7
    instance.stop()
    (instance.layout.spool_dir / "failed/7.json").write_text("{")
    instance.start()
    found = told(instance)
    assert found["honed_degraded"][("damaged_entries",)] == 1
    assert found["honed_damaged_entries"] == {(): 1}


# -- a full disk ------------------------------------------------------------------------------------------------------


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB that `fill` fills."""
    if os.getuid() != 0:
        pytest.skip("a file system of its own takes root")
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "honed-test", place], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"nothing can be mounted here: {made.stderr}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def fill(place: Path) -> Path:
    """Fill a file system to the last byte."""
    filler = place / "filler"
    with filler.open("ab", buffering=0) as file:
        for size in (65536, 512, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * size)
    return filler


def test_each_verb_answers_degraded_on_a_full_disk_and_works_when_there_is_room(
    full_disk: Path, tmp_path: Path
) -> None:
    instance = Instance(full_disk)
    instance.log_path = tmp_path / "honed.log"
    data = base64.b64encode(json.dumps(plain.spec(instance.model, instance.dataset)).encode()).decode()
    verbs: dict[str, dict[str, Any]] = {
        "submit": {"name": "more.json", "data": data},
        "hold": {"id": "queued"},
        "release": {"id": "held"},
        "requeue": {"id": "explain"},
        "pin": {"id": "queued"},
        "unpin": {"id": "queued"},
        "cancel": {"id": "goes"},
    }
    try:
        instance.drop("explain")
        instance.start()
        instance.wait_state("explain", State.FAILED)
        instance.client.ask("pause")
        for name in ("queued", "held.hold", "goes"):
            instance.drop(name)
            instance.wait_state(name.removesuffix(".hold"), State.QUEUED, State.HELD)
        filler = fill(full_disk)
        before = {job.name: (job.state, job.is_pinned) for job in instance.spool.all_jobs().values()}
        for verb, arguments in verbs.items():
            with pytest.raises(HonedError) as caught:
                instance.client.ask(verb, **arguments)
            assert (verb, caught.value.code) == (verb, "degraded")
            assert "No space left on device" in caught.value.message
            assert "honectl doctor" in caught.value.hint
        done = instance.honectl("hold", "queued")
        assert done.returncode == 69
        assert "No space left on device" in done.stderr
        assert {job.name: (job.state, job.is_pinned) for job in instance.spool.all_jobs().values()} == before
        assert "Traceback" not in instance.log
        assert instance.log.count("control: hold failed: ") == 1
        filler.unlink()
        for verb, arguments in verbs.items():
            instance.client.ask(verb, **arguments)
        assert "Traceback" not in instance.log
    finally:
        instance.stop()
        instance.end()


# -- etc/ -------------------------------------------------------------------------------------------------------------


def expressions(value: Any) -> Iterator[str]:
    """Yield the expressions in a dashboard or in rules."""
    match value:
        case dict():
            for key, each in value.items():
                if key in {"expr", "query", "definition"} and isinstance(each, str):
                    yield each
                yield from expressions(each)
        case list():
            for each in value:
                yield from expressions(each)


def test_every_metric_of_the_dashboard_and_of_the_rules_is_exported(instance: Instance) -> None:
    instance.drop("succeed")
    instance.start()
    instance.wait_state("succeed", State.SUCCEEDED)
    text = scrape(Source(instance.layout), query.ANYBODY).decode()
    samples = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",)}
    exported = {
        f"{family.name}{suffix}"
        for family in text_string_to_metric_families(text)
        for suffix in samples.get(family.type, ("",))
    }
    for content in (
        json.loads((ETC / "grafana/honed.json").read_text()),
        yaml.safe_load((ETC / "prometheus/honed.rules.yml").read_text()),
    ):
        used = {name for each in expressions(content) for name in METRIC.findall(each)}
        assert len(used) > 8
        assert used <= exported


def test_the_rules_have_what_prometheus_needs_of_them() -> None:
    content = yaml.safe_load((ETC / "prometheus/honed.rules.yml").read_text())
    (group,) = content["groups"]
    assert group.keys() == {"name", "rules"}
    for rule in group["rules"]:
        assert rule.keys() == {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"Honed[A-Za-z]+", rule["alert"])
        assert re.fullmatch(r"[0-9]+[mh]", rule["for"])
        assert rule["labels"].keys() == {"severity"}
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert rule["annotations"].keys() == {"summary", "description"}
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"]) >= 7


def test_the_manual_lists_every_metric(instance: Instance) -> None:
    assert instance.drain() == 0
    instance.start()
    manual = (ETC.parent / "docs/monitoring.md").read_text()
    text = scrape(Source(instance.layout), query.ANYBODY, with_process=False).decode()
    for family in text_string_to_metric_families(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert f"`{name}`" in manual or f"`{name}{{" in manual or name.startswith("honed_process_"), name
