"""Jobs whose data sets are on the hub: the real daemon, the real check, a small hub, and a fake worker."""

from __future__ import annotations

import io
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fakehub
import pyarrow
import pyarrow.parquet
import pytest
from fakehub import Hub, Repository
from harness import Instance

from honed.job.job import State
from honed.run import snapshot
from honed.run.snapshot import DATASET
from waiting import wait_for

COMMIT = "1" * 40
#: Bytes of a .parquet file that the hub sends until it is released.
HELD_AT = 1024


def messages(first: int, num_rows: int) -> list[dict[str, Any]]:
    return [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}]}
        for n in range(first, first + num_rows)
    ]


def parquet(rows: list[dict[str, Any]]) -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer, compression="none", use_dictionary=False)
    return buffer.getvalue()


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture
def hub() -> Iterator[Hub]:
    with fakehub.running() as made:
        made.repositories["datasets/org/rows"] = Repository(
            files={
                "README.md": b"---\nlicense: mit\n---\n# Rows\n",
                ".gitattributes": b"*",
                "make.py": b"print()\n",
                "data/train-00000-of-00002.parquet": parquet(messages(0, 99)),
                "data/train-00001-of-00002.parquet": parquet(messages(6, 6)),
                "data/test-00000-of-00001.parquet": parquet(messages(12, 4)),
                "dataset_infos.json": b"{}",
                "picture.png": b"p",
            }
        )
        yield made


@pytest.fixture
def fetching(instance: Instance, hub: Hub) -> Instance:
    """An instance that is allowed to fetch."""
    instance.configure("[policy]\nhub = true\n")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    instance.environment = {**inherited, "HF_ENDPOINT": hub.url}
    return instance


def honectl(instance: Instance, *arguments: str) -> subprocess.CompletedProcess[str]:
    return instance.honectl(*arguments, env=instance.environment)


def names(path: Path) -> set[str]:
    return {str(each.relative_to(path)) for each in path.rglob("*") if not each.is_dir()}


def test_a_data_set_of_the_hub_is_fetched_by_split_and_the_job_keeps_its_commit(fetching: Instance, hub: Hub) -> None:
    both = {
        "datasets": [{"path": "org/rows", "split": "train"}],
        "eval_datasets": [{"path": "org/rows", "split": "test"}],
    }
    fetching.start()
    fetching.client.ask("pause")
    fetching.drop("make.first")
    fetching.drop("succeed-1", adapter="job:make.first", lora=None, **both)  # planned again when that one is done
    fetching.wait_state("succeed-1", State.QUEUED)
    ref = snapshot.repository_dir(fetching.layout.cache_dir, "org/rows", DATASET) / "refs/main"
    ref.write_text("2" * 40)  # the branch has moved on
    fetching.client.ask("resume")
    fetching.wait_state("succeed-1", State.SUCCEEDED)
    path = snapshot.snapshot_dir(fetching.layout.cache_dir, "org/rows", COMMIT, DATASET)
    train = ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]
    test = ["data/test-00000-of-00001.parquet"]
    found = {"repo_id": "org/rows", "commit": COMMIT, "path": str(path)}
    plan = fetching.show("succeed-1")["plan"]
    assert plan["hub_datasets"] == {
        "datasets.0": {**found, "files": train},
        "eval_datasets.0": {**found, "files": test},
    }
    assert names(path) == {"README.md", *train, *test}, "no script, and nothing else"
    ref.write_text(COMMIT)
    num_requests = len(hub.requests)
    fetching.drop("succeed-1.later", **both)
    fetching.wait_state("succeed-1.later", State.SUCCEEDED)
    assert len(hub.requests) == num_requests, "what is cached is not asked for"


def test_what_is_no_data_set_to_train_on_is_refused_with_its_reason(fetching: Instance, hub: Hub) -> None:
    rows = jsonl(messages(0, 8))
    hub.repositories |= {
        "datasets/org/private": Repository(files={"train.jsonl": rows}, token="t"),
        "datasets/org/gated": Repository(files={"train.jsonl": rows}, gated=True, token="t"),
        "datasets/org/script": Repository(files={"script.py": b"1", "README.md": b"#", "dataset_infos.json": b"{}"}),
        "datasets/org/configs": Repository(files={"main/train.jsonl": rows, "socratic/train.jsonl": rows}),
        "org/model": Repository(files={"config.json": b"{}"}),
    }
    for name in ("none", "private", "gated", "script", "rows", "configs", "model"):
        fetching.drop(name, datasets=[{"path": f"org/{name}"}])
    fetching.drop("revision", datasets=[{"path": "org/rows", "split": "train", "revision": "v9"}])
    fetching.drop("split", datasets=[{"path": "org/rows", "split": "validation"}])
    fetching.drop("fields", datasets=[{"path": "org/rows", "split": "train"}], adapter="/nowhere", lora=None)
    assert fetching.drain() == 0
    reasons = {name.removesuffix(".json"): text for name, text in fetching.rejected().items()}
    words = {
        "none": "no such data set, or denies access without a token",
        "private": "no such data set, or denies access without a token",
        "gated": "/datasets/org/gated, and put a token",
        "script": "only a loading script (script.py)",
        "rows": "write `split: train` or `split: test`",
        "configs": "main, socratic",
        "model": "no such data set",
        "revision": "no such revision",
        "split": "no data file of split 'validation'",
        "fields": "/nowhere",
    }
    for name, expected in words.items():
        assert expected in " ".join(reasons.pop(name).split()), name
    assert not reasons
    asked = [path for path, _, _ in hub.requests if path.endswith((".jsonl", ".parquet")) and "/gated/" not in path]
    assert asked == [], "it was known from the list of files"


