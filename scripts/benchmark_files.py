"""Benchmark of loads, checkpoints, resumes and outputs, beside another version of honed.

    scripts/bench files --beside TREE [--size 2000] [--dtype bfloat16] [--optim sgd] [--pairs 5]
    scripts/bench files --beside TREE --small [--pairs 10]      a whole small job (LoRA), stage by stage

TREE is another checkout with its own .venv, such as a worktree of an earlier commit after `scripts/setup`. A pair is a
job of each version, in turn. A job is two attempts: one step of full fine-tuning with a checkpoint and an output, and
one that resumes from it. CPU seconds are those of all threads of the worker; a ratio is of one pair. Files are in the
page cache, and writes include the sync.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import plan_document

#: What is measured of a job with large files: its name, module, class and function. Resumes are of three parts.
PARTS = (
    ("load of the base", "honed.worker.model.load", "", "load"),
    ("checkpoint", "honed.worker.train.trainer", "Trainer", "_save_checkpoint"),
    ("resume", "honed.worker.train.checkpoint", "", "find"),
    ("resume", "honed.worker.train.trainer", "Trainer", "_load_from_checkpoint"),
    ("resume", "honed.worker.train.trainer", "Trainer", "_load_optimizer_and_scheduler"),
    ("output", "honed.worker.model.export", "", "export"),
)
SIZES = {"float32": 4, "bfloat16": 2}
HIDDEN, INTERMEDIATE = 4096, 14336
#: Parameters of a layer, with four matrices of attention and three of the MLP.
LAYER = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INTERMEDIATE


# --- one attempt, in a process of its own, of either version ----------------------------------------------------------


class Clock:
    """The wall and CPU seconds of each part, and those of the stages between their begins."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self.found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._stage, self._began = "start", (0.0, 0.0)

    def wrap(self, name: str, owner: Any, function: str) -> None:
        inner = getattr(owner, function)

        @functools.wraps(inner)
        def measured(*args: Any, **kwargs: Any) -> Any:
            began = time.monotonic(), time.process_time()
            try:
                result = inner(*args, **kwargs)
                if name == "checkpoint":
                    args[0].finish_save()  # wait until it is in place
                return result
            finally:
                self._add(name, began)

        setattr(owner, function, measured)

    def _add(self, name: str, began: tuple[float, float]) -> None:
        sums = self.found[name]
        sums[0] += time.monotonic() - began[0]
        sums[1] += time.process_time() - began[1]

    def enter(self, stage: str) -> None:
        self._add(self._stage, self._began if self._stage != "start" else (time.monotonic(), 0.0))
        self._stage, self._began = stage, (time.monotonic(), time.process_time())

    def end(self) -> None:
        self.enter("end")
        self._place.write_text(json.dumps(self.found))


def attempt(directory: Path, number: int, place: Path, *, by_stage: bool) -> int:
    """Run one attempt of a job, and write what its parts took."""
    import importlib

    from honed.worker import __main__ as worker
    from honed.worker import imports

    clock = Clock(place)
    if by_stage:
        from honed.worker.recipe.base import Run

        stage = Run.stage

        def entered(run: Run, name: str) -> None:
            clock.enter(name)
            stage(run, name)

        Run.stage = entered  # type: ignore[method-assign]
    else:
        from honed.worker.assignment import read

        imports.prepare(read(directory, number))
        for name, module, kind, function in PARTS:
            found = importlib.import_module(module)
            clock.wrap(name, getattr(found, kind) if kind else found, function)
    try:
        sys.argv = ["honed.worker", str(directory), str(number)]
        return worker.main()
    finally:
        clock.end()


def plan(directory: Path, keys: dict[str, Any]) -> None:
    """Create a job's directory with its plan, as this version's daemon does."""
    from honed.inputs import basemodel
    from honed.plan import plan
    from honed.spec import jobfile
    from honed.spec.config import Config
    from honed.system import installed
    from honed.system.device import cpu

    directory.mkdir()
    parsed = jobfile.validate({"backend": "transformers", "predictions": {"sample_frequency": "off"}, **keys})
    model = Path(keys["base_model"])
    planned = plan.make(parsed, basemodel.inspect(model), cpu(), config=Config(), installed=installed.look())
    plan_document.write(directory, parsed, planned)


# --- pairs ------------------------------------------------------------------------------------------------------------


