"""The administrator's configuration: `honed.toml`, then `honed.toml.d/*.toml` by name; later files win.

It is parsed into a `Config` at start and at reload. An unknown key or a wrong type raises a `SpecError` that names file
and key; on a reload the current configuration then stays.
"""

from __future__ import annotations

import functools
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from honed.spec import hours, setting
from honed.spec.hours import Hours
from honed.spec.problem import MAX_PROBLEMS
from honed.system import device, manual, quote
from honed.system.device import Device
from honed.system.error import SpecError
from honed.system.layout import Layout


def _absolute(value: str) -> str:
    if not value.startswith("/"):
        raise ValueError("use an absolute path")
    return value


def _web_address(value: str) -> str:
    parts = urlsplit(value)
    is_plain = value.isascii() and value.isprintable() and " " not in value
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.port == 0 or not is_plain:
        raise ValueError("not an HTTP or HTTPS URL")
    if parts.username is not None or parts.password is not None:
        raise ValueError("a URL must not contain a password: set token_file")
    return value


#: The name of a webhook in honed.toml.
WEBHOOK_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
#: One mailbox, without characters that could add a second recipient, a header, or an option of a mail program.
MAIL_ADDRESS = re.compile(
    r"[A-Za-z0-9_+][A-Za-z0-9._%+=~-]{0,63}@[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*"
)


def _matching(pattern: re.Pattern[str], problem: str) -> AfterValidator:
    def check(value: str) -> str:
        if not pattern.fullmatch(value):
            raise ValueError(problem)
        return value

    return AfterValidator(check)


def _name_of(what: str, pattern: re.Pattern[str]) -> AfterValidator:
    return _matching(pattern, f"the name of a {what} may contain letters, digits, - and _")


#: A class's name.
CLASS_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MailAddress = Annotated[str, _matching(MAIL_ADDRESS, "not an email address")]


#: Apprise's schemas of chats that are reached over TLS alone.
CHAT_SCHEMAS = (
    *("discord", "gchat", "gotifys", "matrixs", "mmosts", "nctalks", "ntfys", "pover", "rockets", "signals", "slack"),
    *("tgram", "workflows", "wxteams", "zulip"),
)
#: Apprise's schemas that act on this machine or read its files; and mail, which honed delivers itself.
_NO_CHATS = {
    *("blink1", "dbus", "gio", "glib", "gnome", "kde", "macosx", "qt", "syslog", "windows", "fcm", "vapid"),
    *("mailto", "mailtos"),
}


def _chat_schema(value: str) -> str:
    if value in {"http", "https"} or not re.fullmatch(r"[a-z][a-z0-9]*", value):
        raise ValueError("not the scheme of a chat URL, such as slack or ntfys")
    if value in _NO_CHATS:
        raise ValueError("a scheme that acts on this machine, or one for mail, which smtp_host delivers")
    return value


def _hours(value: str | list[str]) -> str | list[str]:
    hours.parse(value)
    return value


def _hours_of(value: dict[str, str | list[str]]) -> dict[str, str | list[str]]:
    for name, texts in value.items():
        try:
            hours.parse(texts)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return value


#: An absolute path of a directory.
Directory = Annotated[str, AfterValidator(_absolute)]


#: Options of sbatch that are honed's own: another value would lose jobs, or run them twice.
_SLURM_OWN = {
    *("job-name", "output", "error", "open-mode", "requeue", "no-requeue", "parsable", "array", "nodes", "ntasks"),
    *("ntasks-per-node", "time", "wrap", "wait", "chdir", "export", "uid", "gid", "test-only", "dependency"),
    *("signal", "comment", "kill-on-invalid-dep", "gpus", "gpus-per-node", "gpus-per-task", "gres", "begin", "hold"),
    *("ntasks-per-gpu", "ntasks-per-core", "ntasks-per-socket", "no-kill", "quiet", "verbose", "version", "help"),
    *("usage", "input", "get-user-env", "export-file", "clusters", "deadline", "time-min", "batch", "immediate"),
    *("container", "container-id", "nodefile", "gpus-per-socket", "tres-per-task", "reboot"),
}


#: Options of sbatch that have keys of their own.
_SLURM_KEYS = ("partition", "account", "qos", "constraint")


