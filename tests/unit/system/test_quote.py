"""Quotes from a job's files: marked in transit, in no log, and complete for users who may read the job."""

from __future__ import annotations

import base64
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from honed.cli import joblog
from honed.inputs import row
from honed.inputs.attachment import RowError
from honed.job.arrival import Arrivals
from honed.job.event import EventWriter
from honed.job.job import Job
from honed.job.spool import Spool
from honed.send import notification
from honed.spec.jobfile import loads
from honed.spec.problem import Problem, faults, locate
from honed.spec.spec import InvalidSpecError
from honed.system import quote
from honed.system.error import BY_CODE, DatasetError, HonedError, InternalError, MaskError, SpecError, from_dict, said
from honed.system.layout import Layout
from honed.system.log import _Formatter, trace
from honed.system.notify import Notifier
from honed.system.personpath import PersonPath
from told import refused

SENTENCE = f"message 2: the role is {quote.mark(repr('moderator'))}, not one of user{quote.aside(' (nor bot)')}"
HIDDEN = "message 2: the role is …, not one of user"
SHOWN = "message 2: the role is 'moderator', not one of user (nor bot)"


def test_a_sentence_is_told_with_its_quotes_or_without() -> None:
    assert quote.hide(SENTENCE) == HIDDEN
    assert quote.show(SENTENCE) == SHOWN
    assert quote.hide(HIDDEN) == quote.show(HIDDEN) == HIDDEN


def test_a_quote_that_is_quoted_or_cut_stays_one() -> None:
    assert quote.hide(f"it says: {quote.mark(SENTENCE)}!") == "it says: …!"
    assert quote.show(quote.mark(SENTENCE)) == SHOWN
    for end in range(len(SENTENCE)):
        assert "moder" not in quote.hide(SENTENCE[:end])


def test_a_text_with_marks_of_its_own_neither_ends_a_quote_nor_hides_what_stands_behind_it() -> None:
    forged = quote.mark("a\ufdd2b") + " and " + quote.mark("\ufdd0c\ufdd1d")
    assert quote.hide(f"{forged}, so") == "… and …, so"


@pytest.mark.parametrize(
    ("name", "told"),
    [("question", "question"), ("a.b-c_2", "a.b-c_2"), ("What is it?", "…"), ("", "…"), ("x" * 61, "…")],
)
def test_a_name_is_no_quote_unless_it_may_be_a_sentence(name: str, told: str) -> None:
    assert quote.hide(quote.name(name)) == told


def test_columns_of_which_one_is_no_name_are_the_first_row_of_a_table_without_a_header() -> None:
    assert quote.hide(quote.names(["prompt", "answer"])) == "prompt, answer"
    made = quote.names(["What is it?", "Paris"])
    assert (quote.hide(made), quote.show(made)) == ("…", "What is it?, Paris")
    with refused(DatasetError, r"columns \(What is it\?, Paris\)") as caught:
        row.recognise({"What is it?": "a", "Paris": "b"})
    assert "columns (…)" in caught.value.message


def test_a_path_in_a_row_is_told_unless_it_may_be_a_sentence() -> None:
    assert quote.hide(quote.place("/srv/a/cat.png")) == "/srv/a/cat.png"
    assert quote.hide(quote.place("/srv/a/A cat on a mat")) == "…"


# -- errors -----------------------------------------------------------------------------------------------------------


def test_an_error_has_its_quotes_as_evidence_and_in_neither_message_nor_hint() -> None:
    error = DatasetError(SENTENCE, hint=f"write {quote.mark('it')} so")
    assert (error.message, error.evidence, error.shown, error.hint) == (HIDDEN, SHOWN, SHOWN, "write … so")
    assert str(error) == HIDDEN
    assert error.as_dict() == {"code": "dataset_invalid", "message": HIDDEN, "hint": "write … so", "evidence": SHOWN}
    assert "evidence" not in DatasetError("it is gone").as_dict()


def test_an_error_that_another_process_wrote_down_keeps_its_evidence_and_its_place() -> None:
    again = from_dict(json.loads(json.dumps(DatasetError(SENTENCE).as_dict())))
    assert (type(again), again.message, again.evidence) == (DatasetError, HIDDEN, SHOWN)
    again.surround("datasets.0: ")
    assert (again.message, again.shown) == (f"datasets.0: {HIDDEN}", f"datasets.0: {SHOWN}")


