"""Rows that one job encoded, found by other jobs of the same user; and all that makes them other rows."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from honed.job.job import Job, State
from honed.job.row_cache import FILES, VARIABLE, RowCache, names
from honed.spec import jobfile
from honed.spec.spec import DatasetSpec
from honed.system.layout import Layout
from honed.text.chat import ChatFormat
from honed.worker import assignment
from honed.worker.rows import cache
from honed.worker.rows.table import MANIFEST, ROWS, TOKENS
from worker.conftest import Ended, MakeJob, WorkerJob
from worker.test_resume_checkpoint import flip

KEYS: dict[str, Any] = {"eval_split": 0.25, "lora": {"r": 4}, "predictions": {"sample_frequency": "off"}}
OTHER = KEYS | {"training": {"learning_rate": 1e-3}}


class Shared:
    """A user's cache, filled by the daemon's own code."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._layout = Layout(root)
        self._layout.jobs_dir.mkdir(parents=True)
        self._cache = RowCache(self._layout, lambda: 2**30)
        self._number = 0
        self.dir = self._layout.rows_dir / "4711"
        monkeypatch.setenv(VARIABLE, str(self.dir))

    def take(self, job: WorkerJob, ended: Ended) -> None:
        """Take the rows that an attempt has reported, as long as its job has them."""
        self._number += 1
        self._layout.job(self._number).dir.symlink_to(job.dir)
        taken = Job(self._number, "rows", 0.0, "rows.yaml", 4711, str(job.output_dir), state=State.RUNNING)
        self._cache.take(taken, names(ended.of("rows")[0]))

    def entries(self) -> dict[str, int]:
        return {path.parent.name: path.stat().st_ino for path in self.dir.glob(f"[0-9a-f]*/{MANIFEST}")}

    def files(self) -> set[str]:
        return {str(path.relative_to(self.dir)) for path in self.dir.rglob("*") if path.is_file()}


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shared:
    return Shared(tmp_path / "root", monkeypatch)


def is_linked(job: WorkerJob) -> bool:
    manifests = list(job.dir.glob(f"rows/[0-9a-f]*/{MANIFEST}"))
    assert len(manifests) == 1
    return manifests[0].is_symlink()


def test_the_names_of_the_files_agree() -> None:
    assert set(FILES) == {TOKENS, ROWS, MANIFEST}


def test_another_job_finds_the_rows_and_trains_as_it_would_without(make_job: MakeJob, shared: Shared) -> None:
    alone = make_job(**OTHER).run()
    assert alone.of("rows")[0]["entries"]
    first = make_job(**KEYS)
    shared.take(first, first.stopped_at(2))
    assert len(shared.entries()) == 1
    second = make_job(**OTHER)
    ended = second.stopped_at(2)
    assert is_linked(second)
    assert ended.of("rows")[0]["shared"] == list(shared.entries())
    assert ended.of("data") == alone.of("data")
    assert ended.losses | second.run(2).losses == alone.losses


def test_packed_rows_are_cached_beside_the_links_alone(make_job: MakeJob, shared: Shared) -> None:
    packed = KEYS | {"training": {"packing": True, "max_length": 64}}
    first = make_job(**packed)
    shared.take(first, first.stopped_at(2))
    before = shared.files()
    second = make_job(**packed)
    second.stopped_at(2)
    assert is_linked(second)
    assert list(second.dir.glob("rows/*/cache-*.arrow"))
    assert shared.files() == before


def test_a_damaged_entry_is_made_anew_reported_and_replaced(make_job: MakeJob, shared: Shared) -> None:
    first = make_job(**KEYS)
    shared.take(first, first.stopped_at(2))
    before = shared.entries()
    flip(shared.dir / next(iter(before)) / TOKENS, 500)
    second = make_job(**KEYS)
    ended = second.stopped_at(2)
    told = [text for text in ended.messages("warning") if "damaged and are made anew" in text]
    assert len(told) == 1
    assert "of an earlier job" in told[0]
    assert not is_linked(second)
    shared.take(second, ended)
    assert shared.entries().keys() == before.keys()
    assert shared.entries() != before
    third = make_job(**KEYS)
    assert not any("damaged" in text for text in third.stopped_at(2).messages("warning"))
    assert is_linked(third)


def test_an_entry_that_has_gone_since_is_made_anew_without_a_word(make_job: MakeJob, shared: Shared) -> None:
    undisturbed = make_job(**KEYS).run()
    first = make_job(**KEYS)
    shared.take(first, first.stopped_at(2))
    second = make_job(**KEYS)
    begun = second.stopped_at(2)
    assert is_linked(second)
    shutil.rmtree(shared.dir)
    resumed = second.stopped_at(4, attempt=2)
    assert not is_linked(second)
    assert not any("rows" in text for text in resumed.messages("warning"))
    assert begun.losses | resumed.losses | second.run(3).losses == undisturbed.losses


