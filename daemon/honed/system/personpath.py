"""Paths of files that a person made or can replace: a type that no function of Python opens.

`open`, `os` and `pathlib` take a `Path`, and follow links, wait for pipes and enter what is mounted on the way. A
`PersonPath` has to be given to untrusted.py, which does none of that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, order=True, slots=True)
class PersonPath:
    """A directory that only honed or the administrator can replace, and the names below it that others can."""

    root: Path
    names: tuple[str, ...] = ()
    #: True for a program that runs as the person: it may enter what the person has mounted, and the owner is not asked.
    is_own: bool = field(default=False, compare=False)

    @classmethod
    def own(cls, path: Path) -> PersonPath:
        """Return a path of the user that this program runs as; only its last name is not followed if it is a link."""
        return cls(path.parent, (path.name,), is_own=True)

    @classmethod
    def of(cls, path: Path, num_names: int) -> PersonPath:
        """Return a path of which others can replace the last `num_names` names."""
        return cls(path.parents[num_names - 1], path.parts[-num_names:])

    def __truediv__(self, names: str) -> PersonPath:
        """Join. Raises ValueError for names that lead elsewhere than down."""
        added = tuple(names.split("/"))
        if not {"", ".", ".."}.isdisjoint(added):
            raise ValueError(f"{names!r}: not a name below {self}")
        return PersonPath(self.root, self.names + added, self.is_own)

    def __str__(self) -> str:
        return str(self.root.joinpath(*self.names))

    @property
    def name(self) -> str:
        return self.names[-1] if self.names else self.root.name

    @property
    def stem(self) -> str:
        return PurePosixPath(self.name).stem

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> PersonPath:
        """The directory that it is in. Raises ValueError for the root, whose parent is not a person's."""
        if not self.names:
            raise ValueError(f"{self}: the directory above it is not a person's")
        return PersonPath(self.root, self.names[:-1], self.is_own)

    def with_name(self, name: str) -> PersonPath:
        return self.parent / name
