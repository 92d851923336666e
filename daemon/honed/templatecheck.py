"""The chat template that a job's rows are rendered by: whether there is one, and whether it is Jinja."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from honed.basemodel import BaseModelInfo
from honed.error import HonedError, ModelError, SpecError
from honed.spec import JobSpec

#: Bytes of a chat template that is read.
MAX_TEMPLATE_BYTES = 1024 * 1024
#: Characters of one that is remembered.
MAX_REMEMBERED = 64 * 1024


def check(job_spec: JobSpec, model: BaseModelInfo | None) -> bool:
    """Whether there is a template; a model that is not there yet may have one.

    Raises SpecError or ModelError for one that does not compile.
    """
    if job_spec.chat_template is not None:
        _compile(_read(Path(job_spec.chat_template)), f"chat_template: {job_spec.chat_template}", SpecError)
        return True
    if model is None:
        return True
    if model.chat_template is not None:
        _compile(model.chat_template, f"{model.path}: the chat template", ModelError)
    return model.has_chat_template


def _read(path: Path) -> str:
    if not path.is_file():  # nor a pipe, on which reading would wait for ever
        raise SpecError(f"chat_template: no such file: {path}", hint="name a file with a Jinja chat template")
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_TEMPLATE_BYTES)
    except (OSError, ValueError) as error:
        raise SpecError(
            f"chat_template: {path}: {error}", hint="it is UTF-8, and the group honed-job can read it"
        ) from error
    if not text.strip():
        raise SpecError(f"chat_template: {path} is empty", hint="name a file with a Jinja chat template")
    return text


def _compile(text: str, where: str, kind: type[HonedError]) -> None:
    """Where jinja2 is missing, the packages' check tells."""
    try:
        import jinja2  # noqa: F401, PLC0415  (it belongs to the worker's packages)
    except ImportError:
        return
    look = _fault if len(text) <= MAX_REMEMBERED else _fault.__wrapped__
    if fault := look(text):
        raise kind(f"{where}{fault}", hint="correct it, or name another as chat_template:")


@functools.lru_cache(maxsize=16)  # compiling takes milliseconds, and many jobs have the same base model
def _fault(text: str) -> str | None:
    """What is wrong with a template, parsed with transformers' own `{% generation %}`."""
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
        return f"{at}: not a Jinja template: {error}"
    return None
