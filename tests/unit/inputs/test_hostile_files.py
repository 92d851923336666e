"""Files made to fill the memory, to take hours or to lie about themselves: rejected, within limits."""

from __future__ import annotations

import base64
import io
import json
import os
import struct
import subprocess
import sys
import wave
import zlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from honed.inputs import basemodel, datafile, dataset, media
from honed.job import event
from honed.job.plan_file import Earlier
from honed.run import outcome
from honed.run.helper import HELPER_ENVIRONMENT
from honed.run.runner import Exit
from honed.spec import config, jobfile
from honed.spec.config import Config
from honed.spec.media import MediaLimits
from honed.spec.spec import DatasetSpec
from honed.system.client import Client
from honed.system.control import Server, _Connection
from honed.system.device import cpu
from honed.system.error import HonedError
from honed.system.layout import Layout
from honed.system.personpath import PersonPath
from zoo import plain
from zoo.limits import in_child

#: Memory that reading one such file may take beyond its own size.
MAX_BYTES = 700 * 2**20
CPU_SEC = 60
MiB = 2**20

#: Reads a file.
Read = Callable[[Path], object]


def refusal(read: Read, path: Path) -> str:
    """Return the message with which the file is rejected, or an empty text."""
    try:
        read(path)
    except HonedError as error:
        assert error.code != "error", error.message
        return f"{error.shown}\n{error.hint}"
    return ""


def of_dataset(path: Path) -> object:
    return dataset.inspect(DatasetSpec(path=str(path)))


def of_header(path: Path) -> object:
    return basemodel.read_header(path, hint="copy it again")


def of_config_json(path: Path) -> object:
    plain.write_base_model(path.parent / "model")
    path.replace(path.parent / "model/config.json")
    return basemodel.inspect(path.parent / "model")


def of_honed_toml(path: Path) -> object:
    layout = Layout(path.parent)
    layout.config_path.parent.mkdir(parents=True)
    path.replace(layout.config_path)
    return config.load(layout)


def of_picture(path: Path) -> object:
    return media.probe(media.Media("image", path)), media.image(media.Media("image", path), MediaLimits())


def of_sound(path: Path) -> object:
    return media.probe(media.Media("audio", path)), media.audio(media.Media("audio", path), 16_000)


def of_video(path: Path) -> object:
    return media.probe(media.Media("video", path))


def header(tensors: object, *, length: int | None = None) -> bytes:
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text


