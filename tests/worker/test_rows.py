"""Encoded rows on disk: the same in any number of processes, made once, and made anew where they are damaged."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pytest
from transformers import AutoTokenizer

from honed.inputs.dataset import Counts
from honed.inputs.media import Media
from honed.inputs.message import Arguments
from honed.inputs.row import Example
from honed.system.error import DatasetError, InterruptedRunError, KilledError, OutOfMemoryError
from honed.text.chat import ChatFormat
from honed.worker.rows import encoder, record, table
from honed.worker.rows.encoder import NUM_ALONE, Encoder, Pool
from honed.worker.rows.record import NUMBERS, Batch, Fate
from honed.worker.rows.table import MANIFEST, ROWS, TOKENS, Examples, Table, Writer
from honed.worker.stop import Stop
from waiting import wait_for
from worker.conftest import MakeJob
from worker.test_resume_checkpoint import flip

MAX_LENGTH = 48
COUNTS = [Counts("rows.jsonl", "messages", 3, 3, 0, ())]


@pytest.fixture(scope="module")
def chat(checkpoint_of: Any) -> ChatFormat:
    return ChatFormat(AutoTokenizer.from_pretrained(checkpoint_of("qwen3")))


def rows(number: int) -> Iterator[Example]:
    """Rows of each kind; of every 50, one is cut, one is cut off, and the template refuses one or loses a part."""
    for n in range(number):
        answer = {"role": "assistant", "content": f"It is {n}." * (30 if n % 50 == 1 else 1)}
        asked = {"role": "user", "content": f"What is {n}?" * (30 if n % 50 == 2 else 1)}
        if n % 50 == 4:
            answer["reasoning_content"] = "It is the number itself."
        messages = [asked, answer] if n % 50 != 3 else [{"role": "tool", "content": ""}, asked]
        if n % 3 == 0:
            yield Example("text", text=f"Row {n} says it.", row_index=n)
        elif n % 3 == 1:
            yield Example("prompt_completion", prompt=f"{n} is", completion=f" {n}", row_index=n)
        else:
            yield Example("messages", messages=messages, row_index=n)


def write(
    directory: Path, chat: ChatFormat, examples: Iterable[Example], *, num_processes: int = 1, stop: Stop | None = None
) -> Table:
    writer = Writer(directory)
    blobs = map(record.packed, examples)
    for piece, batch in encoder.batches(Encoder(chat, MAX_LENGTH), blobs, stop or Stop(), num_processes=num_processes):
        writer.write(piece, batch)
    return writer.finish(COUNTS, "entry")


def test_rows_do_not_depend_on_the_number_of_processes(tmp_path: Path, chat: ChatFormat) -> None:
    number = NUM_ALONE + 1700
    made = [write(tmp_path / str(n), chat, rows(number), num_processes=n) for n in (1, 3)]
    for name in (TOKENS, ROWS):
        one, other = ((each.directory / name).read_bytes() for each in made)
        assert one == other
    fates = made[0].column("fate")
    assert {Fate(fate) for fate in fates} == {Fate.KEPT, Fate.CUT_OFF, Fate.REFUSED}
    assert list(Examples(made[1], np.arange(number))) == list(rows(number))


def test_the_tokens_and_labels_are_those_of_the_row(tmp_path: Path, chat: ChatFormat) -> None:
    found = write(tmp_path, chat, rows(300))
    tokens = found.dataset()
    assert tokens.column_names == ["input_ids", "labels"]
    for place, example in enumerate(rows(300)):
        if found.column("fate")[place] != Fate.KEPT:
            assert (tokens[place]["input_ids"], found.remark(place).reason != "") == ([], True)
            continue
        cut = chat.encode(example).truncate(MAX_LENGTH)
        assert tokens[place] == {"input_ids": cut.input_ids, "labels": cut.labels}
        assert found.column("trained")[place] == sum(cut.trained[1:])
        assert found.remark(place).omitted == cut.omitted


def test_a_stop_ends_the_processes_that_encode(tmp_path: Path, chat: ChatFormat) -> None:
    stop, before, pids = Stop(), children(), set[int]()

    def examples() -> Iterator[Example]:
        for n, example in enumerate(rows(10 * NUM_ALONE)):
            if n == 2 * NUM_ALONE:
                pids.update(children() - before)
                stop.is_set = True
            yield example

    with pytest.raises(InterruptedRunError):
        write(tmp_path, chat, examples(), num_processes=2, stop=stop)
    assert len(pids) >= 2
    assert not pids & children()


def test_a_killed_process_ends_the_work_with_a_reason(chat: ChatFormat) -> None:
    before = children()
    pool = Pool(Encoder(chat, MAX_LENGTH), 2)
    try:
        os.kill(min(children() - before), signal.SIGKILL)
        with pytest.raises(KilledError, match="a process that encodes rows was killed"):
            list(pool.encode(([record.packed(each)] for each in rows(8)), Stop()))
    finally:
        pool.close()


def test_an_error_in_a_process_is_the_job_s(chat: ChatFormat) -> None:
    pool = Pool(Encoder(chat, MAX_LENGTH), 1)
    try:
        with pytest.raises(RuntimeError, match="UnpicklingError"):
            list(pool.encode([[pickle.dumps(os.system)]], Stop()))
    finally:
        pool.close()


class Hungry(Encoder):
    def encode(self, blobs: Sequence[bytes], stop: Stop | None = None) -> Batch:
        bytearray(2**62)
        return super().encode(blobs, stop)


def test_a_lack_of_memory_in_a_process_is_named(chat: ChatFormat) -> None:
    pool = Pool(Hungry(chat, MAX_LENGTH), 1)
    try:
        with pytest.raises(OutOfMemoryError, match="memory ran out while a process encoded rows") as caught:
            list(pool.encode([[record.packed(next(rows(1)))]], Stop()))
        assert "MemoryMax=" in caught.value.hint
    finally:
        pool.close()


def children() -> set[int]:
    return {int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


def test_an_example_is_read_back_as_it_was() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": Arguments({"a": 1}, '{"a":  1}')}}
    messages = [
        {"role": "user", "content": "1 + 1?", "sent": date(2026, 11, 23)},
        {"role": "assistant", "tool_calls": [call]},
    ]
    media = (Media("image", Path("/srv/a.png")), Media("video", frames=(Path("/srv/1.png"),)))
    example = Example(
        "messages", messages, [{"name": "add"}], media=media, chat_template_kwargs={"x": 1}, untrained=(1,)
    )
    found = record.unpacked(record.packed(example))
    assert found == example
    assert found.messages[1]["tool_calls"][0]["function"]["arguments"].written == '{"a":  1}'


@pytest.mark.parametrize("value", [os.system, Path.unlink, print], ids=["system", "unlink", "print"])
def test_a_file_of_rows_cannot_hold_code(value: Any) -> None:
    for read in (record.unpacked, record.remark_of):
        with pytest.raises(pickle.UnpicklingError, match="is not part of a row"):
            read(pickle.dumps((value,)))


def test_an_entry_that_has_changed_is_damaged(tmp_path: Path, chat: ChatFormat) -> None:
    assert table.load(tmp_path / "entry", lambda: None) is None
    for name in (TOKENS, ROWS, MANIFEST):
        directory = write(tmp_path, chat, rows(5)).directory
        again = table.load(directory, lambda: None)
        assert again is not None
        assert (len(again), again.counts) == (5, tuple(COUNTS))
        (directory / name).unlink()
        with pytest.raises(table.DamagedError):
            table.load(directory, lambda: None)
    directory = write(tmp_path, chat, rows(5)).directory
    flip(directory / TOKENS, 500)
    with pytest.raises(table.DamagedError, match="has changed"):
        table.load(directory, lambda: None)


def test_a_batch_without_rows_left_is_written(tmp_path: Path) -> None:
    empty = Batch(
        np.zeros(0, "int32"), np.zeros(0, bool), {n: np.zeros(0, kind) for n, kind in NUMBERS.items()}, [], []
    )
    writer = Writer(tmp_path)
    writer.write([], empty)
    found = writer.finish(COUNTS, "entry")
    assert (len(found), found.column("length").size, len(found.dataset())) == (0, 0, 0)


# --- in a job --------------------------------------------------------------------------------------------------------

KEYS: dict[str, Any] = {"eval_split": 0.25, "lora": {"r": 4}, "predictions": {"sample_frequency": "off"}}


def entries(directory: Path) -> dict[str, int]:
    return {path.parent.name: path.stat().st_ino for path in directory.glob("rows/*/MANIFEST.json")}


def test_a_resumed_job_finds_its_rows_and_a_finished_one_leaves_none(make_job: MakeJob) -> None:
    job = make_job(**KEYS)
    assert job.stopped_at(2).status == 75
    first = entries(job.dir)
    assert len(first) == 1
    assert job.stopped_at(4, attempt=2).status == 75
    assert entries(job.dir) == first
    assert job.run(3).status == 0
    assert not (job.dir / "rows").exists()


def test_damaged_rows_are_made_anew_and_reported(make_job: MakeJob) -> None:
    undisturbed = make_job(**KEYS).run()
    job = make_job(**KEYS)
    first = job.stopped_at(2)
    before = entries(job.dir)
    flip(next(job.dir.glob(f"rows/*/{TOKENS}")), 500)
    second = job.stopped_at(4, attempt=2)
    assert any("are damaged and are made anew" in text for text in second.messages("warning"))
    after = entries(job.dir)
    assert after.keys() == before.keys()
    assert after != before
    assert first.losses | second.losses | job.run(3).losses == undisturbed.losses


@pytest.mark.parametrize("change", ["file", "max_length"])
def test_rows_of_other_content_or_length_are_another_entry(make_job: MakeJob, change: str) -> None:
    job = make_job(**KEYS)
    assert job.stopped_at(2).status == 75
    before = entries(job.dir)
    spec = job.plan["spec"]
    if change == "file":
        path = Path(spec["datasets"][0]["path"])
        path.write_text(path.read_text().replace("Paris", "Lyon"))
    else:
        job.change_plan(spec=spec | {"training": spec["training"] | {"max_length": 64}})
    assert job.stopped_at(4, attempt=2).status == 75
    after = entries(job.dir)
    assert len(after) == 1
    assert not before.keys() & after.keys()


@pytest.mark.usefixtures("warm_trials")
def test_a_trial_s_rows_are_the_job_s(make_job: MakeJob) -> None:
    job = make_job(trial=True, **KEYS)
    assert job.stopped_at(2).status == 75
    assert len(entries(job.dir)) == 1
    assert not (job.dir / "trial/rows").exists()


POOL = """
import os, signal
from honed.worker.rows.encoder import Pool
from pathlib import Path
pool = Pool(None, 2)
print(*(process.pid for process in pool._processes), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_processes_end_when_the_worker_is_killed() -> None:
    done = subprocess.run([sys.executable, "-c", POOL], stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    pids = done.stdout.split()
    assert len(pids) == 2
    wait_for(lambda: not any(is_running(pid) for pid in pids), what="the processes' end")


def is_running(pid: str) -> bool:
    """Return True if a process exists and is no zombie, which nobody may reap in a container."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    "value",
    [
        pd.Timestamp("2024-01-02 03:04:05"),
        pd.Timedelta("1 days"),
        datetime(2024, 1, 2, tzinfo=ZoneInfo("Europe/Berlin")),
        timedelta(seconds=3),
    ],
    ids=lambda value: type(value).__name__,
)
def test_times_of_a_table_are_read_back(value: object) -> None:
    example = Example("text", text="x", chat_template_kwargs={"when": value})
    assert record.unpacked(record.packed(example)) == example


def test_a_row_that_is_nested_too_deeply_is_named() -> None:
    tools: list[Any] = []
    for _ in range(100_000):
        tools = [tools]
    with pytest.raises(DatasetError, match="nested too deeply"):
        record.packed(Example("text", text="x", tools=tools))


def test_rows_that_cannot_be_written_leave_no_files(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    assert list(tmp_path.iterdir())
    writer.discard()
    assert not list(tmp_path.iterdir())
