"""The administrator's configuration: `honed.toml`, then `honed.toml.d/*.toml` by name; later files win.

Parsed once, at start and at reload, into a `Config`; an unknown key or a wrong type is a `SpecError` that names file
and key, and the configuration in force stays.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from honed.error import SpecError
from honed.layout import Layout


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class SpoolConfig(_Section):
    """[spool]"""

    settle_sec: Annotated[float, Field(ge=0, le=60)] = 2.0
    """Seconds for which a file that was not seen to be closed or renamed in must lie still before it is taken."""
    rescan_interval_sec: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """Seconds between scans of incoming/ that no event asked for: inotify can drop events."""
    max_spec_bytes: Annotated[int, Field(gt=0, le=16 * 1024 * 1024)] = 256 * 1024
    """Bytes; a larger job file is refused."""
    preflight_timeout_sec: Annotated[float, Field(gt=0)] = 60.0
    """Seconds that the checking of one job file may take, slow file systems included."""


class JobsConfig(_Section):
    """[jobs]"""

    stop_timeout_sec: Annotated[float, Field(gt=0)] = 300.0
    """Seconds that a worker which was asked to stop has for its checkpoint, before it is killed."""
    retry_delay_sec: Annotated[float, Field(ge=0)] = 30.0
    """Seconds before the second retry, doubled for each one after it; the first retry follows at once."""
    stall_timeout_sec: Annotated[float, Field(gt=0)] = 1800.0
    """Seconds without a word from a worker after which it hangs: its stacks go to its log, and it is ended."""
    poll_interval_sec: Annotated[float, Field(gt=0, le=10)] = 0.5
    """Seconds between looks at the events of running jobs."""
    max_running: Annotated[int, Field(ge=1)] | None = None
    """Jobs at a time; by default one per GPU, or one on a machine without."""


class DeviceConfig(_Section):
    """[device]"""

    gpus: list[int] | None = None
    """Indices of the GPUs that honed may use, as nvidia-smi numbers them; all by default, none with an empty list."""
    reserve_bytes: Annotated[int, Field(ge=0)] = 512 * 1024 * 1024
    """Bytes of a device's memory that are never planned with."""
    busy_bytes: Annotated[int, Field(ge=0)] = 1024 * 1024 * 1024
    """A GPU on which others hold more than this is not free, and a job waits for it."""


class PolicyConfig(_Section):
    """[policy]: what a job may ask for."""

    hub: bool = False
    """Whether a job may name a hub id that must be fetched: honed fetches it before it accepts the job. Where not, it
    is refused with the command that fetches it. One in the local cache may always be used."""
    trust_remote_code: bool = False
    """Whether a job may run code that comes with a model."""
    pickle: bool = False
    """Whether weights in pickle files (.bin, .pt) may be loaded: loading one runs what is in it."""


class HubConfig(_Section):
    """[hub]: how models are fetched, where policy.hub allows it."""

    fetch_timeout_sec: Annotated[float, Field(gt=0)] = 86400.0
    """Seconds that fetching one model may take, all interruptions and retries together; then its jobs are refused."""
    max_fetches: Annotated[int, Field(ge=1)] = 2
    """Models that are fetched at a time."""


class Config(_Section):
    """All of honed.toml."""

    spool: SpoolConfig = SpoolConfig()
    jobs: JobsConfig = JobsConfig()
    device: DeviceConfig = DeviceConfig()
    policy: PolicyConfig = PolicyConfig()
    hub: HubConfig = HubConfig()


def load(layout: Layout) -> Config:
    """The configuration in force; the defaults where there is no file. Raises SpecError, which names file and key."""
    merged: dict[str, Any] = {}
    for path in [layout.config_path, *sorted(layout.config_dropin_dir.glob("*.toml"))]:
        merged = _merge(merged, _read(path))
    return Config.model_validate(merged)


def _read(path: Path) -> dict[str, Any]:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise SpecError(f"{path}: {error}", hint="honed.toml is TOML; see docs/configuration.md") from error
    try:
        Config.model_validate(data)
    except ValidationError as error:
        lines = [f"{path}: {'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
        raise SpecError("; ".join(lines), hint="see docs/configuration.md for every key") from error
    return data


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both_tables = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both_tables else value
    return merged
