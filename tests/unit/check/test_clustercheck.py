"""What a cluster says to a job before it is accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from honed.check import clustercheck
from honed.spec.config import Config, JobsConfig, SlurmConfig, SlurmProfile
from honed.spec.spec import JobSpec, ResourceSpec
from honed.system.error import ClusterRefusedError, SpecError

PROFILES = {"big": SlurmProfile(partition="a100", gpu_bytes=80 << 30), "small": SlurmProfile(default=True, qos="low")}


def job(**resources: object) -> JobSpec:
    spec = JobSpec.model_validate({"base_model": "/m", "datasets": [{"path": "/d.jsonl"}], "lora": {"r": 4}})
    return spec.model_copy(update={"resources": ResourceSpec(**resources)})  # type: ignore[arg-type]


def cluster(**keys: object) -> Config:
    slurm = SlurmConfig(partition="main", options=["--mem=1G"], gpu_bytes=1000, profiles=PROFILES)
    return Config(jobs=JobsConfig(runner="slurm"), slurm=slurm.model_copy(update=keys))


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sbatch that says what the file `words` has, and notes its arguments."""
    path = tmp_path / "bin/sbatch"
    path.parent.mkdir()
    path.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\ncat {tmp_path}/words >&2\nexit $(cat {tmp_path}/rc)\n')
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")
    monkeypatch.setattr(clustercheck, "_answers", {})
    return tmp_path


def says(place: Path, words: str, status: int = 1) -> None:
    (place / "words").write_text(words)
    (place / "rc").write_text(str(status))


def test_a_profile_has_its_own_keys_and_the_rest_of_slurms() -> None:
    config = cluster()
    big, default = config.slurm.profile("big"), config.slurm.profile(None)
    assert big.as_options() == ["--partition=a100", "--mem=1G"]
    assert default.as_options() == ["--partition=main", "--qos=low", "--mem=1G"]
    assert (big.gpu_bytes, default.gpu_bytes) == (80 << 30, 1000)


def test_an_unknown_profile_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SpecError, match="bog is not a profile of this cluster; the profiles are big, small") as found:
        clustercheck.profile(job(profile="bog"), cluster())
    assert found.value.fix == {"resources.profile": None}
    with pytest.raises(SpecError, match="there is no cluster"):
        clustercheck.profile(job(profile="big"), Config())


def test_slurms_refusal_is_shown_in_its_words(sbatch: Path) -> None:
    says(sbatch, "allocation failure: Invalid qos specification")
    with pytest.raises(ClusterRefusedError, match="Invalid qos specification") as found:
        clustercheck.ask(job(profile="big", nodes=3, gpus=2), cluster())
    assert "profile big" in found.value.hint
    asked = (sbatch / "asked").read_text()
    assert "--test-only" in asked
    assert "--nodes=3 --ntasks-per-node=1 --gpus-per-node=2 --partition=a100" in asked


@pytest.mark.parametrize(
    "words",
    [
        "allocation failure: Unable to contact slurm controller (connect failure)",
        "allocation failure: Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
    ],
)
def test_no_answer_is_a_warning_and_is_not_waited_for_again(sbatch: Path, words: str) -> None:
    says(sbatch, words)
    config = cluster()
    (warning,) = clustercheck.ask(job(), config)
    assert words in warning
    clustercheck.ask(job(), config)
    assert len((sbatch / "asked").read_text().splitlines()) == 1


def test_a_lack_of_nodes_is_a_refusal_only_beyond_those_that_there_are(sbatch: Path) -> None:
    says(sbatch, "allocation failure: Requested node configuration is not available")
    sinfo = sbatch / "bin/sinfo"
    sinfo.write_text("#!/bin/sh\nprintf 'node1\\nnode2\\n'\n")
    sinfo.chmod(0o755)
    (warning,) = clustercheck.ask(job(nodes=2), cluster())
    assert "no such nodes now" in warning
    with pytest.raises(ClusterRefusedError):
        clustercheck.ask(job(nodes=3), cluster())


def test_a_job_that_slurm_would_take_gets_no_word(sbatch: Path) -> None:
    says(sbatch, "sbatch: Job 3 to start at 2030-01-01T00:00:00", status=0)
    assert clustercheck.ask(job(), cluster()) == []
