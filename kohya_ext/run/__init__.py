"""A run's states, output files, lock and step times, and stopping it safely."""
