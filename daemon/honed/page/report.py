"""The report of a job, `jobs/<id>/report.html`, and the index of all jobs, `var/lib/honed/index.html`.

The daemon starts this program, `python -m honed.page.report --root DIR ID…`, while jobs run and when they end
(daemon/reporter.py). Everything on a page comes from the database, the entry, plan.json and the submitted spec: files
that a data set or a model names are not opened, since that would happen with honed's rights.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import json
import os
import re
import stat
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from honed import __version__
from honed.job import query
from honed.job.database import Reader, timestamp
from honed.job.job import Job
from honed.job.progress import duration, figure, progress_text
from honed.job.spool import Spool
from honed.page import plot
from honed.page.page import document, facts, said, section, table, text
from honed.page.plot import Series
from honed.system import access, durable, niceness
from honed.system import layout as layouts
from honed.system.layout import Layout
from honed.system.log import guard_tracebacks, trace

#: Examples on a page, steps of one example, events, and characters of one text; the page says where the rest is.
MAX_SAMPLES, MAX_ROUNDS, MAX_EVENTS, MAX_TEXT = 20, 12, 200, 60_000
#: Characters of texts that are compared: the time grows with their square.
MAX_COMPARED = 600
#: Bytes of the submitted spec.
MAX_SPEC_BYTES = 1024 * 1024
#: Bytes of a thumbnail, encoded.
MAX_THUMBNAIL = 64 * 1024
#: Metrics of transformers' evaluation about its own speed; throughput has its own plot.
_NO_PLOT = re.compile(r"_(runtime|per_second|num_tokens)$")
#: Events that are shown in other parts of the page.
_ELSEWHERE = {"worse", "example", "samples", "data", "memory", "audit"}
_BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")
_PARTS = (
    ("base model", "weights_bytes"),
    ("adapter", "adapter_bytes"),
    ("gradients", "gradient_bytes"),
    ("optimizer", "optimizer_bytes"),
    ("activations", "activation_bytes"),
    ("media", "media_bytes"),
    ("in all", "total_bytes"),
    ("most on the GPU at a time", "device_peak_bytes"),
    ("most of main memory at a time", "resident_peak_bytes"),
    ("there is", "available_bytes"),
)

#: Jobs of each kind (running, queued, held, over) on the index: nobody reads a page of ten thousand.
MAX_INDEX_JOBS = 200


@dataclass(frozen=True)
class Story:
    """The data of one job's report."""

    job: Job
    shown: dict[str, Any]  #: as in `honectl show --json`
    figures: list[tuple[str, int, float, str]]  #: (name, step, value, created_at) in order; the last value of each step
    predictions: list[dict[str, Any]]
    events: list[dict[str, Any]]
    spec_text: str

    def last(self, kind: str) -> dict[str, Any]:
        """Return the latest event of a kind; empty if there is none."""
        return next((event for event in reversed(self.events) if event["event"] == kind), {})


def gather(spool: Spool, layout: Layout, job: Job) -> Story:
    reader = Reader(layout.database_path)
    try:
        figures, predictions, events = reader.figures(job.id), reader.predictions(job.id), reader.events(job.id)
    finally:
        reader.close()
    try:
        spec_text = _read(layout.job(job.id).spec_path)
    except OSError as error:
        spec_text = f"({error.strerror})"
    shown = query.show(spool, layout, str(job.id))
    return Story(job, shown, figures, predictions, events, spec_text)


