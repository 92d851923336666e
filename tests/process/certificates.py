"""Certificates for servers of tests, made by openssl."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Authority:
    """A private certificate authority, as a lab has, and its certificate for `localhost`."""

    ca: Path
    certificate: Path
    key: Path

    @property
    def server_side(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key)
        return context


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl, to make certificates")
    place = tmp_path_factory.mktemp("certificates")

    def openssl(name: str, *arguments: str) -> None:
        new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
        files = ["-keyout", f"{name}.key", "-out", f"{name}.pem"]
        command = ["openssl", "req", "-x509", *new, *files, "-subj", f"/CN={name}", *arguments]
        subprocess.run(command, cwd=place, check=True, capture_output=True)

    openssl("ca", "-addext", "keyUsage=critical,keyCertSign")
    leaf = ["-addext", "subjectAltName=DNS:localhost", "-addext", "basicConstraints=critical,CA:FALSE"]
    openssl("server", *leaf, "-CA", "ca.pem", "-CAkey", "ca.key")
    return Authority(place / "ca.pem", place / "server.pem", place / "server.key")
