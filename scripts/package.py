"""Build honed_<version>_<arch>.deb: the daemon, honectl and honed-web with their small environment.

    /usr/lib/honed/dist/          the environment, and training/, the recipe of honed-setup; nothing runs from here
    /usr/lib/honed/<version>/     made from it by postinst, hard-linked: running jobs keep theirs through upgrades
    /usr/lib/honed/current        → the one of new processes

A <version> is the package's, with a hash of the environment's content. The package is for one minor version of Python,
the one of the Debian release that builds it: packages with compiled modules are in it. The same sources, packages and
$SOURCE_DATE_EPOCH (by default the changelog's date) give the same file.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from email.utils import parsedate_to_datetime
from importlib import metadata
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT / "scripts"))

from install import PROGRAMS, STAMP, Installer, Places, fail, run_shown, say  # noqa: E402

LIB = Path("/usr/lib/honed")
SCRIPTS = ("config", "preinst", "postinst", "prerm", "postrm")


class Package:
    """One build below `root`, a directory that becomes the package's content."""

    def __init__(self, root: Path, python: str | None) -> None:
        self._root = root
        self._project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
        self._changelog = (CHECKOUT / "scripts/debian/changelog").read_text()
        self.version = str(self._project["version"])
        if (found := re.match(r"honed \((.*?)\)", self._changelog)) is None or found[1] != self.version:
            fail(
                f"scripts/debian/changelog does not begin with version {self.version}, as pyproject.toml",
                "add an entry",
            )
        places = dataclasses.replace(Places.of_system(), versions_dir=LIB, bin_dir=Path("/usr/bin"))
        options = argparse.Namespace(user=False, destdir=str(root), dry_run=False, environment=None)
        options.python = python or Path("/usr/bin/python3").resolve()
        self._programs = (*PROGRAMS, "honed-setup")
        self._installer = Installer(options, places, programs=self._programs)

    def epoch(self) -> int:
        """Return the time of all files, in seconds: $SOURCE_DATE_EPOCH, or the date of the changelog's first entry."""
        date = re.search(r"^ -- .*>  (.*)$", self._changelog, re.MULTILINE)
        assert date is not None
        return int(os.environ.get("SOURCE_DATE_EPOCH") or parsedate_to_datetime(date[1]).timestamp())

    def fill(self) -> None:
        """Write all files of the package."""
        dist = LIB / "dist"
        packages = self._installer.empty_environment(dist, None)
        self._add_packages(packages)
        (packages / "honed-training.pth").write_text("import honed.system.training; honed.system.training.enter()\n")
        self._add_recipe(self._at(dist) / "training", packages)
        for path in [*self._at(dist).glob("bin/[Aa]ctivate*"), self._at(dist) / "lib64"]:
            path.unlink(missing_ok=True)
        shutil.rmtree(self._at(dist) / "include", ignore_errors=True)
        digest = _digest(self._at(dist))
        environment = LIB / f"{self.version}+{digest[:8]}"
        self._installer.point_scripts(dist, environment)
        (self._at(dist) / STAMP).write_text(digest + "\n")
        self._installer.install_files()
        self._installer.install_config()
        for name in self._programs:
            self._installer.link(Path("/usr/bin") / name, Path("../lib/honed/current/bin") / name)
        self._compress()
        self._add_control(packages.parent.name, environment.name)

    def _at(self, path: Path) -> Path:
        return self._root / path.relative_to("/")

    def _add_packages(self, packages: Path) -> None:
        """Install honed's own requirements, from the package index."""
        python = packages.parents[2] / "bin/python"
        with tempfile.TemporaryDirectory() as scratch:
            # Debian's Python has no pip of its own, but each of its environments may.
            subprocess.run([python.resolve(), "-I", "-m", "venv", scratch], check=True)
            command = [
                f"{scratch}/bin/pip",
                "install",
                "--disable-pip-version-check",
                "--no-compile",
                "--target",
                packages,
            ]
            command += ["--constraint", CHECKOUT / "constraints.txt", *self._project["dependencies"]]
            if status := run_shown(command, environment=os.environ):
                fail(f"pip ended with {status}: see the lines above", "PIP_INDEX_URL and PIP_FIND_LINKS name sources")
        # Programs of other packages; they name the scratch directory.
        shutil.rmtree(packages / "bin")
        for record in packages.glob("*.dist-info/RECORD"):
            lines = record.read_text().splitlines(keepends=True)
            record.write_text("".join(line for line in lines if not line.startswith("../../bin/")))
        for path in packages.rglob("*"):
            if path.suffix == ".so":
                path.chmod(0o644)
                subprocess.run(["strip", "--strip-unneeded", path], check=False)

    def _add_recipe(self, recipe: Path, packages: Path) -> None:
        """Write what honed-setup installs, and with what: scripts/setup, as everywhere."""
        (recipe / "scripts").mkdir(parents=True)
        for name in ("setup", "uv_settings.py"):
            shutil.copy(CHECKOUT / "scripts" / name, recipe / "scripts" / name)
        extras = self._project["optional-dependencies"]
        (recipe / "requirements.txt").write_text("".join(f"{line}\n" for line in [*extras["train"], *extras["chat"]]))
        # Both environments are on one path, so packages of both have one version.
        own = sorted(f"{each.name}=={each.version}\n" for each in metadata.distributions(path=[str(packages)]))
        names = {line.partition("==")[0].lower().replace("_", "-") for line in own}
        pinned = (CHECKOUT / "constraints.txt").read_text().splitlines(keepends=True)
        rest = [line for line in pinned if line.partition("==")[0].lower().replace("_", "-") not in names]
        # scripts/setup pins these itself: so that `pip download` of both files gets what it wants.
        setup = (CHECKOUT / "scripts/setup").read_text()
        stack = [
            f"{name.lower()}=={value}\n" for name, value in re.findall(r"^([A-Z]+)=([\d.]+)$", setup, re.MULTILINE)
        ]
        (recipe / "constraints.txt").write_text("".join([*rest, *own, *stack]))

    def _compress(self) -> None:
        for path in sorted(self._at(Path("/usr/share/man")).rglob("*.[1-8]")):
            _write_gzip(path.with_name(f"{path.name}.gz"), path.read_bytes())
            path.unlink()
        doc = self._at(Path("/usr/share/doc/honed"))
        _write_gzip(doc / "changelog.gz", self._changelog.encode())
        shutil.copy(CHECKOUT / "scripts/debian/copyright", doc / "copyright")
        overrides = self._at(Path("/usr/share/lintian/overrides/honed"))
        overrides.parent.mkdir(parents=True)
        shutil.copy(CHECKOUT / "scripts/debian/lintian-overrides", overrides)

    def _add_control(self, python: str, environment: str) -> None:
        control = self._root / "DEBIAN"
        files = [path for path in sorted(self._root.rglob("*")) if path.is_file() and not path.is_symlink()]
        values = {
            "@VERSION@": self.version,
            "@ARCH@": architecture(),
            "@SIZE@": str(sum(path.stat().st_size for path in files) // 1024),
            "@PYTHON@": python,
            "@MINOR@": python.removeprefix("python"),
            "@ENVIRONMENT@": environment,
        }
        control.mkdir()
        for name in ("control", "templates", *SCRIPTS):
            text = (CHECKOUT / "scripts/debian" / name).read_text()
            for key, value in values.items():
                text = text.replace(key, value)
            (control / name).write_text(text)
            (control / name).chmod(0o755 if name in SCRIPTS else 0o644)
        configuration = [path for path in files if path.is_relative_to(self._root / "etc")]
        (control / "conffiles").write_text("".join(f"/{path.relative_to(self._root)}\n" for path in configuration))
        sums = (
            f"{hashlib.md5(path.read_bytes()).hexdigest()}  {path.relative_to(self._root)}\n"
            for path in files
            if path not in configuration
        )
        (control / "md5sums").write_text("".join(sums))


def architecture() -> str:
    return subprocess.run(["dpkg", "--print-architecture"], capture_output=True, text=True, check=True).stdout.strip()


def _digest(directory: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()):
        # The root's own name is in the programs of the environment until they are pointed to their place.
        if path.parent.name != "bin" and path.name != "pyvenv.cfg":
            digest.update(f"{path.relative_to(directory)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _write_gzip(path: Path, content: bytes) -> None:
    path.write_bytes(gzip.compress(content, 9, mtime=0))


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/package", description="Build the Debian package of honed.")
    parser.add_argument("--output", type=Path, default=Path(), metavar="DIR", help="where to write it (default: here)")
    parser.add_argument("--python", metavar="PYTHON", help="the Python it is for (default: /usr/bin/python3.X)")
    options = parser.parse_args()
    if shutil.which("dpkg-deb") is None:
        fail("there is no dpkg-deb here", "Debian: apt-get install dpkg")
    os.umask(0o022)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "root"
        root.mkdir()
        root.chmod(0o755)
        package = Package(root, options.python)
        package.fill()
        options.output.mkdir(parents=True, exist_ok=True)
        target = options.output / f"honed_{package.version}_{architecture()}.deb"
        say(f"package: {target}")
        environment = {**os.environ, "SOURCE_DATE_EPOCH": str(package.epoch())}
        command = ["dpkg-deb", "--build", "--root-owner-group", root, target]
        if run_shown(command, environment=environment):
            fail("dpkg-deb failed: see the lines above", "free disk space, or choose another --output")


if __name__ == "__main__":
    main()
