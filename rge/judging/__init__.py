"""Vision-language models that judge: scores of pairs of a query and a candidate."""
