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
import re
import shlex
import sys
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from markupsafe import Markup

from honed import __version__
from honed.job.database import Reader
from honed.job.progress import duration, figure, progress_text
from honed.job.spool import Spool
from honed.job.thinning import KINDS, thinned_counts
from honed.page import plot
from honed.page.page import document, text
from honed.page.plot import Series
from honed.page.story import ELSEWHERE, MAX_CURVES, Story, gather
from honed.spec import kind as kinds
from honed.spec.export import EXPORTS
from honed.system import access, durable, niceness, untrusted
from honed.system import layout as layouts
from honed.system.layout import Layout
from honed.system.log import guard_tracebacks, trace

#: Events on a page, and characters of one text; the page says where the rest is.
MAX_EVENTS, MAX_TEXT = 200, 60_000
#: Characters of texts that are compared: the time grows with their square.
MAX_COMPARED = 600
#: Bytes of a thumbnail, encoded.
MAX_THUMBNAIL = 64 * 1024
#: Bytes of a page for honed-web, which has it in memory while it sends it.
MAX_PRINTED_BYTES = 64 * 1024 * 1024
#: The values of vLLM's --max-lora-rank.
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
#: Metrics of transformers' evaluation about its own speed; throughput has its own plot.
_NO_PLOT = re.compile(r"_(runtime|per_second|num_tokens)$")
_BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")
_WORDS = {"None": "none", "True": "yes", "False": "no"}
_PARTS = (
    ("base model", "weights_bytes"),
    ("adapter", "adapter_bytes"),
    ("gradients", "gradient_bytes"),
    ("optimizer", "optimizer_bytes"),
    ("activations", "activation_bytes"),
    ("media", "media_bytes"),
    ("total", "total_bytes"),
    ("peak GPU memory", "device_peak_bytes"),
    ("peak RAM", "resident_peak_bytes"),
    ("available", "available_bytes"),
)

#: Jobs of every kind (running, queued, held, over) on the index: nobody reads a page of ten thousand.
MAX_INDEX_JOBS = 200


# -- the page ---------------------------------------------------------------------------------------------------------


def render(story: Story, *, now: float, is_served: bool = False) -> bytes:
    """Return the page as a file, or as honed-web sends it."""
    job = story.job
    name = job.name or f"job {job.id}"
    kind, line = outcome(story)
    drawn, mixture = _data(story)
    events = [event for event in story.events if event["event"] not in ELSEWHERE]
    return document(
        "report.html",
        title=f"{name}: {line}",
        is_served=is_served,
        live="" if job.state.is_final else f"/api/jobs/{job.id}/events",
        job=job,
        name=name,
        kind=kind,
        line=line,
        now=now,
        overview=_overview(story, now=now),
        warnings=_warnings(story),
        plots=_plots(story, is_served=is_served),
        scripts=("uplot", "plots"),
        todo=_todo(story),
        groups=_groups(story),
        samples=_samples(story),
        num_samples=story.num_examples,
        more=f" (the rest: honectl predictions {job.id})",
        max_text=MAX_TEXT,
        choices=_choices(story),
        **_audit(story),
        memory=_memory(story),
        numbers=_numbers(story.last("data")),
        lengths=drawn,
        mixture=mixture,
        segments=_dicts(story.last("example").get("segments")),
        events=[(event, _event_words(event)) for event in events[-MAX_EVENTS:]],
        num_earlier=story.num_events - MAX_EVENTS,
        thinned=_thinned(story),
        sampled=_sampled(story),
        spec_text=story.spec_text,
        versions={"honed": __version__, **_dict(story.last("started").get("versions"))},
        **_loading(story),
    )


def _thinned(story: Story) -> str:
    """Return what honed.db, and so this page, no longer has of the job; empty if it has all."""
    counts = thinned_counts(story.last("thinned"))
    what = ", ".join(f"{num:,} {KINDS[kind]}" for kind, num in counts.items() if num)
    why = "Older rows were thinned. " if counts.keys() - {"names"} else ""
    return f"{why}Left out here: {what}; attempts/*/events.jsonl has them all." if what else ""


