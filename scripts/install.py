"""Install honed on a machine with systemd, upgrade it, or remove it again. Can be run again at any time.

    /opt/honed/<version>/     a Python environment, never changed once a worker may run from it
    /opt/honed/current        → the environment of new processes; /usr/local/bin/honed, honectl, honed-send and
                              honed-web go through it
    /opt/honed/files          the list of other installed files, one path per line, for the next install and --uninstall
    /usr/lib/systemd/system/  units; beside them sysusers.d, tmpfiles.d, the catalog, and below /usr/share the polkit
                              rule, man pages and completions
    /etc/honed/honed.toml     the configuration, every key commented out; never overwritten

`--user` does the same for one user, below their home, without root: no users, no polkit rule, jobs as children of
honed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT / "daemon"))

from honed.system.environment import copy_metrics, run_shown, running_from, say  # noqa: E402

#: The programs that people call.
PROGRAMS = ("honed", "honectl", "honed-send", "honed-web")
#: Hidden from honed's units by ProtectHome=.
HOMES = ("/home", "/root", "/run/user")
#: Left by honed-view@.
VIEW_LOCK = Path("/run/honed-view.lock")
#: A credential of honed-fetch@.service, whose name does not contain honed.
HUB_TOKEN = Path("/etc/credstore/hf-token")
#: The first systemd version with `Type=notify-reload`.
NOTIFY_RELOAD_SINCE = 253
#: Written last into an environment: a hash of its inputs. Without it the environment is incomplete.
STAMP = "honed-content"


def fail(message: str, hint: str) -> NoReturn:
    print(f"install: {message}\n  hint: {hint}", file=sys.stderr)
    sys.exit(1)


@dataclass(frozen=True)
class Places:
    """Install locations, as paths on the installed machine."""

    versions_dir: Path
    bin_dir: Path
    unit_dir: Path
    config_dir: Path
    man_dir: Path
    bash_dir: Path
    zsh_dir: Path
    fish_dir: Path
    doc_dir: Path

    @classmethod
    def of_system(cls) -> Places:
        share = Path("/usr/share")
        return cls(
            Path("/opt/honed"),
            Path("/usr/local/bin"),
            Path("/usr/lib/systemd/system"),
            Path("/etc/honed"),
            share / "man",
            share / "bash-completion/completions",
            share / "zsh/vendor-completions",
            share / "fish/vendor_completions.d",
            share / "doc/honed",
        )

    @classmethod
    def of_user(cls) -> Places:
        home = Path.home()
        share = Path(os.environ.get("XDG_DATA_HOME") or home / ".local/share")
        config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
        return cls(
            share / "honed/versions",
            home / ".local/bin",
            config / "systemd/user",
            config / "honed",
            share / "man",
            share / "bash-completion/completions",
            share / "zsh/site-functions",
            config / "fish/completions",
            share / "doc/honed",
        )


class Installer:
    """One run: prints each step; with `--dry-run` it only prints."""

    def __init__(
        self, options: argparse.Namespace, places: Places | None = None, *, programs: Sequence[str] = PROGRAMS
    ) -> None:
        self._options = options
        self._programs = programs
        self._places = places or (Places.of_user() if options.user else Places.of_system())
        self._destdir = Path(options.destdir or "/").absolute()
        self._is_live = not options.destdir  #: installs on this machine, not into a package
        self._files: list[Path] = []

    # -- what is done -------------------------------------------------------------------------------------------------

    def install(self) -> None:
        version_dir = self._environment()
        before = self._known_files()
        self.install_files()
        self.install_config()
        self.link(self._places.versions_dir / "current", Path(version_dir.name))
        for name in self._programs:
            self.link(self._places.bin_dir / name, self._places.versions_dir / "current/bin" / name)
            self._files.append(self._places.bin_dir / name)
        for path in sorted(before - set(self._files)):
            self._remove(path)
        self._write(self._places.versions_dir / "files", "".join(f"{path}\n" for path in sorted(self._files)))
        self._tell_systemd()
        self._remove_old_versions(keep=version_dir)
        self._say_next_steps()

    def uninstall(self) -> None:
        if self._is_live:
            # honed first, so that it does not react to its jobs ending; then each job writes its checkpoint.
            self._systemctl("disable", "--now", "honed.service", may_fail=True)
            self._systemctl("disable", "--now", "honed-web.socket", may_fail=True)
            self._systemctl("stop", "honed-web.service", may_fail=True)
            if not self._options.user:
                self._systemctl("disable", "--now", "honed-slurm.socket", may_fail=True)
                self._systemctl("stop", "honed-send.service", "honed-jobs.slice", may_fail=True)
        for path in sorted(self._known_files()):
            self._remove(path)
        if not self._options.user:
            self._remove(VIEW_LOCK)
        self._remove_tree(self._places.versions_dir)
        if self._options.user and not self._options.dry_run:
            with contextlib.suppress(OSError):
                self._places.versions_dir.parent.rmdir()
        if self._is_live:
            self._systemctl("daemon-reload", may_fail=True)
            if not self._options.user:
                self._run("journalctl", "--update-catalog", may_fail=True)
        if not self._options.purge:
            kept = ", ".join(str(path) for path in (*self._data(), *self._secrets()) if self._at(path).exists())
            self._say(f"kept: {kept or 'nothing was there'}; --purge removes that, too")
            return
        for path in self._data():
            self._remove_tree(path)
        for path in self._secrets():
            self._remove(path)
        if not self._options.user and self._at(HUB_TOKEN).exists():
            self._say(f"kept: {HUB_TOKEN}, which may be others', too")
        if self._is_live and not self._options.user:
            for user in ("honed", "honed-job"):
                self._run("userdel", user, may_fail=True)
            for group in ("honed-job", "honed", "honed-submit"):
                self._run("groupdel", group, may_fail=True)

    def _data(self) -> list[Path]:
        if self._options.user:
            home = Path.home()
            state = Path(os.environ.get("XDG_STATE_HOME") or home / ".local/state")
            cache = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
            return [self._places.config_dir, state / "honed", cache / "honed"]
        data = ("/etc/honed", "/var/spool/honed", "/var/lib/honed", "/var/cache/honed", "/var/cache/honed-job")
        return [*map(Path, data), *(Path(f"/etc/systemd/system/{path.name}.d") for path in _units())]

    def _secrets(self) -> list[Path]:
        """Return the administrator's credential files whose names belong to honed alone."""
        names = () if self._options.user else ("honed.metrics-token", "honed.wandb-key", "honed.web-token")
        return [HUB_TOKEN.with_name(name) for name in names]

    # -- the environment ----------------------------------------------------------------------------------------------

    def _environment(self) -> Path:
        """Build the environment of this version unless it exists. Returns its path on the installed machine."""
        content = self._content()
        name = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["version"]
        version_dir = self._places.versions_dir / name
        if self._stamp(version_dir) not in {None, content}:
            # The same version with other content: workers may run from the existing one.
            version_dir = version_dir.with_name(f"{name}+{content[:8]}")
        if self._stamp(version_dir) == content:
            self._say(f"{version_dir}: there already")
            return version_dir
        self._say(f"{version_dir}: a Python environment")
        if self._options.dry_run:
            return version_dir
        at = self._at(version_dir)
        if at.exists():
            self._remove_tree(version_dir)  # incomplete, so nothing runs from it
        if self._options.environment:
            self._borrow_environment(version_dir)
        else:
            self._build_environment(version_dir)
        self.point_scripts(version_dir)
        packages = next(at.glob("lib/python3.*/site-packages"))
        self._take_over_metrics(packages)
        # Tracebacks must name the files' final paths.
        lies_at = ["-s", at, "-p", version_dir]
        subprocess.run([at / "bin/python", "-I", "-m", "compileall", "-q", *lies_at, packages / "honed"], check=True)
        (at / STAMP).write_text(content + "\n")
        return version_dir

    def _content(self) -> str:
        """Return a hash of everything that determines an environment's content."""
        digest = hashlib.sha256()
        package = [path for path in CHECKOUT.glob("daemon/honed/**/*.*") if path.suffix != ".pyc"]
        paths = [*sorted(package), CHECKOUT / "pyproject.toml"]
        names = ("constraints.txt", "scripts/setup", "scripts/uv_settings.py")
        for path in [*paths, *map(CHECKOUT.joinpath, names)]:
            digest.update(f"{path.relative_to(CHECKOUT)}\0".encode() + path.read_bytes() + b"\0")
        digest.update(str(self._options.environment or "").encode())
        return digest.hexdigest()

    def _stamp(self, version_dir: Path) -> str | None:
        with contextlib.suppress(FileNotFoundError):
            return (self._at(version_dir) / STAMP).read_text().strip()
        return None

    def _borrow_environment(self, version_dir: Path) -> None:
        """Build an environment with its own copy of honed and the third-party packages of an existing one."""
        found = sorted(Path(self._options.environment).resolve().glob("lib/python3.*/site-packages"))
        if not found:
            fail(f"{self._options.environment}: no Python environment", "give the directory that `python -m venv` made")
        borrowed = found[0]
        minor = borrowed.parent.name
        packages = self.empty_environment(version_dir, minor)
        (packages / "honed-borrowed.pth").write_text(f"{borrowed}\n")

    def empty_environment(self, version_dir: Path, minor: str | None) -> Path:
        """Make an environment with a copy of honed and its programs alone. Returns its directory of packages."""
        at = self._at(version_dir)
        subprocess.run([self._python(minor), "-I", "-m", "venv", "--without-pip", at], check=True)
        packages = next(at.glob("lib/python3.*/site-packages"))
        shutil.copytree(CHECKOUT / "daemon/honed", packages / "honed", ignore=shutil.ignore_patterns("__pycache__"))
        scripts = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["scripts"]
        for name, target in scripts.items():
            module, function = target.split(":")
            script = at / "bin" / name
            script.write_text(
                f"#!{at}/bin/python\nimport sys\n\nfrom {module} import {function}\n\nsys.exit({function}())\n"
            )
            script.chmod(0o755)
        return packages

    def _build_environment(self, version_dir: Path) -> None:
        """Build a complete environment from the package index."""
        at = self._at(version_dir)
        at.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "PYTHON": str(self._python(None))}
        if status := run_shown([CHECKOUT / "scripts/setup", "--into", at], environment=environment):
            fail(
                f"{version_dir}: its packages could not be installed (exit status {status}); see the lines above",
                "fix that and run the install again, or take packages from an environment with --environment",
            )

    def _take_over_metrics(self, packages: Path) -> None:
        """Copy packages with the administrator's metrics from the environment in use: jobs in the queue name them."""
        for before in self._at(self._places.versions_dir / "current").resolve().glob("lib/python3.*/site-packages"):
            for line in copy_metrics(before, packages):
                self._say(line)

    def point_scripts(self, version_dir: Path, final: Path | None = None) -> None:
        """Make scripts name the environment's final path, and never `current`: a running worker keeps its files."""
        at = self._at(version_dir)
        for path in [at / "pyvenv.cfg", *(at / "bin").iterdir()]:
            if path.is_file() and not path.is_symlink():
                text = path.read_bytes()
                if str(at).encode() in text and b"\0" not in text:
                    path.write_bytes(text.replace(str(at).encode(), str(final or version_dir).encode()))

    def _python(self, minor: str | None) -> Path:
        """Return a Python that honed's users can run, outside of homes. `minor`: as in python3.11."""
        wanted = [minor] if minor else ["python3.13", "python3.12", "python3.11"]
        candidates = (
            [Path(self._options.python)]
            if self._options.python
            else [Path(directory) / name for name in wanted for directory in ("/usr/local/bin", "/usr/bin")]
        )
        if self._options.user:
            candidates += [Path(found) for name in wanted if (found := shutil.which(name))]
        for candidate in candidates:
            real = os.path.realpath(candidate)
            is_reachable = self._options.user or not real.startswith(tuple(f"{home}/" for home in HOMES))
            if Path(real).exists() and is_reachable:
                return candidate
        fail(
            f"no {' or '.join(wanted)} outside of people's homes, which honed's users cannot enter",
            f"Debian: apt-get install {wanted[-1]} {wanted[-1]}-venv; or name one with --python",
        )

    def _remove_old_versions(self, *, keep: Path) -> None:
        """Remove environments that nothing runs from; a job finishes in the one in which it started."""
        if not self._is_live:
            return
        for stamp in sorted(self._at(self._places.versions_dir).glob(f"*/{STAMP}")):
            old = stamp.parent
            if old.name == keep.name or old.is_symlink():
                continue
            if pids := list(running_from(old)):
                self._say(f"{old}: kept, process {', '.join(map(str, pids))} runs from it; the next install removes it")
            else:
                self._remove_tree(old)

    # -- files --------------------------------------------------------------------------------------------------------

    def install_files(self) -> None:
        for source, target in self._list():
            text = source.read_text(encoding="utf-8")
            if source.parent == CHECKOUT / "units":  # a package has its environments elsewhere
                text = text.replace("/opt/honed/", f"{self._places.versions_dir}/")
            self._files.append(target)
            self._write(target, text)

    def _list(self) -> Iterator[tuple[Path, Path]]:
        """Yield each file of the checkout that is installed unchanged, with its destination."""
        places, units = self._places, CHECKOUT / "units"
        if self._options.user:
            for path in sorted((units / "user").iterdir()):
                yield path, places.unit_dir / path.name
        else:
            for path in _units():
                yield path, places.unit_dir / path.name
            if self._systemd_version() >= NOTIFY_RELOAD_SINCE:
                yield units / "honed-notify-reload.conf", places.unit_dir / "honed.service.d/10-notify-reload.conf"
            lib = places.unit_dir.parent.parent
            yield units / "honed.sysusers.conf", lib / "sysusers.d/honed.conf"
            yield units / "honed.tmpfiles.conf", lib / "tmpfiles.d/honed.conf"
            yield units / "honed.catalog", lib / "systemd/catalog/honed.catalog"
            yield units / "50-honed.rules", Path("/usr/share/polkit-1/rules.d/50-honed.rules")
        for page in sorted((CHECKOUT / "docs/man").glob("*.[1-8]")):
            if page.suffix == ".5" or page.stem in self._programs:
                yield page, places.man_dir / f"man{page.suffix[1:]}" / page.name
        completions = CHECKOUT / "etc/completions"
        for name, target in (
            ("honectl.bash", places.bash_dir / "honectl"),
            ("honectl.zsh", places.zsh_dir / "_honectl"),
            ("honectl.fish", places.fish_dir / "honectl.fish"),
        ):
            yield completions / name, target
        for path in sorted((CHECKOUT / "docs").rglob("*.md")):
            yield path, places.doc_dir / path.relative_to(CHECKOUT / "docs")
        yield CHECKOUT / "etc/honed-job.schema.json", places.doc_dir / "honed-job.schema.json"
        for name in ("examples", "grafana", "prometheus"):
            for path in sorted((CHECKOUT / "etc" / name).iterdir()):
                yield path, places.doc_dir / name / path.name

    def install_config(self) -> None:
        target = self._places.config_dir / "honed.toml"
        if self._at(target).exists():
            self._say(f"{target}: kept as it is")
            return
        self._write(target, (CHECKOUT / "etc/honed.toml").read_text(encoding="utf-8"))
        self._make_dir(self._places.config_dir / "honed.toml.d")

    def _known_files(self) -> set[Path]:
        """Return the files that earlier installs put outside of the environments."""
        with contextlib.suppress(FileNotFoundError):
            return {Path(line) for line in self._at(self._places.versions_dir / "files").read_text().splitlines()}
        return set()

    # -- systemd ------------------------------------------------------------------------------------------------------

    def _tell_systemd(self) -> None:
        if not self._is_live:
            return
        if self._options.user:
            self._systemctl("daemon-reload", may_fail=True)
            self._systemctl("try-restart", "honed.service", "honed-web.service", may_fail=True)
            return
        lib = self._places.unit_dir.parent.parent
        self._run("systemd-sysusers", lib / "sysusers.d/honed.conf")
        self._run("systemd-tmpfiles", "--create", lib / "tmpfiles.d/honed.conf")
        self._run("journalctl", "--update-catalog")
        if not Path("/run/systemd/system").is_dir():
            self._say("systemd does not run here: nothing is reloaded")
            return
        self._systemctl("daemon-reload")
        self._check_user_database()
        if not self._options.no_restart:
            # Running jobs are units of their own: they continue, and the new honed adopts them.
            self._systemctl("try-restart", "honed.service", "honed-send.service", "honed-web.service")

    def _check_user_database(self) -> None:
        """Check that nsswitch.conf finds the users of jobs in /run/userdb."""
        lines = dict(line.split(":", 1) for line in _lines_of(Path("/etc/nsswitch.conf")) if ":" in line)
        missing = [name for name in ("passwd", "group") if "systemd" not in lines.get(name, "").split()]
        if missing:
            fail(
                f"/etc/nsswitch.conf has no `systemd` in: {', '.join(missing)}; jobs run as their submitters by it",
                "Debian, Ubuntu: apt-get install libnss-systemd; elsewhere add the word to the lines",
            )

    def _systemctl(self, *words: str, may_fail: bool = False) -> None:
        self._run("systemctl", *(["--user"] if self._options.user else []), *words, may_fail=may_fail)

    def _systemd_version(self) -> int:
        """Return systemd's version on this machine; 0 if unknown, as for a package, which must work everywhere."""
        if self._options.destdir:
            return 0
        with contextlib.suppress(OSError):
            told = subprocess.run(["systemctl", "--version"], capture_output=True, text=True, check=False).stdout
            if found := re.match(r"systemd (\d+)", told):
                return int(found[1])
        return 0

    def _say_next_steps(self) -> None:
        if not self._is_live or self._options.dry_run:
            return
        if self._options.user:
            self._say("done. Now: systemctl --user enable --now honed, and then honectl --user doctor")
            return
        for home in HOMES:
            if self._options.environment and str(Path(self._options.environment).resolve()).startswith(f"{home}/"):
                self._say(f"warning: {self._options.environment} lies below {home}, which honed's units do not see")
        self._say("done. Now: systemctl enable --now honed, and for each person who drops: adduser NAME honed-submit")

    # -- single steps -------------------------------------------------------------------------------------------------

    def _at(self, path: Path) -> Path:
        """Return the path to write now for a path of the installed machine."""
        return self._destdir / path.relative_to("/")

    def _say(self, text: str) -> None:
        say(f"install: {text}")

    def _run(self, *command: str | Path, may_fail: bool = False) -> None:
        self._say(" ".join(map(str, command)))
        if self._options.dry_run:
            return
        try:
            done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        except FileNotFoundError:
            if not may_fail:
                fail(f"{command[0]}: there is no such program here", "honed is installed on a machine with systemd")
            return
        if done.returncode and not may_fail:
            fail(f"{command[0]}: {done.stderr.strip() or done.returncode}", "mend that and run the install again")

    def _make_dir(self, path: Path) -> None:
        if not self._options.dry_run:
            self._at(path).mkdir(parents=True, exist_ok=True)

    def _write(self, path: Path, text: str) -> None:
        """Write a file atomically; does nothing if it already has this content."""
        at = self._at(path)
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if at.read_text(encoding="utf-8") == text:
                return
        self._say(str(path))
        if self._options.dry_run:
            return
        at.parent.mkdir(parents=True, exist_ok=True)
        temporary = at.with_name(f".{at.name}.new")
        temporary.write_text(text, encoding="utf-8")
        temporary.chmod(0o644)
        temporary.rename(at)

    def link(self, path: Path, target: Path) -> None:
        at = self._at(path)
        if at.is_symlink() and at.readlink() == target:
            return
        self._say(f"{path} → {target}")
        if self._options.dry_run:
            return
        at.parent.mkdir(parents=True, exist_ok=True)
        temporary = at.with_name(f".{at.name}.new")
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target)
        temporary.rename(at)

    def _remove(self, path: Path) -> None:
        at = self._at(path)
        if not at.is_symlink() and not at.exists():
            return
        self._say(f"remove {path}")
        if self._options.dry_run:
            return
        at.unlink()
        # One of our directories is removed with its last file; other directories have other packages' files.
        for directory in [parent for parent in path.parents if "honed" in str(parent)]:
            with contextlib.suppress(OSError):
                self._at(directory).rmdir()

    def _remove_tree(self, path: Path) -> None:
        if self._at(path).exists():
            self._say(f"remove {path}")
            if not self._options.dry_run:
                shutil.rmtree(self._at(path))


