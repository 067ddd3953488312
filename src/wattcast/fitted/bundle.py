"""Bundle: everything that was fitted for a device, with where it came from and how far it holds.

The catalogue says what the vendor publishes; a bundle says what was measured. On disk a bundle is a
folder ``fitted/<gpu>/`` with one readable ``bundle.yaml`` (``format: 1``, below) and, when a fit
needs them, plain arrays beside it; never a pickle. A GPU without a folder gets the provisional rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from wattcast import hardware, units
from wattcast.arrays import Array
from wattcast.errors import bad_value, unknown_name
from wattcast.files import from_yaml, read_bytes, write_whole
from wattcast.fitted.cards import THIS_CARD, CardSpread, published_spread
from wattcast.fitted.learned import residuals_from, residuals_to_bytes
from wattcast.fitted.widening import Widening, WideningFile, usual
from wattcast.fitted.widening import from_plain as widening_from
from wattcast.fitted.widening import to_plain as widening_to
from wattcast.kernels import Reference, Style, reference_of
from wattcast.power import PowerModel, kind_of, kinds
from wattcast.power.module import ModulePower
from wattcast.provenance import Provenance, Status
from wattcast.timeline.carried import Carried
from wattcast.timeline.clock import ClockLaw
from wattcast.timeline.cold import Cold
from wattcast.timeline.phases import Correction, Launch
from wattcast.timeline.residual import Residuals

FORMAT = 1
ARRAYS_FILE = "arrays.npz"
FAMILIES = ("gemm", "conv2d", "attention", "softmax", "layernorm", "rmsnorm", "elementwise", "collective")


@dataclass(frozen=True)
class Residual:
    """Measured over predicted, low and high end of the interval, from ``rows`` held-out rows."""

    latency: tuple[float, float]
    power: tuple[float, float]
    rows: int


@dataclass(frozen=True)
class Seen:
    """What was measured of a family: number formats, kinds of kernels, the range of each size in log2, and the forms
    of operators (:func:`~wattcast.fitted.forms.form_of`) that ran in each kind; None: not known."""

    dtypes: tuple[str, ...]
    groups: tuple[str, ...]
    sizes: Mapping[str, tuple[float, float]]
    forms: Mapping[str, tuple[str, ...]] | None = None

    @cached_property
    def bounds(self) -> tuple[tuple[str, ...], Array, Array]:
        """Names of the sizes, and the smallest and largest of each, ``(size, 1)``."""
        ends = np.array(list(self.sizes.values()), dtype=np.float64).reshape(-1, 2)
        return tuple(self.sizes), ends[:, :1], ends[:, 1:]

    @cached_property
    def every_group(self) -> frozenset[str]:
        """Kinds of kernels measured."""
        return frozenset(self.groups)

    @cached_property
    def every_form(self) -> frozenset[str]:
        """Forms measured, whatever they ran as."""
        return frozenset(name for names in (self.forms or {}).values() for name in names)


@dataclass(frozen=True)
class Bundle:
    """What was fitted for one device."""

    gpu: str
    status: Status
    provenance: Provenance
    corrections: Mapping[str, Correction]
    launch: Launch
    power: PowerModel
    clock_law: ClockLaw | None
    residuals: Mapping[str, Residual]
    toggling: Mapping[str, float]  # kind of data -> dynamic energy relative to random data
    reference: Reference  # the chip whose library chose the kernels
    learned: Residuals | None = None  # what the scaffold leaves over
    seen: Mapping[str, Seen] = field(default_factory=dict)  # family -> what was measured of it
    interval_level: float = 0.9
    settles: float = 1.0  # share of a power limit at which the governor holds the board
    assumptions: tuple[str, ...] = ()
    cards: CardSpread = field(default_factory=published_spread)  # how far another card of the kind may be
    widening: Widening = field(default_factory=usual)  # of intervals, away from what was measured
    cold: Cold | None = None  # what operators take more among others; None: not known

    def __post_init__(self) -> None:
        for table, name in ((self.corrections, "corrections"), (self.residuals, "residuals")):
            missing = [family for family in FAMILIES if family not in table]
            if missing:
                raise bad_value(f"bundle {self.gpu}: {name}", "every kernel family", f"none for {', '.join(missing)}")

    def for_data(self, data: str) -> Bundle:
        """This bundle for a workload whose operands are ``data`` (``random``, ``zeros`` ...)."""
        if data not in self.toggling:
            raise unknown_name("data", data, self.toggling, f"Known: {', '.join(self.toggling)}.")
        factor = self.toggling[data]
        if not isinstance(self.power, ModulePower):
            raise bad_value("data", "random, which this power model is fitted on", data)
        law = replace(self.clock_law, toggling=factor) if self.clock_law else None
        return replace(self, power=replace(self.power, toggling=factor), clock_law=law)

    def for_this_card(self) -> Bundle:
        """This bundle for the very card it was fitted on: intervals leave out how far other cards may be."""
        return replace(self, cards=THIS_CARD)


class _Correction(msgspec.Struct, forbid_unknown_fields=True):
    compute: float
    memory: float
    fixed: str
    l2: float = 1.0
    serial_cycle: float = 0.0


class _Launch(msgspec.Struct, forbid_unknown_fields=True):
    host_per_operator: str
    link_per_message: str
    host_weights: dict[str, float] = {}


class _Cold(msgspec.Struct, forbid_unknown_fields=True):
    operator: str
    s_per_byte: float
    layers: int = 0


class _Provenance(msgspec.Struct, forbid_unknown_fields=True):
    source: str
    date: str = ""
    device: str = ""
    note: str = ""


class _Residual(msgspec.Struct, forbid_unknown_fields=True):
    latency: tuple[float, float]
    power: tuple[float, float]
    rows: int


class _ClockLaw(msgspec.Struct, forbid_unknown_fields=True):
    without: float
    activity: list[float]
    ratio: list[float]
    clock_power: float = 0.0
    top: str = "1 Hz"


class _Reference(msgspec.Struct, forbid_unknown_fields=True):
    sm_count: float
    l2_byte: float
    l2_byte_per_cycle: float
    dram_byte_per_cycle: float
    top_hz: float
    sfu_per_cycle: float
    per_cycle: dict[str, float]
    style: Style = Style.HOPPER


class _Seen(msgspec.Struct, forbid_unknown_fields=True):
    dtypes: list[str]
    groups: list[str]
    sizes: dict[str, tuple[float, float]]
    forms: dict[str, str] | None = None  # group -> forms with commas between: a list is slower to read


class _Cards(msgspec.Struct, forbid_unknown_fields=True):
    latency: float
    power: float
    cards: int
    source: str


class _Power(msgspec.Struct, forbid_unknown_fields=True):
    kind: str
    model: dict[str, Any]


class _BundleFile(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    gpu: str
    status: Status
    provenance: _Provenance
    launch: _Launch
    corrections: dict[str, _Correction]
    power: _Power
    residuals: dict[str, _Residual]
    toggling: dict[str, float]
    effective_clock: _ClockLaw | None = None
    interval_level: float = 0.9
    settles: float = 1.0
    assumptions: list[str] = []
    reference: _Reference | None = None
    learned_on: _Reference | None = None  # the chip learned factors were fitted on, where it is another
    seen: dict[str, _Seen] = {}
    cards: _Cards | None = None  # absent: the published figures
    widening: WideningFile | None = None  # absent: the usual one
    cold: _Cold | None = None  # absent: operators cost among others what they cost by themselves
    arrays: bool = False  # whether learned factors lie beside, in arrays.npz


def read(path: Path) -> Bundle:
    """A bundle from its ``bundle.yaml`` (or the folder of it) and, where it says so, the arrays beside it."""
    path = path / "bundle.yaml" if path.is_dir() else path
    beside = path.parent / ARRAYS_FILE
    return parse(read_bytes(path), path.name, beside.read_bytes() if beside.exists() else None)


def parse(data: bytes, where: str, arrays: bytes | None = None) -> Bundle:
    """The bytes of a ``bundle.yaml`` and of its ``arrays.npz`` -> Bundle."""
    file = from_yaml(data, _BundleFile, where)
    if file.format != FORMAT:
        raise bad_value(f"{where}: format", f"{FORMAT}", file.format, "This Wattcast reads no other; fit again.")
    if file.arrays and arrays is None:
        raise bad_value(f"{where}: arrays", f"{ARRAYS_FILE} beside it", "none", "Copy the whole folder.")
    reference = _reference(file, where)
    learned = _learned(file, arrays, reference)
    return Bundle(
        gpu=file.gpu,
        status=file.status,
        provenance=Provenance(**msgspec.structs.asdict(file.provenance)),
        corrections={name: _correction(c, f"{where}: corrections.{name}") for name, c in file.corrections.items()},
        launch=Launch(
            units.parse(file.launch.host_per_operator, "s", f"{where}: launch.host_per_operator"),
            units.parse(file.launch.link_per_message, "s", f"{where}: launch.link_per_message"),
            file.launch.host_weights,
        ),
        power=_power(file.power, where),
        clock_law=_law(file.effective_clock, where),
        residuals={name: Residual(r.latency, r.power, r.rows) for name, r in file.residuals.items()},
        toggling=file.toggling,
        reference=reference if learned is None else _chosen(reference, learned),
        learned=learned,
        seen={name: _seen(s) for name, s in file.seen.items()},
        interval_level=file.interval_level,
        settles=_share(file.settles, f"{where}: settles"),
        assumptions=tuple(file.assumptions),
        cards=CardSpread(**msgspec.structs.asdict(file.cards)) if file.cards else published_spread(),
        widening=widening_from(file.widening) if file.widening else usual(),
        cold=_cold(file.cold, where),
    )


def _seen(seen: _Seen) -> Seen:
    forms = None if seen.forms is None else {group: tuple(names.split(", ")) for group, names in seen.forms.items()}
    return Seen(tuple(seen.dtypes), tuple(seen.groups), seen.sizes, forms)


def _correction(c: _Correction, where: str) -> Correction:
    return Correction(c.compute, c.memory, units.parse(c.fixed, "s", f"{where}.fixed"), c.l2, c.serial_cycle)


def _law(law: _ClockLaw | None, where: str) -> ClockLaw | None:
    if law is None:
        return None
    top_hz = units.parse(law.top, "Hz", f"{where}: effective_clock.top")
    return ClockLaw(
        law.without, np.array(law.activity), np.array(law.ratio), clock_power=law.clock_power, top_hz=top_hz
    )


def _cold(cold: _Cold | None, where: str) -> Cold | None:
    if cold is None:
        return None
    return Cold(units.parse(cold.operator, "s", f"{where}: cold.operator"), cold.s_per_byte, cold.layers)


def _reference(file: _BundleFile, where: str) -> Reference:
    """The chip the bundle was fitted on; a bundle that does not say means the catalogue's."""
    if file.reference is not None:
        return Reference(**msgspec.structs.asdict(file.reference))
    return reference_of(hardware.load(file.gpu))


