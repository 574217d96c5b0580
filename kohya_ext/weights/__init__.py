"""Read the weights of LoRAs and checkpoints, describe them, and compare two files."""
