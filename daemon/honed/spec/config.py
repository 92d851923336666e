"""The administrator's configuration: `honed.toml`, then `honed.toml.d/*.toml` by name; later files win.

It is parsed into a `Config` at start and at reload. An unknown key or a wrong type raises a `SpecError` that names file
and key; on a reload the current configuration then stays.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from honed.spec import setting
from honed.spec.problem import MAX_PROBLEMS
from honed.system import quote
from honed.system.error import SpecError
from honed.system.layout import Layout


def _absolute(value: str) -> str:
    if not value.startswith("/"):
        raise ValueError("a directory is named from / on")
    return value


def _web_address(value: str) -> str:
    parts = urlsplit(value)
    is_plain = value.isascii() and value.isprintable() and " " not in value
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.port == 0 or not is_plain:
        raise ValueError("not an http or https address")
    if parts.username is not None or parts.password is not None:
        raise ValueError("a password does not belong into an address: name a token_file")
    return value


#: The name of a webhook in honed.toml.
WEBHOOK_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
#: One mailbox, without characters that could add a second recipient, a header, or an option of a mail program.
MAIL_ADDRESS = re.compile(
    r"[A-Za-z0-9_+][A-Za-z0-9._%+=~-]{0,63}@[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*"
)


def _mail_address(value: str) -> str:
    if not MAIL_ADDRESS.fullmatch(value):
        raise ValueError("not a mail address")
    return value


def _webhook_name(value: str) -> str:
    if not WEBHOOK_NAME.fullmatch(value):
        raise ValueError("a webhook's name is a word: letters, digits, - and _")
    return value


def _webhook_or_name(value: str) -> str:
    return value if WEBHOOK_NAME.fullmatch(value) else _web_address(value)


#: An absolute path of a directory.
Directory = Annotated[str, AfterValidator(_absolute)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


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
    """Seconds without a sign of life from a worker after which it hangs: its stacks go to its log, and it is ended.
    Once a job's own steps are known it is less: twenty times the longest of its last pauses."""
    min_stall_timeout_sec: Annotated[float, Field(ge=0)] = 300.0
    """Seconds that a worker may be silent however quick its steps were, as long as that is below stall_timeout_sec."""
    time_limit_grace_sec: Annotated[float, Field(ge=0)] = 300.0
    """Seconds beyond a job's time_limit_sec, all attempts together, after which honed has its worker stopped where that
    has not ended by itself: it does at the end of a step, and one that hangs comes to none."""
    poll_interval_sec: Annotated[float, Field(gt=0, le=10)] = 0.5
    """Seconds between looks at the events of running jobs."""
    max_running: Annotated[int, Field(ge=1)] | None = None
    """Jobs at a time in all; by default as many as there are devices: one on each GPU, and one on the processor, for
    merges and jobs without a GPU."""
    runner: Literal["auto", "process", "systemd"] = "auto"
    """How workers are started: as units honed-job@ID.service, or as processes of honed's own. By default as units where
    that works (the instance at /, started by systemd, with the units and the polkit rule installed); the log says which
    and why. Read at start."""
    on_stop: Literal["leave", "checkpoint"] = "leave"
    """What happens to running jobs when honed itself is stopped or restarted: left to go on, for the next honed to take
    over, or asked for a checkpoint and queued. Only units can be left; a shutdown of the machine always checkpoints."""


class DeviceConfig(_Section):
    """[device]"""

    gpus: list[int] | None = None
    """Indices of the GPUs that honed may use, as nvidia-smi numbers them; all by default, none with an empty list."""
    reserve_bytes: Annotated[int, Field(ge=0)] = 512 * 1024 * 1024
    """Bytes of a device's memory that are never planned with."""
    busy_bytes: Annotated[int, Field(ge=0)] = 1024 * 1024 * 1024
    """A GPU on which others hold more than this is not free, and a job waits for it."""


