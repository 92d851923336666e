"""One hostile job (its name, its rows, its worker's texts and its rejection) through all outputs: hostile text stays
text for every reader, be it a terminal, a browser, a shell, a spreadsheet, a database, a chat or a mail program.

honed's texts for systemd and its log, and rejected job files, are in test_hostile_jobs.py; the journal's protocol is in
unit/system/test_journal.py, the model card in unit/worker/test_card.py, a worker's own lines in test_shim.py.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import manual
import postbox
import pytest
from harness import DEADLINE_SEC, Instance, said_on_terminal
from hostile import ALL, FORMULAS, NAME, check_lines, without_colours
from postbox import PostOffice, Webhook
from prometheus_client.parser import text_string_to_metric_families
from test_notices import allow
from test_report import Page
from test_web import Web

from honed.job.job import State
from waiting import wait_for
from zoo.fuzz import check_shown

CHECKOUT = Path(__file__).parents[2]
#: Of a job file that is refused; a file's name may hold anything but a slash.
FILE = "a;$(touch PWNED) \"'<b>.json"
#: Its job's number: the refused file came first.
JOB = 2
#: honed-web's own scripts; the pages that honed writes have none.
SERVED = {"/live.js", "/list.js", "/uplot.js", "/plots.js"}
#: Elements with which a page could do more than show text.
ACTIVE = {"script", "img", "iframe", "object", "form", "base", "link"}


@dataclass(frozen=True)
class Told:
    """The instance of the hostile job, and the two receivers that were notified of its end."""

    instance: Instance
    hook: Webhook
    office: PostOffice


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    """An instance whose job has failed and notified its receivers; honed is down."""
    instance = Instance(tmp_path_factory.mktemp("hostile"))
    with postbox.open_both() as (hook, office):
        allow(instance, hook, office)
        instance.layout.config_dropin_dir.mkdir()
        (instance.layout.config_dropin_dir / "share.toml").write_text("[policy]\nshare_results = true\n")
        (instance.incoming_dir / FILE).write_text(json.dumps({"base_model": ALL, ALL: ALL}))
        notify = {"webhook": f"{hook.url}/anna", "mail": "anna@example.org"}
        instance.drop("hostile", name=NAME, notify=notify)
        assert instance.drain() == 0
        wait_for(lambda: hook.notices and office.mails, what="both told")
        yield Told(instance, hook, office)
        instance.end()


def honectl(instance: Instance, *arguments: str) -> str:
    return instance.honectl(*arguments, check=True).stdout


VERBS = (
    ["list"], ["list", "--all"], ["list", "--json"], ["show", str(JOB)], ["report", NAME], ["show", str(JOB), "--json"],
    ["logs", str(JOB)], ["logs", str(JOB), "--json"], ["watch", str(JOB)], ["watch", "--json"],
    ["predictions", str(JOB)], ["predictions", str(JOB), "--json"], ["predictions", str(JOB), "--jsonl"],
    ["pin", str(JOB)], ["unpin", NAME], ["hold", NAME], ["cancel", str(JOB)], ["release", NAME],
    ["prune", "--older-than", "0d", "--dry-run"], ["prune", str(JOB), "--dry-run"],
    ["show", ALL.replace("\0", "").encode(errors="ignore").decode()],
    ["prune", "--rejected", "--keep", "0", "--dry-run"], ["prune", "--rejected", "--keep", "0", "--dry-run", "--json"],
)  # fmt: skip


#: Of these the first of each kind of text: tables, lines and fields break elsewhere on a wider terminal.
WIDE = (["list", "--all"], ["show", str(JOB)], ["logs", str(JOB)], ["predictions", str(JOB)], ["watch", str(JOB)])


@pytest.mark.parametrize(("columns", "verbs"), [(80, VERBS), (160, WIDE)], ids=[80, 160])
def test_no_verb_paints_on_a_terminal_what_a_job_says(told: Told, columns: int, verbs: tuple[list[str], ...]) -> None:
    for arguments in verbs:
        said = said_on_terminal(told.instance, columns, *arguments)
        check_lines(without_colours(said.replace("\r\n", "\n")))
        assert "Traceback" not in said
    for arguments in (
        ["logs", str(JOB), "--raw"],
        ["predictions", str(JOB), "--csv"],
    ):  # a text of several lines has several
        check_shown(without_colours(said_on_terminal(told.instance, columns, *arguments).replace("\r\n", "\n")))


def test_no_cell_of_the_csv_is_a_formula_and_the_json_lines_are_exact(told: Told) -> None:
    text = honectl(told.instance, "predictions", str(JOB), "--csv")
    csv.field_size_limit(len(text))
    rows = {row["sample_index"]: row for row in csv.DictReader(io.StringIO(text, newline=""))}
    exact = [
        json.loads(line) for line in honectl(told.instance, "predictions", str(JOB), "--jsonl").split("\n") if line
    ]
    assert [row["prediction"] for row in exact[1:]] == list(FORMULAS)
    for number, formula in enumerate(FORMULAS, 1):
        for key in ("prompt", "ground_truth", "prediction"):
            cell = rows[str(number)][key]
            assert cell in {formula, f"'{formula}"}
            assert not re.match(r"[=+\-@\s＝＋－＠]", cell)
            assert f'"{cell.replace(chr(34), 2 * chr(34))}"' in text  # quoted: no other character ends the cell


def test_what_a_job_says_is_a_value_in_the_views(told: Told) -> None:
    db = sqlite3.connect(f"file:{told.instance.layout.database_path}?mode=ro", uri=True)
    assert db.execute("SELECT id, name, state FROM jobs_v1").fetchall() == [(JOB, NAME, "failed")]
    query = (
        "SELECT prompt, ground_truth, prediction, is_exact FROM predictions_v1 WHERE job_name = ? AND sample_index > 0"
    )
    assert db.execute(f"{query} ORDER BY sample_index", (NAME,)).fetchall() == [
        (text, text, text, 1) for text in FORMULAS
    ]
    assert {type(value) for (value,) in db.execute("SELECT value FROM metrics_v1")} <= {float}
    db.close()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_completions_offer_numbers_and_no_names(told: Told, tmp_path: Path) -> None:
    script = tmp_path / "honectl"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m honed.cli.honectl "$@"\n')
    script.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HONED_ROOT": str(told.instance.root)}
    words = (
        f"source {CHECKOUT}/etc/completions/honectl.bash; COMP_WORDS=(honectl show ''); COMP_CWORD=2; "
        "_shtab_honectl honectl '' show; printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    # What the other shells ask is the same line.
    for command, offered in ((words, [str(JOB)]), (manual.JOBS, [str(JOB)])):
        done = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, check=True, cwd=tmp_path, env=environment
        )
        assert done.stdout.split() == offered
    assert [path.name for path in tmp_path.iterdir()] == ["honectl"]


def test_a_mail_has_the_headers_of_ours_alone(told: Told) -> None:
    (mail,) = told.office.mails.values()
    assert sorted(map(str.lower, mail.keys())) == sorted(
        [
            "subject",
            "from",
            "to",
            "date",
            "message-id",
            "auto-submitted",
            "content-type",
            "content-transfer-encoding",
            "mime-version",
        ]
    )
    assert mail["To"] == "anna@example.org"
    assert "\n" not in str(mail["Subject"])
    assert mail.get_content_type() == "text/plain"
    check_lines(mail.get_content().replace("\r\n", "\n"))
    check_shown(str(mail["Subject"]))


def test_a_chat_calls_nobody_and_hides_no_address(told: Told) -> None:
    (notice,) = told.hook.notices.values()
    assert notice["name"] == NAME  # for programs: as it is
    text = notice["text"]
    check_lines(text)
    assert "channel" in text
    for sign in ("<", ">", "](", "@channel"):
        assert sign not in text


def test_pages_show_it_and_do_nothing(told: Told) -> None:
    instance = told.instance
    pages = [instance.layout.job(JOB).report_path.read_text(), instance.layout.index_path.read_text()]
    web = Web(instance)
    try:
        for path in ("/", f"/jobs/{JOB}"):
            status, headers, body = web.ask(path)
            assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
            pages.append(body.decode())
        answers = {
            path: web.ask(path)
            for path in ("/api/jobs", f"/api/jobs/{JOB}", f"/api/jobs/{JOB}/predictions", "/metrics")
        }
    finally:
        web.process.terminate()
        web.process.wait(DEADLINE_SEC)
    for content in pages:
        page = Page(content)
        assert NAME in page.shown
        links = [keys for tag, keys in page.elements if tag == "link"]
        assert all(keys == {"rel": "icon", "href": "data:,"} for keys in links)
        assert not {tag for tag, keys in page.elements if keys.get("src") not in SERVED} & (ACTIVE - {"link"})
        assert not [key for _, keys in page.elements for key in keys if key.startswith("on")]
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", content)
    for path, (status, headers, body) in answers.items():
        assert (status, headers["x-content-type-options"]) == (200, "nosniff")
        if path == "/metrics":
            assert list(text_string_to_metric_families(body.decode()))
        else:
            assert headers["content-type"] == "application/json"
            json.loads(body)
    assert json.loads(answers[f"/api/jobs/{JOB}"][2])["name"] == NAME


def test_a_refusal_is_text_and_its_first_line_is_ours(told: Told) -> None:
    (reason,) = told.instance.rejected().values()
    check_lines(reason)
    assert reason.startswith(f"{FILE} was refused at 20")
    assert re.fullmatch(r"Taken from incoming/ as [0-9]+, a file of the user [0-9]+\.", reason.split("\n")[1])
    assert [line for line in reason.split("\n") if line and not line.startswith("  ")][3:-1] == ["spec_invalid:"] + [
        line for line in reason.split("\n") if line.startswith(("What to do: ", "Change in the file:"))
    ]


def test_nothing_is_named_after_what_a_job_says_and_nothing_of_it_is_run(told: Told) -> None:
    places = (told.instance.layout.spool_dir, told.instance.layout.state_dir, told.instance.layout.runtime_dir)
    names = [path.name for place in places for path in place.rglob("*") if not path.name.startswith(FILE)]
    assert len(names) > 30
    assert [name for name in names if not re.fullmatch(r"[A-Za-z0-9._@-]+", name)] == []
    assert "PWNED" not in {path.name for path in Path.cwd().iterdir()} | {
        path.name for path in told.instance.root.iterdir()
    }
    job = told.instance.job(NAME)
    assert job is not None
    assert job.state is State.FAILED
    check_lines(told.instance.log)
