"""Masks with images, videos and sounds: whatever a family's processor writes, the assistant's words are trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoProcessor, AutoTokenizer

from honed.inputs.media import Media
from honed.inputs.row import Example
from honed.spec.media import Kind, MediaLimits
from honed.system.error import DatasetError, MaskError, ModelError
from honed.text.chat import IGNORED, ChatFormat, Encoded, MediaCutError
from honed.text.expansion import Place, carry
from honed.text.maskcheck import placeholder_ids
from honed.worker.model.config import model_class
from honed.worker.rows.collator import merge
from honed.worker.rows.processor import Processor
from zoo.vision import LLAVA_1_5, build_vision_checkpoint

#: (width, height), some of which come out as more tokens than others, or in more pieces.
SIZES = ((60, 40), (30, 90), (112, 112), (29, 31), (200, 50))
IMAGE_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "idefics3", "llava", "llava_1_5")
TEMPLATES = {"llava_1_5": LLAVA_1_5}


class Family:
    """One family's processor and chat format, with the tokens that belong to no text."""

    def __init__(self, name: str, directory: Path) -> None:
        self.directory = directory
        build_vision_checkpoint(directory, "llava" if name == "llava_1_5" else name, chat_template=TEMPLATES.get(name))
        self.processor = Processor(
            AutoProcessor.from_pretrained(directory), AutoTokenizer.from_pretrained(directory), MediaLimits()
        )
        self.chat = ChatFormat(AutoTokenizer.from_pretrained(directory), expand=self.processor.expand)
        self.placeholder_ids = placeholder_ids(self.processor.processor, self.chat.tokenizer)

    def trained_texts(self, encoded: Encoded) -> list[str]:
        """Return the trained texts, run by run, by decoding the tokens."""
        texts, run = [], list[int]()
        for token, is_trained in [*zip(encoded.input_ids, encoded.trained, strict=True), (0, False)]:
            if is_trained:
                run.append(token)
            elif run:
                texts.append(self.chat.tokens.decode(run))
                run = []
        return texts

    def check(self, encoded: Encoded, example: Example, *, is_truncated: bool = False) -> None:
        self.chat.check_trained(
            encoded.input_ids, encoded.labels, example, is_truncated=is_truncated, placeholder_ids=self.placeholder_ids
        )


@pytest.fixture(scope="module")
def family_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    built: dict[str, Family] = {}

    def build(name: str) -> Family:
        if name not in built:
            built[name] = Family(name, tmp_path_factory.mktemp(name))
        return built[name]

    return build


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("pictures")
    for n, size in enumerate(SIZES):
        Image.new("RGB", size, (40 * n, 90, 160)).save(directory / f"{n}.png")
    return [directory / f"{n}.png" for n in range(len(SIZES))]


def image(path: Path) -> Media:
    return Media("image", path)


def row(*turns: tuple[str, Sequence[str | Media]]) -> Example:
    """Return a conversation; a turn is a role, and texts and media in their order."""
    messages: list[dict[str, Any]] = []
    for role, parts in turns:
        if role != "user":
            messages.append({"role": role, "content": parts[0]})
            continue
        content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": p.kind} for p in parts]
        messages.append({"role": role, "content": content})
    media = tuple(part for _, parts in turns for part in parts if isinstance(part, Media))
    return Example("messages", messages=messages, media=media)


WORDS = st.lists(
    st.sampled_from(
        [
            "yes",
            "no",
            "red",
            "A cat.",
            "two\nthree",
            "  ",
            "Wie heißt 🙂?",
            "<b>",
            "user",
            "assistant\n",
            "ASSISTANT:",
            "日本",
            "{x}",
            "1, 2",
            "\n\n",
            "a b",
        ]
    ),
    min_size=1,
    max_size=4,
).map(" ".join)
SAID = WORDS.filter(lambda text: text.strip())


