"""What keys and runs share: threads and event loops, batches, retries, periodic tasks, forks."""
