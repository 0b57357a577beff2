"""The app that `semel serve` loads in a scenario."""

import os
from pathlib import Path

from chaos.program import make_app

app = make_app(os.environ["SEMEL_CHAOS_DB"], Path(os.environ["SEMEL_CHAOS_FOLDER"]))
