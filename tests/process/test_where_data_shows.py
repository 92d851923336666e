"""A job's data appear only where their owner looks: in no log, status line, notice, metric or list for others.

Each text that belongs to the owner contains a unique word. Real and rejected jobs go through a real daemon. Then
everything that others can read is searched for those words, and so are the owner's own places: a word found in neither
was never tested.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from endpoint import Endpoint
from harness import Instance, RealInstance
from notified import Notified

from honed.job import query
from honed.page import metrics
from honed.page.source import Source
from honed.send import notification
from honed.system.error import NotPermittedError
from zoo.model import build_checkpoint

#: The place of each word.
WORDS = {
    "zqsystem": "a system prompt",
    "zquser": "what a user says",
    "zqanswer": "what the assistant says",
    "zqreason": "reasoning",
    "zqtool": "a tool call",
    "zqprompt": "predictions.prompts",
    "zqmetric": "the code of a metric",
    "zqtemplate": "a chat template",
    "zqrole": "a role that there is not",
    "zqpart": "a type of part that there is not",
    "zqheader": "the first line of a table without a header",
    "zqcaption": "a text where a picture's file should be named",
    "zqspec": "a value of a job file",
    "zqkey": "a key of a file of rows, dropped as a job",
    "zqsyntax": "a template that is none",
    "zqrefusal": "what a template says of a row",
}
#: A template that shows neither reasoning nor calls, and whose generation prompt begins no turn.
TEMPLATE = (
    "{# zqtemplate #}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>zqtemplate\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>zqtemplate{% endif %}"
)
#: A template that repeats the user's words in the assistant's turn.
PARROT = TEMPLATE.replace("{{ m.content }}<", "{{ m.content }}{{ messages[1].content if m.role == 'assistant' }}<")
METRIC = """
calls = 0
def parrot(text, truth):
    global calls
    calls += 1
    print("zqmetric", truth)
    if calls > 1:
        raise ValueError(f"zqmetric: {truth}")
    return 1.0
