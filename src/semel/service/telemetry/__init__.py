"""What the service logs and counts."""
