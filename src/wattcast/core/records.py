"""``dataclass`` of the standard library, made in a tenth of the time where it is frozen.

The standard library compiles six functions for each frozen class, a millisecond and more in all. A
prediction meets a hundred classes: more time than it takes to predict. Here only ``__init__`` is
compiled, when it is first asked for; the other five are common to all classes. Fields, defaults,
``replace`` and type checkers see an ordinary dataclass."""

from __future__ import annotations

import sys
from dataclasses import KW_ONLY as KW_ONLY
from dataclasses import MISSING, Field, FrozenInstanceError
from dataclasses import asdict as asdict
from dataclasses import field as field
from dataclasses import fields as fields
from dataclasses import is_dataclass as is_dataclass
from dataclasses import replace as replace
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:
    from dataclasses import dataclass as _standard_dataclass

    def dataclass(cls=None, /, *, frozen=False, slots=False, repr=True, eq=True, **options):
        """Make a class a dataclass; only frozen ones without slots are made here."""
        if cls is None:
            return lambda cls: dataclass(
                cls, frozen=frozen, slots=slots, repr=repr, eq=eq, **options
            )
        if not frozen or slots:
            return _standard_dataclass(cls, frozen=frozen, slots=slots, repr=repr, eq=eq, **options)
        above = map(vars, cls.__mro__[1:])
        bases = [base["__dataclass_params__"] for base in above if "__dataclass_params__" in base]
        written = cls.__annotations__
        cls.__annotations__ = {
            name: kind if _may_be_special(kind) else object for name, kind in written.items()
        }
        for parameters in bases:
            parameters.frozen = False  # or it would compile what refuses changes once more
        _standard_dataclass(cls, init=False, repr=False, eq=False, **options)
        for parameters in (*bases, cls.__dataclass_params__):
            parameters.frozen = True  # so that a class that derives from it must be frozen too
        cls.__annotations__ = written
        for name in written.keys() & cls.__dataclass_fields__.keys():
            cls.__dataclass_fields__[name].type = written[name]
        own = vars(cls)
        made = {"__setattr__": _refuse_change, "__delattr__": _refuse_change}
        if "__init__" not in own:
            made["__init__"] = _InitWhenNeeded(cls)
        if repr and "__repr__" not in own:
            made["__repr__"] = _show_fields
        if eq:
            made |= _compare_fields([one.name for one in fields(cls) if one.compare], own)
        for name, method in made.items():
            setattr(cls, name, method)
        return cls


def _may_be_special(kind: object) -> bool:
    """Whether an annotation may be no field's; the standard library looks closely at each, which
    takes long.
    """
    return not isinstance(kind, str) or "ClassVar" in kind or kind == "KW_ONLY"


class _InitWhenNeeded:
    """``__init__`` of a class, compiled when it is first asked for: many classes have no instance
    in a command.
    """

    def __init__(self, owner: type[Any]) -> None:
        self.owner = owner

    def __get__(self, instance: object, kind: type[Any] | None = None) -> Any:
        self.owner.__init__ = init = _compile_init(self.owner)
        return init if instance is None else init.__get__(instance)


_MAKE = type(
    "Factory", (), {"__repr__": lambda self: "<factory>"}
)()  # stands for an argument that was not given, where a function makes its value


def _compile_init(cls: type[Any]) -> Any:
    """Compile ``__init__``: arguments in the order of fields, those by name alone behind the
    others.
    """
    given = sorted((one for one in fields(cls) if one.init), key=lambda one: one.kw_only is True)
    names: dict[str, Any] = {"_set": object.__setattr__, "_MAKE": _MAKE}
    arguments = ["self"]
    for one in given:
        if one.kw_only and "*" not in arguments:
            arguments.append("*")
        if one.default is not MISSING:
            names[f"_default_{one.name}"] = one.default
            arguments.append(f"{one.name}=_default_{one.name}")
        else:
            arguments.append(one.name + ("" if one.default_factory is MISSING else "=_MAKE"))
    lines = [line for one in fields(cls) if (line := _assign_field(one, names))]
    lines += ["self.__post_init__()"] * hasattr(cls, "__post_init__")
    code = f"def make({', '.join(names)}):\n def __init__({', '.join(arguments)}):\n  "
    found: dict[str, Any] = {}
    code += "\n  ".join(lines or ["pass"]) + "\n return __init__"
    exec(code, vars(sys.modules[cls.__module__]), found)  # noqa: S102
    init = found["make"](**names)
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    init.__annotations__ = {one.name: one.type for one in given} | {"return": None}
    return init


def _assign_field(one: Field[Any], names: dict[str, Any]) -> str:
    """Return the line of ``__init__`` that sets a field; none where the default of the class is its
    value.
    """
    value = one.name
    if one.default_factory is not MISSING:
        names[f"_make_{one.name}"] = one.default_factory
        value = f"_make_{one.name}()" + f" if {one.name} is _MAKE else {one.name}" * one.init
    elif not one.init:
        return ""
    return f"_set(self, {one.name!r}, {value})"


def _refuse_change(self: object, name: str, *value: object) -> None:
    raise FrozenInstanceError(f"cannot {'assign to' if value else 'delete'} field {name!r}")


@recursive_repr()
def _show_fields(self: Any) -> str:
    shown = (f"{one.name}={getattr(self, one.name)!r}" for one in fields(self) if one.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _compare_fields(names: list[str], own: Any) -> dict[str, Any]:
    """Return ``__eq__`` and ``__hash__`` over the named fields, but for those that a class has of
    its own.
    """
    values: Any = (
        attrgetter(*names)
        if len(names) > 1
        else lambda self: tuple(getattr(self, name) for name in names)
    )

    def equal(self: object, other: object) -> bool:
        return (
            bool(values(self) == values(other))
            if other.__class__ is self.__class__
            else NotImplemented
        )

    made: dict[str, Any] = (
        {"__hash__": lambda self: hash(values(self))} if own.get("__hash__") is None else {}
    )
    return made if "__eq__" in own else made | {"__eq__": equal}
