"""The names of a model's tensors: as they are stored, and as transformers loads them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Group:
    """Stored tensors from which transformers builds parameters together, such as experts that it stacks."""

    converter: Any  #: transformers' own
    members: Mapping[str, str]  #: stored name → the pattern of the converter that it fits

    def convert(self, parameter: str, tensors: Callable[[str], Any], model: Any) -> dict[str, Any]:
        """Build the group's parameters from its stored tensors; they may be on meta. `parameter` is the first."""
        converter = copy.deepcopy(self.converter)
        for name, pattern in self.members.items():
            converter.add_tensor(parameter, name, pattern, tensors(name))
        made = converter.convert(parameter, model=model, config=model.config)
        return {name: item[0] if isinstance(item, list) else item for name, item in made.items()}


@dataclass(frozen=True)
class Names:
    """Stored names, and the parameters and buffers loaded from them; tensors that transformers ignores are in neither.

    Both follow transformers' own rules.
    """

    whole: dict[str, str]  #: stored name → the parameter that is loaded from it alone
    groups: dict[str, Group]  #: the first parameter of every group
    first: dict[str, str]  #: stored name → the first parameter of its group

    def parameter(self, stored: str) -> str | None:
        """Return the parameter or buffer that a stored tensor is loaded into; None if transformers ignores it."""
        return self.first.get(stored) or self.whole.get(stored)

    def built(self, shapes: Mapping[str, Any], model: Any) -> dict[str, dict[str, Any]]:
        """Return the shapes of all parameters of every group, by its first one, given those of the stored tensors."""
        import torch

        def empty(name: str) -> Any:
            return torch.empty(tuple(shapes[name]), device="meta")

        return {
            first: {name: tuple(item.shape) for name, item in group.convert(first, empty, model).items()}
            for first, group in self.groups.items()
        }


def read(model: Any, stored: Iterable[str]) -> Names:
    """Find the place of every stored name in a model, which may be on meta, and not wrapped by peft."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    changes = get_model_conversion_mapping(model)
    renamings = [change for change in changes if not isinstance(change, WeightConverter)]
    converters = [change for change in changes if isinstance(change, WeightConverter)]
    wanted = model.state_dict()
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    whole: dict[str, str] = {}
    members: dict[str, dict[str, str]] = {}
    for name in sorted(stored, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, wanted)
        if renamed not in wanted and name in wanted:  # as transformers does
            renamed, pattern = rename_source_key(name, [], [], model.base_model_prefix, wanted)
        if pattern is not None and renamed in wanted:
            members.setdefault(renamed, {})[name] = pattern
        elif renamed in wanted:
            whole[name] = renamed
    groups = {first: Group(by_pattern[next(iter(member.values()))], member) for first, member in members.items()}
    return Names(whole, groups, {name: first for first, member in members.items() for name in member})
