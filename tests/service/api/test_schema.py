"""The OpenAPI of the whole service: valid, complete, and true of thousands of answers."""

import os
import re
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from litestar.routes import HTTPRoute
from openapi_spec_validator import OpenAPIV31SpecValidator
from schemathesis import Case, GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from semel.service.app import build
from support.run_service import app_with_models, ended, submitted
from support.service import TestServer, issue_token, serve

OF_EACH = int(os.environ.get("SEMEL_SCHEMA_EXAMPLES", "3"))
"""Requests of each operation, of data that fits and of data that does not; with 8 there are no other statuses."""
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
EVERYWHERE = {"401", "403", "429", "500", "503"}
OPEN = {"/healthz", "/readyz"}
"""Whom anybody may ask, and whose 503 is an answer like their 200."""


class Described:
    """The service with its schema, a token for everything, and a run that is over."""

    def __init__(self, service: TestServer, headers: dict[str, str], run_id: str) -> None:
        self.address = service.address
        self.headers = headers
        self.run_id = run_id
        self.site_app = build(service.state)._inner._inner._inner
        answer = httpx.get(f"{service.address}/schema/openapi.json", headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        self.schema: dict[str, Any] = answer.json()

    @property
    def operations(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        for path, methods in self.schema["paths"].items():
            for method, operation in methods.items():
                yield path, method, operation


@pytest.fixture(scope="module")
def described(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Described]:
    request.param = "sqlite"
    with app_with_models(request, tmp_path_factory.mktemp("schema")) as app:
        secret = issue_token(app, "root", "admin")
        with serve(app) as service, service.client(secret) as client:
            run_id = submitted(client, "files", {"names": ["a.txt"]})
            with app.working(processes=0):
                ended(client, run_id)
            yield Described(service, {"Authorization": f"Bearer {secret}"}, run_id)


def test_it_is_a_valid_schema(described: Described) -> None:
    found = OpenAPIV31SpecValidator(described.schema).iter_errors()
    assert [f"{list(each.absolute_path)}: {each.message}" for each in found] == []


def test_every_operation_has_a_name_of_its_own_and_says_what_it_does(described: Described) -> None:
    names = [operation["operationId"] for _, _, operation in described.operations]
    assert len(set(names)) == len(names)
    dumb = [path for path, _, each in described.operations if not each.get("summary") or not each.get("description")]
    assert dumb == []


def test_every_refusal_is_a_problem_and_none_is_left_out(described: Described) -> None:
    for path, method, operation in described.operations:
        if path in OPEN:
            continue
        answers = operation["responses"]
        assert set(answers) >= EVERYWHERE, (method, path)
        for status, answer in answers.items():
            if int(status) >= 400:
                assert list(answer["content"]) == ["application/problem+json"], (method, path, status)
                assert answer["description"] != "Additional response", (method, path, status)
        if "requestBody" in operation:
            assert set(answers) >= {"400", "413", "415"}, (method, path)


def test_the_runs_have_examples(described: Described) -> None:
    request = described.schema["components"]["schemas"]["RunRequest"]["properties"]
    assert request["model"]["examples"]
    assert request["parameters"]["examples"]


def _can_be_wrong(operation: dict[str, Any]) -> bool:
    """Whether it takes more than texts in its path, for which everything is a text."""
    parameters = [each for each in operation.get("parameters", []) if each["in"] != "path"]
    return bool(parameters) or "requestBody" in operation


class Trial:
    """Requests made from the schema, sent, and their answers compared with it."""

    def __init__(self, described: Described) -> None:
        self.described = described
        self.sent = 0
        self.answers: set[tuple[str, int]] = set()
        self.wrong: list[str] = []
        self._session = requests.Session()
        self._turn = 0

    def close(self) -> None:
        self._session.close()

    def of(self, operation: Any, mode: GenerationMode) -> None:
        """Some requests of one operation."""

        @settings(
            max_examples=OF_EACH,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def send(case: Case) -> None:
            self._send(case)

        try:
            send()
        except Unsatisfiable:
            assert mode is GenerationMode.NEGATIVE  # there is nothing about it that could be wrong
        except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001 -- the others are tried all the same
            self.wrong.append(f"{operation.label}, {mode.value}: {error}")

    def _send(self, case: Case) -> None:
        self._turn += 1
        if self._turn % 2:
            self._make_real(case)
        answer = case.call(
            base_url=self.described.address, session=self._session, headers=self.described.headers, timeout=60
        )
        self.sent += 1
        self.answers.add((case.operation.label, answer.status_code))
        case.validate_response(answer, checks=CHECKS, headers=self.described.headers)

    def _make_real(self, case: Case) -> None:
        """Name things that are there, so that it gets further than to a 404."""
        names = {"run_id": self.described.run_id, "job_id": self.described.run_id, "name": "a.txt"}
        for name, value in names.items():
            if name in (case.path_parameters or {}):
                case.path_parameters[name] = value
        bodies = case.body if isinstance(case.body, list) else [case.body]
        for body in bodies:
            if isinstance(body, dict) and "model" in body and case.path.startswith("/runs"):
                body["model"] = "echo"
            if isinstance(body, dict) and "url" in body:
                body["url"] = "http://127.0.0.1:9/hook"


@pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisDeprecationWarning")
def test_hundreds_of_answers_are_as_the_schema_says(described: Described) -> None:
    schema = schemathesis.openapi.from_dict(described.schema)
    trial = Trial(described)
    for found in schema.get_all_operations():
        operation = found.ok()
        trial.of(operation, GenerationMode.POSITIVE)
        if _can_be_wrong(operation.definition.raw):
            trial.of(operation, GenerationMode.NEGATIVE)
    trial.close()
    assert not trial.wrong, "\n\n".join(trial.wrong)
    assert trial.sent >= 70 * OF_EACH
    assert len(trial.answers) >= 100, "operations with one of their statuses"


def test_no_schema_holds_a_secret(described: Described) -> None:
    assert not re.search(r"semel_[0-9a-f]{16}_", str(described.schema))


def test_every_route_says_which_methods_it_takes(described: Described) -> None:
    """In the answer to OPTIONS, and in the refusal of every other method; what GET answers HEAD does, too."""
    litestar = described.site_app
    routes = [route for route in litestar.routes if isinstance(route, HTTPRoute)]
    assert len(routes) > 70
    with httpx.Client(base_url=described.address, headers=described.headers, timeout=60) as client:
        for route in routes:
            path = re.sub(r"\{(\w+):(\w+)\}", lambda found: {"int": "7", "path": "a/b"}.get(found[2], "x"), route.path)
            takes = {str(method) for method in route.methods} | ({"HEAD"} if "GET" in route.methods else set())
            options = client.options(path)
            assert (options.status_code, methods_in(options)) == (204, takes), route.path
            for method in {"GET", "POST", "PUT", "PATCH", "DELETE"} - takes:
                refused = client.request(method, path)
                if refused.status_code != 404:  # a path that takes anything lies over this one
                    assert (refused.status_code, methods_in(refused)) == (405, takes), (method, route.path)


def methods_in(answer: httpx.Response) -> set[str]:
    return set(answer.headers.get("allow", "").split(", "))


def bodies_of(described: Described) -> Iterator[tuple[str, Any]]:
    """What each operation takes: its name and its type."""
    for route in described.site_app.routes:
        for handler in route.route_handlers if isinstance(route, HTTPRoute) else ():
            if handler.include_in_schema and (field := handler.parsed_data_field) is not None:
                yield handler.operation_id, field.annotation


def test_the_schema_of_a_body_has_every_bound_that_is_kept(described: Described) -> None:
    """What is refused is refused by the schema, too: unknown fields, and numbers and texts out of bounds."""
    components = described.schema["components"]["schemas"]
    kinds = {kind for _, annotated in bodies_of(described) for kind in structs_in(msgspec.inspect.type_info(annotated))}
    assert {kind.__name__ for kind in kinds} >= {"RunRequest", "CancelRequest", "JobRequest", "QuotaBody", "ConfigBody"}
    for kind in kinds:
        shown = components[kind.__name__]
        assert shown.get("additionalProperties") is False, kind
        exact = msgspec.json.schema_components([kind], ref_template="#/components/schemas/{name}")[1][kind.__name__]
        for name, field in exact["properties"].items():
            assert bounds_in(shown["properties"][name]) == bounds_in(field), (kind, name)
    run = components["RunRequest"]["properties"]
    assert bounds_in(run["cost"])["minimum"] == bounds_in(run["key_ttl"])["exclusiveMinimum"] == 0
    assert bounds_in(run["user"]) == {"minLength": 1, "maxLength": 200}
    assert bounds_in(components["QuotaBody"]["properties"]["max_concurrent"])["minimum"] == 0


def structs_in(info: Any) -> Iterator[type]:
    if isinstance(info, msgspec.inspect.StructType):
        yield info.cls
        for field in info.fields:
            yield from structs_in(field.type)
    for inner in (getattr(info, "item_type", None), getattr(info, "type", None), *getattr(info, "types", ())):
        if inner is not None:
            yield from structs_in(inner)


def bounds_in(schema: Any) -> dict[str, float]:
    """The bounds of a field, wherever in its schema they stand."""
    parts = [schema, *schema.get("anyOf", ()), *schema.get("oneOf", ())]
    names = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "pattern")
    return {name: part[name] for part in parts for name in names if name in part}
