"""Build steps: each writes files that the repository contains."""
