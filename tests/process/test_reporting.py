"""From a worker's events to a metrics API: through the daemon, the outbox and honed-send, in the real processes."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import endpoint as api
import pytest
from endpoint import Endpoint, refuse
from harness import Instance

from honed.job.job import State
from honed.send import outbox
from waiting import wait_for

TOKEN = "s3cret-t0ken"


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with api.running() as made:
        yield made


def report_to(instance: Instance, endpoint: Endpoint, *more: str) -> None:
    token = instance.root / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    lines = [
        f'metrics_api_url = "{endpoint.url}"',
        f'token_file = "{token}"',
        "retry_delay_sec = 0.05",
        "max_retry_delay_sec = 0.5",
    ]
    instance.configure("\n".join(["[reporting]", *lines, *more, ""]))


def figures(instance: Instance, sql: str) -> list[tuple[object, ...]]:
    return sorted(sqlite3.connect(instance.layout.database_path).execute(sql).fetchall(), key=str)


def arrived(endpoint: Endpoint, kind: str, *columns: str) -> list[tuple[object, ...]]:
    return sorted((tuple(row[column] for column in columns) for row in endpoint.named(kind)), key=str)


METRICS = "SELECT CAST(job_id AS TEXT), attempt, step, epoch, name, value, created_at FROM metrics"
METRIC = ("job_id", "attempt", "step", "epoch", "name", "value", "created_at")
PREDICTIONS = "SELECT CAST(job_id AS TEXT), user_id, step, sample_index, prompt, prediction FROM training_predictions"
PREDICTION = ("job_id", "user_id", "step", "sample_index", "prompt", "prediction")


def assert_all_arrived(instance: Instance, endpoint: Endpoint) -> None:
    """Check that the endpoint has the database's rows, row for row."""
    assert figures(instance, METRICS)
    assert arrived(endpoint, "value", *METRIC) == figures(instance, METRICS)
    assert arrived(endpoint, "prediction", *PREDICTION) == figures(instance, PREDICTIONS)


def test_every_metric_and_prediction_arrives_before_a_drained_honed_ends(
    instance: Instance, endpoint: Endpoint
) -> None:
    endpoint.replies = [refuse(500), api.speak_no_http, api.show_a_login_page]
    report_to(instance, endpoint)
    for number in range(3):
        instance.drop(f"job{number}", name=f"report-4.{number}")
    assert instance.drain() == 0
    assert_all_arrived(instance, endpoint)
    assert max(endpoint.num_times.values()) == 1
    assert {request.headers["Authorization"] for request in endpoint.requests} == {f"Bearer {TOKEN}"}


def test_without_an_address_nothing_is_kept_and_nobody_is_started(instance: Instance) -> None:
    instance.drop("job", name="report-2")
    assert instance.drain() == 0
    assert not instance.layout.outbox_dir.exists()


def test_training_does_not_wait_for_an_endpoint_that_is_down(instance: Instance, endpoint: Endpoint) -> None:
    """Metrics from the outage arrive once the endpoint is up, although honed was restarted in between."""
    endpoint.down()
    report_to(instance, endpoint, "flush_sec = 3")
    instance.drop("job", name="report-3")
    assert instance.drain() == 0
    assert instance.wait_state("report-3", State.SUCCEEDED)
    assert "not delivered, retrying" in instance.log
    assert "Connection refused" in instance.log
    endpoint.up()
    report_to(instance, endpoint)
    assert instance.drain() == 0
    assert_all_arrived(instance, endpoint)


def test_kills_of_honed_lose_no_row_and_count_none_twice(instance: Instance, endpoint: Endpoint) -> None:
    report_to(instance, endpoint)
    instance.drop("job", name="report-40")
    for turn in range(5):
        instance.start()
        wait_for(lambda turn=turn: len(endpoint.rows) > 5 * turn, what="rows")  # type: ignore[misc]
        instance.kill(signal.SIGKILL)
    assert instance.drain() == 0
    assert_all_arrived(instance, endpoint)


def test_a_deleted_database_loses_no_row(instance: Instance, endpoint: Endpoint) -> None:
    """Events that the worker wrote while honed was down are new to the outbox, too."""
    report_to(instance, endpoint)
    instance.drop("job", name="report-20")
    instance.start()
    wait_for(lambda: endpoint.rows, what="rows")
    instance.kill(signal.SIGKILL)
    wait_for(instance.layout.job(1).attempt(1).exit_path.exists, what="the worker's end")
    for path in instance.layout.state_dir.glob("honed.db*"):
        path.unlink()
    assert instance.drain() == 0
    assert_all_arrived(instance, endpoint)


