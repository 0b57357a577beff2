"""The dashboard: what runs, what is stuck, why it failed, as pages that the server writes. See pages for the list."""
