"""Jobs that run elsewhere: one folder a provider."""
