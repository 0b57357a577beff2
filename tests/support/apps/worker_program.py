"""A worker as a program: `python worker_program.py JSON`, with options of the app, the models and the worker."""

import json
import logging
import sys

from semel import App
from semel.runs.worker import Worker
from support.apps import worker_models


def main(options: dict[str, object]) -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    app = App(str(options.pop("url")), artifacts=str(options.pop("artifacts")))
    worker_models.register(app, **dict(options.pop("models", {})))
    Worker(app, **{"processes": 1, "poll": 0.1, **options}).run()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
