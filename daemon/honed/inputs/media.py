"""Images, videos and sound beside a row's text: found, inspected, and decoded one at a time, as needed.

Images are read with Pillow, video and sound with PyAV; a video may also be a directory or a list of frames. The result
is plain (RGB images, mono float32 samples); a model's own format is made by its processor. Any fault of a file is a
MediaError, whose sentence names the file and the fault. Nothing is ever fetched.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from honed.spec.media import Kind, MediaLimits
from honed.system import quote
from honed.system.error import DatasetError, EnvironmentInvalidError

if TYPE_CHECKING:
    import av
    import av.container
    import numpy.typing
    from PIL import Image

PLURAL: Mapping[Kind, str] = {"image": "images", "video": "videos", "audio": "sounds"}

#: Frames of a video where the job does not set a number.
NUM_FRAMES = 8
#: Pixels above which an image is refused as a decompression bomb; Pillow has the same limit.
MAX_PIXELS = 178_956_970
#: Seconds beyond which sound is not decoded: 24 hours would be 5 GiB of samples.
MAX_AUDIO_SEC = 3600.0
#: Largest ratio of an image's sides. Qwen's processors refuse more, others squash the image to a square.
MAX_ASPECT_RATIO = 200
#: Pixels of an image's shorter side, to which smaller ones are enlarged: processors mistake a side of 1 or 3 for the
#: channels.
MIN_SIDE = 8

#: Suffixes of frames in a directory. A file named in a row may have any suffix.
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".avif", ".jp2")
#: The allowed Pillow readers. The others are for formats that are not used for training, and some of them trust lengths
#: in a header, or run programs.
_IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000")
#: Formats that may be animated, and are then read as video by Pillow.
_ANIMATIONS = (".gif", ".webp", ".png", ".apng", ".avif")


#: FFmpeg's readers of self-contained files. Others (concat, HLS, DASH, SDP) read text and open the files and addresses
#: in it, which no check of the job's rights has seen.
_FORMATS = (
    "mov,matroska,webm,avi,flv,mpegts,mpeg,mpegvideo,m4v,h263,h264,hevc,av1,obu,ivf,asf,mxf,nut,rm,dv,mjpeg,gif,apng,"
    "png_pipe,jpeg_pipe,bmp_pipe,webp_pipe,tiff_pipe,ogg,wav,w64,mp3,aac,flac,aiff,au,amr,amrnb,amrwb,caf,ape,ac3,eac3,dts,wv,tta,voc,loas,mpc,mpc8,tak,gsm"
)
_SELF_CONTAINED = {"format_whitelist": _FORMATS, "protocol_whitelist": "file"}


class MediaError(DatasetError):
    """A missing, broken or unexpected file beside a row; the message begins with its place."""


@dataclass(frozen=True)
class Media:
    """One image, video or sound of a row, not decoded."""

    kind: Kind
    path: Path | None = None  #: a file, or a video's directory of frames
    frames: tuple[Path, ...] = ()  #: a video that is given as a list of images
    data: bytes | None = field(default=None, repr=False)  #: embedded in the row; `spill` writes it to a file
    name: str = ""  #: the name of embedded data in the row

    @property
    def paths(self) -> tuple[Path, ...]:
        """The media's files, or its directory; empty if it is embedded."""
        return self.frames if self.path is None else (self.path,)

    @property
    def place(self) -> str:
        """The media's name in logs, previews and the database."""
        if self.path is not None:
            return str(self.path)
        if self.frames:
            return f"{self.frames[0]} and {len(self.frames) - 1} more" if self.frames[1:] else str(self.frames[0])
        return f"embedded {self.kind}{f' {self.name}' if self.name else ''}"

    @property
    def named(self) -> str:
        """The media's place for use in a sentence, where a name from the row is quoted."""
        if self.paths:
            others = f" and {len(self.paths) - 1} more" if self.paths[1:] else ""
            return f"{quote.place(str(self.paths[0]))}{others}"
        return f"embedded {self.kind}{f' {quote.place(self.name)}' if self.name else ''}"


