"""``/ui/submit``: a form from a model's signature, and the lines for a shell that do the same."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from litestar import Response, get, post
from litestar.params import QueryParameter

from semel.api_types import RemoteModel, RemoteRun, RunRequest
from semel.dashboard import quota_bars
from semel.dashboard.forms import form_of
from semel.dashboard.submit.command_lines import base_of, curl_line, semel_line
from semel.dashboard.submit.form import SubmitForm, new_form, read_form, show_fields, show_whole
from semel.dashboard.templating import page, problem_headers, redirect_with_message
from semel.errors import InvalidRequest, SemelError, UnknownModel
from semel.runs.models.model import Model
from semel.runs.types import INTERNAL_PREFIX
from semel.service.api import quotas, runs
from semel.service.api.params import TheRequest
from semel.service.api.problems import problem_of
from semel.service.auth.middleware import Principal
from semel.service.state import CurrentPrincipal, CurrentState, ServiceState

PLACE = "/ui/submit"

Name = Annotated[str, QueryParameter(max_length=1000)]


@get(PLACE)
async def show(
    *,
    request: TheRequest,
    service: CurrentState,
    caller: CurrentPrincipal,
    model: Name = "",
    origin: Annotated[str, QueryParameter(name="from", max_length=200)] = "",
) -> Response[Any]:
    """The models to choose from; or the form of one, empty or with the parameters of a run."""
    run = await service.run(origin, caller) if origin else None
    name = run.model if run is not None else model
    if not name:
        return page(request, service, caller, "submit.html", title="Submit", models=await _models(service))
    values = {} if run is None else msgspec.json.decode(run.parameters_json)
    sheet = new_form(_model(service, name), values, run)
    return await _shown(request, service, caller, sheet, origin=origin)


@post(PLACE, status_code=303)
async def submit(request: TheRequest, service: CurrentState, caller: CurrentPrincipal) -> Response[Any]:
    """Submit what the form says, once for its key; or show what is wrong beside what was typed."""
    form = form_of(request)
    sheet = read_form(_model(service, form.get("model")), form)
    body, faults = sheet.read()
    if faults:
        sheet.faults = sheet.judged(body["parameters"]) | faults
        sheet.problem = problem_of(InvalidRequest("nothing was submitted: something below cannot be so"))
        return await _shown(request, service, caller, sheet, origin=form.get("from"))
    try:
        asked = RunRequest(**body)
        answer = await runs.submit.fn(data=asked, service=service, caller=caller, request=request, key=None)
    except SemelError as error:
        sheet.refused(error, body)
        return await _shown(request, service, caller, sheet, origin=form.get("from"))
    run = msgspec.json.decode(answer.content, type=RemoteRun)
    return redirect_with_message(request, service, f"/ui/runs/{run.run_id}", said=_said(run))


@post("/ui/submit/form", status_code=200)
async def again(request: TheRequest, service: CurrentState, caller: CurrentPrincipal) -> Response[Any]:
    """The same form with the lines for what was typed, or in its other shape. Nothing is submitted."""
    form = form_of(request)
    sheet = read_form(_model(service, form.get("model")), form)
    body, faults = sheet.read()
    unread = {place: said for place, said in faults.items() if place in ("whole", "more")}
    if unread:
        sheet.faults = unread
    elif form.get("shape") == "json":
        show_whole(sheet, body["parameters"])
    elif form.get("shape") == "fields":
        show_fields(sheet, body["parameters"])
    return await _shown(request, service, caller, sheet, origin=form.get("from"))


async def _shown(
    request: TheRequest, service: ServiceState, caller: Principal, sheet: SubmitForm, *, origin: str
) -> Response[Any]:
    problem = sheet.problem
    body, _ = sheet.read()
    base = base_of(request, service.settings)
    standing = await quotas.own_usage.fn(service=service, caller=caller)
    return page(
        request,
        service,
        caller,
        "submit_form.html",
        status=200 if problem is None else problem.status,
        headers=None if problem is None else problem_headers(problem),
        title=f"Submit {sheet.model.name}",
        sheet=sheet,
        problem=problem,
        model=sheet.model,
        models=await _models(service),
        origin=origin,
        curl=curl_line(base, body, token=caller.token is not None),
        semel=semel_line(base, body),
        tight=quota_bars.tight(quota_bars.bars_of(standing)),
    )


async def _models(service: ServiceState) -> list[RemoteModel]:
    listed = await runs.models.fn(service=service)
    return msgspec.json.decode(listed.content, type=list[RemoteModel])


def _model(service: ServiceState, name: str) -> Model:
    if name.startswith(INTERNAL_PREFIX):
        raise UnknownModel(f"unknown model {name!r}")
    return service.app.registry[name]


def _said(run: RemoteRun) -> str:
    done = "This run was there already; nothing new was submitted." if run.replayed else "Submitted."
    warnings = [*run.quota_warnings, *([run.cost_limit_warning] if run.cost_limit_warning else [])]
    return " ".join([done, *(f"Mind your quota: {each}" for each in warnings)])


HANDLERS = (show, submit, again)
