"""The guides' readers: a directory as their machine, with the tiny models and the data that each page names.

`scripts/guides PAGE…` writes anew what the commands of these pages print.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from harness import RealInstance

import guide
import warm
from zoo import settings, shipped
from zoo.model import build_checkpoint, write_facts
from zoo.vision import build_vision_checkpoint

#: The reader's directory, the instance in it, and the paths of a page that lie below our directory.
HOME, INSTANCE = "home/anna", "home/anna/honed"
_OURS = re.compile(r"(?<![\w.])/(?=(?:srv|home)/)")


def vision(root: Path) -> None:
    """Write a model that sees, and pictures of one color."""
    from PIL import Image

    template = shipped.source("qwen2_5_vl")
    model = root / "srv/models/Qwen2.5-VL-3B-Instruct"
    build_vision_checkpoint(model, "qwen2_5_vl", chat_template=template)
    processor = model / "preprocessor_config.json"
    images = json.loads(processor.read_text())
    images["size"]["longest_edge"] = 12_845_056  # as in the real one
    processor.write_text(json.dumps(images))
    (root / "srv/data/tiles").mkdir(parents=True)
    for number, color in enumerate(("red", "green", "blue", "yellow")):
        Image.new("RGB", (448 + 28 * number, 448), color).save(root / f"srv/data/tiles/{color}.png")


def merge_chains(root: Path) -> None:
    """Write a base model, and rows for the stages of a chain."""
    build_checkpoint(root / "srv/models/Qwen3-1.7B", "qwen3")
    (root / "srv/data").mkdir()
    rows = write_facts(root / "srv/data/support.jsonl", 16).read_text().splitlines(keepends=True)
    (root / "srv/data/support-test.jsonl").write_text("".join(rows[12:]))
    (root / "srv/data/support.jsonl").write_text("".join(rows[:6]))
    (root / "srv/data/support-hard.jsonl").write_text("".join(rows[6:12]))


def chat_data(root: Path) -> None:
    """Write a base model with the template that Qwen3 comes with."""
    model = build_checkpoint(root / "srv/models/Qwen3-1.7B", "qwen3")
    (model / "chat_template.jinja").write_text(shipped.source("qwen3"), encoding="utf-8")


def tutorial(root: Path) -> None:
    """Write the quickstart's model and data."""
    runpy.run_path(str(guide.DOCS.parent / "scripts/demonstration.py"))["build"](root / HOME)


def other_tools(root: Path) -> None:
    """Write settings of other tools, with the data that they name."""
    settings.write(root / HOME, num_rows=1)


PAGES: dict[str, Callable[[Path], None]] = {
    "tutorial": tutorial,
    "guides/vision": vision,
    "guides/merge-chains": merge_chains,
    "guides/chat-data": chat_data,
    "guides/from-axolotl": other_tools,
    "guides/from-llama-factory": other_tools,
}


class Reader:
    """A reader at a terminal, whose instance runs in `root`."""

    def __init__(self, root: Path, *, preview: str) -> None:
        self.root = root
        self._preview = preview  #: the server of a preview's process: that of rows with media imports more
        self.real = RealInstance(root / INSTANCE)
        self.real.configure("[device]\ngpus = []\n")  # as the machine was that printed the pages

    def ours(self, text: str) -> str:
        """Return a text of the page with the paths that its files have here."""
        return _OURS.sub(f"{self.root}/", text)

    def write(self, file: guide.File) -> None:
        """Write a file of the page: below the reader's home, if its path is relative."""
        path = self.root / HOME / self.ours(file.name)
        path.write_text(self.ours(file.text), encoding="utf-8")

    def shell(self, _user: str | None, command: str) -> str:
        """Run a command in the reader's home; honectl with its imports done."""
        words = self.ours(command)
        environment = {**os.environ, "HONED_ROOT": str(self.real.root), "COLUMNS": "120", "LC_ALL": "C.UTF-8"}
        environment["HONED_TEST_PREVIEW"] = self._preview
        verb, _, rest = words.partition(" | ")
        with tempfile.TemporaryFile("w+") as output:
            if verb.startswith("honectl "):
                is_preview = verb.startswith("honectl preview ")
                program = ["-m", "honed.cli.honectl"]
                program = [str(Path(__file__).with_name("warmpreview.py"))] if is_preview else program
                line = [sys.executable, *program, *verb.split()[1:]]
                warm.Popen(line, stdout=output, stderr=subprocess.STDOUT, cwd=self.root / HOME, env=environment).wait()
                output.seek(0)
                words = rest or "cat"
            done = subprocess.run(
                ["bash", "-c", words],
                stdin=output,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=self.root / HOME,
                env=warm.without(environment),
                text=True,
                check=False,
            )
        return done.stdout.replace(str(self.root), "").replace(str(guide.DOCS.parent), "/home/anna/src/honed")


def follow(name: str, root: Path, act: Callable[..., None]) -> Reader:
    """Have a reader follow a page: `guide.check` or `guide.rewrite`."""
    if PAGES[name] is vision:
        warm.address("seeing")
    reader = Reader(root, preview="seeing" if PAGES[name] is vision else "worker")
    try:
        PAGES[name](root)
        if PAGES[name] in (tutorial, vision, merge_chains):
            reader.real.start()
        act(guide.DOCS / f"{name}.md", reader.write, reader.shell)
    finally:
        reader.real.end()
    return reader


def main() -> None:
    """Write the outputs of the pages that are named, or of all."""
    named = [word.removeprefix("docs/").removesuffix(".md") for word in sys.argv[1:]]
    for name in named or [*PAGES, "guides/shared-machine"]:
        if name in PAGES:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
                follow(name, Path(directory), guide.rewrite)
        else:
            importlib.import_module("machineguide").follow(guide.rewrite)


if __name__ == "__main__":
    main()