@st.composite
def conversations(draw: Any) -> list[tuple[str, list[Any]]]:
    """Draw 1–4 assistant turns between user turns with 0–3 images, and perhaps a system message."""
    is_usual = draw(st.booleans())
    num_turns = draw(st.integers(1, 4))
    roles = ["user", "assistant"] * num_turns
    if not is_usual:
        roles = ["user", *draw(st.permutations(["assistant"] * num_turns + ["user"] * draw(st.integers(0, 3))))]
    turns: list[tuple[str, list[Any]]] = [("system", [draw(SAID)])] if draw(st.booleans()) else []
    turns += [(role, draw(st.lists(SAID, min_size=1, max_size=2 if role == "user" else 1))) for role in roles]
    asked = [parts for role, parts in turns if role == "user"]
    for _ in range(draw(st.integers(0, 3))):
        parts = asked[draw(st.integers(0, len(asked) - 1))]
        parts.insert(draw(st.integers(0, len(parts))), draw(st.integers(0, len(SIZES) - 1)))
    return turns


@pytest.mark.parametrize("name", IMAGE_FAMILIES)
@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much, HealthCheck.too_slow],
)
@given(turns=conversations(), cut=st.floats(0, 1))
def test_what_is_trained_decodes_to_what_the_assistant_says(
    family_of: Any, pictures: list[Path], name: str, turns: list[tuple[str, list[Any]]], cut: float
) -> None:
    family: Family = family_of(name)
    example = row(*[(role, [image(pictures[p]) if isinstance(p, int) else p for p in parts]) for role, parts in turns])
    try:
        encoded = family.chat.encode(example)
    except DatasetError as error:
        assume(
            "the chat template rejects the conversation" not in error.message
        )  # Gemma's, where turns do not alternate
        raise
    said = [message["content"] for message in example.messages if message["role"] == "assistant"]
    trained = family.trained_texts(encoded)
    assert len(trained) == len(said)
    for text, words in zip(trained, said, strict=True):
        ends = [end for end in family.chat.renderer.probe.ends if text.rstrip().endswith(end.rstrip())]
        assert ends or not family.chat.renderer.probe.ends
        assert text.replace(ends[0] if ends else "", "").strip() == words.strip()
    assert (
        not {t for t, is_it in zip(encoded.input_ids, encoded.trained, strict=True) if is_it} & family.placeholder_ids
    )
    family.check(encoded, example)
    if not example.media:
        assert encoded.media_end == 0
        return
    assert not any(t in family.placeholder_ids for t in encoded.input_ids[encoded.media_end :])
    assert [s["text"] for s in encoded.segments()] != []
    assert sum(s["text"].count("[image ") for s in encoded.segments()) == len(example.media)
    length = max(1, round(cut * len(encoded.input_ids)))
    if length < encoded.media_end:
        with pytest.raises(MediaCutError):
            encoded.truncate(length)
    elif any((short := encoded.truncate(length)).trained):
        family.check(short, example, is_truncated=length < len(encoded.input_ids))


@pytest.mark.parametrize("name", IMAGE_FAMILIES)
def test_a_mask_from_a_count_without_the_images_is_found(family_of: Any, pictures: list[Path], name: str) -> None:
    family: Family = family_of(name)
    asked = [image(pictures[2]), image(pictures[4]), "Which color has the thing in the middle?"]
    example = row(("user", asked), ("assistant", ["Blue."]))
    encoded = family.chat.encode(example)
    without = family.chat.prompt(row(("user", asked[2:]), ("assistant", ["Blue."])))[1]
    labels = [IGNORED] * len(without) + encoded.input_ids[len(without) :]
    tokens = {token for token in labels if token in family.placeholder_ids}
    with pytest.raises(MaskError) as caught:
        family.chat.check_trained(encoded.input_ids, labels, example, placeholder_ids=family.placeholder_ids)
    for token in tokens:
        assert repr(family.chat.tokens.decode([token])) in caught.value.shown


def test_each_kind_of_media_has_its_place_in_a_row_of_several(
    family_of: Any, pictures: list[Path], tmp_path: Path
) -> None:
    family: Family = family_of("qwen2_5_omni_thinker")
    sound = write_sound(tmp_path / "a.wav")
    example = row(
        ("user", ["Look:", image(pictures[0]), " and listen:", Media("audio", sound)]),
        ("assistant", ["A bell."]),
        ("user", [Media("audio", sound), image(pictures[1])]),
        ("assistant", ["Another."]),
    )
    encoded = family.chat.encode(example)
    assert [text.removesuffix("<|im_end|>") for text in family.trained_texts(encoded)] == ["A bell.", "Another."]
    family.check(encoded, example)
    shown = "".join(s["text"] for s in encoded.segments())
    assert shown.count("[image ") == shown.count("[audio ") == 2
    prompt, _, _ = family.chat.prompt(example)
    assert prompt.index(str(pictures[0])) < prompt.index(str(sound)) < prompt.rindex(str(sound))
    assert prompt.rindex(str(sound)) < prompt.index(str(pictures[1]))


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_a_videos_frames_are_shown_as_what_they_are(family_of: Any, pictures: list[Path], name: str) -> None:
    family: Family = family_of(name)
    video = Media("video", frames=tuple(pictures[2:3] * 4))
    example = row(("user", [video, "What happens?", image(pictures[0])]), ("assistant", ["Nothing."]))
    encoded = family.chat.encode(example)
    family.check(encoded, example)
    shown = "".join(s["text"] for s in encoded.segments())
    assert "[video 2×" in shown
    assert "[image 2×1 tokens]" in shown
    assert "_pad|>" not in shown


