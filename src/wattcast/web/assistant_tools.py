"""Answer assistants: a server of the Model Context Protocol whose tools are Wattcast's verbs.

``wattcast serve --mcp`` talks over stdin and stdout, as assistants start it. Each tool takes what
the verb takes in Python, with the same names and units, and its schema is made from the same
declarations. A mistake comes back as the sentence that the command line prints.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    Callable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from typing import Any

import mcp_types as types
import msgspec
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

import wattcast
from wattcast.core.errors import (
    WattcastError,
    bad_value,
    check_names,
)
from wattcast.core.option_declaration import DeclaredOption
from wattcast.core.user_results import UserResult
from wattcast.options.exploring_options import EXPLORE
from wattcast.options.serving_options import PLAN, SIMULATE
from wattcast.options.setting_options import COMPARE, PREDICT
from wattcast.options.training_options import TRAIN
from wattcast.options.verb_options import VerbOptions

MOST_ITEMS = (
    12  # of each list of an answer: an assistant reads the first, not four hundred operators
)
MOST_DEPTH = 4  # of nested plain data

Schema = dict[str, Any]
_TEXT: Schema = {"type": "string"}
_TEXTS: Schema = {"type": ["string", "array"], "items": {"type": "string"}}
_GPU = {**_TEXTS, "description": "Catalogue name such as h200 or h100-sxm, or a list of them."}
_MODEL = {
    **_TEXT,
    "description": "Model name such as llama3-8b, Hugging Face id, or path of a config.json.",
}


@dataclass(frozen=True)
class AssistantTool:
    """A verb as a tool: what it is for, what it must be given, and its options."""

    purpose: str
    call: Callable[..., Any]
    arguments: Mapping[str, Schema]  # must be given
    options: VerbOptions | None = None

    @property
    def schema(self) -> Schema:
        """The JSON schema of what the tool takes."""
        properties: dict[str, Schema] = dict(self.arguments)
        required = list(self.arguments)
        for name, declared in (self.options.declared if self.options else {}).items():
            properties.setdefault(name, describe_option(declared))
            if declared.is_required:
                required.append(name)
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }


def describe_option(declared: DeclaredOption) -> Schema:
    """Return the JSON schema of an option: its types, its words and its help."""
    kinds: list[str] = []
    members = declared.element_members
    if declared.option.unit is not None or str in members or declared.enum is not None:
        kinds.append("string")
    if declared.option.unit is not None or float in members:
        kinds.append("number")
    elif bool in members:
        kinds.append("boolean")
    elif int in members:
        kinds.append("integer")
    if declared.is_sequence:
        kinds.append("array")
    schema: Schema = {"description": declared.option.help}
    if kinds:
        schema["type"] = kinds if len(kinds) > 1 else kinds[0]
    if declared.words and not declared.is_sequence:
        schema["enum"] = list(declared.words)
    return schema


def _compare(
    a: str,
    b: str,
    **options: Any,
) -> UserResult:
    return wattcast.compare(a, b, **options)


def _list_gpus() -> dict[str, Any]:
    return {"gpus": [{"name": gpu.name, "title": gpu.title} for gpu in wattcast.gpus()]}


def _list_models() -> dict[str, Any]:
    return {"models": [{"name": model.name, "title": model.title} for model in wattcast.models()]}


TOOLS: dict[str, AssistantTool] = {
    "predict": AssistantTool(
        "Predict tokens per second, joules per token, watts, latency, memory and cost of a model "
        "on GPUs, with intervals. A run that does not fit is refused with what would fit.",
        wattcast.predict,
        {"workload": _MODEL, "gpu": _GPU},
        PREDICT,
    ),
    "plan": AssistantTool(
        "Find how many GPUs serve a language model at a rate of requests within latency bounds, "
        "with power, energy and cost.",
        wattcast.plan,
        {"model": _MODEL, "gpu": _GPU},
        PLAN,
    ),
    "simulate": AssistantTool(
        "Simulate a serving engine under traffic: latencies, throughput, power and energy.",
        wattcast.simulate,
        {"model": _MODEL, "gpu": _GPU},
        SIMULATE,
    ),
    "train": AssistantTool(
        "Predict hours, kWh, money and carbon of a training job, and how GPUs share it.",
        wattcast.train,
        {"model": _MODEL, "gpu": _GPU},
        TRAIN,
    ),
    "explore": AssistantTool(
        "Predict every combination of GPUs, options, clocks and power limits, and name the best. "
        'Each of vary is such as "clock=all", "batch=1,8,64" or "power_limit=300W,500W".',
        lambda **arguments: wattcast.explore(**arguments),
        {
            "workload": _MODEL,
            "gpu": _GPU,
            "vary": {"type": "array", "items": _TEXT},
        },
        EXPLORE,
    ),
    "compare": AssistantTool(
        "Explain why two predictions differ, by operator and cause. Sides are written "
        "MODEL@GPU,option=value, such as llama3-8b@h200,batch=8 and @h100-sxm.",
        _compare,
        {"a": _TEXT, "b": _TEXT},
        COMPARE,
    ),
    "gpus": AssistantTool("List the GPUs that are known by name.", _list_gpus, {}),
    "models": AssistantTool("List the models that are known by name.", _list_models, {}),
}


def answer_tool(name: str, arguments: Mapping[str, Any]) -> types.CallToolResult:
    """Call a verb and return its answer in a line and as plain data, or the sentence of a
    mistake.
    """
    try:
        check_names("tool", name, TOOLS)
        tool = TOOLS[name]
        for expected in tool.schema["required"]:
            if expected not in arguments:
                raise bad_value(f"{name}: {expected}", "a value", "none")
        result = tool.call(**arguments)
    except (WattcastError, TypeError) as error:
        return types.CallToolResult(content=[_write_text(str(error))], is_error=True)
    plain = result.to_dict() if isinstance(result, UserResult) else result
    short = shorten_plain(plain)
    headline = repr(result) if isinstance(result, UserResult) else f"{name}: {len(short)} lists"
    text = f"{headline}\n{msgspec.json.encode(short).decode()}"
    return types.CallToolResult(content=[_write_text(text)], structured_content=short)


def _write_text(text: str) -> types.TextContent:
    return types.TextContent(type="text", text=text)


def shorten_plain(plain: Any, depth: int = 0) -> Any:
    """Return plain data with the first entries of each list.

    >>> len(shorten_plain({"ops": list(range(400))})["ops"])
    12
    """
    if isinstance(plain, Mapping):
        return {str(name): shorten_plain(value, depth + 1) for name, value in plain.items()}
    if isinstance(plain, Sequence) and not isinstance(plain, str):
        if depth == 1 and all(isinstance(item, Mapping) and len(item) == 2 for item in plain):
            return list(plain)  # names and titles of a catalogue
        return [shorten_plain(item, depth + 1) for item in plain[:MOST_ITEMS]]
    return plain


def make_server() -> Server[Any]:
    """Make the server; it holds nothing between calls."""

    async def list_tools(_: Any, __: Any) -> types.ListToolsResult:
        tools = [
            types.Tool(
                name=name,
                description=tool.purpose,
                input_schema=tool.schema,
            )
            for name, tool in TOOLS.items()
        ]
        return types.ListToolsResult(tools=tools)

    async def call_tool(_: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        return await asyncio.to_thread(answer_tool, params.name, params.arguments or {})

    return Server(
        "wattcast",
        version=wattcast.__version__,
        instructions=(
            "Wattcast predicts speed, watts, joules and cost of GPU workloads before they run. "
            "Quantities carry units (500W, 1.2GHz, 20/s); every answer says how sure it is."
        ),
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


def serve_assistant() -> None:
    """Serve an assistant over stdin and stdout until it closes them."""

    async def serve() -> None:
        server = make_server()
        async with stdio_server() as (reading, writing):
            await server.run(reading, writing, server.create_initialization_options())

    asyncio.run(serve())
