"""Providers, which run jobs elsewhere: one folder each."""
