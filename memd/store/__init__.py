"""The database: what operators and charts look back at. Serving never waits for it."""