def png(width: int, height: int) -> bytes:
    """Return a PNG whose header claims that size, with hardly any image data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


def wav(*, data_bytes: int) -> bytes:
    """Return a WAV file whose header claims so many bytes of sound."""
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes(bytes(160))
    return file.getvalue().replace(struct.pack("<I", 160), struct.pack("<I", data_bytes))


def laughs(number: int) -> bytes:
    lines = ["a0: &a0 [x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, number))]
    return "\n".join(lines).encode()


FILES: dict[str, tuple[str, Callable[[], bytes], Read, str]] = {
    "YAML: a billion laughs": ("x.yaml", lambda: laughs(9), jobfile.load, "more than 20000 keys and values"),
    "YAML: nested": ("x.yaml", lambda: b"[" * 200_000, jobfile.load, "nested more than 50"),
    "JSON: nested": ("x.json", lambda: b"[" * 200_000, jobfile.load, "nested more than 50"),
    "TOML: nested": ("x.toml", lambda: b"a = " + b"[" * 200_000, jobfile.load, "nested more than 50"),
    "TOML: a dotted key": ("x.toml", lambda: b"a" + b".a" * 100_000 + b" = 1", jobfile.load, "nested more than 50"),
    "a huge number": ("x.json", lambda: b'{"priority": ' + b"9" * 200_000 + b"}", jobfile.load, "too large"),
    "a huge hexadecimal": ("x.toml", lambda: b"priority = 0x" + b"f" * 200_000, jobfile.load, "is too large"),
    "YAML: NaN": ("x.yaml", lambda: b"base_model: /m\ndatasets: [{path: /d}]\neval_split: .nan", jobfile.load, "not a finite number"),
    "JSON: NaN": ("x.json", lambda: b'{"eval_split": NaN}', jobfile.load, "numbers must be finite"),
    "JSON: keys twice": ("x.json", lambda: b'{"name": "a",\n "name": "b"}', jobfile.load, "line 2: name: occurs twice"),
    "YAML: keys twice": ("x.yaml", lambda: b"name: a\nname: b", jobfile.load, "line 2: name: occurs twice"),
    "TOML: keys twice": ("x.toml", lambda: b"name = 'a'\nname = 'b'", jobfile.load, "line 2: name: occurs twice"),
    "YAML: an empty key": ("x.yaml", lambda: b'name: a\n"": 1', jobfile.load, "line 2: a value without a key"),
    "JSON: an empty key": ("x.json", lambda: b'{"name": "a",\n "": 1}', jobfile.load, "line 2: a value without a key"),
    "TOML: an empty key": ("x.toml", lambda: b"name = 'a'\n'' = 1", jobfile.load, "line 2: a value without a key"),
    "not UTF-8": ("x.yaml", lambda: b"name: a\nbase_model: \xff", jobfile.load, "line 2: not UTF-8"),
    "UTF-16": ("x.yaml", lambda: "name: a".encode("utf-16"), jobfile.load, "not UTF-8"),
    "NUL": ("x.toml", lambda: b"name = 'a\0'", jobfile.load, "control character"),
    "half a character": ("x.json", lambda: b'{"name": "\\ud800"}', jobfile.load, "U+D800"),
    "a path must not contain a line break": ("x.json", lambda: b'{"base_model": "/m\\n7: ok", "datasets": [{"path": "/d"}]}', jobfile.load, "a line break"),
    "a path with C1": ("x.json", lambda: b"" + '{"output_dir": "/m\x9b2J", "base_model": "/m", "datasets": [{"path": "/d"}]}'.encode(), jobfile.load, "control character"),
    "honed.toml: nested": ("x.toml", lambda: b"a = " + b"[" * 200_000, of_honed_toml, "honed.toml"),
    "honed.toml: infinite": ("x.toml", lambda: b"[jobs]\nstop_timeout_sec = inf", of_honed_toml, "stop_timeout_sec"),
    "jsonl: nested": ("x.jsonl", lambda: b'{"text": ' + b"[" * 10**6, of_dataset, "line 1: not JSON: nested too deeply"),
    "json: 10^6 lists": ("x.json", lambda: b"[" * 10**6 + b"]" * 10**6, of_dataset, "nested too deeply"),
    "jsonl: a huge number": ("x.jsonl", lambda: b'{"text": ' + b"9" * 5000 + b"}", of_dataset, "thousands of digits"),
    "json: a huge number": ("x.json", lambda: b'[{"text": ' + b"9" * 5000 + b"}]", of_dataset, "thousands of digits"),
    "jsonl: one line": ("x.jsonl", lambda: b'{"text": "' + b"x" * (5 * MiB), of_dataset, "line 1: longer than"),
    "jsonl: half a character": ("x.jsonl", lambda: b'{"text": "\\ud800"}\n' * 3, of_dataset, "unpaired surrogate"),
    "jsonl: a long role": (
        "x.jsonl", lambda: json.dumps({"messages": [{"role": "\x1b[2J" * 10**5, "content": "a"}]}).encode(), of_dataset,
        "the role is",
    ),
    "jsonl: a long column": ("x.jsonl", lambda: json.dumps({"a\nok" * 10**5: 1}).encode(), of_dataset, "the format cannot"),
    "jsonl: many columns": (
        "x.jsonl", lambda: json.dumps({str(n): 1 for n in range(10**5)}).encode(), of_dataset, "and 99980 more"
    ),
    "csv: NUL": ("x.csv", lambda: b"prompt,completion\na,b\0\n", of_dataset, ""),
    "csv: an open quote": ("x.csv", lambda: b'prompt,completion\na,"' + b"b\n" * (3 * MiB), of_dataset, "not CSV"),
    "safetensors: 2^63 bytes of header": ("x.safetensors", lambda: header({}, length=2**63), of_header, "not a safetensors"),
    "safetensors: more header than file": ("x.safetensors", lambda: header({}, length=10**6), of_header, "truncated"),
    "safetensors: a product": (
        "x.safetensors",
        lambda: header({"a": {"dtype": "F32", "shape": [2**62] * 10**6, "data_offsets": [0, 4]}}), of_header, "shape",
    ),
    "safetensors: nested": ("x.safetensors", lambda: struct.pack("<Q", 10**6) + b"[" * 10**6, of_header, "cannot be read"),
    "safetensors: offsets": (
        "x.safetensors", lambda: header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 4]}}), of_header,
        "cannot be read",
    ),
    "safetensors: a long name": (
        "x.safetensors", lambda: header({"\x1b" * 10**6: {"dtype": "F32", "shape": [1], "data_offsets": [1, 5]}}),
        of_header, "do not match",
    ),
    "config.json: nested": ("config.json", lambda: b'{"a":' * 10**6, of_config_json, "not JSON"),
    "config.json: a huge number": ("config.json", lambda: b'{"a":' + b"9" * 5000 + b"}", of_config_json, "not JSON"),
    "config.json: a number of 300 digits": (
        "config.json", lambda: b'{"model_type": "llama", "hidden_size": ' + b"9" * 300 + b"}", of_config_json, "has 300 digits"
    ),
    "config.json: a long dtype": (
        "config.json", lambda: json.dumps({"model_type": "x", "dtype": "\n" * 10**6}).encode(), of_config_json, "is not a dtype"
    ),
    "a picture of 10^9 pixels": ("x.png", lambda: png(40_000, 40_000), of_picture, "pixels"),
    "a picture of 2^62 pixels": ("x.png", lambda: png(2**31 - 1, 2**31 - 1), of_picture, "x.png: "),
    "a picture that is not there": ("x.png", lambda: png(10_000, 10_000), of_picture, "a broken image"),
    "PostScript": (
        "x.eps", lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", of_picture, "it is text"
    ),
    "a brush with 4 GiB of a comment": ("x.gbr", lambda: struct.pack(">6I", 2**32 - 1, 1, 9, 9, 4, 0), of_picture, "not a readable image"),
    "a sound with a lie": ("x.wav", lambda: wav(data_bytes=2**32 - 1), of_sound, ""),
    "a list of other files": ("x.mp4", lambda: b"ffconcat version 1.0\nfile secret.mp4\n", of_video, "not a readable video"),
    "a playlist": (
        "x.m3u8", lambda: b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n", of_video, "not a readable video"
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FILES)
def test_it_is_refused_within_limits_and_told_in_a_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_name, make, read, words = FILES[name]
    monkeypatch.setattr(datafile, "MAX_LINE_BYTES", 4 * MiB)
    path = tmp_path / file_name
    path.write_bytes(make())
    said = in_child(lambda: refusal(read, path), max_bytes=MAX_BYTES, cpu_sec=CPU_SEC)
    path.unlink(missing_ok=True)
    assert words in said
    assert len(said) < 5000
    assert said.count("\n") <= 1 if said else not words
    assert all(char.isprintable() or char == "\n" for char in said)


def test_a_list_of_files_that_calls_itself_a_video_opens_none_of_them(tmp_path: Path) -> None:
    """FFmpeg would open them, although nobody checked whether the job may read them."""
    pytest.importorskip("av")
    from zoo.fuzz import _recordings

    (tmp_path / "secret.mp4").write_bytes(_recordings()[1])
    assert media.probe(media.Media("video", tmp_path / "secret.mp4")).num_frames == 5
    (tmp_path / "x.mp4").write_text("ffconcat version 1.0\nfile secret.mp4\n")
    with pytest.raises(media.MediaError, match="it is text"):
        media.probe(media.Media("video", tmp_path / "x.mp4"))


@pytest.mark.slow
def test_a_parquet_file_that_unpacks_to_more_than_the_check_may_have_is_refused(tmp_path: Path) -> None:
    """The helper itself rejects it, in a fresh process."""
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet

    path, job_path = tmp_path / "bomb.parquet", tmp_path / "job.json"
    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 120, pyarrow.int32()), ["x" * (4 * MiB)])
    pyarrow.parquet.write_table(pyarrow.table({"text": texts.cast(pyarrow.string())}), path, compression="zstd")
    assert path.stat().st_size < MiB
    job_path.write_text(json.dumps(plain.spec(plain.write_base_model(tmp_path / "model"), path, resources={"gpus": 0})))
    request = {
        "id": 1,
        "spec_name": job_path.name,
        "spec": base64.b64encode(job_path.read_bytes()).decode(),
        "config": Config().model_dump(mode="json"),
        "device": asdict(cpu()),
        "uid": None,
        "earlier": asdict(Earlier()),
    }
    command = [sys.executable, "-m", "honed.check.preflight", "--root", str(tmp_path), "--max-bytes", str(800 * MiB)]
    done = subprocess.run(
        command,
        input=json.dumps(request).encode() + b"\n",
        capture_output=True,
        check=True,
        env=os.environ | HELPER_ENVIRONMENT,
    )
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["error"]["code"] == "dataset_invalid", done.stderr
    assert "bomb.parquet" in answer["error"]["message"] or "more memory" in answer["error"]["message"]


@pytest.mark.parametrize("depth", [40, 60, 300, 900, 10**5])
def test_an_event_that_is_nested_too_deeply_is_counted_and_passed_over(depth: int, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    line = b'{"event": "log", "time": 1, "message": ' + b"[" * depth + b"]" * depth + b"}\n"
    path.write_bytes(line + b'{"event": "stage", "time": 1}\n')
    reading = event.read(PersonPath.own(path), 0)
    assert [item.kind for item in reading.events][-1] == "stage"
    assert reading.num_bad == int(depth > event.MAX_DEPTH)


@pytest.mark.parametrize(("num_times", "code"), [(60_000, "mask_invalid"), (10**6, "killed")])
def test_a_result_with_half_characters_and_a_long_message_still_makes_an_entry(
    tmp_path: Path, num_times: int, code: str
) -> None:
    """An entry that cannot be written would keep the job running forever. A result of megabytes is no worker's."""
    path = tmp_path / "attempts/1/result.json"
    path.parent.mkdir(parents=True)
    error = {"code": "mask_invalid", "message": "\ud800\x1b[2J" * num_times, "hint": "\udfff"}
    path.write_text(json.dumps({"outcome": "failed", "step": 10**400, "error": error}))
    judged = outcome.judge(PersonPath.of(path, 3), Exit(81, None))
    assert judged.code == code
    assert judged.step is None
    told = judged.error.as_dict()
    assert len(json.dumps(told, ensure_ascii=False).encode()) < 100_000
    assert "\x1b" not in told["message"]