def _sampled(story: Story) -> str:
    """Return of how many values the figures show how many; empty if they have all that honed.db has."""
    sizes = [(curve.num, len(curve.points)) for curve in story.curves.values()]
    num, num_shown = (sum(size) for size in zip(*sizes, strict=True)) if sizes else (0, 0)
    few = f" Of more metrics than {MAX_CURVES:,} the others are left out." if len(sizes) >= MAX_CURVES else ""
    if num == num_shown:
        return few.strip()
    return (
        f"A sample of {num_shown:,} of {num:,} values: of very long curves the first value, the last, and the lowest "
        f"and the highest of each stretch.{few}"
    )


def outcome(story: Story) -> tuple[str, str]:
    """Return a job's outcome: its kind (good, bad, warn or empty), and one line of text."""
    job, error = story.job, story.shown["error"]
    why = f": {error.get('evidence') or error['message']}" if error and error.get("message") else ""
    match job.state:
        case "succeeded" if job.remark:
            return "warn", f"succeeded, but {job.remark}"
        case "succeeded" if isinstance(worse := story.last("worse").get("found"), list):
            return "warn", f"succeeded, but worse than it began: {', '.join(map(str, worse))}"
        case "succeeded":
            return "good", f"succeeded{_ends(story)}"
        case "failed":
            return "bad", f"{job.outcome or 'failed'}{why}"
        case "cancelled" if job.cut is not None and job.was_stopped_early:
            return "warn", f"stopped early by its sweep: {job.cut.words}"
        case "cancelled":
            return "warn", "cancelled"
        case "queued" | "running" if preemption := story.shown["preemption"]:
            return "warn", f"{job.state}; preempted: {preemption['reason']}"
        case "running":
            progress = story.shown["progress"]
            stage = story.last("stage").get("stage", "starting")
            return "", f"running: {progress_text(progress) if progress.get('step') is not None else stage}"
        case state:
            return "warn" if state == "held" or why else "", f"{state}{why}"


def _ends(story: Story) -> str:
    parts = []
    for name, words in (("loss", "loss"), ("eval_loss", "evaluation loss")):
        if points := story.points(name):
            ends = dict.fromkeys((figure(points[0][1]), figure(points[-1][1])))
            parts.append(f"{words} {' → '.join(ends)}")
    return f": {', '.join(parts)}" if parts else ""


def telling_scores(stories: Sequence[Story]) -> list[str]:
    """Return the metrics of the predictions as a whole. One that was always 0 says nothing next to others, and no more
    does the share of answers that a metric could read where it could read all."""
    values: dict[str, list[float]] = {}
    for story in stories:
        for name in story.curves:
            if name.startswith("predictions/") and name.count("/") == 1:
                values.setdefault(name, []).extend(value for _, value in story.points(name))
    values = {name: scores for name, scores in values.items() if not (name.endswith("_parsable") and min(scores) == 1)}
    return [name for name in values if any(values[name])] or list(values)


def _overview(story: Story, *, now: float) -> Iterable[tuple[str, Any]]:
    job, plan, spec = story.job, story.shown["plan"], story.shown["spec"]
    seconds = sum(attempt.spent_sec if attempt.ended_at else now - attempt.started_at for attempt in job.attempts)
    progress, metrics = story.shown["progress"], story.shown["metrics"]
    yield "state", job.state
    if num_steps := progress.get("num_steps"):
        yield "step", f"{progress.get('step')} of {num_steps}"
    for name, words in (("train_loss", "training loss"), ("eval_loss", "evaluation loss")):
        yield words, figure(metrics[name]) if isinstance(metrics.get(name), int | float) else None
    for name in telling_scores([story]):
        if name in metrics:
            yield f"{name.removeprefix('predictions/').replace('_', ' ')} of predictions", figure(metrics[name])
    yield "time", duration(seconds) if job.attempts else None
    yield "preemptions", job.num_preemptions or None
    yield "base model", spec.get("base_model")
    yield "backend", job.attempt.backend if job.attempts else (plan.get("backend") or {}).get("name")
    yield "device", (plan.get("device") or {}).get("name")
    counted = plan.get("checkpoint") or {}
    if counted.get("num_parameters") and counted.get("num_trained"):
        yield "trained parameters", f"{counted['num_trained']:,} of {counted['num_parameters']:,}"


