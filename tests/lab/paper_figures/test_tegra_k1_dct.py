"""Figure 13 of the Tegra K1's paper: counts of our DCT, priced by the published model."""

from __future__ import annotations

from pathlib import Path

import pytest

from wattcast.lab.paper_figures.tegra_k1 import compute_dct_w, compute_part_w, load_k1, main
from wattcast.lab.paper_figures.tegra_k1_dct import (
    PARTS,
    VARIANTS,
    draw_figure_13,
    make_k1_events,
    read_dct_events,
)

FULL_HD = 1920 * 1080


def test_a_frame_costs_what_equation_5_needs() -> None:
    """64 multiply-adds and 64 products of a coefficient, with 64 conversions of its pixels."""
    wide, narrow = (read_dct_events(v.name) for v in VARIANTS[:2])
    needed = 5.0 * FULL_HD * 128
    assert wide["fp64_instruction"] == pytest.approx(needed, rel=0.03)
    assert narrow["fp32_instruction"] == pytest.approx(needed, rel=0.03)
    assert narrow["fp64_instruction"] == 0.0
    assert wide["conversion_instruction"] == pytest.approx(needed / 2, rel=0.03)


def test_loads_that_miss_come_from_l2() -> None:
    threads = {
        f"sm__sass_thread_inst_executed_op_{kind}_pred_on.sum": 0.0
        for kind in ("integer", "fp32", "fp64", "conversion", "misc")
    }
    metrics = threads | {
        "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum": 100.0,
        "l1tex__t_sectors_pipe_lsu_mem_global_op_ld_lookup_hit.sum": 75.0,
        "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum": 40.0,
        "l1tex__m_xbar2l1tex_read_bytes.sum": 800.0,
        "dram__bytes_read.sum": 60.0,
        "dram__bytes_write.sum": 20.0,
    }
    events = make_k1_events(metrics, 2.0)
    assert events["l1_read_word"] == 2 * 30.0
    assert events["l2_read_sector"] == 2 * 25.0
    assert events["device_memory_cycle"] == 2 * 10.0


def test_savings_beside_those_that_are_printed() -> None:
    """The data type saves what is printed to half a point. The cache saves more: our loads that
    pass the L1 cost more of the L2's reads than the paper's, of which no count is printed.
    """
    total_w = [sum(watts.values()) for watts in compute_dct_w().values()]
    saved = [1.0 - watts / total_w[0] for watts in total_w]
    assert saved[1] == pytest.approx(VARIANTS[1].printed_saving, abs=0.005)
    assert saved[2] == pytest.approx(0.049, abs=0.002)
    assert VARIANTS[2].printed_saving == 0.032


def test_parts_of_the_figure_add_up_to_the_board() -> None:
    pytest.importorskip("matplotlib")
    watts = compute_dct_w()
    (axes,) = draw_figure_13(watts).axes
    heights = [patch.get_height() for patch in axes.patches]
    assert len(heights) == len(PARTS) * len(VARIANTS)
    for place, variant in enumerate(VARIANTS):
        assert sum(heights[place :: len(VARIANTS)]) == pytest.approx(
            sum(watts[variant.name].values())
        )
    idle = compute_part_w(load_k1(), {"host_active_cycle": 1092e6})
    assert heights[0] == pytest.approx(sum(idle.values()))


def test_the_command_prints_and_draws(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "figure-13.svg"
    monkeypatch.setattr("sys.argv", ["tegra_k1", "--figure-13", str(out)])
    main()
    assert out.stat().st_size > 1000
    said = capsys.readouterr().out
    assert "printed 2.4%" in said
    assert "printed above 3 times  computed 3.0" in said