class PolicyConfig(_Section):
    """[policy]: what jobs may request."""

    hub: bool = False
    """Whether a job may name a hub id, of a model or a data set, that must be fetched: honed fetches it before it
    accepts the job. Where not, it is refused with the command that fetches it. One in the local cache may always be
    used."""
    arrivals: Literal["spool", "socket"] = "spool"
    """How job files come in. `spool`: by a file in incoming/, whose owner is who submits it; `honectl submit` drops
    one. `socket`: by `honectl submit` alone, over the control socket, where the kernel says who submits; a file in
    incoming/ is refused. It cannot be known where that lay before: a file in a directory that others can write can be
    moved to incoming/ by them, and stays its owner's."""
    trust_remote_code: bool = False
    """Whether a job may run code that comes with a model."""
    pickle: bool = False
    """Whether weights in pickle files (.bin, .pt) may be loaded: loading one runs what is in it."""
    allowed_paths: list[Directory] | None = None
    """Directories below which a job may read models and data and write its output; symbolic links are followed first.
    By default it reads all that its submitter may, and writes into its own directory alone. Its own directory, the
    model cache and what `submit --stage` copied are always allowed. Nobody but root may write the directories above
    one, or else `honectl sandbox` refuses it: whoever may can put a link to any other in its place."""
    admin_group: str = "root"
    """Members of this group may cancel, hold, release and requeue every job, and read its results, as root may."""
    share_results: bool = False
    """Whether everybody may read every job: its name, spec, metrics and predictions. By default the one who dropped it
    alone may, besides root and the administrators' group; of the others' jobs the queue, and the status line of
    `systemctl status honed`, show number and state."""


class ReportingConfig(_Section):
    """[reporting]: an HTTP endpoint that receives every metric and every prediction."""

    metrics_api_url: Annotated[str, AfterValidator(_web_address)] | None = None
    """Where metrics and predictions are sent, as JSON by POST; nowhere by default. $METRICS_API_URL goes before it."""
    token_file: Directory | None = None
    """A file that holds the bearer token for it, and that honed's user can read. The unit's own credential goes before
    it, /etc/credstore/honed.metrics-token. Without either, none is sent."""
    timeout_sec: Annotated[float, Field(gt=0, le=120)] = 30.0
    """Seconds that the other side may take for one answer."""
    retry_delay_sec: Annotated[float, Field(gt=0)] = 1.0
    """Seconds before what could not be sent is tried again, doubled each time, with some chance in it."""
    max_retry_delay_sec: Annotated[float, Field(gt=0)] = 300.0
    """Seconds between two tries, at most. There is no last one."""
    flush_sec: Annotated[float, Field(ge=0)] = 30.0
    """Seconds that `honed --drain` leaves at its end for the delivery of what still waits."""
    max_outbox_bytes: Annotated[int, Field(gt=0)] = 256 * 1024 * 1024
    """Bytes that may wait for delivery. Rows for which there is no room are counted and dropped, and the log says so;
    in honed.db they are in any case."""
    sync_wandb: bool = False
    """Whether the runs of jobs with `report_to: [wandb]`, which wandb writes without network, are synchronised once a
    job has ended. Everybody who may drop jobs then sends to this account. Where not, they stay in jobs/ID/wandb."""
    wandb_key_file: Directory | None = None
    """A file that holds the key of the account at wandb, and that honed's user can read. The unit's own credential goes
    before it, /etc/credstore/honed.wandb-key."""
    wandb_base_url: Annotated[str, AfterValidator(_web_address)] | None = None
    """A wandb server of one's own; by default wandb's."""

    def address(self, environment: Mapping[str, str] = os.environ) -> str | None:
        """Return the URL that rows are sent to, or None. Raises SpecError if METRICS_API_URL is invalid."""
        if not (url := environment.get("METRICS_API_URL")):
            return self.metrics_api_url
        try:
            return _web_address(url)
        except ValueError as error:
            raise SpecError(f"METRICS_API_URL: {error}", hint="an http or https address") from error


