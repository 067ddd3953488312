"""The official client of the Model Context Protocol gets README's four answers."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import wattcast

if find_spec("mcp") is None:  # tests import it, which takes seconds
    pytest.skip("no mcp: pip install 'wattcast[mcp]'", allow_module_level=True)

SOURCE = Path(__file__).resolve().parents[2] / "src"
LLAMA_70B = {"workload": "meta-llama/Llama-3.1-70B-Instruct", "gpu": "h100-sxm", "phase": "decode"}
PLAN = {"model": "llama3-8b", "rate": "20/s", "prompt": 1000, "output": 300}


def make_server() -> Any:
    """Return a server of the tools, imported by the worker that needs it."""
    from wattcast.web import assistant_tools

    return assistant_tools.make_server()


def ask(server: Any, *calls: tuple[str, dict[str, Any]]) -> list[Any]:
    """Call tools of a server one after the other with the official client."""
    from mcp import Client

    async def run() -> list[Any]:
        async with Client(server) as client:
            return [await client.call_tool(name, arguments) for name, arguments in calls]

    return asyncio.run(run())


def test_the_tools_are_the_verbs_with_schemas_of_their_options() -> None:
    from mcp import Client

    from wattcast.web.assistant_tools import TOOLS

    async def run() -> Any:
        async with Client(make_server()) as client:
            return (await client.list_tools()).tools

    tools = {tool.name: tool for tool in asyncio.run(run())}
    assert set(tools) == set(TOOLS)
    assert set(tools) >= {"predict", "plan", "simulate", "train", "explore", "compare"}
    predict = tools["predict"].input_schema
    assert {"workload", "gpu"} <= set(predict["required"])
    assert predict["properties"]["batch"]["type"] == "integer"
    assert predict["properties"]["power_limit"]["type"] == ["string", "number"]
    assert "rate" in tools["plan"].input_schema["required"]
    for tool in tools.values():
        assert len(tool.description) > 20
        for name, schema in tool.input_schema["properties"].items():
            assert schema.get("type") or schema.get("description"), (tool.name, name)


def test_an_assistant_gets_the_four_answers_of_the_readme() -> None:
    """In a process of its own, over stdin and stdout, as an assistant starts it."""
    from mcp import StdioServerParameters

    paths = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = StdioServerParameters(
        command=sys.executable,
        args=["-m", "wattcast", "serve", "--mcp"],
        env={**os.environ, "PYTHONPATH": paths},
    )
    clocks = ["clock=1GHz,1.215GHz,1.98GHz"]
    eight, one, sweep, plan = ask(
        command,
        ("predict", {**LLAMA_70B, "tp": 8, "batch": 64, "seq": 2048, "price": "2.50USD/h"}),
        ("predict", {**LLAMA_70B, "batch": 64, "seq": 2048}),
        (
            "explore",
            {
                "workload": "llama3-8b",
                "gpu": "h200",
                "vary": clocks,
                "phase": "decode",
                "batch": 32,
                "seq": 4096,
            },
        ),
        ("plan", {**PLAN, "gpu": ["h100-sxm", "h200"], "tp": "2"}),
    )
    p = wattcast.predict(
        LLAMA_70B["workload"],
        "h100-sxm",
        phase="decode",
        tp=8,
        batch=64,
        seq=2048,
        price="2.50USD/h",
    )
    assert not eight.is_error
    assert eight.structured_content["tokens_per_s"] == pytest.approx(p.tokens_per_s)
    assert eight.structured_content["cost_per_million_tokens"] == pytest.approx(
        p.cost_per_million_tokens
    )
    assert json.loads(eight.content[0].text.split("\n", 1)[1]) == eight.structured_content
    assert one.is_error
    assert "It fits on 4 x h100-sxm" in one.content[0].text
    best = sweep.structured_content["best"]["energy"]
    assert best["asked_clock_hz"] == pytest.approx(1.215e9)
    assert plan.structured_content["best"]["gpus"] == 2
    assert len(plan.structured_content["kinds"]) == 2


@pytest.mark.parametrize(
    ("tool", "arguments", "says"),
    [
        ("predict", {"workload": "lama3-8b", "gpu": "h200"}, "Closest: llama3-8b"),
        ("predict", {"workload": "gpt2", "gpu": "h201"}, "Closest: h20"),
        ("predict", {"workload": "gpt2", "gpu": "h200", "bach": 2}, "Closest: batch"),
        ("predict", {"workload": "gpt2"}, "gpu"),
        ("plan", {"model": "gpt2", "gpu": "h200"}, "rate"),
        ("simulate", {"model": "gpt2", "gpu": "h200", "rate": "5"}, "5/s"),
        ("predikt", {}, "predict"),
    ],
)
def test_a_mistake_is_the_sentence_of_the_command_line(
    tool: str, arguments: dict[str, Any], says: str
) -> None:
    (answer,) = ask(make_server(), (tool, arguments))
    assert answer.is_error
    assert says in answer.content[0].text


def test_catalogues_are_whole_and_answers_are_short() -> None:
    gpus, models, predicted = ask(
        make_server(),
        ("gpus", {}),
        ("models", {}),
        ("predict", {"workload": "gpt2", "gpu": "h200", "seq": 128}),
    )
    assert len(gpus.structured_content["gpus"]) == len(wattcast.gpus())
    assert len(models.structured_content["models"]) == len(wattcast.models())
    assert len(predicted.content[0].text) < 20_000
