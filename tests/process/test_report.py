"""The pages: written outside the daemon's loop, and a model's answers stay text."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import subprocess
import time
from html.parser import HTMLParser
from pathlib import Path

import browser
import pytest
from harness import Instance

from honed.job.event import EventWriter
from honed.job.job import State
from honed.page import report
from honed.system import access
from waiting import wait_for

HOSTILE = (
    "<script>document.title='owned'</script><img src=x onerror=alert(1)>\x00\x1b[31m \u202ekcatta\u202c </div></body>"
    "<!-- \u2028 &lt;b&gt; \ud800"
)


class Page(HTMLParser):
    """A page as a browser parses it: its elements, and the text that it shows."""

    def __init__(self, content: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.shown = ""
        self._is_style = False
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._is_style = tag == "style"

    def handle_endtag(self, _tag: str) -> None:
        self._is_style = False

    def handle_data(self, data: str) -> None:
        self.shown += "" if self._is_style else data

    @classmethod
    def of(cls, path: Path) -> Page:
        return cls(path.read_text(encoding="utf-8"))


def write_events(instance: Instance, job_id: int, *, steps: int = 60, answer: str = HOSTILE) -> None:
    """Write a worker's events of a whole run to the job's last attempt."""
    job = instance.spool.job(job_id)
    assert job is not None
    path = instance.layout.job(job_id).attempt(job.attempt.number).events_path
    now = [time.time() - 3600.0]

    def clock() -> float:
        now[0] += 5.0
        return now[0]

    events = EventWriter(path, clock=clock)
    events.emit("started", pid=1, versions={"torch": "2.13", "transformers": "5.17"}, backend="transformers")
    counts = [{"role": "base", "dtype": "bfloat16", "device": "cpu", "num_parameters": 400_000}]
    events.emit("audit", when="built", model_dtype="bfloat16", counts=counts, mended=["an adapter was float32"])
    events.emit("audit", when="saved", model_dtype="float16", counts=[counts[0] | {"dtype": "float16"}], mended=[])
    events.emit(
        "data",
        num_train=900,
        num_eval=48,
        num_truncated=3,
        num_dropped=1,
        num_tokens=81234,
        lengths={"width": 32, "counts": [0, 12, 80, 200, 310, 190, 60, 30, 10, 5, 0, 3]},
        datasets=[{"num_rows": 948, "num_taken": 948, "num_bad": 0}],
    )
    events.emit(
        "example",
        segments=[
            {"text": f"<|im_start|>user\nWhat? {HOSTILE}\n", "trained": False},
            {"text": "Paris<|im_end|>", "trained": True},
        ],
    )
    events.emit("log", level="warning", message=f"a row says {HOSTILE}")
    for step in range(1, steps + 1):
        events.emit(
            "step",
            step=step,
            num_steps=steps,
            epoch=step / steps,
            loss=3 / step**0.5 + (step % 7) / 20,
            learning_rate=2e-4 * (1 - step / steps),
            grad_norm=1 + (step % 5) / 3,
        )
        if step % 10 == 0:
            events.emit("evaluation", step=step, epoch=step / steps, metrics={"eval_loss": 3.2 / step**0.5})
            rows = [
                {
                    "sample_index": index,
                    "prompt": f"{index}: what is the capital? {HOSTILE}",
                    "ground_truth": "Paris, the capital of France",
                    "prediction": answer if step < steps else "Paris, the capital of Italy",
                }
                for index in range(3)
            ]
            events.emit(
                "predictions",
                step=step,
                epoch=step / steps,
                num_failed=0,
                rows=rows,
                scores={"exact_match": step / 100, "token_f1": step / 80},
            )
    events.emit("memory", when="trained", weights_bytes=3 << 30, adapter_bytes=9 << 20, device_peak_bytes=5 << 30)
    events.close()


def rebuilt(instance: Instance, job_id: int) -> Page:
    """Return the page that honed builds from the job's own files after its database was deleted."""
    instance.layout.database_path.unlink()
    assert instance.drain() == 0
    made = report.write(instance.layout, [job_id], is_shared=True, admin_group="")
    assert made == 0
    return Page.of(instance.layout.job(job_id).report_path)


