"""Cost of images, videos and sounds in a vision or audio model: tokens, and positions in its tower.

    preprocessor_config.json, processor_config.json, video_preprocessor_config.json ──► how media are cut up
    config.json                                                                     ──► how wide and deep the towers are

It is derived from these files, not from a list of model names; missing values are assumed to be the most common ones.
So a number here is an estimate: for training, the processor itself counts. No torch, no pixels.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from honed.spec.media import Part
from honed.system import durable

#: Smallest and largest pixels of an image in the Qwen family, where its files do not set them.
MIN_PIXELS, MAX_PIXELS = 56 * 56, 28 * 28 * 1280
#: Digits of an integer. transformers writes 31 for a tokenizer without a limit: int(1e30).
MAX_DIGITS = 40
#: Pixels above which a video's limit applies to all frames together, as in Qwen3-VL's and GLM's files.
MAX_FRAME_PIXELS = 20_000_000
#: Whisper's values, which most audio towers share: spectrum frames per second of sound, spectrum frames per position in
#: the tower and per token, and the seconds to which sound is padded.
SPECTRUM_RATE, FRAMES_A_POSITION, FRAMES_A_TOKEN, CHUNK_SEC = 100, 2, 4, 30

_PROJECTOR = re.compile(
    r"(^|\.)((multi_?modal|mm)_projector|connector|aligner|resampler|qformer|language_projection|embed_(vision|audio)"
    r"|(visual|vision\w*)\.(merger|deepstack_merger_list)|(audio|speech)\w*\.proj\d?)(\.|$)"
)
_AUDIO = re.compile(r"(^|\.)(audio|speech)\w*(\.|$)")
_VISION = re.compile(r"(^|\.)(visual\w*|vision\w*|vit\w*|vqmodel|img_\w+|image_\w+)(\.|$)")


#: The current job's patterns for its model's parts (see `naming`), and the names resolved with them.
_named: dict[Part, re.Pattern[str]] = {}
_known: dict[str, Part] = {}


@contextlib.contextmanager
def naming(patterns: Mapping[Part, str]) -> Iterator[None]:
    """Apply a job's own regular expressions for parts, before the rules for known families.

    The setting is global, since all modules of the daemon's side and of the worker call `part`: both handle one job at
    a time.
    """
    global _named, _known
    before = _named, _known
    # A projector may lie within the vision or audio tower that it connects.
    order: tuple[Part, ...] = ("projector", "audio", "vision", "language")
    _named, _known = {kind: re.compile(patterns[kind]) for kind in order if kind in patterns}, {}
    try:
        yield
    finally:
        _named, _known = before


def part(name: str) -> Part:
    """Return the part of the model that a module or parameter belongs to, by its name."""
    if not _named:
        return _usual(name)
    if name not in _known:
        kinds = [kind for kind, pattern in _named.items() if is_within(name, pattern)]
        _known[name] = kinds[0] if kinds else _usual(name)
    return _known[name]


def is_within(name: str, pattern: re.Pattern[str]) -> bool:
    """Return True if a name, or that of a module above it, matches anywhere: as stored, as loaded, or in an adapter's
    wrapper."""
    words = name.removeprefix("base_model.model.").removeprefix("model.").split(".")
    above = (".".join(words[:count]) for count in range(1, len(words) + 1))
    return any(pattern.search(item) or pattern.search(f"model.{item}") for item in above)


def _usual(name: str) -> Part:
    if _PROJECTOR.search(name):
        return "projector"
    if _AUDIO.search(name):
        return "audio"
    return "vision" if _VISION.search(name) else "language"


@dataclass(frozen=True)
class Tower:
    """The dimensions of a vision or audio tower."""

    hidden: int
    mlp: int
    layers: int
    heads: int


@dataclass(frozen=True)
class Cost:
    """The cost of media in the model."""

    tokens: int  #: in the language model
    positions: int  #: in the tower
    window: int  #: the most positions that attend to each other

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.tokens + other.tokens, self.positions + other.positions, max(self.window, other.window))


NOTHING = Cost(0, 0, 0)


@dataclass(frozen=True)
class Senses:
    """A model's handling of media, from its configuration files."""

    config: Mapping[str, Any]  #: of the model that is trained
    processor: Mapping[str, Any]  #: processor_config.json without its nested sections
    images: Mapping[str, Any]
    videos: Mapping[str, Any]
    sounds: Mapping[str, Any]

    @property
    def eyes(self) -> Tower | None:
        return _tower(self.config.get("vision_config"))

    @property
    def ears(self) -> Tower | None:
        return _tower(self.config.get("audio_config") or self.config.get("audio_encoder_config"))

    def image(self, width: int, height: int) -> Cost:
        """Return the cost of an image of that size, after the job's own limits and before the processor's."""
        settings = self.images
        if (merge := _whole(settings.get("merge_size"))) is not None:
            return self._grid(width, height, settings, merge)
        if tile := _edge(settings.get("max_image_size")):
            return self._tiles(width, height, settings, tile)
        if points := settings.get("image_grid_pinpoints") or self.config.get("image_grid_pinpoints"):
            return self._pinpoints(width, height, points)
        longest = _edge(settings.get("size"), "longest_edge")
        if longest and (patch := _edge(settings.get("patch_size"))):
            return self._ragged(width, height, longest, patch)
        return self._fixed()

    def video(self, num_frames: int, width: int, height: int) -> Cost:
        """Return the cost of that many frames of that size. In a model without video support, each counts as an
        image."""
        settings = self.videos or self.images
        merge = _whole(settings.get("merge_size"))
        if merge is None:
            image = self._fixed() if _edge(settings.get("max_image_size")) else self.image(width, height)
            return Cost(image.tokens * num_frames, image.positions * num_frames, image.window)
        together = _whole(settings.get("temporal_patch_size")) or 2
        frame = self._grid(width, height, settings, merge, num_frames=num_frames)
        steps = math.ceil(num_frames / together)
        return Cost(frame.tokens * steps, frame.positions * steps, frame.window)

    def sound(self, duration_sec: float) -> Cost:
        chunk = _number(self.sounds.get("chunk_length")) or CHUNK_SEC
        frames = min(duration_sec, chunk) * SPECTRUM_RATE
        positions = math.ceil(chunk * SPECTRUM_RATE / FRAMES_A_POSITION)
        return Cost(math.ceil(frames / FRAMES_A_TOKEN), positions, positions)

    def _grid(
        self, width: int, height: int, settings: Mapping[str, Any], merge: int, *, num_frames: int | None = None
    ) -> Cost:
        """Qwen-VL's scheme: resized to whole patches between two areas, `merge` by `merge` of which make a token."""
        patch = _edge(settings.get("patch_size")) or 14
        size = settings.get("size") if isinstance(settings.get("size"), dict) else {}
        assert isinstance(size, dict)
        least = _whole(settings.get("min_pixels")) or _whole(size.get("shortest_edge")) or MIN_PIXELS
        most = _whole(settings.get("max_pixels")) or _whole(size.get("longest_edge")) or MAX_PIXELS
        if num_frames and most > MAX_FRAME_PIXELS:
            most = max(least, most // num_frames)
        across, down = resized_to_patches(width, height, patch * merge, least, most)
        positions = across * down * merge * merge
        return Cost(across * down, positions, positions)

    def _tiles(self, width: int, height: int, settings: Mapping[str, Any], tile: int) -> Cost:
        """Idefics3's and SmolVLM's scheme: resized to whole tiles with equal tokens, plus the whole image once more."""
        image = self._fixed()
        longest = _edge(settings.get("size"), "longest_edge") or 4 * tile
        scale = longest / max(width, height)
        across, down = (max(1, math.ceil(round(edge * scale) / tile)) for edge in (width, height))
        is_split = settings.get("do_image_splitting") is not False and across * down > 1
        number = across * down + 1 if is_split else 1
        signs = 2 * number + 1 + (down if is_split else 0)  # the marker tokens around each
        return Cost(image.tokens * number + signs, image.positions * number, image.window)

    def _pinpoints(self, width: int, height: int, points: Any) -> Cost:
        """LLaVA-NeXT's scheme: the best of a list of sizes, in tiles, plus the whole image once more."""
        image, tile = self._fixed(), self._image_size()

        def fit(point: list[int]) -> tuple[float, float]:
            scale = min(point[1] / width, point[0] / height)
            used = min(width * scale * height * scale, width * height)
            return used, used - point[0] * point[1]

        down, across = max(points, key=fit)
        number = max(1, down // tile) * max(1, across // tile) + 1
        return Cost(image.tokens * number, image.positions * number, image.window)

    def _ragged(self, width: int, height: int, longest: int, patch: int) -> Cost:
        """Pixtral's scheme: as large as allowed, with a marker token at the end of every row of patches."""
        merge = _whole(self.config.get("spatial_merge_size")) or _whole(self.processor.get("spatial_merge_size")) or 1
        scale = min(1.0, longest / max(width, height))
        across, down = (max(1, math.ceil(edge * scale / (patch * merge))) for edge in (width, height))
        positions = across * down * merge * merge
        return Cost((across + 1) * down, positions, positions)

    def _fixed(self) -> Cost:
        """A fixed cost for every image, as with CLIP and SigLIP."""
        vision = _section(self.config, "vision_config")
        side = self._image_size() // (_edge(self.processor.get("patch_size") or vision.get("patch_size")) or 14)
        positions = max(1, side * side)
        if "patch_size" in self.processor:  # LLaVA's, which counts patches too
            class_token = 1 if self.processor.get("vision_feature_select_strategy") == "default" else 0
            more = _whole(self.processor.get("num_additional_image_tokens")) or 0
            return Cost(positions + more - class_token, positions, positions)
        named = [
            _whole(where.get(key))
            for where, key in (
                (self.processor, "image_seq_length"),
                (self.processor, "image_seq_len"),
                (self.processor, "num_image_tokens"),
                (self.config, "mm_tokens_per_image"),
                (self.config, "image_seq_length"),
            )
        ]
        tokens = next(filter(None, named), positions // (_whole(self.config.get("scale_factor")) or 1) ** 2)
        return Cost(tokens, positions, positions)

    def _image_size(self) -> int:
        vision = _section(self.config, "vision_config")
        sizes = (vision.get("image_size"), self.images.get("crop_size"), self.images.get("size"))
        return next(filter(None, map(_edge, sizes)), 336)


def look(path: Path, config: Mapping[str, Any]) -> Senses:
    """Read the files beside a config.json; unreadable ones count as empty here, and the loader refuses them."""
    whole = _read(path / "processor_config.json")
    flat = _read(path / "preprocessor_config.json")
    video = _read(path / "video_preprocessor_config.json")
    inner = config.get("thinker_config")
    return Senses(
        config=inner if isinstance(inner, dict) else config,
        processor={key: value for key, value in whole.items() if not isinstance(value, dict)},
        images=_section(whole, "image_processor") or flat,
        videos=_section(whole, "video_processor") or video,
        sounds=_section(whole, "feature_extractor") or _section(whole, "audio_processor") or flat,
    )


def resized_to_patches(width: int, height: int, patch: int, least: int, most: int) -> tuple[int, int]:
    """Return patches across and down, for an area of `least` to `most` pixels of nearly the same proportions."""
    across, down = (max(1, round(edge / patch)) for edge in (width, height))
    if across * down * patch * patch > most:
        shrink = math.sqrt(width * height / most)
        across, down = (max(1, math.floor(edge / shrink / patch)) for edge in (width, height))
    elif across * down * patch * patch < least:
        grow = math.sqrt(least / (width * height))
        across, down = (math.ceil(edge * grow / patch) for edge in (width, height))
    return across, down


def _tower(config: Any) -> Tower | None:
    if not isinstance(config, dict):
        return None

    def first(*names: str) -> int | None:
        return next((number for name in names if (number := _whole(config.get(name))) is not None), None)

    hidden = first("embed_dim", "d_model", "hidden_size", "width")  # Qwen2-VL's hidden_size is the language model's
    layers = first("depth", "num_hidden_layers", "encoder_layers", "layers")
    if not (hidden and layers):
        return None
    ratio = _number(config.get("mlp_ratio")) or 4
    mlp = first("intermediate_size", "encoder_ffn_dim") or int(ratio * hidden)
    heads = first("num_heads", "num_attention_heads", "encoder_attention_heads", "heads") or max(1, hidden // 64)
    return Tower(hidden, mlp, layers, heads)


def _read(path: Path) -> dict[str, Any]:
    return durable.json_object(path.read_bytes, loads)


def loads(data: bytes) -> Any:
    """Parse a model's JSON. Raises ValueError, also for an integer too large to be a size: products of a few of them
    would overflow a float."""
    return json.loads(data, parse_int=_int)


def _int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"the number {text[:20]}… has {len(text)} digits")
    return int(text)


def _section(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    section = config.get(key)
    return section if isinstance(section, dict) else {}


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 else None


def _edge(value: Any, *names: str) -> int | None:
    """Return one edge of a size, which files write as a number, a pair, or a mapping with edges or height and width."""
    match value:
        case dict():
            keys = names or ("height", "longest_edge", "shortest_edge")
            return next((edge for key in keys if (edge := _whole(value.get(key))) is not None), None)
        case [first, *_] if not names:
            return _whole(first)
        case _:
            return None if names else _whole(value)
