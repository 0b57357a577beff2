"""Converts JSON to typed values, from several threads at the same time.

msgspec examines a type when it is used for the first time. A thread that uses the same type meanwhile finds it half
examined, and the process dies of a segmentation fault (msgspec 0.22). Here one thread at a time examines types.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
_lock = threading.Lock()


def decode(data: bytes | str, kind: type[T]) -> T:
    """The JSON as ``kind``. Raises msgspec's ``DecodeError`` or ``ValidationError``."""
    value: T = decoder(kind).decode(data)
    return value


def convert(value: Any, kind: type[T], *, strict: bool = True, dec_hook: Callable[[type, Any], Any] | None = None) -> T:
    """Plain data as ``kind``. Raises msgspec's ``ValidationError``."""
    decoder(kind)
    return msgspec.convert(value, kind, strict=strict, dec_hook=dec_hook)


def decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """The one decoder of this type."""
    try:
        found = _decoders.get(kind)
    except TypeError:  # a user's annotation need not be hashable
        with _lock:
            return msgspec.json.Decoder(kind)
    if found is None:
        with _lock:
            found = _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    return found


if hasattr(os, "register_at_fork"):  # a child must not inherit the lock of another thread
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
