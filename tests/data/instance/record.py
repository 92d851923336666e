"""Record an instance that later versions must load: python record.py COMMIT VERSION (a minute).

With the tests' environment. It runs that commit's daemon and workers, as that version, in the directory `ROOT`, on
real tiny models, until there are jobs in every state, kills them all, and packs what they leave:

    instance.tar.xz    the directory
    recorded.json      the versions and the processor, the jobs as that honed lists them, and what was delivered

An instance has absolute paths in files with checksums, so it can only be unpacked to the same place.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = Path("/tmp/honed-recorded")
#: The receiver's port, in honed.toml and in the webhook's file.
PORT = 18471
#: Steps of the jobs `whole` and `cut`, and the first step after which `cut` may be cut.
NUM_STEPS, CUT_STEP = 24, 6
#: Names of directories of staged copies: of the job `half-pruned`, and of `staged`.
STAGED = ("0123456789abcdef", "fedcba9876543210")
#: Keys of `honectl show --json` that are kept of each job.
LISTED = ("id", "name", "state", "outcome", "is_pinned", "attempts", "error", "metrics", "artifacts")
DEADLINE_SEC = 900.0
TOKEN = "0123456789abcdef-token"

CONFIG = """
[spool]
settle_sec = 0.1
preflight_timeout_sec = 900

[jobs]
runner = "process"
max_running = 1
poll_interval_sec = 0.1
retry_delay_sec = 0.5

[device]
gpus = []
reserve_bytes = 1048576

[policy]
admin_group = "root"
share_results = true

[hub]
max_fetches = 1

[reporting]
metrics_api_url = "http://127.0.0.1:{port}/api"
token_file = "{root}/etc/honed/metrics-token"
retry_delay_sec = 0.1
max_retry_delay_sec = 0.5

[web]
token_file = "{root}/etc/honed/web-token"
hosts = ["train.example.org"]

[retention]
max_job_age_days = 36500
max_jobs = 1000
max_rejected_age_days = 36500

[notify]
admin_webhook = "team"
admin_states = ["failed", "cancelled"]
retry_delay_sec = 0.1
max_retry_delay_sec = 0.5
give_up_days = 36500
[notify.webhook_files]
team = "{root}/etc/honed/team-webhook"
"""
#: Drop-ins: the later of two wins, over honed.toml as well.
DROP_INS = {
    "50-local.toml": "[jobs]\nmin_stall_timeout_sec = 200\nstop_timeout_sec = 100\n",
    "60-later.toml": "[jobs]\nstop_timeout_sec = 123\n",
}
METRIC = "def vowels(text, truth):\n    return (1 + sum(map(text.count, 'aeiou'))) / (1 + len(text))\n"


class Receiver(BaseHTTPRequestHandler):
    """The metrics API and the chat, which take everything until they are told to refuse."""

    rows: list[dict[str, Any]] = []  # noqa: RUF012
    notices: list[dict[str, Any]] = []  # noqa: RUF012
    statuses: dict[str, int] = {"/api": 200, "/team": 200}  # noqa: RUF012
    num_refused = 0

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status = self.statuses[self.path]
        if status == 200:
            (
                self.notices.append(body)
                if self.path == "/team"
                else self.rows.extend(body["metrics"] + body["predictions"])
            )
        else:
            Receiver.num_refused += 1
        self.send_response(status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing on stderr."""


def main() -> None:
    if "HONED_RECORDED" in os.environ:
        record()
        return
    with tempfile.TemporaryDirectory() as place:
        tree, environment_dir = f"{place}/tree", f"{place}/environment"
        Path(tree).mkdir()
        command = ["git", "archive", "--format=tar", sys.argv[1]]
        archive = subprocess.run(command, cwd=HERE.parents[2], stdout=subprocess.PIPE, check=True)
        subprocess.run(["tar", "--extract", "--directory", tree], input=archive.stdout, check=True)
        for name in ("pyproject.toml", "daemon/honed/__init__.py"):  # as scripts/release writes it
            path = Path(tree, name)
            text = re.sub(r'(version(?:__)?) = "[0-9.]+"', rf'\1 = "{sys.argv[2]}"', path.read_text(), count=1)
            path.write_text(text)
        # The packages of this environment but for its .pth files, which add today's honed. By links, so that tracebacks
        # in the recording do not name this environment.
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment_dir], check=True)
        [packages] = Path(environment_dir).glob("lib/python3.*/site-packages")
        for path in Path(sysconfig.get_path("purelib")).iterdir():
            if path.suffix != ".pth":
                (packages / path.name).symlink_to(path)
        environment = {
            **os.environ,
            "PYTHONPATH": f"{tree}/daemon:{tree}/tests:{ROOT}/packages",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "HONED_RECORDED": " ".join(sys.argv[1:]),
        }
        subprocess.run([f"{environment_dir}/bin/python", __file__], env=environment, check=True)


