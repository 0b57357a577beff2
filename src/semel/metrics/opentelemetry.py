"""Metrics for OpenTelemetry: ``Once(url, on_event=OpenTelemetryMetrics())``."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Lock
from weakref import WeakKeyDictionary

from semel.db.database import missing
from semel.metrics.names import BUCKETS, COUNTED, MEANINGS, SAMPLE_EVERY, interval
from semel.once.stats import MOST_SCOPES, Event, Scopes

try:
    from opentelemetry.metrics import CallbackOptions, Meter, MeterProvider, Observation, get_meter_provider
except ModuleNotFoundError as error:
    raise missing("opentelemetry", error) from error


class OpenTelemetryMetrics:
    """A hook that records events with OpenTelemetry. Hooks with the same provider share their instruments.

    The default is the global provider, which may be set later. Scopes beyond ``most_scopes`` are counted together.
    ``sample_every=None`` turns off the metrics of the store's size.
    """

    def __init__(
        self,
        meter_provider: MeterProvider | None = None,
        sample_every: float | None = SAMPLE_EVERY,
        *,
        most_scopes: int = MOST_SCOPES,
    ) -> None:
        self.sample_every = interval(sample_every)
        self._to = _instruments(meter_provider)
        self._scopes = Scopes(most_scopes)

    def __call__(self, event: Event) -> None:
        """Record the event."""
        match event.name:
            case "cleanup":
                self._to.cleanup.add(int(event.value))
            case "store":
                self._to.store.record(event.value, {"verb": event.reason})
            case "held":
                self._to.held[event.reason] = int(event.value)
            case name if name in COUNTED:
                self._to.count(name, event.door, self._scopes.known(event.label), event.reason)


class _MeterInstruments:
    """The instruments of one provider, and the numbers that its gauges read at export."""

    def __init__(self, meter: Meter) -> None:
        self._counters = {
            event: meter.create_counter(f"idempotency.{name}", "{call}", MEANINGS[name])
            for event, name in COUNTED.items()
        }
        self.cleanup = meter.create_counter("idempotency.cleanup.count", "{key}", MEANINGS["cleanup"])
        self.store = meter.create_histogram(
            "idempotency.store.duration", "s", MEANINGS["store"], explicit_bucket_boundaries_advisory=BUCKETS
        )
        self.held: dict[str, int] = {}
        self._lock = Lock()
        self._calls: dict[tuple[str, str], tuple[int, int]] = {}
        meter.create_observable_gauge("idempotency.replay_ratio", [self._ratios], "1", MEANINGS["replay_ratio"])
        meter.create_observable_gauge("idempotency.keys_held", [self._holds], "{key}", MEANINGS["keys_held"])

    def count(self, name: str, door: str, scope: str, reason: str) -> None:
        place = {"door": door, "scope": scope}
        self._counters[name].add(1, {**place, "reason": reason} if name == "miss" else place)
        if name in ("hit", "miss"):
            with self._lock:
                hits, misses = self._calls.get((door, scope), (0, 0))
                self._calls[door, scope] = (hits + 1, misses) if name == "hit" else (hits, misses + 1)

    def _ratios(self, _options: CallbackOptions) -> Iterator[Observation]:
        for (door, scope), (hits, misses) in self._calls.copy().items():
            yield Observation(hits / (hits + misses), {"door": door, "scope": scope})

    def _holds(self, _options: CallbackOptions) -> Iterator[Observation]:
        for state, number in self.held.copy().items():
            yield Observation(number, {"state": state})


_known: WeakKeyDictionary[MeterProvider, _MeterInstruments] = WeakKeyDictionary()
_global: list[_MeterInstruments] = []
_lock = Lock()


def _instruments(provider: MeterProvider | None) -> _MeterInstruments:
    """The instruments of the provider, made once: it uses only the first gauge of a name."""
    with _lock:
        if provider is None or provider is get_meter_provider():
            if not _global:
                _global.append(_MeterInstruments(get_meter_provider().get_meter("semel")))
            return _global[0]
        found = _known.get(provider)
        if found is None:
            found = _known[provider] = _MeterInstruments(provider.get_meter("semel"))
        return found