def _learned(file: _BundleFile, arrays: bytes | None, reference: Reference) -> Residuals | None:
    if not file.arrays or arrays is None:
        return None
    if file.learned_on is None:
        return residuals_from(arrays, reference)
    found = residuals_from(arrays, Reference(**msgspec.structs.asdict(file.learned_on)))
    return Carried(found.reference, found.time, found.energy)


def _chosen(reference: Reference, learned: Residuals) -> Reference:
    """The reference with the kernel choice that was saved, where its library is the one the choice was fitted on."""
    if not isinstance(learned, Carried):
        return learned.reference
    whole = "gemm" in learned.time
    return replace(reference, choice=learned.reference.choice) if whole else reference


def _reference_plain(reference: Reference) -> dict[str, Any]:
    known = {name: value for name, value in vars(reference).items() if name not in ("choice", "kept")}
    return {**known, "per_cycle": dict(reference.per_cycle), "style": str(reference.style)}


def _share(value: float, where: str) -> float:
    if not 0.5 <= value <= 1.0:
        raise bad_value(where, "a share of the power limit between 0.5 and 1", value)
    return value


def _power(power: _Power, where: str) -> PowerModel:
    kind = kind_of(power.kind)
    try:
        return kind.from_plain(power.model)
    except (KeyError, TypeError, ValueError) as error:
        raise bad_value(f"{where}: power.model", f"the coefficients of a {power.kind} model", str(error)) from None


