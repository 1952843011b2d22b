"""The protocol of workers and parameter servers, and which updates count."""
