"""Alert rules of memd: one file, evaluated here and rendered for Prometheus, and notifications."""