def _read(path: Path) -> str:
    """Read a file from a directory where workers write, too. Links are not followed, or workers could have us read any
    file."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return "(not a file)"
        return file.read(MAX_SPEC_BYTES).decode(errors="replace")


# -- the page ---------------------------------------------------------------------------------------------------------


def render(story: Story, *, now: float) -> bytes:
    """Return the whole page."""
    return document(*parts(story, now=now))


def parts(story: Story, *, now: float) -> tuple[str, list[str]]:
    """Return the page's title, which is text, and its body, which is HTML."""
    job = story.job
    name = job.name or f"job {job.id}"
    kind, line = outcome(story)
    more = f" (the rest: honectl predictions {job.id})"
    body = [
        f'<header><h1><bdi>{text(name)}</bdi> <span class="dim">job {job.id}</span></h1>',
        f'<p class="outcome {kind}" dir="auto">{text(line)}</p>',
        f'<p class="dim small">honed {text(__version__)}; as of {text(timestamp(now)[:19])} UTC.'
        f"{'' if job.state.is_final else ' This page is made anew while the job goes on.'} "
        '<a href="../../index.html">All jobs</a></p></header>',
        facts(_overview(story, now=now)),
        *_warnings(story),
        *section("Figures", _plots(story)),
        *section("Predictions", _predictions(story, more)),
        *section("Precision", _precision(story)),
        *section("Memory", _memory(story)),
        *section("Data", _data(story)),
        *section("An example, as it is trained on", _example(story)),
        *section("What happened", _events(story)),
        *section("Attempts", [_attempts(story)]),
        *section("The spec, as it was dropped", [_block(story.spec_text)]),
        *section("Versions", [_versions(story)]),
        *section("How to load it", _loading(story)),
    ]
    return f"{name}: {line}", body


def outcome(story: Story) -> tuple[str, str]:
    """Return a job's outcome: its kind (good, bad, warn or empty), and one line of text."""
    job, error = story.job, story.shown["error"] or {}
    why = f": {error.get('evidence') or error['message']}" if error.get("message") else ""
    match job.state:
        case "succeeded" if job.remark:
            return "warn", f"succeeded, but {job.remark}"
        case "succeeded" if isinstance(worse := story.last("worse").get("found"), list):
            return "warn", f"succeeded, but worse than it began: {', '.join(map(str, worse))}"
        case "succeeded":
            return "good", f"succeeded{_ends(story)}"
        case "failed":
            return "bad", f"{job.outcome or 'failed'}{why}"
        case "cancelled":
            return "warn", "cancelled"
        case "running":
            progress = story.shown["progress"]
            return "", f"running: {progress_text(progress) if progress.get('step') is not None else _stage(story)}"
        case state:
            return "warn" if state == "held" or why else "", f"{state}{why}"


def _stage(story: Story) -> str:
    return str(story.last("stage").get("stage", "starting"))


def _ends(story: Story) -> str:
    """Return e.g. `: loss 1.2 → 0.4, evaluation loss 1.3 → 0.6`."""
    parts = []
    for name, words in (("loss", "loss"), ("eval_loss", "evaluation loss")):
        if points := _points(story, name):
            ends = dict.fromkeys((figure(points[0][1]), figure(points[-1][1])))
            parts.append(f"{words} {' → '.join(ends)}")
    return f": {', '.join(parts)}" if parts else ""


def _overview(story: Story, *, now: float) -> Iterable[tuple[str, str]]:
    job, plan, spec = story.job, story.shown["plan"], story.shown["spec"]
    seconds = sum(each.spent_sec if each.ended_at else now - each.started_at for each in job.attempts)
    progress, metrics = story.shown["progress"], story.shown["metrics"]
    num_steps = progress.get("num_steps")
    yield "state", text(job.state)
    yield "step", text(f"{progress.get('step')}{f' of {num_steps}' if num_steps else ''}" if num_steps else "")
    for name, words in (("train_loss", "training loss"), ("eval_loss", "evaluation loss")):
        yield words, text(figure(metrics[name])) if isinstance(metrics.get(name), int | float) else ""
    for name, value in metrics.items():
        if name.startswith("predictions/"):
            yield f"{name.removeprefix('predictions/').replace('_', ' ')} of predictions", text(figure(value))
    yield "time", text(duration(seconds)) if job.attempts else ""
    yield "base model", text(spec.get("base_model"))
    yield "backend", text(job.attempt.backend if job.attempts else (plan.get("backend") or {}).get("name"))
    yield "device", text((plan.get("device") or {}).get("name"))
    counted = plan.get("checkpoint") or {}
    if counted.get("num_parameters") and counted.get("num_trained"):
        yield "trained parameters", text(f"{counted['num_trained']:,} of {counted['num_parameters']:,}")


