"""Read, save and scale bundles that stand on a forecast.

What a card's own rows changed is kept, and all else is forecast anew: ``calibration.yaml`` has the
entries of a ``bundle.json`` that differ from the forecast of the same GPU, and ``arrays.npz`` the
factors on time that its rows taught. So a calibration stays small, and what no row said (energies,
V(f), idle power, kernels of other families) follows the forecast wherever that is improved.

Efficiency factors that a user gives or ``calibrate`` learned scale a bundle [Lee2026, VI-C]. On
time: ``launch`` (host's cost of an operator), ``compute`` (cycles on chip), ``products`` (cycles of
products, convolutions and attention, besides), ``memory`` (seconds of device memory). On energy:
``energy`` (every operation), ``<module>_energy`` (tensor, cuda, sfu, shared, l2, sm, dram, link,
besides). Above 1 is slower, or more joules. ``idle_offset`` adds watts to idle power.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from wattcast.core import (
    Dtype,
    bad_value,
    check_names,
    files,
)
from wattcast.core.strict_files import (
    decode_yaml,
    read_bytes,
    read_shipped_yaml,
)
from wattcast.core.whole_files import write_whole
from wattcast.hardware import (
    Gpu,
    load_gpu,
    strip_board,
)
from wattcast.power.activity import known_events
from wattcast.power.power_model import PowerModel
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
from wattcast.predictor.bundle.forecast import (
    FORECAST,
    forecast_bundle,
    forecast_rule,
    remember_by_gpu,
)
from wattcast.predictor.kernel_phases import Correction
from wattcast.predictor.learned_factors import CarriedFactors, LayeredFactors

CALIBRATION_FILE = "calibration.yaml"
USUAL_ENGINE = "vllm"  # whose kernels a bundle means where none is named
Plain = dict[str, Any]


@dataclass(frozen=True)
class _Calibration:
    """The entries of a bundle that differ from the forecast, and its arrays."""

    plain: Plain
    arrays: bytes
    engine: str  # whose kernels; empty: vLLM's


@remember_by_gpu
def calibrated_bundle(gpu: Gpu) -> Bundle | None:
    """Return the forecast of ``gpu`` with the calibration that ships for it, or for a card of the
    same processor.

    None where neither ships. From another card come the times of kernels, and energies where it is
    as large and has the same memory; the bundle stays a forecast. Calibrations are those of vLLM's
    kernels, or of the engine that is named.
    """
    calibration = _read_shipped(calibration_folder(gpu.name, gpu.engine))
    if calibration is not None:
        return _apply_calibration(calibration, gpu)
    sibling = forecast_rule().same_processor.get(gpu.compute_capability, "")
    sibling_calibration = None
    if sibling:
        sibling_calibration = _read_shipped(calibration_folder(sibling, gpu.engine))
    if sibling_calibration is None:
        return None
    return _carry_times(sibling, sibling_calibration, gpu)


def calibration_base(gpu: Gpu) -> Bundle:
    """Return the forecast that calibrations stand on.

    Their corrections and factors were fitted with lone SMs that read as on the parent.
    """
    forecast = forecast_bundle(gpu)
    engine = "" if gpu.engine == USUAL_ENGINE else gpu.engine
    reference = replace(forecast.reference, lone_sm_share=0.0, engine=engine)
    return replace(forecast, reference=reference)


def calibration_folder(gpu: str, engine: str = "") -> str:
    """Return the folder of a card's calibration; vLLM's kernels are those that no name is added
    for.

    >>> calibration_folder("h100-sxm"), calibration_folder("h100-sxm", "trtllm")
    ('h100-sxm', 'h100-sxm.trtllm')
    """
    name = strip_board(gpu)
    return f"{name}.{engine}" if engine not in ("", USUAL_ENGINE) else name


def engine_bundle(gpu: Gpu) -> Bundle:
    """Return the calibration on the kernels of the engine that a GPU is asked to run."""
    calibrated = calibrated_bundle(gpu)
    if calibrated is not None:
        note = (
            f"engine {gpu.engine}: its products, attention and experts; how an engine launches and "
            "cuts its work is vLLM's"
        )
        return replace(calibrated, assumptions=(*calibrated.assumptions, note))
    cards = list_engine_cards(gpu.engine)
    expected = f"a card whose kernels of {gpu.engine} are in public tables: {', '.join(cards)}"
    do = "Leave --engine out for vLLM's kernels, or calibrate with your own tables."
    raise bad_value("engine", expected, gpu.name, do)


def pad_experts(bundle: Bundle, gpu: Gpu) -> Bundle:
    """Return a bundle whose experts with scales of blocks run as in vLLM up to 0.11.

    On Blackwell that is DeepGEMM over rows padded for every expert (``is_deep_gemm_e8m0_used``);
    kernels of other cards are those of today.
    """
    if not bundle.reference.is_blackwell:
        note = f"engine {gpu.engine}: kernels as in today's vLLM on this card"
        return replace(bundle, assumptions=(*bundle.assumptions, note))
    note = (
        f"engine {gpu.engine}: experts in fp8 with scales of blocks run in DeepGEMM, which "
        "multiplies 127 rows more for each expert; other kernels as in today's vLLM"
    )
    reference = replace(bundle.reference, engine=gpu.engine)
    return replace(bundle, reference=reference, assumptions=(*bundle.assumptions, note))


def list_engine_cards(engine: str) -> tuple[str, ...]:
    """Return the cards that ship a calibration on the kernels of an engine."""
    ending = f".{engine}"
    folders = sorted(item.name for item in files("wattcast.predictor.bundle").iterdir())
    return tuple(name.removesuffix(ending) for name in folders if name.endswith(ending))


def _carry_times(
    sibling: str,
    calibration: _Calibration,
    gpu: Gpu,
) -> Bundle:
    """Return the forecast of a GPU with the times of kernels of a card with the same processor."""
    chip = load_gpu(sibling)
    calibrated = _apply_calibration(calibration, chip)
    assert isinstance(calibrated.learned, LayeredFactors), "a calibration has factors of its own"
    base = _carry_power(calibration_base(gpu), gpu, calibration, chip)
    carried = CarriedFactors(calibrated.reference, calibrated.learned.time, {})
    note = (
        f"times of products, attention and experts: as calibrated on the {sibling}, a card with "
        "the same processor"
    )
    return replace(
        base,
        corrections={**base.corrections, **_carry_fitted(calibrated, chip, gpu)},
        learned=LayeredFactors(
            carried.reference,
            carried.time,
            {},
            own=carried,
            carried=base.learned,
        ),
        assumptions=(*base.assumptions[:1], note, *base.assumptions[1:]),
    )


def carry_sibling(bundle: Bundle, gpu: Gpu) -> Bundle:
    """Return a bundle with the corrections of a calibrated card that has the same processor, and
    with its energies where it is as large and has the same memory; else the bundle as it is.
    """
    for sibling in forecast_rule().energies_from.get(gpu.name, ()):
        calibration = _read_shipped(sibling)
        if calibration is not None:
            chip = load_gpu(sibling)
            fitted = _carry_fitted(_apply_calibration(calibration, chip), chip, gpu)
            moved = _carry_power(bundle, gpu, calibration, chip)
            return replace(moved, corrections={**moved.corrections, **fitted})
    return bundle


def _carry_power(
    bundle: Bundle,
    gpu: Gpu,
    calibration: _Calibration,
    chip: Gpu,
) -> Bundle:
    """Return a bundle with the energies of ``chip``'s calibration and how far these are off, if the
    cards are alike enough.
    """
    size_ratio = float(np.mean(gpu.sm_count)) / float(np.mean(chip.sm_count))
    if abs(size_ratio - 1.0) >= FORECAST.same_size or gpu.memory.kind != chip.memory.kind:
        return bundle
    entries: Plain = {"power": calibration.plain.get("power", {}), "residuals": {}}
    for family, ends in calibration.plain.get("residuals", {}).items():
        if "power" in ends:
            entries["residuals"][family] = {"power": ends["power"]}
    merged = _merge_entries(bundle_to_plain(replace(bundle, learned=None)), entries)
    read = plain_to_bundle(merged, CALIBRATION_FILE)
    return replace(bundle, power=read.power, residuals=read.residuals)


def _carry_fitted(
    calibrated: Bundle,
    chip: Gpu,
    gpu: Gpu,
) -> dict[str, Correction]:
    """Return the corrections that a calibration changed, carried to a card with other tensor
    cores.
    """
    forecast = forecast_bundle(chip).corrections
    rate = _tensor_rate(gpu) / _tensor_rate(chip)
    fitted = {}
    for group, correction in calibrated.corrections.items():
        if correction == forecast.get(group):
            continue
        if group.startswith("gemm") and rate < 1.0:
            # what feeds the tensor cores keeps up with slower ones
            fed = min(correction.compute, max(FORECAST.fed_products, correction.compute * rate))
            correction = replace(correction, compute=fed)
        fitted[group] = correction
    return fitted


def _tensor_rate(gpu: Gpu) -> float:
    return float(np.mean(gpu.pipes.tensor_flop_per_cycle.get(Dtype.BF16, np.nan)))


@cache
def _read_shipped(name: str) -> _Calibration | None:
    path = files("wattcast.predictor.bundle").joinpath(name, CALIBRATION_FILE)
    return _read_calibration(path) if path.is_file() else None


def load_bundle(path: Path) -> Bundle:
    """Read what ``save_bundle`` saved: a calibration on a forecast, or a bundle of its own."""
    file = path / CALIBRATION_FILE if path.is_dir() else path
    if file.name != CALIBRATION_FILE or not file.exists():
        return read_bundle(path)
    calibration = _read_calibration(file)
    gpu = replace(load_gpu(calibration.plain["gpu"]), engine=calibration.engine)
    return _apply_calibration(calibration, gpu)


def save_bundle(bundle: Bundle, folder: Path) -> Path:
    """Save a bundle to ``folder`` and return its file: where it stands on a forecast, only what
    differs from that.
    """
    import yaml

    folder.mkdir(parents=True, exist_ok=True)
    if not isinstance(bundle.learned, LayeredFactors):
        write_bundle(bundle, folder / "bundle.json")
        return folder / "bundle.json"
    base = bundle_to_plain(replace(calibration_base(load_gpu(bundle.gpu)), learned=None))
    changed = _subtract_entries(bundle_to_plain(replace(bundle, learned=None)), base)
    changed |= {"format": base["format"], "gpu": bundle.gpu}
    if bundle.reference.engine:
        changed["engine"] = bundle.reference.engine
    # which library runs what is the forecast's, which has it anew
    own_factors = bundle.learned.own
    own_factors = replace(own_factors, reference=replace(own_factors.reference, choice=None))
    write_whole(folder / ARRAYS_FILE, residuals_to_bytes(own_factors))
    text = yaml.safe_dump(changed, sort_keys=False, allow_unicode=True)
    write_whole(folder / CALIBRATION_FILE, text.encode())
    return folder / CALIBRATION_FILE


def _read_calibration(path: Path) -> _Calibration:
    """Read a calibration and the arrays beside it."""
    plain = decode_yaml(read_bytes(path), dict[str, Any], path.name)
    if not isinstance(plain.get("gpu"), str):
        raise bad_value(f"{path.name}: gpu", "the name of a GPU", plain.get("gpu"))
    engine = plain.pop("engine", "")
    return _Calibration(plain, read_bytes(path.parent / ARRAYS_FILE), engine)


def _apply_calibration(calibration: _Calibration, gpu: Gpu) -> Bundle:
    base = calibration_base(gpu)
    base_entries = bundle_to_plain(replace(base, learned=None))
    merged = _merge_entries(base_entries, calibration.plain)
    bundle = plain_to_bundle(merged, CALIBRATION_FILE)
    own_factors = residuals_from_bytes(calibration.arrays, base.reference)
    own_factors = replace(own_factors, reference=base.reference)
    learned = LayeredFactors(
        own_factors.reference,
        own_factors.time,
        own_factors.energy,
        own=own_factors,
        carried=base.learned,
    )
    return replace(bundle, learned=learned, reference=base.reference)


def _subtract_entries(plain: Mapping[str, Any], base: Mapping[str, Any]) -> Plain:
    """Return the entries of ``plain`` that ``base`` lacks or has otherwise; mappings are compared
    entry by entry.
    """
    changed: Plain = {}
    for name, value in plain.items():
        if isinstance(value, Mapping) and isinstance(base.get(name), Mapping):
            inner = _subtract_entries(value, base[name])
            if inner:
                changed[name] = inner
        elif name not in base or base[name] != value:
            changed[name] = value
    return changed


def _merge_entries(base: Mapping[str, Any], plain: Mapping[str, Any]) -> Plain:
    """Return the entries of ``base`` with those of ``plain`` in their place."""
    merged = dict(base)
    for name, value in plain.items():
        if isinstance(value, Mapping) and isinstance(merged.get(name), Mapping):
            merged[name] = _merge_entries(merged[name], value)
        else:
            merged[name] = value
    return merged


TIME_FACTORS = ("launch", "compute", "products", "memory")
PRODUCT_FAMILIES = ("gemm", "conv2d", "attention")
IDLE_OFFSET = "idle_offset"
# beyond these a factor is a slip of the finger, or of a unit
LEAST_FACTOR = 0.02
MOST_FACTOR = 50.0


def factor_names() -> tuple[str, ...]:
    """List the factors that a bundle takes."""
    modules = dict.fromkeys(event.module for event in known_events().values() if not event.is_mean)
    energy_factors = [f"{module}_energy" for module in modules]
    return (*TIME_FACTORS, "energy", *energy_factors, IDLE_OFFSET)


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
            expected = f"a factor between {LEAST_FACTOR:g} and {MOST_FACTOR:g}, 1 for no change"
            raise bad_value(f"factor {name}", expected, value)
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
    learns.
    """
    mean_card = shipped_bundle(gpu)
    assert mean_card is not None, "boards are told apart where a GPU was measured"
    boards = read_shipped_yaml(dict[str, _BoardFile], "wattcast.predictor.bundle", "boards.yaml")
    board = boards[part_number]
    factors = ", ".join(f"{name} {value:g}" for name, value in board.factors.items())
    note = f"board {part_number}: {factors} times the mean card's, from {board.cards} cards"
    return _scale_bundle(mean_card, board.factors, (note,))