def of_job(python: Path, root: Path, keys: dict[str, Any], *, is_small: bool) -> dict[str, list[float]]:
    """Run a job with a version's Python; return wall and CPU seconds of each part."""
    directory, place = root / "job", root / "times"
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    found: dict[str, list[float]] = {}

    def call(*words: str) -> list[float]:
        began = time.monotonic()
        command = [str(python), __file__, "--of", str(directory), *words]
        process = subprocess.Popen(
            command, env=environment, cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        assert process.stderr is not None
        told = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)}\n{told.decode()[-4000:]}")
        return [time.monotonic() - began, usage.ru_utime + usage.ru_stime]

    call("--keys", json.dumps(keys))
    try:
        for number in (1,) if is_small else (1, 2):
            whole = call("--attempt", str(number), "--place", str(place), *(["--small"] if is_small else []))
            for name, each in json.loads(place.read_text()).items():
                if number == 1 or name == "resume":
                    found[name] = each
            if is_small:
                found["whole job"] = whole
    finally:
        shutil.rmtree(directory)
    return found


def build(root: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Build the base model and the rows; return the keys of the job."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from zoo.model import build_checkpoint

    rows = root / "train.jsonl"
    rows.write_text(json.dumps({"prompt": "What is one and one?", "completion": "Two."}) + "\n")
    keys: dict[str, Any] = {"base_model": str(root / "model"), "datasets": [{"path": str(rows)}]}
    if options.small:
        rows.write_text(rows.read_text() * 64)
        build_checkpoint(root / "model", "llama")
        return {**keys, "lora": {}, "training": {"max_steps": 20, "per_device_train_batch_size": 8}}
    build_checkpoint(
        root / "model",
        "llama",
        dtype=options.dtype,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_layers=max(1, round(options.size * 1e6 / SIZES[options.dtype] / LAYER)),
        num_key_value_heads=4,
    )
    training = {
        "max_steps": 1,
        "per_device_train_batch_size": 1,
        "optim": options.optim,
        "gradient_checkpointing": False,
    }
    kept = "float32" if options.dtype == "float32" else "none"
    return {**keys, "dtype": options.dtype, "master_weights": kept, "training": training}


def show(pairs: list[tuple[dict[str, list[float]], dict[str, list[float]]]]) -> None:
    print(
        "| | CPU s before | after | ratio, pair by pair | wall s before | after | ratio |\n"
        "|---|---|---|---|---|---|---|"
    )
    for name in pairs[0][1]:
        cells = [name]
        for index in (1, 0):
            both = [(before.get(name, [0.0, 0.0])[index], after[name][index]) for before, after in pairs]
            ratios = [after / before for before, after in both if before]
            cells += [f"{statistics.median(each):.2f}" for each in zip(*both, strict=True)]
            cells += [f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})" if ratios else ""]
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path, metavar="TREE", help="the other version's checkout")
    parser.add_argument("--size", type=float, default=2000, help="MB of weights")
    parser.add_argument("--dtype", choices=SIZES, default="bfloat16")
    parser.add_argument("--optim", default="sgd", help="sgd has no state: a checkpoint is the weights alone")
    parser.add_argument("--pairs", type=int)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--dir", type=Path, help="where to write; default: the system's temporary directory")
    for name in ("--of", "--keys", "--attempt", "--place"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.keys:
        plan(Path(options.of), json.loads(options.keys))
        return
    if options.attempt:
        sys.stdout.flush()
        status = attempt(Path(options.of), int(options.attempt), Path(options.place), by_stage=options.small)
        os._exit(status)
    if options.beside is None:
        parser.error("--beside is missing")
    with tempfile.TemporaryDirectory(prefix="honed-files-", dir=options.dir) as name:
        root = Path(name)
        keys = build(root, options)
        pythons = [options.beside.absolute() / ".venv/bin/python", Path(sys.executable)]
        num_pairs = options.pairs or (10 if options.small else 5)
        print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {num_pairs} pairs")
        of_job(pythons[0], root, keys, is_small=options.small)  # its files come into the page cache
        pairs = []
        for number in range(num_pairs):
            order = [0, 1] if number % 2 == 0 else [1, 0]
            found = {each: of_job(pythons[each], root, keys, is_small=options.small) for each in order}
            pairs.append((found[0], found[1]))
        show(pairs)


if __name__ == "__main__":
    main()
