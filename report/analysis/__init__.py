"""What holds runs back, which configuration is best, and how a job would scale."""
