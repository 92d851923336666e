"""What a worker saves, by its own code and without a model: checkpoints, one of them again, and an output over nothing
and over an earlier one. `python saves.py JOB_DIR` saves the whole story; each word on stdout is one save that is done.

What must hold, whatever happens to that process, is in `violations`.
"""

from __future__ import annotations

import collections
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crash import traced
from crash.scene import Hit, Point
from honed.system.layout import JobLayout, Layout
from honed.worker import assignment
from honed.worker.assignment import Assignment
from honed.worker.model import export
from honed.worker.train import checkpoint
from honed.worker.train.sealing import Sealing

#: What changes something, or makes it durable. Opening for reading is in it, too: it can fail.
CALLS = (
    "openat",
    "write",
    "sendfile",
    "fsync",
    "rename",
    "renameat2",
    "unlink",
    "unlinkat",
    "mkdir",
    "rmdir",
    "chmod",
    "close",
)
OUTPUT = "output"
PROCESSOR = "preprocessor_config.json"
#: Of an output and of a checkpoint; each has a directory in it.
MODEL_FILES = ("adapter_model.safetensors", "merged/model.safetensors")
#: Files of an output that have no word: they are the base's, or made of its files.
OTHERS = ("tokenizer.json", "generation_config.json")
CHECKPOINT_FILES = ("adapter_model.safetensors", "optimizer.pt", checkpoint.REQUIRED, "random/state.pth")


@dataclass(frozen=True)
class Save:
    """One thing that is saved; its word is in every file of it."""

    place: str
    word: str

    def data(self, name: str) -> bytes:
        return f"{self.word} {name}\n".encode() * 1000


STORY = (
    Save("checkpoint-1", "first"),
    Save("checkpoint-2", "second"),
    Save(OUTPUT, "third"),
    Save("checkpoint-2", "fourth"),
    Save(OUTPUT, "fifth"),
)


def prepare(root: Path) -> None:
    """A job's directory as a worker finds it; its output is asked for in a place that is not there yet."""
    layout = job_layout(root)
    layout.checkpoints_dir.mkdir(parents=True)
    model_dir = root / "model"
    model_dir.mkdir()
    for name in (PROCESSOR, "tokenizer.json"):
        (model_dir / name).write_text("{}")
    spec = {"base_model": str(model_dir), "datasets": [{"path": "/d"}], "lora": {"r": 4}}
    precision = {
        "load_dtype": "float32",
        "compute_dtype": None,
        "bf16": False,
        "fp16": False,
        "adapter_dtype": "float32",
        "quantization": "none",
        "attn_implementation": "sdpa",
        "reasons": {},
    }
    plan = {
        "job": {"id": 1, "name": "a", "instance": "/i"},
        "date": "2026-11-29T10:00:00+00:00",
        "spec": spec,
        "base_model_path": str(model_dir),
        "output_dir": str(root / "out" / OUTPUT),
        "backend": {"name": "transformers", "reasons": []},
        "precision": precision,
    }
    layout.plan_path.write_text(json.dumps(plan))


def job_layout(root: Path) -> JobLayout:
    return Layout(root).job(1)


def tell(job_dir: Path, *, done: Callable[[Save], None] = lambda _save: None) -> None:
    """Save everything, in order."""
    job = assignment.read(job_dir, 1)
    for save in STORY:
        if save.place == OUTPUT:
            save_output(job, save)
        else:
            save_checkpoint(job.layout.checkpoints_dir, save)
        done(save)


@dataclass(frozen=True)
class Saved:
    """A model or a tokenizer, as far as an export goes."""

    save: Save
    names: Sequence[str]

    def modules(self) -> Iterable[Any]:
        return ()

    def save_pretrained(self, directory: Path) -> None:
        write(directory, self.names, self.save)


def save_output(job: Assignment, save: Save) -> None:
    facts = {"metrics": {}, "word": save.word}
    model, tokenizer = Saved(save, MODEL_FILES), Saved(save, ())
    export.export(
        job,
        model,
        tokenizer,
        facts,
        progress=lambda _done, _of: None,
        prove=lambda _made: None,
        compare=lambda _merged: "",
    )


