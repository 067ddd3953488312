"""Read and write bundles: everything that was fitted for one device.

A bundle is a folder with ``bundle.json`` and, where factors were learned, ``arrays.npz``: plain
arrays under dotted names, never a pickle. Structs that end in ``File`` are the forms in which YAML
writes a noun with units in strings.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import (
    dataclass,
    field,
    replace,
)
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from wattcast import hardware
from wattcast.core import (
    bad_value,
    check_names,
    files,
    units,
)
from wattcast.core.arrays import Array, read_arrays
from wattcast.core.strict_files import (
    FitStatus,
    Provenance,
    convert_plain,
    decode_json,
    decode_yaml,
    read_bytes,
)
from wattcast.core.tree_ensemble import TreeEnsemble
from wattcast.kernels import (
    LibraryStyle,
    ReferenceChip,
    kernel_choice,
    reference_chip,
)
from wattcast.power.power_model import PowerModel, build_power_model
from wattcast.predictor.bundle.support_widening import (
    THIS_CARD,
    WIDEST_SPREAD,
    CardSpread,
    Widening,
    default_widening,
    published_spread,
)
from wattcast.predictor.cold_cache import ColdCacheDelay
from wattcast.predictor.gaussian_process import GaussianProcess
from wattcast.predictor.kernel_phases import Correction, LaunchCosts
from wattcast.predictor.learned_factors import (
    CarriedFactors,
    LearnedFactor,
    LearnedFactors,
)
from wattcast.predictor.timeline import ClockLaw

BUNDLE_FORMAT = 1
# What a number of a bundle may be. Shipped bundles have factors from 0.16 to 20 and 11,200 serial
# cycles at most. What lies beyond these bounds is a slip of the finger or a damaged file.
Factor = Annotated[float, Meta(ge=0.01, le=100.0)]
Cycles = Annotated[float, Meta(ge=0.0, le=1e7)]
Weight = Annotated[float, Meta(ge=0.0, le=1e3)]
Share = Annotated[float, Meta(gt=0.0, le=1.0)]
Size = Annotated[float, Meta(ge=0.0, le=1e15)]
HIGHEST_HZ = 1e11
Hertz = Annotated[float, Meta(gt=0.0, le=HIGHEST_HZ)]
Watts = Annotated[float, Meta(gt=0.0, le=1e6)]
Celsius = Annotated[float, Meta(ge=-50.0, le=150.0)]
LONGEST_FIXED_S = 1.0  # of a kernel's fixed time, or of the host's time for an operator
LEAST_SETTLES = 0.5  # share of the power limit that a governor keeps to; those that ship: 0.97
MOST_LOG_FACTOR = 7.0  # of a learned factor; those that ship reach 4.9
ARRAYS_FILE = "arrays.npz"
FAMILIES = (
    "gemm",
    "conv2d",
    "attention",
    "softmax",
    "layernorm",
    "rmsnorm",
    "elementwise",
    "collective",
)


class ResidualEnds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Low and high end of measured over predicted, from ``rows`` held-out rows."""

    latency: tuple[Factor, Factor]
    power: tuple[Factor, Factor]
    rows: Annotated[int, Meta(ge=0)]

    def __post_init__(self) -> None:
        for name, (low, high) in (("latency", self.latency), ("power", self.power)):
            if low > high:
                where = f"residuals: {name}"
                raise bad_value(where, "a low end below the high one", f"{low} and {high}")


@dataclass(frozen=True)
class MeasuredRange:
    """What was measured of a family of kernels; predictions outside of it are marked as
    unsupported.
    """

    dtypes: tuple[str, ...]
    groups: tuple[str, ...]  # kinds of kernels
    sizes: Mapping[str, tuple[float, float]]  # least and most of each size, in log2
    # by kind, forms that ran (``Operator.form``); None: unknown
    forms: Mapping[str, tuple[str, ...]] | None = None
    clock_hz: tuple[float, float] | None = None  # lowest and highest of rows; None: unknown

    @cached_property
    def bounds(self) -> tuple[tuple[str, ...], Array, Array]:
        """Names of the sizes, and the smallest and largest of each, ``(size, 1)``."""
        ends = np.array(list(self.sizes.values()), dtype=np.float64).reshape(-1, 2)
        return tuple(self.sizes), ends[:, :1], ends[:, 1:]

    @cached_property
    def every_form(self) -> frozenset[str]:
        """Forms measured, whatever they ran as."""
        if self.forms is None:
            return frozenset()
        return frozenset().union(*self.forms.values())


