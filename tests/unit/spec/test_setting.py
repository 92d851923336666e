"""Errors in honed.toml: reported as in a job file, with key, line and the name that was probably meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from honed.daemon.signals import Configuration
from honed.spec import config, setting
from honed.system.error import SpecError
from honed.system.layout import Layout


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[jobs]\nmax_runing = 2", "line 2: jobs.max_runing: unknown key (did you mean max_running?)"),
        ("[job]\nmax_running = 2", "line 1: job: unknown key (did you mean [jobs]?)"),
        ("\nmax_running = 2", "line 2: max_running: unknown key (belongs under [jobs])"),
        ("[policy]\nsettle_sec = 2", "line 2: policy.settle_sec: unknown key (belongs under [spool])"),
        ("[policy]\nstop_timeout = 2", "line 2: policy.stop_timeout: unknown key (did you mean stop_timeout_sec under"),
        ("[policy]\nHub = true", "line 2: policy.Hub: unknown key (did you mean hub?)"),
        ('[policy]\n"\\u001b[2J" = 2', "line 2: policy.'\\x1b[2J': unknown key"),
        ("[spool]\nsettle_sec = -1", "line 2: spool.settle_sec: expected a number, at least 0 and at most 60, got -1"),
        (
            "[spool]\nsettle_sec = nan",
            "line 2: spool.settle_sec: expected a number, at least 0 and at most 60, got nan",
        ),
        ("spool = 3", "line 1: spool: expected a mapping, got 3"),
        (
            "[jobs]\nrunner = 'docker'",
            "line 2: jobs.runner: expected one of auto, process, systemd, slurm, got 'docker'",
        ),
        ("[policy]\nallowed_paths = ['/srv',\n 'srv']", "line 3: policy.allowed_paths: use an absolute path"),
        ("[reporting]\nmetrics_api_url = 'ftp://x'", "reporting.metrics_api_url: not an HTTP or HTTPS URL, got"),
        ("[jobs]\nmax_running = 1\n[jobs]\n", "Cannot declare"),
        ("[device]\nhours = 'Mo 8:00-9:00'", "line 2: device.hours: 'Mo 8:00-9:00': 'Mo' is not a weekday; expected"),
        ("[device]\nhours = ['8:00-9:00',\n'8:00']", "device.hours: '8:00': expected weekdays and a range of times"),
        ("[device]\nhours = []", "line 2: device.hours: an empty list: without the key a device is always open"),
        ("[device]\nhours = 8", "line 2: device.hours: expected text or a list, each item text, or null, got 8"),
        ("[device.hours_of]\n0 = '24:00-8:00'", "device.hours_of: 0: '24:00-8:00': 24:00 can only be an end"),
        ("a = " + "[" * 5000, "nested too deeply"),
    ],
)
def test_what_is_wrong_is_told_with_its_key_its_line_and_the_right_name(text: str, told: str, tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    layout.config_path.parent.mkdir(parents=True)
    layout.config_path.write_text(text)
    with pytest.raises(SpecError) as raised:
        config.load(layout)
    assert raised.value.message.startswith(f"{layout.config_path}: ")
    assert told in raised.value.message
    assert raised.value.message.count("\n") == 0


def test_a_key_that_is_gone_is_ignored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(setting.GONE, "retention.max_events", "delete this line: events are kept as long as their job")
    layout = Layout(tmp_path)
    layout.config_dropin_dir.mkdir(parents=True)
    path = layout.config_dropin_dir / "50-mine.toml"
    path.write_text("[retention]\nmax_jobs = 7\nmax_events = 9\n")
    loaded = config.load(layout)
    assert loaded.retention.max_jobs == 7
    assert loaded.outdated == (
        f"{path}: line 3: retention.max_events: is no longer a key; it is ignored "
        "(delete this line: events are kept as long as their job)",
    )
    assert Configuration(layout, loaded).reload()
    assert [record.getMessage() for record in caplog.records] == 2 * list(loaded.outdated), "at the start and a reload"


def test_everything_wrong_is_told_at_once_in_the_order_of_the_lines(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    layout.config_path.parent.mkdir(parents=True)
    layout.config_path.write_text("# mine\n[policy]\nhubb = true\n[jobs]\nmax_running = 0\n")
    with pytest.raises(SpecError) as raised:
        config.load(layout)
    lines = [part.split(": ")[1] for part in raised.value.message.split("; ")]
    assert lines == ["line 3", "line 5"]