@pytest.mark.parametrize("name", ["gemma3", "idefics3"])
def test_words_that_a_token_is_spelled_with_may_stand_between_images(
    family_of: Any, pictures: list[Path], name: str
) -> None:
    family: Family = family_of(name)
    first, second = image(pictures[0]), image(pictures[1])
    example = row(("user", [first, "ok", second, "a", first, "image", second]), ("assistant", ["ok"]))
    encoded = family.chat.encode(example)
    family.check(encoded, example)
    assert [text.strip() for text in family.trained_texts(encoded)] == [f"ok{family.chat.renderer.probe.ends[0]}"]
    shown = "".join(segment["text"] for segment in encoded.segments())
    assert shown.count("[image ") == 4


@pytest.mark.parametrize(
    ("name", "tensor"), [("qwen2_5_vl", "second_per_grid_ts"), ("qwen2_5_omni_thinker", "video_second_per_grid")]
)
def test_a_video_passes_as_fast_as_its_file_says(family_of: Any, tmp_path: Path, name: str, tensor: str) -> None:
    frames = [Image.new("RGB", (56, 56), (40 * n, 0, 0)) for n in range(4)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:], duration=250)
    family: Family = family_of(name)
    video = Media("video", tmp_path / "a.gif")
    rendered = family.chat.rendered(row(("user", [video, "What happens?"]), ("assistant", ["Nothing."])))
    tensors = family.processor.process(rendered.text, (video,)).tensors
    assert tensors[tensor].tolist() == [0.5]  # four a second, and two to a token


def test_a_message_may_be_cut_off_after_its_images_but_not_within(family_of: Any, pictures: list[Path]) -> None:
    family: Family = family_of("qwen2_5_vl")
    encoded = family.chat.encode(row(("user", [image(pictures[2]), "What?"]), ("assistant", ["A large blue square."])))
    assert encoded.truncate(encoded.media_end).input_ids == encoded.input_ids[: encoded.media_end]
    with pytest.raises(MediaCutError, match="truncated after"):
        encoded.truncate(encoded.media_end - 1)


@pytest.mark.parametrize(
    ("turns", "told"),
    [
        ([("user", ["<|image_pad|> is a token", "IMAGE"]), ("assistant", ["Yes."])], "processor rejects"),
        (
            [("user", ["<|vision_start|><|image_pad|><|vision_end|>", "IMAGE"]), ("assistant", ["Yes."])],
            "placeholders for 2",
        ),
    ],
)
def test_words_that_read_like_an_image_are_an_error_of_their_row(
    family_of: Any, pictures: list[Path], turns: Any, told: str
) -> None:
    family: Family = family_of("qwen2_5_vl")
    given = [(role, [image(pictures[0]) if part == "IMAGE" else part for part in parts]) for role, parts in turns]
    with pytest.raises(DatasetError, match=told):
        family.chat.encode(row(*given))


def test_a_template_without_a_place_for_images_refuses_rows_with_them(family_of: Any, pictures: list[Path]) -> None:
    from zoo.tokenizer import build_tokenizer

    family: Family = family_of("qwen2_5_vl")
    chat = ChatFormat(build_tokenizer("chatml"), expand=family.processor.expand)
    with pytest.raises(DatasetError, match="no placeholder for an image"):
        chat.encode(row(("user", [image(pictures[0]), "What?"]), ("assistant", ["A square."])))


