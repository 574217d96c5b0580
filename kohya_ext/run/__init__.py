"""A run's life on disk: its states, its files, its lock, and how it stops."""
