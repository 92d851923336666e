"""Fetching a model from a hub: the program itself, as a process, against a small hub that misbehaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fakehub
import pytest
from fakehub import Hub, Repository
from harness import DEADLINE_SEC

import warm
from honed.inputs import basemodel
from honed.run import snapshot
from honed.system.layout import Layout
from waiting import wait_for
from zoo import plain

REPO = "org/tiny"
COMMIT = "1" * 40


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with fakehub.running() as made:
        model = plain.write_base_model(tmp_path / "published")
        extra = {
            "README.md": b"#",
            ".gitattributes": b"*",
            "model.onnx": b"o",
            "tf_model.h5": b"h",
            "q4.gguf": b"g",
            "consolidated.safetensors": b"c",
            "pytorch_model.bin": b"p",
            "modeling_tiny.py": b"1",
            "original/params.json": b"{}",
            "adapter_config.json": b"{}",
            "LICENSE.txt": b"l",
            "additional_chat_templates/tool.jinja": b"{{ messages }}",
        }
        made.repositories[REPO] = Repository(files=fakehub.read(model) | extra)
        yield made


def command(root: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "honed.inputs.fetch", "--root", str(root), *arguments]


def environment_of(hub: Hub, **more: str) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return {**inherited, "HF_ENDPOINT": hub.url, **more}


def start(root: Path, hub: Hub, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(root, *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment_of(hub),
    )


def fetch(root: Path, hub: Hub, *arguments: str, **environment: str) -> tuple[int, dict[str, Any], str]:
    """Return the exit status, the last line, and stderr."""
    done = warm.run(
        command(root, *(arguments or (REPO,))), env=environment_of(hub, **environment), timeout=DEADLINE_SEC
    )
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stderr


def names(path: Path) -> set[str]:
    return {str(each.relative_to(path)) for each in path.rglob("*") if not each.is_dir()}


def test_a_model_is_fetched_with_what_training_needs_and_nothing_else(hub: Hub, tmp_path: Path) -> None:
    status, last, err = fetch(tmp_path, hub)
    assert status == 0, err
    path = Path(last["path"])
    assert names(path) == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "additional_chat_templates/tool.jinja",
    }
    cache_dir = Layout(tmp_path).cache_dir
    assert basemodel.resolve(REPO, cache_dir=cache_dir, allow_hub=False) == path
    assert basemodel.resolve(REPO, cache_dir=cache_dir, allow_hub=False, revision=COMMIT) == path
    assert basemodel.inspect(path).model_type == "llama"
    # huggingface_hub finds it as its own.
    import huggingface_hub

    assert huggingface_hub.try_to_load_from_cache(REPO, "config.json", cache_dir=cache_dir / "hub") == str(
        path / "config.json"
    )
    num_requests = len(hub.requests)
    assert fetch(tmp_path, hub)[0] == 0
    assert len(hub.requests) == num_requests + 1, "the second asks for the listing alone"


def test_ones_own_instance_has_a_cache_of_its_own(hub: Hub, tmp_path: Path) -> None:
    homes = {name: str(tmp_path / name) for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME")}
    status, last, err = fetch(tmp_path / "XDG_STATE_HOME/honed", hub, REPO, **homes)
    assert status == 0, err
    assert Path(last["path"]).is_relative_to(tmp_path / "XDG_CACHE_HOME/honed")


def test_code_and_pickles_come_only_where_they_are_allowed(hub: Hub, tmp_path: Path) -> None:
    _, last, _ = fetch(tmp_path, hub, REPO, "--allow-code", "--allow-pickle")
    assert "modeling_tiny.py" in names(Path(last["path"]))
    assert "pytorch_model.bin" not in names(Path(last["path"])), "there are safetensors"
    files = hub.repositories[REPO].files
    del files["model.safetensors"]
    hub.repositories["org/pickled"] = Repository(files=files)
    status, last, _ = fetch(tmp_path, hub, "org/pickled")
    assert (status, last["error"]["code"]) == (66, "model_invalid")
    assert "only pickled weights" in last["error"]["message"]
    assert not snapshot.repository_dir(Layout(tmp_path).cache_dir, "org/pickled").exists(), "nothing was fetched"
    status, last, _ = fetch(tmp_path, hub, "org/pickled", "--allow-pickle")
    assert status == 0
    assert "pytorch_model.bin" in names(Path(last["path"]))


def test_shards_are_those_that_the_index_names(hub: Hub, tmp_path: Path) -> None:
    files = hub.repositories[REPO].files
    del files["model.safetensors"]
    files["model.safetensors.index.json"] = json.dumps({"weight_map": {"a": "one.safetensors"}}).encode()
    files |= {"one.safetensors": b"1", "two.safetensors": b"2"}
    status, last, _ = fetch(tmp_path, hub)
    assert status == 0
    assert {"one.safetensors", "model.safetensors.index.json"} <= names(Path(last["path"]))
    assert not {"two.safetensors", "consolidated.safetensors"} & names(Path(last["path"]))
    del files["one.safetensors"]
    hub.repositories["org/torn"] = Repository(files=files)
    assert "lacks one.safetensors, which" in fetch(tmp_path, hub, "org/torn")[1]["error"]["message"]


@pytest.mark.parametrize(
    ("arguments", "status", "code", "message"),
    [
        (("org/none",), 66, "model_invalid", "has no such model, or denies access without a token"),
        ((REPO, "--revision", "v9"), 66, "model_invalid", "no such revision"),
        (("org/gated",), 72, "environment_invalid", "is gated"),
        (("org/adapter",), 66, "model_invalid", "is an adapter"),
        (("org/huge",), 73, "disk_insufficient", "is free"),
        (("../etc",), 2, "usage", "is not a hub id"),
    ],
)
def test_what_cannot_be_fetched_is_said_and_leaves_nothing(
    hub: Hub, tmp_path: Path, arguments: tuple[str, ...], status: int, code: str, message: str
) -> None:
    files = hub.repositories[REPO].files
    hub.repositories["org/gated"] = Repository(files=files, gated=True, token="t")
    hub.repositories["org/adapter"] = Repository(files={"adapter_config.json": b"{}"})
    hub.repositories["org/huge"] = Repository(files=files, sizes={"model.safetensors": 1 << 60})
    done, last, _ = fetch(tmp_path, hub, *arguments)
    assert (done, last["error"]["code"]) == (status, code)
    assert message in last["error"]["message"]
    assert last["error"]["hint"]
    assert not list(tmp_path.rglob("snapshots"))


def test_a_token_comes_from_a_file_and_shows_nowhere(hub: Hub, tmp_path: Path) -> None:
    files = hub.repositories[REPO].files
    hub.repositories["org/gated"] = Repository(files=files, gated=True, token="hf_secret", has_cdn=True)
    layout = Layout(tmp_path)
    layout.token_path.parent.mkdir(parents=True)
    layout.token_path.write_text("hf_wrong\n")
    status, last, _ = fetch(tmp_path, hub, "org/gated")
    assert (status, "with the configured token" in last["error"]["message"]) == (72, True)
    credentials_dir = tmp_path / "credentials"
    credentials_dir.mkdir()
    (credentials_dir / "hf-token").write_text("hf_secret\n")
    status, last, err = fetch(tmp_path, hub, "org/gated", CREDENTIALS_DIRECTORY=str(credentials_dir))
    assert status == 0
    assert "hf_secret" not in err + json.dumps(last)
    assert {token for path, _, token in hub.requests if path.startswith("cdn/")} == {""}, "nor to another host"
    assert fetch(tmp_path / "other", hub, "org/gated", HF_TOKEN="hf_secret")[0] == 72, "the environment is no place"
    (tmp_path / "token").write_text("hf_secret")
    assert fetch(tmp_path / "other", hub, "org/gated", HF_TOKEN_PATH=str(tmp_path / "token"))[0] == 0


def test_a_connection_that_is_cut_is_gone_on_with_where_it_ended(hub: Hub, tmp_path: Path) -> None:
    hub.repositories[REPO].drops = {"model.safetensors": [2048, 1024]}
    hub.statuses = [503]
    status, last, err = fetch(tmp_path, hub)
    assert status == 0, err
    assert "retrying" in err
    ranges = [wanted for path, wanted, _ in hub.requests if path.endswith("model.safetensors")]
    assert ranges == ["", "bytes=2048-", "bytes=3072-"]
    assert (Path(last["path"]) / "model.safetensors").read_bytes() == hub.repositories[REPO].files["model.safetensors"]


def test_a_hub_without_ranges_gives_the_file_again_from_its_beginning(hub: Hub, tmp_path: Path) -> None:
    hub.repositories[REPO].drops = {"model.safetensors": [2048]}
    hub.repositories[REPO].has_ranges = False
    status, last, err = fetch(tmp_path, hub)
    assert status == 0, err
    assert (Path(last["path"]) / "model.safetensors").read_bytes() == hub.repositories[REPO].files["model.safetensors"]


def test_a_mirror_that_lists_no_hashes_is_asked_for_each_file(hub: Hub, tmp_path: Path) -> None:
    hub.repositories[REPO].is_mirror = True
    status, last, err = fetch(tmp_path, hub)
    assert status == 0, err
    assert basemodel.inspect(Path(last["path"])).model_type == "llama"


def test_a_file_that_is_longer_than_listed_is_not_fetched_for_ever(hub: Hub, tmp_path: Path) -> None:
    hub.repositories[REPO].sizes = {"model.safetensors": 100}
    status, last, _ = fetch(tmp_path, hub)
    assert status == 72
    assert "model.safetensors did not match its hash in 2 attempts" in last["error"]["message"]
    assert hub.num_gets("model.safetensors") == 2


def test_names_that_lead_out_of_the_snapshot_are_passed_over(hub: Hub, tmp_path: Path) -> None:
    odd = ("../../out.json", "additional_chat_templates/../../out.jinja", "/out.json", "a\0b.json", "a\nb.json")
    hub.repositories[REPO].files |= dict.fromkeys(odd, b"{}")
    status, _, err = fetch(tmp_path, hub)
    assert status == 0, err
    assert not [path for path in tmp_path.rglob("*") if "out." in path.name or not path.name.isprintable()]


def test_a_hub_that_is_down_is_waited_for_until_the_deadline(hub: Hub, tmp_path: Path) -> None:
    hub.stop()
    process = start(tmp_path, hub, REPO)
    line = json.loads(process.stdout.readline())  # type: ignore[union-attr]
    assert "cannot be reached" in line["problem"]
    hub.start()
    out, err = process.communicate(timeout=DEADLINE_SEC)
    assert process.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["ok"]
    hub.stop()
    config_path = Layout(tmp_path / "b").config_path
    config_path.parent.mkdir(parents=True)
    config_path.write_text("[hub]\nfetch_timeout_sec = 1.5\n")
    status, last, _ = fetch(tmp_path / "b", hub)
    assert (status, last["error"]["code"]) == (72, "environment_invalid")
    assert "cannot be reached" in last["error"]["message"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_a_signal_cuts_short_is_gone_on_with(hub: Hub, tmp_path: Path, number: signal.Signals) -> None:
    hub.repositories[REPO].held_at = 3072
    process = start(tmp_path, hub, REPO)
    blobs_dir = snapshot.repository_dir(Layout(tmp_path).cache_dir, REPO) / "blobs"

    def part() -> int:
        return next((path.stat().st_size for path in blobs_dir.glob(f"{'?' * 64}.part")), 0)

    wait_for(lambda: part() >= 2048, what="a part of the weights")
    process.send_signal(number)
    out, _ = process.communicate(timeout=DEADLINE_SEC)
    if number == signal.SIGTERM:
        assert process.returncode == 75
        assert json.loads(out.splitlines()[-1])["error"]["code"] == "interrupted"
    kept = part()
    assert kept >= 2048
    cache_dir = Layout(tmp_path).cache_dir
    with pytest.raises(basemodel.UncachedError, match="only partly"):
        basemodel.resolve(REPO, cache_dir=cache_dir, allow_hub=True, revision=COMMIT)
    hub.repositories[REPO].held_at = None
    num_requests = len(hub.requests)
    status, _, err = fetch(tmp_path, hub)
    assert status == 0, err
    ranges = [wanted for path, wanted, _ in hub.requests[num_requests:] if path.endswith("model.safetensors")]
    assert ranges == [f"bytes={kept}-"]


def test_a_part_that_a_power_cut_spoiled_is_fetched_again(hub: Hub, tmp_path: Path) -> None:
    data = hub.repositories[REPO].files["model.safetensors"]
    blobs_dir = snapshot.repository_dir(Layout(tmp_path).cache_dir, REPO) / "blobs"
    blobs_dir.mkdir(parents=True)
    (blobs_dir / f"{fakehub.blob('model.safetensors', data)}.part").write_bytes(bytes(3000))
    status, last, err = fetch(tmp_path, hub)
    assert status == 0, err
    assert "does not match its hash" in err
    assert (Path(last["path"]) / "model.safetensors").read_bytes() == data


def test_two_fetches_of_one_model_take_turns(hub: Hub, tmp_path: Path) -> None:
    hub.repositories[REPO].delay_sec = 0.02
    both = [start(tmp_path, hub, REPO) for _ in range(2)]
    ends = []
    threads = [
        threading.Thread(target=lambda each=each: ends.append(each.communicate(timeout=DEADLINE_SEC))) for each in both
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each.returncode for each in both] == [0, 0], ends
    assert hub.num_gets("model.safetensors") == 1


def test_a_branch_means_the_commit_that_it_had_when_the_fetch_began(hub: Hub, tmp_path: Path) -> None:
    hub.repositories[REPO].held_at = 1024
    process = start(tmp_path, hub, REPO)
    wait_for(lambda: hub.num_gets("model.safetensors"), what="the weights")
    hub.repositories[REPO].commits["main"] = "2" * 40
    hub.repositories[REPO].commits["old"] = COMMIT
    hub.repositories[REPO].held_at = None
    out, err = process.communicate(timeout=DEADLINE_SEC)
    assert process.returncode == 0, err
    assert Path(json.loads(out.splitlines()[-1])["path"]).name == COMMIT
