"""The overview: what runs, what is stuck, why it failed."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from litestar import Response, get
from litestar.params import QueryParameter

from semel.service.dashboard.rendering import address, gone_to, page
from semel.service.dashboard.scenes import scene_of
from semel.service.dashboard.windows import WINDOWS
from semel.service.runs_words import TheRequest, root_of
from semel.service.site import TheCaller, TheSite

WindowName: TypeAlias = Annotated[Literal["hour", "day", "week"], QueryParameter(name="window")]


@get("/")
async def show(request: TheRequest, site: TheSite, caller: TheCaller, window: WindowName = "hour") -> Response[Any]:
    """The page, as it was at most a moment ago: see scenes."""
    view = await scene_of(site, caller, WINDOWS[window]).view()
    windows = list(WINDOWS.values())
    return page(request, site, caller, "overview.html", title="Overview", view=view, windows=windows)


@get("/ui", status_code=303)
async def home(request: TheRequest) -> Response[Any]:
    """The overview is at the root; who guesses finds it, too."""
    return gone_to(address(root_of(request), "/"))


HANDLERS = (show, home)
