"""What a middleware can be told, and the checks that refuse what can never work when the app starts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, MutableMapping
from fnmatch import translate
from typing import Any, Literal, TypeAlias, TypedDict, get_args
from uuid import UUID

from semel.errors import InvalidRequest
from semel.once.guard import is_async
from semel.once.stats import Hook
from semel.policy import HOUR, Policy

Context: TypeAlias = MutableMapping[str, Any]
"""What the server knows of the request: ASGI's scope, or WSGI's environ."""

Preset: TypeAlias = Literal["intake", "ietf", "stripe", "processor", "router"]
PRESETS: tuple[str, ...] = get_args(Preset)
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_URL = re.compile(r"(?:https?://|/)[!#-;=?-~]+")


class MiddlewareOptions(TypedDict, total=False):
    """What a middleware can be told."""

    policy: Policy | Preset | None
    """A policy, or a preset's name; without it ``Policy.intake()``."""

    ttl: float | None
    """Seconds for which a key is kept, instead of the policy's."""

    methods: Iterable[str]
    """Which requests may have a key; others are left alone. Without it POST, and in the ``ietf`` dialect PATCH, too."""

    paths: str | Iterable[str] | Callable[[str], bool] | None
    """Which paths: patterns such as ``/api/*``, or a function of the path; all without it."""

    exclude: str | Iterable[str]
    """Patterns of paths that are left alone."""

    header: str
    """The header that holds the key."""

    required: bool
    """A request without a key is refused."""

    tenant: Callable[[Context], Any] | None
    """Whose request it is, from ASGI's scope or WSGI's environ: tenants never meet each other's keys."""

    credentials: str | Iterable[str] | None
    """What tells one caller from another: headers, and cookies as ``cookie:name``. The same key with other credentials
    is refused. Without this option it is ``Authorization``, where there is no tenant; None: nothing is compared."""

    scope: str | Callable[[Context], str] | None
    """What keys belong to, instead of method and path (in the ``stripe`` dialect: instead of all endpoints together).
    A function with the same scope meets the same keys."""

    fingerprint: Literal["body", "json"] | Callable[[Context, bytes], str]
    """What makes two requests the same: the bytes, the JSON content, or what the function makes of them."""

    keep: Callable[[int], bool] | Iterable[int] | None
    """Which responses are the key's outcome, by their status; others give the key back. Without it the policy says.
    An exception counts as 500."""

    max_request_bytes: int | None
    """Larger requests are refused with 413; 10 MiB without it, None: no limit."""

    max_response_bytes: int | None
    """Larger responses are delivered but not kept; their key is never carried out again. Without it the
    policy's; None: no limit."""

    body_in_memory: int
    """Larger request bodies wait in a temporary file; 1 MiB without it."""

    status_path: str | None
    """Under which path a GET tells what is known of a key; nowhere without it."""

    docs_url: str | None
    """Where the documentation of your keys is: refusals link to it."""

    name: str
    """What metrics call this door's requests."""

    on_event: Hook | None
    """Hears every event; see ``docs/metrics.md``."""


def policy_of(policy: Policy | str | None, ttl: float | None) -> Policy:
    """The policy of a door."""
    if policy is None:
        return Policy.intake(HOUR if ttl is None else ttl)
    if isinstance(policy, str):
        if policy not in PRESETS:
            raise InvalidRequest(f"{policy!r} is not a preset; there are {', '.join(PRESETS)}")
        policy = getattr(Policy, policy)()
    if not isinstance(policy, Policy):
        raise InvalidRequest(f"policy= takes a Policy or a preset's name, not {policy!r:.80}")
    if policy.in_flight == "reference":
        raise InvalidRequest('in_flight="reference" is for jobs and runs; a request can "wait" or "conflict"')
    return policy.but(ttl=ttl)