def test_rows_that_find_no_room_are_counted_and_said(instance: Instance, endpoint: Endpoint) -> None:
    endpoint.default = refuse(503)
    report_to(instance, endpoint, "max_outbox_bytes = 2000", "flush_sec = 0")
    instance.drop("job", name="report-20")
    assert instance.drain() == 0
    assert instance.wait_state("report-20", State.SUCCEEDED)
    assert "it has reached reporting.max_outbox_bytes (2000)" in instance.log
    assert "rows for the metrics API" in instance.log
    num_lost = outbox.num_lost(instance.layout.outbox_dir)
    endpoint.default = api.Request.accept
    report_to(instance, endpoint)
    assert instance.drain() == 0
    num_all = len(figures(instance, METRICS)) + len(figures(instance, PREDICTIONS))
    assert 0 < num_lost == num_all - len(endpoint.rows)


def test_a_platform_names_the_job_and_its_user(instance: Instance, endpoint: Endpoint) -> None:
    instance.environment |= {
        "METRICS_API_URL": endpoint.url,
        "JOB_ID": "db0a2144",
        "JOB_USER_ID": "anna",
        "JOB_TOKEN": TOKEN,
    }
    instance.drop("job", name="report-2")
    assert instance.drain() == 0
    assert {(row["job_id"], row["user_id"], row["honed_job"]) for row in endpoint.rows.values()} == {
        ("db0a2144", "anna", 1)
    }
    assert "JOB_TOKEN in the environment is ignored" in instance.log
    assert endpoint.requests[0].headers["Authorization"] is None
    assert TOKEN not in instance.log


def test_a_token_is_in_no_file_and_no_process_of_the_instance(instance: Instance, endpoint: Endpoint) -> None:
    report_to(instance, endpoint)
    instance.is_warm = False  # a fork's environ and cmdline are those of the process that it was forked from
    instance.environment |= {"JOB_TOKEN": TOKEN, "HONED_TEST_SEEN": "in environ"}
    instance.drop("job", name="slow-4000")
    instance.start()
    wait_for(lambda: endpoint.rows, what="rows")
    worker = instance.layout.job(1).attempt(1).dir / "lock"
    pid = int(worker.read_text().partition('"worker_pid": ')[2].partition(",")[0])
    environ = Path(f"/proc/{pid}/environ").read_bytes()
    assert b"HONED_TEST_SEEN=in environ" in environ
    assert TOKEN.encode() not in environ
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:  # it ended meanwhile
            continue
        assert TOKEN.encode() not in command
    instance.stop()
    for path in instance.root.rglob("*"):
        if path.is_file() and path.name != "token":
            assert TOKEN.encode() not in path.read_bytes(), path


def test_a_reload_begins_and_ends_the_sending(instance: Instance, endpoint: Endpoint) -> None:
    instance.start()
    report_to(instance, endpoint)
    assert instance.process is not None
    instance.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "sends metrics and predictions" in instance.log, what="honed-send")
    instance.drop("job", name="report-2")
    instance.wait_state("report-2", State.SUCCEEDED)
    wait_for(lambda: len(endpoint.rows) == 11, what="all rows")
    instance.configure("")
    instance.process.send_signal(signal.SIGHUP)
    wait_for(lambda: instance.log.count("configuration reloaded") >= 2, what="the reload")
    instance.drop("job", name="report-3")
    instance.wait_state("report-3", State.SUCCEEDED)
    instance.stop()
    assert len(endpoint.rows) == 11


def test_a_database_that_takes_nothing_for_a_while_floods_nobody(instance: Instance, endpoint: Endpoint) -> None:
    """Events that are read again because the database failed are not sent again."""
    report_to(instance, endpoint)
    instance.start()
    wait_for(instance.layout.database_path.exists, what="the database")
    with contextlib.closing(sqlite3.connect(instance.layout.database_path, isolation_level=None)) as holder:
        holder.execute("CREATE TRIGGER busy BEFORE INSERT ON metrics BEGIN SELECT RAISE(ABORT, 'not now'); END")
        instance.drop("job", name="slow")
        wait_for(lambda: instance.log.count("not now") >= 3, what="three tries")
        holder.execute("DROP TRIGGER busy")
    wait_for(lambda: len(figures(instance, METRICS)) > 20, what="figures")
    wait_for(lambda: len(endpoint.rows) > 20, what="rows")
    assert max(endpoint.num_times.values()) == 1
