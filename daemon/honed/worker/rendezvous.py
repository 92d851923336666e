"""The meeting of ranks on several machines: rank 0 listens on its node, and writes where to the shared file system.

    ranks/address.json   {"host", "port"}, by rank 0

torch's FileStore, by which the ranks of one machine meet, locks and reads its file all the time, which network file
systems are bad at. gloo and NCCL take the interface by which the other ranks reach this one: by themselves they would
ask for the address of the machine's name, which is 127.0.1.1 on many.
"""

from __future__ import annotations

import datetime
import errno
import fcntl
import json
import logging
import os
import socket
import struct
import time
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

#: The address of rank 0's node, in the environment of ranks on several machines.
VARIABLE = "HONED_MEET_AT"
#: Seconds between looks for rank 0's port.
LOOK_INTERVAL_SEC = 0.1
#: Seconds for the first connection to it.
CONNECT_SEC = 60.0
SIOCGIFADDR = 0x8915


def store(shared: Path, host: str, *, rank: int, world: int, timeout: datetime.timedelta) -> Any:
    """Return the store where all ranks meet. Raises RuntimeError if rank 0 cannot be reached."""
    from torch import distributed

    path = shared / "address.json"
    if rank == 0:
        try:
            listening = _listen(host)
        except OSError as error:
            raise RuntimeError(f"rank 0 cannot listen at {host}: {error.strerror or error}") from error
        made = distributed.TCPStore(
            host,
            listening.getsockname()[1],
            world,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        temporary = path.with_name(f".{path.name}")
        temporary.write_text(json.dumps({"host": host, "port": made.port}))
        temporary.replace(path)
        _log_address(host, made.port)
        _choose_interface(host)
        return made
    deadline = time.monotonic() + timeout.total_seconds()
    while not path.exists():
        if time.monotonic() >= deadline:
            raise RuntimeError(f"rank 0 did not publish its address within {timeout}")
        time.sleep(LOOK_INTERVAL_SEC)
    address = json.loads(path.read_bytes())
    _log_address(address["host"], address["port"])
    try:
        with socket.create_connection((address["host"], address["port"]), timeout=CONNECT_SEC) as link:
            _choose_interface(link.getsockname()[0])
    except OSError as error:
        raise RuntimeError(f"{address['host']}, port {address['port']}: {error.strerror or error}") from error
    return distributed.TCPStore(
        address["host"], address["port"], world, is_master=False, timeout=timeout, wait_for_workers=False
    )


def _listen(host: str) -> socket.socket:
    """Listen at an address of this node, and at no other: torch itself would listen at all, and asks for no name."""
    (family, kind, _, _, address), *_ = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    made = socket.socket(family, kind)
    try:
        made.bind(address)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            made.close()
            raise
        log.warning("rank 0 listens at all addresses: %s, by which others reach this node, is none of its own", host)
        made.bind(("", 0))
    made.listen()
    return made


def _log_address(host: str, port: int) -> None:
    """Have accelerate, which looks for them on the CPU, find what torchrun's variables would say."""
    os.environ.setdefault("MASTER_ADDR", host)
    os.environ.setdefault("MASTER_PORT", str(port))


def _choose_interface(address: str) -> None:
    """Have gloo and NCCL use the interface with an IPv4 address, unless the administrator has chosen another."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(reply[20:24]) == address:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
                os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
                return
