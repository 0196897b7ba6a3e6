"""Results of a run: audit, report, card and export."""
