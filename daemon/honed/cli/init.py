"""`honectl init`: a commented job file for a model and data that honed accepts, and that fits this machine.

The check that honed makes decides: its corrections are applied to a first guess until it passes, and then batches are
halved until the plan's estimate fits. Each of these changes is named in the file.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from honed.cli import convert, draft, schema, terminal
from honed.cli.instance import Instance
from honed.inputs import dataset as datasets
from honed.job.progress import gib
from honed.spec import problem, relative
from honed.spec.spec import DatasetSpec, is_hub_dataset
from honed.system import quote
from honed.system.error import HonedError, MemoryShortError, SpecError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from honed.check.checklist import Verdict

#: Corrections after which the check would still fail for a reason of its own.
MAX_ROUNDS = 12
#: Rows below which none are held out.
MIN_ROWS_HELD_OUT = 10
#: Rows from which on one epoch is enough to begin with.
MANY_ROWS = 20_000
#: Characters of a token of ordinary text, about; its JSON has more.
CHARS_PER_TOKEN = 3
LENGTHS = (512, 1024, 2048, 4096)

_METHODS = ("lora", "qlora", "full")
_COMMENTS = {
    "base_model": "A directory, a hub id (org/name), or job:NAME for the output of another job.",
    "quantization": "The base model's weights in 4 bits: less memory, somewhat slower.",
    "lora": "An adapter is trained. Without this section, all weights are.",
    "eval_split": "This share of the rows is held out, for eval_loss and predictions.",
    "training": "SFTConfig's own names; `man honed-job` lists all of them.",
    "training.num_train_epochs": "Passes over the data.",
    "training.learning_rate": "Peak; LoRA usually needs ten times that of full fine-tuning.",
    "training.gradient_accumulation_steps": "Batches of an optimizer step.",
    "training.max_length": "Tokens; longer rows are cut, counted and reported.",
    "predictions": "Answers to held-out rows, before, during and after training.",
}


@dataclass
class Wanted:
    """The answers of the user."""

    model: str
    data: list[str]
    method: str | None
    name: str


@dataclass
class Draft:
    """A job file in the making."""

    job: dict[str, Any]
    facts: list[str] = field(default_factory=list)  #: facts about the data
    changes: list[str] = field(default_factory=list)  #: corrections, and why


def init(instance: Instance, options: argparse.Namespace) -> int:
    wanted = _wanted(options)
    output = options.output or Path(f"{wanted.name}.yaml")
    if output.exists():
        raise UsageError(f"{output}: exists already", hint="give another -o, or delete that file")
    terminal.say("looks at the model, the data and this machine …", style="dim")
    draft_job = _first_guess(wanted)
    verdict = _settled(instance, draft_job, wanted.method)
    convert.write_new(output, rendered(draft_job, verdict))
    terminal.say(f"{output}: written", style="green")
    for line in [*draft_job.facts, *_of_plan(verdict), *draft_job.changes]:
        terminal.say(f"  {line}")
    draft.say_offers(instance, [verdict])
    terminal.say(f"next: honectl preview {output}; honectl trial {output}; honectl submit --wait {output}")
    return 0


# --- What is wanted ---------------------------------------------------------------------------------------------------


def _wanted(options: argparse.Namespace) -> Wanted:
    """Return the options, and the answers to questions where one is missing and a terminal is there."""
    can_ask = sys.stdin.isatty() and sys.stdout.isatty()
    missing = [f"--{key}" for key in ("model", "data") if not getattr(options, key)]
    if missing and not can_ask:
        raise UsageError(f"missing: {' and '.join(missing)}", hint="give them, or run honectl init in a terminal")
    model = _place(options.model) if options.model else _ask("Base model (a directory or a hub id)", _place)
    data = [_place(item) for item in options.data or []]
    if not data:
        data = [_ask("Training data (a file, a directory or a hub id)", _place)]
    method = options.method
    if missing and method is None:
        method = _ask(f"Method ({', '.join(_METHODS)}; Enter chooses by memory)", _method)
    return Wanted(model, data, method, options.name or _name(data[0]))


def _ask(question: str, convert_answer: Callable[[str], Any]) -> Any:
    while True:
        try:
            return convert_answer(input(f"{question}: ").strip())
        except EOFError as error:
            raise UsageError("the input ended") from error
        except UsageError as error:
            terminal.say(error.message, style="yellow")


def _method(answer: str) -> str | None:
    if answer and answer not in _METHODS:
        raise UsageError(f"one of {', '.join(_METHODS)}, or nothing")
    return answer or None


def _place(given: str) -> str:
    """Return the absolute path of a file or directory; a hub id stays one."""
    text, _ = relative.absolute(json.dumps({"output_dir": given}).encode(), ".json", Path.cwd())
    path = Path(json.loads(text)["output_dir"])
    if path.exists():
        return str(path)
    if given.startswith("job:") or (is_hub_dataset(given) and not given.startswith(".")):
        return given
    raise UsageError(f"{given or 'nothing'}: no such file or directory, and no hub id (org/name)")


def _name(path: str) -> str:
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(path).name.partition(".")[0]).strip("-._")
    return stem if stem and not stem.isdecimal() else f"job-{stem}".rstrip("-")


# --- The first guess --------------------------------------------------------------------------------------------------


def _first_guess(wanted: Wanted) -> Draft:
    made = Draft({})
    looks = [_look(made, path) for path in wanted.data]
    num_rows = None if any(look is None for look in looks) else sum(look[0] for look in looks if look)
    length = max((look[1] for look in looks if look), default=1024)
    is_full = wanted.method == "full"
    job: dict[str, Any] = {"name": wanted.name, "base_model": wanted.model}
    if wanted.method == "qlora":
        job["quantization"] = "4bit"
    if not is_full:
        job["lora"] = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
    job["datasets"] = [{"path": path} for path in wanted.data]
    training: dict[str, Any] = {
        "num_train_epochs": 1 if num_rows is not None and num_rows > MANY_ROWS else 3,
        "learning_rate": 1e-5 if is_full else 2e-4,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.03,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "max_length": length,
    }
    if num_rows is None or num_rows >= MIN_ROWS_HELD_OUT:
        job["eval_split"] = 0.05 if num_rows is None or num_rows >= 100 else 0.1 if num_rows >= 20 else 0.2
        training["eval_strategy"] = "epoch"
    job["training"] = training
    if "eval_split" in job:
        job["predictions"] = {"num_samples": 5, "max_new_tokens": 64}
    made.job = job
    return made


def _look(made: Draft, path: str) -> tuple[int, int] | None:
    """Return the number of rows of a data set, about, and a length that holds them; None before it is fetched."""
    if is_hub_dataset(path) and not Path(path).exists():
        made.facts.append(f"{path}: fetched from the hub when the job is submitted")
        return None
    try:
        seen = datasets.inspect(DatasetSpec(path=path), num_rows=200)
    except HonedError:
        return None  # for the check, which knows a correction
    sizes = [len(json.dumps(row, ensure_ascii=False)) for row in seen.rows]
    mean = sum(sizes) / len(sizes) if sizes else 0
    num_rows = seen.num_rows if seen.is_whole or not mean else round(seen.num_bytes / mean)
    about = "" if seen.is_whole else "about "
    media = f", {seen.num_attached} of the first with images, videos or sound" if seen.num_attached else ""
    made.facts.append(f"{path}: {about}{num_rows:,} rows of {seen.format}{media}")
    longest = max(sizes, default=0) / CHARS_PER_TOKEN
    length = next((item for item in LENGTHS if longest <= item), LENGTHS[-1])
    return num_rows, max(length, LENGTHS[-1] if seen.num_attached else 0)


# --- Corrections ------------------------------------------------------------------------------------------------------


def _settled(instance: Instance, made: Draft, method: str | None) -> Verdict:
    """Apply the check's corrections until it passes, then halve batches until the estimate fits."""
    for _ in range(MAX_ROUNDS):
        try:
            verdict = _checked(instance, made)
        except HonedError as error:
            if not error.fix or (isinstance(error, MemoryShortError) and _changes_method(error.fix, method)):
                raise
            fix = dict(error.fix)
            if fix.get("eval_split", ...) is None:  # what only held-out rows are for goes with them
                fix |= {"training.eval_strategy": None, "predictions": None}
            made.job = problem.mended(made.job, fix)
            why = re.sub(r"^line \d+: ", "", quote.show(error.message)).splitlines()[0]
            made.changes.append(f"{', '.join(problem.fix_lines(error.fix))}: {why}")
            continue
        training = made.job["training"]
        batch = training["per_device_train_batch_size"]
        if verdict.plan is None or verdict.plan.memory.fits or batch == 1:
            return verdict
        training["per_device_train_batch_size"] = batch // 2
        training["gradient_accumulation_steps"] *= 2
    raise SpecError("no job file was found that honed accepts", hint="honectl check explains each fault of a file")


