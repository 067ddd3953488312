"""Make the golden files: ``python tests/golden/make.py``. A changed golden is explained in the commit.

They freeze what others build on: the shape of the JSON output, the options and names, the workload
file and the bundle file. They hold shapes, not predictions, so a better model changes none of them.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

HERE = Path(__file__).resolve().parent


def schema_of_output() -> object:
    from wattcast.predictor.prediction_json import PredictOut

    return msgspec.json.schema(PredictOut)


def schema_of_bundle() -> object:
    from wattcast.predictor.bundle.bundle_file import BUNDLE_FORMAT, _BundleFile

    return {"format": BUNDLE_FORMAT, "schema": msgspec.json.schema(_BundleFile)}


def schema_of_workload() -> object:
    from wattcast.workload.operator_base import load_functions, registered_operators
    from wattcast.workload.readers.from_json import operator_struct

    kinds = {kind: msgspec.json.schema(operator_struct(cls)) for kind, cls in registered_operators().items()}
    return {"operators": kinds, "elementwise": sorted(load_functions())}


def options_of_predict() -> object:
    from wattcast.cli.main import walk_commands

    command = dict(walk_commands())["predict"]
    return {p.name: {"names": sorted(p.opts), "default": repr(p.default)} for p in command.params}


MAKERS = {
    "output.json": schema_of_output,
    "bundle.json": schema_of_bundle,
    "workload.json": schema_of_workload,
    "options.json": options_of_predict,
}


def text(name: str) -> str:
    return json.dumps(MAKERS[name](), indent=1, sort_keys=True, ensure_ascii=False, default=str) + "\n"


if __name__ == "__main__":
    for name in MAKERS:
        (HERE / name).write_text(text(name), encoding="utf-8")