def _slurm_option(value: str) -> str:
    match = re.fullmatch(r"--([a-z][a-z-]*)(=.*)?", value)
    if match is None or not value.isprintable():
        raise ValueError("write an option of sbatch as --name or --name=value")
    if match[1] in _SLURM_OWN:
        raise ValueError(f"--{match[1]} is honed's own")
    if own := min((item for item in _SLURM_OWN if item.startswith(match[1])), default=None):
        raise ValueError(f"--{match[1]}: sbatch may take it for --{own}, which is honed's own")
    if other := next((key for key in _SLURM_KEYS if key.startswith(match[1])), None):
        raise ValueError(f"--{match[1]} has a key of its own: {other}")
    return value


def _slurm_value(value: str) -> str:
    if not value or not value.isprintable() or value != value.strip():
        raise ValueError("not one line of text")
    return value


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class SpoolConfig(_Section):
    """[spool]"""

    settle_sec: Annotated[float, Field(ge=0, le=60)] = 2.0
    """Seconds that a file must stay unchanged before it is taken, if honed did not see it closed or moved in."""
    rescan_interval_sec: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """Seconds between scans of incoming/ that no event triggered: inotify can lose events."""
    max_spec_bytes: Annotated[int, Field(gt=0, le=16 * 1024 * 1024)] = 256 * 1024
    """Maximum bytes of a job file; a larger one is rejected."""
    max_sweep_jobs: Annotated[int, Field(ge=1, le=1000)] = 64
    """Maximum number of jobs that one job file with `sweep:` becomes; a larger sweep is rejected."""
    preflight_timeout_sec: Annotated[float, Field(gt=0)] = 60.0
    """Maximum seconds for the check of one job file, slow file systems included."""
    rehearsal_cpu_sec: Annotated[int, Field(ge=0, le=3600)] = 30
    """Maximum seconds of CPU time for one step on a small model of a job's family; by the clock it may take 20 times as
    long. Only jobs whose family or adapter needs it get one. Beyond the limit the job is accepted with a warning. 0
    disables it."""
    preflight_helpers: Annotated[int, Field(ge=1, le=16)] | None = None
    """Processes of honed's own that check job files at the same time; by default one for every two cores, and four at
    most. Where jobs are units, two more users than that are checked at once by units of their own. Read at start."""

    @property
    def rehearsal_timeout_sec(self) -> float:
        """Maximum seconds for a rehearsal: the check gives way to everything else, and may wait long for the CPU. Two
        of them at a time keep no other user waiting (daemon/arrivals/line.py)."""
        return 20.0 * self.rehearsal_cpu_sec


