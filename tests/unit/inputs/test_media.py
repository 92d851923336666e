"""Images, videos and sounds, on real files created here."""

from __future__ import annotations

import fractions
import io
import math
import os
import struct
import wave
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw

from honed.inputs import media
from honed.inputs.media import Media, MediaError
from honed.spec.media import KINDS, Kind, MediaLimits

ANY = MediaLimits()


def image_at(path: Path, limits: MediaLimits = ANY) -> Image.Image:
    return media.image(Media("image", path), limits)


def told(path: Path, kind: Kind = "image") -> str:
    """Return the message about a broken file: equal from a probe and from decoding, but for faults hidden by the
    header."""
    one = Media(kind, path)
    with pytest.raises(MediaError) as caught:
        match kind:
            case "image":
                media.image(one, ANY)
            case "video":
                media.frames(one, ANY)
            case "audio":
                media.audio(one, 16000)
    assert str(path) in caught.value.message
    return caught.value.shown.replace(str(path), "FILE")


def write_wave(path: Path, samples: np.ndarray, rate: int = 16000, num_channels: int = 1) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(num_channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    return path


def write_video(path: Path, num_frames: int = 30, rate: int = 10, size: tuple[int, int] = (64, 48)) -> Path:
    """Write a video whose n-th frame has the gray level 8 n."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        stream.time_base = fractions.Fraction(1, rate)
        stream.codec_context.gop_size = 10
        for n in range(num_frames):
            frame = av.VideoFrame.from_image(Image.new("RGB", size, (8 * n,) * 3))
            for packet in stream.encode(frame):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return path


# --- Sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "limits", "fitted"),
    [
        ((640, 480), MediaLimits(), (640, 480)),
        ((640, 480), MediaLimits(max_pixels=640 * 480), (640, 480)),
        ((640, 480), MediaLimits(max_pixels=320 * 240), (320, 240)),
        ((640, 480), MediaLimits(max_image_size=320), (320, 240)),
        ((640, 480), MediaLimits(max_image_size=320, max_pixels=100 * 75), (100, 75)),
        ((100, 100), MediaLimits(min_pixels=40000), (200, 200)),
        ((100, 100), MediaLimits(min_pixels=40000, max_image_size=120), (120, 120)),
        ((1, 1), MediaLimits(), (8, 8)),
        ((400, 3), MediaLimits(), (400, 8)),
    ],
)
def test_an_image_is_fitted_to_the_limits(size: tuple[int, int], limits: MediaLimits, fitted: tuple[int, int]) -> None:
    assert media.fitted_size(*size, limits) == fitted


SIDES = st.integers(min_value=8, max_value=5000)


@settings(max_examples=100)
@given(SIDES, SIDES, st.integers(min_value=2**14, max_value=2**22))
def test_no_limit_is_passed_by_rounding(width: int, height: int, limit: int) -> None:
    wide, high = media.fitted_size(width, height, MediaLimits(max_pixels=limit))
    assert wide * high <= max(limit, 8 * max(wide, high))
    wide, high = media.fitted_size(width, height, MediaLimits(min_pixels=limit))
    assert wide * high >= limit
    if min(width, height) * 20 > max(width, height):
        assert math.isclose(wide / high, width / height, rel_tol=0.15)


# --- Images -----------------------------------------------------------------------------------------------------------


def test_every_kind_of_image_becomes_rgb(tmp_path: Path) -> None:
    red = Image.new("RGB", (20, 10), "red")
    for name, mode in (("a.png", "RGB"), ("b.png", "P"), ("c.tif", "CMYK"), ("d.jpg", "CMYK"), ("e.bmp", "RGB")):
        red.convert(mode).save(tmp_path / name)
        got = image_at(tmp_path / name)
        assert got.mode == "RGB"
        assert got.size == (20, 10)
        assert np.allclose(got.getpixel((5, 5)), (254, 0, 0), atol=4), name
    for name, mode in (("f.png", "1"), ("g.png", "L"), ("h.png", "LA")):
        Image.new("L", (20, 10), 255).convert(mode).save(tmp_path / name)
        assert image_at(tmp_path / name).getpixel((5, 5)) == (255, 255, 255)


def test_sixteen_bits_are_scaled_not_cut(tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 256, dtype=np.uint16).reshape(16, 16)
    Image.fromarray(ramp).save(tmp_path / "gray.png")
    got = np.asarray(image_at(tmp_path / "gray.png"))[:, :, 0].reshape(-1)
    assert got[0] == 0
    assert got[-1] == 255
    assert np.abs(got.astype(int) - np.arange(256)).max() <= 1
    Image.fromarray(np.linspace(0, 1, 256, dtype=np.float32).reshape(16, 16)).save(tmp_path / "float.tif")
    assert np.asarray(image_at(tmp_path / "float.tif"))[15, 15, 0] == 255


def test_what_is_transparent_becomes_white(tmp_path: Path) -> None:
    clear = Image.new("RGBA", (20, 20), (255, 0, 0, 0))
    clear.paste((0, 0, 255, 255), (0, 0, 10, 20))
    clear.save(tmp_path / "clear.png")
    got = image_at(tmp_path / "clear.png")
    assert got.getpixel((5, 5)) == (0, 0, 255)
    assert got.getpixel((15, 5)) == (255, 255, 255)
    palette = Image.new("P", (20, 20), 0)
    palette.putpalette([255, 0, 0, 0, 255, 0])
    palette.save(tmp_path / "palette.gif", transparency=0)
    assert image_at(tmp_path / "palette.gif").getpixel((5, 5)) == (255, 255, 255)


def test_a_photograph_is_turned_as_its_exif_data_say(tmp_path: Path) -> None:
    picture = Image.new("RGB", (40, 20), "white")
    exif = picture.getexif()
    exif[0x0112] = 6
    picture.save(tmp_path / "turned.jpg", exif=exif)
    assert image_at(tmp_path / "turned.jpg").size == (20, 40)
    facts = media.probe(Media("image", tmp_path / "turned.jpg"))
    assert (facts.width, facts.height, facts.format) == (20, 40, "JPEG")


def gif(path: Path, num_frames: int = 12, duration_ms: int = 100) -> Path:
    pictures = [Image.new("RGB", (16, 16), (20 * n, 0, 0)) for n in range(num_frames)]
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=duration_ms)
    return path


def test_an_animation_is_its_first_frame_as_an_image_and_all_of_them_as_a_video(tmp_path: Path) -> None:
    path = gif(tmp_path / "moving.gif")
    assert image_at(path).getpixel((1, 1)) == (0, 0, 0)
    taken, rate = media.frames(Media("video", path), MediaLimits(num_frames=3))
    assert [frame.getpixel((1, 1))[0] for frame in taken] == pytest.approx([0, 120, 220], abs=4)
    assert rate == pytest.approx(2 / 1.1)
    assert media.probe(Media("video", path)).num_frames == 12


def test_limits_hold_for_what_is_decoded(tmp_path: Path) -> None:
    Image.new("RGB", (640, 480)).save(tmp_path / "large.png")
    assert image_at(tmp_path / "large.png", MediaLimits(max_pixels=64 * 48)).size == (64, 48)
    Image.new("RGB", (1, 1), "red").save(tmp_path / "dot.png")
    dot = image_at(tmp_path / "dot.png")
    assert dot.size == (8, 8)
    assert dot.getpixel((4, 4)) == (255, 0, 0)


def test_a_broken_image_is_told_by_name_and_fault(tmp_path: Path) -> None:
    assert told(tmp_path / "gone.png") == "FILE: no such file"
    assert told(tmp_path / "no" / "where" / "gone.png").startswith("FILE: no such file: the directory ")
    (tmp_path / "folder.png").mkdir()
    assert told(tmp_path / "folder.png") == "FILE: a directory, not a file"
    (tmp_path / "link.png").symlink_to(tmp_path / "nothing.png")
    assert "a link to" in told(tmp_path / "link.png")
    os.mkfifo(tmp_path / "pipe.png")
    assert told(tmp_path / "pipe.png") == "FILE: not a regular file"
    (tmp_path / "empty.png").touch()
    assert told(tmp_path / "empty.png") == "FILE: an empty file"
    (tmp_path / "text.png").write_text("a note about a picture, which is text\n")
    assert told(tmp_path / "text.png") == "FILE: not a readable image: it is text"
    (tmp_path / "page.jpg").write_text("<!DOCTYPE html><html>404</html>")
    assert "a web page downloaded instead of the file" in told(tmp_path / "page.jpg")
    (tmp_path / "pointer.jpg").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    assert "a Git LFS pointer" in told(tmp_path / "pointer.jpg")
    (tmp_path / "noise.png").write_bytes(bytes(range(256)) * 10)
    assert told(tmp_path / "noise.png") == "FILE: not a readable image"
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "torn.jpg")
    (tmp_path / "torn.jpg").write_bytes((tmp_path / "torn.jpg").read_bytes()[:1500])
    assert told(tmp_path / "torn.jpg").startswith("FILE: a broken image: image file is truncated")
    assert media.probe(Media("image", tmp_path / "torn.jpg")).width == 64, "a header alone does not show it"
    Image.new("L", (20000, 20)).save(tmp_path / "strip.png")
    assert told(tmp_path / "strip.png").startswith(
        "FILE: 20000×20: one side is more than 200 times as long as the other"
    )


def test_a_decompression_bomb_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    Image.new("1", (10, 10)).save(tmp_path / "bomb.png")
    content = bytearray((tmp_path / "bomb.png").read_bytes())
    content[16:24] = struct.pack(">II", 60000, 60000)
    import zlib

    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    (tmp_path / "bomb.png").write_bytes(content)
    assert "pixels" in told(tmp_path / "bomb.png")


# --- Video ------------------------------------------------------------------------------------------------------------


def test_frames_are_taken_evenly_from_the_first_to_the_last(tmp_path: Path) -> None:
    one = Media("video", write_video(tmp_path / "gray.mp4"))
    for wanted in (2, 3, 8, 29, 30, 100):
        taken, rate = media.frames(one, MediaLimits(num_frames=wanted))
        number = min(wanted, 30)
        seen = [frame.getpixel((20, 20))[0] / 8 for frame in taken]
        assert seen == pytest.approx([n * 29 / (number - 1) for n in range(number)], abs=1.2)
        assert rate == pytest.approx((number - 1) / 2.9, rel=0.02)
    assert len(media.frames(one, ANY)[0]) == media.NUM_FRAMES
    assert media.frames(one, MediaLimits(num_frames=1))[0][0].getpixel((20, 20))[0] == pytest.approx(120, abs=8)
    facts = media.probe(one)
    assert (facts.width, facts.height, facts.num_frames) == (64, 48, 30)
    assert facts.duration_sec == pytest.approx(3.0, abs=0.11)
    assert media.frames(one, MediaLimits(num_frames=2, max_image_size=32))[0][0].size == (32, 24)


def test_a_video_may_be_a_directory_or_a_list_of_frames(tmp_path: Path) -> None:
    for n in range(12):
        Image.new("RGB", (16, 16), (20 * n, 0, 0)).save(tmp_path / f"frame_{n}.png")
    (tmp_path / "labels.txt").touch()

    def reds(one: Media, limits: MediaLimits = ANY) -> list[int]:
        taken, rate = media.frames(one, limits)
        assert rate is None
        return [frame.getpixel((1, 1))[0] // 20 for frame in taken]

    directory = Media("video", tmp_path)
    assert reds(directory, MediaLimits(num_frames=12)) == list(range(12)), "2 comes before 10"
    assert len(reds(directory)) == media.NUM_FRAMES
    listed = Media("video", frames=tuple(tmp_path / f"frame_{n}.png" for n in range(10)))
    assert reds(listed) == list(range(10)), "a list is what its owner chose"
    assert reds(listed, MediaLimits(num_frames=2)) == [0, 9]
    assert listed.place == f"{tmp_path}/frame_0.png and 9 more"
    assert media.probe(listed).num_frames == 10
    gone = Media("video", frames=(tmp_path / "frame_0.png", tmp_path / "gone.png"))
    with pytest.raises(MediaError, match=r"gone\.png: no such file"):
        media.probe(gone)
    with pytest.raises(MediaError, match=r"gone\.png: no such file"):
        media.frames(gone, ANY)


def test_a_broken_video_is_told_by_name_and_fault(tmp_path: Path) -> None:
    assert told(tmp_path / "gone.mp4", "video") == "FILE: no such file"
    (tmp_path / "text.mp4").write_text("no film\n" * 100)
    assert told(tmp_path / "text.mp4", "video").startswith("FILE: not a readable video: it is text")
    whole = write_video(tmp_path / "whole.mp4").read_bytes()
    (tmp_path / "torn.mp4").write_bytes(whole[: len(whole) // 2])
    assert "torn.mp4" not in told(tmp_path / "torn.mp4", "video")
    (tmp_path / "empty").mkdir()
    assert told(tmp_path / "empty", "video").startswith("FILE: no frames in this directory")
    sound = write_wave(tmp_path / "sound.wav", np.zeros(100))
    assert told(sound, "video") == "FILE: it has no picture"


# --- Sound ------------------------------------------------------------------------------------------------------------


def test_sound_is_mono_at_the_rate_that_is_asked_for(tmp_path: Path) -> None:
    tone = np.sin(np.arange(44100) / 44100 * 2 * np.pi * 440) * 0.5
    both = np.stack([tone, tone], axis=1).reshape(-1)
    path = write_wave(tmp_path / "tone.wav", both, rate=44100, num_channels=2)
    samples = media.audio(Media("audio", path), 16000)
    assert samples.dtype == np.float32
    assert samples.shape[0] == pytest.approx(16000, abs=40)
    assert np.abs(samples).max() == pytest.approx(0.5, abs=0.05)
    spectrum = np.abs(np.fft.rfft(samples))
    assert spectrum.argmax() * 16000 / len(samples) == pytest.approx(440, abs=2)
    assert media.probe(Media("audio", path)).duration_sec == pytest.approx(1.0, abs=0.01)
    assert np.array_equal(samples, media.audio(Media("audio", path), 16000))


def test_a_broken_sound_is_told_by_name_and_fault(tmp_path: Path) -> None:
    assert told(tmp_path / "gone.wav", "audio") == "FILE: no such file"
    assert told(write_wave(tmp_path / "silent.wav", np.zeros(0)), "audio") == "FILE: sound of zero length"
    (tmp_path / "text.wav").write_text("no sound\n" * 100)
    assert told(tmp_path / "text.wav", "audio") == "FILE: not a readable sound file: it is text"
    Image.new("RGB", (16, 16)).save(tmp_path / "picture.png")
    assert told(tmp_path / "picture.png", "audio") == "FILE: it has no sound"


# --- Embedded data ----------------------------------------------------------------------------------------------------


def test_embedded_data_become_a_file_once(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    drawn = Image.new("RGB", (16, 16), "red")
    ImageDraw.Draw(drawn).line((0, 0, 16, 16))
    drawn.save(buffer, "PNG")
    one = Media("image", data=buffer.getvalue(), name="rows/red.PNG")
    assert media.image(one, ANY).size == (16, 16)
    assert one.place == "embedded image rows/red.PNG"
    spilled = media.spill(one, tmp_path / "media")
    assert spilled.data is None
    assert spilled.path is not None
    assert spilled.path.suffix == ".png"
    assert media.image(spilled, ANY).getpixel((1, 0)) == (255, 0, 0)
    assert media.spill(one, tmp_path / "media") == spilled
    assert media.spill(spilled, tmp_path / "media") is spilled
    assert [path.name for path in (tmp_path / "media").iterdir()] == [spilled.path.name]
    with pytest.raises(MediaError, match="embedded image: empty"):
        media.probe(Media("image", data=b""))


def test_a_path_that_cannot_even_be_looked_for_is_told_by_name(tmp_path: Path) -> None:
    for kind in KINDS:
        with pytest.raises(MediaError, match="File name too long"):
            media.probe(Media(kind, tmp_path / ("a" * 300)))
        with pytest.raises(MediaError, match="File name too long"):
            media.require(Media(kind, tmp_path / ("a" * 300)))