def test_a_worker_cannot_have_honed_signal_other_processes_than_its_own() -> None:
    from honed.run.process import _process

    assert [_process(pid) for pid in (-1, 0, 1, True, 2**40, "7", None, 7.0)] == [None] * 8
    assert _process(os.getpid()) == os.getpid()


@pytest.mark.parametrize(
    "line", [b"[" * 60_000, b'{"verb": "list", "id": ' + b"9" * 5000 + b"}", b"\xff", b"null", b'{"verb": 3}']
)
def test_a_request_that_is_none_is_told_so(line: bytes) -> None:
    server = Server.__new__(Server)
    server._answer = lambda _request: None
    answer = server._respond(line, _Connection(None, 0, frozenset()))  # type: ignore[arg-type]
    assert json.loads(answer)["error"]["code"] == "usage"


def test_a_result_that_is_no_json_is_a_failed_request_and_not_the_end_of_the_loop() -> None:
    server = Server.__new__(Server)
    server._answer = lambda _request: {"estimated_bytes": 10**5000}
    answer = server._respond(bytearray(b'{"verb": "glance"}'), _Connection(None, 0, frozenset()))  # type: ignore[arg-type]
    assert json.loads(answer)["error"]["code"] == "error"


def test_a_honed_that_hangs_is_not_told_to_be_started(tmp_path: Path) -> None:
    import socket

    path = tmp_path / "control"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen(1)
        with pytest.raises(HonedError, match="is running, but did not respond") as raised:
            Client(path, timeout_sec=0.05).ask("list")
    assert "start it" not in raised.value.hint
    with pytest.raises(HonedError, match="does not respond") as raised:
        Client(path).ask("list")
    assert "start it" in raised.value.hint
