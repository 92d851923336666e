"""Pictures of honed-web's pages for docs/web/, each of the top of a page, in 256 colours to be small."""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]
sys.path[:0] = [str(CHECKOUT / "tests"), str(CHECKOUT / "tests/process")]
PAGES = {"list": "/", "job": "/jobs/4", "compare": "/compare?ids=1,3,4,5"}
#: Width and height of a picture.
SIZES = {390: 1100, 1280: 1000}


def main() -> int:
    """Write the pictures. Returns 1 without Chromium."""
    import browser
    import webscene
    from harness import Instance
    from PIL import Image
    from test_web import serving

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?", type=Path, default=CHECKOUT / "docs/web")
    directory: Path = parser.parse_args().directory
    if browser.CHROMIUM is None:
        print("screenshots: there is no Chromium on this machine; on Debian: apt-get install chromium", file=sys.stderr)
        return 1
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="honed-screenshots-") as root:
        instance = Instance(Path(root))
        try:
            webscene.furnish(instance)
            with serving(instance) as web, browser.opened(Path(root)) as chromium:
                for name, path in PAGES.items():
                    for width, height in SIZES.items():
                        for scheme in ("light", "dark"):
                            chromium.emulate(scheme=scheme)
                            chromium.visit(f"{web.address}{path}", width=width)
                            drawn = Path(root) / "drawn.png"
                            chromium.picture(drawn, scheme=scheme)
                            with Image.open(io.BytesIO(drawn.read_bytes())) as picture:
                                whole = picture.convert("RGB").crop((0, 0, picture.width, min(height, picture.height)))
                            few = whole.quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
                            few.save(directory / f"{name}-{width}-{scheme}.png", optimize=True)
        finally:
            instance.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
