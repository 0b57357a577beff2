"""Who sends a request, and how much and how fast."""