def test_a_tokenizer_that_cuts_words_otherwise_than_the_processors_is_an_error_of_the_row(
    family_of: Any, pictures: list[Path]
) -> None:
    family: Family = family_of("qwen2_5_vl")
    tokenizer = AutoTokenizer.from_pretrained(family.directory)
    tokenizer.add_tokens(["square"])
    chat = ChatFormat(tokenizer, expand=family.processor.expand)
    with pytest.raises(DatasetError, match="the processor and the tokenizer produce different tokens") as it:
        chat.encode(row(("user", [image(pictures[0]), "What?"]), ("assistant", ["A square."])))
    assert "honectl preview" in it.value.hint
    chat.encode(row(("user", [image(pictures[0]), "What?"]), ("assistant", ["A circle."])))


def test_a_processor_that_puts_an_images_tokens_in_after_it_has_tokenized_is_refused(
    family_of: Any, pictures: list[Path]
) -> None:
    import torch

    family: Family = family_of("qwen2_5_vl")
    processor = AutoProcessor.from_pretrained(family.directory)

    class Late(type(processor)):  # type: ignore[misc]
        """A processor as before transformers 5: the text that is tokenized has one token for each image."""

        def __call__(self, text: list[str], **options: Any) -> Any:
            batch = super().__call__(text=text, **options)
            held = self.tokenizer(text)["input_ids"][0]
            return {**batch, "input_ids": torch.tensor([[held[0], *batch["input_ids"][0].tolist()]])}

    processor.__class__ = Late
    expand = Processor(processor, family.chat.tokenizer, MediaLimits()).expand
    with pytest.raises(ModelError, match="Late does not insert an image's tokens before it tokenizes a row") as it:
        ChatFormat(family.chat.tokenizer, expand=expand).encode(
            row(("user", [image(pictures[0]), "What?"]), ("assistant", ["A square."]))
        )
    assert "train this model only on text rows" in it.value.hint


def test_a_processor_that_changes_the_words_of_a_row_is_an_error_of_the_row(
    family_of: Any, pictures: list[Path]
) -> None:
    family: Family = family_of("qwen2_5_vl")
    processor = AutoProcessor.from_pretrained(family.directory)

    class Loud(type(processor)):  # type: ignore[misc]
        """A processor that writes more than the media's tokens into the text."""

        def __call__(self, text: list[str], **options: Any) -> Any:
            return super().__call__(text=[each.replace("What", "WHAT") for each in text], **options)

    processor.__class__ = Loud
    chat = ChatFormat(family.chat.tokenizer, expand=Processor(processor, family.chat.tokenizer, MediaLimits()).expand)
    with pytest.raises(DatasetError, match="data set 1, row 1: the processor changes") as it:
        chat.encode(row(("user", [image(pictures[0]), "What?"]), ("assistant", ["A square."])))
    assert "honectl preview" in it.value.hint
    chat.encode(row(("user", [image(pictures[0]), "Why?"]), ("assistant", ["A square."])))


