"""What all operators share: fields that are checked when it is made, equality and hash that are worked out once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from operator import itemgetter
from typing import ClassVar, TypeVar

from wattcast.dtypes import Dtype
from wattcast.errors import bad_value
from wattcast.workload.sizes import Size

_Any = TypeVar("_Any", bound="Operator")


@dataclass(frozen=True)
class Operator:
    """One call that the host issues. ``count`` is how often in a row; ``label`` says where in the model.

    Neither changes what one call costs, so neither takes part in equality.
    """

    kind: ClassVar[str] = ""

    dtype: Dtype = field(default=Dtype.BF16, kw_only=True)
    count: int = field(default=1, kw_only=True, compare=False)
    label: str = field(default="", kw_only=True, compare=False)

    def __post_init__(self) -> None:
        known = self.__dict__
        for name, least in _WHOLE.get(self.__class__) or _least(self.__class__):
            value = known[name]
            if not (isinstance(value, (int, Size)) and value >= least):
                raise bad_value(f"{self.name}.{name}", f"a whole number of at least {least}", value)

    def __init_subclass__(cls) -> None:
        type.__setattr__(cls, "__hash__", Operator.__hash__)  # a dataclass leaves those that are there
        type.__setattr__(cls, "__eq__", Operator.__eq__)

    def __hash__(self) -> int:
        """Of what is compared, once: copies elsewhere in a model have it too."""
        return (self.__dict__.get("_identity") or self._identify())[0]

    def __eq__(self, other: object) -> bool:
        """Of a class and equal in all that is compared, which copies know at once."""
        if other.__class__ is not self.__class__:
            return NotImplemented
        mine = self.__dict__.get("_identity") or self._identify()
        its = other.__dict__.get("_identity") or other._identify()
        return mine is its or bool(mine == its)

    def _identify(self) -> tuple[int, tuple[object, ...]]:
        """What is compared, and before it its hash; kept, since a graph's operators are looked up again and again."""
        known = self.__dict__
        pick = _COMPARED.get(self.__class__) or _compared(self.__class__)
        key = (self.kind, *pick(known))
        known["_identity"] = found = hash(key), key
        return found

    def __getstate__(self) -> dict[str, object]:
        return {
            name: value for name, value in self.__dict__.items() if name != "_identity"
        }  # words hash anew elsewhere

    def again(self: _Any, label: str) -> _Any:
        """The same operator elsewhere in the model; it was checked when it was first made."""
        other = object.__new__(self.__class__)
        known = other.__dict__
        known.update(self.__dict__)
        known["label"] = label
        return other

    @property
    def name(self) -> str:
        """What people call it: the kind, or for elementwise operators the function."""
        return self.kind

    def __str__(self) -> str:
        """``linear 8192x4096x4096 bf16``: the name, the sizes in order, the number format."""
        hidden = _HIDDEN_ROWS if self.kind == "elementwise" else _HIDDEN
        sizes = (v for k, v in vars(self).items() if k not in hidden and type(v) is int)
        return f"{self.name} {'x'.join(map(str, sizes))} {self.dtype}"

    @property
    def flop(self) -> float:
        """Floating-point operations of one call."""
        return 0.0

    @property
    def sfu_op(self) -> float:
        """Special-function operations (exponentials, reciprocals, tanh) of one call."""
        return 0.0

    @property
    def read_byte(self) -> float:
        """Bytes one call reads when nothing is cached."""
        return 0.0

    @property
    def write_byte(self) -> float:
        """Bytes one call writes."""
        return 0.0


_HIDDEN = frozenset({"count", "label", "read", "write", "p", "q"})  # what an operator's name leaves out
_HIDDEN_ROWS = _HIDDEN | {"rows", "run"}
_LEAST = {"padding": 0, "bytes": 0, "read": 0, "write": 0}


_WHOLE: dict[type, tuple[tuple[str, int], ...]] = {}
_COMPARED: dict[type, Callable[[dict[str, object]], tuple[object, ...]]] = {}


def _least(kind: type[Operator]) -> tuple[tuple[str, int], ...]:
    """The whole-number fields of an operator class, with the least each may be; looked up once a class."""
    whole = ((item.name, _LEAST.get(item.name, 1)) for item in fields(kind) if item.type == "int")
    _WHOLE[kind] = found = tuple(whole)
    return found


def _compared(kind: type[Operator]) -> Callable[[dict[str, object]], tuple[object, ...]]:
    """Picks the fields of an operator class that make two of them equal; looked up once a class."""
    _COMPARED[kind] = found = itemgetter(*(item.name for item in fields(kind) if item.compare))
    return found
