"""Pages, charts and tables that people read."""
