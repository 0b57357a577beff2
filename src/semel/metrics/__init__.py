"""Hooks for ``on_event=`` that turn events into metrics: one module for each system."""
