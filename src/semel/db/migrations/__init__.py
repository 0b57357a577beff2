"""Alembic's environment for semel's own tables."""
