"""The engine campaign without a GPU: its plan, its workers on a GPU that keeps time, and workers
that die.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import engine_kernel_campaign as campaign_module
import engine_kernel_worker as plan
import engine_shapes as shapes
from engine_kernel_calls import ACTIVATION_BYTE, CALLS, WEIGHT_BYTE
from engine_kernel_worker import KernelWorker, keep_compiled_tasks, obey_orders
from engine_products import list_expert_turns, shuffle_pages
from wattcast.core.measured_rows import KernelRow, RowKind, row_from_plain, row_to_plain
from wattcast.core.row_journals import read_lines
from wattcast.lab.campaigns.campaign_engine import OperatorBench
from wattcast.lab.campaigns.kernel_plan import OperatorSpec
from wattcast.lab.campaigns.operator_calls import OperandPools
from wattcast.lab.campaigns.operator_rows import KernelCampaign

TASKS = {group: plan.list_group_tasks(group) for group in plan.GROUPS}
ALL = [task for tasks in TASKS.values() for task in tasks]


def of_kind(tasks: list[plan.EngineTask], kind: RowKind) -> list[plan.EngineTask]:
    return [task for task in tasks if task.kind is kind]


def test_the_plan_is_the_same_in_another_process() -> None:
    """Another hash seed would change the order of a set: ids decide what a second call skips."""
    code = (
        "from engine_kernel_worker import *\n"
        "import hashlib; ids = [t.id for g in GROUPS for t in list_group_tasks(g)]\n"
        "print(hashlib.sha256(' '.join(ids).encode()).hexdigest())"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1


def test_the_plan_needs_nothing_a_bare_node_lacks() -> None:
    code = (
        "import sys, engine_kernel_campaign, engine_kernel_worker\n"
        "print(sorted({n.split('.')[0] for n in sys.modules} & {'polars', 'msgspec', 'typer', 'torch', 'vllm'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_the_plan_has_the_wanted_size_and_no_row_twice() -> None:
    kinds = Counter(task.kind for task in ALL)
    assert 1400 <= kinds[RowKind.BURST] <= 1700
    assert 240 <= kinds[RowKind.SUSTAINED] <= 310
    assert len({task.id for task in ALL}) == len(ALL)
    assert (
        {task.spec.family for task in ALL}
        == set(CALLS)
        == {f for all_ in plan.GROUPS.values() for f in all_}
    )


def test_the_plan_of_served_steps_has_captured_sizes_and_uneven_contexts() -> None:
    tasks = plan.list_group_tasks(plan.SERVED)
    families = Counter(task.spec.family for task in of_kind(tasks, RowKind.BURST))
    assert families == {"linear": 168, "engine_scaled_mm": 168, "engine_attention": 96}
    assert len(of_kind(tasks, RowKind.SUSTAINED)) == plan.SERVED_SUSTAINED
    products = [task.spec.operator for task in tasks if task.spec.family != "engine_attention"]
    assert {operator["m"] for operator in products} == set(shapes.CAPTURED)
    uneven = [task for task in tasks if len(task.spec.operator.get("groups", ())) > 1]
    assert all(sum(count for count, _, _ in task.spec.operator["groups"]) >= 8 for task in uneven)
    held_out = [task.spec.detail["held_out"] for task in tasks if task.spec.family != "linear"]
    assert 0.1 < np.mean(held_out) < 0.3


def test_a_fifth_of_the_shapes_is_held_out_whatever_the_routing() -> None:
    specs = {task.spec.id: task.spec for task in ALL}.values()
    share = np.mean([spec.detail["held_out"] for spec in specs])
    assert share == pytest.approx(plan.HELD_OUT_SHARE, abs=0.04)
    form = shapes.experts_form(64, 8, 2, 4096, 3584, "bf16", "none")
    decided = {
        plan.is_held_out(form | {"routing": kind, "tokens": n})
        for kind in shapes.ROUTINGS
        for n in range(9)
    }
    assert decided == {True, False}
    for tokens in range(9):
        assert (
            len(
                {plan.is_held_out(form | {"routing": k, "tokens": tokens}) for k in shapes.ROUTINGS}
            )
            == 1
        )


def test_held_out_does_not_depend_on_the_order_of_fields() -> None:
    for task in ALL[::97]:
        turned = dict(reversed(list(task.spec.operator.items())))
        assert plan.is_held_out(turned) == task.spec.detail["held_out"]


@pytest.mark.parametrize("group", plan.GROUPS)
def test_every_variant_is_served_in_the_first_fifth(group: str) -> None:
    bursts = of_kind(TASKS[group], RowKind.BURST)
    common = Counter(plan.name_variant(task.spec.operator) for task in bursts)
    early = {plan.name_variant(task.spec.operator) for task in bursts[: len(bursts) // 5]}
    assert {name for name, count in common.items() if count >= 8} <= early
    families = {
        task.spec.family
        for task in of_kind(TASKS[group], RowKind.SUSTAINED)[: len(plan.GROUPS[group])]
    }
    assert families == set(plan.GROUPS[group])


def test_sustained_rows_have_a_burst_of_the_same_operator() -> None:
    bursts = {task.spec.id for task in of_kind(ALL, RowKind.BURST)}
    lone = [task for task in of_kind(ALL, RowKind.SUSTAINED) if task.spec.id not in bursts]
    assert {task.spec.chosen for task in lone} <= {"data"}


def test_dummy_weights_and_routing_are_compared_on_the_same_shapes() -> None:
    sustained = of_kind(ALL, RowKind.SUSTAINED)
    plain = {task.spec.id for task in sustained if task.data == "random"}
    tiny = [task for task in sustained if task.data == "tiny"]
    assert len(tiny) >= 10
    assert all(task.spec.id in plain for task in tiny)
    by_shape: dict[str, set[str]] = {}
    for task in sustained:
        if task.spec.family == "engine_experts":
            key = json.dumps(
                {n: v for n, v in task.spec.operator.items() if n != "routing"}, sort_keys=True
            )
            by_shape.setdefault(key, set()).add(task.spec.operator["routing"])
    assert sum(kinds == set(shapes.ROUTINGS) for kinds in by_shape.values()) >= 4


@pytest.mark.parametrize("group", plan.GROUPS)
def test_operands_fit_the_pools(group: str) -> None:
    room = WEIGHT_BYTE[group]
    for task in TASKS[group]:
        operator = task.spec.operator
        assert plan.fits_campaign(operator)
        assert shapes.set_byte(operator) <= max(room.values())
        assert shapes.activation_byte(operator) <= ACTIVATION_BYTE["bf16"]


def test_rows_of_the_plan_survive_json() -> None:
    for task in ALL[::53]:
        row = KernelRow(
            task.id, task.kind, task.spec.family, task.spec.operator, detail=task.spec.detail
        )
        back = row_from_plain(json.loads(json.dumps(row_to_plain(row))), KernelRow)
        again = OperatorSpec(
            back.family, back.operator, rotated=task.spec.rotated, detail=back.detail
        )
        assert again.id == task.spec.id
        assert back == row


def test_attention_follows_the_engines_graphs() -> None:
    decode = shapes.attention_form(32, 8, 128, [[64, 1, 1000]])
    assert (decode["phase"], decode["splits"], decode["bound"]) == ("decode", 32, 8192)
    prefill = shapes.attention_form(32, 8, 128, [[1, 4096, 4096]])
    assert (prefill["phase"], prefill["splits"], prefill["bound"]) == ("prefill", 0, 4096)
    assert plan.make_engine_spec(prefill, "plan").rotated == "none"
    mixed = shapes.attention_form(32, 8, 128, [[32, 1, 1000], [1, 100, 100]])
    assert (mixed["phase"], mixed["splits"], mixed["bound"]) == ("mixed", 32, 1000)
    assert plan.make_engine_spec(mixed, "plan").rotated == "all"


def test_work_of_known_shapes() -> None:
    assert shapes.operator_work(shapes.attention_form(32, 8, 128, [[2, 1, 1000]])) == (
        4.0 * 2 * 1000 * 32 * 128,
        2.0 * 2 * 1000 * 8 * 128 * 2,
    )
    experts = shapes.experts_form(4, 8, 2, 1024, 512, "bf16", "none")
    assert shapes.operator_work(experts)[0] == 2.0 * 3 * 8 * 1024 * 512
    assert shapes.set_byte(experts) == 3 * 8 * 1024 * 512 * 2


def test_routing_is_even_skewed_or_the_same() -> None:
    even, skewed, same = (shapes.route_tokens(2000, 64, 4, kind) for kind in shapes.ROUTINGS)
    assert all(len(set(row)) == 4 for row in even[:100])
    heaviest = [np.bincount(ids.ravel(), minlength=64).max() / 125.0 for ids in (even, skewed)]
    assert heaviest[0] < 1.5 < 3.0 < heaviest[1]
    assert len(np.unique(same)) == 4
    assert (shapes.route_tokens(2000, 64, 4, "even") == even).all()


def test_experts_turn_until_their_weights_pass_the_cache() -> None:
    few = np.array([[0, 1]])
    assert list_expert_turns(few, 128, 1e6, 6e7) == [2 * turn for turn in range(64)]
    assert list_expert_turns(few, 8, 3.5e8, 6e7) == [0]
    assert list_expert_turns(np.arange(8)[None], 8, 1e6, 6e7) == [0]


def test_pages_are_shuffled_and_belong_to_one_request() -> None:
    table, blocks = shuffle_pages([100, 17, 16], 16)
    assert blocks == 7 + 2 + 1
    used = [*table[0, :7], *table[1, :2], *table[2, :1]]
    assert sorted(used) == list(range(10))
    assert used != sorted(used)


def test_tiny_weights_are_an_engines_dummy_weights() -> None:
    torch = pytest.importorskip("torch")
    operands = OperandPools(torch, "cpu", {"bf16": 20000})
    operands.fill("tiny")
    operands.reset()
    values = operands.take("bf16", 10000).float()
    assert float(values.abs().max()) <= 1e-3
    assert float(values.std()) == pytest.approx(1e-3 / 3**0.5, rel=0.05)


def worker_on(
    bench: OperatorBench, out: Path, tasks: list[plan.EngineTask], done: set[str] | None = None
) -> KernelWorker:
    bench.gpu.operands = SimpleNamespace(
        pattern="random", fill=lambda pattern: setattr(bench.gpu.operands, "pattern", pattern)
    )
    told: list[dict[str, object]] = []
    worker = KernelWorker(
        KernelCampaign(bench, out, float("inf")), tasks, done or set(), told.append
    )
    worker.told = told  # type: ignore[attr-defined]
    return worker


def test_a_slice_measures_bursts_then_sustained_rows(bench: OperatorBench, tmp_path: Path) -> None:
    tasks = [*of_kind(TASKS["experts"], RowKind.BURST)[:4]]
    tiny = next(
        task for task in of_kind(TASKS["experts"], RowKind.SUSTAINED) if task.data == "tiny"
    )
    worker = worker_on(bench, tmp_path, [*tasks, tiny])
    assert worker.measure_slice(12.0) == {"burst": 4, "sustained": 1}
    assert worker.left() == {"burst": 0, "sustained": 0}
    assert [told["begin"] for told in worker.told] == [task.id for task in [*tasks, tiny]]  # type: ignore[attr-defined]
    (row,) = (
        row_from_plain(plain, KernelRow) for plain in read_lines(tmp_path / "sustained.jsonl")
    )
    assert (row.data, row.id) == ("tiny", tiny.id)
    assert row.power_w == pytest.approx(300.0, rel=0.1)  # a busy host may cost a sharp edge
    assert row.detail["held_out"] == tiny.spec.detail["held_out"]


def test_a_slice_ends_in_time_and_the_next_goes_on(bench: OperatorBench, tmp_path: Path) -> None:
    worker = worker_on(bench, tmp_path, of_kind(TASKS["small"], RowKind.BURST)[:300])
    took_s: list[float] = []
    while not took_s or (
        took_s[-1] >= 2.0 and len(took_s) < 4
    ):  # a stalled machine is late, a slice never twice
        began_s = time.monotonic()
        first = worker.measure_slice(1.2)["burst"]
        took_s.append(time.monotonic() - began_s)
    assert took_s[-1] < 2.0, took_s
    assert 0 < first < 300
    worker.measure_slice(1.2)
    ids = [row["id"] for row in read_lines(tmp_path / "burst.jsonl")]
    assert len(ids) == len(set(ids)) > first
    assert ids == [task.id for task in worker.tasks[: len(ids)]]


def test_a_failing_operator_is_recorded_and_tried_again_by_the_next_call(
    bench: OperatorBench, tmp_path: Path
) -> None:
    tasks = of_kind(TASKS["products"], RowKind.BURST)[:3]
    bench.gpu.fails = {tasks[1].spec.id}
    assert worker_on(bench, tmp_path, tasks).measure_slice(5.0) == {"burst": 3, "burst errors": 1}
    found = list(read_lines(tmp_path / "burst.jsonl"))
    assert [row.get("error", "") for row in found] == ["", "RuntimeError: CUDA out of memory", ""]
    bench.gpu.fails = set()
    again = worker_on(bench, tmp_path, tasks, done={tasks[2].id})
    assert again.measure_slice(5.0) == {"burst": 1}
    assert [message["begin"] for message in again.told] == [tasks[1].id]  # type: ignore[attr-defined]


def test_a_broken_context_ends_the_worker(bench: OperatorBench, tmp_path: Path) -> None:
    """An illegal address breaks every later call: recovering raises, and the campaign must hear
    which row it was.
    """
    tasks = of_kind(TASKS["products"], RowKind.BURST)[:3]
    bench.gpu.fails = {tasks[1].spec.id}
    worker = worker_on(bench, tmp_path, tasks)

    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    bench.gpu.recover = broken
    with pytest.raises(RuntimeError, match="illegal memory"):
        worker.measure_slice(5.0)
    assert worker.told[-1] == {"begin": tasks[1].id}  # type: ignore[attr-defined]
    assert len(list(read_lines(tmp_path / "burst.jsonl"))) == 1


def test_a_worker_obeys_orders(bench: OperatorBench, tmp_path: Path) -> None:
    worker = worker_on(bench, tmp_path, of_kind(TASKS["block"], RowKind.BURST)[:2])
    opened = []

    class Borrowed:
        def __enter__(self) -> object:
            opened.append(bench.sampler)
            return bench.sampler

        def __exit__(self, *exc: object) -> None:
            pass

    order = {"do": "slice", "seconds": 4.0, "bursts": 0.5}
    obey_orders(worker, [json.dumps(order), json.dumps({"do": "stop"}), "never read"], Borrowed)  # type: ignore[arg-type]
    answer = worker.told[-1]  # type: ignore[attr-defined]
    assert answer["end"] == {"burst": 2}
    assert answer["left"] == {"burst": 0, "sustained": 0}
    assert len(opened) == 1


def test_only_kernels_compiled_at_run_time_are_warmed() -> None:
    warmed = keep_compiled_tasks(TASKS["block"])
    assert warmed
    assert {task.spec.operator["kernel"] for task in warmed} == {"deepgemm"}
    assert keep_compiled_tasks(TASKS["attention"]) == []


FIND_STUDY = f"import sys\nsys.path.insert(0, {str(Path(plan.__file__).parent)!r})\n"
FAKE_WORKER = """
import json, pathlib, sys
from engine_kernel_worker import list_smoke_tasks
from engine_kernel_worker import Journal, read_lines
from wattcast.core.measured_rows import KernelRow
group, out, skip = sys.argv[1], pathlib.Path(sys.argv[3]), pathlib.Path(sys.argv[5])
tell = lambda **message: print(json.dumps(message), flush=True)
done = {row["id"] for row in read_lines(skip)} if skip.exists() else set()
if group == "block":
    sys.exit(5)
