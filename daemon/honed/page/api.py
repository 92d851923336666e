"""The JSON API of honed-web: each endpoint's parameters and response type. The OpenAPI description is generated from
them, so that the two cannot differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import models_json_schema

from honed import __version__
from honed.job.job import State
from honed.page.source import Health, Source

#: Rows of one page, at most and by default.
MAX_ROWS, ROWS = 500, 100
#: A whole number that SQLite can hold.
Number = Annotated[int, Field(ge=0, lt=2**63)]


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


# -- parameters -------------------------------------------------------------------------------------------------------


class NoParameters(_Answer):
    """No parameters."""


class Paging(_Answer):
    """The choice of a page of rows."""

    limit: Annotated[int, Field(ge=1, le=MAX_ROWS)] = ROWS
    """Maximum number of rows on a page."""
    cursor: Annotated[str, Field(max_length=1000)] | None = None
    """Start of the page, from `next` of the previous page."""


class JobPaging(Paging):
    """The choice of jobs."""

    state: State | None = None
    """Only jobs in this state."""


class MetricPaging(Paging):
    """The choice of metrics."""

    name: Annotated[str, Field(max_length=200)] | None = None
    """Only this metric: loss, eval_loss, learning_rate, …"""


class PredictionPaging(Paging):
    """The choice of predictions."""

    step: Number | None = None
    """Only predictions of this step."""
    sample_index: Number | None = None
    """Only predictions of this example, at all steps."""


# -- answers ----------------------------------------------------------------------------------------------------------


class Progress(_Answer):
    """The progress of a job."""

    step: int | None
    num_steps: int | None
    epoch: float | None
    loss: float | None
    eta_sec: float | None


class Score(_Answer):
    """A metric of the last evaluation: the first one of the predictions, else the loss."""

    name: str
    value: float


class WaitingFor(_Answer):
    """The reason why a job does not run."""

    reason: str
    """Reason for programs: person, dependency, plan, retry, disk, paused, device, hours, drained, reserved, turn,
    honed, …"""
    detail: str
    "Reason as text; empty for another user's job, and if it changes every second."


class JobRow(_Answer):
    """One job. Another user's, if results are not shared, has only number, state and progress."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    id: int
    name: str
    state: State
    outcome: str | None
    """Outcome: succeeded, cancelled, stopped_early (by its sweep), or the error's code."""
    remark: str = ""
    "Remark on a success: its loss did not fall, or the model ended worse."
    priority: int
    job_class: str | None = Field(default=None, alias="class")
    """Class of the administrator's [classes]; null: the default class."""
    submitted_at: str
    """ISO 8601, UTC."""
    uid: int
    """User who submitted the job."""
    source: str | None
    """Name of the submitted file."""
    is_pinned: bool
    """True if the job is kept regardless of [retention]."""
    waiting_for: WaitingFor | None
    """Reason for waiting; given for held jobs and the first 500 of the queue."""
    staged_at: str | None = None
    """Start of its worker ahead of its turn, ISO 8601, UTC; null if it has none."""
    needs_bytes: int | None
    """Free disk space in bytes that it needs to be started again."""
    preemption: dict[str, Any] | None = None
    """Request to give up its device, of a job that has not started again since: reason, stop_sec, lost_steps."""
    progress: Progress
    model: str | None = None
    """Base model as the job file names it; null for another user's job."""
    data: list[str] = Field(default_factory=list)
    """Paths of the data sets."""
    elapsed_sec: float | None = None
    """Seconds of all attempts; null before the first."""
    score: Score | None = None
    """Score of the last evaluation; null before the first."""


class JobList(_Answer):
    """Jobs, the newest first."""

    jobs: list[JobRow]
    next: str | None
    """Address of the next page; null on the last."""


class Error(_Answer):
    """An error: its cause and its remedy, each a sentence."""

    code: str
    message: str
    hint: str
    evidence: str | None = None
    """Message with its quotes from the job's files, if it has any; never logged."""
    fix: dict[str, Any] | None = None
    """Edit of the job file that fixes the error, if one does: dotted key, and new value or null to remove the key."""


class Failure(_Answer):
    """A failed request."""

    error: Error


class AttemptRow(_Answer):
    """One start of a worker."""

    model_config = ConfigDict(extra="allow")

    number: int
    backend: str
    started_at: str
    ended_at: str | None
    outcome: str | None
    step: int


class JobShown(JobRow):
    """The details of one job, as in `honectl show --json`; later versions may add keys."""

    spec: dict[str, Any]
    plan: dict[str, Any]
    attempts: list[AttemptRow]
    error: dict[str, Any] | None
    artifacts: dict[str, Any]
    metrics: dict[str, Any]
    """Last value of each metric."""
    adjustments: list[dict[str, Any]]
    """Changes since the job ran out of memory, one per step: attempt, text, changes."""
    num_preemptions: int = 0
    """Number of requests to give up its device."""
    depends_on: list[str]
    """Numbers and names of the jobs that it waits for."""
    edited_at: list[str] = []
    """Times at which its job file was edited."""
    stopped_early: dict[str, Any] | None = None
    """Rung at which its sweep ended it: rung, step, eval_loss, reason."""
    job_dir: str
    memory: dict[str, Any]
    """Memory in bytes, as `estimated` and as `used`."""