"""


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def a_row(n: int, **more: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "zqtool", "arguments": {"place": f"zqtool {n}"}}}
    return {
        "messages": [
            turn("system", "zqsystem"),
            turn("user", f"zquser, number {n}?"),
            turn("assistant", f"zqanswer {n}", reasoning_content="zqreason", tool_calls=[call]),
            turn("tool", "zqtool"),
            turn("assistant", f"zqanswer, again {n}"),
            *more.pop("messages", ()),
        ],
        **more,
    }


GOOD = [a_row(n) for n in range(12)]
BAD_ROLE = {"messages": [turn("zqrole", "zquser"), turn("assistant", "zqanswer")]}
CSV = b'"zqheader, said one, and more",zqheader\nzquser,zqanswer\n'
#: Files of rows that are rejected or warned about, and the other keys of their jobs.
ROWS: dict[str, tuple[Any, dict[str, Any]]] = {
    "role": ([BAD_ROLE] * 4, {}),
    "some-roles": ([*GOOD, BAD_ROLE], {}),
    "part": ([{"messages": [turn("user", [{"type": "zqpart, or what"}]), turn("assistant", "zqanswer")]}] * 4, {}),
    "weight": ([{"messages": [turn("user", "zquser"), turn("assistant", "zqanswer", weight="zqanswer")]}] * 4, {}),
    "no-header": (CSV, {}),
    "cut": (b'{"messages": [{"role": "user", "content": "zquser', {}),
    "not-rows": (b'["zquser", "zqanswer"]', {}),
    "caption": ([{"image": "zqcaption of a cat", **GOOD[0]}] * 4, {}),
    "refused": (GOOD, {"chat_template": "{{ raise_exception('zqrefusal ' ~ messages[0].content) }}"}),
    "some-refused": (
        [*GOOD, a_row(99, messages=[turn("user", "zquser")])],
        {
            "chat_template": TEMPLATE + "{% if messages[-1].role == 'user' and messages | length > 1 and not "
            "add_generation_prompt %}{{ raise_exception('zqrefusal ' ~ messages[1].content) }}{% endif %}"
        },
    ),
    "no-template": (GOOD, {"chat_template": "{% zqsyntax %}{{ messages }}"}),
}
#: Job files that are rejected for their content.
SPECS: dict[str, Any] = {
    "prompts": {"predictions": {"prompts": "zqprompt, said alone"}},
    "number": {"training": {"learning_rate": "zqspec, or so"}},
    "kwargs": {"training": {"lr_scheduler_kwargs": {"zqspec is it": 1}}},
    "model": {"base_model": "zqspec and more"},
    "rows": [{"zqkey, said the first": "zquser"}],
    "row": {"zqkey, said the second": "zquser", "zqkey: a third": 1},
}


def write_rows(path: Path, rows: Any) -> Path:
    path.write_bytes(rows if isinstance(rows, bytes) else "".join(json.dumps(row) + "\n" for row in rows).encode())
    return path


def plug_in(instance: Instance) -> None:
    """Install a package as an administrator would, with one metric, `parrot`, for the daemon and its children."""
    place = instance.root / "packages"
    info = place / "house_metrics-1.0.dist-info"
    info.mkdir(parents=True)
    (place / "house_metrics.py").write_text(METRIC)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: house-metrics\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[honed.metrics]\nparrot = house_metrics:parrot\n")
    instance.environment["PYTHONPATH"] = str(place)


def drop_bad(instance: Instance) -> None:
    """Drop the jobs with invalid files; two of these are invalid only in some rows."""
    for name, (rows, keys) in ROWS.items():
        path = write_rows(instance.root / f"{name}{'.csv' if rows is CSV else '.jsonl'}", rows)
        template = instance.root / f"{name}.jinja"
        if "chat_template" in keys:
            template.write_text(keys["chat_template"])
        more = {key: str(template) for key in keys}
        is_kept = name.startswith("some-")
        instance.drop(f"{name}.hold" if is_kept else name, name=name, datasets=[{"path": str(path)}], **more)
    for name, said in SPECS.items():
        if isinstance(said, dict) and not any(key.startswith("zq") for key in said):
            instance.drop(name, **said)
        else:
            (instance.incoming_dir / f"{name}.json").write_text(json.dumps(said))


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Notified]:
    """What the daemon tells systemd; an instance's root is the same directory."""
    made = Notified(tmp_path / "notify")
    yield made
    made.close()


@pytest.fixture
def echo() -> Iterator[Endpoint]:
    """An endpoint that rejects every row, and repeats it in the answer, as FastAPI does."""
    made = Endpoint()
    made.default = lambda request: request.answer(422, request.body)
    yield made
    made.down()


def for_everybody(instance: Instance) -> dict[str, str]:
    """Return all that users other than the owner can read, by where it is."""
    spool, layout = instance.spool, instance.layout
    stranger = query.Asker(uid=os.getuid() + 1, is_administrator=False, reads_all=False)
    for job in spool.all_jobs().values():
        for read in (query.show, query.predictions, query.losses, query.glance):
            with pytest.raises(NotPermittedError):
                read(spool, layout, str(job.id), stranger)
    with sqlite3.connect(layout.database_path) as db:
        jobs = db.execute("SELECT * FROM jobs").fetchall()
    notices = notification.notices_dir(layout)
    return {
        "the log": instance.log,
        "the list": json.dumps(query.list_jobs(spool, layout, "", stranger)),
        "the overview": json.dumps(query.overview(spool, layout, query.Choice(), stranger)),
        "the refusals": repr([query.refusal(spool, f"{name}.json", stranger) for name in (*ROWS, *SPECS)]),
        "the table of jobs": repr(jobs),
        "the index": layout.index_path.read_text() if layout.index_path.exists() else "",
        "metrics": metrics.scrape(Source(layout), stranger).decode(),
        "notices": "".join(path.read_text() for path in sorted(notices.rglob("*")) if path.is_file()),
    }


def for_the_owner(instance: Instance) -> str:
    """Return what the owner of all jobs is shown of them, and the reasons beside the rejected files."""
    told = [*instance.rejected().values()]
    for job in instance.spool.all_jobs().values():
        told.append(json.dumps(query.show(instance.spool, instance.layout, str(job.id)), ensure_ascii=False))
        files = instance.layout.job(job.id)
        shown = [files.report_path, *files.dir.glob("attempts/*/worker.log")]
        told += [path.read_text() for path in shown if path.exists()]
    return "\n".join(told)


