"""Which layers of a Hugging Face configuration differ from the others, and in what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from wattcast.workload.dimension_limits import check_layer_count
from wattcast.workload.readers.huggingface_fields import ConfigFields

_USUAL_LAYER: dict[str, Any] = {
    "mixer": "attention",
    "feed_forward": "same",
    "window": 0,
    "chunk": 0,
    "rotary": True,
}


class LayerRule(msgspec.Struct, forbid_unknown_fields=True):
    """Which layers differ from the others, and in what."""

    # a field with a word for each layer, and whether a word marks it
    words: dict[str, dict[str, bool]] = {}
    # a field with a number for each layer, and whether 1 or 0 marks it
    flags: tuple[str, bool] = ("", True)
    places: str = ""  # a field that lists the layers marked
    first: str = ""  # a field with the number of first layers that are marked
    each: Any = 1  # the period of the marked layers; or [period, offset]
    last: bool = False  # whether the last layer is marked as well
    only_if: str = ""  # a size that must be there for the rule to hold
    set: dict[str, Any] = {}  # fields of a layer: [where marked, elsewhere], or everywhere


def mark_layers(
    fields: ConfigFields,
    layers: int,
    rule: LayerRule,
) -> list[bool]:
    """Tell of each layer whether a rule marks it.

    A list in the file decides; without one, the place of a layer does.
    """
    check_layer_count(layers, f"{fields.where}: layers")
    marks = _mark_by_lists(fields, layers, rule)
    if marks is not None:
        return marks

    if rule.first:
        count = fields.read(rule.first, float)
        return [layer < count for layer in range(layers)]

    period, *offset = rule.each if isinstance(rule.each, list) else [rule.each]
    step = fields.read(period)
    place = int(fields.read(offset[0], float)) if offset else step - 1
    marks = [step > 0 and layer % step == place for layer in range(layers)]
    marks[-1] = marks[-1] or rule.last
    return marks


def _mark_by_lists(
    fields: ConfigFields,
    layers: int,
    rule: LayerRule,
) -> list[bool] | None:
    """Return what a list in the file says of each layer; None where it has none."""
    for name, mark_of_word in rule.words.items():
        words = fields.config.get(name)
        if words is not None:
            valid = _is_list_of(words, layers)
            valid = valid and all(str(word) in mark_of_word for word in words)
            choices = " or ".join(mark_of_word)
            fields.check(name, words, valid, f"a list of {layers} words, each {choices}")
            return [mark_of_word[word] for word in words]

    name, marking_flag = rule.flags
    flags = fields.get(name, None)
    if flags is not None and flags != []:
        fields.check(name, flags, _is_list_of(flags, layers), f"a list of {layers}")
        return [bool(flag) is marking_flag for flag in flags]

    places = fields.get(rule.places, None)
    if places is not None and places != []:
        valid = isinstance(places, list) and all(type(place) is int for place in places)
        fields.check(rule.places, places, valid, "a list of layers")
        marked = set(places)
        return [layer in marked for layer in range(layers)]
    return None


def _is_list_of(value: Any, length: int) -> bool:
    return isinstance(value, list) and len(value) == length


def group_layers(
    fields: ConfigFields,
    layers: int,
    rules: Sequence[LayerRule],
) -> list[dict[str, Any]]:
    """Return groups of equal layers in the order in which they first appear.

    There are none where all layers are usual.
    """
    check_layer_count(layers, f"{fields.where}: layers")
    kinds: list[dict[str, Any]] = [{} for _ in range(layers)]
    for rule in rules:
        if rule.only_if and not fields.read(rule.only_if):
            continue
        marks = mark_layers(fields, layers, rule)
        for name, values in rule.set.items():
            marked_value, usual_value = _read_pair(fields, name, values)
            for layer, is_marked in zip(kinds, marks, strict=True):
                layer[name] = marked_value if is_marked else usual_value
    return count_alike(kinds)


def _read_pair(
    fields: ConfigFields,
    name: str,
    values: Any,
) -> list[Any]:
    """Return what a field of a layer is where the layer is marked, and what it is elsewhere."""
    pair = values if isinstance(values, list) else [values, values]
    kind = type(_USUAL_LAYER[name])
    if kind is str:
        return pair
    return [kind(fields.read(expression)) for expression in pair]


def count_alike(kinds: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return groups of equal layers with their sizes; none where all layers are usual."""
    counts = Counter(tuple(sorted(kind.items())) for kind in kinds)
    are_equal = len(counts) == 1
    if are_equal and all(value == _USUAL_LAYER[name] for name, value in kinds[0].items()):
        return []
    return [{"layers": count, **dict(kind)} for kind, count in counts.items()]
