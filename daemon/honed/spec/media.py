"""The kinds of media in a row, and a job's limits on their size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["image", "video", "audio"]


KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class MediaLimits:
    """Limits on the size of media before the model's processor sees them; None means no limit."""

    max_pixels: int | None = None  #: of an image or frame; larger ones are scaled down proportionally
    min_pixels: int | None = None  #: smaller ones are enlarged
    max_image_size: int | None = None  #: pixels of the longer side
    num_frames: int | None = None  #: of a video; None means NUM_FRAMES, or all of a list of frames


#: The part that a module belongs to. A projector connects the vision or audio encoder to the language model.
Part = Literal["language", "vision", "audio", "projector"]
