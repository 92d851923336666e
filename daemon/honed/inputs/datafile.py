"""Data files: reads the rows of a file, in any supported format and compression.

    .jsonl .ndjson    an object on every line
    .json             a list of them, or an object with one as `data`
    .csv              with a header
    .parquet .arrow   tables; .arrow as `save_to_disk` of datasets writes them

The first three may be compressed: `.gz`, `.zst`, `.bz2`, `.xz`. A name is only a hint: the file's first bytes decide if
they are unambiguous. Rows are read one at a time, and a whole file at once only if its format requires it.
"""

from __future__ import annotations

import bz2
import codecs
import contextlib
import csv
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, AnyStr, cast

from honed.inputs.message import kind_of
from honed.spec.data_form import PACKED, SUFFIXES_HINT, form_of
from honed.spec.problem import shown
from honed.system import quote
from honed.system.error import DatasetError, unreadable

#: Bytes of one line, including embedded images. A file without line breaks must not fill the memory.
MAX_LINE_BYTES = 256 * 1024 * 1024
#: Bytes of a .json file, decompressed: all of it is in memory, and a small compressed file may expand to any size.
MAX_JSON_BYTES = 2 * 1024**3
#: Rows of a table that are held as Python objects at a time.
NUM_TABLE_ROWS = 256
#: Bytes by which a format is detected.
_HEAD_BYTES = 4096

#: First bytes of compressed files.
_PACKED_BEGINNINGS = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst", b"BZh": ".bz2", b"\xfd7zXZ\x00": ".xz"}
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_UTF8_MARK = codecs.BOM_UTF8


@dataclass(frozen=True)
class Broken:
    """The placeholder of a row that is unusable in any format, with the reason."""

    reason: str


class Nulled(dict[str, Any]):
    """A table's row without its nulls, one of which was an argument of a tool call: the call's own, or padding."""


def read(path: Path, *, limit: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of one file. Raises DatasetError, which names the file, the place, and the remedy."""
    for n, (row, place) in enumerate(read_any(path)):
        if limit is not None and n >= limit:
            return
        if isinstance(row, Broken):
            raise DatasetError(f"{path}: {place}: {row.reason}")
        if not isinstance(row, dict):
            raise DatasetError(
                f"{path}: {place}: a row must be an object with columns, this is {kind_of(row)}",
                hint='for example {"prompt": "…", "completion": "…"}',
            )
        yield row


def read_any(path: Path) -> Iterator[tuple[Any, str]]:
    """Yield every row, or its placeholder, with its place in the file."""
    form = form_of(path)
    if form is None:
        raise DatasetError(
            f"{path}: files of type {path.suffix or 'a file without suffix'} are not supported", hint=SUFFIXES_HINT
        )
    try:
        head = _beginning(path)
        if head.startswith(b"PAR1") or (form == ".parquet" and not _is_foreign(head)):
            yield from _read_parquet(path)
        elif head.startswith((b"ARROW1", b"\xff\xff\xff\xff")) or (form == ".arrow" and not _is_foreign(head)):
            yield from _read_arrow(path)
        else:
            yield from _read_text(path, form)
    except UnicodeDecodeError as error:
        raise DatasetError(
            f"{path}: not UTF-8 at byte {error.start}", hint="convert it, for example with iconv"
        ) from error
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise DatasetError(
            f"{path}: cannot be decompressed: {quote.mark(' '.join(str(error).split()))}",
            hint="it may be incomplete: copy it again from its source",
        ) from error
    except OSError as error:
        raise unreadable(DatasetError, path, error) from error


def check_beginning(path: Path) -> None:
    """Raise DatasetError for a file whose first bytes show that it has no rows, such as a web page."""
    with contextlib.suppress(OSError, EOFError, zlib.error, lzma.LZMAError):
        head = _beginning(path)
        if _is_foreign(head):
            _refuse_foreign(path, head)
        if not head.startswith((b"PAR1", b"ARROW1")):
            with _opened(path) as file:
                _refuse_foreign(path, file.peek(_HEAD_BYTES)[:_HEAD_BYTES])


# --- text ------------------------------------------------------------------------------------------------------------


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_HEAD_BYTES)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[io.BufferedReader]:
    """Open a file's text as UTF-8, decompressed while it is read."""
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(path.open("rb"))
        head = file.peek(_HEAD_BYTES)
        packed = next((packed for mark, packed in _PACKED_BEGINNINGS.items() if head.startswith(mark)), None)
        if packed is not None:
            file = stack.enter_context(_unpacked(path, file, packed))
            head = file.peek(_HEAD_BYTES)
        if head.startswith(_UTF16_MARKS):
            file = stack.enter_context(io.BufferedReader(cast("io.RawIOBase", _Recoded(file))))
        yield file


def _unpacked(path: Path, file: io.BufferedReader, packed: str) -> io.BufferedReader:
    match packed:
        case ".gz":
            raw: Any = gzip.GzipFile(fileobj=file)
        case ".bz2":
            raw = bz2.BZ2File(file)
        case ".xz":
            raw = lzma.LZMAFile(file)  # noqa: SIM115
        case _:
            try:
                import pyarrow  # noqa: PLC0415  (heavy, and only where there is such a file)
            except ImportError as error:
                raise DatasetError(
                    f"{path}: reading .zst needs pyarrow", hint="pip install pyarrow, or unpack it with zstd -d"
                ) from error
            raw = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), "zstd")
    return io.BufferedReader(raw, 2**16)


