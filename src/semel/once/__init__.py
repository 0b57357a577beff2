"""Keys: claim → work → complete, replay.

Read the modules in this order: ``store`` (the contract), ``rules`` (how a claim is judged), ``engine`` (the verbs),
``guard`` and ``client`` (what users call). ``stores`` has one module per store. ``waiters`` wakes callers that wait for
a key, ``maintenance`` has the collector and the renewer, and ``pending_writes`` retries writes that failed. Batching,
retries, listeners, threads and event loops are in :mod:`semel._concurrency`.
"""