def test_an_error_that_is_made_of_another_quotes_what_that_quotes() -> None:
    for kind in BY_CODE.values():
        made = kind(f"datasets.0: {said(DatasetError(SENTENCE))}")
        assert (made.message, made.shown) == (f"datasets.0: {HIDDEN}", f"datasets.0: {SHOWN}")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("invalid literal: 'Paris'"), "…"),
        (KeyError("Paris"), "…"),
        (ValueError(""), ""),
        (FileNotFoundError(2, "No such file", "/srv/x"), "[Errno 2] No such file: '/srv/x'"),
        (OSError("a library's: Paris"), "…"),
        (ImportError("No module named 'av'"), "No module named 'av'"),
        (RowError(SENTENCE), HIDDEN),
    ],
)
def test_of_an_exception_everybody_is_told_what_the_system_says_and_no_library(error: Exception, told: str) -> None:
    assert quote.hide(said(error)) == told
    assert quote.show(said(error)) == quote.show(str(error))


def test_a_job_file_is_refused_with_its_keys_and_without_its_values() -> None:
    with pytest.raises(InvalidSpecError) as caught:
        loads(
            b'{"base_model": "/m", "datasets": [{"path": "/d"}], "predictions": {"prompts": "Who is Ann?"},'
            b' "training": {"learning_rate": "2e-4"}, "Who is Bob?": 1}',
            ".json",
        )
    error = caught.value
    assert error.message.splitlines() == [
        "line 1: training.learning_rate: expected a number, more than 0 and at most 1, got … (without quotes)",
        "line 1: predictions.prompts: expected a list of strings, or null, got …",
        "line 1: …: unknown key",
    ]
    assert "got 'Who is Ann?'" in error.evidence
    assert "'Who is Bob?': unknown key" in error.evidence
    _, prompts, _ = faults(error)
    assert (prompts["message"], prompts["evidence"]) == (
        "expected a list of strings, or null, got …",
        "expected a list of strings, or null, got 'Who is Ann?'",
    )


def test_the_place_in_a_job_file_is_put_before_both_sentences() -> None:
    error = DatasetError(f"/srv/rows.jsonl: {SENTENCE}")
    locate(error, {"datasets": [{"path": "/srv/rows.jsonl"}]}, {("datasets", 0, "path"): 3})
    assert error.message == f"line 3: datasets.0.path: /srv/rows.jsonl: {HIDDEN}"
    assert error.shown == f"line 3: datasets.0.path: /srv/rows.jsonl: {SHOWN}"
    [fault] = faults(error)
    assert (fault["message"], fault["evidence"]) == (f"/srv/rows.jsonl: {HIDDEN}", f"/srv/rows.jsonl: {SHOWN}")


def test_a_fault_without_quotes_has_no_evidence() -> None:
    assert "evidence" not in faults(InvalidSpecError([Problem("colour", 1, "unknown key")]))[0]
    assert "evidence" not in faults(SpecError("it is empty"))[0]


# -- where it goes ----------------------------------------------------------------------------------------------------


def test_a_log_hides_what_nobody_has_hidden_before_and_the_words_of_exceptions() -> None:
    record = logging.LogRecord("honed", logging.WARNING, "x.py", 1, "job 7: %s", (SENTENCE,), None)
    assert _Formatter(prefixed=True).format(record) == f"<4>job 7: {HIDDEN}"
    asked = "Who is Ann?"
    try:
        try:
            int(asked)
        except ValueError as error:
            raise DatasetError(SENTENCE) from error
    except DatasetError as error:
        told = trace(error)
    assert "Ann" not in told
    assert "moderator" not in told
    assert told.splitlines()[-1] == f"DatasetError: {HIDDEN}"
    assert "ValueError: …" in told
    assert f'File "{__file__}"' in told


