"""Real runs of GPUWattch and AccelWattch, reproduced from their metric traces."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from gpuwattch.conftest import read_lines, read_table
from wattcast.lab.gpuwattch.simulated_power import make_power_trace
from wattcast.lab.gpuwattch.trace_reading import SimulatorDialect
from wattcast.lab.gpuwattch.trace_request import TraceRequest

PRINTED_TOO_COARSELY = {"power", "PIPEP", "PIPE_A"}  # six decimals of a duty worth 25 W


def request(reference: Path, out: Path, run: str, xml: str, **more: object) -> TraceRequest:
    folder = reference / "simulator_runs" / run
    names = out / "names.txt"
    out.mkdir(parents=True, exist_ok=True)
    found = re.findall(
        r"^kernel_name = (\S+)", (folder / "power_report.log").read_text(), re.MULTILINE
    )
    names.write_text("\n".join(found))
    return TraceRequest(
        folder / "metric_trace.log.gz",
        folder / f"{xml}.xml",
        reference / "accelwattch" / "coefficients" / f"{xml}.csv",
        out / "power",
        kernels=names,
        figure=False,
        **more,
    )


@pytest.fixture(scope="module")
def gtx480(reference: Path, tmp_path_factory: pytest.TempPathFactory):
    made = request(
        reference,
        tmp_path_factory.mktemp("gtx480"),
        "gtx480_gpuwattch",
        "gpuwattch_gtx480",
        compat=SimulatorDialect.GPUWATTCH,
    )
    return reference / "simulator_runs" / "gtx480_gpuwattch", made.out, make_power_trace(made)[1]


@pytest.fixture(scope="module")
def qv100(reference: Path, tmp_path_factory: pytest.TempPathFactory):
    made = request(
        reference,
        tmp_path_factory.mktemp("qv100"),
        "qv100_accelwattch",
        "accelwattch_ptx_sim",
        compat=SimulatorDialect.ACCELWATTCH,
    )
    return reference / "simulator_runs" / "qv100_accelwattch", made.out, make_power_trace(made)[1]


def test_gtx480_every_component_of_every_sample(gtx480) -> None:
    truth, ours, result = gtx480
    names, true_w = read_table(truth / "power_trace.log.gz")
    assert read_table(ours / "power_trace.log.gz")[0] == names
    error_w = np.abs(read_table(ours / "power_trace.log.gz")[1] - true_w).max(axis=0)
    assert result.samples == 292
    assert len(result.kernels) == 13
    for name, error in zip(names, error_w, strict=True):
        assert error <= (2e-5 if name in ("power", "PIPEP") else 1e-5), name


def test_gtx480_metric_trace_is_the_same_file(gtx480) -> None:
    truth, ours, _ = gtx480
    assert read_lines(ours / "metric_trace.log.gz") == read_lines(truth / "metric_trace.log.gz")


def figure_of(line: str) -> tuple[str, str]:
    label, _, figure = line.partition(" = ")
    return re.sub(r"^(gpu|kernel)_(avg|max|min|tot|tot_avg|tot_max|tot_min)_", "", label).rstrip(
        ","
    ), figure.strip()


def last_place(figure: str) -> float:
    """Value of one unit in the last printed place of six significant digits."""
    value = abs(float(figure))
    return 10.0 ** (np.floor(np.log10(value)) - 5) if value else 1e-6


def test_gtx480_report_agrees_to_the_printed_digits(gtx480) -> None:
    """Same lines; figures equal, but for the duty and what hangs on it, and for ties of table
    digits.

    The energy table has 8 digits. A figure that falls on a rounding tie (0.07475625 W) may print
    its last digit otherwise: at most one unit, and rarely."""
    truth, ours, _ = gtx480
    wanted, found = read_lines(truth / "power_report.log"), read_lines(ours / "power_report.log")
    assert len(found) == len(wanted) == 2106
    ties = 0
    for line, got in zip(wanted, found, strict=True):
        if line == got:
            continue
        name, figure = figure_of(line)
        assert figure_of(got)[0] == name
        difference = abs(float(figure_of(got)[1]) - float(figure))
        if name in PRINTED_TOO_COARSELY:
            assert difference <= 1.01 * last_place(figure) or difference <= (
                1e-6 if name == "PIPE_A" else 2e-5
            ), line
        else:
            ties += 1
            assert difference <= 1.01 * last_place(figure), line
    assert ties <= 10


def test_gtx480_steady_states(gtx480) -> None:
    truth, ours, result = gtx480
    wanted = read_lines(truth / "steady_state_tracking.log.gz")
    found = read_lines(ours / "steady_state_tracking.log.gz")
    assert len(found) == len(wanted)
    assert sum(r is not None for r in result.regions) == 11
    for line, got in zip(wanted, found, strict=True):
        a, b = line.split(","), got.split(",")
        assert len(a) == len(b)
        if not a[0].isdigit():
            assert line == got
            continue
        assert a[:2] == b[:2]
        assert float(a[2]) == pytest.approx(float(b[2]), abs=2e-5)
        assert b[3] == ""  # IPC: not in the trace, left out
        assert a[4:31] == b[4:31]
        assert float(a[31]) == pytest.approx(float(b[31]), abs=1.1e-6)  # PIPE_A
        assert a[32:] == b[32:]
    assert any("IPC" in note for note in result.notes)


def test_qv100_what_its_trace_determines(qv100) -> None:
    """All components but STATICP, which needs the active threads of a warp, and with it the total."""
    truth, ours, result = qv100
    head, true_w = read_table(truth / "power_trace.log.gz")
    our_head, our_w = read_table(ours / "power_trace.log.gz")
    assert our_head == head
    assert head[-1] == "CONSTPSTATICP"  # the original's header lacks a comma
    names = [*head[:-1], "CONSTP", "STATICP"]
    error_w = dict(zip(names, np.abs(our_w - true_w).max(axis=0), strict=True))
    assert result.samples == 173
    assert len(result.kernels) == 13
    for name in set(names) - {"power", "STATICP"}:
        assert error_w[name] <= 1e-4, name
    assert any("STATICP" in note for note in result.notes)
    static = np.abs(our_w[:, -1] - true_w[:, -1]) <= 1e-4  # full warps hold in all samples but one
    assert static.sum() >= len(static) - 2


def test_qv100_steady_states(qv100) -> None:
    truth, ours, _ = qv100
    wanted = read_lines(truth / "steady_state_tracking.log.gz")
    found = read_lines(ours / "steady_state_tracking.log.gz")
    assert len(found) == len(wanted) == 15
    for line, got in zip(wanted[1:], found[1:], strict=True):
        a, b = line.split(","), got.split(",")
        assert a[:2] == b[:2]
        assert float(a[2]) == pytest.approx(float(b[2]), abs=1e-5)
        assert np.array(a[4:-1], float) == pytest.approx(np.array(b[4:-1], float), abs=1.1e-6)


def test_default_mode_has_the_same_totals_and_no_repeated_rows(
    reference: Path, tmp_path: Path, gtx480
) -> None:
    strict = gtx480[2]
    made = request(reference, tmp_path, "gtx480_gpuwattch", "gpuwattch_gtx480", parquet=False)
    job, result = make_power_trace(made)
    names, watts = read_table(made.out / "power_trace.log.gz")
    assert watts.shape == (292, 20)
    assert names[-1] == "COALP"
    assert watts[:, 1:].sum(axis=1) == pytest.approx(watts[:, 0], abs=2e-5)
    assert result.energy_j == pytest.approx(strict.energy_j, rel=1e-6)
    assert "IBP," not in (made.out / "power_report.log").read_text()
    assert job.model.parts == tuple(names[1:])


def test_leakage_of_mcpat_becomes_a_part(reference: Path, tmp_path: Path) -> None:
    listing = reference / "simulator_runs" / "gtx480_gpuwattch" / "mcpat_area_leakage_peak.txt"
    watts = {}
    for gated in (False, True):
        made = request(
            reference,
            tmp_path / str(gated),
            "gtx480_gpuwattch",
            "gpuwattch_gtx480",
            leakage=listing,
            gate_idle_sms=gated,
            parquet=False,
        )
        make_power_trace(made)
        names, table = read_table(made.out / "power_trace.log.gz")
        watts[gated] = table[:, names.index("LEAKAGEP")]
    assert watts[False] == pytest.approx(46.422, abs=1e-3)  # McPAT's "Total Leakage"
    assert (watts[True] <= watts[False] + 1e-9).all()
    assert watts[True].min() < 40.0  # kernels end on idle SMs
