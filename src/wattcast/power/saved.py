"""A fitted power model in a readable file: kind, coefficients, where they came from, how wrong they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from wattcast.errors import BadInput, bad_value
from wattcast.files import from_yaml, read_bytes, write_whole
from wattcast.power.interface import PowerModel, kind_of, kinds
from wattcast.provenance import Provenance

FORMAT = 1
MOST_FILE_BYTE = 1 << 22


@dataclass(frozen=True)
class SavedModel:
    """A power model with its provenance, its held-out errors in percent, and what was assumed."""

    name: str
    model: PowerModel
    provenance: Provenance
    error_percent: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    scaling: Mapping[str, float] = field(default_factory=dict)  # how activity was carried to other clocks


class _Provenance(msgspec.Struct, forbid_unknown_fields=True):
    source: str
    date: str = ""
    device: str = ""
    note: str = ""


class _ModelFile(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    name: str
    kind: str
    provenance: _Provenance
    model: dict[str, Any]
    error_percent: dict[str, float] = {}
    notes: list[str] = []
    scaling: dict[str, float] = {}


def save(saved: SavedModel, path: Path) -> None:
    """Write a model file, whole or not at all."""
    write_whole(path, encode(saved))


def encode(saved: SavedModel) -> bytes:
    """The text of a model file."""
    import yaml

    plain = {
        "format": FORMAT,
        "name": saved.name,
        "kind": next(k.name for k in kinds().values() if type(k.example()) is type(saved.model)),
        "provenance": {key: value for key, value in vars(saved.provenance).items() if value},
        "error_percent": {key: round(value, 3) for key, value in saved.error_percent.items()},
        "notes": list(saved.notes),
        "scaling": dict(saved.scaling),
        "model": saved.model.to_plain(),
    }
    text: str = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=118)
    return text.encode()


def load(path: Path) -> SavedModel:
    """Read a model file, or the model that ships under that name (``h200``)."""
    if not path.exists() and len(path.parts) == 1 and path.name in shipped():
        return parse(_shipped(path.name).read_bytes(), f"{path.name}.yaml")
    return parse(read_bytes(path, MOST_FILE_BYTE), path.name)


def shipped() -> list[str]:
    """Fitted models that ship, by name."""
    return sorted(p.name.removesuffix(".yaml") for p in _shipped("").iterdir() if p.name.endswith(".yaml"))


def _shipped(name: str) -> Any:
    folder = files("wattcast.power").joinpath("presets", "fitted")
    return folder.joinpath(f"{name}.yaml") if name else folder


def parse(data: bytes, where: str) -> SavedModel:
    """The bytes of a model file -> SavedModel, or an error that names the bad key."""
    file = from_yaml(data, _ModelFile, where)
    if file.format != FORMAT:
        raise bad_value(f"{where}: format", str(FORMAT), file.format, "Is it from another version of Wattcast?")
    kind = kind_of(file.kind)
    try:
        model = kind.from_plain(file.model)
    except BadInput as error:
        raise BadInput(f"{where}: model: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise bad_value(
            f"{where}: model", f"coefficients of kind {file.kind}", f"{type(error).__name__}: {error}"
        ) from None
    provenance = Provenance(**{f: getattr(file.provenance, f) for f in file.provenance.__struct_fields__})
    return SavedModel(file.name, model, provenance, file.error_percent, tuple(file.notes), file.scaling)
