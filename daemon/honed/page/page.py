"""HTML for people: one self-contained file, light and dark, for phones and for paper, without scripts.

Texts from a model or a data set are hostile: all of them go through `text`, and the page's own policy allows no script,
no form and no address but `data:` images, should anything get past it.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Iterable, Sequence
from typing import Any

#: Characters that are invisible, or that reverse the text around them: shown as their code points. The two joiners
#: (U+200C, U+200D) are excluded: Persian, Hindi and emoji need them.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u115f\u1160\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff"
    "\ufff9-\ufffb\ufffe\uffff\U000e0000-\U000e007f]"
)

#: Paper does not scroll, and browsers print no backgrounds: texts are printed in full, and highlighted passages are
#: underlined.
_STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1b1f24;--dim:#59636e;--line:#d1d9e0;--card:#f6f8fa;--a:#0550ae;
--b:#b3470c;--c:#1a7f37;--d:#8250df;--good:#1a7f37;--bad:#c5221f;--warn:#8a5a00;--mark:#d7ecff;--mask:#6b7280}
@media (prefers-color-scheme:dark){:root{--bg:#0f1318;--fg:#e6ebf1;--dim:#9aa6b2;--line:#343c46;--card:#181e25;
--a:#6cb0ff;--b:#ff9e64;--c:#5fd37a;--d:#c4a1ff;--good:#5fd37a;--bad:#ff8078;--warn:#e8b339;--mark:#1d4368;--mask:#8b95a1}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1200px;padding:16px;background:var(--bg);color:var(--fg);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;overflow-wrap:anywhere}
h1{font-size:1.45rem;margin:.2em 0}h2{font-size:1.1rem;margin:2em 0 .6em;border-bottom:1px solid var(--line)}
h3{font-size:1rem;margin:1.2em 0 .4em}p{margin:.4em 0}a{color:var(--a)}
.outcome{font-size:1.1rem;font-weight:600;padding:.5em .7em;border-left:5px solid var(--dim);background:var(--card)}
.outcome.good{border-color:var(--good)}.outcome.bad{border-color:var(--bad)}.outcome.warn{border-color:var(--warn)}
.good b,.good.word{color:var(--good)}.bad.word{color:var(--bad)}.warn.word{color:var(--warn)}
.dim{color:var(--dim)}.small{font-size:.87rem}
.facts{display:grid;grid-template-columns:repeat(auto-fill,minmax(150px,1fr));gap:8px;margin:1em 0;padding:0}
.facts div{background:var(--card);border:1px solid var(--line);border-radius:6px;padding:6px 10px}
.facts dt{font-size:.8rem;color:var(--dim)}.facts dd{margin:0;font-weight:600}
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(340px,100%),1fr));gap:16px}
figure{margin:0;min-width:0}figcaption{font-size:.87rem}svg{display:block;width:100%;height:auto}
svg text{font:11px system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;fill:var(--dim)}
.grid{stroke:var(--line);stroke-width:1}.axis{stroke:var(--dim);stroke-width:1}
.s0{stroke:var(--a)}.s1{stroke:var(--b);stroke-dasharray:6 3}.s2{stroke:var(--c);stroke-dasharray:2 3}
.s3{stroke:var(--d)}
path.series{fill:none;stroke-width:1.8;stroke-linejoin:round}circle.series{fill:var(--bg);stroke-width:1.6;
stroke-dasharray:none}
.bar{fill:var(--a)}.key{display:inline-block;width:22px;height:8px;vertical-align:middle;margin:0 5px 0 10px}
.key line{stroke-width:2.5}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:.92rem}
th,td{text-align:left;vertical-align:top;padding:4px 10px 4px 0;border-bottom:1px solid var(--line)}
th{font-weight:600;color:var(--dim)}td.number,th.number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.path{overflow-wrap:anywhere}.short,.word{white-space:nowrap}td,th{overflow-wrap:break-word}td:last-child{overflow-wrap:anywhere}
.sample td:first-child{width:1%;white-space:nowrap}
pre,.said{font:13px/1.45 ui-monospace,SFMono-Regular,Menlo,"DejaVu Sans Mono",monospace;white-space:pre-wrap;margin:0;
overflow-wrap:anywhere}
.said{max-height:15em;overflow-y:auto;unicode-bidi:isolate}
pre.block{background:var(--card);border:1px solid var(--line);border-radius:6px;padding:10px;max-height:40em;
overflow-y:auto}
pre.copy{user-select:all;-webkit-user-select:all}
.hidden{border:1px solid var(--line);border-radius:3px;color:var(--dim);font-size:.82em;padding:0 2px}
ins .hidden,.trained .hidden{color:inherit}
.masked{color:var(--mask)}.trained{background:var(--mark);text-decoration:underline;text-underline-offset:3px}
.sample{border:1px solid var(--line);border-radius:6px;padding:8px 12px;margin:12px 0}
.thumb{max-width:96px;max-height:96px;border:1px solid var(--line);border-radius:4px;margin:2px 6px 2px 0;
vertical-align:top}
del,ins{text-decoration:none;background:var(--mark)}
details>summary{cursor:pointer}
@media (max-width:600px){body{padding:10px}table.stack th{display:none}table.stack tr{display:block;padding:4px 0;
border-bottom:1px solid var(--line)}table.stack td{display:block;border:0;padding:1px 0;text-align:left}
table.stack td:first-child{width:auto;font-weight:600}}
@media print{:root{color-scheme:light;--bg:#fff;--fg:#000;--dim:#444;--line:#bbb;--card:#fff;--a:#0550ae;--b:#b3470c;
--c:#1a7f37;--d:#8250df;--good:#1a7f37;--bad:#c5221f;--warn:#8a5a00;--mark:#d7ecff;--mask:#555}
body{max-width:none;font-size:11px}.said,.wide,pre.block{max-height:none;overflow:visible}ins{text-decoration:underline}
figure,tr,.sample>p{break-inside:avoid}h2,h3{break-after:avoid}
.plots{grid-template-columns:repeat(auto-fill,minmax(min(300px,100%),1fr))}details::details-content{content-visibility:visible;height:auto}}
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; form-action 'none'; base-uri 'none'"


#: The style's hash, by which a server's policy allows it; the same on all pages.
STYLE_SOURCE = f"'sha256-{base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()}'"


def text(value: Any, *, limit: int | None = None, more: str = "") -> str:
    """Return a value as HTML that shows exactly its characters; invisible ones show as their code points.

    A text of more than `limit` characters is cut; its end says how many are left out, and `more` says where they are.
    """
    whole = "" if value is None else str(value)
    shown = whole if limit is None else whole[:limit]
    pieces, at = [], 0
    for match in _HIDDEN.finditer(shown := shown.encode(errors="replace").decode()):
        pieces += [html.escape(shown[at : match.start()]), f'<span class="hidden">U+{ord(match[0]):04X}</span>']
        at = match.end()
    pieces.append(html.escape(shown[at:]))
    if len(shown) < len(whole):
        rest = f"… and {len(whole) - len(shown):,} more characters{more}"
        pieces.append(f' <span class="dim">{html.escape(rest)}</span>')
    return "".join(pieces)


def document(title: str, body: Iterable[str], *, head: str = "", is_served: bool = False) -> bytes:
    """Return the whole file. `title` is text, `body` and `head` are HTML. A server sends the policy as a header."""
    policy = "" if is_served else f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    made = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{policy}'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="referrer" content="no-referrer"><link rel="icon" href="data:,">'
        f"<title>{text(title)}</title><style>{_STYLE}</style>{head}</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )
    return made.encode(errors="replace")


def section(title: str, parts: Sequence[str]) -> list[str]:
    """Return a heading and the parts below it; nothing if all parts are empty."""
    return [f"<h2>{text(title)}</h2>", *parts] if any(parts) else []


def table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: frozenset[int] = frozenset(), stack: bool = False
) -> str:
    """Return a table of HTML cells. `numbers`: columns that are right-aligned. `stack`: cells in one column on a
    phone."""
    kinds = [' class="number"' if place in numbers else "" for place in range(len(heads))]
    head = "".join(f"<th{kind}>{text(each)}</th>" for kind, each in zip(kinds, heads, strict=True))
    lines = [
        "<tr>" + "".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in rows
    ]
    if not lines:
        return ""
    shape = ' class="stack"' if stack else ""
    return (
        f'<div class="wide"><table{shape}><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
    )


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Return names and values in small boxes. Names are text, values are HTML; pairs without a value are left out."""
    boxes = "".join(f"<div><dt>{text(name)}</dt><dd>{value}</dd></div>" for name, value in pairs if value)
    return f'<dl class="facts">{boxes}</dl>' if boxes else ""


def said(value: Any, *, limit: int | None = None, more: str = "") -> str:
    """Return a text of the model's or the data's in its own box, which contains its length and its direction."""
    return f'<div class="said" dir="auto">{text(value, limit=limit, more=more)}</div>'
