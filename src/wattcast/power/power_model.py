"""Activity -> Power: the interface of every power model, how one is found by name, and its files.

A power model is a frozen dataclass of coefficients that inherits from ``PowerModel`` and lives in
one file of this package. It must say which events it needs, name its parts, and turn an activity
into watts by part. Everything else that predictions, efficiency factors and forecasts ask of a
model has an implementation here, which a model replaces where it can do better. Nothing outside
asks which model it has.

Files hold published models, each number with its source, and fitted ones that were saved.
"""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import (
    dataclass,
    field,
    fields,
    is_dataclass,
)
from enum import Enum
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import UnionType
from typing import (
    Any,
    ClassVar,
    Self,
    TypeAlias,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
import numpy as np

from wattcast.core import (
    BadInput,
    bad_value,
    check_names,
    errors,
    files,
)
from wattcast.core.arrays import (
    Array,
    Sweepable,
    as_sweep,
)
from wattcast.core.errors import MissingSpecification
from wattcast.core.strict_files import (
    Provenance,
    decode_yaml,
    read_bytes,
)
from wattcast.core.whole_files import write_whole
from wattcast.hardware import DEFAULT_TEMPERATURE_C, OperatingPoint
from wattcast.power.activity import (
    Activity,
    ActivitySource,
    known_events,
)

FORMAT = 1
MOST_FILE_BYTE = 1 << 22


@dataclass(frozen=True)
class Power:
    """Watts by part in each interval. The total is the sum of the parts, by construction."""

    part_w: Array  # (*sweep, interval, part)
    parts: tuple[str, ...]

    @property
    def total_w(self) -> Array:
        """Board power, ``(*sweep, interval)``."""
        total: Array = self.part_w.sum(axis=-1)
        return total

    def part_power_w(self, part: str) -> Array:
        """Return the watts of one part, ``(*sweep, interval)``."""
        return self.part_w[..., self.parts.index(part)]


@dataclass(frozen=True)
class DesignEnergies:
    """How the energies of a design differ from those of the chip it is drawn from.

    Factors on the energy of events by module, on the core rail and on other rails, and on the
    static and the clock part of the idle power, each a number or ``(*sweep, 1)``. A module that is
    not named keeps its energy.
    """

    core: Mapping[str, Sweepable] = field(default_factory=dict)
    other: Mapping[str, Sweepable] = field(default_factory=dict)
    static: Sweepable = 1.0
    clock: Sweepable = 1.0
    link_j_per_byte: float | None = None  # of a model that has no energy of links


# (count of the last event, duration in s, operating point) -> mean power in W, each ``(*sweep,)``
MeanPower: TypeAlias = Callable[[Array, Array, OperatingPoint], Array]
_MODELS: dict[str, type[PowerModel]] = {}  # filled as the files of models are imported


class PowerModel(ABC):
    """Frozen coefficients that turn an activity into watts by part.

    A subclass names its ``kind``, the word that stands for it in files, and is known by it once its
    file is imported.
    """

    kind: ClassVar[str]

    def __init_subclass__(cls) -> None:
        if "kind" in vars(cls):
            _MODELS[cls.kind] = cls

    @property
    @abstractmethod
    def required_events(self) -> tuple[str, ...]:
        """Events without which this model cannot say how many watts there are."""

    @property
    @abstractmethod
    def parts(self) -> tuple[str, ...]:
        """Names of the parts it reports, in order."""

    @abstractmethod
    def power(self, activity: Activity) -> Power:
        """Return the watts of each part in each interval of ``activity``."""

    def to_plain(self) -> dict[str, Any]:
        """Return the coefficients as mappings, lists and numbers, as YAML and JSON hold them."""
        plain: dict[str, Any] = coefficients_to_plain(self)
        return plain

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Build the model from what ``to_plain`` returned."""
        model: Self = build_coefficients(cls, plain)
        return model

    def prepare_mean_power(
        self,
        events: tuple[str, ...],
        counts: Array,
    ) -> MeanPower:
        """Prepare the mean power of a workload that is asked for at one clock after another.

        ``counts`` are those of ``events[:-1]`` over the whole workload and do not depend on the
        clock. The count of ``events[-1]`` does, and is given with each call. Mean power is that of
        one interval that holds all counts.
        """

        def mean_power(
            last_count: Array,
            duration_s: Array,
            at: OperatingPoint,
        ) -> Array:
            fixed_counts = np.broadcast_to(counts, (*last_count.shape, len(counts)))
            all_counts = np.concatenate([fixed_counts, last_count[..., np.newaxis]], axis=-1)
            activity = Activity(
                duration_s[..., np.newaxis],
                all_counts[..., np.newaxis, :],
                events,
                at,
                ActivitySource.PREDICTED,
            )
            return self.power(activity).total_w[..., 0]

        return mean_power

    def idle_power_w(
        self,
        clock_hz: Sweepable,
        temperature_c: Sweepable = DEFAULT_TEMPERATURE_C,
    ) -> Array:
        """Return the watts drawn at each set clock while nothing happens.

        All clocks of the card are this one.
        """
        names = self.required_events
        hertz, degrees = np.broadcast_arrays(clock_hz, temperature_c)
        at = OperatingPoint(as_sweep(hertz), None, as_sweep(degrees), as_sweep(hertz))
        no_counts = np.zeros((*hertz.shape, 1, len(names)))
        one_second = np.ones((*hertz.shape, 1))
        activity = Activity(
            one_second,
            no_counts,
            names,
            at,
            ActivitySource.PREDICTED,
        )
        return self.power(activity).total_w[..., 0]

    def relative_voltage(self, clock_hz: Sweepable) -> Array | None:
        """Return the core voltage over that at the top clock; None where the model has no
        voltage.
        """
        return None

    @property
    def scalable_parts(self) -> tuple[str, ...]:
        """Parts whose energy ``scale_energy`` can scale, one by one."""
        return ()

    def scale_energy(
        self,
        part_factor: Mapping[str, float],
        idle_factor: float = 1.0,
        idle_offset_w: float = 0.0,
    ) -> PowerModel:
        """Return the model with the energy of some parts and its idle power scaled.

        Parts that are not named keep their energy. P_idle becomes ``idle_factor``·P_idle +
        ``idle_offset_w``.
        """
        expected = "a power model whose energies can be scaled"
        raise bad_value("efficiency factors", expected, f"a {self.kind} model")

    def with_data_factor(self, factor: float) -> PowerModel:
        """Return the model for operands whose toggling takes ``factor`` times that of random
        data.
        """
        if factor == 1.0:
            return self
        expected = "random data, which this power model was fitted on"
        raise bad_value("data", expected, f"energy times {factor:g}")

    def for_design(self, energies: DesignEnergies) -> PowerModel:
        """Return the model of a design; a model without energies by module keeps what it has."""
        return self

    def with_voltage_beyond(self, top_hz: float) -> PowerModel:
        """Return the model with its voltage carried on above the measured clocks, up to
        ``top_hz``."""
        return self

    def with_voltage_factor(self, factor: Sweepable) -> PowerModel:
        """Return the model with its core voltage times ``factor`` at every clock."""
        raise MissingSpecification(
            f"vary voltage: a {self.kind} power model has no voltage curve to scale. "
            "Vary another field."
        )


def power_model_kind(name: str) -> type[PowerModel]:
    """Return the class of the model called ``name``, or raise an error with the nearest names.

    The model called ``rate`` is looked for in ``rate.py`` and ``rate_power.py`` of this package, so
    that reading one file of coefficients imports one model. A model in a file elsewhere is known
    once that file is imported.
    """
    if name not in _MODELS and name.isidentifier():
        for module in (f"wattcast.power.{name}", f"wattcast.power.{name}_power"):
            if find_spec(module) is not None:
                import_module(module)
    if name not in _MODELS:
        check_names("power model", name, power_model_kinds())
    return _MODELS[name]


def build_power_model(
    kind: str,
    plain: Mapping[str, Any],
    where: str,
) -> PowerModel:
    """Build a model of a kind from the coefficients of a file, or raise an error that says why
    not.
    """
    try:
        return power_model_kind(kind).from_plain(plain)
    except BadInput as error:
        raise type(error)(f"{where}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise bad_value(where, f"coefficients of a {kind} model", problem) from None


def power_model_kinds() -> dict[str, type[PowerModel]]:
    """Return every power model by name: those of this package, and those registered elsewhere."""
    package = import_module("wattcast.power")
    for module in pkgutil.iter_modules(package.__path__, "wattcast.power."):
        import_module(module.name)
    return dict(sorted(_MODELS.items()))


# Metadata of a field that files do not hold, and of one that they hold where it is neither zero nor
# empty, which is its default
NOT_SAVED = {"saved": False}
SAVED_IF_SET = {"saved": "set"}


def coefficients_to_plain(value: Any) -> Any:
    """Return coefficients as mappings, lists and numbers.

    Dataclasses are mappings of their fields, without empty arrays.
    """
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [coefficients_to_plain(item) for item in value]
    if isinstance(value, Mapping):
        return dict(value)
    if not is_dataclass(value):
        return value
    plain = {}
    for item in fields(value):
        part = getattr(value, item.name)
        if _is_saved(item.metadata.get("saved", True), part):
            plain[item.name] = coefficients_to_plain(part)
    return plain


def _is_saved(rule: bool | str, value: Any) -> bool:
    """Return whether files hold the value of a field, whose metadata give a rule."""
    if isinstance(value, np.ndarray) and not value.size:
        return False
    return bool(value) if rule == "set" else bool(rule)


def build_coefficients(kind: Any, plain: Any) -> Any:
    """Build a value of a type from what ``coefficients_to_plain`` returned.

    Fields that it does not hold have their defaults.
    """
    origin = get_origin(kind)
    inner_kinds = get_args(kind)
    if kind == Array:
        return np.array(plain, dtype=np.float64)
    if origin in (UnionType, Union):  # of a type and None
        return None if plain is None else build_coefficients(inner_kinds[0], plain)
    if origin is tuple:
        return tuple(build_coefficients(inner_kinds[0], item) for item in plain)
    if origin is Mapping:
        return {name: build_coefficients(inner_kinds[1], item) for name, item in plain.items()}
    if not is_dataclass(kind):
        return kind(plain)
    hints = get_type_hints(kind)
    arguments = {}
    for item in fields(kind):
        if item.name in plain:
            arguments[item.name] = build_coefficients(hints[item.name], plain[item.name])
    return cast("Callable[..., Any]", kind)(**arguments)


def interval_energy_j(power: Power, duration_s: Array) -> Array:
    """Return the joules of each interval, E = P·t, ``(*sweep, interval)``."""
    return np.asarray(power.total_w * duration_s)


def mean_power_w(joules: Array, seconds: Array) -> Array:
    """Return the mean power P = E/t; zero where no time passes."""
    takes_time = np.asarray(seconds) > 0
    if takes_time.all():
        return np.asarray(joules / seconds)
    nothing = np.zeros(np.broadcast_shapes(joules.shape, seconds.shape))
    return np.divide(joules, seconds, out=nothing, where=takes_time)


def event_intensity(activity: Activity, event: str) -> Array:
    """Return the rate of an event in 1/s, or the value of a mean, ``(*sweep, interval)``."""
    if known_events()[event].is_mean:
        return activity.event_values(event)
    return activity.rate(event)


def stack_parts(
    activity: Activity,
    part_w: list[Array],
    parts: tuple[str, ...],
) -> Power:
    """Return watts of parts, each of which may be constant, over all intervals of ``activity``."""
    part_shapes = [np.shape(watts) for watts in part_w]
    shape = np.broadcast_shapes(activity.duration_s.shape, activity.value.shape[:-1], *part_shapes)
    broadcast_w = [np.broadcast_to(watts, shape) for watts in part_w]
    return Power(np.stack(broadcast_w, axis=-1), parts)


def order_by_event(where: str, coefficients: Mapping[str, float]) -> dict[str, float]:
    """Return coefficients in the order of ``events.csv``, whatever order a file wrote them in.

    Every event must be known and every coefficient a finite number.
    """
    events = known_events()
    for name, coefficient in coefficients.items():
        check_names("event", name, events, "")
        if not np.isfinite(coefficient):
            raise bad_value(f"{where}: {name}", "a finite number", coefficient)
    return {name: float(coefficients[name]) for name in events if name in coefficients}


MOST_RELATIVE_VOLTAGE = 10.0
MOST_IDLE_GROWTH = 0.1  # of idle power a degree
LOWEST_C, HIGHEST_C = -100.0, 200.0  # beyond which no chip is
_LINE_WIDTH = 118  # of a file
MOST_IDLE_W = 1e5  # of one card: the hungriest of the catalogue idles at 294 W


@dataclass(frozen=True)
class VoltageCurve:
    """Core voltage by set clock, relative to that at the top clock.

    It is linear between points and flat beyond them. Relative voltage is enough, because dynamic
    power needs V²·C only up to one factor, and some vendors publish no volts. ``factor`` multiplies
    the curve, a number or one per point of a sweep, for asking what another voltage would do; files
    do not hold it.
    """

    clock_hz: Array
    relative: Array
    factor: Sweepable = field(default=1.0, metadata=NOT_SAVED)

    def __post_init__(self) -> None:
        _check_curve("voltage", "one relative voltage a clock", self.clock_hz, self.relative)
        clocks_rise = (np.diff(self.clock_hz) > 0).all()
        never_falls = (np.diff(self.relative) >= 0).all()
        if not (clocks_rise and never_falls and self.relative[0] > 0):
            expected = "rising clocks and voltages that never fall"
            raise bad_value("voltage", expected, self.relative.tolist())
        if not (self.relative[-1] <= MOST_RELATIVE_VOLTAGE and np.isfinite(self.clock_hz).all()):
            limit = f"at most {MOST_RELATIVE_VOLTAGE:g}"
            expected = f"voltages relative to that at the top clock, {limit}"
            raise bad_value("voltage", expected, self.relative[-1])

    def carried_to(self, top_hz: float) -> VoltageCurve:
        """Return the curve carried on to ``top_hz`` at the slope of its last rise.

        Beyond its end the curve is flat, which would give a design with a higher clock that clock
        for nothing.
        """
        rises = np.flatnonzero(np.diff(self.relative) > 0)
        if not rises.size or top_hz <= self.clock_hz[-1]:
            return self
        first = int(rises[-1])
        rise = self.relative[first + 1] - self.relative[first]
        slope = rise / (self.clock_hz[first + 1] - self.clock_hz[first])
        level = self.relative[-1] + slope * (top_hz - self.clock_hz[-1])
        return VoltageCurve(
            np.append(self.clock_hz, top_hz),
            np.append(self.relative, min(level, MOST_RELATIVE_VOLTAGE)),
            self.factor,
        )

    def level_at(self, clock_hz: Sweepable) -> Array:
        """Return the relative voltage at each set clock."""
        return np.asarray(np.interp(clock_hz, self.clock_hz, self.relative) * self.factor)


@dataclass(frozen=True)
class IdlePower:
    """What the card draws with a context open and no work, by set clock f and die temperature T.

    P_idle(f) = P_board + I_leak·V + C_clk·V²·f is given as one measured or published curve, linear
    between points and flat beyond them. The part above its lowest point is reported as clock power,
    the rest as static power. Leakage makes it grow with temperature: P_idle(f, T) = P_idle(f)·(1 +
    ``per_c``·(T - ``reference_c``)), not below zero. The straight line in T holds for the few tens
    of degrees between light and heavy use.
    """

    clock_hz: Array
    power_w: Array
    reference_c: float
    per_c: float = 0.0

    def __post_init__(self) -> None:
        _check_curve("idle", "one power a clock", self.clock_hz, self.power_w)
        if not ((np.diff(self.clock_hz) > 0).all() and (self.power_w > 0).all()):
            raise bad_value("idle", "rising clocks and powers above zero", self.power_w.tolist())
        if not (self.power_w.max() <= MOST_IDLE_W and np.isfinite(self.clock_hz).all()):
            raise bad_value("idle", f"at most {MOST_IDLE_W:g} W", self.power_w.max())
        if not (abs(self.per_c) <= MOST_IDLE_GROWTH and LOWEST_C <= self.reference_c <= HIGHEST_C):
            expected = "a growth of at most 0.1 a degree, from a temperature of a chip"
            raise bad_value("idle", expected, f"{self.per_c} from {self.reference_c} C")

    def power_at(
        self,
        clock_hz: Sweepable,
        temperature_c: Sweepable,
    ) -> Array:
        """Return the idle power in W at each set clock and temperature."""
        warmer = np.maximum(1.0 + self.per_c * (temperature_c - self.reference_c), 0.0)
        return np.asarray(np.interp(clock_hz, self.clock_hz, self.power_w) * warmer)

    def static_w(self, temperature_c: Sweepable) -> Array:
        """Return the lowest point of the curve: board, memory standby, and leakage at that
        clock.
        """
        return self.power_at(self.clock_hz[np.argmin(self.power_w)], temperature_c)


def _check_curve(
    name: str,
    expected: str,
    clock_hz: Array,
    values: Array,
) -> None:
    """Raise an error unless a curve has a value at each clock, and a clock at all."""
    if clock_hz.shape != values.shape or clock_hz.ndim != 1 or clock_hz.size == 0:
        raise bad_value(name, expected, f"{values.size} for {clock_hz.size}")


@dataclass(frozen=True)
class SavedModel:
    """A power model with its provenance, its held-out errors in percent, and what was assumed."""

    name: str
    model: PowerModel
    provenance: Provenance
    error_percent: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    # How activity was carried to other clocks
    scaling: Mapping[str, float] = field(default_factory=dict)


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
    text: str = yaml.safe_dump(
        plain,
        sort_keys=False,
        allow_unicode=True,
        width=_LINE_WIDTH,
    )
    return text.encode()


def load_saved_model(path: Path) -> SavedModel:
    """Read a model file, or a model that ships: fitted here (``h200``) or published
    (``tegra-k1``).
    """
    if path.exists() or len(path.parts) > 1 or path.suffix in (".yaml", ".yml"):
        return parse_saved_model(read_bytes(path, MOST_FILE_BYTE), path.name)
    shipped = shipped_models()
    name_of_folded = {errors.fold_name(name): name for name in shipped} | {"tk1": "tegra-k1"}
    name = name_of_folded.get(errors.fold_name(path.name), "")
    if not name:
        raise bad_value("power model", f"a file, or {' or '.join(shipped)}, which ship", path.name)
    return parse_saved_model(shipped[name].read_bytes(), f"{name}.yaml")


def shipped_models() -> dict[str, Path]:
    """Return the files of models that ship, by name: published ones, and those fitted here."""
    presets = files("wattcast.power").joinpath("presets")
    paths = {}
    for folder in (presets.joinpath("fitted"), presets):
        for path in folder.iterdir():
            if path.name.endswith(".yaml"):
                paths[path.name.removesuffix(".yaml")] = path
    return paths


def parse_saved_model(data: bytes, where: str) -> SavedModel:
    """Return the model that a model file describes, or raise an error that names the bad key."""
    file = decode_yaml(data, _ModelFile, where)
    if file.format != FORMAT:
        hint = "Is it from another version of Wattcast?"
        raise bad_value(f"{where}: format", str(FORMAT), file.format, hint)
    return SavedModel(
        name=file.name,
        model=build_power_model(file.kind, file.model, f"{where}: model"),
        provenance=file.provenance,
        error_percent=file.error_percent,
        notes=tuple(file.notes),
        scaling=file.scaling,
    )