def test_a_job_has_a_page_while_it_runs_and_when_it_is_over(instance: Instance) -> None:
    instance.drop("until-60")
    instance.start()
    job = instance.wait_state("until-60", State.RUNNING)
    path = instance.layout.job(job.id).report_path
    wait_for(path.exists, what="the page of a job that runs")
    assert "running" in Page.of(path).shown
    instance.go("until-60")
    instance.wait_state("until-60", State.SUCCEEDED)
    wait_for(lambda: "succeeded: loss 1 → 0.01667" in Page.of(path).shown, what="the page of one that is over")
    wait_for(lambda: "succeeded" in Page.of(instance.layout.index_path).shown, what="the same in the index")
    assert ("a", {"href": f"jobs/{job.id}/report.html"}) in Page.of(instance.layout.index_path).elements
    instance.stop()
    assert "an error in the daemon's loop" not in instance.log
    assert "reports could not be written" not in instance.log


def test_a_drain_ends_with_the_last_word_on_every_page(instance: Instance) -> None:
    instance.drop("succeed")
    instance.drop("explain")
    assert instance.drain() == 0
    for name, words in (("succeed", "succeeded: loss"), ("explain", "mask_invalid: trained on the prompt")):
        job = instance.job(name)
        assert job is not None
        assert words in Page.of(instance.layout.job(job.id).report_path).shown.split("Attempts")[0]


def test_hostile_text_is_text_everywhere(instance: Instance) -> None:
    instance.drop("succeed", name=f"succeed.{HOSTILE[:30]}")
    assert instance.drain() == 0
    write_events(instance, 1, answer=HOSTILE + "x" * 50_000)
    page = rebuilt(instance, 1)
    assert "Loaded model (built)" in page.shown, "what was trained, not what it was cast to in the end"
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "img", "iframe", "object", "form", "base"}
    assert not [key for _, keys in page.elements for key in keys if key.startswith("on")]
    assert page.shown.count("<script>document.title='owned'</script>") >= 6
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e\u2028]", page.shown)
    assert "U+0000" in page.shown
    assert "U+202E" in page.shown
    assert "x" * 50_000 in page.shown
    index = Page.of(instance.layout.index_path)
    assert "script" not in {tag for tag, _ in index.elements}


def test_the_page_says_all_that_is_known_of_a_job(instance: Instance) -> None:
    instance.drop("succeed", lora={"r": 4})
    assert instance.drain() == 0
    write_events(instance, 1)
    page = rebuilt(instance, 1)
    drawn = [keys["aria-label"] or "" for tag, keys in page.elements if tag == "svg" and "aria-label" in keys]
    titles = [label.partition(";")[0] for label in drawn]
    assert titles == [
        "Loss",
        "Learning rate",
        "Gradient norm",
        "Steps a minute, evaluations included",
        "Scores of the predictions",
        "Tokens of a row, as trained on",
    ]
    assert "training from 3.05 to 0.587" in drawn[0]
    for words in (
        "load_dtype",
        "an adapter was float32",
        "3.0 GiB",
        "Paris<|im_end|>",
        "truncated",
        "torch",
        "2.13",
        "PeftModel.from_pretrained",
        "differs",
        "948",
        '"base_model"',
    ):
        assert words in page.shown, words
    marked = [keys for tag, keys in page.elements if tag == "ins"]
    assert len(marked) >= 3  # Italy is not France


@pytest.mark.parametrize("training", [{"optim": "adafactor"}, {}])
def test_the_page_names_the_optimizer_that_the_plan_leaves_to_the_job(
    instance: Instance, training: dict[str, str]
) -> None:
    instance.drop("succeed", lora={"r": 4}, training=training)
    assert instance.drain() == 0
    shown = " ".join(rebuilt(instance, 1).shown.split())
    assert f"optim{training.get('optim', 'default')}" in shown.replace(" ", "")


