"""The names of a model's tensors: as they are stored, and as transformers loads them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Member:
    """A stored tensor that is one of several from which a parameter is built, in transformers' own terms."""

    parameter: str
    pattern: str
    converter: Any


@dataclass(frozen=True)
class Names:
    """Stored names, and the parameters and buffers loaded from them; tensors that transformers ignores are in neither.

    Both follow transformers' own rules.
    """

    whole: dict[str, str]  #: stored name → the parameter that is loaded from it alone
    fused: dict[str, Member]  #: stored name → its place in a parameter that is loaded from several

    def parameter(self, stored: str) -> str | None:
        """Return the parameter or buffer that a stored tensor is loaded into; None if transformers ignores it."""
        found = self.fused.get(stored)
        return self.whole.get(stored) if found is None else found.parameter


def read(model: Any, stored: Iterable[str]) -> Names:
    """Find the place of each stored name in a model, which may be on meta, and not wrapped by peft."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    changes = get_model_conversion_mapping(model)
    renamings = [change for change in changes if not isinstance(change, WeightConverter)]
    converters = [change for change in changes if isinstance(change, WeightConverter)]
    wanted = model.state_dict()
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    whole, fused = {}, {}
    for name in sorted(stored, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, wanted)
        if renamed not in wanted and name in wanted:  # as transformers does
            renamed, pattern = rename_source_key(name, [], [], model.base_model_prefix, wanted)
        if pattern is not None and renamed in wanted:
            fused[name] = Member(renamed, pattern, by_pattern[pattern])
        elif renamed in wanted:
            whole[name] = renamed
    return Names(whole, fused)
