"""HTML pages, charts and tables."""
