"""Long work: submit it once, lease it, keep it alive, retry it, and trust its outcome when a worker dies halfway."""