def test_a_job_that_regressed_says_so_in_its_first_line(instance: Instance) -> None:
    instance.drop("regress")
    assert instance.drain() == 0
    job = instance.job("regress")
    assert job is not None
    assert job.outcome == "regressed"
    page = Page.of(instance.layout.job(job.id).report_path)
    outcome = next(keys for tag, keys in page.elements if tag == "p" and "outcome" in (keys.get("class") or ""))
    assert outcome["class"] == "outcome bad"
    assert page.shown.index("regressed: exact_match fell from 0.950 to 0.150") < page.shown.index("as of ")


def test_only_pictures_that_the_worker_made_are_shown(instance: Instance) -> None:
    instance.drop("succeed")
    assert instance.drain() == 0
    write_events(instance, 1, steps=10)
    job = instance.spool.job(1)
    assert job is not None
    events = EventWriter(instance.layout.job(1).attempt(job.attempt.number).events_path)
    bad = ['" onload="alert(1)', "A" * 100_000, 7, "https://example.org/a.png", "</div>"]
    events.emit("samples", rows=[{"sample_index": 0, "thumbnails": ["/9j/4AAQ", *bad]}, {"sample_index": []}, "x"])
    events.close()
    page = rebuilt(instance, 1)
    images = [keys for tag, keys in page.elements if tag == "img"]
    assert [each["src"] for each in images] == ["data:image/jpeg;base64,/9j/4AAQ"]


