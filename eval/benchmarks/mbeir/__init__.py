"""M-BEIR."""
