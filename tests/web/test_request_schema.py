"""The interface against its own OpenAPI schema: whatever is sent, answers are of the kinds the
schema names.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from requests import ConnectionError

from serving import Server
from wattcast.web.http_app import openapi_schema

MODES = ("valid", "wrong")
PLAIN = openapi_schema()
EVERY_OPERATION = [(path, method) for path, item in PLAIN["paths"].items() for method in item]
SLOW_PATHS = ("/api/live", "/api/report")  # a stream without end; five seconds each
OPERATIONS = [(path, method) for path, method in EVERY_OPERATION if path not in SLOW_PATHS]


def import_schemathesis() -> Any:
    """Import it where it is needed: it takes longer than to collect the tests of this folder."""
    return pytest.importorskip("schemathesis", reason="no schemathesis: pip install schemathesis")


@cache
def load_operations() -> dict[tuple[str, str], Any]:
    """Return what may be asked of each path by each method."""
    schema = import_schemathesis().openapi.from_dict(PLAIN)
    operations = [operation.ok() for operation in schema.get_all_operations()]
    return {(operation.path, operation.method): operation for operation in operations}


@cache
def list_checks() -> list[Any]:
    """Return what every answer has to hold."""
    import_schemathesis()
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    return [
        not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
        checks.negative_data_rejection,
        checks.unsupported_method,
    ]


def check_cases(
    server: Server, asked: tuple[str, str], mode: str, count: int, seeded: int = 0
) -> int:
    """Send ``count`` drawn requests and judge the answers; return how many were sent."""
    modes = import_schemathesis().GenerationMode
    generation_mode = modes.POSITIVE if mode == "valid" else modes.NEGATIVE
    operation = load_operations()[asked]
    checks = list_checks()
    sent = 0

    @seed(seeded)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=generation_mode))
    def holds(case) -> None:
        nonlocal sent
        sent += 1
        case.call_and_validate(base_url=server.url, checks=checks, timeout=600)

    try:
        holds()
    except ConnectionError:  # a server that is gone says nothing: its exit code and last lines do
        raise AssertionError((server.process.poll(), server.said[-20:])) from None
    return sent


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_answers_are_of_the_kinds_the_schema_names(
    server: Server, path: str, method: str, mode: str
) -> None:
    if mode == "wrong" and method == "get":
        pytest.skip("takes nothing that could be wrong")
    check_cases(server, (path, method), mode, 2 if path in HEAVY else 4)


def test_every_operation_is_asked() -> None:
    assert set(load_operations()) == set(EVERY_OPERATION)


SEED = int(os.environ.get("WATTCAST_SEED", "1"))  # another night draws other requests
POSTS = [path for path, method in EVERY_OPERATION if method == "post"]
HEAVY = dict.fromkeys(("/api/hall", "/api/plan", "/api/simulate", "/api/train"), 100) | {
    "/api/figure": 60,
    "/api/report": 12,
}
NIGHTLY = [(path, "wrong", 700) for path in POSTS] + [
    (path, "valid", HEAVY.get(path, 600)) for path in POSTS
]


def test_the_nightly_run_is_of_ten_thousand_requests() -> None:
    assert sum(count for _, _, count in NIGHTLY) >= 10_000


@pytest.mark.slow
@pytest.mark.parametrize(("path", "mode", "count"), NIGHTLY)
def test_no_request_of_a_night_meets_an_error_of_the_server(
    server: Server, path: str, mode: str, count: int
) -> None:
    assert check_cases(server, (path, "post"), mode, count, SEED) >= count


def test_the_server_publishes_that_schema(server: Server) -> None:
    published = import_schemathesis().openapi.from_url(f"{server.url}/openapi.json").raw_schema
    assert published["paths"] == PLAIN["paths"]
    assert published["components"] == PLAIN["components"]
