"""A gallery on disk: pictures and texts embedded once, kept up to date, and searched."""
