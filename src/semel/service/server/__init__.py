"""The processes of ``semel serve``: the supervisor, the server itself, and the service inside a WSGI application."""
