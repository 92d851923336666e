"""`honectl web`: honed-web for the owner of an instance, in a browser of theirs."""

from __future__ import annotations

import argparse
import html
import logging
import os
import sys
import threading
import webbrowser
from typing import TYPE_CHECKING

from honed.page import session
from honed.page.session import Link
from honed.system import durable
from honed.system.error import EnvironmentInvalidError, NotPermittedError, UsageError
from honed.system.layout import Layout

if TYPE_CHECKING:
    from honed.cli.instance import Instance

_DISPLAYS = ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY")


def web(instance: Instance, options: argparse.Namespace) -> int:
    """Print a link to the pages of the instance, and serve them until interrupted, unless they are served already."""
    layout = instance.layout
    if layout.is_of_system:
        raise UsageError(
            "`honectl web` is for your per-user instance (--user) and for an instance in a directory (--root DIR)",
            hint="for the system's instance: systemctl enable --now honed-web.socket",
        )
    if (link := session.find(layout)) is not None:
        print(link, flush=True)
        if options.open:
            _open(layout, link)
        return 0
    if not layout.spool_dir.is_dir():
        raise EnvironmentInvalidError(f"{layout.spool_dir}: the spool does not exist", hint="start honed once")
    if layout.state_dir.stat().st_uid != os.getuid():
        raise NotPermittedError(f"{layout.root} is another user's instance", hint="run honectl as its owner")
    durable.make_dir(layout.runtime_dir)
    from honed.page import server
    from honed.system import log as logs

    def begun(link: Link | None) -> bool:
        is_ours = link is not None
        link = link or session.find(layout)  # another one was faster
        if link is None:
            raise EnvironmentInvalidError(
                f"{layout.runtime_dir} holds no file for the link", hint="see its permissions and its owner"
            )
        print(link, flush=True)
        if is_ours:
            print("Serving until you press Ctrl+C.", file=sys.stderr, flush=True)
            if options.open:  # in a process of its own: it may not return before it has the page
                threading.Thread(target=_open, args=(layout, link), daemon=True).start()
        elif options.open:
            _open(layout, link)
        return is_ours

    logs.set_up(verbose=False, identifier="honed-web")
    logging.getLogger("honed").setLevel(logging.WARNING)
    return server.serve(layout, address=f"127.0.0.1:{options.port}", begun=begun)


def _open(layout: Layout, link: Link) -> None:
    """Open the link in a browser, if there is one with a window; one of the terminal would wait there for keys."""
    if sys.platform != "darwin" and not any(os.environ.get(name) for name in _DISPLAYS):
        return
    path, target = session.opening_path(layout), html.escape(str(link))
    page = f'<!doctype html><title>honed</title><meta http-equiv="refresh" content="0;url={target}">'
    durable.write(path, page.encode(), mode=0o600)
    if not webbrowser.open(path.as_uri()):
        print("No browser could be opened: open the link yourself.", file=sys.stderr)
    else:  # a browser of a snap or a flatpak may be kept from the file, and nobody learns of it
        print(
            "If the browser says that it cannot read the page, open the link above by hand.",
            file=sys.stderr,
            flush=True,
        )
