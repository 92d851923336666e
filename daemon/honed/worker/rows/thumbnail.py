"""Small pictures of the media in prediction examples, for the report: made here, where the files may be read."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

from honed.inputs.media import Media, MediaError, frames, image
from honed.job.event import EventWriter
from honed.spec.media import MediaLimits
from honed.worker.train.prediction import Question

#: Examples with thumbnails, pictures of one example, and pixels of a picture's longer side.
MAX_SAMPLES, MAX_PICTURES, SIZE = 20, 4, 96


def emit(questions: Sequence[Question], events: EventWriter) -> None:
    """Send one event with the thumbnails of all examples, if there are any. A broken file has no thumbnail."""
    rows = [
        {"sample_index": index, "thumbnails": [made for item in question.media[:MAX_PICTURES] if (made := _of(item))]}
        for index, question in enumerate(questions[:MAX_SAMPLES])
    ]
    if rows := [row for row in rows if row["thumbnails"]]:
        events.emit("samples", rows=rows)


def _of(media: Media) -> str:
    """Return a JPEG in base64, of a video its first frame; empty where there is nothing to see."""
    try:
        match media.kind:
            case "image":
                picture: Any = image(media, MediaLimits(max_image_size=SIZE))
            case "video":
                picture = frames(media, MediaLimits(max_image_size=SIZE, num_frames=1))[0][0]
            case _:
                return ""
    except (MediaError, IndexError):
        return ""
    made = io.BytesIO()
    picture.save(made, "JPEG", quality=80)
    return base64.b64encode(made.getvalue()).decode("ascii")
