"""Attachments of a row: images, videos and sounds, and their places in its messages.

    images, image, videos, video, audios, audio       columns: a path, an embedded file, or a list of them
    <image> <video> <audio>                           in the text: places for the columns' media
    {"type": "image"}                                 in a message's content: such a place, too
    {"type": "image", "image": "cat.png"}             a place with its own media

Media in a column without a place are put before the first user turn. No file is opened here, and none is fetched.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from honed.inputs.media import IMAGE_SUFFIXES, PLURAL, Media
from honed.spec.media import KINDS, Kind
from honed.system import quote

COLUMNS: Mapping[str, Kind] = {
    "images": "image",
    "image": "image",
    "videos": "video",
    "video": "video",
    "audios": "audio",
    "audio": "audio",
}
#: Types of parts: ours, and those of OpenAI's and Qwen's messages.
TYPES: Mapping[str, Kind] = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "video": "video",
    "video_url": "video",
    "input_video": "video",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
}
#: The other columns of a row that some format reads.
_TEXT_COLUMNS = frozenset(
    (
        "messages",
        "conversations",
        "conversation",
        "prompt",
        "completion",
        "instruction",
        "input",
        "output",
        "system",
        "history",
        "text",
        "tools",
    )
)
#: File suffixes of every kind.
_SUFFIXES: Mapping[Kind, tuple[str, ...]] = {
    "image": IMAGE_SUFFIXES,
    "video": (".mp4", ".mkv", ".mov", ".avi", ".webm", ".m4v"),
    "audio": (".wav", ".mp3", ".flac", ".ogg", ".opus", ".m4a", ".aac"),
}
#: Keys for a part's file that fit any kind.
_SOURCES = ("path", "url", "file", "data", "bytes", "base64", "source")
#: Keys of a part that qwen-vl-utils reads → the job's own key. Here they are set for the whole job.
_LIMITS = {
    "max_pixels": "max_pixels",
    "min_pixels": "min_pixels",
    "total_pixels": "max_pixels",
    "nframes": "num_frames",
    "fps": "num_frames",
    "max_frames": "num_frames",
    "min_frames": "num_frames",
    "resized_height": "max_image_size",
    "resized_width": "max_image_size",
    "video_start": "",
    "video_end": "",
}

#: First bytes of embedded frames without a name: JPEG, PNG, BMP.
_IMAGE_BEGINNINGS = (b"\xff\xd8\xff", b"\x89PNG", b"BM")
#: Characters of a path; Linux accepts no more.
MAX_PATH = 4096


class RowError(Exception):
    """The reason why a row is unusable."""


def is_given(value: Any) -> bool:
    """Return True if a column has a value; null, an empty string and an empty list are none."""
    return not (value is None or (isinstance(value, str | bytes | list | tuple | dict) and not value))


def part(given: Mapping[str, Any], number: int) -> dict[str, Any] | None:
    """Return an image, video or sound of message `number` as `{type, source?, index?, column?}`; None for any other
    part."""
    kind = TYPES.get(str(given.get("type"))) or next(
        (kind for kind in KINDS if "type" not in given and kind in given), None
    )
    if kind is None:
        return None
    if limit := next((key for key in given if key in _LIMITS and given[key] is not None), None):
        instead = f"`media: {{{_LIMITS[limit]}: …}}` in the job file" if _LIMITS[limit] else "cut the file"
        raise RowError(f"message {number}: `{limit}` cannot be set on a part; instead: {instead}")
    keys = (kind, f"{kind}_url", f"input_{kind}", *_SOURCES)
    made: dict[str, Any] = {"type": kind}
    if key := next((key for key in keys if is_given(given.get(key))), None):
        made["source"] = {key: given[key]} if key in ("data", "bytes", "base64") else given[key]
    for key, form, words in (("index", int, "an integer"), ("column", str, "a column's name")):
        if (value := given.get(key)) is not None:
            if not isinstance(value, form) or isinstance(value, bool):
                raise RowError(f"message {number}: `{key}` must be {words}, but is {quote.mark(repr(str(value)[:40]))}")
            made[key] = value
    return made


def place(
    row: Mapping[str, Any], messages: Sequence[dict[str, Any]], directories: Mapping[Kind, Path] | None
) -> tuple[list[dict[str, Any]], tuple[Media, ...]]:
    """Return the messages with `{type: kind}` in every place, and the media of these places, in order. Raises RowError.

    Relative paths start from the directory of their kind.
    """
    named = {item["column"] for item in _parts(messages) if "column" in item}
    listed = _columns({key: value for key, value in row.items() if key not in named}, directories)
    _refuse_empty_places(row, listed, messages)
    if not listed and not any(_parts(messages)):
        return list(messages), ()
    marks = {mark: kind for kind in listed if (mark := _mark(kind, listed, messages))}
    marked = [_marked(message, marks) for message in messages]
    fronted = [kind for kind in listed if kind not in marks.values() and not any(_parts(marked, kind))]
    placed = _fronted(marked, [kind for kind in fronted for _ in listed[kind]])
    _check_numbers(listed, placed)
    supplies = {kind: iter(media) for kind, media in listed.items()}
    media = tuple(
        _of_part(item, row, listed.get(item["type"], []), supplies.get(item["type"], iter(())), directories)
        for item in _parts(placed)
    )
    return [_bare(message) for message in placed], media


def overlooked(
    row: Mapping[str, Any],
    columns: Mapping[str, str],
    messages: Sequence[Mapping[str, Any]],
    media: Sequence[Media],
) -> Iterator[str]:
    """Yield warnings, for the row's owner, about apparent images, videos or sounds that are not read as such.

    `columns` has the data set's own names; `messages` and `media` are the results of reading the row.
    """
    names = {path.name for one in media for path in one.paths}
    data = {one.data for one in media}
    for key, value in row.items():
        if key in COLUMNS or key in _TEXT_COLUMNS or key in columns.values():
            continue
        for item in value if isinstance(value, list | tuple) else [value]:
            kind, column = _kind_by_name(item)
            if kind is not None and column not in names and not (isinstance(item, dict) and item.get("bytes") in data):
                called = quote.name(key)
                text = f"the column `{called}` seems to contain {PLURAL[kind]}, but is not read"
                yield f"{text}: `columns: {{{kind}: {called}}}`"
                break
    for kind in KINDS:
        if not media and _count(messages, f"<{kind}>"):
            yield (
                f"`<{kind}>` in the text of rows without a column `{kind}` or `{PLURAL[kind]}` is treated as plain text"
            )


def _kind_by_name(value: Any) -> tuple[Kind | None, str]:
    name = value.get("path") if isinstance(value, dict) else value
    if not isinstance(name, str) or len(name) > MAX_PATH or "\n" in name:
        return None, ""
    kind = next((kind for kind in KINDS if name.lower().endswith(_SUFFIXES[kind])), None)
    return kind, name.replace("\\", "/").rpartition("/")[2]


def _columns(row: Mapping[str, Any], directories: Mapping[Kind, Path] | None) -> dict[Kind, list[Media]]:
    listed: dict[Kind, tuple[str, list[Media]]] = {}
    for key, kind in COLUMNS.items():
        value = row.get(key)
        if not is_given(value):
            continue
        if kind in listed:
            raise RowError(f"`{listed[kind][0]}` and `{key}` are both filled in; use only one of them")
        items = value if isinstance(value, list | tuple) and not _is_frames(kind, value) else [value]
        listed[kind] = key, [_media(kind, item, directories, f"`{key}`") for item in items]
    return {kind: media for kind, (_, media) in listed.items()}


def _refuse_empty_places(
    row: Mapping[str, Any], listed: Mapping[Kind, Any], messages: Sequence[Mapping[str, Any]]
) -> None:
    """Raise RowError for `<image>` in the text of a row whose column exists and is empty."""
    for key, kind in COLUMNS.items():
        if key in row and not listed and (number := _count(messages, f"<{kind}>")):
            raise RowError(f"the text has {number} `<{kind}>` placeholders, but `{key}` is empty")


def _mark(kind: Kind, listed: Mapping[Kind, Any], messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the marker of a column's media in the text; empty if there is none."""
    if any(_parts(messages, kind)):
        return ""
    if _count(messages, f"<{kind}>"):
        return f"<{kind}>"
    # LLaVA-Video's rows use `<image>` as the place of a video.
    is_llava = kind == "video" and "image" not in listed and not any(_parts(messages, "image"))
    return "<image>" if is_llava and _count(messages, "<image>") else ""


