"""Results of a run for people: audit, report, review page, agreement, export and card."""
