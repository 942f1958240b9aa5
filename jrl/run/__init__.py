"""One run: its folder, identity, programs, checkpoints and records."""