def _warnings(story: Story) -> list[str]:
    hint = error.get("hint") if (error := story.shown["error"]) and not story.job.state.is_final else None
    logged = [
        str(event.get("evidence") or event.get("message"))
        for event in story.events
        if event["event"] == "log" and event.get("level") in ("warning", "error")
    ]
    planned = map(str, story.shown["plan"].get("warnings") or ())
    return [*([f"What to do: {hint}"] if hint else []), *dict.fromkeys([*planned, *logged])]


def _todo(story: Story) -> dict[str, Any]:
    """Return what to do about a job that failed or was cancelled: a hint, and commands with what they do."""
    job, error = story.job, story.shown["error"]
    if job.state not in ("failed", "cancelled"):
        return {"hint": "", "commands": ()}
    again = "queue it again; it resumes from its last checkpoint, if it has one"
    commands = [
        (f"honectl logs {job.id}", "the log of its attempts, up to the end"),
        (f"honectl requeue {job.id}", again),
        (f"honectl rerun {job.id} --set KEY=VALUE", "a new job from its job file, with a change"),
    ]
    return {"hint": error["hint"] if error else "", "commands": commands if job.attempts else commands[1:]}


# -- plots ------------------------------------------------------------------------------------------------------------


def _group_of(name: str) -> str:
    """Return the group of rows that a metric is for (`eval_loss/general`, `predictions/exact_match/tag:x`), else ""."""
    kind, _, rest = name.partition("/")
    return rest if kind == "eval_loss" else rest.partition("/")[2]


def _groups(story: Story) -> list[tuple[str, str, str, str]]:
    """Return the metrics of every data set and tag: the group, the metric, its first value and its last."""
    names = [name for name in story.curves if _group_of(name)]
    rows = []
    for name in sorted(names, key=lambda name: (_group_of(name), name)):
        points, metric = story.points(name), name.removesuffix(f"/{_group_of(name)}")
        words = metric.removeprefix("predictions/").replace("_", " ")
        first = figure(points[0][1]) if len(points) > 1 else ""
        rows.append((_group_of(name), words, first, figure(points[-1][1])))
    return rows


def _plots(story: Story, *, is_served: bool) -> list[Markup]:
    lines = partial(plot.lines, is_served=is_served)

    def series(*names: tuple[str, str]) -> list[Series]:
        return [Series(words, story.points(name)) for name, words in names]

    drawn = [
        lines("Loss", series(("loss", "training"), ("eval_loss", "evaluation"))),
        lines("Learning rate", series(("learning_rate", "learning rate")), from_zero=True),
        lines("Gradient norm", series(("grad_norm", "gradient norm")), from_zero=True),
        lines("Steps a minute, evaluations included", [Series("steps a minute", _speed(story))], from_zero=True),
    ]
    plotted = {"loss", "eval_loss", "learning_rate", "grad_norm"}
    names = [name for name in story.curves if name not in plotted and not _group_of(name)]
    telling = telling_scores([story])
    names = [name for name in names if name in telling or not name.startswith("predictions/")]
    scores = [name for name in names if "/" in name]
    for kind in dict.fromkeys(name.partition("/")[0] for name in scores):
        of_kind = [name for name in scores if name.startswith(f"{kind}/")]
        title = {"predictions": "Scores of the predictions", "guard": "The guard"}.get(kind, kind)
        for start in range(0, len(of_kind), 4):
            some = [(name, name.partition("/")[2].replace("_", " ")) for name in of_kind[start : start + 4]]
            drawn.append(lines(title, series(*some), from_zero=True))
    others = [name for name in names if name not in scores and not _NO_PLOT.search(name)]
    for name in dict.fromkeys(name.removeprefix("eval_") for name in others):
        drawn.append(lines(name.replace("_", " "), series((name, "training"), (f"eval_{name}", "evaluation"))))
    return [item for item in drawn if item]


