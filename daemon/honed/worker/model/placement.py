"""Which stored tensors become which of a model's own, by transformers' rules for loading: names, and conversions.

A parameter may be stored as several tensors (experts), and a stored tensor may be several parameters.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Source:
    """The stored tensors from which one or more parameters are made."""

    converter: Any
    members: list[tuple[str, str]] = field(default_factory=list)  #: stored name, and the pattern that it matched


class Placement:
    """The places of a checkpoint's tensors in a model, which may be without weights."""

    def __init__(self, model: Any, names: Iterable[str]) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key

        self._model = model
        self.tensors: dict[str, Any] = model.state_dict()
        changes = get_model_conversion_mapping(model)
        self._renamings = [change for change in changes if isinstance(change, WeightRenaming)]
        self._converters = [change for change in changes if isinstance(change, WeightConverter)]
        by_pattern = {pattern: each for each in self._converters for pattern in each.source_patterns}
        self._sources: dict[str, Source] = {}
        self.unread: list[str] = []  #: stored names that have no place
        for name in sorted(names, key=dot_natural_key):
            place, pattern = self._place(name)
            if place not in self.tensors:
                self.unread.append(name)
                continue
            converter = WeightRenaming(name, place) if pattern is None else by_pattern[pattern]
            source = self._sources.setdefault(place, Source(copy.deepcopy(converter)))
            source.members.append((name, pattern or name))

    def _place(self, name: str) -> tuple[str, str | None]:
        from transformers.core_model_loading import rename_source_key

        prefix, own = self._model.base_model_prefix, self.tensors
        place, pattern = rename_source_key(name, self._renamings, self._converters, prefix, own)
        if place not in own and name in own:
            place, pattern = rename_source_key(name, [], [], prefix, own)
        return place, pattern

    def values(self, read: Callable[[str], Any]) -> Iterator[tuple[str, Any]]:
        """Yield each parameter that is stored, with its value, from stored tensors as `read` returns them."""
        for place, source in self._sources.items():
            converter = copy.deepcopy(source.converter)
            for name, pattern in source.members:
                converter.add_tensor(place, name, pattern, read(name))
            made = converter.convert(place, model=self._model, config=self._model.config)
            for parameter, value in made.items():
                yield parameter, value[0] if isinstance(value, list) else value

    def missing(self, found: Iterable[str]) -> list[str]:
        """Return the parameters that are not among the found ones, nor tied to one that is, nor made anew by a load."""
        have = set(found)
        ties = dict(getattr(self._model, "all_tied_weights_keys", None) or {})
        groups: dict[str, set[str]] = {}
        for target, source in ties.items():
            groups.setdefault(source, {source}).add(target)
        for group in groups.values():
            if group & have:
                have |= group
        remade = getattr(self._model, "_keys_to_ignore_on_load_missing", None) or ()
        return sorted(
            name for name in self.tensors if name not in have and not any(re.search(each, name) for each in remade)
        )