class JobsConfig(_Section):
    """[jobs]"""

    stop_timeout_sec: Annotated[float, Field(gt=0)] = 300.0
    """Seconds that a worker has for its checkpoint after a stop request, before it is killed."""
    retry_delay_sec: Annotated[float, Field(ge=0)] = 30.0
    """Seconds before the second retry, doubled for each later one; the first retry follows at once."""
    stall_timeout_sec: Annotated[float, Field(gt=0)] = 1800.0
    """Seconds without a sign of life after which a worker counts as hung: its stacks go to its log, and it is ended.
    Once a job's own steps are known, the limit is lower: twenty times the longest of its last pauses."""
    min_stall_timeout_sec: Annotated[float, Field(ge=0)] = 300.0
    """Seconds that a worker may always be silent, however quick its steps were, up to stall_timeout_sec."""
    time_limit_grace_sec: Annotated[float, Field(ge=0)] = 300.0
    """Seconds beyond a job's time_limit_sec, all attempts together, after which honed stops its worker. A worker ends
    by itself at the end of a step; one that hangs reaches none."""
    poll_interval_sec: Annotated[float, Field(gt=0, le=10)] = 0.5
    """Seconds between checks for events of running jobs."""
    max_running: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of jobs at a time; by default one on each GPU, and one on the processor, for merges and jobs
    without a GPU."""
    runner: Literal["auto", "process", "systemd", "slurm"] = "auto"
    """Method of starting workers: as units honed-job@ID.service, as processes of honed's own, or as jobs of a Slurm
    cluster ([slurm]); at /, as its submitters, with honed-slurm.socket enabled. `auto` uses units
    where that works (the instance at /, started by systemd, with the units and the polkit rule installed); the log
    reports the choice and the reason. Read at start."""
    stage_ahead: bool = True
    """Start the worker of the job that is next for a device while that is still busy: it imports its libraries and
    encodes its data, and waits for the device. Only while a processor, memory and disk space are left for it."""
    stage_min_available_bytes: Annotated[int, Field(ge=0)] = 4 * 1024**3
    """Bytes of host memory that must be available to start a worker ahead of its turn. Below half of that, such
    workers are ended, and their jobs start at their turn."""
    on_stop: Literal["leave", "checkpoint"] = "leave"
    """Action for running jobs when honed itself is stopped or restarted: `leave` lets them continue, and the next honed
    takes them over; `checkpoint` has them write one and queues them. Only units can be left; a shutdown of the machine
    always checkpoints."""

    @property
    def has_cluster(self) -> bool:
        """True if workers run on the nodes of a cluster, which chooses their devices."""
        return self.runner == "slurm"


class DeviceConfig(_Section):
    """[device]"""

    gpus: list[int] | None = None
    """Indices of the GPUs that honed may use, as nvidia-smi numbers them; by default all, with an empty list none."""
    reserve_bytes: Annotated[int, Field(ge=0)] = 512 * 1024 * 1024
    """Bytes of a device's memory that plans never use."""
    busy_bytes: Annotated[int, Field(ge=0)] = 1024 * 1024 * 1024
    """Bytes of memory that others may hold on a free GPU; above that, a job waits for it."""
    hours: Annotated[str | list[str], AfterValidator(_hours)] | None = None
    """Hours during which jobs may run, or a list of them: `Mon..Fri 20:00-08:00`, in local time. Weekdays are as in
    systemd.time(7), every day without any; a range that passes midnight belongs to the day on which it begins. When the
    hours end, running jobs write a checkpoint and return to the queue. By default always."""
    hours_of: Annotated[dict[str, str | list[str]], AfterValidator(_hours_of)] = {}
    """Hours of single devices, in place of device.hours: a GPU's index or UUID, or cpu = hours. `00:00-24:00` is
    always."""

    def hours_for(self, *names: str) -> Hours:
        """Return the hours of a device that has these names, the most specific first."""
        of_device = next((self.hours_of[name] for name in names if name in self.hours_of), self.hours)
        return hours.parse(of_device) if of_device is not None else Hours()


class PolicyConfig(_Section):
    """[policy]: what jobs may request."""

    hub: bool = False
    """Allow hub ids, of models and data sets, that must be fetched: honed fetches them before it accepts the job. If
    false, the job is rejected with the command that fetches them. Those in the local cache are always allowed. For an
    instance of `--user` or `--root DIR` the default is true."""
    arrivals: Literal["spool", "socket"] = "spool"
    """Ways to submit a job. `spool`: by a file in incoming/, whose owner is the submitter; `honectl submit` drops one.
    `socket`: by `honectl submit` alone, over the control socket, where the kernel identifies the submitter; a file in
    incoming/ is rejected. honed cannot know where such a file was before: others can move a file from a directory that
    they can write to incoming/, and it keeps its owner."""
    trust_remote_code: bool = False
    """Allow a job to run code that comes with a model."""
    pickle: bool = False
    """Allow weights in pickle files (.bin, .pt): loading one runs the code in it."""
    allowed_paths: list[Directory] | None = None
    """Directories below which a job may read models and data and write its output; symbolic links are followed first.
    By default it reads all that its submitter may, and writes into its own directory alone. Its own directory, the
    model cache and the copies of `submit --stage` are always allowed. Only root may have write access to the
    directories above an entry, or `honectl sandbox` refuses it: others could replace it by a link to any directory."""
    admin_group: str = "root"
    """Group whose members may cancel, hold, release and requeue every job, and read its results, as root may."""
    share_results: bool = False
    """Allow everybody to read every job: its name, spec, metrics and predictions. By default only its submitter, root
    and the administrators' group may; for others' jobs, the queue and the status line of `systemctl status honed` show
    number and state."""


