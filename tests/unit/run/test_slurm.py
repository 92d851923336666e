"""The configuration of a cluster, and the fence of a worker whose start was settled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from honed.job import fence
from honed.run import slurm_request
from honed.run.choice import why_no_slurm
from honed.spec import config
from honed.system.error import InterruptedRunError, SpecError
from honed.system.layout import Layout


def test_the_shared_instance_runs_no_jobs_on_a_cluster() -> None:
    assert "one user's own" in why_no_slurm(Layout(Path("/")))


@pytest.mark.parametrize("option", ["--requeue", "--job-name=x", "-p main", "--mem=1G\n--requeue", "mem=1G"])
def test_an_option_that_is_honeds_own_is_refused(tmp_path: Path, option: str) -> None:
    layout = Layout(tmp_path)
    layout.config_path.parent.mkdir(parents=True)
    layout.config_path.write_text(f"[slurm]\noptions = [{json.dumps(option)}]\n")
    with pytest.raises(SpecError, match="slurm"):
        config.load(layout)


def test_a_place_stands_for_each_job_that_may_be_handed_over(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    layout.config_path.parent.mkdir(parents=True)
    layout.config_path.write_text(
        '[jobs]\nrunner = "slurm"\n[slurm]\nmax_jobs = 3\ngpu_bytes = 1000\npartition = "big"\noptions = ["--mem=1G"]\n'
    )
    read = config.load(layout)
    assert len({each.key for each in config.devices(read)}) == 3
    assert read.slurm.as_options() == ["--partition=big", "--mem=1G"]


def test_a_worker_whose_start_was_settled_puts_nothing_into_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "exit.json"
    monkeypatch.setenv(fence.VARIABLE, f"2:{path}")
    fence.require_current()
    path.write_text('{"start": 1}')
    fence.require_current()
    path.write_text('{"start": 2}')
    with pytest.raises(InterruptedRunError):
        fence.require_current()


def test_one_profile_is_the_default_and_each_has_honeds_options_for_itself(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    layout.config_path.parent.mkdir(parents=True)
    layout.config_path.write_text("[slurm.profiles.a]\ndefault = true\n[slurm.profiles.b]\ndefault = true\n")
    with pytest.raises(SpecError, match=r"slurm\.profiles: a and b are the default"):
        config.load(layout)
    layout.config_path.write_text('[slurm.profiles.a]\noptions = ["--requeue"]\n')
    with pytest.raises(SpecError, match=r"slurm\.profiles\.a\.options.*--requeue is honed's own"):
        config.load(layout)
    layout.config_path.write_text('[slurm.profiles.a]\npartitoin = "x"\n')
    with pytest.raises(SpecError, match=r"slurm\.profiles\.a\.partitoin.*unknown key.*did you mean partition"):
        config.load(layout)


@pytest.mark.parametrize(
    ("words", "is_for_ever"),
    [
        ("sbatch: error: Batch job submission failed: Invalid partition name specified", True),
        ("sbatch: error: invalid partition specified: nope", True),
        ("Batch job submission failed: Invalid account or account/partition combination specified", True),
        ("sbatch: unrecognized option '--foo=1'", True),
        ("Batch job submission failed: Requested node configuration is not available", True),
        ("Batch job submission failed: Unable to contact slurm controller (connect failure)", False),
        ("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", False),
        ("Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size …)", False),
        ("sbatch did not end within 30 s", False),
        ("", False),
    ],
)
def test_only_what_no_waiting_changes_is_a_refusal(words: str, is_for_ever: bool) -> None:
    assert slurm_request.is_refusal(words) is is_for_ever