def test_the_assistant_says_words_alone(family_of: Any, pictures: list[Path]) -> None:
    family: Family = family_of("qwen2_5_vl")
    example = row(("user", [image(pictures[0]), "Draw it."]), ("assistant", ["Here."]))
    example.messages[1]["content"] = [{"type": "image"}, {"type": "text", "text": "Here."}]
    with pytest.raises(DatasetError, match="message 2, from the assistant, contains more than text"):
        family.chat.encode(Example("messages", messages=example.messages, media=example.media * 2))


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_of_one_batch_are_padded_together_and_keep_their_own(
    family_of: Any, pictures: list[Path], side: Any
) -> None:
    import torch

    family: Family = family_of("qwen2_5_vl")
    rows = [
        row(("user", [image(pictures[0]), "What?", image(pictures[1])]), ("assistant", ["Red."])),
        row(("user", [image(pictures[2])]), ("assistant", ["A large blue square."])),
        row(("user", ["And without any?"]), ("assistant", ["Nothing."])),
    ]
    tensors = []
    for each in rows:
        encoded = family.chat.encode(each)
        one = family.processor.process(encoded.rendered, each.media).tensors if each.media else {}
        tensors.append({**one, "input_ids": torch.tensor([encoded.input_ids])})
    batch = merge(tensors, family.processor.names_by_token, side=side, dtype="bfloat16", pad_token_id=9)
    width = max(each["input_ids"].shape[1] for each in tensors)
    assert {name: batch[name].shape for name in ("input_ids", "attention_mask", "mm_token_type_ids")} == dict.fromkeys(
        ("input_ids", "attention_mask", "mm_token_type_ids"), (3, width)
    )
    for n, one in enumerate(tensors):
        seen = batch["attention_mask"][n].bool()
        assert batch["input_ids"][n][seen].tolist() == one["input_ids"][0].tolist()
        assert set(batch["input_ids"][n][~seen].tolist()) <= {9}
        assert seen[-1 if side == "left" else 0]
    assert batch["pixel_values"].dtype == torch.bfloat16
    assert batch["image_grid_thw"].tolist() == [list(map(int, g)) for t in tensors[:2] for g in t["image_grid_thw"]]
    assert len(batch["pixel_values"]) == sum(len(one["pixel_values"]) for one in tensors[:2])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *[(name, "image") for name in IMAGE_FAMILIES],
        ("qwen2_5_vl", "video"),
        ("qwen3_vl", "video"),
        ("qwen2_audio", "audio"),
        ("qwen2_5_omni_thinker", "audio"),
    ],
)
def test_a_row_means_the_same_to_the_model_in_a_batch_as_alone(
    family_of: Any, pictures: list[Path], tmp_path: Path, name: str, kind: Kind
) -> None:
    import torch
    from transformers import AutoConfig

    family: Family = family_of(name)
    match kind:
        case "image":
            first, second = image(pictures[0]), image(pictures[2])
        case "video":
            first, second = (Media("video", frames=tuple(pictures[n : n + 1] * 4)) for n in (0, 2))
        case "audio":
            first, second = (
                Media("audio", write_sound(tmp_path / f"{n}.wav", seconds=seconds)) for n, seconds in ((0, 0.5), (1, 1))
            )
    rows = [
        row(("user", [first, "What?", second]), ("assistant", ["Red."])),
        row(("user", [second, "And what may this be, all in all?"]), ("assistant", ["A large blue square."])),
        row(("user", ["And without any?"]), ("assistant", ["Nothing."])),
    ]
    model = model_class(AutoConfig.from_pretrained(family.directory)).from_pretrained(family.directory).float().eval()
    tensors = []
    for each in rows:
        encoded = family.chat.encode(each)
        one = family.processor.process(encoded.rendered, each.media).tensors if each.media else {}
        tensors.append({**one, "input_ids": torch.tensor([encoded.input_ids])})

    def batch(some: list[dict[str, Any]], side: Any) -> dict[str, Any]:
        return merge(some, family.processor.names_by_token, side=side, dtype="float32", pad_token_id=0)

    with torch.no_grad():
        alone = [model(**batch([one], "right")).logits[0] for one in tensors]
        for side in ("left", "right"):
            together = batch(tensors, side)
            logits = model(**together).logits
            for n, expected in enumerate(alone):
                torch.testing.assert_close(logits[n][together["attention_mask"][n].bool()], expected)


# --- from the rendered text to the expanded one


def places(text: str, *marks: tuple[str, Kind]) -> list[Place]:
    found = [(text.index(mark), mark, kind) for mark, kind in marks]
    return [Place(kind, at, at + len(mark)) for at, mark, kind in sorted(found)]


def test_text_between_media_is_found_wherever_it_went() -> None:
    text = "a<1>\n<2>b?answer."
    carried = carry(text, places(text, ("<1>", "image"), ("<2>", "image")), "a\n**\n**\n\n\n**\nb?answer.")
    (span,) = carried.spans([(text.index("answer"), len(text))])
    assert "a\n**\n**\n\n\n**\nb?answer."[slice(*span)] == "answer."


@pytest.mark.parametrize("expanded", ["A**b**c", "a**B**c", "a**b**C", "abc", "", "a**b**b**c", "a**b*"])
def test_a_processor_that_changes_other_text_is_not_believed(expanded: str) -> None:
    text = "a<1>b<2>c"
    if expanded == "abc":
        assert carry(text, places(text, ("<1>", "image"), ("<2>", "image")), expanded).spans([(0, 1)]) == [(0, 1)]
        return
    with pytest.raises(ValueError, match="the processor"):
        carry(text, places(text, ("<1>", "image"), ("<2>", "image")), expanded)


def write_sound(path: Path, *, seconds: float = 0.5, rate: int = 16000) -> Path:
    import wave

    samples = (np.sin(np.arange(int(seconds * rate)) / 9) * 12000).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())
    return path