@dataclass(frozen=True)
class Bundle:
    """What was fitted for one device."""

    gpu: str
    status: FitStatus
    provenance: Provenance
    corrections: Mapping[str, Correction]
    launch: LaunchCosts
    power: PowerModel
    clock_law: ClockLaw | None
    residuals: Mapping[str, ResidualEnds]
    toggling: Mapping[str, float]  # kind of data -> dynamic energy relative to random data
    reference: ReferenceChip  # the chip whose library chose the kernels
    learned: LearnedFactors | None = None  # corrects what the scaffold misses
    # family -> what was measured of it
    seen: Mapping[str, MeasuredRange] = field(default_factory=dict)
    interval_level: float = 0.9
    governor_share: float = 1.0  # of a power limit at which the governor holds the board
    waiting_sm: float = 1.0  # energy of an SM that waits for memory, over that of one with work
    # dynamic energy of kernels in an engine's steps, over that of the same kernels alone
    step_energy: float = 1.0
    power_factor: float = 1.0  # on the watts of a GPU that works: of one card over the usual one
    assumptions: tuple[str, ...] = ()
    # how far another card of the kind may be
    cards: CardSpread = field(default_factory=published_spread)
    # of intervals, away from what was measured
    widening: Widening = field(default_factory=default_widening)
    cold: ColdCacheDelay | None = None  # of operators inside a model; None: not known
    # lowest and highest limit that rows ran under; None: unknown
    power_limit_w: tuple[float, float] | None = None
    temperature_c: tuple[float, float] | None = None  # lowest and highest of rows; None: unknown

    def __post_init__(self) -> None:
        for table, name in ((self.corrections, "corrections"), (self.residuals, "residuals")):
            missing = [family for family in FAMILIES if family not in table]
            if missing:
                where = f"bundle {self.gpu}: {name}"
                raise bad_value(where, "every kernel family", f"none for {', '.join(missing)}")

    @property
    def has_engine_kernels(self) -> bool:
        """Whether kernels of a serving engine were measured."""
        return any(name.startswith("engine_") for name in self.seen)

    def for_data(self, data: str) -> Bundle:
        """Return this bundle for a workload whose operands are ``data`` (``random``, ``zeros``
        ...).
        """
        check_names("data", data, self.toggling)
        factor = self.toggling[data]
        law = self.clock_law
        if law is not None:
            law = replace(law, toggling=factor)
        return replace(self, power=self.power.with_data_factor(factor), clock_law=law)

    def with_power_of(self, other: Bundle) -> Bundle:
        """Return the bundle with another's energies and idle power."""
        return replace(self, power=other.power)

    def for_bursts(self) -> Bundle:
        """Return this bundle for runs of some milliseconds after a pause.

        A clock law that holds in long runs alone goes.
        """
        if self.clock_law is None or self.clock_law.in_bursts:
            return self
        return replace(self, clock_law=None)

    def for_this_card(self) -> Bundle:
        """Return this bundle for the very card it was fitted on: intervals leave out how far other
        cards may be.
        """
        return replace(self, cards=THIS_CARD)

    def for_measured_card(self, factor: float, spread: float | None) -> Bundle:
        """Return this bundle for a card that draws ``factor`` times the usual watts while it works.

        ``spread`` is the standard deviation of the logarithm that measurements of the card leave,
        or of several that disagree; None: what cards differ by is not known better than before.
        """
        cards = self.cards
        if spread is not None:
            cards = msgspec.structs.replace(cards, power=min(spread, WIDEST_SPREAD))
        return replace(self, power_factor=factor * self.power_factor, cards=cards)