class _Recoded(io.RawIOBase):
    """UTF-16 text with a byte order mark, read as UTF-8."""

    def __init__(self, file: io.BufferedReader) -> None:
        self._file, self._decoder, self._rest = file, codecs.getincrementaldecoder("utf-16")(), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            raw = self._file.read(2**15)
            self._rest = self._decoder.decode(raw, final=not raw).encode(errors="surrogatepass")
            if not raw:
                break
        number = min(len(buffer), len(self._rest))
        buffer[:number], self._rest = self._rest[:number], self._rest[number:]
        return number


def _is_foreign(head: bytes) -> bool:
    """Return True if a file that should be a table has another format."""
    return head.lstrip().startswith((b"<", b"version https://git-lfs", b"{", b"[", b"PK\x03\x04"))


def _refuse_foreign(path: Path, head: bytes) -> None:
    """Raise DatasetError for files that are saved in place of data files by accident."""
    begins = head.removeprefix(_UTF8_MARK).lstrip()[:200]
    if begins.startswith(b"version https://git-lfs"):
        raise DatasetError(
            f"{path}: a Git LFS pointer, not the data file itself",
            hint="run git lfs pull in its repository to fetch it",
        )
    if begins.lower().startswith((b"<!doctype", b"<html", b"<head", b"<?xml", b"<!--")):
        raise DatasetError(
            f"{path}: a web page (HTML) saved with a data file's name",
            hint="download the file itself: on the hub, replace /blob/ in the page's address with /resolve/",
        )
    if begins.startswith(b"PK\x03\x04"):
        raise DatasetError(
            f"{path}: a zip archive (spreadsheets in .xlsx are one)", hint="unpack it, or save the sheet as .csv"
        )


def _read_text(path: Path, form: str) -> Iterator[tuple[Any, str]]:
    with _opened(path) as file:
        head = file.peek(_HEAD_BYTES)[:_HEAD_BYTES]
        _refuse_foreign(path, head)
        if form == ".csv":
            yield from _read_csv(path, file)
            return
        is_list = b"".join(head.removeprefix(_UTF8_MARK).split())[:2] in (b"[{", b"[]")
        if is_list or (form == ".json" and not _is_jsonl(path)):
            yield from _read_json(path, file)
        else:
            yield from _read_jsonl(path, file)


def _is_jsonl(path: Path) -> bool:
    """Return True if a file has an object on its first line and text on another."""
    with _opened(path) as file:
        first = file.readline(MAX_LINE_BYTES + 1).removeprefix(_UTF8_MARK)
        while first and not first.strip():
            first = file.readline(MAX_LINE_BYTES + 1)
        if len(first) > MAX_LINE_BYTES or not first.rstrip().endswith(b"}"):
            return False
        if not next((True for line in _lines(file, path) if line.strip()), False):
            return False
        try:
            return isinstance(json.loads(first), dict)
        except (ValueError, RecursionError):
            return False


def _read_jsonl(path: Path, file: io.BufferedReader) -> Iterator[tuple[Any, str]]:
    decode = _Decoder()
    for number, raw in enumerate(_lines(file, path), start=1):
        line = raw.removeprefix(_UTF8_MARK) if number == 1 else raw
        if not line.strip():
            continue
        try:
            row = decode(line.decode().rstrip())
        except UnicodeDecodeError as error:
            raise DatasetError(
                f"{path}: line {number}: not UTF-8 at byte {error.start + 1} of the line",
                hint="convert the file, for example with iconv",
            ) from error
        except (ValueError, RecursionError) as error:
            hint = "a .jsonl file has one JSON object per line"
            if line.strip() in (b"{", b"["):
                hint += "; `jq -c .` converts objects that span several lines"
            raise DatasetError(
                f"{path}: line {number}{_column(error)}: not JSON: {_json_words(error)}", hint=hint
            ) from error
        yield decode.judged(row), f"line {number}"