def honectl(instance: Instance, *arguments: str) -> str:
    done = instance.honectl(*arguments)
    assert done.stderr == ""
    return done.stdout


def check(places: dict[str, str]) -> None:
    shown = {(word, place): text for place, text in places.items() for word in WORDS if word in text.lower()}
    assert not shown, "\n".join(
        f"{place} shows {WORDS[word]}: {line}"
        for (word, place), text in shown.items()
        for line in text.splitlines()
        if word in line.lower()
    )


def test_what_is_in_rows_prompts_templates_and_job_files_is_shown_to_their_owner_alone(
    real: RealInstance, systemd: Notified, echo: Endpoint
) -> None:
    real.environment["NOTIFY_SOCKET"] = str(systemd.path)
    plug_in(real)
    (real.root / "template.jinja").write_text(TEMPLATE)
    (real.root / "parrot.jinja").write_text(PARROT)
    rows = write_rows(real.root / "good.jsonl", GOOD)
    model = build_checkpoint(real.root / "tiny", num_layers=1, hidden_size=32)
    keys: dict[str, Any] = {
        "base_model": str(model),
        "datasets": [{"path": str(rows)}],
        "eval_split": 0.25,
        "backend": "transformers",
        "lora": {"r": 2},
        "retry": {"max_attempts": 1},
        "training": {"max_steps": 2, "per_device_train_batch_size": 2, "eval_strategy": "steps", "eval_steps": 1},
    }
    real.configure(
        f'[reporting]\nmetrics_api_url = "{echo.url}"\nflush_sec = 1.0\n'
        '[notify]\nadmin_webhook = "http://127.0.0.1:9/hook"\nadmin_states = ["succeeded", "failed"]\n'
    )
    real.drop(
        "guarded",
        name="guarded",
        chat_template=str(real.root / "template.jinja"),
        predictions={"prompts": ["zqprompt"], "max_new_tokens": 4},
        guard={"metric": "parrot", "num_samples": 2, "max_drop": 0.1},
        **keys,
    )
    real.drop("parrots", name="parrots", chat_template=str(real.root / "parrot.jinja"), **keys)
    drop_bad(real)
    real.start("--drain", "--verbose")
    assert real.wait(deadline_sec=300) == 0
    assert echo.requests
    outcomes = {name: real.show(name)["outcome"] for name in ("guarded", "parrots")}
    assert outcomes == {"guarded": "regressed", "parrots": "mask_invalid"}
    kept = {name for name in ROWS if name.startswith("some-")}
    assert {name.removesuffix(".json") for name in real.rejected()} == {*ROWS, *SPECS} - kept
    assert "STATUS=running" in systemd.said()
    check({**for_everybody(real), "STATUS": systemd.said()})
    owners = for_the_owner(real)
    assert [word for word in WORDS if word not in owners] == []
    assert "trained between ⟦⟧: " in honectl(real, "show", "parrots")
    logs = honectl(real, "logs", "parrots")
    assert "message 3: 'zqtool" in logs
    assert "trained between ⟦⟧: " in logs
    [answer] = json.loads(honectl(real, "check", "--json", str(real.kept("weight.json"))))
    for error in (answer["error"], *answer["faults"]):
        assert "`weight` is …, but" in error["message"]
        assert "`weight` is 'zqanswer', but" in error["evidence"]


def test_what_a_worker_prints_before_it_crashes_and_what_it_dies_of_stay_in_its_own_log(instance: Instance) -> None:
    rows = write_rows(instance.root / "good.jsonl", GOOD)
    instance.drop("spill", name="spill", datasets=[{"path": str(rows)}], retry={"max_attempts": 1})
    assert instance.drain() == 0
    job = instance.job("spill")
    assert job is not None
    assert job.outcome == "killed"
    log = instance.layout.job(job.id).attempt(1).log_path.read_text()
    assert log.count("zquser") == 2, "printed, and in the traceback"
    assert "the first row: …" in instance.log
    assert "zquser" in honectl(instance, "logs", "spill")
    check(for_everybody(instance))