def _warnings(story: Story) -> list[str]:
    hint = (story.shown["error"] or {}).get("hint")
    told = dict.fromkeys(
        [
            *map(str, story.shown["plan"].get("warnings") or ()),
            *(
                str(each.get("evidence") or each.get("message"))
                for each in story.events
                if each["event"] == "log" and each.get("level") in ("warning", "error")
            ),
        ]
    )
    items = [*([f"What to do: {hint}"] if hint else []), *told]
    lines = [f'<li dir="auto">{text(each, limit=2000)}</li>' for each in items[:30]]
    lines += [f'<li class="dim">and {len(items) - 30} more: honectl logs {story.job.id}</li>'] if items[30:] else []
    return section("Worth knowing", [f"<ul>{''.join(lines)}</ul>"]) if lines else []


# -- plots ------------------------------------------------------------------------------------------------------------


def _points(story: Story, name: str) -> list[tuple[int, float]]:
    return [(step, value) for found, step, value, _ in story.figures if found == name]


def _plots(story: Story) -> list[str]:
    def series(*names: tuple[str, str]) -> list[Series]:
        return [Series(words, _points(story, name)) for name, words in names]

    drawn = [
        plot.lines("Loss", series(("loss", "training"), ("eval_loss", "evaluation"))),
        plot.lines("Learning rate", series(("learning_rate", "learning rate")), from_zero=True),
        plot.lines("Gradient norm", series(("grad_norm", "gradient norm")), from_zero=True),
        plot.lines("Steps a minute, evaluations included", [Series("steps a minute", _speed(story))], from_zero=True),
    ]
    plotted = {"loss", "eval_loss", "learning_rate", "grad_norm"}
    names = [name for name in dict.fromkeys(name for name, *_ in story.figures) if name not in plotted]
    scores = [name for name in names if "/" in name]
    for kind in dict.fromkeys(name.partition("/")[0] for name in scores):
        of_kind = [name for name in scores if name.startswith(f"{kind}/")]
        title = {"predictions": "Scores of the predictions", "guard": "The guard"}.get(kind, kind)
        for start in range(0, len(of_kind), 4):
            some = [(name, name.partition("/")[2].replace("_", " ")) for name in of_kind[start : start + 4]]
            drawn.append(plot.lines(title, series(*some), from_zero=True))
    for name in names:
        if name not in scores and not _NO_PLOT.search(name):
            drawn.append(plot.lines(name.replace("_", " "), series((name, name))))
    drawn = [each for each in drawn if each]
    return [f'<div class="plots">{"".join(drawn)}</div>'] if drawn else []


