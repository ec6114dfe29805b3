"""What a run leaves for people: progress lines, curves, the report page."""
