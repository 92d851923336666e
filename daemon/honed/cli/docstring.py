"""The descriptions of keys, from the source of the types that have them."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
from collections.abc import Mapping

from pydantic import BaseModel


@functools.cache
def docstrings(model: type[BaseModel]) -> Mapping[str, str]:
    """Return the docstring of each field of a model, by name, from the source: the string below the field.

    pydantic would read the source of every model on import (`use_attribute_docstrings`), a third of the daemon's start.
    """
    found = {}
    for item in reversed(model.__mro__):
        if not issubclass(item, BaseModel) or item is BaseModel:
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(item))).body
        assert isinstance(definition, ast.ClassDef)
        for statement, below in itertools.pairwise(definition.body):
            match statement, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = inspect.cleandoc(text)
    return {info.alias or name: found[name] for name, info in model.model_fields.items() if name in found}