def test_what_nobody_catches_is_told_without_its_words_in_any_thread() -> None:
    code = (
        "import threading; from honed.system.log import guard_tracebacks; guard_tracebacks()\n"
        "def fail(): int(''.join(['Who is ', 'Ann?']))\n"
        "thread = threading.Thread(target=fail); thread.start(); thread.join(); fail()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.count("line 2, in fail") == 2
    assert done.stderr.count("ValueError: …") == 2
    assert "Who is Ann" not in done.stderr


def test_what_the_check_of_a_job_file_stumbles_over_is_in_its_answer_and_not_in_the_journal(tmp_path: Path) -> None:
    """The same holds for a library's output during the check, from Python or from C."""
    code = (
        "import os, sys; from honed.check import preflight\n"
        "def fail(_, data, **__):\n"
        "    text = data.decode(); print(text); os.write(1, text.encode()); os.write(2, text.encode())\n"
        "    print(text, file=sys.stderr); int(text)\n"
        "preflight.jobfile.read = fail\n"
        f"sys.argv = ['preflight', '--root', {str(tmp_path / 'root')!r}]; preflight.main()\n"
    )
    asked = base64.b64encode(b"Who is Ann?").decode()
    request = {"id": 7, "spec_name": "asked", "spec": asked, "config": {}, "device": None, "uid": None, "earlier": {}}
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(request) + "\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    error = json.loads(done.stdout.removeprefix('{"ready": true}\n'))["error"]
    assert error["message"].endswith("ValueError: …")
    assert error["evidence"].endswith("ValueError: invalid literal for int() with base 10: 'Who is Ann?'")
    assert "line 4, in fail" in done.stderr
    assert done.stderr.endswith("ValueError: …\n")
    assert "Ann" not in done.stderr


def test_a_worker_tells_a_sentence_for_the_log_and_its_evidence_beside_it(tmp_path: Path) -> None:
    events = EventWriter(tmp_path / "events.jsonl")
    events.log("warning", SENTENCE)
    events.log("error", HIDDEN, evidence=SHOWN, code="mask_invalid")
    events.log("info", "nothing is quoted")
    events.close()
    told = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(each["message"], each.get("evidence"), each.get("code")) for each in told] == [
        (HIDDEN, SHOWN, None),
        (HIDDEN, SHOWN, "mask_invalid"),
        ("nothing is quoted", None, None),
    ]


def test_a_status_line_has_no_quotes(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    notifier = Notifier()
    monkeypatch.setattr(notifier, "_send", sent.append)
    notifier.status(f"not delivered: {SENTENCE}")
    assert sent == [f"STATUS=not delivered: {HIDDEN}"]


def test_a_notice_has_neither_what_an_error_quotes_nor_values_of_the_job_file() -> None:
    error = MaskError(SENTENCE, hint="look", fix={"predictions.prompts": ["Who is Ann?"]}).as_dict()
    shown = {
        "error": error,
        "metrics": {},
        "attempts": [],
        "artifacts": {"output_dir": "/o", "report": None},
        "submitted_at": "now",
    }
    job = Job(id=7, name="n", submitted_at=0.0, source="n.json", uid=1, output_dir="/o")
    made = notification.payload(job, shown)
    assert made["error"] == {"code": "mask_invalid", "message": HIDDEN, "hint": "look"}
    assert "moderator" not in json.dumps(made)
    assert "Ann" not in json.dumps(made)


def test_a_reason_quotes_and_is_for_its_dropper_alone(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    spool = Spool(layout)
    arrivals = Arrivals(spool)
    (spool.incoming_dir / "a.yaml").write_text("a: 1")
    claim = arrivals.claim(PersonPath.of(spool.incoming_dir / "a.yaml", 1))
    assert claim is not None
    reason = Path(str(arrivals.reject(claim, DatasetError(SENTENCE), when="now")))
    assert SHOWN in reason.read_text()
    assert reason.stat().st_mode & 0o777 == 0o600


def test_what_the_journal_does_not_quote_comes_behind_it_for_those_who_may_read_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    journalctl = tmp_path / "bin/journalctl"
    journalctl.parent.mkdir()
    journalctl.write_text(f"#!/bin/sh\necho 'the journal: {HIDDEN}'\n")
    journalctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{journalctl.parent}:{os.environ['PATH']}")
    layout = Layout(tmp_path)
    attempt = layout.job(7).attempt(1)
    attempt.dir.mkdir(parents=True)
    events = EventWriter(attempt.events_path)
    events.log("warning", SENTENCE)
    events.log("info", "nothing is quoted")
    events.close()
    job = {"id": 7, "state": "failed", "attempts": [{"number": 1}, {"number": 2}]}
    instance = SimpleNamespace(layout=layout, read=lambda *_: job)
    for follows in (False, True):
        options = SimpleNamespace(id="7", explain=False, follow=follows)
        assert joblog._follow_journal(instance, job, options) == 0  # type: ignore[arg-type]
        first, heading, *quoted = capfd.readouterr().out.splitlines()
        assert first == f"the journal: {HIDDEN}"
        assert heading == "-- attempt 1: text that the journal does not contain"
        assert [line.partition(" ")[2] for line in quoted] == [f"warning: {SHOWN}"]


def test_an_internal_error_is_told_by_its_kind() -> None:
    error = InternalError(f"ValueError: {said(ValueError('Paris'))}")
    assert (error.message, error.shown) == ("ValueError: …", "ValueError: Paris")
    assert isinstance(error, HonedError)
