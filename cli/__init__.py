"""What can a person type? One thin file a subcommand of ``trainer``; the work is done elsewhere."""
