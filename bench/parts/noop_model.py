"""A blocking model at the top of a module, where child processes find it."""


def blocking_noop() -> None:
    """Nothing."""