def _scale_bundle(
    bundle: Bundle,
    factors: Mapping[str, float],
    notes: tuple[str, ...],
) -> Bundle:
    """Scale corrections, the host's time, energies and idle power of a bundle, and add notes to its
    assumptions.
    """
    corrections = {}
    for group, c in bundle.corrections.items():
        on_chip = factors.get("compute", 1.0)
        if group.partition(".")[0] in PRODUCT_FAMILIES:
            on_chip *= factors.get("products", 1.0)
        corrections[group] = replace(
            c,
            compute=c.compute * on_chip,
            l2=c.l2 * on_chip,
            serial_cycle=c.serial_cycle * on_chip,
            memory=c.memory * factors.get("memory", 1.0),
        )
    slower = factors.get("launch", 1.0)
    launch = replace(
        bundle.launch,
        host_s_per_operator=bundle.launch.host_s_per_operator * slower,
        engine_factor=bundle.launch.engine_factor * slower,
    )
    return replace(
        bundle,
        corrections=corrections,
        launch=launch,
        power=_scale_power(bundle.power, factors),
        assumptions=(*bundle.assumptions, *notes),
    )


def _scale_power(power: PowerModel, factors: Mapping[str, float]) -> PowerModel:
    if not any(name == IDLE_OFFSET or name.endswith("energy") for name in factors):
        return power
    by_module = {}
    for event in known_events().values():
        of_module = factors.get(f"{event.module}_energy", 1.0)
        by_module[event.module] = factors.get("energy", 1.0) * of_module
    return power.scale_energy(by_module, idle_offset_w=factors.get(IDLE_OFFSET, 0.0))