def _count(messages: Sequence[Mapping[str, Any]], mark: str) -> int:
    return sum(text.count(mark) for message in messages if _is_read(message) for text in _texts(message))


def _is_read(message: Mapping[str, Any]) -> bool:
    """Return True if places are searched in a message: `<image>` in an answer is only a word."""
    return bool(message["role"] != "assistant")


def _texts(message: Mapping[str, Any]) -> list[str]:
    content = message["content"]
    return [content] if isinstance(content, str) else [item["text"] for item in content if item["type"] == "text"]


def _parts(messages: Sequence[Mapping[str, Any]], kind: Kind | None = None) -> Iterator[dict[str, Any]]:
    for message in messages:
        for item in message["content"] if isinstance(message["content"], list) else []:
            if item["type"] != "text" and kind in (None, item["type"]):
                yield item


def _marked(message: dict[str, Any], marks: Mapping[str, Kind]) -> dict[str, Any]:
    content = message["content"]
    if not marks or not _is_read(message) or not any(mark in text for mark in marks for text in _texts(message)):
        return message
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return message | {"content": [piece for item in parts for piece in _pieces(item, marks)]}


def _pieces(part: dict[str, Any], marks: Mapping[str, Kind]) -> Iterator[dict[str, Any]]:
    if part["type"] != "text":
        yield part
        return
    for text in re.split(f"({'|'.join(map(re.escape, marks))})", part["text"]):
        if text in marks:
            yield {"type": marks[text]}
        elif text:
            yield {"type": "text", "text": text}