def test_a_file_that_changes_while_it_is_read_makes_rows_for_this_attempt_alone(
    make_job: MakeJob, shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    from honed.worker.rows import data

    job = make_job(**KEYS)
    path, hashed = Path(job.plan["spec"]["datasets"][0]["path"]), data.sha256

    def changed_after(*arguments: Any) -> str:
        found = hashed(*arguments)
        path.write_text(path.read_text().replace("Paris", "Lyon"))
        return found

    monkeypatch.setattr(data, "sha256", changed_after)
    ended = job.stopped_at(2)
    assert ended.of("rows")[0]["entries"] == []
    assert not list(job.dir.glob(f"rows/[0-9a-f]*/{MANIFEST}"))


def test_a_job_with_code_of_its_own_reads_no_shared_rows(make_job: MakeJob, shared: Shared) -> None:
    job = make_job(**KEYS)
    assert assignment.read(job.dir, 1).shared_rows_dir == shared.dir
    job.change_plan(spec=job.plan["spec"] | {"trust_remote_code": True})
    assert assignment.read(job.dir, 1).shared_rows_dir is None


# --- the key ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def base(make_job: MakeJob) -> WorkerJob:
    return make_job(**KEYS)


def key_of(job: WorkerJob, *, chat: ChatFormat | None = None, hash_: str = "1", **keys: Any) -> str:
    if keys:
        spec = jobfile.validate({"base_model": "/srv/m", "datasets": [{"path": "/srv/a.jsonl"}], **keys})
        job.change_plan(spec=spec.model_dump(mode="json"))
    job_read = assignment.read(job.dir, 1)
    tokenizer = AutoTokenizer.from_pretrained(job.plan["base_model_path"])
    file = Path(job.plan["spec"]["datasets"][0]["path"])
    found = chat or ChatFormat.of(job_read.spec, tokenizer, date=job_read.date)
    return cache.key(job_read, found, [DatasetSpec(path=str(file))], {str(file): hash_})


def test_the_key_is_of_content_and_of_what_changes_a_row_and_of_nothing_else(base: WorkerJob) -> None:
    path = Path(base.plan["spec"]["datasets"][0]["path"])
    common = {"base_model": base.plan["base_model_path"], "datasets": [{"path": str(path)}]}
    first = key_of(base, **common)
    copy = base.dir / "copy" / path.name
    copy.parent.mkdir()
    shutil.copy(path, copy)
    for same in (
        {"datasets": [{"path": str(copy)}]},
        {"training": {"learning_rate": 1e-5, "max_steps": 3, "seed": 5}},
        {"lora": {"r": 8}},
        {"eval_split": 0.1},
    ):
        assert key_of(base, **(common | same)) == first, same
    for other in ({"training": {"max_length": 77}}, {"chat_template_kwargs": {"enable_thinking": False}}):
        assert key_of(base, **(common | other)) != first, other
    assert key_of(base, hash_="2", **common) != first
    renamed = path.with_name("other.jsonl")
    shutil.copy(path, renamed)
    assert key_of(base, **(common | {"datasets": [{"path": str(renamed)}]})) != first


def test_the_date_counts_only_where_the_template_asks_for_it(base: WorkerJob) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base.plan["base_model_path"])
    found = []
    for template in (tokenizer.chat_template, tokenizer.chat_template + "{{ strftime_now('%d') }}"):
        tokenizer.chat_template = template
        keys = set()
        for day in (1, 2):
            base.change_plan(date=datetime(2026, 11, day).astimezone().isoformat())
            keys.add(key_of(base, chat=ChatFormat(tokenizer)))
        found.append(len(keys))
    assert found == [1, 2]


CODE = """
from transformers import PreTrainedTokenizerFast
from .deeper import N
class Own(PreTrainedTokenizerFast): pass
"""


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with a tokenizer, as transformers makes one of a model's own code."""
    package = tmp_path / "code" / "owncode"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "deeper.py").write_text("N = 1\n")
    (package / "tokenizing.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(package.parent))
    yield package
    for name in [each for each in sys.modules if each.startswith("owncode")]:
        del sys.modules[name]


@pytest.mark.parametrize("file", ["tokenizing.py", "deeper.py"])
def test_a_tokenizer_s_own_code_is_part_of_the_key(base: WorkerJob, own_code: Path, file: str) -> None:
    import owncode.tokenizing as own

    def key() -> str:
        return key_of(base, chat=ChatFormat(own.Own.from_pretrained(base.plan["base_model_path"])))

    first = key()
    assert key() == first
    (own_code / file).write_text((own_code / file).read_text() + "# changed\n")
    assert key() != first


def test_a_slow_tokenizer_s_libraries_and_files_are_part_of_the_key(
    base: WorkerJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow:
        def __init__(self, tokenizer: Any) -> None:
            self._tokenizer = tokenizer

        def __getattr__(self, name: str) -> Any:
            if name == "backend_tokenizer":
                raise AttributeError
            return getattr(self._tokenizer, name)

        def __call__(self, *arguments: Any, **keys: Any) -> Any:
            return self._tokenizer(*arguments, **keys)

    tokenizer = AutoTokenizer.from_pretrained(base.plan["base_model_path"])
    versions = {"tiktoken": "1"}
    monkeypatch.setattr(cache.installed, "version", lambda name: versions.get(name, "0"))

    def keys() -> tuple[str, str]:
        made = [ChatFormat(tokenizer), ChatFormat(tokenizer)]
        made[1].tokenizer = Slow(tokenizer)
        fast, slow = (key_of(base, chat=each) for each in made)
        return fast, slow

    first = keys()
    versions["tiktoken"] = "2"
    second = keys()
    assert first[0] == second[0]
    assert first[1] != second[1]
