"""Delivers the events of runs to subscriptions: webhooks, and a Redis stream."""
