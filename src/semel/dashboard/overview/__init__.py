"""The overview: what runs, what is stuck, why it failed."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from litestar import Response, get
from litestar.params import QueryParameter

from semel.dashboard.overview.windows import WINDOWS
from semel.dashboard.templating import address, page, redirect
from semel.service.api.params import TheRequest, root_of
from semel.service.state import CurrentPrincipal, CurrentState

WindowName: TypeAlias = Annotated[Literal["hour", "day", "week"], QueryParameter(name="window")]


@get("/")
async def show(
    request: TheRequest, service: CurrentState, caller: CurrentPrincipal, window: WindowName = "hour"
) -> Response[Any]:
    """The page, as it was at most a moment ago: see feed."""
    view = await service.overview_feeds.of(caller, WINDOWS[window]).view()
    windows = list(WINDOWS.values())
    return page(request, service, caller, "overview.html", title="Overview", view=view, windows=windows)


@get("/ui", status_code=303)
async def home(request: TheRequest) -> Response[Any]:
    """The overview is at the root; who guesses finds it, too."""
    return redirect(address(root_of(request), "/"))


HANDLERS = (show, home)