def _changes_method(fix: dict[str, Any], method: str | None) -> bool:
    return method is not None and any(key == "quantization" or key.partition(".")[0] == "lora" for key in fix)


def _checked(instance: Instance, made: Draft) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="honectl-") as directory:
        path = Path(directory) / "job.yaml"
        path.write_text(convert.yaml_of(made.job), encoding="utf-8")
        return draft.check_one(instance, path)


# --- The job file -----------------------------------------------------------------------------------------------------


def _of_plan(verdict: Verdict) -> list[str]:
    """Return what is known about the job from its plan."""
    if (plan := verdict.plan) is None:
        needed = verdict.needs_fetch  # policy.hub allows it, or the check would have rejected the job
        what = f"{needed.repo_id} is fetched first" if needed else "it waits for another job"
        return [f"memory: not known yet, since {what}; honed plans the job then"]
    memory = plan.memory
    return [
        f"model: {plan.model.num_parameters:,} parameters, {plan.num_trained:,} of them trained, in "
        f"{plan.precision.load_dtype}",
        f"memory: about {gib(memory.total_bytes)} of {gib(memory.available_bytes)} on {plan.device.name}",
    ]


def rendered(made: Draft, verdict: Verdict) -> str:
    facts = [*made.facts, *_of_plan(verdict)]
    lines = ["# Made by honectl init.", *(f"#   {convert.one_line(fact)}" for fact in facts)]
    if made.changes:
        lines += [
            "# Chosen for this machine and data:",
            *(f"#   {convert.one_line(change)}" for change in made.changes),
        ]
    return schema.line() + "\n".join([*lines, ""]) + convert.yaml_of(made.job, _COMMENTS)