def _lines(file: IO[AnyStr], path: Path) -> Iterator[AnyStr]:
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise DatasetError(
                f"{path}: line {number}: longer than {MAX_LINE_BYTES} bytes",
                hint="each row must be on its own line; refer to large images by path",
            )
        yield line


def _read_json(path: Path, file: io.BufferedReader) -> Iterator[tuple[Any, str]]:
    raw = bytearray()
    while piece := file.read(2**20):
        raw += piece
        if len(raw) > MAX_JSON_BYTES:
            raise DatasetError(
                f"{path}: longer than {MAX_JSON_BYTES} bytes{' when unpacked' if path.suffix in PACKED else ''}",
                hint="rows on separate lines (.jsonl) and .parquet are read piece by piece",
            )
    decode = _Decoder()
    try:
        data = decode(raw.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        where = f"line {error.lineno}, column {error.colno}: " if isinstance(error, json.JSONDecodeError) else ""
        raise DatasetError(
            f"{path}: {where}not JSON: {_json_words(error)}", hint="for one object per line, use a .jsonl file"
        ) from error
    del raw
    rows = data.get("data") if isinstance(data, dict) else data
    if not isinstance(rows, list):
        keys = quote.names(list(data)[:8]) if isinstance(data, dict) else ""
        raise DatasetError(
            f"{path}: a .json file must contain a list of rows, or an object with such a list as "
            f"`data`{f', this an object with {keys}' if keys else ''}",
            hint="for rows on separate lines, use a .jsonl file",
        )
    yield from ((decode.judged(row), f"row {number}") for number, row in enumerate(rows, start=1))


class _Decoder:
    """A JSON decoder that detects duplicate keys in an object, of which Python would silently keep the last."""

    def __init__(self) -> None:
        self._has_twice = False
        self._decoder = json.JSONDecoder(object_pairs_hook=self._made)

    def __call__(self, text: str) -> Any:
        return self._decoder.decode(text)

    def judged(self, row: Any) -> Any:
        """Return the row, or a Broken with the reason why it is unusable."""
        key = _twice(row) if self._has_twice else None
        return row if key is None else Broken(f"`{quote.name(key)}` occurs twice in one object")

    def _made(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) == len(pairs):
            return made
        self._has_twice = True
        return _Twice(made, next(key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1))


class _Twice(dict[str, Any]):
    """An object with a duplicate key."""

    def __init__(self, made: dict[str, Any], key: str) -> None:
        super().__init__(made)
        self.key = key


def _twice(value: Any) -> str | None:
    match value:
        case _Twice():
            return value.key
        case dict():
            return next((key for item in value.values() if (key := _twice(item)) is not None), None)
        case list():
            return next((key for item in value if (key := _twice(item)) is not None), None)
        case _:
            return None


def _read_csv(path: Path, binary: io.BufferedReader) -> Iterator[tuple[Any, str]]:
    csv.field_size_limit(MAX_LINE_BYTES)
    file = io.TextIOWrapper(binary, encoding="utf-8-sig", newline="")
    reader = csv.DictReader(_lines(file, path), strict=True)
    try:
        if not reader.fieldnames:
            raise DatasetError(f"{path}: empty", hint="the first line of a .csv file must contain the column names")
        _check_columns(path, reader.fieldnames)
        for row in reader:
            if None in row or None in row.values():
                raise DatasetError(
                    f"{path}: line {reader.line_num}: the number of fields differs from the header "
                    f"({len(reader.fieldnames)})",
                    hint="put text with commas, quotes or line breaks in double quotes",
                )
            yield row, f"line {reader.line_num}"
    except csv.Error as error:
        raise DatasetError(
            f"{path}: line {reader.line_num}: not CSV: {error}",
            hint="put text with commas, quotes or line breaks in double quotes",
        ) from error


def _check_columns(path: Path, names: Iterable[str]) -> None:
    """Raise DatasetError for a duplicate column, of which only the last would be read, and for a header with another
    separator than the comma."""
    listed = [name.strip() for name in names]
    for name in listed:
        if name and listed.count(name) > 1:
            raise DatasetError(f"{path}: the column `{quote.name(name)}` occurs twice", hint="rename or remove one")
    if len(listed) == 1 and (mark := next((mark for mark in ";\t|" if mark in listed[0]), None)):
        named = {"\t": "tabs", ";": "semicolons", "|": "bars"}[mark]
        raise DatasetError(
            f"{path}: the header is a single column, {shown(listed[0])}: the fields seem to be separated by {named}",
            hint="a .csv file must use commas as separators: save it that way",
        )


# --- tables ----------------------------------------------------------------------------------------------------------


def _read_parquet(path: Path) -> Iterator[tuple[Any, str]]:
    pyarrow = _pyarrow(path, "parquet")

    def batches() -> Iterator[Any]:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file.schema_arrow
            yield from file.iter_batches(batch_size=NUM_TABLE_ROWS)

    yield from _read_table(path, pyarrow, ".parquet", batches)


def _read_arrow(path: Path) -> Iterator[tuple[Any, str]]:
    """Yield the rows of an Arrow stream, as datasets writes them, or file. Not mapped: the check has little address
    space."""
    pyarrow = _pyarrow(path, "ipc")

    def batches() -> Iterator[Any]:
        with pyarrow.OSFile(str(path)) as file:
            is_file = file.read(6) == b"ARROW1"
            file.seek(0)
            if not is_file:
                with pyarrow.ipc.open_stream(file) as stream:
                    yield stream.schema
                    yield from stream
            else:
                with pyarrow.ipc.open_file(file) as reader:
                    yield reader.schema
                    yield from (reader.get_batch(number) for number in range(reader.num_record_batches))

    yield from _read_table(path, pyarrow, ".arrow", batches)


def _pyarrow(path: Path, part: str) -> Any:
    try:
        import pyarrow  # noqa: PLC0415  (heavy, and only where there is such a file)

        __import__(f"pyarrow.{part}")
    except ImportError as error:
        raise DatasetError(
            f"{path}: reading {path.suffix} needs pyarrow", hint="pip install pyarrow, or use .jsonl"
        ) from error
    return pyarrow


def _read_table(path: Path, pyarrow: Any, form: str, batches: Callable[[], Iterator[Any]]) -> Iterator[tuple[Any, str]]:
    """Yield the rows of a table; `batches` yields its schema first, then its batches."""
    number = 0
    try:
        pieces = batches()
        schema = next(pieces)
        _check_columns(path, schema.names)
        texts = {field.name: decode for field in schema if (decode := _json_decoder(field.type)) is not None}
        for batch in pieces:
            for start in range(0, batch.num_rows, NUM_TABLE_ROWS):
                for item in batch.slice(start, NUM_TABLE_ROWS).to_pylist():
                    number += 1
                    row = _without_nulls(item)
                    row = Nulled(row) if _has_null_argument(item) else row
                    for name in texts.keys() & row.keys():
                        row[name] = texts[name](row[name])
                    yield row, f"row {number}"
    except UnicodeDecodeError as error:
        raise DatasetError(
            f"{path}: row {number + 1} or a later one has text that is not UTF-8",
            hint="rewrite the file with its text in UTF-8",
        ) from error
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, NotImplementedError) as error:
        # The last exceptions come from values that Python cannot represent, such as a date before the year 1.
        raise DatasetError(
            f"{path}: not a readable {form} file: {quote.mark(' '.join(str(error).split()))}",
            hint="copy it again from its source, or create it again",
        ) from error


