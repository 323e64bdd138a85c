"""What a run tells of itself: events, logs, status, live progress, report. Knows no other room."""
