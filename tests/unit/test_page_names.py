"""What the pages of docs/ name exists: links, tests, modules, scripts, units, journal fields and error codes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import honed
from honed.system.error import BY_CODE

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md"), ROOT / "tests/README.md"])
PACKAGE = Path(honed.__file__).parent
TESTS = {path.name: path for path in ROOT.glob("tests/**/*.py")}
UNITS = {path.name for path in ROOT.glob("units/**/*")}
#: Errors of requests: no worker of a job ends with them.
OF_REQUESTS = ("usage", "not_permitted", "degraded")


def named(pattern: str) -> list[tuple[str, re.Match[str]]]:
    """Return what matches within the code of a page, with the page's name."""
    spans = [(page.name, span) for page in PAGES for span in re.findall(r"`([^`\n]+)`", page.read_text())]
    return [(name, match) for name, span in spans for match in re.finditer(pattern, span)]


def anchors(page: Path) -> set[str]:
    """Return GitHub's anchors of a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_of_a_page_leads_to_a_file_and_its_heading() -> None:
    links = [(page, link) for page in PAGES for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())]
    assert len(links) > 100
    for page, link in links:
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if "://" not in link:
            assert target.exists(), (page.name, link)
            assert not anchor or anchor in anchors(target), (page.name, link)


def test_every_test_that_a_page_names_is_there() -> None:
    found = named(r"(?:(tests/[\w/]*)/)?(test_\w+\.py)(?:::(\w+))?")
    assert len(found) > 50
    for page, match in found:
        directory, file, function = match.groups()
        assert file in TESTS, (page, match[0])
        assert directory is None or TESTS[file].parent == ROOT / directory, (page, match[0])
        assert function is None or f"def {function}(" in TESTS[file].read_text(), (page, match[0])


def test_every_module_and_script_that_a_page_names_is_there() -> None:
    for page, match in named(r"(?<![\w./])(?!tests/|scripts/|daemon/honed/)(\w+/[\w/]*\w\.py)\b"):
        assert list(PACKAGE.glob(f"**/{match[1]}")), (page, match[0])
    for page, match in named(r"(?<![\w./])((?:scripts|units|docs|daemon/honed|tests)/[\w./@-]*\w)"):
        assert (ROOT / match[1]).exists(), (page, match[0])


def test_every_unit_that_a_page_names_is_there() -> None:
    found = named(r"\bhoned[\w-]*(?:@\w*)?\.(?:service|socket|slice)\b")
    assert len(found) > 20
    assert {(page, match[0]) for page, match in found if re.sub(r"@\w+", "@", match[0]) not in UNITS} == set()


def test_the_fields_of_the_journal_are_in_its_table() -> None:
    calls = [node for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    given = {
        f"HONED_{keyword.arg.upper()}"
        for call in calls
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "about"
        for keyword in call.keywords
        if keyword.arg not in {None, "message"}
    }
    table = (ROOT / "docs/monitoring.md").read_text().partition("## The journal")[2].partition("```")[0]
    assert given - set(re.findall(r"`(HONED_\w+)`", table)) == set()


def test_the_table_of_codes_has_each_with_its_exit_status_and_whether_it_is_retried() -> None:
    text = (ROOT / "docs/jobs.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\d+|\(a \w+\)) \| ([^|]*)\|", text, re.MULTILINE)
    told = {code: (status, bool(retried.strip())) for code, status, retried in rows}
    # A worker that is killed has no status of its own, and what was stopped on request is not retried but resumed.
    own = {"killed": ("(a signal)", True), "interrupted": ("75", False)}
    wanted = {code: (str(kind.exit_status), kind.is_transient) for code, kind in BY_CODE.items()}
    assert told == wanted | own | dict.fromkeys(OF_REQUESTS, ("(a request)", False))


def test_a_setting_whose_default_is_a_list_is_called_one() -> None:
    text = (ROOT / "docs/configuration.md").read_text()
    rows = re.findall(r"^- `(\w+)` \((.*?); default `\[", text, re.MULTILINE)
    assert len(rows) > 2
    assert [key for key, value in rows if "a list" not in value] == []