@dataclass(frozen=True)
class Facts:
    """The facts in a file's header."""

    kind: Kind
    format: str
    width: int = 0  #: pixels, after the rotation of its EXIF data
    height: int = 0
    num_frames: int = 1  #: of a video, in all; 0 if the header does not say
    is_list: bool = False  #: True for a video whose frames the row lists
    duration_sec: float | None = None


def fitted_size(width: int, height: int, limits: MediaLimits) -> tuple[int, int]:
    """Return the size in which an image is passed to the processor. The upper limits take precedence over the lower."""
    scale = 1.0
    if limits.min_pixels is not None and width * height < limits.min_pixels:
        scale = math.sqrt(limits.min_pixels / (width * height))
    if limits.max_pixels is not None:
        scale = min(scale, math.sqrt(limits.max_pixels / (width * height)))
    if limits.max_image_size is not None:
        scale = min(scale, limits.max_image_size / max(width, height))
    rounded = (_rounded(width, scale), _rounded(height, scale))
    smaller = min(rounded)
    if smaller >= MIN_SIDE:
        return rounded
    # Too thin for a processor: only the short side is enlarged, for which the limits have room.
    return max(rounded[0], MIN_SIDE), max(rounded[1], MIN_SIDE)


def _rounded(side: int, scale: float) -> int:
    """Round a scaled side towards the limit's safe side, so that the product never exceeds the limit."""
    if scale == 1.0:
        return side
    return max(math.floor(side * scale + 1e-6) if scale < 1 else math.ceil(side * scale - 1e-6), 1)


def num_taken(num_frames: int, limits: MediaLimits, *, is_list: bool = False) -> int:
    """Return the number of frames that are taken of a video."""
    return min(limits.num_frames or (num_frames if is_list else NUM_FRAMES), num_frames)


def spill(media: Media, directory: Path) -> Media:
    """Return media as a file: embedded data are written to `<directory>/<sha256><suffix>`, atomically, once per
    content."""
    if media.data is None:
        return media
    suffix = Path(media.name).suffix.lower() if re.fullmatch(r"\.\w{1,5}", Path(media.name).suffix) else ""
    path = directory / f"{hashlib.sha256(media.data).hexdigest()}{suffix}"
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_bytes(media.data)
        partial.replace(path)
    return replace(media, path=path, data=None)


# --- What a header says -----------------------------------------------------------------------------------------------


def probe(media: Media) -> Facts:
    """Return the facts in a file's header, without decoding. Raises MediaError for a missing or unusable file."""
    match media.kind:
        case "image":
            with _opened_image(media) as image:
                return _image_facts(image, "image")
        case "video":
            return _probe_video(media)
        case "audio":
            with _container(media) as container:
                stream = _stream(media, container, "audio")
                return Facts("audio", container.format.name, duration_sec=_duration(container, stream))


def require(media: Media) -> None:
    """Raise MediaError if a file is missing or empty. Its content is not checked."""
    if media.kind == "video" and _is_dir(media.path):
        return
    for path in media.frames:
        _check_file(Media(media.kind, path))
    if media.path is not None or media.data is not None:
        _check_file(media)


def _image_facts(image: Image.Image, kind: Kind) -> Facts:
    width, height = image.size
    if image.getexif().get(_ORIENTATION) in _ON_ITS_SIDE:
        width, height = height, width
    return Facts(kind, image.format or "", width, height, num_frames=getattr(image, "n_frames", 1))


def _probe_video(media: Media) -> Facts:
    if frames := _frame_files(media):
        with _opened_image(Media("video", frames[0])) as image:
            facts = _image_facts(image, "video")
        require(Media("video", frames=tuple(frames[1:])))
        return replace(facts, num_frames=len(frames), is_list=bool(media.frames))
    if _is_animation(media):
        with _opened_image(media) as image:
            return _image_facts(image, "video")
    with _container(media) as container:
        stream = _stream(media, container, "video")
        width, height = stream.codec_context.width, stream.codec_context.height
        duration = _duration(container, stream)
        number = stream.frames or round((duration or 0) * float(stream.average_rate or 0))
        return Facts("video", container.format.name, width, height, num_frames=number, duration_sec=duration)