class HubConfig(_Section):
    """[hub]: fetching of models and data sets, if policy.hub allows it."""

    fetch_timeout_sec: Annotated[float, Field(gt=0)] = 86400.0
    """Seconds that fetching one model or data set may take, all interruptions and retries together; then its jobs are
    refused."""
    max_fetches: Annotated[int, Field(ge=1)] = 2
    """Models and data sets that are fetched at a time."""


class RetentionConfig(_Section):
    """[retention]: automatic removal. By default finished jobs are kept forever; rejected files are not. Pinned jobs
    (`honectl pin`) and everything that an unfinished job needs are always kept. An output_dir outside of the job's own
    directory is never touched.
    """

    max_job_age_days: Annotated[float, Field(ge=0)] | None = None
    """Days after which a finished job is removed, with all that lies in its directory and its rows in honed.db."""
    max_jobs: Annotated[int, Field(ge=0)] | None = None
    """Finished jobs that are kept; the oldest go. Pinned ones do not count."""
    max_job_bytes: Annotated[int, Field(ge=0)] | None = None
    """Bytes that the directories of finished jobs may take together; the oldest go. Pinned ones do not count."""
    max_checkpoint_age_days: Annotated[float, Field(ge=0)] | None = None
    """Days after which the checkpoints of a job that has succeeded are removed; its output stays."""
    max_failed_checkpoint_age_days: Annotated[float, Field(ge=0)] | None = None
    """The same of jobs that failed or were cancelled: requeued after that, they start from the beginning."""
    max_checkpoint_jobs: Annotated[int, Field(ge=0)] | None = None
    """Finished jobs whose checkpoints are kept, failed and cancelled ones among them; those of the oldest go."""
    max_checkpoint_bytes: Annotated[int, Field(ge=0)] | None = None
    """Bytes that the checkpoints of finished jobs may take together; those of the oldest go."""
    max_rejected_age_days: Annotated[float, Field(ge=0)] | None = 30.0
    """Days after which a refused file is removed from rejected/, with its reason."""
    max_rejected: Annotated[int, Field(ge=0)] | None = 10_000
    """Refused files that are kept; the oldest go."""
    max_event_age_days: Annotated[float, Field(ge=0)] | None = None
    """Days after which what the workers of finished jobs told is removed from the table `events`, their metrics and
    predictions not. A database that is made again has them again, until then."""
    max_events: Annotated[int, Field(ge=0)] | None = None
    """Rows in the table `events` that are kept of finished jobs; the oldest go."""
    interval_sec: Annotated[float, Field(gt=0)] = 3600.0
    """Seconds between looks at all that."""


