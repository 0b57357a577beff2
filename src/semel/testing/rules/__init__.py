"""The rules by topic. Each is a test whose name and docstring state what every store must do."""
