"""Recorded traffic: what the daemon writes and the simulator reads."""
