"""Read and write bundles: everything that was fitted for one device.

A bundle is a folder with ``bundle.json`` and, where factors were learned, ``arrays.npz``: plain
arrays under dotted names, never a pickle. Structs that end in ``File`` are the forms in which YAML
writes a noun with units in strings."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from wattcast import hardware
from wattcast.core import bad_value, check_names, files, units
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
from wattcast.kernels import LibraryStyle, ReferenceChip, kernel_choice, reference_chip
from wattcast.power.power_model import PowerModel, build_power_model
from wattcast.predictor.bundle.support_widening import (
    THIS_CARD,
    CardSpread,
    Widening,
    default_widening,
    published_spread,
)
from wattcast.predictor.cold_cache import ColdCacheDelay
from wattcast.predictor.gaussian_process import GaussianProcess
from wattcast.predictor.kernel_phases import Correction, LaunchCosts
from wattcast.predictor.learned_factors import CarriedFactors, LearnedFactor, LearnedFactors
from wattcast.predictor.timeline import ClockLaw

BUNDLE_FORMAT = 1
# What a number of a bundle may be. Shipped bundles have factors from 0.16 to 20 and 11,200 serial
# cycles at most. What lies beyond these bounds is a slip of the finger or a damaged file.
Factor = Annotated[float, Meta(ge=0.01, le=100.0)]
Cycles = Annotated[float, Meta(ge=0.0, le=1e7)]
Weight = Annotated[float, Meta(ge=0.0, le=1e3)]
Share = Annotated[float, Meta(gt=0.0, le=1.0)]
Size = Annotated[float, Meta(ge=0.0, le=1e15)]
Hertz = Annotated[float, Meta(gt=0.0, le=1e11)]
Watts = Annotated[float, Meta(gt=0.0, le=1e6)]
Celsius = Annotated[float, Meta(ge=-50.0, le=150.0)]
LONGEST_FIXED_S = 1.0  # of a kernel's fixed time, or of the host's time for an operator
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
                raise bad_value(
                    f"residuals: {name}", "a low end below the high one", f"{low} and {high}"
                )


@dataclass(frozen=True)
class MeasuredRange:
    """What was measured of a family of kernels; predictions outside of it are marked as
    unsupported.
    """

    dtypes: tuple[str, ...]
    groups: tuple[str, ...]  # kinds of kernels
    sizes: Mapping[str, tuple[float, float]]  # least and most of each size, in log2
    forms: Mapping[str, tuple[str, ...]] | None = (
        None  # by kind, forms that ran (``Operator.form``); None: unknown
    )
    clock_hz: tuple[float, float] | None = None  # lowest and highest of rows; None: unknown

    @cached_property
    def bounds(self) -> tuple[tuple[str, ...], Array, Array]:
        """Names of the sizes, and the smallest and largest of each, ``(size, 1)``."""
        ends = np.array(list(self.sizes.values()), dtype=np.float64).reshape(-1, 2)
        return tuple(self.sizes), ends[:, :1], ends[:, 1:]

    @cached_property
    def every_form(self) -> frozenset[str]:
        """Forms measured, whatever they ran as."""
        return frozenset(name for names in (self.forms or {}).values() for name in names)


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
    learned: LearnedFactors | None = None  # what the scaffold leaves over
    seen: Mapping[str, MeasuredRange] = field(
        default_factory=dict
    )  # family -> what was measured of it
    interval_level: float = 0.9
    governor_share: float = 1.0  # of a power limit at which the governor holds the board
    waiting_sm: float = 1.0  # energy of an SM that waits for memory, over that of one with work
    step_energy: float = (
        1.0  # dynamic energy of kernels in an engine's steps, over that of the same alone
    )
    assumptions: tuple[str, ...] = ()
    cards: CardSpread = field(
        default_factory=published_spread
    )  # how far another card of the kind may be
    widening: Widening = field(
        default_factory=default_widening
    )  # of intervals, away from what was measured
    cold: ColdCacheDelay | None = None  # what operators take more among others; None: not known
    power_limit_w: tuple[float, float] | None = (
        None  # lowest and highest that rows ran under; None: unknown
    )
    temperature_c: tuple[float, float] | None = None  # lowest and highest of rows; None: unknown

    def __post_init__(self) -> None:
        for table, name in ((self.corrections, "corrections"), (self.residuals, "residuals")):
            missing = [family for family in FAMILIES if family not in table]
            if missing:
                raise bad_value(
                    f"bundle {self.gpu}: {name}",
                    "every kernel family",
                    f"none for {', '.join(missing)}",
                )

    @property
    def has_engine_kernels(self) -> bool:
        """Whether kernels of a serving engine were measured."""
        return any(name.startswith("engine_") for name in self.seen)

    def for_data(self, data: str) -> Bundle:
        """This bundle for a workload whose operands are ``data`` (``random``, ``zeros`` ...)."""
        check_names("data", data, self.toggling)
        factor = self.toggling[data]
        law = replace(self.clock_law, toggling=factor) if self.clock_law else None
        return replace(self, power=self.power.with_data_factor(factor), clock_law=law)

    def for_bursts(self) -> Bundle:
        """This bundle for runs of some milliseconds after a pause: without a clock law of long runs
        alone.
        """
        return (
            replace(self, clock_law=None)
            if self.clock_law and not self.clock_law.in_bursts
            else self
        )

    def for_this_card(self) -> Bundle:
        """This bundle for the very card it was fitted on: intervals leave out how far other cards
        may be.
        """
        return replace(self, cards=THIS_CARD)


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
        return Correction(self.compute, self.memory, fixed_s, self.l2, self.serial_cycle)


class LaunchFile(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """``LaunchCosts`` as YAML writes them."""

    host_per_operator: str
    link_per_message: str = (
        ""  # of older bundles, and unused: predictor/link_laws.yaml has the laws
    )
    host_weights: dict[str, Weight] = {}
    start_clock: str = ""  # at which fixed times hold, where they are cycles

    def to_costs(self, where: str) -> LaunchCosts:
        """Return the costs in seconds."""
        host_s = _parse_short_time(self.host_per_operator, f"{where}.host_per_operator")
        start_hz = (
            _parse_clock(self.start_clock, f"{where}.start_clock") if self.start_clock else None
        )
        return LaunchCosts(host_s, self.host_weights, start_hz=start_hz)


def _parse_short_time(text: str, where: str) -> float:
    seconds = units.parse(text, "s", where)
    if not 0.0 <= seconds <= LONGEST_FIXED_S:
        raise bad_value(where, f"a time from 0 to {LONGEST_FIXED_S:g} s", text)
    return seconds


def _parse_clock(text: str, where: str) -> float:
    hertz = units.parse(text, "Hz", where)
    if not 0.0 < hertz <= 1e11:
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
            raise bad_value(
                where, "a ratio for each activity, which rise", f"{len(ratio)} for {len(activity)}"
            )
        top_hz = _parse_clock(self.top, where)
        return ClockLaw(
            self.without, activity, ratio, 1.0, self.clock_power, top_hz, self.in_bursts
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


class _RangeFile(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    dtypes: tuple[str, ...]
    groups: tuple[str, ...]
    sizes: dict[str, tuple[float, float]]
    forms: dict[str, str] | None = (
        None  # group -> forms with commas between: a list is slower to read
    )
    clock_hz: tuple[Hertz, Hertz] | None = None


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
    learned_on: _ReferenceFile | None = (
        None  # the chip learned factors were fitted on, where it is another
    )
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
    path = path / "bundle.json" if path.is_dir() else path
    data = read_bytes(path)
    beside = path.parent / ARRAYS_FILE
    decode = (
        decode_json if data.startswith(b"{") else decode_yaml
    )  # a bundle may be written as YAML too
    arrays = read_bytes(beside) if beside.exists() else None
    return _from_file(decode(data, _BundleFile, path.name), path.name, arrays)


@cache
def shipped_bundle(gpu: str) -> Bundle | None:
    """Return the bundle that ships for this GPU, for the mean of its boards, or None."""
    path = files("wattcast.predictor.bundle").joinpath(hardware.strip_board(gpu), "bundle.json")
    return read_bundle(path) if path.is_file() else None


def plain_to_bundle(plain: Mapping[str, Any], where: str) -> Bundle:
    """Make a bundle without learned factors from the plain mappings that ``bundle_to_plain`` gives."""
    return _from_file(convert_plain(plain, _BundleFile, where), where, None)


def _from_file(file: _BundleFile, where: str, arrays: bytes | None) -> Bundle:
    if file.format != BUNDLE_FORMAT:
        raise bad_value(
            f"{where}: format",
            f"{BUNDLE_FORMAT}",
            file.format,
            "This Wattcast reads no other; fit again.",
        )
    if file.arrays and arrays is None:
        raise bad_value(
            f"{where}: arrays", f"{ARRAYS_FILE} beside it", "none", "Copy the whole folder."
        )
    if not 0.5 <= file.settles <= 1.0:
        raise bad_value(
            f"{where}: settles", "a share of the power limit between 0.5 and 1", file.settles
        )
    given, trained = (
        of and ReferenceChip(**msgspec.structs.asdict(of))
        for of in (file.reference, file.learned_on)
    )
    reference = given or reference_chip(hardware.load_gpu(file.gpu))
    learned = None
    if file.arrays and arrays is not None:
        learned = residuals_from_bytes(arrays, trained or reference)
        if trained is None:
            reference = learned.reference
        else:
            learned = CarriedFactors(learned.reference, learned.time, learned.energy)
            if (
                "gemm" in learned.time
            ):  # its library is the one that the kernel choice was fitted on
                reference = replace(reference, choice=learned.reference.choice)
    law = file.effective_clock
    cold = None
    if file.cold is not None:
        operator_s = _parse_short_time(file.cold.operator, f"{where}: cold.operator")
        cold = ColdCacheDelay(operator_s, file.cold.s_per_byte, file.cold.layers)
    seen = {}
    for name, s in file.seen.items():
        forms = (
            None if s.forms is None else {kind: tuple(f.split(", ")) for kind, f in s.forms.items()}
        )
        seen[name] = MeasuredRange(s.dtypes, s.groups, s.sizes, forms, s.clock_hz)
    return Bundle(
        **{name: getattr(file, name) for name in _KEPT_AS_THEY_ARE},
        corrections={
            name: c.to_correction(f"{where}: corrections.{name}")
            for name, c in file.corrections.items()
        },
        launch=file.launch.to_costs(f"{where}: launch"),
        power=build_power_model(file.power.kind, file.power.model, f"{where}: power.model"),
        clock_law=None if law is None else law.to_law(f"{where}: effective_clock.top"),
        reference=reference,
        learned=learned,
        seen=seen,
        governor_share=file.settles,
        cards=file.cards or published_spread(),
        widening=file.widening or default_widening(),
        cold=cold,
    )


_KEPT_AS_THEY_ARE = (  # fields of a bundle that a file has under the same names
    *(
        "gpu",
        "status",
        "provenance",
        "residuals",
        "toggling",
        "interval_level",
        "waiting_sm",
        "step_energy",
    ),
    *("assumptions", "power_limit_w", "temperature_c"),
)


def bundle_to_plain(bundle: Bundle) -> dict[str, Any]:
    """Return a bundle as plain mappings, for a file; ``plain_to_bundle`` reads them back."""
    launch = bundle.launch
    law = bundle.clock_law
    cold = bundle.cold
    learned = bundle.learned
    clock = None
    seen = {}
    if law is not None:
        curve = law.without, law.activity.tolist(), law.ratio.tolist()
        clock = ClockLawFile(*curve, law.clock_power, f"{law.top_hz!r} Hz", law.in_bursts)
    for name, s in bundle.seen.items():
        forms = None if s.forms is None else {kind: ", ".join(f) for kind, f in s.forms.items()}
        seen[name] = _RangeFile(s.dtypes, s.groups, dict(s.sizes), forms, s.clock_hz)
    file = _BundleFile(
        **{name: getattr(bundle, name) for name in _KEPT_AS_THEY_ARE},
        format=BUNDLE_FORMAT,
        launch=LaunchFile(
            f"{float(launch.host_s_per_operator)!r} s",
            host_weights=dict(launch.host_weights),
            start_clock="" if launch.start_hz is None else f"{launch.start_hz!r} Hz",
        ),
        corrections={
            name: CorrectionFile(c.compute, c.memory, f"{c.fixed_s!r} s", c.l2, c.serial_cycle)
            for name, c in bundle.corrections.items()
        },
        power=_PowerFile(bundle.power.kind, bundle.power.to_plain()),
        effective_clock=clock,
        settles=bundle.governor_share,
        reference=_write_reference(bundle.reference),
        learned_on=_write_reference(learned.reference)
        if isinstance(learned, CarriedFactors)
        else None,
        seen=seen,
        cards=None if bundle.cards == published_spread() else bundle.cards,
        widening=None if bundle.widening == default_widening() else bundle.widening,
        cold=None
        if cold is None
        else _ColdFile(f"{cold.operator_s!r} s", cold.s_per_byte, cold.layers),
        arrays=learned is not None,
    )
    plain: dict[str, Any] = msgspec.to_builtins(file)
    return {name: value for name, value in plain.items() if value is not None}


def _write_reference(reference: ReferenceChip) -> _ReferenceFile:
    return _ReferenceFile(
        **{name: getattr(reference, name) for name in _ReferenceFile.__struct_fields__}
    )


def write_bundle(bundle: Bundle, path: Path) -> None:
    """Save a bundle as JSON and its arrays beside it, each replaced only when the new one is whole."""
    from wattcast.core.whole_files import write_whole  # predictions only read

    if bundle.learned is not None:
        write_whole(path.parent / ARRAYS_FILE, residuals_to_bytes(bundle.learned))
    write_whole(
        path, msgspec.json.format(msgspec.json.encode(bundle_to_plain(bundle)), indent=1) + b"\n"
    )


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
    np.savez(
        buffer, **arrays
    )  # inflating would take a tenth of a cold command; wheels are packed anyway
    return buffer.getvalue()


def residuals_from_bytes(data: bytes, reference: ReferenceChip) -> LearnedFactors:
    """Read what ``residuals_to_bytes`` saved."""
    arrays = read_arrays(data, ARRAYS_FILE)
    found: dict[str, dict[str, LearnedFactor]] = {"time": {}, "energy": {}}
    try:
        choice = kernel_choice.choice_from_arrays(arrays, "choice")
        for prefix in [name.removesuffix(".range") for name in arrays if name.endswith(".range")]:
            kind, _, family = prefix.partition(".")
            forest = f"{prefix}.forest"
            kriging = f"{prefix}.kriging"
            low, high = (float(x) for x in arrays[f"{prefix}.range"])
            if not -MOST_LOG_FACTOR <= low <= high <= MOST_LOG_FACTOR:
                raise ValueError(
                    f"{prefix}.range: {low} to {high} is no range of logarithms of factors"
                )
            found[kind][family] = LearnedFactor(
                TreeEnsemble.from_arrays(arrays, forest)
                if f"{forest}.features" in arrays
                else None,
                GaussianProcess.from_arrays(arrays, kriging)
                if f"{kriging}.features" in arrays
                else None,
                low,
                high,
            )
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise bad_value(
            ARRAYS_FILE, "arrays saved by `wattcast lab fit kernels`", str(error)
        ) from None
    return LearnedFactors(replace(reference, choice=choice or None), found["time"], found["energy"])
