"""The job files and settings that the pages of docs/ and the README show."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from honed.spec import config, document, jobfile, relative
from honed.system.layout import Layout

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), ROOT / "README.md"])
FENCE = re.compile(r"^```(yaml|toml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: What the parts of a job file that pages show are added to.
LEAST: dict[str, Any] = {"base_model": "/srv/models/m", "datasets": [{"path": "/srv/data/d.jsonl"}]}
#: Top-level keys by which a fence is another program's.
OTHERS = {"scrape_configs"}


def shown(language: str) -> list[Any]:
    return [
        pytest.param(fence[2], id=f"{page.name}:{page.read_text().count(chr(10), 0, fence.start()) + 1}")
        for page in PAGES
        for fence in FENCE.finditer(page.read_text())
        if fence[1] == language
    ]


@pytest.mark.parametrize("text", shown("yaml"))
def test_a_job_file_of_a_page_is_valid(text: str, tmp_path: Path) -> None:
    data = document.parse(text.encode(), ".yaml").data
    if OTHERS & set(data):
        return
    path = tmp_path / "job.yaml"
    path.write_text(text)
    if "base_model" in data:
        with relative.resolved(path) as found:
            data = document.parse(found.path.read_bytes(), ".yaml").data
    jobfile.validate(LEAST | data if "kind" not in data else data)


@pytest.mark.parametrize("text", shown("toml"))
def test_settings_of_a_page_are_valid(text: str, tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    layout.config_path.parent.mkdir(parents=True)
    layout.config_path.write_text(text)
    assert config.load(layout).outdated == ()
