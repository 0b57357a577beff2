"""The options of a middleware, and their checks, which refuse at start what could never work."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fnmatch import translate
from typing import Any, Literal, TypeAlias, TypedDict, get_args
from uuid import UUID

from semel._validation import checked_text
from semel.errors import InvalidRequest
from semel.once.guard import is_async
from semel.once.stats import Hook
from semel.policy import HOUR, Policy

Context: TypeAlias = Any
"""The request as the server gives it: ASGI's scope or WSGI's environ. Each framework has a type of its own for it."""

Preset: TypeAlias = Literal["intake", "ietf", "stripe", "processor", "router"]
PRESETS: tuple[str, ...] = get_args(Preset)
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_URL = re.compile(r"(?:https?://|/)[!#-;=?-~]+")


class MiddlewareOptions(TypedDict, total=False):
    """The options of both middlewares."""

    policy: Policy | Preset | None
    """A policy, or the name of a preset. Default: ``Policy.intake()``."""

    ttl: float | None
    """Seconds for which a key is kept. Default: the policy's."""

    methods: Iterable[str]
    """Methods whose requests may have a key; others pass unchanged. Default: POST, with ``ietf`` PATCH, too."""

    paths: str | Iterable[str] | Callable[[str], bool] | None
    """The paths to cover: patterns such as ``/api/*``, or a function of the path. Default: all."""

    exclude: str | Iterable[str]
    """Patterns of paths that pass unchanged."""

    header: str
    """The header of the key."""

    required: bool
    """Whether a request without a key is refused."""

    tenant: Callable[[Context], Any] | None
    """A function that returns the tenant of a request. Tenants have separate keys."""

    credentials: str | Iterable[str] | None
    """What identifies a caller: headers, and cookies as ``cookie:name``. A key with other credentials is refused.
    Default: ``Authorization`` if the request has no tenant. None: credentials are not compared."""

    scope: str | Callable[[Context], str] | None
    """The scope of keys. Default: method and path; in the ``stripe`` dialect one scope for all endpoints.
    A guarded function with the same scope shares the keys."""

    fingerprint: Literal["body", "json"] | Callable[[Context, bytes], str]
    """How requests are compared: by their bytes, by their JSON content, or by what the function returns."""

    keep: Callable[[int], bool] | Iterable[int] | None
    """The statuses of responses that are the key's outcome; any other releases the key. Default: the policy's.
    An exception counts as 500."""

    max_request_bytes: int | None
    """Larger requests are refused with 413. Default: 10 MiB. None: no limit."""

    max_response_bytes: int | None
    """Larger responses are sent but not stored, and their request is never executed again. Default: the policy's.
    None: no limit."""

    body_in_memory: int
    """Larger request bodies are kept in a temporary file. Default: 1 MiB."""

    status_path: str | None
    """The path below which a GET returns the status of a key. Default: none."""

    docs_url: str | None
    """The URL of your documentation of keys, to which refusals link."""

    name: str
    """The name of this middleware in metrics."""

    on_event: Hook | None
    """A function that is called with every event; see ``docs/metrics.md``."""


def policy_of(policy: Policy | str | None, ttl: float | None) -> Policy:
    """The policy of a middleware."""
    if policy is None:
        return Policy.intake(HOUR if ttl is None else ttl)
    if isinstance(policy, str):
        if policy not in PRESETS:
            raise InvalidRequest(f"{policy!r} is not a preset; there are {', '.join(PRESETS)}")
        policy = getattr(Policy, policy)()
    if not isinstance(policy, Policy):
        raise InvalidRequest(f"policy= takes a Policy or a preset's name, not {policy!r:.80}")
    return policy.but(ttl=ttl)


def matcher(paths: Any, exclude: Any) -> Callable[[str, str], bool]:
    """A function that returns whether a path is covered, with or without the prefix of a mounted app."""
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
    """One text or several, as a tuple."""
    if isinstance(given, str):
        return (given,)
    try:
        found = tuple(given)
    except TypeError:
        raise InvalidRequest(f"{what}= takes one text or several, not {given!r:.80}") from None
    if not found and what not in {"exclude", "credentials"}:
        raise InvalidRequest(f"{what}= is empty, so no request would ever be protected")
    return found


def token(what: str, given: Any) -> str:
    """A token of HTTP: the name of a method or a header."""
    if not _TOKEN.fullmatch(checked_text(what, given)):
        raise InvalidRequest(f"{what}= takes names that are valid in HTTP, one by one, not {given!r:.80}")
    return str(given)


def path_of(what: str, given: Any) -> str:
    """A path or a pattern of paths."""
    if not checked_text(what, given).startswith(("/", "*")) or (what == "status_path" and not given.strip("/")):
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
    """The tenant as text. Other objects are refused, as their text may contain a memory address."""
    if tenant == "":
        raise InvalidRequest(
            "tenant= returned an empty text, which all requests without a tenant would share; "
            "return None for a request that belongs to no tenant"
        )
    if tenant is None or isinstance(tenant, str):
        return tenant
    if isinstance(tenant, int | UUID) and not isinstance(tenant, bool):
        return str(tenant)
    raise InvalidRequest(
        f"tenant= returned a {type(tenant).__name__}; it must return text, a whole number, a UUID or None"
    )


def credential_names(given: Any) -> tuple[str, ...]:
    """The names of headers in lower case, and of cookies as ``cookie:name``."""
    names = () if given is None else several("credentials", given)
    for name in names:
        token("credentials", checked_text("credentials", name).removeprefix("cookie:"))
    return tuple(name if name.startswith("cookie:") else name.lower() for name in names)


def kept_statuses(given: Any) -> Callable[[int], bool] | None:
    """A function that returns whether a status is kept; None if the option is not set."""
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
    """A URL that is valid in a header, or None."""
    if given is not None and not _URL.fullmatch(checked_text(what, given)):
        raise InvalidRequest(f"{what}= takes a URL, not {given!r:.80}")
    return None if given is None else str(given)
