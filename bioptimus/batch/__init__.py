"""Many slides: inputs, worker threads, claims, shards, report."""
