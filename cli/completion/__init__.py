"""What does a shell offer where a command is typed? Options, subcommands, and the values that the checks take."""