def matcher(paths: Any, exclude: Any) -> Callable[[str, str], bool]:
    """Whether a path is covered. In an app that is mounted under another, also as that app itself knows it."""
    if callable(paths):
        wanted: Callable[[str], Any] = paths
    else:
        wanted = _globs("paths", ("*",) if paths is None else paths)
    unwanted = _globs("exclude", exclude)

    def covers(path: str, mount: str) -> bool:
        known = {path, path.removeprefix(mount)}
        return any(map(wanted, known)) and not any(map(unwanted, known))

    return covers


def _globs(what: str, patterns: Any) -> Callable[[str], Any]:
    texts = [translate(path_of(what, pattern)) for pattern in several(what, patterns)]
    return re.compile("|".join(texts) if texts else "(?!)").fullmatch


def several(what: str, given: Any) -> tuple[Any, ...]:
    """One or several, as a tuple."""
    if isinstance(given, str):
        return (given,)
    try:
        found = tuple(given)
    except TypeError:
        raise InvalidRequest(f"{what}= takes a text or several, not {given!r:.80}") from None
    if not found and what not in {"exclude", "credentials"}:
        raise InvalidRequest(f"{what}= is empty, so no request would ever be protected")
    return found


def _text(what: str, given: Any) -> str:
    if not isinstance(given, str) or not given:
        raise InvalidRequest(f"{what}= takes text, not {given!r:.80}")
    return given


def token(what: str, given: Any) -> str:
    """A name as HTTP has them: a method's or a header's."""
    if not _TOKEN.fullmatch(_text(what, given)):
        raise InvalidRequest(f"{what}= takes names such as HTTP has them, one by one, not {given!r:.80}")
    return str(given)


def path_of(what: str, given: Any) -> str:
    """A path, or a pattern of paths."""
    if not _text(what, given).startswith(("/", "*")) or (what == "status_path" and not given.strip("/")):
        raise InvalidRequest(f"{what}= takes paths, which begin with a slash, not {given!r:.80}")
    return str(given)


def function(what: str, given: Any) -> Any:
    """A plain function, or None."""
    if given is not None and not callable(given):
        raise InvalidRequest(f"{what}= takes a function of the request, not {given!r:.80}")
    if is_async(given):
        raise InvalidRequest(f"{what}= takes a plain function, not an async one")
    return given


def tenant_name(tenant: Any) -> str | None:
    """The tenant, if it is a name: an object's text may be its place in memory, which would be no tenant at all."""
    if tenant == "":
        raise InvalidRequest(
            "tenant= returned an empty text, which would put all who have no name together; "
            "return None for a request that belongs to no tenant"
        )
    if tenant is None or isinstance(tenant, str):
        return tenant
    if isinstance(tenant, int | UUID) and not isinstance(tenant, bool):
        return str(tenant)
    raise InvalidRequest(f"tenant= gave a {type(tenant).__name__}; a tenant is text, a whole number, a UUID or None")


def credential_names(given: Any) -> tuple[str, ...]:
    """Headers in lower case, and cookies as ``cookie:name``."""
    names = () if given is None else several("credentials", given)
    for name in names:
        token("credentials", _text("credentials", name).removeprefix("cookie:"))
    return tuple(name if name.startswith("cookie:") else name.lower() for name in names)


def kept_statuses(given: Any) -> Callable[[int], bool] | None:
    """Whether a status is kept; None where nothing was said."""
    if given is None:
        return None
    if callable(given):
        chosen: Callable[[int], bool] = function("keep", given)
        return chosen
    try:
        statuses = frozenset(given)
    except TypeError:
        statuses = frozenset((given,))
    if not all(isinstance(status, int) and 200 <= status <= 599 for status in statuses):
        raise InvalidRequest(f"keep= takes statuses from 200 to 599, or a function of the status, not {given!r:.80}")
    return statuses.__contains__


def url_of(what: str, given: Any) -> str | None:
    """A URL that can stand in a header, or None."""
    if given is not None and not _URL.fullmatch(_text(what, given)):
        raise InvalidRequest(f"{what}= takes a URL, not {given!r:.80}")
    return None if given is None else str(given)
