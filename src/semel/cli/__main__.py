"""``python -m semel.cli``."""

import sys

from semel.cli import main

sys.exit(main())
