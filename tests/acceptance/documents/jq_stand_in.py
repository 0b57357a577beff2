"""Stands in for jq, on machines that have none, for the few expressions of the document's scripts."""

import json
import sys

expression = sys.argv[-1]
name, _, default = expression.partition(" // ")
value = json.load(sys.stdin).get(name.removeprefix("."))
if default and value in (None, False):
    if default != "empty":
        sys.stdout.write(f"{default}\n")
else:
    sys.stdout.write(f"{value if isinstance(value, str) else json.dumps(value)}\n")
