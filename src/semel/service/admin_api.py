"""``/admin``: tokens, quotas, keys and reservations, for those who manage them."""

from __future__ import annotations

from semel.service import admin_keys, admin_quotas, admin_tokens

HANDLERS = (*admin_tokens.HANDLERS, *admin_quotas.HANDLERS, *admin_keys.HANDLERS)