def _units() -> list[Path]:
    """Return the system's units in the checkout."""
    return [path for kind in ("service", "slice", "socket") for path in sorted((CHECKOUT / "units").glob(f"*.{kind}"))]


def _lines_of(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return [line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    return []


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/install", description="Install honed, upgrade it, or remove it. Says each thing that it does."
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    parser.add_argument(
        "--destdir",
        default=os.environ.get("DESTDIR", ""),
        metavar="DIR",
        help="put the files below DIR, to make a package; nothing is started ($DESTDIR)",
    )
    parser.add_argument(
        "--environment",
        metavar="VENV",
        help="take the third-party packages from this one; by default they are installed",
    )
    parser.add_argument("--python", metavar="PYTHON", help="the Python to use; by default /usr/bin/python3.X")
    parser.add_argument("--user", action="store_true", help="for yourself alone, below your home, without root")
    parser.add_argument("--no-restart", action="store_true", help="leave a running honed as it is")
    parser.add_argument("--uninstall", action="store_true", help="remove honed; jobs, results and configuration stay")
    parser.add_argument("--purge", action="store_true", help="with --uninstall: these, too, and the users")
    options = parser.parse_args()
    if options.purge and not options.uninstall:
        parser.error("--purge goes with --uninstall")
    if os.geteuid() != 0 and not options.user and not options.destdir and not options.dry_run:
        fail("only root installs honed for a machine", "sudo scripts/install; or --user, for yourself alone")
    os.umask(0o022)
    installer = Installer(options)
    try:
        (installer.uninstall if options.uninstall else installer.install)()
    except KeyboardInterrupt:
        fail("interrupted", "run it again to complete it")


if __name__ == "__main__":
    main()
