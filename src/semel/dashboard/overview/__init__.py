"""The overview: what is running, what is stuck, and what failed."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal, TypeAlias

from litestar import Response, get
from litestar.params import QueryParameter
from litestar.response import Stream

from semel.dashboard.overview.chart import WINDOWS
from semel.dashboard.overview.feed import OverviewFeed
from semel.dashboard.sse import NO_UPDATE, live_response, replace_event
from semel.dashboard.templating import address, page, redirect
from semel.service.api.params import AnyRequest, root_of
from semel.service.sse import longest_wait
from semel.service.state import CurrentPrincipal, CurrentState

WindowName: TypeAlias = Annotated[Literal["hour", "day", "week"], QueryParameter(name="window")]


@get("/")
async def show(
    request: AnyRequest, service: CurrentState, caller: CurrentPrincipal, window: WindowName = "hour"
) -> Response[Any]:
    """The page, at most two seconds old."""
    view = await service.overview_feeds.of(caller, WINDOWS[window]).view()
    windows = list(WINDOWS.values())
    return page(request, service, caller, "overview/page.html", title="Overview", view=view, windows=windows)


@get("/ui", status_code=303)
async def redirect_home(request: AnyRequest) -> Response[Any]:
    """Redirects to the overview."""
    return redirect(address(root_of(request), "/"))


@get("/ui/live")
async def live(
    request: AnyRequest, service: CurrentState, caller: CurrentPrincipal, window: WindowName = "hour"
) -> Stream:
    """The parts of the page: first all of them, then each that changes."""
    feed = service.overview_feeds.of(caller, WINDOWS[window])
    updates = live_response(service, caller, _updates(feed, root_of(request)))
    await feed.view()
    return updates


async def _updates(feed: OverviewFeed, root: str) -> AsyncGenerator[bytes, None]:
    sent: dict[str, str] = {}
    with feed.watched():
        while True:
            parts = feed.render(root)
            changed = [html for name, html in parts.items() if sent.get(name) != html]
            yield replace_event("\n".join(changed)) if changed else NO_UPDATE
            sent = parts
            await feed.wait_for_change(longest_wait())


HANDLERS = (show, redirect_home, live)
