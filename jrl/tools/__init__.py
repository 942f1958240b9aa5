"""The work behind the commands of the command line."""