def save_checkpoint(checkpoints_dir: Path, save: Save) -> None:
    """What the trainer does, with `save_total_limit: 1`."""
    made = checkpoint.new_dir(checkpoints_dir) / save.place
    write(made, CHECKPOINT_FILES, save)
    progress = checkpoint.Progress(data_hashes={"word": save.word})
    sealing = Sealing(beat=lambda: None)
    sealing.start(1, lambda beat: checkpoint.commit(made, progress, checkpoints_dir, limit=1, keep=set(), beat=beat))
    sealing.wait()


def write(directory: Path, names: Sequence[str], save: Save) -> None:
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(save.data(name))


# -- what must hold ----------------------------------------------------------------------------------------------------


def violations(root: Path, num_done: int) -> list[str]:
    """What is wrong after so many saves were said to be done, and once all of them are made again."""
    layout = job_layout(root)
    job_dir, output_dir = layout.dir, root / "out" / OUTPUT
    found = []
    allowed = words(is_output=True, num_done=num_done)
    if (word := output_word(output_dir)) not in allowed:
        found.append(f"the output is {word}, not one of {allowed}")
    whole, set_aside = checkpoint.find(layout.checkpoints_dir)
    allowed = words(is_output=False, num_done=num_done)
    if (word := None if whole is None else checkpoint_word(whole)) not in allowed:
        found.append(f"the checkpoint is {word}, not one of {allowed}")
    found += [f"{each.name} was set aside: {each.why}" for each in set_aside]
    tell(job_dir)
    if (word := output_word(output_dir)) != "fifth":
        found.append(f"the output that is made again is {word}")
    left = {path.name for place in (output_dir.parent, layout.checkpoints_dir) for path in place.iterdir()}
    if left != {OUTPUT, "checkpoint-2"} and not set_aside:
        found.append(f"beside what is made again lies {left}")
    return found


def words(*, is_output: bool, num_done: int) -> list[str | None]:
    """What may lie in the place: the last that is done, or the one that was being made."""
    ours = [(number, save.word) for number, save in enumerate(STORY) if (save.place == OUTPUT) == is_output]
    last = [word for number, word in ours if number < num_done][-1:] or [None]
    return [*last, *(word for number, word in ours if number == num_done)]


def output_word(output_dir: Path) -> str | None:
    """The word of a whole output; None where there is nothing."""
    if not os.path.lexists(output_dir):
        return None
    try:
        word = str(json.loads((output_dir / export.MANIFEST).read_bytes())["word"])
    except (OSError, ValueError, KeyError) as error:
        return f"torn: {error}"
    others = {export.MANIFEST, "README.md", PROCESSOR, *OTHERS}
    fault = fault_of(output_dir, MODEL_FILES, Save(OUTPUT, word), but=others)
    return fault or word


def checkpoint_word(whole: checkpoint.Checkpoint) -> str:
    save = Save(whole.path.name, whole.progress.data_hashes["word"])
    return fault_of(whole.path, CHECKPOINT_FILES, save, but={checkpoint.MANIFEST}) or save.word


def fault_of(directory: Path, names: Sequence[str], save: Save, *, but: set[str]) -> str | None:
    there = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    if there != {*names, *but}:
        return f"torn: {sorted(there)}"
    torn = [name for name in names if (directory / name).read_bytes() != save.data(name)]
    return f"torn: {torn}" if torn else None


# -- the process -------------------------------------------------------------------------------------------------------


def run(root: Path, *, tracer: Sequence[str] = (), mutant: str | None = None) -> int:
    """The whole story in a process of its own; see mutants.py for `mutant`. Returns how many saves it said
    were done."""
    command = [sys.executable, str(Path(__file__)), str(job_layout(root).dir)]
    ended = traced.run(command, mutant=mutant, tracer=tracer)
    return len(ended.stdout.split())


def hit_arguments(root: Path, hit: Hit) -> tuple[str, ...]:
    """Files are synced by threads, and strace counts the calls of each by itself."""
    return ("-f", *hit.arguments(root))


