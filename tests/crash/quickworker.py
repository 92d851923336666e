"""A worker of a hundredth of a second, run as `python -I -S`: three steps, an evaluation, a prediction, an output.

A job of the name `dies` is killed in its first attempt, right after its second step.
"""

import json
import os
import signal
import sys

job_dir, number = sys.argv[1], sys.argv[2]
attempt_dir = f"{job_dir}/attempts/{number}"
with open(f"{job_dir}/plan.json", "rb") as file:  # noqa: PTH123 - pathlib would double the start
    plan = json.load(file)
events_fd = os.open(f"{attempt_dir}/events.jsonl", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
if os.fstat(events_fd).st_size:
    os.write(events_fd, b"\n")


def tell(event: str, **data: object) -> None:
    os.write(events_fd, json.dumps({"event": event, "time": 1_000_000.0, **data}).encode() + b"\n")


def write(path: str, value: object) -> None:
    with open(f"{path}.tmp", "w") as file:  # noqa: PTH123
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(f"{path}.tmp", path)  # noqa: PTH104
    fd = os.open(os.path.dirname(path), os.O_RDONLY)  # noqa: PTH120
    os.fsync(fd)
    os.close(fd)


tell("started", pid=1, backend="transformers")
for step in (1, 2, 3):
    tell("step", step=step, num_steps=3, epoch=step / 3, loss=1 / step, learning_rate=0.1)
    if step == 2 and plan["job"]["name"] == "dies" and number == "1":
        os.kill(os.getpid(), signal.SIGKILL)
tell("evaluation", step=3, epoch=1.0, metrics={"eval_loss": 0.25})
row = {"sample_index": 0, "prompt": "Wie weit?", "ground_truth": "weit", "prediction": "weit"}
tell("predictions", step=3, epoch=1.0, num_failed=0, rows=[row])
tell("finished", outcome="succeeded", step=3, metrics={})
os.fsync(events_fd)
artifacts = {"output_dir": plan["output_dir"], "merged": None}
write(
    f"{attempt_dir}/result.json",
    {"outcome": "succeeded", "step": 3, "metrics": {}, "artifacts": artifacts, "error": None},
)
