"""Keys: claim → work → complete, replay.

Read it top to bottom: ``store`` (the contract), ``rules`` (the law), ``engine`` (the verbs), ``calls`` and ``faces``
(what users touch). Beside them one file per store, and the machinery: ``batch`` (coalescing), ``runtime`` (threads or
a loop), ``bell`` and ``listener`` (waking those who wait), ``background`` (collector, renewer).
"""
