"""Read the file of ``lab kit`` as rows that a calibration takes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from wattcast.calibrate.kernel_rows import KernelRows, load_kernel_rows
from wattcast.core.errors import BadInput, bad_value
from wattcast.core.regular_files import check_regular

KIT_FORMAT = "wattcast card kit 1"
KIT_SUFFIX = ".kit.json.gz"


def is_kit(path: Path) -> bool:
    """Return whether a path is named as a kit's file."""
    return path.name.endswith(KIT_SUFFIX)


def read_kit_rows(path: Path) -> KernelRows:
    """Read the rows of a kit; those of a part of a card, or of a shared one, are refused."""
    plain = _read_kit(path)
    shared = plain.get("shared") or []
    if shared:
        raise BadInput(
            f"{path.name}: rows of a card that was not the program's alone: {'; '.join(shared)}. "
            "Time and watts are not those of the card. Run `wattcast lab kit` on a whole card with "
            "nothing else on it."
        )
    run = plain.get("run") or {}
    card = {name: run.get(name) for name in ("card_name", "card_uuid", "driver")}
    lines = [
        json.dumps(
            {
                "record": "row",
                **card,
                **row,
            }
        )
        for row in plain["rows"]
    ]
    with TemporaryDirectory() as folder:
        (Path(folder) / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        return load_kernel_rows(folder)


def _read_kit(path: Path) -> dict[str, Any]:
    check_regular(path)
    try:
        plain = json.loads(gzip.decompress(path.read_bytes()))
    except (OSError, EOFError, ValueError) as error:
        raise bad_value(str(path), "a file of `wattcast lab kit`", str(error)) from None
    if not isinstance(plain, dict) or plain.get("format") != KIT_FORMAT:
        form = plain.get("format") if isinstance(plain, dict) else type(plain).__name__
        raise bad_value(f"{path.name}: format", KIT_FORMAT, form)
    if not isinstance(plain.get("rows"), list):
        raise bad_value(f"{path.name}: rows", "a list of rows", plain.get("rows"))
    return plain
