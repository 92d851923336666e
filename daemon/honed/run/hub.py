"""Access to the Hugging Face Hub for fetch.py: a revision's files, their metadata and content, and errors for people.

It uses huggingface_hub's sessions, URLs and errors, but not its downloads: version 1.33 downloads into a file with a
random name and deletes it when interrupted, so that nothing of a 5 GB shard would remain.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from honed import __version__
from honed.run.snapshot import DATASET, Missing
from honed.system.error import DatasetError, EnvironmentInvalidError, HonedError, ModelError

#: Seconds in which the hub must respond or send more data.
TIMEOUT_SEC = 30.0
#: The file of the hub's token that hints name, for the system's own instance.
TOKEN_PATH = Path("/etc/honed/hf-token")
#: Statuses of temporary errors.
TRANSIENT_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})


@dataclass(frozen=True)
class File:
    """A file of the repository."""

    name: str
    num_bytes: int
    blob: str  #: its name in blobs/: the SHA-256 of a large file, git's SHA-1 of a small one


@dataclass(frozen=True)
class Listing:
    """The files of a revision, by name."""

    commit: str
    files: Mapping[str, File]
    license: str | None = None
    is_gated: bool = False


class TransientError(Exception):
    """A temporary error; its message is for people."""


class Hub:
    """One revision of a repository. Each request raises TransientError or HonedError; an OSError is a local error."""

    def __init__(
        self, wanted: Missing, token: str | None, *, token_path: Path = TOKEN_PATH, timeout_sec: float = TIMEOUT_SEC
    ) -> None:
        self._wanted = wanted
        self._token_path = token_path
        self._timeout_sec = timeout_sec
        self._repo_id = wanted.repo_id
        self._revision = wanted.revision
        self._token: str | bool = token or False  # False: do not use the token of the environment

    @property
    def where(self) -> str:
        return f"{self._repo_id} at {self._revision}"

    @property
    def page(self) -> str:
        """The address of the repository's page, with its terms."""
        return f"{_endpoint()}/{'datasets/' if self._wanted.repo_type == DATASET else ''}{self._repo_id}"

    def fault(self, message: str, *, hint: str = "") -> HonedError:
        """Return an error about the repository itself: a DatasetError or ModelError that names its key."""
        kind = DatasetError if self._wanted.repo_type == DATASET else ModelError
        return kind(f"{self._wanted.key}: {message}", hint=hint)

    def list(self) -> Listing:
        """List the files of the revision. A mirror may omit sizes (-1) and hashes (""); `ask` then finds them."""
        import huggingface_hub  # noqa: PLC0415  (it belongs to the worker's packages)

        with self._translated():
            repository = huggingface_hub.HfApi(token=self._token).repo_info(
                self._repo_id,
                repo_type=self._wanted.repo_type,
                revision=self._revision,
                files_metadata=True,
                timeout=self._timeout_sec,
            )
        commit = str(repository.sha)
        if not re.fullmatch(r"[0-9a-f]{7,64}", commit):
            raise EnvironmentInvalidError(f"{self.where}: the hub returned {commit!r} as its commit")
        files = {}
        for sibling in repository.siblings or []:
            blob, size = (sibling.lfs.sha256, sibling.lfs.size) if sibling.lfs else (sibling.blob_id, sibling.size)
            files[sibling.rfilename] = File(sibling.rfilename, -1 if size is None else size, blob or "")
        return Listing(commit, files, _license(repository), bool(repository.gated))

    def ask(self, commit: str, name: str) -> File:
        """Return a file's size and hash from its own URL."""
        import huggingface_hub  # noqa: PLC0415

        with self._translated():
            metadata = huggingface_hub.get_hf_file_metadata(
                self._url(commit, name), token=self._token, timeout=self._timeout_sec, retry_on_errors=False
            )
        if metadata.etag is None or metadata.size is None:
            raise EnvironmentInvalidError(f"{self.where}: the hub returned no ETag or size of {name}")
        return File(name, metadata.size, metadata.etag)

    @contextlib.contextmanager
    def open(self, commit: str, name: str, begin: int) -> Iterator[Any]:
        """Stream the response for a file from byte `begin`: status 206, 200 if the hub sends the whole file, or 416 if
        nothing follows that byte. Errors while reading are translated, too.
        """
        import huggingface_hub  # noqa: PLC0415

        with self._translated():
            headers = huggingface_hub.utils.build_hf_headers(
                token=self._token, library_name="honed", library_version=__version__
            )
            headers |= {"Accept-Encoding": "identity"} | ({"Range": f"bytes={begin}-"} if begin else {})
            session = huggingface_hub.get_session()
            url = self._url(commit, name)
            with session.stream("GET", url, headers=headers, timeout=TIMEOUT_SEC, follow_redirects=True) as response:
                if response.status_code != 416:
                    huggingface_hub.utils.hf_raise_for_status(response)
                yield response

    def _url(self, commit: str, name: str) -> str:
        import huggingface_hub  # noqa: PLC0415

        return str(huggingface_hub.hf_hub_url(self._repo_id, name, repo_type=self._wanted.repo_type, revision=commit))

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Translate the library's exceptions into errors for people; temporary ones into TransientError."""
        import httpx  # noqa: PLC0415
        from huggingface_hub import errors  # noqa: PLC0415

        try:
            yield
        except errors.OfflineModeIsEnabled as error:
            raise EnvironmentInvalidError(
                f"{self._wanted.key}: {self.where} cannot be fetched: HF_HUB_OFFLINE is set",
                hint="unset it in honed's environment, or set policy.hub = false",
            ) from error
        except errors.HfHubHTTPError as error:
            raise self._from_status(error) from error
        except errors.HFValidationError as error:
            raise self.fault(f"{self.where}: {error}") from error
        except httpx.TransportError as error:
            raise TransientError(f"the hub cannot be reached ({type(error).__name__}: {error})") from error
        except OSError:  # some of them are ValueErrors as well
            raise
        except (httpx.HTTPError, ValueError) as error:
            raise EnvironmentInvalidError(
                f"{self.where}: {_endpoint()} does not respond like a hub ({type(error).__name__}: {error})",
                hint="check for a proxy in between, or a wrong HF_ENDPOINT",
            ) from error

    def _from_status(self, error: Any) -> Exception:
        from huggingface_hub import errors  # noqa: PLC0415

        where, status, what = f"{self._wanted.key}: {self.where}", error.response.status_code, self._wanted.what
        page = self.page
        files = f"{self._token_path}, or the credential hf-token"
        with_token = "with the configured token" if self._token else "without a token"
        match error:
            case errors.GatedRepoError():
                return EnvironmentInvalidError(
                    f"{where} is gated, and the hub denied access {with_token}",
                    hint=f"accept its terms at {page}, and put a token of that account in {files}",
                )
            case errors.RevisionNotFoundError():
                return self.fault(
                    f"{self.where}: no such revision", hint=f"use a branch, a tag or a commit of that {what}"
                )
            case errors.RepositoryNotFoundError() | errors.DisabledRepoError():
                return self.fault(
                    f"{self.where}: {_endpoint()} has no such {what}, or denies access {with_token}",
                    hint=f"check the name; a private {what} needs a token, in {files}",
                )
            case _ if status in {401, 403}:
                return EnvironmentInvalidError(
                    f"{where}: the hub denied access {with_token} ({status})", hint=f"put a valid token in {files}"
                )
            case errors.EntryNotFoundError():
                return self.fault(f"{self.where}: the hub lists files that it does not have: {error.response.url}")
            case _ if status in TRANSIENT_STATUSES:
                return TransientError(f"the hub responded with {status}")
            case _:
                return EnvironmentInvalidError(f"{where}: the hub responded with {status} to {error.response.url.path}")


def _license(repository: Any) -> str | None:
    given = [tag.removeprefix("license:") for tag in repository.tags or [] if tag.startswith("license:")]
    return given[0] if given and given[0].isprintable() else None


def _endpoint() -> str:
    from huggingface_hub import constants  # noqa: PLC0415

    return str(constants.ENDPOINT)
