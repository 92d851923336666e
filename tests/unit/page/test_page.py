"""Templates: hostile text stays text, and the files that pages need are installed with the code."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from honed.page import page, plot
from honed.page.plot import Series

CHECKOUT = Path(__file__).parents[3]
HOSTILE = "<b onclick=x>\"' &lt; {{ 7 * 7 }} {% raw %}\x00\u202e\ud800"


def test_text_shows_each_character_and_makes_no_element_of_it() -> None:
    shown = "&lt;b onclick=x&gt;&#34;&#39; &amp;lt; {{ 7 * 7 }} {% raw %}"
    hidden = '<span class="hidden">U+0000</span><span class="hidden">U+202E</span>?'
    assert page.text(HOSTILE) == shown + hidden
    assert page.text(None) == ""
    assert page.text(0) == "0"
    assert page.text("abcdef", 4, " <there>") == 'abcd <span class="dim">… and 2 more characters &lt;there&gt;</span>'


def test_a_value_that_a_template_lacks_is_an_error_and_not_a_gap() -> None:
    with pytest.raises(UndefinedError):
        page.document("index.html", title="x")


def test_a_name_with_invisible_characters_stays_within_its_attribute_and_its_title() -> None:
    drawn = plot.lines(HOSTILE, [Series("loss", [(1, 1.0), (2, 0.5)])])
    label = drawn.partition('aria-label="')[2].partition('"')[0]
    assert label.endswith("{% raw %}U+0000U+202E\ud800; loss from 1 to 0.5")
    values = {"is_served": False, "live": "", "now": 0.0, "rows": (), "num_more": 0, "login": ""}
    made = page.document("index.html", title=HOSTILE, older_than=None, **values).decode()
    title = made.partition("<title>")[2].partition("</title>")[0]
    assert title.startswith("&lt;b onclick")
    assert title.endswith("U+0000U+202E?")


def files(directory: Path) -> set[str]:
    return {
        str(path.relative_to(directory))
        for path in directory.rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }


def test_a_wheel_has_every_file_of_the_package(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=CHECKOUT, check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        packed = {name.removeprefix("honed/") for name in wheel.namelist() if name.startswith("honed/")}
    assert packed == files(CHECKOUT / "daemon/honed")
    assert {"page/templates/report.html", "page/templates/style.css", "page/templates/live.js"} <= packed


def test_a_package_has_every_file_and_a_changed_template_is_a_new_environment(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    for name in ("daemon", "docs", "etc", "scripts", "units"):
        shutil.copytree(CHECKOUT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(CHECKOUT / name, checkout / name)
    words = ["--user", "--destdir", str(tmp_path / "package"), "--environment", sys.prefix, "--python", sys.executable]

    def install() -> Path:
        subprocess.run([checkout / "scripts/install", *words], check=True, capture_output=True)
        return next((tmp_path / "package").rglob("versions/current")).resolve()

    first = install()
    assert files(next(first.glob("lib/python3.*/site-packages/honed"))) == files(checkout / "daemon/honed")
    with (checkout / "daemon/honed/page/templates/style.css").open("a") as file:
        file.write("b{font-weight:bold}\n")
    assert install() != first
