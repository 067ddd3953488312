"""Make a workload of one operator from its name and its sizes, as people type them."""

from __future__ import annotations

import json

from wattcast.core.errors import bad_value, check_names
from wattcast.workload.graph import Graph
from wattcast.workload.readers.from_json import parse_workload

_SIZES = {
    "linear": ("m", "n", "k"),
    "bmm": ("b", "m", "n", "k"),
    "softmax": ("rows", "dim"),
    "layernorm": ("rows", "dim"),
    "rmsnorm": ("rows", "dim"),
    "attention": ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim"),
}


def graph_of_operator(
    name: str,
    sizes: str,
    dtype: str = "bf16",
) -> Graph:
    """Return the workload that runs one operator, such as ``linear`` of ``4096x4096x4096``.

    >>> len(graph_of_operator("softmax", "128x1024").blocks)
    1
    """
    check_names("operator", name, list(_SIZES))
    names = _SIZES[name]
    words = sizes.lower().replace("×", "x").split("x")
    is_number = [word.strip().isascii() and word.strip().isdigit() for word in words]
    if len(words) != len(names) or not all(is_number):
        raise bad_value(f"sizes of {name}", "x".join(names), sizes)
    entry: dict[str, str | int] = {"op": name, "dtype": dtype}
    for field, word in zip(names, words, strict=True):
        entry[field] = int(word)
    data = json.dumps({"name": f"{name} {sizes}", "ops": [entry]}).encode()
    return parse_workload(data, f"{name} {sizes}")
