"""A client of Replicate's HTTP API: create, get, cancel and list predictions.

The API has no idempotency keys, so a failed call may have been executed:
:class:`~semel.providers.replicate.types.Unavailable` says so.
"""

from __future__ import annotations

import json
import re
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
import msgspec

from semel import typed_json
from semel.providers.replicate.types import PageOfPredictions, Prediction, ReplicateRefusal, Unavailable

_BEFORE_SENDING = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)
_RESETS_IN = re.compile(r"resets in ~?(\d+(?:\.\d+)?)\s*s")
MAX_REASON = 1000


class ReplicateApi:
    """The client, open while the server is up."""

    def __init__(self, url: str, token: str, timeout: float = 30.0) -> None:
        self._token = token
        self._client = httpx.AsyncClient(
            base_url=url.rstrip("/"),
            headers={"Authorization": f"Bearer {token}", "User-Agent": "semel"},
            timeout=httpx.Timeout(timeout, connect=min(timeout, 10.0)),
            verify=not url.startswith("http:"),  # to load the authorities takes time, and redirects are not followed
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def create(self, *, version: str | None, model: str | None, body: dict[str, Any]) -> Prediction:
        """Create a prediction of a version, or else of an official model."""
        if version is None:
            return self._prediction(await self._request("POST", f"/v1/models/{model}/predictions", json=body))
        return self._prediction(await self._request("POST", "/v1/predictions", json={"version": version, **body}))

    async def get(self, prediction_id: str) -> Prediction:
        """The prediction."""
        return self._prediction(await self._request("GET", f"/v1/predictions/{prediction_id}"))

    async def cancel(self, prediction_id: str) -> None:
        """Request its cancellation, which may take a while."""
        await self._request("POST", f"/v1/predictions/{prediction_id}/cancel")

    async def list(self, cursor: str | None = None) -> PageOfPredictions:
        """A page of the account's predictions, newest first."""
        answer = await self._request("GET", "/v1/predictions", params=None if cursor is None else {"cursor": cursor})
        try:
            found = answer.json()
            results = [typed_json.convert(each, Prediction) for each in found["results"]]
            following = found.get("next")
            # only the cursor is taken from the link: the token is sent only to the address of the settings
            cursor = None if following is None else httpx.URL(following).params["cursor"]
        except (ValueError, TypeError, KeyError, AttributeError, httpx.InvalidURL):
            raise Unavailable("Replicate's list of predictions cannot be read", perhaps_done=False) from None
        return PageOfPredictions(results=results, cursor=cursor, now=_date_of(answer))

    async def _request(self, method: str, path: str, **more: Any) -> httpx.Response:
        try:
            answer = await self._client.request(method, path, **more)
        except _BEFORE_SENDING as error:
            raise Unavailable(f"Replicate cannot be reached ({type(error).__name__})", perhaps_done=False) from None
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
            raise Unavailable(f"Replicate's response was lost ({type(error).__name__})", perhaps_done=True) from None
        if answer.is_success:
            return answer
        raise self._error_of(answer)

    def _error_of(self, answer: httpx.Response) -> Unavailable | ReplicateRefusal:
        status, reason = answer.status_code, self._reason(answer)
        if status == 429:
            return Unavailable(
                f"Replicate limits the rate of requests (429): {reason}",
                perhaps_done=False,
                after=_retry_after(answer, reason),
            )
        if status >= 500 or status == 408 or answer.is_redirect:
            return Unavailable(
                f"Replicate responded with {status}: {reason}", perhaps_done=True, after=_retry_after(answer, "")
            )
        match status:
            case 401 | 403:
                return ReplicateRefusal(
                    status, f"Replicate does not accept the token ({status}): {reason}; see REPLICATE_API_TOKEN"
                )
            case 402:
                return ReplicateRefusal(
                    status, f"Replicate asks for payment (402): {reason}; see replicate.com/account/billing"
                )
        return ReplicateRefusal(status, f"Replicate refused ({status}): {reason}")

    def _reason(self, answer: httpx.Response) -> str:
        """The reason that an error's body states, without our token, should it be repeated there."""
        try:
            body = answer.json()
            parts = [body.get("title"), body.get("detail")] if isinstance(body, dict) else [body]
            text = ": ".join(str(each) for each in parts if each) or answer.reason_phrase
        except ValueError:
            text = answer.reason_phrase
        return " ".join(text.replace(self._token, "…").split())[:MAX_REASON] or "without a reason"

    def _prediction(self, answer: httpx.Response) -> Prediction:
        try:
            found = typed_json.convert(answer.json(), Prediction)
        except (json.JSONDecodeError, UnicodeDecodeError, msgspec.ValidationError):
            raise Unavailable("Replicate's response cannot be read", perhaps_done=True) from None
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,100}", found.id):
            raise Unavailable("Replicate's response has no valid id", perhaps_done=True)
        return found


def _retry_after(answer: httpx.Response, reason: str) -> float | None:
    sent = answer.headers.get("retry-after", "")
    if sent.isdigit():
        return min(float(sent), 3600.0)
    found = _RESETS_IN.search(reason)
    return min(float(found[1]), 3600.0) if found else None


def _date_of(answer: httpx.Response) -> float | None:
    try:
        return parsedate_to_datetime(answer.headers["date"]).timestamp()
    except (KeyError, ValueError, TypeError):
        return None
