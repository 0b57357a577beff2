"""Stores that are wrong on purpose: each breaks one promise, as real systems have done, and names who notices.

They are small changes to one small store that is right, so what is wrong is all there is to see.
"""

from conformance import broken_claims, broken_times, broken_writes
from conformance.sound import BROKEN, Broken, Sound

__all__ = ["BROKEN", "Broken", "Sound", "broken_claims", "broken_times", "broken_writes"]
