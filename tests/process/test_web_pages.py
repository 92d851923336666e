"""honed-web's pages in a real browser: the list, a job, a comparison; by pointer, by keys, and for axe-core."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browser
import pytest
import webscene
from browser import Browser
from harness import Instance
from test_report import HOSTILE, Page
from test_web import Web, serving

from honed.job.job import State
from honed.page import comparison
from waiting import wait_for

CHECKOUT = Path(__file__).parents[2]
AXE = CHECKOUT / ".venv/npm/axe.min.js"
COMPARED = "/compare?ids=1,3,4,5"
PAGES = ("/", "/?state=failed&sort=-score", "/jobs/1", "/jobs/6", "/jobs/7", COMPARED, "/jobs/99")

_PLOT = "document.querySelector('.uplot')"
_LABELS = f"[...{_PLOT}.querySelectorAll('.u-label')].map(one => one.textContent)"
_VALUES = f"[...{_PLOT}.querySelectorAll('.u-value')].map(one => one.textContent)"
_BOX = f"""(({{left, top, width, height}}) => [left, top, width, height])(
  {_PLOT}.querySelector('.u-over').getBoundingClientRect())"""

_AXE = """axe.run({resultTypes: ['violations']}).then(found => JSON.stringify({num: found.passes.length,
  bad: found.violations.map(one => [one.id, one.nodes.map(node => node.html.slice(0, 120)).slice(0, 4)])}))"""

needs_chromium = pytest.mark.skipif(browser.CHROMIUM is None, reason="no Chromium here")
needs_axe = pytest.mark.skipif(
    not AXE.exists(), reason="no axe-core here: scripts/axe fetches it from the npm registry"
)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    instance = Instance(tmp_path_factory.mktemp("scene"))
    try:
        webscene.furnish(instance)
        yield instance
    finally:
        instance.end()


@pytest.fixture(scope="module")
def web(scene: Instance) -> Iterator[Web]:
    with serving(scene) as made:
        yield made


@pytest.fixture(scope="module")
def chromium(web: Web, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if browser.CHROMIUM is None:
        pytest.skip("no Chromium here")
    with browser.opened(tmp_path_factory.mktemp("browser")) as made:
        made.expected = (f"{web.address}/", "data:")
        yield made


def shown(chromium: Browser, web: Web, path: str, *, width: int = 1280) -> dict[str, Any]:
    """Open a page, and return what it shows without a complaint."""
    seen = chromium.visit(f"{web.address}{path}", width=width)
    assert seen["complaints"] == []
    return seen


def press(chromium: Browser, key: str, *, text: str = "") -> None:
    codes = {"Tab": 9, "Enter": 13, " ": 32, "ArrowLeft": 37, "ArrowRight": 39}
    for kind in ("keyDown", "keyUp"):
        more = {"text": text} if text and kind == "keyDown" else {}
        chromium.ask("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=codes.get(key, 0), **more)


def cells(chromium: Browser, column: int) -> list[str]:
    """Return the texts of a column of the list, the first is 1."""
    return list(
        chromium.value(
            f"[...document.querySelectorAll('.jobs tbody td:nth-child({column})')].map(one => one.innerText)"
        )
    )


# -- for everybody ----------------------------------------------------------------------------------------------------


@needs_axe
@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (390, "light"),
        (1280, "dark"),
        pytest.param(390, "dark", marks=pytest.mark.exhaustive),
        pytest.param(1280, "light", marks=pytest.mark.exhaustive),
    ],
)
def test_axe_finds_nothing_on_any_page(chromium: Browser, web: Web, width: int, scheme: str) -> None:
    chromium.emulate(scheme=scheme)
    for path in PAGES:
        seen = chromium.visit(f"{web.address}{path}", width=width)
        assert seen["scrolls"] <= seen["width"], path
        chromium.ask("Runtime.evaluate", expression=AXE.read_text())
        told = chromium.ask("Runtime.evaluate", expression=_AXE, awaitPromise=True, returnByValue=True)
        found = json.loads(told["result"]["value"])
        assert found["bad"] == [], path
        assert found["num"] >= 10, path
    chromium.emulate()


@needs_chromium
def test_the_keyboard_reaches_everything_and_the_skip_link_first(chromium: Browser, web: Web) -> None:
    shown(chromium, web, "/jobs/1")
    press(chromium, "Tab")
    assert chromium.value("document.activeElement.textContent") == "Skip to the content"
    press(chromium, "Enter", text="\r")
    wait_for(lambda: chromium.value("location.hash") == "#main", what="the jump")
    seen: list[str] = []
    while not any(each.startswith("uplot") for each in seen):
        press(chromium, "Tab")
        seen.append(chromium.value("document.activeElement.id || document.activeElement.className || ''"))
        assert len(seen) < 60, seen
    assert {"log", "smooth", "whole"} <= set(seen)
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft"):
        press(chromium, key)
    assert chromium.value("document.querySelector('#news').textContent").startswith("step 0: training")
    told = chromium.value("document.activeElement.getAttribute('aria-label')")
    assert told.startswith("Loss; training from")


# -- the list ---------------------------------------------------------------------------------------------------------


@needs_chromium
def test_the_list_shows_devices_the_queue_with_its_reasons_progress_and_scores(chromium: Browser, web: Web) -> None:
    text = shown(chromium, web, "/")["text"]
    for words in (
        "GPU 0",
        "97 %",
        "49.0 of 80.0 GiB",
        "64 °C",
        "drained: a new fan",
        "which it depends on, is running",
    ):
        assert words in text, words
    device = chromium.value("document.querySelector('.devices li').innerText")
    assert device.endswith("medical-summaries")
    rows = dict(zip([each.split()[0] for each in cells(chromium, 2)], cells(chromium, 4), strict=True))
    assert list(rows)[-6:] == ["6", "5", "4", "3", "2", "1"]
    assert "of 4000 steps" in rows["7"]
    assert "ETA" in rows["7"]
    assert rows["1"] == "300 steps"  # what is over has no ETA
    assert cells(chromium, 6)[-2:] == ["0.6\nexact match", "0.8\nexact match"]
    assert chromium.value("document.querySelectorAll('.jobs svg.spark').length") == 6


@needs_chromium
def test_the_list_is_sorted_and_filtered_and_stays_so_while_it_is_live(chromium: Browser, web: Web) -> None:
    shown(chromium, web, "/")
    chromium.value("document.querySelectorAll('.jobs thead a')[4].click()")
    address = "?sort=-scorecomplete"
    wait_for(lambda: chromium.value("location.search + document.readyState") == address, what="the page")
    assert cells(chromium, 6)[0] == "1\nexact match"
    assert chromium.value("document.querySelector('[aria-sort=descending]').innerText").startswith("score")
    chromium.value("window.isSame = true")
    chromium.value(
        "(() => { const q = document.querySelector('#q'); q.focus(); q.value = 'LR'; "
        "q.dispatchEvent(new Event('input')); })()"
    )
    wait_for(lambda: len(cells(chromium, 2)) == 2, what="the jobs of that name")
    assert [each.split()[0] for each in cells(chromium, 2)] == ["4", "3"]
    assert chromium.value("document.activeElement.id") == "q"
    assert chromium.value("location.search") == "?sort=-score&q=LR"
    chromium.value(
        "(() => { const q = document.querySelector('#q'); q.value = ''; q.dispatchEvent(new Event('input')); })()"
    )
    wait_for(lambda: len(cells(chromium, 2)) == 9, what="all jobs again")
    steps = next(each for each in cells(chromium, 4) if "ETA" in each)
    wait_for(lambda: steps not in cells(chromium, 4), what="a later step")
    assert chromium.value("isSame") is True
    assert chromium.seen()["complaints"] == []


@needs_chromium
def test_chosen_jobs_are_compared(chromium: Browser, web: Web) -> None:
    shown(chromium, web, "/")
    assert chromium.value("document.querySelector('#compare').disabled") is True
    for number in (5, 1, 4):
        chromium.value(f"document.querySelector('.choose input[value=\"{number}\"]').click()")
    assert chromium.value("document.querySelector('#compare').textContent") == "Compare 3 jobs"
    as_of = chromium.value("document.querySelector('[data-block=status]').textContent")
    wait_for(lambda: as_of != chromium.value("document.querySelector('[data-block=status]').textContent"), what="live")
    assert chromium.value("document.querySelectorAll('.choose input:checked').length") == 3
    chromium.value("document.querySelector('#compare').click()")
    address = f"complete{web.address}/compare?ids=5,1,4"
    wait_for(lambda: chromium.value("document.readyState + location.href") == address, what="the comparison")
    text = chromium.seen()["text"]
    assert "Lowest evaluation loss: C capitals-lr-5e-4" in " ".join(text.split())
    for words in ("training.learning_rate", "0.0005", "lora.r", "What is the capital of Peru?", "differs"):
        assert words in text, words
    assert not {"rouge", "parsable"} & set(re.findall(r"\w+", text.lower()))  # always 0, always 1: they say nothing
    assert chromium.value("document.querySelectorAll('.uplot').length") == 4
    assert chromium.value(_LABELS) == ["step", "A capitals-r64", "B capitals", "C capitals-lr-5e-4"]
    assert chromium.seen()["complaints"] == []


# -- a job ------------------------------------------------------------------------------------------------------------


@needs_chromium
def test_a_figure_can_be_read_smoothed_drawn_by_logarithm_and_zoomed(chromium: Browser, web: Web) -> None:
    shown(chromium, web, "/jobs/1")
    assert chromium.value("document.querySelectorAll('figure[data-plot].drawn').length") == 5
    assert chromium.value(_LABELS) == ["step", "training", "evaluation"]
    chromium.value(f"{_PLOT}.scrollIntoView()")
    left, top, wide, high = chromium.value(_BOX)

    def mouse(kind: str, share: float, **more: Any) -> None:
        chromium.ask("Input.dispatchMouseEvent", type=kind, x=left + share * wide, y=top + high / 2, **more)

    def step() -> int:
        return int(chromium.value(_VALUES)[0].replace("–", "-1"))

    mouse("mouseMoved", 0.5)
    wait_for(lambda: 147 <= step() <= 153, what="the step under the pointer")
    _, training, evaluation = chromium.value(_VALUES)
    assert 0.5 < float(training) < 2.5
    assert 1 < float(evaluation) < 3
    ticks = f"{_PLOT}.querySelector('canvas').toDataURL()"
    before = chromium.value(ticks)
    mouse("mouseMoved", 0.3)
    mouse("mousePressed", 0.3, button="left", clickCount=1)
    mouse("mouseMoved", 0.5, button="left")
    mouse("mouseReleased", 0.5, button="left", clickCount=1)
    mouse("mouseMoved", 0.5)
    wait_for(lambda: 110 <= step() <= 130, what="another step at the same place")
    assert chromium.value(ticks) != before
    chromium.value("document.querySelector('#whole').click()")
    mouse("mouseMoved", 0.52)
    mouse("mouseMoved", 0.5)
    wait_for(lambda: 147 <= step() <= 153, what="the whole range")
    chromium.value("document.querySelector('#log').click()")
    assert chromium.value("document.querySelector('#log').ariaPressed") == "true"
    assert chromium.value(ticks) != before
    chromium.value(
        "(one => { one.value = 0.9; one.dispatchEvent(new Event('input')); })(document.querySelector('#smooth'))"
    )
    assert chromium.value(_LABELS) == ["step", "training, raw", "training", "evaluation"]
    assert chromium.seen()["complaints"] == []


@needs_chromium
def test_success_first_says_how_to_load_and_failure_what_to_do_and_sections_fold(chromium: Browser, web: Web) -> None:
    seen = shown(chromium, web, "/jobs/1")
    titles = "[...document.querySelectorAll('details.part h2')].map(one => one.textContent)"
    found = chromium.value(titles)
    assert found[0] == "How to load and serve it"
    assert chromium.value("[...document.querySelectorAll('.contents a')].map(one => one.textContent)") == found
    assert "vllm serve" in seen["text"]
    assert not {"rouge", "parsable"} & set(re.findall(r"\w+", seen["text"].lower()))
    assert "--max-lora-rank 16 --lora-modules capitals=" in seen["text"]
    chromium.value("document.querySelector('.contents a[href=\"#versions\"]').click()")
    wait_for(lambda: chromium.value("document.querySelector('#part-versions').open"), what="the folded section")
    assert "2.13.0" in chromium.seen()["text"]
    shown(chromium, web, "/jobs/6")
    assert chromium.value(titles)[0] == "What to do"
    assert "honectl logs 6" in chromium.seen()["text"]


@needs_chromium
def test_what_is_folded_on_a_live_page_stays_so(chromium: Browser, web: Web) -> None:
    shown(chromium, web, "/jobs/7")
    chromium.value("document.querySelector('#part-precision').open = false")
    chromium.value("document.querySelector('#part-attempts').open = true")
    chromium.value("document.querySelector('#log').click()")
    first = chromium.value("document.querySelector('figure[data-plot]').dataset.plot")
    wait_for(lambda: chromium.value("document.querySelector('figure[data-plot]').dataset.plot") != first, what="steps")
    assert chromium.value("document.querySelector('#part-precision').open") is False
    assert chromium.value("document.querySelector('#part-attempts').open") is True
    assert chromium.value("document.querySelector('#log').ariaPressed") == "true"
    assert chromium.value("document.querySelectorAll('figure.drawn .uplot').length") == 2


# -- rights and limits ------------------------------------------------------------------------------------------------


def test_what_cannot_be_compared_is_said(web: Web) -> None:
    for query, status, words in (
        ("ids=1", 400, "2 to 16 jobs can be compared, and these are 1"),
        ("ids=1,1", 400, "these are 1"),
        ("", 400, "these are 0"),
        ("ids=" + ",".join(map(str, range(1, 18))), 400, "these are 17"),
        ("ids=1,x", 400, "not numbers of jobs"),
        ("ids=1,²", 400, "not numbers of jobs"),
        ("ids=" + "1" * 2000, 400, "not numbers of jobs"),
        ("ids=1,99", 404, "no job 99"),
        ("sweep=1", 400, "no sweep"),
    ):
        found, _, body = web.ask(f"/compare?{query}".replace("²", "%C2%B2"))
        assert (found, words in json.loads(body)["error"]["message"]) == (status, True), query
    for query in ("state=late", "sort=nothing", "before=x", "before=%C2%B2"):
        assert web.ask(f"/?{query}")[0] == 400, query
    assert web.ask("/nothing.js")[0] == 404
    assert web.ask("/uplot.js")[1]["content-type"].startswith("text/javascript")


def test_a_sweep_is_compared_and_of_a_large_one_the_best_jobs(instance: Instance) -> None:
    instance.configure(webscene.SHARED)
    instance.drop("sweep", name="succeed", sweep={"training.learning_rate": [number * 1e-5 for number in range(1, 18)]})
    assert instance.drain() == 0
    numbers = sorted(job.id for job in instance.spool.jobs(State.SUCCEEDED))
    assert len(numbers) == 17
    for place, number in enumerate(numbers):
        webscene.tell(instance, number, 1 - abs(place - 5) / 20, steps=6)
    instance.layout.database_path.unlink()
    assert instance.drain() == 0
    group = instance.spool.all_jobs()[numbers[0]].group
    assert group is not None
    with serving(instance) as web:
        assert ("a", f"/compare?sweep={group['id']}") in {
            (tag, keys.get("href")) for tag, keys in Page(web.ask("/")[2].decode()).elements
        }
        status, _, body = web.ask(f"/compare?sweep={group['id']}")
    text = " ".join(Page(body.decode()).shown.split())
    assert status == 200
    assert "16 jobs compared Lowest evaluation loss: F succeed-6 " in text
    assert "These are the 16 with the lowest evaluation loss of 17." in text
    assert "succeed-16" in text
    assert "succeed-17" not in text  # the worst
    assert "training.learning_rate" in text


def test_a_comparison_needs_the_right_to_each_job_and_shows_hostile_text_as_text(instance: Instance) -> None:
    for number in (1, 2):
        instance.drop(f"{number}", name=f"succeed.{HOSTILE[:30]}{number}")
        assert instance.drain() == 0
        webscene.tell(instance, number, 0.5, steps=6)
    instance.layout.database_path.unlink()
    assert instance.drain() == 0
    with serving(instance) as web:
        assert web.ask("/compare?ids=1,2")[0] == 403
    instance.configure(webscene.SHARED)
    with serving(instance) as web:
        status, headers, body = web.ask("/compare?ids=1,2")
        assert status == 200
        page = Page(body.decode())
        assert [keys["src"] for tag, keys in page.elements if tag == "script"] == ["/uplot.js", "/plots.js"]
        assert not {tag for tag, _ in page.elements} & {"img", "iframe", "object", "form", "base"}
        assert not [key for _, keys in page.elements for key in keys if key.startswith("on")]
        assert "unsafe" not in headers["content-security-policy"]
    assert comparison.main(["--root", str(instance.root), "1", "7"]) == 1
    assert instance.spool.state_dir(State.SUCCEEDED).is_dir()
