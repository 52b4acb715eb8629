"""Tables of things by name, each loaded when it is asked for: listing names imports nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar, cast

from samkv_integrations.errors import InvalidOption, MissingExtra

T = TypeVar("T")


class Table(Mapping[str, T], Generic[T]):
    """Name -> a thing that has this ``name``: our own in order, then those of other distributions.

    kind: what the things are, in errors. of: their class. places: name -> ``module:ATTRIBUTE`` of
    our own. group: of the entry points by which other distributions add more; empty for none.

    Looking a name up raises KeyError if it is unknown, MissingExtra if ours needs a module that is
    not installed, and InvalidOption if that of another distribution cannot be loaded. If two
    distributions use the same name, looking up and listing names raise InvalidOption.
    """

    def __init__(self, kind: str, of: type, places: Mapping[str, str], *, group: str = "") -> None:
        self._kind, self._type, self._places, self._group = kind, of, places, group
        self._loaded: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        if name not in self._loaded:
            if place := self._places.get(name):
                point = EntryPoint(name=name, value=place, group=self._group)
                try:
                    self._loaded[name] = point.load()
                except ModuleNotFoundError as error:  # a module that an extra installs
                    raise MissingExtra.of(error.name or place, "transformers") from error
            else:
                self._loaded[name] = self._load(self._others[name])
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._places
        yield from self._others

    def __len__(self) -> int:
        return len(self._places) + len(self._others)

    def __contains__(self, name: object) -> bool:
        return name in self._places or name in self._others

    def __repr__(self) -> str:
        return f"<{self._kind}s: {', '.join(self)}>"

    @cached_property
    def _others(self) -> Mapping[str, EntryPoint]:
        """The entry points of the group by name."""
        found: dict[str, EntryPoint] = {}
        points = entry_points(group=self._group) if self._group else ()
        for point in sorted(points, key=lambda each: (each.name, _distribution(each))):
            if point.name in self._places or point.name in found:
                other = found.get(point.name)
                owner = "samkv-integrations" if other is None else _distribution(other)
                raise InvalidOption(
                    f"{self._kind} {point.name!r} of the distribution {_distribution(point)!r} "
                    f"has the name of one of {owner!r}; rename its entry point in the group "
                    f"{self._group!r}, or uninstall it"
                )
            found[point.name] = point
        return found

    def _load(self, point: EntryPoint) -> T:
        whose = f"{self._kind} {point.name!r} of the distribution {_distribution(point)!r}"
        try:
            loaded = point.load()
        except (Exception, SystemExit) as error:  # whatever the module does when it is imported
            raise InvalidOption(
                f"{whose} could not be loaded from {point.value!r} "
                f"({type(error).__name__}: {error}); repair or uninstall the distribution, or "
                f"choose another {self._kind}"
            ) from error
        if not isinstance(loaded, self._type) or getattr(loaded, "name", None) != point.name:
            raise InvalidOption(
                f"{whose} is {loaded!r:.80}; {point.value!r} must be a {self._type.__name__} whose "
                f"name is {point.name!r}"
            )
        return cast("T", loaded)


def _distribution(point: EntryPoint) -> str:
    return point.dist.name if point.dist else "unknown"
