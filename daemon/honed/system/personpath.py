"""Paths of files that a person made or can replace: a type that no function of Python opens.

`open`, `os` and `pathlib` take a `Path`, and follow links, wait for pipes and enter what is mounted on the way. A
`PersonPath` has to be given to untrusted.py, which does none of that.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath


class PersonPath:
    """A directory that only honed or the administrator can replace, and the names below it that others can.

    With `is_own` it is a path of a program that runs as the person: it may enter what the person has mounted, and the
    owner is not asked.
    """

    # Not a dataclass: the completion of a command line loads this module, and has no time for `dataclasses`.
    __slots__ = ("is_own", "names", "root")

    def __init__(self, root: Path, names: tuple[str, ...] = (), *, is_own: bool = False) -> None:
        self.root = root
        self.names = names
        self.is_own = is_own

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PersonPath) and (self.root, self.names) == (other.root, other.names)

    def __hash__(self) -> int:
        return hash((self.root, self.names))

    def __lt__(self, other: PersonPath) -> bool:
        return (self.root, self.names) < (other.root, other.names)

    def __repr__(self) -> str:
        return f"PersonPath({str(self)!r})"

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
        return PersonPath(self.root, self.names + added, is_own=self.is_own)

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
        return PersonPath(self.root, self.names[:-1], is_own=self.is_own)

    def with_name(self, name: str) -> PersonPath:
        return self.parent / name
