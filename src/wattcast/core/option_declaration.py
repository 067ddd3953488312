"""How an option is declared, once for Python, the command line, HTTP and the help.

An option is an annotated field of a frozen dataclass, or an annotated parameter of a function:

    batch: Annotated[int, Option("Sequences or images at once.", least=1)] = 1
    clock_hz: Annotated[float | None, Option("Lock the clock, such as 1830MHz.", unit="Hz")] = None

The field says the type and the default, ``Option`` the rest. A field holds SI units and enums;
people write words and units. ``clock_hz`` is therefore ``clock="1830MHz"`` in Python, ``--clock
1830MHz`` on the command line, and ``"clock_hz": 1.83e9`` over HTTP. ``parse_group`` makes a
dataclass of what people write."""

from __future__ import annotations

import builtins
import inspect
import sys
import types
import typing
from collections.abc import (
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import (
    MISSING,
    dataclass,
    fields,
)
from enum import StrEnum
from functools import cache, cached_property
from typing import (
    Any,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from wattcast.core.errors import (
    bad_value,
    bad_word,
    check_names,
    resolve_name,
)
from wattcast.core.units import Dtype, parse_amount

REQUIRED = inspect.Parameter.empty  # the default of an option that must be given
_SUFFIXES = {
    "Hz": "_hz",
    "W": "_w",
    "s": "_s",
    "C": "_c",
    "/s": "_per_s",
    "byte": "_byte",
    "byte/s": "_byte_per_s",
}
Group = TypeVar("Group")
_Word = TypeVar("_Word", bound=StrEnum)


@dataclass(frozen=True)
class Option:
    """What an option means, whoever asks for it.

    ``parse(value, where)`` replaces the usual reading of a value. A value of ``commas`` is a
    sequence, which the command line takes as one text with commas between."""

    help: str
    name: str = ""  # on a command line, where it is not the name of the field
    hidden: bool = False
    positional: bool = False
    panel: str = ""  # the heading of the help under which rarely used options stand
    unit: str | None = None  # of a quantity; "" for a share, which is written 20% or 0.2
    choices: tuple[str, ...] = ()  # words, where the type is not an enum
    least: float | None = None
    most: float | None = None
    above: float | None = None  # the value must be larger than this
    commas: bool = False
    parse: Callable[[Any, str], Any] | None = None
    keyword: str = ""  # in Python and on a command line, where it is not the name of the field


@dataclass(frozen=True)
class DeclaredOption:
    """An option with the name, type and default of the field or parameter that it belongs to."""

    field: str
    kind: Any
    default: Any
    option: Option

    @cached_property
    def keyword(self) -> str:
        """The name in Python: the field's without its unit."""
        suffix = _SUFFIXES.get(self.option.unit or "", "")
        return self.option.keyword or self.field.removesuffix(suffix)

    @cached_property
    def flag(self) -> str:
        """The option on a command line: ``--power-limit``, or ``--gzip/--plain`` for yes and no."""
        names = (self.option.name or self.keyword).replace("_", "-").split("/")
        return "/".join(f"--{name}" for name in names)

    @property
    def is_required(self) -> bool:
        """Whether it must be given."""
        return self.default is REQUIRED

    @cached_property
    def is_sequence(self) -> bool:
        """Whether it takes several values."""
        return any(get_origin(kind) in (list, tuple, Sequence) for kind in self.members)

    @cached_property
    def members(self) -> tuple[Any, ...]:
        """The types that a value may have, None left out."""
        is_union = get_origin(self.kind) in (types.UnionType, typing.Union)
        members = get_args(self.kind) if is_union else (self.kind,)
        return tuple(member for member in members if member is not types.NoneType)

    @cached_property
    def element_members(self) -> tuple[Any, ...]:
        """The types of one of several values."""
        if not self.is_sequence:
            return self.members
        sequence = next(kind for kind in self.members if get_origin(kind) is not None)
        element = get_args(sequence)[0]
        is_union = get_origin(element) in (types.UnionType, typing.Union)
        return get_args(element) if is_union else (element,)

    @cached_property
    def enum(self) -> type[StrEnum] | None:
        """The enum whose words it takes, if there is one."""
        for member in self.element_members:
            if isinstance(member, type) and issubclass(member, StrEnum):
                return member
        return None

    @property
    def words(self) -> tuple[str, ...]:
        """The words that it takes; empty where any text or a number is taken."""
        return self.option.choices or tuple(map(str, self.enum or ()))


@cache
def list_declared(source: Callable[..., Any]) -> tuple[DeclaredOption, ...]:
    """Return the options that a dataclass or a function declares, in order."""
    if inspect.isclass(source):
        hints = get_type_hints(source, localns=_known_names(source), include_extras=True)
        defaults = {item.name: _read_default(item) for item in fields(cast(Any, source))}
    else:
        parameters = inspect.signature(source, eval_str=True).parameters
        hints = {name: parameter.annotation for name, parameter in parameters.items()}
        defaults = {name: parameter.default for name, parameter in parameters.items()}
    declared = []
    for name, default in defaults.items():
        option = find_option(hints[name])
        if option is not None:
            declared.append(DeclaredOption(name, get_args(hints[name])[0], default, option))
    return tuple(declared)


def find_option(annotation: Any) -> Option | None:
    """Return the declaration in an annotation, if there is one."""
    if get_origin(annotation) is not typing.Annotated:
        return None
    marks = [mark for mark in get_args(annotation)[1:] if isinstance(mark, Option)]
    return marks[0] if marks else None


def _read_default(item: Any) -> Any:
    if item.default is not MISSING:
        return item.default
    return REQUIRED if item.default_factory is MISSING else item.default_factory()


def _known_names(source: type) -> Mapping[str, Any]:
    """Return the names in which annotations are resolved.

    Names that are imported for type checkers alone mean nothing here: any value will do.
    """

    class KnownNames(dict[str, Any]):
        def __missing__(self, name: str) -> Any:
            module = vars(sys.modules[source.__module__])
            return module.get(name, getattr(builtins, name, Any))

    return KnownNames()


def parse_word(
    kind: type[_Word],
    name: str,
    value: object,
) -> _Word:
    """Return the member of an enum that a user's word names."""
    if kind is Dtype and isinstance(value, str):
        return cast(_Word, Dtype.parse(value))
    try:
        return kind(str(value))
    except ValueError:
        raise bad_word(name, kind, value) from None


def parse_group(group: type[Group], keywords: Mapping[str, Any]) -> Group:
    """Make a dataclass of options from keywords as people write them."""
    declarations = list_declared(cast(Any, group))
    by_keyword = {declared.keyword: declared for declared in declarations}
    values = {}
    for name, value in keywords.items():
        declared = by_keyword[name]
        values[declared.field] = parse_option_value(declared, value)
    return group(**values)


def parse_option_value(declared: DeclaredOption, value: Any) -> Any:
    """Return a value as the field of an option holds it: in SI units, an enum, a whole number."""
    if value is None and declared.default in (None, ()):
        return declared.default
    if declared.option.parse is not None:
        return declared.option.parse(value, declared.keyword)
    if declared.is_sequence:
        is_single = not isinstance(value, str | Iterable)
        items = [value] if is_single else value
        if isinstance(items, str):
            items = items.split(",")
        parsed = [_parse_item(declared, item) for item in items or ()]
        is_list = any(get_origin(kind) is list for kind in declared.members)
        return parsed if is_list else tuple(parsed)
    return _parse_item(declared, value)


def _parse_item(declared: DeclaredOption, value: Any) -> Any:
    option = declared.option
    where = declared.keyword
    if option.unit is not None:
        is_sweep = not isinstance(value, str | int | float)
        return value if is_sweep else _parse_quantity(option, value, where)
    if declared.enum is not None:
        if declared.enum is Dtype:
            return Dtype.parse(str(value))
        return declared.enum(resolve_name(where.replace("_", " "), str(value), declared.enum))
    if option.choices:
        check_names(where, value, option.choices)
    if int in declared.element_members and str not in declared.element_members:
        return _parse_count(option, value, where)
    return value


def _parse_quantity(
    option: Option,
    value: Any,
    where: str,
) -> float:
    least = 0.0 if option.least is None else option.least
    if option.above is not None:
        least = option.above
    most = float("inf") if option.most is None else option.most
    is_inclusive = option.above is None
    return parse_amount(
        value,
        option.unit or "",
        where,
        least=least,
        most=most,
        inclusive=is_inclusive,
    )


def _parse_count(
    option: Option,
    value: Any,
    where: str,
) -> Any:
    """Check a whole number, which may be written as text where several stand with commas
    between.
    """
    if isinstance(value, str) and option.commas and value.strip().isdecimal():
        value = int(value)
    is_whole = hasattr(value, "__index__") and not isinstance(value, bool)
    is_low = is_whole and option.least is not None and value < option.least
    is_high = is_whole and option.most is not None and value > option.most
    if is_whole and not is_low and not is_high:
        return value
    expected = "a whole number"
    if option.least is not None and option.most is not None:
        expected = f"from {option.least:g} to {option.most:g}"
    elif option.least is not None:
        expected = f"a whole number of at least {option.least:g}"
    raise bad_value(where, expected, value)


def describe_choices(words: Iterable[str]) -> str:
    """Return words as help names them: ``prefill|decode``."""
    return "|".join(words)