def _json_decoder(kind: Any) -> Callable[[Any], Any] | None:
    """Return the decoder for JSON that a table holds as text, as datasets' `Json` type does; None if it holds none."""
    if getattr(kind, "extension_name", "") == "arrow.json":
        return json.loads
    if hasattr(kind, "value_type") and (inner := _json_decoder(kind.value_type)) is not None:
        return lambda value: [inner(item) if item is not None else None for item in value]
    if not hasattr(kind, "get_field_index"):
        return None
    fields = {field.name: decode for field in kind if (decode := _json_decoder(field.type)) is not None}
    if not fields:
        return None
    return lambda value: {k: fields[k](item) if k in fields else item for k, item in value.items()}


def _without_nulls(value: Any) -> Any:
    """Remove null values: tables give every object the keys of all of them, so null means absent."""
    match value:
        case dict():
            return {key: _without_nulls(item) for key, item in value.items() if item is not None}
        case list():
            return [_without_nulls(item) for item in value]
        case _:
            return value


def _has_null_argument(value: Any, *, is_argument: bool = False) -> bool:
    """Return True if a tool call has an argument of null, at any depth."""
    match value:
        case None:
            return is_argument
        case dict():
            # The arguments themselves may be absent; what is within them is a call's.
            inner = ((key == "arguments" and isinstance(item, dict), item) for key, item in value.items())
            return any(_has_null_argument(item, is_argument=is_argument or begins) for begins, item in inner)
        case list():
            return any(_has_null_argument(item, is_argument=is_argument) for item in value)
        case _:
            return False


def _column(error: Exception) -> str:
    return f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""


def _json_words(error: Exception) -> str:
    match error:
        case json.JSONDecodeError():
            return error.msg
        case RecursionError():
            return "nested too deeply"
        case _:  # Python refuses numbers of more than 4300 digits
            return "a number with thousands of digits"
