"""One self-contained HTML page about a run."""
