"""What keys and runs both stand on: threads and event loops, batches, retries, periodic tasks, forks."""
