"""Checks of the chat template that renders a job's rows: whether there is one, and whether it is valid Jinja."""

from __future__ import annotations

import difflib
import functools
import re
from pathlib import Path
from typing import Any

from honed.inputs.basemodel import BaseModelInfo
from honed.inputs.row import RESERVED_KWARGS
from honed.spec import variant
from honed.spec.spec import JobSpec
from honed.system import quote
from honed.system.error import HonedError, ModelError, SpecError, said

#: Bytes of a chat template that are read.
MAX_TEMPLATE_BYTES = 1024 * 1024
#: Characters of the longest template whose check is remembered.
MAX_REMEMBERED = 64 * 1024


def check(job_spec: JobSpec, model: BaseModelInfo | None) -> bool:
    """Return True if there is a template, or the model is not there yet and may have one.

    Raises SpecError or ModelError for a template that does not compile.
    """
    if reserved := sorted(RESERVED_KWARGS & job_spec.chat_template_kwargs.keys()):
        raise SpecError(
            f"chat_template_kwargs: `{reserved[0]}` cannot be passed to a chat template",
            hint="remove it",
            fix={f"chat_template_kwargs.{reserved[0]}": None},
        )
    if (asked := job_spec.training_chat_template) not in (None, variant.ASKED):
        _compile(_read(Path(asked), "training_chat_template"), f"training_chat_template: {asked}", SpecError)
    if job_spec.chat_template is not None:
        _compile(_read(Path(job_spec.chat_template)), f"chat_template: {job_spec.chat_template}", SpecError)
    for_rows(job_spec, model)
    if job_spec.chat_template is not None or model is None:
        return True
    if model.chat_template is not None:
        _compile(model.chat_template, f"{model.path}: the chat template", ModelError)
    return model.has_chat_template


def for_rows(job_spec: JobSpec, model: BaseModelInfo | None) -> Path | None:
    """Return the template that only rows are rendered by; None if the job names none, or its model is not there yet.

    Raises SpecError if the base model has no chat template for predictions, or there is no such variant of it.
    """
    if job_spec.training_chat_template is None or (job_spec.chat_template is None and model is None):
        return None
    if job_spec.chat_template is not None:
        template: str | None = _read(Path(job_spec.chat_template))
    else:
        template = model.chat_template if model else None
    if template is None:
        raise SpecError(
            "training_chat_template: the base model has no chat template, which predictions need",
            hint="set chat_template to the file: it is used for rows and predictions",
        )
    return variant.locate(job_spec.training_chat_template, template)


def unused(job_spec: JobSpec, model: BaseModelInfo | None) -> list[str]:
    """Return warnings about names of chat_template_kwargs that occur in none of the job's templates."""
    if not job_spec.chat_template_kwargs or model is None or (own := source(job_spec, model)) is None:
        return []
    other = for_rows(job_spec, model)
    words = set(re.findall(r"\w+", own + (_read(other, "training_chat_template") if other is not None else "")))
    warnings = []
    for name in sorted(job_spec.chat_template_kwargs.keys() - words):
        near = difflib.get_close_matches(name, words, n=1, cutoff=0.8)
        meant = quote.aside(f" (did you mean {near[0]}?)") if near else ""
        warnings.append(
            f"chat_template_kwargs.{quote.name(name)}: the chat template does not use it, so it has no effect{meant}"
        )
    return warnings


def source(job_spec: JobSpec, model: BaseModelInfo) -> str | None:
    """Return the source of the chat template: the job's, or the base model's."""
    return model.chat_template if job_spec.chat_template is None else _read(Path(job_spec.chat_template))


def _read(path: Path, key: str = "chat_template") -> str:
    if not path.is_file():  # a pipe is none either: reading it would block for ever
        raise SpecError(f"{key}: no such file: {path}", hint="use a file with a Jinja chat template")
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_TEMPLATE_BYTES)
    except (OSError, ValueError) as error:
        raise SpecError(
            f"{key}: {path}: {said(error)}", hint="it must be UTF-8 and readable by the job's submitter"
        ) from error
    if not text.strip():
        raise SpecError(f"{key}: {path} is empty", hint="use a file with a Jinja chat template")
    if "{{" not in text and "{%" not in text:
        raise SpecError(
            f"{key}: {path} is not a Jinja template: without {{{{ or {{% it renders every row the same",
            hint="use a file with a Jinja chat template",
        )
    return text


def _compile(text: str, where: str, kind: type[HonedError]) -> None:
    """Raise `kind` for a template that does not compile."""
    look = _fault if len(text) <= MAX_REMEMBERED else _fault.__wrapped__
    if fault := look(text):
        raise kind(f"{where}{fault}", hint="correct it, or use another template with chat_template:")


@functools.lru_cache(maxsize=16)  # compiling takes milliseconds, and many jobs have the same base model
def _fault(text: str) -> str | None:
    """Return the fault of a template, parsed with transformers' own `{% generation %}`; None if it compiles."""
    import jinja2.ext  # noqa: PLC0415
    import jinja2.nodes  # noqa: PLC0415
    import jinja2.sandbox  # noqa: PLC0415

    class Generation(jinja2.ext.Extension):  # type: ignore[misc]
        tags = {"generation"}  # noqa: RUF012  (jinja2's own form)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(
                line
            )

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(extensions=[Generation, jinja2.ext.loopcontrols])
    try:
        environment.compile(text)
    except (jinja2.TemplateError, ValueError, RecursionError) as error:  # a number with thousands of digits
        line = getattr(error, "lineno", None)
        at = f", line {line}" if line else ""
        return f"{at}: not a Jinja template: {quote.mark(str(error))}"
    return None
