"""What listens to events: logs now, metrics and traces later. Nothing here is needed for a job to run."""
