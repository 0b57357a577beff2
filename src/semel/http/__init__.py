"""Idempotent requests: a middleware for ASGI apps in :mod:`semel.http.asgi`, one for WSGI apps in :mod:`.wsgi`."""
