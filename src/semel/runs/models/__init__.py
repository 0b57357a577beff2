"""Registered functions, called models: their options, and the parameters that they take."""
