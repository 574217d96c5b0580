"""Knowledge about sd-scripts. Nothing here changes it."""
