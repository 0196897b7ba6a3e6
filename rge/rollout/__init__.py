"""The model's own rationales: generation, its settings in a step, and vLLM as another engine."""
