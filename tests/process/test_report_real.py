"""The pages of a text job and of a vision job that the real worker ran on hostile rows, viewed in a browser."""

from __future__ import annotations

import json
from pathlib import Path

import browser
import pytest
from browser import Browser
from harness import RealInstance
from test_report import Page

from honed.worker.model import torchvision
from zoo.model import build_checkpoint, write_facts
from zoo.vision import build_vision_checkpoint, write_pictures

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=alert(1)> \u202ekcatta\u202c \x00 </div>"
SHORT = {
    "lora": {"r": 4},
    "backend": "transformers",
    "eval_split": 0.25,
    "training": {"max_steps": 4, "per_device_train_batch_size": 2, "eval_strategy": "steps", "eval_steps": 2},
}
#: Pixels (96 an inch) that paper leaves between margins of a centimeter.
A4, A4_ON_ITS_SIDE, A5 = 718, 1047, 484


def with_hostile_questions(path: Path) -> Path:
    """Append hostile text to each question of the rows."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        asked = row["messages"][0]
        if isinstance(asked["content"], str):
            asked["content"] += HOSTILE
        else:
            asked["content"][-1]["text"] += HOSTILE
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.skipif(browser.CHROMIUM is None, reason="no Chromium here")
def test_the_pages_of_a_text_job_and_of_a_vision_job_are_whole_at_both_widths(real: RealInstance) -> None:
    torchvision.mend()
    sees = build_vision_checkpoint(real.root / "sees", "qwen2_5_vl")
    reads = build_checkpoint(real.root / "reads", "qwen3")
    pictures = with_hostile_questions(write_pictures(real.root / "pictures.jsonl", 8))
    facts = with_hostile_questions(write_facts(real.root / "facts.jsonl", 8))
    predictions = {"num_samples": 2, "max_new_tokens": 4}
    real.drop("sees", base_model=str(sees), datasets=[{"path": str(pictures)}], predictions=predictions, **SHORT)
    # One prompt is 50 kB on one line: more than the model has positions for, and cut for the model alone. (No NUL: a
    # spec with one is refused.)
    long = HOSTILE.replace("\x00", "") + "x" * 50_000
    prompts = {"predictions": {"max_new_tokens": 4, "prompts": [long, "And you?"]}}
    real.drop("reads", base_model=str(reads), datasets=[{"path": str(facts)}], **prompts, **SHORT)
    real.start("--drain")
    assert real.wait(deadline_sec=600) == 0
    assert real.rejected() == {}
    with browser.opened(real.root) as chromium:
        for name in ("sees", "reads"):
            shown = real.show(name)
            assert shown["state"] == "succeeded", real.log
            path = real.layout.job(shown["id"]).report_path
            page = Page.of(path)
            assert not {tag for tag, _ in page.elements} & {"script", "iframe", "object", "form", "base"}
            titles = {
                (keys["aria-label"] or "").partition(";")[0]
                for tag, keys in page.elements
                if tag == "svg" and "aria-label" in keys
            }
            assert titles >= {"Loss", "Learning rate", "Gradient norm", "Tokens of a row, as trained on"}
            for width in (390, 1280):
                seen = chromium.look(path, width=width)
                assert seen["complaints"] == []
                assert seen["title"].startswith(f"{name}: succeeded")
                assert "<script>document.title='owned'</script><img src=x onerror=alert(1)>" in seen["text"]
                assert "U+202E" in seen["text"]
                assert ("x" * 50_000 in seen["text"]) == (name == "reads")
                assert seen["scrolls"] <= seen["width"] == width
                assert len(seen["figures"]) == len(titles)
                for box in seen["figures"]:
                    assert box["width"] >= 250
                    assert box["height"] >= 140
                    assert 0 <= box["left"] < box["right"] <= width
                assert len(seen["pictures"]) == (2 if name == "sees" else 0), "a thumbnail for each example"
            can_be_read_in_light_in_the_dark_and_on_paper(chromium, path)


def can_be_read_in_light_in_the_dark_and_on_paper(chromium: Browser, path: Path) -> None:
    for scheme, color in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(15, 19, 24)")):
        chromium.emulate(scheme=scheme)
        found = chromium.contrasts()
        assert (found["weak"], found["page"]) == ([], color)
        assert found["written"] > 100
        assert found["drawn"] > 20
    for width in A4, A4_ON_ITS_SIDE, A5:
        chromium.emulate(scheme="dark", media="print")  # paper is white, whatever the screen was
        seen = chromium.look(path, width=width)
        assert seen["scrolls"] <= seen["width"] == width
        assert chromium.hidden_in_print() == []
        assert seen["smallest"] >= 9.3, "7 points: one can read the axes"
        found = chromium.contrasts()
        assert (found["weak"], found["page"]) == ([], "rgb(255, 255, 255)")
    chromium.emulate()
