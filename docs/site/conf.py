"""The documentation as a site: scripts/docs builds it into build/site.

Sphinx with MyST and furo, for what a site of an offline tool needs: pages are plain Markdown that GitHub shows as well;
the search is in the browser and works from files; nothing is loaded from elsewhere; a link without its target, or a
page in no menu, is a warning, and warnings are errors. Zensical, the successor of Material for MkDocs, was tried
(0.1.3): it finds broken links as well, but no page in no menu, loads its fonts from Google unless told otherwise, and
is young.
"""

from __future__ import annotations

from typing import Any

project, author = "honed", "the maintainers of honed"
project_copyright = author
extensions = ["myst_parser"]
master_doc = root_doc = "index"
source_suffix = {".md": "markdown"}
exclude_patterns = ["site", "man"]
html_theme, html_title = "furo", "honed"
html_theme_options = {"navigation_with_keys": True}
html_copy_source = html_show_sourcelink = False
# GitHub's anchors, to which the pages link.
myst_heading_anchors = 4
suppress_warnings = ["misc.highlighting_failure"]
#: The pages of each part of the site, in the order of its menu.
PARTS = {
    "Begin": ("tutorial", "install"),
    "Guides": (
        "guides/from-axolotl",
        "guides/from-llama-factory",
        "guides/vision",
        "guides/chat-data",
        "guides/merge-chains",
        "guides/shared-machine",
        "guides/upgrade",
        "web",
        "cluster",
    ),
    "Use": ("honectl", "administration", "monitoring"),
    "Reference": ("job-spec", "configuration", "jobs", "data", "files", "database", "gpu"),
    "Explanation": (
        "architecture",
        "precision",
        "masks",
        "reliability",
        "families",
        "security",
        "benchmarks",
        "comparison",
    ),
}


def add_menu(_app: Any, name: str, content: list[str]) -> None:
    """Append the menu to the first page: its Markdown has it as links, which GitHub shows."""
    if name == root_doc:
        for caption, pages in PARTS.items():
            lines = [f":caption: {caption}", ":hidden:", "", *pages]
            content[0] += "\n\n" + "\n".join(["```{toctree}", *lines, "```"])


def setup(app: Any) -> None:
    """Register `add_menu` with Sphinx."""
    app.connect("source-read", add_menu)
