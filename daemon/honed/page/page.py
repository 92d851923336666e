"""HTML for people: every page is one self-contained file, light and dark, for phones and for paper. A file has no
script; pages of honed-web have those next to the templates, and uPlot.

Texts from a model or a data set are hostile. The templates are files of this package, and every value in them goes
through `text`; the page's own policy allows no other script, no form and no address but `data:` images, should anything
get past it.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from honed import __version__
from honed.job.database import timestamp
from honed.job.progress import duration, figure, progress_text

#: Characters that are invisible, or that reverse the text around them: shown as their code points. The two joiners
#: (U+200C, U+200D) are excluded: Persian, Hindi and emoji need them.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u115f\u1160\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff"
    "\ufff9-\ufffb\ufffe\uffff\U000e0000-\U000e007f]"
)

#: The place of the nonce in a page that honed-web sends; no text contains it, since `<` is escaped there.
NONCE = b"<nonce>"


def plain(value: Any) -> str:
    """Return a value as text in which invisible characters are their code points: for attributes and titles."""
    return _HIDDEN.sub(_code_point, str(value))


def text(value: Any, limit: int | None = None, more: str = "") -> Markup:
    """Return a value as HTML that shows exactly its characters; invisible ones show as their code points.

    A text of more than `limit` characters is cut; its end says how many are left out, and `more` says where they are.
    """
    if isinstance(value, Markup):
        return value
    whole = "" if value is None else str(value)
    shown = whole[:limit].encode(errors="replace").decode()
    made = _HIDDEN.sub(lambda match: f'<span class="hidden">{_code_point(match)}</span>', escape(shown))
    if len(shown) < len(whole):
        made = f'{made} <span class="dim">… and {len(whole) - len(shown):,} more characters{escape(more)}</span>'
    return Markup(made)


def _code_point(match: re.Match[str]) -> str:
    return f"U+{ord(match[0]):04X}"


def document(template: str, **values: Any) -> bytes:
    """Return a page. A server sends the policy as a header (`is_served`), and puts a nonce in the place of NONCE."""
    made: str = _ENVIRONMENT.get_template(template).render(values)
    return made.encode(errors="replace")


def load() -> None:
    """Load all templates now, for a program that renders them after an upgrade, too: with those of its own version. A
    report's process needs a few and ends soon; it loads them as it goes."""
    for name in _ENVIRONMENT.list_templates(extensions=["html"]):
        _ENVIRONMENT.get_template(name)


def source(name: str) -> str:
    """Return a file from the templates' directory as it is."""
    content: str = _LOADER.get_source(_ENVIRONMENT, name)[0]
    return content


def vendored(name: str) -> str:
    """Return a file of a library that is part of this package."""
    return resources.files("honed.page").joinpath("vendor", name).read_text(encoding="utf-8")


_LOADER = PackageLoader("honed.page")
_ENVIRONMENT = Environment(
    loader=_LOADER,
    autoescape=True,
    finalize=text,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    auto_reload=False,
)
# Paper does not scroll, and browsers print no backgrounds: texts are printed in full, and highlighted passages are
# underlined.
_STYLE = source("style.css")
_SERVED_STYLE = "\n".join((vendored("uplot/uPlot.min.css"), _STYLE, source("served.css")))
#: The hash of the style of served pages, by which a server's policy allows it; the same on all of them.
SERVED_STYLE_SOURCE = f"'sha256-{base64.b64encode(hashlib.sha256(_SERVED_STYLE.encode()).digest()).decode()}'"
_ENVIRONMENT.filters |= {"plain": plain, "text": text}
_ENVIRONMENT.globals |= {
    "duration": duration,
    "figure": figure,
    "nonce": Markup(NONCE.decode()),
    "progress_text": progress_text,
    "repr": repr,
    "style": Markup(_STYLE),
    "served_style": Markup(_SERVED_STYLE),
    "timestamp": timestamp,
    "version": __version__,
}
