"""The guides of docs/, followed as a reader does: each command prints what the page says."""

from __future__ import annotations

import functools
from pathlib import Path

import guides
import pytest

import guide

#: The page that is held against its jobs, too.
CHAIN = "guides/merge-chains"


@pytest.mark.parametrize("name", [name for name in guides.PAGES if name not in (CHAIN, "tutorial")])
def test_each_command_of_a_guide_prints_what_the_page_says(name: str, tmp_path: Path) -> None:
    reader = guides.follow(name, tmp_path, guide.check)
    assert reader.real.rejected() == {}
    assert "Traceback" not in reader.real.log


def test_the_tutorial_prints_what_it_says_before_it_trains(tmp_path: Path) -> None:
    guides.follow("tutorial", tmp_path, functools.partial(guide.check, until="honectl trial"))


@pytest.mark.exhaustive
def test_each_command_of_the_tutorial_prints_what_it_says(tmp_path: Path) -> None:
    guides.follow("tutorial", tmp_path, guide.check)


def test_the_guide_to_merge_chains_trains_merges_and_trains_on_the_merged_model(tmp_path: Path) -> None:
    real = guides.follow(CHAIN, tmp_path, guide.check).real
    merged, second = (real.show(name) for name in ("support-merged", "support-hard"))
    assert merged["plan"]["precision"]["load_dtype"] == "bfloat16"
    assert second["plan"]["base_model_path"] == merged["artifacts"]["output_dir"]
    assert set(second["plan"]["checkpoint"]["stored_dtypes"]) == {"bfloat16"}
    assert "Traceback" not in real.log


def test_no_page_has_a_session_that_nobody_runs() -> None:
    run = {f"{name}.md" for name in (*guides.PAGES, "guides/shared-machine")}
    pages = {
        str(page.relative_to(guide.DOCS))
        for page in guide.DOCS.rglob("*.md")
        if any(isinstance(step, guide.Exchange) for step in guide.steps(page))
    }
    assert pages == run