def test_a_private_data_set_is_fetched_with_the_token_and_one_configuration_of_several(
    fetching: Instance, hub: Hub
) -> None:
    files = {f"{name}/train.jsonl": jsonl(messages(n, 8)) for n, name in enumerate(("main", "socratic"))}
    hub.repositories["datasets/org/private"] = Repository(files=files, token="t0ken")
    fetching.layout.token_path.parent.mkdir(parents=True, exist_ok=True)
    fetching.layout.token_path.write_text("t0ken\n")
    fetching.drop("succeed-1.data", datasets=[{"path": "org/private", "name": "socratic", "revision": "main"}])
    assert fetching.drain() == 0
    assert fetching.wait_state("succeed-1.data", State.SUCCEEDED)
    (found,) = fetching.show("succeed-1.data")["plan"]["hub_datasets"].values()
    assert found["files"] == ["socratic/train.jsonl"]
    assert hub.num_gets("main/train.jsonl") == 0


def test_where_nothing_may_be_fetched_a_data_set_is_refused_with_the_command_and_used_once_it_is_there(
    instance: Instance, hub: Hub
) -> None:
    instance.configure("[policy]\nhub = false\n")
    instance.drop("refused", datasets=[{"path": "org/rows", "split": "train"}])
    assert instance.drain() == 0
    reason = " ".join(instance.rejected()["refused.json"].split())
    assert "datasets.0.path: org/rows at main is not in the local cache" in reason
    assert "jobs may not fetch from the hub (policy.hub)" in reason
    assert "hf download --repo-type dataset org/rows --local-dir DIR" in reason
    # As huggingface_hub itself would put it there.
    repository = hub.repositories["datasets/org/rows"]
    repository_dir = snapshot.repository_dir(instance.layout.cache_dir, "org/rows", DATASET)
    for name, data in repository.files.items():
        path = repository_dir / "snapshots" / COMMIT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (repository_dir / "refs").mkdir()
    (repository_dir / "refs/main").write_text(COMMIT)
    instance.drop("succeed-1.used", datasets=[{"path": "org/rows", "split": "train"}])
    assert instance.drain() == 0
    assert instance.wait_state("succeed-1.used", State.SUCCEEDED)
    assert hub.requests == []


def test_honectl_says_what_would_be_fetched_and_a_killed_fetch_goes_on(fetching: Instance, hub: Hub) -> None:
    repository, large = hub.repositories["datasets/org/rows"], "data/train-00000-of-00002.parquet"
    path = fetching.root / "succeed-1.json"
    job = {"base_model": str(fetching.model), "lora": {}, "datasets": [{"path": "org/rows", "split": "train"}]}
    path.write_text(json.dumps(job))
    answer = json.loads(honectl(fetching, "plan", "--json", str(path)).stdout)
    needed = {"repo_id": "org/rows", "revision": "main", "repo_type": "dataset", "split": "train"}
    assert answer["needs_fetch"] == needed
    assert "honed first fetches it from the hub" in " ".join(answer["warnings"])
    assert "no row to preview" in " ".join(honectl(fetching, "preview", str(path)).stderr.split())
    assert hub.requests == []
    repository.held_at = HELD_AT
    fetching.drop("succeed-1", datasets=job["datasets"])
    fetching.start("--drain")
    blobs_dir = snapshot.repository_dir(fetching.layout.cache_dir, "org/rows", DATASET) / "blobs"
    wait_for(lambda: any(part.stat().st_size >= HELD_AT for part in blobs_dir.glob("*.part")), what="some bytes")
    (arrival,) = fetching.client.ask("status")["arrivals"]
    assert (arrival["repo_id"], arrival["repo_type"], arrival["state"]) == ("org/rows", "dataset", "fetching")
    os.kill(int(fetching.layout.fetch(1).lock_path.read_text()), 9)
    wait_for(lambda: "died without an error message" in fetching.log, what="the death is seen")
    repository.held_at = None
    assert fetching.wait() == 0
    assert fetching.wait_state("succeed-1", State.SUCCEEDED)
    ranges = [wanted for asked, wanted, _ in hub.requests if asked.endswith(large)]
    assert ranges == ["", f"bytes={HELD_AT}-"], "what was there stayed"