def test_the_index_is_for_the_administrators_where_jobs_are_not_shared(instance: Instance) -> None:
    instance.drop("succeed")
    assert instance.drain() == 0
    path = instance.layout.index_path
    assert path.stat().st_mode & 0o007 == 0
    acl = access.acl_of(path)
    assert acl is None or (acl.groups == {0: 4} and acl.group == 0)
    instance.configure("[policy]\nshare_results = true\n")
    instance.drop("again", name="succeed")
    assert instance.drain() == 0
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_page_is_printed_for_honed_web_unless_it_is_too_long(
    instance: Instance, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    instance.drop("succeed")
    assert instance.drain() == 0
    assert report.print_page(instance.layout, 1) == 0
    page = Page(capsysbinary.readouterr().out.decode())
    assert "as JSON" in page.shown
    assert not [keys for tag, keys in page.elements if "http-equiv" in keys], "the policy is a header there"
    assert report.print_page(instance.layout, 2) == 1
    monkeypatch.setattr(report, "MAX_PRINTED_BYTES", 1000)
    assert report.print_page(instance.layout, 1) == 1
    out, err = capsysbinary.readouterr()
    assert out == b""
    assert b"more than honed-web serves" in err


def test_a_link_in_the_place_of_the_spec_is_not_followed(instance: Instance) -> None:
    instance.drop("succeed")
    assert instance.drain() == 0
    secret = instance.root / "secret"
    secret.write_text("hunter2")
    spec_path = instance.layout.job(1).spec_path
    spec_path.unlink()
    spec_path.symlink_to(secret)
    assert report.write(instance.layout, [1], is_shared=True, admin_group="") == 0
    assert "hunter2" not in instance.layout.job(1).report_path.read_text()


def test_what_lies_in_the_place_of_a_page_costs_that_page_alone(
    instance: Instance, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("first", "second"):
        instance.drop(f"succeed.{name}")
    assert instance.drain() == 0
    pages = [instance.layout.job(number).report_path for number in (1, 2)]
    for page in pages:
        page.unlink()
    pages[0].mkdir()
    assert report.write(instance.layout, [1, 2], is_shared=True, admin_group="") == 0, "it would be tried for ever"
    assert "job 1: its report: " in capsys.readouterr().err
    assert "succeed.second" in Page.of(pages[1]).shown


def test_honectl_names_the_page(instance: Instance) -> None:
    instance.drop("succeed")
    assert instance.drain() == 0

    path = instance.layout.job(1).report_path
    assert instance.honectl("report", "1").stdout == f"{path}\n"
    assert json.loads(instance.honectl("report", "succeed", "--json").stdout) == {"report": str(path)}
    assert instance.honectl("report").stdout == f"{instance.layout.index_path}\n"
    assert json.loads(instance.honectl("show", "1", "--json").stdout)["artifacts"]["report"] == str(path)
    path.unlink()
    refused = instance.honectl("report", "1")
    assert refused.returncode != 0
    assert "has no report yet" in refused.stderr


def test_honectl_opens_a_page_in_the_browser_and_says_where_there_is_none(instance: Instance) -> None:
    instance.drop("succeed")
    assert instance.drain() == 0
    page, index, asked = instance.layout.job(1).report_path, instance.layout.index_path, instance.root / "asked"
    opens, fails = instance.root / "opens", instance.root / "fails"
    opens.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" >>'{asked}'\n")
    fails.write_text("#!/bin/sh\nexit 3\n")
    programs = instance.root / "programs"  # replaces PATH, so that no text browser of this machine is found
    programs.mkdir()
    bare = {key: value for key, value in os.environ.items() if key not in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY")}
    for path in (opens, fails):
        path.chmod(0o755)

    def honectl(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return instance.honectl("report", "--open", *arguments, env={**bare, "PATH": str(programs), **environment})

    done = [honectl("succeed", BROWSER=str(opens)), honectl(BROWSER=str(opens))]
    assert [(each.returncode, each.stdout) for each in done] == [(0, f"{page}\n"), (0, f"{index}\n")]
    assert asked.read_text().splitlines() == [page.as_uri(), index.as_uri()]
    told = [honectl("1"), honectl("1", BROWSER=str(fails)), honectl("1", BROWSER="/nonexistent/browser")]
    assert [(each.returncode, each.stdout) for each in told] == [(69, f"{page}\n")] * 3
    words = [
        "there is no browser on this machine",
        f"BROWSER could not open it: {fails}",
        "BROWSER could not open it: /nonexistent/browser",
    ]
    assert [each.stderr.splitlines()[0] for each in told] == [f"honectl: {what}" for what in words]
    assert all(f"copy {page} to a machine with a browser" in " ".join(each.stderr.split()) for each in told)
    assert json.loads(honectl("1", "--json").stdout)["error"]["message"] == "there is no browser on this machine"
    page.unlink()
    assert "has no report yet" in honectl("1", BROWSER=str(opens)).stderr
    assert len(asked.read_text().splitlines()) == 2, "a page that is not there is not opened"


@pytest.mark.skipif(browser.CHROMIUM is None, reason="no Chromium here")
def test_a_browser_shows_every_figure_and_complains_of_nothing(instance: Instance) -> None:
    instance.drop("succeed")
    assert instance.drain() == 0
    write_events(instance, 1, answer=HOSTILE + "x" * 50_000)
    events = EventWriter(instance.layout.job(1).attempt(1).events_path)
    events.emit("samples", rows=[{"sample_index": 0, "thumbnails": [picture()]}])
    events.close()
    rebuilt(instance, 1)
    with browser.opened(instance.root) as chromium:
        for width in (390, 1280):
            seen = chromium.look(instance.layout.job(1).report_path, width=width)
            assert seen["complaints"] == []
            assert seen["scripts"] == 0
            assert seen["title"].startswith("succeed: succeeded")
            assert "<script>document.title='owned'</script>" in seen["text"]
            assert seen["scrolls"] <= seen["width"] == width  # nothing hangs out at the side
            assert len(seen["figures"]) == 6
            for box in seen["figures"]:
                assert box["width"] >= 250
                assert box["height"] >= 140
                assert 0 <= box["left"] < box["right"] <= width
            assert seen["smallest"] >= 10  # pixels: one can read the axes
            assert seen["pictures"] == [[40, 30]]
        assert chromium.look(instance.layout.index_path, width=390)["complaints"] == []


def picture() -> str:
    from PIL import Image

    made = io.BytesIO()
    Image.new("RGB", (40, 30), (200, 30, 30)).save(made, "JPEG")
    return base64.b64encode(made.getvalue()).decode()
