"""Small pictures for the report, of any files named in the rows."""

from __future__ import annotations

import base64
import io
from pathlib import Path

from PIL import Image

from honed.inputs.media import Media
from honed.job.event import EventWriter, read
from honed.system.personpath import PersonPath
from honed.worker.rows import thumbnail
from honed.worker.train.prediction import Question


def told(questions: list[Question], path: Path) -> list[dict[str, object]]:
    events = EventWriter(path)
    thumbnail.emit(questions, events)
    events.close()
    return [event.data for event in read(PersonPath.own(path), 0).events]


def test_pictures_become_small_ones_and_broken_files_none(tmp_path: Path) -> None:
    Image.new("RGBA", (400, 100), (200, 30, 30, 128)).save(tmp_path / "wide.png")
    (tmp_path / "broken.png").write_bytes(b"no picture")
    frames = tuple(tmp_path / f"{n}.png" for n in range(3))
    for path in frames:
        Image.new("L", (30, 50)).save(path)
    media = (
        Media("image", tmp_path / "wide.png"),
        Media("image", tmp_path / "broken.png"),
        Media("image", tmp_path / "gone.png"),
        Media("video", frames=frames),
    )
    questions = [Question("text", [], ""), Question("seen", [], "", media=media)]
    (event,) = told(questions, tmp_path / "events.jsonl")
    (row,) = event["rows"]  # type: ignore[misc]
    sizes = [Image.open(io.BytesIO(base64.b64decode(each))).size for each in row["thumbnails"]]
    assert row["sample_index"] == 1
    assert sizes == [(96, 24), (30, 50)]


def test_text_alone_tells_nothing(tmp_path: Path) -> None:
    assert told([Question("text", [], "")], tmp_path / "events.jsonl") == []
