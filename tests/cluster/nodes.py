"""Two virtual Slurm nodes on this machine, in a directory of their own."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "process")]

from harness import Instance  # noqa: E402

import gpus  # noqa: E402
from waiting import DEADLINE_SEC, wait_for  # noqa: E402

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel")
#: What starts each daemon, by the name of its file in pid/.
DAEMONS = {
    "slurmctld": ["slurmctld"],
    "slurmd-node1": ["slurmd", "-N", "node1"],
    "slurmd-node2": ["slurmd", "-N", "node2"],
}


def why_not() -> str:
    """Return why no cluster can be brought up here."""
    if missing := [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]:
        return f"needs the packages slurm-wlm and munge: no {', '.join(missing)}"
    return "needs root, for munged and slurmd" if os.geteuid() != 0 else ""


def _free_port() -> int:
    """Return the first of three ports in a row that nothing listens on, below those that the kernel gives out."""
    while True:
        first = random.randrange(15_000, 30_000)
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + 3):
                    stack.enter_context(socket.socket()).bind(("", port))
            except OSError:
                continue
            return first


class Cluster:
    """munged, a controller and two nodes."""

    def __init__(self, directory: Path) -> None:
        if len(os.fsencode(directory / "state/spool-node1/node1_9999.4294967291")) >= 108:
            raise ValueError(f"{directory}: too long for the paths of slurmstepd's sockets")
        self.dir = directory
        self.conf = directory / "etc/slurm.conf"
        self.environment = os.environ | {"SLURM_TEST_DIR": str(directory), "SLURM_CONF": str(self.conf)}
        self.environment["PATH"] += ":/usr/sbin"
        self.environment["SLURM_TEST_PORT"] = str(_free_port())

    def up(self) -> None:
        subprocess.run([HERE / "up"], env=self.environment, check=True, capture_output=True, timeout=DEADLINE_SEC)

    def down(self) -> None:
        subprocess.run(
            [HERE / "down", "--wipe"], env=self.environment, check=False, capture_output=True, timeout=DEADLINE_SEC
        )

    def running(self, program: str) -> int | None:
        """Return the pid of a daemon that runs and has written it down."""
        try:
            pid = int((self.dir / f"pid/{program}.pid").read_text())
        except (FileNotFoundError, ValueError):  # it starts: the file comes after its command has returned
            return None
        return pid if Path(f"/proc/{pid}/exe").exists() else None

    def kill(self, program: str) -> None:
        """Kill a daemon: slurmctld, slurmd-node1 or slurmd-node2."""
        pid = wait_for(lambda: self.running(program), what=f"{program} runs")
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{pid}/exe").exists(), what=f"the end of {program}")

    def start(self, program: str) -> None:
        """Start a daemon, and wait until it has written its pid down; again where it ends at once."""
        (self.dir / f"pid/{program}.pid").unlink(missing_ok=True)
        for _ in range(6):
            subprocess.run([*DAEMONS[program], "-f", self.conf], env=self.environment, check=True, timeout=30)
            with contextlib.suppress(AssertionError):
                wait_for(lambda: self.running(program), what=f"{program} runs", deadline_sec=10)
                return
        raise AssertionError(f"{program} does not run: {(self.dir / f'log/{program}.log').read_text()[-3000:]}")

    def mend(self) -> None:
        """Start again what was killed, and take back nodes that Slurm has given up."""
        for program in DAEMONS:
            if self.running(program) is None:
                self.start(program)
        resume = ["scontrol", "update", "nodename=node1,node2", "state=resume"]
        subprocess.run(resume, env=self.environment, check=False, capture_output=True, timeout=DEADLINE_SEC)

    def run(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self.environment, check=True, capture_output=True, text=True, timeout=DEADLINE_SEC
        )
        return done.stdout


class ClusterInstance(Instance):
    """A honed of one user's own whose workers are jobs of the cluster."""

    command = (sys.executable, str(HERE / "fakehoned.py"))
    is_warm = False

    def __init__(self, root: Path, cluster: Cluster) -> None:
        super().__init__(root)
        self.cluster = cluster
        self.environment = dict(cluster.environment)
        self.configure("")

    def pretend_cuda(self) -> None:
        """Have the check find a torch that was built for the GPUs that the nodes pretend to have."""
        packages = self.root / "packages"
        gpus.write_torch(packages)
        self.environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(packages), os.environ.get("PYTHONPATH")]))

    def configure(self, text: str) -> None:
        jobs = 'runner = "slurm"\nretry_delay_sec = 0.1'
        text = text.replace("[jobs]", f"[jobs]\n{jobs}") if "[jobs]" in text else f"{text}\n[jobs]\n{jobs}\n"
        super().configure(text)

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="module")
def whole_cluster() -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    made = Cluster(Path(tempfile.mkdtemp(prefix="honed-slurm-")))
    try:
        made.up()
        yield made
    finally:
        made.down()


@pytest.fixture
def cluster(whole_cluster: Cluster, tmp_path: Path) -> Iterator[ClusterInstance]:
    made = ClusterInstance(tmp_path, whole_cluster)
    yield made
    made.end()
    whole_cluster.mend()
