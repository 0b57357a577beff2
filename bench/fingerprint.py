"""Benchmark of fingerprints against the shortest code that does the same: `python bench/fingerprint.py`.

The two are measured in turn, in many rounds, so that other load on the machine affects both equally.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from hashlib import sha256
from statistics import median
from timeit import timeit
from typing import Any

from semel.fingerprint import fingerprint

REQUIRED = 3.0
ROUNDS = 101
CALLS = 200

ORDER = {
    "order_id": "ord_01HZX3K8V7Q2M4N6P8R0T2W4Y6",
    "customer": {
        "id": 48213,
        "name": "Zoë Krüger",
        "email": "zoe.krueger@example.com",
        "vip": True,
        "address": {"street": "Lindenstraße 14", "city": "Köln", "zip": "50674", "country": "DE"},
    },
    "currency": "EUR",
    "items": [
        {"sku": "BK-1001", "title": "The Left Hand of Darkness", "quantity": 1, "price": 12.99, "weight": 0.34},
        {"sku": "BK-2044", "title": "A Wizard of Earthsea, illustrated", "quantity": 2, "price": 24.5, "weight": 0.81},
        {"sku": "TE-0007", "title": "Darjeeling first flush, 250 g", "quantity": 3, "price": 18.0, "weight": 0.27},
        {"sku": "MU-0310", "title": 'Mug "Hainish", blue', "quantity": 1, "price": 9.95, "weight": 0.4},
    ],
    "shipping": {"method": "express", "cost": 7.9, "estimated_days": 2, "gift": False, "note": None},
    "discounts": [{"code": "SPRING", "percent": 10}],
    "total": 119.74,
    "tax_rate": 0.19,
    "created": "2025-03-14T09:26:53Z",
    "channel": "web",
    "metadata": {"campaign": "newsletter-12", "session": "9f8c1b2a77", "ab_test": "B"},
}


def dumped(payload: Any) -> str:
    return sha256(json.dumps(payload, sort_keys=True).encode()).hexdigest()


def microseconds(function: Callable[[Any], str]) -> float:
    return timeit(lambda: function(ORDER), number=CALLS) / CALLS * 1e6


def main() -> int:
    rounds = [(microseconds(dumped), microseconds(fingerprint)) for _ in range(ROUNDS)]
    ratio = median(ours / theirs for theirs, ours in rounds)
    theirs, ours = (median(column) for column in zip(*rounds, strict=True))
    size = len(json.dumps(ORDER))
    what = f"fingerprint of a {size} byte order: {ours:.1f} µs, sha256(json.dumps(sort_keys)): {theirs:.1f} µs"
    print("| what | ratio | required | ok |\n|---|---|---|---|")
    print(f"| {what} | {ratio:.2f} | <= {REQUIRED:.2f} | {'yes' if ratio <= REQUIRED else 'NO'} |")
    return 0 if ratio <= REQUIRED else 1


if __name__ == "__main__":
    sys.exit(main())
