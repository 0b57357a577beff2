"""A blocking model at module level, so that child processes can import it."""


def blocking_noop() -> None:
    """Do nothing."""