class ReportingConfig(_Section):
    """[reporting]: an HTTP endpoint that receives every metric and every prediction."""

    metrics_api_url: Annotated[str, AfterValidator(_web_address)] | None = None
    """URL that receives metrics and predictions, as JSON by POST; none by default. $METRICS_API_URL takes
    precedence."""
    token_file: Directory | None = None
    """File with the bearer token for metrics_api_url, readable by honed's user. The unit's own credential,
    /etc/credstore/honed.metrics-token, takes precedence. Without either, no token is sent."""
    timeout_sec: Annotated[float, Field(gt=0, le=120)] = 30.0
    """Maximum seconds for one response of the endpoint."""
    retry_delay_sec: Annotated[float, Field(gt=0)] = 1.0
    """Seconds before a failed delivery is retried, doubled each time, with random jitter."""
    max_retry_delay_sec: Annotated[float, Field(gt=0)] = 300.0
    """Maximum seconds between two tries. Retries never end."""
    flush_sec: Annotated[float, Field(ge=0)] = 30.0
    """Seconds that `honed --drain` leaves at its end for deliveries that still wait."""
    max_outbox_bytes: Annotated[int, Field(gt=0)] = 256 * 1024 * 1024
    """Maximum bytes of rows that wait for delivery. Further rows are counted, logged and not sent; honed.db has them in
    any case."""
    sync_wandb: bool = False
    """Synchronise the runs of jobs with `report_to: [wandb]`, which wandb writes without network, once a job has ended.
    Everybody who may submit jobs then sends to this account. If false, the runs stay in jobs/ID/wandb."""
    wandb_key_file: Directory | None = None
    """File with the key of the wandb account, readable by honed's user. The unit's own credential,
    /etc/credstore/honed.wandb-key, takes precedence."""
    wandb_base_url: Annotated[str, AfterValidator(_web_address)] | None = None
    """URL of a wandb server of your own; by default wandb's."""

    def address(self, environment: Mapping[str, str] = os.environ) -> str | None:
        """Return the URL that rows are sent to, or None. Raises SpecError if METRICS_API_URL is invalid."""
        if not (url := environment.get("METRICS_API_URL")):
            return self.metrics_api_url
        try:
            return _web_address(url)
        except ValueError as error:
            raise SpecError(f"METRICS_API_URL: {error}", hint="an HTTP or HTTPS URL") from error


class HubConfig(_Section):
    """[hub]: fetching of models and data sets, if policy.hub allows it."""

    fetch_timeout_sec: Annotated[float, Field(gt=0)] = 86400.0
    """Maximum seconds to fetch one model or data set, all interruptions and retries together, without the time in which
    honed and the fetch were frozen; then its jobs are rejected."""
    max_fetches: Annotated[int, Field(ge=1)] = 2
    """Maximum number of models and data sets fetched at a time."""


class RetentionConfig(_Section):
    """[retention]: automatic removal, once an hour and after a reload. By default finished jobs are kept forever;
    rejected files are not. Pinned jobs (`honectl pin`) and everything that an unfinished job needs are always kept. An
    output_dir outside of the job's own directory is never touched.
    """

    max_job_age_days: Annotated[float, Field(ge=0)] | None = None
    """Days after which a finished job is removed, with its whole directory and its rows in honed.db."""
    max_jobs: Annotated[int, Field(ge=0)] | None = None
    """Maximum number of finished jobs; the oldest are removed. Pinned ones do not count."""
    max_job_bytes: Annotated[int, Field(ge=0)] | None = None
    """Maximum bytes of all finished jobs' directories; the oldest are removed. Pinned ones do not count."""
    max_checkpoint_age_days: Annotated[float, Field(ge=0)] | None = None
    """Days after which the checkpoints of a succeeded job are removed; its output stays."""
    max_failed_checkpoint_age_days: Annotated[float, Field(ge=0)] | None = None
    """Days after which the checkpoints of failed and cancelled jobs are removed; requeued later, they start from the
    beginning."""
    max_checkpoint_bytes: Annotated[int, Field(ge=0)] | None = None
    """Maximum bytes of all finished jobs' checkpoints, failed and cancelled ones included; those of the oldest are
    removed."""
    max_row_bytes: Annotated[int, Field(ge=0)] = 20 * 2**30
    """Maximum bytes of encoded rows that are kept for other jobs of the same user, of all users together, and at most a
    quarter of the free space. Beyond that, those of the user who has the most, and that were not used for the longest
    time, are removed. 0: jobs share no rows."""
    max_rejected_age_days: Annotated[float, Field(ge=0)] | None = 30.0
    """Days after which a rejected file is removed from rejected/, with its reason. At most 10,000
    are kept: beyond that, the oldest files of the users who have the most are removed."""


