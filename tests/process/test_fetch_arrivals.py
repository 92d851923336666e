"""Jobs whose base model has to be fetched: the real daemon, the real check, a small hub, and a fake worker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fakehub
import pytest
from fakehub import Hub, Repository
from harness import Instance, is_alive

from honed.daemon.arrivals.fetches import Waiting
from honed.job import counters, query
from honed.job.job import State
from honed.run import snapshot
from honed.run.fetcher import ProcessFetchRunner
from honed.system.clock import awake_time
from honed.system.pauses import MIN_PAUSE_SEC
from waiting import wait_for
from zoo import plain

REPO = "org/tiny"
COMMIT = "1" * 40
#: Bytes of the 10 KiB of weights that the hub sends until it is released.
HELD_AT = 3072


@pytest.fixture
def hub() -> Iterator[Hub]:
    with fakehub.running() as made:
        yield made


@pytest.fixture
def fetching(instance: Instance, hub: Hub) -> Iterator[Instance]:
    """An instance that is allowed to fetch."""
    hub.repositories[REPO] = Repository(files=fakehub.read(instance.model))
    instance.configure("[policy]\nhub = true\n")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    instance.environment = {**inherited, "HF_ENDPOINT": hub.url}
    yield instance
    for path in (instance.layout.state_dir / "fetch").glob("*.lock"):  # a fetch outlives its daemon
        ProcessFetchRunner(instance.layout).stop(int(path.stem), at_once=True)


def arrivals(instance: Instance) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = instance.client.ask("status")["arrivals"]
    return found


def others_view(instance: Instance) -> list[dict[str, Any]]:
    """Return the rows of the waiting arrivals as another user of the machine sees them."""
    stranger = query.Asker(os.getuid() + 1, is_administrator=False, reads_all=False)
    return [Waiting(**each).seen_by(stranger) for each in arrivals(instance)]


def fetch_pid(instance: Instance, number: int) -> int:
    path = instance.layout.fetch(number).lock_path
    return int(wait_for(lambda: path.exists() and path.read_text(), what="the fetch"))


def wait_for_bytes(instance: Instance) -> None:
    """Wait until the hub has sent all the bytes of the weights that it sends before it holds the rest."""
    blobs_dir = snapshot.repository_dir(instance.layout.cache_dir, REPO) / "blobs"

    def is_there() -> bool:
        return any(path.stat().st_size >= HELD_AT for path in blobs_dir.glob(f"{'?' * 64}.part"))

    wait_for(is_there, what="some bytes")
    wait_for(lambda: any(each["total_bytes"] for each in arrivals(instance)), what="the word about them")


def honectl(instance: Instance, *arguments: str) -> subprocess.CompletedProcess[str]:
    return instance.honectl(*arguments, env=instance.environment)


def test_a_model_is_fetched_once_for_all_and_holds_up_nobody_else(fetching: Instance, hub: Hub) -> None:
    hub.repositories[REPO].held_at = HELD_AT
    fetching.drop("succeed-1.a", base_model=REPO)
    fetching.drop("succeed-1.b", base_model=REPO)
    fetching.start("--drain")
    wait_for(lambda: len(arrivals(fetching)) == 2, what="both wait")
    fetching.drop("succeed-1.local")
    fetching.wait_state("succeed-1.local", State.SUCCEEDED)
    wait_for_bytes(fetching)
    first, second = arrivals(fetching)
    assert (first["repo_id"], first["state"], second["source"]) == (REPO, "fetching", "succeed-1.b.json")
    assert f"fetching {REPO}" in fetching.client.ask("status")["status"]
    listed = honectl(fetching, "list").stdout
    assert f"1 (succeed-1.a): fetching {REPO} at main" in listed
    assert "is not a job yet" in honectl(fetching, "show", "1").stderr
    for other in others_view(fetching):
        assert (other["name"], other["source"], other["repo_id"], other["uid"]) == ("", None, None, os.getuid())
    hub.repositories[REPO].held_at = None
    assert fetching.wait() == 0
    for name in ("succeed-1.a", "succeed-1.b"):
        assert fetching.wait_state(name, State.SUCCEEDED)
        plan = fetching.show(name)["plan"]
        assert plan["base_model_commit"] == COMMIT
        assert plan["base_model_path"] == str(snapshot.snapshot_dir(fetching.layout.cache_dir, REPO, COMMIT))
    assert hub.num_gets("model.safetensors") == 1
    fetched = [path.stat() for path in snapshot.snapshot_dir(fetching.layout.cache_dir, REPO, COMMIT).iterdir()]
    counted = counters.read(fetching.layout.counters_path)
    assert counted is not None
    assert counted["counters"]["honed_fetched_bytes_total"] == {"model": sum(info.st_size for info in fetched)}
    assert not list((fetching.layout.state_dir / "fetch").iterdir()), "nothing is left behind"
    fetching.drop("succeed-1.later", base_model=REPO)
    num_requests = len(hub.requests)
    assert fetching.drain() == 0
    assert len(hub.requests) == num_requests, "what is cached is not asked for"


def test_an_arrival_that_waits_for_its_model_counts_for_the_limit_of_queued_jobs(fetching: Instance, hub: Hub) -> None:
    hub.repositories[REPO].held_at = HELD_AT
    fetching.configure('[policy]\nhub = true\n[users."*"]\nmax_queued = 1\n')
    fetching.drop("succeed-1.a", base_model=REPO)
    fetching.drop("succeed-1.b", base_model=REPO)
    fetching.start("--drain")
    wait_for(lambda: "1 job file waits" in fetching.client.ask("status")["limit"], what="the limit")
    wait_for_bytes(fetching)
    assert [each["name"] for each in arrivals(fetching)] == ["succeed-1.a"]
    assert [path.stem for path in fetching.incoming_dir.glob("*.json")] == ["succeed-1.b"]
    hub.repositories[REPO].held_at = None
    assert fetching.wait() == 0
    assert len(list(fetching.spool.jobs(State.SUCCEEDED))) == 2


def test_what_the_hub_does_not_give_is_a_refusal_with_its_reason(fetching: Instance, hub: Hub) -> None:
    files = hub.repositories[REPO].files
    hub.repositories["org/gated"] = Repository(files=files, gated=True, token="t")
    pickled = {name: data for name, data in files.items() if name != "model.safetensors"} | {"pytorch_model.bin": b"p"}
    hub.repositories["org/pickled"] = Repository(files=pickled)
    hub.repositories["org/huge"] = Repository(files=files, sizes={"model.safetensors": 1 << 60})
    for name in ("none", "gated", "pickled", "huge"):
        fetching.drop(name, base_model=f"org/{name}")
    fetching.drop("revision", base_model=REPO, revision="v9")
    fetching.drop("data", base_model="org/none", datasets=[{"path": "/nowhere.jsonl"}])
    assert fetching.drain() == 0
    reasons = {name.removesuffix(".json"): text for name, text in fetching.rejected().items()}
    words = {
        "none": "no such model",
        "gated": "is gated",
        "pickled": "only pickled weights",
        "huge": "is free",
        "revision": "no such revision",
        "data": "/nowhere.jsonl",
    }
    for name, expected in words.items():
        assert expected in reasons.pop(name)
    assert not reasons
    assert hub.num_gets("model.safetensors") == 0


def test_the_hub_is_left_alone_where_the_administrator_does_not_allow_it_any_more(fetching: Instance, hub: Hub) -> None:
    hub.repositories[REPO].held_at = HELD_AT
    fetching.drop("stopped", base_model=REPO)
    fetching.start()
    wait_for_bytes(fetching)
    num_requests = len(hub.requests)
    fetching.configure("[policy]\nhub = false\n")
    assert fetching.process is not None
    fetching.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "policy.hub" in fetching.rejected().get("stopped.json", ""), what="the first refusal")
    fetching.drop("refused", base_model="org/other")
    wait_for(lambda: "policy.hub" in fetching.rejected().get("refused.json", ""), what="the second refusal")
    assert len(hub.requests) == num_requests


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_daemon_that_ends_during_a_fetch_goes_on_with_it(
    fetching: Instance, hub: Hub, number: signal.Signals
) -> None:
    hub.repositories[REPO].held_at = HELD_AT
    fetching.drop("succeed-1", base_model=REPO)
    fetching.start()
    wait_for_bytes(fetching)
    pid = fetch_pid(fetching, 1)
    fetching.kill(number)
    assert is_alive(pid) == (number == signal.SIGKILL)
    hub.repositories[REPO].held_at = None
    assert fetching.drain() == 0
    assert fetching.wait_state("succeed-1", State.SUCCEEDED).id == 1
    ranges = [wanted for path, wanted, _ in hub.requests if path.endswith("model.safetensors")]
    assert len(ranges) == (1 if number == signal.SIGKILL else 2), "adopted, or gone on with"
    assert all(ranges[1:])


def test_a_pause_of_honed_and_a_fetch_brings_no_deadline_nearer(fetching: Instance, hub: Hub) -> None:
    """As `systemctl freeze honed.slice` makes it. The fetch goes on last."""
    timeout_sec = 3 * MIN_PAUSE_SEC
    fetching.configure(f"[policy]\nhub = true\n[hub]\nfetch_timeout_sec = {timeout_sec}\n")
    hub.repositories[REPO].held_at = HELD_AT
    fetching.start()
    fetching.drop("succeed", base_model=REPO)
    wait_for_bytes(fetching)
    assert fetching.process is not None
    pids = [fetching.process.pid, fetch_pid(fetching, 1)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    over_at = json.loads(fetching.layout.fetch(1).request_path.read_bytes())["deadline"] + 2.0
    wait_for(lambda: awake_time() > over_at, what="the end of the pause")
    hub.repositories[REPO].held_at = None
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    fetching.wait_state("succeed", State.SUCCEEDED)


def test_a_fetch_that_is_killed_or_cut_off_is_started_again(fetching: Instance, hub: Hub) -> None:
    hub.repositories[REPO].held_at = HELD_AT
    fetching.drop("succeed-1", base_model=REPO)
    fetching.start("--drain")
    wait_for_bytes(fetching)
    os.kill(fetch_pid(fetching, 1), signal.SIGKILL)
    wait_for(lambda: "died without an error message" in fetching.log, what="the death is seen")
    hub.stop()
    hub.repositories[REPO].held_at = None
    wait_for(lambda: (arrivals(fetching)[0]["problem"] or "").startswith("the hub cannot be reached"), what="the word")
    hub.start()
    assert fetching.wait() == 0
    assert fetching.wait_state("succeed-1", State.SUCCEEDED)
    ranges = [wanted for path, wanted, _ in hub.requests if path.endswith("model.safetensors")]
    assert all(ranges[1:]), "what was there stayed"


def test_a_torn_snapshot_of_others_is_completed(fetching: Instance, hub: Hub) -> None:
    repository_dir = snapshot.repository_dir(fetching.layout.cache_dir, REPO)
    torn_dir = plain.write_base_model(repository_dir / "snapshots" / COMMIT)
    (torn_dir / "model.safetensors").unlink()
    (repository_dir / "refs").mkdir()
    (repository_dir / "refs/main").write_text(COMMIT)
    fetching.drop("succeed-1", base_model=REPO)
    assert fetching.drain() == 0
    assert fetching.wait_state("succeed-1", State.SUCCEEDED)
    assert (torn_dir / "model.safetensors").read_bytes() == hub.repositories[REPO].files["model.safetensors"]


def test_a_model_that_is_whole_and_wrong_is_refused_and_not_fetched_again(fetching: Instance, hub: Hub) -> None:
    del hub.repositories[REPO].files["tokenizer.json"]
    fetching.drop("succeed", base_model=REPO)
    assert fetching.drain() == 0
    assert "no tokenizer" in fetching.rejected()["succeed.json"]
    assert hub.num_gets("model.safetensors") == 1


def test_a_job_that_names_one_whose_model_is_fetched_waits_for_it(fetching: Instance, hub: Hub) -> None:
    hub.repositories[REPO].delay_sec = 0.6  # longer than honed waits for jobs that do not exist
    fetching.drop("third", name="succeed-1.third", depends_on=["succeed-1.second"])
    fetching.drop("second", name="succeed-1.second", depends_on=["succeed-1.first"])
    fetching.drop("first", name="succeed-1.first", base_model=REPO)
    assert fetching.drain() == 0
    assert fetching.rejected() == {}
    assert len(list(fetching.spool.jobs(State.SUCCEEDED))) == 3


def test_a_job_keeps_the_commit_that_its_branch_had_when_it_was_accepted(fetching: Instance, hub: Hub) -> None:
    fetching.start()
    fetching.client.ask("pause")
    fetching.drop("make.first")
    fetching.drop("succeed-1", base_model=REPO, adapter="job:make.first", lora=None)
    fetching.wait_state("succeed-1", State.QUEUED)
    # The branch moves on, at the hub and in the cache, and the old commit is removed.
    hub.repositories[REPO].commits = {"main": "2" * 40, "old": COMMIT}
    repository_dir = snapshot.repository_dir(fetching.layout.cache_dir, REPO)
    (repository_dir / "snapshots" / COMMIT).rename(repository_dir / "snapshots" / ("2" * 40))
    (repository_dir / "refs/main").write_text("2" * 40)
    fetching.client.ask("resume")
    fetching.wait_state("succeed-1", State.SUCCEEDED)
    plan = fetching.show("succeed-1")["plan"]
    assert plan["base_model_path"] == str(repository_dir / "snapshots" / COMMIT)
    assert Path(plan["base_model_path"], "config.json").exists()
    assert hub.num_gets("model.safetensors") == 1, "its blobs were there"


def test_honectl_says_what_would_be_fetched_and_fetches_nothing_itself(fetching: Instance, hub: Hub) -> None:
    path = fetching.root / "succeed-1.json"
    path.write_text(json.dumps(plain.spec(Path(REPO), fetching.dataset)))
    (answer,) = json.loads(honectl(fetching, "check", "--json", str(path)).stdout)
    assert (answer["ok"], answer["needs_fetch"]) == (True, {"repo_id": REPO, "revision": "main"})
    planned = honectl(fetching, "plan", str(path))
    assert (planned.returncode, "must be fetched first" in planned.stdout) == (0, True)
    assert "no tokenizer to preview with" in honectl(fetching, "preview", str(path)).stderr
    assert hub.requests == []
    hub.repositories[REPO].held_at = HELD_AT
    fetching.start()
    dropped = honectl(fetching, "submit", str(path))
    assert dropped.returncode == 0
    assert f"after fetching {REPO} at main" in " ".join(dropped.stdout.split())
    wait_for_bytes(fetching)
    cancelled = honectl(fetching, "cancel", "succeed-1")
    assert (cancelled.returncode, "rejected" in cancelled.stdout) == (0, True)
    assert "cancelled" in fetching.rejected()["succeed-1.json"]
    assert arrivals(fetching) == []
    hub.repositories[REPO].held_at = None
    waited = honectl(fetching, "submit", "--wait", str(path.rename(path.with_name("succeed-1.again.json"))))
    assert waited.returncode == 0, waited.stderr
    assert "succeeded" in waited.stdout
