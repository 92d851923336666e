"""Facts about a model or data set of the hub before it is fetched: its size, its licence, and whether it is gated."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from honed.inputs import basemodel, hubdata
from honed.inputs.fetch import ENVIRONMENT, KINDS, PASSED_OVER, read_token
from honed.job.progress import gib
from honed.run import snapshot
from honed.run.hub import Hub, Listing, TransientError
from honed.run.snapshot import Missing
from honed.spec.data_form import form_of
from honed.spec.spec import JobSpec
from honed.system.error import HonedError
from honed.system.layout import Layout

#: Seconds in which the hub must answer: a person waits, and the fetch itself is more patient.
TIMEOUT_SEC = 10.0
_WEIGHTS = re.compile(r"model[\w.-]*\.safetensors(\.index\.json)?")


@dataclass(frozen=True)
class Offer:
    """What there is to fetch."""

    num_bytes: int
    license: str | None
    is_gated: bool
    page: str
    obstacle: str = ""  #: why a fetch would fail, and the remedy

    def __str__(self) -> str:
        terms = f"licence {self.license}" if self.license else "no licence named"
        gate = f"; gated: access was granted under the terms at {self.page}" if self.is_gated else ""
        gate = f"; {self.obstacle}" if self.obstacle else gate
        return f"about {gib(self.num_bytes)} to fetch, {terms}{gate}"


def missing(job_spec: JobSpec, cache_dir: Path) -> Iterator[Missing]:
    """Yield what a job names and the cache lacks, data sets first. The job's data sets were looked for before."""
    for dataset in (*job_spec.datasets, *job_spec.eval_datasets):
        if dataset.is_missing:
            yield Missing(dataset.path, dataset.revision or "main", snapshot.DATASET, dataset.name, dataset.split)
    revision = job_spec.revision or "main"
    if basemodel.is_hub_id(job_spec.base_model) and snapshot.find(cache_dir, job_spec.base_model, revision) is None:
        yield Missing(job_spec.base_model, revision)


def message(wanted: Missing, layout: Layout) -> str:
    """Return a sentence about a model or data set; also where the hub does not answer."""
    where = f"{wanted.repo_id} at {wanted.revision}"
    try:
        return f"{where}: {offered(wanted, layout)}"
    except (HonedError, TransientError) as error:
        why, hint = (error.message, error.hint) if isinstance(error, HonedError) else (str(error), "")
        return f"{where}: its size and licence are not known: {why}{f' ({hint})' if hint else ''}"


def offered(wanted: Missing, layout: Layout) -> Offer:
    """Ask the hub. Raises HonedError or TransientError."""
    os.environ |= ENVIRONMENT
    try:
        token = read_token(layout, os.environ)
    except HonedError:  # the system's own is closed to users
        token = None
    hub = Hub(wanted, token, token_path=layout.token_path, timeout_sec=TIMEOUT_SEC)
    listing = hub.list()
    names = [*_names(listing, wanted)]
    num_bytes = sum(max(listing.files[name].num_bytes, 0) for name in names)
    obstacle = ""
    if listing.is_gated and names:
        try:
            hub.ask(listing.commit, names[0])
        except HonedError as error:
            obstacle = f"{error.message.partition(' is ')[2]}: {error.hint}"
    return Offer(num_bytes, listing.license, listing.is_gated, hub.page, obstacle)


def _names(listing: Listing, wanted: Missing) -> Iterator[str]:
    """Yield the files that a fetch would take, as far as the list tells."""
    if wanted.repo_type == snapshot.DATASET:
        try:
            yield from hubdata.choose(listing.files, None, wanted)
        except HonedError:  # its card, which is not read here, may say which files are meant
            yield from (name for name in listing.files if form_of(Path(name)) is not None)
        return
    for name in listing.files:
        is_text = "/" not in name and Path(name).suffix in KINDS and not PASSED_OVER.fullmatch(name)
        if is_text or _WEIGHTS.fullmatch(name):
            yield name
