"""The rules, by what they are about: each a test whose name and docstring state what every store keeps."""