tasks = [task for task in list_smoke_tasks(group) if task.id not in done]
tell(ready=group, seconds=0.1, left={})
for line in sys.stdin:
    order = json.loads(line)
    if order["do"] == "stop":
        break
    journals = {kind: Journal(out / f"{kind}.jsonl") for kind in ("burst", "sustained")}
    for place, task in enumerate(tasks):
        tell(begin=task.id)
        if group == "experts" and task.kind == "burst" and task.spec.operator["weights"] == "fp8":
            tell(died="AcceleratorError: CUDA error")
            sys.exit(9)
        row = KernelRow(task.id, task.kind, task.spec.family, task.spec.operator, latency_s=1e-5)
        if row.id not in journals[task.kind].ids:
            journals[task.kind].append(row)
    tell(end={"burst": len(tasks)}, left={})
"""


def test_workers_that_die_cost_a_row_each_and_are_given_up_at_last(
    tmp_path: Path, monkeypatch
) -> None:
    """Every fp8 mixture kills its worker and one group never starts: all other rows must be there."""
    script = tmp_path / "worker.py"
    script.write_text(FIND_STUDY + FAKE_WORKER)
    monkeypatch.setattr(campaign_module, "compile_kernels", lambda *given: None)
    monkeypatch.setattr(campaign_module, "list_group_tasks", plan.list_smoke_tasks)
    groups = ["experts", "block", "small"]
    counts = campaign_module.run_engine_kernels(
        tmp_path / "out",
        60.0,
        groups,
        worker_command=[sys.executable, str(script)],
        names=False,
        burst_shares=(0.3,) * 5,
    )
    assert counts["block given up: died while starting"] == 1
    assert (
        counts["experts given up: died or hung while measuring: AcceleratorError: CUDA error"] == 1
    )
    failures = list(read_lines(tmp_path / "out" / "failures.jsonl"))
    killers = [row for row in failures if row["group"] == "experts"]
    assert [row["status"] for row in killers] == [9, 9, 9]
    assert [row["status"] for row in failures if row["group"] == "block"] == [5, 5, 5]
    assert {row["operator"]["weights"] for row in killers} == {"fp8"}
    assert len({row["id"] for row in killers}) == 3
    skipped = {row["id"] for row in read_lines(tmp_path / "out" / "skip.jsonl")}
    assert skipped == {row["id"] for row in killers}
    found = {row["id"] for row in read_lines(tmp_path / "out" / "burst.jsonl")}
    small = {task.id for task in plan.list_smoke_tasks("small") if task.kind is RowKind.BURST}
    assert small <= found
    lines = campaign_module.describe_variants(tmp_path / "out")
    assert any("worker lost: experts" in line for line in lines)
    assert any(
        line.startswith("rms_norm residual token") and "1 of   1 ok" in line for line in lines
    )


REAL_WORKER = """
import sys, types
from types import SimpleNamespace
sys.path.insert(0, {tests!r})
sys.modules["vllm"] = types.SimpleNamespace(__version__="0.25.1")
from fake_gpu import FakeGpu
import engine_kernel_calls, engine_kernel_worker
class Gpu(FakeGpu):
    torch = None
    def run_once(self, spec):
        if spec.operator["kernel"] == "deepgemm":
            raise RuntimeError("no compiler")