def to_plain(bundle: Bundle) -> dict[str, Any]:
    """A bundle as plain mappings, for YAML; :func:`parse` takes it back."""
    law = bundle.clock_law
    plain: dict[str, Any] = {
        "format": FORMAT,
        "gpu": bundle.gpu,
        "status": str(bundle.status),
        "provenance": {k: v for k, v in vars(bundle.provenance).items() if v},
        "launch": {
            "host_per_operator": f"{float(bundle.launch.host_s_per_operator)!r} s",
            "link_per_message": f"{bundle.launch.link_s_per_message!r} s",
            **({"host_weights": dict(bundle.launch.host_weights)} if bundle.launch.host_weights else {}),
        },
        "corrections": {
            name: {
                "compute": c.compute,
                "memory": c.memory,
                "fixed": f"{c.fixed_s!r} s",
                "l2": c.l2,
                "serial_cycle": c.serial_cycle,
            }
            for name, c in bundle.corrections.items()
        },
        "power": {"kind": _kind_name(bundle.power), "model": bundle.power.to_plain()},
        "residuals": {
            name: {"latency": list(r.latency), "power": list(r.power), "rows": r.rows}
            for name, r in bundle.residuals.items()
        },
        "toggling": dict(bundle.toggling),
        "interval_level": bundle.interval_level,
        "settles": bundle.settles,
        "assumptions": list(bundle.assumptions),
    }
    if law is not None:
        plain["effective_clock"] = {
            "without": law.without,
            "activity": law.activity.tolist(),
            "ratio": law.ratio.tolist(),
            "clock_power": law.clock_power,
            "top": f"{law.top_hz!r} Hz",
        }
    plain["reference"] = _reference_plain(bundle.reference)
    if isinstance(bundle.learned, Carried):
        plain["learned_on"] = _reference_plain(bundle.learned.reference)
    plain["seen"] = {
        name: {
            "dtypes": list(s.dtypes),
            "groups": list(s.groups),
            "sizes": {size: list(ends) for size, ends in s.sizes.items()},
            **({} if s.forms is None else {"forms": {group: ", ".join(names) for group, names in s.forms.items()}}),
        }
        for name, s in bundle.seen.items()
    }
    if bundle.cards != published_spread():
        plain["cards"] = dict(vars(bundle.cards))
    if bundle.widening != usual():
        plain["widening"] = widening_to(bundle.widening)
    if bundle.cold is not None:
        cold = bundle.cold
        plain["cold"] = {"operator": f"{cold.operator_s!r} s", "s_per_byte": cold.s_per_byte, "layers": cold.layers}
    plain["arrays"] = bundle.learned is not None
    return plain


def write(bundle: Bundle, path: Path) -> None:
    """Save a bundle as YAML and its arrays beside it, each replaced only when the new one is whole."""
    import yaml

    if bundle.learned is not None:
        write_whole(path.parent / ARRAYS_FILE, residuals_to_bytes(bundle.learned))
    write_whole(path, yaml.safe_dump(to_plain(bundle), sort_keys=False, allow_unicode=True).encode())


def _kind_name(model: PowerModel) -> str:
    return next(kind.name for kind in kinds().values() if type(kind.example()) is type(model))


@cache
def fitted(gpu: str) -> Bundle | None:
    """The bundle shipped for this GPU, or None."""
    folder = files("wattcast.fitted").joinpath(gpu)
    path, beside = folder.joinpath("bundle.yaml"), folder.joinpath(ARRAYS_FILE)
    if not path.is_file():
        return None
    return parse(path.read_bytes(), f"{gpu}/bundle.yaml", beside.read_bytes() if beside.is_file() else None)
