"""What is behind each command of the command line."""