def points_of(directory: Path, *, mutant: str | None = None) -> list[Point]:
    """What an undisturbed process calls on files of its own, in order: the n-th call of a kind on one path each."""
    counts: collections.Counter[tuple[str, str, str]] = collections.Counter()
    found: dict[tuple[str, int, str], Point] = {}
    for each in calls_of(directory, mutant=mutant):
        if each.paths:
            key = each.thread, each.call, each.paths[0]
            counts[key] += 1
            point = Point(each.call, counts[key], each.paths[0])
            found.setdefault((point.call, point.number, point.path), point)
    return list(found.values())


@dataclass(frozen=True)
class Call:
    """One system call that came to its end, or began."""

    thread: str
    call: str
    paths: tuple[str, ...]  #: those below the root, relative to it
    text: str


def calls_of(directory: Path, *, mutant: str | None = None) -> list[Call]:
    """All calls of an undisturbed process, in order."""
    root = directory / "undisturbed"
    prepare(root)
    trace_path = directory / "undisturbed.trace"
    arguments = ("-f", "-q", "-y", "-o", str(trace_path), "-e", f"trace={','.join(CALLS)}")
    assert run(root, tracer=arguments, mutant=mutant) == len(STORY)
    assert violations(root, len(STORY)) == []
    shutil.rmtree(root)
    traced.wait_for_end(trace_path)
    found = []
    for line in trace_path.read_text(errors="replace").splitlines():
        if (match := re.match(r"(\d+) +(\w+)\((.*)", line)) is not None:
            text = match[3]
            if match[2] == "unlinkat":  # a name in a directory that is open
                text = re.sub(r'\d+<([^<>]*)>, "([^"/][^"]*)"', r'"\1/\2"', text)
            paths = re.findall(rf"[\"<]{re.escape(str(root))}(?:/([^\"<>]*))?[\">]", text)
            found.append(Call(match[1], match[2], tuple(paths), match[3]))
    return found


def unsynced(calls: Sequence[Call]) -> set[str]:
    """What was changed and not synced when it was renamed into a place, or when a save was said to be done. So it is by
    the book; what a file system does unasked does not count. That something goes need not be durable."""
    dirty: set[str] = set()
    found: set[str] = set()
    num_said = 0
    for each in calls:
        path = each.paths[0] if each.paths else ""
        match each.call:
            case "fsync":
                dirty.discard(path)
            case "write" if each.text.startswith("1<") and f'"{STORY[num_said % len(STORY)].word}' in each.text:
                found |= dirty  # a save is said to be done
                num_said += 1
            case "write" | "sendfile" | "chmod" if each.paths:
                dirty.add(path)
            case "openat" if each.paths and "O_CREAT" in each.text:
                dirty |= {path, os.path.dirname(path)}  # noqa: PTH120 - text
            case "mkdir" if each.paths and each.text.endswith("= 0"):
                dirty |= {path, os.path.dirname(path)}  # noqa: PTH120
            case "rmdir" | "unlinkat":
                dirty.discard(path)
            case "rename" | "renameat2" if each.paths and not each.paths[1].endswith(".old"):
                moved = {other for other in dirty if f"{other}/".startswith(f"{path}/")}
                found |= moved
                dirty -= moved
                dirty |= {os.path.dirname(other) for other in each.paths}  # noqa: PTH120
    assert num_said == len(STORY)
    return found


def try_hit(directory: Path, hit: Hit, *, mutant: str | None = None) -> list[str]:
    """One cell of the matrix: the process is hit once, looked at, and started again."""
    root = directory / re.sub(r"\W+", "-", str(hit))
    prepare(root)
    num_done = run(root, tracer=hit_arguments(root, hit), mutant=mutant)
    try:
        return violations(root, num_done)
    except Exception as error:  # noqa: BLE001 - what cannot even be read is the gravest violation
        return [f"cannot be looked at: {error!r}"]
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    traced.begin()
    tell(Path(sys.argv[1]), done=lambda save: print(save.word, flush=True))