class CorrectionFile(msgspec.Struct, forbid_unknown_fields=True):
    """A ``Correction`` as YAML writes it."""

    compute: Factor
    memory: Factor
    fixed: str
    l2: Factor = 1.0
    serial_cycle: Cycles = 0.0

    def to_correction(self, where: str) -> Correction:
        """Return the correction, its time in seconds."""
        fixed_s = _parse_short_time(self.fixed, f"{where}.fixed")
        return Correction(
            self.compute,
            self.memory,
            fixed_s,
            self.l2,
            self.serial_cycle,
        )


class LaunchFile(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """``LaunchCosts`` as YAML writes them."""

    host_per_operator: str
    # of older bundles, and unused: predictor/link_laws.yaml has the laws
    link_per_message: str = ""
    host_weights: dict[str, Weight] = {}
    start_clock: str = ""  # at which fixed times hold, where they are cycles

    def to_costs(self, where: str) -> LaunchCosts:
        """Return the costs in seconds."""
        host_s = _parse_short_time(self.host_per_operator, f"{where}.host_per_operator")
        start_hz = None
        if self.start_clock:
            start_hz = _parse_clock(self.start_clock, f"{where}.start_clock")
        return LaunchCosts(host_s, self.host_weights, start_hz=start_hz)


def _parse_short_time(text: str, where: str) -> float:
    seconds = units.parse(text, "s", where)
    if not 0.0 <= seconds <= LONGEST_FIXED_S:
        raise bad_value(where, f"a time from 0 to {LONGEST_FIXED_S:g} s", text)
    return seconds


def _parse_clock(text: str, where: str) -> float:
    hertz = units.parse(text, "Hz", where)
    if not 0.0 < hertz <= HIGHEST_HZ:
        raise bad_value(where, "a clock above 0 and up to 100 GHz", text)
    return hertz


class _ColdFile(msgspec.Struct, forbid_unknown_fields=True):
    operator: str
    s_per_byte: Annotated[float, Meta(ge=0.0, le=1e-6)]
    layers: Annotated[int, Meta(ge=0, le=100_000)] = 0


class ClockLawFile(msgspec.Struct, forbid_unknown_fields=True):
    """A ``ClockLaw`` as YAML writes it."""

    without: Factor
    activity: Annotated[
        list[Annotated[float, Meta(ge=0.0, le=1e6)]], Meta(min_length=1, max_length=1000)
    ]
    ratio: Annotated[list[Factor], Meta(min_length=1, max_length=1000)]
    clock_power: Annotated[float, Meta(ge=0.0, le=10.0)] = 0.0
    top: str = "1 Hz"
    in_bursts: bool = True

    def to_law(self, where: str) -> ClockLaw:
        """Return the law, its clock in hertz."""
        activity = np.array(self.activity)
        ratio = np.array(self.ratio)
        if activity.shape != ratio.shape or (np.diff(activity) < 0).any():
            counts = f"{len(ratio)} for {len(activity)}"
            raise bad_value(where, "a ratio for each activity, which rise", counts)
        return ClockLaw(
            without=self.without,
            activity=activity,
            ratio=ratio,
            clock_power=self.clock_power,
            top_hz=_parse_clock(self.top, where),
            in_bursts=self.in_bursts,
        )

    @classmethod
    def from_law(cls, law: ClockLaw) -> ClockLawFile:
        """Return a law as YAML writes it."""
        return cls(
            without=law.without,
            activity=law.activity.tolist(),
            ratio=law.ratio.tolist(),
            clock_power=law.clock_power,
            top=f"{law.top_hz!r} Hz",
            in_bursts=law.in_bursts,
        )


class _ReferenceFile(msgspec.Struct, forbid_unknown_fields=True):
    sm_count: Annotated[float, Meta(ge=1.0, le=1e6)]
    l2_byte: Annotated[float, Meta(gt=0.0, le=1e15)]
    l2_byte_per_cycle: Annotated[float, Meta(gt=0.0, le=1e9)]
    dram_byte_per_cycle: Annotated[float, Meta(gt=0.0, le=1e9)]
    top_hz: Hertz
    sfu_per_cycle: Size
    per_cycle: dict[str, Annotated[float, Meta(gt=0.0, le=1e9)]]
    style: LibraryStyle = LibraryStyle.HOPPER
    shared_byte: Size = 0.0
    lone_sm_share: Annotated[float, Meta(ge=0.0, le=1e6)] = 0.0


class _RangeFile(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    dtypes: tuple[str, ...]
    groups: tuple[str, ...]
    sizes: dict[str, tuple[float, float]]
    # group -> forms with commas between: a list is slower to read
    forms: dict[str, str] | None = None
    clock_hz: tuple[Hertz, Hertz] | None = None

    def to_range(self) -> MeasuredRange:
        """Return the range, its forms in lists."""
        forms = None
        if self.forms is not None:
            forms = {kind: tuple(names.split(", ")) for kind, names in self.forms.items()}
        return MeasuredRange(
            self.dtypes,
            self.groups,
            self.sizes,
            forms,
            self.clock_hz,
        )

    @classmethod
    def from_range(cls, seen: MeasuredRange) -> _RangeFile:
        """Return a range as YAML writes it."""
        forms = None
        if seen.forms is not None:
            forms = {kind: ", ".join(names) for kind, names in seen.forms.items()}
        return cls(
            seen.dtypes,
            seen.groups,
            dict(seen.sizes),
            forms,
            seen.clock_hz,
        )


class _PowerFile(msgspec.Struct, forbid_unknown_fields=True):
    kind: str
    model: dict[str, Any]


class _BundleFile(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    gpu: str
    status: FitStatus
    provenance: Provenance
    launch: LaunchFile
    corrections: dict[str, CorrectionFile]
    power: _PowerFile
    residuals: dict[str, ResidualEnds]
    toggling: dict[str, Annotated[float, Meta(ge=0.0, le=2.0)]]
    effective_clock: ClockLawFile | None = None
    interval_level: Annotated[float, Meta(gt=0.0, lt=1.0)] = 0.9
    settles: Share = 1.0
    waiting_sm: Annotated[float, Meta(ge=0.0, le=2.0)] = 1.0
    step_energy: Annotated[float, Meta(ge=0.1, le=10.0)] = 1.0
    assumptions: tuple[str, ...] = ()
    reference: _ReferenceFile | None = None  # absent: the catalogue's chip
    # the chip learned factors were fitted on, where it is another
    learned_on: _ReferenceFile | None = None
    seen: dict[str, _RangeFile] = {}
    cards: CardSpread | None = None  # absent: the published figures
    widening: Widening | None = None  # absent: the default
    cold: _ColdFile | None = None  # absent: operators cost in a model what they cost alone
    power_limit_w: tuple[Watts, Watts] | None = None
    temperature_c: tuple[Celsius, Celsius] | None = None
    arrays: bool = False  # whether learned factors lie beside, in arrays.npz


def read_bundle(path: Path) -> Bundle:
    """Read a bundle from its ``bundle.json`` (or the folder of it) and, where it says so, the
    arrays beside it.
    """
    if path.is_dir():
        path = path / "bundle.json"
    data = read_bytes(path)
    # a bundle may be written as YAML too
    decode = decode_json if data.startswith(b"{") else decode_yaml
    file = decode(data, _BundleFile, path.name)
    arrays_path = path.parent / ARRAYS_FILE
    arrays = read_bytes(arrays_path) if arrays_path.exists() else None
    return _make_bundle(file, path.name, arrays)


@cache
def shipped_bundle(gpu: str) -> Bundle | None:
    """Return the bundle that ships for this GPU, for the mean of its boards, or None."""
    path = files("wattcast.predictor.bundle").joinpath(hardware.strip_board(gpu), "bundle.json")
    return read_bundle(path) if path.is_file() else None


def plain_to_bundle(plain: Mapping[str, Any], where: str) -> Bundle:
    """Make a bundle without learned factors from the plain mappings that ``bundle_to_plain``
    gives.
    """
    return _make_bundle(convert_plain(plain, _BundleFile, where), where, None)


def _make_bundle(
    file: _BundleFile,
    where: str,
    arrays: bytes | None,
) -> Bundle:
    _check_file(file, where, arrays)
    reference = _read_reference(file.reference) or reference_chip(hardware.load_gpu(file.gpu))
    learned = None
    if file.arrays and arrays is not None:
        learned, reference = _read_learned(file, arrays, reference)
    law = file.effective_clock
    cold = None
    if file.cold is not None:
        operator_s = _parse_short_time(file.cold.operator, f"{where}: cold.operator")
        cold = ColdCacheDelay(operator_s, file.cold.s_per_byte, file.cold.layers)
    corrections = {}
    for name, correction in file.corrections.items():
        corrections[name] = correction.to_correction(f"{where}: corrections.{name}")
    return Bundle(
        **{name: getattr(file, name) for name in _UNCHANGED_FIELDS},
        corrections=corrections,
        launch=file.launch.to_costs(f"{where}: launch"),
        power=build_power_model(file.power.kind, file.power.model, f"{where}: power.model"),
        clock_law=None if law is None else law.to_law(f"{where}: effective_clock.top"),
        reference=reference,
        learned=learned,
        seen={name: seen.to_range() for name, seen in file.seen.items()},
        governor_share=file.settles,
        cards=file.cards or published_spread(),
        widening=file.widening or default_widening(),
        cold=cold,
    )


def _check_file(
    file: _BundleFile,
    where: str,
    arrays: bytes | None,
) -> None:
    """Raise an error where a file has another format, lacks its arrays, or has an absurd share."""
    if file.format != BUNDLE_FORMAT:
        do = "This Wattcast reads no other; fit again."
        raise bad_value(f"{where}: format", f"{BUNDLE_FORMAT}", file.format, do)
    if file.arrays and arrays is None:
        do = "Copy the whole folder."
        raise bad_value(f"{where}: arrays", f"{ARRAYS_FILE} beside it", "none", do)
    if not LEAST_SETTLES <= file.settles <= 1.0:
        expected = "a share of the power limit between 0.5 and 1"
        raise bad_value(f"{where}: settles", expected, file.settles)


def _read_learned(
    file: _BundleFile,
    arrays: bytes,
    reference: ReferenceChip,
) -> tuple[LearnedFactors, ReferenceChip]:
    """Return the learned factors of a bundle, and its reference chip with the kernel choice that
    was learned.
    """
    other_chip = _read_reference(file.learned_on)
    if other_chip is None:
        learned = residuals_from_bytes(arrays, reference)
        return learned, learned.reference
    learned = residuals_from_bytes(arrays, other_chip)
    if "gemm" in learned.time:  # its library is the one that the kernel choice was fitted on
        reference = replace(reference, choice=learned.reference.choice)
    return CarriedFactors(learned.reference, learned.time, learned.energy), reference


def _read_reference(file: _ReferenceFile | None) -> ReferenceChip | None:
    return None if file is None else ReferenceChip(**msgspec.structs.asdict(file))


# fields of a bundle that a file has under the same names
_UNCHANGED_FIELDS = (
    "gpu",
    "status",
    "provenance",
    "residuals",
    "toggling",
    "interval_level",
    "waiting_sm",
    "step_energy",
    "assumptions",
    "power_limit_w",
    "temperature_c",
)


def bundle_to_plain(bundle: Bundle) -> dict[str, Any]:
    """Return a bundle as plain mappings, for a file; ``plain_to_bundle`` reads them back."""
    law = bundle.clock_law
    cold = None
    if bundle.cold is not None:
        operator = f"{bundle.cold.operator_s!r} s"
        cold = _ColdFile(operator, bundle.cold.s_per_byte, bundle.cold.layers)
    learned_on = None
    if isinstance(bundle.learned, CarriedFactors):
        learned_on = _write_reference(bundle.learned.reference)
    file = _BundleFile(
        **{name: getattr(bundle, name) for name in _UNCHANGED_FIELDS},
        format=BUNDLE_FORMAT,
        launch=_write_launch(bundle.launch),
        corrections={name: _write_correction(c) for name, c in bundle.corrections.items()},
        power=_PowerFile(bundle.power.kind, bundle.power.to_plain()),
        effective_clock=None if law is None else ClockLawFile.from_law(law),
        settles=bundle.governor_share,
        reference=_write_reference(bundle.reference),
        learned_on=learned_on,
        seen={name: _RangeFile.from_range(seen) for name, seen in bundle.seen.items()},
        cards=None if bundle.cards == published_spread() else bundle.cards,
        widening=None if bundle.widening == default_widening() else bundle.widening,
        cold=cold,
        arrays=bundle.learned is not None,
    )
    plain: dict[str, Any] = msgspec.to_builtins(file)
    return {name: value for name, value in plain.items() if value is not None}


def _write_launch(launch: LaunchCosts) -> LaunchFile:
    return LaunchFile(
        host_per_operator=f"{float(launch.host_s_per_operator)!r} s",
        host_weights=dict(launch.host_weights),
        start_clock="" if launch.start_hz is None else f"{launch.start_hz!r} Hz",
    )


def _write_correction(c: Correction) -> CorrectionFile:
    return CorrectionFile(
        c.compute,
        c.memory,
        f"{c.fixed_s!r} s",
        c.l2,
        c.serial_cycle,
    )


def _write_reference(reference: ReferenceChip) -> _ReferenceFile:
    names = _ReferenceFile.__struct_fields__
    return _ReferenceFile(**{name: getattr(reference, name) for name in names})


def write_bundle(bundle: Bundle, path: Path) -> None:
    """Save a bundle as JSON and its arrays beside it, each replaced only when the new one is
    whole.
    """
    from wattcast.core.whole_files import write_whole  # predictions only read

    if bundle.learned is not None:
        write_whole(path.parent / ARRAYS_FILE, residuals_to_bytes(bundle.learned))
    text = msgspec.json.format(msgspec.json.encode(bundle_to_plain(bundle)), indent=1)
    write_whole(path, text + b"\n")


def residuals_to_bytes(residuals: LearnedFactors) -> bytes:
    """Return the bytes of an ``arrays.npz``."""
    arrays: dict[str, Any] = kernel_choice.choice_to_arrays(
        residuals.reference.choice or {}, "choice"
    )
    for kind, models in (("time", residuals.time), ("energy", residuals.energy)):
        for family, model in models.items():
            prefix = f"{kind}.{family}"
            arrays[f"{prefix}.range"] = np.array([model.low, model.high])
            if model.forest is not None:
                arrays |= model.forest.to_arrays(f"{prefix}.forest")
            if model.kriging is not None:
                arrays |= model.kriging.to_arrays(f"{prefix}.kriging")
    buffer = io.BytesIO()
    # not compressed: inflating would take a tenth of a cold command, and wheels are packed anyway
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def residuals_from_bytes(data: bytes, reference: ReferenceChip) -> LearnedFactors:
    """Read what ``residuals_to_bytes`` saved."""
    arrays = read_arrays(data, ARRAYS_FILE)
    factors: dict[str, dict[str, LearnedFactor]] = {"time": {}, "energy": {}}
    try:
        choice = kernel_choice.choice_from_arrays(arrays, "choice")
        for name in arrays:
            prefix = name.removesuffix(".range")
            if prefix != name:
                kind, _, family = prefix.partition(".")
                factors[kind][family] = _read_factor(arrays, prefix)
    except (KeyError, ValueError, TypeError, IndexError) as error:
        expected = "arrays saved by `wattcast lab fit kernels`"
        raise bad_value(ARRAYS_FILE, expected, str(error)) from None
    chip = replace(reference, choice=choice or None)
    return LearnedFactors(chip, factors["time"], factors["energy"])


def _read_factor(arrays: Mapping[str, Any], prefix: str) -> LearnedFactor:
    low, high = arrays[f"{prefix}.range"]
    if not -MOST_LOG_FACTOR <= low <= high <= MOST_LOG_FACTOR:
        raise ValueError(f"{prefix}.range: {low} to {high} is no range of logarithms of factors")
    forest = None
    if f"{prefix}.forest.features" in arrays:
        forest = TreeEnsemble.from_arrays(arrays, f"{prefix}.forest")
    kriging = None
    if f"{prefix}.kriging.features" in arrays:
        kriging = GaussianProcess.from_arrays(arrays, f"{prefix}.kriging")
    return LearnedFactor(forest, kriging, float(low), float(high))
