"""The JSON API of honed-web: the endpoints' parameters and response type. The OpenAPI description is generated from
them, so that the two cannot differ."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from types import MappingProxyType, UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints, is_typeddict

from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.json_schema import models_json_schema

from honed import __version__
from honed.job import shape
from honed.job.job import State
from honed.page.source import Health, Source
from honed.spec.docstring import of_class

#: Rows of one page, at most and by default.
MAX_ROWS, ROWS = 500, 100
#: A whole number that SQLite can hold.
Number = Annotated[int, Field(ge=0, lt=2**63)]


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow")


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


#: The models of rows that other rows have; rows without one are any object.
_MODELS: dict[type, type[BaseModel]] = {}


def _made_of(
    row: type,
    name: str,
    doc: str,
    *,
    base: type[BaseModel] = _Answer,
    types: Mapping[str, Any] = MappingProxyType({}),
    defaults: Mapping[str, Any] = MappingProxyType({}),
    without: Container[str] = (),
) -> type[BaseModel]:
    """Return the model of a row of `--json`: its keys, types and descriptions are those of job/shape.py, but for
    `types`. Keys with a default are not required: they came after the first version of the API."""
    words, fields = of_class(row), dict[str, Any]()
    for key, kind in get_type_hints(row).items():
        if key in without or key in base.model_fields:
            continue
        default, description = defaults.get(key, ...), words.get(key, _WORDS.get(key))
        field = Field(default_factory=list, description=description)
        if default is not list:
            field = Field(default=default, description=description)
        fields[key] = (types.get(key, _annotation(kind)), field)
    made = create_model(name, __base__=base, __doc__=doc, **fields)
    _MODELS[row] = made
    return made


def _annotation(kind: Any) -> Any:
    if is_typeddict(kind):
        return _MODELS.get(kind, dict[str, Any])
    if isinstance(kind, UnionType):
        return functools.reduce(operator.or_, map(_annotation, get_args(kind)))
    return list[_annotation(get_args(kind)[0])] if get_origin(kind) is list else kind  # type: ignore[misc]


#: A key that is no name, whose row has no room for its description.
_WORDS = {"class": "Class of the administrator's [classes]; null: the default class."}
_STEPS = {"step": int | None, "num_steps": int | None}
Progress = _made_of(shape.Progress, "Progress", "The progress of a job.", types=_STEPS)
Score = _made_of(
    shape.Score, "Score", "A metric of the last evaluation: the first one of the predictions, else the loss."
)
WaitingFor = _made_of(shape.Wait, "WaitingFor", "The reason why a job does not run.")
AttemptRow = _made_of(
    shape.AttemptRow,
    "AttemptRow",
    "One start of a worker.",
    base=_Open,
    without={"num_starts", "staged_at", "device", "preemption"},
)
JobRow = _made_of(
    shape.Row,
    "JobRow",
    "One job. Another user's, if results are not shared, has only number, state and progress.",
    base=_Open,
    types={"state": State},
    defaults={
        **dict.fromkeys(("class", "staged_at", "preemption", "model", "elapsed_sec", "score")),
        "remark": "",
        "data": list,
    },
    without={"group"},
)
JobShown = _made_of(
    shape.Shown,
    "JobShown",
    "The details of one job, as in `honectl show --json`; later versions may add keys.",
    base=JobRow,
    types={"metrics": dict[str, Any]},
    defaults={"num_preemptions": 0, "edited_at": [], "stopped_early": None},
    without={"group", "slurm", "events"},
)


class JobList(_Answer):
    """Jobs, the newest first."""

    jobs: list[JobRow]  # type: ignore[valid-type]
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
    parameters = []
    for name, schema_of in schema.get("properties", {}).items():
        words = {key: value for key, value in schema_of.items() if key not in {"description", "title"}}
        # A parameter is left out rather than null.
        if "anyOf" in words:
            (one,) = [item for item in words.pop("anyOf") if item.get("type") != "null"]
            words = {**words, **one}
            words.pop("default", None)
        if "$ref" in words:
            words = {"type": "string", "enum": kinds[words["$ref"].rpartition("/")[2]]["enum"]}
        parameters.append(
            {
                "name": name,
                "in": "query",
                "required": False,
                "description": schema_of.get("description", ""),
                "schema": words,
            }
        )
    return parameters
