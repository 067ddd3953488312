"""Write ``keywords.py``: ``python -m wattcast.options.keyword_source``.

A type checker cannot follow a dataclass into ``**options``, so the keywords of each verb are
written out as typed dictionaries. A test compares the file with the declarations."""

from __future__ import annotations

import ast
import inspect
from enum import StrEnum
from pathlib import Path

from wattcast.core.option_declaration import DeclaredOption
from wattcast.core.whole_files import write_whole
from wattcast.options.exploring_options import (
    EXPLORE,
    EXPLORE_DESIGNS,
    STUDY,
)
from wattcast.options.run_options import ModelOptions
from wattcast.options.serving_options import PLAN, SIMULATE
from wattcast.options.setting_options import (
    COMPARE,
    PREDICT,
    PriceOptions,
    SettingOptions,
)
from wattcast.options.training_options import TRAIN
from wattcast.options.verb_options import GroupPart, VerbOptions

KEYWORDS = {
    "PredictKeywords": PREDICT,
    "CompareKeywords": COMPARE,
    "SimulateKeywords": SIMULATE,
    "PlanKeywords": PLAN,
    "TrainKeywords": TRAIN,
    "ExploreKeywords": EXPLORE,
    "StudyKeywords": STUDY,
    "ExploreDesignsKeywords": EXPLORE_DESIGNS,
    "ModelKeywords": VerbOptions("model", ModelOptions),
    "SettingKeywords": VerbOptions("settings", SettingOptions, PriceOptions),
    "PriceKeywords": VerbOptions("prices", PriceOptions),
}
TARGET = Path(__file__).with_name("keywords.py")
_HEAD = '''"""The keywords of each verb, as type checkers see them.

Generated from the declarations beside it by ``python -m wattcast.options.keyword_source``; do not
edit. Functions take them as ``**options: Unpack[PredictKeywords]``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Required, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from typing import TypeAlias

    import numpy.typing as npt

    from wattcast.hardware import Node
    from wattcast.predictor.bundle.bundle_file import Bundle
    from wattcast.serving.arrivals import Trace
    from wattcast.workload.model_catalogue import ModelSpec

    Quantity: TypeAlias = str | npt.ArrayLike  # "1830 MHz", 1.83e9, or an array in SI units
'''


def write_keywords() -> str:
    """Return the text of ``keywords.py``."""
    blocks = [_HEAD]
    for name, verb in KEYWORDS.items():
        blocks.append(_write_dictionary(name, verb))
    return "\n\n".join(blocks)


def _write_dictionary(name: str, verb: VerbOptions) -> str:
    lines = [
        f"class {name}(TypedDict, total=False):",
        f'    """Keywords of ``{verb.verb}``."""',
        "",
    ]
    for part in verb.parts:
        for declared in part.declared:
            kind = _keyword_type(part, declared)
            if declared.is_required:
                kind = f"Required[{kind}]"
            lines.append(f"    {declared.keyword}: {kind}")
    return "\n".join(lines) + "\n"


def _keyword_type(part: GroupPart, declared: DeclaredOption) -> str:
    """Return the type of a keyword: that of the field, with words for enums and text for units."""
    annotation = ast.parse(inspect.get_annotations(part.group)[declared.field], mode="eval").body
    assert isinstance(annotation, ast.Subscript)
    assert isinstance(annotation.slice, ast.Tuple)
    takes_text = declared.option.unit is not None or declared.option.parse is not None
    kinds: list[str] = []
    for member in _split_union(annotation.slice.elts[0]):
        text = ast.unparse(member)
        if text == "Sweepable":
            kinds.append("Quantity")
        elif isinstance(member, ast.Subscript) and text.startswith("tuple["):
            kinds += ["str", f"Sequence[{_element_type(declared)}]"]
        elif text == "float" and takes_text:
            kinds += ["str", "float"]
        elif _is_enum(declared, text):
            kinds.append("str")
        else:
            kinds.append(text)
    return " | ".join(dict.fromkeys(kinds))


def _element_type(declared: DeclaredOption) -> str:
    if declared.option.parse is not None:
        return "str"
    return "int" if int in declared.element_members else "str | float"


def _is_enum(declared: DeclaredOption, name: str) -> bool:
    enums = [k for k in declared.members if isinstance(k, type) and issubclass(k, StrEnum)]
    return name in [kind.__name__ for kind in enums]


def _split_union(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return [*_split_union(node.left), *_split_union(node.right)]
    return [node]


if __name__ == "__main__":
    write_whole(TARGET, write_keywords().encode())
