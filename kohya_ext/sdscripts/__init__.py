"""What is known about sd-scripts. Nothing here changes it."""