class NotifyConfig(_Section):
    """[notify]: allowed recipients in a job's own `notify:`, and the administrator's notifications."""

    allowed_webhooks: list[Annotated[str, AfterValidator(_web_address)]] = []
    """Addresses that a job may have called, each with all that lies below its path: https://ntfy.example.org/honed.
    None by default: honed-send has network, and a job file must not choose where it goes."""
    webhook_files: dict[Annotated[str, AfterValidator(_webhook_name)], Directory] = {}
    """Webhooks by a name that jobs may use, whose address is a secret: name = file, which has the address on its first
    line and, where one is needed, a bearer token on its second. Readable for honed's group alone."""
    allowed_mail_domains: list[str] = []
    """Domains to which jobs may have mail sent, each written out."""
    smtp_host: str | None = None
    """The mail server; without one no mail is sent."""
    smtp_port: Annotated[int, Field(gt=0, lt=65536)] = 587
    """Its port."""
    smtp_security: Literal["starttls", "tls", "none"] = "starttls"
    """How the connection is kept private: by STARTTLS, by TLS from the start (port 465), or not."""
    smtp_user: str | None = None
    """The user to log in as, where that is needed."""
    smtp_password_file: Directory | None = None
    """A file with that user's password, readable for honed's group alone."""
    mail_from: Annotated[str, AfterValidator(_mail_address)] | None = None
    """The sender's address."""
    admin_webhook: Annotated[str, AfterValidator(_webhook_or_name)] | None = None
    """The administrator's own webhook, for all jobs: an address, or a name in webhook_files."""
    admin_mail: list[Annotated[str, AfterValidator(_mail_address)]] = []
    """The administrator's own mail addresses, for all jobs."""
    admin_states: list[Literal["succeeded", "failed", "cancelled"]] = ["failed"]
    """The ends that the administrator is told of."""
    admin_degraded: bool = True
    """Whether the administrator is told when honed cannot work (a full disk, a GPU that does not answer), and when it
    can again."""
    timeout_sec: Annotated[float, Field(gt=0, le=120)] = 30.0
    """Seconds that a receiver may take for one answer."""
    retry_delay_sec: Annotated[float, Field(gt=0)] = 10.0
    """Seconds before what could not be delivered is tried again, doubled each time, with some chance in it."""
    max_retry_delay_sec: Annotated[float, Field(gt=0)] = 1800.0
    """Seconds between two tries, at most."""
    give_up_days: Annotated[float, Field(gt=0)] = 7.0
    """Days after which a notice that nobody takes is set aside."""
    max_waiting: Annotated[int, Field(gt=0)] = 10_000
    """Notices that may wait for delivery; what comes after that is dropped, and the log says so."""


class WebConfig(_Section):
    """[web]: honed-web, pages and an API for browsers; it runs only if honed-web.socket is enabled."""

    listen: str = "127.0.0.1:8470"
    """Where it listens when it is started by hand: an address with a port, or the path of a socket. Where systemd
    starts it, the socket unit says that. An address that other machines reach needs a token."""
    token_file: Directory | None = None
    """A file with the token that whoever asks must show, as a bearer token or as a password: one line of 16 characters
    or more, which honed-web can read. The unit's own credential goes before it, /etc/credstore/honed.web-token. Who has
    it reads every job; on a loopback address one without it reads what policy.share_results lets everybody read."""
    hosts: list[str] = []
    """Names of this machine by which browsers may ask, besides localhost and its addresses: those that a proxy before
    it hands on. Any other is refused, or a page from elsewhere could give its own name our address."""


class Config(_Section):
    """All of honed.toml."""

    spool: SpoolConfig = SpoolConfig()
    jobs: JobsConfig = JobsConfig()
    device: DeviceConfig = DeviceConfig()
    policy: PolicyConfig = PolicyConfig()
    hub: HubConfig = HubConfig()
    reporting: ReportingConfig = ReportingConfig()
    web: WebConfig = WebConfig()
    retention: RetentionConfig = RetentionConfig()
    notify: NotifyConfig = NotifyConfig()


def load(layout: Layout) -> Config:
    """Load the current configuration, with defaults for missing files. Raises SpecError, which names file and key."""
    merged: dict[str, Any] = {}
    for path in [layout.config_path, *sorted(layout.config_dropin_dir.glob("*.toml"))]:
        merged = _merge(merged, _read(path))
    return Config.model_validate(merged)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
        data = tomllib.loads(text)
    except FileNotFoundError:
        return {}
    except RecursionError as error:
        raise SpecError(f"{path}: nested too deeply", hint="`man honed.toml` has every key") from error
    except (OSError, ValueError) as error:
        words = error.strerror if isinstance(error, OSError) else error
        raise SpecError(f"{path}: {words}", hint="honed.toml is TOML; see `man honed.toml`") from error
    try:
        Config.model_validate(data)
    except ValidationError as error:
        found = setting.problems(error, Config, setting.lines_of(text))
        told = [f"{path}: {problem}" for problem in found[:MAX_PROBLEMS]]
        # The administrator's own file: its content is no secret in the administrator's log.
        raise SpecError(quote.show("; ".join(told)), hint="`man honed.toml` has every key") from error
    return data


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both_tables = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both_tables else value
    return merged
