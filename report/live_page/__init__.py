"""How does the page follow runs that are still at work? Served on this machine alone, and rendered anew when their records change."""
