"""What the stages made, as people read it: audit, page, review, agreement, export."""
