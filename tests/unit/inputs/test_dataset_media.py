"""Rows with images, videos and sounds in all the forms that people have, from real files."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from honed.inputs import dataset, media
from honed.inputs.dataset import Example
from honed.inputs.media import Media
from honed.spec.media import MediaLimits
from honed.spec.spec import DatasetSpec
from honed.system import quote
from honed.system.error import DatasetError

ANSWER = {"role": "assistant", "content": "A cat."}
GPT = {"from": "gpt", "value": "A cat."}


def png(color: str = "red", size: tuple[int, int] = (16, 12)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, color).save(buffer, "PNG")
    return buffer.getvalue()


def load_rows(path: Path, rows: list[Any], *, has_chat_template: bool = True, **more: Any) -> dataset.Mixture:
    file = path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = DatasetSpec(path=str(file), **more)
    return dataset.load([asked], seed=0, has_chat_template=has_chat_template)


def load_one(path: Path, row: Any, **more: Any) -> Example:
    return load_rows(path, [row], **more).examples[0]


def asked(example: Example) -> list[Any]:
    """Return the first turn of the user: its texts, and the kinds of the media between them."""
    content = next(message["content"] for message in example.messages if message["role"] == "user")
    return [part["text"] if part["type"] == "text" else part["type"].upper() for part in content]


def places(example: Example) -> list[str]:
    return [each.place for each in example.media]


def in_user(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}, ANSWER]}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "a.png"},
        {"type": "image", "path": "a.png"},
        {"type": "image", "url": "a.png"},
        {"type": "image", "image": "file://{dir}/a.png"},
        {"type": "image", "image": {"path": "a.png"}},
        {"type": "image_url", "image_url": {"url": "a.png"}},
        {"type": "image_url", "image_url": {"url": "a.png", "detail": "low"}},
        {"type": "image", "column": "photo"},
        {"image": "a.png"},
    ],
)
def test_a_part_names_its_image(tmp_path: Path, part: Any) -> None:
    part = json.loads(json.dumps(part).replace("{dir}", str(tmp_path)))
    example = load_one(tmp_path, in_user(part, {"type": "text", "text": "What is it?"}) | {"photo": "a.png"})
    assert example.kind == "messages"
    assert example.messages[0]["content"] == [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    assert example.messages[1] == ANSWER
    assert example.media == (Media("image", tmp_path / "a.png"),)


def test_every_kind_of_part_stands_in_its_place_through_all_turns(tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": [{"type": "video", "video": "a.mp4"}, {"type": "text", "text": "?"}]},
        ANSWER,
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "And "},
                {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
                {"type": "image", "image": "/srv/b.png"},
                {"type": "video", "video": ["f1.jpg", "f2.jpg"]},
            ],
        },
        ANSWER,
    ]
    example = load_one(tmp_path, {"messages": turns})
    assert example.media == (
        Media("video", tmp_path / "a.mp4"),
        Media("audio", data=b"RIFF", name="audio.wav"),
        Media("image", Path("/srv/b.png")),
        Media("video", frames=(tmp_path / "f1.jpg", tmp_path / "f2.jpg")),
    )
    assert [part["type"] for part in example.messages[2]["content"]] == ["text", "audio", "image", "video"]
    assert dataset.words(example.messages[2]) == "And "
    assert dataset.words(ANSWER) == "A cat."


def test_parts_take_from_columns_in_order_or_by_number(tmp_path: Path) -> None:
    row = in_user({"type": "image"}, {"type": "text", "text": "or"}, {"type": "image"}) | {"images": ["a.png", "b.png"]}
    assert places(load_one(tmp_path, row)) == [f"{tmp_path}/a.png", f"{tmp_path}/b.png"]
    row = in_user({"type": "image", "index": 1, "text": None}, {"type": "image", "index": 0}) | {
        "images": ["a.png", "b.png"]
    }
    assert places(load_one(tmp_path, row)) == [f"{tmp_path}/b.png", f"{tmp_path}/a.png"]


def test_llava_and_sharegpt_rows_have_places_in_their_text(tmp_path: Path) -> None:
    llava = {"id": 1, "image": "coco/1.jpg", "conversations": [{"from": "human", "value": "<image>\nWhat is it?"}, GPT]}
    example = load_one(tmp_path, llava)
    assert asked(example) == ["IMAGE", "\nWhat is it?"]
    assert places(example) == [f"{tmp_path}/coco/1.jpg"]
    several = {
        "images": ["a.png", "b.png"],
        "audios": ["c.wav"],
        "conversations": [{"from": "human", "value": "Is <image> <image> as loud as<audio>?"}, GPT],
    }
    example = load_one(tmp_path, several)
    assert asked(example) == ["Is ", "IMAGE", " ", "IMAGE", " as loud as", "AUDIO", "?"]
    assert [each.kind for each in example.media] == ["image", "image", "audio"]
    videos = {"videos": [["f1.jpg", "f2.jpg"]], "conversations": [{"from": "human", "value": "<video>Who?"}, GPT]}
    assert load_one(tmp_path, videos).media[0].frames == (tmp_path / "f1.jpg", tmp_path / "f2.jpg")
    llava_video = {"video": "a.mp4", "conversations": [{"from": "human", "value": "<image>\nWho?"}, GPT]}
    example = load_one(tmp_path, llava_video)
    assert asked(example) == ["VIDEO", "\nWho?"]
    assert example.media == (Media("video", tmp_path / "a.mp4"),)


def test_a_prompt_with_images_becomes_a_conversation(tmp_path: Path) -> None:
    example = load_one(tmp_path, {"prompt": "What is it?", "completion": "A cat.", "images": ["a.png", "b.png"]})
    assert (example.kind, example.num_prompt_messages) == ("messages", 1)
    assert asked(example) == ["IMAGE", "IMAGE", "What is it?"], "what has no place stands before the text"
    assert example.messages[1] == ANSWER
    turns = [{"role": "system", "content": "Look."}, {"role": "user", "content": "What is it?"}]
    example = load_one(tmp_path, {"prompt": turns, "completion": [ANSWER], "image": "a.png"})
    assert asked(example) == ["IMAGE", "What is it?"]
    assert example.num_prompt_messages == 2
    row = {"instruction": "What is <image>?", "input": "", "output": "A cat.", "images": ["a.png"]}
    assert asked(load_one(tmp_path, row)) == ["What is ", "IMAGE", "?"]
    columns = {"prompt": "question", "completion": "answer", "image": "photo"}
    row = {"question": "What is it?", "answer": "A cat.", "photo": "a.png"}
    assert places(load_one(tmp_path, row, columns=columns)) == [f"{tmp_path}/a.png"]


def test_rows_of_text_alone_stay_what_they_are(tmp_path: Path) -> None:
    row = {
        "messages": [{"role": "user", "content": "Write an <image> tag."}, {"role": "assistant", "content": "<image>"}]
    }
    example = load_one(tmp_path, row)
    assert example.messages == row["messages"]
    assert example.media == ()
    assert load_one(tmp_path, {"prompt": "a", "completion": "b", "images": []}).kind == "prompt_completion"
    answer = {"messages": [{"role": "user", "content": "Which tag?"}, {"role": "assistant", "content": "<image>"}]}
    example = load_one(tmp_path, answer | {"image": "a.png"})
    assert example.messages[1]["content"] == "<image>", "an answer's is a word"


def test_paths_start_from_the_directory_of_their_kind(tmp_path: Path) -> None:
    row = {
        "image": "a.png",
        "audio": "b.wav",
        "video": "clip/7",
        "messages": [{"role": "user", "content": "<image><audio><video>"}, ANSWER],
    }
    assert places(load_one(tmp_path, row)) == [f"{tmp_path}/{name}" for name in ("a.png", "b.wav", "clip/7")]
    assert places(load_one(tmp_path, row, media_dir="/m")) == ["/m/a.png", "/m/b.wav", "/m/clip/7"]
    each = {"video": "/frames", "audio": "/sounds"}
    assert places(load_one(tmp_path, row, media_dir=each)) == [f"{tmp_path}/a.png", "/sounds/b.wav", "/frames/clip/7"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (in_user({"type": "image"}), "has no source"),
        (in_user({"type": "image", "image": "https://a.b/c.png"}), "https://a.b/c.png is not fetched"),
        (in_user({"type": "image", "image": "s3://bucket/c.png"}), "is not fetched"),
        (in_user({"type": "image", "image": "data:image/png;base64,@@"}), "not base64"),
        (in_user({"type": "image", "image": 7}), "is of type int"),
        (in_user({"type": "image", "image": {"width": 7}}), "neither `path` nor `bytes`"),
        (in_user({"type": "image", "column": "photo"}), "the column `photo`, which is empty"),
        (in_user({"type": "image", "image": "a.png", "max_pixels": 100}), "`media: {max_pixels: …}`"),
        (in_user({"type": "audio", "audio": {"array": [0.0], "sampling_rate": 1}}), "decoded samples"),
        (in_user({"type": "image"}) | {"images": ["a.png", "b.png"]}, "2 images, but 1 placeholders"),
        (in_user({"type": "image", "index": 2}) | {"images": ["a.png"]}, "the indices [2]"),
        (in_user({"type": "image", "image": "a.png"}) | {"images": ["a.png"]}, "use only one of them"),
        (in_user("<image>?") | {"image": None}, "`image` is empty"),
        (in_user("<image>?") | {"images": ["a", "b"]}, "2 images, but 1 placeholders"),
        (in_user("?") | {"images": ["a"], "image": "b"}, "are both filled in"),
        ({"messages": [ANSWER], "images": ["a"]}, "no user turn"),
        (in_user("?") | {"video": [{"bytes": None, "path": 3}]}, "neither"),
        (in_user({"type": "image", "index": [0]}) | {"images": ["a"]}, "`index` must be an integer"),
        (in_user({"type": "image", "index": 5}, {"type": "image"}) | {"images": ["a", "b"]}, "set it on all or none"),
        (in_user({"type": "image", "column": ["a"]}) | {"images": ["a"]}, "`column` must be a column's name"),
        (
            in_user("?") | {"image": "A" * 6000},
            "6000 characters are too long for a path; an embedded file is {base64: …}",
        ),
        (in_user("?") | {"image": "\ud800.png"}, "a path with an invalid character: '\\ud800.png'"),
    ],
)
def test_a_row_whose_media_make_no_sense_is_counted_and_named(tmp_path: Path, row: Any, words: str) -> None:
    good = {"messages": [{"role": "user", "content": "?"}, ANSWER]}
    mixture = load_rows(tmp_path, [good, row, good])
    assert mixture.counts[0].num_bad == 1
    assert words in quote.show(mixture.counts[0].bad[0])


def test_a_part_may_name_a_column_that_is_called_as_its_kind(tmp_path: Path) -> None:
    assert places(load_one(tmp_path, in_user({"type": "image", "column": "image"}) | {"image": "a.png"})) == [
        f"{tmp_path}/a.png"
    ]


def test_a_list_of_animations_is_so_many_videos(tmp_path: Path) -> None:
    example = load_one(tmp_path, in_user("<video><video>?") | {"videos": ["a.gif", "b.gif"]})
    assert [each.path for each in example.media] == [tmp_path / "a.gif", tmp_path / "b.gif"]


def test_embedded_frames_are_no_videos_of_one_frame_each(tmp_path: Path) -> None:
    rows = [{"prompt": "?", "completion": "A cat.", "video": [{"bytes": png(), "path": None}] * 2}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    with pytest.raises(DatasetError, match="frames embedded in the row"):
        dataset.load([DatasetSpec(path=str(tmp_path / "rows.parquet"))], seed=0, has_chat_template=True)


def test_what_seems_to_be_media_and_is_not_read_is_told(tmp_path: Path) -> None:
    def overlooked(row: dict[str, Any], **more: Any) -> tuple[str, ...]:
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
        return dataset.inspect(DatasetSpec(path=str(tmp_path / "rows.jsonl"), **more)).overlooked

    (tmp_path / "a.png").write_bytes(png())
    row = {"prompt": "<image>What is in a.png", "completion": "A cat."}
    column, words = overlooked(row | {"image_path": "a.png", "id": "7"})
    assert column == "the column `image_path` seems to contain images, but is not read: `columns: {image: image_path}`"
    assert words == "`<image>` in the text of rows without a column `image` or `images` is treated as plain text"
    assert not overlooked(row | {"image_path": "a.png"}, columns={"image": "image_path"})
    assert not overlooked(row | {"image": "a.png", "file_name": "pictures/a.png"})  # the same, named twice
    (sound,) = overlooked(row | {"image": "a.png", "voice": ["a.wav"]})
    assert "`columns: {audio: voice}`" in sound


def test_media_beside_plain_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="no turn to put it in"):
        load_one(tmp_path, {"text": "a", "image": "a.png"})
    with pytest.raises(DatasetError, match="needs a chat template"):
        load_one(tmp_path, {"prompt": "a", "completion": "b", "image": "a.png"}, has_chat_template=False)


def test_embedded_files_are_read_from_parquet_and_spilled(tmp_path: Path) -> None:
    red, blue = png("red"), png("blue")
    table = pyarrow.Table.from_pylist(
        [
            {"prompt": "Which?", "completion": "red", "images": [{"bytes": red, "path": "red.png"}]},
            {"prompt": "Which?", "completion": "blue", "images": [{"bytes": blue, "path": None}]},
            {"prompt": "Which?", "completion": "green", "images": [{"bytes": None, "path": "green.png"}]},
            {"prompt": "None?", "completion": "none", "images": []},
        ]
    )
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    spec = DatasetSpec(path=str(tmp_path / "rows.parquet"))
    examples = dataset.load([spec], seed=0, has_chat_template=True, spill_dir=tmp_path / "media").examples
    assert [len(example.media) for example in examples] == [1, 1, 1, 0]
    assert all(each.data is None for example in examples for each in example.media)
    assert media.image(examples[0].media[0], MediaLimits()).getpixel((1, 1)) == (255, 0, 0)
    assert media.image(examples[1].media[0], MediaLimits()).getpixel((1, 1)) == (0, 0, 255)
    assert examples[2].media[0].path == tmp_path / "green.png"
    assert len(list((tmp_path / "media").iterdir())) == 2
    kept = dataset.load([spec], seed=0, has_chat_template=True).examples
    assert kept[0].media[0].data == red
    assert kept[0].media[0].place == "embedded image red.png"


def test_a_data_address_is_an_embedded_file(tmp_path: Path) -> None:
    address = "data:image/png;base64," + base64.b64encode(png("blue")).decode()
    (one,) = load_one(tmp_path, in_user({"type": "image_url", "image_url": {"url": address}})).media
    assert media.image(one, MediaLimits()).getpixel((1, 1)) == (0, 0, 255)


def test_a_look_opens_the_first_files_and_counts_what_is_broken(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(size=(64, 48)))
    (tmp_path / "text.png").write_text("no picture")
    row = {"prompt": "What is it?", "completion": "A cat."}
    rows = [row | {"image": name} for name in ("a.png", "gone.png", "a.png", "text.png")] + [row]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    found = dataset.inspect(DatasetSpec(path=str(tmp_path / "rows.jsonl")))
    assert (found.num_rows, found.num_attached, found.num_broken, len(found.rows)) == (5, 4, 2, 1)
    assert [(seen.media[0].width, seen.media[0].height) for seen in found.attached] == [(64, 48), (64, 48)]
    assert found.attached[0].texts == ("What is it?", "A cat.")
    assert found.broken == (
        f"rows.jsonl, line 2: {tmp_path}/gone.png: no such file",
        f"rows.jsonl, line 4: {tmp_path}/text.png: not a readable image: it is text",
    )
    assert found.columns == ("prompt", "completion", "image")