def _fronted(messages: list[dict[str, Any]], kinds: Sequence[Kind]) -> list[dict[str, Any]]:
    if not kinds:
        return messages
    first = next((n for n, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        raise RowError(f"`{kinds[0]}` next to the text, but no user turn to put it in")
    content = messages[first]["content"]
    rest = content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []
    fronted = messages[first] | {"content": [*({"type": kind} for kind in kinds), *rest]}
    return [*messages[:first], fronted, *messages[first + 1 :]]


def _check_numbers(listed: Mapping[Kind, Sequence[Media]], messages: Sequence[Mapping[str, Any]]) -> None:
    for kind in KINDS:
        waiting = [item for item in _parts(messages, kind) if "source" not in item and "column" not in item]
        num_given, has_own = len(listed.get(kind, [])), any("source" in item for item in _parts(messages, kind))
        if num_given and has_own and not waiting:
            raise RowError(f"a column of {PLURAL[kind]} next to parts that have their own path; use only one of them")
        if waiting and not num_given:
            raise RowError(f"a part of type {kind} has no source: neither a path in it nor a column `{kind}`")
        numbers = {item["index"] for item in waiting if "index" in item}
        if numbers and not all("index" in item for item in waiting):
            raise RowError(f"some parts of type {kind} have an `index` and others do not; set it on all or none")
        if numbers:
            if numbers != set(range(num_given)):
                raise RowError(f"{num_given} {PLURAL[kind]}, but parts with the indices {sorted(numbers)}")
        elif len(waiting) != num_given:
            raise RowError(f"{num_given} {PLURAL[kind]}, but {len(waiting)} placeholders for them in the messages")


def _of_part(
    part: Mapping[str, Any],
    row: Mapping[str, Any],
    listed: Sequence[Media],
    supply: Iterator[Media],
    directories: Mapping[Kind, Path] | None,
) -> Media:
    kind: Kind = part["type"]
    if "source" in part:
        return _media(kind, part["source"], directories, f"a part of type {kind}")
    if (column := part.get("column")) is not None:
        if not is_given(row.get(column)):
            raise RowError(f"a part of type {kind} refers to the column `{quote.name(column)}`, which is empty")
        return _media(kind, row[column], directories, f"`{column}`")
    return next(supply) if (index := part.get("index")) is None else listed[int(index)]


def _bare(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as templates expect it: a place has only its type."""
    if isinstance(message["content"], str):
        return message
    parts = [item if item["type"] == "text" else {"type": item["type"]} for item in message["content"]]
    return message | {"content": parts}


# --- What one place holds ---------------------------------------------------------------------------------------------


def _is_frames(kind: Kind, value: Sequence[Any]) -> bool:
    return kind == "video" and all(map(_is_frame, value))


def _is_frame(item: Any) -> bool:
    name, data = (item.get("path"), item.get("bytes")) if isinstance(item, dict) else (item, item)
    if isinstance(data, bytes):
        return data.startswith(_IMAGE_BEGINNINGS)
    # A GIF in a list is a video of its own: GIFs are not used for single frames.
    return isinstance(name, str) and name.lower().endswith(IMAGE_SUFFIXES) and not name.lower().endswith(".gif")


def _media(kind: Kind, value: Any, directories: Mapping[Kind, Path] | None, what: str) -> Media:
    match value:
        case str():
            return _from_text(kind, value, directories, what)
        case bytes():
            return Media(kind, data=value)
        case list() | tuple() if kind == "video":
            return Media("video", frames=tuple(_frame(item, directories, what) for item in value))
        case dict():
            return _from_mapping(kind, value, directories, what)
        case _:
            raise RowError(f"{what}: must be a path or an embedded file, but is of type {type(value).__name__}")


def _frame(value: Any, directories: Mapping[Kind, Path] | None, what: str) -> Path:
    frame = _media("video", value, directories, what)
    if frame.path is None:
        raise RowError(f"{what}: frames embedded in the row are not supported; use paths of frames, or a video")
    return frame.path


def _from_mapping(kind: Kind, value: Mapping[str, Any], directories: Mapping[Kind, Path] | None, what: str) -> Media:
    """Return the media of a mapping: embedded as by the datasets library (`{bytes, path}`), OpenAI or Anthropic."""
    name = value.get("path") or value.get("url") or value.get("file")
    form = value.get("format") or str(value.get("media_type") or "").rpartition("/")[2]
    called = name if isinstance(name, str) else f"{kind}.{form}" if form else ""
    if isinstance(data := value.get("bytes"), bytes):
        return Media(kind, data=data, name=called)
    if isinstance(text := value.get("data") or value.get("base64") or data, str):
        if text.startswith("data:"):
            return _from_text(kind, text, directories, what)
        return Media(kind, data=_decoded(text, what), name=called)
    if isinstance(name, str):
        return _from_text(kind, name, directories, what)
    if "array" in value:
        raise RowError(f"{what}: decoded samples are not supported; use paths or embedded files")
    raise RowError(f"{what}: it has neither `path` nor `bytes` (it has: {quote.names(map(str, value)) or 'nothing'})")


_DATA = re.compile(r"data:(?:[\w.+-]+/([\w.+-]+))?(?:;[\w=.+-]+)*;base64,", re.ASCII)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def _from_text(kind: Kind, text: str, directories: Mapping[Kind, Path] | None, what: str) -> Media:
    if text.startswith("data:"):
        if (match := _DATA.match(text)) is None:
            raise RowError(f"{what}: a data: URL that is not base64")
        form = re.sub(r"^x-|\W.*", "", match[1] or "")
        return Media(kind, data=_decoded(text[match.end() :], what), name=f"{kind}.{form}" if form else "")
    if text.startswith("file://"):
        text = unquote(urlsplit(text).path)
    elif _SCHEME.match(text):
        shown = text if len(text) < 100 else f"{text[:99]}…"
        raise RowError(f"{what}: {quote.mark(shown)} is not fetched: rows must refer to local files")
    if len(text) > MAX_PATH:
        raise RowError(
            f"{what}: {len(text)} characters are too long for a path; an embedded file is {{base64: …}}, or begins "
            "with data:"
        )
    if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise RowError(f"{what}: a path with an invalid character: {quote.mark(ascii(text)[:100])}")
    path = Path(text)
    if not path.is_absolute():
        if directories is None:
            raise RowError(
                f"{what}: {quote.place(text)}: a relative path, but there is no directory to resolve it against"
            )
        path = directories[kind] / path
    return Media(kind, path)


def _decoded(text: str, what: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RowError(f"{what}: not base64: {error}") from error
