"""Files of rows: packed or plain, with the right suffix or a wrong one, and files that contain no rows at all."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from honed.inputs import datafile
from honed.system.error import DatasetError

ROWS = [{"prompt": f"{n}+{n}?", "completion": f"{2 * n} – so"} for n in range(5)]
JSONL = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
JSON = json.dumps(ROWS, indent=1).encode()
CSV = b"prompt,completion\n" + "".join(f"{row['prompt']},{row['completion']}\n" for row in ROWS).encode()
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 1\n"


def zstd(data: bytes) -> bytes:
    return bytes(pyarrow.Codec("zstd").compress(data, asbytes=True))


def read(path: Path, content: bytes) -> list[dict[str, Any]]:
    path.write_bytes(content)
    return list(datafile.read(path))


@pytest.mark.parametrize(
    ("suffix", "pack"), [(".gz", gzip.compress), (".zst", zstd), (".bz2", bz2.compress), (".xz", lzma.compress)]
)
@pytest.mark.parametrize(("name", "content"), [("a.jsonl", JSONL), ("a.json", JSON), ("a.csv", CSV)])
def test_a_packed_file_has_the_rows_of_the_plain_one(
    tmp_path: Path, suffix: str, pack: Callable[[bytes], bytes], name: str, content: bytes
) -> None:
    assert read(tmp_path / f"{name}{suffix}", pack(content)) == ROWS
    assert read(tmp_path / f"{name}{suffix}", pack(content[:40]) + pack(content[40:])) == ROWS  # two packs in a row
    assert read(tmp_path / f"{name}{suffix}", content) == ROWS  # unpacked by the downloading program
    assert read(tmp_path / name, pack(content)) == ROWS


@pytest.mark.parametrize("suffix, pack", [(".gz", gzip.compress), (".zst", zstd), (".bz2", bz2.compress)])
def test_a_packed_file_that_ends_early_is_refused(tmp_path: Path, suffix: str, pack: Callable[[bytes], bytes]) -> None:
    with pytest.raises(DatasetError) as refused:
        read(tmp_path / f"a.jsonl{suffix}", pack(JSONL * 1000)[:-8])
    assert "a.jsonl" in refused.value.message
    assert refused.value.hint


def test_what_packs_without_end_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datafile, "MAX_LINE_BYTES", 2**20)
    monkeypatch.setattr(datafile, "MAX_JSON_BYTES", 2**20)
    bombs = {"a.jsonl.gz": b'{"text": "', "a.json.gz": b'[{"text": "'}
    for name, begins in bombs.items():
        (tmp_path / name).write_bytes(gzip.compress(begins + bytes(32 * 2**20)))
    tracemalloc.start()
    try:
        for name in bombs:
            with pytest.raises(DatasetError, match="longer than 1048576 bytes"):
                list(datafile.read(tmp_path / name))
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()


def test_lines_under_the_name_json_and_a_list_under_jsonl_are_read(tmp_path: Path) -> None:
    assert read(tmp_path / "a.json", JSONL) == ROWS
    assert read(tmp_path / "a.json", b"\xef\xbb\xbf\n" + JSONL) == ROWS
    assert read(tmp_path / "a.jsonl", JSON) == ROWS
    assert read(tmp_path / "a.ndjson", JSONL) == ROWS
    assert read(tmp_path / "b.json", b'{"data": ' + JSON + b"}") == ROWS
    assert read(tmp_path / "b.json", b'{"data": ' + json.dumps(ROWS).encode() + b"}\n\n") == ROWS


def test_an_object_over_several_lines_is_refused_with_what_puts_it_on_one(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"line 1.*not JSON") as refused:
        read(tmp_path / "a.jsonl", b"\n".join(json.dumps(row, indent=1).encode() for row in ROWS))
    assert "jq -c ." in refused.value.hint


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
@pytest.mark.parametrize(("name", "content"), [("a.jsonl", JSONL), ("a.json", JSON), ("a.csv", CSV)])
def test_a_mark_of_the_encoding_is_believed(tmp_path: Path, encoding: str, name: str, content: bytes) -> None:
    assert read(tmp_path / name, content.decode().encode(encoding)) == ROWS


@pytest.mark.parametrize(
    ("name", "content", "words", "hint"),
    [
        ("a.jsonl", POINTER, "Git LFS pointer", "git lfs pull"),
        ("a.parquet", POINTER, "Git LFS pointer", "git lfs pull"),
        ("a.jsonl", b"\n<!DOCTYPE html>\n<html>", "web page", "/resolve/"),
        ("a.json.gz", gzip.compress(b"<html>", mtime=0), "web page", "/resolve/"),
        ("a.parquet", b"<!doctype html>", "web page", "/resolve/"),
        ("a.csv", b"PK\x03\x04rest", "zip archive", ".csv"),
        ("a.csv", b"prompt,completion,prompt\na,b,c\n", "`prompt` occurs twice", "rename"),
        ("a.csv", b"prompt;completion\na;b\n", "separated by semicolons", "commas"),
        ("a.csv", b"prompt\tcompletion\na\tb\n", "separated by tabs", "commas"),
        ("a.json", b'{"train": [], "test": []}', "an object with train, test", ".jsonl"),
    ],
)
def test_what_is_no_file_of_rows_is_called_what_it_is(
    tmp_path: Path, name: str, content: bytes, words: str, hint: str
) -> None:
    with pytest.raises(DatasetError) as refused:
        read(tmp_path / name, content)
    assert words in refused.value.message
    assert hint in refused.value.hint


@pytest.mark.parametrize(("name", "join"), [("a.jsonl", b"%s\n%s\n"), ("a.json", b"[%s, %s]")])
def test_a_row_with_a_key_twice_is_one_that_cannot_be_used(tmp_path: Path, name: str, join: bytes) -> None:
    path = tmp_path / name
    twice = b'{"messages": [{"role": "user", "content": "a", "content": "b"}]}'
    path.write_bytes(join % (twice, b'{"text": "a"}'))
    (first, place), (second, _) = datafile.read_any(path)
    assert first == datafile.Broken("`content` occurs twice in one object")
    assert place.endswith("1")
    assert second == {"text": "a"}


@pytest.mark.parametrize("is_stream", [True, False])
def test_arrow_is_read_as_a_stream_and_as_a_file(tmp_path: Path, is_stream: bool) -> None:
    table = pyarrow.Table.from_pylist([*ROWS, {"prompt": "x", "completion": None}])
    new = pyarrow.ipc.new_stream if is_stream else pyarrow.ipc.new_file
    with new(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    assert list(datafile.read(tmp_path / "a.arrow")) == [*ROWS, {"prompt": "x"}]
    (tmp_path / "a.arrow").write_bytes((tmp_path / "a.arrow").read_bytes()[:200])
    with pytest.raises(DatasetError, match=r"not a readable \.arrow file"):
        list(datafile.read(tmp_path / "a.arrow"))


def test_a_column_that_a_table_has_twice_is_refused(tmp_path: Path) -> None:
    table = pyarrow.table([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DatasetError, match="`text` occurs twice"):
        list(datafile.read(tmp_path / "a.parquet"))


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_json_that_datasets_keeps_as_text_in_a_table_is_what_it_was(tmp_path: Path, name: str) -> None:
    kind = pyarrow.json_(pyarrow.string())
    call = {"name": "f", "arguments": {"a": None}}
    texts = [json.dumps({"role": "assistant", "tool_calls": [call]}), json.dumps({"role": "user"})]
    each = pyarrow.ExtensionArray.from_storage(kind, pyarrow.array(texts))
    listed = pyarrow.ListArray.from_arrays(pyarrow.array([0, None, 2], pyarrow.int32()), each)
    table = pyarrow.table({"messages": listed, "text": pyarrow.array(["a", "b"])})
    if name == "a.parquet":
        pyarrow.parquet.write_table(table, tmp_path / name)
    else:
        with pyarrow.ipc.new_stream(tmp_path / name, table.schema) as writer:
            writer.write_table(table)
    rows = list(datafile.read(tmp_path / name))
    assert rows == [{"messages": list(map(json.loads, texts)), "text": "a"}, {"text": "b"}]


def test_a_table_is_never_in_memory_at_once(tmp_path: Path) -> None:
    schema = pyarrow.schema([("text", pyarrow.string())])
    with pyarrow.ipc.new_stream(tmp_path / "a.arrow", schema) as writer:
        for _ in range(40):
            writer.write_table(pyarrow.table({"text": ["x" * 20_000] * 100}))
    before = pyarrow.total_allocated_bytes()
    assert max(pyarrow.total_allocated_bytes() - before for _ in datafile.read(tmp_path / "a.arrow")) < 8 * 2**20
