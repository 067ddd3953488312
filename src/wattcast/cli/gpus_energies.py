"""``wattcast gpus show NAME --energies`` and ``wattcast gpus check-energies``: parse, call, print."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from wattcast.activity.simulated import Dialect
from wattcast.cli.environment import Environment
from wattcast.cli.figures import save_one
from wattcast.errors import bad_value
from wattcast.files import write_whole
from wattcast.power.component.bottom_up.chip import build_chip
from wattcast.power.component.bottom_up.table import BottomUp, energy_table, of_file, of_gpu, plain, with_sizes
from wattcast.power.component.bottom_up.what_if import KNOBS, compare
from wattcast.power.component.energies import to_yaml
from wattcast.units import parse

_ZERO_C_IN_K = 273.15


@dataclass(frozen=True)
class Asked:
    """What a user asked for, with units."""

    name: str
    feature_nm: float | None
    voltage_v: float | None
    temperature_k: float | None
    factors: dict[str, float]
    save: Path | None
    plot: Path | None

    @classmethod
    def read(
        cls,
        name: str,
        node: str | None,
        voltage: str | None,
        temperature: str | None,
        changes: list[str],
        save: Path | None,
        plot: Path | None,
    ) -> Asked:
        """Options as texts -> numbers."""
        return cls(
            name,
            None if node is None else 1e9 * parse(node, "m", "--node"),
            None if voltage is None else parse(voltage, "V", "--voltage"),
            None if temperature is None else parse(temperature, "C", "--temperature") + _ZERO_C_IN_K,
            dict(_factor(text) for text in changes),
            save,
            plot,
        )


def show_bottom_up(env: Environment, asked: Asked, json: bool) -> None:
    """Build, print, and write the table where one is wanted."""
    from wattcast.report.energies import show_changes, show_energies

    found, dialect = _built(asked)
    changed = with_sizes(found, asked.factors) if asked.factors else found
    if asked.save is not None:
        write_whole(asked.save, to_yaml(energy_table(changed, dialect)))
    if asked.plot is not None:
        from wattcast.report.energies_figure import what_if_figure

        save_one(env, what_if_figure(changed.design), asked.plot)
    moved = compare(build_chip(found.design), build_chip(changed.design)) if asked.factors else ()
    if json:
        changes = [vars(change) | {"ratio": change.ratio} for change in moved]
        env.json(plain(changed) | ({"changes": changes} if moved else {}))
        return
    console = env.console()
    show_energies(console, plain(changed))
    if moved:
        show_changes(console, moved)


def show_check(env: Environment, reference: Path | None, gpu: str, plot: Path | None, json: bool) -> None:
    """Every ratio, then medians and ranks against their goals."""
    from wattcast.reference import VARIABLE, reference_folder
    from wattcast.report.energies import show_ratios
    from wattcast.validate.component_energies import dumped_ratios, energy_rows, fitted_ratios, leakage_area_ratios
    from wattcast.validate.ledger import show

    folder = reference or reference_folder(env.variables)
    if folder is not None and not (folder / "accelwattch").is_dir():
        raise bad_value("--reference", "a folder with accelwattch/ in it", str(folder))
    dumped = dumped_ratios(folder) if folder is not None else []
    standing = leakage_area_ratios(folder) if folder is not None else []
    ratios = dumped + standing + fitted_ratios(gpu)
    if plot is not None:
        from wattcast.report.energies_figure import ratios_figure

        if not dumped:
            raise bad_value("--plot", "dumped energies to compare with", "none", f"Name them with {VARIABLE}.")
        save_one(env, ratios_figure(dumped), plot)
    rows = energy_rows(folder, gpu)
    if json:
        env.json({"ratios": [vars(r) | {"ratio": r.ratio} for r in ratios], "rows": rows})
    else:
        show_ratios(env.console(), ratios)
        env.stdout.write(show(rows) + "\n")
    if folder is None:
        env.say(f"note: no dumped energies here; name their folder with --reference or {VARIABLE}.")


def _built(asked: Asked) -> tuple[BottomUp, Dialect]:
    path = Path(asked.name)
    changes = (asked.feature_nm, asked.voltage_v, asked.temperature_k)
    if _is_architecture(path):
        return of_file(path, *changes)
    from wattcast.api import find_gpu

    return of_gpu(find_gpu(asked.name), *changes), Dialect.GPUWATTCH


def _is_architecture(path: Path) -> bool:
    """XML, or our YAML form of it."""
    if path.suffix.lower() in (".yaml", ".yml") and path.is_file():
        with path.open("rb") as stream:
            return b"wattcast: architecture" in stream.read(4096)
    return path.suffix.lower() == ".xml"


def _factor(text: str) -> tuple[str, float]:
    name, _, number = text.partition("=")
    try:
        return name.strip(), float(number)
    except ValueError:
        raise bad_value("--change", f"PART=FACTOR with a part of {', '.join(KNOBS)}", text) from None
