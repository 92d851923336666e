"""The date that some chat templates write into a row: that of the job's acceptance, for the job's whole life."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
import transformers.utils.chat_template_utils as rendering

from honed.inputs.row import Example
from honed.text.chat import ChatFormat
from worker.conftest import MakeJob
from zoo.shipped import build_shipped, source

ROW = Example("messages", messages=[{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "That."}])
ACCEPTED = datetime(2024, 2, 29, 12, 30, tzinfo=UTC)


class _Later(datetime):
    @classmethod
    def now(cls, tz: object = None) -> datetime:  # noqa: ARG003
        return datetime(2031, 7, 4, tzinfo=UTC)


@pytest.mark.parametrize("name", ["llama3_2", "gptoss", "gptoss_training", "muse_glimmer"])
def test_a_row_is_the_same_on_every_day(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = ChatFormat(build_shipped(name), date=ACCEPTED)
    today = chat.encode(ROW), chat.prompt(ROW)
    monkeypatch.setattr(rendering, "datetime", _Later)
    assert (chat.encode(ROW), chat.prompt(ROW)) == today
    assert "2031" in ChatFormat(build_shipped(name)).prompt(ROW)[0]  # the clock is asked where no date is given
    assert "2024" in today[1][0]


def test_the_date_of_a_jobs_own_goes_first() -> None:
    chat = ChatFormat(build_shipped("llama3_2"), chat_template_kwargs={"date_string": "1 May 1999"}, date=ACCEPTED)
    assert "1 May 1999" in chat.prompt(ROW)[0]


def test_training_predictions_and_the_manifest_have_the_date_of_the_acceptance(
    make_job: MakeJob, tmp_path: Path
) -> None:
    template = tmp_path / "llama3_2.jinja"
    template.write_text(source("llama3_2"), encoding="utf-8")
    job = make_job("llama", lora={"r": 4}, chat_template=str(template), training={"max_steps": 1})
    job.change_plan(date=ACCEPTED.isoformat())
    ended = job.run()
    assert ended.status == 0, ended.result
    [example] = ended.of("example")
    assert "Today Date: 29 Feb 2024" in "".join(part["text"] for part in example["segments"])
    assert all("29 Feb 2024" in row["prompt"] for each in ended.of("predictions") for row in each["rows"])
    assert json.loads((job.output_dir / "honed.json").read_text())["plan"]["date"] == ACCEPTED.isoformat()