#: The EXIF tag of the orientation, and its values that mean a quarter turn.
_ORIENTATION = 0x0112
_ON_ITS_SIDE = (5, 6, 7, 8)


# --- Files ------------------------------------------------------------------------------------------------------------


def _is_dir(path: Path | None) -> bool:
    try:
        return path is not None and path.is_dir()
    except OSError:  # the name is too long, or its directory may not be listed
        return False  # the error is reported when it is opened as a file


def _absence(path: Path) -> str:
    """Return the reason why a path is not a readable file."""
    try:
        if path.is_dir():
            return "a directory, not a file"
        if path.is_symlink() and not path.exists():
            return f"a link to {quote.place(str(path.readlink()))}, which does not exist"
        if not path.exists():
            missing = next((parent for parent in reversed(path.parents) if not parent.exists()), None)
            return "no such file" + (f": the directory {quote.place(str(missing))} does not exist" if missing else "")
    except OSError as error:
        return error.strerror or str(error)
    return "not a regular file"


def _check_file(media: Media) -> Path | None:
    """Return the file after checking that it exists and is not empty; None if the data are embedded."""
    path = media.path
    if path is None:
        if not media.data:
            raise MediaError(f"{media.named}: empty")
        return None
    try:
        if not path.is_file():  # a pipe is none either: reading it would block for ever
            hint = "relative paths are resolved against the data file's directory, or `media_dir`"
            raise MediaError(f"{media.named}: {_absence(path)}", hint=hint)
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise MediaError(
            f"{media.named}: {error.strerror or error}", hint="check that the job's submitter can read it"
        ) from error
    if not head:
        raise MediaError(f"{media.named}: an empty file")
    if head.startswith(b"version https://git-lfs"):
        raise MediaError(f"{media.named}: a Git LFS pointer, not the file itself", hint="run git lfs pull to fetch it")
    return path


def _looks(media: Media) -> str:
    """Return a guess at the content of a file that no reader knows; empty without one."""
    try:
        if media.path is not None:
            with media.path.open("rb") as file:
                head = file.read(512)
        else:
            head = (media.data or b"")[:512]
    except OSError:
        return ""
    if head.lstrip()[:1] == b"<":
        return "it is text, such as a web page downloaded instead of the file"
    try:
        head[:500].decode()
    except UnicodeDecodeError as error:
        # A multi-byte character may have been cut off.
        return "" if error.start < len(head[:500]) - 4 else "it is text"
    return "" if b"\0" in head else "it is text"


def _unreadable(media: Media, reader: str) -> str:
    seems = _looks(media)
    return f"{media.named}: not a readable {reader}{f': {seems}' if seems else ''}"


def _source(media: Media) -> Any:
    path = _check_file(media)
    return str(path) if path is not None else io.BytesIO(media.data or b"")


# --- Images -----------------------------------------------------------------------------------------------------------


@contextmanager
def _opened_image(media: Media) -> Iterator[Image.Image]:
    """Open an image and check its header, without decoding pixels. Errors in the block become a MediaError of the
    file."""
    pillow = _pillow()
    formats = [item for item in _IMAGE_FORMATS if item in pillow.OPEN]
    try:
        with pillow.open(_source(media), formats=formats) as image:
            _check_size(media, *image.size)
            yield image
    except MediaError:
        raise
    except pillow.DecompressionBombError as error:
        raise MediaError(f"{media.named}: more than {MAX_PIXELS:,} pixels", hint="make it smaller") from error
    except pillow.UnidentifiedImageError as error:
        hint = f"supported image formats are {', '.join(formats)}: convert it to one of them"
        raise MediaError(_unreadable(media, "image"), hint=hint) from error
    except _TORN as error:
        raise MediaError(f"{media.named}: a broken image: {_said(error)}") from error


