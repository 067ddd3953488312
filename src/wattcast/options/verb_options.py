"""How a verb takes its options: groups, or some options of a group."""

from __future__ import annotations

import inspect
from collections.abc import (
    Callable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from functools import cached_property
from typing import (
    Any,
    TypeVar,
    cast,
)

from wattcast.core.errors import bad_value, unknown_name
from wattcast.core.option_declaration import (
    DeclaredOption,
    list_declared,
    parse_group,
)

Group = TypeVar("Group")
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class GroupPart:
    """Some options of a group, by their keywords; no names: all of them."""

    group: type
    names: tuple[str, ...] = ()

    @property
    def declared(self) -> tuple[DeclaredOption, ...]:
        """The options of this part, in the order of the group."""
        options = list_declared(cast(Any, self.group))
        return tuple(o for o in options if not self.names or o.keyword in self.names)


def part_of(group: type, *names: str) -> GroupPart:
    """Return some options of a group."""
    return GroupPart(group, names)


class ParsedOptions:
    """The options of one call by group: ``chosen[Traffic]`` is a ``Traffic``."""

    def __init__(
        self,
        parts: Sequence[GroupPart],
        keywords: Mapping[str, object],
    ) -> None:
        self._parts = {part.group: part for part in parts}
        self._keywords = keywords

    def __getitem__(self, group: type[Group]) -> Group:
        return parse_group(group, self.select_keywords(group))

    def select_keywords(self, group: type) -> dict[str, Any]:
        """Return the keywords of a group as they were written."""
        names = {option.keyword for option in self._parts[group].declared}
        return {name: value for name, value in self._keywords.items() if name in names}


class VerbOptions:
    """The options that one verb takes, in Python, on the command line and in help."""

    def __init__(
        self,
        verb: str,
        *parts: type | GroupPart,
    ) -> None:
        self.verb = verb
        self.parts = [part if isinstance(part, GroupPart) else GroupPart(part) for part in parts]

    @cached_property
    def declared(self) -> dict[str, DeclaredOption]:
        """The options by keyword."""
        options = [option for part in self.parts for option in part.declared]
        return {option.keyword: option for option in options}

    def check_keywords(self, keywords: Mapping[str, object]) -> None:
        """Raise an error with the nearest names where the verb does not take a keyword."""
        for name in keywords:
            if name not in self.declared:
                hint = f"Options of {self.verb}: {', '.join(self.declared)}."
                raise unknown_name("option", name, self.declared, hint)

    def parse(self, keywords: Mapping[str, object]) -> ParsedOptions:
        """Return the groups of these keywords; what is not given has its default."""
        self.check_keywords(keywords)
        for name, option in self.declared.items():
            if option.is_required and name not in keywords:
                raise bad_value(f"{self.verb}: {name}", option.option.help.rstrip("."), "nothing")
        return self.select(keywords)

    def select(self, keywords: Mapping[str, object]) -> ParsedOptions:
        """Return the groups of keywords that were checked already."""
        return ParsedOptions(self.parts, keywords)

    def sign(self, function: Function) -> Function:
        """Show these options in the signature of a function that takes them as ``**options``."""
        parameters = inspect.signature(function).parameters
        fixed = [p for p in parameters.values() if p.kind is not p.VAR_KEYWORD]
        options = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option.default)
            for name, option in self.declared.items()
        ]
        vars(function)["__signature__"] = inspect.Signature([*fixed, *options])
        return function
