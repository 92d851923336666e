"""Pictures for the README: what honectl prints for the quickstart's job, and the top of that job's report."""

from __future__ import annotations

import argparse
import fcntl
import io
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

import demonstration
from benchmark_load import Honed
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from honed.system.layout import Layout

CHECKOUT = Path(__file__).parents[1]
sys.path[:0] = [str(CHECKOUT / "tests/process")]
COLUMNS = 100
#: The example whose answers are shown.
SAMPLE = "3"
#: Width and height of the picture of the report.
SIZE = 1100, 1330


def session(root: Path) -> list[tuple[str, str]]:
    """Run commands on a job that is trained meanwhile. Returns each with what it prints in a terminal."""
    pages = root / "share/man/man5"
    pages.mkdir(parents=True)
    shutil.copy(CHECKOUT / "docs/man/honed-job.5", pages)  # as where honed is installed
    text = (root / "capitals.yaml").read_text()
    (root / "typo.yaml").write_text(text.replace("learning_rate", "learning_rat").replace("r: 32", "rank: 32"))
    told: list[tuple[str, str]] = []

    def run(words: str) -> None:
        told.append((f"honectl {words}", printed(["honectl", *words.split()], root)))

    honed = Honed(root)
    honed.start()
    try:
        run("check typo.yaml")
        run("submit capitals.yaml")
        wait_for_end(root, "capitals")
        run("rerun capitals --set lora.r=2 --set lora.lora_alpha=4")
        wait_for_end(root, "capitals-2")
        run("list")
        run(f"predictions capitals --sample {SAMPLE}")
    finally:
        honed.stop()
    return told


def printed(command: list[str], root: Path) -> str:
    """Return what a program prints in a terminal of this width, without the lines that it removes again."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 50, COLUMNS, 0, 0))
    environment = {**os.environ, "HONED_ROOT": str(root), "TERM": "xterm-256color", "XDG_DATA_HOME": f"{root}/share"}
    process = subprocess.Popen(command, cwd=root, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    found = b""
    try:
        while read := os.read(ours, 65536):
            found += read
    except OSError:  # the program has ended
        pass
    process.wait()
    os.close(ours)
    lines = found.decode().replace("\r\n", "\n").split("\n")
    return "\n".join(line.rpartition("\r\x1b[K")[2] for line in lines).rstrip()


def wait_for_end(root: Path, name: str) -> None:
    command = ["honectl", "--root", str(root), "list", name, "--filter", "state=succeeded", "-o", "name"]
    while not subprocess.run(command, capture_output=True, check=True).stdout:
        time.sleep(0.5)


def drawn(told: list[tuple[str, str]]) -> str:
    """Return a session as SVG, without a font from elsewhere."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for number, (command, output) in enumerate(told):
        console.print(Text.assemble(("\n" if number else ""), ("$ ", "dim"), (command, "bold")))
        console.print(Text.from_ansi(output))
    form = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    form = form.replace("Fira Code", "ui-monospace, SFMono-Regular, Menlo, DejaVu Sans Mono")
    return console.export_svg(title="honectl", code_format=form, unique_id="honed")


def main() -> int:
    """Write the pictures. Returns 1 without Chromium, after that of the terminal."""
    import browser
    from PIL import Image

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?", type=Path, default=CHECKOUT / "docs/pictures")
    directory: Path = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="honed-") as name:
        root = Path(name)
        demonstration.build(root)
        (directory / "terminal.svg").write_text(drawn(session(root)), encoding="utf-8")
        if browser.CHROMIUM is None:
            print(
                "pictures: there is no Chromium on this machine; on Debian: apt-get install chromium", file=sys.stderr
            )
            return 1
        report = Layout(root).job(1).report_path
        with browser.opened(root) as chromium:
            chromium.emulate(scheme="light")
            chromium.look(report, width=SIZE[0])
            chromium.picture(root / "report.png")
        with Image.open(root / "report.png") as picture:
            whole = picture.convert("RGB").crop((0, 0, picture.width, min(SIZE[1], picture.height)))
        few = whole.quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        few.save(directory / "report.png", optimize=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
