"""Middleware that makes requests idempotent: :mod:`semel.http.asgi` and :mod:`semel.http.wsgi`."""
