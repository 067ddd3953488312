"""Make the golden files: ``python tests/golden/make.py``. A changed golden is explained in the
commit.

They freeze what others build on: the shape of the JSON output, the options and names, the workload
file and the bundle file. They hold shapes, not predictions, so a better model changes none of them.
The answers in the README are the commands' own words, to the digits they print."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

HERE = Path(__file__).resolve().parent
README = HERE.parents[1] / "README.md"


def schema_of_output() -> object:
    from wattcast.predictor.prediction_json import PredictOut

    return msgspec.json.schema(PredictOut)


def schema_of_bundle() -> object:
    from wattcast.predictor.bundle.bundle_file import BUNDLE_FORMAT, _BundleFile

    return {"format": BUNDLE_FORMAT, "schema": msgspec.json.schema(_BundleFile)}


def schema_of_workload() -> object:
    import wattcast.workload.engine_operators
    import wattcast.workload.engine_row_operators
    import wattcast.workload.scan_operators  # noqa: F401
    from wattcast.workload.operator_base import load_functions, registered_operators
    from wattcast.workload.readers.from_json import operator_struct

    kinds = {
        kind: msgspec.json.schema(operator_struct(cls))
        for kind, cls in registered_operators().items()
    }
    return {"operators": kinds, "elementwise": sorted(load_functions())}


def options_of_predict() -> object:
    from wattcast.cli.main import walk_commands

    command = dict(walk_commands())["predict"]
    return {p.name: {"names": sorted(p.opts), "default": repr(p.default)} for p in command.params}


def readme() -> str:
    """The README with the answer of each command in a console block."""
    from wattcast.cli.command_output import Environment
    from wattcast.cli.main import main
    from wattcast.lab.validate.doc_figures import fill_consoles, run_command

    text = README.read_text(encoding="utf-8")
    return fill_consoles(text, lambda words: run_command(words, main, Environment))


MAKERS = {
    "output.json": schema_of_output,
    "bundle.json": schema_of_bundle,
    "workload.json": schema_of_workload,
    "options.json": options_of_predict,
    "README.md": readme,
}


def path(name: str) -> Path:
    return README if name == README.name else HERE / name


def text(name: str) -> str:
    if name == README.name:
        return readme()
    shape = whole_as_integers(MAKERS[name]())
    return json.dumps(shape, indent=1, sort_keys=True, ensure_ascii=False, default=str) + "\n"


def whole_as_integers(shape: object) -> object:
    """Write bounds such as 2.0 as 2: which of two equal bounds a type keeps depends on the order in
    which modules were imported.
    """
    if isinstance(shape, dict):
        return {key: whole_as_integers(value) for key, value in shape.items()}
    if isinstance(shape, list):
        return [whole_as_integers(value) for value in shape]
    if isinstance(shape, float) and shape.is_integer():
        return int(shape)
    return shape


if __name__ == "__main__":
    for name in MAKERS:
        path(name).write_text(text(name), encoding="utf-8")
