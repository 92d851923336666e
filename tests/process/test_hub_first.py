"""Models and data sets of the hub in one's own instance: allowed without configuration, and described before the
fetch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import fakehub
import pytest
from fakehub import Hub, Repository
from harness import DEADLINE_SEC, Instance

from honed.job.job import State
from honed.spec import config
from honed.system.layout import Layout, UserLayout
from waiting import wait_for


@pytest.fixture
def hub() -> Iterator[Hub]:
    with fakehub.running() as made:
        yield made


@pytest.fixture
def fresh(instance: Instance, hub: Hub) -> Instance:
    """An instance without a word about the hub in its configuration."""
    files = fakehub.read(instance.model)
    rows = {"train.jsonl": instance.dataset.read_bytes()}
    hub.repositories["org/tiny"] = Repository(files=files, license="apache-2.0")
    hub.repositories["org/gated"] = Repository(files=files, license="llama3.2", gated=True, token="t0ken")
    hub.repositories["datasets/org/rows"] = Repository(files=rows, license="cc-by-4.0")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    instance.environment = {**inherited, "HF_ENDPOINT": hub.url}
    return instance


def write(path: Path, model: str, data: str) -> Path:
    path.write_text(json.dumps({"base_model": model, "lora": {"r": 4}, "datasets": [{"path": data}]}))
    return path


def test_what_would_be_fetched_is_said_before_and_its_progress_meanwhile(
    fresh: Instance, hub: Hub, tmp_path: Path
) -> None:
    job = write(tmp_path / "succeed-1.json", "org/tiny", "org/rows")
    said = fresh.honectl("check", str(job), env=fresh.environment)
    assert said.returncode == 0, said.stderr + said.stdout
    assert "base_model: org/tiny at main: about 1 MiB to fetch, licence apache-2.0" in said.stdout
    assert "datasets: org/rows at main: about 1 MiB to fetch, licence cc-by-4.0" in said.stdout
    assert hub.num_gets("model.safetensors") == 0
    fresh.start()
    hub.repositories["org/tiny"].held_at = 3072
    with fresh.beside("submit", "--wait", str(job), env=fresh.environment) as submit:
        wait_for(lambda: "%" in submit.said, what="its progress", account=lambda: submit.said + fresh.account())
        hub.repositories["org/tiny"].held_at = None
        assert submit.process.wait(DEADLINE_SEC) == 0, submit.said
        lines = submit.said.splitlines()
    licence = next(number for number, line in enumerate(lines) if "licence apache-2.0" in line)
    progress = next(number for number, line in enumerate(lines) if "fetching org/tiny" in line and "%" in line)
    accepted = next(number for number, line in enumerate(lines) if "job 1" in line)
    assert licence < progress < accepted
    assert fresh.wait_state("succeed-1", State.SUCCEEDED)


def test_a_gated_model_is_described_with_its_terms_and_the_file_for_this_instances_token(
    fresh: Instance, tmp_path: Path
) -> None:
    job = write(tmp_path / "job.json", "org/gated", str(fresh.dataset))
    said = " ".join(fresh.honectl("check", str(job), env=fresh.environment).stdout.split())
    assert "licence llama3.2; gated, and the hub denied access without a token" in said
    assert "accept its terms at" in said
    assert str(fresh.layout.token_path) in said
    fresh.layout.token_path.write_text("t0ken\n")
    said = " ".join(fresh.honectl("check", str(job), env=fresh.environment).stdout.split())
    assert "gated: access was granted" in said


def test_a_hub_that_does_not_answer_is_no_error_of_the_check(fresh: Instance, hub: Hub, tmp_path: Path) -> None:
    hub.stop()
    job = write(tmp_path / "job.json", "org/tiny", str(fresh.dataset))
    said = fresh.honectl("check", str(job), env=fresh.environment)
    assert said.returncode == 0
    assert "its size and licence are not known: the hub cannot be reached" in said.stdout


def test_the_hub_is_on_by_default_in_ones_own_instance_and_off_in_the_systems(tmp_path: Path) -> None:
    own = Layout(tmp_path)
    assert config.load(own).policy.hub
    assert config.load(UserLayout(tmp_path / "state")).policy.hub
    assert Layout(Path("/")).is_of_system
    own.config_path.parent.mkdir(parents=True)
    own.config_path.write_text("[policy]\nhub = false\n")
    assert not config.load(own).policy.hub
    assert not config.Config().policy.hub
