"""What does each subcommand of ``trainer`` do? One file each."""