def record() -> None:
    ROOT.mkdir(mode=0o700)
    recording = Recording()
    try:
        recording.make()
    finally:
        recording.kill_all()
    shutil.rmtree(ROOT)


class Recording:
    def __init__(self) -> None:
        self.daemon: subprocess.Popen[bytes] | None = None
        self.spool_dir, self.state_dir = ROOT / "var/spool/honed", ROOT / "var/lib/honed"
        self.incoming_dir = self.spool_dir / "incoming"

    # -- the course of events -----------------------------------------------------------------------------------------

    def make(self) -> None:
        server = ThreadingHTTPServer(("127.0.0.1", PORT), Receiver)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.write_inputs()
        self.start()
        self.ended()
        self.wait_delivered()
        Receiver.statuses = {"/api": 503, "/team": 422}
        self.undelivered()
        Receiver.statuses = {"/api": 503, "/team": 503}
        self.waiting()
        self.killed()
        server.shutdown()
        self.pack()

    def ended(self) -> None:
        """Jobs that have ended, and whose receivers know it: numbers 1 to 5."""
        self.drop("whole", **self.spec(NUM_STEPS), notify={"webhook": "team"}, pin=True, save_merged="float16")
        self.wait_state("whole", "succeeded")
        self.drop("pruned", **self.spec(2))
        self.wait_state("pruned", "succeeded")
        self.honectl("prune", "pruned")
        wait_for(lambda: not (self.state_dir / "jobs/2").exists(), "the directory's removal")
        self.drop("overdue", **self.spec(400), time_limit_sec=0.001)
        self.wait_state("overdue", "failed")
        # Its copies stay, as of every job that failed.
        self.drop("half-pruned", **self.spec(400, dataset=self.stage(STAGED[0])), time_limit_sec=0.001)
        self.wait_state("half-pruned", "failed")
        (self.incoming_dir / "misspelt.yaml").write_text(f"base_modell: {ROOT}/inputs/model\n")
        wait_for((self.spool_dir / "rejected/misspelt.yaml.reason").exists, "the reason")

    def undelivered(self) -> None:
        """A job that was cancelled in its run: its rows wait, and the chat has refused its notice."""
        self.drop("cancelled", **self.spec(60))
        self.stop_worker("cancelled", 5)
        self.honectl("cancel", "cancelled")
        self.wait_state("cancelled", "cancelled")
        wait_for(lambda: list((self.state_dir / "outbox/notices/refused").glob("*.json")), "the refused notice")

    def waiting(self) -> None:
        """A job in the middle of its run, and those behind it."""
        self.drop("cut", **self.spec(NUM_STEPS), notify={"webhook": "team"})
        self.stop_worker("cut", CUT_STEP)
        assert len(self.losses("cut")) < NUM_STEPS - 4
        self.drop("deferred", **{key: value for key, value in self.spec(4).items() if key != "lora"}, adapter="job:cut")
        self.drop("after", **self.spec(2), depends_on=["deferred"])
        self.drop("staged", **self.spec(2, dataset=self.stage(STAGED[1])), priority=5)
        self.drop("held.hold", **self.spec(2))
        for name in ("given-up", "told-later"):
            self.drop(f"{name}.hold", **self.spec(2), notify={"webhook": "team"})
        for name in ("deferred", "after", "staged"):
            self.wait_state(name, "queued")
        for name in ("held", "given-up", "told-later"):
            self.wait_state(name, "held")
        self.honectl("cancel", "told-later")
        wait_for(lambda: list((self.state_dir / "outbox/notices").glob("*.json")), "the notice that waits")

    def killed(self) -> None:
        """kill -9 for all: an arrival is being checked, another lies there, a third is removed, a save is half done."""
        [helper] = [pid for pid, words in self.processes() if "preflight" in words]
        os.kill(helper, signal.SIGSTOP)
        self.drop("claimed", **self.spec(2))
        wait_for(lambda: any(path.is_file() for path in (self.spool_dir / "claimed").rglob("*")), "the claim")
        time.sleep(1)  # its first steps are durable
        self.kill_all()
        self.drop("arriving", **self.spec(2))
        self.honectl("cancel", "given-up")  # without a daemon: its end has yet to be told
        self.half_prune("half-pruned")
        half = self.state_dir / f"jobs/{self.number('cut')}/checkpoints/.new/checkpoint-8"
        half.mkdir(parents=True, exist_ok=True)
        (half / "trainer_state.json").write_text('{"global_step": 8, "log_hi')

    def half_prune(self, name: str) -> None:
        """Commit the removal of a job, and be killed before the rest."""
        from honed.job.spool import Spool
        from honed.system.layout import Layout

        spool = Spool(Layout(ROOT))
        [job] = spool.named(name)
        spool.prune(job)
        spool.close()

    def pack(self) -> None:
        import torch
        import transformers
        import trl

        commit, version = os.environ["HONED_RECORDED"].split()
        recorded = {
            "commit": commit,
            "version": version,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "trl": trl.__version__,
            "processor": processor(),
            "jobs": [{key: self.show(job["name"])[key] for key in LISTED} for job in self.list()],
            "losses": self.losses("whole"),
            "rows": sorted(row["idempotency_key"] for row in Receiver.rows),
            "notices": sorted(notice["idempotency_key"] for notice in Receiver.notices),
        }
        (HERE / "recorded.json").write_text(json.dumps(recorded, indent=1, ensure_ascii=False) + "\n")
        # The log and the sockets are no part of an instance's state.
        excluded = [f"--exclude={pattern}" for pattern in ("*.sock", "honed.log", "__pycache__")]
        command = ["tar", "--create", "--xz", "--sort=name", "--owner=0", "--group=0", "--numeric-owner", *excluded]
        subprocess.run([*command, "--file", HERE / "instance.tar.xz", "--directory", ROOT, "."], check=True)

    # -- the instance -------------------------------------------------------------------------------------------------

    def write_inputs(self) -> None:
        from zoo.model import build_checkpoint, write_facts

        self.incoming_dir.mkdir(parents=True)
        build_checkpoint(ROOT / "inputs/model", hidden_size=16, num_layers=1, vocab_size=300)
        write_facts(ROOT / "inputs/facts.jsonl", 12)
        config_dir = ROOT / "etc/honed"
        (config_dir / "honed.toml.d").mkdir(parents=True)
        (config_dir / "honed.toml").write_text(CONFIG.format(root=ROOT, port=PORT))
        for name, text in DROP_INS.items():
            (config_dir / "honed.toml.d" / name).write_text(text)
        for name, text in (
            ("team-webhook", f"http://127.0.0.1:{PORT}/team\n"),
            ("metrics-token", f"{TOKEN}\n"),
            ("web-token", f"{TOKEN}\n"),
        ):
            (config_dir / name).touch(mode=0o640)
            (config_dir / name).write_text(text)
        info = ROOT / "packages/house_metrics-1.0.dist-info"
        info.mkdir(parents=True)
        (ROOT / "packages/house_metrics.py").write_text(METRIC)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: house-metrics\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[honed.metrics]\nvowels = house_metrics:vowels\n")

    def stage(self, name: str) -> Path:
        """Copy the data set as `honectl submit --stage` does (of root's files, it copies none)."""
        place = self.state_dir / "staged" / name / "0"
        place.mkdir(parents=True)
        return Path(shutil.copy(ROOT / "inputs/facts.jsonl", place))

    def spec(self, num_steps: int, *, dataset: Path = ROOT / "inputs/facts.jsonl") -> dict[str, Any]:
        return {
            "base_model": str(ROOT / "inputs/model"),
            "backend": "transformers",
            "lora": {"r": 2, "lora_alpha": 4, "lora_dropout": 0.1},
            "datasets": [{"path": str(dataset)}],
            "eval_split": 0.25,
            "training": {
                "max_steps": num_steps,
                "per_device_train_batch_size": 2,
                "max_length": 128,
                "learning_rate": 0.01,
                "logging_steps": 1,
                "save_steps": 4,
                "eval_strategy": "steps",
                "eval_steps": 12,
            },
            "predictions": {"num_samples": 2, "max_new_tokens": 4, "metrics": ["exact_match", "vowels"]},
        }

    def start(self) -> None:
        with (ROOT / "honed.log").open("wb") as log:
            command = [sys.executable, "-m", "honed.daemon.loop", "--root", ROOT]
            self.daemon = subprocess.Popen(command, stdout=log, stderr=log)

    def drop(self, file: str, **keys: Any) -> None:
        name = file.removesuffix(".hold")
        temporary = self.incoming_dir / f".{name}"
        temporary.write_text(json.dumps({"name": name, **keys}))
        temporary.rename(self.incoming_dir / f"{file}.json")

    def honectl(self, *words: str) -> str:
        command = [sys.executable, "-m", "honed.cli.honectl", "--root", ROOT, *words]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout

    def list(self) -> list[dict[str, Any]]:
        jobs: list[dict[str, Any]] = json.loads(self.honectl("list", "--json"))
        return jobs

    def show(self, name: str) -> dict[str, Any]:
        job: dict[str, Any] = json.loads(self.honectl("show", "--json", name))
        return job

    def number(self, name: str) -> int:
        return next(int(job["id"]) for job in self.list() if job["name"] == name)

    def wait_state(self, name: str, state: str) -> None:
        def is_there() -> bool:
            found = next((job["state"] for job in self.list() if job["name"] == name), None)
            refused = list((self.spool_dir / "rejected").glob(f"{name}.*.reason"))
            assert not refused, refused[0].read_text()
            assert found == state or found in {None, "queued", "running"}, (name, found)
            return found == state

        wait_for(is_there, f"{name} in {state}")

    def wait_delivered(self) -> None:
        """Wait until all that the jobs have told so far is delivered, and noted as such."""
        outbox = self.state_dir / "outbox"

        def is_over() -> bool:
            cursor = json.loads((outbox / "sender/cursor.json").read_text())
            last = max(outbox.glob("*.jsonl"), key=lambda path: int(path.stem))
            is_at_end = (cursor["segment"], cursor["offset"]) == (int(last.stem), last.stat().st_size)
            return is_at_end and not list((outbox / "notices").glob("*.json")) and len(Receiver.notices) == 3

        wait_for(is_over, "the delivery")

    # -- workers ------------------------------------------------------------------------------------------------------

    def stop_worker(self, name: str, step: int) -> None:
        """Stop a job's worker in its tracks once it has done a step."""
        wait_for(lambda: self.is_running(name), name, pause_sec=0.001)
        events = self.state_dir / f"jobs/{self._numbers[name]}/attempts/1/events.jsonl"
        wait_for(lambda: events.exists() and len(self.losses(name)) >= step, f"step {step}", pause_sec=0.001)
        os.kill(self.lock(name)["worker_pid"], signal.SIGSTOP)

    def is_running(self, name: str) -> bool:
        """Look in the spool: by the time that honectl has answered, a short job has ended."""
        for path in (self.spool_dir / "running").glob("*.json"):
            with contextlib.suppress(FileNotFoundError):
                if json.loads(path.read_text())["name"] == name:
                    self._numbers[name] = int(path.stem)
        return name in self._numbers

    def lock(self, name: str) -> dict[str, Any]:
        path = self.state_dir / f"jobs/{self._numbers[name]}/attempts/1/lock"
        lock: dict[str, Any] = json.loads(path.read_text())
        return lock

    def losses(self, name: str) -> list[float]:
        if name not in self._numbers:
            self._numbers[name] = self.number(name)
        lines = (self.state_dir / f"jobs/{self._numbers[name]}/attempts/1/events.jsonl").read_text().splitlines()
        return [event["loss"] for event in map(json.loads, lines) if event["event"] == "step"]

    _numbers: dict[str, int] = {}  # noqa: RUF012

    def kill_all(self) -> None:
        if self.daemon is not None:
            self.daemon.kill()
            self.daemon.wait()
        for pid, _ in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not self.processes(), "the end of all")

    def processes(self) -> list[tuple[int, str]]:
        """The processes of the instance that still run, with their command lines."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = path.read_bytes().replace(b"\0", b" ").decode()
                if str(ROOT) in words and int(path.parent.name) != os.getpid():
                    found.append((int(path.parent.name), words))
        return found


def processor() -> str:
    """Return what the last bits of a loss depend on."""
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = " ".join(
        line.partition(":")[2].strip() for line in lines[:12] if line.startswith(("model", "cpu family", "vendor"))
    )
    return f"{model}, {torch.backends.cpu.get_cpu_capability()}"


def wait_for(condition: Callable[[], Any], what: str, *, pause_sec: float = 0.05) -> None:
    deadline = time.monotonic() + DEADLINE_SEC
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {DEADLINE_SEC:.0f} s; see {ROOT}/honed.log"
        time.sleep(pause_sec)


if __name__ == "__main__":
    main()
