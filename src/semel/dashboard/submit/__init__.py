"""``/ui/submit``: a form for each model, and the commands for a shell that submit the same run."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import urlsplit

from litestar import Response, get, post
from litestar.params import QueryParameter

from semel import typed_json
from semel.api_types import RemoteModel, RemoteRun, RunRequest
from semel.dashboard.forms import form_of
from semel.dashboard.quotas import bars_of
from semel.dashboard.submit.form import SubmitForm, empty_form, form_of_run, posted_form
from semel.dashboard.templating import page, redirect_with_message
from semel.errors import InvalidRequest, SemelError, UnknownModel
from semel.runs.models.model import Model
from semel.runs.types import INTERNAL_PREFIX
from semel.service.api import quotas, runs
from semel.service.api.params import AnyRequest, root_of
from semel.service.api.problems import problem_of
from semel.service.auth.cookies import is_https
from semel.service.auth.middleware import Principal
from semel.service.settings import Settings
from semel.service.state import CurrentPrincipal, CurrentState, ServiceState

PATH = "/ui/submit"
_PLAIN_KEY = re.compile(r"[\w.:/@+=-]+", re.ASCII)
"""Keys that a header can carry unchanged."""
_HOST = re.compile(r"[A-Za-z0-9._:\[\]-]+")

ModelName = Annotated[str, QueryParameter(max_length=1000)]


@get(PATH)
async def show(
    *,
    request: AnyRequest,
    service: CurrentState,
    caller: CurrentPrincipal,
    model: ModelName = "",
    origin: Annotated[str, QueryParameter(name="from", max_length=200)] = "",
) -> Response[Any]:
    """The list of models, or the form of one: empty, or with the parameters of a run."""
    if origin:
        run = await service.run(origin, caller)
        return await _form_page(request, service, caller, form_of_run(_model(service, run.model), run), origin=origin)
    if model:
        return await _form_page(request, service, caller, empty_form(_model(service, model)), origin="")
    return page(request, service, caller, "submit/models.html", title="Submit", models=await _models(service))


@post(PATH, status_code=303)
async def submit(request: AnyRequest, service: CurrentState, caller: CurrentPrincipal) -> Response[Any]:
    """Submit the run and redirect to it; or show the form again with its errors."""
    sent = form_of(request)
    form = posted_form(_model(service, sent.get("model")), sent)
    body, errors = form.read()
    if errors:
        form.errors = form.validate(body["parameters"]) | errors
        form.problem = problem_of(InvalidRequest("Nothing was submitted. Fix the fields marked below."))
        return await _form_page(request, service, caller, form, origin=sent.get("from"))
    try:
        response = await runs.submit.fn(
            data=RunRequest(**body), service=service, caller=caller, request=request, key=None
        )
    except SemelError as error:
        form.refuse(error, body)
        return await _form_page(request, service, caller, form, origin=sent.get("from"))
    run = typed_json.decode(response.content, RemoteRun)
    return redirect_with_message(request, service, f"/ui/runs/{run.run_id}", _confirmation(run))


@post("/ui/submit/form", status_code=200)
async def redraw(request: AnyRequest, service: CurrentState, caller: CurrentPrincipal) -> Response[Any]:
    """The same form with the commands for what was typed, or with its parameters as JSON or as fields."""
    sent = form_of(request)
    form = posted_form(_model(service, sent.get("model")), sent)
    body, errors = form.read()
    if unread := {key: message for key, message in errors.items() if key in ("all_json", "extra")}:
        form.errors = unread
    elif sent.get("shape") == "json":
        form.show_json(body["parameters"])
    elif sent.get("shape") == "fields":
        form.show_fields(body["parameters"])
    return await _form_page(request, service, caller, form, origin=sent.get("from"))


async def _form_page(
    request: AnyRequest, service: ServiceState, caller: Principal, form: SubmitForm, *, origin: str
) -> Response[Any]:
    body, _ = form.read()
    base = _base_url(request, service.settings)
    standing = await quotas.own_usage.fn(service=service, caller=caller)
    return page(
        request,
        service,
        caller,
        "submit/form.html",
        problem=form.problem,
        title=f"Submit {form.model.name}",
        form=form,
        model=form.model,
        models=await _models(service),
        origin=origin,
        curl=curl_command(base, body, token=caller.token is not None),
        semel=semel_command(base, body),
        nearly_used=[bar for bar in bars_of(standing.quota, standing.usage) if bar.state],
    )


async def _models(service: ServiceState) -> list[RemoteModel]:
    response = await runs.models.fn(service=service)
    return typed_json.decode(response.content, list[RemoteModel])


def _model(service: ServiceState, name: str) -> Model:
    if name.startswith(INTERNAL_PREFIX):
        raise UnknownModel(f"unknown model {name!r}")
    return service.app.registry[name]


def _confirmation(run: RemoteRun) -> str:
    done = "This run already existed; nothing new was submitted." if run.replayed else "Submitted."
    warnings = [*run.quota_warnings, *([run.cost_limit_warning] if run.cost_limit_warning else [])]
    return " ".join([done, *(f"Quota warning: {each}" for each in warnings)])


def _base_url(request: AnyRequest, settings: Settings) -> str:
    """The URL of this service, as its users reach it."""
    if settings.public_url and urlsplit(settings.public_url).netloc:
        return settings.public_url.rstrip("/")
    host = request.headers.get("host", "")
    scheme = "https" if is_https(request.scope, settings) else "http"
    return f"{scheme}://{host if _HOST.fullmatch(host) else '127.0.0.1:8001'}{root_of(request)}"


def curl_command(base: str, body: Mapping[str, Any], *, token: bool) -> str:
    """The request with curl. The token comes from $SEMEL_TOKEN, and is never part of the command."""
    sent = dict(body)
    key = sent.get("idempotency_key")
    words = ["curl", "-sS", shlex.quote(f"{base}/runs")]
    if token:
        words += ["-H", '"Authorization: Bearer $SEMEL_TOKEN"']
    words += ["-H", shlex.quote("Content-Type: application/json")]
    if isinstance(key, str) and _PLAIN_KEY.fullmatch(key):
        del sent["idempotency_key"]
        words += ["-H", shlex.quote(f"Idempotency-Key: {key}")]
    return " ".join([*words, "-d", shlex.quote(_json_line(sent))])


def semel_command(base: str, body: Mapping[str, Any]) -> str:
    """The same with ``semel submit``, which reads the token from $SEMEL_TOKEN."""
    words = ["semel", "submit", body["model"]]
    if body.get("parameters"):
        words.append(f"--params={_json_line(body['parameters'])}")
    options = {
        "key": body.get("idempotency_key"),
        "user": body.get("user"),
        "queue": body.get("queue"),
        "priority": body.get("priority"),
        "delay": _decimal(body.get("delay")),
        "cost": _decimal(body.get("cost")),
        "server": base,
    }
    words += [f"--{name}={value}" for name, value in options.items() if value is not None]
    if body.get("dedupe") is not None:
        words.append("--dedupe" if body["dedupe"] else "--no-dedupe")
    return " ".join(shlex.quote(word) for word in words)


def _json_line(value: Any) -> str:
    """JSON on one line. Characters that do not print are escaped, so that the command shows everything it does."""
    written = json.dumps(value, ensure_ascii=False)
    return written if written.isprintable() else json.dumps(value)


def _decimal(value: float | None) -> str | None:
    """Without an exponent, which the command line does not read."""
    if value is None:
        return None
    return str(value) if isinstance(value, int) else f"{value:.9f}".rstrip("0").rstrip(".")


HANDLERS = (show, submit, redraw)
