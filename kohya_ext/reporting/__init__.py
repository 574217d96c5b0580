"""Reports on runs in HTML."""
