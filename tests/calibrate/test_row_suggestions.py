"""Which rows to measure next: new before known, what takes time before what does not, no two alike."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest

from wattcast import hardware
from wattcast.calibrate import kernel_rows, row_suggestions
from wattcast.calibrate.kernel_rows import KernelRows
from wattcast.calibrate.row_suggestions import RowCandidate, suggest_rows
from wattcast.cli.command_output import Environment
from wattcast.cli.main import main
from wattcast.core.errors import BadInput
from wattcast.kernels.kernel_table import RunCondition
from wattcast.lab.campaigns.kernel_campaign import read_listed
from wattcast.lab.campaigns.kernel_plan import read_kernel_plan, spec_from_operator
from wattcast.lab.campaigns.operator_rows import KernelCampaign
from wattcast.predictor.bundle import bundle_for

WEIGHTS = RunCondition("nt", "weights", "")


@pytest.fixture(scope="module")
def rows() -> KernelRows:
    """Every fifth of the shipped rows: what is new, alike or heavy is so beside these too."""
    every = kernel_rows.load_kernel_rows("h200")
    return every.select_rows(np.arange(len(every)) % 5 == 0)


def linear(m: int, n: int, k: int, share: float) -> RowCandidate:
    return RowCandidate(
        {"op": "linear", "m": m, "n": n, "k": k, "dtype": "bf16"}, WEIGHTS, share, f"{m}x{n}x{k}"
    )


def ranked(
    candidates: list[RowCandidate], count: int, rows: KernelRows, plan_share: float = 0.0
) -> list[str]:
    chip = hardware.load_gpu("h200")
    found = suggest_rows(candidates, count, rows, chip, bundle_for(chip), plan_share)
    return [suggestion.candidate.source for suggestion in found]


def test_what_takes_more_time_comes_first(rows: KernelRows) -> None:
    assert (
        ranked([linear(3000, 30000, 9000, 0.1), linear(24, 30000, 9000, 0.6)], 2, rows)[0]
        == "24x30000x9000"
    )


def test_what_is_new_comes_before_what_was_measured(rows: KernelRows) -> None:
    first = next(
        op
        for op, kind in zip(rows.ops, rows.kind, strict=True)
        if op.name == "linear" and kind == "burst"
    )
    same = RowCandidate(
        {"op": "linear", "m": first.m, "n": first.n, "k": first.k, "dtype": "bf16"},
        WEIGHTS,
        0.5,
        "old",
    )
    assert ranked([same, linear(16000, 60000, 30000, 0.5)], 1, rows) == ["16000x60000x30000"]


def test_two_that_are_alike_are_not_both_taken_first(rows: KernelRows) -> None:
    twins = [
        linear(16000, 60000, 30000, 0.4),
        linear(16000, 60000, 30016, 0.39),
        linear(1, 60000, 60, 0.3),
    ]
    first, second = ranked(twins, 2, rows)
    assert first.startswith("16000x60000x300")
    assert second == "1x60000x60"


def test_a_share_comes_from_the_plan(rows: KernelRows) -> None:
    real = [linear(16000, 60000, 30000 + 512 * i, 0.1) for i in range(8)]
    random = [linear(500 + 64 * i, 3000, 7000, 0.0) for i in range(8)]
    found = ranked([*real, *random], 10, rows, plan_share=0.3)
    assert sum(source.endswith("x3000x7000") for source in found) == 3
    assert ranked([], 5, rows) == []


def test_three_of_ten_suggestions_come_from_the_plan(rows: KernelRows) -> None:
    real = [linear(16000, 60000, 30000 + 512 * i, 0.1) for i in range(10)]
    random = [linear(500 + 64 * i, 3000, 7000, 0.0) for i in range(10)]
    chip = hardware.load_gpu("h200")
    suggestions = suggest_rows([*real, *random], 10, rows, chip, bundle_for(chip))
    assert sum(suggestion.candidate.share == 0.0 for suggestion in suggestions) == 3


def test_another_group_tells_as_much_as_five_to_six_doublings_away() -> None:
    """Kernels of one size in two groups of a family share half of what was not foreseen."""
    sizes = np.array([[0.0], [5.0], [6.0], [0.0]])
    groups = np.array([1, 1, 1, 2])
    here = np.array([0])
    told = row_suggestions._correlate_residuals(sizes[here], groups[here], sizes, groups)[0]
    _, five_away, six_away, other_group = told
    assert six_away < other_group < five_away


@pytest.mark.parametrize(("share", "first"), [(0.021, "again"), (0.028, "softmax")])
def test_measuring_again_is_worth_a_fortieth_of_measuring_first(
    rows: KernelRows, share: float, first: str
) -> None:
    """A product was measured; softmax, of which nothing is known, takes ``share`` of its time."""
    is_linear = [
        op.name == "linear" and kind == "burst"
        for op, kind in zip(rows.ops, rows.kind, strict=True)
    ]
    place = is_linear.index(True)
    known = rows.select_rows(np.arange(len(rows)) == place)
    op = known.ops[0]
    entry = {"op": "linear", "m": op.m, "n": op.n, "k": op.k, "dtype": str(op.dtype)}
    again = RowCandidate(entry, known.conditions[0], 1.0, "again")
    softmax = {"op": "softmax", "rows": 4096, "dim": 4096, "dtype": "bf16"}
    new = RowCandidate(softmax, RunCondition("", "", ""), share, "softmax")
    assert ranked([again, new], 1, known) == [first]


def test_nothing_measured_yet_begins_with_what_takes_most_time(rows: KernelRows) -> None:
    nothing = rows.select_rows(np.zeros(len(rows), dtype=bool))
    some = [
        linear(512, 4096, 4096, 0.1),
        linear(4096, 14336, 4096, 0.7),
        linear(1, 4096, 4096, 0.2),
    ]
    assert ranked(some, 1, nothing) == ["4096x14336x4096"]


def test_thousands_of_candidates_are_weighed(rows: KernelRows) -> None:
    """More than are compared: those of most weight stay, and none is picked twice."""
    rng = np.random.default_rng(0)
    many = [linear(*(int(2**x) for x in rng.uniform(4, 14, 3)), 1e-4) for _ in range(1800)]
    heavy = linear(16000, 60000, 30000, 0.5)
    found = ranked([*many, heavy], 30, rows)
    assert heavy.source in found
    assert len(set(found)) == 30


def run(*argv: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    code = main(list(argv), Environment(stdout=out, stderr=err, variables={}))
    return code, out.getvalue(), err.getvalue()


@pytest.mark.slow
def test_the_command_writes_a_list_that_the_campaign_measures(
    rows: KernelRows, tmp_path: Path
) -> None:
    code, out, err = run("lab", "kernels", "--suggest", "12", "--out", str(tmp_path), "--json")
    assert code == 0, err
    found = json.loads(out)
    assert len(found["suggestions"]) == 12
    assert found["from_models"] == 8
    specs = read_listed(tmp_path / "plan.jsonl")
    assert len(specs) == 12
    assert not {spec.id for spec in specs} & set(rows.spec)
    campaign = KernelCampaign(None, tmp_path, 0.0, listed=specs)  # type: ignore[arg-type]
    assert campaign.specs() == specs
    assert KernelCampaign(None, tmp_path, 0.0).specs() == read_kernel_plan()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("operator", "family"),
    [
        ({"op": "linear", "m": 4, "n": 8, "k": 16, "dtype": "bf16"}, "linear"),
        ({"op": "bmm", "b": 2, "m": 4, "n": 8, "k": 16, "dtype": "bf16"}, "bmm"),
        ({"op": "softmax", "rows": 4, "dim": 8, "dtype": "bf16"}, "softmax"),
        ({"op": "silu", "n": 3072, "dtype": "bf16"}, "elementwise"),
        ({"op": "add", "n": 64, "dtype": "bf16", "layout": "strided"}, None),
        ({"op": "gather", "n": 64, "dtype": "bf16"}, None),
        ({"op": "linear", "m": 4, "n": 8, "k": 16, "dtype": "bf16", "weight_dtype": "int8"}, None),
    ],
)
def test_operators_of_models_as_the_campaign_runs_them(
    operator: dict[str, object], family: str | None
) -> None:
    spec = spec_from_operator(operator)
    assert (spec.family if spec else None) == family
    if family == "elementwise":
        assert spec is not None
        assert spec.detail["rows"] * spec.detail["cols"] == 3072


@pytest.mark.parametrize(
    ("text", "said"), [("", "at least one"), ('{"family": "linear"}\n', "operator")]
)
def test_a_list_that_is_wrong_is_named(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(BadInput, match=said):
        read_listed(tmp_path / "p.jsonl")
    with pytest.raises(BadInput, match="--suggest"):
        read_listed(tmp_path / "none.jsonl")