class NotifyConfig(_Section):
    """[notify]: allowed recipients in a job's own `notify:`, and the administrator's notifications."""

    allowed_webhooks: list[Annotated[str, AfterValidator(_web_address)]] = []
    """URLs that a job may call, each with everything below its path: https://ntfy.example.org/honed. None by default:
    honed-send has network access, and a job file must not choose its target."""
    webhook_files: dict[Annotated[str, _name_of("webhook", WEBHOOK_NAME)], Directory] = {}
    """Webhooks with a secret URL, under a name that jobs may use: name = file. The file has the URL on its first line
    and, where one is needed, a bearer token on its second. It is readable for honed's group alone. Instead of an http
    or https URL it may have the Apprise URL of a chat: slack://…, ntfys://…."""
    chat_schemas: list[Annotated[str, AfterValidator(_chat_schema)]] = list(CHAT_SCHEMAS)
    """Schemas of Apprise URLs that a file of webhook_files may have; those of the default use TLS. A server on this
    machine may need one without: ntfy, gotify, matrix, mmost."""
    allowed_mail_domains: list[str] = []
    """Domains to which jobs may send mail, each in full."""
    smtp_host: str | None = None
    """Mail server; without one no mail is sent."""
    smtp_port: Annotated[int, Field(gt=0, lt=65536)] = 587
    """Port of the mail server."""
    smtp_security: Literal["starttls", "tls", "none"] = "starttls"
    """Encryption of the connection: STARTTLS, TLS from the start (port 465), or none."""
    smtp_user: str | None = None
    """User name at the mail server, where it needs one."""
    smtp_password_file: Directory | None = None
    """File with the password of smtp_user, readable for honed's group alone."""
    mail_from: _MailAddress | None = None
    """Sender address of mails."""
    admin_webhook: (
        Annotated[str, AfterValidator(lambda value: value if WEBHOOK_NAME.fullmatch(value) else _web_address(value))]
        | None
    ) = None
    """Administrator's own webhook, for all jobs: a URL, or a name in webhook_files."""
    admin_mail: list[_MailAddress] = []
    """Administrator's own mail addresses, for all jobs."""
    admin_states: list[Literal["succeeded", "failed", "cancelled"]] = ["failed"]
    """Final states of jobs that the administrator is notified of."""
    admin_degraded: bool = True
    """Notify the administrator when honed cannot work (a full disk, a GPU that does not respond), and when it
    recovers."""
    timeout_sec: Annotated[float, Field(gt=0, le=120)] = 30.0
    """Maximum seconds for one response of a recipient."""
    retry_delay_sec: Annotated[float, Field(gt=0)] = 10.0
    """Seconds before a failed delivery is retried, doubled each time, with random jitter."""
    max_retry_delay_sec: Annotated[float, Field(gt=0)] = 1800.0
    """Maximum seconds between two tries."""
    give_up_days: Annotated[float, Field(gt=0)] = 7.0
    """Days after which an undelivered notification is set aside."""
    max_waiting: Annotated[int, Field(gt=0)] = 10_000
    """Maximum number of notifications that wait for delivery; further ones are discarded and logged."""


class WebConfig(_Section):
    """[web]: honed-web, pages and an API for browsers; it runs only if honed-web.socket is enabled."""

    listen: str = "127.0.0.1:8470"
    """Address with a port, or path of a socket, to listen on when started by hand; under systemd the socket unit sets
    it. An address that other machines reach needs a token."""
    token_file: Directory | None = None
    """File with the token that clients must send, as a bearer token or as a password: one line of 16 characters or
    more, readable by honed-web. The unit's own credential, /etc/credstore/honed.web-token, takes precedence. A client
    with the token reads every job; on a loopback address one without it reads what policy.share_results lets everybody
    read."""
    hosts: list[str] = []
    """Names of this machine that browsers may request, besides localhost and its addresses: those that a proxy in front
    forwards. Any other is rejected, or else a foreign page could point its own name to our address."""


#: The first characters of a place for a job on a cluster, which stands for its GPUs.
SLOT = "slurm-"


SlurmValue = Annotated[str, AfterValidator(_slurm_value)]
SlurmOption = Annotated[str, AfterValidator(_slurm_option)]


