"""The floor under ``once`` and ``runs``: the schema, its migrations, and the ways to reach a database."""
