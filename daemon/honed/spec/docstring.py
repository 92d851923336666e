"""The descriptions of keys, from the source of the types that have them: the string below each."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
from collections.abc import Mapping

from pydantic import BaseModel


def of_class(kind: type) -> dict[str, str]:
    """Return the docstring of every key that a class itself declares."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for statement, below in itertools.pairwise(definition.body):
        match statement, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = inspect.cleandoc(text)
    return docs


@functools.cache
def docstrings(model: type[BaseModel]) -> Mapping[str, str]:
    """Return the docstring of every field of a model, by name.

    pydantic would read the source of every model on import (`use_attribute_docstrings`), a third of the daemon's start.
    """
    docs: dict[str, str] = {}
    for item in reversed(model.__mro__):
        if issubclass(item, BaseModel) and item is not BaseModel:
            docs |= of_class(item)
    return {info.alias or name: docs[name] for name, info in model.model_fields.items() if name in docs}