class SlurmProfile(_Section):
    """[slurm.profiles.NAME]: a kind of jobs on the cluster, which a job file names with `resources: {profile: NAME}`. A
    key that is not set is that of [slurm]."""

    default: bool = False
    """Profile of jobs that name none. Without a default profile, such jobs have the keys of [slurm]."""
    partition: SlurmValue | None = None
    """Partition of the jobs."""
    account: SlurmValue | None = None
    """Account that is charged."""
    qos: SlurmValue | None = None
    """Quality of service."""
    constraint: SlurmValue | None = None
    """Features that a node must have."""
    options: list[SlurmOption] | None = None
    """Further options of sbatch, in place of those of [slurm]."""
    gpu_name: str | None = None
    """Name of the nodes' GPUs, for people."""
    gpu_bytes: Annotated[int, Field(ge=0)] | None = None
    """Bytes of memory of the nodes' GPUs, for which jobs are planned."""
    gpu_compute_capability: tuple[int, int] | None = None
    """CUDA compute capability of the nodes' GPUs, for which jobs are planned."""


class SlurmConfig(_Section):
    """[slurm]: the cluster, with `jobs.runner = "slurm"`. The directory of the instance, the models and the data must
    have the same paths on every node, and so must honed itself."""

    partition: SlurmValue | None = None
    """Partition of the jobs; by default the cluster's own default."""
    account: SlurmValue | None = None
    """Account that is charged."""
    qos: SlurmValue | None = None
    """Quality of service."""
    constraint: SlurmValue | None = None
    """Features that a node must have."""
    options: list[SlurmOption] = []
    """Further options of sbatch, each as `--name=value`. Those that honed sets itself are refused."""
    max_jobs: Annotated[int, Field(ge=1, le=1000)] = 4
    """Maximum number of jobs with GPUs that are handed to Slurm at a time; further ones wait in honed's queue. Of jobs
    without a GPU, one at a time is handed over."""
    gpu_name: str = "GPU"
    """Name of the nodes' GPUs, for people."""
    gpu_bytes: Annotated[int, Field(ge=0)] = 0
    """Bytes of memory of the nodes' GPUs, for which jobs are planned; 0: the nodes have none, and jobs train on their
    processors, one job at a time."""
    gpu_compute_capability: tuple[int, int] = (8, 0)
    """CUDA compute capability of the nodes' GPUs, for which jobs are planned: [8, 0] is an A100's."""
    profiles: dict[Annotated[str, _name_of("profile", CLASS_NAME)], SlurmProfile] = {}
    """Kinds of jobs, as [slurm.profiles.NAME]."""

    def profile(self, name: str | None) -> SlurmConfig:
        """Return the configuration for jobs of a profile, None meaning the default one. Raises KeyError."""
        if name is None:
            name = next((item for item, one in self.profiles.items() if one.default), None)
        if name is None:
            return self
        own = self.profiles[name].model_dump(exclude_none=True, exclude={"default"})
        return self.model_copy(update={**own, "profiles": {}})

    def devices(self) -> list[Device]:
        """Return a place per job that may be handed over, as a device: Slurm chooses the real ones."""
        if not self.gpu_bytes and not any(profile.gpu_bytes for profile in self.profiles.values()):
            return [device.cpu()]
        slot = functools.partial(
            Device,
            kind="cuda",
            name=self.gpu_name,
            compute_capability=self.gpu_compute_capability,
            total_bytes=self.gpu_bytes,
            free_bytes=self.gpu_bytes,
        )
        return [slot(uuid=f"{SLOT}{number}") for number in range(1, self.max_jobs + 1)]

    def as_options(self) -> list[str]:
        """Return the options of sbatch."""
        named = {key: getattr(self, key) for key in _SLURM_KEYS}
        return [*(f"--{key}={value}" for key, value in named.items() if value), *self.options]


class ClassConfig(_Section):
    """[classes.NAME]: a class of jobs, which a job file names with `class: NAME`."""

    rank: Annotated[int, Field(ge=-1000, le=1000)] = 0
    """Jobs of a class with a higher rank start first, regardless of who submitted them."""
    default: bool = False
    """Class of jobs that name none. Without a default class, such jobs have rank 0 and the other defaults below."""
    users: list[str] | None = None
    """Users who may submit jobs of this class, and groups, as `@group`; by default everybody."""
    preempts: bool = False
    """Let jobs of this class take a device from jobs of classes with a lower rank: those write a checkpoint, return to
    the queue, and resume later."""
    min_run_sec: Annotated[float, Field(ge=0)] = 600.0
    """Seconds that an attempt of this class's own jobs runs at least before a job of a higher class may preempt it."""


