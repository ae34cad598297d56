"""What a KV format or window costs in quality and saves in memory, measured on a text."""
