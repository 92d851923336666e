"""Checks of a job for a Slurm cluster: its profile, and whether Slurm would take it.

Slurm is asked with `sbatch --test-only`, which submits nothing. A clear refusal is the job's fault or the
configuration's; no answer, and a lack of nodes that may be there later, say nothing about either.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from honed.run import slurm_client
from honed.run.slurm_request import NO_SUCH_NODES, Request, is_refusal, may_have_nodes, try_out
from honed.spec import kind
from honed.spec.config import Config, SlurmConfig
from honed.spec.spec import JobSpec
from honed.system.error import ClusterRefusedError, EnvironmentInvalidError, NotPermittedError, SpecError
from honed.system.layout import Layout

#: Seconds for which an answer holds: jobs of a sweep are alike, and a controller that is down is asked once.
ANSWER_SEC = 60.0
_answers: dict[tuple[str, ...], tuple[float, str, bool]] = {}


def profile(job_spec: JobSpec, config: Config) -> SlurmConfig | None:
    """Return the configuration of a job's profile; None without a cluster. Raises SpecError for an unknown one."""
    name, known = job_spec.resources.profile, sorted(config.slurm.profiles)
    if config.jobs.runner != "slurm":
        if name is not None:
            raise SpecError(
                "resources.profile: there is no cluster: profiles need jobs.runner = slurm in honed.toml",
                hint="remove it",
                fix={"resources.profile": None},
            )
        return None
    try:
        return config.slurm.profile(name)
    except KeyError:
        profiles = f"the profiles are {', '.join(known)}" if known else "there are none"
        hint = "write one of those, or remove it" if known else "remove it"
        raise SpecError(
            f"resources.profile: {name} is not a profile of this cluster; {profiles}",
            hint=f"{hint}; profiles are in honed.toml, as [slurm.profiles.{name}]",
            fix={"resources.profile": None},
        ) from None


def require_gpus(job_spec: JobSpec, asked: SlurmConfig) -> None:
    """Raise SpecError for a job of several GPUs on nodes without any."""
    if job_spec.resources.gpus > 1 and not asked.gpu_bytes:
        raise SpecError(
            f"resources.gpus: {job_spec.resources.gpus} GPUs are wanted, but slurm.gpu_bytes is 0: the nodes have none",
            hint="write resources.gpus: 0",
            fix={"resources.gpus": 0},
        )


def require_user(layout: Layout, config: Config, uid: int) -> None:
    """Raise NotPermittedError or EnvironmentInvalidError if a user's jobs cannot run as that user on the cluster."""
    if config.jobs.runner != "slurm" or not layout.is_of_system:
        return
    if problem := slurm_client.why_not(layout):
        raise EnvironmentInvalidError(
            problem, hint="an administrator enables it: systemctl enable --now honed-slurm.socket"
        )
    if problem := slurm_client.why_not_as(uid):
        raise NotPermittedError(problem, hint="submit it as a user of the cluster")


def ask(job_spec: JobSpec, config: Config, progress: Callable[[str], None] = lambda _stage: None) -> list[str]:
    """Ask Slurm whether it would take a job; returns a warning if it has not answered. Raises ClusterRefusedError."""
    if (asked := profile(job_spec, config)) is None:
        return []
    progress("cluster")
    resources = job_spec.resources
    num_gpus = resources.gpus if asked.gpu_bytes and kind.of(job_spec).needs_device else 0
    wanted = Request(resources.nodes, num_gpus, resources.profile, job_spec.time_limit_sec)
    key = tuple(wanted.options(config.slurm))
    known = _answers.get(key)
    if known is None or time.monotonic() - known[0] > ANSWER_SEC:
        known = _answers[key] = (time.monotonic(), *_answer(wanted, config.slurm))
    _, words, is_final = known
    if is_final:
        named = f"profile {resources.profile}" if resources.profile else "[slurm]"
        raise ClusterRefusedError(
            f"Slurm refuses the job: {words}", hint=f"correct resources in the job file, or {named} in honed.toml"
        )
    if not words:
        return []
    said = "has no such nodes now" if is_refusal(words) else "did not answer"
    return [f"resources: Slurm was asked whether it would take the job, and {said}: {words}"]


def _answer(wanted: Request, slurm: SlurmConfig) -> tuple[str, bool]:
    """Return Slurm's objection, empty for none, and whether it holds for ever."""
    words = try_out(wanted, slurm)
    is_lack = NO_SUCH_NODES in words.lower() and may_have_nodes(wanted, slurm)
    return words, is_refusal(words) and not is_lack