def open_group(group):
    print("a library prints")
    gpu = Gpu()
    gpu.operands = SimpleNamespace(pattern="random", fill=lambda pattern: None)
    return gpu
engine_kernel_calls.EngineGpu.open_group = open_group
sys.exit(engine_kernel_worker.main())
"""


@pytest.mark.usefixtures("standin")
def test_campaign_and_worker_understand_each_other(tmp_path: Path) -> None:
    """The whole of a smoke test but the kernels: processes, orders, samplers, rows and the table."""
    script = tmp_path / "worker.py"
    script.write_text(FIND_STUDY + REAL_WORKER.format(tests=str(Path(__file__).parent)))
    out, groups = tmp_path / "out", ["products", "block"]
    counts = campaign_module.run_engine_kernels(
        out, 90.0, groups, smoke=True, names=False, worker_command=[sys.executable, str(script)]
    )
    tasks = [task for group in groups for task in plan.list_smoke_tasks(group)]
    assert counts["worker deaths"] == 0
    assert counts["burst"] == len(of_kind(tasks, RowKind.BURST)) >= 7
    rows = [row for kind in ("burst", "sustained") for row in read_lines(out / f"{kind}.jsonl")]
    assert {row["id"] for row in rows} == {task.id for task in tasks}
    assert all(row["latency_s"] == pytest.approx(1e-4, rel=0.01) for row in rows)
    assert len({row["run"] for row in rows}) == 2
    log = (out / "log.txt").read_text()
    assert "a library prints" in log
    assert "no compiler" in log
    assert not (out / "failures.jsonl").exists()
    assert all(" 0 of" not in line for line in campaign_module.describe_variants(out))


def test_rows_of_another_folder_are_not_measured_again(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    lines = [{"id": "a"}, {"id": "b", "error": "RuntimeError: no"}, {"id": "c"}]
    (old / "burst.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "new"
    out.mkdir()
    skip = campaign_module.write_done(out, [old, tmp_path / "absent"])
    assert [row["id"] for row in read_lines(skip)] == ["a", "c"]


def test_a_smoke_test_serves_every_variant_and_sustains_three() -> None:
    tasks = [task for group in plan.GROUPS for task in plan.list_smoke_tasks(group)]
    bursts = of_kind(tasks, RowKind.BURST)
    assert {plan.name_variant(t.spec.operator) for t in bursts} >= {
        plan.name_variant(t.spec.operator) for t in ALL[:200]
    }
    assert len(of_kind(tasks, RowKind.SUSTAINED)) == 3
    assert len(bursts) < 80


def test_an_unknown_group_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        campaign_module.main(["--out", str(tmp_path), "--groups", "attention,mlp"])
    assert "unknown group 'mlp'" in capsys.readouterr().err
