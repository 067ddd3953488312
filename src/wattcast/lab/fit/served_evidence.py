"""Read watts of served models as evidence for the energies of a card.

A row of a served model has the joules of a step of its engine: a token of every sequence in the
batch, and the prompts of the requests that come in meanwhile. The prior's joules of both come from
``predict``, of a card without a power limit, since a run below the limit runs at the top clock.
Runs at the limit say only that it was reached, and are passed over. The time of a step is the
measured one, so what its host adds costs idle power and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from wattcast.calibrate.energy_evidence import (
    SERVING,
    EnergyEvidence,
    scalable_modules,
)
from wattcast.calibrate.table_coefficients import TABLE
from wattcast.core.arrays import sweep_values
from wattcast.hardware import Gpu
from wattcast.lab.fit.served_rows import PROMPT_TOKENS, ServedRow
from wattcast.lab.fit.served_steps import run_engine
from wattcast.power.module_power import as_module_power
from wattcast.predictor.api import predict
from wattcast.predictor.bundle.bundle_file import Bundle
from wattcast.predictor.prediction import Prediction

_NO_LIMIT = 10.0  # times the power limit, which no run reaches
_PROMPTS = 8  # in a step, by whose energy that of one is taken


def served_evidence(
    rows: Sequence[ServedRow],
    gpu: Gpu,
    bundle: Bundle,
) -> list[EnergyEvidence]:
    """Return the evidence of rows below the power limit; the prior is the bundle's power."""
    limit_w = float(sweep_values(gpu.power.limit_w))
    below = [row for row in rows if row.power_w < TABLE.uncapped_share * limit_w]
    return [_read_row(row, gpu, bundle) for row in below]


def _read_row(
    row: ServedRow,
    gpu: Gpu,
    bundle: Bundle,
) -> EnergyEvidence:
    unlimited = replace(gpu, power=replace(gpu.power, limit_w=_NO_LIMIT * gpu.power.limit_w))
    model, weights = row.model
    context = PROMPT_TOKENS[row.task] + row.mean_context_tokens
    options: dict[str, Any] = {
        "tp": row.gpus,
        "ep": row.expert_gpus,
        "force": True,
        "bundle": run_engine(bundle),
        **weights,
    }
    step = predict(
        model,
        unlimited,
        phase="decode",
        batch=row.batch,
        seq=round(context),
        **options,
    )
    prompts = predict(
        model,
        unlimited,
        phase="prefill",
        batch=_PROMPTS,
        seq=PROMPT_TOKENS[row.task],
        **options,
    )
    prompts_a_step = row.batch / row.mean_tokens
    step_j = _module_joules(step)
    prompt_j = _module_joules(prompts)
    modules = scalable_modules(bundle)
    own_w = {}
    for module in modules:
        joules = step_j[module] + prompts_a_step / _PROMPTS * prompt_j[module]
        own_w[module] = joules / row.step_s
    idle_w = float(np.max(as_module_power(bundle.power).idle.power_w))
    return EnergyEvidence(SERVING, row.power_w, idle_w, own_w)


def _module_joules(prediction: Prediction) -> dict[str, float]:
    seconds = float(prediction.latency_s)
    return {item.name: float(item.power_w) * seconds for item in prediction.modules}
