"""Text to tokens to shards to lanes."""
