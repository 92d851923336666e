"""A worker that misbehaves on demand: what it does is the job's name. It trains nothing and imports no torch.

succeed[-N]      N steps (5), then success           slow         200 steps of 50 ms; SIGTERM: checkpoint, exit 75
slow-N[-M]       as slow, N steps; the checkpoint that it writes when it is asked to stop takes M seconds
begin            takes no step until it is asked to stop; ends without a checkpoint
until[-N[-M]]    as slow, N steps (20); takes the last when a file `go` is in its directory
eat              waits for a file `eat` in its directory, then takes all the memory that there is
spill            prints the first row, warns of it, and dies of it after two steps
explain          ends with mask_invalid, explained   oom          ends with out_of_memory, explained
shrink-N[-PHASE] ends with out_of_memory in that phase (train) until it has taken N steps down the ladder
full-N           ends with disk_insufficient until N MiB are free
crash            exit 1 without a word               abort        SIGABRT
die-N[-M]        kills itself with SIGKILL at step N of its first attempt, then resumes; M ms for each step after that
killer           kills itself in every attempt       exit0        exit 0 without a result
liar             exit 3 with a result of success     garbage      noise among its events, then success
hang             never says a word                   deaf[-N]     as slow, but ignores SIGTERM
freeze           15 quick steps, then nothing more   plod         15 quick steps, then one of twelve seconds
fallback[-slowly]   backend_unavailable under unsloth (once it is asked to stop), success under transformers
mismatch[-N]     precision_mismatch under unsloth, after N steps (none), success under transformers
late             as succeed, with its output; then it crashes while it ends
unlearned        as succeed, and says that nothing was learned
rungs-N      30 steps of 0.1 s, with evaluations; 4 and 5 wait at step 10 until they are asked to stop, and 4 at its
             fourth for a file `go`
report[-N[-go]]   as succeed, and evaluates and predicts at each step; with `go`, it takes its last step when a file
             `go` is in its directory
regress      ends worse than it began, explained
hostile[-go]     escape sequences, markup and forged lines in all that it says, then an explanation of that kind;
                 with `go`, that waits for a file `go` in its directory
torn             half a result file, then exit 0       make[-N]     as succeed, and leaves what such a job makes
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).parents[1]))
from honed.job.event import EventWriter
from honed.system import durable, quote
from honed.system.layout import JobLayout
from honed.worker import gate as gates
from honed.worker.gate import Gate
from honed.worker.pulse import Pulse
from zoo import plain


def be_hostile(events_path: Path, result_path: Path, go: Path | None) -> int:
    """Put a text that must never be printed unescaped wherever a text can occur."""
    sys.path.insert(0, str(Path(__file__).parent))
    from hostile import ALL, FORMULAS, LONG

    text = ALL + LONG
    shown = dict.fromkeys(("model_dtype", "config_dtype", "embedding_dtype", "quantization", "when"), text)
    rows = [{"sample_index": 0, "prompt": text, "ground_truth": ALL, "prediction": ALL + "!", text: text}]
    formulas = [
        {"sample_index": number, "prompt": each, "ground_truth": each, "prediction": each}
        for number, each in enumerate(FORMULAS, 1)
    ]
    with events_path.open("ab") as file:
        for data in (
            {"event": "stage", "stage": text},
            {"event": "log", "level": "warning", "message": text, "code": text},
            {"event": "step", "step": text, "num_steps": text, "loss": text, "eta_sec": text, "epoch": text},
            {"event": "step", "step": 3, "num_steps": 9, "loss": 1.0, "eta_sec": 5.0, "epoch": 0.5},
            {"event": "evaluation", "step": 3, "metrics": {"eval_loss" + text: text, ALL: 1.0}},
            {"event": "resumed", "step": ALL, "path": ALL},  # first, since it deletes predictions
            {"event": "predictions", "step": 3, "num_failed": text, "rows": rows, "scores": {ALL: 1.0}},
            {"event": "predictions", "step": 4, "num_failed": 0, "rows": formulas},
            {"event": "audit", **shown, "counts": [{"role": text, "dtype": ALL}], "mended": [ALL]},
            {"event": "data", "num_train": ALL, "num_" + ALL: ALL, "lengths": ALL},
            {"event": "example", "segments": [{"text": ALL, "trained": True}]},
            {"event": "fallback", "from": ALL, "to": ALL, "reason": ALL},
            {"event": "memory", "when": ALL, "weights_bytes": 10**400, "device_peak_bytes": ALL},
            {"event": "started", "pid": ALL, "versions": {ALL: ALL}, "backend": ALL},
            {"event": "artifact", "name": ALL, "path": ALL},
            {"event": ALL, "x": ALL},
        ):
            file.write(json.dumps({"time": time.time(), **data}).encode() + b"\n")
    print(ALL.encode(errors="replace").decode(), flush=True)
    while go is not None and not go.exists():
        time.sleep(0.05)
    error = {"code": "mask_invalid", "message": text, "hint": text}
    result_path.write_text(
        json.dumps(
            {
                "outcome": "failed",
                "step": ALL,
                "metrics": {ALL: ALL, "loss": 10**400},
                "error": error,
                "artifacts": {"output_dir": ALL, "merged": [ALL]},
            }
        )
    )
    return 81


def main() -> int:
    if os.environ.get("RANK", "0") != "0":
        return 0  # what there is to write, rank 0 writes
    job_dir, number, backend = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[4]
    layout = JobLayout(job_dir)
    attempt = layout.attempt(number)
    plan = json.loads(layout.plan_path.read_bytes())
    name = plan["job"]["name"].split(".")[0]
    faulthandler.enable()
    pulse = Pulse(path=attempt.pulse_path)
    events = EventWriter(attempt.events_path, on_event=pulse.report)
    asked: list[int] = []
    signal.signal(signal.SIGTERM, signal.SIG_IGN if name.startswith("deaf") else lambda *_: asked.append(1))
    print("the libraries chatter")
    events.emit("started", pid=os.getpid(), versions={}, backend=backend)

    def result(outcome: str, step: int, error: dict[str, str] | None = None, **facts: Any) -> None:
        artifacts = {"output_dir": str(layout.output_dir), "merged": None}
        value = {
            "outcome": outcome,
            "step": step,
            "metrics": {"train_loss": 0.5},
            "artifacts": artifacts,
            "error": error,
            **facts,
        }
        durable.write_json(attempt.result_path, value)

    def beat() -> None:
        pulse.beat()
        if asked:
            result("interrupted", 0, {"code": "interrupted", "message": "stopped on request", "hint": ""})
            sys.exit(75)

    gates.FILES_INTERVAL_SEC = 0.2
    gate = Gate(layout, number, beat=beat)
    if gate.is_closed:
        events.emit("stage", stage="staged")
        gate.wait()
    with (job_dir / "starts.txt").open("a") as file:
        file.write(f"{number} {backend} {os.environ.get('CUDA_VISIBLE_DEVICES')}\n")
    if name != "hang":
        events.emit("stage", stage="train")
    progress_path = layout.checkpoints_dir / "step"
    layout.checkpoints_dir.mkdir(exist_ok=True)

    def stop(step: int, save_sec: float) -> NoReturn:
        time.sleep(save_sec)
        events.emit("checkpoint", step=step, path=str(progress_path), num_bytes=progress_path.stat().st_size)
        result("interrupted", step, {"code": "interrupted", "message": f"stopped at step {step}", "hint": ""})
        sys.exit(75)

    def steps(
        count: int, *, pause: float = 0.0, die_at: int | None = None, save_sec: float = 0.0, go: Path | None = None
    ) -> int:
        first = int(progress_path.read_text()) if progress_path.exists() else 0
        if first:
            events.emit("resumed", step=first, path=str(progress_path))
        for step in range(first + 1, count + 1):
            time.sleep(pause)
            while step == count and go is not None and not go.exists():
                if asked:
                    stop(step - 1, save_sec)
                pulse.beat()
                time.sleep(0.05)
            pulse.beat()
            events.emit("step", step=step, num_steps=count, epoch=step / count, loss=1 / step, eta_sec=count - step)
            if step == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            with contextlib.suppress(OSError):  # on a full disk the previous one stays
                durable.write(progress_path, str(step).encode())
            if asked:
                stop(step, save_sec)
        return count

    word, _, argument = name.partition("-")
    match word:
        case "succeed":
            events.emit("memory", when="built", weights_bytes=3 * 2**20, adapter_bytes=2**20)
            events.emit("memory", when="trained", weights_bytes=3 * 2**20, adapter_bytes=2**20, optimizer_bytes=2**21)
            result("succeeded", steps(int(argument or 5)))
        case "flood":  # events as fast as it can
            until, step = time.monotonic() + float(argument), 0
            while time.monotonic() < until and not asked:
                pulse.beat()
                for step in range(step + 1, step + 1001):  # noqa: B020
                    events.emit("step", step=step, num_steps=10**9, epoch=0.1, loss=1.0, learning_rate=0.1, grad_norm=1)
                events.emit("evaluation", step=step, epoch=0.1, metrics={"eval_loss": 1.0})
            result("succeeded", step)
        case "late":
            layout.output_dir.mkdir()
            result("succeeded", steps(5))
            os.kill(os.getpid(), signal.SIGSEGV)
        case "unlearned":
            result("succeeded", steps(5), remark="the loss did not fall: 2.3 in the first steps, 2.3 …")
        case "rungs":  # its evaluation loss is its learning rate

            def waits(step: int) -> bool:
                return (argument == "4" and step == 4 and not (job_dir / "go").exists()) or (
                    argument in {"4", "5"} and step == 10
                )

            first = int(progress_path.read_text()) if progress_path.exists() else 0
            if first:
                events.emit("resumed", step=first, path=str(progress_path))
            for step in range(first + 1, 31):
                time.sleep(0.1)
                while number == 1 and not asked and waits(step):
                    pulse.beat()
                    time.sleep(0.05)
                pulse.beat()
                events.emit("step", step=step, num_steps=30, epoch=step / 30, loss=1.0, eta_sec=30 - step)
                metrics = {"eval_loss": plan["spec"]["training"]["learning_rate"]}
                events.emit("evaluation", step=step, epoch=step / 30, metrics=metrics)
                durable.write(progress_path, str(step).encode())
                if asked:
                    events.emit("checkpoint", step=step, path=str(progress_path), num_bytes=1)
                    result("interrupted", step, {"code": "interrupted", "message": "stopped", "hint": ""})
                    return 75
            result("succeeded", 30, metrics={"eval_loss": plan["spec"]["training"]["learning_rate"]})
        case "report":
            number_of_steps, _, is_held = argument.partition("-")
            count = int(number_of_steps or 5)
            for step in range(count + 1):
                events.emit("evaluation", step=step, epoch=step / count, metrics={"eval_loss": 1 / (step + 1)})
                rows = [
                    {
                        "sample_index": index,
                        "prompt": f"Frage {index}: wie weit ist es bis Köln?",
                        "ground_truth": "weit",
                        "prediction": f"nach {step} Schritten",
                    }
                    for index in range(2)
                ]
                events.emit("predictions", step=step, epoch=step / count, num_failed=0, rows=rows)
                time.sleep(0.02)
            result("succeeded", steps(count, pause=0.02, go=job_dir / "go" if is_held else None))
        case "make":
            made = Path(plan["output_dir"])
            (plain.write_adapter if plan["spec"]["lora"] else plain.write_base_model)(made)
            durable.write_json(made / "honed.json", {"job": plan["job"]})
            result("succeeded", steps(int(argument or 1), pause=0.05))
        case "slow" | "deaf":
            count, _, save = argument.partition("-")
            result("succeeded", steps(int(count or 200), pause=0.05, save_sec=float(save or 0)))
        case "until":
            count, _, save = argument.partition("-")
            result("succeeded", steps(int(count or 20), pause=0.05, save_sec=float(save or 0), go=job_dir / "go"))
        case "begin":
            while not asked:
                pulse.beat()
                time.sleep(0.05)
            result("interrupted", 0, {"code": "interrupted", "message": "stopped on request", "hint": ""})
            return 75
        case "eat":
            steps(1)
            while not (job_dir / "eat").exists():
                time.sleep(0.05)
            eaten = []
            while True:
                eaten.append(b"x" * 2**22)
        case "die":
            die_at, _, pause_ms = argument.partition("-")
            if number == 1:
                steps(10, die_at=int(die_at))
            result("succeeded", steps(10, pause=int(pause_ms or 0) / 1000))
        case "killer":
            steps(10, die_at=int(progress_path.read_text()) + 1 if progress_path.exists() else 1)
        case "spill":
            row = Path(plan["spec"]["datasets"][0]["path"]).read_text().splitlines()[0]
            print(row)
            events.log("warning", f"the first row: {quote.mark(row)}")
            steps(2)
            raise ValueError(row)
        case "explain":
            result("failed", 0, {"code": "mask_invalid", "message": "trained on the prompt", "hint": "see preview"})
            return 81
        case "regress":
            message = "exact_match fell from 0.950 to 0.150, by more than 0.1"
            result("failed", steps(3), {"code": "regressed", "message": message, "hint": "the output is kept"})
            return 86
        case "oom":
            result("failed", 3, {"code": "out_of_memory", "message": "no memory", "hint": ""})
            return 83
        case "shrink":
            taken = json.loads(layout.adjustments_path.read_bytes()) if layout.adjustments_path.exists() else []
            wanted, _, phase = argument.partition("-")
            if len(taken) >= int(wanted):
                result("succeeded", steps(3))
                return 0
            message = {"code": "out_of_memory", "message": "no memory", "hint": ""}
            result("failed", 0, message, phase=phase or "train")
            return 83
        case "full":
            path, found = layout.checkpoints_dir, os.statvfs(layout.checkpoints_dir)
            if found.f_bavail * found.f_frsize < int(argument) * 2**20:
                message = {
                    "code": "disk_insufficient",
                    "message": f"{path}: the disk is full",
                    "hint": "free disk space",
                }
                result("failed", steps(2), message, needed_bytes=int(argument) * 2**20)
                return 73
            result("succeeded", steps(5))
        case "crash":
            return 1
        case "abort":
            os.abort()
        case "exit0":
            steps(3)
        case "liar":
            result("succeeded", 3)
            return 3
        case "hostile":
            return be_hostile(attempt.events_path, attempt.result_path, job_dir / "go" if argument == "go" else None)
        case "torn":
            attempt.result_path.write_text('{"outcome": "succ')
        case "garbage":
            with attempt.events_path.open("ab") as file:
                file.write(b"\x00\x00\n[1, 2]\nnot json\n" + b"{" * 5000 + b"\n" + os.urandom(2000) + b"\n")
                file.write(b'{"event": "step", "time": 1, "step": "many", "loss": "NaN", "epoch": [1]}\n')
                for when in (b"NaN", b"1e20", b"-5", b"9" * 400):
                    file.write(b'{"event": "log", "time": ' + when + b', "message": "x"}\n')
                file.write(b'{"event": "l\\ud800g", "time": 1, "message": "\\udfff"}\n')
                file.write(b'{"event": "evaluation", "time": 1, "metrics": {"\\ud800": 1' + b"0" * 30 + b"}}\n")
            result("succeeded", steps(3))
        case "manystep":
            events.emit("step", step="many", num_steps=None, loss=[])
            return 1
        case "badresult":
            value = {"outcome": "failed", "step": "x", "metrics": [1], "artifacts": [1], "error": {"code": 7}}
            durable.write_json(attempt.result_path, value)
            return 1
        case "freeze":
            result("succeeded", steps(15, pause=0.02))
            while number == 1:
                time.sleep(1)
        case "plod":
            steps(15, pause=0.02)
            for _ in range(20):  # the batches of one long step, without events
                time.sleep(0.6)
                pulse.beat()
            result("succeeded", steps(16))
        case "hang":
            while True:
                time.sleep(1)
        case "fallback":
            if backend == "unsloth":
                while argument == "slowly" and not asked:
                    time.sleep(0.05)
                result("failed", 0, {"code": "backend_unavailable", "message": "no vision on CPU", "hint": ""})
                return 69
            result("succeeded", steps(3))
        case "mismatch":
            if backend == "unsloth":
                message = "planned bf16=True fp16=False, but the trainer has bf16=False fp16=False"
                step = steps(int(argument or 0))
                result("failed", step, {"code": "precision_mismatch", "message": message, "hint": ""})
                return 80
            result("succeeded", steps(3))
        case _:
            raise SystemExit(f"no behaviour {name!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
