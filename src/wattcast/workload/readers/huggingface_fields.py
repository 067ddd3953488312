"""Fields of a Hugging Face configuration, each checked as it is read.

``huggingface.yaml`` writes what to read as short expressions; ``ConfigFields.read`` evaluates
them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from wattcast.core import bad_value
from wattcast.core.strict_files import decode_json
from wattcast.workload.model_options import SIZE_LIMIT

Kind = TypeVar("Kind", str, list[Any], dict[str, Any])
_LARGEST_NUMBER = 1e9
# Activations by the names of transformers, and what our templates call them.
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "relu": "relu",
    "gelu_new": "gelu_new",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu2": "relu2",
}
_WORDS_FOR_TYPES = {
    str: "text",
    list: "a list",
    dict: "an object",
}


class ConfigFields:
    """The fields of a configuration, and the file that errors name."""

    def __init__(
        self,
        config: Mapping[str, Any],
        where: str,
    ) -> None:
        self.config = config
        self.where = where

    def get(
        self,
        name: str,
        default: Any,
    ) -> Any:
        """Return a field, or ``default`` where it is absent or null."""
        value = self.config.get(name)
        return default if value is None else value

    def find(self, name: str) -> Any:
        """Return a field, or (``a.b``) b of the object a; None where it is not there."""
        outer, _, inner = name.rpartition(".")
        if outer:
            return self.take(outer, {}).get(inner)
        return self.config.get(name)

    def check(
        self,
        name: str,
        value: Any,
        valid: bool,
        wanted: str,
    ) -> Any:
        """Return a value, or raise an error that names its field."""
        if not valid:
            raise bad_value(f"{self.where}: {name}", wanted, value)
        return value

    def take(
        self,
        name: str,
        default: Kind,
    ) -> Kind:
        """Return text, a list or an object, as its default is one."""
        value = self.get(name, default)
        kind = type(default)
        field: Kind = self.check(name, value, isinstance(value, kind), _WORDS_FOR_TYPES[kind])
        return field

    def require(
        self,
        name: str,
        allowed: list[Any],
    ) -> None:
        """Refuse a field whose value our template does not know."""
        value = self.find(name)
        choices = " or ".join(map(repr, allowed))
        is_allowed = value is None or value in allowed
        self.check(name, value, is_allowed, f"{choices} (all the template knows)")

    def assume(self, defaults: Mapping[str, Any]) -> ConfigFields:
        """Return the fields with what transformers assumes where the file says nothing."""
        config = {name: value for name, value in self.config.items() if value is not None}
        fields = ConfigFields(config, self.where)
        for name, expression in defaults.items():
            if name not in config:
                config[name] = fields.read(expression)
        return fields

    def read(
        self,
        expression: Any,
        kind: Any = int,
    ) -> Any:
        """Return what an expression of ``huggingface.yaml`` means.

        It is a field, a product of fields, a comparison (``a=b==c``: whether a word, by default b,
        is c), or a value as it stands.
        """
        if not isinstance(expression, str):
            return expression
        if "==" in expression:
            field, _, word = expression.partition("==")
            name, _, default = field.partition("=")
            return self.take(name, default) == word

        # The first alternative that the file has, else the last
        *names, last = expression.split(" or ")
        for name in names:
            if self.find(name) is not None:
                return self._read_field(name, kind)
        if "*" in last or "/" in last:
            return self._read_product(last)
        return self._read_field(last, kind)

    def _read_product(self, expression: str) -> int | float:
        """Multiply and divide fields and numbers from left to right."""
        product = 1.0
        for sign, word in re.findall(r"([*/]?)([^*/]+)", expression):
            factor = int(word) if word.isdigit() else self._read_field(word, int)
            if sign == "/":
                product /= factor
            else:
                product *= factor
        return int(product) if product.is_integer() else product

    def _read_field(
        self,
        word: str,
        kind: Any,
    ) -> Any:
        """Return the first of the fields ``a|b`` that is there.

        Where none is, it is the default of ``a=1``, or 0 or false for ``a?``.
        """
        is_optional = word.endswith("?")
        text, _, default = word.rstrip("?").partition("=")
        names = text.split("|")
        present = (name for name in names if self.find(name) is not None)
        name = next(present, names[0])

        value: Any = self.find(name)
        if value is None and is_optional:
            return kind()
        if value is None and default:
            value = default if kind is str else decode_json(default.encode(), kind, name)

        is_valid, expected = _CHECKS.get(kind, _SIZE_LIST_CHECK)
        valid = is_valid(value)
        if kind is int and is_optional:
            valid = valid or (value == 0 and type(value) is int)
        self.check(name, "none" if value is None else value, valid, expected)
        return _ACTIVATIONS[value] if kind is str else value


def _is_size(value: object) -> bool:
    return type(value) is int and 0 < value < SIZE_LIMIT


def _is_ratio(value: object) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0.0 <= value < _LARGEST_NUMBER  # type: ignore[operator]  # a number


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_activation(value: object) -> bool:
    return isinstance(value, str) and value in _ACTIVATIONS


def _is_size_list(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_size, value))


_Check = tuple[Callable[[object], bool], str]
# How a field of each type is checked, and what the error asks for.
_CHECKS: dict[Any, _Check] = {
    int: (_is_size, "a whole number above zero"),
    float: (_is_ratio, "a number, zero or more"),
    bool: (_is_flag, "true or false"),
    str: (_is_activation, f"one of {', '.join(_ACTIVATIONS)}"),
}
_SIZE_LIST_CHECK: _Check = (_is_size_list, "a list of whole numbers above zero")
