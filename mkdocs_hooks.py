"""What the documentation's build adds: pages written from the code itself, and lists of pages that
grow.

``mkdocs build --strict`` calls these; the reference can therefore not fall behind.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "src"))

GROWING = {"Decisions": "decisions"}
PUBLIC = {
    "wattcast": None,
    "wattcast.workload.model_options": ("ModelOptions",),
    "wattcast.predictor.prices": ("parse_prices",),
    "wattcast.report.configuration_view": (
        *("view_configuration", "ConfigurationView", "PowerTrace", "build_power_trace"),
    ),
    "wattcast.report.html_report": ("build_report",),
    "wattcast.measure.training_callbacks": (
        *(
            "StepMeter",
            "log_to_wandb",
            "log_to_mlflow",
            "make_lightning_callback",
            "make_transformers_callback",
        ),
    ),
    "wattcast.report.prediction_figures": (
        "draw_breakdown",
        "draw_timeline",
        "draw_roofline",
        "draw_clock_curves",
        "draw_pareto",
    ),
}


class DocstringMarkdown(griffe.Extension):
    """Turn docstrings into Markdown before mkdocstrings renders them, so that examples become code."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of an object, where it has one."""
        if obj.docstring:
            obj.docstring.value = _paragraphs(obj.docstring.value)


def on_config(config: Any) -> Any:
    """Fill the parts of the navigation that list a folder."""
    for entry in config["nav"]:
        for title, folder in GROWING.items():
            if title in entry:
                pages = sorted(Path(config["docs_dir"], folder).glob("*.md"))
                entry[title] = [f"{folder}/{page.name}" for page in pages]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the reference."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "reference/cli.md", content=commands_page()))
    files.append(File.generated(config, "reference/api.md", content=python_page()))
    schemas = json_schemas()
    files.append(File.generated(config, "reference/schemas.md", content=schemas_page(schemas)))
    for name, (_, schema) in schemas.items():
        files.append(
            File.generated(config, f"reference/{name}", content=json.dumps(schema, indent=1))
        )
    return files


def on_page_content(html: str, **kwargs: Any) -> str:
    """Keep a number and its percent sign on one line, outside code."""
    parts = re.split(r"(<pre.*?</pre>)", html, flags=re.DOTALL)
    return "".join(
        part if part.startswith("<pre") else re.sub(r"(\d) %", r"\1&nbsp;%", part) for part in parts
    )


def json_schemas() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return file name -> what it describes, and the schema, made from the types that read and
    write the data.
    """
    import msgspec

    from wattcast.predictor.prediction_json import PredictOut
    from wattcast.web.http_app import openapi_schema

    about = "https://json-schema.org/draft/2020-12/schema"
    return {
        "predict.schema.json": (
            "JSON Schema of what `wattcast predict --json` and `/api/predict` give",
            {
                "$schema": about,
                "title": "wattcast predict --json",
                **msgspec.json.schema(PredictOut),
            },
        ),
        "openapi.json": (
            "OpenAPI 3.1 of the HTTP interface of `wattcast serve`, requests included",
            openapi_schema(),
        ),
    }


def schemas_page(schemas: dict[str, tuple[str, dict[str, Any]]]) -> str:
    """List the schemas with links."""
    rows = [f"| [{name}]({name}) | {words} |" for name, (words, _) in schemas.items()]
    head = ["# JSON schemas", "", "Generated from the types that read and write the data.", ""]
    return "\n".join([*head, "| file | of |", "|---|---|", *rows])


def commands_page() -> str:
    """Every command with its help and its options."""
    from wattcast.cli.main import walk_commands

    lines = ["# Commands", "", "`wattcast COMMAND --help` says the same in a terminal.", ""]
    for words, command in walk_commands():
        lines += _command(command, f"wattcast {words}")
    return "\n".join(lines)


def _command(command: Any, path: str) -> list[str]:
    lines = [f"## {path}", "", _paragraphs(command.help or ""), ""]
    options = [
        param
        for param in command.params
        if param.name not in ("help", None) and not getattr(param, "hidden", False)
    ]
    if options:
        lines += ["| | |", "|---|---|"]
        for param in options:
            named = param.param_type_name == "argument"
            name = param.name.upper() if named else ", ".join(f"`{word}`" for word in param.opts)
            text = " ".join((getattr(param, "help", "") or "").split()).replace("|", "\\|")
            lines.append(f"| {name} | {text} |")
        lines.append("")
    return lines


def python_page() -> str:
    """Public functions and classes, which mkdocstrings fills with their signatures and docstrings."""
    lines = ["# Python", "", "Quantities are SI and carry their unit in the name.", ""]
    for module, names in PUBLIC.items():
        home = importlib.import_module(module)
        lines += [f"## {module}", "", _paragraphs(inspect.getdoc(home) or ""), ""]
        lines += [
            f"::: {module}.{name}\n"
            for name in names or home.__all__
            if callable(getattr(home, name))
        ]
    return "\n".join(lines)


def _paragraphs(text: str) -> str:
    """A docstring as Markdown: roles and double backticks become single ones, examples become code."""
    text = inspect.cleandoc(text)
    text = re.sub(r":\w+:`~?([^`]+)`", lambda m: f"`{m[1].split('.')[-1]}`", text)
    text = text.replace("``", "`").replace("\b", "")
    kept, code = [], False
    for line in text.splitlines():
        starts = line.startswith((">>> ", "... ", "Example: "))
        if starts and not code:
            kept += ["", "```python" if line.startswith((">>> ", "... ")) else "```text"]
            code = True
        elif code and not line.strip():
            kept.append("```")
            code = False
        kept.append(line.removeprefix("Example: ") if code else line)
    if code:
        kept.append("```")
    return "\n".join(kept)
