"""The socket on which honed tells systemd of itself."""

from __future__ import annotations

import socket
import threading
from pathlib import Path


class Notified:
    """Reads all messages at once, as systemd does: of unread ones the kernel keeps a few, and honed would wait."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.messages: list[str] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        while message := self._socket.recv(1 << 20):
            self.messages.append(message.decode())

    def said(self) -> str:
        """Return all that was said so far, a line for each assignment."""
        return "\n".join(self.messages)

    def close(self) -> None:
        """Read what was said before this, and end."""
        if not self._reading.is_alive():
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"", str(self.path))
        self._reading.join()
        self._socket.close()