def _speed(story: Story) -> list[tuple[float, float]]:
    """Return the steps per minute between logged steps, in at most about a hundred stretches."""
    told = [(step, datetime.fromisoformat(when).timestamp()) for name, step, _, when in story.figures if name == "loss"]
    told = told[:: max(1, len(told) // 100)]
    return [
        (step, 60 * (step - before) / (when - then))
        for (before, then), (step, when) in itertools.pairwise(told)
        if when > then and step > before
    ]


# -- predictions ------------------------------------------------------------------------------------------------------


def _predictions(story: Story, more: str) -> list[str]:
    by_sample: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in story.predictions:
        by_sample[row["sample_index"]].append(row)
    thumbnails = {
        str(row.get("sample_index")): row.get("thumbnails") for row in _dicts(story.last("samples").get("rows"))
    }
    parts = []
    if len(by_sample) > MAX_SAMPLES:
        parts.append(f'<p class="dim">The first {MAX_SAMPLES} of {len(by_sample)} examples{text(more)}</p>')
    for index in sorted(by_sample)[:MAX_SAMPLES]:
        parts.append(_sample(index, by_sample[index], _images(thumbnails.get(str(index))), more))
    return parts


def _sample(index: int, rows: list[dict[str, Any]], images: str, more: str) -> str:
    truth = rows[-1]["ground_truth"] or ""
    shown = _some(rows)
    left_out = f'<p class="dim small">{len(rows) - len(shown)} steps are left out.</p>' if rows[len(shown) :] else ""
    lines = [
        [
            f'<span class="short">step {row["step"]}</span> {_verdict(row["prediction"], truth)}',
            _compared(row["prediction"], truth, more),
        ]
        for row in shown
    ]
    asked = f"<p>{images}</p>" if images else ""
    given = f'<p class="dim small">truth</p>{said(truth, limit=MAX_TEXT, more=more)}' if truth else ""
    return (
        f'<div class="sample"><p class="dim small">example {index}</p>{asked}'
        f"{said(rows[-1]['prompt'], limit=MAX_TEXT, more=more)}{given}"
        f"{table(('', 'prediction'), lines, stack=True)}{left_out}</div>"
    )


def _some(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the first row, the last, and evenly spaced ones between them, MAX_ROUNDS at most."""
    if len(rows) <= MAX_ROUNDS:
        return rows
    return [rows[round(n * (len(rows) - 1) / (MAX_ROUNDS - 1))] for n in range(MAX_ROUNDS)]


def _verdict(prediction: str | None, truth: str) -> str:
    if not truth:
        return ""
    is_right = (prediction or "").strip() == truth.strip()
    return '<span class="good word">right</span>' if is_right else '<span class="warn word">differs</span>'


def _compared(prediction: str | None, truth: str, more: str) -> str:
    """Return a prediction with its differences from the reference marked, if both are short enough to be compared."""
    written = prediction or ""
    if not truth or written.strip() == truth.strip() or max(len(written), len(truth)) > MAX_COMPARED:
        return said(written, limit=MAX_TEXT, more=more)
    words, wanted = re.findall(r"\w+|\W", written), re.findall(r"\w+|\W", truth)
    matcher = difflib.SequenceMatcher(None, wanted, words, autojunk=False)
    pieces = []
    for kind, _, _, start, end in matcher.get_opcodes():
        if chunk := text("".join(words[start:end])):
            pieces.append(chunk if kind == "equal" else f"<ins>{chunk}</ins>")
    return f'<div class="said" dir="auto">{"".join(pieces)}</div>'


def _images(thumbnails: Any) -> str:
    """Return the thumbnails that the worker made, as JPEGs; anything but plain base64 is left out."""
    return "".join(
        f'<img class="thumb" alt="what the model sees" src="data:image/jpeg;base64,{each}">'
        for each in (thumbnails if isinstance(thumbnails, list) else [])
        if isinstance(each, str) and len(each) <= MAX_THUMBNAIL and _BASE64.fullmatch(each)
    )


# -- what was planned, and what was ------------------------------------------------------------------------------------


def _precision(story: Story) -> list[str]:
    plan = story.shown["plan"]
    choices, backend = dict(plan.get("precision") or {}), plan.get("backend") or {}
    reasons = choices.pop("reasons", None) or {}
    rows = [[text("backend"), text(backend.get("name")), text("; ".join(map(str, backend.get("reasons") or ())))]]
    if choices.get("optim") is None and "optim" in reasons:  # the plan keeps the job's own
        choices["optim"] = ((story.shown.get("spec") or {}).get("training") or {}).get("optim", "default")
    rows += [[text(key), text(_word(value)), text(reasons.get(key))] for key, value in choices.items()]
    parts = [table(("choice", "value", "why"), rows, stack=True)] if choices else []
    # The dtypes during training: the last audit of a full fine-tuning is of the saved weights.
    looks = [event for event in story.events if event["event"] == "audit" and event.get("when") != "saved"]
    audit = looks[-1] if looks else {}
    counted = [
        [text(each.get("role")), text(each.get("dtype")), text(each.get("device")), text(_count(each))]
        for each in _dicts(audit.get("counts"))
    ]
    if counted:
        parts += [
            f"<h3>Loaded model ({text(audit.get('when'))})</h3>",
            table(("role", "dtype", "device", "parameters"), counted, numbers=frozenset({3})),
        ]
    told = [event.get("mended") for event in story.events if event["event"] == "audit"]
    mended = [f"<li>{text(each)}</li>" for some in told if isinstance(some, list) for each in some]
    return [*parts, *([f"<p>Mended:</p><ul>{''.join(dict.fromkeys(mended))}</ul>"] if mended else [])]


def _word(value: Any) -> str:
    match value:
        case None:
            return "none"
        case bool():
            return "yes" if value else "no"
        case _:
            return str(value)


def _count(row: Mapping[str, Any]) -> str:
    number = row.get("num_parameters")
    return f"{number:,}" if isinstance(number, int) else ""


def _memory(story: Story) -> list[str]:
    estimated, used = (story.shown["memory"].get(key) or {} for key in ("estimated", "used"))
    rows = [
        [text(words), text(_size(estimated.get(key))), text(_size(used.get(key)))]
        for words, key in _PARTS
        if estimated.get(key) or used.get(key)
    ]
    return [table(("part", "estimated", "used"), rows, numbers=frozenset({1, 2}))]


def _size(value: Any) -> str:
    if not isinstance(value, int | float):
        return ""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value / 2**10:.0f} KiB"


def _data(story: Story) -> list[str]:
    counts = story.last("data")
    rows = [
        [text(key.removeprefix("num_").replace("_", " ")), text(f"{value:,}")]
        for key, value in counts.items()
        if key.startswith("num_") and isinstance(value, int)
    ]
    parts = [table(("rows and tokens", "number"), rows, numbers=frozenset({1}))]
    lengths = counts.get("lengths")
    if isinstance(lengths, dict):
        bins, width = lengths.get("counts"), lengths.get("width")
        if isinstance(bins, list) and all(isinstance(each, int) for each in bins) and isinstance(width, int | float):
            drawn = plot.histogram("Tokens of a row, as trained on", bins, width, x_label="tokens")
            parts.append(f'<div class="plots">{drawn}</div>' if drawn else "")
    spec = story.shown["spec"]
    mixture = [
        [
            f'<span class="path">{text(each.get("path"))}</span>',
            "held out" if key == "eval_datasets" else text(each.get("fraction")),
            *(text(found.get(f"num_{name}")) for name in _ROWS),
        ]
        for key in ("datasets", "eval_datasets")
        for each, found in zip(_dicts(spec.get(key) or []), _dicts(counts.get(key)), strict=False)
    ]
    parts.append(table(("data set", "fraction", *_ROWS), mixture, numbers=frozenset({1, 2, 3, 4})) if mixture else "")
    return [each for each in parts if each]


_ROWS = ("rows", "taken", "bad")


def _example(story: Story) -> list[str]:
    segments = _dicts(story.last("example").get("segments"))
    if not segments:
        return []
    pieces = [
        f'<span class="{kind}">{text(each.get("text"), limit=MAX_TEXT)}</span>'
        for each in segments
        for kind in ("trained" if each.get("trained") else "masked",)
    ]
    key = '<p class="small"><span class="trained">trained on</span> <span class="masked">masked</span></p>'
    return [key, f'<pre class="block" dir="auto">{"".join(pieces)}</pre>']


def _events(story: Story) -> list[str]:
    told = [event for event in story.events if event["event"] not in _ELSEWHERE]
    rows = [
        [
            f'<span class="dim short">{text(str(event["created_at"])[:19].replace("T", " "))}</span>',
            f"<b>{text(event['event'])}</b> <bdi>{_event_words(event)}</bdi>",
        ]
        for event in told[-MAX_EVENTS:]
    ]
    earlier = f'<p class="dim">{len(told) - MAX_EVENTS} earlier ones: honectl logs {story.job.id}</p>'
    return [*([earlier] if told[MAX_EVENTS:] else []), table(("time (UTC)", "event"), rows, stack=True)]


def _event_words(event: Mapping[str, Any]) -> str:
    match event["event"]:
        case "log":
            return text(f"{event.get('level')}: {event.get('evidence') or event.get('message')}", limit=2000)
        case "stage":
            return text(event.get("stage"))
        case "started":
            return text(f"attempt {event.get('attempt')}, {event.get('backend')}")
        case _:
            rest = {key: value for key, value in event.items() if key not in {"event", "attempt", "created_at"}}
            words = ", ".join(
                f"{key} {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
                for key, value in rest.items()
            )
            return text(words, limit=500)


def _attempts(story: Story) -> str:
    rows = [
        [
            text(each.number),
            text(each.backend),
            text(timestamp(each.started_at)[:19].replace("T", " ")),
            text(duration(each.spent_sec) if each.ended_at else "goes on"),
            text(each.step),
            text(each.outcome),
        ]
        for each in story.job.attempts
    ]
    steps = [[text(each.attempt), text(each.text)] for each in story.job.adjustments]
    ladder = table(("out of memory in attempt", "the next ones go on with"), steps, stack=True) if steps else ""
    fallen = [[text(each.number), text(each.fallback.reason)] for each in story.job.attempts if each.fallback]
    without = table(("attempt", "fell back to transformers, since"), fallen, stack=True) if fallen else ""
    return (
        table(("attempt", "backend", "started (UTC)", "time", "step", "outcome"), rows, stack=True) + without + ladder
    )


def _versions(story: Story) -> str:
    versions = story.last("started").get("versions")
    found = {"honed": __version__, **(versions if isinstance(versions, dict) else {})}
    return facts([(name, text(version)) for name, version in found.items()])


def _block(content: str, *, is_copied: bool = False) -> str:
    return f'<pre class="block{" copy" if is_copied else ""}">{text(content)}</pre>' if content else ""


def _loading(story: Story) -> list[str]:
    """Return code that loads the job's output, if the job has made one."""
    made, plan, spec = story.shown["artifacts"], story.shown["plan"], story.shown["spec"]
    if not any(event["event"] == "artifact" for event in story.events) and story.job.state != "succeeded":
        return []
    is_adapter = spec.get("kind") != "merge" and bool(spec.get("lora") or spec.get("adapter"))
    sees = bool((plan.get("checkpoint") or {}).get("has_vision"))
    output, base = str(made["output_dir"]), str(plan.get("base_model_path") or spec.get("base_model"))
    dtype = (plan.get("precision") or {}).get("load_dtype") or "auto"
    parts = [_block(code(output, base, dtype=dtype, is_adapter=is_adapter, sees=sees), is_copied=True)]
    if made.get("merged"):
        merged = code(str(made["merged"]), base, dtype="auto", is_adapter=False, sees=sees)
        parts += ["<p>The merged checkpoint, which needs no peft:</p>", _block(merged, is_copied=True)]
    return parts


def code(output: str, base: str, *, dtype: str, is_adapter: bool, sees: bool) -> str:
    """Return Python code that loads a job's output; paths are quoted as Python quotes them."""
    auto = "AutoModelForImageTextToText" if sees else "AutoModelForCausalLM"
    reader, reads = ("AutoProcessor", "processor") if sees else ("AutoTokenizer", "tokenizer")
    lines = [f"from transformers import {auto}, {reader}"]
    if is_adapter:
        lines.insert(0, "from peft import PeftModel")
        lines += [
            "",
            f'base = {auto}.from_pretrained({base!r}, dtype="{dtype}")',
            f"model = PeftModel.from_pretrained(base, {output!r})",
            f"{reads} = {reader}.from_pretrained({(base if sees else output)!r})",
        ]
    else:
        lines += [
            "",
            f'model = {auto}.from_pretrained({output!r}, dtype="{dtype}")',
            f"{reads} = {reader}.from_pretrained({output!r})",
        ]
    return "\n".join(lines) + "\n"


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


# -- the index --------------------------------------------------------------------------------------------------------


def render_index(
    rows: Sequence[Mapping[str, Any]], layout: Layout, *, now: float, counts: Mapping[str, int] | None = None
) -> bytes:
    """Return the index: running jobs, then the queue in its order, then the rest, newest first. `counts`: all jobs by
    state."""

    def address(job_id: int) -> str | None:
        return f"jobs/{job_id}/report.html" if os.path.lexists(layout.job(job_id).report_path) else None

    return document("honed: all jobs", index_body(rows, address, now=now, counts=counts))


def index_body(
    rows: Sequence[Mapping[str, Any]],
    address: Callable[[int], str | None],
    *,
    now: float,
    counts: Mapping[str, int] | None = None,
) -> list[str]:
    """Return the index as HTML. `address` returns where a job's page is, or None."""
    lines = []
    for row in rows:
        name = text(row["name"] or f"job {row['id']}")
        if (href := address(row["id"])) is not None:
            name = f'<a href="{href}"><bdi>{name}</bdi></a>'
        kind = {"succeeded": "good", "failed": "bad", "held": "warn", "cancelled": "warn"}.get(row["state"], "")
        state = row["outcome"] if row["state"] == "failed" and row["outcome"] else row["state"]
        progress = row["progress"]
        how_far = progress_text(progress) if progress.get("step") is not None else ""
        lines.append(
            [
                text(row["id"]),
                name,
                f'<span class="word {kind}">{text(state)}</span>',
                text(how_far),
                f'<span class="dim">{text(row["submitted_at"][:19].replace("T", " "))}</span>',
            ]
        )
    body = [
        "<h1>honed: all jobs</h1>",
        f'<p class="dim small">honed {text(__version__)}; as of {text(timestamp(now)[:19])} UTC.</p>',
        table(("job", "name", "state", "how far", "dropped (UTC)"), lines, numbers=frozenset({0}), stack=True)
        or "<p>There is no job yet.</p>",
    ]
    if (num_more := sum((counts or {}).values()) - len(rows)) > 0:
        told = ", ".join(f"{number:,} {state}" for state, number in (counts or {}).items() if number)
        body.append(f'<p class="dim">And {num_more:,} more, of these in all: {text(told)}. See honectl list --all.</p>')
    return body


# -- the program ------------------------------------------------------------------------------------------------------


def write(layout: Layout, job_ids: Sequence[int], *, is_shared: bool, admin_group: str) -> int:
    """Write the reports of these jobs, and the index. Returns how many failed to be written and may succeed another
    time; each is reported on stderr.

    The index names all users' jobs: if they are not shared, only honed and the administrators' group may read it.
    """
    spool, num_failed = Spool(layout, lock=False), 0
    now = time.time()
    for job_id in job_ids:
        job = spool.job(job_id)
        if job is None or not layout.job(job_id).dir.is_dir():
            continue
        try:
            durable.write(layout.job(job_id).report_path, render(gather(spool, layout, job), now=now))
        except OSError as error:
            print(f"job {job_id}: its report: {error}", file=sys.stderr)
            num_failed += 1
        except Exception as error:  # noqa: BLE001 - a worker that tells nonsense costs its own page, and no other's
            print(f"job {job_id}: its report cannot be made:\n{trace(error)}", file=sys.stderr)
    reader = Reader(layout.database_path)
    try:
        rows, counts = reader.overview(MAX_INDEX_JOBS)
    finally:
        reader.close()
    page = render_index(rows, layout, now=now, counts=counts)
    path = durable.write_beside(layout.index_path, page, mode=0o644 if is_shared else 0o600)
    path.chmod(0o644 if is_shared else 0o600)
    administrators = access.group_id(admin_group)
    if not is_shared and administrators is not None:
        access.set_acl(path, access.Acl(6, 0, 0, users={}, groups={administrators: access.READ}))
    path.rename(layout.index_path)
    return num_failed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="honed.page.report", description="Write the reports of jobs, and the index.")
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--shared", action="store_true", help="let everybody read every job")
    parser.add_argument("--admin-group", default="")
    parser.add_argument("ids", nargs="*", type=int)
    options = parser.parse_args(arguments)
    guard_tracebacks()
    niceness.step_back()
    layout = layouts.of(options.root)
    return min(write(layout, options.ids, is_shared=options.shared, admin_group=options.admin_group), 1)


if __name__ == "__main__":
    sys.exit(main())