class Metric(_Answer):
    """One logged metric."""

    attempt: int
    step: int
    epoch: float | None
    name: str
    value: float | None
    created_at: str


class MetricList(_Answer):
    """Metrics by name and step."""

    metrics: list[Metric]
    next: str | None
    """Address of the next page; null on the last."""


class Prediction(_Answer):
    """The model's prediction for one held-out example at one step."""

    epoch: float | None
    step: int
    sample_index: int
    prompt: str | None
    ground_truth: str | None
    prediction: str | None
    created_at: str


class PredictionList(_Answer):
    """Predictions by step; a page ends early if its texts are long."""

    predictions: list[Prediction]
    next: str | None
    """Address of the next page; null on the last."""


# -- addresses --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Endpoint:
    """One endpoint. `read`: takes a source, the job of the address if there is one, the asker, and the parameters by
    name. `rows`: the key of the answer that has a page's rows, if the endpoint is paged."""

    path: str
    summary: str
    parameters: type[BaseModel]
    answer: type[BaseModel]
    read: Callable[..., Any]
    rows: str | None = None


ENDPOINTS = (
    Endpoint("/api/jobs", "All jobs, newest first", JobPaging, JobList, Source.jobs, "jobs"),
    Endpoint("/api/jobs/{job_id}", "One job", NoParameters, JobShown, Source.show),
    Endpoint("/api/jobs/{job_id}/metrics", "Metrics of one job", MetricPaging, MetricList, Source.metrics, "metrics"),
    Endpoint(
        "/api/jobs/{job_id}/predictions",
        "Predictions of one job",
        PredictionPaging,
        PredictionList,
        Source.predictions,
        "predictions",
    ),
    Endpoint(
        "/healthz",
        "Health of the daemon and its database",
        NoParameters,
        Health,
        lambda one, _: one.health().model_dump(),
    ),
)
#: Endpoints without JSON: address, summary, media type.
_OTHERS = (
    ("/", "Page of all jobs", "text/html"),
    ("/jobs/{job_id}", "Report of one job", "text/html"),
    ("/api/events", "`changed` whenever a job changes state or reports a step", "text/event-stream"),
    (
        "/api/jobs/{job_id}/events",
        "`progress` (a row as in /api/jobs, with stage, eval_loss, predicted_step and line) when the job reports "
        "something, `ended` at its end",
        "text/event-stream",
    ),
    ("/metrics", "Metrics for Prometheus", "text/plain"),
)
_FAILURES = {
    400: "invalid parameter",
    401: "missing or wrong token",
    403: "another user's job",
    404: "no such job or address",
    421: "Host header with a name that is not this machine's",
    503: "too many concurrent requests, or nothing to read yet",
}


def openapi() -> dict[str, Any]:
    """Return the OpenAPI 3.1 description of all endpoints."""
    models: set[type[BaseModel]] = {Failure, *(endpoint.answer for endpoint in ENDPOINTS)}
    ordered = sorted(models, key=lambda model: model.__name__)
    _, schemas = models_json_schema(
        [(model, "serialization") for model in ordered], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, Any] = {}
    for endpoint in ENDPOINTS:
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{endpoint.answer.__name__}"}}}
        paths[endpoint.path] = _path(endpoint.path, endpoint.summary, content, _query(endpoint.parameters))
    for path, summary, kind in _OTHERS:
        paths[path] = _path(path, summary, {kind: {"schema": {"type": "string"}}}, [])
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "honed",
            "version": __version__,
            "summary": "Read-only access to honed's jobs",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer"},
                "password": {"type": "http", "scheme": "basic", "description": "the token as password"},
            },
        },
        "security": [{}, {"token": []}, {"password": []}],
    }


def _path(path: str, summary: str, content: dict[str, Any], query: list[dict[str, Any]]) -> dict[str, Any]:
    job = {"name": "job_id", "in": "path", "required": True, "schema": {"type": "integer", "minimum": 0}}
    failure = {"application/json": {"schema": {"$ref": "#/components/schemas/Failure"}}}
    failures = {str(status): {"description": words, "content": failure} for status, words in _FAILURES.items()}
    name = path.strip("/").replace("{job_id}", "job").replace("/", "_") or "index"
    return {
        "get": {
            "operationId": f"get_{name}",
            "summary": summary,
            "parameters": [*([job] if "{job_id}" in path else []), *query],
            "responses": {"200": {"description": summary, "content": content}, **failures},
        }
    }


def _query(model: type[BaseModel]) -> list[dict[str, Any]]:
    schema = model.model_json_schema()
    kinds = schema.get("$defs", {})
    found = []
    for name, told in schema.get("properties", {}).items():
        words = {key: value for key, value in told.items() if key not in {"description", "title"}}
        # A parameter is left out rather than null.
        if "anyOf" in words:
            (one,) = [item for item in words.pop("anyOf") if item.get("type") != "null"]
            words = {**words, **one}
            words.pop("default", None)
        if "$ref" in words:
            words = {"type": "string", "enum": kinds[words["$ref"].rpartition("/")[2]]["enum"]}
        found.append(
            {
                "name": name,
                "in": "query",
                "required": False,
                "description": told.get("description", ""),
                "schema": words,
            }
        )
    return found
