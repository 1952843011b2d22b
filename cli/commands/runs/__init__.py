"""What does each subcommand of ``trainer runs`` do? List, show, delete, export."""
