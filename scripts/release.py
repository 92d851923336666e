"""Make a version of honed: the version's number everywhere, the CHANGELOG dated, one commit and one tag.

    scripts/release minor              0.1.0 -> 0.2.0; or patch, major, or the number itself
    scripts/release minor --dry-run    what would be done; writes nothing

The tree must be clean, and `scripts/check` must pass with the new number. Nothing is pushed. An error puts the files
back; a commit and tag that were made are undone with `git reset --hard HEAD~ && git tag -d vVERSION`.
"""

from __future__ import annotations

import argparse
import datetime
import email.utils
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
UNRELEASED = "## Unreleased"


class ReleaseError(Exception):
    """Raised with the reason why there is no release."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/release", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("version", metavar="VERSION", help="major, minor, patch, or a number such as 0.2.0")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done; write nothing")
    options = parser.parse_args()
    try:
        release(options.version, dry_run=options.dry_run)
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


def release(wanted: str, *, dry_run: bool) -> None:
    current = str(tomllib.loads(read("pyproject.toml"))["project"]["version"])
    version, today = next_version(current, wanted), datetime.datetime.now(datetime.UTC)
    require_clean(version)
    edits = edited(current, version, today)
    print(f"release: {current} -> {version}")
    for name in edits:
        print(f"release: {'would edit' if dry_run else 'edits'} {name}")
    steps = "regenerate the pages, run scripts/check, commit, tag"
    if dry_run:
        print(f"release: would {steps} v{version}; nothing was written")
        return
    try:
        for name, text in edits.items():
            (CHECKOUT / name).write_text(text, encoding="utf-8")
        run(str(CHECKOUT / ".venv/bin/python"), "scripts/reference.py", "--write", "docs")
        run(str(CHECKOUT / "scripts/check"))
    except (ReleaseError, OSError, KeyboardInterrupt):
        git("checkout", "--", ".")
        raise
    git("commit", "--quiet", "--all", "--message", f"release: {version}")
    git("tag", "--annotate", f"v{version}", "--message", f"honed {version}")
    print(f"release: v{version} is committed and tagged; push both, and build the package with scripts/package")


def next_version(current: str, wanted: str) -> str:
    numbers = [int(part) for part in current.split(".")]
    if wanted in (parts := ("major", "minor", "patch")):
        place = parts.index(wanted)
        return ".".join(map(str, [*numbers[:place], numbers[place] + 1, *[0] * (2 - place)]))
    if not re.fullmatch(r"\d+\.\d+\.\d+", wanted):
        raise ReleaseError(f"{wanted} is no version: major, minor, patch, or three numbers")
    if [int(part) for part in wanted.split(".")] <= numbers:
        raise ReleaseError(f"{wanted} is not after {current}")
    return wanted


def require_clean(version: str) -> None:
    if changed := git("status", "--porcelain"):
        raise ReleaseError(f"the tree is not clean; commit or stash first:\n{changed}")
    if git("tag", "--list", f"v{version}"):
        raise ReleaseError(f"the tag v{version} exists already")


def edited(current: str, version: str, today: datetime.datetime) -> dict[str, str]:
    """Return the new text of each file that has the version."""
    return {
        "pyproject.toml": replaced("pyproject.toml", f'\nversion = "{current}"\n', f'\nversion = "{version}"\n'),
        "daemon/honed/__init__.py": replaced(
            "daemon/honed/__init__.py", f'__version__ = "{current}"', f'__version__ = "{version}"'
        ),
        "CHANGELOG.md": changelog(version, today),
        "scripts/debian/changelog": debian_entry(version, today) + read("scripts/debian/changelog"),
    }


def changelog(version: str, today: datetime.datetime) -> str:
    text = read("CHANGELOG.md")
    before, found, rest = text.partition(f"{UNRELEASED}\n")
    news = rest.partition("\n## ")[0].strip()
    if not found or not news:
        raise ReleaseError(f"CHANGELOG.md has nothing below {UNRELEASED!r}: write what changed for users")
    return f"{before}{UNRELEASED}\n\n## {version} ({today:%Y-%m-%d})\n{rest}"


def debian_entry(version: str, today: datetime.datetime) -> str:
    return (
        f"honed ({version}) unstable; urgency=medium\n\n  * CHANGELOG.md lists the changes.\n\n"
        f" -- honed maintainers <maintainers@honed.example>  {email.utils.format_datetime(today)}\n\n"
    )


def replaced(name: str, old: str, new: str) -> str:
    text = read(name)
    if text.count(old) != 1:
        raise ReleaseError(f"{name}: expected {old.strip()!r} once")
    return text.replace(old, new)


def read(name: str) -> str:
    try:
        return (CHECKOUT / name).read_text(encoding="utf-8")
    except OSError as error:
        raise ReleaseError(f"{name}: {(error.strerror or '').lower()}") from error


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=CHECKOUT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"git {arguments[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


def run(*command: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT / "daemon")}
    if subprocess.run(command, cwd=CHECKOUT, env=environment, check=False).returncode:
        raise ReleaseError(f"{Path(command[0]).name} failed; the files are as they were")


if __name__ == "__main__":
    sys.exit(main())
