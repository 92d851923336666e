"""Data sets remembered between checks: unchanged ones without a warning; the memory grants no right to read."""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import PIL.Image
import pytest

from honed.check import datacheck
from honed.check.datacheck import Cache, Looked
from honed.check.policy import Policy
from honed.inputs import basemodel, dataset
from honed.inputs.basemodel import BaseModelInfo
from honed.spec.config import Config, PolicyConfig
from honed.spec.spec import JobSpec
from honed.system.error import DatasetError
from honed.system.layout import Layout
from zoo import plain


class Desk:
    """A data set, a job that names it, and a count of its inspections."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.rows = plain.write_dataset(path / "rows.jsonl")
        self.layout = Layout(path / "root")
        self.cache = Cache()
        self.num_looks = 0
        inspect = dataset.inspect

        def counted(*given: Any, **named: Any) -> dataset.Inspection:
            self.num_looks += 1
            return inspect(*given, **named)

        monkeypatch.setattr(dataset, "inspect", counted)

    def check(
        self,
        *,
        has_chat_template: bool = True,
        rights: Policy | None = None,
        model: BaseModelInfo | None = None,
        **keys: Any,
    ) -> Looked:
        named = {"path": str(self.rows)} | keys
        spec = JobSpec.model_validate(plain.spec(self.path / "model", self.rows, datasets=[named]))
        rights = rights or Policy.of(self.layout, Config(), None)
        return datacheck.check(spec, model, rights, has_chat_template=has_chat_template, cache=self.cache)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(tmp_path, monkeypatch)


@pytest.fixture
def settled(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    """A desk whose files have not been modified for long enough."""
    monkeypatch.setattr(datacheck, "SETTLED_NS", 50_000_000)
    time.sleep(0.06)
    yield desk


def test_a_data_set_of_which_only_the_first_rows_are_read_is_reported_as_sampled(desk: Desk) -> None:
    assert not desk.check().is_sampled
    row = desk.rows.read_text().splitlines()[0]
    desk.rows.write_text(f"{row}\n" * (datacheck.NUM_ROWS + 1))
    assert desk.check().is_sampled


def test_an_unchanged_data_set_is_looked_at_once_and_told_of_the_same(settled: Desk) -> None:
    first = settled.check()
    assert first.num_rows
    assert first.num_row_tokens
    assert [settled.check() for _ in range(3)] == [first] * 3
    assert settled.num_looks == 1


def test_a_file_that_has_just_been_written_is_looked_at_each_time(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datacheck, "SETTLED_NS", 3600 * 10**9)  # however long the checks take
    desk.check()
    desk.check()
    assert desk.num_looks == 2


def test_another_reading_of_the_same_file_is_another_look(settled: Desk) -> None:
    settled.check()
    with pytest.raises(DatasetError):
        settled.check(format="alpaca")
    settled.check(columns={"instruction": "nowhere"})
    assert settled.num_looks == 3


def test_rows_that_were_added_are_looked_at(settled: Desk) -> None:
    settled.check()
    text = settled.rows.read_text()
    settled.rows.write_text("no JSON\n" + text)
    with pytest.raises(DatasetError, match="line 1"):
        settled.check()


def test_a_file_in_its_place_of_the_same_size_and_time_is_looked_at(settled: Desk) -> None:
    settled.check()
    info = settled.rows.stat()
    other = settled.path / "other.jsonl"
    other.write_bytes(b"!" * info.st_size)
    os.utime(other, ns=(info.st_atime_ns, info.st_mtime_ns))
    other.rename(settled.rows)
    with pytest.raises(DatasetError, match="line 1"):
        settled.check()


def test_a_file_written_over_in_place_with_its_old_time_is_looked_at(settled: Desk) -> None:
    settled.check()
    info = settled.rows.stat()
    with settled.rows.open("r+b") as file:
        file.write(b"!" * info.st_size)
    os.utime(settled.rows, ns=(info.st_atime_ns, info.st_mtime_ns))
    with pytest.raises(DatasetError, match="line 1"):
        settled.check()


def test_a_file_that_joins_a_directory_is_looked_at(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datacheck, "SETTLED_NS", -1)
    directory = desk.path / "many"
    directory.mkdir()
    plain.write_dataset(directory / "a.jsonl")
    num_rows = desk.check(path=str(directory)).num_rows
    plain.write_dataset(directory / "b.jsonl")
    assert num_rows is not None
    assert desk.check(path=str(directory)).num_rows == 2 * num_rows


def test_a_warning_is_told_of_each_time(settled: Desk) -> None:
    settled.rows.write_text(settled.rows.read_text() + '{"something": "else"}\n')
    time.sleep(0.06)
    first = settled.check()
    assert ["rows.jsonl, line 9" in warning for warning in first.warnings] == [True]
    assert settled.check().warnings == first.warnings


def test_columns_that_are_not_read_are_told_once_a_data_set_with_how_a_weight_is_written(settled: Desk) -> None:
    turns = '"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]'
    settled.rows.write_text(f'{{"id": 1, "weight": 0.5, {turns}}}\n' * 3)
    time.sleep(0.06)
    (told,) = settled.check().warnings
    assert "unused columns: `id`, `weight`. `weight` of a row has no effect" in told
    assert "set `weight: 0` in its message" in told
    assert settled.check().warnings == [told]
    assert settled.num_looks == 1
    settled.rows.write_text('{"text": "a", "source": "web"}\n')
    assert [told.partition(": ")[2] for told in settled.check().warnings] == ["unused columns: `source`"]


def test_rows_without_a_turn_to_train_on_are_counted_and_refused_where_there_are_no_others(desk: Desk) -> None:
    row = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"%s}]}\n'
    desk.rows.write_text(row % "" + row % ', "weight": 0')
    assert [
        "1 of the first 2 rows have weight 0 on every assistant turn" in told for told in desk.check().warnings
    ] == [True]
    desk.rows.write_text(row % ', "weight": 0')
    with pytest.raises(DatasetError, match="nothing is left to train on"):
        desk.check()


def test_a_prefix_model_is_given_no_rows_with_two_trained_answers(settled: Desk) -> None:
    model = replace(basemodel.inspect(plain.write_base_model(settled.path / "model")), model_type="paligemma")
    asked, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    one, two = {"messages": [asked, said]}, {"messages": [asked, said, asked, said]}
    weighed = {"messages": [asked, {**said, "weight": 0}, asked, said]}
    settled.rows.write_text("".join(json.dumps(row) + "\n" for row in (one, two)))
    time.sleep(0.06)
    settled.check()  # another model takes them, and they are remembered
    with pytest.raises(DatasetError, match=r"datasets\.0: .*line 2: 2 turns of the assistant are trained on") as caught:
        settled.check(model=model)
    assert "`weight: 0`" in caught.value.hint
    settled.rows.write_text("".join(json.dumps(row) + "\n" for row in (one, weighed)))
    assert settled.check(model=model).warnings == []


def test_a_column_that_looks_like_pictures_is_told_of_each_time(settled: Desk) -> None:
    settled.rows.write_text('{"text": "a", "photo": "cat.png"}\n' * 3)
    time.sleep(0.06)
    first = settled.check()
    assert ["`photo` seems to contain images" in warning for warning in first.warnings] == [True]
    assert settled.check().warnings == first.warnings


def test_a_column_that_is_nowhere_is_told_of_each_time(settled: Desk) -> None:
    first = settled.check(columns={"instruction": "nowhere"})
    assert ["`columns` names `nowhere`" in warning for warning in first.warnings] == [True]
    assert settled.check(columns={"instruction": "nowhere"}).warnings == first.warnings


def test_a_picture_that_is_gone_meanwhile_is_missed(settled: Desk) -> None:
    PIL.Image.new("RGB", (32, 32)).save(settled.path / "cat.png")
    parts = [{"type": "image", "image": "cat.png"}, {"type": "text", "text": "what?"}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": "a cat"}]
    settled.rows.write_text(json.dumps({"messages": turns}) + "\n")
    time.sleep(0.06)
    assert len(settled.check().attached) == 1
    (settled.path / "cat.png").unlink()
    with pytest.raises(DatasetError, match=r"cat\.png"):
        settled.check()


def test_a_file_that_changes_while_it_is_looked_at_is_not_remembered(
    settled: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    inspect = dataset.inspect

    def interrupted(*given: Any, **named: Any) -> dataset.Inspection:
        found = inspect(*given, **named)
        settled.rows.touch()
        return found

    monkeypatch.setattr(dataset, "inspect", interrupted)
    settled.check()
    assert not settled.cache._seen


def test_a_directory_of_many_files_is_remembered_as_one_thing(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datacheck, "SETTLED_NS", -1)
    directory = desk.path / "many"
    directory.mkdir()
    for number in range(300):
        (directory / f"{number}.jsonl").write_text('{"text": "a"}\n')
    desk.check(path=str(directory))
    ((key, seen),) = desk.cache._seen.items()
    assert len(key) == 32
    assert len(pickle.dumps(seen)) < 1000


def test_what_was_remembered_is_no_leave_to_read_it(settled: Desk) -> None:
    settled.check()
    stranger = Policy.of(settled.layout, Config(policy=PolicyConfig(allowed_paths=["/srv/elsewhere"])), None)
    with pytest.raises(DatasetError, match="outside the directories that jobs may read"):
        settled.check(rights=stranger)
    assert settled.num_looks == 1


def test_rows_that_need_a_template_are_refused_without_one_though_remembered(settled: Desk) -> None:
    settled.rows.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    time.sleep(0.06)
    settled.check()
    with pytest.raises(DatasetError, match="chat template"):
        settled.check(has_chat_template=False)
    assert settled.num_looks == 1


def test_only_so_many_are_remembered(settled: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datacheck, "MAX_REMEMBERED", 2)
    for number in (1, 2, 3):
        settled.check(max_rows=number)
    settled.check(max_rows=3)
    settled.check(max_rows=2)
    assert settled.num_looks == 3
    settled.check(max_rows=1)
    assert settled.num_looks == 4
