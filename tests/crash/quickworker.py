"""A worker of a hundredth of a second, run as `python -I -S`: three steps, an evaluation, a prediction, an output.

A job of the name `dies` is killed in its first attempt, right after its second step. With HONED_TEST_STAGING the first
start of a job trains until the other job is staged, so that it is.
"""

import json
import os
import signal
import sys
import time

words = sys.argv[1:]
job_dir, number = words[:2]
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


def waits_for_other() -> bool:
    """Return True while the other job could still be staged, and is not."""
    jobs_dir, own = os.path.split(job_dir)
    for other in os.listdir(jobs_dir):  # noqa: PTH208
        entry = f"{os.path.dirname(os.path.dirname(os.path.dirname(jobs_dir)))}/spool/honed/queued/{other}.json"  # noqa: PTH120
        if other != own and os.path.exists(entry):  # noqa: PTH110
            with open(entry, "rb") as file:  # noqa: PTH123
                return json.load(file).get("staged_at") is None
    return False


tell("started", pid=1, backend="transformers")
if "HONED_STAGED" in os.environ:
    tell("stage", stage="staged")
    passed = {}
    while (passed.get("number"), passed.get("start")) != (int(number), int(os.environ["HONED_STAGED"])):
        time.sleep(0.02)
        if os.path.exists(f"{job_dir}/gate.json"):  # noqa: PTH110
            with open(f"{job_dir}/gate.json", "rb") as file:  # noqa: PTH123
                passed = json.load(file)
elif "HONED_TEST_STAGING" in os.environ:
    tell("stage", stage="train")
    until = time.monotonic() + 60
    while time.monotonic() < until and waits_for_other():
        time.sleep(0.05)
for step in (1, 2, 3):
    tell("step", step=step, num_steps=3, epoch=step / 3, loss=1 / step, learning_rate=0.1)
    if step == 2 and plan["job"]["name"] == "dies" and number == "1":
        os.kill(os.getpid(), signal.SIGKILL)
tell("evaluation", step=3, epoch=1.0, metrics={"eval_loss": 0.25})
row = {"sample_index": 0, "prompt": "Wie weit?", "ground_truth": "weit", "prediction": "weit"}
tell("predictions", step=3, epoch=1.0, num_failed=0, rows=[row])
tell("finished", outcome="succeeded", step=3, metrics={})
os.fsync(events_fd)
os.makedirs(plan["output_dir"], exist_ok=True)  # noqa: PTH103
artifacts = {"output_dir": plan["output_dir"], "merged": None}
write(
    f"{attempt_dir}/result.json",
    {"outcome": "succeeded", "step": 3, "metrics": {}, "artifacts": artifacts, "error": None},
)
