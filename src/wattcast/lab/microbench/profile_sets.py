"""Complete what an Nsight Compute export holds by what follows from it.

``ncu --set full`` does not collect the metrics that ``lab tune`` counts with: it gives pipes as
shares of their peaks, bank conflicts by loads and stores, and no sizes of accesses. Each of these
follows from what it gives. A metric that was collected itself always counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wattcast.core.arrays import Array
from wattcast.core.units import Dtype
from wattcast.hardware import Gpu
from wattcast.lab.counter_models.profiler_counters import LaunchKey
from wattcast.lab.microbench.unit_work import ACCESSES, METRICS

Metrics = dict[str, Array]

_WARP = 32.0
_SECTOR_BYTE = 32.0
_SCHEDULERS = 4.0
_ELAPSED = "sm__cycles_elapsed"
_ACTIVE = "sm__cycles_active"
_PIPE = "sm__inst_executed_pipe_{}"
_RATE = "smsp__sass_thread_inst_executed_op_{}_pred_on"
_SINGLE_KINDS = ("fadd", "ffma", "fmul")
_USED_BYTES = "smsp__sass_average_data_bytes_per_sector_mem_global_op_{}"


@dataclass(frozen=True)
class PipeRates:
    """Warp instructions that each pipe of a multiprocessor starts in a cycle, at its peak."""

    sm_count: float
    per_cycle: dict[str, float]

    @classmethod
    def of(cls, gpu: Gpu) -> PipeRates:
        """Return the rates of a GPU of the catalogue; a pipe whose rate is not known is left
        out.
        """
        flop = gpu.pipes.cuda_flop_per_cycle
        fma = flop.get(Dtype.FP32, 0.0) / 2.0 / _WARP
        rates = {
            "fma": fma,
            "fmaheavy": fma / 2.0,
            "fp64": flop.get(Dtype.FP64, 0.0) / 2.0 / _WARP,
            "alu": (gpu.pipes.int32_op_per_cycle or 0.0) / _WARP,
            "xu": (gpu.pipes.sfu_op_per_cycle or 0.0) / _WARP,
            "lsu": 1.0,
        }
        known = {pipe: float(np.mean(rate)) for pipe, rate in rates.items()}
        known = {pipe: rate for pipe, rate in known.items() if rate > 0.0}
        return cls(float(np.mean(gpu.sm_count)), known)


def complete_metrics(
    exported: Metrics,
    launches: Sequence[LaunchKey],
    pipes: PipeRates | None,
) -> Metrics:
    """Return the metrics of an export with those that follow from them."""
    metrics = dict(exported)
    _add_sizes(metrics, launches)
    _add_cycles(metrics, pipes)
    _add_pipes(metrics, pipes)
    _add_products(metrics)
    _add_threads(metrics)
    _add_memory(metrics)
    _add_access_sizes(metrics)
    return metrics


def _add(
    metrics: Metrics,
    name: str,
    value: Array | None,
) -> None:
    """Set a metric that was not collected."""
    if value is not None and name not in metrics:
        metrics[name] = value


def _sum_known(metrics: Metrics, *names: str) -> Array | None:
    """Return the sum of metrics, None where one of them was not collected."""
    if any(name not in metrics for name in names):
        return None
    return np.asarray(np.sum([metrics[name] for name in names], axis=0))


def _scaled(
    metrics: Metrics,
    name: str,
    factor: Array | float,
) -> Array | None:
    return None if name not in metrics else metrics[name] * factor


def _add_sizes(metrics: Metrics, launches: Sequence[LaunchKey]) -> None:
    """Take blocks and threads from the columns of the launch where no metric has them."""
    for name, sides in (
        (METRICS["grid"], [launch.grid for launch in launches]),
        (METRICS["block"], [launch.block for launch in launches]),
    ):
        if sides and all(sides):
            _add(metrics, name, np.array([float(np.prod(side)) for side in sides]))


def _add_cycles(metrics: Metrics, pipes: PipeRates | None) -> None:
    """Sum cycles over the multiprocessors where only means or maxima were collected."""
    if pipes is None:
        return
    for name in (_ELAPSED, _ACTIVE):
        for rollup in ("avg", "max"):
            _add(metrics, f"{name}.sum", _scaled(metrics, f"{name}.{rollup}", pipes.sm_count))
    time_s = metrics.get(METRICS["time"])
    if time_s is not None:
        cycles = _scaled(metrics, f"{_ELAPSED}.avg.per_second", time_s * pipes.sm_count)
        _add(metrics, f"{_ELAPSED}.sum", cycles)
    _add(metrics, f"{_ELAPSED}.max", _scaled(metrics, f"{_ELAPSED}.sum", 1.0 / pipes.sm_count))


def _add_pipes(metrics: Metrics, pipes: PipeRates | None) -> None:
    """Count the instructions of a pipe from the share of its peak, in active or elapsed cycles."""
    if pipes is None:
        return
    for pipe, rate in pipes.per_cycle.items():
        name = _PIPE.format(pipe)
        for cycles, which in ((_ACTIVE, "active"), (_ELAPSED, "elapsed")):
            share = f"{name}.avg.pct_of_peak_sustained_{which}"
            if share in metrics and f"{cycles}.sum" in metrics:
                _add(metrics, f"{name}.sum", metrics[share] * rate * metrics[f"{cycles}.sum"])
    share = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
    if share in metrics and f"{_ACTIVE}.sum" in metrics:
        cycles_sum = _SCHEDULERS * metrics[f"{_ACTIVE}.sum"]
        _add(metrics, METRICS["tensor_cycles"], metrics[share] * cycles_sum)


def _add_products(metrics: Metrics) -> None:
    """Tell the instructions on the heavy half of the multiply-add pipe from the kinds of all.

    heavy = P + S/2 with S fp32 instructions, which run on both halves alike, and P the others,
    which are integer products and run on the heavy half alone. ``--set full`` has S as rates of
    threads."""
    rates = [f"{_RATE.format(kind)}.sum.per_cycle_elapsed" for kind in _SINGLE_KINDS]
    per_cycle = _sum_known(metrics, *rates)
    cycles = metrics.get(f"{_ELAPSED}.max")
    together = metrics.get(METRICS["pipe_fma"])
    threads = metrics.get(METRICS["active_threads"])
    if per_cycle is None or cycles is None or together is None or threads is None:
        return
    single = np.minimum(per_cycle * cycles / np.maximum(threads, 1.0), together)
    _add(metrics, METRICS["pipe_fmaheavy"], together - 0.5 * single)


def _add_threads(metrics: Metrics) -> None:
    """Count instructions of threads from those of warps and their active threads."""
    if METRICS["instructions"] not in metrics:
        for name in ("sm__inst_executed.sum", "smsp__inst_issued.sum"):
            _add(metrics, METRICS["instructions"], metrics.get(name))
    active = METRICS["active_threads"]
    if METRICS["instructions"] in metrics:
        threads = _scaled(metrics, active, metrics[METRICS["instructions"]])
        _add(metrics, METRICS["thread_instructions"], threads)
    # of a diverged warp not all threads come to a branch
    each = metrics.get(active, _WARP)
    branches = _scaled(metrics, "smsp__inst_executed_op_branch.sum", each)
    _add(metrics, METRICS["branches_of_threads"], branches)


def _add_memory(metrics: Metrics) -> None:
    """Add up loads and stores, and turn sectors and rates into bytes."""
    time_s = metrics.get(METRICS["time"])
    conflicts = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared"
    passes = "l1tex__data_pipe_lsu_wavefronts_mem_shared"
    for name, total in ((conflicts, METRICS["extra_passes"]), (passes, METRICS["shared_passes"])):
        _add(metrics, total, _sum_known(metrics, f"{name}_op_ld.sum", f"{name}_op_st.sum"))
    share = "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed"
    if f"{_ELAPSED}.sum" in metrics:  # a pass a cycle at most
        _add(metrics, METRICS["wavefronts"], _scaled(metrics, share, metrics[f"{_ELAPSED}.sum"]))
    for way, total in (("read", "dram_read"), ("write", "dram_written")):
        sectors = _scaled(metrics, f"dram__sectors_{way}.sum", _SECTOR_BYTE)
        _add(metrics, METRICS[total], sectors)
        if time_s is not None:
            rate = _scaled(metrics, f"dram__bytes_{way}.sum.per_second", time_s)
            _add(metrics, METRICS[total], rate)
    reduced = metrics.get("lts__t_sectors_srcunit_tex_op_red.sum")
    _add(metrics, METRICS["reduced_sectors"], reduced)
    for way, total in (("read", "l2_read"), ("write", "l2_written")):
        sectors = _scaled(metrics, f"lts__t_sectors_srcunit_tex_op_{way}.sum", _SECTOR_BYTE)
        _add(metrics, METRICS[total], sectors)


def _add_access_sizes(metrics: Metrics) -> None:
    """Tell the size of accesses from the bytes that threads use of their sectors.

    ``--set full`` has no instructions by size. Accesses of a kernel are all taken as of the size
    next to their mean. Bytes of a sector that several threads share would make it too small: where
    the L1 gives most sectors again, loads are taken as of the size of stores if that is larger."""
    names = [METRICS[name] for name in ACCESSES.values()]
    threads = metrics.get(METRICS["active_threads"])
    ways = (("ld", "loaded_sectors", "loads"), ("st", "stored_sectors", "stores"))
    if threads is None or any(name in metrics for name in names):
        return
    used_byte = {way: np.zeros_like(threads) for way, _, _ in ways}
    lanes = {way: np.zeros_like(threads) for way, _, _ in ways}
    requests = np.zeros_like(threads)
    for way, sectors, accesses in ways:
        used = _read_used_bytes(metrics, way)
        if used is None or any(METRICS[name] not in metrics for name in (sectors, accesses)):
            continue
        # the ratio is no number where no sector was moved
        used_byte[way] = np.nan_to_num(used) * np.nan_to_num(metrics[METRICS[sectors]])
        lanes[way] = np.nan_to_num(metrics[METRICS[accesses]]) * np.maximum(threads, 1.0)
        requests = requests + np.nan_to_num(metrics[METRICS[accesses]])
    if not (requests > 0.0).any():
        return
    stored_byte = used_byte["st"] / np.maximum(lanes["st"], 1.0)
    shared = _are_shared(metrics)
    least_byte = np.where(shared, stored_byte * lanes["ld"], 0.0)
    loaded_byte = np.maximum(used_byte["ld"], least_byte)
    mean = (loaded_byte + used_byte["st"]) / np.maximum(lanes["ld"] + lanes["st"], 1.0)
    sizes = np.array(list(ACCESSES), dtype=float)
    nearest = np.abs(np.log2(np.maximum(mean, 0.5))[:, np.newaxis] - np.log2(sizes)).argmin(axis=1)
    for place, name in enumerate(names):
        metrics[name] = np.where(nearest == place, requests, 0.0)


def _are_shared(metrics: Metrics) -> Array:
    """Tell the kernels whose threads share words: the L1 gives most of their sectors again."""
    loaded = np.nan_to_num(metrics.get(METRICS["loaded_sectors"], np.zeros(1)))
    hit = np.nan_to_num(metrics.get(METRICS["hit_sectors"], np.zeros(1)))
    return np.asarray(hit >= 0.5 * np.maximum(loaded, 1.0))


def _read_used_bytes(metrics: Metrics, way: str) -> Array | None:
    """Return the bytes that threads use of a sector, of loads or stores; a share is of 32 bytes."""
    name = _USED_BYTES.format(way)
    if f"{name}.ratio" in metrics:
        return metrics[f"{name}.ratio"]
    return _scaled(metrics, f"{name}.pct", _SECTOR_BYTE)
