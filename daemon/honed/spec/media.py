"""The kinds of media in a row, and the limits that a job sets to their size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["image", "video", "audio"]


KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class MediaLimits:
    """Limits to the size of media before the model's processor sees them; None leaves them as they are."""

    max_pixels: int | None = None  #: of an image or frame; larger ones are made smaller, in proportion
    min_pixels: int | None = None  #: smaller ones are enlarged
    max_image_size: int | None = None  #: pixels of the longer side
    num_frames: int | None = None  #: of a video; None takes NUM_FRAMES, and the whole of a list of frames


#: What a module is part of. A projector leads from eyes or ears into the language model.
Part = Literal["language", "vision", "audio", "projector"]
