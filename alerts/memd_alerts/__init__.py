"""Alert rules: one file of rules, evaluated here or rendered for Prometheus, and notifications."""
