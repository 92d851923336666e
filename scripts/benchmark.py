"""Benchmark of one small job: its duration beside `trl sft`, the idle daemon;
batched predictions.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import demonstration

STEPS, BATCH, RANK = 20, 8, 16
#: Minimum speed-up of predictions in a batch of 16 on a CPU.
MIN_RATIO = 4
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}

TRL_CONFIG = """\
model_name_or_path: {dir}/model
dtype: float32
datasets:
  - path: json
    data_files: {dir}/train.jsonl
output_dir: {output}
max_steps: {steps}
per_device_train_batch_size: {batch}
learning_rate: 1.0e-3
gradient_checkpointing: false
logging_steps: 1
use_cpu: true
bf16: false
use_peft: true
lora_r: {rank}
lora_alpha: 32
lora_dropout: 0.0
lora_target_modules: all-linear
report_to: none
loss_type: nll
"""
JOB = """\
base_model: {dir}/model
dtype: float32
lora: {{r: {rank}, lora_alpha: 32}}
datasets: [{{path: {dir}/train.jsonl}}]
predictions: {{sample_frequency: off}}
training:
  max_steps: {steps}
  per_device_train_batch_size: {batch}
  learning_rate: 1.0e-3
  gradient_checkpointing: false
"""


@contextmanager
def running_honed(root: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a daemon, started before the measurement."""
    with (root / "honed.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "honed.daemon.loop", "--root", str(root)], stderr=log)
    while not (root / "run/honed/control.sock").exists():
        time.sleep(0.05)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def time_honed(root: Path, number: int) -> float:
    """Return the seconds from the drop to the entry in succeeded/."""
    job = root / f"job{number}.yaml"
    job.write_text(JOB.format(dir=root, steps=STEPS, batch=BATCH, rank=RANK))
    done = root / f"var/spool/honed/succeeded/{number}.json"
    started = time.perf_counter()
    job.rename(root / f"var/spool/honed/incoming/{job.name}")
    while not done.exists():
        time.sleep(0.01)
        if (root / f"var/spool/honed/failed/{number}.json").exists():
            raise SystemExit((root / f"var/spool/honed/failed/{number}.json").read_text())
        if reasons := list((root / "var/spool/honed/rejected").glob("*.reason")):
            raise SystemExit(reasons[0].read_text())
    return time.perf_counter() - started


def time_trl(root: Path, number: int) -> float:
    """Return the seconds from the command's start to its end."""
    config = root / f"trl{number}.yaml"
    config.write_text(
        TRL_CONFIG.format(dir=root, output=root / f"trl-out{number}", steps=STEPS, batch=BATCH, rank=RANK)
    )
    started = time.perf_counter()
    command = [str(Path(sys.executable).with_name("trl")), "sft", "--config", str(config)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr.decode())
    return time.perf_counter() - started


def idle(process: subprocess.Popen[bytes], *, seconds: float = 20.0) -> tuple[float, float]:
    """Return resident MiB and the share of a core of an idle daemon."""

    def ticks() -> int:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    before = ticks()
    time.sleep(seconds)
    share = (ticks() - before) / os.sysconf("SC_CLK_TCK") / seconds
    resident = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return resident, share


def time_predictions(root: Path, runs: int) -> dict[str, Any]:
    """Return the times by dtype; see benchmark_prediction.py."""
    script = Path(__file__).with_name("benchmark_prediction.py")
    command = [sys.executable, str(script), str(root), "--runs", str(runs)]
    done = subprocess.run(command, env=ENVIRONMENT, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def row(name: str, seconds: list[float]) -> str:
    return f"| {name} | {statistics.median(seconds):.2f} | {min(seconds):.2f}–{max(seconds):.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory(prefix="honed-bench-") as name:
        root = Path(name)
        demonstration.build(root)
        with running_honed(root) as process:
            resident, share = idle(process)
            time_honed(root, 1), time_trl(root, 0)  # warm the caches
            rounds = [(time_honed(root, number), time_trl(root, number)) for number in range(2, runs + 2)]
        result = json.loads((root / "var/lib/honed/jobs/2/attempts/1/result.json").read_text())
        assert result["step"] == STEPS
        asked = time_predictions(root, runs)
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {runs} rounds in turn")
    print("| submit to finished | median s | range | of `trl sft`, pair by pair |\n|---|---|---|---|")
    ratios = [ours / theirs for ours, theirs in rounds]
    of_trl = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
    print(f"{row('honed (daemon running)', [ours for ours, _ in rounds])} {of_trl} |")
    print(f"{row('`trl sft`', [theirs for _, theirs in rounds])} |")
    print("\n| 16 predictions of 64 tokens, float32 | median s |\n|---|---|")
    whole, half = asked["float32"], asked["bfloat16"]
    print(f"| in one batch | {whole['batch_sec']:.2f} |\n| one at a time | {whole['one_sec']:.2f} |")
    print(f"| times as fast, pair by pair | {whole['ratio']:.1f} ({whole['min_ratio']:.1f}–{whole['max_ratio']:.1f}) |")
    print(f"\ntexts that differ: {whole['num_different']} in float32, {half['num_different']} in bfloat16")
    if whole["ratio"] < MIN_RATIO or whole["num_different"]:
        raise SystemExit(f"batched predictions should be the same texts, at least {MIN_RATIO} times as fast")
    print(f"\nidle daemon: {resident:.1f} MiB resident, {share:.2%} of a core over 20 s")


if __name__ == "__main__":
    main()
