"""Names of keys and scopes: any text, compared exactly; two scopes never share a key."""

from __future__ import annotations

from itertools import product

from semel.once.store import KeyRef
from semel.testing.harness import World, claim_request, complete_request
from semel.types import Granted, InFlight, Replay

_SEPARATORS = (":", "/", "|", ",", " ", "_", "-", ".", "\\", "{", "}", "}:", "::", "'", '"', "%", "*")

LOOKALIKES: tuple[str, ...] = (
    "key",
    "Key",
    "KEY",
    " key",
    "key ",
    "k\u00e9y",
    "ke\u0301y",  # looks the same, but is another text
    "k\u0435y",  # a Cyrillic letter
    "\uff4b\uff45\uff59",  # full width
    "key\u200d",  # with an invisible character
    "%",
    "_",
    "*",
    "?",
    "[k]ey",
    "k_y",
    "k%",
    "'; DROP TABLE semel_keys; --",
    "$1",
    ":key",
    "{key}",
    "\\",
    "0",
    "00",
    "None",
    "null",
    "\u0131",
    "I",
    "i",
    "\u00df",
    "ss",
    "\U0001f600",
    "\U0001f601",
)
"""Texts that a faulty store may confuse with one another, or not treat as text."""


class Names:
    """Different names are different keys."""

    def test_scopes_never_collide(self, world: World) -> None:
        """The same key in two scopes is two keys, claimed, completed and released separately."""
        one, two = world.granted(scope="one"), world.granted(scope="two")
        assert world.complete(one, "of one")
        assert world.record(scope="two").state == "claimed"
        assert world.value(scope="one") == "of one"
        assert world.release(two)
        assert world.get(scope="two") is None
        assert isinstance(world.claim(scope="one"), Replay)

    def test_no_separator_joins_two_scopes(self, world: World) -> None:
        """Scope ``a:b`` with key ``c`` is not scope ``a`` with key ``b:c``, whatever the separator."""
        pairs = []
        for number, mark in enumerate(_SEPARATORS):
            a, b, c = (f"{letter}{number}" for letter in "abc")
            pairs += [(a + mark + b, c), (a, b + mark + c), (a + mark, b), (a, mark + b), (a, mark), (mark, a)]
            pairs += [(f"1{mark}{a}", b), ("1", f"{a}{mark}{b}"), (f"{len(a)}{mark}{a}", b), (mark * 2, mark)]
        _all_apart(world, pairs)

    def test_names_are_compared_exactly(self, world: World) -> None:
        """Case, spaces, accents, wildcards and look-alikes all matter, in keys and in scopes."""
        _all_apart(world, list(product(LOOKALIKES[:12], LOOKALIKES)))

    def test_names_may_be_long(self, world: World) -> None:
        """255 characters of four bytes each, in key and scope, are told apart by the last character."""
        long = "\U0001f600" * 254
        two = (long + "\U0001f601", long + "\U0001f602")
        _all_apart(world, list(product(two, two)))

    def test_a_batch_keeps_scopes_apart(self, world: World) -> None:
        """With the same key in several scopes in one batch, each answer is that of its own scope."""
        scopes = ["b", "a", "c"]
        verdicts = world.claims([claim_request(scope=scope) for scope in scopes])
        claims = [verdict.claim for verdict in verdicts if isinstance(verdict, Granted)]
        assert [claim.scope for claim in claims] == scopes
        answers = world.run(world.store.complete([complete_request(claim, claim.scope) for claim in claims[:2]]))
        assert answers == [True, True]
        records = world.run(world.store.get([KeyRef(scope, "key") for scope in ("c", "a", "none", "b", "a")]))
        assert [record and (record.scope, record.state) for record in records] == [
            ("c", "claimed"),
            ("a", "completed"),
            None,
            ("b", "completed"),
            ("a", "completed"),
        ]


def _all_apart(world: World, pairs: list[tuple[str, str]]) -> None:
    """Assert that every pair is a separate key: granted, then in flight, and found under its own name."""
    pairs = list(dict.fromkeys(pairs))
    verdicts = world.claims([claim_request(key, scope=scope) for scope, key in pairs])
    assert [pair for pair, verdict in zip(pairs, verdicts, strict=True) if not isinstance(verdict, Granted)] == []
    records = world.run(world.store.get([KeyRef(scope, key) for scope, key in pairs]))
    assert [record and (record.scope, record.key) for record in records] == pairs
    again = world.claims([claim_request(key, scope=scope) for scope, key in reversed(pairs)])
    assert [verdict for verdict in again if not isinstance(verdict, InFlight)] == []
