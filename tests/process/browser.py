"""A real browser: headless Chromium, controlled over a pipe in its own protocol, and its view of a page."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from waiting import wait_for

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
#: Seconds for one answer; a busy machine takes long to start Chromium.
TIMEOUT_SEC = 180.0
_SEEN = """
(() => ({title: document.title, width: innerWidth, scrolls: document.documentElement.scrollWidth,
  text: document.body.innerText, scripts: document.scripts.length,
  pictures: [...document.images].map(one => [one.naturalWidth, one.naturalHeight]),
  figures: [...document.querySelectorAll('figure > svg')].map(one => {
    const {left, right, width, height} = one.getBoundingClientRect(); return {left, right, width, height}}),
  smallest: Math.min(...[...document.querySelectorAll('figure text')].map(one =>
    parseFloat(getComputedStyle(one).fontSize) * one.ownerSVGElement.getBoundingClientRect().width / 360))
}))()
"""

#: Texts with a contrast to their background below 4.5 to 1, and drawn elements below 3 to 1 (WCAG 2.1, 1.4.3 and
#: 1.4.11); and the numbers of texts and of drawn elements.
_CONTRASTS = """
(() => {
  const channels = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => channels(color).slice(0, 3)
    .map(one => one / 255).map(one => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)
    .reduce((sum, one, at) => sum + one * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = (element) => {
    for (; element; element = element.parentElement) {
      const color = getComputedStyle(element).backgroundColor;
      if ((channels(color)[3] ?? 1) > 0) return color;
    }
    return 'rgb(255, 255, 255)';
  };
  const ratio = (color, element) => {
    const [low, high] = [light(color), light(behind(element))].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const weak = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let written = 0, drawn = 0;
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement, said = texts.currentNode.data.trim();
    if (!said || element.tagName === 'title' || !element.checkVisibility()) continue;
    written += 1;
    const style = getComputedStyle(element), found = ratio(element.closest('svg') ? style.fill : style.color, element);
    if (found < 4.5) weak.push([said.slice(0, 40), found]);
  }
  for (const element of document.querySelectorAll('.series, .axis, .bar, .key line')) {
    drawn += 1;
    const style = getComputedStyle(element), color = element.matches('.bar') ? style.fill : style.stroke;
    if (ratio(color, element) < 3) weak.push([element.outerHTML.slice(0, 60), ratio(color, element)]);
  }
  return {weak, written, drawn, page: getComputedStyle(document.body).backgroundColor};
})()
"""
#: Elements partly invisible on paper: in a box that scrolls, or beyond the right edge; rows without height; and words
#: that only the color of their background distinguishes from others.
_HIDDEN_IN_PRINT = """
(() => {
  const all = [...document.body.querySelectorAll('*')].filter(one => !one.closest('svg') && one.checkVisibility());
  const cut = all.filter(one => getComputedStyle(one).overflow !== 'visible'
      && (one.scrollWidth > one.clientWidth || one.scrollHeight > one.clientHeight));
  const beyond = all.filter(one => one.getBoundingClientRect().right > innerWidth + 0.5);
  const shut = [...document.querySelectorAll('tr')].filter(one => !one.getBoundingClientRect().height);
  const bare = [...document.querySelectorAll('ins, .trained')]
    .filter(one => getComputedStyle(one).textDecorationLine !== 'underline');
  return [...new Set([...cut, ...beyond, ...shut, ...bare])].map(one => one.outerHTML.slice(0, 80));
})()
"""


@dataclass
class Browser:
    """One Chromium with one page. `complaints`: what its console and its network said."""

    process: subprocess.Popen[bytes]
    read_fd: int
    write_fd: int
    session: str = ""
    number: int = 0
    buffer: bytes = b""
    complaints: list[str] = field(default_factory=list)
    expected: tuple[str, ...] = ("file:", "data:")  #: prefixes of the addresses that a page may load

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.number += 1
        request: dict[str, Any] = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            request["sessionId"] = self.session
        os.write(self.write_fd, json.dumps(request).encode() + b"\0")
        for message in self._messages():
            if message.get("id") == self.number:
                assert "error" not in message, message
                return dict(message["result"])
        raise AssertionError(f"{method}: no answer")

    def _messages(self) -> Iterator[dict[str, Any]]:
        deadline = time.monotonic() + TIMEOUT_SEC
        while True:
            line, end, rest = self.buffer.partition(b"\0")
            if not end:
                assert select.select([self.read_fd], [], [], max(deadline - time.monotonic(), 0))[0], "no answer"
                chunk = os.read(self.read_fd, 1 << 16)
                assert chunk, "Chromium is gone"
                self.buffer += chunk
                continue
            self.buffer = rest
            message = json.loads(line)
            self._note(message)
            yield message

    def _note(self, message: dict[str, Any]) -> None:
        match message.get("method"), message.get("params"):
            case "Log.entryAdded", {"entry": entry}:
                self.complaints.append(f"{entry['level']}: {entry['text']}")
            case "Network.loadingFailed", {"canceled": True}:  # the page itself was left, for example during a stream
                pass
            case "Runtime.consoleAPICalled" | "Runtime.exceptionThrown" | "Network.loadingFailed", said:
                self.complaints.append(str(said))
            case "Network.requestWillBeSent", {"request": {"url": url}} if not url.startswith(self.expected):
                self.complaints.append(f"asked for {url}")
            case _:
                pass

    def look(self, page: Path, *, width: int) -> dict[str, Any]:
        """Return what a screen of that width shows of the page in a file, with the browser's complaints."""
        return self.visit(page.as_uri(), width=width)

    def visit(self, address: str, *, width: int) -> dict[str, Any]:
        """Do the same as `look` for a page at an address."""
        self.complaints.clear()
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600)
        self.ask("Page.navigate", url=address)
        state = "document.readyState + location.href"
        wait_for(lambda: self.value(state) == f"complete{address}", what=address, account=lambda: self.value(state))
        return self.seen()

    def seen(self) -> dict[str, Any]:
        """Return what the page shows now, with the browser's complaints."""
        return {**self.value(_SEEN), "complaints": list(self.complaints)}

    def emulate(self, *, scheme: str = "light", media: str = "screen") -> None:
        """Set the color scheme and the medium (screen or print) for the page."""
        self.ask(
            "Emulation.setEmulatedMedia", media=media, features=[{"name": "prefers-color-scheme", "value": scheme}]
        )

    def contrasts(self) -> dict[str, Any]:
        """Return the texts that can hardly be read (`weak`), counts (`written`, `drawn`) and background (`page`)."""
        return dict(self.value(_CONTRASTS))

    def hidden_in_print(self) -> list[str]:
        """Return the beginnings of the elements that would look different on paper."""
        return list(self.value(_HIDDEN_IN_PRINT))

    def picture(self, path: Path, *, scheme: str = "light", media: str = "screen") -> None:
        """Return a picture of the whole page, for a person to look at."""
        self.emulate(scheme=scheme, media=media)
        made = self.ask("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        path.write_bytes(base64.b64decode(made["data"]))

    def value(self, expression: str) -> Any:
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")


@contextmanager
def opened(profile: Path) -> Iterator[Browser]:
    assert CHROMIUM is not None
    to_read, to_write = os.pipe(), os.pipe()

    def as_3_and_4() -> None:  # the descriptors that --remote-debugging-pipe uses
        ends = os.dup(to_write[0]), os.dup(to_read[1])
        os.dup2(ends[0], 3)
        os.dup2(ends[1], 4)

    command = [
        CHROMIUM,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--remote-debugging-pipe",
        f"--user-data-dir={profile / 'chromium'}",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "about:blank",
    ]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=as_3_and_4,  # noqa: PLW1509 - one thread
        close_fds=False,
        start_new_session=True,
    )
    os.close(to_write[0])
    os.close(to_read[1])
    browser = Browser(process, to_read[0], to_write[1])
    try:
        target = next(each for each in browser.ask("Target.getTargets")["targetInfos"] if each["type"] == "page")
        browser.session = browser.ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            browser.ask(f"{domain}.enable")
        yield browser
    finally:
        process.terminate()
        process.wait(TIMEOUT_SEC)
        os.close(to_read[0])
        os.close(to_write[1])
