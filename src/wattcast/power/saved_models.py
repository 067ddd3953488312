"""Power models in files: published ones, each number with its source, and fitted ones that were saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import msgspec

from wattcast.core import errors
from wattcast.core.errors import BadInput, bad_value
from wattcast.core.strict_files import Provenance, decode_yaml, read_bytes
from wattcast.core.whole_files import write_whole
from wattcast.power.power_model import PowerModel, power_model_kind

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


class _ModelFile(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    name: str
    kind: str
    provenance: Provenance
    model: dict[str, Any]
    error_percent: dict[str, float] = {}
    notes: list[str] = []
    scaling: dict[str, float] = {}


def save_model(saved: SavedModel, path: Path) -> None:
    """Write a model file, whole or not at all."""
    write_whole(path, encode_model(saved))


def encode_model(saved: SavedModel) -> bytes:
    """Return the text of a model file."""
    import yaml

    plain = {
        "format": FORMAT,
        "name": saved.name,
        "kind": saved.model.kind,
        "provenance": msgspec.to_builtins(saved.provenance),
        "error_percent": {key: round(value, 3) for key, value in saved.error_percent.items()},
        "notes": list(saved.notes),
        "scaling": dict(saved.scaling),
        "model": saved.model.to_plain(),
    }
    text: str = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=118)
    return text.encode()


def load_saved_model(path: Path) -> SavedModel:
    """Read a model file, or a model that ships: one fitted here (``h200``) or one published (``tegra-k1``)."""
    if path.exists() or len(path.parts) > 1 or path.suffix in (".yaml", ".yml"):
        return parse_saved_model(read_bytes(path, MOST_FILE_BYTE), path.name)
    shipped = shipped_models()
    known = {errors.fold_name(name): name for name in shipped} | {"tk1": "tegra-k1"}
    name = known.get(errors.fold_name(path.name), "")
    if not name:
        raise bad_value("power model", f"a file, or {' or '.join(shipped)}, which ship", path.name)
    return parse_saved_model(shipped[name].read_bytes(), f"{name}.yaml")


def shipped_models() -> dict[str, Traversable]:
    """Return the files of models that ship, by name: published ones, and those fitted here."""
    presets = files("wattcast.power").joinpath("presets")
    found = [path for folder in (presets.joinpath("fitted"), presets) for path in folder.iterdir()]
    return {path.name.removesuffix(".yaml"): path for path in found if path.name.endswith(".yaml")}


def parse_saved_model(data: bytes, where: str) -> SavedModel:
    """Return the model that the bytes of a model file describe, or raise an error that names the bad key."""
    file = decode_yaml(data, _ModelFile, where)
    if file.format != FORMAT:
        raise bad_value(f"{where}: format", str(FORMAT), file.format, "Is it from another version of Wattcast?")
    kind = power_model_kind(file.kind)
    try:
        model = kind.from_plain(file.model)
    except BadInput as error:
        raise BadInput(f"{where}: model: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise bad_value(
            f"{where}: model", f"coefficients of kind {file.kind}", f"{type(error).__name__}: {error}"
        ) from None
    return SavedModel(file.name, model, file.provenance, file.error_percent, tuple(file.notes), file.scaling)
