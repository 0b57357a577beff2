"""``/admin``: tokens, quotas, keys and reservations, for those who manage them."""

from __future__ import annotations

from semel.service.api import keys, quotas, tokens

HANDLERS = (*tokens.HANDLERS, *quotas.HANDLERS, *keys.HANDLERS)