def _speed(story: Story) -> list[tuple[float, float]]:
    """Return the steps per minute between logged steps, in at most about a hundred stretches."""
    points = story.curves["loss"].points if "loss" in story.curves else []
    points = points[:: max(1, len(points) // 100)]
    times = [(point.step, datetime.fromisoformat(point.created_at).timestamp()) for point in points]
    return [
        (step, 60 * (step - before) / (when - then))
        for (before, then), (step, when) in itertools.pairwise(times)
        if when > then and step > before
    ]


# -- predictions ------------------------------------------------------------------------------------------------------


def _samples(story: Story) -> list[dict[str, Any]]:
    """Return the first held-out examples with their predictions."""
    thumbnails = {
        str(row.get("sample_index")): row.get("thumbnails") for row in _dicts(story.last("samples").get("rows"))
    }
    samples = []
    for index, rows, num_all in story.examples:
        truth = rows[-1]["ground_truth"] or ""
        samples.append(
            {
                "index": index,
                "images": _images(thumbnails.get(str(index))),
                "prompt": rows[-1]["prompt"],
                "truth": truth,
                "rounds": [(row["step"], *compared(row["prediction"] or "", truth)) for row in rows],
                "num_left_out": num_all - len(rows),
            }
        )
    return samples


def compared(written: str, truth: str) -> tuple[str, list[tuple[bool, str]]]:
    """Return whether a prediction is right, as a word, and its parts, with whether they differ from the
    reference."""
    is_right = written.strip() == truth.strip()
    verdict = ("right" if is_right else "differs") if truth else ""
    if not truth or is_right or max(len(written), len(truth)) > MAX_COMPARED:
        return verdict, [(False, written)]
    words, wanted = re.findall(r"\w+|\W", written), re.findall(r"\w+|\W", truth)
    codes = difflib.SequenceMatcher(None, wanted, words, autojunk=False).get_opcodes()
    return verdict, [(kind != "equal", "".join(words[start:end])) for kind, _, _, start, end in codes if end > start]


def _images(thumbnails: Any) -> list[str]:
    """Return the thumbnails that the worker made, as JPEGs; anything but plain base64 is left out."""
    return [
        thumbnail
        for thumbnail in (thumbnails if isinstance(thumbnails, list) else [])
        if isinstance(thumbnail, str) and len(thumbnail) <= MAX_THUMBNAIL and _BASE64.fullmatch(thumbnail)
    ]


# -- what was planned, and what was ------------------------------------------------------------------------------------


def _choices(story: Story) -> list[tuple[Any, ...]]:
    plan = story.shown["plan"]
    choices, backend = dict(plan.get("precision") or {}), plan.get("backend") or {}
    reasons = choices.pop("reasons", None) or {}
    if choices.get("optim") is None and "optim" in reasons:  # the plan keeps the job's own
        choices["optim"] = ((story.shown.get("spec") or {}).get("training") or {}).get("optim", "default")
    first = ("backend", backend.get("name"), "; ".join(map(str, backend.get("reasons") or ())))
    return (
        [first, *((key, _WORDS.get(str(value), value), reasons.get(key)) for key, value in choices.items())]
        if choices
        else []
    )


def _audit(story: Story) -> dict[str, Any]:
    audits = [event for event in story.events if event["event"] == "audit"]
    # The dtypes during training: the last audit of a full fine-tuning is of the saved weights.
    audit: Mapping[str, Any] = next((event for event in reversed(audits) if event.get("when") != "saved"), {})
    counts = [
        (item.get("role"), item.get("dtype"), item.get("device"), _count(item)) for item in _dicts(audit.get("counts"))
    ]
    mended = [str(item) for event in audits if isinstance(event.get("mended"), list) for item in event["mended"]]
    return {"audited_when": audit.get("when"), "counts": counts, "mended": list(dict.fromkeys(mended))}


def _count(row: Mapping[str, Any]) -> str:
    number = row.get("num_parameters")
    return f"{number:,}" if isinstance(number, int) else ""


def _memory(story: Story) -> list[tuple[str, str, str]]:
    estimated, used = story.shown["memory"]["estimated"], story.shown["memory"]["used"]
    return [
        (words, _size(estimated.get(key)), _size(used.get(key)))
        for words, key in _PARTS
        if estimated.get(key) or used.get(key)
    ]


def _size(value: Any) -> str:
    if not isinstance(value, int | float):
        return ""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value / 2**10:.0f} KiB"


def _numbers(counts: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        (key.removeprefix("num_").replace("_", " "), f"{value:,}")
        for key, value in counts.items()
        if key.startswith("num_") and isinstance(value, int)
    ]


def _data(story: Story) -> tuple[Markup, list[tuple[Any, ...]]]:
    """Return the histogram of the rows' lengths, and one row per data set."""
    counts = story.last("data")
    lengths = _dict(counts.get("lengths"))
    bins, width = lengths.get("counts"), lengths.get("width")
    drawn = Markup()
    if isinstance(bins, list) and all(isinstance(item, int) for item in bins) and isinstance(width, int | float):
        drawn = plot.histogram("Tokens of a row, as trained on", bins, width, x_label="tokens")
    return drawn, [
        (
            item.get("path"),
            "held out" if key == "eval_datasets" else item.get("fraction"),
            *(data.get(name) for name in ("num_rows", "num_taken", "num_bad")),
        )
        for key in ("datasets", "eval_datasets")
        for item, data in zip(_dicts(story.shown["spec"].get(key)), _dicts(counts.get(key)), strict=False)
    ]


def _event_words(event: Mapping[str, Any]) -> Markup:
    match event["event"]:
        case "log":
            return text(f"{event.get('level')}: {event.get('evidence') or event.get('message')}", 2000)
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
            return text(words, 500)


def _loading(story: Story) -> dict[str, Any]:
    """Return the values in the code that loads the job's output; `outputs` is empty if it has made none."""
    made, plan, spec = story.shown["artifacts"], story.shown["plan"], story.shown["spec"]
    is_made = any(event["event"] == "artifact" for event in story.events) or story.job.state == "succeeded"
    is_adapter = kinds.of(spec).trains and bool(spec.get("lora") or spec.get("adapter"))
    dtype = (plan.get("precision") or {}).get("load_dtype") or "auto"
    outputs = [(str(made["output_dir"]), dtype, is_adapter)]
    exported = [str(path) for item in EXPORTS if item.is_base_model and (path := made.get(item.name))]
    outputs += [(path, "auto", False) for path in exported]
    is_shown = is_made and bool(kinds.of(spec).makes)
    return {
        "outputs": outputs if is_shown else [],
        "serving": _serving(story, outputs[-1][0], is_adapter=outputs[-1][2]) if is_shown else "",
        "base": str(plan.get("base_model_path") or spec.get("base_model")),
        "sees": bool((plan.get("checkpoint") or {}).get("has_vision")),
    }


def _serving(story: Story, output: str, *, is_adapter: bool) -> str:
    """Return the command with which vLLM serves an output; empty if it cannot."""
    if not is_adapter:
        return f"vllm serve {shlex.quote(output)}"
    plan, spec = story.shown["plan"], story.shown["spec"]
    lora = _dict(spec.get("lora"))
    rank = lora.get("r", 16)
    if lora.get("use_dora") or lora.get("modules_to_save") or not isinstance(rank, int):
        return ""
    name = re.sub(r"[^\w.-]+", "-", story.job.name) or f"job-{story.job.id}"
    ranks = [item for item in VLLM_RANKS if item >= rank]
    base = str(plan.get("base_model_path") or spec.get("base_model"))
    words = [
        "vllm",
        "serve",
        base,
        "--enable-lora",
        "--max-lora-rank",
        str(ranks[0]),
        "--lora-modules",
        f"{name}={output}",
    ]
    return shlex.join(words) if ranks else ""


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


# -- the index --------------------------------------------------------------------------------------------------------


def render_index(
    rows: Sequence[Mapping[str, Any]], layout: Layout, *, now: float, counts: Mapping[str, int] | None = None
) -> bytes:
    """Return the index: running jobs, then the queue in its order, then the rest, newest first. `counts`: all jobs by
    state."""

    def address(job_id: int) -> str | None:
        return f"jobs/{job_id}/report.html" if untrusted.exists(layout.files(job_id).report_path) else None

    counts = counts or {}
    return document(
        "index.html",
        title="honed: all jobs",
        is_served=False,
        live="",
        now=now,
        rows=rows,
        address=address,
        counts=counts,
        num_more=sum(counts.values()) - len(rows),
    )


# -- the program ------------------------------------------------------------------------------------------------------


def write(
    layout: Layout,
    job_ids: Sequence[int],
    *,
    is_shared: bool,
    admin_group: str,
    queue: Sequence[int] = (),
    ahead: Container[int] = (),
) -> int:
    """Write the reports of these jobs, and the index. Returns how many failed to be written and may succeed another
    time; they are reported on stderr. `queue`: the first queued jobs in the order in which they start; `ahead`: those
    whose workers wait for their turns.

    The index names all users' jobs: if they are not shared, only honed and the administrators' group may read it.
    """
    spool, num_failed = Spool(layout, lock=False), 0
    now = time.time()
    for job_id in job_ids:
        job = spool.job(job_id)
        if job is None or not layout.files(job_id).place.is_dir():
            continue
        try:
            untrusted.write_plain(layout.files(job_id).report_path, render(gather(spool, layout, job), now=now))
        except OSError as error:
            print(f"job {job_id}: its report: {error}", file=sys.stderr)
            # What its submitter has put in its place costs this page alone, until the job's state changes.
            num_failed += durable.machine_fault(error) is not None and error.errno not in durable.OWNERS_ERRNOS
        except Exception as error:  # noqa: BLE001 - a worker that tells nonsense costs its own page, and no other's
            print(f"job {job_id}: its report could not be generated:\n{trace(error)}", file=sys.stderr)
    reader = Reader(layout.database_path)
    try:
        rows, counts = reader.overview(MAX_INDEX_JOBS, queue)
    finally:
        reader.close()
    rows = [{**row, "staged_at": True} if row["id"] in ahead and row["state"] == "queued" else row for row in rows]
    page = render_index(rows, layout, now=now, counts=counts)
    try:
        path = durable.write_beside(layout.index_path, page, mode=0o644 if is_shared else 0o600)
        path.chmod(0o644 if is_shared else 0o600)
        administrators = access.group_id(admin_group)
        if not is_shared and administrators is not None:
            access.set_acl(path, access.Acl(6, 0, 0, users={}, groups={administrators: access.READ}))
        path.rename(layout.index_path)
    except OSError as error:
        print(f"{layout.index_path}: {error}", file=sys.stderr)
        num_failed += 1
    return num_failed


def print_page(layout: Layout, job_id: int) -> int:
    """Print the page of a job as honed-web sends it. Returns 1 if there is no such job, or the page is too long."""
    spool = Spool(layout, lock=False)
    if (job := spool.job(job_id)) is None:
        return 1
    return put_out(render(gather(spool, layout, job), now=time.time(), is_served=True), f"job {job_id}: its page")


def put_out(page: bytes, what: str) -> int:
    """Print a page for honed-web. Returns 1 if it is too long."""
    if len(page) > MAX_PRINTED_BYTES:
        print(f"{what} has {len(page):,} bytes, more than honed-web serves", file=sys.stderr)
        return 1
    sys.stdout.buffer.write(page)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="honed.page.report", description="Write the reports of jobs, and the index.")
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--shared", action="store_true", help="let everybody read every job")
    parser.add_argument("--admin-group", default="")
    parser.add_argument("--queue", type=_job_ids, default=(), help="the first queued jobs, in their order")
    parser.add_argument("--ahead", type=_job_ids, default=(), help="those of them whose workers wait for their turns")
    parser.add_argument("--print", action="store_true", help="print the page of one job for honed-web; write nothing")
    parser.add_argument("ids", nargs="*", type=int)
    options = parser.parse_args(arguments)
    guard_tracebacks()
    niceness.step_back()
    layout = layouts.of(options.root)
    if options.print:
        return print_page(layout, *options.ids)
    num_failed = write(
        layout,
        options.ids,
        is_shared=options.shared,
        admin_group=options.admin_group,
        queue=options.queue,
        ahead=options.ahead,
    )
    return min(num_failed, 1)


def _job_ids(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
