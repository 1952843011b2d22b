"""What is a job, and where does each of its tasks run? Imported by every folder, imports none of them."""