class UserConfig(_Section):
    """[users.NAME]: share and limits of a user, of each member of a group (`[users."@group"]`), or of everybody else
    (`[users."*"]`). A key of the user's own table precedes one of a group, where the most generous group counts, and
    that one precedes `"*"`. A job beyond a limit waits; none is rejected or ended for it."""

    weight: Annotated[float, Field(gt=0, le=1000)] | None = None
    """Share of the devices, and of the turns at which job files are taken and checked, in relation to other users who
    wait; 1 if not set."""
    max_queued: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of a user's queued and held jobs, with the checked files that wait for a fetch or for a job that
    they name; further files wait in incoming/; 10000 if not set."""
    max_running: Annotated[int, Field(ge=0)] | None = None
    """Maximum number of a user's running jobs; unlimited if not set."""
    max_job_bytes: Annotated[int, Field(gt=0)] | None = None
    """Maximum bytes of the directories of a user's jobs, running ones left out; beyond it none of their jobs starts;
    unlimited if not set."""
    max_device_sec: Annotated[float, Field(gt=0)] | None = None
    """Maximum seconds of use of devices within fair_share.window_sec, all devices together; unlimited if not set."""


class FairShareConfig(_Section):
    """[fair_share]"""

    window_sec: Annotated[float, Field(ge=60, le=30 * 86400)] = 7 * 86400.0
    """Seconds of the sliding window of users' max_device_sec."""
    priority_across_users: bool = False
    """Let `priority` of job files count between users of one class, before their shares do."""


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
    fair_share: FairShareConfig = FairShareConfig()
    slurm: SlurmConfig = SlurmConfig()
    classes: dict[Annotated[str, _name_of("class", CLASS_NAME)], ClassConfig] = {}
    users: dict[str, UserConfig] = {}

    _outdated: tuple[str, ...] = ()

    @property
    def outdated(self) -> tuple[str, ...]:
        """A warning per key in `setting.GONE` that the files have."""
        return self._outdated


def load(layout: Layout) -> Config:
    """Load the current configuration, with defaults for missing files. Raises SpecError, which names file and key."""
    merged: dict[str, Any] = {}
    outdated: list[str] = []
    for path in [layout.config_path, *sorted(layout.config_dropin_dir.glob("*.toml"))]:
        merged = _merge(merged, _read(path, outdated))
    if not layout.is_of_system:
        merged = _merge({"policy": {"hub": True}}, merged)
    config = Config.model_validate(merged)
    _require_one_default(config)
    config._outdated = tuple(outdated)
    return config


def devices(config: Config, profile: str | None = None) -> list[Device]:
    """Return the devices that jobs may run on: this machine's, or places for jobs of a profile on the cluster. Raises
    KeyError for an unknown profile."""
    if config.jobs.has_cluster:
        return config.slurm.profile(profile).devices()
    return device.probe(config.device.gpus)


def _require_one_default(config: Config) -> None:
    if len(names := [name for name, klass in config.classes.items() if klass.default]) > 1:
        raise SpecError(f"classes: {' and '.join(names)} are the default", hint="set default = true in one of them")
    if names and config.classes[names[0]].users is not None:
        problem = f"classes.{names[0]}.users: the default class is everybody's"
        raise SpecError(problem, hint="remove users, or make another class the default")
    if len(names := [name for name, profile in config.slurm.profiles.items() if profile.default]) > 1:
        problem = f"slurm.profiles: {' and '.join(names)} are the default"
        raise SpecError(problem, hint="set default = true in one of them")


def _read(path: Path, outdated: list[str]) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
        data = tomllib.loads(text)
    except FileNotFoundError:
        return {}
    except RecursionError as error:
        raise SpecError(f"{path}: nested too deeply", hint=manual.all_keys("honed.toml.5")) from error
    except (OSError, ValueError) as error:
        words = error.strerror if isinstance(error, OSError) else error
        raise SpecError(
            f"{path}: {words}", hint=f"honed.toml must be TOML; {manual.all_keys('honed.toml.5')}"
        ) from error
    outdated += [f"{path}: {problem}" for problem in setting.take_gone(data, text)]
    try:
        Config.model_validate(data)
    except ValidationError as error:
        problems = setting.problems(error, Config, setting.lines_of(text))
        lines = [f"{path}: {problem}" for problem in problems[:MAX_PROBLEMS]]
        # The administrator's own file: its content is no secret in the administrator's log.
        raise SpecError(quote.show("; ".join(lines)), hint=manual.all_keys("honed.toml.5")) from error
    return data


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both_tables = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both_tables else value
    return merged