#: Exceptions of Pillow's readers for truncated or forged files; struct.error is a subclass of none of the others.
_TORN = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    LookupError,
    TypeError,
    ArithmeticError,
    AttributeError,
    AssertionError,
    NotImplementedError,
    RuntimeError,
    struct.error,
    zlib.error,
)


def _check_size(media: Media, width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise MediaError(f"{media.named}: {width}×{height} is more than {MAX_PIXELS:,} pixels", hint="make it smaller")
    if not width or not height:
        raise MediaError(f"{media.named}: {width}×{height}: the image is empty")
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise MediaError(
            f"{media.named}: {width}×{height}: one side is more than {MAX_ASPECT_RATIO} times as long as the other, "
            "too narrow for models to recognize anything",
            hint="cut it into several images",
        )


def _said(error: BaseException) -> str:
    words = (str(error) or type(error).__name__).strip().splitlines()[0][:200]
    return words if isinstance(error, OSError) and error.errno is not None else quote.mark(words)


def image(media: Media, limits: MediaLimits) -> Image.Image:
    """Return an image as RGB, upright, within the limits; an animation's first frame. Transparency becomes white.

    Raises MediaError.
    """
    with _opened_image(media) as opened:
        opened.load()
        return _fitted(_rgb(opened), limits)


def _rgb(image: Image.Image) -> Image.Image:
    from PIL import Image as pillow  # noqa: N813, PLC0415  (only where there are images)
    from PIL import ImageOps  # noqa: PLC0415

    turned = ImageOps.exif_transpose(image)
    if turned.mode.startswith(("I", "F")):
        turned = _eight_bits(turned)
    if turned.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in turned.info:
        clear = turned.convert("RGBA")
        return pillow.alpha_composite(pillow.new("RGBA", clear.size, "white"), clear).convert("RGB")
    # A copy, so that the file can be closed.
    return turned.convert("RGB") if turned.mode != "RGB" else turned.copy()


def _eight_bits(image: Image.Image) -> Image.Image:
    """Convert gray values of 16 or 32 bits, or floats, to 8 bits: Pillow's own conversion clips at 255 (a white
    page)."""
    import numpy as np  # noqa: PLC0415
    from PIL import Image as pillow  # noqa: N813, PLC0415

    values = np.asarray(image).astype("float64")
    values = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    low, high = float(values.min()), float(values.max())
    if image.mode == "F":
        low, high = (0.0, 1.0) if low >= 0 and high <= 1 else (0.0, 255.0) if low >= 0 and high <= 255 else (low, high)
    elif low >= 0 and high <= 65535:
        low, high = 0.0, 65535.0
    scaled = (values - low) * (255.0 / ((high - low) or 1.0))
    return pillow.fromarray(np.rint(scaled).clip(0, 255).astype("uint8"), mode="L")


def _fitted(image: Image.Image, limits: MediaLimits) -> Image.Image:
    from PIL import Image as pillow  # noqa: N813, PLC0415

    size = fitted_size(*image.size, limits)
    return image if size == image.size else image.resize(size, pillow.Resampling.BICUBIC)


# --- Video ------------------------------------------------------------------------------------------------------------


def frames(media: Media, limits: MediaLimits) -> tuple[list[Image.Image], float | None]:
    """Return frames of a video, evenly spread from first to last, as `image` returns them; and their rate per second.

    The rate is that of the returned frames, not of the file; None if it is unknown. Raises MediaError.
    """
    if files := _frame_files(media):
        taken = [files[n] for n in _spread(len(files), num_taken(len(files), limits, is_list=bool(media.frames)))]
        return [image(Media("video", path), limits) for path in taken], None
    if _is_animation(media):
        return _animation(media, limits)
    return _video(media, limits)


def _spread(number: int, num_wanted: int) -> list[int]:
    if num_wanted == 1:
        return [number // 2]
    return [round(n * (number - 1) / (num_wanted - 1)) for n in range(num_wanted)]


def _frame_files(media: Media) -> list[Path]:
    """Return the image files of a video, a directory's sorted by their numbers; empty for a video file."""
    if media.frames or media.path is None or not _is_dir(media.path):
        return list(media.frames)
    try:
        frames = [path for path in media.path.iterdir() if not path.name.startswith(".")]
    except OSError as error:
        raise MediaError(
            f"{media.named}: {error.strerror or error}", hint="check that the job's submitter can read it"
        ) from error
    images = sorted((item for item in frames if item.suffix.lower() in IMAGE_SUFFIXES), key=_natural)
    if not images:
        raise MediaError(
            f"{media.named}: no frames in this directory", hint=f"frames must end in {' '.join(IMAGE_SUFFIXES)}"
        )
    return images


def _natural(path: Path) -> list[tuple[int, int, str]]:
    """Return a sort key by which frame_2 comes before frame_10."""
    parts = re.split(r"(\d+)", path.name)
    return [(0, int(part), "") if part.isdigit() and part.isascii() else (1, 0, part) for part in parts if part]


def _is_animation(media: Media) -> bool:
    name = str(media.path) if media.path is not None else media.name
    return name.lower().endswith(_ANIMATIONS)


def _animation(media: Media, limits: MediaLimits) -> tuple[list[Image.Image], float | None]:
    with _opened_image(media) as opened:
        number = getattr(opened, "n_frames", 1)
        wanted = _spread(number, num_taken(number, limits))
        taken, durations = [], []
        for n in range(wanted[-1] + 1):
            opened.seek(n)
            opened.load()
            durations.append(float(opened.info.get("duration") or 0) / 1000)
            if n in wanted:
                taken.append(_fitted(_rgb(opened), limits))
        between = sum(durations[wanted[0] : wanted[-1]])
        return taken, (len(taken) - 1) / between if between > 0 else None


def _video(media: Media, limits: MediaLimits) -> tuple[list[Image.Image], float | None]:
    with _container(media) as container:
        stream = _stream(media, container, "video")
        times, keys = _timetable(container, stream)
        if not times:
            raise MediaError(f"{media.named}: a video without a frame")
        if len(times) < stream.frames * 0.9:  # containers count a few more than they show
            raise MediaError(f"{media.named}: a truncated video: it has {len(times)} of its {stream.frames} frames")
        wanted = [times[n] for n in _spread(len(times), num_taken(len(times), limits))]
        taken = [_upright(media, frame, limits) for frame in _decoded(container, stream, wanted, keys)]
        if not taken:
            raise MediaError(f"{media.named}: a broken video: none of its {len(times)} frames can be decoded")
        between = float((wanted[-1] - wanted[0]) * (stream.time_base or 0))
        return taken, (len(wanted) - 1) / between if between > 0 else None


def _timetable(container: Any, stream: Any) -> tuple[list[int], list[int]]:
    """Return when every frame is shown, and the times at which decoding can start, both sorted; nothing is decoded."""
    times, keys = [], []
    for packet in container.demux(stream):
        when = packet.pts if packet.pts is not None else packet.dts
        if when is None or not packet.size:
            continue
        times.append(when)
        if packet.is_keyframe:
            keys.append(when)
    return sorted(set(times)), sorted(keys)


def _decoded(container: Any, stream: Any, wanted: Sequence[int], keys: Sequence[int]) -> Iterator[Any]:
    """Yield the frame shown at each wanted time. Seeks only past a key frame, so each frame is decoded at most once."""
    stream.thread_type = "AUTO"
    container.seek(wanted[0], stream=stream)
    decoding = container.decode(stream)
    shown, last = -math.inf, None
    for when in wanted:
        key = max((item for item in keys if item <= when), default=None)
        if key is not None and key > shown > -math.inf:
            container.seek(key, stream=stream)
            decoding = container.decode(stream)
        if last is not None and shown >= when:
            yield last
            continue
        for frame in decoding:
            last, shown = frame, frame.pts if frame.pts is not None else shown
            if shown >= when:
                break
        if last is not None:
            yield last


def _upright(media: Media, frame: Any, limits: MediaLimits) -> Image.Image:
    _check_size(media, frame.width, frame.height)
    picture = frame.to_image()
    turn = round(float(getattr(frame, "rotation", 0) or 0)) % 360  # phones record sideways, with a rotation tag
    return _fitted(picture.rotate(turn, expand=True) if turn else picture, limits)


# --- Sound ------------------------------------------------------------------------------------------------------------


def audio(media: Media, sampling_rate: int) -> numpy.typing.NDArray[numpy.float32]:
    """Return the sound of a file, or of a video, as mono float32 samples in [-1, 1]. Raises MediaError, also for no
    sample."""
    import numpy as np  # noqa: PLC0415

    av_module = _av()
    with _container(media) as container:
        stream = _stream(media, container, "audio")
        # The channels' mean is taken here: FFmpeg's own downmix makes floats 50 % louder.
        resampler = av_module.AudioResampler(format="fltp", rate=sampling_rate)
        chunks, number = [], 0
        for frame in _and_the_rest(container.decode(stream), resampler):
            chunks.append(frame.to_ndarray().mean(axis=0))
            number += len(chunks[-1])
            if number > MAX_AUDIO_SEC * sampling_rate:
                raise MediaError(f"{media.named}: more than {MAX_AUDIO_SEC / 60:g} minutes of sound", hint="shorten it")
        if not number:
            raise MediaError(f"{media.named}: sound of zero length")
        samples: numpy.typing.NDArray[numpy.float32] = np.concatenate(chunks).astype(np.float32, copy=False)
        return samples


def _and_the_rest(decoded: Iterable[Any], resampler: Any) -> Iterator[Any]:
    for frame in decoded:
        frame.pts = None  # gaps in a file's timestamps are not filled
        yield from resampler.resample(frame)
    yield from resampler.resample(None)


# --- Libraries --------------------------------------------------------------------------------------------------------


@contextmanager
def _container(media: Media) -> Iterator[av.container.InputContainer]:
    """Open a video or sound file. Errors in the block become a MediaError of the file."""
    av_module = _av()
    what = "sound file" if media.kind == "audio" else "video"
    source = _source(media)
    try:
        with av_module.open(source, mode="r", options=dict(_SELF_CONTAINED), metadata_errors="replace") as container:
            yield container
    except MediaError:
        raise
    except (av_module.error.InvalidDataError, av_module.error.EOFError, av_module.error.ArgumentError) as error:
        raise MediaError(_unreadable(media, what)) from error
    except (av_module.error.FFmpegError, OSError, ValueError, LookupError, ArithmeticError) as error:
        raise MediaError(f"{media.named}: broken: {_said(error)}") from error


def _stream(media: Media, container: Any, kind: Literal["video", "audio"]) -> Any:
    streams = container.streams.video if kind == "video" else container.streams.audio
    if not streams:
        raise MediaError(f"{media.named}: it has no {'picture' if kind == 'video' else 'sound'}")
    if streams[0].codec_context is None:
        raise MediaError(f"{media.named}: an unsupported codec")
    return streams[0]


def _duration(container: Any, stream: Any) -> float | None:
    if stream.duration is not None and stream.time_base is not None:
        return float(stream.duration * stream.time_base)
    return container.duration / 1_000_000 if container.duration is not None else None


def _pillow() -> Any:
    try:
        from PIL import Image as pillow  # noqa: N813, PLC0415  (only where there are images)
    except ImportError as error:
        raise EnvironmentInvalidError(
            "images need Pillow, which is not installed", hint="pip install pillow"
        ) from error
    pillow.init()
    return pillow


def _av() -> Any:
    try:
        import av as av_module  # noqa: PLC0415  (only where there is video or sound)
    except ImportError as error:
        raise EnvironmentInvalidError(
            "video and sound files need PyAV, which is not installed",
            hint="pip install av; a video may also be a directory of frames",
        ) from error
    return av_module
