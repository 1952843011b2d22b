"""What can ``trainer runs`` do? List, show, delete, export."""
