"""Bundles that stand on a forecast: what a card's own rows changed is kept, the rest is forecast
anew.

``calibration.yaml`` has the entries of a ``bundle.json`` that differ from the forecast of the same
GPU, and ``arrays.npz`` the factors on time that its rows taught. So a calibration stays small, and
what no row said (energies, V(f), idle power, kernels of other families) follows the forecast
wherever that is improved.

Efficiency factors that a user gives or ``calibrate`` learned scale a bundle [Lee2026, VI-C]. On
time: ``launch`` (host's cost of an operator), ``compute`` (cycles on chip), ``products`` (cycles of
products, convolutions and attention, besides), ``memory`` (seconds of device memory). On energy:
``energy`` (every operation), ``<module>_energy`` (tensor, cuda, sfu, shared, l2, sm, dram, link,
besides). Above 1 is slower, or more joules. ``idle_offset`` adds watts to idle power."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from wattcast.core import Dtype, bad_value, check_names, files
from wattcast.core.strict_files import decode_yaml, read_bytes, read_shipped_yaml
from wattcast.core.whole_files import write_whole
from wattcast.hardware import Gpu, load_gpu
from wattcast.power.activity import known_events
from wattcast.predictor.bundle.bundle_file import (
    ARRAYS_FILE,
    Bundle,
    bundle_to_plain,
    plain_to_bundle,
    read_bundle,
    residuals_from_bytes,
    residuals_to_bytes,
    shipped_bundle,
    write_bundle,
)
from wattcast.predictor.bundle.forecast import forecast_bundle, forecast_rule, keep_by_gpu
from wattcast.predictor.learned_factors import CarriedFactors, LayeredFactors

CALIBRATION_FILE = "calibration.yaml"
Plain = dict[str, Any]


@keep_by_gpu
def calibrated_bundle(gpu: Gpu) -> Bundle | None:
    """Return the forecast of ``gpu`` with the calibration that ships for it, or for a card of the
    same processor.

    None where neither ships. From another card come the times of kernels, and energies where it is
    as large and has the same memory; the bundle stays a forecast."""
    kin = (
        gpu.name
        if _read_shipped(gpu.name)
        else forecast_rule().same_processor.get(gpu.compute_capability, "")
    )
    found = _read_shipped(kin) if kin else None
    if found is None:
        return None
    return _apply_calibration(*found, gpu) if kin == gpu.name else _carry_times(kin, found[0], gpu)


_AS_LARGE = 0.1  # difference in SMs, relative, between chips that have the same energies
_FED = (
    1.03  # time of products over the tensor cores' own, where nothing else limits them: set by hand
)


def _carry_times(kin: str, shipped: Plain, gpu: Gpu) -> Bundle:
    chip = load_gpu(kin)
    base = forecast_bundle(gpu)
    other = calibrated_bundle(chip)
    assert other is not None, "a calibration that ships"
    assert isinstance(other.learned, LayeredFactors), "a calibration has factors of its own"
    as_large = abs(float(np.mean(gpu.sm_count)) / float(np.mean(chip.sm_count)) - 1.0) < _AS_LARGE
    if as_large and gpu.memory.kind == chip.memory.kind:
        plain = _merge_entries(
            bundle_to_plain(replace(base, learned=None)), {"power": shipped.get("power", {})}
        )
        base = replace(base, power=plain_to_bundle(plain, CALIBRATION_FILE).power)
    fitted = {
        g: c for g, c in other.corrections.items() if c != forecast_bundle(chip).corrections.get(g)
    }
    own_rate, its_rate = (
        float(np.mean(of.pipes.tensor_flop_per_cycle.get(Dtype.BF16, np.nan))) for of in (gpu, chip)
    )
    for group, correction in fitted.items():
        if (
            group.startswith("gemm") and own_rate < its_rate
        ):  # what feeds the tensor cores keeps up with slower ones
            fed = min(correction.compute, max(_FED, correction.compute * own_rate / its_rate))
            fitted[group] = replace(correction, compute=fed)
    own = CarriedFactors(other.reference, other.learned.time, {})
    note = f"times of products, attention and experts: as calibrated on the {kin}, a card with the same processor"
    return replace(
        base,
        corrections={**base.corrections, **fitted},
        learned=LayeredFactors(own.reference, own.time, {}, own=own, carried=base.learned),
        assumptions=(*base.assumptions[:1], note, *base.assumptions[1:]),
    )


@cache
def _read_shipped(name: str) -> tuple[Plain, bytes] | None:
    path = files("wattcast.predictor.bundle").joinpath(name, CALIBRATION_FILE)
    return _read_calibration(path) if path.is_file() else None


def load_bundle(path: Path) -> Bundle:
    """Read what ``save_bundle`` saved: a calibration on a forecast, or a bundle of its own."""
    file = path / CALIBRATION_FILE if path.is_dir() else path
    if file.name != CALIBRATION_FILE or not file.exists():
        return read_bundle(path)
    plain, arrays = _read_calibration(file)
    return _apply_calibration(plain, arrays, load_gpu(plain["gpu"]))


def save_bundle(bundle: Bundle, folder: Path) -> Path:
    """Save a bundle to ``folder`` and return its file: where it stands on a forecast, only what
    differs from that.
    """
    import yaml

    folder.mkdir(parents=True, exist_ok=True)
    if not isinstance(bundle.learned, LayeredFactors):
        write_bundle(bundle, folder / "bundle.json")
        return folder / "bundle.json"
    base = bundle_to_plain(replace(forecast_bundle(load_gpu(bundle.gpu)), learned=None))
    changed = _subtract_entries(bundle_to_plain(replace(bundle, learned=None)), base)
    changed |= {"format": base["format"], "gpu": bundle.gpu}
    write_whole(folder / ARRAYS_FILE, residuals_to_bytes(bundle.learned.own))
    text = yaml.safe_dump(changed, sort_keys=False, allow_unicode=True)
    write_whole(folder / CALIBRATION_FILE, text.encode())
    return folder / CALIBRATION_FILE


def _read_calibration(path: Path) -> tuple[Plain, bytes]:
    """Read a calibration and the arrays beside it."""
    plain = decode_yaml(read_bytes(path), dict[str, Any], path.name)
    if not isinstance(plain.get("gpu"), str):
        raise bad_value(f"{path.name}: gpu", "the name of a GPU", plain.get("gpu"))
    return plain, read_bytes(path.parent / ARRAYS_FILE)


def _apply_calibration(plain: Plain, arrays: bytes, gpu: Gpu) -> Bundle:
    base = forecast_bundle(gpu)
    merged = _merge_entries(bundle_to_plain(replace(base, learned=None)), plain)
    found = plain_to_bundle(merged, CALIBRATION_FILE)
    own = residuals_from_bytes(arrays, base.reference)
    learned = LayeredFactors(own.reference, own.time, own.energy, own=own, carried=base.learned)
    return replace(found, learned=learned, reference=base.reference)


def _subtract_entries(plain: Mapping[str, Any], base: Mapping[str, Any]) -> Plain:
    """Return the entries of ``plain`` that ``base`` lacks or has otherwise; mappings are compared
    entry by entry.
    """
    found: Plain = {}
    for name, value in plain.items():
        if isinstance(value, Mapping) and isinstance(base.get(name), Mapping):
            inner = _subtract_entries(value, base[name])
            if inner:
                found[name] = inner
        elif name not in base or base[name] != value:
            found[name] = value
    return found


def _merge_entries(base: Mapping[str, Any], plain: Mapping[str, Any]) -> Plain:
    found = dict(base)
    for name, value in plain.items():
        if isinstance(value, Mapping) and isinstance(found.get(name), Mapping):
            found[name] = _merge_entries(found[name], value)
        else:
            found[name] = value
    return found


TIME_FACTORS = ("launch", "compute", "products", "memory")
PRODUCT_FAMILIES = ("gemm", "conv2d", "attention")
IDLE_OFFSET = "idle_offset"
# beyond these a factor is a slip of the finger, or of a unit
LEAST_FACTOR = 0.02
MOST_FACTOR = 50.0


def factor_names() -> tuple[str, ...]:
    """List the factors that a bundle takes."""
    modules = dict.fromkeys(event.module for event in known_events().values() if not event.is_mean)
    return (*TIME_FACTORS, "energy", *(f"{module}_energy" for module in modules), IDLE_OFFSET)


def apply_factors(bundle: Bundle, factors: Mapping[str, float]) -> Bundle:
    """Apply factors to a bundle and note each among its assumptions; values out of reason are
    refused.
    """
    if not factors:
        return bundle
    check_names("factor", factors, factor_names())
    for name, value in factors.items():
        if not np.isfinite(value):
            raise bad_value(f"factor {name}", "a finite number", value)
        if name != IDLE_OFFSET and not LEAST_FACTOR <= value <= MOST_FACTOR:
            wanted = f"a factor between {LEAST_FACTOR:g} and {MOST_FACTOR:g}, 1 for no change"
            raise bad_value(f"factor {name}", wanted, value)
    notes = tuple(f"factor of your own: {name} {value:g}" for name, value in factors.items())
    return _scale_bundle(bundle, factors, notes)


class _BoardFile(msgspec.Struct, forbid_unknown_fields=True):
    factors: dict[str, float]
    cards: int
    source: str


@cache
def shipped_board_bundle(gpu: str, part_number: str) -> Bundle:
    """Return the bundle that ships for boards of one part number: the mean card's with factors of
    these boards.

    ``boards.yaml`` has the factors, which ``python -m wattcast.lab.fit.card_levels --write``
    learns."""
    mean_card = shipped_bundle(gpu)
    assert mean_card is not None, "boards are told apart where a GPU was measured"
    board = read_shipped_yaml(dict[str, _BoardFile], "wattcast.predictor.bundle", "boards.yaml")[
        part_number
    ]
    said = ", ".join(f"{name} {value:g}" for name, value in board.factors.items())
    note = f"board {part_number}: {said} times the mean card's, from {board.cards} cards"
    return _scale_bundle(mean_card, board.factors, (note,))


def _scale_bundle(bundle: Bundle, factors: Mapping[str, float], notes: tuple[str, ...]) -> Bundle:
    """Scale corrections, the host's time, energies and idle power of a bundle, and add notes to its
    assumptions.
    """
    corrections = {}
    launch = bundle.launch
    power = bundle.power
    for group, c in bundle.corrections.items():
        on_chip = factors.get("compute", 1.0)
        if group.partition(".")[0] in PRODUCT_FAMILIES:
            on_chip *= factors.get("products", 1.0)
        scaled = {name: getattr(c, name) * on_chip for name in ("compute", "l2", "serial_cycle")}
        corrections[group] = replace(c, **scaled, memory=c.memory * factors.get("memory", 1.0))
    slower = factors.get("launch", 1.0)
    launch = replace(
        launch,
        host_s_per_operator=launch.host_s_per_operator * slower,
        engine_factor=launch.engine_factor * slower,
    )
    if any(name == IDLE_OFFSET or name.endswith("energy") for name in factors):
        on_all = factors.get("energy", 1.0)
        modules = dict.fromkeys(event.module for event in known_events().values())
        by_module = {module: on_all * factors.get(f"{module}_energy", 1.0) for module in modules}
        power = power.scale_energy(by_module, idle_offset_w=factors.get(IDLE_OFFSET, 0.0))
    assumptions = (*bundle.assumptions, *notes)
    return replace(
        bundle, corrections=corrections, launch=launch, power=power, assumptions=assumptions
    )
